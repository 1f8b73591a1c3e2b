"""Which equations XLA computes where their results are used.

Source: `CpuInstructionFusion`, `InstructionFusion`, `TransposeFolding` and `DotDecomposer` of XLA.
"""

import math

from partjit._jax.versions import RELEASE
from partjit.inspect.operands import CUMULATIVE
from partjit.inspect.skeleton import REDUCTIONS, WINDOWS, Body, Equation, Variable

__all__ = [
    "CONSUMERS",
    "CUMULATIVE",
    "ELEMENTWISE",
    "FUSED",
    "UPDATES",
    "VIEWS",
    "find_fused",
    "is_cheap",
    "is_fused",
    "viewed",
]

VIEWS = {"reshape", "squeeze", "expand_dims", "copy", "copy_p", "sharding_constraint", "optimization_barrier", "name"}
VIEWS |= {"reshard", "pvary", "pcast"}
_SHAPED = {"broadcast_in_dim", "iota", "convert_element_type", "select_n", "slice", "rev", "pad", "transpose", "tile"}
_SHAPED |= {"dynamic_slice", WINDOWS}
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
FUSED = VIEWS | _SHAPED | ELEMENTWISE | {"gather"}
_JOINS = {"concatenate", "stack"}
_MOVING = {"slice", "split", "rev", "pad", "dynamic_slice", "concatenate", "stack"}
"""An element of what these compute is that of another place of an operand."""
CONSUMERS = FUSED | REDUCTIONS | {"argmax"}
_WITH_COPIES = ("conv_general_dilated", "dot_general", *CUMULATIVE)
_MOST_JOINED = 8
_CONTIGUOUS = 64 if RELEASE >= (0, 12) else 512
"""Of a concatenation along the last dimension, the bytes from which on it is a copy of its own."""
_JOINED = 2048 if RELEASE >= (0, 12) else 0


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


def find_fused(body: Body) -> None:
    """Notes what is used several times, the last first: it depends on what uses it, through all of a long program."""
    if not body.fused:
        for eqn in reversed(body.equations):
            if eqn.name in ELEMENTWISE and len(body.users.get(eqn.outvars[0], ())) > 1:
                is_fused(eqn, body, 2)


def _is_fused(eqn: Equation, body: Body, read: int) -> bool:
    if len(eqn.outvars) != 1:
        is_used = (_consumes(user, var) for var in eqn.outvars for user in body.users.get(var, ()))
        return eqn.name == "split" and all(is_used) and not {*eqn.outvars} & {*body.outvars}
    name, var = eqn.name, eqn.outvars[0]
    if eqn.is_view:
        return True
    if name not in FUSED and not (name in _JOINS and _is_fused_join(eqn)):
        return False
    is_result = var in body.outvars
    if name == "transpose" and var.ndim == 2 and read == 1 and _is_of_product(eqn, body):
        return True
    if not read or (name in VIEWS and (not is_result or read == 1)):
        return True
    users = _users(var, body)
    if users is None:
        return False
    if name == "transpose" and not is_result and var.ndim == 2:
        return all(user.name == "dot_general" or _consumes(user, of) for user, of in users)
    if is_result or any(not _consumes(user, of) for user, of in users):
        return False
    if (name == "pad" or name in _JOINS) and _is_read_at_several_places(var, body):
        return False
    if is_cheap(eqn, body) or len(users) == 1:
        return True
    return not _is_expensive(eqn, body) and _is_read_in_one_fusion(var, body)


def _is_read_in_one_fusion(var: Variable, body: Body) -> bool:
    """Whether all uses of a variable, and of what is computed from it where it is used, are in one fusion."""
    ends, frontier, seen = set[Equation](), [var], set[Variable]()
    while frontier and len(ends) < 2:
        one = frontier.pop()
        if one in body.outvars:
            return False
        for user in body.users.get(one, ()):
            if not is_fused(user, body, 2):
                ends.add(user)
            else:
                frontier += [of for of in user.outvars if of not in seen]
                seen.update(user.outvars)
    return len(ends) < 2


