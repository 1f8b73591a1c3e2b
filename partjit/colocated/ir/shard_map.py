"""Calls in the body of a `shard_map`: calls with arrays over its mesh, whose function is called per shard."""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partjit._jax.shard_maps import register_eager_in_shard_map, type_over_mesh
from partjit.colocated.ir.eager import DefaultSharding, body, call_in_body, evaluated_with
from partjit.colocated.ir.primitive import Callee, colocated_call_p
from partjit.colocated.runtime.shards import Shards
from partjit.colocated.runtime.streams import Stream

__all__ = ["called_for_each_shard", "check_for_each_shard", "check_is_over_all_axes"]

Array = tuple[ShapedArray, NamedSharding]
"""The type of an array and its sharding over the mesh."""


def called_for_each_shard(callee: Callee, mesh: Mesh, arguments: Sequence[Array], results: Sequence[Array]) -> Callee:
    """The callee of a call with arrays, from that of a call in a `shard_map` with their shards.

    Args:
        callee: its arguments and results are shards.
        mesh: that of the `shard_map`.
        arguments, results: the arrays; their shards have those shapes, except for dimensions of size 1.

    Raises:
        ValueError: it has options that do not apply in a `shard_map`.
    """
    check_for_each_shard(callee)
    in_avals, in_shardings = _unzipped(arguments)
    out_avals, out_shardings = _unzipped(results)

    def make() -> Callee:
        options = dataclasses.replace(callee.options, devices=None)
        return dataclasses.replace(
            callee,
            definition=dataclasses.replace(callee.definition, options=options),
            in_avals=in_avals,
            in_shardings=in_shardings,
            out_avals=out_avals,
            out_shardings=out_shardings,
            shards=Shards(mesh, callee.in_avals, callee.out_avals, in_shardings, out_shardings),
        )

    return callee.derived((mesh, in_avals, in_shardings, out_avals, out_shardings), make)


def _unzipped(arrays: Sequence[Array]) -> tuple[tuple[ShapedArray, ...], tuple[NamedSharding, ...]]:
    return tuple(aval for aval, _ in arrays), tuple(sharding for _, sharding in arrays)


def check_is_over_all_axes(what: str, mesh: Mesh, axes: Sequence[str]) -> None:
    """Raises ValueError if a `shard_map` leaves axes of its mesh to the partitioner.

    Args:
        what: the `shard_map` and its call, for the message.
        mesh: its mesh.
        axes: its manual axes.
    """
    left = [axis for axis, size in mesh.shape.items() if axis not in axes and size > 1]
    if left:
        raise ValueError(
            f"{what} and leaves the axes {', '.join(map(repr, left))} of its mesh to the partitioner: with calls in it "
            "a shard_map has to be over all axes of its mesh. Name them in axis_names too, or make the calls outside"
        )


def check_for_each_shard(callee: Callee) -> None:
    """Raises ValueError if a function has options that do not apply in a `shard_map`."""
    options = callee.options
    if options.run_ahead:
        raise ValueError(
            f"run_ahead={options.run_ahead} lets calls of {callee.name} be made before their results are "
            "requested, but in a shard_map they are made for each shard: leave it out, or make the call outside of the "
            "shard_map"
        )
    if options.layout == "per_shard":
        raise ValueError(
            f"layout='per_shard' calls {callee.name} with the shards of its arguments, but in a shard_map it is called "
            "for each shard anyway, with arrays: leave it out. partjit.colocated.mesh_coordinates() says which it is"
        )
    explicit = {"in_specs": callee.in_shardings, "out_specs": callee.out_shardings if options.has_out_specs else ()}
    for what, shardings in explicit.items():
        for sharding in shardings:
            if sharding is not None:
                raise ValueError(
                    f"{what} of the colocated function {callee.name} name the sharding {sharding.spec}, but in a "
                    "shard_map it is called for each shard, with arrays on one device: say the shapes and dtypes of "
                    "what is one shard's, without shardings"
                )


def _evaluate(mesh: Mesh, *values: Any, axes: Sequence[str], callee: Callee, stream: Stream | None) -> list[jax.Array]:
    """Makes a call in a `shard_map` that is evaluated operation by operation."""
    check_is_over_all_axes(f"a shard_map calls {callee.name}", mesh, axes)
    arguments = [
        (type_over_mesh(aval, value.shape), NamedSharding(mesh, P(*value.sharding.spec[:1])))
        for aval, value in zip(callee.in_avals, values, strict=True)
    ]
    size = math.prod(mesh.shape[axis] for axis in axes)
    over_all = NamedSharding(mesh, P(tuple(axis for axis in mesh.axis_names if axis in axes)))
    results = [(type_over_mesh(aval, (size, *aval.shape)), over_all) for aval in callee.out_avals]
    default = DefaultSharding(NamedSharding(mesh, P()), True)
    replaced = called_for_each_shard(callee, mesh, arguments, results)
    with evaluated_with(default) if body.default is None else contextlib.nullcontext():
        return call_in_body(default, replaced, stream, values)


register_eager_in_shard_map(colocated_call_p, _evaluate)
