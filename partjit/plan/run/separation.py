"""The arguments of calls without those that are no arrays: static ones, and those that only the host gets."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

from jax.tree_util import tree_leaves

from partjit._jax.types import PyTree, PyTreeDef
from partjit.arguments import Numbered, positions
from partjit.plan.run.kinds import are_arguments, numbers_of

__all__ = ["Separation", "TypedStatics"]

TypedStatics: TypeAlias = tuple[tuple[int | str, type, Hashable], ...]
"""The static arguments of a call, each with its number or name and, before it, its type: 1 and True are equal, and only
values of one type are compared. Of host arguments only the number or name."""


class Separation:
    """What separates the arguments of the calls of one function.

    Args:
        static, host: the numbers and names of its static and of its host arguments.

    Attributes:
        is_needed: whether there are any.
    """

    def __init__(self, static: Numbered, host: Numbered) -> None:
        self._static = static
        self._host = host
        self.is_needed = any((*static, *host))
        self._layouts: dict[int, tuple[Sequence[int], Sequence[int], Sequence[int]]] = {}  # see `_layout`

    def __call__(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree], TypedStatics]:
        """The arguments without static and host arguments, and these."""
        static, host, dynamic = self._layouts.get(len(args)) or self._layout(len(args))
        statics = [(i, type(args[i]), args[i]) for i in static] + [(i, object, None) for i in host]
        if kwargs:
            names, host_names = self._static[1], self._host[1]
            statics += [(name, type(kwargs[name]), kwargs[name]) for name in names if name in kwargs]
            statics += [(name, object, None) for name in host_names if name in kwargs]
            kwargs = {name: value for name, value in kwargs.items() if name not in names and name not in host_names}
        return tuple([args[i] for i in dynamic]), kwargs, tuple(statics)

    def reading(
        self, tree: PyTreeDef, leaves: Sequence[int], count: int
    ) -> Callable[[tuple[PyTree, ...], dict[str, PyTree]], Sequence[Any]]:
        """What returns some leaves of the arguments of a call.

        Args:
            tree: the structure of the arguments that are neither static nor of the host.
            leaves: which of theirs.
            count: how many positional arguments there are.
        """
        if are_arguments(tree, leaves):
            dynamic, numbers = self._layout(count)[2], numbers_of(tree)
            positions = [dynamic[numbers[i]] for i in leaves]
            return lambda args, _: [args[i] for i in positions]

        def read(args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Sequence[Any]:
            found = tree_leaves(self(args, kwargs)[:2] if self.is_needed else (args, kwargs))
            return [found[i] for i in leaves]

        return read

    def _layout(self, count: int) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Which of so many positional arguments are static, of the host, and neither."""
        static, host = (positions(numbered[0], count) for numbered in (self._static, self._host))
        dynamic = [i for i in range(count) if i not in static | host]
        self._layouts[count] = layout = sorted(static), sorted(host), dynamic
        return layout
