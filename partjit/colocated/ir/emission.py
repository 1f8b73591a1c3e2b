"""`emission_p`: a call that an executable makes as it runs, as an equation of what one device does.

Its operands are the numbers of the execution and of the call in it, in one array, the position of the device if there
are several, and its shards of the arguments. Its results, if the devices wait for the call, are the numbers of the next
one and the shards of the results. Python gets an array for each operand, which takes a tenth of a small call.

Parameters:

* `which`: the position of the call among those of the executable, or `END`.
* `results`: the types of its results; None if the devices do not wait for the call.
* `has_position`: whether the position of the device is an operand.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue, ShapedArray
from jax.extend.core import ClosedJaxpr, Effect, Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.interpreters.mlir import LoweringRuleContext
from jax.sharding import Mesh, PartitionSpec

from partjit._jax.callbacks import lower_callback
from partjit._jax.effects import register_effect
from partjit.colocated.runtime.answering import answer
from partjit.colocated.runtime.emission import END, hand_over
from partjit.colocated.runtime.handed_over import HandedOver, Returned

__all__ = ["ANSWERED", "PLATFORMS", "emission_p", "emit_answered", "emit_call", "emit_end", "has_other_effects"]

PLATFORMS = frozenset({"cpu", "gpu", "cuda", "rocm"})
"""Those whose executables can call the hosts without stopping the devices of others.

Devices say "gpu", and what is lowered for them "cuda" or "rocm".
"""

ANSWERED = frozenset({"cpu"})
"""Those whose executables wait for a call in less time than it takes to end one and begin another."""

emission_p = Primitive("emission")
emission_p.multiple_results = True


class EmissionEffect(Effect):  # type: ignore[misc]  # jax gives the base class no types
    """The effect of an executable that calls Python; without it the equation would be eliminated."""

    def __str__(self) -> str:
        return "Emission"


_effect = EmissionEffect()


def has_other_effects(jaxpr: ClosedJaxpr) -> bool:
    """Whether a program with emitted calls has effects besides."""
    return bool({*jaxpr.effects} - {_effect})


@emission_p.def_effectful_abstract_eval
def _abstract_eval(
    *_: AbstractValue, which: int, results: tuple[ShapedArray, ...] | None, has_position: bool
) -> tuple[list[AbstractValue], set[Effect]]:
    del which, has_position
    # The numbers that they give each other keep calls that are waited for. Where an executable with an effect fails,
    # jax raises its error once more when it waits for all effects, at exit at the latest.
    return ([], {_effect}) if results is None else ([*results], set())


def _callback(
    which: int, results: tuple[ShapedArray, ...] | None, has_position: bool
) -> Callable[..., Sequence[np.ndarray]]:
    return hand_over(which, has_position) if results is None else answer(which, has_position)


def _lower(ctx: LoweringRuleContext, *args: ir.Value, **params: Any) -> Sequence[ir.Value]:
    given, returned = cast(Sequence[ShapedArray], ctx.avals_in), cast(Sequence[ShapedArray], ctx.avals_out)
    values, _, _ = mlir.emit_python_callback(
        ctx, _callback(**params), None, [*args], given, returned, has_side_effect=True, returns_token=False
    )
    return cast(Sequence[ir.Value], values)


def _lower_on_cpu(ctx: LoweringRuleContext, *args: ir.Value, **params: Any) -> Sequence[ir.Value]:
    return lower_callback(ctx, _callback(**params), args)


def emit_call(
    numbers: jax.Array,
    arrays: Sequence[jax.Array],
    handed_over: HandedOver,
    which: int,
) -> None:
    """Emits a call in a function being traced.

    Args:
        numbers: those of the execution and of the call in it.
        arrays: its arguments.
        handed_over: which devices hand over what of them.
        which: the position of the call among those of the executable, or `END`.
    """
    mesh, holders = handed_over.mesh, handed_over.positions
    if mesh is None:
        emission_p.bind(numbers, *arrays, which=which, results=None, has_position=False)
        return

    def on_each_device(numbers: jax.Array, *shards: jax.Array) -> None:
        position = jax.lax.axis_index(mesh.axis_names)

        def emit() -> None:
            emission_p.bind(numbers, position, *shards, which=which, results=None, has_position=True)

        if len(holders) == mesh.size:
            emit()
        else:
            is_holder = np.isin(np.arange(mesh.size), [*holders])
            jax.lax.cond(jnp.asarray(is_holder)[position], emit, lambda: None)

    specs = (PartitionSpec(), *(sharding.spec for sharding in handed_over.shardings))
    jax.shard_map(on_each_device, mesh=mesh, in_specs=specs, out_specs=None, check_vma=False)(numbers, *arrays)


def emit_answered(
    numbers: jax.Array,
    arrays: Sequence[jax.Array],
    handed_over: HandedOver,
    returned: Returned,
    avals: Sequence[ShapedArray],
    which: int,
) -> tuple[jax.Array, Sequence[jax.Array]]:
    """Emits a call whose results the devices wait for, in a function being traced.

    Args:
        numbers: those of the execution and of the call in it.
        arrays: its arguments.
        handed_over: which devices hand over what of them.
        returned: which devices get what of the results.
        avals: the types of the results.
        which: the position of the call among those of the executable.

    Returns:
        The numbers of the next call, and the results.
    """
    mesh = handed_over.mesh
    following = ShapedArray((2,), jnp.dtype(jnp.int32))
    if mesh is None:
        results = (following, *avals)
        numbers, *values = emission_p.bind(numbers, *arrays, which=which, results=results, has_position=False)
        return numbers, values
    parts = [aval.update(shape=s.shard_shape(aval.shape)) for aval, s in zip(avals, returned.shardings, strict=True)]

    def on_each_device(numbers: jax.Array, *shards: jax.Array) -> Any:
        position = jax.lax.axis_index(mesh.axis_names)
        results = (following, *parts)
        return emission_p.bind(numbers, position, *shards, which=which, results=results, has_position=True)

    replicated = PartitionSpec()
    in_specs = (replicated, *(sharding.spec for sharding in handed_over.shardings))
    out_specs = [replicated, *(sharding.spec for sharding in returned.shardings)]
    numbers, *values = jax.shard_map(
        on_each_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )(numbers, *arrays)
    return numbers, values


def emit_end(numbers: jax.Array, mesh: Mesh) -> None:
    """Emits how many calls there were, in a function being traced; arguments as of `emit_call`."""
    emit_call(numbers, [], HandedOver.of([], [], mesh), END)


register_effect(EmissionEffect)
mlir.register_lowering(emission_p, _lower_on_cpu, platform="cpu", cacheable=False)
mlir.register_lowering(emission_p, _lower, platform="gpu", cacheable=False)
