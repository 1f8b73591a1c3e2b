"""Which value is the gradient of an argument.

jax names the equations of a backward pass by `transpose(...)` in their scope. The gradient of an argument is the last
value of that pass from which the argument's new value, or a result with its path, is computed through values of its
shape, as optimizers do. Where there is no such result, it is what the backward pass computes from the values that meet
the argument in equations: those of the forward pass, and the cotangents.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr, AnnotatedValue
from partjit.inspect.why.dataflow import Dataflow, reachable
from partjit.inspect.why.key_paths import common_end, keys_of

__all__ = ["gradient_of", "is_backward"]


def is_backward(equation: AnnotatedEquation) -> bool:
    """Whether an equation belongs to a backward pass."""
    return "transpose(" in equation.scope


def gradient_of(
    tree: AnnotatedJaxpr, flow: Dataflow, argument: AnnotatedValue, results: Sequence[tuple[str, AnnotatedValue]]
) -> AnnotatedValue | None:
    """The gradient of an argument of a program with these results and their paths; None if none is recognized."""
    search = _Search(tree, flow, argument)
    number = search.from_results(results)
    if number is None:
        number = search.from_uses()
    return None if number is None else flow.values[number]


class _Search:
    def __init__(self, tree: AnnotatedJaxpr, flow: Dataflow, argument: AnnotatedValue) -> None:
        self._flow = flow
        self._argument = argument
        self._shape = argument.aval.shape
        self._outside = _outside_of_loops(tree)

    def from_results(self, results: Sequence[tuple[str, AnnotatedValue]]) -> int | None:
        """The value of the backward pass that the result of the argument is computed from."""
        ranked = []
        for order, (path, value) in enumerate(results):
            if value.is_array and value.aval.shape == self._shape and value.number >= 0:
                found, met = self._behind(value.number)
                if found:
                    ranked.append((self._rank(path, met), -order, found, met))
        ranked = [entry for entry in ranked if entry[0] > (False, 0, 0)]
        if not ranked:
            return None
        best, order, found, met = max(ranked, key=lambda entry: entry[:2])
        equal = [entry for entry in ranked if entry[0] == best]
        if len(equal) > 1:  # results of one array each, whose paths do not name an argument
            used = self.from_uses()
            _, _, found, met = next((entry for entry in equal if entry[2] == [used]), (best, order, found, met))
        return found[0] if len(found) == 1 else self._joined(found, met)

    def _rank(self, path: str, met: Collection[int]) -> tuple[bool, int, int]:
        """How well a result fits: whether it is computed from the argument, and how much of their paths is equal."""
        own, other = keys_of(self._argument.path or "") or (), keys_of(path) or ()
        same = common_end(own, other)
        # The gradient of an argument that is one array is a result of its own, or one of several in their order.
        alone = len(own) == 1 and all(key.isdigit() for key in other[1:])
        return self._argument.number in met, max(same, int(alone)), -abs(len(own) - len(other))

    def _behind(self, number: int) -> tuple[list[int], list[int]]:
        """The values of the backward pass that a value is computed from, nearest first, and those on the way there."""
        found = []

        def sources(at: int) -> Iterator[int]:
            edges = self._flow.made_by(at)
            if any(is_backward(edge.equation) for edge in edges):
                found.append(at)
            else:
                yield from (source for edge in edges for source in edge.sources if self._has_shape(source))

        met = [*reachable([number], sources)]
        # The gradient is the sum that a loop accumulates, not the term of one iteration.
        if found and not any(at in self._outside for at in found):
            outer = [at for at in met if at in self._outside and any(edge.crosses for edge in self._flow.made_by(at))]
            found = outer[-1:] or found
        return found, met

    def _joined(self, found: Sequence[int], met: Iterable[int]) -> int:
        """The first value on the paths that is computed from all of those found: their sum, in most cases."""
        order = sorted(number for number in met if number not in found and number in self._outside)
        parts: dict[int, set[int]] = {number: {number} for number in found}
        for number in order:
            computed_from = (parts.get(source, set()) for edge in self._flow.made_by(number) for source in edge.sources)
            parts[number] = set().union(*computed_from)
            if len(parts[number]) == len(found):
                return number
        return found[0]

    def from_uses(self) -> int | None:
        """The last value that the backward pass computes from the values that meet the argument."""
        partners, same = self._partners()
        edges = [
            edge
            for number in partners
            for edge in self._flow.used_by(number)
            if is_backward(edge.equation) and not edge.crosses and not same.intersection(edge.sources)
        ]
        # A product's equation has both operands; values that checkpointing recomputes are not among the partners.
        known = set(partners)
        edges = [edge for edge in edges if len(edge.sources) > 1 and known.issuperset(edge.sources)] or edges
        starts = [target for edge in edges for target in edge.targets]
        reached = [number for number in self._backward_from(starts) if number not in same and number in self._outside]
        fitting = [number for number in reached if self._has_shape(number)]
        last = [
            number
            for number in fitting
            if not any(target in fitting for edge in self._flow.used_by(number) for target in edge.targets)
        ]
        return last[0] if len(last) == 1 else None

    def _partners(self) -> tuple[list[int], set[int]]:
        """The values that meet the argument in equations, and the values that are the argument itself."""
        partners: set[int] = set()

        def renamed(number: int) -> Iterator[int]:
            for edge in self._flow.used_by(number):
                if edge.crosses or (len(edge.sources) == 1 and edge.equation.primitive in _MOVES):
                    yield from edge.targets
                else:
                    partners.update(edge.sources)

        def saved(number: int) -> Iterator[int]:
            """The values that loops keep of it for the backward pass."""
            return (target for edge in self._flow.used_by(number) if edge.crosses for target in edge.targets)

        same = {*reachable([self._argument.number], renamed)}
        return [*reachable(partners - same, saved)], same

    def _backward_from(self, starts: Iterable[int]) -> Iterable[int]:
        """Values of the backward pass that are computed from some by sums, reshapes and the like."""

        def following(number: int) -> Iterator[int]:
            for edge in self._flow.used_by(number):
                if is_backward(edge.equation) and (edge.crosses or edge.equation.primitive in _MOVES | _SUMS):
                    yield from edge.targets

        return reachable(starts, following)

    def _has_shape(self, number: int) -> bool:
        value = self._flow.values[number]
        return value.is_array and value.aval.shape == self._shape


_MOVES = {"convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "sharding_constraint", "slice"}
_SUMS = {"add", "add_any", "reduce_sum", "copy", "mul", "neg"}


def _outside_of_loops(tree: AnnotatedJaxpr) -> set[int]:
    """The numbers of values outside of the bodies of loops, branches and shard_maps."""
    found = {value.number for value in (*tree.constants, *tree.inputs, *tree.outputs)}
    for equation in tree.equations:
        found.update(value.number for value in equation.outputs)
        if equation.primitive not in ("scan", "while", "cond", "shard_map"):
            for body in equation.bodies.values():
                found |= _outside_of_loops(body)
    return found
