"""Asserting that nothing is traced or compiled, and finding the argument that caused it."""

import collections
import contextlib
import functools
import os
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from partjit._jax.meshes import innermost_mesh
from partjit.checks import require_callable, require_integer
from partjit.trace import TRACE_EVENT

__all__ = ["assert_no_recompile"]

_MOST = 5  # functions that a message names
_ANEW = ": another function each time; make it once, outside of the loop"
_EVENTS = {
    TRACE_EVENT: "traced",
    "/jax/core/compile/backend_compile_duration": "compiled",
}


@contextlib.contextmanager
def assert_no_recompile(*functions: Callable[..., object], warmup: int = 0) -> Iterator[Any]:
    """Asserts that nothing is traced or compiled while the block runs.

    Args:
        *functions: the functions to watch. The block gets wrapped ones, one function or a tuple of several, and only
            calls of these count. Without any, everything in this thread counts.
        warmup: the number of calls of each function that may trace and compile.

    Raises:
        TypeError, ValueError: a function is none, or `warmup` no number of calls.
        AssertionError: at the end of the block, with the difference of every call that traced or compiled to the call
            before, by the path of the argument.

    Example:
        >>> import jax.numpy as jnp
        >>> step = jax.jit(lambda x: x + 1)
        >>> x, longer = jnp.ones(3), jnp.ones(4)
        >>> with assert_no_recompile(step, warmup=1) as watched:
        ...     for _ in range(3):
        ...         x = watched(x)
        >>> with assert_no_recompile(step, warmup=1) as watched:
        ...     watched(x)
        ...     watched(longer)
        Traceback (most recent call last):
            ...
        AssertionError: call 2 of <lambda> traced and compiled: args[0] was float32[3] and is float32[4]
    """
    for i, function in enumerate(functions):
        require_callable("assert_no_recompile", f"functions[{i}]", function)
    warmup = require_integer("assert_no_recompile", "warmup", warmup, 0)
    failures: list[str] = []
    thread = threading.get_ident()
    seen: list[tuple[str, str]] = []

    def listen(event: str, *_: object, **details: object) -> None:
        if event in _EVENTS and threading.get_ident() == thread:
            seen.append((_EVENTS[event], str(details.get("fun_name", ""))))

    def watch(function: Callable[..., object]) -> Callable[..., object]:
        calls = 0
        previous: dict[str, tuple[str, str]] | None = None
        name = getattr(function, "__name__", repr(function))

        @functools.wraps(function)
        def watched(*args: object, **kwargs: object) -> object:
            nonlocal calls, previous
            calls += 1
            signature = _signature(args, kwargs)
            seen.clear()
            result = function(*args, **kwargs)
            if seen and calls > warmup:
                failures.append(f"call {calls} of {name} {_show(seen)}: {_difference(previous, signature, seen)}")
            seen.clear()
            previous = signature
            return result

        return watched

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        watched = tuple(map(watch, functions))
        yield watched[0] if len(watched) == 1 else watched
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    if not functions and seen:
        failures.append(
            f"the block {_show(seen)} {len(seen)} times ({_names(seen)}); name the functions to see which argument it "
            "was"
        )
    if failures:
        raise AssertionError("\n".join(failures))


def _show(seen: Sequence[tuple[str, str]]) -> str:
    return " and ".join(word for word in _EVENTS.values() if word in dict(seen))


def _names(seen: Sequence[tuple[str, str]]) -> str:
    """The names of the functions that were traced, or else compiled, in short."""
    names = [name for word, name in seen if word == "traced"] or [name for _, name in seen]
    counts = collections.Counter(name or "a function" for name in names)
    shown = [name if count == 1 else f"{name} {count} times" for name, count in counts.most_common(_MOST)]
    return ", ".join([*shown, *(["..."] if len(counts) > _MOST else [])])


def _signature(args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """The cache key of a call by the path of the argument: its type, and its value."""
    leaves = jax.tree_util.tree_leaves_with_path({"args": args, "kwargs": kwargs}, is_leaf=lambda leaf: leaf is None)
    signature = {root.key + jax.tree_util.keystr(tuple(rest)): _describe(leaf) for (root, *rest), leaf in leaves}
    mesh = str(innermost_mesh())
    signature["the ambient mesh"] = (mesh, mesh)
    return signature


def _describe(leaf: object) -> tuple[str, str]:
    if isinstance(leaf, jax.Array):
        weak = " (weakly typed)" if leaf.weak_type else ""
        sharding = f" with {leaf.sharding}" if leaf.committed else ""
        text = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]{weak}{sharding}"
    elif isinstance(leaf, np.ndarray | np.generic):
        text = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}] of NumPy"
    elif isinstance(leaf, bool | int | float | complex):  # whose value matters in static arguments only
        return f"a Python {type(leaf).__name__}", f"the {type(leaf).__name__} {leaf!r}"
    elif isinstance(leaf, types.FunctionType):  # which is another one, however equal, where its line runs again
        code = leaf.__code__
        text = f"the function {leaf.__name__} of {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
        return text, f"{text} ({id(leaf):#x})"
    else:
        text = f"the {type(leaf).__name__} {leaf!r}"
    return text, text


def _difference(
    before: dict[str, tuple[str, str]] | None, after: dict[str, tuple[str, str]], seen: Sequence[tuple[str, str]]
) -> str:
    if before is None:
        return "it is the first call here, so there is none to compare it with (see warmup=)"
    missing = ("not there", "not there")
    for part in (0, 1):  # a changed type is the reason; if there is none, a value may be
        changes = [
            f"{path} was {before.get(path, missing)[part]} and is {after.get(path, missing)[part]}"
            for path in {**before, **after}
            if before.get(path, missing)[part] != after.get(path, missing)[part]
        ]
        if changes:
            return "; ".join(changes) + (_ANEW if part and any("the function" in change for change in changes) else "")
    traced = [name for word, name in seen if word == "traced" and name]
    if not traced:
        return "with the same arguments as the call before, so a cache was cleared or missed"
    # What is traced inside of a function ends before it.
    return (
        f"with the same arguments as the call before, {traced[-1]} is traced again: it is another function in each "
        "call, as a lambda, a nested function, or jax.jit or pjit in the body of the step are; make it once, outside "
        "of the step. Or a cache was cleared"
    )
