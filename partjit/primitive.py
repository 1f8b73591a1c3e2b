"""The two primitives of the IR: a partitioned program (`pjit_p`) and a sharding constraint (`sharding_constraint_p`).

Parameters of `pjit_p`, all of them tuples with one entry per flat argument or result unless said otherwise:

* `jaxpr`: the closed jaxpr of the function.
* `in_specs`, `out_specs`: `ParsedPartitionSpec`, or UNSPECIFIED where the partitioner chooses.
* `mesh`: the mesh the specs refer to; the empty mesh if there is none.
* `donated_invars`: flags of the arguments whose buffers the program may reuse.
* `name`, `keep_unused`: the program's name, and whether arguments it does not read are passed all the same.
* `agree`: how its processes agree, if it is a program with colocated calls.
* `witness`: see `device_witness`.

How each transformation acts on them is in `partjit.rules`, one file per transformation.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence, Set
from typing import Any, TypeVar

import jax
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, Effect, Jaxpr, Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.interpreters.mlir import LoweringRuleContext
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partjit._jax.effects import positional_effects
from partjit._jax.lowering import add_manual_axes, lower_call, lower_constraint
from partjit._jax.meshes import under_mesh
from partjit._jax.rules import register_printing
from partjit._jax.shardings import UNSPECIFIED, UnspecifiedValue
from partjit._jax.tracing import low_jaxpr, register_to_low
from partjit.mesh import auto_twin, describe_mesh
from partjit.spec import ParsedPartitionSpec, Spec

__all__ = [
    "colocated_call_p",
    "device_witness",
    "keep_where",
    "pjit_p",
    "sharding_constraint_p",
    "shardings_of",
]

T = TypeVar("T")

pjit_p = Primitive("pjit")
pjit_p.multiple_results = True
# jax declares the attribute as None, and calls what a primitive has there.
pjit_p.is_effectful = lambda params: bool(params["jaxpr"].effects)  # type: ignore[method-assign, assignment]

sharding_constraint_p = Primitive("sharding_constraint")
"""Parameters: `spec` (a `ParsedPartitionSpec`, possibly with UNCONSTRAINED dimensions), `mesh` and `witness`.

It changes no type: what the type of a value says of Explicit axes is what the spec says of them.
"""

colocated_call_p = Primitive("colocated_call")
"""A colocated call, see `partjit.colocated.ir.primitive`: a program is searched for calls without importing that."""
colocated_call_p.multiple_results = True


def shardings_of(specs: Sequence[Spec], mesh: Mesh) -> tuple[NamedSharding | UnspecifiedValue, ...]:
    """The shardings of `specs` in a program on `mesh`.

    Without a mesh there is nothing to be replicated over, so a spec of None is left to jax.
    """
    return tuple(
        spec.named_sharding(mesh)
        if isinstance(spec, ParsedPartitionSpec) and not (spec.mesh or mesh).empty
        else UNSPECIFIED
        for spec in specs
    )


@functools.lru_cache(maxsize=256)
def device_witness(mesh: Mesh) -> "_Witness | None":
    """A tiny jaxpr from which `jax.jit` learns the devices of an equation of ours, or None for the empty mesh.

    Before it lowers a function, jax looks for the devices in the parameters of its own primitives and in every jaxpr
    it finds in the parameters of others. Without this one, `jax.jit` of a function with a `pjit` inside would compile
    for a single device and drop every spec.
    """
    if mesh.empty:
        return None
    twin = auto_twin(mesh)
    with under_mesh(twin):  # the result is cached, so it must not depend on the ambient mesh
        constrain = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(twin, P())))
        jaxpr = constrain(jax.ShapeDtypeStruct((), "bool")).jaxpr
    # jax makes no equation of a constraint on Explicit axes, and returns results on the mesh that it finds here.
    eqns = [eqn.replace(params={**eqn.params, "sharding": NamedSharding(mesh, P())}) for eqn in jaxpr.eqns]
    return _Witness([jaxpr.replace(eqns=eqns)])


class _Witness(tuple[Jaxpr, ...]):
    """A jaxpr that is a new object at each iteration: a printed jaxpr begins with the jaxprs that occur repeatedly."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Jaxpr]:
        return (jaxpr.replace() for jaxpr in super().__iter__())


