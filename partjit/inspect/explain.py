"""`explain`: from a function and its arguments to a report."""

import dataclasses
from collections.abc import Mapping
from typing import cast

from jax.sharding import AbstractMesh, Mesh

from partjit.checks import require, require_flag, require_mesh_type, require_number, wrong_value
from partjit.devices import no_devices
from partjit.inspect.collector import without_collections
from partjit.inspect.compiled import compile_unit
from partjit.inspect.findings_of_calls import findings_of_calls
from partjit.inspect.findings_of_xla import findings_of_xla
from partjit.inspect.predicted import predict
from partjit.inspect.propagation import Partitioned, partition
from partjit.inspect.report import Report
from partjit.inspect.times import given_trip_count
from partjit.inspect.tracing import fragments_of, trace_function
from partjit.inspect.user_lines import shown_line
from partjit.mesh import is_abstract_mesh

__all__ = ["explain"]


def explain(
    fun: object,
    *args: object,
    mesh: Mesh | AbstractMesh | None = None,
    compiled: bool = False,
    large: int | None = None,
    bandwidth: float | Mapping[str, float] | None = None,
    iterations: Mapping[str, int] | None = None,
    **kwargs: object,
) -> Report:
    """Reports how a function is partitioned: the sharding of each value and why, the collectives, memory and FLOPs.

    Nothing is executed, and nothing is compiled unless requested: the partitioner's propagation is run on the lowered
    program, which takes a small part of the time.

    Args:
        fun: a function of `pjit` or `jax.jit`, a plain one, or what their `trace` returned.
        *args, **kwargs: its arguments, trees of arrays or of `jax.ShapeDtypeStruct`s, with a sharding where an array
            would be committed to one.
        mesh: the ambient mesh of the call, or None for the one that is set. An `AbstractMesh` will do for all but
            `compiled`: no devices are needed.
        compiled: whether to compile it as well, and to read collectives, memory and XLA's warnings from the result.
        large: the number of bytes from which a replicated value is a finding; by default 1 % of the memory of the
            program, but at least 64 kB.
        bandwidth: the bytes per second that a device sends, or those of each axis of the mesh by name. The report then
            says how long the collectives over each axis take, one after the other.
        iterations: the trip counts of `while_loop`s that the program does not say, by the line of the loop:
            `{"model.py:12": 100}`. Without it, what such a loop does counts per iteration.

    Returns:
        The report. At a prompt it shows tables, in a notebook a page.

    Raises:
        TypeError: `fun` is no function, `mesh` no mesh, or an argument no array.
        ValueError: the call itself would raise it, for a spec that does not fit for instance.
        MissingMeshError: it is to be compiled for an abstract mesh.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> from partjit import Mesh, P, pjit
        >>> from partjit.inspect import explain
        >>> mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
        >>> @pjit(in_shardings=(P("data"), P(None, "model")), out_shardings=P("data"))
        ... def layer(x, w):
        ...     return jnp.tanh(x @ w)
        >>> report = explain(layer, np.ones((8, 16), np.float32), np.ones((16, 4), np.float32), mesh=mesh)
        >>> [(value.path, *value.spec) for value in report.whole.tree.inputs]
        [('x', 'data', None), ('w', None, 'model')]
        >>> [(collective.kind, collective.axes) for collective in report.collectives]
        [('all-gather', ('model',))]

    Source: Shardy's propagation, https://openxla.org/shardy.
    """
    if mesh is not None:
        require_mesh_type("explain", "mesh", mesh, or_abstract=True)
    compiled = require_flag("explain", "compiled", compiled)
    if large is not None:
        require_number("explain", "large", large, "a number of bytes")
    _check_bandwidth(bandwidth)
    given = {} if iterations is None else _checked(iterations)
    traced = trace_function(fun, args, kwargs, mesh)
    _require_axes(bandwidth, traced.whole.mesh)
    if compiled and is_abstract_mesh(traced.whole.mesh):
        raise no_devices("explain: compiled=True needs devices to compile for", traced.whole.mesh)
    with without_collections():
        whole = partition(dataclasses.replace(traced.whole, iterations=given), keep_text=True)
        _require_loops(given, whole)
        if traced.plan is None:
            programs, donated = (whole,), (traced.donated,)
        else:
            units_of_plan = (dataclasses.replace(unit, iterations=given) for unit in fragments_of(traced.plan))
            programs = tuple(map(partition, units_of_plan))
            donated = tuple(fragment.donated_arguments for fragment in traced.plan.fragments)
        predictions = tuple(map(predict, programs))
    units = [compile_unit(program.unit, flags) for program, flags in zip(programs, donated, strict=True) if compiled]
    warnings = [
        finding
        for program, unit in zip(programs, units, strict=False)  # nothing is compiled unless requested
        for finding in findings_of_xla(program, unit.rematerializations)
    ]
    return Report(
        traced.whole.name,
        whole,
        programs,
        traced.plan,
        donated,
        predictions,
        tuple(units),
        (*warnings, *(() if traced.plan is None else findings_of_calls(traced.plan))),
        large,
        bandwidth,
        traced.donated,
    )


def _checked(iterations: object) -> dict[str, int]:
    expected = "a dict from lines of loops, such as 'model.py:12', to numbers of iterations"
    require("explain", "iterations", iterations, Mapping, expected)
    given = dict(cast(Mapping[object, object], iterations))
    for line, count in given.items():
        if not isinstance(line, str) or not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise wrong_value("explain", "iterations", iterations, expected)
    return cast(dict[str, int], given)


def _require_loops(iterations: Mapping[str, int], program: Partitioned) -> None:
    """Refuses lines where there is no loop."""
    if not iterations:
        return
    loops = {equation.site for equation in program.tree.walk() if equation.primitive == "while"} - {None}
    wrong = [line for line in iterations if not any(given_trip_count(site, {line: 0}) == 0 for site in loops)]
    if wrong:
        there = ", ".join(sorted(map(shown_line, loops))) or "none"
        raise ValueError(f"explain: iterations names {', '.join(wrong)}, where no while_loop is; there are {there}")


def _check_bandwidth(bandwidth: object) -> None:
    expected = "a number of bytes per second above 0, or one for each axis of the mesh by name"
    for value in bandwidth.values() if isinstance(bandwidth, Mapping) else [bandwidth]:
        if bandwidth is not None and require_number("explain", "bandwidth", value, expected) <= 0:
            raise wrong_value("explain", "bandwidth", value, expected)


def _require_axes(bandwidth: object, mesh: Mesh | AbstractMesh) -> None:
    """Refuses bandwidths of other axes than those of the mesh: nothing, or too little, would be said of the latter."""
    if not isinstance(bandwidth, Mapping):
        return
    needed = {axis for axis, size in mesh.shape.items() if size > 1}
    if not needed <= {*bandwidth} <= {*mesh.axis_names}:
        raise ValueError(
            f"explain: bandwidth is given for {', '.join(map(str, bandwidth)) or 'no axis'}, but the axes of the mesh "
            f"are {', '.join(mesh.axis_names) or 'none'}: give one for each of them, or a number for all"
        )
