"""What there is to choose: classes of dimensions, groups of arrays, families of activations; what a choice means."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr, AnnotatedValue
from partjit.inspect.changes import Axes, Change
from partjit.search.blocks import labels_of, parameter_of, returned_as
from partjit.search.dimensions import Dimension, Dimensions
from partjit.search.program import SearchedProgram

__all__ = ["Choice", "DimensionClass", "Family", "Group", "Names", "Question", "Space"]

Names: TypeAlias = tuple[str, ...]

_FAMILIES = 6
_SUMS = ("add", "add_any")
_OF_GRADIENTS = ("dot_general", "conv_general_dilated", "scatter-add", "add_any", "transpose", "reduce_sum")
_MADE = (*_SUMS, "dot_general", "gather", "conv_general_dilated", "name")


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters in equal places of repeated blocks, with the state of the optimizer that belongs to them.

    Attributes:
        label: the path that they have in common.
        members, states: positions of the parameters and of their states among the arguments.
        nbytes: of the parameters together.
    """

    label: str
    members: tuple[int, ...]
    states: tuple[int, ...]
    nbytes: int


@dataclasses.dataclass(frozen=True)
class DimensionClass:
    """Dimensions that are sharded alike, in all instances of repeated blocks.

    Attributes:
        name: a dimension of a group, or of an argument, that is in it.
        roots: what stands for them; see `Dimensions`.
        size: a number that divides all of them.
        groups: the groups that have such a dimension.
        nbytes: of these groups.
        is_batch: whether it is the batch.
    """

    name: str
    roots: frozenset[Dimension]
    size: int
    groups: tuple[int, ...]
    nbytes: int
    is_batch: bool


