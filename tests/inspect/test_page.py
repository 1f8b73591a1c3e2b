"""The report as a page: what is in it, that nothing of the user's becomes markup, and what a reader can do with it in a
real browser."""

import base64
import hashlib
import html.parser
import json
import linecache
import math
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType

import partjit
from partjit import P, colocated, pjit, with_sharding_constraint
from partjit.inspect.collectives import Collective
from partjit.inspect.explain import explain
from partjit.inspect.listing import Line
from partjit.inspect.page.comparison import compare
from partjit.inspect.page.excerpts import AROUND, Excerpts
from partjit.inspect.page.listing import drawn_lines
from partjit.inspect.page.page import page_of
from partjit.inspect.page.table import amount, colored_spec, rows_table
from partjit.inspect.report_data import as_data
from partjit.render.numbers import shown_bytes
from partjit.render.theme import THEMES
from tests.census import sees
from tests.inspect.browser import NAMES, find_browser, start_browser

SDS = jax.ShapeDtypeStruct


def loss(params, x):
    """A few layers, the last of them in a loop."""
    for w in params["layers"]:
        x = jax.nn.gelu(x @ w["in"]) @ w["out"]
        x = with_sharding_constraint(x, P("data"))

    def turn(x, w):
        return jnp.tanh(x @ w), None

    x = with_sharding_constraint(x, P("data", "model"))  # is a finding: it was constrained otherwise
    x, _ = jax.lax.scan(turn, x, params["stack"])
    return jnp.mean(x**2)


def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def explained(layers, compiled=False):
    mesh = partjit.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    one = {"in": SDS((64, 128), jnp.float32), "out": SDS((128, 64), jnp.float32)}
    params = {"layers": [one] * layers, "stack": SDS((3, 64, 64), jnp.float32)}
    specs = {"layers": [{"in": P(None, "model"), "out": P("model")}] * layers, "stack": P(None, None, "model")}
    fun = pjit(step, in_shardings=(specs, P("data")), out_shardings=(specs, None))
    return explain(fun, params, SDS((32, 64), jnp.float32), mesh=mesh, compiled=compiled, large=1 << 10)


@pytest.fixture(scope="module")
def report():
    return explained(2, compiled=True)


@pytest.fixture(scope="module")
def planned():
    mesh = partjit.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    log = colocated.colocated_python(print, out_specs_fn=lambda x: None, stream="log")

    @pjit(in_shardings=P("data", "model"), out_shardings=P("data"))
    def logged(x):
        log(jnp.sum(x))
        return 2 * x

    return explain(logged, SDS((8, 16), jnp.float32), mesh=mesh)


