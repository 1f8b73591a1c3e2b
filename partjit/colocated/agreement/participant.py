"""A process that agrees with others: it votes, and does what was decided, on threads that no signal interrupts.

What is agreed on is done here as well, and not in the thread that asked: an interrupt there may come at any moment, and
would leave this process without what the others do.
"""

import collections
import contextlib
import itertools
import queue
import secrets
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from multiprocessing.connection import Client
from typing import Any

import jax

from partjit._jax.processes import DistributedRuntimeClient, distributed_client, own_host, published
from partjit.colocated.agreement.coordinator import BEATS, LISTEN_SECONDS, Coordinator
from partjit.colocated.agreement.lines import Channel, Line, Remote
from partjit.colocated.agreement.refusals import refusal_of
from partjit.colocated.agreement.votes import Decision, Gone, Join, Message, Vote
from partjit.colocated.runtime.interrupts import Flag

__all__ = ["Participant", "Pending", "gone", "participant"]


class Pending:
    """A vote that is not decided yet.

    Attributes:
        vote: the vote.
        action: what is done if all agree, or ahead of the vote; None if nothing is.
        instead: what is done ahead if the action raises something; None if nothing is.
        acted: set when it has been done, or when it will not be.
        done: set when nothing is left to be done, or to be decided.
        decision: what was decided; None if nothing can be.
        result: what the action returned.
        is_under_way: whether the action has been done, or what is done instead.
        sent: has an item when the vote has been sent.
        error: what it raised.
        lost: why nothing can be decided.
    """

    def __init__(
        self, vote: Vote, action: Callable[[], Any] | None, instead: Callable[[], object] | None = None
    ) -> None:
        self.vote = vote
        self.action = action
        self.instead = instead
        self.acted = Flag()
        self.done = Flag()
        self.decision: Decision | None = None
        self.result: Any = None
        self.is_under_way = False
        self.sent: list[object] = []
        self.error: BaseException | None = None
        self.lost: BaseException | None = None

    def act(self, is_going_on: bool = True) -> None:
        """Does what all do, or gives it up."""
        action, instead = self.action, self.instead
        self.action = self.instead = None
        if action is not None and is_going_on:
            try:
                self.result = action()
                self.is_under_way = True
            except BaseException as error:
                self.error = error
                self.is_under_way = isinstance(error, jax.errors.JaxRuntimeError)  # raised by what was dispatched
                if instead is not None and not self.is_under_way:
                    with contextlib.suppress(Exception):  # the first one is raised
                        instead()
                        self.is_under_way = True
        self.acted.set()

    def finish(self, decision: Decision) -> None:
        """Does what was decided."""
        self.decision = decision
        if not self.vote.is_ahead:
            self.act(not decision.failures)
        self.done.set()

    def fail(self, lost: BaseException) -> None:
        """Gives up what cannot be decided any more."""
        self.lost = lost
        if not self.vote.is_ahead:
            self.act(False)
        self.done.set()


class PendingFailure(Pending):
    """A failure that the others have not all come to yet.

    Attributes:
        left: set when it has been sent, and it is known whether the last vote was.

    Args:
        vote: the vote that says so.
        join: dispatches, by its name, what the others have dispatched; None if they wait for each other.
        last: the last vote of the execution.
    """

    def __init__(self, vote: Vote, join: Callable[[str], Any] | None, last: Pending | None) -> None:
        super().__init__(vote, None)
        self.left = Flag()
        self._join = join
        self._last = last

    @property
    def has_dispatched(self) -> bool:
        """Whether the execution has dispatched what the others dispatch next."""
        return self._last is not None and self._last.is_under_way and not self._last.sent

    @property
    def unsent(self) -> Pending | None:
        """The last vote of the execution, if an interrupt came before it was sent."""
        last = self._last
        return None if last is None or last.sent or last.acted.is_set else last

    def join(self, node: str | None) -> None:
        """Takes part in what the others have dispatched."""
        join = self._join
        if node is not None and join is not None:
            self.action = lambda: join(node)
        self.act()
        self.done.set()


