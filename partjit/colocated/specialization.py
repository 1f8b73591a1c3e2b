"""What a colocated function was told about its calls beforehand, and the cache of what follows from that."""

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from partjit._jax.caches import register_cache
from partjit.checks import devices_in, require_callable, require_choice, require_flag, require_integer
from partjit.colocated.runtime.specs import InSpecs, check_out_specs
from partjit.colocated.runtime.streams import Stream, as_stream

__all__ = ["CacheInfo", "Layout", "Mode", "Specialization", "SpecializationCache", "VmapMethod", "kind_of"]

Mode = Literal["auto", "inline", "stream"]
"""Where a call runs: in its caller, on a thread, or whichever pays."""

Layout = Literal["global", "per_shard"]
"""What the function is called with: arrays, once; or the shards of arrays, once for each device."""

VmapMethod = Literal["sequential", "expand_dims", "broadcast_all"]
"""What a batch is: one call for each example; or one call with batched arrays, arguments that are not batched having an
axis of size 1 there, or being repeated."""


@dataclasses.dataclass(frozen=True)
class Specialization:
    """What the user has said; None is what is still open.

    Attributes:
        in_specs: the arguments.
        out_specs: the results: a tree of ShapeDtypeStructs.
        out_specs_fn: gives `out_specs` from the ShapeDtypeStructs of the arguments.
        devices: on whose hosts the function runs.
        mode: where a call runs.
        stream: the stream of the calls.
        pure: whether a call does nothing but compute its results.
        layout: what the function is called with.
        run_ahead: how many calls without arguments are made before they are asked for.
        vmap_method: what `jax.vmap` makes of a call.
    """

    in_specs: InSpecs | None = None
    out_specs: Any = None
    out_specs_fn: Callable[..., Any] | None = None
    devices: tuple[Any, ...] | None = None
    mode: Mode | None = None
    stream: Stream | None = None
    pure: bool | None = None
    layout: Layout | None = None
    run_ahead: int | None = None
    vmap_method: VmapMethod | None = None

    def with_items(
        self,
        where: str,
        *,
        in_specs: Any = None,
        out_specs: Any = None,
        out_specs_fn: Callable[..., Any] | None = None,
        devices: Any = None,
        mode: Mode | None = None,
        stream: str | Stream | None = None,
        pure: bool | None = None,
        layout: Layout | None = None,
        run_ahead: int | None = None,
        vmap_method: VmapMethod | None = None,
    ) -> "Specialization":
        """The same with more said.

        Args:
            where: what was called with the items, for messages.
            in_specs, out_specs, out_specs_fn, devices, mode, stream, pure, layout, run_ahead, vmap_method: the items;
                None says nothing.

        Raises:
            ValueError: something was said before, or is none of the values it may have.
            TypeError: something is of a wrong type.
        """
        given = {
            name: value
            for name, value in {
                "in_specs": in_specs,
                "out_specs": out_specs,
                "out_specs_fn": out_specs_fn,
                "devices": devices,
                "mode": mode,
                "stream": stream,
                "pure": pure,
                "layout": layout,
                "run_ahead": run_ahead,
                "vmap_method": vmap_method,
            }.items()
            if value is not None
        }
        for name in given:
            if getattr(self, name) is not None:
                raise ValueError(f"{name} already specified")
        both = {name for name in ("out_specs", "out_specs_fn") if name in given or getattr(self, name) is not None}
        if len(both) == 2:
            raise ValueError("out_specs and out_specs_fn say the same: give one of them")
        if in_specs is not None:
            given["in_specs"] = InSpecs.of_user(in_specs)
        if out_specs is not None:
            check_out_specs(where, out_specs)
        if out_specs_fn is not None:
            require_callable(where, "out_specs_fn", out_specs_fn, "a function of the specs of the arguments")
        if devices is not None:
            given["devices"] = _devices(where, devices)
        for name, choices in (("mode", Mode), ("layout", Layout), ("vmap_method", VmapMethod)):
            if name in given:
                require_choice(where, name, given[name], get_args(choices))
        if stream is not None:
            given["stream"] = as_stream(stream, where)
        if pure is not None:
            given["pure"] = require_flag(where, "pure", pure)
        if run_ahead is not None:
            given["run_ahead"] = require_integer(where, "run_ahead", run_ahead, 0, _MOST_AHEAD)
        return dataclasses.replace(self, **given)


