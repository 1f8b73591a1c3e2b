"""The predicted collectives beside the compiled ones, and why they differ."""

import dataclasses
from collections.abc import Iterable, Sequence

from partjit.inspect.collectives import Collective
from partjit.render.numbers import counted

__all__ = ["Comparison", "Tally", "compare"]


@dataclasses.dataclass(frozen=True)
class Tally:
    """Collectives of one kind over the same axes.

    Attributes:
        instructions: their number in the programs.
        arrays: the number of arrays they move; a combined collective counts for all of its arrays.
        executions: the number of arrays that are moved in a step, those in loops once per iteration; a loop of unknown
            trip count counts as one iteration.
        nbytes: that a device sends for them in a step.
    """

    instructions: int = 0
    arrays: int = 0
    executions: int = 0
    nbytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One kind over the same axes, before and after XLA.

    Attributes:
        kind: the kind of collective.
        axes: the axes of the mesh.
        predicted: those that the shardings require.
        compiled: those in the optimized programs; None if nothing was compiled.
        reason: why the two differ; empty if they are equal.
    """

    kind: str
    axes: tuple[str, ...]
    predicted: Tally
    compiled: Tally | None
    reason: str


def compare(predicted: Sequence[Collective], compiled: Sequence[Collective] | None) -> tuple[Comparison, ...]:
    """Counts predicted and, if there are any, compiled collectives by kind and axes; those that send most come first.

    Example:
        >>> def gather(times, **more):
        ...     return Collective(
        ...         kind="all-gather", axes=("model",), group_size=2, operand="f32[4]", result="f32[8]",
        ...         operand_bytes=16, result_bytes=32, times=times, **more)
        >>> (found,) = compare([gather(10)], [gather(1)])
        >>> found.predicted.nbytes, found.compiled.nbytes
        (160.0, 16.0)
        >>> found.reason
        'XLA hoisted it out of a loop (loop-invariant code motion)'
    """
    before, after = _tallied(predicted), None if compiled is None else _tallied(compiled)
    keys = {*before, *(after or {})}
    size = {key: max(before.get(key, Tally()).nbytes, (after or {}).get(key, Tally()).nbytes) for key in keys}
    return tuple(
        Comparison(
            *key,
            before.get(key, Tally()),
            None if after is None else after.get(key, Tally()),
            "" if after is None else _reason(before.get(key, Tally()), after.get(key, Tally())),
        )
        for key in sorted(keys, key=lambda key: (-size[key], key))
    )


def _tallied(collectives: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], Tally]:
    tallies: dict[tuple[str, tuple[str, ...]], Tally] = {}
    for collective in collectives:
        key = collective.kind, collective.axes
        tally, times = tallies.get(key, Tally()), 1 if collective.times is None else collective.times
        tallies[key] = Tally(
            tally.instructions + 1,
            tally.arrays + collective.combined,
            tally.executions + collective.combined * times,
            tally.nbytes + collective.bytes_moved * times,
        )
    return tallies


def _reason(before: Tally, after: Tally) -> str:
    reasons = []
    if not after.instructions:
        return "XLA needs none: it moves the data in another way, or eliminated the value"
    if not before.instructions:
        return "XLA's partitioner uses it in place of a predicted collective of another kind"
    fewer = before.arrays - after.arrays
    if fewer > 0:
        reasons.append(f"{fewer} fewer: XLA merges equal values (common subexpressions), and eliminates unused ones")
    elif fewer < 0:
        reasons.append(f"{-fewer} more: XLA's partitioner reshards in other steps than predicted")
    elif before.executions > after.executions:
        reasons.append("XLA hoisted it out of a loop (loop-invariant code motion)")
    elif before.executions < after.executions:
        reasons.append("XLA executes it in more iterations of a loop")
    if after.instructions < after.arrays:
        reasons.append(f"XLA combined {after.arrays} arrays into {counted(after.instructions, 'instruction')}")
    if not reasons and abs(before.nbytes - after.nbytes) >= 1:
        reasons.append("XLA moves other shapes or types")
    return "; ".join(reasons)
