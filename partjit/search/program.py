"""The program whose specs are searched: traced and lowered once, and asked what other shardings would cost."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from partjit._jax.shardings import UNSPECIFIED, MaybeSharding
from partjit._jax.types import PyTree
from partjit.devices import platform_of
from partjit.inspect.annotated import AnnotatedValue
from partjit.inspect.changes import Axes, Change, change, facts_of
from partjit.inspect.memory import estimate_memory, needs_of
from partjit.inspect.places import Known
from partjit.inspect.predicted import Prediction, predict_of
from partjit.inspect.propagation import Partitioned, partition, propagated, results_of
from partjit.inspect.tracing import TracedFunction
from partjit.inspect.user_lines import shown_line
from partjit.render.numbers import shown_bytes
from partjit.search.blocks import Leaf
from partjit.search.machine import Machine
from partjit.search.step_time import seconds_of_step
from partjit.search.work import Work
from partjit.shardy import TensorSharding
from partjit.xla_rewrites import open_captured

__all__ = ["Answer", "SearchedProgram"]

_LARGEST = 8


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a program would cost with some shardings.

    Attributes:
        seconds: the time of a step.
        peak: the bytes that a device needs at most.
        arguments, results: the axes of arguments and results, by dimensions; those of an argument or result that was
            left to the partitioner are what it chose.
    """

    seconds: float
    peak: int
    arguments: tuple[Axes, ...]
    results: tuple[Axes, ...]


