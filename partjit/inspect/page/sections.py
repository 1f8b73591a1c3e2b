"""The sections of the page of a report."""

from collections.abc import Iterable, Sequence

from partjit.inspect.collectives import Collective, taken, total_bytes
from partjit.inspect.contents import Collectives, Contents
from partjit.inspect.findings import grouped
from partjit.inspect.memory import Memory
from partjit.inspect.modules import folded
from partjit.inspect.page.comparison import Tally, compare
from partjit.inspect.page.excerpts import Excerpts
from partjit.inspect.page.table import Amount, Cell, amount, chip, nbytes, rows_table
from partjit.inspect.page.trees import Leaf, drawn_tree
from partjit.inspect.suggested import SpecSuggestion
from partjit.plan.ir.nodes import ColocatedCall, Fragment
from partjit.plan.plan import Plan
from partjit.plan.show.folding import shortened
from partjit.render.html import code
from partjit.render.markup import Markup, element, join
from partjit.render.numbers import counted, shown_bytes, shown_duration, shown_flops

__all__ = ["collectives", "comparison", "costs", "findings", "memory", "modules", "plan", "summary"]

_MEMORY_PARTS = ("arguments", "results that are not donated arguments", "temporaries")
_COSTS = 5
_BUFFERS = 200
_SHOWN = 4  # findings of one kind, and lines of one collective, that are not folded


def summary(report: Contents) -> Markup:
    """The most important numbers."""
    flops, moved = report.flops, report.collectives
    peak = max(report.memory, key=lambda memory: memory.peak, default=None)
    about = "" if flops.is_exact else "at least "
    sent = total_bytes(moved)
    predicted = f"predicted {shown_bytes(report.predicted.bytes_per_step)}" if report.compiled else moved.source
    count = len(report.findings)
    bound = "at least " if moved.unknown else "" if sent.is_exact else "about "
    tiles = [
        ("equations", f"{len(report.equations):,}", "including nested ones"),
        ("compute", about + shown_flops(flops.per_device), f"per device, of {shown_flops(flops.total)}"),
        ("sent in a step", bound + shown_bytes(sent.bytes), f"by a device, {predicted}"),
        ("collectives", f"{len(moved):,}", moved.source),
        ("findings", f"{count:,}", "to look at"),
    ]
    tiles += [
        (f"over {' x '.join(axes)}", shown_duration(t), "in a step, as stated") for axes, t in report.seconds.items()
    ]
    if peak is not None:
        most = f"{'about ' if peak.is_estimate else ''}{shown_bytes(peak.peak)}"
        below = (
            f"per device, {peak.shown_bounds or 'estimated'}" if peak.is_estimate else "at most per device, compiled"
        )
        tiles.insert(2, ("memory", most, below))
    drawn = (
        element("div", element("span", name), element("strong", _large(value)), element("span", below))
        for name, value, below in tiles
    )
    return element("div", *drawn, class_="pj-tiles")


def _large(text: str) -> Markup:
    """A number with its unit, and in small type what bounds it."""
    bound = next((word for word in ("about ", "at least ") if text.startswith(word)), "")
    return join([element("small", bound) if bound else "", text.removeprefix(bound)])


def comparison(report: Contents) -> Markup:
    """Predicted collectives by kind and axes, beside the compiled ones."""
    axes = report.mesh.axis_names
    found = compare(report.predicted, report.collectives if report.compiled else None)
    if not found:
        return Markup("")
    columns = ["kind", "axes", "arrays", "moves in a step", "sent in a step"]
    groups, rows = [("", 2), ("predicted", 3)], []
    for c in found:
        row: list[Cell] = [c.kind, _axes(c.axes, axes), *_tallied(c.predicted)]
        if c.compiled is not None:
            reason = element("span", c.reason or "as predicted", class_="pj-why")
            row += [amount(c.compiled.instructions), *_tallied(c.compiled), reason]
        rows.append(row)
    if report.compiled:
        columns += ["instructions", *columns[2:], "why they differ"]
        groups += [("compiled", 4), ("", 1)]
    return rows_table("collectives by kind and axes", columns, rows, is_searched=False, groups=groups)


def _tallied(tally: Tally) -> tuple[Amount, Amount, Amount]:
    return amount(tally.arrays), amount(tally.executions), nbytes(tally.nbytes)


