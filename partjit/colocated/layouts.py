"""What a function is called with: the arrays, or their shards one device at a time."""

from collections.abc import Callable
from typing import Any

import jax

from partjit.colocated.specs import OutSpecs, flat_result

__all__ = ["per_shard"]


def per_shard(target: Callable[..., Any], name: str, out_specs: OutSpecs | None) -> Callable[..., Any]:
    """A function of arrays that calls `target` with their shards, once for each device of this process.

    Args:
        target: takes a `jax.Shard` (its `data`, `index`, `device` and `replica_id`) for each array, and returns the
            shards of its results.
        name: what it is called in messages.
        out_specs: the arrays that the results are put together to; None if there are no results.

    Raises:
        ValueError: when called: there are results and nothing says what they are shards of, or on some device there
            are others than the specs say, or a shard has another shape than its place.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        shards = [{shard.device: shard for shard in leaf.addressable_shards} for leaf in leaves]
        devices = [*shards[0]]
        results = []
        for device in devices:
            own_args, own_kwargs = jax.tree.unflatten(tree, [of_leaf[device] for of_leaf in shards])
            results.append(target(*own_args, **own_kwargs))
        flat, trees = zip(*map(flat_result, results), strict=True)
        if out_specs is None and not any(flat):
            return results[0]
        if out_specs is None:
            raise ValueError(
                f"{name} is called once per shard and returned arrays: say with out_specs or out_specs_fn, shardings "
                "included, what they are shards of"
            )
        for device, returned in zip(devices, trees, strict=True):
            if returned != out_specs.tree:
                raise ValueError(
                    f"{name} returned the structure {returned} on {device}, but its specs say {out_specs.tree}: it is "
                    "called once per shard and returns a shard of each result each time"
                )
        return jax.tree.unflatten(
            out_specs.tree,
            [
                _put_together(spec, dict(zip(devices, (own[i] for own in flat), strict=True)), name, i)
                for i, spec in enumerate(out_specs.leaves)
            ],
        )

    return call


def _put_together(spec: Any, by_device: dict[Any, Any], name: str, i: int) -> Any:
    wanted = spec.sharding.shard_shape(spec.shape)
    for device, shard in by_device.items():
        if shard.shape != wanted or shard.dtype != spec.dtype:
            raise ValueError(
                f"{name} returned {shard.aval.str_short()} as result {i} on {device}, but its specs make a shard "
                f"{jax.ShapeDtypeStruct(wanted, spec.dtype)}"
            )
    placed = [jax.device_put(by_device[device], device) for device in spec.sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(spec.shape, spec.sharding, placed)
