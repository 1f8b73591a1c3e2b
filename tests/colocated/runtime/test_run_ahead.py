"""Calls made ahead have not happened until they are taken: neither to other methods nor to the program."""

import contextlib
import gc
import math
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import partjit
from partjit import colocated
from partjit._jax.arrays import ArrayImpl
from partjit.colocated import cheapness, colocated_python, colocated_python_class
from partjit.colocated.runtime import streams
from tests.census import saw, sees
from tests.colocated import rendezvous
from tests.effort import examples

pytestmark = pytest.mark.usefixtures("meeting")

scalar = jax.ShapeDtypeStruct((), jnp.int32)
device = jax.devices()[0]


class Numbers:
    """Counts up to an end."""

    def __init__(self, end=1000):
        self.position, self.end = 0, end

    def next(self):
        rendezvous.logs["made"].append(self.position)
        if self.position == self.end:
            raise LookupError(f"no more than {self.end}")
        self.position += 1
        return np.int32(self.position)

    def where(self):
        return np.int32(self.position)

    def seek(self, x):
        before, self.position = self.position, int(x)
        return np.int32(before)

    def save(self):
        rendezvous.logs["saved"].append(self.position)
        return np.int32(self.position)

    def restore(self, position):
        rendezvous.logs["restored"].append(int(position))
        self.position = int(position)


Forgetful = colocated_python_class(Numbers, devices=device)
Exact = colocated_python_class(Numbers, devices=device, state=("save", "restore"))


def methods_of(numbers, run_ahead):
    following = numbers.next.specialize(out_specs=scalar, run_ahead=run_ahead)
    return {
        "next": following,
        "program": partjit.pjit(lambda: following() + 0),
        "where": numbers.where.specialize(out_specs=scalar),
        "save": numbers.save.specialize(out_specs=scalar),
        "another next": numbers.next.specialize(out_specs=scalar),
        "first where": numbers.where,  # whose specs are unknown: it runs in its caller
        "inline where": numbers.where.specialize(mode="inline"),
        "seek": numbers.seek.specialize(out_specs=scalar),
    }


def outcome(function, *args):
    try:
        return int(function(*args))
    except LookupError as error:
        return str(error)


BY_HAND = {"program": "next", "another next": "next", "first where": "where", "inline where": "where"}
calls = st.tuples(st.sampled_from(["next", "where", "save", *sorted(BY_HAND)]), st.just(0))
seeks = st.tuples(st.just("seek"), st.integers(0, 3))
takes = st.tuples(st.sampled_from(["next", "settle", "discard"]), st.just(0))


@sees("an error made ahead", "a method after calls made ahead", "a restored state", "calls that were discarded")
@given(
    st.lists(takes | takes | calls | seeks, min_size=3, max_size=20),
    st.sampled_from([1, 2, 5]),
    st.integers(1, 3),
    st.booleans(),
)
def test_an_object_with_a_state_is_as_if_nothing_were_made_ahead(operations, run_ahead, end, is_asynchronous):
    rendezvous.clear()
    expected, numbers = Numbers(end), Exact(end)
    methods = methods_of(numbers, run_ahead)
    results = []
    for name, position in operations:
        if name == "settle":  # otherwise some calls have not begun when the next operation comes
            streams.join(None)
            saw("an error made ahead", when=rendezvous.logs["made"][-1:] == [end])
        elif name == "discard":
            saw("calls that were discarded", when=methods["next"].discard_ahead() > 0)
        else:
            args = (jnp.int32(position),) if name == "seek" else ()
            want = outcome(getattr(expected, BY_HAND.get(name, name)), *args)
            got = methods[name]
            if is_asynchronous and name in ("next", "where", "save", "seek"):
                results.append((want, got(*args)))
            else:
                assert outcome(got, *args) == want
            saw("a method after calls made ahead", when=name == "where" and "next" in [n for n, _ in operations])
    for want, got in results:
        assert outcome(lambda got=got: got) == want
    saw("a restored state", when=bool(rendezvous.logs["restored"]))
    assert int(methods["where"]()) == expected.position
    colocated.wait()


