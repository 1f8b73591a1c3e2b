"""`emission_p`: a call that an executable makes as it runs, as an equation of what one device does.

Its operands are the numbers of the execution and of the call in it, the position of the device, and its shards of the
arguments. The parameter `which` is the position of the call among those of the executable, or `END`.
"""

from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue, ShapedArray
from jax.extend.core import Effect, Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.interpreters.mlir import LoweringRuleContext
from jax.sharding import Mesh, PartitionSpec

from partjit._jax.effects import register_effect
from partjit.colocated.runtime.emission import END, hand_over
from partjit.colocated.runtime.handed_over import HandedOver

__all__ = ["PLATFORMS", "emission_p", "emit_call", "emit_end"]

PLATFORMS = frozenset({"cpu", "gpu"})
"""Those whose executables can call the hosts without stopping the devices of others."""

emission_p = Primitive("emission")
emission_p.multiple_results = True


class EmissionEffect(Effect):  # type: ignore[misc]  # jax gives the base class no types
    """The effect of an executable that calls Python; without it the equation would be eliminated."""

    def __str__(self) -> str:
        return "Emission"


_effect = EmissionEffect()


@emission_p.def_effectful_abstract_eval
def _abstract_eval(*_: AbstractValue, which: int) -> tuple[list[AbstractValue], set[Effect]]:
    del which
    return [], {_effect}


def _lower(ctx: LoweringRuleContext, *args: ir.Value, which: int) -> Sequence[ir.Value]:
    avals = cast(Sequence[ShapedArray], ctx.avals_in)
    mlir.emit_python_callback(
        ctx, hand_over(which), None, [*args], avals, [], has_side_effect=True, returns_token=False
    )
    return []


def emit_call(
    execution: jax.Array,
    number: jax.Array,
    arrays: Sequence[jax.Array],
    handed_over: HandedOver,
    which: int,
) -> None:
    """Emits a call in a function being traced.

    Args:
        execution, number: the numbers of the execution and of the call in it.
        arrays: its arguments.
        handed_over: which devices hand over what of them.
        which: the position of the call among those of the executable, or `END`.
    """
    mesh, holders = handed_over.mesh, handed_over.positions
    if mesh is None:
        emission_p.bind(execution, number, jnp.int32(0), *arrays, which=which)
        return

    def on_each_device(execution: jax.Array, number: jax.Array, *shards: jax.Array) -> None:
        position = jax.lax.axis_index(mesh.axis_names)

        def emit() -> None:
            emission_p.bind(execution, number, position, *shards, which=which)

        if len(holders) == mesh.size:
            emit()
        else:
            is_holder = np.isin(np.arange(mesh.size), [*holders])
            jax.lax.cond(jnp.asarray(is_holder)[position], emit, lambda: None)

    replicated = PartitionSpec()
    specs = (replicated, replicated, *(sharding.spec for sharding in handed_over.shardings))
    jax.shard_map(on_each_device, mesh=mesh, in_specs=specs, out_specs=None, check_vma=False)(
        execution, number, *arrays
    )


def emit_end(execution: jax.Array, number: jax.Array, mesh: Mesh) -> None:
    """Emits how many calls there were, in a function being traced."""
    emit_call(execution, number, [], HandedOver.of([], [], mesh), END)


register_effect(EmissionEffect)
for _platform in PLATFORMS:
    mlir.register_lowering(emission_p, _lower, platform=_platform, cacheable=False)
