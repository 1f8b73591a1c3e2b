"""Streams: ordered queues of colocated calls.

Every thread has its own stream, on which its calls run in program order; calls on different streams overlap. A named
stream is shared by all threads. Calls made inside a colocated function are on a stream nested in that of the function,
so that they are ordered as if the function were inlined where it is called.
"""

import contextlib
import contextvars
import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

from partjit import short_cuts
from partjit._jax.tracing import is_eager
from partjit.checks import require, require_flag, require_integer, require_number, wrong_type
from partjit.colocated.runtime import arrivals, failures, lanes, scheduler
from partjit.colocated.runtime.call import Call, Lane, current_calls, descends_from, roots_so_far
from partjit.colocated.runtime.interrupts import Exclusive, deadline_of

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
_changes = Exclusive()
_named: "weakref.WeakValueDictionary[str, Stream]" = weakref.WeakValueDictionary()
_scope: "contextvars.ContextVar[_Entry | Stream | None]" = contextvars.ContextVar(
    "partjit_colocated_stream", default=None
)
_traced: "contextvars.ContextVar[_Entry | Stream | None]" = contextvars.ContextVar(
    "partjit_traced_stream", default=None
)


class Stream(Lane):
    """An ordered queue of colocated calls; `colocated.stream` makes one.

    Attributes:
        name: its name, or None.
        size: how many calls it holds; a caller that adds another waits.
        is_private: whether only one thread can add to it.
        was_entered: whether it was ever entered by a `with` block.
    """

    __slots__ = ("_nested", "_root", "is_private", "name", "was_entered")

    def __init__(
        self, name: str | None = None, size: int = _SIZE, is_private: bool = False, root: "Stream | None" = None
    ) -> None:
        require("Stream", "name", name, str | None, "the name of a stream, or None")
        require("Stream", "root", root, Stream | None, "a Stream or None")
        super().__init__(require_integer("Stream", "size", size, 1))
        self.name = name
        self.is_private = require_flag("Stream", "is_private", is_private)
        self.was_entered = False
        self._root = root
        self._nested: weakref.ref[Stream] | None = None

    @property
    def root(self) -> "Stream":
        """The stream of the outermost call that makes calls on it; itself unless it is nested."""
        return self if self._root is None else self._root  # without a cycle it is freed when it is not used any more

    @property
    def nested(self) -> "Stream":
        """The stream of calls made inside its calls; the same one while it is in use."""
        return _changes.run(self._find_nested)

    def _find_nested(self) -> "Stream":
        found = self._nested() if self._nested is not None else None
        if found is None:
            found = Stream(root=self.root)
            self._nested = weakref.ref(found)
        return found

    def __reduce__(self) -> tuple[Callable[[str], "Stream"], tuple[str]]:
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
    return (_scope.get() and _entered(_scope)) or _of_thread.stream


def entered_stream() -> Stream | None:
    """The stream of the innermost `with colocated.stream(...)`, None outside of any."""
    return None if _scope.get() is None else _entered(_scope)


def traced_stream() -> Stream | None:
    """The stream of the innermost `with colocated.stream(...)` entered by the function being traced itself."""
    return _entered(_traced)


def _entered(variable: "contextvars.ContextVar[_Entry | Stream | None]") -> Stream | None:
    entry = variable.get()
    while type(entry) is _Entry and entry.was_broken_off:
        entry = entry.outer[variable]
    if isinstance(entry, Stream):  # inside a call of it
        nested = _Entry(entry.nested)
        if variable.get() is entry:  # the next call made here is on the same one, which this keeps until then
            variable.set(nested)
        return nested.stream
    return None if entry is None else entry.stream


def as_stream(stream: str | Stream, where: str = "colocated.stream", argument: str = "stream") -> Stream:
    """The stream of a name, or the stream itself.

    Args:
        stream: a name or a stream.
        where, argument: the public function and its argument, for messages.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(stream, Stream):
        return stream
    if not isinstance(stream, str):
        raise wrong_type(where, argument, stream, "the name of a stream or a Stream")
    return _changes.run(_find_named, stream)


def _find_named(name: str) -> Stream:
    found = _named.get(name)
    if found is None:
        found = _named[name] = Stream(name)
    return found


def forget_after_fork() -> None:
    """Starts anew in a forked child: a thread that it does not have may have been in the middle of a change."""
    global _changes
    _changes = Exclusive()


def inside(stream: Stream) -> None:
    """Makes the calls of this context nested in a call of a stream."""
    _scope.set(stream)


def stream(name: str | None = None, *, size: int | None = None) -> contextlib.AbstractContextManager[Stream, None]:
    """Puts the colocated calls made in the `with` block on a stream, and waits for them at its end.

    Args:
        name: the same name means the same stream, in all threads. Without one, the stream is new.
        size: how many calls the stream holds before the next one makes its caller wait, 128 by default; it stays the
            size of a named stream.

    Raises:
        ValueError: the size is not positive.
        TypeError: the name is not a string or a stream, or the size is not an integer.
        Exception: a failure on the stream that nobody has seen, once all calls have ended; unless the block itself
            raised.

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
    return cast(Any, _Scope(name, None if size is None else require_integer("colocated.stream", "size", size, 1)))


