"""The buffers that a value is computed from: its own, or several where it has none."""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from partjit.inspect.buffer_lifetimes import Buffer
from partjit.inspect.skeleton import Variable

__all__ = ["NONE", "Roots", "are_arguments", "as_large", "bound", "roots_of"]

Roots: TypeAlias = frozenset[Buffer]
NONE: Roots = frozenset()


def as_large(buffer: Buffer, others: Iterable[Buffer]) -> list[Buffer]:
    """Those of the same size, in the order of the program: sets have another one in each process."""
    nbytes = buffer.nbytes
    found = [one for one in others if one.nbytes == nbytes]
    return found if len(found) < 2 else sorted(found, key=lambda one: one.number)


def are_arguments(buffers: Roots) -> bool:
    """Whether a value is computed from arguments alone, at least one."""
    return bool(buffers) and all(buffer.start < 0 for buffer in buffers)


def bound(invars: Iterable[Variable], values: Iterable[Roots]) -> dict[Variable, Roots]:
    """What the arguments of a body are computed from."""
    return dict(zip(invars, values, strict=False))


def roots_of(atoms: Iterable[Variable | str], roots: Mapping[Variable, Roots]) -> list[Roots]:
    """What each of some operands is computed from."""
    return [NONE if isinstance(atom, str) else roots[atom] for atom in atoms]