@sees("several threads", "another method in between")
@examples(40)
@given(st.integers(1, 3), st.sampled_from([1, 2, 5]), st.lists(st.sampled_from(["where", "save"]), max_size=8))
def test_several_threads_get_every_item_once_and_each_its_own_in_order(count, run_ahead, others):
    rendezvous.clear()
    numbers = Exact()
    methods = methods_of(numbers, run_ahead)
    taken, seen = [[] for _ in range(count)], []
    saw("several threads", when=count > 1)
    saw("another method in between", when=bool(others))
    threads = [
        threading.Thread(target=lambda own=own: own.extend(int(methods["next"]()) for _ in range(12))) for own in taken
    ]
    threads.append(threading.Thread(target=lambda: seen.extend(int(methods[name]()) for name in others)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(own == sorted(own) for own in taken)
    assert sorted(number for own in taken for number in own) == [*range(1, 12 * count + 1)]
    assert seen == sorted(seen)
    assert int(methods["where"]()) == 12 * count


def test_the_state_is_shown_without_making_anything_again():
    methods = methods_of(Exact(), 3)
    assert int(methods["next"]()) == 1
    for _ in range(3):
        assert int(methods["save"]()) == 1
    assert [int(methods["next"]()) for _ in range(3)] == [2, 3, 4]
    assert int(methods["save"]()) == 4
    colocated.wait()
    assert rendezvous.logs["made"] == [*range(7)]
    assert not rendezvous.logs["restored"]


def test_another_method_has_what_was_made_ahead_made_again():
    methods = methods_of(Exact(), 3)
    assert int(methods["next"]()) == 1
    colocated.wait()
    assert int(methods["where"]()) == 1
    assert rendezvous.logs["restored"] == [1]
    assert int(methods["where"]()) == 1
    assert int(methods["next"]()) == 2
    colocated.wait()
    assert rendezvous.logs["made"] == [0, 1, 2, 3, 1, 2, 3, 4]
    assert rendezvous.logs["restored"] == [1]


def test_a_saved_state_continues_where_the_program_was():
    methods = methods_of(Exact(), 5)
    first = [int(methods["next"]()) for _ in range(4)]
    saved = int(methods["save"]())
    rest = [int(methods["next"]()) for _ in range(4)]
    again = methods_of(Exact(), 5)
    again["seek"](jnp.int32(saved))
    assert [int(again["next"]()) for _ in range(4)] == rest
    assert first + rest == [*range(1, 9)]


@pytest.mark.parametrize("name", ["where", "first where", "inline where", "another next", "seek", "program"])
def test_an_object_without_a_state_refuses_a_method_that_would_see_what_was_made_ahead(name):
    numbers = Forgetful()
    methods = methods_of(numbers, 2)
    other = numbers.where.specialize(out_specs=scalar, run_ahead=1)
    methods["program"] = partjit.pjit(lambda: other() + 0)
    args = (jnp.int32(0),) if name == "seek" else ()
    assert int(methods["next"]()) == 1
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"would see the state after 2 calls of Numbers\.next made ahead"
        ) as caught:
            int(methods[name](*args))
        assert "colocated_python_class(state=(..., ...))" in str(caught.value)
        assert "discard_ahead()" in str(caught.value)
        assert "inline" in name or "first" in name or __file__ in caught.value.__notes__[0]
        if name == "program":
            other.discard_ahead()
    assert [int(methods["next"]()) for _ in range(3)] == [2, 3, 4]  # nothing is lost
    colocated.wait()
    assert methods["next"].discard_ahead() == 2
    assert int(methods["where"]()) == 6  # what was done remains done
    assert int(methods["next"]()) == 7


@pytest.mark.parametrize("make", [Forgetful, Exact])
@pytest.mark.parametrize("taken", [3, 4])
@pytest.mark.parametrize("is_settled", [False, True])
def test_after_an_end_of_data_and_a_reset_there_are_no_stale_errors(make, taken, is_settled):
    methods = methods_of(make(3), 4)
    assert [outcome(methods["next"]) for _ in range(taken)] == [1, 2, 3, "no more than 3"][:taken]
    if is_settled:
        colocated.wait()  # does not raise an error that the program has not come to
    methods["seek"](jnp.int32(0))
    assert [outcome(methods["next"]) for _ in range(4)] == [1, 2, 3, "no more than 3"]
    colocated.wait()
    assert int(methods["where"]()) == 3


@pytest.mark.parametrize("args", [(jnp.int32(7),), (7,), ("seven",)])
@pytest.mark.parametrize("out_specs", [None, scalar])
def test_a_call_with_arguments_is_refused_and_not_made_without_them(args, out_specs):
    following = colocated_python(lambda x=0: np.int32(x), run_ahead=2, out_specs=out_specs, devices=device)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"run_ahead=2 .* no arguments; this one has (x|objects)$"):
            following(*args)
    assert int(following()) == 0


