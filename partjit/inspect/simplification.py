"""Equations as XLA simplifies them: a slice of what was concatenated reads the parts that it is of.

Where all uses of a concatenated array are slices, that array is never computed. A product with ones, as it is in the
gradient of a sum of squares, is the other factor. What is lowered to nothing is its operand.

Source: `AlgebraicSimplifierVisitor` of XLA, `HandleSlice` and `HandleMultiply`.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from jax.extend.core import JaxprEqn, Literal, Var, primitives

from partjit._jax.jaxprs import Atom, type_of
from partjit.inspect.identities import passed_operand

__all__ = ["simplified"]


def simplified(eqns: Iterable[JaxprEqn]) -> list[JaxprEqn]:
    """The equations of a jaxpr, in their order; those that are simplified compute the same variables."""
    joined: dict[Var, JaxprEqn] = {}
    ones = set[Atom]()
    made = list[JaxprEqn]()
    for eqn in eqns:
        name, first = eqn.primitive.name, eqn.invars[0] if eqn.invars else None
        source = joined.get(first) if isinstance(first, Var) else None
        new = [eqn]
        if source is not None and name == "slice":
            new = [_slice_of(eqn, source)]
        elif source is not None and name == "split":
            new = _split_of(eqn, source)
        elif name == "broadcast_in_dim" and isinstance(first, Literal) and first.val == 1:
            ones.add(eqn.outvars[0])
        elif name == "mul" and not ones.isdisjoint(atom for atom in eqn.invars if isinstance(atom, Var)):
            (factor, *_) = [atom for atom in eqn.invars if isinstance(atom, Literal) or atom not in ones] or eqn.invars
            new = [eqn.replace(primitive=primitives.reshape_p, invars=[factor])]
        elif (operand := passed_operand(eqn)) is not None:
            new = [eqn.replace(primitive=primitives.reshape_p, invars=[operand])]
        made += new
        joined.update((one.outvars[0], one) for one in new if one.primitive.name == "concatenate")
    return made


def _slice_of(eqn: JaxprEqn, source: JaxprEqn) -> JaxprEqn:
    strides, dim = eqn.params["strides"], source.params["dimension"]
    if strides is not None and any(stride != 1 for stride in strides):
        return eqn
    start, limit = eqn.params["start_indices"][dim], eqn.params["limit_indices"][dim]
    sizes, whole = type_of(eqn.outvars[0]).shape, type_of(source.outvars[0]).shape
    is_along = all(a == b for k, (a, b) in enumerate(zip(sizes, whole, strict=True)) if k != dim)
    return _of_parts(eqn, eqn.outvars[0], source, (start, limit), is_along) or eqn


def _split_of(eqn: JaxprEqn, source: JaxprEqn) -> list[JaxprEqn]:
    if eqn.params["axis"] != source.params["dimension"]:
        return [eqn]
    ends = [*itertools.accumulate(eqn.params["sizes"], initial=0)]
    pairs = zip(eqn.outvars, itertools.pairwise(ends), strict=True)
    found = [_of_parts(eqn, var, source, between, True) for var, between in pairs]
    made = [one for one in found if one is not None]
    return made if len(made) == len(found) else [eqn]


def _of_parts(
    eqn: JaxprEqn, result: Var, source: JaxprEqn, between: tuple[int, int], is_along: bool
) -> JaxprEqn | None:
    """What computes a slice of concatenated parts from some of these; None if it needs all, or a slice of several.

    Args:
        eqn: the equation whose result the slice is.
        result: the slice.
        source: the equation that concatenates.
        between: where the slice begins and ends along the dimension of the parts.
        is_along: whether it has all of the other dimensions.
    """
    needed, is_exact = _needed(source.invars, source.params["dimension"], between)
    if len(needed) == len(source.invars):
        return None
    if len(needed) == 1:
        primitive = primitives.reshape_p if is_exact and is_along else primitives.slice_p
        return eqn.replace(primitive=primitive, invars=needed, outvars=[result])
    if not is_exact or not is_along:
        return None
    return eqn.replace(primitive=source.primitive, params=source.params, invars=needed, outvars=[result])


def _needed(parts: Sequence[Atom], dim: int, between: tuple[int, int]) -> tuple[list[Atom], bool]:
    """The parts that are in a slice, and whether it consists of these."""
    (start, limit), needed = between, [*_touched(parts, dim, between)]
    return [part for part, _, _ in needed], bool(needed) and (needed[0][1], needed[-1][2]) == (start, limit)


def _touched(parts: Sequence[Atom], dim: int, between: tuple[int, int]) -> Iterator[tuple[Atom, int, int]]:
    start, limit = between
    end = 0
    for part in parts:
        begin, end = end, end + type_of(part).shape[dim]
        if begin < limit and start < end:
            yield part, begin, end
