"""Order and concurrency: streams, waiting, and what travels with a call."""

import collections
import contextlib
import contextvars
import functools
import gc
import threading
import time
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated
from partjit.colocated import colocated_python, colocated_python_class
from partjit.colocated.runtime import lanes, scheduler, soon
from partjit.colocated.runtime import threads as own_threads
from partjit.colocated.runtime.call import Call, Lane, Waiter
from partjit.colocated.runtime.streams import current_stream
from tests.census import saw, sees
from tests.colocated import rendezvous
from tests.effort import examples

pytestmark = pytest.mark.usefixtures("meeting")

one = jnp.float32(1)
tag = contextvars.ContextVar("tag", default="none")


def logging(name, **items):
    """A colocated function that writes its argument to the log of a name."""
    return colocated_python(
        lambda x: rendezvous.logs[name].append(int(x)), **{"out_specs_fn": lambda x: None, "mode": "stream", **items}
    )


def blocked(**items):
    """A colocated function that ends when `go` is said."""
    return colocated_python(lambda x: rendezvous.hear("go") or x, **{"out_specs_fn": lambda x: x, **items})


def until(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def run_threads(*targets):
    errors = []

    def guarded(target):
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


# Order


def test_calls_of_a_thread_run_in_their_order_whatever_they_are():
    functions = [logging("order"), logging("order", mode="auto"), logging("order", mode="inline")]
    for i in range(300):
        functions[i % 7 % 3](jnp.int32(i))
    colocated.wait()
    assert rendezvous.logs["order"] == [*range(300)]


def test_threads_overlap():
    f = colocated_python(lambda x: rendezvous.meet("all three", 3) or x, out_specs_fn=lambda x: x)
    run_threads(*[lambda: jax.block_until_ready(f(one))] * 3)


def test_threads_overlap_on_their_first_calls_too():
    f = colocated_python(lambda x: rendezvous.meet("all three", 3) or x)
    run_threads(*[lambda: jax.block_until_ready(f(one))] * 3)


def test_named_streams_overlap_within_a_thread_and_with_it():
    f = colocated_python(lambda x: rendezvous.meet("all three", 3), out_specs_fn=lambda x: None)
    for items in ({"stream": "a"}, {"stream": "b"}, {}):
        f.specialize(**items)(one)
    colocated.wait()


def test_a_named_stream_is_one_order_for_all_threads():

    def alone(x):
        rendezvous.logs["inside"].append(1)
        assert len(rendezvous.logs["inside"]) == 1
        time.sleep(0.001)
        rendezvous.logs["inside"].pop()
        rendezvous.logs["order"].append(int(x))

    f = colocated_python(alone, stream="shared", out_specs_fn=lambda x: None)
    run_threads(*[lambda k=k: [f(jnp.int32(100 * k + i)) for i in range(20)] for k in range(4)])
    colocated.wait()
    order = rendezvous.logs["order"]
    assert len(order) == 80
    for k in range(4):
        assert [i for i in order if i // 100 == k] == [100 * k + i for i in range(20)]


def test_a_result_of_another_stream_is_waited_for_by_the_call_that_needs_it_only():
    slow = blocked(stream="slow")(one)
    depends = colocated_python(lambda x: x + 1, stream="depends", out_specs_fn=lambda x: x)(slow)
    free = colocated_python(lambda x: x + 2, stream="free", out_specs_fn=lambda x: x)(one)
    assert float(free) == 3
    assert not depends.is_ready()
    rendezvous.say("go")
    assert float(depends) == 2


# Scopes


def test_a_scope_sends_calls_to_its_stream_and_waits_for_them():
    outer = current_stream()
    pending = None
    with colocated.stream("scope") as stream:
        assert current_stream() is stream
        pending = blocked()(one)
        logging("order")(jnp.int32(1))
        assert len(stream.calls) == 2
        threading.Timer(0.02, rendezvous.say, ["go"]).start()
    assert current_stream() is outer
    assert pending.is_ready()
    assert rendezvous.logs["order"] == [1]


def test_scopes_nest_and_other_threads_are_not_in_them():
    with colocated.stream("a") as a, colocated.stream() as anonymous:
        assert current_stream() is anonymous
        seen = []
        run_threads(lambda: seen.append(current_stream()))
        assert seen[0] not in (a, anonymous)
        with colocated.stream("a") as again:
            assert again is a
            assert current_stream() is a


def test_a_scope_raises_what_its_calls_raised():
    f = colocated_python(lambda x: {}[int(x)], out_specs_fn=lambda x: x)
    with pytest.raises(KeyError, match="3"), colocated.stream():
        f(jnp.int32(3))
    with pytest.raises(ZeroDivisionError), colocated.stream() as stream:  # its own error comes first
        (f(jnp.int32(3)), 1 / 0)
    with pytest.raises(KeyError, match="3"):
        colocated.wait(stream)


def test_functions_with_a_stream_of_their_own_stay_on_it_in_a_scope():
    f = blocked(stream="own")
    with colocated.stream("scope") as stream:
        f(one)
        assert len(stream.calls) == 0
    rendezvous.say("go")


def add_a_call(stream):
    """A thread that makes a blocked call on a stream, and the event that it could."""
    entered = threading.Event()
    thread = threading.Thread(target=lambda: (blocked(stream=stream)(one), entered.set()))
    thread.start()
    return thread, entered


def test_a_full_stream_makes_its_caller_wait():
    with colocated.stream("small", size=3) as stream:
        f = blocked()
        for _ in range(3):
            f(one)
        thread, fourth = add_a_call(stream)
        assert not fourth.wait(0.1)
        assert len(stream.calls) == 3
        rendezvous.say("go")
        assert fourth.wait(5)
        thread.join()


@pytest.mark.parametrize("size", [0, -3])
def test_a_stream_holds_at_least_one_call(size):
    with pytest.raises(ValueError, match=f"size must be at least 1, but is {size}"), colocated.stream(size=size):
        pass


def test_a_stream_that_shrinks_is_full_with_more_calls_than_it_holds():
    with colocated.stream("shrinks", size=3) as stream:
        for _ in range(3):
            blocked()(one)
        scheduler.resize(stream, 2)
        thread, entered = add_a_call(stream)
        assert not entered.wait(0.1)
        rendezvous.say("go")
        assert entered.wait(5)
        thread.join()


def test_a_stream_that_grows_lets_in_who_waits():
    with colocated.stream("grows", size=1) as stream:
        blocked()(one)
        thread, entered = add_a_call(stream)
        assert not entered.wait(0.1)
        scope = colocated.stream("grows", size=3)
        scope.__enter__()
        assert entered.wait(5)
        rendezvous.say("go")
        scope.__exit__(None, None, None)
        thread.join()


def test_a_scope_lets_every_exception_through():
    with pytest.raises(StopIteration), colocated.stream():
        next(iter([]))
    y = colocated_python(lambda x: next(iter([])), mode="stream", out_specs_fn=lambda x: x)(one)
    with pytest.raises(RuntimeError, match="raised StopIteration"):  # which nobody but the loop around may raise
        y.block_until_ready()


def test_the_end_of_a_scope_raises_what_nested_calls_raised():
    inner = colocated_python(lambda x: {}[0], mode="stream", out_specs_fn=lambda x: None)
    outer = colocated_python(lambda x: inner(x), mode="stream", out_specs_fn=lambda x: None)
    with pytest.raises(KeyError), colocated.stream():
        outer(one)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="jax 0.10 may die in a garbage collection in which arrays were made"
)
def test_finalizers_may_make_calls():
    log = logging("finalized", stream="finalized")
    log(jnp.int32(0))

    class Cycle:
        def __init__(self, i):
            self.i, self.me = i, self

        def __del__(self):
            log(jnp.int32(self.i))

    work = colocated_python(lambda x: x, mode="stream", out_specs_fn=lambda x: x)
    for i in range(300):
        Cycle(i)
        work(one)
    deadline = time.monotonic() + 60
    while len(rendezvous.logs["finalized"]) < 301 and time.monotonic() < deadline:
        gc.collect()  # which does nothing while another thread collects
        colocated.wait(timeout=60)
    assert sorted(rendezvous.logs["finalized"]) == sorted([0, *range(300)])


def test_streams_show_what_is_in_them():
    with colocated.stream("shown", size=7) as stream:
        blocked()(one)
        assert repr(stream) == "Stream(shown, 1 of 7 calls)"
        rendezvous.say("go")
    with colocated.stream() as stream:
        assert repr(stream) == "Stream(anonymous, 0 of 128 calls)"


def test_a_named_stream_travels_by_its_name_and_another_does_not():
    with colocated.stream("travels") as stream:
        assert colocated.deserialize(colocated.serialize(stream)) is stream
    with colocated.stream() as stream, pytest.raises(TypeError, match="a stream without a name belongs to its process"):
        colocated.serialize(stream)


def test_streams_nobody_refers_to_are_forgotten():
    with colocated.stream("forgotten") as stream:
        logging("x")(jnp.int32(1))
    reference = weakref.ref(stream)
    del stream
    gc.collect()
    assert reference() is None


# wait


def test_wait_waits_for_all_streams_and_for_the_calls_that_calls_make():
    inner = colocated_python(lambda x: time.sleep(0.02) or rendezvous.logs["inner"].append(1), stream="inner")

    def make_calls(x):
        inner(x)
        time.sleep(0.02)
        inner(x)
        inner(x)

    outer = colocated_python(make_calls, mode="stream")
    outer(one)
    colocated.wait()
    rendezvous.logs["inner"].clear()
    for stream in ("a", "b", None):
        outer.specialize(stream=stream, out_specs_fn=lambda x: None)(one)
    colocated.wait()
    assert len(rendezvous.logs["inner"]) == 9


def test_wait_for_one_stream_leaves_the_others():
    f = blocked(stream="waits")
    f(one)
    log = logging("order", stream="quick")
    log(jnp.int32(1))
    colocated.wait("quick")
    assert rendezvous.logs["order"] == [1]
    rendezvous.say("go")


def test_wait_with_a_timeout_names_the_calls():
    @colocated_python(stream="stuck", out_specs_fn=lambda x: None)
    def stuck(x):
        rendezvous.hear("go")

    stuck(one)
    with pytest.raises(
        TimeoutError, match=r"after 0.05 s there still run or wait 'stuck' \(called at .*streams.py:\d+\)"
    ):
        colocated.wait(timeout=0.05)
    rendezvous.say("go")
    colocated.wait(timeout=60)


def test_wait_inside_of_a_function_waits_for_the_calls_it_made():
    def outer(x):
        log = logging("inner")
        for i in range(5):
            log(jnp.int32(i))
        colocated.wait()
        assert rendezvous.logs["inner"] == [*range(5)]
        return x

    f = colocated_python(outer, mode="stream", out_specs_fn=lambda x: x)
    queued = [f(one)]
    float(queued[0])


# Calls inside of calls


def test_calls_inside_are_ordered_as_if_the_function_stood_there():
    def outer(x):
        log = logging("order")
        for i in range(3):
            log(x * 10 + i)

    f = colocated_python(outer, mode="stream", out_specs_fn=lambda x: None)
    for i in range(20):
        f(jnp.int32(i))
    colocated.wait()
    assert rendezvous.logs["order"] == [10 * i + j for i in range(20) for j in range(3)]


def test_calls_inside_are_ordered_whichever_threads_run_the_function():
    def inner(x):
        if int(x) == 0:
            rendezvous.hear("inner may go")
        rendezvous.logs["order"].append(int(x))

    def outer(x):
        rendezvous.logs["threads"].append(threading.get_ident())
        colocated_python(inner, mode="stream", out_specs_fn=lambda x: None)(x)
        return x

    f = colocated_python(outer, mode="stream", out_specs_fn=lambda x: x)
    float(f(jnp.int32(0)))
    time.sleep(0.1)  # until no thread waits for the next call of the stream
    for i in range(8):  # which keep the idle threads busy
        blocked(stream=f"busy {i}")(one)
    float(f(jnp.int32(1)))
    time.sleep(0.1)  # in which a call out of order would have run
    rendezvous.say("inner may go")
    rendezvous.say("go")
    colocated.wait()
    assert len({*rendezvous.logs["threads"]}) == 2
    assert rendezvous.logs["order"] == [0, 1]


@pytest.mark.parametrize("mode", ["inline", "stream", "auto"])
def test_a_call_on_the_stream_it_runs_on_is_part_of_the_call(mode):
    inner = colocated_python(lambda x: x + 1, stream="same", out_specs_fn=lambda x: x, mode=mode)
    outer = colocated_python(lambda x: inner(inner(x)) * 2, stream="same", out_specs_fn=lambda x: x, mode=mode)
    for _ in range(3):
        assert float(outer(one)) == 6


def test_deep_nesting_works():
    def descend(n):
        again = colocated_python(descend, mode="stream", out_specs_fn=lambda n: n)
        return n if int(n) == 0 else again(n - 1) + 1

    assert int(colocated_python(descend, mode="stream", out_specs_fn=lambda n: n)(jnp.int32(12))) == 12


def test_calls_that_wait_for_each_other_are_told_instead_of_hanging():
    def on_a(x):
        rendezvous.say("a runs")
        rendezvous.hear("b is queued")
        return colocated_python(lambda x: x, stream="b", out_specs_fn=lambda x: x)(x) + 1

    def on_b(x):
        rendezvous.hear("a runs")
        return colocated_python(lambda x: x, stream="a", out_specs_fn=lambda x: x)(x) + 1

    results = [
        colocated_python(on_a, stream="a", out_specs_fn=lambda x: x)(one),
        colocated_python(on_b, stream="b", out_specs_fn=lambda x: x)(one),
    ]
    rendezvous.say("b is queued")
    errors = []
    for result in results:
        try:
            float(result)
        except RuntimeError as error:
            errors.append(str(error))
    assert errors
    assert all(error.startswith("deadlock: the colocated call of 'on_") for error in errors)
    colocated.wait(timeout=30)


# What travels with a call


@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_context_variables_travel(mode):
    f = colocated_python(lambda x: rendezvous.logs["tags"].append(tag.get()), mode=mode, out_specs_fn=lambda x: None)
    for value in ("one", "two"):
        token = tag.set(value)
        f(one)
        tag.reset(token)
    f(one)
    colocated.wait()
    assert rendezvous.logs["tags"] == ["one", "two", "none"]


@pytest.mark.parametrize("mode", ["inline", "stream"])
@pytest.mark.parametrize("way", ["with partjit.Mesh", "partjit.set_mesh", "jax.set_mesh"])
def test_the_ambient_mesh_travels(mesh, mode, way):
    def use(x):
        y = partjit.pjit(lambda x: x + 1, in_axis_resources=P("x"), out_axis_resources=P("y"))(x)
        return partjit.pjit(lambda y: partjit.with_sharding_constraint(y, P("x")))(y)

    x = jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, P("x")))
    f = colocated_python(use, mode=mode, out_specs=jax.ShapeDtypeStruct((8,), np.float32))
    enter = {
        "with partjit.Mesh": contextlib.nullcontext,
        "partjit.set_mesh": partjit.set_mesh,
        "jax.set_mesh": jax.set_mesh,
    }
    with mesh if way == "with partjit.Mesh" else enter[way](mesh):
        y = f(x)
        with partjit.Mesh(jax.devices()[::-1], "z"):  # which is entered after the call was made
            np.testing.assert_array_equal(y, np.ones(8))
    with pytest.raises(partjit.MissingMeshError):
        jax.block_until_ready(f(x))


