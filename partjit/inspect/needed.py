"""Which equations of a program compute what it returns, or have effects. XLA removes the others."""

from collections.abc import Container

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr
from partjit.inspect.why.dataflow import crossings

__all__ = ["needed_equations"]

# fmt: off
_EFFECTS = frozenset((
    "io_callback", "debug_callback", "debug_print", "colocated_call", "swap", "addupdate", "masked_swap",
    "run_state", "infeed", "outfeed",
))
# fmt: on


def needed_equations(program: AnnotatedJaxpr) -> Container[int]:
    """The numbers of the equations without bodies of which a result is used, or that have effects.

    In loops a carried value is used if the loop's result is, or the condition, or what computes another used one.
    """
    found, values = set[int](), {value.number for value in program.outputs}
    _find(program, values, found)
    return found


def _find(program: AnnotatedJaxpr, values: set[int], found: set[int]) -> bool:
    """Adds the values and equations that are needed, the last ones first; returns whether any has an effect."""
    has_effect = False
    for equation in reversed(program.equations):
        if equation.bodies:
            has_effect |= _find_inside(equation, values, found)
            continue
        own = equation.primitive in _EFFECTS or not equation.outputs
        if own or any(value.number in values for value in equation.outputs):
            found.add(equation.number)
            values.update(value.number for value in equation.inputs)
        has_effect |= own
    return has_effect


def _find_inside(equation: AnnotatedEquation, values: set[int], found: set[int]) -> bool:
    pairs, has_effect, count = [*crossings(equation)], False, -1
    while count < len(values):  # what an iteration needs of the one before
        count = len(values)
        values.update(source.number for source, target in pairs if target.number in values)
        for body in equation.bodies.values():
            has_effect |= _find(body, values, found)
        is_needed = has_effect or any(value.number in values for value in equation.outputs)
        if is_needed and equation.primitive == "cond":
            values.add(equation.inputs[0].number)
        elif is_needed and equation.primitive == "while":
            values.update(value.number for value in equation.bodies["cond_jaxpr"].outputs)
    return has_effect
