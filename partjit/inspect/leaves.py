"""The arguments and results of a program, whose specs may be changed."""

import dataclasses
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

__all__ = ["Leaf"]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An argument or a result of a program.

    Attributes:
        name: its key path, as reports have it: `params['head']`, `result[0]`.
        shape, dtype: of the whole array.
        nbytes: bytes of the whole array.
        spec: the spec that the function requests for it; None if that is left to the partitioner.
        is_donated: whether its memory may be reused; never that of a result.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int
    spec: P | None = None
    is_donated: bool = False
