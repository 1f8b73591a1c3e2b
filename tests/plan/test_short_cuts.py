"""Calls that C++ dispatches before Python sees them, and what closes these short cuts."""

import contextlib
import functools
import gc
import itertools
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import colocated, events, letting_in, pjit, record
from partjit._jax import dispatch
from partjit.colocated import cheapness, colocated_python
from partjit.colocated.runtime.pending import PendingArray
from partjit.colocated.runtime.streams import as_stream
from partjit.plan.run import first
from partjit.plan.run.observe import wait_for_fragments
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

WARM = 5
"""How many calls there are before one goes by a short cut, at least."""


@pytest.fixture
def short(monkeypatch):
    """Of each call by a short cut the name of its program."""
    found = []
    real = first.AfterFirst.short_cut

    def short_cut(self, *args):
        with pytest.MonkeyPatch.context() as patch:
            make = first.fast_path_then

            def noting(data, is_given, then, **how):
                return make(data, is_given, lambda results: (found.append(self._plan.name), then(results))[1], **how)

            patch.setattr(first, "fast_path_then", noting)
            return real(self, *args)

    monkeypatch.setattr(first.AfterFirst, "short_cut", short_cut)
    return found


_numbers = itertools.count()


def new_name():
    """The name of a stream that nobody has entered."""
    return f"stream {next(_numbers)}"


def logging(stream=None):
    """On a stream of its own by default."""
    return colocated_python(note, out_specs_fn=lambda *_: None, stream=stream or new_name())


def note(*xs):
    rendezvous.logs["log"].append([np.asarray(x).item() for x in xs])


def logged():
    colocated.wait()
    found = [*rendezvous.logs["log"]]
    rendezvous.logs["log"].clear()
    return found


def step_with(log, name="step"):
    def step(x, i):
        log(i, jnp.sum(x))
        return x + 1

    step.__name__ = name
    return pjit(step)


def is_short(program, short, *args):
    """Whether the call goes by a short cut."""
    short.clear()
    program(*args)
    return bool(short)


def warm(program, *args):
    for _ in range(WARM):
        program(*args)
    logged()


@contextlib.contextmanager
def journal(tmp_path):
    with colocated.journal(tmp_path / "journal"):
        yield


WATCHES = {
    "a listener": lambda _: events.subscribe(lambda _: None),
    "a record": lambda _: record(),
    "a journal": journal,
    "two listeners": lambda _: contextlib.ExitStack(),
}


@pytest.mark.parametrize("how", [*WATCHES])
def test_while_somebody_watches_python_sees_every_call(how, short, tmp_path):
    program, x = step_with(logging()), jnp.ones(4)
    warm(program, x, 0)
    assert is_short(program, short, x, 1)
    with WATCHES[how](tmp_path) as watch:
        if how == "two listeners":
            for _ in range(2):
                watch.enter_context(events.subscribe(lambda _: None))
        assert not any(is_short(program, short, x, i) for i in range(2, 5))
    assert logged() == [[i, 4] for i in range(1, 5)]
    program(x, 5)
    assert is_short(program, short, x, 6), "nobody watches any more"
    assert logged() == [[5, 4], [6, 4]]


def test_the_first_call_that_is_recorded_is_recorded_as_a_whole(short, monkeypatch):
    monkeypatch.setattr(letting_in, "_SECONDS_APART", 0.02)
    wait_for_fragments()  # those that were observed before would be recorded when they end
    program, x = step_with(logging()), jnp.ones(4)
    warm(program, x, 0)

    def kinds():
        with record() as timeline:
            program(x, 1)
        return sorted(type(event).__name__ for event in timeline.events)

    found = kinds()
    assert {"ProgramStarted", "FragmentDispatched", "CallQueued", "CallFinished", "ProgramFinished"} <= {*found}
    for _ in range(20):  # as often as one likes
        assert kinds() == found
        for _ in range(2):
            program(x, 2)
    time.sleep(0.03)
    warm(program, x, 0)
    assert is_short(program, short, x, 1)


