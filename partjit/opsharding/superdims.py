"""Orders of devices as mixed-radix digits.

Each axis of a mesh is a digit of the device number, (size, stride), which counts from 0 to `size - 1` in steps of
`stride`. A transposition of the mesh permutes the digits. Contiguous digits are indistinguishable from a single one, a
superdim, which is split again where the sizes are known.
"""

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence

import numpy as np

from partjit.checks import items_of, require, require_integer, wrong_type

__all__ = [
    "Digit",
    "axes_by_top",
    "axes_of_shape",
    "digits_of",
    "digits_of_array",
    "explode_superdims",
    "strides_for_sizes",
    "unflatten_array",
    "unflatten_superdims",
]

Digit = tuple[int, int]
"""(size, stride): counts from 0 to size - 1 in steps of stride."""


def strides_for_sizes(sizes: Sequence[int]) -> np.ndarray:
    """The strides of dimensions of these sizes, major to minor: each is the product of the sizes after it.

    Args:
        sizes: int64, each at least 1.

    Returns:
        An int64 array as long as `sizes`.

    Raises:
        TypeError, ValueError: a size is no integer of at least 1.

    Example:
        >>> strides_for_sizes([2, 3, 4])
        array([12,  4,  1])

    Source: the function of this name of `jax.experimental.pjit` as of jax 0.2.26, as are the next three.
    """
    array = _numbers("strides_for_sizes", "sizes", sizes, least=1)
    return np.cumprod(np.append(1, array[:0:-1]), dtype=np.int64)[::-1][: len(array)]


def unflatten_superdims(assignment: Sequence[int] | np.ndarray) -> list[Digit]:
    """The fewest digits that generate `assignment`.

    Args:
        assignment: a permutation of 0, ..., n - 1.

    Returns:
        (size, stride) pairs, minor to major: `assignment` is the outer sum of `stride * arange(size)` of all of them,
        flattened with the first pair running fastest.

    Raises:
        NotImplementedError: there are no such digits.
        TypeError, ValueError: it does not consist of numbers.

    Example:
        >>> unflatten_superdims([0, 2, 4, 1, 3, 5])
        [(3, 2), (2, 1)]
        >>> unflatten_superdims([0, 2, 3, 1])
        Traceback (most recent call last):
            ...
        NotImplementedError: [0, 2, 3, 1] is no transposition of a grid of devices
    """
    flat = _numbers("unflatten_superdims", "assignment", assignment).tolist()
    digits = digits_of(flat)
    if digits is None:
        shown = f"{str(flat[:16])[:-1]}, ...]" if len(flat) > 16 else flat
        raise NotImplementedError(f"{shown} is no transposition of a grid of devices")
    return digits


def digits_of(flat: Sequence[int]) -> list[Digit] | None:
    """As `unflatten_superdims`, for integers that are checked already; None if there are no such digits."""
    digits: list[Digit] = []
    heads = [*flat]
    while len(heads) > 1:
        stride = heads[1] - heads[0]
        differs = map(operator.ne, heads, itertools.count(heads[0], stride))
        size = next(itertools.compress(itertools.count(), differs), len(heads))
        if stride < 1 or len(heads) % size:
            return None
        runs = (range(first, first + size * stride, stride) for first in heads[::size])
        if heads != [*itertools.chain.from_iterable(runs)]:
            return None
        digits.append((size, stride))
        heads = heads[::size]
    return digits if heads == [0] and _count(digits) else None


def digits_of_array(flat: np.ndarray) -> list[Digit] | None:
    """As `digits_of`, for an int64 vector; faster if it is long."""
    if flat.min() < 0 or flat.max() >= len(flat):  # so that differences are no larger
        return None
    digits: list[Digit] = []
    heads = flat
    while len(heads) > 1:
        stride = int(heads[1] - heads[0])
        ends = np.flatnonzero(heads[1:] - heads[:-1] != stride) + 1
        size = int(ends[0]) if len(ends) else len(heads)
        if stride < 1 or len(heads) % size or (ends % size).any():
            return None
        digits.append((size, stride))
        heads = heads[::size]
    return digits if heads[0] == 0 and _count(digits) else None


def _count(digits: Sequence[Digit]) -> bool:
    """Whether digits together count from 0 to the last device."""
    count = 1
    for size, stride in sorted(digits, key=operator.itemgetter(1)):
        if stride != count:
            return False
        count *= size
    return True


