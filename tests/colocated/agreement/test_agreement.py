"""Processes that agree, played by threads: what one does all do, and errors say what happened where."""

import collections
import contextlib
import itertools
import multiprocessing.connection
import os
import random
import re
import select
import socket
import threading
import time

import jax
import numpy as np
import pytest

from partjit import OtherProcessError, ProgramsDifferError, events
from partjit.colocated.agreement import coordinator, lines, participant, refusals
from partjit.colocated.agreement.participant import Participant
from partjit.colocated.agreement.plan_alone import PlanAgreement
from partjit.colocated.agreement.program import Agreement, Decider
from partjit.colocated.agreement.setup import agreement_of
from partjit.colocated.agreement.votes import Point, Refusal, Vote

SECONDS = 20.0


class Service(dict):
    """What the processes of a group share: texts by key."""

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self
        self[key] = value

    def key_value_try_get(self, key):
        if key not in self:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self[key]


@pytest.fixture
def group(monkeypatch):
    """Makes as many processes, each with an agreement on the same program."""
    monkeypatch.setattr(participant, "own_host", lambda: "127.0.0.1")

    def made(count, *, timeout=SECONDS, texts=None, last_node=None, deciders=None, kind=Agreement, here=None):
        service, processes = Service(), tuple(range(count))
        return [
            kind(
                Participant(service, k, 0, timeout),
                processes,
                "step",
                (texts or {}).get(k, "step"),
                last_node,
                timeout,
                deciders or {},
            )
            for k in here or processes
        ]

    return made


def outcomes(agreements, programs):
    """What the program of each process returns or raises."""
    results = [None] * len(agreements)

    def run(k):
        try:
            results[k] = agreements[k].run(programs[k], ())
        except BaseException as error:
            results[k] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(agreements))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("last_node", ["node 2", None])
def test_each_node_runs_in_all_processes_or_in_none(group, last_node):
    agreements, draw = group(3, last_node=last_node), random.Random(7)
    seen = collections.Counter()
    for _ in range(150):
        victim, at = draw.randrange(3), draw.randrange(-2, 4)
        ran = collections.Counter()

        def program(k, victim=victim, at=at, ran=ran):
            dispatch = [agreements[k].dispatching(f"node {i}", lambda i=i: ran.update([i])) for i in range(3)]
            for i in range(4):
                if victim == k and at == i:
                    raise LookupError(f"no space left at {at}")
                if i < 3:
                    dispatch[i]()
            return "done"

        found = outcomes(agreements, [lambda k=k: program(k) for k in range(3)])
        assert {*ran.values()} <= {3}
        is_after_all = at == 3 and last_node is not None  # an exception that concerns nobody else
        if at < 0:
            assert found == ["done"] * 3
        else:
            assert isinstance(found.pop(victim), LookupError)
            assert found == ["done"] * 2 if is_after_all else {*map(type, found)} == {OtherProcessError}
        assert len(ran) == (3 if at < 0 else at)
        seen[at] += 1
    assert min(seen[at] for at in range(-2, 4)) > 10


@pytest.mark.parametrize("last_node", ["node 3", None])
def test_what_is_dispatched_ahead_is_dispatched_by_all_in_one_order(group, last_node):
    agreements, draw = group(3, last_node=last_node), random.Random(11)
    seen = set()
    for _ in range(100):
        victims = {draw.randrange(3): draw.choice(["call", "dispatch", "interrupt", None]) for _ in range(2)}
        at, late = draw.randrange(4), draw.choice([0.0, 0.0, 0.01])
        order, calls = {k: [] for k in range(3)}, collections.Counter()

        def program(k, victims=victims, at=at, late=late, order=order, calls=calls):
            own, how = agreements[k], victims.get(k)

            def dispatch(i):
                if i == at and how == "dispatch":
                    raise LookupError("no memory left")
                order[k].append(i)

            def on_zeros(i):
                return None if i == 2 else lambda: order[k].append(i)

            run = [own.dispatching(f"node {i}", lambda i=i: dispatch(i), on_zeros(i)) for i in range(4)]
            for i in range(4):
                if i == at and how == "call":
                    raise LookupError("no space left")
                time.sleep(late * (k == 0))
                run[i]()
                if i == at and how == "interrupt":
                    raise KeyboardInterrupt
                own.calling([], lambda i=i: calls.update([i]) or ())()
            return "done"

        found = outcomes(agreements, [lambda k=k: program(k) for k in range(3)])
        kinds = {how for how in victims.values() if how}
        seen.add((at, *sorted(kinds)))
        if not kinds:
            assert found == ["done"] * 3
            assert order[0] == order[1] == order[2] == [0, 1, 2, 3]
            continue
        is_alone = at in (0, 2) and "dispatch" in kinds  # all were told to go on, and a process could not
        assert is_alone or order[0] == order[1] == order[2] == sorted(order[0])
        assert {*order[0]} <= {*range(at + 2)}
        assert all(calls[i] == 3 for i in range(at))
        assert not any(calls[i] for i in range(at + 1, 4))
        raised = {"call": LookupError, "dispatch": LookupError, "interrupt": KeyboardInterrupt, None: OtherProcessError}
        for k in range(3):
            is_over = kinds == {"interrupt"} and at == 3 and found[k] == "done"
            assert is_over or type(found[k]) in (OtherProcessError, raised[victims.get(k)])
        assert outcomes(agreements, [lambda: 1] * 3) == [1] * 3
    assert len(seen) > 20


