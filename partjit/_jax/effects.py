"""Effects of equations: jax's own, and the registries that say where an effect is allowed."""

import contextlib
import time
from collections.abc import Iterable
from typing import Any

import jax
from jax._src import core, dispatch, effects
from jax.extend.core import ClosedJaxpr, Effect

__all__ = [
    "has_kept_effects",
    "positional_effects",
    "register_effect",
    "register_ordered_effect",
    "wait_for_effect",
    "without_axes",
]

# The effects of a jaxpr, those on its inputs by position.
positional_effects = core.positional_effects


def has_kept_effects(jaxpr: ClosedJaxpr) -> bool:
    """Whether the jaxpr has effects that partial evaluation must keep even where nobody reads a result."""
    return bool(effects.partial_eval_kept_effects.filter_in(jaxpr.effects))


def register_effect(effect_type: type[Effect]) -> None:
    """Allows equations with an unordered effect wherever calls are allowed, and has partial evaluation keep them."""
    for registry in (
        effects.control_flow_allowed_effects,
        effects.custom_derivatives_allowed_effects,
        effects.remat_allowed_effects,
        effects.lowerable_effects,
        effects.partial_eval_kept_effects,
    ):
        registry.add_type(effect_type)


def register_ordered_effect(effect_type: type[Effect]) -> None:
    """As `register_effect`, and has jax order what has the effect, in programs and across those of a thread.

    Programs that jax lowers itself get a token for it, which equations take and return; on any number of devices.
    """
    register_effect(effect_type)
    effects.ordered_effects.add_type(effect_type)
    effects.shardable_ordered_effects.add_type(effect_type)


def wait_for_effect(effect: Effect, deadline: float | None) -> bool:
    """Waits for what has an ordered effect in the programs that this thread has started, whether it failed or not.

    Args:
        effect: the effect.
        deadline: in seconds of `time.monotonic`, or None.

    Returns:
        Whether it ended by then.
    """
    token = dispatch.runtime_tokens.current_tokens.get(effect)
    if token is None:
        return True
    array: Any = token._buf
    while deadline is not None and not array.is_ready():  # jax can only wait without a deadline
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the caller gets it with the results
        token.block_until_ready()
    return True


_PAUSE = 0.5e-3


def without_axes(effects: Iterable[Effect]) -> set[Effect]:
    """Effects without those that only say of which axes of the mesh an equation is."""
    return {effect for effect in effects if not isinstance(effect, core.NamedAxisEffect)}
