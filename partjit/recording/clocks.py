"""The clocks of processes: what each counts from, and how far two of them are apart.

`time.perf_counter()` counts from an instant that each machine chooses. How far the clocks of two processes are apart is
bounded by messages between them: none arrives before it was sent.
"""

import os
import pathlib
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from partjit._jax.processes import own_process
from partjit.render.numbers import shown_duration

__all__ = ["Clock", "ClockOffset", "Exchange", "align", "bounds_of_offset", "own_clock"]

Exchange = tuple[float, float, float, float]
"""When a question was sent (here), received and answered (there), and the answer received (here), in seconds."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of a process.

    Attributes:
        process: the number of the process.
        host: the name of its machine.
        origin: what names the instant that it counts from; None if nothing does. Equal names mean one clock.
        epoch: when it was 0, in seconds since 1970 by the wall clock of the machine.
    """

    process: int
    host: str
    origin: str | None
    epoch: float


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How a process' times become those of the lowest process of a merged timeline.

    Attributes:
        process: the number of the process.
        host: the name of its machine.
        seconds: what is added to its times.
        uncertainty: by how many seconds this is wrong at most, when it was measured; 0 for a clock that is the same;
            None where only the wall clocks of the machines are known, which may be apart by any time.

    Example:
        >>> from partjit.recording.clocks import ClockOffset
        >>> print(ClockOffset(1, "node1", 12.5, 2.5e-05))
        process 1 (node1): 12.500000 s, +- 25.00 us
    """

    process: int
    host: str
    seconds: float
    uncertainty: float | None

    def __str__(self) -> str:
        return f"process {self.process} ({self.host}): {self.seconds:.6f} s, {self.accuracy}"

    @property
    def accuracy(self) -> str:
        """The uncertainty in words."""
        if self.uncertainty is None:
            return "by wall clocks"
        return f"+- {shown_duration(self.uncertainty)}" if self.uncertainty else "the same clock"


def own_clock() -> Clock:
    """The clock of this process.

    Example:
        >>> abs(own_clock().epoch + time.perf_counter() - time.time()) < 60
        True
    """
    before, wall, after = time.perf_counter(), time.time(), time.perf_counter()
    return Clock(own_process(), platform.node(), _origin(), wall - (before + after) / 2)


def _origin() -> str | None:
    if (
        sys.platform != "linux"
        or time.get_clock_info("perf_counter").implementation != "clock_gettime(CLOCK_MONOTONIC)"
    ):
        return None
    # The clock counts from the boot of the machine, or as the time namespace of a container says.
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        return None
    return f"{boot} {namespace}"


def bounds_of_offset(exchanges: Iterable[Exchange]) -> tuple[float, float]:
    """Between what the clock here is ahead of the one there.

    Each exchange bounds it: the question did not arrive before it was sent, nor the answer. All of them together bound
    it at least as closely as the one with the shortest round trip, which is what NTP goes by (RFC 5905, section 10).

    Example:
        >>> bounds_of_offset([(10.0, 2.25, 2.5, 11.0), (20.0, 12.125, 12.25, 20.5)])
        (7.875, 8.25)
    """
    each = [(sent - received, back - answered) for sent, received, answered, back in exchanges]
    least, most = max(low for low, _ in each), min(high for _, high in each)
    # Clocks that drift while they are compared may leave nothing in between.
    return min(least, most), max(least, most)


def align(clocks: Sequence[Clock], measured: Mapping[int, tuple[float, float]]) -> tuple[ClockOffset, ...]:
    """The offsets of processes to the lowest of them, in the order of their numbers.

    Processes whose clocks are the same share what was measured for any of them.

    Args:
        clocks: of the processes.
        measured: for each process, between what the clock of the lowest one is ahead; where it is missing for all
            processes that share a clock, wall clocks have to do.

    Example:
        >>> clocks = [Clock(0, "a", "boot a", 100.0), Clock(1, "b", "boot b", 98.0), Clock(2, "b", "boot b", 98.5)]
        >>> [(each.seconds, each.uncertainty) for each in align(clocks, {1: (-3.0, -1.0), 2: (-2.5, -0.5)})]
        [(0.0, 0.0), (-1.75, 0.75), (-1.75, 0.75)]
        >>> [(each.seconds, each.uncertainty) for each in align(clocks, {})]
        [(0.0, 0.0), (-2.0, None), (-2.0, None)]
    """
    clocks = sorted(clocks, key=lambda clock: clock.process)
    first = clocks[0]
    same: dict[object, list[Clock]] = {}
    for clock in clocks:
        same.setdefault(clock.origin or clock.process, []).append(clock)
    found: dict[int, ClockOffset] = {}
    for group in same.values():
        bounds = [measured[clock.process] for clock in group if clock.process in measured]
        if first in group:
            seconds, uncertainty = 0.0, 0.0
        elif bounds:
            least, most = max(low for low, _ in bounds), min(high for _, high in bounds)
            seconds, uncertainty = (least + most) / 2, abs(most - least) / 2
        else:
            seconds, uncertainty = group[0].epoch - first.epoch, None
        for clock in group:
            found[clock.process] = ClockOffset(clock.process, clock.host, seconds, uncertainty)
    return tuple(found[clock.process] for clock in clocks)
