"""Which call is which, the same after every restart: what a call is a part of, and how many like it came before.

Calls are counted in what they are a part of: an execution of a program, the call that makes them, or, for others, the
journal. Executions are counted likewise. So calls on streams that overlap are told from each other whichever is first.
"""

import contextvars
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Protocol

__all__ = [
    "UNRECORDED",
    "Execution",
    "Place",
    "Scope",
    "current_examples",
    "current_scope",
    "idempotency_key",
    "in_scope_of_caller",
    "next_in",
    "outside_of_calls",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """What a call is of, as long as its function lives.

    Attributes:
        name: that of the function.
        node: its node in its program; empty outside of programs.
        line: where the user's code makes it; empty outside of programs.
        types: those of its arguments.
    """

    name: str
    node: str
    line: str
    types: Callable[[], str]


class Scope(Protocol):
    """What counts calls and executions.

    Attributes:
        program: the program that it is an execution of, with the named stream that it is on; empty if it is none.
        execution: its number.
        counts: counts them, by what they are of.
    """

    @property
    def log(self) -> object:
        """What records them; None if nothing does."""
        ...

    program: str
    execution: int
    counts: "dict[object, itertools.count[int]]"

    @property
    def number(self) -> int:
        """The number of the call that makes these; 0 if none does."""
        ...

    @property
    def path(self) -> str:
        """Which one it is, in words."""
        ...

    def key(self) -> str:
        """What `idempotency_key` returns in it."""
        ...


class _Unrecorded:
    """A call made ahead, which is part of no execution yet, and everything in it."""

    log, program, execution, number, path = None, "", 0, 0, ""

    def __init__(self) -> None:
        self.counts: dict[object, itertools.count[int]] = {}

    def key(self) -> str:
        raise RuntimeError(
            "idempotency_key() was called in a call that runs ahead: which execution will take it is not known yet"
        )


UNRECORDED: Scope = _Unrecorded()
current_scope: "contextvars.ContextVar[Scope | None]" = contextvars.ContextVar("partjit_journal_scope", default=None)

current_examples: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar("partjit_examples", default=())
"""Of a batch that is one call: for which example the function runs now, and of batches of batches for which of each."""


def outside_of_calls() -> RuntimeError:
    """The error of `idempotency_key` where there is none."""
    return RuntimeError(
        "idempotency_key() was called where no colocated call runs that a journal records: open one with "
        "partjit.colocated.journal(path), and call it in the function itself, not in a worker process or in a thread "
        "that it starts"
    )


class Execution:
    """An execution of a program; or, without one, the journal as what counts the calls that nothing else does."""

    __slots__ = ("counts", "execution", "log", "number", "path", "program")

    def __init__(self, log: object, outer: Scope | None, program: str = "", execution: int = 0) -> None:
        self.log = log
        self.number = outer.number if outer is not None else 0
        self.program, self.execution = program, execution
        self.counts: dict[object, itertools.count[int]] = {}
        outside = f"{outer.path}/" if outer is not None and outer.path else ""
        self.path = f"{outside}{program}:{execution}" if program else ""

    def key(self) -> str:
        """There is none."""
        raise outside_of_calls()


def next_in(scope: Scope, what: object) -> int:
    """The number of a call or execution among those like it in a scope."""
    count = scope.counts.get(what)
    if count is None:
        count = scope.counts.setdefault(what, itertools.count())
    return next(count)


def in_scope_of_caller(
    function: Callable[..., Any], elsewhere: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """What `elsewhere` makes of a function, which may run it in another thread, where it counts calls as here."""

    def run_there(scope: Scope | None, *args: object) -> Any:
        token = current_scope.set(scope)
        try:
            return function(*args)
        finally:
            current_scope.reset(token)

    run = elsewhere(run_there)
    return lambda *args: run(current_scope.get(), *args)


def idempotency_key() -> str:
    """A text that is the same for the same call whenever it is made again, and another one for every other call.

    Between its effect and the record of the journal a call may be killed; then it is made again. A service outside
    that takes an idempotency key does once per key what it is asked for.

    Returns:
        The journal, the number of its last commit, the program, the number of its execution since that commit, the
        node, the iteration, the process and, in calls for one shard, its coordinates; under `jax.vmap` the example.

    Raises:
        RuntimeError: no call runs here that a journal records; or it runs ahead, for an execution that is not known.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> from partjit import colocated
        >>> def pay(amount):
        ...     journal, _, key = colocated.idempotency_key().partition("/")
        ...     print(float(amount), key)
        >>> pay = colocated.colocated_python(pay, out_specs_fn=lambda amount: None, mode="inline")
        >>> with tempfile.TemporaryDirectory() as path, colocated.journal(path):
        ...     pay(jnp.float32(3))
        ...     pay(jnp.float32(4))
        3.0 0/pay:0/process-0
        4.0 0/pay:1/process-0
    """
    scope = current_scope.get()
    if scope is None:
        raise outside_of_calls()
    return "/".join([scope.key(), *(f"example-{i}" for i in current_examples.get())])
