"""An exception raised between any two steps of a thread leaves nothing locked, lost or done twice.

`sys.settrace` raises at each call, line and return of the runtime in turn, in the thread that makes calls: what the
handler of a signal may do, but at every place and not by luck.
"""

import collections
import contextlib
import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import partjit
from partjit import colocated
from partjit.colocated import cheapness, colocated_python, colocated_python_class
from partjit.colocated.runtime import interrupts, lanes, scheduler, streams, threads
from partjit.colocated.runtime import soon as soon_module
from partjit.colocated.runtime.interrupts import Exclusive, Flag, Presence, is_interrupt
from tests.colocated import rendezvous

pytestmark = [pytest.mark.usefixtures("meeting"), pytest.mark.soak]

IS_SOAK = os.environ.get("PARTJIT_PROFILE") == "soak"
SECONDS = 30.0
"""In which everything must be over: what hangs fails."""
RUNTIME = (
    "interrupts",
    "call",
    "scheduler",
    "lanes",
    "soon",
    "deadlocks",
    "streams",
    "threads",
    "pending",
    "failures",
    "run_ahead",
    "history",
)
FILES = {os.path.join(os.path.dirname(scheduler.__file__), f"{name}.py"): name for name in RUNTIME}
one = jnp.float32(1)
number = functools.cache(jnp.float32)


class Interrupt(BaseException):
    """What the handler of a signal raises."""


class Limit(TimeoutError):
    """What that of an alarm raises, which is an ordinary exception."""


class Interruption:
    """Raises once, at the first step of the runtime in this thread at which that was not done often enough.

    Attributes:
        places: how often it was done: by module, line, what was about to happen, and caller where it matters.
        place: where it was done now.
    """

    def __init__(self, places, error, is_close=IS_SOAK):
        self.places, self._error, self._is_close = places, error, is_close
        self.place = None

    def __call__(self, frame, event, _):
        code = frame.f_code
        module = FILES.get(code.co_filename)
        if module is None:
            module = _module_of_threading(frame)
        if module is None or code.co_name in ("__del__", "log"):  # what they raise is reported, not raised
            return None
        if self._is_close:
            frame.f_trace_opcodes = True
        if event != "exception":
            place = (module, frame.f_lineno, event)
            if self._is_close:
                place = (*place, frame.f_lasti, frame.f_back.f_lineno)
            if not self.places[place]:
                self.places[place] += 1
                self.place = place
                raise self._error("in between")
        return self


def _module_of_threading(frame):
    """Python's own module of threads counts as far as the runtime uses it."""
    if frame.f_code.co_filename != threading.__file__:
        return None
    while frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    return FILES.get(frame.f_code.co_filename) and "threading"


def log(x):
    rendezvous.logs["S"].append(int(x))
    return x


def fail(x):
    rendezvous.logs["S"].append(int(x))
    raise LookupError(int(x))


def outer(x):
    """Makes calls itself, for which it waits."""
    inner = colocated_python(log, mode="stream", out_specs_fn=lambda x: x)
    first = inner(x)
    second = inner(x + 1)
    float(first)
    float(second)
    return x


on_stream = colocated_python(log, stream="S", mode="stream", out_specs_fn=lambda x: x)
inline = colocated_python(log, stream="S", mode="inline")
failing = colocated_python(fail, stream="S", mode="stream", out_specs_fn=lambda x: x)
nesting = colocated_python(outer, stream="S", mode="inline")
blocking = colocated_python(
    lambda x: rendezvous.hear("go") or log(x), stream="S", mode="stream", out_specs_fn=lambda x: x
)


@colocated_python_class
class Log:
    def add(self, x):
        return log(x)


Log.add = Log.add.specialize(out_specs_fn=lambda x: x)


class Calls:
    """Makes calls with numbers that grow, and notes which were made."""

    def __init__(self):
        self.made = []
        self._number = 0

    def __call__(self, function, count=1):
        self._number += count
        first = self._number - count + 1
        result = function(number(first))
        self.made += range(first, first + count)
        return result


