"""The key paths of arguments, found once for each structure: that takes longer than to flatten the arguments."""

from collections.abc import Sequence

import jax

from partjit._jax.caches import CacheGroup
from partjit._jax.types import PyTree, PyTreeDef
from partjit.checks import flattened

__all__ = ["paths_of"]


class _Known:
    """What was found for structures and names of arguments."""

    MOST = 1024

    def __init__(self) -> None:
        self.found: dict[tuple[PyTreeDef, tuple[str, ...]], tuple[tuple[str, ...], tuple[int, ...]]] = {}

    def clear(self) -> None:
        """Forgets all of it."""
        self.found.clear()


_known = _Known()
_caches = CacheGroup("partjit paths of arguments")
_caches.add(_known)


def paths_of(tree: PyTreeDef, names: tuple[str, ...], args: Sequence[PyTree]) -> tuple[tuple[str, ...], Sequence[int]]:
    """The key path of each leaf in terms of the function's parameters, and how many leaves each argument has.

    Args:
        tree: the structure of the arguments.
        names: their names.
        args: the arguments.
    """
    try:
        found = _known.found.get((tree, names))
    except (TypeError, ValueError):  # what a type of trees says of its structure has no hash, or cannot be compared
        return _found(names, args)
    if found is None:
        found = _found(names, args)
        if len(_known.found) >= _known.MOST:
            _known.clear()
        _known.found[tree, names] = found
    return found


def _found(names: Sequence[str], args: Sequence[PyTree]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    each = [flattened(arg, f"Argument {name}")[0] for name, arg in zip(names, args, strict=True)]
    keystr = jax.tree_util.keystr
    paths = tuple(name + keystr(path) for name, leaves in zip(names, each, strict=True) for path, _ in leaves)
    return paths, tuple(map(len, each))
