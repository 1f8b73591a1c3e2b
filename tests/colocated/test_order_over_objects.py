"""Threads call methods of the same objects, also from within calls: the order of each thread holds in each object."""

import itertools
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from partjit import colocated, pjit
from partjit.colocated import colocated_python, colocated_python_class
from partjit.colocated.runtime.streams import current_stream
from tests.census import saw, sees
from tests.colocated import rendezvous
from tests.effort import examples

pytestmark = pytest.mark.usefixtures("meeting")

one = jnp.int32(1)
SPEC = jax.ShapeDtypeStruct((), jnp.int32)


class Log:
    """Notes what it is given, itself or with another log."""

    def __init__(self, name):
        self.log = rendezvous.logs[name]
        self.is_busy = False

    def note(self, x):
        assert not self.is_busy
        self.log.append(int(x))
        return x

    def note_in_both(self, x, other, is_waited_for):
        assert not self.is_busy
        self.is_busy = True
        try:
            self.log.append(int(x))
            rendezvous.say("both")
            if rendezvous.programs.get("late"):
                rendezvous.hear("late")
            noted = rendezvous.programs[other].note(x + 1)
            rendezvous.say("noted")
            if is_waited_for:
                int(noted)
        finally:
            self.is_busy = False
        return x


def note_each(x, steps):
    if rendezvous.programs.get("late"):
        rendezvous.hear("noted")
    for k, (name, is_waited_for) in enumerate(steps):
        noted = rendezvous.programs[name].note(x + k)
        if is_waited_for:
            int(noted)
    return x


def logs():
    """Two objects, with methods that have specs."""
    made = colocated_python_class(Log)
    made.note = made.note.specialize(out_specs=SPEC)
    made.note_in_both = made.note_in_both.specialize(out_specs=SPEC)
    rendezvous.programs.update(a=made("a"), b=made("b"))
    return rendezvous.programs["a"], rendezvous.programs["b"]


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread


@pytest.mark.parametrize("is_between", [False, True])
def test_what_a_function_calls_comes_before_what_is_behind_it_where_others_wait_for_calls_in_between(is_between):
    a, b = logs()
    rendezvous.programs["late"] = True
    other = in_thread(lambda: a.note_in_both(jnp.int32(100), "b", True))
    rendezvous.hear("both")
    each = colocated_python(note_each, out_specs=SPEC, mode="stream")
    each(jnp.int32(0), [("a", False), ("b", False)])  # behind the other thread in a, which comes behind this one in b
    b.note(jnp.int32(2))
    if is_between:  # of a third thread, behind this one in a and before what the function calls in b
        a.note(jnp.int32(3))
        in_thread(lambda: (a.note(jnp.int32(200)), b.note(jnp.int32(201)))).join()
    rendezvous.say("late")
    other.join()
    colocated.wait()
    assert [x for x in rendezvous.logs["b"] if x < 100] == [1, 2]
    assert [x for x in rendezvous.logs["a"] if x < 100] == ([0, 3] if is_between else [0])
    assert {*rendezvous.logs["b"]} == {101, 1, 2} | ({201} if is_between else set())


SPREAD = {"uses_jax": False}
WAYS = {
    "a call": lambda f: f,
    "an inline call": lambda f: f.specialize(mode="inline"),
    "a call of a program": lambda f: pjit(lambda x: f(x) * 0 + x),
    "a branch": lambda f: pjit(lambda x: lax.cond(x > 0, lambda: f(x), lambda: x)),
    "a loop that returns what its calls get": lambda f: pjit(lambda x: in_loop(f, 4, x)),
    "a loop that hands it over": lambda f: pjit(lambda x: in_loop(f, x, x)),
    "a loop that waits": lambda f: pjit(lambda x: lax.fori_loop(0, x, lambda _, x: f.specialize(**SPREAD)(x), x)),
    "a loop with calls of two streams": lambda f: pjit(lambda x: in_loop(both(f, f.specialize(stream="o")), x, x)),
    "a loop whose devices run them": lambda f: pjit(lambda x: in_loop(f.specialize(**SPREAD), x, x)),
}