@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_settings_of_jax_travel_and_do_not_stay(mode):
    def look(x):
        rendezvous.logs["settings"].append((jnp.asarray(1.5).dtype.name, [d.id for d in jnp.zeros(3).devices()]))

    f = colocated_python(look, mode=mode, out_specs_fn=lambda x: None)
    with jax.enable_x64(True), jax.default_device(jax.devices()[5]):
        f(one)
    f(one)
    with jax.numpy_rank_promotion("allow"):
        colocated_python(lambda x: jnp.zeros((2, 2)) + jnp.zeros(2), mode=mode)(one)
    colocated.wait()
    assert rendezvous.logs["settings"] == [("float64", [5]), ("float32", [0])]


def test_transfer_guards_travel():
    f = colocated_python(
        lambda x: jnp.sin(np.float32(3)), mode="stream", out_specs=jax.ShapeDtypeStruct((), np.float32)
    )
    with jax.transfer_guard("disallow"):
        y = f(one)
        colocated_python(lambda x: x, mode="stream", out_specs_fn=lambda x: x)(one).block_until_ready()
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        y.block_until_ready()
    jax.block_until_ready(f(one))


# Calls behind others


@colocated.colocated_python_class
class Recorder:
    def record(self, x):
        return record(x)


def record(x):
    rendezvous.logs["behind"].append(int(x))
    if int(x) % 3 == 2:
        raise LookupError(int(x))
    return x


