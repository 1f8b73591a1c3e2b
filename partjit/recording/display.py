"""A live display of running programs and colocated calls, for terminals.

The listener only counts; a thread of rich's renders the counts ten times a second. rich is optional, so it is imported
when a display is opened.
"""

import collections
import contextlib
import functools
import importlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from partjit import events
from partjit.checks import require
from partjit.events import Event
from partjit.render.numbers import counted

__all__ = ["progress"]

_PER_SECOND = 10


def progress(console: object = None) -> contextlib.AbstractContextManager[None]:
    """Displays programs and colocated calls while the `with` block runs, and prints a line per program at its end.

    On a console that is no terminal, only these lines are printed.

    Args:
        console: a `rich.console.Console`; rich's own by default.

    Raises:
        ImportError: rich is missing.
        TypeError: `console` is no console of rich's.

    Example:
        >>> from partjit import events
        >>> from partjit.recording.display import progress
        >>> with progress():
        ...     events.emit(events.ProgramStarted("step", 0, time=1.0))
        ...     events.emit(events.ProgramFinished("step", 0, time=3.0))
        step: 1 execution in 2.0 s, 0.5 per second
    """
    try:
        rich = importlib.import_module("rich")
        for part in ("console", "live", "table", "text"):
            importlib.import_module(f"rich.{part}")
    except ImportError as error:
        raise ImportError('progress needs rich, which is missing; run: pip install "partjit[viz]"') from error
    if console is None:
        console = rich.get_console()
    require("progress", "console", console, importlib.import_module("rich.console").Console, "a rich.console.Console")
    return _shown(rich, console)


@contextlib.contextmanager
def _shown(rich: ModuleType, console: Any) -> Iterator[None]:
    counts = _Counts()

    display = contextlib.nullcontext()
    if console.is_interactive:
        render = functools.partial(_render, rich, counts)
        display = rich.live.Live(get_renderable=render, console=console, refresh_per_second=_PER_SECOND, transient=True)
    try:
        with display, events.subscribe(counts.count):
            yield
    finally:
        for line in counts.lines():
            console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


@dataclass
class _Program:
    """The counts of a program, or of the calls outside of programs."""

    running: set[int] = field(default_factory=set)
    finished: int = 0
    failed: int = 0
    calls: int = 0
    failed_calls: int = 0
    first: float = math.inf
    last: float = -math.inf

    @property
    def seconds(self) -> float:
        """From the first event to the last one."""
        return max(0.0, self.last - self.first)

    @property
    def rate(self) -> str:
        """Executions per second, as text."""
        if not self.seconds:
            return "-"
        rate = self.finished / self.seconds
        return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


class _Counts:
    """The counts so far."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a finalizer that emits may come in between
        self.programs: dict[str | None, _Program] = collections.defaultdict(_Program)
        self.queued: dict[int, str] = {}  # the streams of calls
        self.running: dict[int, str] = {}
        self.failed: collections.Counter[str] = collections.Counter()
        self._owners: dict[int, str | None] = {}

    def count(self, event: Event) -> None:
        with self.lock:
            match event:
                case events.ProgramStarted(name, execution):
                    self._program(name, event).running.add(execution)
                case events.ProgramFinished(name, execution):
                    program = self._program(name, event)
                    program.running.discard(execution)
                    program.finished += 1
                case events.ProgramFailed(name, execution):
                    program = self._program(name, event)
                    program.running.discard(execution)
                    program.failed += 1
                case events.CallQueued(number, _, stream, name):
                    self.queued[number] = stream
                    self._owners[number] = name
                case events.CallStarted(number, _, stream):
                    self.queued.pop(number, None)
                    self.running[number] = stream
                case events.CallFinished(number):
                    self._end_call(number)
                case events.CallFailed(number, _, stream):
                    self.failed[stream] += 1
                    self._end_call(number).failed_calls += 1

    def _program(self, name: str, event: Event) -> _Program:
        program = self.programs[name]
        program.first = min(program.first, event.time)
        program.last = max(program.last, event.time)
        return program

    def _end_call(self, number: int) -> _Program:
        self.queued.pop(number, None)
        self.running.pop(number, None)
        program = self.programs[self._owners.pop(number, None)]
        program.calls += 1
        return program

    def lines(self) -> list[str]:
        """The lines to print at the end."""
        with self.lock:
            return [_line(name, program) for name, program in self.programs.items()]


def _line(name: str | None, program: _Program) -> str:
    calls = [counted(program.calls, "call")] if program.calls else []
    if program.failed_calls:
        calls.append(f"{counted(program.failed_calls, 'call')} failed")
    if name is None:
        return f"outside of programs: {', '.join(calls)}"
    parts = [f"{counted(program.finished, 'execution')} in {program.seconds:.1f} s"]
    if program.finished and program.seconds:
        parts.append(f"{program.rate} per second")
    if program.failed:
        parts.append(f"{program.failed} failed")
    if program.running:
        parts.append(f"{len(program.running)} not ended")
    return f"{name}: {', '.join(parts + calls)}"


def _render(rich: ModuleType, counts: _Counts) -> object:
    """The counts as two tables, of programs and of streams."""
    programs = _table(rich, "program", "executions", "per second", "seconds", "failed")
    streams = _table(rich, "stream", "running", "queued", "failed")
    now = time.perf_counter()
    with counts.lock:
        for name, program in counts.programs.items():
            if name is not None:
                seconds = max(program.seconds, now - program.first) if program.running else program.seconds
                numbers = f"{program.finished}", program.rate, f"{seconds:.1f}", f"{program.failed}"
                programs.add_row(rich.text.Text(name), *numbers)  # a bare string could contain markup
        running, queued = (collections.Counter(calls.values()) for calls in (counts.running, counts.queued))
        for stream in sorted({*running, *queued, *counts.failed}):
            streams.add_row(rich.text.Text(stream), *(f"{of[stream]}" for of in (running, queued, counts.failed)))
    both = rich.table.Table.grid()
    both.add_row(programs)
    both.add_row(streams)
    return both


def _table(rich: ModuleType, first: str, *others: str) -> Any:
    table = rich.table.Table(box=None)
    table.add_column(first)
    for header in others:
        table.add_column(header, justify="right")
    return table
