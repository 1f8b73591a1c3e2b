"""What a colocated function raises reaches somebody; and what ends or doubles the process is survived."""

import _thread
import dataclasses
import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from asyncio import CancelledError

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import partjit
from partjit import P, colocated, pjit
from partjit.colocated import colocated_python, colocated_python_class
from partjit.colocated.runtime import failures, scheduler
from tests.census import saw, sees
from tests.colocated import rendezvous
from tests.effort import examples

pytestmark = pytest.mark.usefixtures("meeting")

one = jnp.float32(1)


class OwnError(Exception):
    """One of the user's."""

    def __init__(self, code, detail):
        super().__init__(code, detail)
        self.code = code


def fail(x):
    raise OwnError(int(x), "detail")


def failing(**items):
    return colocated_python(fail, **{"mode": "stream", "out_specs_fn": lambda x: (x, x), **items})


# Where it is raised


def test_the_original_exception_is_raised_with_its_traceback_and_where_the_call_was_made():
    y, _ = failing()(one)
    with pytest.raises(OwnError) as caught:
        y + 1
    assert caught.value.code == 1
    lines = traceback.extract_tb(caught.value.__traceback__)
    names = [line.name for line in lines]
    assert names[names.index("raise_") + 1 :] == ["fail"]  # nothing of the package in between
    (note,) = caught.value.__notes__
    assert note.startswith("This happened in the colocated call of 'fail' made at ")
    assert f"{__file__}:" in note
    assert note.endswith("in test_the_original_exception_is_raised_with_its_traceback_and_where_the_call_was_made")


class Stop(BaseException):
    """No Exception, and the user's own."""


def eagerly(call, x):
    return call(x)


def in_a_program(call, x):
    return pjit(lambda x: 2 * call(x))(x)


def in_a_loop(call, x):
    return pjit(lambda x: lax.fori_loop(0, 2, lambda _, x: call(x) * 1, x))(x)


def in_a_branch(call, x):
    return pjit(lambda x: lax.cond(x[0] > 0, lambda: call(x), lambda: x))(x)


def in_a_batch(call, x):
    return pjit(lambda x: jax.vmap(call)(jnp.stack([x, x])) * 1)(x)


def on_devices(call, x):
    mesh = partjit.Mesh(np.array(jax.devices()), ("x",))
    return in_a_loop(call, jax.device_put(x, jax.NamedSharding(mesh, P("x"))))


def without_compiling(call, x):
    with jax.disable_jit():
        return in_a_program(call, x)


def in_another(call, x):
    return colocated_python(lambda x: call(x) * 1, mode="inline")(x)


def as_a_method(call, x):
    class Owner:
        def call(self, x):
            return call(x)

    return colocated_python_class(Owner)().call.specialize(out_specs_fn=lambda x: x)(x)


def made_and_seen(way, call, x):
    jax.block_until_ready(way(call, x))
    colocated.wait()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, CancelledError, Stop])
@pytest.mark.parametrize(
    "options",
    [{"mode": "inline"}, {"mode": "stream"}, {}, {"uses_jax": False}, {"brief": True}, {"returns": None}],
    ids=str,
)
def test_whatever_is_raised_names_its_call_however_that_is_made(options, error):
    def fail(x):
        if np.asarray(x).ravel()[0] > 1:
            raise error("mine")
        return None if "returns" in options else x

    made = {"out_specs_fn": lambda x: options.get("returns", x), **options}
    is_brief, _ = made.pop("brief", False), made.pop("returns", None)
    x = np.full(8, 2, np.float32)
    places = (eagerly, in_a_program, in_a_loop, in_a_branch, in_a_batch, on_devices, without_compiling)
    for way in (*places, in_another, as_a_method):
        call = colocated_python(fail, **made)
        use = call if "returns" not in options else lambda x, call=call: [call(x), x][1]
        for _ in range(30 * is_brief):
            jax.block_until_ready(call(x - 1))
        with pytest.raises(error, match="mine") as caught:
            made_and_seen(way, use, x)
        (note,) = [
            note for note in caught.value.__notes__ if note.startswith("This happened in the colocated call of ")
        ]
        assert f"made at {__file__}:" in note, way
        colocated.wait()  # it was seen


