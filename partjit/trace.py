"""From a function and the types of its arguments to a jaxpr.

Tracing is cached on the function, the types, the static arguments and the mesh, and on nothing else: two pjits of one
function with other specs share one trace, because specs do not change what the function computes.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from partjit._jax.caches import weakref_cache
from partjit._jax.tracing import ShardingTypeError, name_results, separate_consts, trace_to_jaxpr
from partjit._jax.types import PyTree, PyTreeDef
from partjit.arguments import Function, Statics, flattened_results, name_of
from partjit.host_objects import check_returned, explaining_misuse
from partjit.mesh import explicit_axes, tracing_under

__all__ = ["TRACE_EVENT", "Trace", "trace", "with_static"]

TRACE_EVENT = "/jax/core/compile/jaxpr_trace_duration"


@dataclasses.dataclass(frozen=True)
class Trace:
    """A traced function.

    Attributes:
        jaxpr: the closed jaxpr of flat arguments and results, `consts` being its leading arguments.
        consts: the values of outer traces (and refs) the function closes over.
        out_tree: the structure of its result.
        out_paths: the key path of each flat result: `result['loss']`.
    """

    jaxpr: ClosedJaxpr
    consts: list[object]
    out_tree: PyTreeDef
    out_paths: tuple[str, ...]


def with_static(
    in_tree: PyTreeDef, leaves: Sequence[object], static: Statics
) -> tuple[list[PyTree], dict[str, PyTree]]:
    """The arguments `(args, kwargs)` of a function, from flat arguments and static ones."""
    args, kwargs = jax.tree.unflatten(in_tree, leaves)
    args = list(args)
    for key, value, _ in static:
        if isinstance(key, int):
            args.insert(key, value)
        else:
            kwargs[key] = value
    return args, kwargs


@contextlib.contextmanager
def _explaining_refusals(name: str, mesh: Mesh) -> Iterator[None]:
    """Adds what to do to jax's error about types that do not determine the sharding of a result."""
    try:
        yield
    except ShardingTypeError as error:
        axes = ", ".join(name for name in mesh.axis_names if name in explicit_axes(mesh))
        if axes and not any("are Explicit" in note for note in getattr(error, "__notes__", ())):
            error.add_note(
                f"{name} is traced on a mesh whose axes {axes} are Explicit, as jax.make_mesh makes them: there the "
                "types of values have to determine how each result is sharded. To leave that to the partitioner, give "
                "the mesh Auto axes: partjit.Mesh(mesh.devices, mesh.axis_names), or axis_types= of jax.make_mesh; for "
                "a part of the program, wrap it with jax.sharding.auto_axes"
            )
        raise


@weakref_cache
def trace(
    fun: Function,
    in_tree: PyTreeDef,
    in_avals: tuple[AbstractValue, ...],
    static: Statics,
    arg_names: tuple[str, ...],
    source: str,
    mesh: Mesh,
) -> Trace:
    """Traces `fun` once for these types, static arguments and mesh; an exception of `fun` is not cached."""
    out_paths: tuple[str, ...] = ()
    out_tree = None

    def flat_fun(*leaves: object) -> list[object]:
        nonlocal out_paths, out_tree
        args, kwargs = with_static(in_tree, leaves, static)
        returned = fun(*args, **kwargs)
        results, out_paths, out_tree = flattened_results(returned, name_of(fun))
        check_returned(returned, name_of(fun))
        return results

    start = time.perf_counter()
    misuse = explaining_misuse(value for _, value, _ in static)
    with tracing_under(mesh), _explaining_refusals(name_of(fun), mesh), misuse:
        jaxpr = trace_to_jaxpr(flat_fun, in_avals, source=source, arg_names=arg_names, result_paths=lambda: out_paths)
    # As jax does, so that listeners who count traces count ours.
    jax.monitoring.record_event_duration_secs(TRACE_EVENT, time.perf_counter() - start, fun_name=name_of(fun))
    name_results(jaxpr, out_paths)
    jaxpr, consts = separate_consts(jaxpr)
    return Trace(jaxpr, consts, out_tree, out_paths)