def test_while_listeners_come_and_go_each_execution_is_seen_as_a_whole_or_not_at_all():
    program, x = step_with(logging()), jnp.ones(4)
    warm(program, x, 0)
    seen, is_over = [], threading.Event()

    def watch():
        while not is_over.is_set():
            with events.subscribe(seen.append):
                is_over.wait(1e-3)
            is_over.wait(1e-3)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for i in range(1000):
        program(x, i)
    is_over.set()
    watcher.join()
    assert logged() == [[i, 4] for i in range(1000)]
    started = [event.execution for event in seen if isinstance(event, events.ProgramStarted)]
    dispatched = {event.execution for event in seen if isinstance(event, events.FragmentDispatched)}
    assert len(started) > 3, "it saw some"
    # A listener may end, or begin, in the middle of one.
    assert len({*started} - dispatched) <= len(started) / 2


@pytest.mark.parametrize("has_own", [True, False])
def test_a_program_whose_stream_is_entered_keeps_one_order(has_own, short):
    """Its calls, those that it puts on no stream, and those of the block are in one order then."""
    name = new_name()
    log = logging(name)
    other = colocated_python(note, out_specs_fn=lambda *_: None)

    def both(x):
        (log if has_own else other)(0, jnp.sum(x))
        other(1, jnp.sum(x))
        return x + 1

    program, x = pjit(both), jnp.ones(4)
    warm(program, x)
    assert is_short(program, short, x)
    logged()
    for _ in range(3):
        with colocated.stream(name):
            other(-1, x[0])
            assert is_short(program, short, x) != has_own
            log(2, x[0])
        assert logged() == [[-1, 1], [0, 4], [1, 4], [2, 1]]
    warm(program, x)
    assert is_short(program, short, x) != has_own


def test_a_stream_that_was_entered_before_is_known(short):
    name = new_name()
    with colocated.stream(name) as stream:
        pass
    program, x = step_with(logging(name)), jnp.ones(4)
    assert stream is as_stream(name)
    warm(program, x, 0)
    assert not is_short(program, short, x, 1)


@pytest.mark.parametrize("read", ["itself", "in a tree"])
def test_arguments_are_read_beside_static_ones_and_those_by_name(read, short):
    log = logging()

    @functools.partial(pjit, static_argnums=(0, 2), static_argnames="kind")
    def step(scale, x, shift, i, *, kind=None):
        log(i if read == "itself" else i["i"], jnp.sum(x))
        return x * scale + shift

    x = jnp.ones(4)
    for named in ({}, {"kind": "text"}):
        for i in range(WARM + 3):
            number = i if read == "itself" else {"i": i, "other": 7}
            assert step(2, x, 1, number, **named).tolist() == [3.0] * 4
        assert logged() == [[i, 4] for i in range(WARM + 3)]
    assert len(short) >= 4


def test_one_that_first_waits_for_what_it_was_given_back_gets_one_when_it_no_longer_does(short, monkeypatch):
    monkeypatch.setattr(cheapness, "_CHEAP_SECONDS", 2e-2)  # on a machine that does much else, too
    scalar = jax.ShapeDtypeStruct((), np.float32)
    next_number = colocated_python(lambda x: np.float32(x) + 1, out_specs=scalar)
    program = pjit(lambda x, tree: (x + 1, {"number": next_number(x + tree["number"])}), name="fed back")
    x, tree, kinds = jnp.float32(0), {"number": jnp.float32(0)}, []
    for _ in range(40):
        kinds.append(type(tree["number"]) is PendingArray)
        x, tree = program(x, tree)
    assert any(kinds), "no call was on a thread at first"
    assert short, "no call was made by its caller"
    assert (float(x), float(tree["number"])) == (40, sum(range(40)) + 40)


def test_results_are_checked_from_when_that_is_asked_for(short):
    program, x = step_with(logging()), jnp.ones(4)
    warm(program, x, 0)
    assert is_short(program, short, x, 1)
    bad = x.at[0].set(jnp.nan)
    for expected in (True, False):  # the first time only
        short.clear()
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
            program(bad, 2)
        assert bool(short) == expected
    with jax.debug_nans(True):
        assert program(x, 3).tolist() == [2.0] * 4
    program(x, 4)
    assert is_short(program, short, x, 5), "they are checked no more"
    assert [step for step, _ in logged()][-3:] == [3, 4, 5]


