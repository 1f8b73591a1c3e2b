"""`explain`: from a function and its arguments to a report."""

from collections.abc import Mapping

from jax.sharding import Mesh

from partjit.checks import require_flag, require_mesh_type, require_number, wrong_value
from partjit.inspect.collectives import repeated
from partjit.inspect.compiled import compile_unit
from partjit.inspect.contents import Collectives
from partjit.inspect.findings import findings_of
from partjit.inspect.findings_of_calls import findings_of_calls
from partjit.inspect.findings_of_xla import findings_of_xla
from partjit.inspect.flops import flops_of
from partjit.inspect.memory import estimate_memory
from partjit.inspect.predicted import predict
from partjit.inspect.propagation import partition
from partjit.inspect.report import Report
from partjit.inspect.tracing import fragments_of, trace_function

__all__ = ["explain"]

_LARGE = 1 << 16


def explain(
    fun: object,
    *args: object,
    mesh: Mesh | None = None,
    compiled: bool = False,
    large: int | None = None,
    bandwidth: float | Mapping[str, float] | None = None,
    **kwargs: object,
) -> Report:
    """Reports how a function is partitioned: the sharding of each value and why, the collectives, memory and FLOPs.

    Nothing is executed, and nothing is compiled unless requested: the partitioner's propagation is run on the lowered
    program, which takes a small part of the time.

    Args:
        fun: a function of `pjit` or `jax.jit`, a plain one, or what their `trace` returned.
        *args, **kwargs: its arguments, trees of arrays or of `jax.ShapeDtypeStruct`s, with a sharding where an array
            would be committed to one.
        mesh: the ambient mesh of the call, or None for the one that is set.
        compiled: whether to compile it as well, and to read collectives, memory and XLA's warnings from the result.
        large: the number of bytes from which a replicated value is a finding; by default 1 % of the memory of the
            program, but at least 64 kB.
        bandwidth: the bytes per second that a device sends, or those of each axis of the mesh by name. The report then
            says how long the collectives over each axis take, one after the other.

    Returns:
        The report. At a prompt it shows tables, in a notebook a page.

    Raises:
        TypeError: `fun` is no function, `mesh` no mesh, or an argument no array.
        ValueError: the call itself would raise it, for a spec that does not fit for instance.

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
        require_mesh_type("explain", "mesh", mesh)
    compiled = require_flag("explain", "compiled", compiled)
    if large is not None:
        require_number("explain", "large", large, "a number of bytes")
    _check_bandwidth(bandwidth)
    traced = trace_function(fun, args, kwargs, mesh)
    whole = partition(traced.whole, keep_text=True)
    if traced.plan is None:
        programs, donated = (whole,), (traced.donated,)
    else:
        programs = tuple(map(partition, fragments_of(traced.plan)))
        donated = tuple(fragment.donated_arguments for fragment in traced.plan.fragments)
    predictions = [predict(program) for program in programs]
    predicted = [
        [repeated(c, program.unit.times) for c in prediction.collectives]
        for program, prediction in zip(programs, predictions, strict=True)
    ]
    unknown = [
        repeated(move, program.unit.times)
        for program, prediction in zip(programs, predictions, strict=True)
        for move in prediction.unknown
    ]
    estimates = [
        estimate_memory(program, flags, prediction.collectives)
        for program, flags, prediction in zip(programs, donated, predictions, strict=True)
    ]
    if large is None:
        large = max(_LARGE, max(estimate.peak for estimate in estimates) // 100)
    units = [compile_unit(program.unit, flags) for program, flags in zip(programs, donated, strict=True) if compiled]
    findings = [
        finding
        for program, collectives in zip(programs, predicted, strict=True)
        for finding in findings_of(program, collectives, large)
    ]
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
        Collectives([c for collectives in predicted for c in collectives], "predicted", unknown),
        tuple(units),
        (*warnings, *(() if traced.plan is None else findings_of_calls(traced.plan))),
        tuple(findings),
        tuple(estimates),
        flops_of(whole.tree),
        donated[0] if traced.plan is None else (),
        large,
        bandwidth,
    )


def _check_bandwidth(bandwidth: object) -> None:
    expected = "a number of bytes per second above 0, or one for each axis of the mesh by name"
    for value in bandwidth.values() if isinstance(bandwidth, Mapping) else [bandwidth]:
        if bandwidth is not None and require_number("explain", "bandwidth", value, expected) <= 0:
            raise wrong_value("explain", "bandwidth", value, expected)
