"""Objects of the standard library that cloudpickle does not copy as they are.

Cloudpickle names the file of every code object `<dynamic-code>` since 3.1.3, so that its pickles are the same wherever
a function is defined. A traceback through a copied function would then show neither a file nor its lines. What the
decorators of `functools` and `contextlib` make, it looks for by name, or finds a lock, weak references or a generator
in it. Of a file of text that can be read, `open(path, "a+")` among them, it makes a StringIO of the text: what a
function writes to that would be lost.

A worker process loads this module without its package: it may import nothing but the standard library.
"""

import contextlib
import functools
import io
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["is_importable", "reduced_standard_object"]

_MEMOIZED = type(functools.cache(lambda: None))
_MANAGER: type = type(contextlib.contextmanager(iter)(()))


def reduced_standard_object(pickler: Any, obj: Any, *, has_own_main: bool = False) -> tuple[Any, ...] | None:
    """What a pickler of cloudpickle writes for an object; None if it copies it as it is.

    Args:
        pickler: the pickler.
        obj: the object.
        has_own_main: whether the reader has another `__main__`.

    Raises:
        pickle.PicklingError: it is an open file.
    """
    kind = type(obj)
    if kind is types.CodeType:
        make, arguments = pickler.dispatch_table[kind](obj)
        return make, tuple(obj.co_filename if argument == "<dynamic-code>" else argument for argument in arguments)
    if kind is _MEMOIZED and (not is_importable(obj) or (has_own_main and obj.__module__ == "__main__")):
        return _memoized, (obj.__wrapped__, obj.cache_parameters())
    if kind is functools.cached_property:  # on Python 3.11, it has a lock
        return _cached_property, (obj.func, obj.attrname)
    if kind is weakref.WeakKeyDictionary:  # functools.singledispatch has one, of what it was called with
        return kind, (), None, None, iter([*obj.items()])
    if kind is _MANAGER and hasattr(obj, "func"):  # has not been entered: as a decorator, it is made anew by each call
        return kind, (obj.func, obj.args, obj.kwds)
    if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
        raise pickle.PicklingError(f"an open file cannot be copied: {getattr(obj, 'name', obj)!r}")
    return None


def _memoized(function: Callable[..., object], parameters: dict[str, Any]) -> Callable[..., object]:
    """A function of `functools.cache` or `lru_cache` in a copy, which remembers nothing yet."""
    return functools.lru_cache(**parameters)(function)


def _cached_property(function: Callable[[Any], object], name: str | None) -> "functools.cached_property[object]":
    made = functools.cached_property(function)
    made.attrname = name
    return made


# Cloudpickle writes what it takes for functions of `__main__` themselves: to find them, a worker would import partjit.
_memoized.__module__ = _cached_property.__module__ = "__main__"


def is_importable(function: object) -> bool:
    """Whether a function is found by its name."""
    # The wrapper of a functools.partial or a callable object has no qualified name.
    qualname = getattr(function, "__qualname__", None)
    if qualname is None:
        return False
    found: object = sys.modules.get(getattr(function, "__module__", None) or "")
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found is function
