"""The key paths of arguments, found once for each structure: that takes longer than to flatten the arguments.

And texts about values, in which the paths of equal layers are one.
"""

import math
import re
from collections.abc import Sequence

import jax

from partjit._jax.caches import CacheGroup
from partjit._jax.types import PyTree, PyTreeDef
from partjit.checks import flattened

__all__ = ["folded_paths", "folded_texts", "paths_of", "pattern_of"]


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


def pattern_of(path: str) -> str:
    """A path without its numbers; those of equal layers are equal."""
    return re.sub(r"\d+", "*", path)


def folded_paths(paths: Sequence[str]) -> str:
    """One text for paths that differ in numbers only.

    Example:
        >>> folded_paths(["layers/0/w", "layers/1/w", "layers/2/w"])
        'layers/{0-2}/w'
    """
    return "".join(_range([*dict.fromkeys(parts)]) for parts in zip(*map(_split, paths), strict=True))


def _split(path: str) -> list[str]:
    return re.split(r"(\d+)", path)


def _range(parts: Sequence[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    numbers = sorted(map(int, parts))
    if numbers == [*range(numbers[0], numbers[-1] + 1)]:
        return f"{{{numbers[0]}-{numbers[-1]}}}"
    return f"{{{','.join(map(str, numbers))}}}"


_MOST_ALIKE = 4
"""So many texts that are alike are listed one by one."""


def folded_texts(texts: Sequence[tuple[str, str]]) -> list[str]:
    """Texts about values, given with the path of each; many that differ in the numbers of the path alone are one.

    Example:
        >>> folded_texts([("x", "x is no array"), *((f"w[{i}]", f"w[{i}] is no array") for i in range(60))])
        ['x is no array', 'w[{0-59}] is no array']
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for path, text in texts:
        alike.setdefault((pattern_of(path), _without(path, text)), []).append(path)
    shown: dict[tuple[str, str], str] = {}  # by a path and the rest of the text; empty where another one stands for it
    for (_, rest), paths in alike.items():
        for group in _grids(paths):
            if len(group) > _MOST_ALIKE:
                shown.update(((path, rest), "") for path in group)
                shown[group[0], rest] = rest.replace("\0", folded_paths(group))
    found = [shown.get((path, _without(path, text)), text) for path, text in texts]
    return [text for text in found if text]


def _without(path: str, text: str) -> str:
    return text.replace(path, "\0") if path else text


def _grids(paths: Sequence[str]) -> list[Sequence[str]]:
    """Groups of paths that ranges of numbers describe, and no other paths; one that is repeated is in none."""
    if _is_grid(paths):
        return [paths]
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(re.sub(r"\d+", "*", path, count=1), []).append(path)
    return [group for group in groups.values() if _is_grid(group)]


def _is_grid(paths: Sequence[str]) -> bool:
    numbers = [{*parts} for parts in zip(*map(_split, paths), strict=True)]
    return len({*paths}) == len(paths) == math.prod(map(len, numbers))