def test_calls_that_make_the_same_call_again_and_in_other_threads(short):
    def down(i, x):
        if i > 0:
            rendezvous.logs["down"].append(program(x, i - 1).tolist())

    step = step_with(colocated_python(down, arrays="numpy", mode="inline", out_specs_fn=lambda *_: None))

    def program(x, i):
        return step(np.full(4, x, np.float32), i)

    x = np.float32(4)
    for _ in range(WARM):
        program(x, 0)
    short.clear()
    threads = [threading.Thread(target=program, args=(x, 3)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(rendezvous.logs["down"]) == sorted([[17.0] * 4, [65.0] * 4, [257.0] * 4] * 3)
    assert short, "also inside of a call, or outside"


def test_one_that_is_no_longer_used_is_freed(short):
    class Model:
        pass

    def made():
        model, log = Model(), logging()

        def step(x):
            assert model is not None
            log(jnp.sum(x))
            return x + 1

        return pjit(step), weakref.ref(model)

    program, seen = made()
    warm(program, jnp.ones(4))
    assert is_short(program, short, jnp.ones(4))
    colocated.wait()
    del program
    gc.collect()
    assert seen() is None


# What C++ calls at the end of a call


def _calls_with_arguments(then):
    """A C++ function that has `then` called with its results and arguments at the end."""
    inner = jax.jit(lambda x: x + 1)
    x = jnp.float32(1)

    def learn(*args):
        traced = inner.trace(x)
        executable = traced.lower().compile()._executable
        own = dispatch.fast_path_data(executable, jax.tree.structure(0), [x], [inner(x)], traced.jaxpr, [])

        def go_on(results):
            return dispatch.then_with_arguments(results[0], then, results)

        return None, dispatch.fast_path_then(own, [True, False], go_on, is_at_once=True), False

    function = dispatch.make_cpp_function(learn, "f", learn, ((), ()), object())
    function(x, 0)
    return lambda number: function(x, number)


def _what_cpp_calls():
    return dispatch._end_of_call.get_local()


def test_the_function_gets_the_arguments_and_the_call_returns_the_result():
    seen = []
    call, outer = _calls_with_arguments(lambda *given: seen.append(given)), _what_cpp_calls()
    assert float(call(5)) == 2
    (((result,), (x, number), kwargs),) = seen
    assert (float(result), float(x), number, kwargs) == (2, 1, 5, {})
    assert _what_cpp_calls() is outer


def test_what_it_raises_the_call_raises():
    def fail(results, args, kwargs):
        if args[1] == 3:
            raise ValueError("three")

    call, outer = _calls_with_arguments(fail), _what_cpp_calls()
    with pytest.raises(ValueError, match="three"):
        call(3)
    assert _what_cpp_calls() is outer
    assert float(call(4)) == 2


def test_results_are_looked_at_as_well_where_that_is_asked_for():
    call = _calls_with_arguments(lambda *_: None)
    with jax.debug_nans(True):
        outer = _what_cpp_calls()
        assert float(call(1)) == 2
        assert _what_cpp_calls() is outer
        with pytest.raises(FloatingPointError):
            jax.jit(jnp.log)(-jnp.ones(2))


def test_another_call_in_between_is_left_alone():
    """As a finalizer makes it, or the call after one that an interrupt broke off."""
    seen = []
    other, outer = jax.jit(lambda x: x * 2), _what_cpp_calls()
    x = jnp.float32(3)
    other(x)
    dispatch.then_with_arguments(jnp.float32(0), lambda *given: seen.append(given), [])
    assert float(other(x)) == 6
    assert seen == []
    call = _calls_with_arguments(lambda *given: seen.append(given))
    assert float(call(5)) == 2
    assert len(seen) == 1
    assert _what_cpp_calls() is outer, "what was left behind is gone"
