"""A program on several processes: what it agrees on with the others, and what its caller sees when one of them fails.

A fragment may have collectives, in which the devices of all processes wait for each other. So all of them dispatch it
or none does: before each one they vote, and a process in which anything was raised since the last vote says so.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from partjit._jax.types import Device
from partjit.colocated.agreement.participant import Participant, Pending, participant
from partjit.colocated.agreement.votes import Decision, Point, Report, Vote, report_of
from partjit.errors import OtherProcessError, ProgramsDifferError

__all__ = ["Agreement", "agreement_of"]

_ATTRIBUTE = "_partjit_is_agreed"
_TIMEOUT_SECONDS = 300.0
_SEND_SECONDS = 2.0
_LEEWAY_SECONDS = 10.0


def agreement_of(
    devices: Iterable[Device], name: str, text: Callable[[], str], last_node: str | None = None
) -> "Agreement | None":
    """What a program agrees on; None where all its devices are of this process, or its processes share no service.

    PARTJIT_AGREEMENT=off, which has to be the same in all processes, is for those that cannot connect to each other.

    Args:
        devices: its devices.
        name: its name.
        text: what has to be equal in all processes, in lines.
        last_node: the fragment after which nothing is left; None if an execution has to agree on its end.

    Raises:
        ValueError: PARTJIT_AGREEMENT is neither "on" nor "off", or PARTJIT_AGREEMENT_TIMEOUT no number of seconds.
    """
    here = jax.process_index()
    group = tuple(sorted({device.process_index for device in devices}))
    if here not in group or len(group) == 1:
        return None
    if not _is_on():
        return None
    timeout = _timeout()
    own = participant(min(group), timeout)
    return None if own is None else Agreement(own, group, name, text(), last_node, timeout)


def _is_on() -> bool:
    text = os.environ.get("PARTJIT_AGREEMENT", "") or "on"
    if text not in ("on", "off"):
        raise ValueError(f"PARTJIT_AGREEMENT must be 'on' or 'off', but is {text!r}")
    return text == "on"


def _timeout() -> float:
    text = os.environ.get("PARTJIT_AGREEMENT_TIMEOUT", "")
    try:
        timeout = float(text or _TIMEOUT_SECONDS)
    except ValueError:
        timeout = math.nan
    if not 0 < timeout < threading.TIMEOUT_MAX:
        raise ValueError(f"PARTJIT_AGREEMENT_TIMEOUT must be a positive number of seconds, but is {text!r}")
    return timeout


def _mark(error: BaseException) -> None:
    """Notes that the other processes know of an exception."""
    with contextlib.suppress(AttributeError):  # it may be immutable
        setattr(error, _ATTRIBUTE, True)


class _NotAgreed(BaseException):
    """Ends an execution that ends in all processes.

    Attributes:
        error: what the caller gets.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


