"""The device groups of collectives, and the mesh axes that they communicate over.

HLO writes groups in several forms, and the attributes of an instruction determine what the numbers in them are:
replicas, partitions or both. Here they all become groups of positions in the device assignment of the program, which is
the order of `mesh.devices.flat`. Unknown forms are errors: a group that was not parsed would look like one of all
devices.
"""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from jax.sharding import AbstractMesh, Mesh

from partjit.inspect.device_groups import DeviceGroups

__all__ = [
    "Groups",
    "axes_of_groups",
    "axes_of_pairs",
    "device_ids",
    "expand",
    "groups_over",
    "parse_groups",
    "parse_pairs",
]

Groups = Sequence[tuple[int, ...]]

_LIST = re.compile(r"\{\s*(?:\{[\d,\s]*\}[,\s]*)*\}")
_IOTA = re.compile(r"\[(?P<grid>\d+,\d+)\]<=\[(?P<reshape>[\d,]+)\](?:T\((?P<perm>[\d,]+)\))?")
_MESH = re.compile(
    r"mesh\[(?P<mesh>[^\]]*)\]"
    r"(?:,\s*device_ids=\((?:(?:<=)?\[(?P<reshape>[\d,]+)\](?:T\((?P<perm>[\d,]+)\))?|(?P<devices>[\d,]+))\))?"
    r"\s*\{(?P<axes>.*)\}"
)
_SIZE = re.compile(r"'?(?P<name>[^'=]*)'?=(?P<size>\d+)")
_AXIS = re.compile(r"\s*'?(?P<name>[^',:]+)'?(?::\((?P<before>\d+)\)(?P<size>\d+))?\s*(?:,|$)")


def parse_groups(text: str) -> Groups:
    """The groups of a `replica_groups=` attribute; none if it puts all devices into one group.

    Args:
        text: a list `{{0,1},{2,3}}`, the iota form `[4,2]<=[2,4]T(1,0)`, or axes or parts of axes of a mesh of its own:
            `mesh['x'=4,'y'=2] {'y'}`, `mesh['x'=4,'y'=2] {'x':(2)2}`.

    Raises:
        ValueError: it is none of these.

    Example:
        >>> parse_groups("[4,2]<=[2,4]T(1,0)") == parse_groups("mesh['x'=2,'y'=4] {'x'}")
        True
        >>> parse_groups("[4,2]<=[2,4]T(1,0)")
        ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    stripped = text.strip()
    if _LIST.fullmatch(stripped):
        groups = [_numbers(group) for group in re.findall(r"\{([\d,\s]*)\}", stripped[1:-1])]
        return tuple(group for group in groups if group)
    if match := _IOTA.fullmatch(stripped):
        numbers = _iota(match["reshape"], match["perm"], text)
        count, size = _numbers(match["grid"])
        if numbers.size != count * size:
            raise _malformed(text, f"{count} groups of {size} are not {numbers.size} devices")
        return DeviceGroups(numbers.reshape(count, size))
    if match := _MESH.fullmatch(stripped):
        return _groups_of_mesh(match, text)
    raise _malformed(text, "they are neither a list, nor an iota, nor axes of a mesh")


def parse_pairs(text: str) -> tuple[tuple[int, int], ...]:
    """The (source, target) pairs of a `source_target_pairs=` attribute.

    Raises:
        ValueError: it is not a list of pairs.

    Example:
        >>> parse_pairs("{{0,1},{1,0}}")
        ((0, 1), (1, 0))
    """
    if not _LIST.fullmatch(text.strip()):
        raise _malformed(text, "they are not a list of pairs")
    pairs = []
    for group in parse_groups(text):
        if len(group) != 2:
            raise _malformed(text, f"{group} is no pair")
        pairs.append((group[0], group[1]))
    return tuple(pairs)


def expand(groups: Groups, replicas: int, partitions: int, channel: bool, global_ids: bool | None) -> Groups:
    """Groups as positions in the device assignment, which has partitions as its minor dimension.

    Args:
        groups: as the instruction has them; none means one group of all.
        replicas, partitions: their numbers in the program.
        channel: whether the instruction has a channel.
        global_ids: its `use_global_device_ids`; None for opcodes without that attribute.

    Source: `GetCollectiveOpGroupMode` of XLA.
    """
    everyone = range(
        replicas * partitions if global_ids else partitions if channel and global_ids is None else replicas
    )
    groups = groups or (tuple(everyone),)
    outside = [number for group in groups for number in group if number not in everyone]
    if outside:
        raise ValueError(f"a collective names device {outside[0]}, but its program has only {len(everyone)}")
    if global_ids:  # the numbers are positions already
        return groups
    if not channel:  # replicas, the same in each partition
        return tuple(tuple(r * partitions + p for r in group) for p in range(partitions) for group in groups)
    if global_ids is None:  # partitions, the same in each replica
        return tuple(tuple(r * partitions + p for p in group) for r in range(replicas) for group in groups)
    # Replicas with all of their partitions.
    return tuple(tuple(r * partitions + p for r in group for p in range(partitions)) for group in groups)


def axes_of_groups(groups: Groups, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes of the mesh whose product each group of positions is, in the mesh's order; none if there are none.

    Example:
        >>> axes_of_groups(((0, 4), (1, 5), (2, 6), (3, 7)), AbstractMesh((2, 4), ("x", "y")))
        ('x',)
        >>> axes_of_groups(((0, 1), (2, 3), (4, 5), (6, 7)), AbstractMesh((2, 4), ("x", "y")))
        ()
    """
    if len({len(group) for group in groups}) != 1:
        return ()
    return _arrays(groups).axes(mesh)


