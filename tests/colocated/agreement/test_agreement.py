"""Processes that agree, played by threads: what one does all do, and errors say what happened where."""

import collections
import dataclasses
import multiprocessing.connection
import random
import re
import socket
import threading
import time

import jax
import pytest

from partjit import OtherProcessError, ProgramsDifferError
from partjit.colocated.agreement import participant
from partjit.colocated.agreement.participant import Participant
from partjit.colocated.agreement.program import Agreement, agreement_of

SECONDS = 20.0


class Service(dict):
    """What the processes of a group share: texts by key."""

    key_value_set = dict.__setitem__

    def key_value_try_get(self, key):
        if key not in self:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self[key]


@pytest.fixture
def group(monkeypatch):
    """Makes as many processes, each with an agreement on the same program."""
    monkeypatch.setattr(participant, "own_host", lambda: "127.0.0.1")

    def made(count, *, timeout=SECONDS, texts=None, last_node=None):
        service, processes = Service(), tuple(range(count))
        return [
            Agreement(
                Participant(service, k, 0, timeout), processes, "step", (texts or {}).get(k, "step"), last_node, timeout
            )
            for k in processes
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
    agreements[1].fail(TypeError("x is no array"))
    with pytest.raises(OtherProcessError, match="process 1: TypeError: x is no array"):
        agreements[0].run(lambda: 1, ())
    assert outcomes(agreements, [lambda: 1, lambda: 2]) == [1, 2]


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
    vote = own.vote

    class Interrupted:
        def wait(self, deadline=None):
            while not agreements[1]._own._waiting:
                time.sleep(0.001)
            time.sleep(0.05)  # the other one's vote is there
            raise KeyboardInterrupt

    def vote_and_be_interrupted(cast, action=None):
        pending = vote(cast, action)
        if cast.failure is None:
            pending.done, pending.finish = Interrupted(), lambda decision: None
        return pending

    monkeypatch.setattr(own, "vote", vote_and_be_interrupted)
    monkeypatch.setattr(
        agreements[0],
        "_fail",
        lambda execution, error: Agreement._fail(agreements[0], dataclasses.replace(execution, last=None), error),
    )
    interrupted, other = outcomes(agreements[:2], [lambda: 1, lambda: 2])  # the third one does not come
    assert isinstance(interrupted, KeyboardInterrupt)
    assert "process 0: KeyboardInterrupt" in str(other)
    monkeypatch.undo()
    with pytest.raises(OtherProcessError, match="process 0: KeyboardInterrupt"):  # it is not late, for it was decided
        agreements[2].run(lambda: 3, ())
    assert outcomes(agreements, [lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]


def test_different_programs_end_with_where_they_differ(group):
    texts = {0: "step\n  save(x) at train.py:12", 1: "step\n  save(x) at train.py:14"}
    agreements = group(2, texts=texts)
    errors = outcomes(agreements, [lambda: 1, lambda: 2])
    assert {*map(type, errors)} == {ProgramsDifferError}
    assert str(errors[0]) == (
        "the processes are not at the same point of the same program: here it is the end of step, elsewhere\n"
        "  process 1: the end of step\n"
        "their plans first differ in\n"
        "  here:      save(x) at train.py:12\n"
        "  process 1: save(x) at train.py:14\n"
        "every process has to call the same programs, in the same order and with arguments of the same types"
    )


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


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan"])
def test_the_timeout_has_to_be_a_number_of_seconds(monkeypatch, text):
    monkeypatch.setenv("PARTJIT_AGREEMENT_TIMEOUT", text)
    with pytest.raises(
        ValueError, match=f"PARTJIT_AGREEMENT_TIMEOUT must be a positive number of seconds, but is '{text}'"
    ):
        agreement_of([*jax.devices(), Elsewhere()], "step", lambda: "step")