def findings(report: Contents, excerpts: Excerpts) -> Markup:
    """The findings in groups of the same kind and suggestion, in their order."""
    if not report.findings:
        return element("p", "Nothing stands out.", class_="pj-muted-text")
    parts = []
    for (kind, suggestion), group in grouped(report.folded_findings).items():
        text = suggestion[:1].upper() + suggestion[1:]
        head = [element("strong", kind, class_="pj-kind"), element("span", text)]
        count = sum(len(one.findings) for one in group)
        if count > 1:
            head.append(element("small", f"{count:,} of these"))
        rows = [
            element(
                "li",
                element("span", one.text, *([" ", _module(one.module)] if one.module else [])),
                element("span", shown_bytes(one.nbytes), class_="pj-r"),
                excerpts.link(one.site),
                # Fragments have names of values of their own.
                data_value=(one.findings[0].value or None) if report.plan is None else None,
            )
            for one in group
        ]
        listed = [element("ul", join(rows[:_SHOWN]))]
        if rows[_SHOWN:]:
            more = element("summary", f"{len(rows) - _SHOWN:,} more")
            listed.append(element("details", more, element("ul", join(rows[_SHOWN:]))))
        if group[0].effect:
            listed.append(element("p", group[0].effect, class_="pj-effect"))
        parts.append(element("article", element("header", *head), *listed))
    return element("div", *parts, class_="pj-findings")


def suggestions(found: Sequence[SpecSuggestion]) -> Markup:
    """Other specs that were tried, with what they change."""
    note = "Changes of single specs, the best first. Each was tried: the partitioner propagated the program with it."
    rows = [
        element("li", element("span", one.title, class_="pj-mono"), element("span", one.effect, class_="pj-effect"))
        for one in found
    ]
    return element(
        "div", element("p", note, class_="pj-muted-text"), element("ul", join(rows)), class_="pj-suggestions"
    )


def collectives(found: Collectives, axes: Sequence[str], excerpts: Excerpts) -> Markup:
    """A table of collectives, with equal ones in one row."""
    if not found:
        return element("p", f"There are no collectives ({found.source}).", class_="pj-muted-text")
    several = len({c.program for c in found}) > 1
    rows = []
    for group in found.groups():
        c, count = group[0], len(group)
        row: list[Cell] = [
            c.kind,
            _axes(c.axes, axes),
            c.result if c.combined == 1 else f"{c.combined} arrays",
            amount(count),
            _times(c),
            nbytes(count * c.counted_bytes),
            _module(folded(module for one in group for module in one.modules)),
            _lines(c, excerpts),
        ]
        rows.append([*row, c.program] if several else row)
    columns = ("kind", "axes", "result per device", "count", "times", "sent in a step", "module", "line")
    columns = (*columns, "program") if several else columns
    return rows_table(f"{found.source} collectives", columns, rows, filters=(0, 1), total=5)


def _times(c: Collective) -> Amount:
    if c.times is None:
        return Amount(c.shown_times, c.executions)
    return amount(c.times) if c.is_exact else Amount(f"up to {c.times:,}", c.times)


def _lines(c: Collective, excerpts: Excerpts) -> Markup:
    """The lines that a collective comes from, and that of the library."""
    links = [excerpts.link(site) for site in c.sites[:_SHOWN]]
    if len(c.sites) > _SHOWN:
        links.append(element("small", f"and {len(c.sites) - _SHOWN} more"))
    if c.library is not None:
        links.append(element("small", "in ", excerpts.link(c.library)))
    return element("span", *(Markup(f"{link} ") for link in links), class_="pj-wrap") if links else Markup("unknown")


def costs(report: Contents, excerpts: Excerpts) -> Markup:
    """The collectives that send the most, with their shares."""
    moved, total = report.collectives, report.collectives.bytes_per_step
    if not total:
        return Markup("")
    rows = []
    for group in Collectives(taken(moved), moved.source).groups()[:_COSTS]:
        c, sent = group[0], sum(one.counted_bytes for one in group)
        share = element("span", f"{sent / total:.0%}", class_="pj-b", style=f"--w:{100 * sent / total:.0f}%")
        module = _module(folded(module for one in group for module in one.modules))
        what = element("span", f"{c.kind} ", _axes(c.axes, report.mesh.axis_names), " ", module)
        rows.append(element("li", share, what, element("span", shown_bytes(sent), class_="pj-r"), _lines(c, excerpts)))
    return element("section", element("h3", "Sends most"), element("ol", join(rows)), class_="pj-costs")


def modules(found: Collectives) -> Markup:
    """What each module sends in a step, as a tree that folds."""
    leaves = []
    for c in found:
        if not c.modules:
            continue
        members = c.members or (c,)
        whole = sum(member.operand_bytes for member in members) or 1
        for member in members:
            path = tuple((member.module or c.module or "(none)").split("/"))
            leaves.append(Leaf(path, c.counted_bytes * member.operand_bytes / whole, f"{c.kind} {', '.join(c.axes)}"))
    if not leaves:
        return Markup("")
    head = element("summary", f"By module ({found.source})")
    return element("details", head, drawn_tree("sent by module", "array", leaves), class_="pj-fold", open="")


def _module(path: str) -> Markup:
    """The path of a module."""
    return element("span", path, class_="pj-mono pj-module", title=path) if path else Markup("")


def _axes(own: Iterable[str], axes: Sequence[str]) -> Markup:
    """The axes of a collective, each in its color."""
    return Markup(", ".join(chip(axis, axes) for axis in own) or "-")