@pytest.mark.parametrize("kinds", ["f", "m", "fm", "mf", "ffm", "mmf"])
@pytest.mark.parametrize("are_behind", [False, True])
@pytest.mark.parametrize("way", ["first or behind", "watched", "soon"])
def test_calls_behind_others_are_in_order_and_fail_as_any(kinds, are_behind, way, monkeypatch):
    """Functions are in one lane, methods in two. Those that may be first are watched; for some a thread waits."""
    monkeypatch.setattr(soon, "_SECONDS", 0.01 if way == "soon" else 0)
    if way == "watched":
        monkeypatch.setattr(lanes, "enter_behind", lambda call: False)
    options = {"mode": "stream", "out_specs_fn": lambda x: x}
    calls = {"f": colocated_python(record, **options), "m": Recorder().record.specialize(**options)}
    with colocated.stream(size=4):
        first = blocked(mode="stream")
        if are_behind:
            first(one)
        else:
            rendezvous.say("go")
        results = []
        for i in range(9):
            results.append(calls[kinds[i % len(kinds)]](jnp.int32(i)))
            if i == 2:
                rendezvous.say("go")  # before the stream is full
        for i, result in enumerate(results):
            if i % 3 == 2:
                with pytest.raises(LookupError, match=str(i)):
                    result.block_until_ready()
            else:
                assert int(result) == i
    assert rendezvous.logs["behind"] == [*range(9)]
    assert not lanes.unfinished()


