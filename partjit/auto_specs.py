"""`AUTO`, the spec of what is to be searched, and how a partitioned function is to search."""

import dataclasses
import enum
import os
from collections.abc import Callable, Iterable
from typing import Any, Final

from partjit.checks import (
    items_of,
    require,
    require_callable,
    require_flag,
    require_integer,
    require_number,
    wrong_type,
    wrong_value,
)

__all__ = ["AUTO", "DEFAULT_SEARCH", "Auto", "SearchOptions"]


class Auto(enum.Enum):
    """The type of `AUTO`. An enumeration member stays the same object through pickling and copying."""

    AUTO = "AUTO"

    def __repr__(self) -> str:
        return self.value


AUTO: Final = Auto.AUTO
"""A spec that is chosen by a search: by `partjit.search_specs`, or by a function of `pjit` when it is first called."""


@dataclasses.dataclass(frozen=True, eq=False)  # a machine has no hash
class SearchOptions:
    """How `pjit` searches for the specs that are `AUTO`; what is said of them in `search_specs` holds here.

    Attributes:
        machine: a `partjit.search.Machine`; by default that of the devices of the mesh if it is known, or else an H100.
        memory: the bytes that a device may need; by default what the machine has.
        questions: how many different specs are asked about. The result is the same for the same number.
        time_limit: how many seconds to search, for results that may differ from one run to the next.
        constrain: whether activations may be constrained; or the names of those that may be.
        overlap: which part of the communication is hidden behind computation.
        methods: "descent", "annealing", or both.
        isolated, workers: whether other processes are asked, and how many.
        cache: the folder for what was found; True for `PARTJIT_SEARCH_CACHE` if that is set, or else
            `partjit/search` in `XDG_CACHE_HOME` or `~/.cache`; False for none. What a process has found it also
            remembers.
        progress: as that of `search_specs`.
        measure: how many of the best programs are compiled and timed on the devices, of which the fastest is taken; 0
            for none. On a mesh with devices of several processes anything else is an error when it is searched. There
            is a warning of what could not be run.

    Raises:
        TypeError, ValueError: an option is wrong.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from partjit import AUTO, Mesh, SearchOptions, pjit
        >>> layer = pjit(
        ...     lambda x, w: jnp.tanh(x @ w),
        ...     in_shardings=AUTO,
        ...     out_shardings=AUTO,
        ...     search=SearchOptions(questions=20, isolated=False, cache=False),
        ... )
        >>> with Mesh(jax.devices(), "data"):
        ...     y = layer(jnp.ones((1024, 64)), jnp.ones((64, 64)))
        >>> y.sharding.spec
        P('data',)
    """

    machine: Any = None
    memory: float | None = None
    questions: int = 60
    time_limit: float | None = None
    constrain: bool | Iterable[str] = True
    overlap: float = 0.0
    methods: Iterable[str] = ("descent",)
    isolated: bool = True
    workers: int | None = None
    cache: bool | str | os.PathLike[str] = True
    progress: Callable[[int, int, float], None] | bool | None = None
    measure: int = 0

    def __post_init__(self) -> None:
        what = "SearchOptions"
        if self.machine is not None and not hasattr(self.machine, "seconds_to_send"):
            raise wrong_type(what, "machine", self.machine, "a partjit.search.Machine")
        for name, value in (("memory", self.memory), ("time_limit", self.time_limit)):
            if value is not None and require_number(what, name, value, "a number above 0") <= 0:
                raise wrong_value(what, name, value, "a number above 0")
        require_integer(what, "questions", self.questions, 1)
        if not 0 <= require_number(what, "overlap", self.overlap, "a number between 0 and 1") <= 1:
            raise wrong_value(what, "overlap", self.overlap, "a number between 0 and 1")
        if not isinstance(self.constrain, bool):
            names = items_of(what, "constrain", self.constrain, "True, False, or the names of activations")
            object.__setattr__(self, "constrain", tuple(require(what, "constrain", n, str, "a name") for n in names))
        methods = items_of(what, "methods", self.methods, "some of descent, annealing")
        for method in methods:
            if not isinstance(method, str) or method not in ("descent", "annealing"):
                raise wrong_value(what, "methods", method, "some of descent, annealing")
        object.__setattr__(self, "methods", tuple(methods))
        require_flag(what, "isolated", self.isolated)
        if self.workers is not None:
            require_integer(what, "workers", self.workers, 1)
        require_integer(what, "measure", self.measure, 0)
        require(what, "cache", self.cache, bool | str | os.PathLike, "a folder, True or False")
        if self.progress is not None and not isinstance(self.progress, bool):
            require_callable(what, "progress", self.progress)


DEFAULT_SEARCH: Final = SearchOptions()
"""One for all functions, which compare options by identity."""
