"""What models are written in: operations on sharded arrays, and what XLA's partitioner does with them."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.mlir import ir

from partjit.inspect.moves.tiles import Step, Tiles, tiles_of
from partjit.shardy import TensorSharding

__all__ = [
    "Model",
    "Operation",
    "Prepared",
    "Tensor",
    "Transfer",
    "constant_index",
    "definition",
    "element_type",
    "elements",
    "merged",
    "numbers",
    "without",
]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An operand or a result.

    Attributes:
        shape: its shape.
        dtype: the short name of its dtype, as in `f32[8,16]`.
        itemsize: bytes of an element.
        sharding: how it is sharded.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    sharding: TensorSharding

    @functools.cached_property
    def shards(self) -> tuple[int, ...]:
        """The number of shards of each dimension."""
        return tuple(math.prod(parts) for parts in self.sharding.parts)

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of the largest shard."""
        return tuple(-(-n // count) for n, count in zip(self.shape, self.shards, strict=True))

    @functools.cached_property
    def is_sharded(self) -> bool:
        """Whether it has several shards."""
        return any(count > 1 for count in self.shards)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it, with the padding of uneven shards."""
        return math.prod(n * count for n, count in zip(self.local, self.shards, strict=True)) * self.itemsize

    def sharded(self, sharding: TensorSharding) -> "Tensor":
        """The same array with another sharding."""
        return dataclasses.replace(self, sharding=sharding)


class Transfer(NamedTuple):
    """A collective that XLA's partitioner adds for an operation, and what it is about, which gives the dtype."""

    step: Step
    tensor: Tensor


class Prepared(NamedTuple):
    """A reshard of an operand within groups of devices, or to a sharding that no axes of the mesh name.

    Attributes:
        name: XLA makes one for all operations that reshard the same value under one name.
        transfers: what is moved.
    """

    name: str
    transfers: tuple[Transfer, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """How XLA computes an operation: it reshards operands, moves parts of shards, computes locally, reshards results.

    Attributes:
        operands: for each operand the shardings that it gets, or how, one after the other; none if it stays as it is.
        results: the sharding in which each result is computed; None if it is that of the result.
        transfers: what is moved besides; None if that is not modelled.
        bound: the bytes that a device sends at most if it is not; None if it is that of any such operation.
        absorbs: what it is computed from, if operations that compute its operands are part of it.
        keeps: whether the operation stays, with the operands resharded.
        distinct: the operands whose reshards XLA does not merge with all equal ones of other operations, and the names
            that those have with which it does; the empty name is that of none.
        forgets: whether XLA does not remember the shardings in which results are computed, so that it moves data to
            reshard a result back to these; of an operation that stays, how operands were sharded before.
        remembered: the name of a reshard of the result, within groups of devices, that XLA has made already.
    """

    operands: tuple[tuple[TensorSharding | Prepared, ...], ...]
    results: tuple[TensorSharding | None, ...]
    transfers: tuple[Transfer, ...] | None = ()
    bound: int | None = None
    absorbs: tuple[ir.Value, ...] = ()
    keeps: bool = False
    distinct: Mapping[int, str] = dataclasses.field(default_factory=dict)
    forgets: bool = False
    remembered: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An operation of the lowered program.

    Attributes:
        op: the operation itself.
        operands, results: its arrays.
        sizes: of the axes of the mesh, those that are manual left out.
        sharding_of: gives the sharding of any value.
        primitive_of: gives the primitive that an operation was lowered from, or the empty string.
    """

    op: ir.Operation
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    sizes: Mapping[str, int]
    sharding_of: Callable[[ir.Value], TensorSharding]
    primitive_of: Callable[[ir.Operation], str]

    @property
    def primitive(self) -> str:
        """The primitive that it was lowered from, or the empty string; to read it takes longer than most models."""
        return self.primitive_of(self.op)

    @property
    def bound(self) -> int:
        """The bytes that a device sends at most: that of all arrays, and of the results once more."""
        return sum(tensor.nbytes for tensor in (*self.operands, *self.results, *self.results))

    def tiles(self, sharding: TensorSharding) -> Tiles:
        """The devices of the shards of a sharding."""
        return tiles_of(sharding, self.sizes)

    def numbers(self, name: str, default: Sequence[int] = ()) -> list[int]:
        """An attribute that is a list of numbers."""
        return numbers(self.op.attributes[name]) if name in self.op.attributes else [*default]

    def number(self, name: str) -> int:
        """An attribute that is a number."""
        return int(ir.IntegerAttr(self.op.attributes[name]).value)

    def model(
        self,
        operands: Mapping[int, Sequence[TensorSharding | Prepared]] | None = None,
        results: Sequence[TensorSharding | None] | None = None,
        transfers: Sequence[Transfer] = (),
        keeps: bool = False,
        distinct: Mapping[int, str] | None = None,
        forgets: bool = False,
    ) -> Model:
        """A model, from the operands that are resharded."""
        chains = tuple(tuple((operands or {}).get(k, ())) for k in range(len(self.operands)))
        return Model(
            operands=chains,
            results=(None,) * len(self.results) if results is None else tuple(results),
            transfers=tuple(transfers),
            keeps=keeps,
            distinct=distinct or {},
            # Several results are a tuple, which is resharded, and of whose elements nothing is known.
            forgets=forgets or (len(self.results) > 1 and not keeps),
        )

    def replicated(self, which: Collection[int] | None = None) -> Model:
        """XLA's last resort: every device computes all of it, from these operands."""
        used = range(len(self.operands)) if which is None else which
        whole = {k: [_replicated(self.operands[k])] for k in used if self.operands[k].is_sharded}
        return self.model(whole, [_replicated(tensor) for tensor in self.results])


def _replicated(tensor: Tensor) -> TensorSharding:
    ndim = len(tensor.shape)
    return dataclasses.replace(tensor.sharding, axes=((),) * ndim, parts=((),) * ndim)


def without(sharding: TensorSharding, dims: Collection[int]) -> TensorSharding:
    """A sharding with some dimensions replicated.

    Example:
        >>> without(TensorSharding((("x",), ("y",)), ((4,), (2,))), [0]).axes
        ((), ('y',))
    """
    axes = tuple(() if dim in dims else names for dim, names in enumerate(sharding.axes))
    parts = tuple(() if dim in dims else sizes for dim, sizes in enumerate(sharding.parts))
    return dataclasses.replace(sharding, axes=axes, parts=parts)


def merged(shape: Sequence[int], sharding: TensorSharding, dim: int, fixed: Collection[int]) -> TensorSharding:
    """A sharding whose axes of a dimension are moved to the first other one that they divide; dropped if none is.

    Args:
        shape: the shape of the array.
        sharding: its sharding.
        dim: the dimension.
        fixed: the dimensions that they are not moved to.

    Example:
        >>> merged((16, 16), TensorSharding((("x",), ("y",)), ((4,), (2,))), 0, [0]).axes
        ((), ('y', 'x'))
    """
    moved = math.prod(sharding.parts[dim])
    for target, n in enumerate(shape):
        if moved > 1 and target != dim and target not in fixed and n % (moved * math.prod(sharding.parts[target])) == 0:
            axes, parts = [*sharding.axes], [*sharding.parts]
            axes[target] += axes[dim]
            parts[target] += parts[dim]
            axes[dim], parts[dim] = (), ()
            return dataclasses.replace(sharding, axes=tuple(axes), parts=tuple(parts))
    return without(sharding, [dim])


def definition(value: ir.Value, *names: str) -> ir.Operation | None:
    """The operation that computes a value, if it is one of these."""
    owner: Any = value.owner
    return None if isinstance(owner, ir.Block) or owner.operation.name not in names else owner.operation


def constant_index(value: ir.Value) -> int | None:
    """The number that a scalar operand is, if it is a constant."""
    owner = definition(value, "stablehlo.constant", "sdy.constant")
    found = None if owner is None else re.search(r"dense<(-?\d+)>", str(owner.attributes["value"]))
    return None if found is None else int(found[1])


def elements(attribute: Any) -> list[list[int]]:
    """The rows of a dense attribute of numbers."""
    rows, columns = attribute.type.shape
    if attribute.is_splat:
        return [[int(attribute.get_splat_value().value)] * columns] * rows
    flat = [int(number) for number in attribute]
    return [flat[i : i + columns] for i in range(0, rows * columns, columns)]


def numbers(attribute: ir.Attribute) -> list[int]:
    """The numbers of a list in an attribute."""
    text = str(attribute)
    return [int(number) for number in re.findall(r"-?\d+", text[text.index(":") + 1 :] if ":" in text else "")]


def element_type(value: ir.Value) -> tuple[tuple[int, ...], int, str]:
    """Shape, bytes of an element and name of the dtype of a value."""
    return tuple(value.type.shape), *_dtype(str(value.type.element_type))


@functools.lru_cache(maxsize=64)
def _dtype(element: str) -> tuple[int, str]:
    """Bytes of an element, and name of the dtype in HLO, of an element type of MLIR."""
    bits = re.findall(r"\d+", element)
    width = int(bits[0]) if bits else 8
    width = 2 * width if element.startswith("complex") else width
    return max(1, width // 8), _SHORT.get(element, element.replace("i", "s", 1))


_SHORT = (
    {"i1": "pred", "ui8": "u8", "ui16": "u16", "ui32": "u32", "ui64": "u64"}
    | {f"f{n}": f"f{n}" for n in (16, 32, 64)}
    | {"bf16": "bf16", "complex<f32>": "c64", "complex<f64>": "c128"}
)