def test_what_calls_without_results_raise_ends_the_next_program_in_all_processes(group):
    agreements, left = group(2, last_node="node"), []

    def raise_left():
        while left:
            raise left.pop()

    agreements[1]._raise_left = raise_left
    programs = [agreement.dispatching("node", lambda: 1) for agreement in agreements]
    assert outcomes(agreements, programs) == [1, 1]
    left.append(OSError("no space left"))
    other, own = outcomes(agreements, programs)
    assert isinstance(own, OSError)
    assert "process 1: OSError: no space left" in str(other)
    assert outcomes(agreements, programs) == [1, 1]


def test_the_error_says_what_happened_in_which_process(group):
    def fail():
        error = LookupError("no space left")
        error.add_note("This happened in the colocated call of 'save' made at train.py:12 in step")
        raise error

    agreements = group(2)
    own, other = outcomes(agreements, [fail, lambda: 1])
    assert isinstance(own, LookupError)
    assert str(other) == (
        "step ends on all of its processes: process 0: LookupError: no space left\n"
        "This happened in the colocated call of 'save' made at train.py:12 in step"
    )
    assert re.match(r"On process 0:\nTraceback .* in fail\n", other.__notes__[0], re.DOTALL)
    assert outcomes(agreements, [lambda: 1, lambda: 2]) == [1, 2]


def test_who_observes_a_program_sees_the_error_that_its_caller_gets(group):
    agreements = group(2)

    def observed(k):
        with events.span(events.ProgramStarted("step", k)):
            agreements[k].dispatching("node", lambda: 1 / 0)() if k else 1 / k

    seen = []
    with events.subscribe(seen.append):
        own, other = outcomes(agreements, [lambda k=k: observed(k) for k in range(2)])
    failed = {event.execution: event.error for event in seen if isinstance(event, events.ProgramFailed)}
    assert failed[0] == "ZeroDivisionError: division by zero"
    assert failed[1] == f"partjit.errors.OtherProcessError: {other}"
    assert isinstance(own, ZeroDivisionError)


def test_an_error_of_a_program_inside_of_another_is_one_of_both(group):
    agreements = group(2)

    def outer(k):
        return lambda: agreements[k].run(lambda: 1 / k, ())

    own, other = outcomes(agreements, [outer(0), outer(1)])
    assert isinstance(own, ZeroDivisionError)
    assert "ZeroDivisionError" in str(other)
    assert outcomes(agreements, [lambda: 1, lambda: 2]) == [1, 2]


def test_what_fails_before_a_program_begins_ends_it(group):
    agreements = group(2)
    agreements[1].fail(TypeError("x is no array"), agreements[1].begun)
    with pytest.raises(OtherProcessError, match="process 1: TypeError: x is no array"):
        agreements[0].run(lambda: 1, ())
    assert outcomes(agreements, [lambda: 1, lambda: 2]) == [1, 2]


@pytest.fixture
def refusing(monkeypatch):
    """Plays a process in what it says of calls that raised something before they began their programs."""
    monkeypatch.setattr(coordinator, "_REFUSAL_SECONDS", 0.02)
    last = collections.defaultdict(Refusal)

    @contextlib.contextmanager
    def playing(agreement, process):
        monkeypatch.setattr(refusals, "distributed_client", lambda: agreement._own.client)
        monkeypatch.setattr(refusals, "own_process", lambda: process)
        monkeypatch.setattr(refusals, "_last", last[process])
        yield refusals
        last[process] = refusals._last

    return playing


