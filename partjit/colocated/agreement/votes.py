"""What processes tell each other about a point of a program, to which all of them come unless one fails."""

import pickle
import struct
import traceback
from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "Choice",
    "Decision",
    "Gone",
    "Join",
    "Message",
    "Point",
    "Refusal",
    "Report",
    "Vote",
    "from_bytes",
    "report_of",
    "to_bytes",
]


class Choice(NamedTuple):
    """A value that is to be the same in every process, for how the program goes on depends on it.

    Attributes:
        name: of the loop or branch that goes by it, or of the result of a call.
        parts: what the process has of it that others have as well, as text, by which part of an array it is; by "" the
            value if it has all of it.
    """

    name: str
    parts: tuple[tuple[str, str], ...]


class Point(NamedTuple):
    """Where a program is about to go on, by what all processes have in common.

    Attributes:
        begun: how many programs the group has begun since the last one that was ended.
        digest: of the plan.
        node: the node that comes next; None at the end.
        program: the name of the program.
    """

    begun: int
    digest: str
    node: str | None
    program: str

    def __str__(self) -> str:
        return f"the end of {self.program}" if self.node is None else f"{self.node} of {self.program}"


class Report(NamedTuple):
    """A failure, for other processes.

    Attributes:
        process: where it happened.
        text: what happened, in a line.
        traceback: as Python prints it; empty if there is none.
    """

    process: int
    text: str
    traceback: str


class Refusal(NamedTuple):
    """What a call raised last in a process before it was known what its program agrees on.

    Attributes:
        number: of how many calls that is true.
        program: the name of the program.
        failure: what was raised; None if the process has gone on since.
    """

    number: int = 0
    program: str = ""
    failure: Report | None = None


class Vote(NamedTuple):
    """What a process says at a point.

    Attributes:
        number: of the vote, among those of the process.
        execution: of the program, among those of the process: a failure also takes back the last vote of its execution.
        group: the processes that agree.
        point: where it is.
        is_last: whether nothing is left of the execution that the others would wait for.
        failure: why it cannot go on; None if it can.
        plan: the text of the plan, with the first vote on it.
        choices: what the process has read since its last vote of the execution.
        is_ahead: whether the process has dispatched what comes next already, on zeros if that failed.
    """

    number: int
    execution: int
    group: tuple[int, ...]
    point: Point
    is_last: bool
    failure: Report | None
    plan: str | None = None
    choices: tuple[Choice, ...] = ()
    is_ahead: bool = False


class Decision(NamedTuple):
    """What all processes of a group do.

    Attributes:
        number: that of the vote it answers.
        failures: why none goes on; none if all do.
        others: where processes are that are somewhere else, with the texts of their plans.
        choices: the first one that differs, of each process that made it; none if that is not why.
    """

    number: int
    failures: Sequence[Report] = ()
    others: Sequence[tuple[int, Point, str]] = ()
    choices: Sequence[tuple[int, Choice]] = ()


class Join(NamedTuple):
    """The message to a process that has failed, when all others have come to where they learn it.

    Attributes:
        number: that of the vote with which it failed.
        node: what they have dispatched ahead, in which the devices of this process have to take part; None if nothing.
    """

    number: int
    node: str | None


class Gone(NamedTuple):
    """The message to processes about one with which they cannot agree any more.

    Attributes:
        process: its number.
        why: what became of it.
    """

    process: int
    why: str


def report_of(error: BaseException, process: int) -> Report:
    """The report of an exception."""
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    return Report(process, summary, "".join(traceback.format_exception(error)).rstrip())


Message = Vote | Decision | Join | Gone | None
"""What goes over a line; None asks for a sign of life, or is one."""

_KINDS = (Vote, Decision, Join, Gone)
_NUMBER = struct.Struct("!Q")


def to_bytes(message: Message) -> bytes:
    """A message for another process; what most votes and decisions have in common is a tuple of plain values.

    Example:
        >>> from_bytes(to_bytes(Join(3, "loop"))), from_bytes(to_bytes(None))
        (Join(number=3, node='loop'), None)
    """
    if message is None:
        return b""
    if isinstance(message, Decision) and not (message.failures or message.others or message.choices):
        return _NUMBER.pack(message.number)  # which no pickle is as short as
    if isinstance(message, Vote):  # pickling a class by name takes longer than all of this
        return pickle.dumps((0, *message[:3], tuple(message.point), *message[4:]), pickle.HIGHEST_PROTOCOL)
    return pickle.dumps((_KINDS.index(type(message)), *message), pickle.HIGHEST_PROTOCOL)


def from_bytes(data: bytes) -> Message:
    """The message that was made to bytes by `to_bytes`, in a process that is known to be one of ours."""
    if not data:
        return None
    if len(data) == _NUMBER.size:
        return Decision(*_NUMBER.unpack(data))
    kind, *values = pickle.loads(data)
    if kind == 0:
        values[3] = Point(*values[3])
    return _KINDS[kind](*values)