_MOST_AHEAD = 1_000_000
"""More calls than that are never under way at a time; they would only fill the memory."""


def _devices(where: str, devices: Any) -> tuple[Any, ...]:
    found = devices_in(where, "devices", devices)
    if not found:
        raise ValueError(f"{where}: devices must name at least one device, but is empty")
    if len({*found}) < len(found):
        raise ValueError(f"{where}: devices must name each device once, but are {[*map(str, found)]}")
    return found


class CacheInfo(NamedTuple):
    """What the cache of a colocated function has seen.

    Attributes:
        hits: calls that found their specialization.
        misses: calls that did not.
        specializations: how many there are.
    """

    hits: int
    misses: int
    specializations: int


def kind_of(leaf: Any) -> tuple[Any, ...]:
    """What a specialization depends on, apart from the sharding."""
    return leaf.shape, leaf.dtype, leaf.aval.weak_type, getattr(leaf, "committed", True)


class SpecializationCache:
    """Specializations by the types and shardings of arguments.

    Looking up equal shardings is slow, so there are two levels: one by the identity of the sharding objects, one by
    their equality. The first keeps the objects, so that no other takes the place of one in memory.

    Attributes:
        last: what was found last, which most callers want again.
        hits: how often something was found.
        misses: how often not.
    """

    _MOST_IDENTITIES = 1024

    def __init__(self) -> None:
        self._by_identity: dict[Any, tuple[Any, Sequence[Any]]] = {}
        self._by_equality: dict[Any, Any] = {}
        self._lock = threading.RLock()
        self.last: Any = None
        self.hits = 0
        self.misses = 0
        _caches.add(self)

    def find(self, leaves: Sequence[Any], tree: Any, make: Callable[[], Any]) -> Any:
        """What was made for arguments like these, or what `make` makes."""
        kinds = tuple(map(kind_of, leaves))
        identities = (tree, *((id(leaf.sharding), kind) for leaf, kind in zip(leaves, kinds, strict=True)))
        found = self._by_identity.get(identities)
        if found is not None:
            self.hits += 1
            self.last = found[0]
            return found[0]
        with self._lock:
            specialized = self.find_only((tree, *(leaf.sharding for leaf in leaves), kinds), make)
            if len(self._by_identity) >= self._MOST_IDENTITIES:
                self._by_identity.clear()
            self._by_identity[identities] = (specialized, [leaf.sharding for leaf in leaves])
        return specialized

    def find_only(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made for an equal key."""
        with self._lock:
            specialized = self._by_equality.get(key)
            if specialized is None:
                specialized = self._by_equality[key] = make()
                self.misses += 1
            else:
                self.hits += 1
            self.last = specialized
        return specialized

    def results_for(self, tree: Any, avals: Sequence[Any]) -> Any:
        """What is known of the results of calls with arguments of these types, on whatever devices; None if nothing."""
        wanted = [(aval.shape, aval.dtype) for aval in avals]
        with self._lock:
            found = [*self._by_equality.values()]
        for specialized in reversed(found):
            in_specs = specialized.in_specs
            types = [(spec.shape, spec.dtype) for spec in in_specs.leaves]
            if specialized.out_specs is not None and in_specs.tree == tree and types == wanted:
                return specialized.out_specs
        return None

    def info(self) -> CacheInfo:
        """How often it was asked, and what it holds."""
        return CacheInfo(self.hits, self.misses, len(self._by_equality))

    def clear(self) -> None:
        """Forgets everything; calls under way go on."""
        with self._lock:
            self._by_identity.clear()
            self._by_equality.clear()
            self.last = None
            self.hits = self.misses = 0


class _Caches:
    """All of them, for `jax.clear_caches()`."""

    def __init__(self) -> None:
        self._caches: weakref.WeakSet[SpecializationCache] = weakref.WeakSet()
        self._lock = threading.RLock()

    def add(self, cache: SpecializationCache) -> None:
        with self._lock:
            self._caches.add(cache)

    def cache_clear(self) -> None:
        with self._lock:
            caches = [*self._caches]
        for cache in caches:
            cache.clear()


_caches = _Caches()
register_cache(_caches, "partjit.colocated specializations")