def test_raising_again_and_again_does_not_pile_up():
    y, z = failing()(one)
    for array in [y, z] * 10:
        with pytest.raises(OwnError) as caught:
            array.block_until_ready()
    assert len(caught.value.__notes__) == 1
    assert len(traceback.extract_tb(caught.value.__traceback__)) < 8


def test_the_first_call_without_specs_raises_at_the_call_and_does_not_spoil_the_next():
    f = colocated_python(lambda x: {1: x}[int(x)])
    with pytest.raises(KeyError):
        f(one + 1)
    np.testing.assert_array_equal(f(one), one)
    with pytest.raises(KeyError):
        f(one + 1).block_until_ready()
    np.testing.assert_array_equal(f(one), one)


def stopping(**items):
    rest = iter([1.0] * 30)
    return colocated_python(lambda x: np.float32(next(rest) * x), **items)


def added(call):
    return lambda x: x + call(jax.lax.stop_gradient(x))


known = {"out_specs": jax.ShapeDtypeStruct((), np.float32)}
WAYS = {
    "inline": lambda: stopping(mode="inline"),
    "inline with specs": lambda: stopping(mode="inline", **known),
    "in its caller with its thread waiting": lambda: stopping(mode="inline", stream="S"),
    "on a thread": lambda: stopping(mode="stream", **known),
    "when it is cheap": lambda: stopping(**known),
    "without specs": lambda: stopping(stream="S"),
    "in a program": lambda: partjit.pjit(stopping(**known)),
    "in a program, awaited": lambda: partjit.pjit(added(stopping(**known))),
    "evaluated": lambda: jax.value_and_grad(added(stopping(**known))),
}


@pytest.mark.parametrize("way", WAYS)
def test_stop_iteration_of_a_call_does_not_end_the_loop_of_its_caller(way):
    call = WAYS[way]()

    def number(x):
        return float(jax.tree.leaves(call(x))[0])

    for loop in (
        lambda: [*map(number, [one] * 40)],
        lambda: next(number(x) for x in [one]),
        lambda: [*iter(lambda: number(one), 0.0)],
    ):
        with pytest.raises(RuntimeError, match=r"<lambda> raised StopIteration, which would silently end") as caught:
            loop()
        error = caught.value
        while not isinstance(error, StopIteration):  # a generator adds another one
            error = error.__cause__
        assert error.__traceback__ is not None


@pytest.mark.parametrize("in_program", [False, True])
def test_an_attribute_error_of_a_call_is_not_taken_for_one_of_its_result(in_program):
    function = colocated_python(lambda x: x.nonsense, mode="stream", out_specs_fn=lambda x: x)
    y = (partjit.pjit(function) if in_program else function)(one)
    uses = (
        jax.block_until_ready,
        lambda y: jax.block_until_ready({"y": y}),
        lambda y: y.block_until_ready(),
        lambda y: y.T,
        lambda y: y.at[...].set(1),
        lambda y: hasattr(y, "addressable_shards"),
    )
    for use in uses:
        with pytest.raises(RuntimeError, match=r"the colocated call raised AttributeError, which here .* 'nonsense'"):
            use(y)
    for use in (float, np.asarray, lambda y: y + 1):
        with pytest.raises(AttributeError, match="nonsense"):
            use(y)
    assert not hasattr(y, "nonsense")


def test_wait_raises_what_nobody_looked_at_once():
    failing()(one)
    with pytest.raises(OwnError):
        colocated.wait()
    colocated.wait()


def test_wait_raises_the_first_and_names_the_others(caplog):
    held = []
    for i in range(3):
        held.append(failing(stream="s")(one * i))
    with pytest.raises(OwnError) as caught:
        colocated.wait()
    assert caught.value.code == 0
    assert caught.value.__notes__[0].startswith("Other colocated calls failed as well:\n  the colocated call of 'fail'")
    assert caught.value.__notes__[0].count("OwnError") == 2
    records = logged(caplog, "names_the_others")
    assert len(records) == 2
    assert all(record.getMessage().endswith("failed; another failure is raised") for record in records)
    colocated.wait()
    with pytest.raises(OwnError):
        held[2][0].block_until_ready()


