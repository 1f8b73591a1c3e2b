"""Gathers and scatters: operations with computed indices."""

import dataclasses
from collections.abc import Iterable

import numpy as np
from jax.extend.mlir import ir

from partjit._jax import RELEASE
from partjit.inspect.moves.device_grouping import replicated
from partjit.inspect.moves.indexed_dims import IndexedDims
from partjit.inspect.moves.indexing import INDICES, Indexing, partition
from partjit.inspect.moves.model import Model, Operation, Tensor, Transfer
from partjit.inspect.moves.partitioned import Array, Resharded
from partjit.inspect.moves.products import link
from partjit.inspect.moves.tiles import Unmodelled, over_axes
from partjit.shardy import TensorSharding

__all__ = ["gather", "scatter"]


def gather(op: Operation) -> Model | None:
    """A gather, such as `x[indices]`."""
    operand, indices, result = *op.operands, op.results[0]
    dims = IndexedDims.of(op.op, operand.shape, len(indices.shape), len(result.shape))
    slices = tuple(op.numbers("slice_sizes"))
    return _model(op, _indexing(op, dims, slices, (operand, indices, result)))


def scatter(op: Operation) -> Model | None:
    """A scatter, such as `x.at[indices].add(updates)`."""
    if len(op.operands) != 3:
        raise Unmodelled
    operand, indices, updates = op.operands
    dims = IndexedDims.of(op.op, operand.shape, len(indices.shape), len(updates.shape))
    windows = dict(dims.windows)
    slices = tuple(updates.shape[windows[dim]] if dim in windows else 1 for dim in range(len(operand.shape)))
    one = _indexing(op, dims, slices, (operand, indices, updates))
    one = dataclasses.replace(one, result=op.tiles(op.results[0].sharding), sums=_combines(op.op) in _SUMS)
    if all(n % count == 0 for n, count in zip(indices.shape, indices.shards, strict=True)):
        return _model(op, one)
    # XLA gathers these, to change those of the padding, and slices them again.
    return _model(op, one, one.indices.replicated())


_HAS_FORMS = RELEASE >= (0, 12)
"""Whether shardings are over named axes; see `reshards.py`."""

_SUMS = {f"stablehlo.{name}" for name in ("add", "and", "maximum", "minimum", "multiply", "or")}


def _indexing(op: Operation, dims: IndexedDims, slices: tuple[int, ...], tensors: Iterable[Tensor]) -> Indexing:
    operand, indices, pieces = (_array(op, tensor) for tensor in tensors)
    named = op.sizes if _HAS_FORMS else None
    return Indexing(dims=dims, slices=slices, operand=operand, indices=indices, pieces=pieces, named=named)


def _array(op: Operation, tensor: Tensor) -> Array:
    tiles = op.tiles(tensor.sharding)
    return Array(tensor.shape, tensor.itemsize, tiles, np.arange(tiles.devices.size)[None], swaps=not _HAS_FORMS)


def _model(op: Operation, one: Indexing, before: Array | None = None) -> Model:
    """The model of an operation whose indices are computed from others, if these are given."""
    found = partition(one)
    if before is not None:
        if found.indices and found.indices[0].target == before.tiles and len(found.indices[0].rows) == 1:
            found = dataclasses.replace(found, indices=found.indices[1:])  # it knows them from before
        found = found.of_computed(INDICES, before)
    indices = op.operands[1]
    tensors = {
        "operand": op.operands[0],
        "indices": indices,
        "predicates": dataclasses.replace(indices, dtype="pred", itemsize=1),
    }
    made = [found.operand, found.indices, *([found.pieces] if one.result is not None else [])]
    chains = {k: [link(op, k, each) for each in chain] for k, chain in enumerate(made)}
    named = None if found.made is None else over_axes(found.made, op.sizes)
    made = None if named is None else [TensorSharding(named.axes, named.parts, op.results[0].sharding.mesh)]
    steps = found.steps if named is not None else (*found.steps, *found.last)
    model = op.model(chains, made, [Transfer(step, tensors[name]) for name, step in steps])
    if one.result is not None or found.made != one.pieces.tiles:
        return model
    # A group has computed all of its part before it was sliced.
    whole = replicated(len(one.pieces.shape), found.rows.shape[1])
    return dataclasses.replace(model, remembered=Resharded(found.rows, whole, ()).name)


def _combines(op: ir.Operation) -> str:
    """The first operation by which a scatter combines updates with what is there."""
    (body,) = op.regions[0].blocks
    return next(iter(body.operations)).operation.name
