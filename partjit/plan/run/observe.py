"""Running a plan for listeners to events: the same source over wrapped functions that emit."""

import contextlib
import contextvars
import dataclasses
import itertools
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, TypeAlias

import jax

from partjit import events
from partjit.colocated.runtime import threads
from partjit.colocated.runtime.observation import node_of_program
from partjit.colocated.runtime.pending import PendingArray
from partjit.plan.ir.nodes import ColocatedCall, Fragment, Value
from partjit.plan.ir.walk import walk
from partjit.plan.plan import Plan
from partjit.primitive import keep_where

__all__ = ["observed", "wait_for_fragments"]

Function: TypeAlias = Callable[..., Sequence[jax.Array]]
"""What a plan's source calls, from arrays to arrays."""

_numbers = itertools.count(1)


@dataclasses.dataclass(slots=True)
class _Execution:
    """The number of an execution, and the last results of each of its calls: a loop would keep all of them."""

    number: int
    made: dict[str, Sequence[jax.Array]]


# Set by every execution in its caller's context; a call inside of which the same program runs has another one there.
_current: "contextvars.ContextVar[_Execution]" = contextvars.ContextVar("partjit_execution")


def observed(plan: Plan, code: CodeType, name: str, namespace: dict[str, Any]) -> Function:
    """A function that runs a plan and emits events.

    Args:
        plan: the plan.
        code: its compiled source.
        name: the function that it defines.
        namespace: the functions and constants that it names.
    """
    program = plan.name
    own = dict(namespace)
    devices = () if plan.mesh.empty else plan.mesh.devices.flat
    group = tuple(sorted({device.process_index for device in devices}))
    processes = group if len(group) > 1 else ()

    def dispatching(fragment: Fragment[Value, Value]) -> Function:
        dispatch, watched = namespace[fragment.name], _watchable(plan, fragment)

        def observed_dispatch(*args: jax.Array) -> Sequence[jax.Array]:
            number = _current.get().number
            events.emit(events.FragmentDispatched(program, number, fragment.name, processes))
            try:
                with node_of_program(program, number, fragment.name):
                    results = dispatch(*args)
            except BaseException as error:
                text = traceback.format_exception_only(error)[0].strip()
                events.emit(events.FragmentFailed(program, number, fragment.name, text))
                raise
            _watcher.watch([results[i] for i in watched], (program, number, fragment.name))
            return results

        return observed_dispatch

    def calling(node: str) -> Function:
        def observed_call(*args: jax.Array) -> Sequence[jax.Array]:
            execution = _current.get()
            with node_of_program(program, execution.number, node):
                results = execution.made[node] = namespace[node](*args)
            return results

        return observed_call

    def moving(node: str, nbytes: int) -> Function:
        def observed_move(*arrays: jax.Array) -> Sequence[jax.Array]:
            with events.span(events.TransferStarted(program, _current.get().number, node, nbytes)):
                return jax.block_until_ready(namespace[node](*arrays))

        return observed_move

    def leaving(node: str) -> Function:
        def observed_move(*arrays: jax.Array) -> Sequence[jax.Array]:
            number = _current.get().number

            def around(nbytes: int) -> contextlib.AbstractContextManager[None]:
                return events.span(events.TransferStarted(program, number, node, nbytes))

            return namespace[node](*arrays, around=around)

        return observed_move

    def wait(array: jax.Array) -> jax.Array:
        if type(array) is not PendingArray:
            return array
        execution = _current.get()
        node = next((call for call, made in execution.made.items() if any(array is r for r in made)), "argument")
        with events.span(events.WaitStarted(program, execution.number, node)):
            return namespace["wait"](array)

    def read(array: jax.Array, *node: str) -> bool | int:
        value = wait(array)
        with events.span(events.WaitStarted(program, _current.get().number, "devices")):
            return namespace["read"](value, *node)

    own |= {"wait": wait, "read": read}
    own |= {fragment.name: dispatching(fragment) for fragment in plan.fragments}
    own |= {call.name: calling(call.name) for call in walk(plan.nodes) if isinstance(call, ColocatedCall)}
    for move in plan.transfers:
        nbytes = sum(value.nbytes for value in move.inputs)
        own[move.name] = leaving(move.name) if move.is_left_to_calls else moving(move.name, nbytes)
    exec(code, own)

    def run(*args: object) -> Sequence[jax.Array]:
        execution = _Execution(next(_numbers), {})
        token = _current.set(execution)
        try:
            with events.span(events.ProgramStarted(program, execution.number)):
                return own[name](*args)
        finally:
            _current.reset(token)
            execution.made.clear()  # contexts of calls, copies of this one, outlive the execution

    return run


def _watchable(plan: Plan, fragment: Fragment[Value, Value]) -> list[int]:
    """The result of a fragment to wait for: one that is not donated later, if there is one."""
    given = {value for other in plan.fragments for value in keep_where(other.inputs, other.donated)}
    own = [i for i, value in enumerate(fragment.outputs) if value not in given]
    results = {*plan.outputs}
    return sorted(own, key=lambda i: (fragment.outputs[i] in results, fragment.outputs[i].nbytes))[:1]


class _Watcher:
    """Waits for the results of fragments in the order of their dispatch, in a thread of its own while there are any."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Sequence[jax.Array], Callable[[], None]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0

    def watch(self, results: Sequence[jax.Array], which: tuple[str, int, str]) -> None:
        """Emits `FragmentReady` of a program, execution and fragment when these results exist."""
        self._add(results, lambda: events.emit(events.FragmentReady(*which)))

    def join(self) -> None:
        """Waits until everything watched so far is ready."""
        reached = threading.Event()
        self._add([], reached.set)
        reached.wait()

    def _add(self, results: Sequence[jax.Array], then: Callable[[], None]) -> None:
        with self._lock:
            self._jobs.put((results, then))
            self._waiting += 1
            is_first = self._waiting == 1
        if is_first:
            threads.start(self._work)

    def _work(self) -> None:
        while True:
            results, then = self._jobs.get()
            with contextlib.suppress(RuntimeError):  # the caller has donated it
                jax.block_until_ready(results)
            del results
            then()
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    return


_watcher = _Watcher()


def wait_for_fragments() -> None:
    """Waits until the fragments dispatched so far, for listeners, are computed."""
    _watcher.join()