def explode_superdims(sizes: Sequence[int], dims: Sequence[Digit]) -> list[Digit]:
    """Splits digits into the dimensions of a known shape.

    Args:
        sizes: of the shape, major to minor.
        dims: (size, stride) pairs, minor to major, as `unflatten_superdims` returns them.

    Returns:
        The dimensions of the shape (without those of size 1) as (size, stride) pairs, major to minor.

    Raises:
        NotImplementedError: a digit is no product of dimensions.
        TypeError, ValueError: a size is no number, or an item of `dims` no pair of numbers.

    Example:
        >>> explode_superdims([2, 3], [(6, 1)])
        [(2, 3), (3, 1)]
    """
    numbers = _numbers("explode_superdims", "sizes", sizes, least=1).tolist()
    by_top = axes_by_top(tuple((str(dim), size) for dim, size in enumerate(numbers)))
    exploded = []
    for size, stride in reversed(_digits(dims)):
        while size > 1:
            _, axis_size = by_top.get(size * stride, (None, 0))
            if not axis_size or size % axis_size:
                raise NotImplementedError(f"dimensions of sizes {numbers} do not make up {[*dims]}")
            size //= axis_size
            exploded.append((axis_size, size * stride))
    return exploded


def unflatten_array(named_sizes: Mapping[str, int], assignment: Sequence[int] | np.ndarray) -> list[str]:
    """The order of the axes of a mesh whose transposition `assignment` is.

    Args:
        named_sizes: the sizes of the axes by name, major to minor.
        assignment: a permutation of 0, ..., n - 1, n being the number of devices.

    Returns:
        The names of the axes that have more than one device, major to minor.

    Raises:
        NotImplementedError: it is no transposition of the mesh.
        TypeError, ValueError: the sizes are no mapping to numbers, or the assignment does not consist of numbers.

    Example:
        >>> unflatten_array({"x": 2, "y": 3}, [0, 3, 1, 4, 2, 5])
        ['y', 'x']
    """
    require("unflatten_array", "named_sizes", named_sizes, Mapping, "a mapping from the names of axes to their sizes")
    _numbers("unflatten_array", "named_sizes", [*named_sizes.values()], least=1)
    assignment = _numbers("unflatten_array", "assignment", assignment)
    names = {(size, stride): name for name, size, stride in axes_of_shape(tuple(named_sizes.items()))}
    if len(assignment) != math.prod(named_sizes.values()):
        raise NotImplementedError(f"{len(assignment)} devices are no transposition of the mesh {dict(named_sizes)}")
    return [names[digit] for digit in explode_superdims([*named_sizes.values()], unflatten_superdims(assignment))]


_INT64 = np.iinfo(np.int64)


def _numbers(where: str, name: str, value: object, least: int = int(_INT64.min)) -> np.ndarray:
    """Integers as a vector."""
    if not (isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind == "i"):
        items = items_of(where, name, value, "a sequence of whole numbers")
        checked = [require_integer(where, f"{name}[{i}]", n, least, int(_INT64.max)) for i, n in enumerate(items)]
        value = np.array(checked, np.int64)
    if value.size and value.min() < least:
        raise ValueError(f"{where}: {name} must be at least {least}, but there is {value.min()} among them")
    return value.astype(np.int64, copy=False)


def _digits(dims: object) -> list[Digit]:
    found = []
    for i, dim in enumerate(items_of("explode_superdims", "dims", dims, "a sequence of pairs (size, stride)")):
        pair = items_of("explode_superdims", f"dims[{i}]", dim, "a pair (size, stride)")
        if len(pair) != 2:
            raise wrong_type("explode_superdims", f"dims[{i}]", dim, "a pair (size, stride)")
        size, stride = (require_integer("explode_superdims", f"dims[{i}]", n, 1, int(_INT64.max)) for n in pair)
        found.append((size, stride))
    return found


@functools.lru_cache(maxsize=256)
def axes_of_shape(shape: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int, int], ...]:
    """(name, size, stride) of the axes that have more than one device."""
    strides = strides_for_sizes([size for _, size in shape])
    return tuple((name, size, int(stride)) for (name, size), stride in zip(shape, strides, strict=True) if size > 1)


@functools.lru_cache(maxsize=256)
def axes_by_top(shape: tuple[tuple[str, int], ...]) -> dict[int, tuple[str, int]]:
    """(name, size) of each axis by the product of its size and stride."""
    return {size * stride: (name, size) for name, size, stride in axes_of_shape(shape)}