def calls_in(lane, count):
    calls = [Call(str(i), ("file", 1, "function"), lane, [lane], tuple) for i in range(count)]
    assert [lanes.enter(call) for call in calls] == [i == 0 for i in range(count)]
    return calls


def test_a_call_that_has_ended_passes_on_its_place():
    lane = Lane()
    first, given_up, third, last = calls_in(lane, 4)
    assert lanes.end(given_up) == [first], "which runs already"
    assert lanes.pass_on(first) == [third]
    assert first.has_ended
    assert {*lanes.unfinished()} >= {third, last}
    assert lanes.pass_on(third) == [last]
    assert lanes.pass_on(last) == []
    assert {*lanes.unfinished()}.isdisjoint({first, given_up, third, last})


def test_a_place_is_passed_on_to_nobody_if_the_call_behind_is_given_up_meanwhile():
    class EmptiedInBetween(collections.deque):
        def popleft(self):
            self.clear()

    lane = Lane()
    calls = calls_in(lane, 2)
    lane.calls = EmptiedInBetween(calls)
    assert lanes.pass_on(calls[0]) == []
    assert {*lanes.unfinished()}.isdisjoint(calls)


@colocated_python_class
class Adder:
    def add(self, x):
        assert not rendezvous.logs["held"]
        return x + 1

    def hold(self, x):
        rendezvous.logs["held"].append(x)
        rendezvous.hear("go")
        rendezvous.logs["held"].clear()
        return x