class _Entry:
    """The entry of a block.

    Attributes:
        stream: the stream of the block.
        outer: the previous values of the context variables.
        exit: what `with` calls at the end of the block, freed with the block however that ends. None if unknown, or if
            the block ended regularly.
    """

    __slots__ = ("exit", "outer", "stream")

    def __init__(self, stream: Stream | None = None) -> None:
        self.stream = stream
        self.outer: Mapping[contextvars.ContextVar[_Entry | Stream | None], _Entry | Stream | None] = _NO_BLOCK
        self.exit: weakref.ref[Callable[..., None]] | None = None

    @property
    def was_broken_off(self) -> bool:
        """Whether an interrupt prevented the block from being entered or left."""
        return self.exit is not None and self.exit() is None


_NO_BLOCK: Mapping[Any, None] = MappingProxyType({})


class _Exit:
    """`__exit__` of a scope: `with` gets an object that C calls and that only the interpreter refers to."""

    def __get__(self, scope: "_Scope | None", owner: type | None = None) -> Callable[..., None]:
        if scope is None:
            return _Scope.leave  # for `contextlib.ExitStack`
        entry = _Entry()
        leave = functools.partial(_leave, scope, entry)
        entry.exit = weakref.ref(leave)
        scope.next = entry
        return leave


class _Scope:
    """The context manager of a stream; `with` looks up `__exit__` first and then calls `__enter__`."""

    __exit__ = _Exit()

    def __init__(self, name: str | None, size: int | None) -> None:
        self._name, self._size = name, size
        self.next: _Entry | None = None
        self._entries: list[_Entry] = []

    def __enter__(self) -> Stream:
        stream = Stream() if self._name is None else as_stream(self._name)
        if not stream.was_entered:
            stream.was_entered = True
            short_cuts.close(stream)
        if self._size is not None:
            scheduler.resize(stream, self._size)
        entry, self.next = self.next, None
        if entry is None or entry.was_broken_off:  # not by `with`
            entry = _Entry()
            self._entries.append(entry)
        entry.stream = stream
        variables = [_scope] if is_eager() else [_scope, _traced]
        entry.outer = {variable: variable.get() for variable in variables}
        for variable in variables:
            variable.set(entry)
        return stream

    def leave(self, error: type[BaseException] | None, *details: object) -> None:
        """Leaves the block entered last without a `with` statement."""
        _leave(self, self._entries[-1], error, *details)
        self._entries.pop()


def _leave(scope: _Scope, entry: _Entry, error: type[BaseException] | None, *details: object) -> None:
    entered = entry.stream
    if entered is None:  # the user called `__exit__`
        scope.leave(error, *details)
        return
    for variable, outer in entry.outer.items():
        variable.set(outer)
    entry.exit = None  # contexts copied in the block keep its stream
    if not is_eager():  # traced: its calls are made when the program runs
        return
    if error is None:
        wait(entered)
    else:
        arrivals.settle(None)
        join(entered)


def wait(stream: str | Stream | None = None, *, timeout: float | None = None) -> None:
    """Waits until the colocated calls made so far have ended, then raises the first failure that nobody has seen.

    Inside a colocated function it waits for the calls made by that function.

    Args:
        stream: wait for the calls of this stream only.
        timeout: in seconds; `math.inf`, like None, waits for ever.

    Raises:
        Exception: the first unseen failure. Others are listed in a note, and logged.
        TimeoutError: calls have not ended; it names them.
        TypeError: `stream` is not a stream, or `timeout` not a number.
        ValueError: the timeout is nan.

    Example:
        >>> import jax.numpy as jnp
        >>> from partjit import colocated
        >>> show = colocated.colocated_python(lambda x: print(f"loss {float(x)}"), out_specs_fn=lambda x: None)
        >>> def train():
        ...     show(jnp.float32(0.5))
        ...     colocated.wait()
        >>> train()
        loss 0.5
    """
    waited_for = None if stream is None else as_stream(stream, "colocated.wait")
    if timeout is not None:
        require_number("colocated.wait", "timeout", timeout, "a number of seconds, or None")
    deadline = deadline_of(timeout)
    if not arrivals.settle(deadline):
        raise TimeoutError(f"colocated.wait: after {timeout} s programs still run that make calls")
    unfinished = join(waited_for, deadline)
    if unfinished:
        raise TimeoutError(f"colocated.wait: {still_there(unfinished, timeout)}")
    running = current_calls()
    failures.raise_unseen(
        lambda failure: (
            (waited_for is None or failure.stream.root is waited_for.root)
            and (not running or descends_from(failure, running[-1]))
        )
    )


def join(stream: Stream | None, deadline: float | None = None, *, since: int = 0) -> list[Call]:
    """Waits as `wait` does, without raising failures; returns the calls that did not end in time.

    With `since`, which `roots_so_far` gave, calls made before are not waited for.
    """
    running, later = current_calls(), roots_so_far()
    while True:  # the calls waited for may have made others
        waited_for = [
            call
            for call in lanes.unfinished()
            if (stream is None or call.stream.root is stream.root)
            and (descends_from(call, running[-1]) if running else since <= call.root < later)
        ]
        if not waited_for:
            return []
        # The last one of a lane first: waiting for each in turn, this thread would wake up after each of them.
        if not all(scheduler.join(call, deadline) for call in reversed(waited_for)):
            return [call for call in waited_for if not call.has_ended]


def still_there(unfinished: list[Call], timeout: float | None) -> str:
    """The names of calls that did not end in time."""
    return f"after {timeout} s there still run or wait " + ", ".join(
        f"{call.name!r} (called at {call.site[0]}:{call.site[1]})" for call in unfinished
    )
