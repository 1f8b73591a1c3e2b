"""Calling a function with the shards of arrays, one device at a time.

With `layout="per_shard"` the function gets `jax.Shard`s, in the body of a `shard_map` arrays.
"""

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from partjit._jax.arrays import array_of_shards, shareable
from partjit._jax.meshes import without_mesh
from partjit._jax.moves import moved_to
from partjit._jax.shardings import device_list
from partjit._jax.types import Device, PyTree, PyTreeDef
from partjit.colocated.devices import colocated_sharding, replicated_beside
from partjit.colocated.runtime.host_values import LARGE, HostValue
from partjit.colocated.runtime.out_spec import OutSpec
from partjit.colocated.runtime.out_specs import OutSpecs, flat_values, wrong_structure
from partjit.colocated.runtime.pending import values_of
from partjit.colocated.runtime.pins import distinct
from partjit.colocated.runtime.replicas import check_replicas
from partjit.colocated.runtime.unshared import unshared
from partjit.structures import ANY_ARRAY

__all__ = [
    "Shards",
    "coordinates_here",
    "mesh_coordinates",
    "on_each",
    "on_each_shard",
    "per_shard",
    "sharding_as_arguments",
]

_Result = TypeVar("_Result")

_coordinates: contextvars.ContextVar[dict[str, int] | None] = contextvars.ContextVar("_coordinates", default=None)


def mesh_coordinates() -> dict[str, int]:
    """The position in its mesh of the shard for which the running colocated function is called.

    It is known to functions called in the body of a `jax.shard_map`, or with `layout="per_shard"` and arrays over a
    mesh, and to the colocated functions that these call.

    Returns:
        The index along each axis of the mesh.

    Raises:
        RuntimeError: no such function is running.

    Example:
        >>> import jax, numpy, partjit
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = partjit.Mesh(numpy.array(jax.devices()[:2]), ("data",))
        >>> where = partjit.colocated.colocated_python(
        ...     lambda x: x + mesh_coordinates()["data"], out_specs_fn=lambda x: x
        ... )
        >>> add = jax.shard_map(where, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        >>> with mesh:
        ...     print(partjit.pjit(add)(jax.numpy.zeros(4, int)))
        [0 0 1 1]
    """
    found = _coordinates.get()
    if found is None:
        raise RuntimeError(
            "mesh_coordinates() was called where no colocated function runs for one shard of a mesh: there are "
            "coordinates in calls in the body of a jax.shard_map, and in calls with layout='per_shard' and arrays over "
            "a mesh. The shards of an array are described by its sharding"
        )
    return dict(found)


def coordinates_here() -> dict[str, int] | None:
    """As `mesh_coordinates`; None where no such function is running."""
    return _coordinates.get()


def on_each(call: Callable[[int], _Result], positions: Sequence[dict[str, int] | None]) -> list[_Result]:
    """Calls a function with the number of each shard, at its coordinates, which are noted on its exceptions."""
    results = []
    token = _coordinates.set(None)
    try:
        with without_mesh():  # a single device has none
            for k, position in enumerate(positions):
                _coordinates.set(position)
                try:
                    results.append(call(k))
                except BaseException as error:
                    if position is not None:
                        error.add_note(f"It was called for the shard at {position} of the mesh")
                    raise
    finally:
        _coordinates.reset(token)
    return results


@functools.lru_cache(maxsize=256)
def _positions(mesh: Mesh) -> Mapping[Device, dict[str, int]]:
    """The coordinates of the devices of a mesh, in their order."""
    indices = np.ndindex(mesh.devices.shape)
    return {d: dict(zip(mesh.axis_names, i, strict=True)) for d, i in zip(mesh.devices.flat, indices, strict=True)}


