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
        types: their element types.
    """

    instructions: int = 0
    arrays: int = 0
    executions: int = 0
    nbytes: float = 0.0
    types: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One kind over the same axes, before and after XLA.

    Attributes:
        kind: the kind of collective.
        axes: the axes of the mesh.
        predicted: those that the shardings require.
        compiled: those in the optimized programs; None if nothing was compiled.
        reason: how the two differ, and what XLA may have done; empty if they are equal.
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
        '1 in a step instead of 10: XLA may have moved it out of a loop, as loop-invariant'
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
        tally, times = tallies.get(key, Tally()), collective.executions
        tallies[key] = Tally(
            tally.instructions + 1,
            tally.arrays + collective.combined,
            tally.executions + collective.combined * times,
            tally.nbytes + collective.bytes_moved * times,
            tuple(sorted({*tally.types, *_types(collective)})),
        )
    return tallies


def _reason(before: Tally, after: Tally) -> str:
    """What differs, which is counted, and what XLA may have done, which is not known."""
    if not after.instructions:
        return "none is compiled: XLA may move the data in another way, or have eliminated the value"
    if not before.instructions:
        return "none was predicted: XLA may use it in place of a collective of another kind"
    reasons = []
    fewer = before.arrays - after.arrays
    if fewer > 0:
        reasons.append(f"{counted(fewer, 'array')} fewer: XLA may have merged equal values, or eliminated unused ones")
    elif fewer < 0:
        reasons.append(f"{counted(-fewer, 'array')} more: XLA may reshard in other steps")
    elif before.executions > after.executions:
        reasons.append(f"{_runs(before, after)}: XLA may have moved it out of a loop, as loop-invariant")
    elif before.executions < after.executions:
        reasons.append(f"{_runs(before, after)}: XLA may execute it in more iterations of a loop")
    if after.instructions < after.arrays:
        reasons.append(f"{after.arrays} arrays in {counted(after.instructions, 'instruction')}")
    types = [sorted({*one.types} - {*other.types}) for one, other in ((after, before), (before, after))]
    if all(types):
        reasons.append(f"{', '.join(types[0])} instead of {', '.join(types[1])}: XLA may compute in a wider type")
    elif before.executions == after.executions and abs(before.nbytes - after.nbytes) >= 1:
        reasons.append("other shapes than predicted")
    return "; ".join(reasons)


def _runs(before: Tally, after: Tally) -> str:
    return f"{after.executions:,} in a step instead of {before.executions:,}"


def _types(collective: Collective) -> set[str]:
    return {array.partition("[")[0] for array in collective.result.split(", ")}
