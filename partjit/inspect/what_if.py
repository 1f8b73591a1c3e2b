"""What a program would send, need and compute with other specs, in milliseconds a question.

A function is traced and lowered once. A question copies the lowered program, changes the shardings of arguments,
results and activations in it, and runs the partitioner's propagation on it; nothing is compiled. The answer is what
`explain` says of the function with these specs.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partjit.checks import require_mesh_type
from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr, AnnotatedValue
from partjit.inspect.changes import facts_of, marked_values
from partjit.inspect.contents import Collectives
from partjit.inspect.outcomes import Outcome, outcome_of, outcome_of_one_device
from partjit.inspect.places import Known
from partjit.inspect.propagation import partition
from partjit.inspect.questions import Activation, Answer, Leaf, Question, change_of
from partjit.inspect.tracing import trace_function
from partjit.mesh import has_explicit_axes
from partjit.shardy import TensorSharding, nested

__all__ = ["Activation", "Answer", "Leaf", "Question", "WhatIf"]


class WhatIf:
    """A program that is traced and lowered once, and asked what it costs with other specs.

    Args:
        fun: a function of `pjit` or `jax.jit`, a plain one, or what their `trace` returned.
        *args, **kwargs: its arguments, trees of arrays or of `jax.ShapeDtypeStruct`s.
        mesh: the mesh of the call, or None for the one that is set.
        iterations: trip counts of loops by their lines, as `explain` takes them.

    Attributes:
        arguments, results: the arguments and results, which questions name.
        mesh: the mesh of the program.

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
        >>> engine = WhatIf(lambda x, w: jnp.tanh(x @ w), x, w, mesh=mesh)
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
        mesh: Mesh | None = None,
        iterations: Mapping[str, int] | None = None,
        **kwargs: object,
    ) -> None:
        """Traces and lowers the program."""
        if mesh is not None:
            require_mesh_type("WhatIf", "mesh", mesh)
        traced = trace_function(fun, args, kwargs, mesh)
        unit = dataclasses.replace(traced.whole, iterations={} if iterations is None else dict(iterations))
        if any(isinstance(aval, ShapedArray) and has_explicit_axes(aval.sharding.mesh) for aval in unit.jaxpr.in_avals):
            raise ValueError(
                f"WhatIf: {unit.name} is on a mesh with axes of type Explicit, where specs are part of the types of "
                "values: with other specs it is another program. Give a mesh whose axes are Auto"
            )
        self.mesh = unit.mesh
        self._base = partition(unit, keep_text=True)
        tree = self._base.tree
        inputs = zip(unit.paths, tree.inputs, unit.in_shardings, traced.donated, strict=True)
        outputs = zip(unit.result_paths, tree.outputs, unit.out_shardings, strict=True)
        self._arguments = [_leaf(*of_input) for of_input in inputs]
        self._results = [_leaf(*of_output) for of_output in outputs]
        self.arguments = tuple(filter(None, self._arguments))
        self.results = tuple(filter(None, self._results))
        self._facts, self._known = facts_of(self._base, traced.donated), Known()

    @property
    def activations(self) -> tuple[Activation, ...]:
        """The arrays that equations compute, in the order of the program, those inside of a `shard_map` left out."""
        return tuple(self._activations.values())

    @functools.cached_property
    def _activations(self) -> dict[int, Activation]:
        found: dict[int, Activation] = {}
        base = self._base
        # Some equations, such as `stop_gradient`, are no operations: their results are their operands.
        first = {}
        for number, value in marked_values(nested(base.lowered) if base.lowered is not None else ()):
            first.setdefault(value, number)
        distinct = {*first.values()} if base.lowered is not None else {*base.inlined.numbers.values()}
        for equation, times in _computing(base.tree, 1):
            for value in equation.outputs:
                if value.is_array and value.aval.shape and value.number in distinct and value.number not in found:
                    found[value.number] = _activation(equation, value, times)
        return found

    def ask(self, question: Question) -> Answer:
        """What the program costs with the specs of a question.

        Raises:
            ValueNotFoundError: it names what the program does not have; the message lists similar names. It is a
                LookupError.
            ShardingError: specs do not fit their values or the mesh; the message lists all that do not.
            TypeError, ValueError: a spec is none, or names an axis twice.
        """
        unit = self._base.unit
        wanted = change_of(question, self._arguments, self._results, self._activations, unit.mesh, unit.name)
        if self._base.lowered is None:
            return self._answer(outcome_of_one_device(self._facts, self._base.inlined.shardings))
        return self._answer(outcome_of(self._base.lowered, self._facts, wanted, self._known))

    def ask_many(self, questions: Iterable[Question]) -> list[Answer]:
        """The answers to several questions, in their order. Raises what `ask` raises."""
        return [self.ask(question) for question in questions]

    def _answer(self, outcome: Outcome) -> Answer:
        collectives, moves = outcome.prediction
        by_axes: dict[tuple[str, ...], float] = collections.defaultdict(float)
        for one in collectives:
            by_axes[one.axes] += one.bytes_moved * one.executions
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
