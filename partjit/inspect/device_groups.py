"""Groups of devices that communicate, as arrays: with thousands of devices a collective has thousands of them."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt
from jax.sharding import AbstractMesh, Mesh

__all__ = ["DeviceGroups"]


class DeviceGroups(Sequence[tuple[int, ...]]):
    """Groups of as many devices each, in order: a sequence of tuples, and equal to a tuple of them.

    The tuples are made when they are first read: of most collectives only the axes of the mesh are.

    Args:
        positions: a row for each group, of positions in the order of the mesh.
        mesh: the mesh whose device ids the tuples have; None for the positions, which are the ids on an abstract mesh.

    Example:
        >>> groups = DeviceGroups(np.arange(8).reshape(2, 4).T)
        >>> groups[1], groups == ((0, 4), (1, 5), (2, 6), (3, 7))
        ((1, 5), True)
        >>> groups.axes(AbstractMesh((2, 4), ("x", "y")))
        ('x',)
    """

    def __init__(self, positions: npt.NDArray[np.int64], mesh: Mesh | AbstractMesh | None = None) -> None:
        self.positions = positions
        self._mesh = None if isinstance(mesh, AbstractMesh) else mesh
        self._axes: dict[tuple[tuple[str, int], ...], tuple[str, ...]] = {}

    @functools.cached_property
    def _tuples(self) -> tuple[tuple[int, ...], ...]:
        numbers = self.positions if self._mesh is None else _ids(self._mesh)[self.positions]
        return tuple(map(tuple, numbers.tolist()))

    @overload
    def __getitem__(self, key: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[tuple[int, ...], ...]: ...
    def __getitem__(self, key: int | slice) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
        return self._tuples[key]

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self._tuples)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DeviceGroups):
            if self._mesh == other._mesh:
                return np.array_equal(self.positions, other.positions)
            other = other._tuples
        return self._tuples == other

    def __hash__(self) -> int:
        return hash(self._tuples)

    def __repr__(self) -> str:
        return repr(self._tuples)

    @property
    def group_size(self) -> int:
        """The number of devices in each group."""
        return self.positions.shape[1]

    def on(self, mesh: Mesh | AbstractMesh) -> "DeviceGroups":
        """The same groups, with the ids of the devices of a mesh."""
        if self._mesh is (None if isinstance(mesh, AbstractMesh) else mesh):
            return self
        found = DeviceGroups(self.positions, mesh)
        found._axes = self._axes
        return found

    def within(self, rows: npt.NDArray[np.int64]) -> "DeviceGroups":
        """The same groups in each row of devices, where they are positions in a row."""
        return DeviceGroups(rows[:, self.positions].reshape([-1, self.group_size]))

    def paired_with(self, others: npt.NDArray[np.int64]) -> "DeviceGroups":
        """Pairs of each device and the one in its place among others."""
        return DeviceGroups(np.stack([self.positions.ravel(), others.ravel()], axis=1))

    def axes(self, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
        """The axes of the mesh whose product each group is, in the mesh's order; none if there are none."""
        key = mesh.shape_tuple
        if key not in self._axes:
            self._axes[key] = self._product(mesh)
        return self._axes[key]

    def _product(self, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
        if self.positions.size != mesh.size:
            return ()
        is_there = np.zeros(mesh.size, bool)
        is_there[self.positions.ravel()] = True
        if not is_there.all():
            return ()
        axes = _moving(self.positions, self.positions[:, :1], mesh)
        # The members of a group differ along these axes only: if there are enough of them, they are the product.
        return axes if math.prod(mesh.shape[name] for name in axes) == self.group_size else ()

    def axes_of_pairs(self, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
        """The axes along which the first and the second device of any group differ, in the mesh's order."""
        return _moving(self.positions[:, 0], self.positions[:, 1], mesh)

    @property
    def moving(self) -> int:
        """The number of pairs of different devices."""
        return int(np.count_nonzero(self.positions[:, 0] != self.positions[:, 1]))


def _moving(these: npt.NDArray[np.int64], those: npt.NDArray[np.int64], mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes of a mesh along which any of these positions differ from those."""
    pairs = zip(*(np.unravel_index(of, mesh.axis_sizes) for of in (these, those)), strict=True)
    return tuple(name for name, (one, other) in zip(mesh.axis_names, pairs, strict=True) if (one != other).any())


@functools.lru_cache(maxsize=16)
def _ids(mesh: Mesh) -> npt.NDArray[np.int64]:
    """The ids of the devices of a mesh, in its order."""
    return np.array([device.id for device in mesh.devices.flat])