def test_failures_that_read_alike_are_named_once():
    @colocated.colocated_python(stream="s", out_specs_fn=lambda x: None)
    def fail(x):
        raise ValueError("the disk is full")

    for _ in range(40):
        fail(one)
    with pytest.raises(ValueError, match="the disk is full") as caught:
        colocated.wait()
    (note,) = [note for note in caught.value.__notes__ if "Other" in note]
    assert note.count("the disk is full") == 1
    assert note.endswith("ValueError: the disk is full (39 times)")


def test_what_was_looked_at_is_not_raised_by_wait():
    y, _ = failing()(one)
    with pytest.raises(OwnError):
        y.block_until_ready()
    colocated.wait()


def test_wait_for_a_stream_raises_its_failures_only():
    failing(stream="bad")(one)
    colocated.wait("good")
    with pytest.raises(OwnError):
        colocated.wait("bad")


def test_a_failed_call_poisons_what_depends_on_it_and_nothing_else():
    add = colocated_python(lambda *xs: sum(xs), mode="stream", out_specs_fn=lambda *xs: xs[0])
    bad, _ = failing()(one)
    depends = [add(bad, one), add(one, bad), add(add(one, bad), one)]
    good = [add(one, one), add(add(one, one), one)]
    assert [float(y) for y in good] == [2, 3]
    for y in depends:
        with pytest.raises(OwnError):
            y.block_until_ready()
        assert "the colocated call of 'fail'" in repr(y)
    colocated.wait()


@pytest.mark.parametrize("mode", ["inline", "stream", "auto"])
def test_a_function_that_returns_a_failed_result_fails_with_it(mode):
    inner = failing(out_specs_fn=lambda x: x, stream="inner")
    outer = colocated_python(lambda x: inner(x) if x else x, mode=mode)
    for _ in range(20):
        outer(jnp.float32(0))
    with pytest.raises(OwnError):
        outer(one).block_until_ready()
    colocated.wait()


def test_wait_inside_of_a_function_raises_what_its_own_calls_raised():
    held = failing(stream="other")(one)
    wait_for(held[0].is_ready)

    def quiet(x):
        colocated.wait()
        return x

    def loud(x):
        failing(out_specs_fn=lambda x: None)(x + 1)
        colocated.wait()

    assert float(colocated_python(quiet, mode="stream", out_specs_fn=lambda x: x)(one)) == 1
    y = colocated_python(loud, mode="stream", out_specs_fn=lambda x: x)(one)
    with pytest.raises(OwnError) as caught:
        y.block_until_ready()
    assert caught.value.code == 2
    with pytest.raises(OwnError) as caught:
        colocated.wait()
    assert caught.value.code == 1


def test_calls_after_a_failed_one_run():
    f = colocated_python(
        lambda x: [rendezvous.logs["ran"].append(int(x)), {}[0]], mode="stream", out_specs_fn=lambda x: x
    )
    results = [f(jnp.int32(i)) for i in range(5)]
    for result in results:
        with pytest.raises(KeyError):
            result.block_until_ready()
    assert rendezvous.logs["ran"] == [*range(5)]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, BaseException])
def test_what_is_no_exception_is_raised_as_well(error):
    def leave(x):
        raise error("leaving")

    y = colocated_python(leave, mode="stream", out_specs_fn=lambda x: x)(one)
    with pytest.raises(error, match="leaving"):
        y.block_until_ready()
    np.testing.assert_array_equal(colocated_python(lambda x: x, mode="stream", out_specs_fn=lambda x: x)(one), one)


@pytest.mark.parametrize("error", [KeyError, SystemExit])
def test_cheap_functions_raise_where_asynchronous_ones_do(error):
    def check(x):
        if int(x) > 5:
            raise error(int(x))
        return x

    f = colocated_python(check, out_specs_fn=lambda x: x)
    for _ in range(200):
        f(one).block_until_ready()
    y = f(one * 7)
    with pytest.raises(error, match="7"):
        y.block_until_ready()
    f(one * 8)
    with pytest.raises(error, match="8"):
        colocated.wait()


# If nobody looks


