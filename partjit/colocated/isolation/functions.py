"""Functions that run in worker processes: every stream has a worker, in which the functions called on it run.

Streams overlap, so their calls run in as many processes at a time. A worker whose stream is gone is kept for the next
one, which finds no functions there.
"""

import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from partjit._jax.types import PyTree
from partjit.colocated.isolation.messages import definition_of, dumps, pack
from partjit.colocated.isolation.process import Died, WorkerProcess
from partjit.colocated.runtime.call import current_calls
from partjit.colocated.runtime.failures import add_note, call_site
from partjit.colocated.runtime.in_specs import argument_paths
from partjit.colocated.runtime.streams import Stream, current_stream
from partjit.colocated.uncopyable import uncopyable_parts
from partjit.errors import WorkerDiedError

__all__ = ["IsolatedFunction", "died_text", "forget_after_fork", "packed_arguments", "pickled"]

_MOST_IDLE = 4
_keys = itertools.count(1)
_changes = threading.RLock()
_of_stream: "weakref.WeakKeyDictionary[Stream, WorkerProcess]" = weakref.WeakKeyDictionary()
_idle: list[WorkerProcess] = []


class IsolatedFunction:
    """A function to be called with NumPy arrays, or shards, and other values that can be pickled.

    Args:
        function: what runs in the worker; it is copied now.
        name, signature: its name and parameters, for messages.

    Raises:
        TypeError, pickle.PicklingError: it cannot be copied; a note names the part.
    """

    def __init__(self, function: Callable[..., PyTree], name: str, signature: inspect.Signature | None) -> None:
        self._name = name
        self._signature = signature
        self._definition = pickled(function, f"{name} and what it captures")
        self._key = next(_keys)
        weakref.finalize(self, _forget, self._key).atexit = False

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Calls the function in the worker of the stream of the call.

        Raises:
            WorkerDiedError: its worker ended before it returned.
            TypeError: an argument cannot be pickled.
            BaseException: what the function raised.
        """
        running = current_calls()
        stream = (running[-1].stream if running else current_stream()).root
        while True:
            worker = _worker_of(stream)
            is_known = self._key in worker.known
            definition = None if is_known else self._definition
            body, pieces = packed_arguments(self._name, self._signature, args, kwargs, definition)
            try:
                return worker.ask("call", body, pieces, key=self._key, definition=not is_known)
            except Died as died:
                if died.was_asked or not worker.has_answered:
                    raise WorkerDiedError(died_text(self._name, worker, died)) from None


def died_text(name: str, worker: WorkerProcess, died: Died) -> str:
    """How a worker died, in words."""
    running = current_calls()
    file, line, _ = running[-1].site if running else call_site()
    return f"the worker process of {name} (pid {worker.pid}) {died.how} in the call made at {file}:{line}"


def pickled(value: object, what: str) -> bytes:
    """The pickle of a function or object for a worker; `what` names it in a note of an error."""
    try:
        return definition_of(value)
    except Exception as error:
        add_note(error, f"{what} are copied for a worker process")
        parts = uncopyable_parts(value, _can_be_pickled)
        if parts:
            add_note(error, f"this cannot be copied: {parts}. Make it inside of the function, or keep it in a module")
        raise


def packed_arguments(
    name: str,
    signature: inspect.Signature | None,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    definition: bytes | None = None,
) -> tuple[bytes | None, Sequence[bytes | memoryview]]:
    """The arguments of a call for its worker, with the definition if that is given.

    Raises:
        TypeError: an argument cannot be pickled; it is named.
    """
    arguments = (args, kwargs)
    try:
        return pack(*dumps(arguments if definition is None else (definition, sys.path, arguments)))
    except Exception as error:
        leaves = jax.tree.leaves(arguments)
        for path, leaf in zip(argument_paths(signature, args, kwargs), leaves, strict=True):
            if not _can_be_pickled(leaf):
                parts = uncopyable_parts(leaf, _can_be_pickled)
                because = f", since it has {parts}" if parts else ""
                raise TypeError(
                    f"{path} of {name}, of type {type(leaf).__qualname__}, cannot be pickled for its worker "
                    f"process{because}: {error}"
                ) from error
        raise


def _can_be_pickled(value: Any) -> bool:
    try:
        definition_of(value)
    except Exception:
        return False
    return True


def _worker_of(stream: Stream) -> WorkerProcess:
    with _changes:
        worker = _of_stream.get(stream)
        if worker is None or worker.has_ended:
            worker = _idle.pop() if _idle else WorkerProcess(is_disposable=True)
            _of_stream[stream] = worker
            weakref.finalize(stream, _let_idle, worker).atexit = False
        return worker


def _let_idle(worker: WorkerProcess) -> None:
    if worker.has_ended or len(_idle) >= _MOST_IDLE or not worker.is_in_step:
        worker.end()
    else:
        worker.forget_all()
        _idle.append(worker)


def _forget(key: int) -> None:
    for worker in [*_of_stream.values()]:
        worker.forget(key)


def forget_after_fork() -> None:
    """Starts anew in a forked child, which has none of its parent's workers."""
    global _changes
    _changes = threading.RLock()
    _of_stream.clear()
    _idle.clear()
