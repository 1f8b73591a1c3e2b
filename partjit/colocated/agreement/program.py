"""A program on several processes: what it agrees on with the others, and what its caller sees when one of them fails.

A fragment may have collectives, in which the devices of all processes wait for each other. So all of them dispatch it
or none does: before each one they vote, and a process in which anything was raised since the last vote says so. If the
user asks for it, they do not wait for the decision where a fragment takes nothing away but dispatch it ahead, and a
process that fails dispatches it on zeros; no other node of the program runs before the decision is known.
"""

import dataclasses
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from partjit._jax.arrays import is_computed
from partjit._jax.types import Device
from partjit.colocated.agreement.differences import different_choices, different_points, parts_of
from partjit.colocated.agreement.execution import Execution
from partjit.colocated.agreement.participant import Participant, Pending
from partjit.colocated.agreement.votes import Choice, Decision, Point, Report, Vote, report_of
from partjit.colocated.agreement.waiting import LAST_SECONDS, LOOK_SECONDS, gone_within, wait_or_gone
from partjit.colocated.runtime.failures import raise_left
from partjit.colocated.runtime.interrupts import Flag
from partjit.colocated.runtime.moves import together
from partjit.colocated.runtime.pending import PendingArray
from partjit.errors import OtherProcessError, ProgramsDifferError

__all__ = ["Agreement", "Decider", "executions_begun"]

_SEND_SECONDS = 2.0
_LEEWAY_SECONDS = 10.0
_RAISING_LATE = ("jax_debug_nans", "jax_debug_infs")
"""Options with which the dispatch of a fragment waits, and raises, for what it has computed."""

_of_thread = threading.local()  # how many executions a thread has begun


@dataclasses.dataclass(frozen=True)
class Decider:
    """A value that each process has for itself, and that decides how its program goes on.

    Attributes:
        what: which one it is, for messages.
        agrees_at_once: whether processes agree on it by itself, as it may decide what comes before the next fragment,
            for which they vote anyway.
        shared: see `parts_of`.
    """

    what: str
    agrees_at_once: bool = False
    shared: Sequence[tuple[Device, str]] | None = None


def executions_begun() -> int:
    """How many executions of programs this thread has begun, which report what fails in them."""
    return getattr(_of_thread, "begun", 0)


