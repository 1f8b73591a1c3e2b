"""Lines between processes: messages arrive whole, once and in order, whatever interrupts who sends them."""

import collections
import multiprocessing.connection
import os
import random
import sys
import threading

import pytest

from partjit.colocated.agreement import lines, votes
from partjit.colocated.agreement.lines import Channel, Within
from partjit.colocated.agreement.votes import Decision, Gone, Join, Point, Report, Vote, to_bytes
from partjit.colocated.runtime import interrupts

SECONDS = 20.0
FILES = {lines.__file__, interrupts.__file__, votes.__file__}


def a_vote(number, plan=None):
    return Vote(number, 7, (0, 1), Point(number, "digest", f"node{number}", "program"), False, None, plan)


@pytest.fixture
def ends():
    """Both ends of a connection of this process to itself."""
    with multiprocessing.connection.Listener(("localhost", 0)) as listener:
        one = multiprocessing.connection.Client(listener.address)
        other = listener.accept()
    with one, other:
        yield one, other


def test_messages_arrive_whole_and_in_order_however_they_are_cut(ends):
    draw = random.Random(3)
    report = Report(1, "it failed", "lines")
    kinds = [
        lambda k: a_vote(k),
        lambda k: a_vote(k, "plan" * draw.randrange(50_000)),
        lambda k: Decision(k),
        lambda k: Decision(k, [report], [(1, Point(0, "d", None, "p"), "text")]),
        lambda k: Join(k, None),
        lambda k: Gone(k, "it has ended"),
        lambda k: None,
    ]
    said = [draw.choice(kinds)(k) for k in range(200)]
    data = b"".join(len(text := to_bytes(message)).to_bytes(4) + text for message in said)

    def write():
        at = 0
        while at < len(data):
            at += os.write(ends[0].fileno(), data[at : at + int(draw.choice([1, 3, 50, 4096, 10**6]))])

    threading.Thread(target=write, daemon=True).start()
    channel = Channel(ends[1], SECONDS)
    assert [channel.receive() for _ in said] == said
    assert not channel.has_news()


class Interruption:
    """A tracer that raises at one step of the code that sends."""

    def __init__(self, step):
        self.step, self.count = step, 0

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        self.count += 1
        if self.count == self.step:
            raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("is_within", [False, True])
def test_it_is_known_whether_a_message_was_sent_wherever_an_interrupt_came(ends, is_within):
    sender, receiver = Channel(ends[0], SECONDS), Channel(ends[1], SECONDS)
    left: collections.deque = collections.deque()
    send = Within(left, lambda: None, lambda _: True).tell_at_once if is_within else sender.send_at_once
    outcomes, step, is_interrupted = set(), 0, True
    while is_interrupted:
        step += 1
        sent, is_interrupted = [], False
        before = sys.gettrace()
        sys.settrace(Interruption(step))
        try:
            send(a_vote(step), sent)
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            sys.settrace(before)
        arrived = [vote.number for vote, _ in left] if is_within else []
        left.clear()
        arrived += [receiver.receive().number] if receiver.has_news() else []
        assert arrived == [step] * len(sent)
        outcomes.add((is_interrupted, bool(sent)))
    assert step > 20
    assert outcomes == {(True, False), (True, True), (False, True)}
    sender.send(a_vote(0))  # nothing is left locked
    assert receiver.receive() == a_vote(0)


def test_who_hears_nothing_for_too_long_is_told(ends):
    with pytest.raises(TimeoutError):
        Channel(ends[1], 0.01).receive()


def test_who_cannot_send_at_once_sends_nothing(ends):
    sender, receiver = Channel(ends[0], SECONDS), Channel(ends[1], SECONDS)
    sent = []
    assert not sender.send_at_once(a_vote(0, "plan" * 10_000), sent)  # for which there may be no room
    assert not sent

    large = a_vote(1, "x" * 3 * 10**7)  # more than there is room for: another thread is sending until it is read
    thread = threading.Thread(target=sender.send, args=(large,), daemon=True)
    thread.start()
    assert receiver._ready.poll(SECONDS * 1e3)
    assert not sender.send_at_once(a_vote(2), sent)
    assert not sent
    assert receiver.receive() == large
    thread.join(SECONDS)
    assert sender.send_at_once(a_vote(3), sent)
    assert sent
    assert receiver.receive() == a_vote(3)


def test_who_sends_to_one_that_has_ended_is_told(ends):
    sender = Channel(ends[0], SECONDS)
    ends[1].close()

    def send_until_told():
        for _ in range(3):  # the first ones are lost
            sender.send_at_once(a_vote(0), [])

    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        send_until_told()
    with pytest.raises(EOFError):
        sender.receive()
