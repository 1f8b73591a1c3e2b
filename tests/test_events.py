"""The stream of events: what an event knows by itself, and who is told."""

import contextlib
import copy
import dataclasses
import gc
import logging
import pickle
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partjit import events
from tests.census import sees

EXAMPLES = [
    events.ProgramStarted("step", 3),
    events.ProgramFinished("step", 3),
    events.ProgramFailed("step", 3, "ValueError: no"),
    events.FragmentDispatched("step", 3, "fragment_0"),
    events.FragmentReady("step", 3, "fragment_0"),
    events.FragmentFailed("step", 3, "fragment_0", "ValueError: no"),
    events.CallQueued(7, "load", "io", "step", 3, "load"),
    events.CallStarted(7, "load", "io"),
    events.CallFinished(7, "load", "io"),
    events.CallFailed(7, "load", "io", "ValueError: no"),
    events.TransferStarted("step", 3, "load", 4096),
    events.TransferFinished("step", 3, "load"),
    events.WaitStarted("step", 3, "load"),
    events.WaitFinished("step", 3, "load"),
]
every_type = pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)


@pytest.fixture(autouse=True)
def _nobody_is_left():
    yield
    assert events.listeners == ()


def an_event(number=0):
    return events.ProgramStarted("step", number)


def run_threads(*targets):
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_the_examples_are_all_types():
    assert {type(event) for event in EXAMPLES} == {
        value
        for value in map(vars(events).get, events.__all__)
        if isinstance(value, type) and issubclass(value, events.Event) and value is not events.Event
    }


@every_type
def test_an_event_knows_when_and_where_it_happened(event):
    before = time.perf_counter()
    values = [getattr(event, field.name) for field in dataclasses.fields(event) if not field.kw_only]
    made = type(event)(*values)
    assert before <= made.time <= time.perf_counter()
    assert made.thread == threading.get_ident()
    assert type(event)(*values, time=event.time, thread=event.thread) == event