def an_inline_call(make):
    make(inline)
    make(inline)


def an_inline_call_that_waits_for_its_turn(make):
    soon()
    make(blocking)
    make(inline)


def a_call_on_a_thread(make):
    make(on_stream)


def a_call_behind_another(make):
    make(blocking)
    try:
        make(on_stream)
    finally:
        assert {*streams.as_stream("S").calls} <= {*lanes.unfinished()}


def calls_that_come_soon(make):
    with soon_is(0.05):
        for _ in range(3):
            float(make(on_stream))
        make(on_stream)


def method_calls_that_come_soon(make):
    with soon_is(0.05), colocated.stream("S"):
        made = Log()
        for _ in range(2):
            make(made.add)
        float(make(made.add))
        make(made.add)


def a_result_that_is_waited_for(make):
    soon()
    y = make(blocking)
    float(y)
    float(make(on_stream) + 1)


def a_full_stream(make):
    soon()
    with contextlib.ExitStack() as stack:
        scheduler.resize(streams.as_stream("S"), 1)
        stack.callback(scheduler.resize, streams.as_stream("S"), 128)
        make(blocking)
        make(on_stream)
        make(on_stream)


def the_scope_of_a_stream(make):
    with colocated.stream("S"):
        make(on_stream)
        with colocated.stream():
            pass
        make(on_stream)


def waiting_with_a_timeout(make):
    soon()
    make(blocking)
    colocated.wait("S", timeout=SECONDS)
    make(on_stream)
    colocated.wait(timeout=SECONDS)


def nested_calls(make):
    make(nesting, 2)
    make(inline)


def a_nested_call_before_those_behind(make):
    add = Log().add
    nested, behind = add.specialize(mode="stream"), add.specialize(mode="stream", stream="S")

    def outer(x):
        in_a_thread(lambda: behind(x + 1))
        float(nested(x))
        return x

    make(colocated_python(outer, stream="S", mode="inline"), 2)


def methods_of_an_object(make):
    with colocated.stream("S"):
        made = Log()
        make(made.add)
        make(made.add.specialize(mode="inline"))
        make(made.add)
        made.close()


def inline_calls_of_methods(make):
    add = Log().add.specialize(mode="inline")
    make(add)
    make(add)


def a_failure(make):
    y = make(failing)
    with contextlib.suppress(LookupError):
        float(y)
    make(failing)
    with contextlib.suppress(LookupError):
        colocated.wait(timeout=SECONDS)


SCENARIOS = {  # and at how many places it has to be interrupted at least
    an_inline_call: 100,
    an_inline_call_that_waits_for_its_turn: 140,
    a_call_on_a_thread: 90,
    a_call_behind_another: 90,
    calls_that_come_soon: 120,
    method_calls_that_come_soon: 120,
    a_result_that_is_waited_for: 130,
    a_full_stream: 120,
    the_scope_of_a_stream: 200,
    waiting_with_a_timeout: 160,
    nested_calls: 170,
    a_nested_call_before_those_behind: 170,
    methods_of_an_object: 240,
    inline_calls_of_methods: 90,
    a_failure: 180,
}


@contextlib.contextmanager
def soon_is(seconds):
    """Has threads wait so long for the next call."""
    with mock.patch.multiple(soon_module, _SECONDS=seconds, _AT_ONCE_SECONDS=0):
        yield


def soon():
    """Lets what is blocked go on as soon as this thread waits, or a little later."""
    thread = threading.Thread(target=lambda: (time.sleep(0.002), rendezvous.say("go")))
    thread.start()
    rendezvous.logs["threads"].append(thread)


