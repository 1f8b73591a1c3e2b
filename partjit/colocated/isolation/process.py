"""A worker process as its parent sees it: it is started by its first request, answers one at a time, and ends or dies.

A signal handler may raise anywhere in the main thread, also in the middle of a request. Messages are whole or not there
and have numbers, so the next request finds out what the worker has answered, and nothing is out of step for long.
"""

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import spawn
from typing import Any

from partjit.colocated import standard_objects
from partjit.colocated.isolation import messages, worker
from partjit.colocated.isolation.messages import PACKET_BYTES, Failed, Reply, Request, Segment, size_of, unpack
from partjit.colocated.runtime import threads
from partjit.colocated.runtime.interrupts import Flag, is_running

__all__ = ["Died", "WorkerProcess", "end_all", "forget_after_fork"]

_CHECK_SECONDS = 0.2
"""How often a waiting parent looks whether the process is there: its own children may keep its connection open."""
_GRACE_SECONDS = 1.0
_LEAST_BYTES = 1 << 20
_MOST_UNUSED = 1000
"""How many functions one request drops, so that it fits into a packet."""

_PROGRAM = """
import importlib.util, sys
sys.path[:] = {path!r}
for name, file in {modules!r}:
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
module.main({descriptor})
"""
"""It loads modules by their names without their packages, which import jax."""

_all: "set[WorkerProcess]" = set()


class Died(Exception):
    """A worker has ended without an answer.

    Attributes:
        how: how, in words, as in "the process ...".
        was_asked: whether it may have received the request.
    """

    def __init__(self, how: str, was_asked: bool) -> None:
        super().__init__(how)
        self.how = how
        self.was_asked = was_asked