def wait_for(condition):
    deadline = time.monotonic() + rendezvous.SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def logged(caplog, test):
    """The log's records of calls that a test made; those of the test before may still be on their way."""
    return [record for record in caplog.records if test in record.getMessage()]


def test_a_failure_is_logged_once_when_no_result_is_left(caplog):
    y, z = failing()(one)
    wait_for(y.is_ready)
    del y
    gc.collect()
    assert not logged(caplog, "when_no_result_is_left")
    del z
    wait_for(lambda: logged(caplog, "when_no_result_is_left"))
    (record,) = logged(caplog, "when_no_result_is_left")
    assert record.name == "partjit.colocated"
    assert record.levelno == logging.ERROR
    assert "the colocated call of 'fail' made at" in record.getMessage()
    assert record.exc_info[0] is OwnError
    assert record.getMessage().endswith("no result of it is left, so the next colocated.wait() raises this")
    with pytest.raises(OwnError):
        colocated.wait()
    assert len(logged(caplog, "when_no_result_is_left")) == 1


def test_one_exception_that_calls_raise_after_it_was_seen_is_raised_by_wait_again():
    error = OwnError(1, "again")
    stream = colocated.Stream()
    kept = failures.Failure(error, "first", ("file.py", 1, "here"), stream, None)
    failures.Failure(error, "first", ("file.py", 2, "here"), stream, None)  # which nobody has
    with pytest.raises(OwnError):
        kept.raise_()
    failures.Failure(error, "second", ("file.py", 3, "here"), stream, None)
    with pytest.raises(OwnError) as raised:
        colocated.wait()
    assert "'second' made at file.py:3" in raised.value.__notes__[-1]
    colocated.wait()


def test_a_call_that_a_thread_itself_makes_names_its_function():
    note = colocated_python(lambda x: rendezvous.say("made") or 1 / 0, mode="stream", out_specs_fn=lambda x: x)
    with pytest.raises(ZeroDivisionError):
        note(one).block_until_ready()
    rendezvous.clear()
    _thread.start_new_thread(note, (one,))  # with no frame of Python below
    rendezvous.hear("made")
    with pytest.raises(ZeroDivisionError):
        wait_for(lambda: colocated.wait())


def test_failures_without_results_are_logged_too(caplog):
    failing(out_specs_fn=lambda x: None)(one)
    wait_for(lambda: logged(caplog, "without_results"))
    with pytest.raises(OwnError):
        colocated.wait()


def test_many_failures_are_not_kept_all(caplog):
    caplog.set_level(logging.CRITICAL)
    f = failing(out_specs_fn=lambda x: None)
    for _ in range(300):
        f(one)
    with pytest.raises(OwnError) as caught:
        colocated.wait()
    assert caught.value.__notes__[0].count("OwnError") <= 100
    assert len(failures._orphans) == 0