def keep_where(values: Sequence[T], flags: Sequence[bool]) -> tuple[T, ...]:
    """The entries of a per-argument or per-result parameter whose flag is set."""
    assert len(values) == len(flags)
    return tuple(itertools.compress(values, flags))


@pjit_p.def_effectful_abstract_eval
def _abstract_eval(*_: object, jaxpr: ClosedJaxpr, **__: object) -> tuple[list[AbstractValue], Set[Effect]]:
    return [*jaxpr.out_avals], positional_effects(jaxpr)


@sharding_constraint_p.def_abstract_eval
def _constraint_abstract_eval(aval: AbstractValue, **_: object) -> AbstractValue:
    return aval


def _lower(
    ctx: LoweringRuleContext,
    *args: ir.Value,
    jaxpr: ClosedJaxpr,
    in_specs: Sequence[Spec],
    out_specs: Sequence[Spec],
    mesh: Mesh,
    name: str,
    **_: object,
) -> Sequence[ir.Value]:
    return lower_call(
        ctx,
        args,
        jaxpr=jaxpr,
        name=name,
        in_shardings=_inner_shardings(ctx, in_specs, mesh, jaxpr.in_avals),
        out_shardings=_inner_shardings(ctx, out_specs, mesh, jaxpr.out_avals),
    )


def _lower_constraint(
    ctx: LoweringRuleContext, x: ir.Value, *, spec: ParsedPartitionSpec, mesh: Mesh, **_: object
) -> Sequence[ir.Value]:
    (sharding,) = _inner_shardings(ctx, (spec,), mesh, ctx.avals_in)
    return [x] if sharding is None else lower_constraint(ctx, x, sharding, spec.unconstrained_dims)


def _inner_shardings(
    ctx: LoweringRuleContext, specs: Sequence[Spec], mesh: Mesh, avals: Sequence[Any]
) -> list[NamedSharding | None]:
    """The shardings of a nested program; None where it has none: inside a shard_map that is manual over all axes every
    value is one device's own.
    """
    axis_context: Any = ctx.module_context.axis_context
    manual = getattr(axis_context, "manual_axes", frozenset())
    shardings: list[NamedSharding | None] = []
    for sharding, aval in zip(shardings_of(specs, auto_twin(mesh)), avals, strict=True):
        if isinstance(sharding, UnspecifiedValue) or manual == frozenset(sharding.mesh.axis_names):
            shardings.append(None)
        else:
            shardings.append(add_manual_axes(axis_context, sharding, aval.ndim) if manual else sharding)
    return shardings


def _show(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a printed equation: the name, the specs as PartitionSpecs, the mesh, and flags that are set."""
    return {
        "name": params["name"],
        "in_specs": f"({', '.join(_show_spec(spec) for spec in params['in_specs'])})",
        "out_specs": f"({', '.join(_show_spec(spec) for spec in params['out_specs'])})",
        "mesh": f"({describe_mesh(params['mesh'])})",
        **({"donated_invars": params["donated_invars"]} if any(params["donated_invars"]) else {}),
        **({"keep_unused": True} if params["keep_unused"] else {}),
        **({} if params["agree"] is True else {"agree": params["agree"]}),
        "jaxpr": params["jaxpr"],
    }


def _show_spec(spec: Spec) -> str:
    return str(spec) if isinstance(spec, ParsedPartitionSpec) else "UNSPECIFIED"


def _as_low(*args: object, jaxpr: ClosedJaxpr, **params: object) -> Sequence[object]:
    return pjit_p.bind(*args, jaxpr=low_jaxpr(jaxpr), **params)


register_to_low(pjit_p, _as_low)
register_printing(pjit_p, _show)
register_printing(
    sharding_constraint_p,
    lambda params: {"spec": _show_spec(params["spec"]), "mesh": f"({describe_mesh(params['mesh'])})"},
)
mlir.register_lowering(pjit_p, _lower, cacheable=False)  # lower_call has a cache of its own
mlir.register_lowering(sharding_constraint_p, _lower_constraint)
