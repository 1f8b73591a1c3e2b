"""The collectives that the shardings ask for beside those that XLA made of them, and why they differ."""

import dataclasses
from collections.abc import Iterable, Sequence

from partjit.inspect.collectives import Collective

__all__ = ["Comparison", "Tally", "compare"]


@dataclasses.dataclass(frozen=True)
class Tally:
    """Collectives of one kind over the same axes.

    Attributes:
        instructions: how many there are in the programs.
        arrays: how many arrays they move; one that moves several counts for all of them.
        executions: how many arrays are moved in a step, those in loops once for each turn; a loop of unknown length
            counts as one turn.
        nbytes: what a device sends for them in a step.
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
        predicted: what the shardings ask for.
        compiled: what is in the optimized programs; None if nothing was compiled.
        reason: why the two differ; empty if they do not.
    """

    kind: str
    axes: tuple[str, ...]
    predicted: Tally
    compiled: Tally | None
    reason: str


def compare(predicted: Sequence[Collective], compiled: Sequence[Collective] | None) -> tuple[Comparison, ...]:
    """Counts collectives by kind and axes; those that send most come first.

    Args:
        predicted: what the shardings ask for.
        compiled: what was read from the optimized programs, or None.

    Example:
        >>> def gather(times, **more):
        ...     return Collective(
        ...         kind="all-gather", axes=("model",), group_size=2, operand="f32[4]", result="f32[8]",
        ...         operand_bytes=16, result_bytes=32, times=times, **more)
        >>> (found,) = compare([gather(10)], [gather(1)])
        >>> found.predicted.nbytes, found.compiled.nbytes
        (160.0, 16.0)
        >>> found.reason
        'XLA moved it out of a loop that does not change it (loop-invariant code motion)'
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
    said = []
    if not after.instructions:
        return "XLA needs none: it moves the data in another way, or does not need it"
    if not before.instructions:
        return "XLA's partitioner moves data so where the shardings ask for another way, or where it sees none"
    fewer = before.arrays - after.arrays
    if fewer > 0:
        said.append(
            f"{fewer} fewer: XLA computes equal values once (common subexpressions), and leaves out what nobody reads"
        )
    elif fewer < 0:
        said.append(f"{-fewer} more: XLA's partitioner goes another way than the shardings ask for")
    elif before.executions > after.executions:
        said.append("XLA moved it out of a loop that does not change it (loop-invariant code motion)")
    elif before.executions < after.executions:
        said.append("XLA moves it in more turns of a loop")
    if after.instructions < after.arrays:
        plural = "" if after.instructions == 1 else "s"
        said.append(f"XLA's combiner moves {after.arrays} arrays in {after.instructions} instruction{plural}")
    if not said and abs(before.nbytes - after.nbytes) >= 1:
        said.append("XLA moves it as other shapes or types")
    return "; ".join(said)
