"""Which value is the gradient of an argument.

jax names what the backward pass computes by `transpose(...)` in the scope of its equations. The gradient of an argument
is the last value of that pass of which the argument's new value, or a result of its path, is made, step by step through
values of its shape: that is what optimizers do. Where no result is made so, it is what the backward pass computes from
the values that the argument meets: those of the forward pass, and the cotangents.
"""

import collections
from collections.abc import Collection, Iterable, Iterator, Sequence

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr, AnnotatedValue
from partjit.inspect.why.dataflow import Dataflow, DataflowEdge
from partjit.inspect.why.key_paths import common_end, keys_of

__all__ = ["gradient_of", "is_backward"]


def is_backward(equation: AnnotatedEquation) -> bool:
    """Whether an equation belongs to a backward pass."""
    return "transpose(" in equation.scope


def gradient_of(
    tree: AnnotatedJaxpr, flow: Dataflow, argument: AnnotatedValue, results: Sequence[tuple[str, AnnotatedValue]]
) -> AnnotatedValue | None:
    """The gradient of an argument; None if none is computed, or none is recognized.

    Args:
        tree: the program.
        flow: its ways.
        argument: the argument.
        results: the results of the program, each with its path.
    """
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
        """What the result that belongs to the argument is made of."""
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
        if len(equal) > 1:  # results of one array each, whose paths do not say of which argument they are
            used = self.from_uses()
            _, _, found, met = next((entry for entry in equal if entry[2] == [used]), (best, order, found, met))
        return found[0] if len(found) == 1 else self._joined(found, met)

    def _rank(self, path: str, met: Collection[int]) -> tuple[bool, int, int]:
        """How well a result fits: it is made of the argument itself; how much of their paths is the same."""
        own, other = keys_of(self._argument.path or "") or (), keys_of(path) or ()
        same = common_end(own, other)
        # The gradient of an argument that is one array is a result of its own, or one of several in their order.
        alone = len(own) == 1 and all(key.isdigit() for key in other[1:])
        return self._argument.number in met, max(same, int(alone)), -abs(len(own) - len(other))

    def _behind(self, number: int) -> tuple[list[int], dict[int, None]]:
        """The values of the backward pass that a value is made of, the nearest first, and those on the ways there."""
        met: dict[int, None] = {number: None}
        found, queue = [], collections.deque([number])
        while queue:
            at = queue.popleft()
            edges = self._flow.made_by(at)
            if any(is_backward(edge.equation) for edge in edges):
                found.append(at)
                continue
            for edge in edges:
                for source in edge.sources:
                    if source not in met and self._has_shape(source):
                        met[source] = None
                        queue.append(source)
        # What is summed up by a loop is the gradient, not what one turn adds to it.
        if found and not any(at in self._outside for at in found):
            outer = [at for at in met if at in self._outside and any(edge.crosses for edge in self._flow.made_by(at))]
            found = outer[-1:] or found
        return found, met

    def _joined(self, found: Sequence[int], met: Iterable[int]) -> int:
        """The first value on the way that is made of all that were found: their sum, in most cases."""
        order = sorted(number for number in met if number not in found and number in self._outside)
        parts: dict[int, set[int]] = {number: {number} for number in found}
        for number in order:
            made_of = (parts.get(source, set()) for edge in self._flow.made_by(number) for source in edge.sources)
            parts[number] = set().union(*made_of)
            if len(parts[number]) == len(found):
                return number
        return found[0]

    def from_uses(self) -> int | None:
        """What the backward pass computes from the values that the argument is used with."""
        partners, same = self._partners()
        edges = [
            edge
            for number in partners
            for edge in self._flow.used_by(number)
            if is_backward(edge.equation) and not edge.crosses and not same.intersection(edge.sources)
        ]
        # An equation of a product has both; what checkpointing computes anew is not known as a partner.
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
        """The values that meet the argument in equations, and the values that are the argument."""
        same, partners = {self._argument.number}, set()
        queue = collections.deque(same)
        while queue:
            for edge in self._flow.used_by(queue.popleft()):
                if edge.crosses or (len(edge.sources) == 1 and edge.equation.primitive in _MOVES):
                    fresh = [number for number in edge.targets if number not in same]
                    same.update(fresh)
                    queue.extend(fresh)
                else:
                    partners.update(edge.sources)
        partners -= same
        return list(self._kept(partners)), same

    def _kept(self, numbers: Iterable[int]) -> Iterator[int]:
        """Values, and what loops keep of them for the backward pass."""
        seen = set(numbers)
        queue = collections.deque(seen)
        while queue:
            number = queue.popleft()
            yield number
            for edge in self._flow.used_by(number):
                if edge.crosses:
                    fresh = [target for target in edge.targets if target not in seen]
                    seen.update(fresh)
                    queue.extend(fresh)

    def _backward_from(self, starts: Iterable[int]) -> Iterator[int]:
        """Values of the backward pass that are made of some by sums, changes of form and the like."""
        seen = dict.fromkeys(starts)
        queue = collections.deque(seen)
        while queue:
            number = queue.popleft()
            yield number
            for edge in self._flow.used_by(number):
                if is_backward(edge.equation) and (edge.crosses or _keeps(edge)):
                    for target in edge.targets:
                        if target not in seen:
                            seen[target] = None
                            queue.append(target)

    def _has_shape(self, number: int) -> bool:
        value = self._flow.values[number]
        return value.is_array and value.aval.shape == self._shape


_MOVES = {"convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "sharding_constraint", "slice"}
_SUMS = {"add", "add_any", "reduce_sum", "copy", "mul", "neg"}


def _keeps(edge: DataflowEdge) -> bool:
    return edge.equation.primitive in _MOVES | _SUMS


def _outside_of_loops(tree: AnnotatedJaxpr) -> set[int]:
    """The numbers of values that are there once: outside of the bodies of loops, branches and shard_maps."""
    found = {value.number for value in (*tree.constants, *tree.inputs, *tree.outputs)}
    for equation in tree.equations:
        found.update(value.number for value in equation.outputs)
        if equation.primitive not in ("scan", "while", "cond", "shard_map"):
            for body in equation.bodies.values():
                found |= _outside_of_loops(body)
    return found
