"""The live display: what it counts, what it shows, and what it leaves."""

import io
import sys
import threading

import pytest
from rich.console import Console

from partjit import events
from partjit.recording.display import progress


def emit(*several):
    for event in several:
        events.emit(event)


def executions(count, name="step", end=events.ProgramFinished):
    for number in range(count):
        emit(events.ProgramStarted(name, number, time=float(number)), end(name, number, time=number + 1.0))


def calls(count, program=None, stream="io"):
    for number in range(count):
        emit(
            events.CallQueued(number, "load", stream, program, 0),
            events.CallStarted(number, "load", stream),
            events.CallFinished(number, "load", stream),
        )


def shown(body, **options):
    """What a console got."""
    file = io.StringIO()
    with progress(Console(file=file, width=100, **options)):
        body()
    assert events.listeners == ()
    return file.getvalue()


def lines(body):
    return shown(body).splitlines()


def test_a_console_that_is_no_terminal_gets_a_line_per_program():
    def body():
        executions(4)
        executions(1, "other")
        calls(3, "other")

    assert lines(body) == [
        "step: 4 executions in 4.0 s, 1 per second",
        "other: 1 execution in 1.0 s, 1 per second, 3 calls",
    ]


def test_nothing_is_said_about_nothing():
    assert shown(lambda: None) == ""


def test_failures_are_counted():
    def body():
        executions(2)
        emit(
            events.ProgramStarted("step", 2, time=2.0),
            events.CallQueued(9, "load", "io", "step", 2),
            events.CallFailed(9, "load", "io", "OSError: disk full"),
            events.ProgramFailed("step", 2, "OSError: disk full", time=4.0),
        )

    assert lines(body) == ["step: 2 executions in 4.0 s, 0.5 per second, 1 failed, 1 call, 1 call failed"]


def test_what_has_not_ended_is_said():
    assert lines(lambda: emit(events.ProgramStarted("step", 0, time=1.0))) == [
        "step: 0 executions in 0.0 s, 1 not ended"
    ]


def test_calls_outside_of_programs_have_a_line():
    assert lines(lambda: calls(2)) == ["outside of programs: 2 calls"]


def test_ends_without_a_beginning_are_counted():
    assert lines(lambda: emit(events.ProgramFinished("step", 0, time=1.0))) == ["step: 1 execution in 0.0 s"]
    assert lines(lambda: emit(events.CallFinished(0, "load", "io"))) == ["outside of programs: 1 call"]


def test_a_name_is_no_markup():
    name = "[red]step[/nothing] :smile: " + "x" * 100
    assert lines(lambda: executions(1, name)) == [f"{name}: 1 execution in 1.0 s, 1 per second"]
    assert "[red]step" in shown(lambda: executions(1, name), force_terminal=True)


def test_a_block_that_raises_leaves_its_lines():
    file = io.StringIO()

    def block():
        with progress(Console(file=file)):
            executions(1)
            raise KeyError

    with pytest.raises(KeyError):
        block()
    assert file.getvalue() == "step: 1 execution in 1.0 s, 1 per second\n"
    assert events.listeners == ()


def test_a_terminal_shows_programs_and_streams_and_keeps_the_lines():
    def body():
        executions(3)
        calls(2)
        emit(
            events.ProgramStarted("step", 3, time=3.0),
            events.CallQueued(10, "load", "disk", "step", 3),
            events.CallQueued(11, "load", "disk", "step", 3),
            events.CallStarted(10, "load", "disk"),
            events.CallFailed(12, "load", "io", "OSError: disk full"),
        )

    output = shown(body, force_terminal=True, force_interactive=True, color_system=None)
    (programs,) = {tuple(line.split()[:2]) for line in output.splitlines() if line.startswith(" step ")}
    assert programs == ("step", "3")
    assert ["disk", "1", "1", "0"] in [line.split() for line in output.splitlines()]
    assert ["io", "0", "0", "1"] in [line.split() for line in output.splitlines()]
    *_, step, outside = output.splitlines()
    assert step.endswith("step: 3 executions in 3.0 s, 1 per second, 1 not ended")
    assert outside == "outside of programs: 3 calls, 1 call failed"


def test_threads_count_together():
    def count(first):
        for number in range(first, first + 250):
            emit(events.ProgramStarted("step", number, time=0.0), events.ProgramFinished("step", number, time=1.0))

    def body():
        threads = [threading.Thread(target=count, args=(1000 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    assert lines(body) == ["step: 1000 executions in 1.0 s, 1000 per second"]


def test_the_console_is_that_of_rich_unless_stated(capsys):
    with progress():
        executions(1)
    assert capsys.readouterr().out == "step: 1 execution in 1.0 s, 1 per second\n"


def test_without_rich_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.live", None)
    with pytest.raises(ImportError, match=r"pip install \"partjit\[viz\]\""):
        progress()
    assert events.listeners == ()


def test_what_is_no_console_is_refused_by_name():
    with pytest.raises(TypeError, match=r"progress: console must be a rich.console.Console, but is 3, an int"):
        progress(3)