@contextlib.contextmanager
def watched():
    """Fails what takes too long instead of waiting for ever."""

    def late(*_):
        raise AssertionError(f"something hangs: {[call.name for call in lanes.unfinished()]}")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 2 * SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupt(scenario, interruption, error):
    """Interrupts a scenario once, and checks what is left."""
    rendezvous.clear()
    make = Calls()
    outside = streams.current_stream()
    others = threading.Thread(target=lambda: rendezvous.logs["others"].append(Calls()(on_other)))
    others.start()
    others.join(SECONDS)
    sys.settrace(interruption)
    try:
        scenario(make)
    except error:
        pass
    finally:
        sys.settrace(None)
    rendezvous.say("go")
    for thread in rendezvous.logs["threads"]:
        thread.join(SECONDS)
    assert not scheduler.current_calls(), "the thread believes to be inside of a call"
    settle()
    assert streams.current_stream() is outside
    ran = [*rendezvous.logs["S"]]
    assert ran == sorted({*ran}), "calls ran in another order, or twice"
    assert {*make.made} <= {*ran}, "calls that were made did not run"
    for thread_of in (lambda target: target(), in_a_thread):  # the next calls work, from here and elsewhere
        thread_of(lambda: [float(function(number(1000))) for function in (on_stream, inline)])
    settle()
    assert rendezvous.logs["S"][len(ran) :] == [1000] * 4
    assert len(rendezvous.logs["other"]) == 1


on_other = colocated_python(
    lambda x: rendezvous.logs["other"].append(int(x)), stream="other", mode="stream", out_specs_fn=lambda x: None
)


def settle():
    with contextlib.suppress(LookupError):
        colocated.wait(timeout=SECONDS)
    assert not lanes.unfinished()


def in_a_thread(target):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of finalizers that were interrupted
def test_an_interrupt_at_any_line_leaves_nothing_locked_lost_or_done_twice(scenario, caplog, monkeypatch):
    caplog.set_level("CRITICAL")
    monkeypatch.setattr(soon_module, "_SECONDS", 0)  # no thread waits for the next call, unless the scenario wants it
    with watched():
        interrupt(scenario, None, Interrupt)  # which prepares what is prepared once
    for error in (Interrupt, Limit) if IS_SOAK else (Interrupt,):
        places, missed = collections.Counter(), 0
        while missed < 2:  # the steps differ a little each time
            interruption = Interruption(places, error)
            with watched():
                interrupt(scenario, interruption, error)
            missed = missed + 1 if interruption.place is None else 0
        assert len(places) >= SCENARIOS[scenario], f"interrupted at {len(places)} places only"


STORM = """
import collections, os, signal, sys, time, threading
import jax, jax.numpy as jnp
from partjit import colocated
from partjit.colocated.runtime import lanes, scheduler

class Alarm(Exception):
    pass

def ring(*_):
    global alarms
    alarms += 1
    raise Alarm

def wait_for_more_than(before):
    # A function, for Python 3.13 leaves the last jump of a loop at the end of a `try` out of that.
    while alarms == before:  # where a finalizer is interrupted, Python does not raise it here
        time.sleep(0.0001)

ran = collections.Counter()
sys.modules["storm"] = type(sys)("storm")
sys.modules["storm"].ran = ran

def work(x):
    import storm
    storm.ran[int(x)] += 1
    return x

@colocated.colocated_python_class
class Worker:
    def work(self, x):
        return work(x)

worker = Worker()
functions = [
    colocated.colocated_python(work, mode="stream", stream="storm", out_specs_fn=lambda x: x),
    colocated.colocated_python(work, mode="inline", stream="storm"),
    colocated.colocated_python(work, mode="stream", out_specs_fn=lambda x: x),
    worker.work.specialize(out_specs_fn=lambda x: x),
]
numbers = [jnp.int32(i) for i in range(50)]
for f in functions:
    jax.block_until_ready([f(numbers[0])])
ran.clear()
most, made, alarms = int(sys.argv[1]), collections.Counter(), 0
signal.signal(signal.SIGALRM, ring)
deadline = time.monotonic() + 240
while alarms < most and time.monotonic() < deadline:
    i, before = alarms % 50, alarms
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.00037 * (alarms % 7))
        with colocated.stream("storm", size=3):
            for f in functions:
                y = f(numbers[i])
                made[i] += 1
            jax.block_until_ready(y)
        colocated.wait(timeout=60)
        wait_for_more_than(before)
    except Alarm:
        pass
signal.setitimer(signal.ITIMER_REAL, 0)
assert alarms >= most, alarms
assert not scheduler.current_calls()
colocated.wait(timeout=60)
assert [float(f(numbers[7])) for f in functions] == [7.0] * 4
assert all(made[i] <= ran[i] for i in made), (made, ran)
colocated.wait(timeout=60)
print("calm", sum(made.values()), sum(ran.values()))
"""


