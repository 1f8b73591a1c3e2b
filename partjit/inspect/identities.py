"""Primitives of other packages that are lowered to nothing: what they compute is one of their operands.

Equinox has such ones, for what its loops select where they are under `vmap`, and not elsewhere.
"""

import functools
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Primitive

from partjit._jax.jaxprs import Atom, type_of

__all__ = ["passed_operand"]

_OWN = ("jax", "partjit")
_MAIN = "main"


def passed_operand(eqn: JaxprEqn) -> Atom | None:
    """The operand that is the result of an equation, as its primitive is lowered; None if that computes something.

    Those of jax are known by name, and are not looked at. One that cannot be lowered by itself is taken to compute.
    """
    if len(eqn.outvars) != 1 or eqn.effects or not _is_of_others(eqn.primitive):
        return None
    result, types_ = type_of(eqn.outvars[0]), [type_of(atom) for atom in eqn.invars]
    if not any((one.shape, one.dtype) == (result.shape, result.dtype) for one in types_):
        return None
    params = tuple(eqn.params.items())
    if not all(isinstance(value, Hashable) for _, value in params):
        return None
    position = _passed(eqn.primitive, params, tuple((one.shape, one.dtype) for one in types_))
    return None if position is None else eqn.invars[position]


def _is_of_others(primitive: Primitive) -> bool:
    """Whether neither jax nor this package evaluates a primitive: jax evaluates its own by compiling them."""
    impl = primitive.impl
    return isinstance(impl, types.FunctionType) and impl.__module__.partition(".")[0] not in _OWN


@functools.lru_cache(maxsize=1024)
def _passed(primitive: Primitive, params: Sequence[tuple[str, Hashable]], shapes: Sequence[tuple]) -> int | None:
    def bound(*operands: jax.Array) -> jax.Array:
        given: Mapping[str, object] = dict(params)
        return primitive.bind(*operands, **given)

    structs = [jax.ShapeDtypeStruct(*one) for one in shapes]
    try:
        module: Any = jax.jit(bound, keep_unused=True).lower(*structs).compiler_ir()
    except Exception:  # of any package; it may be lowered in the scope of an axis alone
        return None
    (main,) = (op for op in module.body.operations if op.attributes["sym_name"].value == _MAIN)
    (block,) = main.regions[0].blocks
    (result,) = block.operations[len(block.operations) - 1].operands
    return next((k for k, operand in enumerate(block.arguments) if operand == result), None)
