"""Calls under `jax.vmap`.

A call with a batched argument becomes one call per example or one call with batched arrays, depending on its
`vmap_method`. The latter calls another function, whose arguments, results and specs have the batch at axis 0.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import source_info_util
from jax.interpreters import batching
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from partjit._jax.arrays import aval_of_struct
from partjit._jax.rules import AxisData, moveaxis
from partjit._jax.sources import traced_at
from partjit._jax.tracing import abstractify, is_staged
from partjit._jax.types import PyTree
from partjit.colocated.cache import SpecializationCache
from partjit.colocated.ir.primitive import Callee, colocated_call_p
from partjit.colocated.options import VmapMethod
from partjit.colocated.runtime.in_specs import InSpecs
from partjit.colocated.runtime.one_by_one import Examples
from partjit.colocated.runtime.out_spec import OutSpec
from partjit.colocated.runtime.out_specs import OutSpecs, flat_values
from partjit.colocated.runtime.spec_structs import struct_of
from partjit.colocated.runtime.streams import Stream
from partjit.rules.batching import insert_batch_axis
from partjit.spec import ParsedPartitionSpec
from partjit.typed import typed_by


def _batch(
    axis_data: AxisData, args: Sequence[jax.Array], dims: Sequence[int | None], *, callee: Callee, stream: Stream | None
) -> tuple[Sequence[jax.Array], list[int | None]]:
    batched = [dim is not None for dim in dims]
    if not any(batched):  # one call for the whole batch
        return colocated_call_p.bind(*args, callee=callee, stream=stream), [None] * len(callee.out_avals)
    method = callee.options.vmap_method or (None if callee.is_pure else "sequential")
    if method is None:
        paths = [path for path, is_batched in zip(callee.paths, batched, strict=True) if is_batched]
        choices = ", ".join(map(repr, get_args(VmapMethod)))
        raise ValueError(
            f"the colocated function {callee.name} is pure and called under jax.vmap with a batched {', '.join(paths)} "
            f"and nothing says how: give it vmap_method=, one of {choices}, or call it outside of what is batched"
        )
    args = [x if dim is None else moveaxis(x, dim, 0) for x, dim in zip(args, dims, strict=True)]
    if method == "sequential" and not _is_one_call(callee, axis_data.size):
        each = _one_by_one(axis_data.size, args, batched, callee, stream)
        of_batch = _sharding_in_front(args, axis_data)
        results = each if of_batch is None else [_sharded_in_front(x, of_batch) for x in each]
    else:
        if method != "sequential":
            size = 1 if method == "expand_dims" else axis_data.size
            args = [
                x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
                for x, is_batched in zip(args, batched, strict=True)
            ]
        results = colocated_call_p.bind(*args, callee=_batched(callee, method, args, batched, axis_data), stream=stream)
    return results, [0] * len(results)


def _is_one_call(callee: Callee, size: int) -> bool:
    """Whether the host can go through the examples: one call that runs the function for each of them."""
    avals = (*callee.in_avals, *callee.out_avals)
    return (
        size > 0
        and callee.shards is None
        and callee.options.layout != "per_shard"
        and not callee.options.run_ahead
        and all(isinstance(aval.dtype, np.dtype) for aval in avals)
        and jax.process_count() == 1
    )


def _one_by_one(
    size: int, args: Sequence[jax.Array], batched: Sequence[bool], callee: Callee, stream: Stream | None
) -> list[jax.Array]:
    def call(of_batch: Sequence[jax.Array]) -> Sequence[jax.Array]:
        own = iter(of_batch)
        example = [next(own) if is_batched else x for x, is_batched in zip(args, batched, strict=True)]
        return colocated_call_p.bind(*example, callee=callee, stream=stream)

    stacked = [_unsharded_in_front(x) for x, is_batched in zip(args, batched, strict=True) if is_batched]
    if is_staged():
        site = source_info_util.current()

        def iteration(_: None, example: Sequence[jax.Array]) -> tuple[None, Sequence[jax.Array]]:
            with traced_at(site):
                return None, call(example)

        _, results = jax.lax.scan(iteration, None, stacked)
        return [*results]
    if not size:
        return [jnp.zeros((0, *aval.shape), aval.dtype) for aval in callee.out_avals]
    # Not traced: no plan splits a loop, and XLA cannot run one with a call in it.
    each = [call([x[i] for x in stacked]) for i in range(size)]
    return [jnp.stack(results) for results in zip(*each, strict=True)]


def _unsharded_in_front(x: jax.Array) -> jax.Array:
    """An array that a loop can take slices of: over Explicit axes jax does not gather it by itself."""
    own = jax.typeof(x).sharding
    if not own.spec or own.spec[0] is None:
        return x
    return jax.sharding.reshard(x, own.update(spec=PartitionSpec(None, *own.spec[1:])))


def _sharding_in_front(args: Sequence[jax.Array], axis_data: AxisData) -> NamedSharding | None:
    """How types say that the batch is sharded, over Explicit axes; None if it is not over such."""
    if not axis_data.explicit_mesh_axis:
        return None
    meshes = (jax.typeof(x).sharding.mesh for x in args)
    mesh = next(mesh for mesh in meshes if not mesh.empty)  # of what is batched: there may be none around
    return NamedSharding(mesh, PartitionSpec(tuple(axis_data.explicit_mesh_axis)))


def _sharded_in_front(x: jax.Array, of_batch: NamedSharding) -> jax.Array:
    """A stack whose type says that the batch is sharded, as it says of the arguments."""
    spec = PartitionSpec(of_batch.spec[0], *jax.typeof(x).sharding.spec[1:])
    return jax.sharding.reshard(x, of_batch.update(spec=spec))


def _batched(
    callee: Callee, method: VmapMethod, args: Sequence[jax.Array], batched: Sequence[bool], axis_data: AxisData
) -> Callee:
    in_avals, of_batch = tuple(map(abstractify, args)), _sharding_in_front(args, axis_data)
    key = (*batched, axis_data.size, tuple(axis_data.spmd_name or ()), of_batch)
    return callee.derived(key, lambda: _make(callee, method, in_avals, batched, axis_data, of_batch))


def _make(
    callee: Callee,
    method: VmapMethod,
    in_avals: tuple[ShapedArray, ...],
    batched: Sequence[bool],
    axis_data: AxisData,
    of_batch: NamedSharding | None,
) -> Callee:
    def insert(sharding: Any, is_batched: bool, what: str) -> NamedSharding | None:
        if sharding is None or (method == "sequential" and not is_batched):
            return sharding
        spec = ParsedPartitionSpec.from_user_input(sharding, what)
        if is_batched:
            owner = f"{what} of the colocated function {callee.name}"
            spec = insert_batch_axis(spec, 0, axis_data, sharding.mesh, owner, ())
        else:
            spec = spec.insert_axis_partitions(0, ())
        return spec.named_sharding(sharding.mesh)

    options = callee.options
    in_shardings = tuple(insert(s, b, "in_specs") for s, b in zip(callee.in_shardings, batched, strict=True))
    batch = (axis_data.size, *callee.batch)
    out_avals = tuple(
        aval_of_struct(jax.ShapeDtypeStruct((batch[0], *aval.shape), aval.dtype, weak_type=aval.weak_type))
        for aval in callee.out_avals
    )
    # Shardings of results known from an earlier call do not apply to a batch of them.
    out_shardings = tuple(insert(s if options.has_out_specs else None, True, "out_specs") for s in callee.out_shardings)
    if of_batch is not None:
        out_avals = tuple(aval.update(sharding=of_batch) for aval in out_avals)
    out_avals = tuple(typed_by(aval, sharding) for aval, sharding in zip(out_avals, out_shardings, strict=True))
    in_specs = InSpecs([*map(struct_of, in_avals, in_shardings)], callee.in_tree)
    out_specs = jax.tree.unflatten(callee.out_tree, [*map(struct_of, out_avals, out_shardings)])
    function = callee.definition.function
    if method == "sequential":
        function = dataclasses.replace(function, examples=_examples(callee, batched, axis_data.size))
    elif options.layout != "per_shard":  # where the specs determine the shards
        load = function.load.load if isinstance(function.load, _LoadBatched) else function.load
        function = dataclasses.replace(function, load=_LoadBatched(load, callee.name, method, batch))
    options = dataclasses.replace(
        options,
        in_specs=in_specs if options.in_specs is not None else None,
        out_specs=None,
        out_specs_fn=(lambda *_, **__: out_specs) if options.has_out_specs else None,
    )
    return dataclasses.replace(
        callee,
        definition=dataclasses.replace(callee.definition, function=function, options=options),
        in_avals=in_avals,
        in_shardings=in_shardings,
        out_avals=out_avals,
        out_shardings=out_shardings,
        cache=SpecializationCache(),
        batch=batch,
    )


def _examples(callee: Callee, batched: Sequence[bool], size: int) -> Examples:
    anywhere = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])  # its results are stacked by NumPy
    out_specs = OutSpecs([OutSpec(aval, anywhere, True) for aval in callee.out_avals], callee.out_tree)
    inner = callee.definition.function.examples
    return Examples(size, tuple(batched), callee.in_avals, callee.in_tree, out_specs, callee.name, inner)


@dataclasses.dataclass(frozen=True)
class _LoadBatched:
    """The `load` of a batched function, whose results are checked to have the batch in front.

    Attributes:
        load: returns the user's function.
        name: its name in messages.
        method: how `jax.vmap` makes its calls.
        batch: the sizes of the leading axes.
    """

    load: Callable[[], Callable[..., PyTree]]
    name: str
    method: VmapMethod
    batch: tuple[int, ...]

    def __call__(self) -> Callable[..., PyTree]:
        fun, batch = self.load(), self.batch

        def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
            result = fun(*args, **kwargs)
            for leaf in flat_values(result, self.name)[0]:
                if leaf.shape[: len(batch)] != batch:
                    raise ValueError(
                        f"{self.name} was called with a batch of the shape {batch} in front of its arguments, as "
                        f"vmap_method={self.method!r} says, and returned {leaf.aval.str_short()}: each result must "
                        "have the batch in front. vmap_method='sequential' calls it with one example at a time instead"
                    )
            return result

        return call


batching.fancy_primitive_batchers[colocated_call_p] = _batch