class Read(html.parser.HTMLParser):
    """What a browser would make of it: the tags, the text, and the text of cells."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text, self.within = [], [], [], []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *attr) for attr in attrs]
        if tag in ("style", "script"):
            self.within.append(tag)

    def handle_endtag(self, tag):
        if self.within and self.within[-1] == tag:
            self.within.pop()

    def handle_data(self, data):
        if not self.within:
            self.text.append(data)


# ---- what is in it


def rows_of(page, table):
    found = re.search(rf'<table[^>]*aria-label="{table}".*?</table>', page, re.S)
    return found[0].partition("<tbody>")[2].count("<tr>")


def test_every_collective_argument_result_and_line_has_its_row(report):
    page = page_of(report)
    placed = [value for value in (*report.whole.tree.inputs, *report.whole.results) if value.is_array]
    assert rows_of(page, "compiled collectives") == len([*report.collectives.rows()])
    assert sum(count for _, count in report.collectives.rows()) == len(report.collectives)
    assert rows_of(page, "arguments and results") == len(placed)
    assert page.count('class="pj-l"') == len(report.jaxpr.lines)
    assert page.count('class="pj-l pj-more"') == sum(len(line.values) - 1 for line in report.jaxpr.lines if line.values)
    assert page.partition('class="pj-findings"')[2].count("<li") == len(report.findings) > 0
    assert rows_of(page, "predicted collectives") == len([*report.predicted.rows()])
    for value in placed:
        assert value.path.replace("'", "&#39;") in page


def test_rows_say_why_values_are_sharded_so():
    mesh = partjit.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))

    @pjit(in_shardings=(P("data"), P(None, "model")))
    def fun(x, w):
        local = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return local(x) @ w

    report = explain(fun, SDS((8, 16), jnp.float32), SDS((16, 4), jnp.float32), mesh=mesh)
    classes = {value for _, name, value in Read(page_of(report)).attributes if name == "class"}
    assert "pj-badge" in classes
    assert "pj-y" not in classes
    page = page_of(report, has_reasons=True)
    arguments = page[page.index('aria-label="arguments and results"') : page.index("The tree of arguments")]
    (of_x, of_w) = re.findall(r'href="#([\w-]+-y\d+)"', arguments)
    for number, axis, name in ((of_x, "data", "x"), (of_w, "model", "w")):
        reason = html.unescape(re.search(rf'<p id="{number}"[^>]*>(.*?)</p>', page, re.S)[1])
        assert re.match(rf"'{axis}' shards dimension \d: from argument {name} with spec P\(", reason)
        assert "is unsharded: its spec is" in reason
    # What a device has of a value in a shard_map is its own.
    local, rest = re.split(r"</details>", page[page.index("<b>shard_map</b>") :], maxsplit=1)
    assert local.count(">local</small>") == 2
    assert ">local</small>" not in rest
    # They are there as soon as the report was asked.
    assert page_of(report) == page


def test_what_is_alive_at_the_peak_is_listed(report):
    (estimate,) = report.estimates
    sizes = [buffer.nbytes for buffer in estimate.buffers]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) >= estimate.saved + estimate.temporaries
    assert sum(buffer.nbytes for buffer in estimate.buffers if buffer.is_saved) == estimate.saved
    assert sizes
    assert rows_of(page_of(report), "buffers at the peak") == len(sizes)
    (data,) = as_data(explained(2))["memory"]
    assert [buffer["nbytes"] for buffer in data["buffers"]] == sizes


def test_predicted_and_compiled_collectives_stand_beside_each_other(report):
    page = page_of(report)
    assert "why they differ" in page
    assert f"The {len(report.predicted)} predicted collectives" in page
    assert "why they differ" not in page_of(explained(1))


def test_a_plan_has_its_picture_and_source(planned):
    page = page_of(planned)
    assert "The plan of logged" in page
    assert "def logged(x):" in page
    assert rows_of(page, "calls") == len(planned.plan.calls) == 1
    assert rows_of(page, "fragments") == len(planned.plan.fragments)
    assert "data-value" not in [
        name for _, name, _ in Read(page).attributes
    ]  # the names in fragments are no names in the listing


def test_a_program_without_a_mesh_and_without_anything_has_a_page():
    page = page_of(explain(lambda: jnp.float32(1)))
    assert "without a mesh" in page
    assert "There are no collectives (predicted)." in page
    assert "Nothing stands out." in page


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_page_is_the_same_each_time_and_asks_for_nothing(report, is_whole):
    page = page_of(report, is_whole)
    assert page == page_of(report, is_whole)
    read = Read(page)
    links = [value for tag, name, value in read.attributes if name in ("src", "href", "action", "srcset", "data")]
    assert [link for link in links if not link.startswith("#") and link != "data:,"] == []
    assert {*read.tags}.isdisjoint({"iframe", "object", "embed", "base", "form", "img"})
    assert not re.search(r"url\(|@import", page)
    assert [name for _, name, _ in read.attributes if name.startswith("on")] == []


def test_the_page_allows_itself_its_own_script_only(report):
    page = page_of(report)
    script = re.search(r"<script>(.*)</script>", page, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(value for tag, name, value in Read(page).attributes if (tag, name) == ("meta", "content"))
    assert policy.startswith("default-src &#39;none&#39;".replace("&#39;", "'"))
    assert f"script-src 'sha256-{digest}';" in policy
    assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script>")


def test_links_lead_somewhere_and_names_are_there_once(report):
    read = Read(page_of(report))
    ids = [value for _, name, value in read.attributes if name == "id"]
    assert len(ids) == len({*ids})
    assert {value for _, name, value in read.attributes if name == "href"} - {f"#{own}" for own in ids} == {"data:,"}
    assert all(own.startswith("pj-") for own in ids)
    classes = {part for _, name, value in read.attributes if name == "class" for part in value.split()}
    assert all(part.startswith("pj") for part in classes)


def test_size_is_linear_in_the_equations():
    reports = [explained(layers) for layers in (2, 6, 10)]
    sizes = [len(page_of(report)) for report in reports]
    equations = [len(report.equations) for report in reports]
    first, second = ((sizes[k + 1] - sizes[k]) / (equations[k + 1] - equations[k]) for k in range(2))
    assert first == pytest.approx(second, rel=0.1)
    assert second < 700  # 6 000 equations in 5 MB


def test_a_page_for_thousands_of_devices_is_about_as_large_as_one_for_eight():
    def size(shape):
        mesh = AbstractMesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        fun = pjit(lambda x, w: jnp.tanh(x @ w), in_shardings=(P("data"), P(("model", "data"))))
        array = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
        return len(explain(fun, array, array, mesh=mesh).to_html())

    assert size((2048, 2)) <= 1.1 * size((4, 2))


# ---- nothing of the user's is markup

TAGS = {"a", "b", "div", "em", "h3", "i", "p", "pre", "section", "span", "table", "tbody", "td", "th", "thead", "tr"}
TAGS |= {"details", "summary"}
nasty = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ["</script><script>alert(1)</script>", "<b>", "'\"><img src=x onerror=alert(1)>", "&amp;", "]]>", "<!--"]
    ),
    st.lists(st.sampled_from(["<", ">", "&", '"', "'", "/", "script", "!--", "style", " ", "x"]), max_size=12).map(
        "".join
    ),
)


def without_spaces(text):
    """What is left when everything a parser may change is away: kinds of spaces, and what no XML may have."""
    return re.sub("[\\s\ufffd\x00-\x20\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "", text)


@sees("different examples", "text")
@given(st.lists(nasty, min_size=3, max_size=3), st.integers())
def test_text_in_tables_stays_text(texts, number):
    read = Read(rows_table(texts[0], texts, [[*texts[:2], amount(number)]]))
    assert {*read.tags} <= TAGS
    assert without_spaces("".join(read.text)) == without_spaces("".join([*texts, *texts[:2], f"{number:,}"]))
    assert ("table", "aria-label") in [(tag, name) for tag, name, _ in read.attributes]


@sees("different examples", "text")
@given(nasty, nasty)
def test_axes_in_specs_stay_text(axis, other):
    spec = f"P({axis!r}, None, {(other, axis)!r})"
    read = Read(colored_spec(spec, [axis, other]))
    assert {*read.tags} <= {"span"}
    if not re.search(r"[\\'\"]", axis + other) and (axis + other).isprintable():
        assert without_spaces("".join(read.text)) == without_spaces(f"P({axis}, None, ({other}, {axis}))")


@sees("different examples", "text")
@given(nasty)
def test_what_is_no_spec_stays_text(text):
    read = Read(colored_spec(f"{text}'x'{text}", ["x"]))
    assert {*read.tags} <= {"span"}
    if not re.search(r"[\\'\"]", text):
        assert without_spaces("".join(read.text)) == without_spaces(f"{text}x{text}")


@sees("different examples", "text")
@given(nasty, nasty, nasty, nasty)
@example("", "", "\0", "")
def test_the_program_stays_text(name, type_, text, function):
    file = f"/home/{text}/model.py"
    lines = [
        Line(0, (name, name), (type_, type_), ("P(None)", ""), (8, 0), f"= dot{text} a", (file, 3, function), 0),
        Line(1, (), (), (), (), f"{text}:"),
    ]
    excerpts = Excerpts("p")
    read = Read(drawn_lines(lines, ["x"], excerpts, {0: function}, {name: text}))
    assert {*read.tags} <= TAGS
    said = [part for line in (name, type_, text, name, function) for part in [without_spaces(line)]]
    shown = without_spaces("".join(read.text))
    assert all(part in shown for part in said if "[" not in text and "Literal" not in text)
    assert {*Read(excerpts.shown()).tags} <= TAGS


@sees("different examples", "text", "several elements")
@settings(max_examples=50)
@given(st.lists(nasty, min_size=1, max_size=30), st.data())
def test_source_stays_text(source, data):
    lines = [f"{line.splitlines()[0] if line.splitlines() else ''}\n" for line in source]
    number = data.draw(st.integers(1, len(lines)))
    file = "<a file that nobody has>"
    linecache.cache[file] = (1, None, lines, file)
    try:
        excerpts = Excerpts("p")
        link = Read(excerpts.link((file, number, "f")))
        read = Read(excerpts.shown())
    finally:
        del linecache.cache[file]
    assert {*read.tags} <= TAGS
    near = lines[max(0, number - 1 - AROUND) : number + AROUND]
    assert without_spaces("".join(read.text)) == without_spaces("".join([file, *near]))
    assert ("a", "href", f"#p-f0-{number}") in link.attributes
    assert ("span", "id", f"p-f0-{number}") in read.attributes


# ---- excerpts


def test_lines_that_are_near_each_other_are_shown_once(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("".join(f"line {k}\n" for k in range(1, 101)))
    excerpts = Excerpts("p")
    for number in (10, 12, 50, 10):
        excerpts.link((str(file), number, ""))
    shown = [int(value) for _, name, value in Read(excerpts.shown()).attributes if name == "data-k"]
    assert shown == [*range(4, 19), *range(44, 57)]
    assert excerpts.shown().count("⋮") == 1


def test_a_line_that_is_gone_and_a_file_that_is_gone_say_so(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("one\ntwo\n")
    excerpts = Excerpts("p")
    excerpts.link((str(file), 40, "f"))
    excerpts.link((str(tmp_path / "gone.py"), 3, "f"))
    shown = excerpts.shown()
    assert "(the file no longer has this line)" in shown
    assert "The file cannot be read, so its lines cannot be shown." in shown
    ids = [value for _, name, value in Read(shown).attributes if name == "id"]
    assert ids == ["p-f0-40", "p-f1-3"]


# ---- the data


def test_the_data_are_what_the_report_says_and_survive_json(report):
    data = json.loads(report.to_json())
    assert data == as_data(report)
    assert data["mesh"] == {"data": 4, "model": 2}
    assert len(data["collectives"]["compiled"]) == len(report.collectives)
    assert len(data["collectives"]["predicted"]) == len(report.predicted)
    assert sum(c["bytes_per_step"] for c in data["collectives"]["compiled"]) == pytest.approx(
        data["collectives"]["bytes_per_step"]
    )
    assert [a["path"] for a in data["arguments"]] == [value.path for value in report.whole.tree.inputs]
    for array in (*data["arguments"], *data["results"]):
        parts = [math.prod(data["mesh"][axis] for axis in axes) for axes in array["spec"]]
        assert array["shard_shape"] == [-(-n // k) for n, k in zip(array["shape"], parts, strict=True)]
        assert array["nbytes_per_device"] == math.prod(array["shard_shape"]) * np.dtype(array["dtype"]).itemsize
    assert {c["site"]["file"] for c in data["collectives"]["compiled"]} == {__file__}
    assert data["plan"] is None


def test_the_data_of_a_plan(planned):
    plan = json.loads(planned.to_json(indent=1))["plan"]
    assert plan["source"] == planned.plan.source
    assert [call["function"] for call in plan["calls"]] == ["print"]
    assert plan["calls"][0]["site"]["file"] == __file__
    assert [fragment["name"] for fragment in plan["fragments"]] == [f.name for f in planned.plan.fragments]


def test_the_documentation_of_the_data_names_all_of_it(report, planned):
    told = {*re.findall(r"`(\w+)`", as_data.__doc__)}

    def names(data, path=()):
        if isinstance(data, dict) and path != ("mesh",):
            for name, inner in data.items():
                yield name
                yield from names(inner, (*path, name))
        elif isinstance(data, list):
            for inner in data:
                yield from names(inner, path)

    assert {*names(as_data(report)), *names(as_data(planned))} - told == set()


# ---- why predicted and compiled collectives differ


def collective(kind="all-gather", times=1, members=1, nbytes=32, dtype="f32"):
    return Collective(
        kind=kind,
        axes=("model",),
        group_size=2,
        operand="",
        result=f"{dtype}[8]",
        operand_bytes=nbytes // 2,
        result_bytes=nbytes,
        times=times,
        members=(None,) * members if members > 1 else (),
    )


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ([collective()], [collective()], ""),
        ([collective()] * 3, [collective(members=3, nbytes=96)], "3 arrays in 1 instruction"),
        ([collective()] * 3, [collective()] * 2, "1 array fewer: XLA may have merged equal values"),
        ([collective()], [collective()] * 2, "1 array more: XLA may reshard in other steps"),
        ([collective(times=8)], [collective()], "1 in a step instead of 8: XLA may have moved it out"),
        ([collective()], [collective(times=8)], "8 in a step instead of 1: XLA may execute it"),
        ([collective()], [collective(nbytes=64)], "other shapes than predicted"),
        ([collective(dtype="bf16")], [collective(nbytes=64)], "f32 instead of bf16: XLA may compute in a wider type"),
        (
            [collective(dtype="bf16")] * 2,
            [collective(nbytes=128, members=2)],
            "2 arrays in 1 instruction; f32 instead of bf16: XLA may compute in a wider type",
        ),
        ([collective()], [], "none is compiled: XLA may move"),
        ([], [collective()], "none was predicted: XLA may use it in place"),
    ],
)
def test_the_reason_of_a_difference(before, after, reason):
    (found,) = compare(before, after)
    assert found.reason.startswith(reason)
    assert bool(found.reason) == bool(reason)
    assert found.predicted.instructions == len(before)
    assert found.compiled.instructions == len(after)


def test_without_a_compiled_program_there_is_no_difference():
    (found,) = compare([collective(times=None)], None)
    assert found.compiled is None
    assert not found.reason
    assert found.predicted.executions == 1


# ---- in a browser


@pytest.fixture(scope="module")
def browser():
    path = find_browser()
    if path is None:
        pytest.skip(f"no browser is installed: looked for {', '.join(NAMES)}")
    with start_browser(path) as started:
        yield started


@pytest.fixture(scope="module")
def file(report, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    report.to_html(path)
    return path


@pytest.fixture
def page(browser, file):
    opened = browser.open(file.as_uri())
    yield opened
    assert opened.complaints == []
    opened.close()


def color_of(page, element="document.querySelector('.pj-report')"):
    """The colours of the text and of what is behind it."""
    found = {}
    for name, style in (("ink", "color"), ("back", "backgroundColor")):
        color = page.evaluate(f"getComputedStyle({element}).{style}")
        found[name] = "#" + "".join(f"{int(part):02x}" for part in re.findall(r"[0-9]+", color))
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_loads_without_errors_and_requests(browser, file, scheme):
    page = browser.open(file.as_uri(), scheme=scheme)
    assert page.complaints == []
    assert page.requests == [file.as_uri()]
    colors = [color_of(page)]
    page.click(".pj-theme")
    colors.append(color_of(page))
    both = [{name: colors_of[name] for name in ("ink", "back")} for colors_of in (THEMES["light"], THEMES["dark"])]
    assert colors == (both if scheme == "light" else both[::-1])
    assert page.evaluate("document.querySelectorAll('svg').length") > 0
    page.close()


def test_the_browser_would_tell_of_errors_and_requests(browser, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text("<script>console.log(1); nothing()</script><img src='http://127.0.0.1:1/x.png'>")
    page = browser.open(path.as_uri())
    assert len(page.complaints) >= 2
    assert "http://127.0.0.1:1/x.png" in page.requests
    page.close()


CELLS = "[...{}.tBodies[0].rows].map((r) => r.cells[{}]).map((c) => [c.dataset.v, c.innerText])"


@pytest.mark.parametrize("title", ["compiled collectives", "arguments and results", "collectives by kind and axes"])
def test_a_click_on_a_head_sorts_the_table(page, title):
    table = f"document.querySelector('table[aria-label=\"{title}\"]')"
    heads = page.evaluate(f"[...[...{table}.tHead.rows].at(-1).cells].map((c) => c.className)")
    for k, kind in enumerate(heads):
        before = page.evaluate(CELLS.format(table, k))
        for is_down in (kind == "pj-r", kind != "pj-r"):
            page.click(f'table[aria-label="{title}"] tr:last-child > th:nth-child({k + 1}) button')
            cells = page.evaluate(CELLS.format(table, k))
            assert sorted(map(str, cells)) == sorted(map(str, before))
            if kind == "pj-r":
                numbers = [float(number) for number, _ in cells]
                assert numbers == sorted(numbers, reverse=is_down)
            else:
                # Numbers in names count as numbers: [2] stands before [10].
                texts = [text.strip() for _, text in cells]
                ordered = page.evaluate(f"{json.dumps(texts)}.sort(new Intl.Collator('en', {{numeric: true}}).compare)")
                assert texts == (ordered[::-1] if is_down else ordered)
            sort = page.evaluate(f"[...{table}.tHead.rows].at(-1).cells[{k}].getAttribute('aria-sort')")
            assert sort == ("descending" if is_down else "ascending")


def test_search_and_filters_choose_rows_and_the_total_is_theirs(page, report):
    page.click('input[aria-label="search in compiled collectives"]')
    page.type("ALL-REDUCE model")
    table = "document.querySelector('table[aria-label=\"compiled collectives\"]')"
    rows = f"[...{table}.tBodies[0].rows].filter((r) => !r.hidden)"
    shown = page.evaluate(f"{rows}.map((r) => r.innerText)")
    wanted = [(c, n) for c, n in report.collectives.rows() if c.kind == "all-reduce" and c.axes == ("model",)]
    assert len(shown) == len(wanted) > 0
    assert all("all-reduce" in text and "model" in text for text in shown)
    total = shown_bytes(sum(c.bytes_per_step * n for c, n in wanted))
    output = page.evaluate("document.querySelector('.pj-is-collectives output').value")
    assert output == f"{len(wanted)} of {len([*report.collectives.rows()])} rows; {total} sent in a step"
    select = "document.querySelector('select[aria-label=\"axes in compiled collectives\"]')"
    page.evaluate(f"{select}.value = 'data'; {select}.dispatchEvent(new Event('input'))")
    assert page.evaluate(f"{rows}.length") == 0


def opened_line(page):
    return page.evaluate(
        "[...document.querySelectorAll('.pj-detail .pj-target')].map((l) => [l.dataset.k, l.innerText.trimEnd(),"
        "l.closest('.pj-file').querySelector('h3').innerText])"
    )


def test_a_collective_opens_its_line_and_closes_it(page, report):
    first = next(report.collectives.rows())[0]
    site = first.sites[0]
    page.click('table[aria-label="compiled collectives"] tbody tr td')
    ((number, text, where),) = opened_line(page)
    assert (int(number), text) == (site[1], linecache.getline(*site[:2]).rstrip())
    assert where == f"{site[0]}:{site[1]} in {site[2]}"
    assert page.evaluate("document.querySelectorAll('.pj-detail .pj-line').length") == 2 * AROUND + 1
    page.click('table[aria-label="compiled collectives"] tbody tr td')
    assert opened_line(page) == []


def test_an_argument_shows_where_it_is(page):
    page.click('table[aria-label="arguments and results"] tbody a')
    assert page.evaluate("document.querySelectorAll('.pj-detail figure svg rect').length") > 1
    assert page.evaluate("document.querySelectorAll('.pj-detail [id]').length") == 0
    assert page.evaluate("document.querySelector('.pj-detail svg').getBoundingClientRect().width") > 100
    page.click('table[aria-label="arguments and results"] tbody .pj-y')
    assert "from argument params" in page.evaluate("document.querySelector('.pj-detail').innerText")


SEEN = "[...document.querySelectorAll('.pj-listing .pj-l:not(.pj-more)')].filter((l) => l.checkVisibility())"


def test_the_program_folds_and_is_searched(page, report):
    page.evaluate("document.querySelector('.pj-is-program').scrollIntoView()")
    page.click(".pj-is-program .pj-tools button:nth-of-type(2)")  # unfold all
    assert page.evaluate(f"{SEEN}.length") == len(report.jaxpr.lines)
    page.click(".pj-is-program .pj-tools button:nth-of-type(1)")
    assert page.evaluate(f"{SEEN}.length") == sum(not line.depth for line in report.jaxpr.lines)
    page.click('input[aria-label="search in the program"]')
    page.type("tanh")
    found = [line for line in report.jaxpr.lines if " tanh" in line.text or ".tanh" in line.text]
    shown = page.evaluate(f"{SEEN}.filter((l) => l.innerText.includes('tanh')).length")
    assert shown == len(found) > 0
    count = page.evaluate("document.querySelector('.pj-is-program output').value")
    assert count == f"{len(found)} of {len(report.jaxpr.lines)} lines"
    # Bodies are unfolded down to what was found, and no further.
    assert page.evaluate(f"{SEEN}.length") < len(report.jaxpr.lines) / 2
    search = "document.querySelector('input[aria-label=\"search in the program\"]')"
    page.evaluate(f"{search}.value = 'scan'; {search}.dispatchEvent(new Event('input'))")
    assert page.evaluate(f"{SEEN}.length") == sum("scan" in line.text for line in report.jaxpr.lines) > 0
    assert page.evaluate("document.querySelectorAll('.pj-listing details[open]:not([hidden])').length") == 0


def test_a_line_of_the_program_opens_its_source_and_leads_on(page, report):
    line = next(line for line in report.jaxpr.lines if not line.depth and line.text.startswith("= dot_general"))
    selector = f'.pj-chunk > .pj-l a[href$="-{line.site[1]}"]'
    page.click(selector)
    assert (int(opened_line(page)[0][0]), opened_line(page)[0][2]) == (
        line.site[1],
        f"{line.site[0]}:{line.site[1]} in {line.site[2]}",
    )
    page.click(".pj-listing .pj-detail button")  # what it reads
    name = page.evaluate("document.querySelector('.pj-here b').innerText")
    assert name in page.evaluate("document.querySelector('.pj-opened .pj-t').innerText").split()


def test_a_finding_leads_to_its_value(page, report):
    finding = next(finding for finding in report.findings if finding.value)
    page.click('input[aria-label="search in the program"]')
    page.type("nothing is called so")
    assert page.evaluate(f"{SEEN}.length") == 0
    page.click(f'li[data-value="{finding.value}"] button')
    assert page.evaluate("document.querySelector('.pj-here b').innerText") == finding.value
    assert page.evaluate("document.querySelector('.pj-here').checkVisibility()")
    assert finding.text in page.evaluate("document.querySelector('.pj-here em').title")


def test_keys_search_and_open_and_go_on(page):
    page.press("/")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "search in compiled collectives"
    page.press("/")  # is typed now
    assert page.evaluate("document.activeElement.value") == "/"
    page.evaluate("document.activeElement.value = ''; document.activeElement.dispatchEvent(new Event('input'))")
    page.evaluate("document.querySelector('table[aria-label=\"compiled collectives\"] tbody a').focus()")
    page.press("Enter")
    assert len(opened_line(page)) == 1
    before = page.evaluate("document.activeElement.closest('tr').rowIndex")
    page.press("ArrowDown")
    links = page.evaluate("document.activeElement.closest('tbody').querySelectorAll('tr:not(.pj-detail) a').length")
    assert links > 1
    assert page.evaluate("document.activeElement.matches('table[aria-label=\"compiled collectives\"] a')")
    page.press("ArrowUp")
    assert page.evaluate("document.activeElement.closest('tr').rowIndex") == before
    page.press("Escape")
    assert opened_line(page) == []
    # A table is one stop.
    assert (
        page.evaluate('document.querySelectorAll(\'table[aria-label="compiled collectives"] a[tabindex="0"]\').length')
        == 1
    )


def test_reports_in_a_notebook_work_side_by_side(browser, report, planned, tmp_path):
    path = tmp_path / "notebook.html"
    path.write_text("<!doctype html><meta charset=utf-8><body data-jp-theme-light=false></body>")
    page = browser.open(path.as_uri())
    for part in (report, planned, report):
        # As Jupyter does: markup that is set runs no script, so each is put in anew.
        page.evaluate(f"""(() => {{
            const cell = document.createElement("div");
            cell.innerHTML = {json.dumps(page_of(part, is_whole=False))};
            document.body.append(cell);
            for (const script of cell.querySelectorAll("script")) {{
                const copy = document.createElement("script");
                copy.textContent = script.textContent;
                script.replaceWith(copy);
            }}
        }})()""")
    assert page.complaints == []
    assert page.evaluate("document.querySelectorAll('.pj-report[data-ready]').length") == 3
    tools = page.evaluate(
        "[...document.querySelectorAll('.pj-report')].map((r) => r.querySelectorAll('.pj-tools').length)"
    )
    assert tools[0] == tools[2] > 0
    third = "document.querySelectorAll('.pj-report')[2]"
    page.evaluate(f"{third}.querySelector('table[aria-label=\"compiled collectives\"] tbody td').click()")
    details = page.evaluate(
        "[...document.querySelectorAll('.pj-report')].map((r) => r.querySelectorAll('.pj-target').length)"
    )
    assert details == [0, 0, 1]
    assert page.evaluate("document.querySelector('.pj-theme')") is None
    assert color_of(page, third)["back"] == THEMES["dark"]["back"]
    assert page.evaluate("getComputedStyle(document.body).margin") == "8px"  # the rest of the page is as it was
    page.close()


def test_without_a_script_everything_can_be_read(browser, file, report):
    page = browser.open("about:blank#")
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.call("Page.navigate", url=file.as_uri())
    text, deadline = "", time.monotonic() + 30
    while time.monotonic() < deadline:
        text = page.evaluate("document.body?.textContent ?? ''")
        if "Source" in text and page.evaluate("document.readyState") == "complete":
            break
    assert page.evaluate("document.querySelectorAll('.pj-tools').length") == 0
    assert all(value.path in text for value in report.whole.tree.inputs)
    assert page.evaluate("document.querySelectorAll('.pj-listing .pj-l').length") >= len(report.jaxpr.lines)
    page.evaluate("location.hash = document.querySelector('.pj-is-collectives a').hash")
    assert page.evaluate("document.querySelector('.pj-line:target').checkVisibility()")
    page.close()


@pytest.mark.parametrize("width", [390, 800, 1600])
def test_nothing_is_wider_than_the_window(page, width):
    page.look(width, 900)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_on_paper_nothing_is_hidden(page):
    page.look(media="print")
    boxes = "[...document.querySelectorAll('.pj-wide, .pj-listing, pre')]"
    assert page.evaluate(f"{boxes}.filter((e) => e.scrollHeight > e.clientHeight + 20).length") == 0
    assert page.evaluate("document.querySelector('.pj-tools').checkVisibility()") is False
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.querySelectorAll('details:not([open])').length") == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.querySelectorAll('details:not([open])').length") > 0
