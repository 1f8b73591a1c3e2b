"""`emission_p`: a call that an executable makes as it runs, as an equation of what one device does.

Its operands are the numbers of the execution and of the call in it, in one array, the position of the device if there
are several, and its shards of the arguments. Its results, if the executable waits for any call, are the numbers of the
next one and the shards of the results. Python gets an array for each operand, which takes a tenth of a small call.

Parameters:

* `which`: the position of the call among those of the executable, or `END`.
* `results`: the types of its results; None if it has none.
* `is_answered`: whether the devices wait for the call. If they do not, its only results can be the next numbers.
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
from partjit.colocated.runtime.answering import NEXT_BESIDE, answer, hand_over_beside
from partjit.colocated.runtime.emission import END, hand_over
from partjit.colocated.runtime.handed_over import HandedOver, Returned

__all__ = [
    "ANSWERED",
    "PLATFORMS",
    "emission_p",
    "emit_answered",
    "emit_beside",
    "emit_call",
    "emit_end",
    "has_other_effects",
]

PLATFORMS = frozenset({"cpu", "gpu", "cuda", "rocm"})
"""Those whose executables can call the hosts without stopping the devices of others.

Devices say "gpu", and what is lowered for them "cuda" or "rocm".
"""

ANSWERED = frozenset({"cpu"})
"""Those whose executables wait for a call in less time than it takes to end one and begin another."""

_NUMBERS = ShapedArray((len(NEXT_BESIDE),), jnp.dtype(jnp.int32))
"""The numbers of an executable that waits for calls."""

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
    *_: AbstractValue, which: int, results: tuple[ShapedArray, ...] | None, is_answered: bool, has_position: bool
) -> tuple[list[AbstractValue], set[Effect]]:
    del which, is_answered, has_position
    # The numbers that they give each other keep calls of an executable that waits for some. Where one with an effect
    # fails, jax raises its error once more when it waits for all effects, at exit at the latest.
    return ([], {_effect}) if results is None else ([*results], set())


def _callback(
    which: int, results: tuple[ShapedArray, ...] | None, is_answered: bool, has_position: bool
) -> Callable[..., Sequence[np.ndarray]]:
    if results is None:
        return hand_over(which, has_position)
    return answer(which, has_position) if is_answered else hand_over_beside(which, has_position)


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

    def emit(*operands: jax.Array, has_position: bool) -> None:
        emission_p.bind(*operands, which=which, results=None, is_answered=False, has_position=has_position)

    _on_holders(emit, lambda _: None, None, numbers, arrays, handed_over)


def emit_beside(numbers: jax.Array, arrays: Sequence[jax.Array], handed_over: HandedOver, which: int) -> jax.Array:
    """Emits a call of an executable that waits for others, but not for this one; arguments as of `emit_call`.

    Returns:
        The numbers of the next call.
    """

    def emit(*operands: jax.Array, has_position: bool) -> jax.Array:
        (following,) = emission_p.bind(
            *operands, which=which, results=(_NUMBERS,), is_answered=False, has_position=has_position
        )
        return following

    following: jax.Array = _on_holders(
        emit, lambda numbers: numbers + NEXT_BESIDE, PartitionSpec(), numbers, arrays, handed_over
    )
    return following


def _on_holders(
    emit: Callable[..., Any],
    otherwise: Callable[[jax.Array], Any],
    out_specs: PartitionSpec | None,
    numbers: jax.Array,
    arrays: Sequence[jax.Array],
    handed_over: HandedOver,
) -> Any:
    """Emits a call on the devices that hand something over; on the others there is what `otherwise` makes of it."""
    mesh, holders = handed_over.mesh, handed_over.positions
    if mesh is None:
        return emit(numbers, *arrays, has_position=False)

    def on_each_device(numbers: jax.Array, *shards: jax.Array) -> Any:
        position = jax.lax.axis_index(mesh.axis_names)

        def here() -> Any:
            return emit(numbers, position, *shards, has_position=True)

        if len(holders) == mesh.size:
            return here()
        is_holder = np.isin(np.arange(mesh.size), [*holders])
        return jax.lax.cond(jnp.asarray(is_holder)[position], here, lambda: otherwise(numbers))

    specs = (PartitionSpec(), *(sharding.spec for sharding in handed_over.shardings))
    run = jax.shard_map(on_each_device, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    return run(numbers, *arrays)


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
    if mesh is None:
        numbers, *values = emission_p.bind(
            numbers, *arrays, which=which, results=(_NUMBERS, *avals), is_answered=True, has_position=False
        )
        return numbers, values
    parts = [aval.update(shape=s.shard_shape(aval.shape)) for aval, s in zip(avals, returned.shardings, strict=True)]

    def on_each_device(numbers: jax.Array, *shards: jax.Array) -> Any:
        position = jax.lax.axis_index(mesh.axis_names)
        results = (_NUMBERS, *parts)
        return emission_p.bind(
            numbers, position, *shards, which=which, results=results, is_answered=True, has_position=True
        )

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