def is_cheap(eqn: Equation, body: Body) -> bool:
    """Whether an equation is computed anew for each fusion that uses its result."""
    name = eqn.name
    if name not in FUSED or _is_expensive(eqn, body):
        return False
    return name in _SHAPED or name in _JOINS or _reads_one(eqn, body)


def _is_read_at_several_places(var: Variable, body: Body) -> bool:
    """Whether one fusion needs several elements of a variable for one of its own.

    Then XLA does not compute them anew in it, if which operand they are of depends on where they are.
    """
    places: dict[Equation, set[object]] = {}
    frontier: list[tuple[Variable, object]] = [(var, None)]
    seen = set[tuple[Variable, object]]()
    while frontier:
        one = frontier.pop()
        if one in seen:
            continue
        seen.add(one)
        for user in body.users.get(one[0], ()):
            if not is_fused(user, body, 2):
                places.setdefault(user, set()).add(one[1])
            else:
                is_first = one[1] is None and user.name in _MOVING
                frontier += [(of, (user, of) if is_first else one[1]) for of in user.outvars]
    return any(len(found) > 1 for found in places.values())


def _is_of_product(eqn: Equation, body: Body) -> bool:
    """Whether its operand is a product that nothing else uses: XLA exchanges the factors."""
    (operand,) = eqn.invars
    if not isinstance(operand, Variable):
        return False
    maker = body.makers.get(operand)
    if maker is None or maker.name != "dot_general":
        return False
    return operand not in body.outvars and len(body.users[operand]) == 1


def _is_expensive(eqn: Equation, body: Body) -> bool:
    """Whether it is not computed several times. To divide by what is broadcast is to multiply by its reciprocal."""
    if eqn.name != "div":
        return eqn.name in _EXPENSIVE
    if not isinstance(divisor := eqn.invars[1], Variable):
        return False
    maker = body.makers.get(viewed(divisor, body))
    return divisor.shape == eqn.outvars[0].shape and (maker is None or maker.name != "broadcast_in_dim")


def _reads_one(eqn: Equation, body: Body) -> bool:
    """Whether all operands but one are literals or broadcast, or the same one."""
    operands = {viewed(atom, body) for atom in eqn.invars if isinstance(atom, Variable)}
    makers = (body.makers.get(atom) for atom in operands)
    return sum(maker is None or maker.name not in ("broadcast_in_dim", "iota") for maker in makers) <= 1


def viewed(var: Variable, body: Body) -> Variable:
    """What a variable is a view of."""
    maker = body.makers.get(var)
    while maker is not None and maker.name in VIEWS and isinstance(maker.invars[0], Variable):
        var = maker.invars[0]
        maker = body.makers.get(var)
    return var


def _users(var: Variable, body: Body) -> list[tuple[Equation, Variable]] | None:
    """The equations that use a variable or a view of it, and which of these; None if a view is a result."""
    found: list[tuple[Equation, Variable]] = []
    frontier = [var]
    while frontier:
        one = frontier.pop()
        for user in body.users.get(one, ()):
            if user.name not in VIEWS or user.name == "optimization_barrier":
                found.append((user, one))
            elif user.outvars[0] in body.outvars:
                return None
            else:
                frontier.append(user.outvars[0])
    return found


def _consumes(user: Equation, var: Variable) -> bool:
    """Whether an equation computes an operand where it uses it, or a transposed copy of it."""
    if user.name in _JOINS:
        return _is_fused_join(user)
    return user.name in CONSUMERS or (user.name in _WITH_COPIES and var in user.transposed)


def _is_fused_join(eqn: Equation) -> bool:
    (result,) = eqn.outvars
    is_copy = eqn.joined_bytes >= _CONTIGUOUS and math.prod(result.shape) * result.itemsize >= _JOINED
    return len(eqn.invars) <= _MOST_JOINED and not is_copy
