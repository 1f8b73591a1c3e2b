"""Finding the specialization of a call by its arguments."""

from collections.abc import Sequence
from typing import Any

import jax

from partjit.colocated.runtime.run_ahead import Ahead
from partjit.colocated.runtime.specs import InSpecs, argument_paths, devices_of, require_array
from partjit.colocated.specialization import Specialization, SpecializationCache, kind_of
from partjit.colocated.specialized import Origin, Specialized

__all__ = ["find_specialized"]


def find_specialized(
    origin: Origin, known: Specialization, cache: SpecializationCache, ahead: Ahead | None, args: Any, kwargs: Any
) -> Specialized:
    """The specialization for the types and shardings of these arguments, made if there is none yet.

    Raises:
        ValueError: an argument is no array, or not what the in specs say; or there are no devices, or several lists.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))

    def paths() -> Sequence[str]:
        return argument_paths(origin.signature, args, kwargs)

    def make() -> Specialized:
        devices = known.devices or devices_of(leaves, paths(), origin.name)
        in_specs = known.in_specs.fresh() if known.in_specs else InSpecs([_struct(leaf) for leaf in leaves], tree)
        return Specialized(origin, known, in_specs, leaves, devices, ahead)

    for i, leaf in enumerate(leaves):
        require_array(leaf, lambda i=i: f"{paths()[i]} of {origin.name}")
    if known.in_specs is not None:
        known.in_specs.check(leaves, tree, paths)
        specs = known.in_specs.leaves
        left_open = [leaf.sharding for leaf, spec in zip(leaves, specs, strict=True) if spec.sharding is None]
        specialized = cache.find_only((*left_open, *map(kind_of, leaves)), make)
    else:
        specialized = cache.find(leaves, tree, make)
    specialized.in_specs.remember(leaves)
    return specialized


def _struct(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.aval.weak_type)