def in_loop(function, count, x):
    return lax.fori_loop(0, count, lambda _, x: (function(x), x)[1], x)


def both(*functions):
    return lambda x: [function(x) for function in functions]


@pytest.mark.parametrize("way", WAYS)
def test_what_a_function_calls_is_of_the_stream_of_its_caller_in_whichever_way_it_is_called(way):
    def noting(x):
        rendezvous.logs["streams"].append(current_stream())
        return x

    called = WAYS[way](colocated_python(noting, out_specs=SPEC))

    def run():
        rendezvous.logs["own"].append(current_stream())
        for _ in range(3):
            called(jnp.int32(3))

    for _ in range(3):
        rendezvous.clear()
        in_thread(run).join()
        colocated.wait()
        noted = [stream.root for stream in rendezvous.logs["streams"] if stream.root.name != "o"]
        assert len(noted) >= 3
        assert {*noted} == {*rendezvous.logs["own"]}


@sees("several threads", "a wait in a call", "calls in calls of both kinds")
@examples(25)
@given(st.data())
def test_calls_on_objects_are_in_the_order_of_each_thread_as_if_functions_were_inlined(data):
    rendezvous.clear()
    a, b = logs()
    steps = st.tuples(st.sampled_from("ab"), st.booleans())
    modes = st.sampled_from([None, "inline", "stream"])
    plans = data.draw(st.lists(st.lists(steps, min_size=1, max_size=3), min_size=2, max_size=2))
    is_waited_for = data.draw(st.booleans())
    each = colocated_python(note_each, out_specs=SPEC)
    kinds = {
        "a": (a.note.specialize(mode=data.draw(modes)), (), [("a", 0)]),
        "b": (b.note.specialize(mode=data.draw(modes)), (), [("b", 0)]),
        "both": (a.note_in_both.specialize(mode=data.draw(modes)), ("b", is_waited_for), [("a", 0), ("b", 1)]),
    }
    for i, plan in enumerate(plans):
        noted = [(name, k) for k, (name, _) in enumerate(plan)]
        kinds[f"plan {i}"] = each.specialize(mode=data.draw(modes)), (plan,), noted
    kept = data.draw(st.lists(st.sampled_from([*kinds]), min_size=2, unique=True))
    calls = st.lists(st.tuples(st.sampled_from(kept), st.booleans()), min_size=10, max_size=30)
    threads = data.draw(st.lists(calls, min_size=2, max_size=3))
    saw("several threads", when=len(threads) > 2)
    saw("a wait in a call", when=is_waited_for and "both" in kept)
    saw("calls in calls of both kinds", when="both" in kept and {"plan 0", "plan 1"} & {*kept})
    expected = [{"a": [], "b": []} for _ in threads]
    failed = []

    def run(t):
        made = []
        try:
            for i, (kind, is_used) in enumerate(threads[t]):
                method, args, noted = kinds[kind]
                first = 100_000 * t + 10 * i
                made.append(method(jnp.int32(first), *args))
                for name, k in noted:
                    expected[t][name].append(first + k)
                if is_used:
                    int(made[-1])
            assert [int(x) % 100_000 for x in made] == [*range(0, 10 * len(made), 10)]
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        running = [in_thread(lambda t=t: run(t)) for t in range(len(threads))]
        for thread in running:
            thread.join()
        colocated.wait(timeout=60)
    finally:
        sys.setswitchinterval(interval)
    assert not failed
    for t, own in enumerate(expected):
        for name, noted in own.items():
            assert [x for x in rendezvous.logs[name] if x // 100_000 == t] == noted


class Calls:
    """What a method is to call, each in its own way, and which calls it is in."""

    def __init__(self, plan, within=()):
        self.plan = plan
        self.within = within


class Calling:
    """Its methods call those of other objects, and of the object itself."""

    def __init__(self):
        self.running = []

    def total(self, x, calls):
        assert {*self.running} <= {*calls.within}, "two calls of one object at the same time"
        own = object()
        self.running.append(own)
        rendezvous.logs["made"].append(own)
        total = int(x)
        for k, (name, mode, plan) in enumerate(calls.plan):
            method = rendezvous.programs[name, mode]
            total += int(method(jnp.int32(int(x) + k), Calls(plan, (*calls.within, own))))
        assert self.running.pop() is own
        return jnp.int32(total)


MODES = ["inline", "stream", "auto"]


def calling_objects():
    made = colocated_python_class(Calling)
    for name in "abc":
        its = made()
        rendezvous.programs.update({(name, mode): its.total.specialize(mode=mode, out_specs=SPEC) for mode in MODES})


def expected_total(x, plan):
    return x + sum(expected_total(x + k, its) for k, (_, _, its) in enumerate(plan))


def number_of_calls(plan):
    return 1 + sum(number_of_calls(its) for _, _, its in plan)


@pytest.mark.parametrize("modes", [*itertools.product(MODES, repeat=3)], ids="-".join)
def test_an_object_may_be_called_by_what_it_has_called_and_waits_for(modes):
    calling_objects()
    first, second, third = modes
    plan = [("b", second, [("a", third, [])])]
    method = rendezvous.programs["a", first]
    assert int(method(one, Calls(plan))) == 3
    assert int(pjit(lambda x: method(x, Calls(plan)) + 1)(one)) == 4
    colocated.wait()


def test_a_call_does_not_wait_for_one_that_is_behind_what_it_is_part_of_even_before_that_waits_for_it():
    _, b = logs()

    def inner(x):
        noted = rendezvous.programs["b"].note(x)
        rendezvous.say("noted")
        return noted * 1

    def outer(x):
        rendezvous.hear("late")
        result = colocated_python(inner, out_specs=SPEC, mode="stream")(x)
        rendezvous.hear("noted")
        time.sleep(0.05)  # until the other one waits
        return result * 1

    result = colocated_python(outer, out_specs=SPEC, mode="stream")(one)
    b.note.specialize(mode="stream")(jnp.int32(2))  # behind the former on its stream, and so in its object
    rendezvous.say("late")
    assert int(result) == 1
    colocated.wait()
    assert rendezvous.logs["b"] == [1, 2]


@sees("several threads", "a call of an object in one of its own calls")
@examples(25)
@given(st.data())
def test_calls_in_calls_on_objects_run_once_and_one_at_a_time_and_never_wait_for_ever(data):
    """What a call waits for is of objects that come later, or that it is in: so nobody waits for each other."""
    rendezvous.clear()
    calling_objects()

    def plans(held, depth):
        names = [name for name in "abc" if name in held or name > max(held)]
        calls = data.draw(
            st.lists(st.tuples(st.sampled_from(names), st.sampled_from(MODES)), max_size=2 if depth else 0)
        )
        saw("a call of an object in one of its own calls", when=any(name in held for name, _ in calls))
        return [(name, mode, plans(held | {name}, depth - 1)) for name, mode in calls]

    firsts = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(MODES), st.booleans()), min_size=3, max_size=8)
    threads = [
        [(name, mode, is_used, plans({name}, 2)) for name, mode, is_used in calls]
        for calls in data.draw(st.lists(firsts, min_size=1, max_size=3))
    ]
    saw("several threads", when=len(threads) > 1)
    failed = []

    def run(calls):
        try:
            made = []
            for i, (name, mode, is_used, plan) in enumerate(calls):
                made.append((rendezvous.programs[name, mode](jnp.int32(i), Calls(plan)), expected_total(i, plan)))
                if is_used:
                    assert int(made[-1][0]) == made[-1][1]
            assert [int(result) for result, _ in made] == [expected for _, expected in made]
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        running = [in_thread(lambda calls=calls: run(calls)) for calls in threads]
        for thread in running:
            thread.join(rendezvous.SECONDS)
            assert not thread.is_alive()
        colocated.wait(timeout=60)
    finally:
        sys.setswitchinterval(interval)
    assert not failed
    assert len(rendezvous.logs["made"]) == sum(number_of_calls(plan) for calls in threads for *_, plan in calls)
