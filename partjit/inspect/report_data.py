"""A report as plain data: what `--json` prints, a stable format for other programs."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, TypeAlias

from partjit.inspect.annotated import AnnotatedValue
from partjit.inspect.collectives import Collective, UnknownMove, total_bytes
from partjit.inspect.contents import Contents
from partjit.inspect.folded_findings import FoldedFinding
from partjit.inspect.memory import Memory
from partjit.inspect.page.comparison import Comparison, Tally, compare
from partjit.inspect.times import Times
from partjit.inspect.user_lines import Site
from partjit.plan.ir.nodes import ColocatedCall, Fragment, Value
from partjit.plan.plan import Plan

__all__ = ["VERSION", "Data", "as_data"]

Data: TypeAlias = dict[str, Any]
"""An object of JSON."""

VERSION = 1
"""Incremented when a key is removed or changes its meaning, not when one is added."""


def as_data(report: Contents) -> Data:
    """A report as dicts, lists, strings and numbers that `json.dumps` takes as they are.

    Sizes are in bytes and FLOPs; those per device are of the device with the most. Unknown values are None.

    Args:
        report: a `partjit.inspect.report.Report`.

    Returns:
        A dict of these:

        * `version`: of this format.
        * `name`: of the function.
        * `mesh`: the sizes of the axes, by name, major to minor; empty without a mesh.
        * `equations`: their number, nested ones included.
        * `arguments`, `results`: for each array its `path`, `shape`, `dtype`, `spec` (for each dimension the axes that
          shard it, major to minor), `shard_shape` (of the largest shard), `nbytes` and `nbytes_per_device`.
        * `collectives`: `source` ("predicted" or "compiled"), `bytes_per_step`, `bytes_per_step_at_most`; `unknown`,
          the moves that are predicted only within bounds; `predicted` and `compiled`, None if
          nothing was compiled: lists of `kind`, `axes`, `group_size`, `operand`, `result`, `arrays`, `bytes_moved`,
          `times`, `per` (where that is unknown: `times` per iteration of `loops`), `is_exact`,
          `bytes_per_step`, `module`, `site`, `library` (the line of an installed package that the site calls),
          `sites`, `program` and `name`; `comparison`: for each kind and
          axes the `instructions`, `arrays`, `executions`, `bytes_per_step` and element `types`, `predicted` and
          `compiled`, and the `reason` why they differ.
        * `findings`: `kind`, `nbytes`, `text`, `suggestion`, `effect`, `share` (of the operations of a device, if it
          is about these), `module`, `site` and `value`, what matters most first.
        * `folded_findings`: the same, those that repeat from layer to layer as one: `kind`, `count`, `nbytes`, `text`,
          `suggestion`, `effect`, `module` ("layers/{0-23}/w"), `site` and `values`.
        * `memory`: for each program `program`, `arguments`, `results`, `donated`, `peak`, `is_estimate`,
          `saved` for the backward pass, other `temporaries`, `unknown`: what the estimate depends on, `at_least` and
          `at_most`: what the peak is between (None if it has no upper bound), and `buffers`, the temporaries at the
          estimated peak, the largest first: `value` (None for what an equation needs besides its operands and results),
          `primitive`, `nbytes`, `is_saved`, `module` and `site`.
        * `flops`: `total`, `per_device` and `is_exact`.
        * `network`: how many `seconds` the collectives over `axes` take at the stated bandwidth; empty without one.
        * `programs`: those that are compiled: `name`, `turns` (how often it runs in a step), `equations`, and
          `xla_flops`, as XLA counts them per device, if it was compiled.
        * `plan`: None if the program makes no colocated calls; otherwise its `source`, `fragments` (`name`,
          `equations`, `bytes_in`, `bytes_out`) and `calls` (`name`, `function`, `where`, `bytes_in`, `bytes_out`,
          `site`).

        A site is a line of the user's code: `file`, `line` and `function`, or None.

    Example:
        >>> import jax.numpy as jnp
        >>> from partjit.inspect.explain import explain
        >>> data = as_data(explain(lambda x: 2 * x, jnp.ones(8)))
        >>> data["name"], data["arguments"][0]["path"], data["flops"]["total"]
        ('<lambda>', 'x', 8.0)
    """
    xla_flops = {unit.unit.name: _number(unit.flops) for unit in report.compiled}
    findings = ((vars(finding), finding.site, finding.value) for finding in report.findings)
    return {
        "version": VERSION,
        "name": report.name,
        "mesh": {str(axis): int(size) for axis, size in report.mesh.shape.items()},
        "equations": len(report.equations),
        "arguments": [*map(_value, (v for v in report.whole.tree.inputs if v.is_array))],
        "results": [*map(_value, (v for v in report.whole.results if v.is_array))],
        "collectives": _collectives(report),
        "folded_findings": [*map(_folded, report.folded_findings)],
        "findings": [{**fields, "site": _site(site), "value": value or None} for fields, site, value in findings],
        "memory": [*map(_memory, report.memory)],
        "flops": {**report.flops._asdict(), **{key: _number(getattr(report.flops, key)) for key in _FLOPS}},
        "network": [{"axes": [*axes], "seconds": float(time)} for axes, time in report.seconds.items()],
        "programs": [
            {
                "name": program.unit.name,
                "turns": program.unit.times,
                "equations": len(program.inlined.equations),
                "xla_flops": xla_flops.get(program.unit.name),
            }
            for program in report.programs
        ],
        "plan": None if report.plan is None else _plan(report.plan),
    }


_FLOPS = ("total", "per_device")


def _memory(memory: Memory) -> Data:
    buffers = [
        {
            "value": None if buffer.value is None else buffer.value.name,
            "primitive": buffer.equation.primitive,
            "nbytes": int(buffer.nbytes),
            "is_saved": buffer.is_saved,
            "module": buffer.equation.module,
            "site": _site(buffer.equation.site),
        }
        for buffer in memory.buffers
    ]
    return {**vars(memory), "unknown": [*memory.unknown], "buffers": buffers}


def _value(value: AnnotatedValue) -> Data:
    sharding = value.sharding
    return {
        "path": value.path,
        "shape": [*map(int, value.aval.shape)],
        "dtype": str(value.aval.dtype),
        "spec": None if sharding is None else [[*axes] for axes in sharding.axes[: len(value.aval.shape)]],
        "shard_shape": [*map(int, value.shard_shape)],
        "nbytes": int(value.nbytes),
        "nbytes_per_device": int(value.nbytes_per_device),
    }


def _collectives(report: Contents) -> Data:
    compiled = [*report.collectives] if report.compiled else None
    return {
        "source": report.collectives.source,
        "bytes_per_step": _number(total_bytes(report.collectives).bytes),
        "bytes_per_step_at_most": _number(report.collectives.bytes_per_step_at_most),
        "unknown": [*map(_unknown, report.predicted.unknown)],
        "predicted": [*map(_collective, report.predicted)],
        "compiled": None if compiled is None else [*map(_collective, compiled)],
        "comparison": [*map(_comparison, compare(report.predicted, compiled))],
    }


_OF_COLLECTIVE = ("kind", "group_size", "operand", "result", "times", "is_exact", "module", "program", "name")


def _collective(collective: Collective) -> Data:
    return {
        **{key: getattr(collective, key) for key in _OF_COLLECTIVE},
        "axes": [*collective.axes],
        "arrays": collective.combined,
        "bytes_moved": _number(collective.bytes_moved),
        "per": None if collective.per is None else _per(collective.per),
        "bytes_per_step": _number(collective.bytes_per_step),
        "site": _site(collective.site),
        "library": _site(collective.library),
        "sites": [*map(_site, collective.sites)],
    }


def _unknown(move: UnknownMove) -> Data:
    names = ("operation", "bytes_at_most", "times", "module", "program")
    return {**{name: getattr(move, name) for name in names}, "site": _site(move.site)}


def _per(times: Times) -> Data:
    return {"times": times.known, "loops": [*map(_site, times.loops)]}


def _comparison(found: Comparison) -> Data:
    return {
        **vars(found),
        "axes": [*found.axes],
        "predicted": _tally(found.predicted),
        "compiled": None if found.compiled is None else _tally(found.compiled),
    }


def _tally(tally: Tally) -> Data:
    counts = dataclasses.asdict(tally)
    nbytes = counts.pop("nbytes")
    return {**counts, "types": [*tally.types], "bytes_per_step": _number(nbytes)}


def _plan(plan: Plan) -> Data:
    fragments, calls = [], []
    for node in (*plan.fragments, *plan.calls):
        sizes = {"bytes_in": _nbytes(node.inputs), "bytes_out": _nbytes(node.outputs)}
        if isinstance(node, Fragment):
            fragments.append({"name": node.name, "equations": len(node.jaxpr.eqns), **sizes})
        elif isinstance(node, ColocatedCall):
            names = {"name": node.name, "function": node.callee.name, "where": node.where}
            calls.append({**names, **sizes, "site": _site(node.site)})
    return {"source": plan.source, "fragments": fragments, "calls": calls}


def _nbytes(values: Iterable[Value]) -> int:
    return int(sum(value.nbytes for value in values))


def _folded(one: FoldedFinding) -> Data:
    return {
        "kind": one.kind,
        "count": len(one.findings),
        "nbytes": one.nbytes,
        "text": one.text,
        "suggestion": one.suggestion,
        "effect": one.effect,
        "module": one.module,
        "site": _site(one.site),
        "values": [finding.value or None for finding in one.findings],
    }


def _site(site: Site | None) -> Data | None:
    return None if site is None else {"file": site[0], "line": int(site[1]), "function": site[2]}


def _number(value: float | None) -> float | None:
    """A number that JSON can represent: neither infinite nor NaN."""
    return float(value) if value is not None and math.isfinite(value) else None