def per_shard(
    target: Callable[..., PyTree],
    name: str,
    out_specs: OutSpecs | None,
    shardings: Sequence[Sharding | None] | None = None,
) -> Callable[..., PyTree]:
    """A function of arrays that calls `target` with their shards, once per device of this process.

    Args:
        target: takes a `jax.Shard` (`data`, `index`, `device` and `replica_id`) for each array, and returns the shards
            of its results.
        name: its name in messages.
        out_specs: the types of the results and the shardings in which they are needed; None if they are unknown.
        shardings: the sharding by which the shards of each result are assembled; None for that of the arguments of the
            same shape, or replicated if there are none. By default those of `out_specs`.

    Raises:
        ValueError: when called: there are results without specs, the results contradict the specs, a shard does not
            have the shape that its sharding implies, or small shards of the same part differ.
    """

    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten((args, kwargs))
        shards = [{shard.device: shard for shard in shareable(leaf).addressable_shards} for leaf in leaves]
        if any(of_leaf.keys() != shards[0].keys() for of_leaf in shards):
            raise ValueError(
                f"{name} is called once per shard, so its arguments must be on the same devices, but they are on "
                f"{[sorted(device.id for device in of_leaf) for of_leaf in shards]}: move them with jax.device_put"
            )
        devices = [*shards[0]]
        mesh = getattr(leaves[0].sharding, "mesh", None)
        where = {} if mesh is None else _positions(mesh)

        def on(k: int) -> tuple[Sequence[Any], PyTreeDef]:
            own_args, own_kwargs = jax.tree.unflatten(tree, [of_leaf[devices[k]] for of_leaf in shards])
            return _flat([target(*own_args, **own_kwargs)], name, waits=False)

        flat = dict(zip(devices, on_each(on, [where.get(device) for device in devices]), strict=True))
        if out_specs is None and not any(values for values, _ in flat.values()):
            return flat[devices[0]][1].unflatten([])
        if out_specs is None:
            raise ValueError(
                f"{name} is called once per shard and returned arrays: say with out_specs or out_specs_fn, shardings "
                "included, what they are shards of"
            )
        own = {}
        for device, (values, returned) in flat.items():
            if returned != out_specs.tree:
                specs = out_specs.tree.unflatten([ANY_ARRAY] * out_specs.tree.num_leaves)
                wrong = "; ".join(wrong_structure(specs, returned.unflatten(values)))
                raise ValueError(
                    f"{name} returned what its output specs do not say on {device}: {wrong}. It is called once per "
                    "shard and returns a shard of each result each time"
                )
            own[device] = distinct(values_of(values), [of_leaf[device].data for of_leaf in shards])
        requested = [spec.sharding for spec in out_specs.leaves] if shardings is None else shardings
        arrays = [
            _assembled(spec, sharding, {device: values[i] for device, values in own.items()}, leaves, name, i)
            for i, (spec, sharding) in enumerate(zip(out_specs.leaves, requested, strict=True))
        ]
        return out_specs.tree.unflatten(arrays)

    return call


def _assembled(
    spec: OutSpec,
    sharding: Sharding | None,
    by_device: Mapping[Device, jax.Array | np.ndarray],
    args: Sequence[jax.Array],
    name: str,
    i: int,
) -> jax.Array:
    """The array with these shards and that sharding; `spec` has the sharding in which it is needed."""
    if sharding is None:
        sharding = sharding_as_arguments(spec.shape, args, name, i)
    if spec.sharding.is_equivalent_to(sharding, len(spec.shape)):  # its mesh may have Explicit axes
        sharding = spec.sharding
    if by_device.keys() != sharding.addressable_devices:
        raise ValueError(
            f"{name} is called for the shards of its arguments, on the devices {sorted(d.id for d in by_device)}, but "
            f"the specs of result {i} are on {sorted(d.id for d in sharding.addressable_devices)}: a result per shard "
            "has to be on the devices of the arguments"
        )
    wanted = sharding.shard_shape(spec.shape)
    for device, shard in by_device.items():
        if shard.shape != wanted or shard.dtype != spec.dtype:
            raise ValueError(
                f"{name} returned {_text(shard)} as result {i} on {device}, but its specs make a shard "
                f"{jax.ShapeDtypeStruct(wanted, spec.dtype)}"
            )
    check_replicas(by_device, sharding, spec.shape, name, i)
    return array_of_shards(spec.aval, sharding, by_device)