class SearchedProgram:
    """A function, lowered without any specs of arguments and results.

    Args:
        function: the traced function.
        machine: the machine.
        overlap: which part of the communication is assumed to be hidden.

    Attributes:
        unit: the program as one unit, with the shardings that the user's own specs say.
        in_tree, out_tree: the structures of `(args, kwargs)` and of the result.
        hidden: the number of arguments that are no arguments of the user's, but values that the function closes over.
        donated: for each argument of the user's whether its memory may be reused.
        partitioned: the program as it is partitioned without any specs.
    """

    def __init__(self, function: TracedFunction, machine: Machine, overlap: float) -> None:
        self.unit, self._donated = function.whole, function.donated
        self.in_tree, self.out_tree = function.in_tree, function.out_tree
        self.hidden = len(self.unit.paths) - self.in_tree.num_leaves
        self.donated = self._donated[self.hidden :]
        self._machine, self._overlap = machine, overlap
        free = dataclasses.replace(
            self.unit,
            in_shardings=(UNSPECIFIED,) * len(self.unit.in_shardings),
            out_shardings=(UNSPECIFIED,) * len(self.unit.out_shardings),
        )
        self.partitioned: Partitioned = partition(free, keep_text=True)
        self._facts, self._known = facts_of(self.unit, self.partitioned.inlined, self._donated), Known()
        self._work = Work(self.partitioned.tree, self._facts.traffic)
        self._is_cpu = platform_of(self.unit.mesh) == "cpu"

    @functools.cached_property
    def arguments(self) -> tuple[Leaf, ...]:
        """The arguments."""
        return _leaves(self.inputs, self.unit.paths[self.hidden :])

    @functools.cached_property
    def results(self) -> tuple[Leaf, ...]:
        """The results."""
        return _leaves(self.partitioned.tree.outputs, self.unit.result_paths)

    @property
    def inputs(self) -> tuple[AnnotatedValue, ...]:
        """The arguments as values."""
        return self.partitioned.tree.inputs[self.hidden :]

    @property
    def argument_names(self) -> tuple[str, ...]:
        """The names of the positional arguments, as paths have them."""
        args, _ = jax.tree.unflatten(self.in_tree, self.arguments)
        names = []
        for k, arg in enumerate(args):
            leaves = jax.tree.leaves(arg)
            names.append(leaves[0].keys[0] if leaves and leaves[0].keys[0].isidentifier() else f"argument_{k}")
        return tuple(names)

    @property
    def leaf_trees(self) -> tuple[tuple[PyTree, ...], PyTree]:
        """Trees like the positional arguments and the result, of `Leaf`s."""
        return jax.tree.unflatten(self.in_tree, self.arguments)[0], jax.tree.unflatten(self.out_tree, self.results)

    @property
    def structs(self) -> tuple[PyTree, ...]:
        """The positional arguments as structs."""
        structs = [jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype) for value in self.inputs]
        return jax.tree.unflatten(self.in_tree, structs)[0]

    @property
    def donated_positions(self) -> tuple[int, ...]:
        """The numbers of the positional arguments whose memory may be reused."""
        args, _ = jax.tree.unflatten(self.in_tree, self.donated)
        return tuple(k for k, arg in enumerate(args) if jax.tree.leaves(arg) and all(jax.tree.leaves(arg)))

    @property
    def sizes(self) -> Mapping[str, int]:
        """The axes of the mesh, with their sizes."""
        return dict(self.unit.mesh.shape)

    @property
    def own_arguments(self) -> tuple[Axes | None, ...]:
        """The axes that the user's own specs say of the arguments; None where they say nothing."""
        return tuple(
            _axes_of(sharding, len(leaf.shape))
            for sharding, leaf in zip(self.unit.in_shardings[self.hidden :], self.arguments, strict=True)
        )

    @property
    def own_results(self) -> tuple[Axes | None, ...]:
        """The same of the results."""
        return tuple(
            _axes_of(sharding, len(leaf.shape))
            for sharding, leaf in zip(self.unit.out_shardings, self.results, strict=True)
        )

    def ask(
        self,
        arguments: Mapping[int, Axes | None],
        results: Mapping[int, Axes | None],
        values: Mapping[int, Axes],
    ) -> Answer:
        """The cost with these axes of arguments and results, by position, and of values, by number."""
        shardings, of_results, prediction = self._changed(arguments, results, values)
        used = {k - self._facts.count: one for k, one in shardings.items() if k >= self._facts.count}
        parts = self._work.parts(shardings, used)
        seconds = seconds_of_step(parts, *prediction, self.sizes, self._machine, self._overlap)
        needs = needs_of(self._facts.skeleton, shardings, self._donated, *prediction, self._is_cpu)
        none = TensorSharding.replicated(0)
        return Answer(
            seconds,
            needs.peak,
            tuple(shardings.get(value.number, none).axes for value in self.inputs),
            tuple(sharding.axes for sharding in of_results),
        )

    def largest(
        self, arguments: Mapping[int, Axes | None], results: Mapping[int, Axes | None], values: Mapping[int, Axes]
    ) -> list[str]:
        """What needs most of the memory of a device with these axes, a line each."""
        shardings, _, prediction = self._changed(arguments, results, values)
        inlined = dataclasses.replace(self.partitioned.inlined, shardings={**shardings})
        after = dataclasses.replace(self.partitioned, inlined=inlined)
        found = []
        for value in self.inputs:
            parts = math.prod(shardings[value.number].sizes.values()) if value.number in shardings else 1
            found.append((value.nbytes / parts, f"{value.path}: {value.shown_type}, an argument"))
        for buffer in estimate_memory(after, self._donated, *prediction).buffers[:_LARGEST]:
            what = "saved for the backward pass" if buffer.is_saved else "a temporary"
            site = buffer.equation.site
            where = f" of {buffer.equation.primitive}{f', {shown_line(site)}' if site else ''}"
            found.append((float(buffer.nbytes), f"{what}{where}"))
        found.sort(key=lambda entry: -entry[0])
        return [f"{shown_bytes(nbytes)}: {text}" for nbytes, text in found[:_LARGEST]]

    def _changed(
        self, arguments: Mapping[int, Axes | None], results: Mapping[int, Axes | None], values: Mapping[int, Axes]
    ) -> tuple[dict[int, TensorSharding], tuple[TensorSharding, ...], Prediction]:
        """The shardings of values and results, and what is sent."""
        wanted = Change({k + self.hidden: axes for k, axes in arguments.items()}, dict(results), dict(values))
        lowered: Any = self.partitioned.lowered
        with lowered.context:
            module = lowered.clone()
            change(module, wanted, self._facts, self._known)
            if self._known.captures:  # the same in all copies
                self._known.captures = open_captured(module)
            shardings, of_values = propagated(module, self._known.shardings)
            of_results = results_of(shardings, self._facts.ranks)
            return of_values, of_results, predict_of(module, shardings, self._facts.origin, self._known)


def _leaves(values: Sequence[AnnotatedValue], paths: Sequence[str]) -> tuple[Leaf, ...]:
    return tuple(
        Leaf(path, getattr(value.aval, "shape", ()), str(getattr(value.aval, "dtype", "")), value.nbytes)
        for value, path in zip(values, paths, strict=True)
    )


def _axes_of(sharding: MaybeSharding, ndim: int) -> Axes | None:
    if not isinstance(sharding, NamedSharding):
        return None
    dims = [(dim,) if isinstance(dim, str) else tuple(dim or ()) for dim in sharding.spec]
    return (*dims, *[()] * (ndim - len(dims)))