def test_who_waits_for_a_process_learns_what_it_raised_before_its_program_began(group, refusing):
    agreements = group(3)
    for k in range(3):
        assert outcomes(agreements, [lambda: 1] * 3) == [1] * 3
        if k:  # in process 0 it is the same
            with refusing(agreements[0], 2) as refusals:
                refusals.say("step", LookupError(f"no space left at {k}"))
            found = outcomes(agreements[:2], [lambda: 1] * 2)
            assert {*map(type, found)} == {OtherProcessError}
            assert str(found[k - 1]).endswith(f"all of its processes: process 2: LookupError: no space left at {k}")
            assert "On process 2:" in found[k - 1].__notes__[0]
    for seconds in (0.0, 0.2):  # it is of one call alone
        late = [lambda: 1, lambda: 2, lambda seconds=seconds: time.sleep(seconds) or 3]
        assert outcomes(agreements, late) == [1, 2, 3]


def test_who_has_not_begun_any_program_may_have_refused_the_first(group, refusing):
    own = group(2, here=[0])[0]
    with refusing(own, 1) as refusals:
        refusals.say("step", LookupError("no space left"))
    with pytest.raises(OtherProcessError, match="process 1: LookupError: no space left"):
        own.run(lambda: 1, ())


def test_a_process_that_comes_late_has_not_refused_the_program(group, refusing):
    agreements = group(2)

    def late():
        time.sleep(0.2)
        return "late"

    def go_on():
        assert outcomes(agreements, [lambda: 1, late]) == [1, "late"]

    go_on()
    with refusing(agreements[0], 1) as refusals:
        refusals.say("another step", LookupError())
    go_on()
    with refusing(agreements[0], 1) as refusals:
        refusals.say("step", LookupError())
        refusals.take_back()
    go_on()
    for k in range(2):  # what all have refused is nothing that one of them has alone
        with refusing(agreements[0], k) as refusals:
            refusals.say("step", LookupError())
    with refusing(agreements[0], 0) as refusals:
        refusals.take_back()
        refusals.say("step", LookupError())
        refusals.say("step", LookupError())
        refusals.take_back()
    go_on()


def test_who_does_not_come_is_named_and_nothing_is_agreed_any_more(group):
    agreements = group(2, timeout=0.2)
    text = "process 1: it did not come to the end of step within 0.2 s"
    with pytest.raises(OtherProcessError, match=text):
        agreements[0].run(lambda: 1, ())
    for agreement in agreements:
        with pytest.raises(OtherProcessError, match=text):  # and not that the other one did not come to this node
            agreement.run(agreement.dispatching("another node", lambda: 1), ())