def sharding_as_arguments(
    shape: tuple[int, ...], args: Sequence[jax.Array | jax.ShapeDtypeStruct], name: str, i: int
) -> Sharding:
    """The sharding of the array that shards make up whose spec has none: that of the arguments of its shape.

    Args:
        shape: its shape.
        args: the arguments of the function, at least one.
        name, i: the name of the function, and which of its results it is, for messages.

    Raises:
        ValueError: the arguments of that shape have different ones.
    """
    alike = [cast(Sharding, arg.sharding) for arg in args if arg.shape == shape]
    if not alike:
        return replicated_beside(cast(Sharding, args[0].sharding))
    for other in alike:
        if not other.is_equivalent_to(alike[0], len(shape)):
            raise ValueError(
                f"{name} is called once per shard, and its specs do not say which sharding result {i} has: the "
                f"arguments of its shape have {alike[0]} and {other}. Say it with a sharding in out_specs"
            )
    return alike[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Shards:
    """The arguments and results of a call in a `shard_map`: arrays whose shards are the values in its body.

    Attributes:
        mesh: the mesh of the `shard_map`.
        in_avals, out_avals: the types of arguments and results in the body.
        in_shardings, out_shardings: the shardings of the arrays.
    """

    mesh: Mesh
    in_avals: tuple[ShapedArray, ...]
    out_avals: tuple[ShapedArray, ...]
    in_shardings: tuple[NamedSharding, ...]
    out_shardings: tuple[NamedSharding, ...]


def on_each_shard(
    target: Callable[..., PyTree], name: str, shards: Shards, out_specs: OutSpecs
) -> Callable[..., PyTree]:
    """A function of arrays that calls `target` with their shards, as the body of a `shard_map` has them.

    `target` is called once per device of this process, in the order of the mesh, with arrays on that device; for an
    accelerator, on its CPU device.

    Args:
        target: takes and returns arrays of the types in the body.
        name: its name in messages.
        shards: those types.
        out_specs: the specs of the assembled results.

    Raises:
        ValueError: when called: the results contradict the specs.
    """
    where = _OwnDevices(shards.mesh)
    in_shapes = [aval.shape for aval in shards.in_avals]

    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arguments = [*map(where.shards_of, leaves, in_shapes, shards.in_shardings)]

        def on(k: int) -> Sequence[Any]:
            own = [of_leaf[k] for of_leaf in arguments]
            own_args, own_kwargs = jax.tree.unflatten(tree, own)
            fitting = _fitting([target(*own_args, **own_kwargs)], name, shards.out_avals, out_specs.tree)
            return distinct(fitting, own)

        results = on_each(on, where.positions)
        arrays = map(where.assembled, zip(*results, strict=True), out_specs.leaves, shards.out_shardings)
        return out_specs.tree.unflatten([*arrays])

    return call


class _OwnDevices:
    """The devices of this process in a mesh, in the order of the mesh.

    Attributes:
        positions: their coordinates.
        hosts: the CPU device of each.
    """

    def __init__(self, mesh: Mesh) -> None:
        devices: list[Device] = [*mesh.devices.flat]
        everywhere = colocated_sharding(NamedSharding(mesh, PartitionSpec()))
        self._is_shared = isinstance(everywhere, SingleDeviceSharding)  # all have the same CPU device
        hosts = [*device_list(everywhere)] * (mesh.size if self._is_shared else 1)
        own = [k for k, device in enumerate(devices) if device.process_index == jax.process_index()]
        self._devices = [devices[k] for k in own]
        self.positions = [_positions(mesh)[device] for device in self._devices]
        self.hosts = [hosts[k] for k in own]

    def shards_of(self, array: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> Sequence[jax.Array]:
        """The shards of an array, in the shape given; it has this sharding or the same one on the hosts."""
        on_hosts = colocated_sharding(sharding)
        if array.sharding != on_hosts and not array.sharding.is_equivalent_to(on_hosts, array.ndim):
            array = moved_to(array, on_hosts)
        if self._is_shared:
            indices = sharding.devices_indices_map(array.shape)
            found = [array[indices[device]] for device in self._devices]
        else:
            by_host = {shard.device: shard.data for shard in shareable(array).addressable_shards}
            found = [by_host[host] for host in self.hosts]
        return found if found[0].shape == shape else [_reshaped(shard, shape) for shard in found]

    def assembled(self, values: Sequence[jax.Array | np.ndarray], spec: OutSpec, sharding: NamedSharding) -> jax.Array:
        """The array with these shards, on the hosts."""
        shape = sharding.shard_shape(spec.shape)
        shards = [value if value.shape == shape else _reshaped(value, shape) for value in values]
        if not self._is_shared:
            on_hosts = colocated_sharding(sharding)
            if spec.sharding.is_equivalent_to(on_hosts, len(spec.shape)):  # its mesh may have Explicit axes
                on_hosts = spec.sharding
            return array_of_shards(spec.aval, on_hosts, dict(zip(self.hosts, shards, strict=True)))
        indices = sharding.devices_indices_map(spec.shape)
        result = jax.numpy.zeros(spec.shape, spec.dtype, device=spec.sharding)
        for value, host, device in zip(shards, self.hosts, self._devices, strict=True):
            result = result.at[indices[device]].set(jax.device_put(value, host))
        return result


_reshaped_array = jax.jit(jax.numpy.reshape, static_argnums=1)


def _reshaped(value: Any, shape: tuple[int, ...]) -> Any:
    return value.reshape(shape) if isinstance(value, np.ndarray) else _reshaped_array(value, shape)


def _flat(returned: Sequence[PyTree], name: str, *, waits: bool = True) -> tuple[list[Any], PyTreeDef]:
    """The flat result of a function: arrays, and NumPy arrays that it cannot change for the next shard any more.

    Args:
        returned: a list of the result alone. Large NumPy arrays in it are copied if anything else refers to them.
        name: the name of the function in messages.
        waits: whether to wait for results of other calls in it, which are pending otherwise.
    """
    own = unshared(returned, LARGE)
    values, tree = flat_values(returned[0], name, waits=waits)
    return [value.as_numpy(value.dtype, own) if isinstance(value, HostValue) else value for value in values], tree


def _fitting(returned: Sequence[PyTree], name: str, avals: Sequence[ShapedArray], tree: PyTreeDef) -> Sequence[Any]:
    """The results for one shard, flat."""
    flat, structure = _flat(returned, name)
    if structure != tree:
        wrong = "; ".join(wrong_structure(tree.unflatten(avals), structure.unflatten(flat)))
        raise ValueError(
            f"{name} is called in a shard_map and returned what its output specs, which are those of one shard, do not "
            f"say: {wrong}"
        )
    for i, (value, aval) in enumerate(zip(flat, avals, strict=True)):
        if value.shape != aval.shape or value.dtype != aval.dtype:
            raise ValueError(
                f"{name} is called in a shard_map and returned {_text(value)} as result {i}, but its output "
                f"specs, which are those of one shard, say {jax.ShapeDtypeStruct(aval.shape, aval.dtype)}"
            )
    return flat


def _text(value: jax.Array | np.ndarray) -> str:
    return ShapedArray(value.shape, value.dtype).str_short()
