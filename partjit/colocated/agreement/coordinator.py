"""The coordinator of processes that agree: it decides when all have voted, when one fails or ends, or when it is late.

The votes of a process are counted: its first one meets the first ones of the others of its group, and so on. Processes
that run the same programs in the same order, as JAX demands of them, meet at the same points; where they do not, all of
them learn it.
"""

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge

from partjit.colocated.agreement.lines import Channel
from partjit.colocated.agreement.votes import Choice, Decision, Gone, Join, Message, Point, Report, Vote

__all__ = ["BEATS", "Coordinator"]

_Group = tuple[int, ...]

BEATS = 4
"""How often a process is heard at least within the time after which it is late."""


@dataclasses.dataclass(eq=False)
class _Round:
    """The votes that meet each other.

    Attributes:
        votes: those that were given, by process.
        deadline: when those that are missing are late, in seconds of `time.monotonic`.
        failures: why it was decided that none goes on.
        choices: those that differ, if that is why.
        is_decided: whether it was decided.
        joining: the numbers of the failures of processes that came to it with one.
    """

    votes: dict[int, Vote]
    deadline: float
    failures: list[Report] = dataclasses.field(default_factory=list)
    choices: Sequence[tuple[int, Choice]] = ()
    is_decided: bool = False
    joining: dict[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class _History:
    """The rounds of a group.

    Attributes:
        rounds: those in which a vote is missing, by their numbers.
        last: the last round of each process.
        count: how many votes each process has given.
        lost: why the group cannot agree any more: a process has ended, or did not come.
    """

    rounds: dict[int, _Round] = dataclasses.field(default_factory=dict)
    last: dict[int, _Round] = dataclasses.field(default_factory=dict)
    count: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    lost: list[Report] = dataclasses.field(default_factory=list)


class Coordinator:
    """Decides for groups of processes, on threads of the process that it is in.

    Args:
        host: the address of this machine for the others.
        key: what connections have to know.
        timeout: seconds after which a missing vote is late, and a process of which nothing is heard is given up.
    """

    def __init__(self, host: str, key: bytes, timeout: float) -> None:
        self._timeout = timeout
        self._key = key
        self._listener = Listener((host, 0), backlog=1024)
        self._deciding = threading.RLock()
        self._senders: dict[int, Callable[[Message], None]] = {}
        self._gone: dict[int, str] = {}
        self._histories: dict[_Group, _History] = collections.defaultdict(_History)
        self._plans: dict[str, str] = {}
        for target in (self._accept, self._watch_deadlines):
            threading.Thread(target=target, daemon=True, name=f"partjit-agreement{target.__name__}").start()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._listener.address[1])

    def enter(self, process: int, send: Callable[[Message], None]) -> None:
        """Takes in a process, with what sends it messages."""
        with self._deciding:
            self._senders[process] = send
            for gone in self._gone.items():
                self._send(process, Gone(*gone))

    def hear(self, process: int, vote: Vote) -> None:
        """Counts the vote of a process."""
        with self._deciding:
            self._count(process, vote)

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # whoever it was has gone
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        # Not by the listener, which would wait for this one and take no others meanwhile.
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            process = connection.recv()
        except (AuthenticationError, EOFError, OSError):  # not one of ours
            connection.close()
            return
        channel = Channel(connection, self._timeout)
        self.enter(process, channel.send)
        try:
            while True:
                vote = channel.receive()
                if isinstance(vote, Vote):
                    self.hear(process, vote)
                else:  # it wants to hear something
                    with self._deciding:
                        self._send(process, None)
        except TimeoutError:
            why = f"nothing has been heard of it for {self._timeout:g} s"
        except (EOFError, OSError):
            why = "it has ended"
        with self._deciding:
            self._gone[process] = why
            for group, history in self._histories.items():
                for round_ in [*history.rounds.values()] if process in group else ():
                    self._decide(group, round_)
            for other in self._senders.keys() - self._gone.keys():
                self._send(other, Gone(process, why))
        connection.close()  # if it goes on, it learns that nobody agrees with it any more

    def _count(self, process: int, vote: Vote) -> None:
        group, history = vote.group, self._histories[vote.group]
        if vote.plan is not None:
            self._plans[vote.point.digest] = vote.plan
        if history.lost:
            self._answer(process, vote, history.lost)
            self._send(process, Join(vote.number, None))
            return
        last = history.last.get(process)
        if vote.failure is not None and last is not None and last.votes[process].execution == vote.execution:
            if not last.is_decided or last.failures:  # none goes on
                last.votes[process] = last.votes[process]._replace(failure=vote.failure)
                self._send(process, Join(vote.number, None))
                self._decide(group, last)
                return
            if last.votes[process].is_last:  # it has ended, for all
                self._send(process, Join(vote.number, None))
                return
        number = history.count[process]
        history.count[process] += 1
        round_ = history.rounds.get(number)
        if round_ is None:
            round_ = history.rounds[number] = _Round({}, time.monotonic() + self._timeout)
        round_.votes[process] = vote
        history.last[process] = round_
        if vote.failure is not None:
            round_.joining[process] = vote.number
        if round_.is_decided:
            self._answer(process, vote, round_.failures, round_)
        else:
            self._decide(group, round_)
        if len(round_.votes) == len(group):
            del history.rounds[number]
            self._let_join(round_)

    def _let_join(self, round_: _Round) -> None:
        """Tells those that failed what all others have dispatched by now."""
        votes = round_.votes.values()
        ahead = next((vote.point.node for vote in votes if vote.is_ahead and vote.point.node is not None), None)
        for process, number in round_.joining.items():
            self._send(process, Join(number, None if round_.votes[process].is_ahead else ahead))

    def _decide(self, group: _Group, round_: _Round, *, is_late: bool = False) -> None:
        """Decides a round, if it can be decided."""
        if round_.is_decided:
            return
        votes = round_.votes
        missing = [process for process in group if process not in votes]
        lost = self._lost_in(round_, missing, is_late=is_late) if missing and (is_late or self._gone) else []
        failures = [vote.failure for vote in votes.values() if vote.failure is not None] or lost
        if not failures:
            round_.choices = _different_choices(votes)
        if not failures and (round_.choices or len({vote.point for vote in votes.values()}) > 1):
            failures = [Report(p, f"it is at {vote.point}", "") for p, vote in votes.items()]
        if missing and not failures:
            return
        self._histories[group].lost += lost
        round_.failures = failures
        round_.is_decided = True
        for process in sorted(votes, reverse=True):  # this one, the lowest, may end when it knows
            self._answer(process, votes[process], failures, round_)

    def _lost_in(self, round_: _Round, missing: Sequence[int], *, is_late: bool) -> list[Report]:
        """Which processes will not come to a round, and why."""
        somewhere = next(iter(round_.votes.values())).point
        gone = self._gone
        lost = [Report(p, f"{gone[p]} and it did not come to {somewhere}", "") for p in missing if p in gone]
        if is_late and not lost:
            lost = [Report(p, f"it did not come to {somewhere} within {self._timeout:g} s", "") for p in missing]
        return lost

    def _answer(self, process: int, vote: Vote, failures: Sequence[Report], round_: _Round | None = None) -> None:
        others: list[tuple[int, Point, str]] = []
        if failures and round_ is not None:
            others = [
                (p, other.point, self._plans.get(other.point.digest, ""))
                for p, other in round_.votes.items()
                if other.failure is None and other.point != vote.point
            ]
        self._send(process, Decision(vote.number, failures, others, round_.choices if round_ else ()))

    def _send(self, process: int, message: Message) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._senders[process](message)

    def _watch_deadlines(self) -> None:
        while True:
            with self._deciding:
                open_ = [
                    (round_.deadline, group, round_)
                    for group, history in self._histories.items()
                    for round_ in history.rounds.values()
                    if not round_.is_decided
                ]
                now = time.monotonic()
                for deadline, group, round_ in open_:
                    if deadline <= now:
                        self._decide(group, round_, is_late=True)
                later = [deadline - now for deadline, _, _ in open_ if deadline > now]
            # Rounds that begin meanwhile have later deadlines, so none has to wake this thread.
            time.sleep(min(later, default=self._timeout))


def _different_choices(votes: Mapping[int, Vote]) -> Sequence[tuple[int, Choice]]:
    """The first choices that differ between processes that run the same program; none if all are the same."""
    count = max(len(vote.choices) for vote in votes.values())
    if not count or len({(vote.point.begun, vote.point.digest) for vote in votes.values()}) > 1:
        return ()
    for i in range(count):
        made = [(process, vote.choices[i]) for process, vote in sorted(votes.items()) if i < len(vote.choices)]
        if len({choice for _, choice in made}) > 1:
            return made
    return ()
