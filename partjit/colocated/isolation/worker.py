"""The program of a worker process: it answers the requests of its parent, one after another.

A worker loads this module without its package, which imports jax: it may import nothing but the standard library, NumPy
and cloudpickle, and what `messages` imports.
"""

import contextlib
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from partjit.colocated.isolation.messages import (
    PACKET_BYTES,
    Failed,
    Reply,
    Request,
    Segment,
    definition_of,
    dumps,
    pack,
    size_of,
    unpack,
)

__all__ = ["main"]

_MOST_DESCRIPTORS = 2


class _Worker:
    """A worker process.

    Attributes:
        is_busy: whether it runs the user's code for a request.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._inbox: Segment | None = None
        self._outbox: Segment | None = None
        self._targets: dict[int, Callable[..., Any]] = {}
        self._object: Any = None
        self._following: Request | None = None  # received, and not answered
        self.is_busy = False

    def serve(self) -> None:
        """Answers requests until the parent wants no more, or has ended."""
        while (request := self._received()) is not None and request.action != "end":
            if request.action == "synchronize":
                self._inbox = self._outbox = None
                self._reply(Reply(request.number))
            elif request.action != "memory":  # of a result that is not awaited any more
                self._answer(request)
        self._targets.clear()
        self._object = None

    def _received(self) -> Request | None:
        if self._following is not None:
            following, self._following = self._following, None
            return following
        packet, ancillary, _, _ = self._connection.recvmsg(PACKET_BYTES, socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS))
        if not packet:
            return None
        request = Request(*pickle.loads(packet))
        descriptors = [*memoryview(b"".join(data for _, _, data in ancillary)).cast("i")]
        if request.has_inbox:
            self._inbox = Segment.of(descriptors.pop(0))
        if request.has_outbox or request.drops_outbox:
            self._outbox = Segment.of(descriptors.pop(0)) if request.has_outbox else None
        return request

    def _answer(self, request: Request) -> None:
        self.is_busy = True
        has_failed, body, pieces = self._outcome(request)
        self.is_busy = False
        number, places = request.number, []
        if pieces and (self._outbox is None or self._outbox.size < size_of(pieces)):
            self._reply(Reply(number, needed=size_of(pieces)))
            following = self._received()
            if following is None or following.action != "memory":
                self._following = following
                return
            number = following.number
        if pieces:
            assert self._outbox is not None
            places = self._outbox.write(pieces)
        pieces.clear()  # which may be arguments
        keeps_inbox = self._inbox is not None and not self._inbox.is_unused()
        if keeps_inbox:
            self._inbox = None
        has_function = request.key in self._targets
        self._reply(Reply(number, (body, places), has_failed, keeps_inbox=keeps_inbox, has_function=has_function))

    def _outcome(self, request: Request) -> tuple[bool, bytes | None, list[bytes | memoryview]]:
        """Whether the request fails, and its packed result or failure."""
        has_failed = False
        try:
            packed = _dumps_result(self._result(request))
        except BaseException as error:
            has_failed, packed = True, dumps((*_failed(error),))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        body, pieces = pack(*packed)
        return has_failed, body, [*pieces]

    def _result(self, request: Request) -> Any:
        if request.forget is None:
            self._targets.clear()
        for key in request.forget or ():
            self._targets.pop(key, None)
        assert request.arguments is not None
        if request.definition:
            definition, path, arguments = unpack(request.arguments, self._inbox)
            sys.path[:] = path
            target = pickle.loads(definition)
            if request.action == "construct":
                self._object = target()
                return None
            self._targets.setdefault(request.key, target)
        else:
            arguments = unpack(request.arguments, self._inbox)
        args, kwargs = arguments
        if request.method == "__enter__":  # which returns the object, as a rule
            self._object.__enter__()
            return None
        if request.method is not None:
            return getattr(self._object, request.method)(*args, **kwargs)
        return self._targets[request.key](*args, **kwargs)

    def _reply(self, reply: Reply) -> None:
        with contextlib.suppress(ConnectionError):  # the parent has ended, as the next `recvmsg` finds
            self._connection.send(pickle.dumps((*reply,)))

    def watch(self) -> None:
        """Ends the process if its parent ends, or lets go of it, during a call that may never end."""
        poll = select.poll()
        poll.register(self._connection, 0)  # for the end of the connection only
        poll.poll()
        while not self.is_busy:
            time.sleep(0.1)
        os._exit(1)


def _dumps_result(result: object) -> tuple[bytes, list[memoryview]]:
    try:
        return dumps(result)
    except Exception as error:
        error.add_note(f"the result, of type {type(result).__qualname__}, cannot be pickled")
        raise


def _failed(error: BaseException) -> Failed:
    own = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename == __file__:
        own = own.tb_next
    error.__traceback__ = own
    name = type(error).__qualname__
    try:
        text = f"{name}: {error}"
    except Exception:
        text = name
    try:
        written = "".join(traceback.format_exception(error))
    except Exception:
        written = text
    error.__traceback__ = None
    pickled: bytes | None = None
    with contextlib.suppress(Exception):
        pickled = definition_of(error)
        if type(pickle.loads(pickled)) is not type(error):
            pickled = None
    return Failed(pickled, text, written)


def main(descriptor: int) -> None:
    """Serves the parent at the other end of a socket, until that is closed."""
    # A terminal sends Ctrl-C to all of its processes, and the parent decides what it means. Other than an ignored
    # signal, a handler is not inherited by what the user's code starts.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    worker = _Worker(socket.socket(fileno=descriptor))
    threading.Thread(target=worker.watch, daemon=True).start()
    worker.serve()
