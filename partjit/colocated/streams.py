"""Streams: ordered queues of colocated calls.

Every thread has a stream of its own, in which its calls run in program order; calls on different streams overlap. A
named stream is the same for all threads. Calls made inside of a colocated function are on a stream that belongs to the
stream of that function, so that they are ordered as if the function stood where it is called.
"""

import contextlib
import contextvars
import threading
import time
import weakref
from typing import Any

from partjit import _compat
from partjit.checks import require, require_flag, require_integer, require_number, wrong_type
from partjit.colocated import calls, failures
from partjit.colocated.calls import Lane

__all__ = [
    "Stream",
    "as_stream",
    "current_stream",
    "entered_stream",
    "inside",
    "join",
    "stream",
    "traced_stream",
    "wait",
]

_SIZE = 128
_lock = threading.RLock()  # a finalizer may come in between
_named: "weakref.WeakValueDictionary[str, Stream]" = weakref.WeakValueDictionary()
_scope: "contextvars.ContextVar[Stream | None]" = contextvars.ContextVar("partjit_colocated_stream", default=None)
_traced: "contextvars.ContextVar[Stream | None]" = contextvars.ContextVar("partjit_traced_stream", default=None)


class Stream(Lane):
    """An ordered queue of colocated calls; `colocated.stream` makes one.

    Attributes:
        name: its name, or None.
        size: how many calls may be in it; whoever adds another waits.
        is_private: whether only one thread can add to it.
        root: the stream of the calls inside of whose calls its own are made; itself for others.
    """

    __slots__ = ("_nested", "is_private", "name", "root")

    def __init__(
        self, name: str | None = None, size: int = _SIZE, is_private: bool = False, root: "Stream | None" = None
    ) -> None:
        require("Stream", "name", name, str | None, "the name of a stream, or None")
        require("Stream", "root", root, Stream | None, "a Stream or None")
        super().__init__(require_integer("Stream", "size", size, 1))
        self.name = name
        self.is_private = require_flag("Stream", "is_private", is_private)
        self.root: Stream = self if root is None else root
        self._nested: weakref.ref[Stream] | None = None

    @property
    def nested(self) -> "Stream":
        """The stream of the calls that are made inside of its calls, the same as long as there are some."""
        with _lock:
            found = self._nested() if self._nested is not None else None
            if found is None:
                found = Stream(root=self.root)
                self._nested = weakref.ref(found)
            return found

    def __reduce__(self) -> Any:
        if self.name is None:
            raise TypeError("a stream without a name belongs to its process: name it to refer to it from elsewhere")
        return as_stream, (self.name,)

    def __repr__(self) -> str:
        return f"Stream({self.name or 'anonymous'}, {len(self.calls)} of {self.size} calls)"


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.stream = Stream(is_private=True)


_of_thread = _OfThread()


def current_stream() -> Stream:
    """The stream of the innermost `with colocated.stream(...)`, or that of the thread."""
    return _scope.get() or _of_thread.stream


def entered_stream() -> Stream | None:
    """The stream of the innermost `with colocated.stream(...)`, None outside of any."""
    return _scope.get()


def traced_stream() -> Stream | None:
    """The stream of the innermost `with colocated.stream(...)` that the function being traced has entered itself."""
    return _traced.get()


def as_stream(stream: str | Stream, where: str = "colocated.stream", argument: str = "stream") -> Stream:
    """The stream of a name, or the stream itself.

    Args:
        stream: the one or the other.
        where, argument: what was called with it, as which argument, for messages.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(stream, Stream):
        return stream
    if not isinstance(stream, str):
        raise wrong_type(where, argument, stream, "the name of a stream or a Stream")
    with _lock:
        found = _named.get(stream)
        if found is None:
            found = _named[stream] = Stream(stream)
        return found


def inside(stream: Stream) -> None:
    """Makes the calls of this context nested ones of a stream's call."""
    _scope.set(stream.nested)