@pytest.mark.parametrize("kind", ["function", "method"])
def test_calls_that_come_soon_are_run_together_once_one_is_waited_for(kind, monkeypatch):
    monkeypatch.setattr(soon, "_SECONDS", 60.0)
    monkeypatch.setattr(soon, "_AT_ONCE_SECONDS", 0)
    options = {"mode": "stream", "out_specs_fn": lambda x: x}
    add = colocated_python(lambda x: x + 1, **options) if kind == "function" else Adder().add.specialize(**options)
    with colocated.stream(size=4) as stream:
        assert float(add(one)) == 2
        assert stream.waiter is None, "nothing came before it"
        assert float(add(one)) == 2
        until(lambda: stream.waiter is not None)
        with monkeypatch.context() as context:
            context.setattr(own_threads, "start", None)  # no other thread is needed
            results = [add(one) for _ in range(3)]
            assert not any(result.is_ready() for result in results)
            assert [*map(float, results)] == [2, 2, 2]
        until(lambda: stream.waiter is not None)
        results = [add(one) for _ in range(9)]  # which waits for room
        colocated.wait()
        assert all(result.has_value for result in results)
        assert float(add(one)) == 2
        until(lambda: stream.waiter is not None)
        in_caller = colocated_python(lambda x: x + 2, mode="inline")
        assert float(in_caller(one)) == 3, "it enters the lane itself"
        assert not lanes.unfinished()
        stream.waiter.hurry.set()
        until(lambda: stream.waiter is None)


