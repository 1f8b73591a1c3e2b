"""What a report has about one module: its parameters, values, collectives and findings."""

import dataclasses
import difflib

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedValue
from partjit.inspect.contents import Collectives, Contents
from partjit.inspect.findings import Finding
from partjit.inspect.modules import is_within
from partjit.inspect.user_lines import shown_lines
from partjit.inspect.why.key_paths import keys_of
from partjit.inspect.why.lookup import ValueNotFoundError
from partjit.render.html import code, fragment
from partjit.render.numbers import counted, shown_bytes
from partjit.render.text import table

__all__ = ["ScopeReport", "find_scope"]

_MOST = 20


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ScopeReport:
    """What belongs to a module; its text is tables.

    Attributes:
        name: as it was searched.
        parameters: the arguments whose paths lead through it.
        equations: those that are computed in it.
        collectives: those it needs.
        findings: those about it.
    """

    name: str
    parameters: tuple[AnnotatedValue, ...]
    equations: tuple[AnnotatedEquation, ...]
    collectives: Collectives
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        sent = shown_bytes(self.collectives.bytes_per_step)
        equations, parameters = counted(len(self.equations), "equation"), counted(len(self.parameters), "parameter")
        parts = [f"{self.name}: {equations}, {parameters}; a device sends {sent} per step"]
        arrays = [
            (value.path or value.name, value.shown_type, value.shown_spec, shown_bytes(value.nbytes_per_device))
            for value in self.parameters
        ]
        if arrays:
            parts.append(table(("parameter", "type", "spec", "per device"), arrays, _MOST))
        rows = [
            (
                *(value.name, value.shown_type, value.shown_spec, shown_bytes(value.nbytes_per_device)),
                *(equation.primitive, equation.module, shown_lines(equation.site, equation.library)),
            )
            for equation in self.equations
            for value in equation.outputs
            if value.is_array and not equation.bodies
        ]
        if rows:
            columns = ("value", "type", "spec", "per device", "primitive", "module", "line")
            parts.append(table(columns, rows, _MOST))
        if self.collectives:
            parts.append(self.collectives.to_text(_MOST))
        parts += map(str, self.findings)
        return "\n\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return fragment(code(str(self)))


def find_scope(report: Contents, name: str) -> ScopeReport:
    """What a report has about a module; see `Report.find`.

    Raises:
        ValueNotFoundError: there is no such module.
    """
    found = ScopeReport(
        name,
        tuple(
            v for v in report.whole.tree.inputs if v.is_array and is_within("/".join(keys_of(v.path or "") or ()), name)
        ),
        tuple(equation for equation in report.equations if is_within(equation.module, name)),
        Collectives(
            [c for c in report.collectives if any(is_within(module, name) for module in c.modules)],
            report.collectives.source,
        ),
        tuple(finding for finding in report.findings if is_within(finding.module, name)),
    )
    if not (found.parameters or found.equations or found.collectives or found.findings):
        known = sorted({equation.module for equation in report.equations if equation.module})
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or known[:5]
        there = f"; there are {', '.join(close)}" if close else "; the program has no scopes and no trees of parameters"
        raise ValueNotFoundError(f"there is no module {name!r} in the program{there}")
    return found