def axes_of_pairs(pairs: Groups, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes of the mesh along which any of these sources and targets differ, in the mesh's order.

    Example:
        >>> axes_of_pairs(((0, 4), (4, 0), (1, 1)), AbstractMesh((2, 4), ("x", "y")))
        ('x',)
    """
    if not pairs:
        return ()
    return _arrays(pairs).axes_of_pairs(mesh)


def device_ids(groups: Groups, mesh: Mesh | AbstractMesh) -> Groups:
    """The same groups with the devices' ids; those of an abstract mesh are its positions."""
    if isinstance(mesh, AbstractMesh):
        return groups
    ids = [device.id for device in mesh.devices.flat]
    return tuple(tuple(ids[number] for number in group) for group in groups)


def groups_over(chosen: Sequence[tuple[str, int, int]], sizes: Mapping[str, int]) -> DeviceGroups:
    """The groups of positions in a mesh that differ along axes, or parts of axes, only.

    Args:
        chosen: of each the name, the size of what is major to it in its axis, and its own size.
        sizes: of the axes of the mesh.

    Raises:
        ValueError: a part of an axis does not divide it.

    Example:
        >>> groups_over([("y", 1, 2)], {"x": 2, "y": 4})
        ((0, 2), (1, 3), (4, 6), (5, 7))
    """
    return DeviceGroups(_grouped(np.arange(math.prod(sizes.values())), chosen, sizes))


def _arrays(groups: Groups) -> DeviceGroups:
    return groups if isinstance(groups, DeviceGroups) else DeviceGroups(np.array(groups))


def _groups_of_mesh(match: re.Match[str], text: str) -> Groups:
    named = [_SIZE.fullmatch(part.strip()) for part in match["mesh"].split(",")]
    sizes = {size["name"]: int(size["size"]) for size in named if size}
    if len(sizes) != len(named):
        raise _malformed(text, f"[{match['mesh']}] is no mesh")
    if match["devices"]:
        numbers = np.array(_numbers(match["devices"]))
    elif match["reshape"]:
        numbers = _iota(match["reshape"], match["perm"], text)
    else:
        numbers = np.arange(math.prod(sizes.values()))
    if numbers.size != math.prod(sizes.values()):
        raise _malformed(text, f"{numbers.size} devices are no mesh [{match['mesh']}]")
    chosen, position = [], 0
    while position < len(match["axes"]):
        axis = _AXIS.match(match["axes"], position)
        if axis is None or axis["name"] not in sizes:
            raise _malformed(text, f"{{{match['axes']}}} names what is no axis of its mesh")
        chosen.append((axis["name"], int(axis["before"] or 1), int(axis["size"] or sizes[axis["name"]])))
        position = axis.end()
    try:
        return DeviceGroups(_grouped(numbers, chosen, sizes))
    except ValueError as error:
        raise _malformed(text, str(error)) from None


def _grouped(
    numbers: npt.NDArray[np.int64], chosen: Sequence[tuple[str, int, int]], sizes: Mapping[str, int]
) -> npt.NDArray[np.int64]:
    """Devices, in the order of a mesh, in groups that differ along these parts of its axes only; a row for each."""
    # Every axis is split where a part of it begins or ends; each piece is a dimension.
    parts = [(name, before, before * size) for name, before, size in chosen]
    cuts = {
        name: sorted({1, size, *(c for n, *part in parts if n == name for c in part)}) for name, size in sizes.items()
    }
    dims = [(name, low, high) for name in sizes for low, high in zip(cuts[name], cuts[name][1:], strict=False)]
    grid = [high // low for _, low, high in dims]
    if any(high % low for _, low, high in dims) or math.prod(grid) != numbers.size:
        raise ValueError("a part of an axis does not divide it")
    grouped = [
        k for name, low, high in parts for k, (n, a, b) in enumerate(dims) if n == name and low <= a and b <= high
    ]
    others = [k for k in range(len(dims)) if k not in grouped]
    return numbers.reshape(grid).transpose(others + grouped).reshape(-1, math.prod(grid[k] for k in grouped))


def _iota(reshape: str, perm: str | None, text: str) -> np.ndarray:
    dims = _numbers(reshape)
    order = _numbers(perm) if perm else range(len(dims))
    if sorted(order) != [*range(len(dims))]:
        raise _malformed(text, f"T({perm}) is no order of {len(dims)} dimensions")
    return np.arange(math.prod(dims)).reshape(dims).transpose(tuple(order)).reshape(-1)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _malformed(text: str, why: str) -> ValueError:
    shown: Sequence[str] = text if len(text) < 200 else text[:200] + "..."
    return ValueError(f"the groups {shown} of a collective cannot be parsed: {why}")