def test_a_call_in_two_lanes_runs_where_its_turn_comes_last(monkeypatch):
    """A thread that waits for the next call of a stream leaves one to others whose object is not free yet."""
    monkeypatch.setattr(soon, "_SECONDS", 100.0)
    monkeypatch.setattr(soon, "_AT_ONCE_SECONDS", 0)
    adder, left, right = Adder(), colocated.stream("left"), colocated.stream("right")
    options = {"mode": "stream", "out_specs_fn": lambda x: x}

    def add_on(stream):
        return adder.add.specialize(**options, stream=stream)(one)

    def wait_for_thread_that_waits_at(stream):
        float(add_on(stream))
        if stream.waiter is None:
            float(add_on(stream))
        until(lambda: stream.waiter is not None)

    with left as left, right as right:
        wait_for_thread_that_waits_at(left)
        first, second = add_on(left), add_on(right)
        assert not first.is_ready(), "the thread waits for more"
        run_threads(second.block_until_ready)  # who waits for it hurries the one before
        assert (float(first), float(second)) == (2, 2)
        wait_for_thread_that_waits_at(left)
        held = adder.hold.specialize(**options, stream=right)(one)
        until(lambda: rendezvous.logs["held"])
        behind = add_on(left)
        left.waiter.hurry.set()
        until(lambda: left.waiter is None)
        time.sleep(0.01)  # in which it does not run
        rendezvous.say("go")
        assert (float(held), float(behind)) == (1, 2)
        wait_for_thread_that_waits_at(left)
        first, inline = add_on(left), adder.add.specialize(mode="inline", stream=right)
        run_threads(lambda: inline(one))  # its caller hurries the one before
        assert first.has_value
        for stream in (left, right):
            if stream.waiter is not None:
                stream.waiter.hurry.set()
    assert not lanes.unfinished()


def test_calls_that_are_wanted_one_by_one_begin_as_they_come(monkeypatch):
    for name in ("_SECONDS", "_AT_ONCE_SECONDS", "_LONG_SECONDS"):
        monkeypatch.setattr(soon, name, 60.0)
    add = colocated_python(lambda x: x + 1, mode="stream", out_specs_fn=lambda x: x)
    with colocated.stream() as stream:
        assert [float(add(one)) for _ in range(2)] == [2, 2]
        until(lambda: stream.waiter is not None)
        result = add(one)
        assert not stream.waiter.hurry.is_set, "until somebody wants it"
        assert float(result) == 2
        for _ in range(3):
            until(lambda: stream.waiter is not None)
            result = add(one)
            until(result.is_ready)
        until(lambda: stream.waiter is not None)
        with monkeypatch.context() as context:
            context.setattr(own_threads, "start", None)  # no other thread is needed
            assert float(add(one)) == 2
        until(lambda: stream.waiter is not None)
        stream.waiter.hurry.set()
        until(lambda: stream.waiter is None)
        assert not lanes.unfinished()


