"""Trip counts of loops of a compiled program that XLA has not annotated.

The condition is analyzed if it compares an affine counter, which starts at a constant and changes by a constant, with
another one. A value is then `slot + offset`: a slot of the loop's state at the beginning of an iteration, and a
constant.
"""

import dataclasses
from collections.abc import Mapping

from partjit.inspect.hlo.text import Computation, Instruction, Module

__all__ = ["trip_count"]

# Opcodes that do not change an integer.
_PASSES = ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start")


@dataclasses.dataclass(frozen=True)
class _Linear:
    slot: int | None
    offset: int


@dataclasses.dataclass(frozen=True)
class _Comparison:
    direction: str
    left: _Linear
    right: _Linear


@dataclasses.dataclass(frozen=True)
class _State:
    """The parameter of a condition or body."""


_Value = _Linear | _Comparison | _State | None


def trip_count(loop: Instruction, around: Computation, module: Module) -> int | None:
    """The trip count of a `while` in a computation; None if it is unknown."""
    if loop.known_trip_count is not None:
        return loop.known_trip_count
    condition, body = (module.computations.get(name) for key in ("condition", "body") for name in loop.names_in(key))
    if condition is None or body is None or condition.root is None or body.root is None:
        return None
    comparison = _value(condition.root, condition, _parameters(condition), module)
    if not isinstance(comparison, _Comparison):
        return None
    left = _course(comparison.left, loop, around, body, module)
    right = _course(comparison.right, loop, around, body, module)
    if left is None or right is None:
        return None
    return _iterations(comparison.direction, left[0] - right[0], left[1] - right[1])


def _course(
    side: _Linear, loop: Instruction, around: Computation, body: Computation, module: Module
) -> tuple[int, int] | None:
    """The initial value of one side of the comparison, and its increment per iteration."""
    if side.slot is None:
        return side.offset, 0
    first = _value(_element(around, around.instructions[loop.operands[0]], side.slot), around, {}, module)
    after = _value(_element(body, body.root, side.slot), body, _parameters(body), module)
    if not (isinstance(first, _Linear) and first.slot is None):
        return None
    if not (isinstance(after, _Linear) and after.slot == side.slot):
        return None
    return first.offset + side.offset, after.offset


def _element(computation: Computation, tuple_: Instruction | None, slot: int) -> Instruction | None:
    """The instruction that computes one element of a tuple, if the tuple is built in the same computation."""
    while tuple_ is not None and tuple_.opcode == "copy":
        tuple_ = computation.instructions.get(tuple_.operands[0])
    if tuple_ is None or tuple_.opcode != "tuple":
        return None
    return computation.instructions.get(tuple_.operands[slot])


def _parameters(computation: Computation) -> Mapping[str, _Value]:
    return {name: _State() for name, found in computation.instructions.items() if found.opcode == "parameter"}


def _value(instruction: Instruction | None, inside: Computation, known: Mapping[str, _Value], module: Module) -> _Value:
    """The value of an instruction, if it is affine or a comparison."""
    if instruction is None:
        return None
    if instruction.name in known:
        return known[instruction.name]
    operands = [inside.instructions.get(name) for name in instruction.operands]
    if instruction.opcode == "constant":
        text = instruction.arguments.strip()
        return _Linear(None, int(text)) if text.removeprefix("-").isdigit() else None
    if instruction.opcode in _PASSES:
        return _value(operands[0], inside, known, module)
    if instruction.opcode == "get-tuple-element":
        state = _value(operands[0], inside, known, module)
        return _Linear(int(instruction.attributes["index"]), 0) if isinstance(state, _State) else None
    if instruction.opcode in ("fusion", "call"):
        (name,) = instruction.names_in("calls") or instruction.names_in("to_apply")
        called = module.computations[name]
        arguments: dict[str, _Value] = {}
        for parameter in called.instructions.values():
            if parameter.opcode == "parameter":
                operand = operands[int(parameter.arguments)]
                arguments[parameter.name] = _value(operand, inside, known, module)
        return _value(called.root, called, arguments, module)
    if instruction.opcode in ("add", "subtract", "compare"):
        left, right = (_value(operand, inside, known, module) for operand in operands)
        if isinstance(left, _Linear) and isinstance(right, _Linear):
            return _combined(instruction, left, right)
    return None


def _combined(instruction: Instruction, left: _Linear, right: _Linear) -> _Value:
    if instruction.opcode == "compare":
        return _Comparison(instruction.attributes["direction"], left, right)
    if instruction.opcode == "add" and (left.slot is None or right.slot is None):
        return _Linear(right.slot if left.slot is None else left.slot, left.offset + right.offset)
    if instruction.opcode == "subtract" and right.slot is None:
        return _Linear(left.slot, left.offset - right.offset)
    return None


def _iterations(direction: str, difference: int, step: int) -> int | None:
    """The first k at which `difference + k * step` no longer compares with 0 in this direction."""
    if direction in ("GT", "GE"):
        direction, difference, step = {"GT": "LT", "GE": "LE"}[direction], -difference, -step
    if direction == "LE":
        direction, difference = "LT", difference - 1
    if direction == "LT":
        if difference >= 0:
            return 0
        return -(difference // step) if step > 0 else None
    if direction == "NE":
        if not difference:
            return 0
        return -difference // step if step and difference % step == 0 and -difference // step > 0 else None
    if difference:  # EQ
        return 0
    return 1 if step else None
