"""Effects of equations: jax's own, and the registries that say where an effect is allowed."""

from collections.abc import Iterable

from jax._src import core, effects
from jax._src.state.types import ReadEffect, RefEffect
from jax.extend.core import ClosedJaxpr, Effect

__all__ = [
    "has_kept_effects",
    "has_registered_effects",
    "positional_effects",
    "register_effect",
    "register_ordered_effect",
    "uses_refs",
    "without_axes",
    "writes_refs",
]

# The effects of a jaxpr, those on its inputs by position.
positional_effects = core.positional_effects

_registered = effects.EffectTypeSet()


def has_kept_effects(jaxpr: ClosedJaxpr) -> bool:
    """Whether the jaxpr has effects that partial evaluation must keep even where nobody reads a result."""
    return bool(effects.partial_eval_kept_effects.filter_in(jaxpr.effects))


def has_registered_effects(jaxpr: ClosedJaxpr) -> bool:
    """Whether the jaxpr has effects of partjit's own."""
    return bool(_registered.filter_in(jaxpr.effects))


def uses_refs(jaxpr: ClosedJaxpr) -> bool:
    """Whether the jaxpr makes refs, or reads or writes those that it is given."""
    return any(isinstance(e, RefEffect) or e is core.internal_mutable_array_effect for e in jaxpr.effects)


def writes_refs(jaxpr: ClosedJaxpr) -> bool:
    """Whether the jaxpr writes refs that it is given."""
    return any(isinstance(e, RefEffect) and not isinstance(e, ReadEffect) for e in jaxpr.effects)


def register_effect(effect_type: type[Effect]) -> None:
    """Allows equations with an unordered effect wherever calls are allowed, and has partial evaluation keep them."""
    for registry in (
        effects.control_flow_allowed_effects,
        effects.custom_derivatives_allowed_effects,
        effects.remat_allowed_effects,
        effects.lowerable_effects,
        effects.partial_eval_kept_effects,
        _registered,
    ):
        registry.add_type(effect_type)


def register_ordered_effect(effect_type: type[Effect]) -> None:
    """As `register_effect`, and has jax order what has the effect, in programs and across those of a thread.

    Programs that jax lowers itself get a token for it, which equations take and return; on any number of devices.
    """
    register_effect(effect_type)
    effects.ordered_effects.add_type(effect_type)
    effects.shardable_ordered_effects.add_type(effect_type)


def without_axes(effects: Iterable[Effect]) -> set[Effect]:
    """Effects without those that only say of which axes of the mesh an equation is."""
    return {effect for effect in effects if not isinstance(effect, core.NamedAxisEffect)}
