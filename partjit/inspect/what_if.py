"""What a program would send, need and compute with other specs, in milliseconds a question.

A function is traced and lowered once. A question copies the lowered program, changes the shardings of arguments,
results and activations in it, and runs the partitioner's propagation on it; nothing is compiled. The answer is what
`explain` says of the function with these specs.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, overload

from jax.core import ShapedArray
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partjit.checks import require_flag, require_integer, require_mesh_type
from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr, AnnotatedValue
from partjit.inspect.asked_pool import processors
from partjit.inspect.asked_process import AskedOutcome, AskedProcess, SavedProgram, WhatIfError, saved_facts
from partjit.inspect.changes import Change, add_mesh, facts_of
from partjit.inspect.collectives import Collective
from partjit.inspect.contents import Collectives
from partjit.inspect.device_groups import DeviceGroups
from partjit.inspect.leaves import Leaf
from partjit.inspect.live.widget import what_if_widget
from partjit.inspect.marks import marked_values
from partjit.inspect.outcomes import Outcome, outcome_of, outcome_of_one_device
from partjit.inspect.places import Known, known_of_copies
from partjit.inspect.propagation import Unit, lower_unit
from partjit.inspect.questions import Activation, Answer, Question, change_of
from partjit.inspect.suggested import QUESTIONS, SpecSuggestion, suggested
from partjit.inspect.tracing import trace_function
from partjit.mesh import has_explicit_axes
from partjit.shardy import TensorSharding, nested

__all__ = ["Activation", "Answer", "Leaf", "Question", "WhatIf", "WhatIfError"]


class WhatIf:
    """A program that is traced and lowered once, and asked what it costs with other specs.

    Args:
        fun: a function of `pjit` or `jax.jit`, a plain one, or what their `trace` returned.
        *args, **kwargs: its arguments, trees of arrays or of `jax.ShapeDtypeStruct`s.
        mesh: the mesh of the call, or None for the one that is set.
        iterations: trip counts of loops by their lines, as `explain` takes them.
        isolated: whether questions are answered in another process, which a failed check of the partitioner ends. It is
            started at once, and the first answer comes when it has imported jax. Otherwise they are answered in this
            process.

    Attributes:
        arguments, results: the arguments and results, which questions name.
        mesh: the mesh of the program.
        name: its name.

    Raises:
        TypeError: `fun` is no function, `mesh` no mesh, or an argument no array.
        ValueError: the call itself would raise it; or the mesh has axes of type Explicit, where specs are types: with
            other specs it is another program.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> from partjit import Mesh, P
        >>> from partjit.inspect.what_if import Question, WhatIf
        >>> mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
        >>> x, w = np.ones((8, 16), np.float32), np.ones((16, 4), np.float32)
        >>> engine = WhatIf(lambda x, w: jnp.tanh(x @ w), x, w, mesh=mesh, isolated=False)
        >>> [leaf.name for leaf in engine.arguments], [str(value) for value in engine.activations]
        (['x', 'w'], ['2: float32[8,4] of dot_general at ...', '3: float32[8,4] of tanh at ...'])
        >>> answer = engine.ask(Question(arguments={"x": P("data", "model"), "w": P("model")}))
        >>> answer.bytes_by_axes, answer.results
        ({('model',): 32.0}, {'result': P('data', None)})

    A program with colocated calls is asked about as one program, of whose calls the partitioner knows nothing.

    Source: Shardy's propagation, https://openxla.org/shardy.
    """

    def __init__(
        self,
        fun: object,
        *args: object,
        mesh: Mesh | AbstractMesh | None = None,
        iterations: Mapping[str, int] | None = None,
        isolated: bool = True,
        **kwargs: object,
    ) -> None:
        """Traces and lowers the program."""
        if mesh is not None:
            require_mesh_type("WhatIf", "mesh", mesh, or_abstract=True)
        self._start(isolated)
        traced = trace_function(fun, args, kwargs, mesh)
        given = {} if iterations is None else dict(iterations)
        self._lower(dataclasses.replace(traced.whole, iterations=given), traced.donated)

    @classmethod
    def of_unit(cls, unit: Unit, donated: Sequence[bool], *, isolated: bool = True) -> Self:
        """The same of a program that is traced, whose arguments are donated as these flags say."""
        engine = cls.__new__(cls)
        engine._start(isolated)
        engine._lower(unit, donated)
        return engine

    def _start(self, isolated: bool) -> None:
        self._isolated = require_flag("WhatIf", "isolated", isolated)
        self._saved = SavedProgram()
        self._processes: list[AskedProcess] = []
        if isolated:
            self._some_processes(1)  # which starts while the program is traced and lowered

    def _lower(self, unit: Unit, donated: Sequence[bool]) -> None:
        if any(isinstance(aval, ShapedArray) and has_explicit_axes(aval.sharding.mesh) for aval in unit.jaxpr.in_avals):
            raise ValueError(
                f"WhatIf: {unit.name} is on a mesh with axes of type Explicit, where specs are part of the types of "
                "values: with other specs it is another program. Give a mesh whose axes are Auto"
            )
        self.mesh, self.name = unit.mesh, unit.name
        self._inlined, self._module = lower_unit(unit)
        tree = self._inlined.tree
        inputs = zip(unit.paths, tree.inputs, unit.in_shardings, donated, strict=True)
        outputs = zip(unit.result_paths, tree.outputs, unit.out_shardings, strict=True)
        self._arguments = [_leaf(*of_input) for of_input in inputs]
        self._results = [_leaf(*of_output) for of_output in outputs]
        self.arguments = tuple(filter(None, self._arguments))
        self.results = tuple(filter(None, self._results))
        self._facts = facts_of(unit, self._inlined, donated)
        self._is_saved = False

    @functools.cached_property
    def _known(self) -> Known:
        return known_of_copies(self._module)

    @property
    def activations(self) -> tuple[Activation, ...]:
        """The arrays that equations compute, in the order of the program, those inside of a `shard_map` left out."""
        return tuple(self._activations.values())

    @functools.cached_property
    def _activations(self) -> dict[int, Activation]:
        found: dict[int, Activation] = {}
        first: dict[object, int] = {}
        for number, value in [] if self._module is None else marked_values(nested(self._module.operation)):
            first.setdefault(value, number)  # that of a `stop_gradient` is its operand: it is no operation
        distinct = {*first.values()}
        for equation, times in _computing(self._inlined.tree, 1):
            for value in equation.outputs:
                may_be = self._module is None or value.number in distinct
                if value.is_array and value.aval.shape and may_be and value.number not in found:
                    found[value.number] = _activation(equation, value, times)
        return found

    def ask(self, question: Question) -> Answer:
        """What the program costs with the specs of a question.

        Raises:
            ValueNotFoundError: it names what the program does not have; the message lists similar names. It is a
                LookupError.
            ShardingError: specs do not fit their values or the mesh; the message lists all that do not.
            TypeError, ValueError: a spec is none, or names an axis twice.
            WhatIfError: the partitioner ended the process that was asked. The next question is answered by another.
        """
        change = self._change(question)
        if self._module is None or not self._isolated:
            return self._answer(self._outcome(change))
        self._save()
        (process,) = self._some_processes(1)
        return self._answer(process.ask(change))

    @overload
    def ask_many(
        self, questions: Iterable[Question], workers: int | None = None, *, missing_ok: Literal[False] = False
    ) -> list[Answer]: ...
    @overload
    def ask_many(
        self, questions: Iterable[Question], workers: int | None = None, *, missing_ok: bool
    ) -> list[Answer | None]: ...
    def ask_many(
        self, questions: Iterable[Question], workers: int | None = None, *, missing_ok: bool = False
    ) -> list[Answer | None] | list[Answer]:
        """The answers to several questions, in their order.

        Args:
            questions: the questions.
            workers: the number of processes that answer them; by default as many as this process may use processors.
                One is enough if the program is not `isolated` from this process: it answers here then.
            missing_ok: whether the answer is None to a question that ends its process, where an error is raised
                otherwise.

        Raises:
            TypeError, ValueError: `workers` is no number of at least 1.
            Exception: what `ask` raises; nothing is asked if a question is wrong.
        """
        changes = [self._change(question) for question in questions]
        count = processors() if workers is None else require_integer("WhatIf.ask_many", "workers", workers, 1)
        missing_ok = require_flag("WhatIf.ask_many", "missing_ok", missing_ok)
        outcomes = self._outcomes(changes, count, missing_ok)
        return [None if outcome is None else self._answer(outcome) for outcome in outcomes]

    def suggest(
        self, most: int = 5, *, questions: int = QUESTIONS, workers: int | None = None
    ) -> tuple[SpecSuggestion, ...]:
        """The other specs of single arguments with which the program sends less or needs less memory, the best first.

        Each is tried out: what it says is what `explain` says of the function with this spec. Equal layers, the states
        of an optimizer that are like a parameter, and the results that are these anew have it together.

        Args:
            most: how many there are at most.
            questions: how many changes are tried, those of most bytes first; that bounds the time.
            workers: the number of processes that answer; see `ask_many`. One that a change ends is no suggestion.

        Raises:
            TypeError, ValueError: a number is none of at least 1.

        Example:
            >>> import jax, jax.numpy as jnp, numpy as np
            >>> from partjit import Mesh, P, pjit
            >>> from partjit.inspect.what_if import WhatIf
            >>> mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
            >>> layer = pjit(lambda x, w: jnp.tanh(x @ w), in_shardings=(P("data"), P("model")))
            >>> x, w = np.ones((64, 128), np.float32), np.ones((128, 256), np.float32)
            >>> with WhatIf(layer, x, w, mesh=mesh, isolated=False) as engine:
            ...     for suggestion in engine.suggest(most=1, workers=1):
            ...         print(suggestion)
            P(None, 'model') for w: -16.4 kB per step, ...
        """
        most = require_integer("WhatIf.suggest", "most", most, 1)
        questions = require_integer("WhatIf.suggest", "questions", questions, 1)
        count = processors() if workers is None else require_integer("WhatIf.suggest", "workers", workers, 1)
        count = count if self._isolated else 1

        def asked(changes: Sequence[Change]) -> Sequence[Outcome | None]:
            return self._outcomes(changes, count, True)

        return suggested(self._arguments, self._results, dict(self.mesh.shape), asked, questions, most)

    def _outcomes(self, changes: Sequence[Change], count: int, missing_ok: bool) -> Sequence[Outcome | None]:
        count = min(count, len(changes))
        if self._module is None or not count or (count == 1 and not self._isolated):
            return [*map(self._outcome, changes)]
        self._save()
        free: queue.SimpleQueue[AskedProcess] = queue.SimpleQueue()
        for process in self._some_processes(count):
            free.put(process)

        def asked(change: Change) -> Outcome | None:
            process = free.get()
            try:
                return process.ask(change)
            except WhatIfError:
                if not missing_ok:
                    raise
                return None
            finally:
                free.put(process)

        with concurrent.futures.ThreadPoolExecutor(count) as threads:  # which wait, without holding the interpreter
            return [*threads.map(asked, changes)]

    def check(self, question: Question) -> None:
        """Raises what `ask` raises for a question that is wrong, without an answer."""
        self._change(question)

    def widget(self) -> Any:
        """A widget for notebooks: a field for the spec of each argument and result, beside what the program costs.

        Each change of a field is a question, and the widget shows the answer: the specs that changed, bytes by axes,
        collectives, memory, FLOPs and the difference to the program as it is. What is wrong in a field is shown in the
        words of `pjit`. `specs` are the texts of the fields by name, which Python may set as well; `question` is the
        question, and `answer` what is shown of the answer.

        Raises:
            ImportError: anywidget is missing: `pip install "partjit[notebooks]"`.

        Example:
            >>> import jax, jax.numpy as jnp, numpy as np
            >>> from partjit import Mesh, P
            >>> from partjit.inspect.what_if import WhatIf
            >>> mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
            >>> x, w = np.ones((8, 16), np.float32), np.ones((16, 4), np.float32)
            >>> engine = WhatIf(lambda x, w: jnp.tanh(x @ w), x, w, mesh=mesh, isolated=False)
            >>> widget = engine.widget()  # doctest: +SKIP
            >>> widget.specs = {"w": "P('model', None)"}  # doctest: +SKIP
            >>> widget.question  # doctest: +SKIP
            Question(arguments={'w': P('model', None)}, results={}, constraints={})

        Source: https://anywidget.dev.
        """
        return what_if_widget(self)

    def close(self) -> None:
        """Ends the processes that answer; a later question starts one again."""
        for process in self._processes:
            process.close()

    def __enter__(self) -> "WhatIf":
        """The engine, whose processes end with the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the processes."""
        self.close()

    def _change(self, question: Question) -> Change:
        return change_of(question, self._arguments, self._results, self._activations, self.mesh, self.name)

    def _outcome(self, change: Change) -> Outcome:
        """An outcome, computed in this process."""
        if self._module is None:
            return outcome_of_one_device(self._facts, self._inlined.shardings)
        return outcome_of(self._module.operation, self._facts, change, self._known)

    def _some_processes(self, count: int) -> Sequence[AskedProcess]:
        while len(self._processes) < count:
            self._processes.append(AskedProcess(self._saved))
        for process in self._processes[:count]:
            process.start()
        return self._processes[:count]

    def _save(self) -> None:
        if not self._is_saved:
            module: Any = self._module
            add_mesh(module, self.mesh.shape)
            self._saved.write(module, AskedOutcome(saved_facts(self._facts)))
            self._is_saved = True

    def _answer(self, outcome: Outcome) -> Answer:
        found, moves = outcome.prediction
        collectives = [_on_mesh(one, self.mesh) for one in found]
        by_axes: dict[tuple[str, ...], float] = collections.defaultdict(float)
        for one in collectives:
            by_axes[one.axes] += one.counted_bytes
        unknown = [] if outcome.flops.is_exact else ["how often loops run, or which branches"]
        unknown += ["what XLA may move besides"] if moves else []
        return Answer(
            Collectives(collectives, "predicted", moves),
            dict(by_axes),
            outcome.peak,
            outcome.argument_bytes,
            outcome.flops.per_device,
            outcome.traffic,
            _specs(self._arguments, outcome.arguments),
            _specs(self._results, outcome.results),
            tuple(dict.fromkeys((*unknown, *outcome.unknown_memory))),
        )


def _on_mesh(one: Collective, mesh: Mesh) -> Collective:
    """A collective with groups of the devices of a mesh: another process knows their positions in it alone."""
    if not isinstance(one.groups, DeviceGroups) or (groups := one.groups.on(mesh)) is one.groups:
        return one
    return dataclasses.replace(one, groups=groups)


def _computing(tree: AnnotatedJaxpr, times: int | None) -> Iterator[tuple[AnnotatedEquation, int | None]]:
    """The equations outside of `shard_map`s, and how often a step evaluates each; those of a body come first."""
    for equation in tree.equations:
        inner = None if times is None or equation.trip_count is None else times * equation.trip_count
        for body in equation.bodies.values() if equation.primitive != "shard_map" else ():
            yield from _computing(body, inner)
        yield equation, times


def _activation(equation: AnnotatedEquation, value: AnnotatedValue, times: int | None) -> Activation:
    return Activation(
        value.number,
        value.aval.shape,
        value.aval.dtype,
        value.nbytes,
        equation.primitive,
        equation.site,
        equation.module,
        equation.scope,
        times,
    )


def _leaf(name: str, value: AnnotatedValue, sharding: object, is_donated: bool = False) -> Leaf | None:
    """What is known of an argument or a result before it is partitioned; None if it is no array."""
    if not value.is_array:
        return None
    spec = sharding.spec if isinstance(sharding, NamedSharding) else None
    return Leaf(name, value.aval.shape, value.aval.dtype, value.nbytes, spec, is_donated)


def _specs(leaves: Sequence[Leaf | None], shardings: Iterable[TensorSharding | None]) -> dict[str, P]:
    """Shardings as specs with an entry for each dimension, by the names of leaves."""
    found = {}
    for leaf, sharding in zip(leaves, shardings, strict=True):
        if leaf is not None:
            dims = ((),) * len(leaf.shape) if sharding is None else sharding.axes[: len(leaf.shape)]
            found[leaf.name] = P(*[dim[0] if len(dim) == 1 else dim or None for dim in dims])
    return found