def run(program, *, timeout=60, **environment):
    """A script in a process of its own: its exit code and what it wrote."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    body = "import sys, time, threading, os\nimport jax, jax.numpy as jnp\nfrom partjit import colocated\n"
    body += "one = jnp.float32(1)\n" + textwrap.dedent(program)
    ran = subprocess.run(
        [sys.executable, "-c", body], capture_output=True, text=True, env=env, timeout=timeout, check=False
    )
    return ran.returncode, ran.stdout, ran.stderr


@pytest.mark.system
def test_at_exit_calls_under_way_are_finished():
    code, out, err = run("""
        def work(x):
            time.sleep(0.3)
            print("ran", flush=True)
        f = colocated.colocated_python(work, out_specs_fn=lambda x: None)
        for _ in range(3):
            f(one)
        print("end", flush=True)
    """)
    assert (code, out.split()) == (0, ["end", "ran", "ran", "ran"]), err
    assert err == ""


@pytest.mark.system
def test_at_exit_a_failure_nobody_looked_at_is_told():
    code, _, err = run("""
        def load(x):
            raise OSError("no disk")
        y = colocated.colocated_python(load, out_specs_fn=lambda x: x)(one)
        z = colocated.colocated_python(load, out_specs_fn=lambda x: None)(one)
    """)
    assert code == 0
    assert err.count("partjit: nobody looked at the failure of the colocated call of 'load' made at <string>:") == 2, (
        err
    )
    assert "OSError: no disk" in err


@pytest.mark.system
def test_at_exit_a_failure_that_was_looked_at_is_not_told():
    code, _, err = run("""
        def load(x):
            raise OSError("no disk")
        y = colocated.colocated_python(load, out_specs_fn=lambda x: x)(one)
        try:
            y.block_until_ready()
        except OSError:
            pass
    """)
    assert (code, err) == (0, "")


@pytest.mark.system
def test_at_exit_a_hanging_call_is_not_waited_for_for_ever():
    code, _, err = run(
        """
        def hang(x):
            threading.Event().wait()
        colocated.colocated_python(hang, out_specs_fn=lambda x: None)(one)
        """,
        PARTJIT_EXIT_TIMEOUT="0.2",
    )
    assert code == 0
    assert "partjit: the process ends before its colocated calls: " in err
    assert "after 0.2 s there still run or wait 'hang' (called at <string>:" in err
    assert "PARTJIT_EXIT_TIMEOUT sets how many seconds to wait" in err


@pytest.mark.system
@pytest.mark.parametrize("timeout", ["soon", "nan"])
def test_an_exit_timeout_that_is_no_number_is_told(timeout):
    code, _, err = run("pass", PARTJIT_EXIT_TIMEOUT=timeout)
    assert code == 0
    assert f"partjit: PARTJIT_EXIT_TIMEOUT must be a number of seconds, but is {timeout!r}" in err


@pytest.mark.system
def test_an_uncaught_exception_ends_the_process_after_its_calls():
    code, out, err = run("""
        def work(x):
            time.sleep(0.2)
            print("ran", flush=True)
        f = colocated.colocated_python(work, out_specs_fn=lambda x: None)
        f(one)
        raise ValueError("mine")
    """)
    assert code == 1
    assert out.split() == ["ran"]
    assert "ValueError: mine" in err


@pytest.fixture
def interrupts():
    """Interrupts are heard, also where the tests run in the background of a shell, which has them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.system