def test_calls_whose_effects_are_wanted_one_by_one_begin_as_they_come(monkeypatch):
    """Nobody waits for the call of a server that sends its answer, but whoever wants the answer makes no other one."""
    monkeypatch.setattr(soon, "_SECONDS", 0.02)
    for name in ("_AT_ONCE_SECONDS", "_MOST_AT_ONCE_SECONDS", "_LONG_SECONDS"):
        monkeypatch.setattr(soon, name, 1000.0)
    answer = colocated_python(
        lambda x: rendezvous.logs["answers"].append(1), mode="stream", out_specs_fn=lambda x: None
    )

    def ask():
        count = len(rendezvous.logs["answers"])
        answer(one)
        until(lambda: len(rendezvous.logs["answers"]) > count)

    with colocated.stream() as stream:
        for _ in range(200):
            if soon.are_one_by_one(stream):
                break
            ask()
        assert soon.are_one_by_one(stream)
        until(lambda: stream.waiter is not None and stream.waiter.is_to_begin)
        monkeypatch.setattr(soon, "_SECONDS", 1000.0)
        for _ in range(3):
            ask()
            until(lambda: stream.waiter is not None)
        stream.waiter.hurry.set()
        until(lambda: stream.waiter is None)


def waited(lane, comes, wanted=False):
    """Has a thread wait at a lane to which so many calls come in each half of the time; returns for how long."""
    waiter, left, deadlines = Waiter(), [*comes], [time.monotonic()]

    def wait(deadline):
        lane.calls.extend(Call("f", ("", 0, ""), lane, [lane], None) for _ in range(left.pop(0)))
        deadlines.append(deadline)
        return wanted

    waiter.hurry = types.SimpleNamespace(wait=wait)
    waiter.lane, lane.waiter = weakref.ref(lane), waiter
    call = soon.next_call(waiter)
    assert call is (lane.calls[0] if lane.calls else None)
    lane.calls.clear()
    return deadlines[-1] - deadlines[0]


@pytest.mark.parametrize(("comes", "is_vain"), [((1, 0), True), ((1, 1), False), ((0, 1), False), ((0, 0), False)])
def test_a_wait_for_more_calls_is_in_vain_if_none_comes_in_its_second_half(comes, is_vain):
    lane = Lane()
    waited(lane, comes)
    assert soon.are_one_by_one(lane) == is_vain


def test_a_thread_waits_the_longer_for_more_calls_the_longer_they_have_kept_coming(monkeypatch):
    monkeypatch.setattr(soon, "_SECONDS", 100.0)
    lane = Lane()
    kept_coming = [round(waited(lane, (1, 2)) / 100) for _ in range(5)]
    assert kept_coming == [1, 2, 4, 4, 4]
    for comes, wanted in [((1, 0), False), ((1, 0), True)]:
        waited(lane, comes, wanted)
        assert round(waited(lane, (1, 1)) / 100) == 1
        assert round(waited(lane, (1, 1)) / 100) == 2


def test_a_stream_at_which_a_thread_waits_is_freed(monkeypatch):
    monkeypatch.setattr(soon, "_SECONDS", 60.0)
    monkeypatch.setattr(soon, "_AT_ONCE_SECONDS", 60.0)
    add = colocated_python(lambda x: x + 1, mode="stream", out_specs_fn=lambda x: x)
    streams = []
    with colocated.stream() as stream:
        streams.append(stream)
        assert [float(add(one)) for _ in range(2)] == [2, 2]
        until(lambda: streams[0].waiter is not None)
    waiter, freed = stream.waiter, weakref.ref(stream)
    del stream
    streams.clear()
    until(lambda: freed() is None)
    waiter.hurry.set()
    until(lambda: waiter not in soon._waiting)  # those of other lanes may wait as long, too


# Laws


LAW_STREAMS = [None, "law a", "law b"]


def act(x):
    """Logs on its stream that it begins and ends, and may make a call itself."""
    thread, i, stream, is_nested = np.asarray(x).tolist()
    log = rendezvous.logs[LAW_STREAMS[stream] or f"thread {thread}"]
    log.append(("begin", thread, i))
    if is_nested:
        inner = colocated_python(lambda x: x + 0, out_specs_fn=lambda x: x, mode="stream")
        np.testing.assert_array_equal(inner(x), x)
    log.append(("end", thread, i))


