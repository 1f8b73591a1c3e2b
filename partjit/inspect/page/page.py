"""A report as a self-contained HTML page, or as a part of a notebook's page.

The page consists of plain tables and lists, so it can be read, searched and printed without a script. The script adds
sorting, search, filters, and the source or picture of a row right below it.
"""

import base64
import functools
import hashlib
import importlib.resources
from collections.abc import Sequence

from partjit.inspect.contents import Contents
from partjit.inspect.page import sections
from partjit.inspect.page.arrays import arrays
from partjit.inspect.page.excerpts import Excerpts
from partjit.inspect.page.listing import drawn_lines
from partjit.inspect.page.reasons import Reasons
from partjit.inspect.page.table import chip
from partjit.inspect.suggested import SpecSuggestion
from partjit.render.markup import Markup, element, join
from partjit.render.numbers import counted, shown_bytes
from partjit.render.theme import PALETTE, STYLESHEET, ink_on

__all__ = ["page_of"]


def page_of(
    report: Contents, is_whole: bool = True, has_reasons: bool = False, suggestions: Sequence[SpecSuggestion] = ()
) -> str:
    """Writes a report as HTML.

    Args:
        report: a `partjit.inspect.report.Report`.
        is_whole: whether it is a page; otherwise it is a fragment, as for the output of a notebook's cell.
        has_reasons: whether it says why each value is sharded so, which takes longer than the rest unless a question
            to the report was answered before.
        suggestions: other specs that were tried.

    Returns:
        The HTML. Its content security policy forbids the network and any script but its own.

    Example:
        >>> import jax.numpy as jnp
        >>> from partjit.inspect.explain import explain
        >>> page = page_of(explain(lambda x: 2 * x, jnp.ones(8)))
        >>> page[:15], "http://" in page.replace("http://www.w3.org/2000/svg", "")
        ('<!doctype html>', False)
    """
    # Several reports may be in one page, so the ids of each need a prefix of their own.
    prefix = f"pj-{hashlib.sha256(report.to_text(None).encode('utf-8', 'replace')).hexdigest()[:8]}"
    style, script = _style(), _file("page.js")
    root = element(
        "div",
        join(_body(report, prefix, has_reasons, suggestions)),
        class_="pj pj-report",
        data_whole="" if is_whole else None,
    )
    # Neither text contains an end tag or text of the user's.
    own_style, own_script = Markup(f"<style>{style}</style>"), Markup(f"<script>{script}</script>")
    if not is_whole:
        return str(element("div", own_style, root, own_script, class_="pj-host"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    head = element(
        "head",
        Markup('<meta charset="utf-8">'),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        Markup('<link rel="icon" href="data:,">'),
        element("title", f"{report.name} - partjit"),
        own_style,
    )
    body = element("body", root, own_script, class_="pj pj-page")
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _body(report: Contents, prefix: str, has_reasons: bool, suggestions: Sequence[SpecSuggestion]) -> list[Markup]:
    axes, excerpts, reasons = report.mesh.axis_names, Excerpts(prefix), Reasons(report, prefix, has_reasons)
    costs = sections.costs(report, excerpts)
    lines = drawn_lines(report.jaxpr.lines, axes, excerpts, *_marks(report), reasons.badge)
    listed = [
        ("Findings", "findings", sections.findings(report, excerpts)),
        *([("Other specs", "suggestions", sections.suggestions(suggestions))] if suggestions else []),
        ("Collectives", "collectives", _collectives(report, excerpts)),
        ("Arguments and results", "arrays", arrays(report, prefix, reasons)),
        ("Program", "program", join([lines, reasons.shown()])),
        ("Memory and FLOPs", "memory", sections.memory(report, excerpts)),
    ]
    if report.plan is not None:
        listed.append(("Plan", "plan", sections.plan(report.plan, excerpts)))
    note = element("p", "The source lines that the report refers to.", class_="pj-muted-text")
    listed.append(("Source", "source", join([note, excerpts.shown()])))
    nav = (element("a", title, href=f"#{prefix}-{name}") for title, name, _ in listed)
    mesh = (chip(axis, axes, f"{axis}={size}") for axis, size in report.mesh.shape.items())
    header = element(
        "header",
        element("h1", report.name, class_="pj-mono"),
        element("p", *mesh, _devices(report), class_="pj-mesh"),
        element("nav", *nav),
        class_="pj-top",
    )
    parts = [
        element("section", element("h2", title), content, id=f"{prefix}-{name}", class_=f"pj-section pj-is-{name}")
        for title, name, content in listed
    ]
    return [header, sections.summary(report), costs, *parts]


def _marks(report: Contents) -> tuple[dict[int, str], dict[str, str]]:
    """The collectives by the numbers of equations, and the findings by the names of values."""
    if report.plan is not None:  # fragments have equations and names of their own
        return {}, {}
    moved: dict[int, list[str]] = {}
    for collective in report.predicted:
        if collective.tags:
            over, size = ", ".join(collective.axes), shown_bytes(collective.bytes_moved)
            moved.setdefault(collective.tags[-1], []).append(f"{collective.kind} {over} {size}")
    flagged: dict[str, list[str]] = {}
    for finding in report.findings:
        flagged.setdefault(finding.value, []).append(f"{finding.kind}: {finding.text}; {finding.suggestion}")
    return (
        {number: ", ".join(dict.fromkeys(texts)) for number, texts in moved.items()},
        {name: "\n".join(texts) for name, texts in flagged.items()},
    )


def _devices(report: Contents) -> Markup:
    if report.mesh.empty:
        return element("span", "without a mesh")
    kind = report.mesh.abstract_mesh.abstract_device
    given = "" if kind is None else f"{kind.device_kind} "
    return element("span", counted(report.mesh.size, f"{given}device"))


def _collectives(report: Contents, excerpts: Excerpts) -> Markup:
    axes = report.mesh.axis_names
    found = report.collectives
    parts = [sections.comparison(report), sections.collectives(found, axes, excerpts), sections.modules(found)]
    if report.compiled and report.predicted:
        head = element("summary", f"The {len(report.predicted):,} predicted collectives")
        before = sections.collectives(report.predicted, axes, excerpts)
        parts.append(element("details", head, before, class_="pj-fold"))
    return join(parts)


@functools.cache
def _style() -> str:
    colors = (f".pj-x{k}{{background:{color};color:{ink_on(color)}}}" for k, color in enumerate(PALETTE))
    return "".join([STYLESHEET, _file("page.css"), *colors])


@functools.cache
def _file(name: str) -> str:
    return importlib.resources.files("partjit.inspect.page").joinpath(name).read_text(encoding="utf-8")
