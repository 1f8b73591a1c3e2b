"""The shardings of values, and the arrays among the operands and results of operations, each read once."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax.extend.mlir import ir

from partjit.inspect.moves.model import Tensor, element_type
from partjit.shardy import TensorSharding

__all__ = ["Values", "are_alike"]


class Values:
    """The arrays among the operands and results of operations, of a module that is not changed meanwhile.

    Values of one type and sharding are one tensor, and each value is read once: a program has few of the former.
    """

    def __init__(
        self, sharding_of: Callable[[ir.Value], TensorSharding], known: Mapping[ir.Value, TensorSharding]
    ) -> None:
        self._sharding_of = sharding_of
        self._known = {**known}
        self._alike: dict[tuple[ir.Type, TensorSharding], Tensor] = {}

    def are_like_result(self, op: ir.Operation) -> bool:
        """Whether operands are known to be sharded like the only result of an operation; scalars are not sharded."""
        known = self._known
        result = known.get(op.result)
        if result is None or not result.axes:
            return result is not None
        for value in op.operands:
            sharding = known.get(value)
            if sharding is not result and (sharding is None or sharding.axes):
                return False
        return True

    def shardings(self, values: Iterable[ir.Value]) -> list[TensorSharding]:
        """The shardings of values."""
        return [self._known.get(value) or self._read(value) for value in values]

    def tensors(self, values: Iterable[Any]) -> tuple[Tensor, ...]:
        """The tensors of those that are arrays."""
        return tuple([self._tensor(value) for value in values if isinstance(value.type, ir.RankedTensorType)])

    def _read(self, value: Any) -> TensorSharding:
        # Scalars are not sharded, and those in the body of a reduction have no sharding to be read.
        is_array = isinstance(value.type, ir.RankedTensorType) and value.type.rank
        sharding = self._known[value] = self._sharding_of(value) if is_array else _SCALAR
        return sharding

    def _tensor(self, value: Any) -> Tensor:
        key = value.type, self._known.get(value) or self._read(value)
        if key not in self._alike:
            shape, itemsize, dtype = element_type(value)
            self._alike[key] = Tensor(shape, dtype, itemsize, key[1])
        return self._alike[key]


def are_alike(shardings: Iterable[TensorSharding]) -> bool:
    """Whether arrays are sharded alike; scalars are not sharded."""
    first = None
    for sharding in shardings:
        if sharding.axes and sharding is not first:
            if first is not None:
                return False
            first = sharding
    return True


_SCALAR = TensorSharding.replicated(0)