class WorkerProcess:
    """A process that runs functions, or the methods of one object.

    Args:
        is_disposable: whether to end it when an interrupt ends the wait for an answer. The next request waits until it
            has answered otherwise.

    Attributes:
        known: the functions that it has.
        is_in_step: whether the last request was answered.
        has_answered: whether any was.
        has_ended: whether it takes no requests any more.
    """

    def __init__(self, *, is_disposable: bool) -> None:
        threads.start_deferred()
        self.known: set[int] = set()
        self.is_in_step = True
        self.has_answered = False
        self.has_ended = False
        self._is_disposable = is_disposable
        self._only = threading.Lock()
        self._number = 0
        self._unused: list[int] | None = []
        self._inbox: Segment | None = None
        self._outbox: Segment | None = None
        self._started: Flag | None = None
        self._error: BaseException | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        _all.add(self)

    @property
    def pid(self) -> int | None:
        """The id of the process; None before the first request."""
        return None if self._process is None else self._process.pid

    def ask(
        self,
        action: str,
        body: bytes | None,
        pieces: Sequence[bytes | memoryview],
        *,
        key: int = 0,
        method: str | None = None,
        definition: bool = False,
    ) -> Any:
        """Makes a request and returns the result; waits without holding the interpreter.

        Args:
            action, key, method, definition: as in `Request`.
            body, pieces: the arguments, as `pack` returns them.

        Raises:
            Died: the process has ended without an answer.
            RuntimeError: a signal handler or a finalizer asks in the middle of another request of the same thread.
            BaseException: what the function raised.
        """
        if self._only.locked() and is_running(WorkerProcess._ask, self):
            raise RuntimeError("a signal handler or finalizer calls, in the middle of another call of the same worker")
        with self._only:
            try:
                return self._ask(action, body, pieces, key, method, definition)
            except BaseException:
                if not self.is_in_step and self._is_disposable:
                    self.kill()
                raise

    def _ask(
        self,
        action: str,
        body: bytes | None,
        pieces: Sequence[bytes | memoryview],
        key: int,
        method: str | None,
        definition: bool,
    ) -> Any:
        was_in_step, self.is_in_step = self.is_in_step, False
        self._start()
        if not was_in_step:
            self._inbox = self._outbox = None
            self._exchange("synchronize")
        unused = self._unused
        unused, self._unused = (None, []) if unused is None else (unused[:_MOST_UNUSED], unused[_MOST_UNUSED:])
        files = []
        places: Sequence[tuple[int, int]] = ()
        if pieces:
            if self._inbox is None or self._inbox.size < size_of(pieces):
                self._inbox = _segment_for(size_of(pieces))
                files.append(self._inbox.descriptor)
            places = self._inbox.write(pieces)
        drops_outbox = self._outbox is not None and not self._outbox.is_unused()
        if drops_outbox:
            self._outbox = None
        reply = self._exchange(
            action,
            files,
            key=key,
            method=method,
            definition=definition,
            arguments=(body, places),
            forget=unused,
            has_inbox=bool(files),
            drops_outbox=drops_outbox,
        )
        if reply.needed:
            self._outbox = _segment_for(reply.needed)
            try:
                reply = self._exchange("memory", [self._outbox.descriptor], has_outbox=True)
            except Died as died:
                raise Died(died.how, was_asked=True) from None
        if reply.keeps_inbox:
            self._inbox = None
        if reply.has_function:
            self.known.add(key)
        self.is_in_step = self.has_answered = True
        assert reply.content is not None
        value = unpack(reply.content, self._outbox)
        if reply.has_failed:
            raise _error_of(Failed(*value))
        return value

    def _exchange(self, action: str, files: Sequence[int] = (), **fields: Any) -> Reply:
        """Sends a request and waits for the reply."""
        connection = self._connection
        assert connection is not None
        self._number += 1
        number = self._number
        packet = pickle.dumps((*Request(number, action, **fields),))
        try:
            if files:
                socket.send_fds(connection, [packet], files)
            else:
                connection.send(packet)
        except OSError:
            raise Died(self._how_it_ended(), was_asked=False) from None
        while True:
            packet = self._received(connection)
            if not packet:
                raise Died(self._how_it_ended(), was_asked=True)
            reply = Reply(*pickle.loads(packet))
            if reply.number == number:
                return reply

    def _received(self, connection: socket.socket) -> bytes:
        """The next packet; empty if the process has ended."""
        assert self._process is not None
        flags = 0
        while True:
            try:
                return connection.recv(PACKET_BYTES, flags)
            except BlockingIOError:  # nothing came for a while
                if flags:
                    return b""
                if self._process.poll() is not None:
                    flags = socket.MSG_DONTWAIT  # it may have answered before it ended
            except OSError:
                return b""

    def _how_it_ended(self) -> str:
        process = self._process
        assert process is not None
        try:
            code = process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its connection"
        self.kill()
        if code >= 0:
            return f"exited with code {code}"
        return f"was killed by signal {-code} ({signal.strsignal(-code)})"

    def forget(self, key: int) -> None:
        """Drops a function that is not called any more; a finalizer may call this."""
        unused = self._unused
        if key in self.known and unused is not None:
            self.known.discard(key)
            unused.append(key)

    def forget_all(self) -> None:
        """Drops all functions."""
        self.known.clear()
        self._unused = None

    # Start and end

    def _start(self) -> None:
        """Starts the process, once."""
        if self._started is None:
            self._started = Flag()
            # No signal is handled in another thread, so what is opened there is also kept.
            threads.start(self._launch)
        self._started.wait()
        if self._error is not None:
            raise self._error
        if self.has_ended:
            raise Died("has ended", was_asked=False)

    def _launch(self) -> None:
        assert self._started is not None
        try:
            if not hasattr(socket, "SOCK_SEQPACKET") or not hasattr(os, "memfd_create"):
                raise OSError("isolate='process' needs sockets that keep messages apart, and files in memory: Linux")
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            timeout = struct.pack("ll", 0, int(_CHECK_SECONDS * 1e6))
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            self._connection = ours
            command = [os.fsdecode(spawn.get_executable()), "-P", "-c", _program(theirs.fileno())]
            # jax, if the user's function imports it, leaves the accelerators to the parent.
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            # Until the worker handles it, Ctrl-C would end it.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                theirs.close()
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()
        if self.has_ended:  # meanwhile
            self.kill()

    def end(self) -> None:
        """Lets the process end by itself; a finalizer may call this."""
        self._let_go()

    def kill(self) -> None:
        """Ends the process at once."""
        if self._process is not None:
            self._process.kill()
        self._let_go()

    def _let_go(self) -> None:
        self.has_ended = True
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):  # it has ended already
                connection.send(pickle.dumps((*Request(0, "end"),)), socket.MSG_DONTWAIT)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # not `close`: another thread may be waiting for an answer
        threads.run_later(lambda: threads.start(self._reap))

    def _reap(self) -> None:
        """Waits for the end of the process and frees what it had."""
        if self._process is not None:
            self._process.wait()
        if self._connection is not None:
            with self._only:
                self._connection.close()
        self._inbox = self._outbox = None
        _all.discard(self)

    def end_by(self, deadline: float) -> None:
        """Waits for the end of the process, and ends it at the deadline, in seconds of `time.monotonic`."""
        try:
            if self._process is not None:
                self._process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self.kill()
        self._reap()

    def forget_after_fork(self) -> None:
        """Leaves the process to the parent, in a forked child."""
        self.has_ended = True
        self._only = threading.Lock()
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.returncode = 0  # it is no child of this process


def _program(descriptor: int) -> str:
    modules = [(module.__name__, module.__file__) for module in (standard_objects, messages, worker)]
    path = [entry for entry in sys.path if isinstance(entry, str)]
    return _PROGRAM.format(path=path, modules=modules, descriptor=descriptor)


def _segment_for(size: int) -> Segment:
    return Segment(max(_LEAST_BYTES, 1 << (size - 1).bit_length()))


def _error_of(failed: Failed) -> BaseException:
    """The exception, with the traceback in the worker as a note."""
    error: BaseException | None = None
    if failed.pickled is not None:
        with contextlib.suppress(Exception):
            error = pickle.loads(failed.pickled)
    if error is None:
        error = RuntimeError(f"an exception that cannot be pickled: {failed.text}")
    with contextlib.suppress(Exception):  # an exception may be immutable
        error.add_note(f"In its worker process:\n{failed.traceback.rstrip()}")
    return error


def end_all() -> None:
    """Ends all workers, at exit; those that do not end by themselves are killed."""
    remaining = [*_all]
    for process in remaining:
        process.end()
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in remaining:
        process.end_by(deadline)


def forget_after_fork() -> None:
    """Leaves all workers to the parent, in a forked child."""
    for process in [*_all]:
        process.forget_after_fork()
    _all.clear()
