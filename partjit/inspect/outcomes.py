"""What a program costs with other shardings, without tracing or lowering it again.

The lowered module is copied, the shardings in it are changed, and they are propagated as in a report.
"""

import dataclasses
from typing import Any, NamedTuple

from partjit.devices import platform_of
from partjit.inspect.changes import Change, Facts, change
from partjit.inspect.collectives import executions, total_bytes
from partjit.inspect.flops import Flops
from partjit.inspect.memory import needs_of
from partjit.inspect.places import Known
from partjit.inspect.predicted import Prediction, predict_of
from partjit.inspect.propagation import propagated, results_of
from partjit.inspect.traffic import bytes_moved
from partjit.shardy import TensorSharding
from partjit.xla_rewrites import open_captured

__all__ = ["Costs", "Outcome", "Propagated", "after_change", "outcome_of", "outcome_of_one_device"]


class Costs(NamedTuple):
    """What a program sends and needs.

    Attributes:
        sent: bytes that a device sends in a step, as far as they are predicted exactly.
        at_most: the same with the upper bounds of what is not.
        peak: bytes on a device at most, estimated.
    """

    sent: float
    at_most: float
    peak: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a program sends, needs and computes in a step, per device.

    Attributes:
        prediction: its collectives, and what is not predicted.
        peak: bytes that are live at once at most, estimated.
        argument_bytes: of the arguments.
        unknown_memory: what the peak depends on that is not known.
        flops: its FLOPs.
        traffic: bytes that a device reads from its memory and writes to it.
        arguments, results: the shardings of arguments and results.
    """

    prediction: Prediction
    peak: int
    argument_bytes: int
    unknown_memory: tuple[str, ...]
    flops: Flops
    traffic: float
    arguments: tuple[TensorSharding, ...]
    results: tuple[TensorSharding, ...]

    @property
    def costs(self) -> Costs:
        """What it sends and needs."""
        collectives, moves = self.prediction
        sent = total_bytes(collectives).bytes
        return Costs(sent, sent + sum(executions(move) * move.bytes_at_most for move in moves), self.peak)


class Propagated(NamedTuple):
    """A program with other shardings, propagated.

    Attributes:
        values: the shardings of values, by their numbers; those that constrained ones are used with have numbers from
            `Facts.count` on.
        results: the shardings of the results.
        prediction: its collectives, and what is not predicted.
    """

    values: dict[int, TensorSharding]
    results: tuple[TensorSharding, ...]
    prediction: Prediction

    def used(self, facts: Facts) -> dict[int, TensorSharding]:
        """The shardings that constrained values are used with, by their numbers."""
        return {number - facts.count: sharding for number, sharding in self.values.items() if number >= facts.count}


def after_change(lowered: Any, facts: Facts, wanted: Change, known: Known) -> Propagated:
    """A program on several devices after a change; see `outcome_of`."""
    with lowered.context:
        module: Any = lowered.clone()
        change(module, wanted, facts, known)
        if known.captures:  # the same in all copies
            known.captures = open_captured(module)
        after, of_values = propagated(module, known.shardings)
        results = results_of(after.shardings, facts.ranks)
        return Propagated(of_values, results, predict_of(after, facts.origin, known))


def outcome_of(lowered: Any, facts: Facts, wanted: Change, known: Known) -> Outcome:
    """The outcome of a change of a program on several devices.

    Args:
        lowered: its module before the propagation, which is copied; see `Partitioned.lowered`.
        facts: what is known of it.
        wanted: the change.
        known: what attributes are known to say; it is added to.
    """
    return _outcome(facts, after_change(lowered, facts, wanted, known))


def outcome_of_one_device(facts: Facts, shardings: dict[int, TensorSharding]) -> Outcome:
    """The outcome of any change of a program on one device: these shardings of its values."""
    results = tuple(map(TensorSharding.replicated, facts.ranks))
    return _outcome(facts, Propagated(shardings, results, Prediction((), ())))


def _outcome(facts: Facts, after: Propagated) -> Outcome:
    of_values, results, prediction = after
    mesh = facts.origin.mesh
    is_cpu = mesh.empty or platform_of(mesh) == "cpu"
    needs = needs_of(facts.skeleton, of_values, results, facts.donated, *prediction, is_cpu)
    return Outcome(
        prediction,
        needs.peak,
        needs.arguments,
        needs.bounds.reasons,
        facts.flops.flops(of_values, after.used(facts)),
        bytes_moved(facts.traffic, of_values),
        tuple(of_values.get(number, TensorSharding.replicated(0)) for number in facts.arguments),
        results,
    )