def test_a_storm_of_alarms_passes():
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STORM), "6000" if IS_SOAK else "100"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("calm"), ran.stdout


# What the handler raises is the caller's


@contextlib.contextmanager
def alarm(seconds):
    """Raises in this thread after a time."""

    def ring(*_):
        raise Limit("too late")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def slow_on_demand(x):
    if int(x):
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        rendezvous.hear("never")
    return x


@pytest.fixture
def cheap(monkeypatch):
    """Has functions seen to be so cheap that their caller runs them, however slow the machine is."""
    monkeypatch.setattr(cheapness, "_CHEAP_SECONDS", float("inf"))

    def call_often(function):
        for _ in range(20):
            function(jnp.int32(0)).block_until_ready()
        return function

    return call_often


@pytest.mark.parametrize("way", ["auto", "auto on a lane", "inline", "inline on a lane", "in a program"])
def test_what_a_handler_raises_in_a_call_that_its_caller_runs_is_raised_there(way, cheap):
    make = colocated_python_class(type("Slow", (), {"run": lambda self, x: slow_on_demand(x)}))
    function = {
        "auto": lambda: cheap(colocated_python(slow_on_demand, out_specs_fn=lambda x: x)),
        "auto on a lane": lambda: cheap(make().run.specialize(out_specs_fn=lambda x: x)),
        "inline": lambda: colocated_python(slow_on_demand, mode="inline"),
        "inline on a lane": lambda: colocated_python(slow_on_demand, mode="inline", stream="S"),
        "in a program": lambda: partjit.pjit(
            colocated_python(slow_on_demand, mode="inline", out_specs_fn=lambda x: x), name="limited"
        ),
    }[way]()
    with alarm(SECONDS):
        float(function(jnp.int32(0)))
        for _ in range(3):
            with pytest.raises(Limit, match="too late"):
                function(jnp.int32(1))
        assert float(function(jnp.int32(0))) == 0
    colocated.wait(timeout=SECONDS)


def test_what_the_function_raises_itself_stays_its_result(cheap):
    def fail(x):
        if int(x):
            raise Limit("of its own")
        return x

    function = cheap(colocated_python(fail, out_specs_fn=lambda x: x))
    with alarm(SECONDS):
        y = function(jnp.int32(1))
    with pytest.raises(Limit, match="of its own"):
        y.block_until_ready()


def test_what_a_handler_raises_in_wait_is_raised_by_it():
    function = colocated_python(lambda x: rendezvous.hear("go"), stream="S", out_specs_fn=lambda x: None)
    function(one)
    for wait in (lambda: colocated.wait(timeout=60), lambda: colocated.wait("S"), lambda: colocated.wait(timeout=60.0)):
        with alarm(0.01), pytest.raises(Limit, match="too late"):
            wait()
    rendezvous.say("go")


def test_an_interrupted_constructor_is_tried_again():
    class Slow:
        def __init__(self):
            rendezvous.logs["constructed"].append(1)
            slow_on_demand(jnp.int32(len(rendezvous.logs["constructed"]) == 1))

        def get(self):
            return one

    slow = colocated_python_class(Slow)()
    get = slow.get.specialize(devices=jax.devices()[:1], mode="inline")
    with alarm(SECONDS), pytest.raises(Limit):
        get()
    assert float(get()) == 1


