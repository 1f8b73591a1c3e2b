"""Caches that jax clears with its own."""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from jax._src.util import register_cache, weakref_cache_key_types, weakref_lru_cache

__all__ = ["CacheGroup", "keyed_weakly", "weakref_cache"]


P = ParamSpec("P")
R = TypeVar("R", covariant=True)
T = TypeVar("T", bound=type)


class Cached(Protocol[P, R]):
    """A function that remembers its results."""

    evict_weakref: Callable[[object], None]
    """Forgets what was computed for an object as the first argument."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


def weakref_cache(compute: Callable[P, R]) -> Cached[P, R]:
    """Caches `compute(key, *more)`, weakly in `key` and per jax's trace context; what raised is computed again.

    jax's `weakref_lru_cache` never stores a result under a key whose first computation raised, so that a function whose
    first trace failed would be traced anew at every later call. Here the cache holds cells, which are made without
    fail, and a cell is filled by the first computation that returns.
    """
    cells = weakref_lru_cache(lambda *_: _Cell())

    @functools.wraps(compute)
    def cached(*key: object) -> Any:
        cell = cells(*key)
        if cell.result is _Cell:
            with cell.lock:
                if cell.result is _Cell:
                    cell.result = cast(Any, compute)(*key)
        return cell.result

    result = cast(Cached[P, R], cached)
    result.evict_weakref = cells.evict_weakref
    return result


def keyed_weakly(cls: T) -> T:
    """Has jax's caches refer to instances of a class weakly, as they do to jaxprs; decorates the class.

    Without it the cache of abstract evaluation keeps the parameters of equations that were traced, and what they
    refer to, for as long as the process lasts. An instance is equal to itself alone.
    """
    weakref_cache_key_types.add(cls)
    return cls


class Clearable(Protocol):
    """A cache that can be cleared, and can be referred to weakly."""

    def clear(self) -> None:
        """Forgets everything."""


class CacheGroup:
    """Caches that `jax.clear_caches()` clears, each as long as it is there; a cache has a method `clear`."""

    def __init__(self, name: str) -> None:
        self._caches: weakref.WeakSet[Clearable] = weakref.WeakSet()
        self._lock = threading.RLock()
        register_cache(self, name)

    def add(self, cache: Clearable) -> None:
        """Adds a cache."""
        with self._lock:
            self._caches.add(cache)

    def cache_clear(self) -> None:
        """Clears all of them; jax calls this."""
        with self._lock:
            caches = [*self._caches]
        for cache in caches:
            cache.clear()


class _Cell:
    def __init__(self) -> None:
        self.result: Any = _Cell  # stands for "none yet"
        self.lock = threading.RLock()
