"""The sections of the page of a report."""

from collections.abc import Iterable, Sequence

from partjit.inspect.collectives import total_bytes
from partjit.inspect.contents import Collectives, Contents
from partjit.inspect.findings import grouped
from partjit.inspect.memory import Memory
from partjit.inspect.modules import folded
from partjit.inspect.page.comparison import Tally, compare
from partjit.inspect.page.excerpts import Excerpts
from partjit.inspect.page.table import Amount, Cell, amount, chip, nbytes, rows_table
from partjit.plan.ir.nodes import ColocatedCall, Fragment
from partjit.plan.plan import Plan
from partjit.render.html import code
from partjit.render.markup import Markup, element, join
from partjit.render.numbers import shown_bytes, shown_flops

__all__ = ["collectives", "comparison", "findings", "memory", "plan", "summary"]

_MEMORY_PARTS = ("arguments", "results that are not donated arguments", "temporaries")
_SHOWN = 4  # findings of one kind, and lines of one collective, that are not folded


def summary(report: Contents) -> Markup:
    """The most important numbers."""
    flops, moved = report.flops, report.collectives
    peak = max(report.memory, key=lambda memory: memory.peak, default=None)
    about = "" if flops.is_exact else "at least "
    sent = total_bytes(moved)
    predicted = f"predicted {shown_bytes(report.predicted.bytes_per_step)}" if report.compiled else moved.source
    count = len(report.findings)
    tiles = [
        ("equations", f"{len(report.equations):,}", "including nested ones"),
        ("compute", about + shown_flops(flops.per_device), f"per device, of {shown_flops(flops.total)}"),
        ("sent in a step", ("" if sent.is_exact else "about ") + shown_bytes(sent.bytes), f"by a device, {predicted}"),
        ("collectives", f"{len(moved):,}", moved.source),
        ("findings", f"{count:,}", "to look at"),
    ]
    if peak is not None:
        most = f"{'about ' if peak.is_estimate else ''}{shown_bytes(peak.peak)}"
        tiles.insert(2, ("memory", most, f"at most per device, {'estimated' if peak.is_estimate else 'compiled'}"))
    drawn = (
        element("div", element("span", name), element("strong", value), element("span", below))
        for name, value, below in tiles
    )
    return element("div", *drawn, class_="pj-tiles")


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
    """The findings in groups of the same kind and suggestion, those of most bytes first."""
    if not report.findings:
        return element("p", "Nothing stands out.", class_="pj-muted-text")
    parts = []
    for (kind, suggestion), group in grouped(report.findings).items():
        text = suggestion[:1].upper() + suggestion[1:]
        head = [element("strong", kind, class_="pj-kind"), element("span", text)]
        if len(group) > 1:
            head.append(element("small", f"{len(group):,} of these"))
        rows = [
            element(
                "li",
                element("span", finding.text, *([" ", _module(finding.module)] if finding.module else [])),
                element("span", shown_bytes(finding.nbytes), class_="pj-r"),
                excerpts.link(finding.site),
                # Fragments have names of values of their own.
                data_value=(finding.value or None) if report.plan is None else None,
            )
            for finding in group
        ]
        listed = [element("ul", join(rows[:_SHOWN]))]
        if rows[_SHOWN:]:
            more = element("summary", f"{len(rows) - _SHOWN:,} more")
            listed.append(element("details", more, element("ul", join(rows[_SHOWN:]))))
        parts.append(element("article", element("header", *head), *listed))
    return element("div", *parts, class_="pj-findings")


def collectives(found: Collectives, axes: Sequence[str], excerpts: Excerpts) -> Markup:
    """A table of collectives, with equal ones in one row."""
    columns = ("kind", "axes", "devices", "result per device", "count", "times", "sent once", "sent in a step")
    rows = []
    for group in found.groups():
        c, count = group[0], len(group)
        links = [excerpts.link(site) for site in c.sites[:_SHOWN]]
        if c.library is not None:
            links.append(element("small", "in ", excerpts.link(c.library)))
        if len(c.sites) > _SHOWN:
            links.append(element("small", f"and {len(c.sites) - _SHOWN} more"))
        times = amount(c.times) if c.is_exact or c.times is None else Amount(f"up to {c.times:,}", c.times)
        rows.append(
            (
                c.kind,
                _axes(c.axes, axes),
                amount(c.group_size),
                c.result if c.combined == 1 else f"{c.combined} arrays",
                amount(count),
                times,
                nbytes(count * c.bytes_moved),
                nbytes(None if c.bytes_per_step is None else count * c.bytes_per_step),
                join(Markup(f"{link} ") for link in links) if links else "unknown",
                c.site[2] if c.site else "",
                _module(folded(module for one in group for module in one.modules)),
                c.program,
            )
        )
    if not rows:
        return element("p", f"There are no collectives ({found.source}).", class_="pj-muted-text")
    columns = (*columns, "line", "function", "module", "program")
    return rows_table(f"{found.source} collectives", columns, rows, filters=(0, 1), total=7)


def _module(path: str) -> Markup:
    """The path of a module."""
    return element("span", path, class_="pj-mono pj-module", title=path) if path else Markup("")


def _axes(own: Iterable[str], axes: Sequence[str]) -> Markup:
    """The axes of a collective, each in its color."""
    return Markup(", ".join(chip(axis, axes) for axis in own) or "-")


def memory(report: Contents) -> Markup:
    """The memory and FLOPs of each program on a device."""
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
            row += [_bar(held, most), "estimated" if held.is_estimate else "compiled"]
        if report.compiled:
            row.append(amount(units[name].flops) if name in units else amount(None))
        rows.append(row)
    columns = ["program", "in a step", "equations", "arguments", "donated", "results", "peak", "", "source"]
    columns += ["FLOPs by XLA"] if report.compiled else []
    is_searched = len(rows) > _SHOWN
    table = rows_table("memory and FLOPs of each program, per device", columns, rows, is_searched=is_searched)
    legend = (element("span", element("i", class_=f"pj-bar{k}"), f" {name}") for k, name in enumerate(_MEMORY_PARTS))
    return join([table, element("p", *legend, class_="pj-legend")])


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
    parts = [element("div", Markup(of.to_svg()), class_="pj-wide"), code(of.source)]
    if fragments:
        columns = ("fragment", "equations", "in", "out", "donated")
        parts.append(rows_table("fragments", columns, fragments, is_searched=len(fragments) > _SHOWN))
    if calls:
        columns = ("call", "function", "runs", "in", "out", "called at")
        parts.append(rows_table("calls", columns, calls, is_searched=len(calls) > _SHOWN))
    return join(parts)
