"""Whether a call fits the signature of a function, for those that do not call it at once."""

import inspect
import types
from collections.abc import Callable, Mapping, Sequence

from partjit.arguments import signature_of
from partjit.render.numbers import counted

__all__ = ["method_signature_of", "misfit", "own_signature_of"]


def own_signature_of(fun: Callable[..., object]) -> inspect.Signature | None:
    """The signature of the calls of a function or class, or None if it has none.

    It is that of a wrapper, and not of what this wraps: the wrapper may give arguments itself.
    """
    try:
        return inspect.signature(fun, follow_wrapped=False)
    except (ValueError, TypeError):  # of what is written in C, and where `__signature__` is something else
        return None


def method_signature_of(
    cls: type, name: str, signature_of: Callable[..., inspect.Signature | None] = signature_of
) -> inspect.Signature | None:
    """The signature of a method, static method or class method as objects have it, or None if it has none."""
    function = getattr(cls, name)
    if isinstance(inspect.getattr_static(cls, name), types.FunctionType):
        function = types.MethodType(function, cls)  # without its first parameter, whatever that is called
    return signature_of(function)


def misfit(
    name: str, signature: inspect.Signature | None, args: Sequence[object], kwargs: Mapping[str, object]
) -> str | None:
    """What a TypeError says of a call that does not fit; None if it does, or if the signature is unknown.

    Args:
        name: the name of the function.
        signature: its signature, or None if it has none.
        args, kwargs: what it is called with.

    Example:
        >>> misfit("step", inspect.signature(lambda params, x: x), [0], {})
        "step() missing a required argument: 'x'"
    """
    if signature is None:
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        problem = str(error)
    else:
        return None
    if problem == "too many positional arguments":  # of how many, Python says where a function is called
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        most = sum(parameter.kind in kinds for parameter in signature.parameters.values())
        problem = (
            f"takes {counted(most, 'positional argument')} but {len(args)} {'was' if len(args) == 1 else 'were'} given"
        )
    return f"{name}() {problem}"