class Agreement:
    """What the executions of a program agree on.

    Args:
        own: this process.
        group: the processes.
        name: the name of the program.
        text: what has to be equal in all processes.
        last_node: the fragment after which nothing is left; None if an execution has to agree on its end.
        timeout: in seconds, after which a process is late.
        deciders: by the names of its loops and branches that the hosts drive, and of results of calls.
        raise_left: raises what calls of this process without results have raised, once.

    Attributes:
        group: the processes.
    """

    def __init__(
        self,
        own: Participant,
        group: tuple[int, ...],
        name: str,
        text: str,
        last_node: str | None,
        timeout: float,
        deciders: Mapping[str, Decider],
        raise_left: Callable[[], None] = raise_left,
    ) -> None:
        self._own = own
        self.group = group
        self._name = name
        self._text = text
        self._digest = hashlib.sha256(text.encode()).hexdigest()
        self._last_node = last_node
        self._timeout = timeout
        self._deciders = deciders
        self._raise_left = raise_left
        self._on_zeros: dict[str, Callable[[], object]] = {}
        self._is_new = itertools.chain([True], itertools.repeat(False))
        self._thread = threading.local()

    @property
    def begun(self) -> int:
        """See `executions_begun`."""
        return executions_begun()

    def dispatching(
        self,
        node: str,
        dispatch: Callable[..., Any],
        on_zeros: Callable[[], object] | None = None,
        names: Sequence[str] = (),
    ) -> Callable[..., Any]:
        """A function that dispatches a fragment when all processes are about to.

        Args:
            node: its name.
            dispatch: dispatches it.
            on_zeros: dispatches it so that the others get their results, if this process fails; None if they have to
                wait until it is known that none does.
            names: those of its last arguments.
        """
        if on_zeros is not None:
            self._on_zeros[node] = on_zeros

        def dispatch_with_all(*args: Any) -> Any:
            for i, arg in enumerate(args, len(names) - len(args)):
                if isinstance(arg, jax.Array) and arg.is_deleted():  # jax would refuse it after the others dispatched
                    what = f"{node} of {self._name} needs {names[i] if i >= 0 else 'an array'}"
                    raise RuntimeError(
                        f"{what}, which was deleted or donated: Array has been deleted with type {arg.aval.str_short()}"
                    )
            return self._with_all(node, lambda: dispatch(*args))

        return dispatch_with_all

    def do(self, what: str, action: Callable[[], Any]) -> Any:
        """Does something in all processes that execute the program, or in none, between two of its nodes."""
        return self._with_all(what, action)

    def before(self, node: str, action: Callable[[], Any]) -> Any:
        """Does something in all processes, or in none, before they begin the program that this is a part of.

        That program reports what is raised later.
        """
        result = self.run(self.dispatching(node, action), ())
        _of_thread.begun = self.begun - 1
        return result

    def reading(
        self, read: Callable[[jax.Array], bool | int], is_there: Callable[[jax.Array], bool] = is_computed
    ) -> Callable[[jax.Array, str], bool | int]:
        """A function that reads what a loop or branch goes by, which has to be the same in all processes.

        Args:
            read: reads the value of an array.
            is_there: whether that would not wait.
        """

        def read_as_all(array: jax.Array, node: str) -> bool | int:
            self._settle()
            self._end_if(wait_or_gone(lambda: is_there(array), self._gone))
            try:
                value = read(array)
            except jax.errors.JaxRuntimeError:  # devices may find out first
                self._end_if(gone_within(self._gone))
                raise
            self._compare(node, value)
            if self._deciders[node].agrees_at_once:
                self._with_all(node, None)
            return value

        return read_as_all

    def calling(
        self, names: Sequence[str], call: Callable[..., Sequence[jax.Array]]
    ) -> Callable[..., Sequence[jax.Array]]:
        """A function that makes a call with results of these names; those that decide have to be the same everywhere.

        A pending one is compared when it is waited for.
        """
        compared = [(i, name) for i, name in enumerate(names) if name in self._deciders]

        def call_and_compare(*args: object) -> Sequence[jax.Array]:
            self._settle()
            results = call(*args)
            for i, name in compared:
                if type(results[i]) is PendingArray:
                    self._thread.execution.pending[name] = results[i]
                else:
                    self._compare(name, results[i])
            return results

        return call_and_compare

    def moving(self, move: Callable[..., Any]) -> Callable[..., Any]:
        """A function that moves values when it is known that all processes go on."""

        def settle_and_move(*args: object) -> Any:
            self._settle()
            return move(*args)

        return settle_and_move

    def waiting(self, wait: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        """A function that waits for a result of a call."""

        def wait_and_compare(array: jax.Array) -> jax.Array:
            if isinstance(array, PendingArray):
                self._end_if(wait_or_gone(lambda: array.ends_within(LOOK_SECONDS), self._gone))
            value = wait(array)
            pending = self._thread.execution.pending
            for name in [name for name, result in pending.items() if result is array]:
                del pending[name]
                self._compare(name, value)
            return value

        return wait_and_compare

    def releasing(self, release: Callable[..., None]) -> Callable[..., None]:
        """A function that gives up the memory of donated arguments, in all processes or in none."""
        return lambda *arguments: self._thread.execution.released.append(lambda: release(*arguments))

    def _gone(self) -> str | None:
        return self._own.gone(self.group)

    def _end_if(self, gone: str | None) -> None:
        if gone is not None:
            execution: Execution = self._thread.execution
            execution.ended_by = OtherProcessError(f"{self._name} ends on all of its processes: {gone}")
            raise execution.ended_by

    def _compare(self, name: str, value: object) -> None:
        execution: Execution = self._thread.execution
        execution.choices += (Choice(name, parts_of(value, self._deciders[name].shared)),)

    def run(self, execute: Callable[..., Any], args: Sequence[object]) -> Any:
        """Executes the program in this thread; if it fails here, it fails in all processes.

        Raises:
            OtherProcessError: another process failed, ended, or is late.
            ProgramsDifferError: another process runs something else.
            BaseException: what the program raises here.
        """
        outer = getattr(self._thread, "execution", None)
        execution = Execution(*self._own.begin(self.group))
        try:
            _of_thread.begun = self.begun + 1  # from here on, in the block, this function reports
            self._thread.execution = execution
            with together(self):
                results = execute(*args)
            if self._last_node is None:
                self._with_all(None, None)
            self._settle()
            _do_all(execution.released)
            return results
        except BaseException as error:
            if error is execution.ended_by:
                self._own.ended(self.group)
            else:
                self._fail(execution, error)
            raise
        finally:
            self._thread.execution = outer

    def fail(self, error: BaseException, begun: int) -> None:
        """Lets the others know what was raised here before the program began.

        Args:
            error: what was raised; an interrupt may also come when it has ended in all processes.
            begun: how many executions this thread had begun before.
        """
        if self.begun == begun:
            self._fail(Execution(*self._own.begin(self.group)), error)

    def _fail(self, execution: Execution, error: BaseException) -> None:
        if execution.is_complete:  # an interrupt came too late for them
            return
        failure = report_of(error, self._own.process)
        deadline = time.monotonic() + _SEND_SECONDS
        may_join = bool(self._on_zeros) and execution.last is not None
        # Sent before this process may end; then it is known whether the last vote was decided before.
        pending = self._own.pending_failure(
            self._vote(execution, None, failure), self._join if may_join else None, execution.last
        )
        self._own.send(pending)
        pending.left.wait(deadline)
        if may_join:  # what this thread dispatches next comes after what the others have dispatched
            is_patient = isinstance(error, Exception)
            self._is_set_in_time(pending.done, time.monotonic() + self._timeout if is_patient else deadline)
        if execution.last is not None:
            execution.last.done.wait(deadline)
        if not execution.is_complete:
            self._own.ended(self.group)

    def _join(self, node: str) -> None:
        """Takes part in a fragment that the others have dispatched, whose results nobody sees."""
        self._on_zeros[node]()

    def _vote(self, execution: Execution, node: str | None, failure: Report | None = None) -> Vote:
        point = Point(execution.begun, self._digest, node, self._name)
        plan = self._text if failure is None and next(self._is_new) else None
        is_last = failure is None and node == self._last_node
        choices, execution.choices = execution.choices, ()
        is_ahead = (
            failure is None
            and node in self._on_zeros
            and execution.last is not None  # all run the same program
            and not (choices or execution.released)
            and not any(getattr(jax.config, option) for option in _RAISING_LATE)
        )
        number = self._own.new_number()
        return Vote(number, execution.number, self.group, point, is_last, failure, plan, choices, is_ahead)

    def _with_all(self, node: str | None, action: Callable[[], Any] | None) -> Any:
        execution: Execution = self._thread.execution
        self._settle()
        self._raise_left()  # nobody else will before `colocated.wait()`, and until then the others would go on
        vote = self._vote(execution, node)
        if execution.released:
            action = _after(execution.released, action)
            execution.released = []
        instead = self._on_zeros[vote.point.node] if vote.is_ahead and vote.point.node is not None else None
        # Known before it is sent, if an interrupt comes now.
        pending = execution.last = self._own.pending(vote, action, instead)
        self._own.send(pending)
        if vote.is_ahead:
            self._wait(execution, pending, pending.acted)
        if not vote.is_ahead or not (pending.is_under_way or pending.error):
            self._settle()
        if pending.error is not None:
            raise pending.error
        return pending.result

    def _settle(self) -> None:
        """Waits until it is known that all processes go on from the last vote, or raises why they do not."""
        execution: Execution = self._thread.execution
        pending = execution.last
        if pending is None:
            return
        if not pending.done.is_set:
            self._wait(execution, pending, pending.done)
        if pending.decision is None:
            execution.ended_by = OtherProcessError(f"{self._name} cannot go on: {pending.lost}")
        elif pending.decision.failures:
            execution.ended_by = self._error(pending.vote.point, pending.decision)
        if execution.ended_by is not None:
            raise execution.ended_by

    def _wait(self, execution: Execution, pending: Pending, flag: Flag) -> None:
        seconds = self._timeout + _LEEWAY_SECONDS
        if self._is_set_in_time(flag, time.monotonic() + seconds):
            return
        self._end_if(self._gone())  # devices may hold what dispatches until that process has done its part
        point = pending.vote.point
        text = f"process {self.group[0]}, which coordinates, does not answer for {seconds:g} s at {point}"
        execution.ended_by = OtherProcessError(text)
        raise execution.ended_by

    def _is_set_in_time(self, flag: Flag, deadline: float) -> bool:
        """Waits for a flag, at most until the deadline, and not much longer than a process is gone."""
        while not flag.wait(min(deadline, time.monotonic() + LOOK_SECONDS)):
            if self._gone() is not None:
                return flag.wait(min(deadline, time.monotonic() + LAST_SECONDS))
            if time.monotonic() >= deadline:
                return False
        return True

    def _error(self, point: Point, decision: Decision) -> BaseException:
        if decision.choices:
            what = self._deciders[decision.choices[0][1].name].what
            return ProgramsDifferError(different_choices(self._name, what, decision.choices))
        if decision.others:
            return ProgramsDifferError(different_points(point, self._text, decision.others))
        first, *others = decision.failures
        error = OtherProcessError(f"{self._name} ends on all of its processes: process {first.process}: {first.text}")
        for report in (first, *others):
            if report.traceback:
                error.add_note(f"On process {report.process}:\n{report.traceback}")
            elif report is not first:
                error.add_note(f"process {report.process}: {report.text}")
        return error


def _after(first: Sequence[Callable[[], None]], action: Callable[[], Any] | None) -> Callable[[], Any]:
    def do_both() -> Any:
        _do_all(first)
        return action() if action is not None else None

    return do_both


def _do_all(actions: Sequence[Callable[[], None]]) -> None:
    for action in actions:
        action()