@dataclasses.dataclass(frozen=True)
class Family:
    """Activations of one shape with dimensions of the same classes, which are constrained together.

    Attributes:
        shape: their shape.
        classes: the class of each dimension, by its position in `Space.classes`; None for one of no class.
        numbers: their numbers in the program.
        nbytes: of all of them.
    """

    shape: tuple[int, ...]
    classes: tuple[int | None, ...]
    numbers: tuple[int, ...]
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is sharded over which axes.

    Attributes:
        classes: for each class of dimensions the axes that shard it.
        storage: for each group further axes over which its arrays are stored; they are gathered where they are used.
        states: for each group axes beyond these over which the states of the optimizer are stored.
        gathered: for each group whether its parameters are constrained not to be sharded over the axes of their storage
            wherever they are used, nor their gradients, so that they are gathered and nothing else is moved.
        constraints: for each family None, or further axes of each dimension of the activations, which are constrained
            to these and to those of their classes.
        is_last_first: whether an axis that is chosen for several dimensions of an array shards the last of these, as
            the columns of matrices, and not the first one.
    """

    classes: tuple[Names, ...]
    storage: tuple[Names, ...]
    states: tuple[Names, ...]
    gathered: tuple[bool, ...]
    constraints: tuple[Axes | None, ...]
    is_last_first: bool = False


@dataclasses.dataclass(frozen=True)
class Question:
    """A choice as shardings: the axes of arguments and results by position, of values by number.

    Two choices may mean the same question; `key` is what equal ones have in common.

    Attributes:
        arguments, results, values: the axes.
        uses: for each argument that is constrained where it is used, by position, the numbers of the values among these
            that are its uses and its gradients.
    """

    arguments: Mapping[int, Axes | None]
    results: Mapping[int, Axes | None]
    values: Mapping[int, Axes]
    uses: Mapping[int, tuple[int, ...]]

    @property
    def change(self) -> Change:
        """The question as a change of the program."""
        return Change(self.arguments, self.results, self.values)

    @functools.cached_property
    def key(self) -> tuple[object, ...]:
        """What equal questions have in common."""
        return tuple(tuple(sorted(part.items())) for part in (self.arguments, self.results, self.values))


class Space:
    """What there is to choose for a program.

    Args:
        program: the program.
        fixed_arguments, fixed_results: the axes that are not to be chosen, by position; None for what the
            partitioner chooses.
        names: the names of the activations that may be constrained, as `jax.ad_checkpoint.checkpoint_name` gives them;
            None for those that are found; empty for none.
        only_specs: whether nothing may be constrained, parameters where they are used included.

    Attributes:
        groups, classes, families: see there.
        own: the function's own specs, and those that are fixed; None if it has none.
        sizes: the axes of the mesh of several devices, with their sizes.
    """

    def __init__(
        self,
        program: SearchedProgram,
        fixed_arguments: Mapping[int, Axes | None],
        fixed_results: Mapping[int, Axes | None],
        names: Sequence[str] | None = None,
        only_specs: bool = False,
    ) -> None:
        self.sizes = {axis: size for axis, size in program.sizes.items() if size > 1}
        self._fixed, self._fixed_results = dict(fixed_arguments), dict(fixed_results)
        self._arguments, self._inputs = program.arguments, program.inputs
        tree = program.partitioned.tree
        dimensions = Dimensions(tree)
        self.own = self._own_question(program)
        self._roots = [dimensions.of(value) for value in self._inputs]
        self._returned = returned_as(program.arguments, program.results)
        weights, batch = self._weights(tree, dimensions)
        self.groups = self._grouped(weights)
        self._group_of = {k: g for g, group in enumerate(self.groups) for k in (*group.members, *group.states)}
        self._states = {k for group in self.groups for k in group.states}
        self.classes = self._classified(batch)
        self._class_of = {root: c for c, one in enumerate(self.classes) for root in one.roots}
        self._given = self._given_classes()
        self._gradients = _find_gradients(tree, dimensions)
        self.families = [] if only_specs else [*self._find_families(tree, dimensions, names)]
        self._only_specs = only_specs

    @property
    def batch(self) -> tuple[int, ...]:
        """The positions of the classes that are batches."""
        return tuple(c for c, one in enumerate(self.classes) if one.is_batch)

    @property
    def nothing(self) -> Choice:
        """The choice that shards nothing but what is fixed."""
        classes = tuple(self._given.get(c, ()) for c in range(len(self.classes)))
        count = len(self.groups)
        return Choice(classes, ((),) * count, ((),) * count, (False,) * count, (None,) * len(self.families))

    def is_given(self, number: int) -> bool:
        """Whether fixed specs say how a class is sharded."""
        return number in self._given

    def question(self, choice: Choice) -> Question:
        """The shardings that a choice means."""
        arguments: dict[int, Axes | None] = {}
        values: dict[int, Axes] = {}
        uses: dict[int, tuple[int, ...]] = {}
        for k, leaf in enumerate(self._arguments):
            used = self._of_classes(leaf.shape, [self._class_of.get(root) for root in self._roots[k]], choice)
            used = self._fixed.get(self._parents.get(k, k)) or used  # a state is sharded as its parameter
            axes = self._fixed.get(k, used)
            if k in self._group_of and axes is not None:
                group, is_state = self._group_of[k], k in self._states
                if k not in self._fixed:
                    further = (*choice.storage[group], *(choice.states[group] if is_state else ()))
                    axes = self._spread(leaf.shape, used, further)
                if choice.gathered[group] and not is_state and not self._only_specs:
                    used = self._of_classes(leaf.shape, [self._class_of.get(root) for root in self._roots[k]], choice)
                    used = tuple(_common(one, other) for one, other in zip(used, axes, strict=True))
                    numbers = (self._inputs[k].number,) if used != axes else ()
                    uses[k] = (*numbers, *self._gradients.get((leaf.shape, self._roots[k]), ()))
                    values.update((number, used) for number in uses[k])
            arguments[k] = axes
        results: dict[int, Axes | None] = {j: arguments[k] for j, k in self._returned.items()}
        results.update(self._fixed_results)
        for family, extra in zip(self.families, choice.constraints, strict=True):
            if extra is not None:
                axes = self._of_classes(family.shape, family.classes, choice, extra)
                values.update((number, axes) for number in family.numbers)
        return Question(arguments, results, values, uses)

    def _own_question(self, program: SearchedProgram) -> Question | None:
        own = program.own_arguments, program.own_results
        if all(axes is None for of in own for axes in of):
            return None
        arguments, results = (
            {**dict(enumerate(of)), **fixed} for of, fixed in zip(own, (self._fixed, self._fixed_results), strict=True)
        )
        return Question(arguments, results, {}, {})

    def _of_classes(
        self, shape: Sequence[int], classes: Sequence[int | None], choice: Choice, extra: Axes | None = None
    ) -> Axes:
        """The axes of an array by the classes of its dimensions; no axis twice, and none that does not divide."""
        used, found = set[str](), dict[int, Names]()
        dims = range(len(shape))
        for dim in reversed(dims) if choice.is_last_first else dims:
            own, parts, number = list[str](), 1, classes[dim]
            wanted = () if number is None else choice.classes[number]
            for axis in (*wanted, *((extra[dim] or ()) if extra is not None else ())):
                if axis not in used and shape[dim] % (parts * self.sizes[axis]) == 0:
                    own.append(axis)
                    used.add(axis)
                    parts *= self.sizes[axis]
            found[dim] = tuple(own)
        return tuple(found[dim] for dim in dims)

    def _spread(self, shape: Sequence[int], axes: Axes, further: Iterable[str]) -> Axes:
        """These axes, and further ones on the dimensions of which there is most on a device."""
        dims = [[*(dim or ())] for dim in axes]
        for axis in further:
            if any(axis in dim for dim in dims):
                continue
            local = [
                size // math.prod(self.sizes.get(a, 1) for a in dim) for size, dim in zip(shape, dims, strict=True)
            ]
            fitting = [k for k, size in enumerate(local) if size and size % self.sizes[axis] == 0]
            if fitting:
                dims[max(fitting, key=lambda k, of=local: (of[k], -k))].append(axis)
        return tuple(map(tuple, dims))

    def _weights(self, tree: AnnotatedJaxpr, dimensions: Dimensions) -> tuple[list[int], set[Dimension]]:
        """The positions of parameters and states, and what stands for batches.

        What a program returns anew, and what is in one tree with it, is no data. If it returns nothing anew, data is
        what the first dimension of its first result belongs to.
        """
        anew = set(self._returned.values())
        if anew:
            trees = {self._arguments[k].keys[0] for k in anew}
            weights = [k for k, leaf in enumerate(self._arguments) if k in anew or leaf.keys[0] in trees]
            kept = {*weights}
            data = [k for k in range(len(self._arguments)) if k not in kept]
            of_weights = {root for k in weights for root in self._roots[k]}
            batch = set[Dimension]()
            for k in data:
                own = [root for root, n in zip(self._roots[k], self._arguments[k].shape, strict=True) if n > 1]
                batch.update([root for root in own if root not in of_weights][:1])
            return weights, batch
        arrays = [value for value in tree.outputs if value.is_array and value.aval.shape and value.number >= 0]
        batch = {dimensions.of(arrays[0])[0]} if arrays else set[Dimension]()
        return [k for k, roots in enumerate(self._roots) if roots and batch.isdisjoint(roots)], batch

    def _grouped(self, weights: Sequence[int]) -> list[Group]:
        """Groups of parameters; notes which parameter each of them is the state of."""
        leaves = [self._arguments[k] for k in weights]
        labels = labels_of(leaves)
        parents = parameter_of(leaves, [self._roots[k] for k in weights])
        self._parents = {weights[i]: weights[parent] for i, parent in enumerate(parents)}
        found: dict[tuple[object, ...], tuple[list[int], list[int]]] = {}
        for i, (leaf, parent) in enumerate(zip(leaves, parents, strict=True)):
            if leaf.shape:
                key = labels[parent], leaf.shape
                found.setdefault(key, ([], []))[parent != i].append(weights[i])
        return [
            Group(str(label), tuple(members), tuple(states), sum(self._arguments[k].nbytes for k in members))
            for (label, _), (members, states) in found.items()
        ]

    def _classified(self, batch: set[Dimension]) -> list[DimensionClass]:
        """The classes of the dimensions of arguments, those of equal dimensions of groups together."""
        signatures: dict[Dimension, set[tuple[str, int]]] = collections.defaultdict(set)
        sizes: dict[Dimension, int] = {}
        touched: dict[Dimension, set[int]] = collections.defaultdict(set)
        for k, leaf in enumerate(self._arguments):
            if k in self._states:
                continue
            group = self._group_of.get(k)
            for dim, (root, size) in enumerate(zip(self._roots[k], leaf.shape, strict=True)):
                if size > 1:
                    name = leaf.path if group is None else self.groups[group].label
                    signatures[root].add((name, dim))
                    sizes[root] = math.gcd(sizes.get(root, 0), size)
                    if group is not None:
                        touched[root].add(group)
        merged: dict[frozenset[tuple[str, int]], list[Dimension]] = collections.defaultdict(list)
        for root, signature in signatures.items():
            merged[frozenset(signature)].append(root)
        found = []
        for signature, roots in merged.items():
            groups = tuple(sorted(set[int]().union(*(touched[root] for root in roots))))
            name, dim = min(signature)
            found.append(
                DimensionClass(
                    f"{name}, dimension {dim}",
                    frozenset(roots),
                    math.gcd(*(sizes[root] for root in roots)),
                    groups,
                    sum(self.groups[g].nbytes for g in groups),
                    any(root in batch for root in roots),
                )
            )
        return sorted(found, key=lambda one: (not one.is_batch, -one.nbytes, one.name))

    def _given_classes(self) -> dict[int, Names]:
        """The classes that the fixed specs of data say."""
        found: dict[int, Names] = {}
        for k, axes in self._fixed.items():
            if k not in self._group_of and axes is not None:
                for root, dim in zip(self._roots[k], axes, strict=True):
                    if dim and root in self._class_of:
                        found.setdefault(self._class_of[root], tuple(a for a in dim if a in self.sizes))
        return found

    def _find_families(
        self, tree: AnnotatedJaxpr, dimensions: Dimensions, names: Sequence[str] | None
    ) -> Iterator[Family]:
        found: dict[tuple[object, ...], list[tuple[AnnotatedEquation, AnnotatedValue]]] = collections.defaultdict(list)
        broadcast = set[int]()
        for equation in tree.walk():
            if equation.primitive == "broadcast_in_dim":
                broadcast.add(equation.outputs[0].number)
            if equation.primitive not in _MADE or len(equation.outputs) != 1 or not equation.outputs[0].is_array:
                continue
            (value,) = equation.outputs
            if names is not None and not (equation.primitive == "name" and equation.params["name"] in names):
                continue
            classes = tuple(self._class_of.get(root) for root in dimensions.of(value))
            is_of_batch = any(number is not None and self.classes[number].is_batch for number in classes)
            is_bias = any(read.number in broadcast for read in equation.inputs)
            if len(classes) > 1 and (names is not None or (is_of_batch and not is_bias)):
                found[value.aval.shape, classes].append((equation, value))
        families = []
        for (shape, classes), made in found.items():
            sums = [one for one in made if one[0].primitive in (*_SUMS, "gather")]
            chosen = {value.number: value.nbytes for _, value in (sums if names is None and sums else made)}
            families.append(Family(shape, classes, tuple(chosen), sum(chosen.values())))  # type: ignore[arg-type]
        yield from sorted(families, key=lambda family: (-family.nbytes, family.numbers))[:_FAMILIES]


def _common(one: Names | None, other: Names | None) -> Names:
    """The axes with which both begin."""
    both = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one or (), other or (), strict=False))
    return tuple(axis for axis, _ in both)


def _find_gradients(
    tree: AnnotatedJaxpr, dimensions: Dimensions
) -> dict[tuple[tuple[int, ...], tuple[Dimension, ...]], list[int]]:
    """What backward passes compute, by the shape and the classes of dimensions: that of a parameter is its gradient."""
    found: dict[tuple[tuple[int, ...], tuple[Dimension, ...]], list[int]] = collections.defaultdict(list)
    for equation in tree.walk():
        if equation.primitive in _OF_GRADIENTS and "transpose(" in equation.scope:
            (value,) = equation.outputs
            found[value.aval.shape, dimensions.of(value)].append(value.number)
    return found
