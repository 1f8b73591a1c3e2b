"""A colocated function as it was defined: what runs, the options of its calls, and its calls that were made early."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from partjit.colocated.options import Options
from partjit.colocated.runtime.call import Lane
from partjit.colocated.runtime.run_ahead import RunAhead

__all__ = ["Definition", "HostFunction"]


@dataclasses.dataclass(frozen=True, eq=False)
class HostFunction:
    """A function that runs on hosts.

    Attributes:
        name: what it is called in messages.
        signature: its parameters, if they are known.
        load: gives the function that runs on this host; called once per specialization, by its first call.
        lane: the order of its calls beside that of their stream, if it is the method of an object.
        reference: for a copy of the colocated function elsewhere, if copying the function is not enough: what makes it,
            and with which arguments before the function and its options.
    """

    name: str
    signature: inspect.Signature | None
    load: Callable[[], Callable[..., Any]]
    lane: Lane | None = None
    reference: tuple[Callable[..., Any], tuple[Any, ...]] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Definition:
    """A function with the options of its calls.

    Attributes:
        function: what runs.
        options: what is known of its calls beforehand.
        ahead: its calls that were made before their results are requested; None if there are none.
    """

    function: HostFunction
    options: Options
    ahead: RunAhead | None = None

    @property
    def name(self) -> str:
        """What the function is called in messages."""
        return self.function.name