def memory(report: Contents, excerpts: Excerpts) -> Markup:
    """The memory and FLOPs of each program on a device, and what is alive at the highest peak."""
    of_program = {memory.program: memory for memory in report.memory}
    units = {unit.unit.name: unit for unit in report.compiled}
    most = max((memory.peak for memory in report.memory), default=0)
    rows = []
    for program in report.programs:
        name, held = program.unit.name, of_program.get(program.unit.name)
        row: list[Cell] = [name, amount(program.unit.times), amount(len(program.inlined.equations))]
        if held is None:
            row += [nbytes(None)] * 4 + ["", ""]
        else:
            row += [nbytes(held.arguments), nbytes(held.donated), nbytes(held.results), nbytes(held.peak)]
            estimated = f"estimated, {held.shown_bounds}" if held.unknown else "estimated"
            row += [_bar(held, most), estimated if held.is_estimate else "compiled"]
        if report.compiled:
            row.append(amount(units[name].flops) if name in units else amount(None))
        rows.append(row)
    columns = ["program", "in a step", "equations", "arguments", "donated", "results", "peak", "", "source"]
    columns += ["FLOPs by XLA"] if report.compiled else []
    is_searched = len(rows) > _SHOWN
    table = rows_table("memory and FLOPs of each program, per device", columns, rows, is_searched=is_searched)
    legend = (element("span", element("i", class_=f"pj-bar{k}"), f" {name}") for k, name in enumerate(_MEMORY_PARTS))
    return join([table, element("p", *legend, class_="pj-legend"), _buffers(report, excerpts)])


def _buffers(report: Contents, excerpts: Excerpts) -> Markup:
    """The temporaries at the highest peak, as they are estimated."""
    highest = max(report.estimates, key=lambda held: held.peak)
    if not highest.buffers:
        return Markup("")
    rows: list[list[Cell]] = []
    for buffer in highest.buffers[:_BUFFERS]:
        value, equation = buffer.value, buffer.equation
        what = "saved for the backward pass" if buffer.is_saved else "temporary"
        rows.append(
            [
                element("b", "" if value is None else value.name, class_="pj-mono"),
                element("span", "" if value is None else value.shown_type, class_="pj-mono"),
                nbytes(buffer.nbytes),
                f"within {equation.primitive}" if value is None else what,
                equation.primitive,
                _module(equation.module),
                excerpts.link(equation.site),
            ]
        )
    count, all_of = len(highest.buffers), shown_bytes(sum(buffer.nbytes for buffer in highest.buffers))
    least = f", the {_BUFFERS} largest" if count > _BUFFERS else ""
    of = f" of {highest.program}" if len(report.programs) > 1 else ""
    head = f"Alive at the peak{of}, besides arguments and results: {counted(count, 'buffer')}, {all_of}{least}"
    columns = ("value", "type", "per device", "what", "computed by", "module", "line")
    table = rows_table("buffers at the peak", columns, rows, filters=(3,), total=2)
    return element("details", element("summary", head), table, class_="pj-fold")


def _bar(held: Memory, most: int) -> Markup:
    """A bar with the parts of the peak."""
    results = max(0, held.results - held.donated)
    sizes = held.arguments, results, max(0, held.peak - held.arguments - results)
    parts = (
        element("i", class_=f"pj-bar{k}", style=f"width:{100 * size / max(most, 1):.1f}%")
        for k, size in enumerate(sizes)
        if size
    )
    tooltip = ", ".join(f"{name} {shown_bytes(size)}" for name, size in zip(_MEMORY_PARTS, sizes, strict=True))
    return element("div", *parts, class_="pj-bar", title=tooltip)


def plan(of: Plan, excerpts: Excerpts) -> Markup:
    """The plan of a program with calls: its picture, its source, its fragments and calls."""
    fragments, calls = [], []
    for node in (*of.fragments, *of.calls):
        sizes = nbytes(sum(v.nbytes for v in node.inputs)), nbytes(sum(v.nbytes for v in node.outputs))
        if isinstance(node, Fragment):
            donated = (value.name for value, given in zip(node.inputs, node.donated, strict=True) if given)
            fragments.append((node.name, amount(len(node.jaxpr.eqns)), *sizes, ", ".join(donated)))
        elif isinstance(node, ColocatedCall):
            calls.append((node.name, node.callee.name, node.where, *sizes, excerpts.link(node.site)))
    parts = [element("div", Markup(of.to_svg()), class_="pj-wide"), code(shortened(of.source))]
    if fragments:
        columns = ("fragment", "equations", "in", "out", "donated")
        parts.append(rows_table("fragments", columns, fragments, is_searched=len(fragments) > _SHOWN))
    if calls:
        columns = ("call", "function", "runs", "in", "out", "called at")
        parts.append(rows_table("calls", columns, calls, is_searched=len(calls) > _SHOWN))
    return join(parts)