def test_nothing_is_made_ahead_of_an_error():
    following = methods_of(Forgetful(2), 5)["next"]
    assert int(following()) == 1
    colocated.wait()
    assert rendezvous.logs["made"] == [0, 1, 2]
    assert outcome(following) == 2
    assert outcome(following) == outcome(following) == "no more than 2"


def test_an_error_made_ahead_is_raised_where_it_is_taken_with_its_traceback():
    following = methods_of(Forgetful(1), 2)["next"]
    assert int(following()) == 1
    colocated.wait()
    failed = following()
    with pytest.raises(LookupError, match="no more") as caught:
        colocated.wait()
    assert caught.traceback[-1].name == "next"
    with pytest.raises(LookupError, match="no more") as caught:
        int(failed)
    assert "This happened in the colocated call of 'Numbers.next' made at" in caught.value.__notes__[0]


def test_an_error_made_ahead_by_a_program_is_raised_where_the_result_is_used():
    methods = methods_of(Exact(0), 2)
    assert outcome(methods["program"]) == "no more than 0"
    failed = methods["next"]()
    assert outcome(lambda: failed) == "no more than 0"
    colocated.wait()


def test_calls_that_are_discarded_before_they_begin_are_not_made():
    @colocated_python(out_specs=scalar, devices=device, run_ahead=3, stream="data")
    def following():
        rendezvous.logs["made"].append(1)
        if len(rendezvous.logs["made"]) == 2:
            rendezvous.say("the second runs")
            rendezvous.hear("go")
        return jnp.int32(len(rendezvous.logs["made"]))

    assert int(following()) == 1
    rendezvous.hear("the second runs")
    assert following.discard_ahead() == 3
    assert following.discard_ahead() == 0
    rendezvous.say("go")
    assert int(following()) == 3
    colocated.wait()
    assert len(rendezvous.logs["made"]) == 6


def test_a_call_that_is_discarded_while_it_runs_fails_for_nobody():
    @colocated_python(out_specs=scalar, devices=device, run_ahead=1, stream="data")
    def following():
        rendezvous.logs["made"].append(1)
        if len(rendezvous.logs["made"]) == 2:
            rendezvous.say("the second runs")
            rendezvous.hear("go")
            raise LookupError("nobody takes this")
        return jnp.int32(len(rendezvous.logs["made"]))

    assert int(following()) == 1
    rendezvous.hear("the second runs")
    assert following.discard_ahead() == 1
    rendezvous.say("go")
    colocated.wait()
    assert int(following()) == 3


def test_a_function_without_run_ahead_has_nothing_to_discard():
    assert colocated_python(lambda x: x).discard_ahead() == 0


def test_an_error_of_restoring_is_raised_until_it_succeeds():
    class Stubborn(Numbers):
        def restore(self, position):
            super().restore(position)
            if len(rendezvous.logs["restored"]) < 3:
                raise OSError("not now")

    methods = methods_of(colocated_python_class(Stubborn, devices=device, state=("save", "restore"))(), 2)
    assert int(methods["next"]()) == 1
    colocated.wait()
    for _ in range(2):
        with pytest.raises(OSError, match="not now"):
            int(methods["where"]())
    assert int(methods["where"]()) == 1


