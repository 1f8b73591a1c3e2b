"""Which equations XLA computes where their results are used, and which need copies of their operands.

Source: `CpuInstructionFusion`, `InstructionFusion`, `TransposeFolding` and `DotDecomposer` of XLA.
"""

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from jax.extend.core import Jaxpr, JaxprEqn, Var

from partjit._jax.jaxprs import type_of
from partjit.inspect.inlining import mark_p

__all__ = [
    "CONSUMERS",
    "ELEMENTWISE",
    "FUSED",
    "UPDATES",
    "is_fused",
    "transposed_operands",
    "turned_operands",
    "used_equations",
    "users_of",
]

_VIEWS = {"reshape", "squeeze", "expand_dims", "copy", "copy_p", "sharding_constraint", "optimization_barrier", "name"}
_SHAPED = {"broadcast_in_dim", "iota", "convert_element_type", "select_n", "slice", "rev", "pad", "transpose"}
ELEMENTWISE = {
    *("abs", "add", "add_any", "and", "atan2", "ceil", "clamp", "cos", "cosh", "div", "eq", "erf", "erf_inv", "exp"),
    *("exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt"),
    *("max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "real", "rem", "round", "rsqrt", "select_n"),
    *("sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor", "convert_element_type", "stop_gradient"),
}
_EXPENSIVE = {
    *("exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "sin", "cos", "pow", "erf", "rsqrt", "sqrt", "div"),
    *("rem", "atan2", "tan", "sinh", "cosh", "erf_inv", "integer_pow"),
}
"""These are not computed several times."""
UPDATES = {"dynamic_update_slice", "scatter", "scatter-add", "scatter_add"}
"""These write over their first operand."""
FUSED = _VIEWS | _SHAPED | ELEMENTWISE
CONSUMERS = FUSED | {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax"}


def used_equations(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The equations of a jaxpr whose results are used, or that have effects."""
    needed = {var for var in jaxpr.outvars if isinstance(var, Var)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive is not mark_p and (eqn.effects or not needed.isdisjoint(eqn.outvars)):
            kept.append(eqn)
            needed.update(var for var in eqn.invars if isinstance(var, Var))
    return kept[::-1]


def users_of(eqns: Iterable[JaxprEqn]) -> dict[Var, list[JaxprEqn]]:
    """The equations that use each variable."""
    users: dict[Var, list[JaxprEqn]] = collections.defaultdict(list)
    for eqn in eqns:
        if eqn.primitive is not mark_p:
            for var in {var for var in eqn.invars if isinstance(var, Var)}:
                users[var].append(eqn)
    return users


def transposed_operands(eqn: JaxprEqn) -> Iterator[Var]:
    """The operands of which an equation needs a transposed copy.

    Those of a product may have the contracted dimensions first or last, behind those of the batch.
    """
    if eqn.primitive.name == "conv_general_dilated":
        yield from (atom for atom in eqn.invars if isinstance(atom, Var))
    elif eqn.primitive.name == "dot_general":
        for atom, contracted, batch in zip(eqn.invars, *eqn.params["dimension_numbers"], strict=True):
            inner = [dim for dim in range(type_of(atom).ndim) if dim not in batch]
            changes = sum((a in contracted) != (b in contracted) for a, b in itertools.pairwise(inner))
            if isinstance(atom, Var) and (changes > 1 or sorted(batch) != [*range(len(batch))]):
                yield atom


def turned_operands(eqn: JaxprEqn) -> Iterator[Var]:
    """The operands of which an iteration of a loop has transposed copies from its start, if it is given them.

    These are products' in which several dimensions are contracted that come first on the left, or last on the right.
    """
    if eqn.primitive.name == "dot_general":
        (left, right), _ = eqn.params["dimension_numbers"]
        for atom, contracted, wrong in zip(
            eqn.invars, (left, right), (0, type_of(eqn.invars[1]).ndim - 1), strict=True
        ):
            if isinstance(atom, Var) and len(contracted) > 1 and wrong in contracted:
                yield atom


def is_fused(eqn: JaxprEqn, users: Mapping[Var, Sequence[JaxprEqn]], results: Set[Var], read: int) -> bool:
    """Whether an equation is computed where its result is used.

    Args:
        eqn: the equation, which has one result.
        users: the equations that use each variable.
        results: the variables that its program returns.
        read: the number of buffers that its operands are computed from.
    """
    name, var = eqn.primitive.name, eqn.outvars[0]
    if name not in FUSED:
        return False
    if not read or (name in _VIEWS and (var not in results or read == 1)):
        return True
    if name == "transpose" and var not in results and type_of(var).ndim == 2:
        return all(user.primitive.name == "dot_general" or user.primitive.name in CONSUMERS for user in users[var])
    if var in results or any(user.primitive.name not in CONSUMERS for user in users.get(var, ())):
        return False
    is_cheap = name not in _EXPENSIVE and (name in _SHAPED or sum(isinstance(a, Var) for a in eqn.invars) == 1)
    return is_cheap or len(users.get(var, ())) == 1
