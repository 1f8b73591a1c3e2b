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
from typing import Any

from partjit.colocated.agreement.differences import different_part
from partjit.colocated.agreement.lines import Channel, Within
from partjit.colocated.agreement.votes import Choice, Decision, Gone, Join, Message, Point, Refusal, Report, Vote

__all__ = ["BEATS", "LISTEN_SECONDS", "Coordinator"]

_Group = tuple[int, ...]

BEATS = 4
"""How often a process is heard at least within the time after which it is late."""
_REFUSAL_SECONDS = 1.0
"""Between two looks at what processes that are awaited have refused; it has to be there at both of them."""
LISTEN_SECONDS = 0.25
"""Between two times at which another thread listens in place of one that does what was decided."""


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
        unaware: what a process has counted too many as begun since a program was ended that it had refused.
        count: how many votes each process has given.
        lost: why the group cannot agree any more: a process has ended, or did not come.
    """

    rounds: dict[int, _Round] = dataclasses.field(default_factory=dict)
    last: dict[int, _Round] = dataclasses.field(default_factory=dict)
    unaware: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    count: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    lost: list[Report] = dataclasses.field(default_factory=list)


class _Remote:
    """Another process.

    Attributes:
        process: its number.
        channel: to it.
        hearing: held by who hears what comes.
        is_there: whether it can still be heard.
    """

    def __init__(self, process: int, channel: Channel) -> None:
        self.process = process
        self.channel = channel
        self.hearing = threading.Lock()
        self.is_there = True


class Coordinator:
    """Decides for groups of processes, on threads of the process that it is in, which is one of each group.

    What was decided is done here by the thread that has heard the last vote, for waking another one takes longer than
    deciding. While it is held by that, another thread listens in its place.

    Args:
        host: the address of this machine for the others.
        key: what connections have to know.
        timeout: seconds after which a missing vote is late, and a process of which nothing is heard is given up.
        process: the number of this process.
        take: takes what this process is sent.
        act: does what it has taken, unless another thread is about to.
        refusal_of: what a call raised last in a process before it began its program.

    Attributes:
        line: the line of this process.
    """

    def __init__(
        self,
        host: str,
        key: bytes,
        timeout: float,
        process: int,
        take: Callable[[Message], object],
        act: Callable[[], object],
        refusal_of: Callable[[int], Refusal],
    ) -> None:
        self._timeout = timeout
        self._key = key
        self._process = process
        self._act = act
        self._listener = Listener((host, 0), backlog=1024)
        self._deciding = threading.Lock()
        self._senders: dict[int, Callable[[Message], object]] = {process: take}
        self._remotes: list[_Remote] = []
        self._gone: dict[int, str] = {}
        self._histories: dict[_Group, _History] = collections.defaultdict(_History)
        self._plans: dict[str, str] = {}
        self._refusal_of = refusal_of
        self._refused: collections.Counter[int] = collections.Counter()
        self._left: collections.deque[tuple[Vote, float]] = collections.deque()
        self.line = Within(self._left, lambda: self._decide_by(lambda: None), self._is_awaited)
        for target in (self._accept, self._watch, self._look_for_refusals):
            threading.Thread(target=target, daemon=True, name=f"partjit-agreement{target.__name__}").start()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._listener.address[1])

    def _is_awaited(self, group: _Group) -> bool:
        """Whether a vote that this process has just left has to be counted now.

        If not, it is counted with the next one of another process, which looks for it when its own has been counted.
        """
        if self._gone or len(self._left) > 1:
            return True
        history = self._histories.get(group)
        if history is None:
            return False
        rounds = [*history.rounds.values()]
        return bool(history.lost) or any(round_.is_decided or len(round_.votes) + 1 == len(group) for round_ in rounds)

    def _decide_by(self, hear: Callable[..., None], *heard: Any) -> None:
        """Hears something, and decides what can be decided by it and by what this process has left."""
        with self._deciding:
            self._count_left()
            hear(*heard)
            self._count_left()

    def _count_left(self) -> None:
        while self._left:
            self._count(self._process, *self._left.popleft())

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
        remote = _Remote(process, Channel(connection, self._timeout))
        self._decide_by(self._enter, remote)
        while remote.is_there:
            with remote.hearing:
                if remote.is_there:
                    self._hear(remote)
            self._act()

    def _enter(self, remote: _Remote) -> None:
        self._senders[remote.process] = remote.channel.send
        self._remotes.append(remote)
        for gone in self._gone.items():
            self._send(remote.process, Gone(*gone))

    def _hear(self, remote: _Remote) -> None:
        """Waits for the next vote of another process, and counts it."""
        try:
            vote = remote.channel.receive()
        except TimeoutError:
            self._decide_by(self._leave, remote, f"nothing has been heard of it for {self._timeout:g} s")
        except (EOFError, OSError):
            self._decide_by(self._leave, remote, "it has ended")
        else:
            if isinstance(vote, Vote):
                self._decide_by(self._count, remote.process, vote, time.monotonic())
            else:  # it wants to hear something
                self._decide_by(self._send, remote.process, None)

    def _leave(self, remote: _Remote, why: str) -> None:
        remote.is_there = False
        self._remotes.remove(remote)
        self._senders[remote.process] = lambda _: None  # what is sent would go to the next file of this descriptor
        remote.channel.close()  # if it goes on, it learns that nobody agrees with it any more
        self._gone[remote.process] = why
        for group, history in self._histories.items():
            for round_ in [*history.rounds.values()] if remote.process in group else ():
                self._decide(group, round_)
        for other in self._senders.keys() - self._gone.keys():
            self._send(other, Gone(remote.process, why))

    def _count(self, process: int, vote: Vote, came: float) -> None:
        group, history = vote.group, self._histories[vote.group]
        if unaware := history.unaware[process]:
            begun = vote.point.begun - unaware
            if begun < 0:  # since then one was ended in this process as well
                history.unaware[process] = 0
            else:
                vote = vote._replace(point=vote.point._replace(begun=begun))
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
            round_ = history.rounds[number] = _Round({}, came + self._timeout)
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
            if process in self._senders:  # or it refused its first program, and has never come
                self._senders[process](message)

    def _watch(self) -> None:
        """Decides what is late, and hears in place of threads that are held."""
        while True:
            # Rounds that begin meanwhile have later deadlines.
            deadlines: list[float] = []
            self._decide_by(self._end_late, deadlines)
            for remote in [*self._remotes]:
                if remote.hearing.acquire(blocking=False):  # what was decided is being done
                    try:
                        while remote.is_there and remote.channel.has_news():
                            self._hear(remote)
                    finally:
                        remote.hearing.release()
            self.line.wake()
            time.sleep(max(0.0, min([*deadlines, time.monotonic() + LISTEN_SECONDS]) - time.monotonic()))

    def _end_late(self, deadlines: list[float]) -> None:
        """Decides the rounds of which votes are late, and adds the deadlines of others."""
        now = time.monotonic()
        for group, history in self._histories.items():
            for round_ in [*history.rounds.values()]:
                if not round_.is_decided and round_.deadline <= now:
                    self._decide(group, round_, is_late=True)
                elif not round_.is_decided:
                    deadlines.append(round_.deadline)

    def _look_for_refusals(self) -> None:
        """Lets those that wait for a process know what it raised instead of beginning their program."""
        before: dict[int, Refusal] = {}
        while True:
            time.sleep(_REFUSAL_SECONDS)
            waiting: dict[int, set[int]] = collections.defaultdict(set)
            self._decide_by(self._find_waiting, waiting)
            found = {process: self._refusal_of(process) for process in waiting}  # the service may not answer
            for process, refusal in found.items():
                if refusal.failure is not None and before.get(process) == refusal:
                    others = max(self._refusal_of(p).number - self._refused[p] for p in waiting[process])
                    if refusal.number - self._refused[process] > others:  # or all have raised it
                        self._decide_by(self._refuse, process, refusal)
                        self.line.wake()
            before = found

    def _find_waiting(self, waiting: dict[int, set[int]]) -> None:
        for group, history in self._histories.items():
            for round_ in history.rounds.values():
                for process in () if round_.is_decided else {*group} - round_.votes.keys():
                    waiting[process].update(round_.votes)

    def _refuse(self, process: int, refusal: Refusal) -> None:
        """Counts a call that did not begin its program, in place of the process."""
        for group, history in self._histories.items():
            for round_ in [*history.rounds.values()]:
                points = {vote.point for vote in round_.votes.values()}
                is_awaited = process in group and process not in round_.votes and not round_.is_decided
                if is_awaited and {point.program for point in points} == {refusal.program}:
                    self._refused[process] = refusal.number
                    point = min(points, key=lambda point: point.begun)
                    begun = history.unaware[process] + point.begun  # as that process counts
                    vote = Vote(-1, -refusal.number, group, point._replace(begun=begun), False, refusal.failure)
                    self._count(process, vote, time.monotonic())
                    history.unaware[process] = begun
                    return


def _different_choices(votes: Mapping[int, Vote]) -> Sequence[tuple[int, Choice]]:
    """The first choices that differ between processes that run the same program; none if all are the same."""
    count = max([len(vote.choices) for vote in votes.values()])
    if not count or len({(vote.point.begun, vote.point.digest) for vote in votes.values()}) > 1:
        return ()
    for i in range(count):
        made = [(process, vote.choices[i]) for process, vote in sorted(votes.items()) if i < len(vote.choices)]
        if different_part([choice for _, choice in made]) is not None:
            return made
    return ()
