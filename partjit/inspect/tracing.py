"""A traced function as units: the programs that are partitioned one by one."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from partjit._jax.meshes import EMPTY_MESH, under_mesh
from partjit._jax.shardings import MaybeSharding
from partjit._jax.stages import jit_parts
from partjit._jax.tracing import low_jaxpr, refuse_high_types
from partjit._jax.types import PyTreeDef
from partjit.api import pjit
from partjit.checks import shown
from partjit.compile import Traced, as_aliased, in_shardings_of
from partjit.inspect.propagation import Unit
from partjit.mesh import Mesh as PartjitMesh
from partjit.mesh import auto_twin, is_abstract_mesh
from partjit.plan.ir.nodes import Branch, Fragment, Loop, Node
from partjit.plan.passes.fragments import shardings_of_fragment
from partjit.plan.plan import Plan
from partjit.plan.run.stages import PlannedTraced
from partjit.primitive import shardings_of

__all__ = ["TracedFunction", "fragments_of", "trace_function"]


@dataclasses.dataclass(frozen=True, eq=False)
class TracedFunction:
    """A traced function.

    Attributes:
        whole: the function as one unit.
        plan: its plan, if it makes colocated calls.
        donated: for each argument whether its memory may be reused.
        in_tree, out_tree: the structures of `(args, kwargs)` and of the result.
    """

    whole: Unit
    plan: Plan | None
    donated: tuple[bool, ...]
    in_tree: PyTreeDef
    out_tree: PyTreeDef


def trace_function(
    fun: object, args: Sequence[object], kwargs: Mapping[str, object], mesh: Mesh | AbstractMesh | None
) -> TracedFunction:
    """Traces a call of a function of `pjit` or `jax.jit`, or of a plain one; takes what their `trace` returned as well.

    Raises:
        TypeError: `fun` is none of these, or arguments were given for a traced function.
    """
    with contextlib.nullcontext() if mesh is None else _entered(mesh):
        if isinstance(fun, Traced | jax.stages.Traced):
            if args or kwargs:
                raise TypeError(f"explain: {fun.fun_name} is traced already and takes no arguments: leave them out")
            traced = fun
        elif callable(fun):
            made: Any = fun if hasattr(fun, "trace") else pjit(fun)
            traced = made.trace(*args, **kwargs)
        else:
            raise TypeError(
                "explain: fun must be a function, what partjit.pjit or jax.jit made of one, or what its trace() "
                f"returned, but is {shown(fun)}"
            )
        return _of_pjit(traced) if isinstance(traced, Traced) else _of_jit(traced, mesh)


def _entered(mesh: Mesh | AbstractMesh) -> contextlib.AbstractContextManager[object]:
    """Makes a mesh ambient, for partjit's code and for jax's."""
    if isinstance(mesh, AbstractMesh):
        return under_mesh(mesh)
    # jax's own mesh warns when it is entered.
    return PartjitMesh(mesh.devices, mesh.axis_names, mesh.axis_types)


def _of_pjit(traced: Traced) -> TracedFunction:
    program = traced.program
    refuse_high_types(program.jaxpr, program.name, "explained")
    jaxpr, out_shardings = low_jaxpr(program.jaxpr), shardings_of(program.out_specs, program.mesh)
    own = in_shardings_of(traced.leaves, program.in_specs, program.mesh)
    in_shardings = as_aliased(jaxpr, own, out_shardings, program.donated_invars)
    hidden = len(program.jaxpr.in_avals) - len(program.arg_paths)
    paths = (*(f"closed_over[{i}]" for i in range(hidden)), *program.arg_paths)
    mesh = program.mesh if not program.mesh.empty else _mesh_in(program.jaxpr, (*in_shardings, *out_shardings))
    whole = Unit(
        program.name,
        jaxpr,
        in_shardings,
        out_shardings,
        mesh,
        paths,
        _result_paths(program.jaxpr, len(out_shardings)),
        keep_unused=program.keep_unused,
    )
    plan = traced.plan if isinstance(traced, PlannedTraced) else None
    return TracedFunction(whole, plan, program.donated_invars, traced.in_tree, traced.out_tree)


def _of_jit(traced: jax.stages.Traced, mesh: Mesh | AbstractMesh | None) -> TracedFunction:
    refuse_high_types(traced.jaxpr, traced.fun_name, "explained")
    parts = jit_parts(traced)
    whole = Unit(
        traced.fun_name,
        low_jaxpr(traced.jaxpr),
        parts.in_shardings,
        parts.out_shardings,
        _mesh_in(traced.jaxpr, (*parts.in_shardings, *parts.out_shardings)) if mesh is None else cast(Mesh, mesh),
        parts.paths,
        _result_paths(traced.jaxpr, len(parts.out_shardings)),
        keep_unused=parts.keep_unused,
    )
    return TracedFunction(whole, None, parts.donated, traced.in_tree, traced.out_tree)


def _result_paths(jaxpr: ClosedJaxpr, count: int) -> tuple[str, ...]:
    paths = jaxpr.jaxpr.debug_info.result_paths
    known = paths if isinstance(paths, tuple | list) and len(paths) == count else [""] * count
    return tuple(path or f"result[{i}]" for i, path in enumerate(known))


def _mesh_in(jaxpr: ClosedJaxpr, shardings: Sequence[MaybeSharding]) -> Mesh:
    """The mesh of shardings, or of equations at any depth, an abstract one where none has devices; or the empty one."""
    named = (sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding))
    abstract = EMPTY_MESH
    for mesh in itertools.chain(named, _meshes_in(jaxpr)):
        if not mesh.empty and not is_abstract_mesh(mesh):
            return auto_twin(mesh)
        abstract = mesh if abstract.empty else abstract
    return auto_twin(abstract)


def _meshes_in(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[Mesh]:
    for eqn in jaxpr.eqns:
        for param in eqn.params.values():
            for item in param if isinstance(param, tuple | list) else (param,):
                mesh = item if isinstance(item, Mesh | AbstractMesh) else getattr(item, "mesh", None)
                if isinstance(mesh, Mesh | AbstractMesh):
                    yield cast(Mesh, mesh)  # which an abstract mesh is passed for everywhere
        for inner in jaxprs_in_params(eqn.params):
            yield from _meshes_in(inner)


def fragments_of(plan: Plan) -> tuple[Unit, ...]:
    """The fragments of a plan, each with how often it runs."""
    return tuple(
        Unit(
            fragment.name,
            fragment.jaxpr,
            *shardings_of_fragment(fragment, plan.mesh),
            plan.mesh,
            (*("execution" for _ in range(fragment.numbers)), *(value.name for value in fragment.inputs)),
            (*("calls" for _ in range(fragment.results_before)), *(value.name for value in fragment.outputs)),
            times,
        )
        for fragment, times in _with_times(plan.nodes, 1)
    )


def _with_times(nodes: Sequence[Node], times: int | None) -> Iterator[tuple[Fragment, int | None]]:
    for node in nodes:
        if isinstance(node, Fragment):
            yield node, times
        elif isinstance(node, Loop):
            inner = None if times is None or node.trip_count is None else times * node.trip_count
            yield from _with_times(node.block.nodes, inner)
        elif isinstance(node, Branch):
            for block in node.blocks:
                yield from _with_times(block.nodes, times)
