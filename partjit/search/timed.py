"""The best of what a search found, compiled and timed on the devices of the mesh."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding

from partjit._jax.processes import own_process
from partjit.api import pjit
from partjit.checks import require_integer, wrong_value
from partjit.inspect.changes import Axes
from partjit.mesh import is_abstract_mesh
from partjit.search.agreed import processes_of
from partjit.search.constrained import with_constraints
from partjit.search.find import Ranking, Tried
from partjit.search.found import spec_of
from partjit.search.program import SearchedProgram

__all__ = ["TimedStep", "compiler", "fastest", "require_measurable"]

_ROUNDS = 15
_CUTS = {3: 1.5, 6: 1.25, 10: 1.15}
"""After so many rounds, by how much the median of one may exceed the best for it to be timed further."""

_WINS = 2 / 3
"""The share of the turns in which another candidate has to be faster than the one with the least estimate."""


def require_measurable(where: str, measure: object, mesh: Mesh) -> int:
    """How many programs are timed.

    Raises:
        TypeError, ValueError: it is no number of at least 0, or this process has not all devices of the mesh.
    """
    count = require_integer(where, "measure", measure, 0)
    if count and is_abstract_mesh(mesh):
        raise wrong_value(where, "measure", count, "0 on an abstract mesh, whose devices are not there to be timed")
    if count and processes_of(mesh) != (own_process(),):
        raise wrong_value(where, "measure", count, "0 on a mesh with devices of other processes")
    return count


def fastest(
    program: SearchedProgram,
    ranking: Ranking,
    count: int,
    leaves: Sequence[object] | None = None,
    hidden: Sequence[Axes] = (),
    where: str = "search_specs",
    compiled: "Callable[[Tried], TimedStep] | None" = None,
) -> Ranking:
    """The ranking, with the fastest of its first `count` candidates as the best.

    Each is compiled. Then they take steps in turn, so that what else the machine does slows all of them alike; those
    that are clearly slower drop out, and the best by estimate stays the best if the fastest is hard to tell from it. A
    candidate that cannot be compiled, or does not fit in the memory of a device, is not the fastest.

    Args:
        program: the program.
        ranking: what was found, of which the candidates are compiled.
        count: how many are compiled.
        leaves: the arguments; those that are no arrays, or all by default, are made up: numbers between -0.02 and 0.02,
            and zeros where they are no floats.
        hidden: the axes of the arguments that are not the user's.
        where: what errors begin with.
        compiled: what compiles candidates, if it is not to be made; see `compiler`.

    Raises:
        ValueError: the program has effects, which it would have each time.
        jax.errors.JaxRuntimeError: none of the candidates could be run.
    """
    steps, failure = list[TimedStep](), None
    compiled = compiled or compiler(program, leaves, hidden, where)
    for tried in ranking.candidates[:count]:
        try:
            step = compiled(tried)
            step.run()
        except jax.errors.JaxRuntimeError as error:
            failure = error
        else:
            steps.append(step)
    if not steps:
        assert failure is not None  # there is at least one candidate
        raise failure
    chosen = _winner(_after_turns(steps), steps[0]).tried
    runners_up = ranking.runners_up
    if chosen.question.key != ranking.question.key:
        runners_up = (ranking.best, *(one for one in runners_up if one.choice != chosen.scored.choice))
    return dataclasses.replace(
        ranking,
        best=chosen.scored,
        question=chosen.question,
        answer=chosen.answer,
        runners_up=runners_up,
        measured={step.tried.question.key: step.seconds for step in steps},
    )


def compiler(
    program: SearchedProgram,
    leaves: Sequence[object] | None = None,
    hidden: Sequence[Axes] = (),
    where: str = "search_specs",
) -> "Callable[[Tried], TimedStep]":
    """What compiles candidates; the arguments and the ValueError are those of `fastest`."""
    closed = with_constraints(program.partitioned.inlined, {}, program.unit.mesh)
    if closed.effects:
        effects = ", ".join(sorted(map(str, closed.effects)))
        raise ValueError(
            f"{where}: {program.unit.name} cannot be measured: it has effects, {effects}, which it would have with "
            "each step that is timed. Leave out `measure`, or what has effects"
        )
    avals = [aval for aval in closed.in_avals if isinstance(aval, ShapedArray)]
    given = leaves if leaves is not None and len(leaves) == len(avals) - program.hidden else ()
    made = _Made(avals, [*[None] * (len(avals) - len(given)), *given])
    return lambda tried: _compiled(program, tried, hidden, avals, made)


@dataclasses.dataclass(frozen=True, eq=False)
class TimedStep:
    """A compiled candidate.

    Attributes:
        tried: the candidate.
        executable: what it was compiled to.
        shardings: those of its flat arguments.
        made: where new arguments come from.
        times: the seconds of the steps that it took in turns.
    """

    tried: Tried
    executable: Any
    shardings: tuple[NamedSharding, ...]
    made: "_Made"
    times: list[float] = dataclasses.field(default_factory=list)

    def run(self) -> float:
        """How long a step takes on new arguments, which it may consume."""
        arguments = jax.block_until_ready(self.made.on(self.shardings))
        start = time.perf_counter()
        jax.block_until_ready(self.executable(*arguments))
        return time.perf_counter() - start

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.times)


def _after_turns(steps: Sequence[TimedStep]) -> Sequence[TimedStep]:
    """Those of the steps that were timed to the end."""
    for turn in range(_ROUNDS):
        if turn in _CUTS:
            most = _CUTS[turn] * min(step.seconds for step in steps)
            steps = [step for step in steps if step.seconds <= most]
        for step in steps:
            step.times.append(step.run())
    return steps


def _winner(steps: Sequence[TimedStep], first: TimedStep) -> TimedStep:
    """The fastest, unless it is hard to tell from the first."""
    best = min(steps, key=lambda step: step.seconds)
    if first not in steps:
        return best
    wins = sum(own < other for own, other in zip(best.times, first.times, strict=True))
    return best if wins >= _WINS * len(first.times) else first


def _compiled(
    program: SearchedProgram, tried: Tried, hidden: Sequence[Axes], avals: Sequence[ShapedArray], made: "_Made"
) -> TimedStep:
    question, mesh = tried.question, program.unit.mesh

    def on_mesh(axes: Sequence[Axes]) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, spec_of(one)) for one in axes)

    own = (question.arguments.get(k) or axes for k, axes in enumerate(tried.answer.arguments))
    shardings = on_mesh([*hidden, *own])
    results = on_mesh([question.results.get(k) or axes for k, axes in enumerate(tried.answer.results)])
    specs = {number: spec_of(axes) for number, axes in question.values.items()}
    evaluate = jaxpr_as_fun(with_constraints(program.partitioned.inlined, specs, mesh))
    donated = tuple(k + program.hidden for k, donated in enumerate(program.donated) if donated)
    options: dict[str, Any] = {"in_shardings": shardings, "out_shardings": results, "donate_argnums": donated}
    partitioned = pjit(lambda *args: tuple(evaluate(*args)), **options)
    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    return TimedStep(tried, partitioned.lower(*structs).compile(), shardings, made)


class _Made:
    """New arguments, as often as they are wanted: what a step consumes may be the user's."""

    def __init__(self, avals: Sequence[ShapedArray], given: Sequence[object]) -> None:
        self._avals, self._given = avals, given
        self._makers: dict[object, Callable[[], jax.Array]] = {}

    def on(self, shardings: Sequence[NamedSharding]) -> list[jax.Array]:
        """The arguments with these shardings."""
        return [
            jax.device_put(value, sharding, may_alias=False)
            if isinstance(value, jax.Array | np.ndarray)
            else self._made_up(aval, sharding)
            for aval, value, sharding in zip(self._avals, self._given, shardings, strict=True)
        ]

    def _made_up(self, aval: ShapedArray, sharding: NamedSharding) -> jax.Array:
        key = aval.shape, aval.dtype, sharding
        if key not in self._makers:
            made = jax.jit(lambda: _numbers(aval.shape, aval.dtype), out_shardings=sharding)
            self._makers[key] = made.lower().compile()  # ahead of time: where this is asked, something may be traced
        return self._makers[key]()


def _numbers(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.lax.broadcast(jax.random.key(0), shape)
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.zeros(shape, dtype)
    place = sum((k + 1.37) * jax.lax.broadcasted_iota(jnp.float32, shape, k) for k in range(len(shape)))
    return (0.02 * jnp.sin(1.0 + place)).astype(dtype)