@pytest.mark.parametrize("handler", ["function", "method", "object", "partial"])
def test_handlers_of_every_kind_are_recognized(handler):
    def ring(*_):
        raise Limit

    class Rings:
        def ring(self, *_):
            raise Limit

        __call__ = ring

    handlers = {"function": ring, "method": Rings().ring, "object": Rings(), "partial": functools.partial(ring, 1)}
    before = signal.signal(signal.SIGUSR1, handlers[handler])
    try:
        with pytest.raises(Limit) as caught:
            signal.raise_signal(signal.SIGUSR1)
        assert is_interrupt(caught.value)
        with pytest.raises(Limit) as caught:
            raise Limit
        assert not is_interrupt(caught.value)
    finally:
        signal.signal(signal.SIGUSR1, before)


# The parts it is built of


def test_exclusive_functions_run_one_at_a_time_and_let_go_when_they_raise():
    exclusive, inside, counted = Exclusive(), [], []

    def count(fails):
        inside.append(1)
        assert len(inside) == 1
        time.sleep(0)  # which lets other threads come in, if they can
        counted.append(1)
        inside.pop()
        if fails:
            raise RuntimeError

    def work():
        for i in range(100):
            with contextlib.suppress(RuntimeError):
                exclusive.run(count, i % 3 == 0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(counted) == 400
    assert not exclusive.is_owned()


def test_an_exclusive_function_may_come_in_between_itself_and_no_other_thread_is_inside():
    exclusive, other = Exclusive(), Exclusive()
    seen = []

    def inner():
        in_a_thread(lambda: seen.append(exclusive.is_owned()))
        return [exclusive.is_owned(), other.is_owned()]

    assert exclusive.run(exclusive.run, exclusive.run, inner) == [True, False]
    assert other.run(exclusive.run, inner) == [True, True]
    assert seen == [False, False]


@pytest.mark.parametrize("deadline", [None, float("inf"), 1e300])
def test_a_flag_lets_everybody_go_on(deadline):
    flag, results = Flag(), []
    threads = [threading.Thread(target=lambda: results.append(flag.wait(deadline))) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert not flag.wait(time.monotonic() + 0.01)
    assert not flag.wait(time.monotonic() - 1)
    flag.set()
    flag.set()
    for thread in threads:
        thread.join(SECONDS)
    assert results == [True] * 5
    assert flag.wait(time.monotonic() - 1)


@pytest.mark.parametrize("ends", ["returns", "raises", "leaves"])
def test_what_a_function_left_undone_another_thread_does(ends):
    presence, done = Presence(), threading.Event()

    def function():
        assert presence.is_on
        if ends == "raises":
            raise Interrupt
        if ends == "leaves":
            presence.leave()

    with contextlib.suppress(Interrupt):
        presence.of(function, otherwise=done.set)()
    assert not presence.is_on
    assert done.wait(0.1 if ends == "leaves" else SECONDS) is (ends != "leaves")


def thrown_at(step):
    """Throws into this thread, at the so-manieth line that what drives its call reaches after that; says where."""
    frame, lines = sys._getframe(), []
    while frame.f_code is not scheduler._drive.__code__:
        frame = frame.f_back
    behind = scheduler._take_over.__code__

    def trace(traced, event, _):
        if (traced is frame or traced.f_code is behind) and event == "line":
            lines.append(traced.f_lineno)
        is_thrown = len(lines) > step
        if is_thrown or (traced is frame and event == "return"):
            sys.settrace(None)
            frame.f_trace = None
        if is_thrown:
            rendezvous.logs["thrown"].append(lines[-1])
            raise Interrupt
        return trace

    frame.f_trace = trace
    sys.settrace(trace)


def value_or_error(result):
    try:
        return float(result)
    except RuntimeError as error:
        return "killed" if "the thread that ran the colocated call of '<lambda>' was killed" in str(error) else error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_is_thrown_into_a_worker_behind_a_call_keeps_nobody_waiting():
    options = {"out_specs_fn": lambda x: x, "mode": "stream", "stream": "thrown into"}
    lines = []
    for step in range(60):
        first = colocated_python(lambda x, step=step: (rendezvous.hear("queued"), thrown_at(step), x)[2], **options)
        behind = colocated_python(lambda x: x + 1, **options)
        results = [first(one), behind(one), behind(one)]
        rendezvous.say("queued")
        colocated.wait(timeout=SECONDS)
        values = [*map(value_or_error, results)]
        assert values in ([1, 2, 2], [1, "killed", 2], [1, 2, "killed"]), "the call it was about to run, at most"
        if not rendezvous.logs["thrown"]:
            break
        lines += rendezvous.logs["thrown"]
        rendezvous.clear()
    assert len({*lines}) >= 8, "each line that is reached behind a call"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_is_thrown_into_a_worker_before_its_call_keeps_nobody_waiting(monkeypatch):
    start, lines = threads.start, []
    for step in range(10):
        thrown = []

        def throwing(frame, event, _, step=step, thrown=thrown):
            if frame.f_code is not scheduler._drive.__code__:
                return None
            if event == "line":
                thrown.append(frame.f_lineno)
                if len(thrown) == step + 1:
                    sys.settrace(None)
                    raise Interrupt
            return throwing

        def traced(job, throwing=throwing):
            def run():
                sys.settrace(throwing)
                job()

            monkeypatch.setattr(threads, "start", start)  # this job only
            start(run)

        monkeypatch.setattr(threads, "start", traced)
        result = colocated_python(lambda x: x + 1, out_specs_fn=lambda x: x, mode="stream")(one)
        colocated.wait(timeout=SECONDS)
        assert value_or_error(result) in (2, "killed")
        lines.append(thrown[step])
        if value_or_error(result) == "killed":
            break
    assert len({*lines}) >= 3, "each line up to the one that runs the call"


def thrown_while_it_waits(step):
    """Throws into this thread, at the so-manieth line at which it waits for its next call; says where."""
    waiting = {getattr(soon_module, name).__code__ for name in ("begin_wait", "_begin", "next_call", "end_wait")}
    lines = []

    def trace(frame, event, _):
        if frame.f_code not in waiting:
            return None
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) > step:
                sys.settrace(None)
                rendezvous.logs["thrown"].append(lines[-1])
                raise Interrupt
        return trace

    sys.settrace(trace)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_is_thrown_into_a_worker_that_waits_for_calls_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr(soon_module, "_SECONDS", 0.05)
    monkeypatch.setattr(soon_module, "_AT_ONCE_SECONDS", 0)
    options = {"out_specs_fn": lambda x: x, "mode": "stream", "stream": "thrown into while it waits"}
    add = colocated_python(lambda x: x + 1, **options)
    lines = rendezvous.logs["thrown"]
    for step in range(60):
        before = len(lines)
        float(add(one))
        float(colocated_python(lambda x, step=step: (thrown_while_it_waits(step), x)[1], **options)(one))
        results = [add(one), add(one)]
        colocated.wait(timeout=SECONDS)
        assert [*map(float, results)] == [2, 2]
        assert not lanes.unfinished()
        if len(lines) == before:
            break
    assert len({*lines}) >= 15, "each line of those functions"


def test_the_end_of_the_process_waits_for_what_is_left_undone():
    presence, done = Presence(), []
    interrupts.forget_after_fork()  # another thread, which may end
    try:
        presence.of(lambda: None, otherwise=lambda: (time.sleep(0.1), done.append(1)))()
        interrupts.stop(time.monotonic() + SECONDS)
        assert done
    finally:
        interrupts.forget_after_fork()
