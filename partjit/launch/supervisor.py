"""`launch`: starts processes, and sees that they end together."""

import contextlib
import dataclasses
import os
import queue
import signal
import time
from collections.abc import Iterator, Mapping, Sequence

from partjit.launch.environment import free_address, variables
from partjit.launch.guard import POLL
from partjit.launch.relay import Relay
from partjit.launch.started import Guard, Started, ending

__all__ = ["Job", "launch"]

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_STDOUT, _STDERR = 1, 2
_LEFT_OPEN = 1.0  # seconds for what a program writes that has left the group of its process


@dataclasses.dataclass(frozen=True)
class Job:
    """What is launched.

    Attributes:
        command: what each process runs.
        count: of the processes.
        devices: of each process.
        grace: seconds from SIGTERM to SIGKILL.
        env: variables for the processes, besides those of the launcher.
    """

    command: Sequence[str]
    count: int
    devices: int
    grace: float
    env: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class _Ended:
    number: int
    code: int


@dataclasses.dataclass(frozen=True)
class _Signaled:
    signal: int


@dataclasses.dataclass(frozen=True)
class _NobodyReads:
    pass


def launch(job: Job) -> int:
    """Runs a command in several processes, in the main thread, until all of them have ended.

    The first that fails ends the others, as does a signal to the launcher, which is passed on. If the launcher is
    killed, its guard ends them. What they write is written to the file descriptors 1 and 2.

    Returns:
        The exit code of the first process that failed, 128 + n for signal n, or 0.
    """
    events: queue.SimpleQueue[_Ended | _Signaled | _NobodyReads] = queue.SimpleQueue()
    address, reserved = free_address()
    relay = Relay(lambda: events.put(_NobodyReads()))
    sentry = Guard(job.grace)
    started: list[Started] = []
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(reserved)
        cleanup.callback(sentry.close)
        cleanup.callback(_close, started, relay)  # a slow reader can be interrupted, as the signals are Python's again
        cleanup.enter_context(_signals(events))
        cleanup.callback(_end, started, job.grace, sentry)
        for number in range(job.count):
            env = {**variables(number, job.count, job.devices, address, os.environ), **job.env}
            started.append(Started(number, job.command, env, sentry))
            relay.add(started[-1].stdout, number, _STDOUT)
            relay.add(started[-1].stderr, number, _STDERR)
        relay.start()
        for process in started:
            process.watch(lambda number, code: events.put(_Ended(number, code)))
        return _supervise(started, events, job.grace, relay)


def _supervise(
    started: Sequence[Started],
    events: "queue.SimpleQueue[_Ended | _Signaled | _NobodyReads]",
    grace: float,
    relay: Relay,
) -> int:
    """Waits for all processes, and returns the exit code."""
    running = {process.number: process for process in started}
    result = 0
    deadline: float | None = None  # set once they have to end

    def end(number: int) -> float:
        for process in running.values():
            process.signal(number)
        return time.monotonic() + grace

    while running:
        try:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            event = events.get(timeout=left)
        except queue.Empty:
            names = _shown(running)
            relay.write(f"partjit launch: {names} did not end within {grace:g} s and will be killed", _STDERR)
            end(signal.SIGKILL)
            deadline = None
            continue
        match event:
            case _Ended(number, code):
                del running[number]
                if code and not result:
                    result = code
                    others = ""
                    if running and deadline is None:
                        others = f"; ending {_shown(running)}"
                        deadline = end(signal.SIGTERM)
                    relay.write(f"partjit launch: process {number} {ending(code)}{others}", _STDERR)
            case _Signaled(number):
                deadline = end(number if deadline is None else signal.SIGKILL)
            case _NobodyReads():
                result = result or 128 + signal.SIGPIPE
                deadline = deadline or end(signal.SIGTERM)
    return result


def _end(started: Sequence[Started], grace: float, sentry: Guard) -> None:
    """Ends the children that processes have left behind; after an error in the launcher, the processes as well."""
    for process in started:
        process.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace
    for process in started:
        while not process.has_ended() and time.monotonic() < deadline:
            time.sleep(POLL)
        process.kill()
        sentry.ends(process.group)


def _close(started: Sequence[Started], relay: Relay) -> None:
    relay.finish(_LEFT_OPEN)
    for process in started:
        process.close()


def _shown(running: Mapping[int, Started]) -> str:
    numbers = ", ".join(map(str, sorted(running)))
    return f"process {numbers}" if len(running) == 1 else f"processes {numbers}"


@contextlib.contextmanager
def _signals(events: "queue.SimpleQueue[_Ended | _Signaled | _NobodyReads]") -> Iterator[None]:
    """Signals of the launcher become events. One that is ignored, as under nohup, stays ignored."""
    before = {number: signal.getsignal(number) for number in _PASSED_ON}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, lambda number, _: events.put(_Signaled(number)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
