"""The specializations of a colocated function, by the types and shardings of its arguments.

What `out_specs_fn` says, and what a function returns, may have other types where `jax_enable_x64` is set: so these have
specializations of their own.
"""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
from jax.core import ShapedArray
from jax.sharding import Sharding

from partjit._jax.caches import CacheGroup
from partjit._jax.shardings import default_device, device_list
from partjit._jax.threads import has_64_bits
from partjit._jax.types import Device, PyTree, PyTreeDef
from partjit.colocated.definition import Definition
from partjit.colocated.runtime.host_arguments import KnownHostArguments
from partjit.colocated.runtime.in_specs import InSpecs, argument_paths
from partjit.colocated.runtime.object_arguments import KnownObjects
from partjit.colocated.runtime.out_specs import OutSpecs
from partjit.colocated.runtime.pending import require_array
from partjit.colocated.runtime.spec_structs import struct_of
from partjit.colocated.runtime.streams import Stream
from partjit.colocated.specialization import Specialization
from partjit.devices import ids_of
from partjit.host_objects import has_objects

__all__ = ["CacheInfo", "SpecializationCache"]

_caches = CacheGroup("partjit.colocated specializations")
_Known = TypeVar("_Known")


class CacheInfo(NamedTuple):
    """Statistics of the cache of a colocated function.

    Attributes:
        hits: calls that found their specialization.
        misses: calls that did not.
        specializations: how many are cached.
    """

    hits: int
    misses: int
    specializations: int


class SpecializationCache:
    """Specializations by the types and shardings of arguments.

    Comparing shardings is slow, so there are two levels: by the identity of the sharding objects, and by their
    equality. The first level keeps the objects alive, so that an id is not reused.

    Attributes:
        last: the specialization found last, which most callers need again; None where that was for other values than
            arrays.
        last_with_host_values: that of the last call with NumPy arrays or numbers, and what became of these.
        last_with_objects: that of the last call with objects, and where these were.
        with_host_values, with_objects: the same of earlier calls, by the kinds of their arguments.
        hits: the number of look-ups that found one.
        misses: the number of those that did not.
    """

    _MOST_IDENTITIES = _MOST_KNOWN = 1024

    def __init__(self) -> None:
        self._by_identity: dict[Hashable, tuple[Specialization, Sequence[Sharding]]] = {}
        self._by_equality: dict[tuple[bool, Hashable], Specialization] = {}
        self._lock = threading.RLock()
        self.last: Specialization | None = None
        self._has_64_bits = False  # where that was found
        self.last_with_host_values: tuple[KnownHostArguments, Specialization] | None = None
        self.last_with_objects: tuple[KnownObjects, Specialization] | None = None
        self.with_host_values: dict[Hashable, tuple[KnownHostArguments, Specialization]] = {}
        self.with_objects: dict[Hashable, tuple[KnownObjects, Specialization]] = {}
        self.hits = 0
        self.misses = 0
        _caches.add(self)

    def find(
        self, definition: Definition, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], stream: Stream | None = None
    ) -> Specialization:
        """The specialization for the types and shardings of these arguments, made if there is none yet.

        Args:
            definition: the function.
            args, kwargs: the arguments of a call.
            stream: the stream of its calls, unless the options name one.

        Raises:
            ValueError: an argument is not an array; the arguments contradict the options; or there are no, or several,
                device lists.
        """
        name, options = definition.name, definition.options
        leaves, tree = jax.tree.flatten((args, kwargs))

        def paths() -> Sequence[str]:
            return argument_paths(definition.function.signature, args, kwargs)

        def make() -> Specialization:
            definition.check_arguments(paths(), tree, args, kwargs)
            is_of_objects = not leaves and has_objects(tree)
            devices = options.devices or (None if leaves else _devices_of_results(options.out_specs))
            devices = devices or (_default() if is_of_objects else _devices_of(leaves, paths(), name))
            # An object of its own, also where the user gave the specs: it remembers arguments of one specialization.
            own = options.in_specs and options.in_specs.leaves
            in_specs = InSpecs(own or [struct_of(leaf.aval, leaf.sharding) for leaf in leaves], tree)
            return Specialization(definition, in_specs, leaves, devices, stream=stream)

        for i, leaf in enumerate(leaves):
            require_array(leaf, lambda i=i: f"{paths()[i]} of {name}")
        if options.in_specs is not None:
            options.in_specs.check(leaves, tree, paths)
            specs = options.in_specs.leaves
            left_open = [leaf.sharding for leaf, spec in zip(leaves, specs, strict=True) if spec.sharding is None]
            specialization = self.find_equal((stream, *left_open, *map(_kind_of, leaves)), make)
        else:
            specialization = self._find_alike(leaves, (tree, stream), make)
        specialization.in_specs.remember(leaves)
        return specialization

    def _find_alike(
        self, leaves: Sequence[jax.Array], key: Hashable, make: Callable[[], Specialization]
    ) -> Specialization:
        kinds = tuple(map(_kind_of, leaves))
        shardings = [leaf.sharding for leaf in leaves]
        identities = (has_64_bits(), key, *zip(map(id, shardings), kinds, strict=True))
        found = self._by_identity.get(identities)
        if found is not None:
            self.hits += 1
            self._remember(found[0])
            return found[0]
        with self._lock:
            specialization = self.find_equal((key, *shardings, kinds), make)
            if len(self._by_identity) >= self._MOST_IDENTITIES:
                self._by_identity.clear()
            self._by_identity[identities] = (specialization, shardings)
        return specialization

    def find_equal(self, key: Hashable, make: Callable[[], Specialization]) -> Specialization:
        """The specialization of an equal key, made if there is none yet."""
        own = has_64_bits(), key
        with self._lock:
            specialization = self._by_equality.get(own)
            if specialization is None:
                specialization = self._by_equality[own] = make()
                self.misses += 1
            else:
                self.hits += 1
            self._remember(specialization)
        return specialization

    def _remember(self, specialization: Specialization | None) -> None:
        if self._has_64_bits is not has_64_bits():
            self._has_64_bits = not self._has_64_bits
            self.last_with_objects = None
        self.last = specialization

    def remember_with_host_values(self, key: Hashable, known: KnownHostArguments, found: Specialization) -> None:
        """Remembers a call with NumPy arrays or numbers as the last one, and for those with the same key.

        The next call is like it, as a rule: it is not compared with calls of arrays alone before.
        """
        self.last, self.last_with_host_values = None, (known, found)
        self._keep(self.with_host_values, key, self.last_with_host_values)

    def remember_with_objects(self, key: Hashable, known: KnownObjects, found: Specialization) -> None:
        """The same of a call with objects."""
        self._remember(None)
        self.last_with_objects = known, found
        self._keep(self.with_objects, key, self.last_with_objects)

    def _keep(self, known: dict[Hashable, _Known], key: Hashable, call: _Known) -> None:
        with self._lock:
            known[key] = call
            if len(known) > self._MOST_KNOWN:
                del known[next(iter(known))]

    def is_as_last(self) -> bool:
        """Whether what was found last may be used here."""
        return self._has_64_bits is has_64_bits()

    def results_for(self, tree: PyTreeDef, avals: Sequence[ShapedArray]) -> OutSpecs | None:
        """The known results of calls with arguments of these types, on any devices; None if there are none."""
        wanted = [(aval.shape, aval.dtype) for aval in avals]
        with self._lock:
            bits = has_64_bits()
            found = [specialization for (own, _), specialization in self._by_equality.items() if own is bits]
        for specialization in reversed(found):
            in_specs = specialization.in_specs
            types = [(spec.shape, spec.dtype) for spec in in_specs.leaves]
            if specialization.out_specs is not None and in_specs.tree == tree and types == wanted:
                return specialization.out_specs
        return None

    def info(self) -> CacheInfo:
        """Its statistics."""
        return CacheInfo(self.hits, self.misses, len(self._by_equality))

    def clear(self) -> None:
        """Removes everything; calls in flight are not affected."""
        with self._lock:
            self._by_identity.clear()
            self._by_equality.clear()
            self.last = self.last_with_host_values = self.last_with_objects = None
            self.with_host_values.clear()
            self.with_objects.clear()
            self.hits = self.misses = 0


