"""The loops that equations before them were in.

jax computes what is the same in all iterations before a loop, in programs that it differentiates, and the frames of
such an equation end in the body of the loop. The loop has the line that calls it.
"""

import functools
from collections.abc import Mapping, Sequence

from partjit.inspect.annotated import AnnotatedEquation

__all__ = ["LoopsAround"]

_LOOPS = ("scan", "while")


class LoopsAround:
    """Finds the loops of a program, once all of its equations are known.

    Args:
        equations: the equations of the program, by their numbers.
    """

    def __init__(self, equations: Sequence[AnnotatedEquation]) -> None:
        self._equations = equations

    def of(self, equation: AnnotatedEquation) -> AnnotatedEquation | None:
        """The first loop that uses what an equation computes, or what others compute of it; None if there is none."""
        return self._found.get(equation.number)

    @functools.cached_property
    def _found(self) -> Mapping[int, AnnotatedEquation]:
        users: dict[int, list[AnnotatedEquation]] = {}
        for equation in self._equations:
            for value in equation.inputs:
                if not value.literal:
                    users.setdefault(value.number, []).append(equation)
        found: dict[int, AnnotatedEquation] = {}
        for equation in reversed(self._equations):
            of_results = [user for value in equation.outputs for user in users.get(value.number, ())]
            loops = (user if user.primitive in _LOOPS else found.get(user.number) for user in of_results)
            first = min((loop for loop in loops if loop is not None), key=lambda loop: loop.number, default=None)
            if first is not None:
                found[equation.number] = first
        return found
