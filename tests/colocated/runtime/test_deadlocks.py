"""Calls that would wait for each other for ever: they make progress, or one of them gets an error."""

import contextlib
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import partjit
from partjit import colocated
from partjit.colocated import colocated_python, colocated_python_class
from partjit.colocated.runtime import lanes, scheduler, threads
from partjit.colocated.runtime.streams import as_stream
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

SECONDS = 30.0
one = jnp.float32(1)
scalar = jax.ShapeDtypeStruct((), jnp.float32)
device = jax.devices()[0]


def count():
    rendezvous.logs["counted"].append(1)
    return jnp.float32(len(rendezvous.logs["counted"]))


def in_threads(*targets):
    """What functions give or raise that run at the same time; a hang is a failure."""
    results = [None] * len(targets)

    def run(i):
        try:
            results[i] = targets[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(targets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), f"something hangs: {[call.name for call in lanes.unfinished()]}"
    return results


def until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def full():
    """Makes the stream `data` small while the test runs."""
    stream = as_stream("data")

    def resize(size):
        scheduler.resize(stream, size)
        return stream

    yield resize
    resize(128)


# Calls made ahead


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("run_ahead", [1, 2, 4])
@pytest.mark.parametrize("is_program", [False, True])
def test_a_call_on_a_full_stream_gets_the_next_batch_while_another_waits_for_room(size, run_ahead, is_program, full):
    stream = full(size)
    following = colocated_python(count, out_specs=scalar, devices=device, run_ahead=run_ahead, stream="data")
    take = partjit.pjit(lambda: following()) if is_program else following

    def occupy(x):
        rendezvous.say("runs")
        rendezvous.hear("others wait")
        return rendezvous.programs["take"]() + 0

    rendezvous.programs["take"] = take
    occupying = colocated_python(occupy, stream="data", out_specs=scalar)

    def taking():
        return [float(take()) for _ in range(3)]

    y = occupying(one)
    rendezvous.hear("runs")
    threading.Timer(0.05, lambda: (until(lambda: len(stream.calls) >= size), rendezvous.say("others wait"))).start()
    (taken,) = in_threads(taking)
    assert not isinstance(taken, BaseException), taken
    assert float(y) == 1  # in the order of the stream: what was made behind it runs later
    assert taken == sorted(taken)
    colocated.wait(timeout=SECONDS)
    assert len({float(y), *taken}) == 4


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("run_ahead", [1, 3])
def test_batches_are_taken_in_order_each_once_and_not_more_are_made(threads, run_ahead):
    following = colocated_python(count, out_specs=scalar, devices=device, run_ahead=run_ahead, stream="data")
    taken = in_threads(*[lambda: [float(following()) for _ in range(10)]] * threads)
    colocated.wait(timeout=SECONDS)
    assert all(batches == sorted(batches) for batches in taken)
    assert sorted(batch for batches in taken for batch in batches) == [*range(1, 10 * threads + 1)]
    assert len(rendezvous.logs["counted"]) == 10 * threads + run_ahead


def test_a_batch_made_before_goes_to_a_call_inside_of_the_stream_and_one_behind_it_does_not():
    following = colocated_python(count, out_specs=scalar, devices=device, run_ahead=2, stream="data")
    rendezvous.programs["following"] = following

    def take_three(x):
        return jnp.stack([rendezvous.programs["following"]() for _ in range(3)])

    take = colocated_python(take_three, stream="data", out_specs=jax.ShapeDtypeStruct((3,), jnp.float32))
    assert float(following()) == 1
    colocated.wait(timeout=SECONDS)  # 2 and 3 are there
    assert take(one).tolist() == [2, 3, 4]
    assert float(following()) == 5  # and 6 and 7 are made, maybe behind the next
    with pytest.MonkeyPatch.context() as patch:
        held = []
        patch.setattr(threads, "start", lambda job: held.append(job))
        y = take(one)
        rest = [following() for _ in range(2)]
        patch.undo()
        for job in held:
            threads.start(job)
    got = y.tolist() + [float(batch) for batch in rest]
    assert sorted(got) == [6, 7, 8, 9, 10]
    assert y.tolist() == sorted(y.tolist())


# Waiting under what was a lock


def deadlocks(results):
    """The errors among what functions gave."""
    errors = [result for result in results if isinstance(result, BaseException)]
    assert all(isinstance(error, RuntimeError) and str(error).startswith("deadlock: ") for error in errors), errors
    return errors


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("mode", ["inline", "stream"])
@pytest.mark.parametrize("what", ["constructor", "close"])
def test_a_constructor_or_close_that_waits_for_a_call_that_uses_the_object(concurrent, mode, what):
    def use():
        handle = rendezvous.programs["handle"]
        float(handle.get.specialize(stream="elsewhere", mode="stream")(one) + 1)

    class Waits:
        def __init__(self):
            if what == "constructor":
                use()

        def get(self, x):
            return x

        def close(self):
            if what == "close":
                use()

    made = colocated_python_class(Waits, concurrent=concurrent)
    made.get = made.get.specialize(out_specs_fn=lambda x: x)
    rendezvous.programs["handle"] = handle = made()

    def run():
        float(handle.get.specialize(mode=mode)(one))
        if what == "close":
            handle.close()

    results = in_threads(run)
    if what == "constructor":
        assert len(deadlocks(results)) == 1
    elif results[0] is not None:  # a closed object has no calls any more, or the wait was found
        assert str(results[0]).startswith(("deadlock: ", "this Waits was closed"))
    with contextlib.suppress(RuntimeError):
        colocated.wait(timeout=SECONDS)
    assert not lanes.unfinished()


@pytest.mark.parametrize("is_call", [False, True])
def test_an_out_specs_fn_that_waits_for_a_result_of_the_same_function(is_call):
    def specs(x):
        if not rendezvous.has_happened("once"):
            rendezvous.say("once")
            float(rendezvous.programs["other"](one))  # whose function calls this one
        return x

    function = colocated_python(lambda x: x + 1, mode="stream", out_specs_fn=specs)
    rendezvous.programs["function"] = function
    rendezvous.programs["other"] = colocated_python(
        lambda x: rendezvous.programs["function"](x) + 0, stream="other", out_specs_fn=lambda x: x
    )
    if is_call:
        outer = colocated_python(lambda x: rendezvous.programs["function"](x) + 0, out_specs_fn=lambda x: x)
        results = in_threads(lambda: float(outer(one)))
    else:
        results = in_threads(lambda: float(function(one)))
    assert len(deadlocks(results)) == 1
    with contextlib.suppress(RuntimeError):
        colocated.wait(timeout=SECONDS)
    assert float(function(one)) == 2


def test_an_out_specs_fn_may_call_its_own_function():
    def specs(x):
        if not rendezvous.has_happened("once"):
            rendezvous.say("once")
            assert float(rendezvous.programs["function"](one)) == 2
        return x

    rendezvous.programs["function"] = function = colocated_python(lambda x: x + 1, out_specs_fn=specs)
    assert float(function(one)) == 2


def test_a_wait_that_was_interrupted_or_timed_out_is_no_part_of_a_circle():
    def wait_a_little(x):
        with contextlib.suppress(TimeoutError):
            rendezvous.programs["late"](one)
            colocated.wait(timeout=0.01)
        rendezvous.say("waited")
        rendezvous.hear("go")
        return x

    rendezvous.programs["late"] = colocated_python(
        lambda x: rendezvous.hear("late may end") or x, stream="late", out_specs_fn=lambda x: x
    )
    y = colocated_python(wait_a_little, stream="a", out_specs_fn=lambda x: x)(one)
    rendezvous.hear("waited")
    late = colocated_python(lambda x: x, stream="late", out_specs_fn=lambda x: x)(y)  # waits for y, behind the other
    rendezvous.say("go")
    assert float(y) == 1
    rendezvous.say("late may end")
    assert float(late) == 1


def test_a_call_that_cannot_run_yet_makes_way_for_one_that_it_waits_for_itself():
    """In the lane of `b` is a call behind `outer`, which waits for a call of `a`, which runs one that waits for `b`."""

    class Log:
        def note(self, x):
            rendezvous.logs["ran"].append(int(x))
            return x

        def calling(self, x):
            rendezvous.say("a runs")
            rendezvous.hear("b is wanted")
            inner = rendezvous.programs["b"].note(x + 1)
            rendezvous.say("inner is made")
            return inner + 0

    made = colocated_python_class(Log)
    made.note, made.calling = (
        method.specialize(out_specs_fn=lambda x: x, mode="stream") for method in (made.note, made.calling)
    )
    a, b = rendezvous.programs["a"], rendezvous.programs["b"] = made(), made()

    def outer(x):
        rendezvous.hear("inner is made")
        return rendezvous.programs["a"].note(x + 1) + 0

    outer = colocated_python(outer, out_specs_fn=lambda x: x, mode="stream")

    def one_thread():
        result = outer(jnp.float32(10))
        rendezvous.hear("a runs")
        behind = b.note(jnp.float32(20))
        rendezvous.say("b is wanted")
        return float(result), float(behind)

    assert in_threads(one_thread, lambda: float(a.calling(jnp.float32(30)))) == [(11, 20), 31]
    assert rendezvous.logs["ran"] == [31, 11, 20]