def test_an_interrupt_while_it_waits_takes_a_vote_back(group, monkeypatch):
    agreements = group(3)
    own = agreements[0]._own
    make = own.pending

    class Interrupted:
        is_set = False

        def wait(self, deadline=None):
            while not agreements[1]._own._waiting:
                time.sleep(0.001)
            time.sleep(0.05)  # the other one's vote is there
            raise KeyboardInterrupt

    def pending_and_interrupted(cast, *actions):
        pending = make(cast, *actions)
        if cast.failure is None:
            pending.done, pending.finish = Interrupted(), lambda decision: None
        return pending

    monkeypatch.setattr(own, "pending", pending_and_interrupted)

    def fail_at_once(execution, error):
        execution.last = None
        Agreement._fail(agreements[0], execution, error)

    monkeypatch.setattr(agreements[0], "_fail", fail_at_once)
    interrupted, other = outcomes(agreements[:2], [lambda: 1, lambda: 2])  # the third one does not come
    assert isinstance(interrupted, KeyboardInterrupt)
    assert "process 0: KeyboardInterrupt" in str(other)
    monkeypatch.undo()
    with pytest.raises(OtherProcessError, match="process 0: KeyboardInterrupt"):  # it is not late, for it was decided
        agreements[2].run(lambda: 3, ())
    assert outcomes(agreements, [lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]


def test_different_programs_end_with_where_they_differ(group):
    texts = {k: f"step(x) -> y\n  fragment(x) -> y\n    y = {name} x" for k, name in enumerate(("sin", "cos"))}
    agreements = group(2, texts=texts)
    errors = outcomes(agreements, [lambda: 1, lambda: 2])
    assert {*map(type, errors)} == {ProgramsDifferError}
    assert str(errors[0]) == (
        "the processes are not at the same point of the same program: here it is the end of step, elsewhere\n"
        "  process 1: the end of step\n"
        "their plans first differ in fragment\n"
        "  here:      y = sin x\n"
        "  process 1: y = cos x\n"
        "every process has to call the same programs, in the same order and with arguments of the same types"
    )


def choosing(agreement, values):
    """A program that reads these values, and dispatches a fragment after all of them."""
    read = agreement.reading(lambda value: value, is_there=lambda _: True)
    dispatch = agreement.dispatching("fragment", lambda: len(values))
    call = agreement.calling(["count", "other"], lambda count: [np.int32(count), np.int32(agreement._own.process)])

    def program():
        for name, value in values:
            if name == "count":
                call(value)
            else:
                read(value, name)
        return dispatch()

    return program


DECIDERS = {
    "loop": Decider("the predicate of the while at train.py:12 in step"),
    "call loop": Decider("the predicate of the while at train.py:14 in step", agrees_at_once=True),
    "count": Decider("the result of the colocated call of 'count' made at train.py:15 in step"),
}


def test_processes_that_would_go_different_ways_do_not_go_on(group):
    agreements, draw = group(2, deciders=DECIDERS), random.Random(3)
    for _ in range(60):
        values = [(draw.choice([*DECIDERS]), draw.randrange(2)) for _ in range(draw.randrange(1, 5))]
        others, at = [*values], draw.randrange(len(values))
        is_same = draw.random() < 0.3
        if not is_same:
            others[at] = (values[at][0], 1 - values[at][1])
            others[at + 1 :] = others[at + 1 :] * draw.randrange(2)
        found = outcomes(agreements, [choosing(a, v) for a, v in zip(agreements, (values, others), strict=True)])
        if is_same:
            assert found == [len(values)] * 2
            continue
        assert {*map(type, found)} == {ProgramsDifferError}
        name, value = values[at]
        assert str(found[0]) == (
            f"the processes of step would go different ways: {DECIDERS[name].what} is\n"
            f"  process 0: {np.int32(value).item() if name == 'count' else value}\n  process 1: {1 - value}\n"
            "It has to be the same in every process: return it as an array sharded over the processes, and let the "
            "program reduce that, for example by jnp.any or jnp.max"
        )
        assert str(found[1]) == str(found[0])


def test_a_loop_of_calls_alone_ends_where_processes_differ(group):
    """In one process it would go on for ever, in the other it has ended."""
    agreements = group(2, deciders=DECIDERS)

    def program(k):
        read = agreements[k].reading(lambda value: value, is_there=lambda _: True)
        while read(k == 0, "call loop"):
            pass

    errors = outcomes(agreements, [lambda: program(0), lambda: program(1)])
    assert {*map(type, errors)} == {ProgramsDifferError}
    assert "the while at train.py:14 in step is\n  process 0: True\n  process 1: False" in str(errors[0])


def test_an_interrupt_after_the_end_of_a_program_is_of_this_process_alone(group):
    agreements = group(2)
    begun = []

    def interrupted_late(k):
        begun.append(agreements[k].begun)
        result = agreements[k].run(lambda: 1, ())
        if k == 0:
            agreements[k].fail(KeyboardInterrupt(), begun[0])
        return result

    assert outcomes(agreements, [lambda: interrupted_late(0), lambda: agreements[1].run(lambda: 1, ())]) == [1, 1]
    assert outcomes(agreements, [lambda: 1, lambda: 2]) == [1, 2]


def test_memory_is_given_up_in_all_processes_or_in_none(group):
    agreements = group(2)
    for fails, gone in (("before", []), ("after", [0, 1]), ("nowhere", [0, 1])):
        released = []

        def program(k, fails=fails, released=released):
            release = agreements[k].releasing(released.append)
            if fails == "before" and k == 0:
                raise LookupError("no space left")
            release(k)
            assert k not in released
            agreements[k].dispatching("fragment", lambda: released.index(k))()
            if fails == "after" and k == 0:
                raise LookupError("no space left")

        outcomes(agreements, [lambda: program(0), lambda: program(1)])
        assert sorted(released) == gone
    outcomes(agreements, [lambda: agreements[0].releasing(released.append)(7), lambda: 1])
    assert released[-1] == 7


def test_without_agreement_the_plan_is_the_same_and_nothing_else(group):
    agreements = group(2, kind=PlanAgreement)

    def fail():
        raise LookupError("no space left")

    own, other = outcomes(agreements, [fail, lambda: 1])
    assert isinstance(own, LookupError)
    assert other == 1
    agreements[0].fail(LookupError("no space left"), agreements[0].begun)
    assert outcomes(agreements, [lambda: 1, lambda: 2]) == [1, 2]
    assert agreements[0].run(lambda: 3, ()) == 3  # the other one does not come
    errors = outcomes(group(2, kind=PlanAgreement, texts={1: "another step"}), [lambda: 1, lambda: 2])
    assert {*map(type, errors)} == {ProgramsDifferError}


def test_without_agreement_what_fails_before_the_first_execution_ends_it(group):
    agreements = group(2, kind=PlanAgreement)
    agreements[1].fail(TypeError("x is no array"), agreements[1].begun)
    with pytest.raises(OtherProcessError, match="process 1: TypeError: x is no array"):
        agreements[0].run(lambda: 1, ())


def test_one_process_needs_no_agreement():
    assert agreement_of(jax.devices(), "step", lambda: "step") is None


class Elsewhere:
    """A device of another process."""

    process_index = 1


def test_agreement_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("PARTJIT_AGREEMENT", "off")
    assert agreement_of([*jax.devices(), Elsewhere()], "step", lambda: "step") is None
    monkeypatch.setenv("PARTJIT_AGREEMENT", "no")
    with pytest.raises(ValueError, match="PARTJIT_AGREEMENT must be 'on' or 'off', but is 'no'"):
        agreement_of([*jax.devices(), Elsewhere()], "step", lambda: "step")


def test_who_does_not_know_the_key_or_says_nothing_is_no_process(group):
    agreements = group(2)
    assert outcomes(agreements, [lambda: 1, lambda: 2]) == [1, 2]
    host, port, _ = agreements[0]._own.client["partjit/agreement/0"].split()
    with socket.create_connection((host, int(port))):
        with pytest.raises(multiprocessing.AuthenticationError):
            multiprocessing.connection.Client((host, int(port)), authkey=b"a guess")
        assert outcomes(agreements, [lambda: 1, lambda: 2]) == [1, 2]


@pytest.mark.parametrize("what", ["has ended", "nothing has been heard of it"])
def test_who_reads_what_devices_compute_learns_that_a_process_is_gone(group, what):
    """The others would never come to the collective that it reads the result of."""
    own = group(2, timeout=SECONDS if what == "has ended" else 0.4, here=[0])[0]
    read = own.reading(lambda value: value, is_there=lambda _: False)
    assert own._own.gone((0, 1)) is None
    wait_until(lambda: "partjit/agreement/0" in own._own.client)
    host, port, key = own._own.client["partjit/agreement/0"].split()
    other = multiprocessing.connection.Client((host, int(port)), authkey=key.encode())
    other.send(1)
    if what == "has ended":
        other.close()
    with pytest.raises(OtherProcessError, match=f"step ends on all of its processes: process 1: .*{what}"):
        own.run(lambda: read(0, "node"), ())
    other.close()


def test_who_has_ended_is_sent_nothing_more(group):
    """Its connection is closed, and the number of that one is soon the number of another."""
    own = group(2, timeout=SECONDS, here=[0])[0]
    wait_until(lambda: "partjit/agreement/0" in own._own.client)
    host, port, key = own._own.client["partjit/agreement/0"].split()
    other = multiprocessing.connection.Client((host, int(port)), authkey=key.encode())
    other.send(1)
    vote = Vote(0, 0, (0, 1), Point(0, own._digest, None, "step"), False, None)
    lines.Channel(other, SECONDS).send(vote)
    other.close()
    wait_until(lambda: own._own.gone((0, 1)))
    pairs = [socket.socketpair() for _ in range(8)]
    assert own.run(lambda: 1, ()) == 1  # for all have voted
    others = [*itertools.chain.from_iterable(pairs)]
    came, _, _ = select.select(others, [], [], 0)
    for one in others:
        one.close()
    assert not came


def test_votes_are_counted_when_somebody_waits_for_them(group, monkeypatch):
    """The first of two to vote wakes no thread; what it has voted is known when the other one comes, or is late."""
    agreements = group(2)
    own = agreements[0]._own
    assert outcomes(agreements, [lambda: 1, lambda: 2]) == [1, 2]
    left, coordinator = own._line._left, own._line._is_awaited.__self__
    woken = []
    monkeypatch.setattr(own._line, "wake", lambda wake=own._line.wake: woken.append(threading.get_ident()) or wake())
    callers = {}

    def has_voted(k):
        rounds = [one for history in [*coordinator._histories.values()] for one in [*history.rounds.values()]]
        return bool(left) if k == 0 else any(set(one.votes) == {1} for one in rounds)

    def program(k, first):
        callers[k] = threading.get_ident()
        if k != first:
            wait_until(lambda: has_voted(first))
        return k

    draw = random.Random(5)
    for first in [draw.randrange(2) for _ in range(8)]:
        woken.clear()
        found = outcomes(agreements, [lambda k=k, first=first: program(k, first) for k in range(2)])
        assert found == [0, 1]
        assert (callers[0] in woken) == (first == 1)
    coordinator._decide_by(lambda: left.append((Vote(99, 99, (0, 2), Point(0, "", None, ""), False, None), 0.0)))
    assert not left  # one that was left while another one was counted, which whoever left it could not see


def wait_until(is_there):
    deadline = time.monotonic() + SECONDS
    while not is_there():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_process_of_which_nothing_is_asked_is_heard_all_the_same(group):
    agreements = group(2, timeout=1.0)
    assert outcomes(agreements, [lambda: 1, lambda: 2]) == [1, 2]
    time.sleep(2.0)
    assert [agreement._own.gone((0, 1)) for agreement in agreements] == [None, None]
    assert outcomes(agreements, [lambda: 1, lambda: 2]) == [1, 2]


def test_a_process_whose_devices_hold_what_dispatches_is_heard_all_the_same(group):
    agreements = group(2, timeout=1.0)

    def program(k):
        agreements[k].dispatching("node 0", lambda: 1)()
        return agreements[k].dispatching("node 1", lambda: time.sleep(2.0) or "done", lambda: None)()

    assert outcomes(agreements, [lambda k=k: program(k) for k in range(2)]) == ["done", "done"]
    assert [agreement._own.gone((0, 1)) for agreement in agreements] == [None, None]


def test_who_is_held_as_another_process_is_gone_does_not_wait_for_the_devices(group):
    agreements, released = group(2), threading.Event()

    def held():
        agreements[0]._own._gone[1] = "it has ended"
        return released.wait(SECONDS)

    def program(k, dispatch):
        agreements[k].dispatching("node 0", lambda: 1)()
        try:
            return agreements[k].dispatching("node 1", dispatch, lambda: None)()
        finally:
            released.set()

    started = time.monotonic()
    own, _ = outcomes(agreements, [lambda: program(0, held), lambda: agreements[1].dispatching("node 0", lambda: 1)()])
    assert isinstance(own, OtherProcessError)
    assert str(own) == "step ends on all of its processes: process 1: it has ended"
    assert time.monotonic() - started < SECONDS / 2


@pytest.mark.parametrize("comes_last", [0, 1])  # another thread is held
def test_who_is_held_in_what_was_decided_learns_that_a_process_is_gone(group, monkeypatch, comes_last):
    connect, connections, released = participant.Client, [], threading.Event()
    monkeypatch.setattr(
        participant, "Client", lambda *to, **key: connections.append(connect(*to, **key)) or connections[0]
    )
    agreements = group(2)
    assert outcomes(agreements, [lambda: 1, lambda: 2]) == [1, 2]

    def held():
        with socket.socket(fileno=os.dup(connections[0].fileno())) as line_of_1:
            line_of_1.shutdown(socket.SHUT_RDWR)
        return released.wait(SECONDS)

    def program():
        time.sleep(0.05 * (comes_last == 0))
        try:
            return agreements[0].dispatching("node 0", held)()
        finally:
            released.set()

    def other():
        time.sleep(0.05 * (comes_last == 1))
        return agreements[1].dispatching("node 0", lambda: released.wait(SECONDS))()

    started = time.monotonic()
    own, _ = outcomes(agreements, [program, other])
    assert isinstance(own, OtherProcessError)
    assert str(own) == "step ends on all of its processes: process 1: it has ended"
    assert time.monotonic() - started < SECONDS / 2


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan"])
def test_the_timeout_has_to_be_a_number_of_seconds(monkeypatch, text):
    monkeypatch.setenv("PARTJIT_AGREEMENT_TIMEOUT", text)
    with pytest.raises(
        ValueError, match=f"PARTJIT_AGREEMENT_TIMEOUT must be a positive number of seconds, but is '{text}'"
    ):
        agreement_of([*jax.devices(), Elsewhere()], "step", lambda: "step")