@every_type
def test_an_event_is_a_small_value(event):
    assert not hasattr(event, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.time = 0.0
    assert pickle.loads(pickle.dumps(event)) == copy.deepcopy(event) == event
    assert hash(event) == hash(copy.deepcopy(event))


def test_a_call_needs_no_program():
    call = events.CallQueued(7, "load", "io")
    assert (call.program, call.execution, call.node) == (None, None, None)


def test_those_who_listen_are_told_in_the_thread_of_the_event():
    seen = []
    with events.subscribe(lambda event: seen.append((event, threading.get_ident()))):
        run_threads(lambda: events.emit(an_event()))
    ((event, told_in),) = seen
    assert event.thread == told_in != threading.get_ident()


def test_nobody_is_told_before_or_after():
    seen = []
    events.emit(an_event(0))
    subscription = events.subscribe(seen.append)
    events.emit(an_event(1))
    subscription.close()
    events.emit(an_event(2))
    subscription.close()
    assert [event.execution for event in seen] == [1]


def test_a_block_that_raises_ends_the_subscription():
    def block():
        with events.subscribe(print) as subscription:
            assert events.listeners == (subscription,)
            raise KeyError

    with pytest.raises(KeyError):
        block()
    assert events.listeners == ()


@sees("different examples", "several elements")
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_everybody_gets_what_was_emitted_while_they_listened(steps):
    seen, expected = [[], [], [], []], [[], [], [], []]
    subscriptions = {}
    for number, (who, is_on) in enumerate(steps):
        if is_on and who not in subscriptions:
            subscriptions[who] = events.subscribe(seen[who].append)
        elif not is_on and who in subscriptions:
            subscriptions.pop(who).close()
        events.emit(an_event(number))
        for listening in subscriptions:
            expected[listening].append(number)
    for subscription in subscriptions.values():
        subscription.close()
    assert [[event.execution for event in own] for own in seen] == expected


def test_the_same_listener_may_subscribe_twice():
    seen = []
    with events.subscribe(seen.append):
        with events.subscribe(seen.append):
            events.emit(an_event())
        events.emit(an_event())
    assert len(seen) == 3


def test_a_listener_that_raises_is_logged_once_and_stops_nobody(caplog):
    first, last = [], []

    def broken(event):
        raise ValueError("broken listener")

    with (
        caplog.at_level(logging.ERROR, "partjit.events"),
        events.subscribe(first.append),
        events.subscribe(broken) as subscription,
        events.subscribe(last.append),
    ):
        for number in range(3):
            events.emit(an_event(number))
        assert subscription not in events.listeners
    assert [event.execution for event in first] == [event.execution for event in last] == [0, 1, 2]
    (entry,) = caplog.records
    assert entry.name == "partjit.events"
    assert "broken" in entry.getMessage()
    assert isinstance(entry.exc_info[1], ValueError)


def test_threads_in_which_a_listener_raises_log_it_once(caplog):
    meeting = threading.Barrier(4)

    def broken(event):
        meeting.wait(60)
        raise ValueError

    with caplog.at_level(logging.ERROR, "partjit.events"), events.subscribe(broken):
        run_threads(*[lambda: events.emit(an_event())] * 4)
    assert len(caplog.records) == 1


def test_an_interrupt_in_a_listener_is_not_swallowed():
    def interrupted(event):
        raise KeyboardInterrupt

    with events.subscribe(interrupted) as subscription:
        with pytest.raises(KeyboardInterrupt):
            events.emit(an_event())
        assert subscription in events.listeners


def test_a_listener_may_subscribe_and_emit():
    seen, inner = [], []

    def listener(event):
        seen.append(event)
        if event.execution == 0:
            with events.subscribe(inner.append):
                events.emit(an_event(1))

    with events.subscribe(listener):
        events.emit(an_event(0))
    assert [event.execution for event in seen] == [0, 1]
    assert [event.execution for event in inner] == [1]


def test_subscriptions_come_and_go_in_many_threads():
    lost = []

    def come_and_go():
        for number in range(200):
            seen = []
            with events.subscribe(seen.append):
                mine = an_event(number)
                events.emit(mine)
            if not any(event is mine for event in seen):
                lost.append(mine)

    run_threads(*[come_and_go] * 8)
    assert not lost


def test_a_closed_subscription_leaves_nothing_behind():
    class Listener:
        def __call__(self, event):
            pass

    gc.collect()
    with events.subscribe(Listener()):
        pass
    gc.collect()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, Listener)]


def span_of(started, block):
    seen = []
    with events.subscribe(seen.append), contextlib.suppress(ZeroDivisionError), events.span(started):
        block()
    assert seen[0] is started
    assert seen[1].thread == threading.get_ident()
    return seen[1:]


@pytest.mark.parametrize(
    ("started", "finished", "failed"),
    [
        (events.ProgramStarted("step", 3), events.ProgramFinished("step", 3), events.ProgramFailed("step", 3, "")),
        (events.CallStarted(7, "f", "io"), events.CallFinished(7, "f", "io"), events.CallFailed(7, "f", "io", "")),
        (events.TransferStarted("step", 3, "log", 64), *[events.TransferFinished("step", 3, "log")] * 2),
        (events.WaitStarted("step", 3, "log"), *[events.WaitFinished("step", 3, "log")] * 2),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_span_emits_how_it_ended(started, finished, failed):
    (end,) = span_of(started, lambda: None)
    assert end == dataclasses.replace(finished, time=end.time)
    (end,) = span_of(started, lambda: 1 // 0)
    error = {"error": "ZeroDivisionError: integer division or modulo by zero"} if hasattr(failed, "error") else {}
    assert end == dataclasses.replace(failed, time=end.time, **error)


def test_a_span_leaves_the_traceback_as_it_is():
    def fails():
        with events.span(an_event()):
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside") as caught:
        fails()
    assert [entry.name for entry in caught.traceback] == ["test_a_span_leaves_the_traceback_as_it_is", "fails"]


def test_only_what_can_be_called_listens():
    number: Any = 3
    with pytest.raises(TypeError, match="subscribe: listener must be a function of an event, but is 3, an int"):
        events.subscribe(number)
