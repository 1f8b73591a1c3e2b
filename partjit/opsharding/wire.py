"""Parses an `OpSharding`, from the proto or from its wire format.

The getters of the proto do not support named shardings, whose plain type is REPLICATED, and those of an HloSharding
crash the process on them. The format is small, so anything but an ordinary tiling is parsed from its bytes here. See
https://protobuf.dev/programming-guides/encoding and `xla/xla_data.proto`.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from partjit.errors import UnrepresentableShardingError
from partjit.opsharding.superdims import Digit
from partjit.opsharding.tiling import Kind, MalformedShardingError, Tiling, named_tiling, tiled

__all__ = ["from_bytes", "from_proto"]


def from_bytes(data: bytes) -> Tiling:
    """Parses a serialized `OpSharding`.

    Raises:
        UnrepresentableShardingError: it is no `OpSharding`, or has unknown fields.
    """
    kind, elements, replicate_on_last, shard_group, named = 0, [], False, False, None
    grid, devices, subgroups, reshape, perm = numbers = [], [], [], [], []
    repeated = dict(zip((3, 4, 8, 9, 10), numbers, strict=True))
    for field, value in _fields(data):
        if field in repeated:
            repeated[field] += _integers(value)
        elif field == 5:
            elements.append(from_bytes(_message(value)))
        elif field == 14:
            named = _message(value)
        elif field == 7:
            pass  # metadata
        elif isinstance(value, bytes):
            raise MalformedShardingError(f"it has a field {field}, which is not known")
        elif field == 1:
            kind = value
        elif field == 6:
            replicate_on_last = bool(value)
        elif field == 11:
            shard_group = bool(value)
        elif field not in (12, 13):  # the group
            raise MalformedShardingError(f"it has a field {field}, which is not known")
    if named is not None:
        return _from_named(named)._replace(shard_group=shard_group)
    if kind != Kind.TILED:
        return Tiling(_kind(kind), elements=tuple(elements), shard_group=shard_group)
    kinds = tuple(map(_kind, subgroups)) or (Kind.REPLICATED,) * replicate_on_last
    return tiled(grid, kinds, devices, reshape, perm)._replace(shard_group=shard_group)


def from_proto(proto: Any) -> Tiling:
    """Parses an `OpSharding`. Raises UnrepresentableShardingError if its fields are inconsistent."""
    if proto.type.value != Kind.TILED:
        return from_bytes(proto.SerializeToString())  # it may be a named one
    subgroups = tuple(map(_kind, proto.last_tile_dims))
    tiling = tiled(
        proto.tile_assignment_dimensions,
        subgroups or (Kind.REPLICATED,) * proto.replicate_on_last_tile_dim,
        proto.tile_assignment_devices,
        proto.iota_reshape_dims,
        proto.iota_transpose_perm,
    )
    return tiling._replace(shard_group=True) if proto.is_shard_group else tiling


def _kind(number: int) -> Kind:
    try:
        return Kind(number)
    except ValueError:
        raise MalformedShardingError(f"it has the type {number}, which is not known") from None


# Named shardings: a mesh of their own, and its axes for each dimension.


def _from_named(data: bytes) -> Tiling:
    sizes: list[int] = []
    devices: list[int] = []
    dims: list[list[Digit]] = []
    others: dict[int, list[Digit]] = {4: [], 5: [], 7: []}
    refs: list[tuple[int, bytes]] = []
    for field, value in _fields(data):
        if field == 2:
            for part, content in _fields(_message(value)):
                if part == 1:
                    sizes.append(dict(_fields(_message(content))).get(2, 1))  # type: ignore[arg-type]  # field 2 is a number
                elif part == 2:
                    devices += _integers(content)
                else:
                    raise MalformedShardingError(f"its mesh has a field {part}, which is not known")
        elif field == 3 or field in others:
            refs.append((field, _message(value)))
        elif field not in (1, 6):
            raise MalformedShardingError(f"its named sharding has a field {field}, which is not known")
    if any(not isinstance(size, int) or size < 1 for size in sizes):
        raise MalformedShardingError(f"its mesh is {sizes}")
    if not sizes:
        return Tiling(Kind.MAXIMAL if devices else Kind.REPLICATED)
    for field, content in refs:
        if field == 3:
            axes, closed = [], False
            for part, inner in _fields(content):
                if part == 1:
                    axes.append(_axis(_message(inner), sizes))
                elif part == 2:
                    closed = bool(inner)
            if not closed:
                raise UnrepresentableShardingError(
                    f"dimension {len(dims)} is open, it may be sharded further, which no PartitionSpec expresses"
                )
            dims.append(axes)
        else:
            others[field].append(_axis(content, sizes))
    return named_tiling(sizes, devices, dims, others[5], others[7])


def _axis(data: bytes, sizes: Sequence[int]) -> Digit:
    """The (size, stride) that an axis, or a part of one, has in the order of the devices of its mesh."""
    fields = dict(_fields(data))
    index = fields.get(1, 0)
    if not isinstance(index, int) or not 0 <= index < len(sizes):
        raise MalformedShardingError(f"it names axis {index} of a mesh of {len(sizes)}")
    stride = math.prod(sizes[index + 1 :])
    if 2 not in fields:
        return sizes[index], stride
    part = dict(_fields(_message(fields[2])))
    before, size = part.get(1, 1), part.get(2, 1)
    if (
        not isinstance(before, int)
        or not isinstance(size, int)
        or before < 1
        or size < 1
        or sizes[index] % (before * size)
    ):
        raise MalformedShardingError(
            f"it names a part of axis {index}, which has {sizes[index]} devices, that does not divide it"
        )
    return size, stride * (sizes[index] // (before * size))


# Fields: (number, varint or bytes)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    position, end = 0, len(data)
    while position < end:
        tag, position = _varint(data, position)
        if tag & 7 == 0:
            value, position = _varint(data, position)
            yield tag >> 3, value - (1 << 64) if value >> 63 else value
        elif tag & 7 == 2:
            length, position = _varint(data, position)
            if position + length > end:
                raise MalformedShardingError("the data ends within a field")
            yield tag >> 3, data[position : position + length]
            position += length
        else:
            raise MalformedShardingError(f"field {tag >> 3} has a wire type that no field of it has")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        position += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result & (1 << 64) - 1, position
        shift += 7
    raise MalformedShardingError("the data ends within a number")


def _integers(value: int | bytes) -> list[int]:
    """The numbers of a repeated field, which come one by one or packed."""
    if isinstance(value, int):
        return [value]
    if not value or max(value) < 128:
        return [*value]
    numbers, position = [], 0
    while position < len(value):
        number, position = _varint(value, position)
        numbers.append(number - (1 << 64) if number >> 63 else number)
    return numbers


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise MalformedShardingError("a field is a number, but should be a message")
    return value