class Participant:
    """This process among those of which one, the leader, has the coordinator.

    Args:
        client: of the service that the processes share, over which they find the coordinator.
        process: the number of this process.
        leader: the process that has it.
        timeout: seconds within which the coordinator has to be there, and within which it hears of this process.

    Attributes:
        new_number: gives numbers to votes.
    """

    def __init__(self, client: DistributedRuntimeClient, process: int, leader: int, timeout: float) -> None:
        self.client = client
        self.process = process
        self._leader = leader
        self._timeout = timeout
        self.new_number = itertools.count().__next__
        self._executions = itertools.count()
        self._begun: dict[tuple[int, ...], int] = {}
        self._line: Line | None = None
        self._unsent: collections.deque[Pending] = collections.deque()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # the thread that sends what is there
        self._waiting: dict[int, Pending] = {}
        self._lost: BaseException | None = None
        self._gone: dict[int, str] = {}
        self._hearing = threading.Lock()  # of threads that no signal interrupts
        self._decided: collections.deque[Decision | Join] = collections.deque()  # and not done yet
        self._acting = threading.Lock()
        threading.Thread(target=self._work, daemon=True, name="partjit-agreement-votes").start()

    def begin(self, group: tuple[int, ...]) -> tuple[int, int]:
        """The number of an execution that begins, here, and since the last one of the group that was ended."""
        count = self._begun.get(group, 0)
        self._begun[group] = count + 1
        return next(self._executions), count

    def ended(self, group: tuple[int, ...]) -> None:
        """Notes that an execution was ended in all processes of the group."""
        self._begun.pop(group, None)

    def gone(self, group: tuple[int, ...]) -> str | None:
        """Which process of a group cannot agree any more, and why; None as far as is known."""
        if self._lost is not None:
            return str(self._lost)
        return next((f"process {process}: {why}" for process, why in [*self._gone.items()] if process in group), None)

    def pending(
        self, vote: Vote, action: Callable[[], Any] | None = None, instead: Callable[[], object] | None = None
    ) -> Pending:
        """A vote that is not sent yet."""
        return Pending(vote, action, instead)

    def pending_failure(
        self, vote: Vote, join: Callable[[str], Any] | None = None, last: Pending | None = None
    ) -> PendingFailure:
        """A failure that is not sent yet; see `PendingFailure`."""
        return PendingFailure(vote, join, last)

    def send(self, pending: Pending) -> None:
        """Sends a vote, and returns at once.

        A vote that nothing is done ahead of is sent by this thread if all before it have been, which wakes no other.
        """
        line, vote = self._line, pending.vote
        is_plain = not (vote.is_ahead or vote.failure is not None)
        if line is not None and is_plain and not self._unsent:
            self._waiting[vote.number] = pending
            if line.tell_at_once(vote, pending.sent):
                if self._lost is not None:  # and this vote may not have been given up with those before
                    self._wakes.put(None)
                return
        self._unsent.append(pending)
        self._wakes.put(None)

    def _work(self) -> None:
        """Sends votes that their threads do not send."""
        try:
            line = self._connected()
        except Exception as error:
            self._lost = error
        else:
            is_leader = self.process == self._leader
            for target in (self._receive,) if is_leader else (self._receive, self._beat):
                threading.Thread(target=target, args=(line,), daemon=True).start()
            self._line = line
        while True:
            self._wakes.get()
            while self._unsent:
                self._send(self._unsent[0])
                self._unsent.popleft()
            if self._lost is not None:
                self._give_up(self._lost)

    def _send(self, pending: Pending) -> None:
        vote = pending.vote
        if isinstance(pending, PendingFailure):
            unsent = pending.unsent
            if unsent is not None:
                self._waiting.pop(unsent.vote.number, None)
                unsent.act(False)
                unsent.done.set()
            vote = vote._replace(is_ahead=pending.has_dispatched)
        elif vote.is_ahead:
            pending.act(self._lost is None)
            if pending.error is not None:  # the program fails
                pending.done.set()
                return
        self._waiting[vote.number] = pending
        pending.sent.append(1)
        if self._line is not None:
            self._line.tell(vote)
        if isinstance(pending, PendingFailure):
            pending.left.set()

    def _beat(self, line: Line) -> None:
        """Lets both ends hear of each other, whatever this process does meanwhile, and hears in place of `_receive`.

        Devices may hold what dispatches until all processes take part, and one of them may be gone.
        """
        next_beat = time.monotonic()
        while self._lost is None:
            now = time.monotonic()
            if now >= next_beat:
                line.tell(None)
                next_beat = now + self._timeout / BEATS
            time.sleep(min(LISTEN_SECONDS, next_beat - now))
            if self._hearing.acquire(blocking=False):  # what was heard last is being done
                try:
                    while self._lost is None and line.has_news():
                        self._hear(line)
                finally:
                    self._hearing.release()

    def _receive(self, line: Line) -> None:
        """Does what is decided."""
        while self._lost is None or self._decided:
            with self._hearing:
                if not self._decided or self._acting.locked():
                    self._hear(line)
            self._act()

    def _hear(self, line: Line) -> None:
        """Waits for the next message."""
        try:
            message = line.hear()
        except (EOFError, OSError) as error:
            is_silent = isinstance(error, TimeoutError)
            what = f"does not answer for {self._timeout:g} s" if is_silent else "has ended"
            self._lost = ConnectionError(f"process {self._leader}, which coordinates, {what}")
            self._give_up(self._lost)
            return
        self._take(message)

    def _take(self, message: Message) -> None:
        """Notes what the coordinator says; what was decided is done later."""
        if isinstance(message, Gone):
            self._gone[message.process] = message.why
        elif isinstance(message, Decision | Join):
            self._decided.append(message)

    def _act(self) -> None:
        """Does what was decided, in that order, unless another thread is about to."""
        while self._decided and self._acting.acquire(blocking=False):
            try:
                if self._decided:
                    self._act_on(self._decided[0])
            finally:
                self._acting.release()

    def _act_on(self, message: Decision | Join) -> None:
        """Does what was decided first."""
        is_early = isinstance(message, Decision) and isinstance(self._waiting.get(message.number), PendingFailure)
        # None if it was given up; others may not have come to a failure yet.
        pending = None if is_early else self._waiting.pop(message.number, None)
        self._decided.popleft()  # from here on it is not given up
        if isinstance(pending, PendingFailure) and isinstance(message, Join):
            pending.join(message.node)
        elif pending is not None and isinstance(message, Decision):
            pending.finish(message)

    def _give_up(self, error: BaseException) -> None:
        """Ends what is not decided."""
        decided = {message.number for message in [*self._decided]}
        for number in self._waiting.keys() - decided:
            pending = self._waiting.pop(number, None)
            if pending is not None:
                pending.fail(error)

    def _connected(self) -> Line:
        key = f"partjit/agreement/{self._leader}"
        if self.process == self._leader:
            secret = secrets.token_hex(16)
            host = own_host()
            coordinator = Coordinator(
                host,
                secret.encode(),
                self._timeout,
                self.process,
                self._take,
                self._act,
                partial(refusal_of, self.client),
            )
            self.client.key_value_set(key, f"{host} {coordinator.port} {secret}")
            return coordinator.line
        host, port, secret = self._published(key).split()
        connection = Client((host, int(port)), authkey=secret.encode())
        connection.send(self.process)
        return Remote(Channel(connection, self._timeout))

    def _published(self, key: str) -> str:
        try:
            return published(self.client, key, time.monotonic() + self._timeout)
        except TimeoutError:
            text = f"process {self._leader} has not called it within {self._timeout:g} s"
            raise TimeoutError(text) from None


_changes = threading.Lock()
_participants: dict[int, Participant] = {}


def gone(group: Collection[int]) -> str | None:
    """Which process of a group is gone, as far as those that have agreed on something here know; None if none is."""
    known = (participant.gone(tuple(group)) for participant in [*_participants.values()])
    return next((found for found in known if found is not None), None)


def participant(leader: int, timeout: float) -> Participant | None:
    """This process among those that a leader coordinates; None if they share no service."""
    client = distributed_client()
    if client is None:
        return None
    with _changes:
        found = _participants.get(leader)
        if found is None or found.client is not client:
            found = _participants[leader] = Participant(client, jax.process_index(), leader, timeout)
        return found
