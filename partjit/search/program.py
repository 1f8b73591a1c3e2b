"""The program whose specs are searched: traced and lowered once, and asked what other shardings would cost."""

import concurrent.futures
import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import Mesh, NamedSharding

from partjit._jax.shardings import UNSPECIFIED, MaybeSharding
from partjit._jax.types import PyTree
from partjit.devices import platform_of
from partjit.inspect.annotated import AnnotatedValue
from partjit.inspect.asked_pool import AskedPool
from partjit.inspect.asked_process import SavedProgram
from partjit.inspect.changes import Axes, Change, add_mesh, facts_of
from partjit.inspect.memory import estimate_memory
from partjit.inspect.outcomes import after_change
from partjit.inspect.places import known_of_copies
from partjit.inspect.propagation import Partitioned, lower_unit
from partjit.inspect.tracing import TracedFunction
from partjit.inspect.user_lines import shown_line
from partjit.render.numbers import shown_bytes
from partjit.search.asked import Answer, AskedStep
from partjit.search.blocks import Leaf
from partjit.search.given import axes_if_any
from partjit.search.machine import Machine
from partjit.search.step_time import require_links
from partjit.search.work import Work
from partjit.spec import ParsedPartitionSpec

__all__ = ["SearchedProgram"]

_LARGEST = 8

_ARGUMENT = re.compile(r"[^\W\d]\w*(\[\d+\])?")
"""The name of an argument: of a parameter, or of one of a parameter with a star."""


