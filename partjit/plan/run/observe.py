"""Running a plan while somebody listens: the same function, with each thing that it does told."""

import contextlib
import itertools
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax

from partjit import events
from partjit.colocated.runtime import threads
from partjit.colocated.runtime.observation import node_of_program
from partjit.colocated.runtime.pending import PendingArray
from partjit.plan.ir.nodes import Fragment
from partjit.plan.plan import Plan

__all__ = ["observed"]

_executions = itertools.count(1)


def observed(plan: Plan, code: Any, name: str, namespace: dict[str, Any]) -> Callable[..., Sequence[Any]]:
    """A function that runs a plan and emits events.

    Args:
        plan: the plan.
        code: its compiled source.
        name: the function that it defines.
        namespace: what the names in it are.
    """
    watched = {fragment.name: _watchable(plan, fragment) for fragment in plan.fragments}
    sizes = {transfer.name: sum(value.nbytes for value in transfer.inputs) for transfer in plan.transfers}

    def run(*args: Any) -> Sequence[Any]:
        execution = next(_executions)
        own = dict(namespace)
        made: dict[str, Sequence[Any]] = {}  # what each call gave last: a loop would keep all of it

        def dispatching(fragment: str) -> Callable[..., Any]:
            def dispatch(*args: Any) -> Any:
                events.emit(events.FragmentDispatched(plan.name, execution, fragment))
                results = namespace[fragment](*args)
                _watcher.watch([results[i] for i in watched[fragment]], plan.name, execution, fragment)
                return results

            return dispatch

        def calling(call: str) -> Callable[..., Any]:
            def make_call(*args: Any) -> Any:
                with node_of_program(plan.name, execution, call):
                    results = namespace[call](*args)
                made[call] = results
                return results

            return make_call

        def moving(transfer: str) -> Callable[..., Any]:
            def move(*arrays: Any) -> Any:
                events.emit(events.TransferStarted(plan.name, execution, transfer, sizes[transfer]))
                try:
                    return jax.block_until_ready(namespace[transfer](*arrays))
                finally:
                    events.emit(events.TransferFinished(plan.name, execution, transfer))

            return move

        def wait(array: Any) -> Any:
            if type(array) is not PendingArray:
                return array
            node = next((call for call, results in made.items() if any(array is r for r in results)), "argument")
            events.emit(events.WaitStarted(plan.name, execution, node))
            try:
                return array.value()
            finally:
                events.emit(events.WaitFinished(plan.name, execution, node))

        def read(array: Any) -> Any:
            value = wait(array)
            events.emit(events.WaitStarted(plan.name, execution, "devices"))
            try:
                return value.item()
            finally:
                events.emit(events.WaitFinished(plan.name, execution, "devices"))

        own["wait"] = wait
        own["read"] = read
        own.update((fragment.name, dispatching(fragment.name)) for fragment in plan.fragments)
        own.update((call.name, calling(call.name)) for call in plan.calls)
        own.update((transfer.name, moving(transfer.name)) for transfer in plan.transfers)
        exec(code, own)
        events.emit(events.ProgramStarted(plan.name, execution))
        try:
            results = own[name](*args)
        except BaseException as error:
            what = traceback.format_exception_only(type(error), error)[0].strip()
            events.emit(events.ProgramFailed(plan.name, execution, what))
            raise
        events.emit(events.ProgramFinished(plan.name, execution))
        return results

    return run


def _watchable(plan: Plan, fragment: Fragment) -> list[int]:
    """The results of a fragment that tell when it is ready: best those that nobody gives away meanwhile."""
    given = {
        value for other in plan.fragments for value, donated in zip(other.inputs, other.donated, strict=True) if donated
    }
    own = [i for i, value in enumerate(fragment.outputs) if value not in given]
    results = {*plan.outputs}
    return sorted(own, key=lambda i: (fragment.outputs[i] in results, fragment.outputs[i].nbytes))[:1]


class _Watcher:
    """Waits for the results of fragments in the order of their dispatch, in a thread of its own while there are any."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0

    def watch(self, results: Sequence[Any], *which: Any) -> None:
        """Emits `FragmentReady` when these results are there."""
        with self._lock:
            self._jobs.put((results, which))
            self._waiting += 1
            is_first = self._waiting == 1
        if is_first:
            threads.start(self._work)

    def _work(self) -> None:
        while True:
            results, which = self._jobs.get()
            with contextlib.suppress(RuntimeError):  # the caller has given it away
                jax.block_until_ready(results)
            del results
            events.emit(events.FragmentReady(*which))
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    return


_watcher = _Watcher()
