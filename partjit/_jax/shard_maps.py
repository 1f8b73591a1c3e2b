"""`shard_map`: its primitive and body, types of values inside, and rules for its eager evaluation."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import config, core
from jax._src import mesh as mesh_lib
from jax._src.shard_map import eager_rules, shard_map_p
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partjit._jax.jaxprs import MERGED_JAXPR
from partjit._jax.meshes import manual_axes, without_mesh

__all__ = [
    "register_eager_in_shard_map",
    "shard_map_body",
    "shard_map_p",
    "type_of_shape",
    "type_over_mesh",
    "varying_axes",
    "varying_type",
]


def varying_type(aval: ShapedArray) -> ShapedArray:
    """The type of a value of which each shard has its own, if a `shard_map` is traced here; elsewhere the same type."""
    mesh = mesh_lib.get_abstract_mesh()
    if not mesh.manual_axes:
        return aval
    # Where `check_vma` is False, types do not say over which axes values vary.
    axes = frozenset(mesh.manual_axes if config._check_vma.value else ())
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * aval.ndim))
    return aval.update(sharding=sharding, manual_axis_type=core.ManualAxisType(varying=axes))


def varying_axes(aval: ShapedArray) -> frozenset[str]:
    """The axes along which the type of a value in a `shard_map` allows it to differ between shards."""
    return aval.mat.vur


def type_of_shape(aval: ShapedArray, shape: tuple[int, ...]) -> ShapedArray:
    """The type of a value in a `shard_map` in another shape."""
    spec = PartitionSpec(*[None] * len(shape))
    return aval.update(shape=shape, sharding=aval.sharding.update(spec=spec))


def type_over_mesh(aval: ShapedArray, shape: tuple[int, ...]) -> ShapedArray:
    """The type, outside of a `shard_map`, of an array of that shape whose shards are values of it."""
    return ShapedArray(shape, aval.dtype, aval.weak_type, memory_space=aval.memory_space)


def shard_map_body(eqn: JaxprEqn) -> ClosedJaxpr:
    """The body of a `shard_map` as a closed jaxpr; jax 0.10 has it as an open one, without constants."""
    jaxpr = eqn.params["jaxpr"]
    return jaxpr if MERGED_JAXPR else ClosedJaxpr(jaxpr, [])


def register_eager_in_shard_map(primitive: Primitive, rule: Callable[..., Sequence[jax.Array]]) -> None:
    """Registers `rule(mesh, *values, axes, **params) -> results` for a `shard_map` that runs operation by operation.

    The axes are those that it is over. Values and results have one dimension more in front, whose slices are what the
    shards have: all of them or, where `check_vma` is True, those along the axes along which the value varies.
    """

    def evaluate(mesh: Mesh, *values: jax.Array, **params: Any) -> Sequence[jax.Array]:
        axes = manual_axes()
        with core.eval_context(), without_mesh():
            return rule(mesh, *values, axes=axes, **params)

    eager_rules[primitive] = evaluate