@dataclasses.dataclass
class _Execution:
    """An execution in one thread.

    Attributes:
        number: in this process.
        begun: see `Point`.
        last: its last vote.
    """

    number: int
    begun: int
    last: Pending | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all agreed on its end."""
        last = self.last
        return last is not None and last.vote.is_last and last.decision is not None and not last.decision.failures


class Agreement:
    """What the executions of a program agree on.

    Args:
        own: this process.
        group: the processes.
        name: the name of the program.
        text: what has to be equal in all processes.
        last_node: the fragment after which nothing is left; None if an execution has to agree on its end.
        timeout: in seconds, after which a process is late.
    """

    def __init__(
        self, own: Participant, group: tuple[int, ...], name: str, text: str, last_node: str | None, timeout: float
    ) -> None:
        self._own = own
        self._group = group
        self._name = name
        self._text = text
        self._digest = hashlib.sha256(text.encode()).hexdigest()
        self._last_node = last_node
        self._timeout = timeout
        self._is_new = itertools.chain([True], itertools.repeat(False))
        self._thread = threading.local()

    def dispatching(self, node: str, dispatch: Callable[..., Any]) -> Callable[..., Any]:
        """A function that dispatches a fragment when all processes are about to."""

        def dispatch_with_all(*args: object) -> Any:
            return self._with_all(node, lambda: dispatch(*args))

        return dispatch_with_all

    def run(self, execute: Callable[..., Any], args: Sequence[object]) -> Any:
        """Executes the program in this thread; if it fails here, it fails in all processes.

        Raises:
            OtherProcessError: another process failed, ended, or is late.
            ProgramsDifferError: another process runs something else.
            BaseException: what the program raises here.
        """
        outer = getattr(self._thread, "execution", None)
        execution = self._thread.execution = _Execution(*self._own.begin(self._group))
        try:
            results = execute(*args)
            if self._last_node is None:
                self._with_all(None, None)
            return results
        except _NotAgreed as ended:
            self._own.ended(self._group)
            _mark(ended.error)
            raise ended.error.with_traceback(ended.__traceback__) from None
        except BaseException as error:
            self._fail(execution, error)
            raise
        finally:
            self._thread.execution = outer

    def fail(self, error: BaseException) -> None:
        """Lets the others know what was raised here before the program began, unless they do."""
        if not getattr(error, _ATTRIBUTE, False):
            self._fail(_Execution(*self._own.begin(self._group)), error)

    def _fail(self, execution: _Execution, error: BaseException) -> None:
        _mark(error)
        if execution.is_complete:  # an interrupt came too late for them
            return
        failure = report_of(error, self._own.process)
        deadline = time.monotonic() + _SEND_SECONDS
        # Sent before this process may end; then it is known whether the last vote was decided before.
        self._own.vote(self._vote(execution, None, failure)).done.wait(deadline)
        if execution.last is not None:
            execution.last.done.wait(deadline)
        if not execution.is_complete:
            self._own.ended(self._group)

    def _vote(self, execution: _Execution, node: str | None, failure: Report | None = None) -> Vote:
        point = Point(execution.begun, self._digest, node, self._name)
        plan = self._text if failure is None and next(self._is_new) else None
        is_last = failure is None and node == self._last_node
        return Vote(0, execution.number, self._group, point, is_last, failure, plan)

    def _with_all(self, node: str | None, action: Callable[[], Any] | None) -> Any:
        execution: _Execution = self._thread.execution
        vote = self._vote(execution, node)
        pending = execution.last = self._own.vote(vote, action)
        seconds = self._timeout + _LEEWAY_SECONDS
        if not pending.done.wait(time.monotonic() + seconds):
            text = f"process {self._group[0]}, which coordinates, does not answer for {seconds:g} s at {vote.point}"
            raise _NotAgreed(OtherProcessError(text))
        if pending.decision is None:
            raise _NotAgreed(OtherProcessError(f"{self._name} cannot go on: {pending.error}"))
        if pending.decision.failures:
            raise _NotAgreed(self._error(vote.point, pending.decision))
        if pending.error is not None:
            raise pending.error
        return pending.result

    def _error(self, point: Point, decision: Decision) -> BaseException:
        if decision.others:
            where = "".join(f"\n  process {process}: {other}" for process, other, _ in decision.others)
            text = f"the processes are not at the same point of the same program: here it is {point}, elsewhere{where}"
            differences = [
                difference
                for process, _, plan in decision.others
                if plan and (difference := _first_difference(self._text, plan, process))
            ]
            hint = "every process has to call the same programs, in the same order and with arguments of the same types"
            return ProgramsDifferError("\n".join([text, *differences[:1], hint]))
        first, *others = decision.failures
        error = OtherProcessError(f"{self._name} ends on all of its processes: process {first.process}: {first.text}")
        for report in (first, *others):
            if report.traceback:
                error.add_note(f"On process {report.process}:\n{report.traceback}")
            elif report is not first:
                error.add_note(f"process {report.process}: {report.text}")
        return error


def _first_difference(own: str, other: str, process: int) -> str:
    """The first line in which two plans differ, in words; empty if none does."""
    for mine, theirs in itertools.zip_longest(own.splitlines(), other.splitlines(), fillvalue="(nothing)"):
        if mine != theirs:
            return f"their plans first differ in\n  here:      {mine.strip()}\n  process {process}: {theirs.strip()}"
    return ""
