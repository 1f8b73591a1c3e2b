"""Checks of arguments that public functions have in common, with one form of error message.

    colocated.stream: size must be a whole number of at least 1, but is '4', a str

An argument is checked where it is passed, so that it does not fail later with an error about the inside of partjit.
A wrong type is a `TypeError`, a wrong value a `ValueError`. A message shows a value in short, and
never fails: the `repr` of a deleted array raises, and that of any other reads it from its devices.

`where` is the public name of the function, `name` that of the argument, with the key path of a part of it.
"""

import inspect
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import KeyPath

from partjit._jax.types import Device, PyTree, PyTreeDef

__all__ = [
    "abridged",
    "devices_in",
    "flattened",
    "items_of",
    "leaves_of",
    "require",
    "require_callable",
    "require_choice",
    "require_flag",
    "require_integer",
    "require_mesh_type",
    "require_number",
    "require_path",
    "require_synchronous",
    "require_text",
    "shown",
    "unsorted",
    "wrong_type",
    "wrong_value",
]

T = TypeVar("T")

_LONGEST = 80


class _Short(reprlib.Repr):
    """Python's abridged `repr`, with one line for an array at any depth, and the type where `repr` raises."""

    def __init__(self) -> None:
        super().__init__()
        self.maxother = self.maxstring = self.maxlong = _LONGEST

    def repr1(self, x: object, level: int) -> str:
        if isinstance(x, jax.Array):
            return f"<{x.aval.str_short()} array>"
        if isinstance(x, np.ndarray):
            return f"<NumPy array {x.dtype}[{','.join(map(str, x.shape))}]>"
        return super().repr1(x, level)


_short = _Short()


def abridged(value: object) -> str:
    """The `repr` of a value, in short; this never fails."""
    try:
        return _short.repr(value)
    except Exception:
        return f"<{type(value).__name__} object>"


def shown(value: object) -> str:
    """A value as messages show it: in short, and of which type; this never fails.

    Example:
        >>> shown("4"), shown(None), shown([1, 2]), shown(jax.numpy.ones(3))
        ("'4', a str", 'None', '[1, 2], a list', '<float32[3] array>')
    """
    kind, text = type(value).__name__, abridged(value)
    if value is None or text.startswith("<") or text.partition("(")[0] == kind:
        return text
    return f"{text}, {'an' if kind[:1] in 'aeioAEIO' else 'a'} {kind}"


def wrong_type(where: str, name: str, value: object, expected: str, remedy: str = "") -> TypeError:
    """The error about an argument of a wrong type, to be raised.

    Example:
        >>> wrong_type("set_mesh", "mesh", "x", "a mesh or None", "make one with partjit.Mesh(devices, axis_names)")
        TypeError("set_mesh: mesh must be a mesh or None, but is 'x', a str: make one with partjit.Mesh(...)...
    """
    return TypeError(_text(where, name, value, expected, remedy))


def wrong_value(where: str, name: str, value: object, expected: str, remedy: str = "") -> ValueError:
    """As `wrong_type`, for a value of the right type that is not one of those allowed."""
    return ValueError(_text(where, name, value, expected, remedy))


def _text(where: str, name: str, value: object, expected: str, remedy: str) -> str:
    return f"{where}: {name} must be {expected}, but is {shown(value)}{f': {remedy}' if remedy else ''}"


def require(where: str, name: str, value: object, kinds: type | UnionType, expected: str, remedy: str = "") -> Any:
    """The value, which must be an instance of a type, or of one of several; TypeError otherwise."""
    if not isinstance(value, kinds):
        raise wrong_type(where, name, value, expected, remedy)
    return value


def require_callable(where: str, name: str, value: T, expected: str = "a function") -> T:
    """The value, which must be callable; TypeError otherwise."""
    if not callable(value):
        raise wrong_type(where, name, value, expected)
    return value


def require_flag(where: str, name: str, value: object) -> bool:
    """A flag as a Python one; NumPy's will do, numbers and arrays will not. TypeError otherwise."""
    if not isinstance(value, bool | np.bool_):
        raise wrong_type(where, name, value, "True or False")
    return bool(value)