@colocated_python_class
class Actor:
    """Does the same, and logs it for itself as well."""

    def __init__(self, name):
        self._name = name

    def act(self, x):
        thread, i, *_ = np.asarray(x).tolist()
        log = rendezvous.logs[self._name]
        log.append(("begin", thread, i))
        time.sleep(1e-4)
        act(x)
        log.append(("end", thread, i))


ACTORS = [None, Actor("object a"), Actor("object b")]


@functools.cache
def acting(actor, mode, stream):
    """As `act`, of an actor or of none; later calls of the same one take fewer steps."""
    options = {"out_specs_fn": lambda x: None, "mode": mode, "stream": LAW_STREAMS[stream]}
    return ACTORS[actor].act.specialize(**options) if actor else colocated_python(act, **options)


@sees("several threads", "two streams", "a nested call", "one object on two streams")
@examples(30)
@given(st.data())
def test_each_stream_and_object_runs_its_calls_once_in_order(data):
    """Random programs: threads that make calls on streams, in any mode, some of which make calls themselves."""
    rendezvous.clear()
    modes = st.sampled_from(["inline", "stream", "auto"])
    kinds = st.tuples(st.integers(0, 2), modes, st.booleans(), st.integers(0, 2))
    programs = [data.draw(st.lists(kinds, max_size=8)) for _ in range(data.draw(st.integers(1, 3)))]
    calls = [call for program in programs for call in program]
    saw("several threads", when=sum(map(bool, programs)) > 1)
    saw("two streams", when={1, 2} <= {stream for stream, *_ in calls})
    saw("a nested call", when=any(is_nested for _, _, is_nested, _ in calls))
    places = {(stream, actor) for stream, _, _, actor in calls if stream and actor}
    saw("one object on two streams", when=len(places) > len({actor for _, actor in places}))

    def run(thread, program):
        for i, (stream, mode, is_nested, actor) in enumerate(program):
            acting(actor, mode, stream)(jnp.asarray([thread, i, stream, int(is_nested)]))

    run_threads(*[lambda k=k, p=p: run(k, p) for k, p in enumerate(programs)])
    colocated.wait(timeout=60)
    for name, log in rendezvous.logs.items():
        for begin, end in zip(log[::2], log[1::2], strict=True):
            assert (begin[0], end[0]) == ("begin", "end"), name
            assert begin[1:] == end[1:], name  # one at a time
        for thread in range(len(programs)):
            mine = [i for what, k, i in log if what == "begin" and k == thread]
            assert mine == sorted(mine), name

    def made(is_of_object):
        logs = [log for name, log in rendezvous.logs.items() if name.startswith("object") is is_of_object]
        return sorted((k, i) for log in logs for what, k, i in log if what == "begin")

    everything = [(k, i, actor) for k, program in enumerate(programs) for i, (*_, actor) in enumerate(program)]
    assert made(False) == [(k, i) for k, i, _ in everything]
    assert made(True) == [(k, i) for k, i, actor in everything if actor]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: colocated.stream(size="4"),
            TypeError,
            "colocated.stream: size must be a whole number of at least 1, but is '4'",
        ),
        (
            lambda: colocated.stream(size=True),
            TypeError,
            "size must be a whole number of at least 1, but is True, a bool",
        ),
        (
            lambda: colocated.stream(5),
            TypeError,
            "colocated.stream: name must be the name of a stream, .*, but is 5, an int",
        ),
        (
            lambda: colocated.wait(timeout="1"),
            TypeError,
            "colocated.wait: timeout must be a number of seconds, .* is '1'",
        ),
        (
            lambda: colocated.wait(timeout=float("nan")),
            ValueError,
            "timeout must be a number of seconds, or None, but is nan",
        ),
        (
            lambda: colocated.wait(5),
            TypeError,
            "colocated.wait: stream must be the name of a stream or a Stream, but is 5",
        ),
        (
            lambda: colocated.Stream(3),
            TypeError,
            "Stream: name must be the name of a stream, or None, but is 3, an int",
        ),
    ],
)
def test_what_is_no_stream_size_or_time_is_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()
