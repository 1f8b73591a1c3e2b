"""The two ways between an array and the piece of a process, as primitives for an eager `jax.grad` or `jax.vmap`.

Both are linear, and the transpose of each is the other: an array and its pieces are two forms of one value, and so
are their cotangents. That is why the gradient of a program of pieces is the piece of the gradient.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partjit._jax.arrays import device_put
from partjit.pieces.boxes import global_array, global_shape_of, local_array, local_shape_of

__all__ = ["to_global_p", "to_local_p"]

to_global_p = Primitive("process_piece_to_array")
to_local_p = Primitive("array_to_process_piece")


@to_global_p.def_impl
def _to_global(piece: Any, *, sharding: NamedSharding) -> jax.Array:
    is_global = isinstance(piece, jax.Array) and not piece.is_fully_addressable
    return piece if is_global else global_array(piece, sharding)


@to_local_p.def_impl
def _to_local(array: Any, *, sharding: NamedSharding) -> jax.Array:
    if not isinstance(array, jax.Array) or array.is_fully_addressable:  # such as zeros for a cotangent
        value = np.asarray(array)
        array = jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    elif not array.sharding.is_equivalent_to(sharding, array.ndim):
        array = device_put(array, sharding)
    return local_array(array, "the result")


@to_global_p.def_abstract_eval
def _type_of_array(piece: ShapedArray, *, sharding: NamedSharding) -> ShapedArray:
    return ShapedArray(global_shape_of(piece.shape, sharding), piece.dtype)


@to_local_p.def_abstract_eval
def _type_of_piece(array: ShapedArray, *, sharding: NamedSharding) -> ShapedArray:
    return ShapedArray(local_shape_of(array.shape, sharding), array.dtype)


ad.deflinear2(to_global_p, lambda ct, _, *, sharding: [to_local_p.bind(ct, sharding=sharding)])
ad.deflinear2(to_local_p, lambda ct, _, *, sharding: [to_global_p.bind(ct, sharding=sharding)])


def _batched(
    primitive: Primitive, args: Sequence[Any], dims: Sequence[Any], sharding: NamedSharding
) -> tuple[Any, int]:
    (value,), (dim,) = args, dims
    entries = [*sharding.spec, *[None] * (value.ndim - 1 - len(sharding.spec))]
    entries.insert(dim, None)
    return primitive.bind(value, sharding=sharding.update(spec=P(*entries))), dim


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "what a process has of an array is not known in a program: a pjit with positional_semantics='local' is called "
        "outside of jax.jit and other programs; inside of them it takes and returns global arrays"
    )


for _primitive in (to_global_p, to_local_p):
    batching.primitive_batchers[_primitive] = lambda args, dims, *, sharding, primitive=_primitive: _batched(
        primitive, args, dims, sharding
    )
    mlir.register_lowering(_primitive, _refuse)