def require_integer(where: str, name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """A whole number as a Python one; NumPy's will do, a flag or an array of one will not.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than `least`, or more than `most`.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise wrong_type(where, name, value, "a whole number" + (f" of at least {least}" if least is not None else ""))
    if least is not None and value < least:
        raise ValueError(f"{where}: {name} must be at least {least}, but is {abridged(int(value))}")
    if most is not None and value > most:
        raise ValueError(f"{where}: {name} must be at most {most}, but is {abridged(int(value))}")
    return int(value)


def require_number(where: str, name: str, value: object, expected: str) -> float:
    """A real number, which is not nan; TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise wrong_type(where, name, value, expected)
    if value != value:
        raise wrong_value(where, name, value, expected)
    return cast(float, value)  # as it is: some whole numbers are too large for a float


def require_text(where: str, name: str, value: object, expected: str) -> str:
    """A str; TypeError otherwise."""
    if not isinstance(value, str):
        raise wrong_type(where, name, value, expected)
    return value


def require_synchronous(what: str, name: str, fun: Callable[..., object]) -> None:
    """Raises TypeError for a coroutine function or a generator function, whose calls return before they have run."""
    kinds = {
        "a coroutine function": inspect.iscoroutinefunction,
        "an asynchronous generator function": inspect.isasyncgenfunction,
        "a generator function": inspect.isgeneratorfunction,
    }
    call = None if inspect.isroutine(fun) else type(fun).__call__
    kind = next((kind for kind, is_of_it in kinds.items() if is_of_it(fun) or is_of_it(call)), None)
    if kind is not None:
        raise TypeError(
            f"{what} must return arrays, but {name} is {kind}: its calls return before it has run. Run it to its end "
            "in a plain function, with asyncio.run or list"
        )


def require_choice(where: str, name: str, value: T, choices: Sequence[str], *, or_none: bool = False) -> T:
    """One of some strings; TypeError for what is no string, ValueError for another string.

    With `or_none` messages say that None, which is not checked here, is the other choice.
    """
    names = ", ".join(map(repr, choices))
    expected = f"{names} or None" if or_none else f"one of {names}"
    if require_text(where, name, value, expected) not in choices:
        raise wrong_value(where, name, value, expected)
    return value


def require_path(where: str, name: str, value: T) -> T:
    """The path of a file; TypeError or ValueError otherwise. `open` takes numbers too: descriptors of other files."""
    expected = "the path of a file, a str or a pathlib.Path"
    require(where, name, value, str | os.PathLike, expected)
    if isinstance(value, str) and not value:
        raise wrong_value(where, name, value, expected)
    return value


def require_mesh_type(where: str, name: str, value: object, *, or_abstract: bool = False) -> Any:
    """A mesh of devices or, on request, an abstract one; TypeError otherwise."""
    if isinstance(value, Mesh) or (or_abstract and isinstance(value, AbstractMesh)):
        return value
    remedy = "make one with partjit.Mesh(devices, axis_names)"
    if isinstance(value, AbstractMesh):
        remedy = f"an AbstractMesh has no devices; {remedy}"
    raise wrong_type(where, name, value, "a mesh", remedy)


def items_of(where: str, name: str, value: object, expected: str) -> tuple[Any, ...]:
    """The items of a collection, in order; TypeError for other values, strings and mappings."""
    if type(value) is tuple or type(value) is list:
        return tuple(value)
    # Iterating over a jax array waits for it, and its items are arrays again.
    if isinstance(value, str | bytes | bytearray | Mapping | jax.Array) or not isinstance(value, Iterable):
        raise wrong_type(where, name, value, expected)
    try:
        iterator = iter(value)
    except TypeError:  # a NumPy array without dimensions, or a class that only looks iterable
        raise wrong_type(where, name, value, expected) from None
    return tuple(iterator)


def devices_in(where: str, name: str, value: object) -> tuple[Device, ...]:
    """The devices of a device, of a mesh, or of a collection of devices; TypeError otherwise."""
    if isinstance(value, jax.Device):
        return (value,)
    if isinstance(value, Mesh):
        return () if value.empty else tuple(value.devices.flat)
    devices = items_of(where, name, value, "devices or a mesh")
    for i, device in enumerate(devices):
        require(where, f"{name}[{i}]", device, jax.Device, "a device, as in jax.devices()")
    return devices


def flattened(
    tree: PyTree, what: str, is_leaf: Callable[[PyTree], bool] | None = None
) -> tuple[list[tuple[KeyPath, Any]], PyTreeDef]:
    """The leaves of a tree with their key paths, and its structure.

    Args:
        tree: a pytree.
        what: how messages name it.
        is_leaf: what counts as a leaf, as in `jax.tree.flatten`.

    Raises:
        ValueError: a dictionary in it has keys that cannot be sorted.
    """
    try:
        return jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    except ValueError as error:
        raise unsorted(error, what) from None


def leaves_of(tree: PyTreeDef, value: PyTree) -> list[Any] | None:
    """The leaves of a value with exactly this structure; None if it has another.

    `tree.flatten_up_to` is a little faster, but where it fails it reads all arrays from their devices, for its message.
    """
    try:
        leaves, found = jax.tree_util.tree_flatten(value)
    except ValueError:  # keys of a dictionary that do not compare
        return None
    return leaves if found == tree else None


def unsorted(error: ValueError, what: str) -> ValueError:
    """The error to raise in place of jax's, which does not say which tree has keys that do not compare."""
    if "dictionary keys" not in str(error):
        return error
    return ValueError(
        f"{what} has a dictionary whose keys do not compare, so that it has no order of leaves: use keys of one type "
        f"with an order, strings for example ({error})"
    )