def stream(name: str | None = None, *, size: int | None = None) -> contextlib.AbstractContextManager[Stream, None]:
    """Sends the colocated calls made in the `with` block to a stream, and waits for them at its end.

    Args:
        name: the same name means the same stream, in all threads. Without, the stream is a new one.
        size: how many calls may be in the stream before the next one makes its caller wait, 128 unless stated;
            for a named stream from now on.

    Raises:
        ValueError: the size is not positive.
        TypeError: the name is no name, or the size no number.
        Exception: what a call of the stream raised that nobody looked at, after all of them ended; unless the block
            itself raised something.

    Example:
        >>> import jax.numpy as jnp
        >>> from partjit import colocated
        >>> double = colocated.colocated_python(lambda x: 2 * x)
        >>> with colocated.stream("left", size=16):
        ...     y = double(jnp.float32(1))
        ...     with colocated.stream("right"):
        ...         z = double(jnp.float32(2))
        >>> y + z
        Array(6., dtype=float32)

    The idea is that of a CUDA stream, and at its end that of a task group.
    """
    require("colocated.stream", "name", name, str | Stream | None, "the name of a stream, or None for a new one")
    return _Scope(name, None if size is None else require_integer("colocated.stream", "size", size, 1))


class _Scope(contextlib.AbstractContextManager[Stream, None]):
    def __init__(self, name: str | None, size: int | None) -> None:
        self._name, self._size = name, size
        self._entered: list[tuple[Stream, list[tuple[Any, Any]]]] = []

    def __enter__(self) -> Stream:
        entered = Stream() if self._name is None else as_stream(self._name)
        if self._size is not None:
            calls.resize(entered, self._size)
        variables = [_scope] if _compat.is_eager() else [_scope, _traced]
        self._entered.append((entered, [(variable, variable.set(entered)) for variable in variables]))
        return entered

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        entered, tokens = self._entered.pop()
        for variable, token in tokens:
            variable.reset(token)
        if not _compat.is_eager():  # its calls are made when the program runs
            return
        if error is None:
            wait(entered)
        else:
            join(entered, None)


def wait(stream: str | Stream | None = None, *, timeout: float | None = None) -> None:
    """Waits until the colocated calls made so far have ended; then raises what failed and nobody looked at.

    Inside of a colocated function it waits for the calls which that function made.

    Args:
        stream: only the calls of this one.
        timeout: in seconds.

    Raises:
        Exception: the first failure that nobody looked at. Others are named in a note of it, and logged.
        TimeoutError: calls still run. It names them.
        TypeError: `stream` is no stream, or `timeout` no number.

    Example:
        >>> import jax.numpy as jnp
        >>> from partjit import colocated
        >>> show = colocated.colocated_python(lambda x: print(f"loss {float(x)}"), out_specs_fn=lambda x: None)
        >>> show(jnp.float32(0.5))
        >>> colocated.wait()
        loss 0.5
    """
    waited_for = None if stream is None else as_stream(stream, "colocated.wait")
    if timeout is not None:
        require_number("colocated.wait", "timeout", timeout, "a number of seconds, or None")
    join(waited_for, timeout)
    running = calls.current_calls()
    failures.raise_unseen(
        lambda failure: (
            (waited_for is None or failure.stream.root is waited_for.root)
            and (not running or calls.descends_from(failure, running[-1]))
        )
    )


def join(stream: Stream | None, timeout: float | None) -> None:
    """Waits as `wait` does, and leaves what failed alone."""
    deadline = None if timeout is None else time.monotonic() + timeout
    running, later = calls.current_calls(), calls.roots_so_far()
    while True:  # a call that was waited for may have made others
        waited_for = [
            call
            for call in calls.unfinished()
            if (stream is None or call.stream.root is stream.root)
            and (calls.descends_from(call, running[-1]) if running else call.root < later)
        ]
        if not waited_for:
            return
        for call in waited_for:
            try:
                call.join(deadline)
            except TimeoutError:
                still = [call for call in waited_for if not call.has_ended]
                raise TimeoutError(
                    f"colocated.wait: after {timeout} s there still run or wait "
                    + ", ".join(f"{call.name!r} (called at {call.site[0]}:{call.site[1]})" for call in still)
                ) from None
