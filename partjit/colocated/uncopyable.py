"""Which parts of an object cannot be pickled: variables, attributes or items, by name."""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import NamedTuple

__all__ = ["uncopyable_parts"]

_MOST_NAMED = 5


class _Part(NamedTuple):
    """A part of an object.

    Attributes:
        access: the expression for the part in the code that uses it: `config['lock']`.
        owner: the function or class that captures it; empty for the object itself.
        value: the part.
    """

    access: str
    owner: str
    value: object


def uncopyable_parts(obj: object, is_copyable: Callable[[object], bool]) -> str:
    """Names the smallest parts of an object that cannot be copied, for an error message; empty if none is found.

    Args:
        obj: the object that could not be copied.
        is_copyable: tests an object.
    """
    found = [*_smallest(_Part("", "", obj), is_copyable, set())]
    named = [
        f"{part.access} ({_kind(part.value)}{f', captured by {part.owner}' if part.owner else ''})"
        for part in found[:_MOST_NAMED]
        if part.access
    ]
    return ", ".join([*named, f"and {len(found) - _MOST_NAMED} more"] if len(found) > _MOST_NAMED else named)


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"a{'n' if name[0] in 'AEIOUaeiou' else ''} {name}"


def _smallest(part: _Part, is_copyable: Callable[[object], bool], seen: set[int]) -> Iterator[_Part]:
    """The parts that cannot be copied although all of their own parts can."""
    seen.add(id(part.value))
    culprits = [inner for inner in _parts(part) if id(inner.value) not in seen and not is_copyable(inner.value)]
    if not culprits:
        yield part
    for inner in culprits:
        if id(inner.value) not in seen:
            yield from _smallest(inner, is_copyable, seen)


def _parts(part: _Part) -> Iterator[_Part]:
    access, owner, value = part
    if isinstance(value, functools.partial):
        yield _Part(access, owner, value.func)
        yield from (_Part(f"{access or 'args'}[{i}]", owner, arg) for i, arg in enumerate(value.args))
        yield from (_Part(name, access or owner, arg) for name, arg in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield _Part(access or "self", owner, value.__self__)
        yield _Part(access, owner, value.__func__)
    elif isinstance(value, types.FunctionType):
        for name, captured in _captured(value).items():
            yield _Part(name, access or owner, captured)
    elif isinstance(value, dict):
        yield from (_Part(f"{access}[{key!r}]", owner, item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from (_Part(f"{access}[{i}]", owner, item) for i, item in enumerate(value))
    elif isinstance(value, type):
        name = value.__qualname__.rpartition(".")[2]
        bases = [cls for cls in reversed(value.__mro__) if cls is not object]
        for key, member in {key: member for cls in bases for key, member in vars(cls).items()}.items():
            if key not in ("__dict__", "__weakref__"):  # made by every class for itself
                yield _Part(f"{name}.{key}", owner, getattr(member, "__func__", member))
    elif type(value).__module__.partition(".")[0] not in sys.stdlib_module_names:  # whose internals say nothing
        attributes = getattr(value, "__dict__", {})
        yield from (_Part(f"{access or 'self'}.{key}", owner, item) for key, item in attributes.items())


def _captured(function: types.FunctionType) -> dict[str, object]:
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # an empty cell
        return {}
    parameters = inspect.signature(function).parameters.values()
    defaults = {f"the default of {p.name}": p.default for p in parameters if p.default is not p.empty}
    return {**variables.globals, **variables.nonlocals, **defaults}