def _kind_of(leaf: jax.Array) -> tuple[Hashable, ...]:
    """What a specialization depends on in addition to the sharding."""
    return leaf.shape, leaf.dtype, leaf.aval.weak_type, getattr(leaf, "committed", True)


def _default() -> tuple[Device, ...]:
    """The default device, where a call with numbers alone runs as well."""
    device = default_device()
    return (device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0],)


def _devices_of_results(out_specs: PyTree) -> tuple[Device, ...] | None:
    """The devices that the specs of results name, if all name the same."""
    named = [getattr(spec, "sharding", None) for spec in jax.tree.leaves(out_specs)]
    lists = {None if sharding is None else (*device_list(sharding),) for sharding in named}
    return next(iter(lists)) if len(lists) == 1 else None


def _devices_of(leaves: Sequence[jax.Array], paths: Sequence[str], name: str) -> tuple[Device, ...]:
    """The devices of a call, from the shardings of its arguments.

    Raises:
        ValueError: there are none, or they differ between arguments, in their order too.
    """
    if not leaves:
        raise ValueError(
            "No devices found. colocated_python function without input arguments must be first specialized with "
            f"devices. {name} is called without arguments: give it specialize(devices=...), or out_specs with shardings"
        )
    first = device_list(leaves[0].sharding)
    others = [
        f"{path} ({leaf.aval.str_short()}) is on {ids_of(leaf.sharding)}"
        for path, leaf in zip(paths, leaves, strict=True)
        if (other := device_list(leaf.sharding)) is not first and other != first
    ]
    if others:
        raise ValueError(
            f"All arguments must use the same device list, but {name} got multiple device lists: {paths[0]} "
            f"({leaves[0].aval.str_short()}) is on {ids_of(leaves[0].sharding)}, {', '.join(others)}, in this order. "
            "Move them with jax.device_put, or say where the function runs with specialize(devices=...)"
        )
    return (*first,)
