"""Which equations XLA computes where their results are used.

Source: `CpuInstructionFusion`, `InstructionFusion`, `TransposeFolding` and `DotDecomposer` of XLA.
"""

import math

from partjit.inspect.skeleton import Body, Equation, Variable

__all__ = ["CONSUMERS", "ELEMENTWISE", "FUSED", "UPDATES", "is_fused"]

_VIEWS = {"reshape", "squeeze", "expand_dims", "copy", "copy_p", "sharding_constraint", "optimization_barrier", "name"}
_VIEWS |= {"reshard"}
_SHAPED = {"broadcast_in_dim", "iota", "convert_element_type", "select_n", "slice", "rev", "pad", "transpose", "tile"}
_SHAPED |= {"dynamic_slice"}
ELEMENTWISE = {
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil"),
    *("clamp", "clz", "complex", "conj", "convert_element_type", "cos", "cosh", "div", "eq", "erf", "erf_inv", "erfc"),
    *("exp", "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "log", "log1p"),
    *("logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "one_minus_square", "or"),
    *("population_count", "pow", "real", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic"),
    *("shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"),
}
_EXPENSIVE = {
    *("exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "sin", "cos", "pow", "erf", "rsqrt", "sqrt", "div"),
    *("rem", "atan2", "tan", "sinh", "cosh", "erf_inv", "integer_pow", "acos", "acosh", "asin", "asinh", "atan"),
    *("atanh", "cbrt", "erfc"),
}
"""These are not computed several times."""
UPDATES = {"dynamic_update_slice", "scatter", "scatter-add", "scatter_add"}
"""These write over their first operand."""
FUSED = _VIEWS | _SHAPED | ELEMENTWISE | {"gather"}
REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod"}
CONSUMERS = FUSED | REDUCTIONS | {"argmax"}


def is_fused(eqn: Equation, body: Body, read: int) -> bool:
    """Whether an equation is computed where its result is used.

    Args:
        eqn: the equation.
        body: the jaxpr that it is in, where what was found is noted: it is the same whatever the shardings.
        read: the number of buffers that its operands are computed from.
    """
    key = eqn, read if read < 2 else 2
    found = body.fused.get(key)
    if found is None:
        found = body.fused[key] = _is_fused(eqn, body, read)
    return found


def _is_fused(eqn: Equation, body: Body, read: int) -> bool:
    if len(eqn.outvars) != 1:
        is_used = (user.name in CONSUMERS for var in eqn.outvars for user in body.users.get(var, ()))
        return eqn.name == "split" and all(is_used) and not {*eqn.outvars} & {*body.outvars}
    name, var = eqn.name, eqn.outvars[0]
    if name in REDUCTIONS and _is_view(eqn):
        return True
    if name not in FUSED:
        return False
    is_result = var in body.outvars
    if not read or (name in _VIEWS and (not is_result or read == 1)):
        return True
    users = body.users.get(var, ())
    if name == "transpose" and not is_result and var.ndim == 2:
        return all(user.name == "dot_general" or user.name in CONSUMERS for user in users)
    if is_result or any(user.name not in CONSUMERS for user in users):
        return False
    is_cheap = name not in _EXPENSIVE and (name in _SHAPED or sum(isinstance(a, Variable) for a in eqn.invars) == 1)
    return is_cheap or len(users) == 1


def _is_view(eqn: Equation) -> bool:
    """Whether a reduction is one over dimensions of size 1, which XLA makes a reshape."""
    (operand,) = eqn.invars
    return isinstance(operand, Variable) and math.prod(operand.shape) == math.prod(eqn.outvars[0].shape)