def test_an_error_of_saving_is_that_of_the_call():
    class Secret(Numbers):
        def save(self):
            raise OSError("not this one")

    methods = methods_of(colocated_python_class(Secret, devices=device, state=("save", "restore"))(), 2)
    for _ in range(2):
        with pytest.raises(OSError, match="not this one"):
            int(methods["next"]())
    assert not rendezvous.logs["made"]


def test_objects_with_calls_made_ahead_are_destroyed_with_their_last_reference():
    class Watched(Numbers):
        def __del__(self):
            rendezvous.say("destroyed")

    gc.disable()
    try:
        numbers = colocated_python_class(Watched, devices=device, state=("save", "restore"))()
        following = numbers.next.specialize(out_specs=scalar, run_ahead=2)
        where = numbers.where.specialize(out_specs=scalar)
        assert int(following()) == 1
        assert int(where()) == 1
        assert int(following()) == 2
        colocated.wait()
        handle = weakref.ref(numbers)
        del numbers, following, where
        assert handle() is None
        rendezvous.hear("destroyed")
    finally:
        gc.enable()


def test_a_result_that_is_there_is_an_array_that_jax_dispatches_in_cpp():
    following = methods_of(Forgetful(), 2)["next"]
    following()
    colocated.wait()
    assert type(following()) is ArrayImpl


def test_an_interrupt_while_others_are_made_gives_the_call_back(monkeypatch):
    following = methods_of(Forgetful(), 2)["next"]
    ahead = following._definition.ahead
    make = ahead._make

    def interrupted(prepared, most):
        if ahead._made or most == 2:
            monkeypatch.undo()
            raise KeyboardInterrupt
        make(prepared, most)

    monkeypatch.setattr(ahead, "_make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        following()
    assert [int(following()) for _ in range(4)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ("save", TypeError, r"colocated_python_class: state must be the names of .* methods .*, but is 'save', a str"),
        (("save",), TypeError, "state must be the names"),
        (("save", 3), TypeError, "state must be the names"),
        (("save", "load"), ValueError, "state names 'load', but Numbers has no such method"),
    ],
)
def test_a_wrong_state_is_refused(state, error, message):
    with pytest.raises(error, match=message):
        colocated_python_class(Numbers, state=state)


def test_there_is_no_state_where_methods_may_overlap():
    with pytest.raises(ValueError, match="the methods of a concurrent object may overlap"):
        colocated_python_class(Numbers, state=("save", "restore"), concurrent=True)
    methods = methods_of(colocated_python_class(Numbers, devices=device, concurrent=True)(), 2)
    assert int(methods["next"]()) in (1, 2, 3)
    deadline = time.monotonic() + 30
    while int(methods["where"]()) < 3:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "slow"])
@pytest.mark.parametrize("cls", [Forgetful, Exact], ids=["Forgetful", "Exact"])
def test_quick_calls_are_made_when_a_program_requests_them(cls, quick, monkeypatch):
    """Each once, in their order, beside another method; after a failure and a reset as well."""
    monkeypatch.setattr(cheapness, "_QUICK_SECONDS", math.inf if quick else 1e-9)
    monkeypatch.setattr(cheapness, "_CHEAP_SECONDS", math.inf)
    numbers = cls(end=70)
    following = numbers.next.specialize(out_specs=scalar, run_ahead=2)
    seek = numbers.seek.specialize(out_specs=scalar)
    program = partjit.pjit(lambda: jax.lax.scan(lambda last, _: (following(), last), jnp.int32(0), None, 30))
    for start in (0, 30):
        last, found = program()
        assert [*found[1:], last] == [*range(start + 1, start + 31)]
    assert following.discard_ahead() == (0 if quick else 2)
    with pytest.raises(LookupError, match="no more than 70"):
        jax.block_until_ready(program())
    with contextlib.suppress(LookupError):  # of calls that were submitted behind it
        colocated.wait()
    following.discard_ahead()
    float(seek(jnp.int32(10)))
    last, found = program()
    assert [*found[1:], last] == [*range(11, 41)]