def test_an_interrupt_of_a_waiting_caller_leaves_the_call_running():
    code, out, err = run("""
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)
        f = colocated.colocated_python(lambda x: time.sleep(1) or x + 1, out_specs_fn=lambda x: x)
        y = f(one)
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
        try:
            y.block_until_ready()
        except KeyboardInterrupt:
            print("interrupted")
        print(float(y), float(f(one)))
    """)
    assert (code, out.split()) == (0, ["interrupted", "2.0", "2.0"]), err


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_inside_of_an_inline_call_frees_its_stream():
    def interrupted(x):
        signal.raise_signal(signal.SIGINT)
        time.sleep(1)

    f = colocated_python(interrupted, mode="inline", stream="interrupted")
    with pytest.raises(KeyboardInterrupt):
        f(one)
    g = colocated_python(lambda x: x, stream="interrupted", out_specs_fn=lambda x: x)
    np.testing.assert_array_equal(g(one), one)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_while_a_full_stream_is_waited_for_leaves_it_whole():
    with colocated.stream("full", size=1) as stream:
        f = colocated_python(lambda x: rendezvous.hear("go"), out_specs_fn=lambda x: None)
        f(one)
        threading.Timer(0.1, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            f(one)
        assert len(stream.calls) == 1
        rendezvous.say("go")


@pytest.mark.system
def test_in_a_forked_child_pending_calls_fail_and_new_ones_work():
    code, out, err = run("""
        import warnings
        warnings.simplefilter("ignore")
        f = colocated.colocated_python(lambda x: time.sleep(0.5) or x + 1, out_specs_fn=lambda x: x)
        y = f(one)
        child = os.fork()
        if child == 0:
            try:
                y.value()
            except RuntimeError as error:
                print("child:", error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print("parent:", float(y), flush=True)
    """)
    assert code == 0, err
    assert out.splitlines() == [
        "child: the process was forked: colocated calls go on in the parent only",
        "parent: 2.0",
    ]


def test_without_another_thread_the_call_fails_and_its_stream_goes_on(monkeypatch):
    def no_thread(job):
        raise RuntimeError("can't start new thread")

    f = colocated_python(lambda x: x, mode="stream", out_specs_fn=lambda x: x)
    f(one).block_until_ready()
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.threads, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            f(one)
    np.testing.assert_array_equal(f(one), one)
    colocated.wait()


def test_an_exception_thrown_into_a_thread_from_outside_does_not_stop_its_stream():
    import ctypes

    def work(x):
        rendezvous.logs["thread"].append(threading.get_ident())
        rendezvous.say("runs")
        for _ in range(1000):
            time.sleep(0.005)

    with colocated.stream("killed"):
        y = colocated_python(work, out_specs_fn=lambda x: x)(one)
        z = colocated_python(lambda x: x, mode="stream", out_specs_fn=lambda x: x)(one)
        rendezvous.hear("runs")
        thread = rendezvous.logs["thread"][0]
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
        with pytest.raises(SystemExit):
            y.block_until_ready()
        np.testing.assert_array_equal(z, one)


# Laws


@sees("a call that fails", "a result of a failed call", "a good result")
@examples(40)
@given(st.lists(st.tuples(st.sampled_from(["good", "bad"]), st.lists(st.integers(0, 6), max_size=2)), max_size=8))
def test_a_result_fails_exactly_if_a_call_before_it_in_its_data_failed(program):
    def body(is_bad, *xs):
        if is_bad:
            raise OwnError(0, "bad")
        return sum(xs, jnp.float32(0)) + 1

    good = colocated_python(lambda *xs: body(False, *xs), mode="stream", out_specs=one, devices=jax.devices())
    bad = colocated_python(lambda *xs: body(True, *xs), stream="bad", out_specs=one, devices=jax.devices())
    results, expected = [one], [1.0]
    for kind, uses in program:
        uses = [use % len(results) for use in uses]
        results.append((good if kind == "good" else bad)(*[results[use] for use in uses]))
        inputs = [expected[use] for use in uses]
        expected.append(None if kind == "bad" or None in inputs else sum(inputs) + 1.0)
        saw(
            "a call that fails" if kind == "bad" else "a result of a failed call" if None in inputs else "a good result"
        )
    for result, value in zip(results, expected, strict=True):
        if value is None:
            with pytest.raises(OwnError):
                result.block_until_ready()
        else:
            assert float(result) == value
    colocated.wait()


@pytest.mark.parametrize("in_program", [False, True])
@pytest.mark.parametrize("wrapped", [lambda f: f, jax.vmap], ids=["plain", "vmap"])
def test_an_exception_that_cannot_be_changed_is_raised_as_it_is(wrapped, in_program):
    @dataclasses.dataclass(frozen=True)
    class Frozen(Exception):
        code: int

    def raise_it(x):
        raise Frozen(3)

    function = wrapped(colocated_python(raise_it, mode="stream", out_specs_fn=lambda x: x))
    with pytest.raises(Exception, match="3") as caught:
        jax.block_until_ready((partjit.pjit(function) if in_program else function)(jnp.ones(2)))
    assert type(caught.value).__name__ == "Frozen"


@pytest.mark.system
def test_calls_and_failures_at_exit_reach_somebody():
    code, out, err = run("""
        none = lambda x: None
        inner = colocated.colocated_python(lambda x: print("inner ran", flush=True), mode="stream", out_specs_fn=none)
        def outer(x):
            time.sleep(0.4)
            inner(x)
            raise KeyError("late")
        colocated.colocated_python(outer, mode="stream", out_specs_fn=lambda x: None)(one)
        print("end", flush=True)
    """)
    assert (code, out.splitlines()) == (0, ["end", "inner ran"]), err
    assert "partjit: nobody looked at the failure of the colocated call of 'outer'" in err


def test_an_interrupt_after_a_thread_has_taken_the_call_does_not_disturb_its_lane(monkeypatch):
    real = scheduler.threads.start

    def interrupted(job):
        real(job)
        time.sleep(0.05)
        raise KeyboardInterrupt

    log = colocated_python(lambda x: rendezvous.logs["ran"].append(int(x)), stream="k", out_specs_fn=lambda x: None)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.threads, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            log(jnp.int32(1))
    for i in (2, 3):
        log(jnp.int32(i))
    colocated.wait(timeout=30)
    assert rendezvous.logs["ran"] == [1, 2, 3]
