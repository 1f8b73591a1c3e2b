"""What is pickled by partjit and by whoever sends a function to a worker: functions of pjit, devices, UNSPECIFIED.

jax's devices cannot be pickled, so neither can meshes, shardings, or functions that capture one, and its UNSPECIFIED
comes back as another object. Both are registered with `copyreg`, which every pickler reads: a device is written as its
platform and id, and looked up where it is read.
"""

import copyreg
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from partjit._jax.dispatch import PjitFunction
from partjit._jax.shardings import UNSPECIFIED, UnspecifiedValue
from partjit._jax.types import Device

__all__ = ["Recipe", "device_of", "reducer"]

Recipe: TypeAlias = Callable[[], PjitFunction]
"""A plain function that makes a function of pjit."""


def device_of(platform: str, number: int) -> Device:
    """The device with an id; ValueError if there is none here."""
    devices = {device.id: device for device in jax.devices(platform)}
    if number not in devices:
        raise ValueError(f"Invalid device ID {number}: the {platform} devices here are {[*devices]}")
    return devices[number]


def _unspecified() -> UnspecifiedValue:
    return UNSPECIFIED


copyreg.pickle(jax.Device, lambda device: (device_of, (device.platform, device.id)))
copyreg.pickle(UnspecifiedValue, lambda _: (_unspecified, ()))

_made: "weakref.WeakKeyDictionary[Recipe, weakref.ref[PjitFunction]]" = weakref.WeakKeyDictionary()
"""The function of each recipe."""


def reducer(function: PjitFunction, recipe: Recipe) -> Callable[[int], tuple[object, ...]]:
    """The `__reduce_ex__` of a function.

    Its recipe is pickled in its place, since picklers have rules for plain functions: pickle writes where one can be
    imported from, and cloudpickle writes the function itself where that is `__main__`, another function, or a module
    that is registered to be pickled by value. So the recipe pretends to be importable as an attribute of the function.

    Args:
        function: the function, whose attribute `_recipe` is `recipe`.
        recipe: makes it anew from what `pjit` was given.
    """
    _made[recipe] = weakref.ref(function)

    def reduce(_protocol: int) -> tuple[object, ...]:
        module, name = _name_of(function)
        recipe.__module__, recipe.__qualname__ = module, f"{name}._recipe"
        return _function_of, (recipe,)

    return reduce


def _name_of(function: Any) -> tuple[str, str]:
    """The module of a function and its name there; a name that does not exist if it has none."""
    # The function of a functools.partial has neither: its attributes are those of jax's class.
    name = getattr(function, "__qualname__", None)
    if name is None:
        return "__main__", "<none>"
    module = sys.modules.get(function.__module__)
    # `step = pjit(train_step)` is found by its own name, not by that of the function it wraps.
    own = [key for key, value in [*vars(module).items()] if value is function] if module is not None else []
    return function.__module__, own[0] if own else name


def _function_of(recipe: Recipe) -> Any:
    """The function of a recipe: the same for the same recipe."""
    known = _made.get(recipe)
    function = None if known is None else known()
    if function is None:
        try:
            function = recipe()
        except NameError:  # cloudpickle has not filled the closure of the recipe yet
            return _SelfReference(recipe)
        _made[recipe] = weakref.ref(function)
    return function


class _SelfReference:
    """A function that refers to itself, as unpickled: it is needed before its recipe is complete."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def __call__(self, *args: object, **kwargs: object) -> object:
        return _function_of(self._recipe)(*args, **kwargs)

    def __getattr__(self, name: str) -> object:
        return getattr(_function_of(self._recipe), name)

    def __get__(self, obj: object, owner: type | None = None) -> object:
        return self if obj is None else types.MethodType(self, obj)

    def __reduce__(self) -> tuple[object, ...]:
        return _function_of, (self._recipe,)
