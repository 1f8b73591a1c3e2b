"""Data of which many are made: frozen to the type checker, which `make check` asks, and not when it runs.

A frozen dataclass sets each attribute by a call. To make one takes up to seven times as long as to make a plain one.

Source: attrs, whose users do the same for classes that are frozen at no cost.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar, dataclass_transform

__all__ = ["QUICK", "quick_dataclass"]

_Class = TypeVar("_Class", bound=type)

QUICK: set[type] = set()
"""The classes made so."""


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(dataclasses.field,))
def quick_dataclass(*, slots: bool = False) -> Callable[[_Class], _Class]:
    """A dataclass whose instances are compared by identity, and are quickly made; nobody changes them.

    Args:
        slots: as of `dataclasses.dataclass`.
    """

    def decorate(cls: _Class) -> _Class:
        made = dataclasses.dataclass(eq=False, slots=slots)(cls)
        QUICK.add(made)
        return made

    return decorate
