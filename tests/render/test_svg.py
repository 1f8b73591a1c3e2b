"""What pictures and pages are made of: escaping, text that fits, colours that can be read, pieces of pages."""

import itertools
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partjit.render.html import code, fragment, table
from partjit.render.legend import legend
from partjit.render.markup import Markup, element, escape, join, number
from partjit.render.numbers import shown_bytes, shown_duration
from partjit.render.svg import fit, label, path, picture, rect, smooth, text_width
from partjit.render.theme import PALETTE, STYLESHEET, THEMES, contrast, ink_on
from tests.census import sees

anything = st.text(st.characters(codec=None, exclude_categories=()))
numbers = st.floats(-1e6, 1e6)


# Markup


@sees("different examples", "text")
@given(anything, anything)
def test_any_text_can_stand_in_an_element_and_in_an_attribute(text, attribute):
    parsed = ET.fromstring(element("a", text, title=attribute))
    allowed = re.compile("[\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

    def kept(text):
        return "".join(c if allowed.fullmatch(c) else "\ufffd" for c in text)

    # What XML itself does to the ends of lines.
    assert (parsed.text or "") == re.sub("\r\n?", "\n", kept(text))
    assert parsed.attrib["title"] == re.sub("[\t\n]", " ", re.sub("\r\n?", "\n", kept(attribute)))


@sees("different examples", "text")
@given(anything)
def test_what_is_escaped_stays_as_it_is_in_an_element(text):
    assert join([escape(text)]) == escape(text) == join([text])
    assert element("b", escape(text)) == element("b", text)


@sees("different examples")
@given(numbers)
def test_numbers_are_short_and_near(value):
    assert re.fullmatch(r"-?\d+(\.\d{1,2})?", number(value))
    assert number(value) != "-0"
    assert float(number(value)) == pytest.approx(value, abs=0.00501)


def test_attributes_are_named_as_in_svg():
    assert element("rect", stroke_width=1.0, class_="x", rx=None) == '<rect stroke-width="1" class="x"/>'
    assert element("td") == "<td></td>", "HTML has no `<td/>`"


# Text


@sees("different examples", "text")
@given(st.text(min_size=1, max_size=30), st.floats(0, 1.1), st.booleans())
def test_a_text_that_is_cut_fits_and_is_a_beginning(text, part, mono):
    width = part * text_width(text, mono=mono)
    cut = fit(text, width, mono=mono)
    if cut == text:
        assert text_width(text, mono=mono) <= width
    elif cut:
        assert cut.endswith("\u2026")
        assert text.startswith(cut[:-1])
        assert text_width(cut, mono=mono) <= width + 1e-9


@sees("different examples", "text")
@given(st.text(max_size=10), st.text(max_size=10), st.floats(1, 40))
def test_widths_add_up_and_grow_with_the_font(text, more, size):
    assert text_width(text + more, size) == pytest.approx(text_width(text, size) + text_width(more, size))
    assert text_width(text, 2 * size) == pytest.approx(2 * text_width(text, size))


def test_wide_characters_are_wide_and_marks_have_no_width():
    assert text_width("\u6f22", mono=True) == 2 * text_width("a", mono=True)
    assert text_width("e\u0301") == text_width("e")


def test_what_is_cut_off_is_in_the_tooltip():
    cut = ET.fromstring(label(0, 0, "params['layers'][0]", width=60))
    assert cut[0].tag == "title"
    assert cut[0].text == "params['layers'][0]"
    assert cut[0].tail.endswith("\u2026")
    assert "title" not in label(0, 0, "short", width=60)
    assert label(0, 0, "no room", width=3) == ""


# Shapes

points = st.lists(st.tuples(st.floats(-500, 500), st.floats(1, 200)), min_size=2, max_size=8).map(
    lambda steps: [(x, sum(step for _, step in steps[:k])) for k, (x, _) in enumerate(steps)]
)


@sees("different examples", "several elements")
@given(points)
def test_a_smooth_line_passes_its_points_and_nothing_beyond_them(points):
    commands = re.findall(r"([MLC])([-\d. ]+)", smooth(points))
    assert len(commands) == len(points)
    at = None
    for (name, text), point in zip(commands, points, strict=True):
        values = [float(value) for value in text.split()]
        assert values[-2:] == pytest.approx(point, abs=0.01)
        if name == "C":
            (x0, y0), (x1, _) = at, values[-2:]
            xs, ys = [x0, *values[::2]], [y0, *values[1::2]]
            # A Bezier curve lies within the hull of its control points, and goes down if they do.
            assert min(x0, x1) - 0.02 <= min(xs) <= max(xs) <= max(x0, x1) + 0.02
            assert ys == sorted(ys)
        at = values[-2:]


def test_a_smooth_line_begins_and_ends_upright():
    assert smooth([(0, 0), (6, 9)]) == "M0 0C0 3 6 6 6 9"


# The theme


@pytest.mark.parametrize("theme", THEMES)
def test_text_can_be_read_on_everything_it_stands_on(theme):
    colors = THEMES[theme]
    accents = [name.removesuffix("-tint") for name in THEMES["light"] if name.endswith("-tint")]
    grounds = ["back", "panel", *(f"{accent}-tint" for accent in accents)]
    for ground in grounds:
        assert contrast(colors["ink"], colors[ground]) >= 7, ground
        assert contrast(colors["muted"], colors[ground]) >= 4.5, ground
    for accent, ground in itertools.product(accents, ("back", "panel")):
        assert contrast(colors[accent], colors[ground]) >= 3, (accent, ground)
    for accent in set(accents) - {"grey"}:
        assert contrast(colors[accent], colors["back"]) >= 4.5, accent


def test_both_themes_name_the_same_colours():
    assert THEMES["light"].keys() == THEMES["dark"].keys()


def test_colours_of_categories_can_be_told_from_each_other_and_carry_ink():
    assert len(set(PALETTE)) == len(PALETTE) == 12
    for color in PALETTE:
        assert contrast(color, ink_on(color)) >= 4.5
        assert all(contrast(color, THEMES[theme]["back"]) >= 1.25 for theme in THEMES)


# Viénot, Brettel and Mollon (1999) and Machado, Oliveira and Fernandes (2009), severe; on linear RGB.
VISIONS = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def seen(color, vision):
    """A colour in OKLab, where distances are about those that are seen."""
    channels = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    r, g, b = (min(max(sum(m * c for m, c in zip(row, linear, strict=True)), 0), 1) for row in VISIONS[vision])
    long, medium, short = (
        (a * r + b_ * g + c * b) ** (1 / 3)
        for a, b_, c in (
            (0.4122214708, 0.5363325363, 0.0514459929),
            (0.2119034982, 0.6806995451, 0.1073969566),
            (0.0883024619, 0.2817188376, 0.6299787005),
        )
    )
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


@pytest.mark.parametrize("vision", VISIONS)
def test_categories_differ_for_the_colour_blind_as_well(vision):
    for one, other in itertools.combinations(PALETTE, 2):
        distance = sum((a - b) ** 2 for a, b in zip(seen(one, vision), seen(other, vision), strict=True)) ** 0.5
        assert distance > 0.09, (one, other)


def test_the_stylesheet_names_nothing_outside_of_pictures():
    selectors = re.findall(r"([^{};]+)\{", STYLESHEET)
    assert all(selector.startswith(("@media", "[data-")) or ".pj" in selector for selector in selectors)
    assert not re.search(r"[<>&#]pj|@import|url\(", STYLESHEET)
    assert not set("<>&") & set(STYLESHEET), "an SVG file would have to escape it"
    assert {name.split("-")[0] for name in re.findall(r"\.([\w-]+)", re.sub(r"[\d.]+px|0?\.\d+", "", STYLESHEET))} == {
        "pj"
    }


def test_the_theme_follows_the_system_and_what_stands_around_it():
    for part in ("prefers-color-scheme:dark", "[data-theme=dark] .pj", "[data-theme=light] .pj"):
        assert part in STYLESHEET
    # What stands around it comes later and is more specific.
    assert STYLESHEET.index("@media") < STYLESHEET.index("[data-theme=light]")


# Pictures and pages


def test_a_picture_is_an_svg_of_its_own_without_ids():
    drawn = picture(
        80, 40, rect(0, 0, 8, 8, class_="pj-c0"), path([[(0, 0), (1, 1)]], class_="pj-s-ink"), title="a < b"
    )
    root = ET.fromstring(drawn)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.attrib["aria-label"] == "a < b"
    assert root.attrib["viewBox"] == "0 0 80 40"
    assert " id=" not in drawn
    classes = {name for item in root.iter() for name in item.attrib.get("class", "").split()}
    assert all(name.startswith("pj") for name in classes)


def test_a_legend_takes_as_few_rows_as_there_is_room_for():
    entries = [(Markup(), "one"), (Markup(), "two"), (Markup(), "three")]
    _, width, height = legend(entries, 1000)
    assert (width < 1000, height) == (True, 12)
    _, narrow, high = legend(entries, 40)
    assert narrow < width
    assert high > 2 * height


def test_a_page_escapes_what_is_shown():
    shown = fragment(code("a < b"), table("T & U", ("name", "size"), [("<x>", 1234567)], {1: shown_bytes}))
    root = ET.fromstring(shown)
    assert root.attrib["class"] == "pj"
    assert root.find("pre").text == "a < b"
    assert [cell.text for cell in root.iter("td")] == ["<x>", "1.2 MB"]
    assert [cell.attrib.get("class") for cell in root.iter("th")] == [None, "pj-number"]
    assert next(root.iter("caption")).text == "T & U"


def test_a_table_writes_numbers_with_separators():
    assert ">1,234,567<" in table("t", ("n",), [(1234567,)])
    assert ">0.5<" in table("t", ("n",), [(0.5,)])


@sees("different examples")
@given(st.floats(0, 1e15))
def test_sizes_and_durations_are_short(value):
    assert re.fullmatch(r"\d{1,3} B|\d{1,4}\.\d [kM]B|\d+\.\d [GTP]B", shown_bytes(value))
    assert re.fullmatch(r"\d+\.\d\d (us|ms|s)", shown_duration(value))