class SearchedProgram:
    """A function, lowered without any specs of arguments and results.

    Args:
        function: the traced function.
        machine: the machine.
        overlap: which part of the communication is assumed to be hidden.
        workers: how many processes answer, which a failed check of the partitioner ends; 0 for this process.

    Attributes:
        workers: how many processes answer.
        unit: the program as one unit, with the shardings that the user's own specs say.
        in_tree, out_tree: the structures of `(args, kwargs)` and of the result.
        hidden: the number of arguments that are no arguments of the user's, but values that the function closes over.
        donated: for each argument of the user's whether its memory may be reused.
        partitioned: the program without any specs, not propagated.

    Raises:
        ValueError: the machine has no link for an axis of the mesh.
    """

    def __init__(self, function: TracedFunction, machine: Machine, overlap: float, workers: int = 0) -> None:
        require_links(machine, function.whole.mesh.shape)
        self.workers = workers
        self._saved = SavedProgram()
        # The processes start while the program is lowered.
        self._pool = AskedPool(self._saved, workers) if workers else None
        try:
            self._lower(function, machine, overlap)
        except BaseException:
            self.close()
            raise

    def _lower(self, function: TracedFunction, machine: Machine, overlap: float) -> None:
        self.unit, self._donated = function.whole, function.donated
        self.in_tree, self.out_tree = function.in_tree, function.out_tree
        self.hidden = len(self.unit.paths) - self.in_tree.num_leaves
        self.donated = self._donated[self.hidden :]
        free = dataclasses.replace(
            self.unit,
            in_shardings=(UNSPECIFIED,) * len(self.unit.in_shardings),
            out_shardings=(UNSPECIFIED,) * len(self.unit.out_shardings),
        )
        inlined, module = lower_unit(free)
        assert module is not None  # which it is on one device only
        self.partitioned = Partitioned(free, inlined, (), None, module.operation)
        self._facts, self._known = facts_of(self.unit, inlined, self._donated), known_of_copies(module)
        is_cpu = platform_of(self.unit.mesh) == "cpu"
        work = Work(inlined.tree, self._facts.traffic)
        self._asked = AskedStep(self._facts, self.hidden, work, machine, self.sizes, overlap, is_cpu)
        if self._pool is not None:
            add_mesh(module, self.sizes)
            self._saved.write(module, self._asked.saved())

    def close(self) -> None:
        """Ends the processes that answer."""
        if self._pool is not None:
            self._pool.close()

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
        """The names of the positional arguments, as paths have them: those of `*data` are `data[0]` and so on."""
        args, _ = jax.tree.unflatten(self.in_tree, self.arguments)
        names = []
        for k, arg in enumerate(args):
            path, leaf = next(iter(jax.tree_util.tree_leaves_with_path(arg)), ((), None))
            name = "" if leaf is None else leaf.path.removesuffix(jax.tree_util.keystr(path))
            names.append(name if _ARGUMENT.fullmatch(name) else f"argument_{k}")
        return tuple(names)

    @property
    def leaf_trees(self) -> tuple[tuple[PyTree, ...], PyTree]:
        """Trees like the positional arguments and the result, of `Leaf`s."""
        return jax.tree.unflatten(self.in_tree, self.arguments)[0], jax.tree.unflatten(self.out_tree, self.results)

    @property
    def structs(self) -> tuple[PyTree, ...]:
        """The positional arguments as structs."""
        avals = (value.aval for value in self.inputs)
        structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
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
            _axes_of(sharding, len(leaf.shape), self.unit.mesh)
            for sharding, leaf in zip(self.unit.in_shardings[self.hidden :], self.arguments, strict=True)
        )

    @property
    def own_results(self) -> tuple[Axes | None, ...]:
        """The same of the results."""
        return tuple(
            _axes_of(sharding, len(leaf.shape), self.unit.mesh)
            for sharding, leaf in zip(self.unit.out_shardings, self.results, strict=True)
        )

    def submit(self, question: Change) -> concurrent.futures.Future[Answer]:
        """What a step costs with the axes of a question, whose arguments are counted without the hidden ones.

        Without other processes it is answered here, and at once; otherwise the result is raised as a `WhatIfError` if
        the question ends its process.
        """
        wanted = self._wanted(question)
        if self._pool is not None:
            return self._pool.submit(wanted)
        answered: concurrent.futures.Future[Answer] = concurrent.futures.Future()
        try:
            answered.set_result(self._asked.answer(self.partitioned.lowered, wanted, self._known))
        except Exception as error:  # raised with the result, as that of another process
            answered.set_exception(error)
        return answered

    def largest(self, question: Change) -> list[str]:
        """What needs most of the memory of a device with these axes, a line each.

        The partitioner runs in this process, with a question that was answered before: it does not end it.
        """
        after = after_change(self.partitioned.lowered, self._facts, self._wanted(question), self._known)
        inlined = dataclasses.replace(self.partitioned.inlined, shardings=after.values)
        partitioned = dataclasses.replace(self.partitioned, inlined=inlined, result_shardings=after.results)
        found = []
        for value in self.inputs:
            parts = math.prod(after.values[value.number].sizes.values()) if value.number in after.values else 1
            found.append((value.nbytes / parts, f"{value.path}: {value.shown_type}, an argument"))
        for buffer in estimate_memory(partitioned, self._donated, *after.prediction).buffers[:_LARGEST]:
            what = "saved for the backward pass" if buffer.is_saved else "a temporary"
            site = buffer.equation.site
            where = f" of {buffer.equation.primitive}{f', {shown_line(site)}' if site else ''}"
            found.append((float(buffer.nbytes), f"{what}{where}"))
        found.sort(key=lambda entry: -entry[0])
        return [f"{shown_bytes(nbytes)}: {text}" for nbytes, text in found[:_LARGEST]]

    def _wanted(self, question: Change) -> Change:
        """A question with the positions of all arguments."""
        arguments = {k + self.hidden: axes for k, axes in question.arguments.items()}
        return dataclasses.replace(question, arguments=arguments)


def _leaves(values: Sequence[AnnotatedValue], paths: Sequence[str]) -> tuple[Leaf, ...]:
    return tuple(
        Leaf(path, getattr(value.aval, "shape", ()), str(getattr(value.aval, "dtype", "")), value.nbytes)
        for value, path in zip(values, paths, strict=True)
    )


def _axes_of(sharding: MaybeSharding, ndim: int, mesh: Mesh) -> Axes | None:
    if not isinstance(sharding, NamedSharding):
        return None
    return axes_if_any(ParsedPartitionSpec.from_user_input(sharding, "spec"), mesh, ndim)
