"""How the structures of two trees differ, in the words of messages."""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, KeyPath

from partjit._jax.types import PyTree, PyTreeDef
from partjit.checks import abridged, shown

__all__ = ["ANY_ARRAY", "differences", "differing_nodes", "is_leaf", "keys_of", "kind_of", "listed", "similar"]

ANY_ARRAY = object()
"""A leaf in the place of an array of which nothing more is known."""

_MOST_SHOWN = 10


def kind_of(tree: PyTree) -> str:
    """What the root of a tree is; of an array, of which type.

    Example:
        >>> kind_of([1, 2]), kind_of({"a": 1, "b": 2}), kind_of(None), kind_of(jax.numpy.ones(3))
        ('a list of 2', "a dict with the keys 'a', 'b'", 'None', 'an array (float32[3])')
    """
    if tree is None:
        return "None"
    name = type(tree).__name__
    article = "an" if name[:1] in "aeioAEIO" else "a"
    if isinstance(tree, Mapping | list | tuple) and not tree:
        return f"an empty {name}"
    if isinstance(tree, Mapping):
        return f"{article} {name} with the {'key' if len(tree) == 1 else 'keys'} {listed([*tree])}"
    if type(tree) in (list, tuple):
        return f"{article} {name} of {len(tree)}"
    if not is_leaf(tree):
        return f"{article} {name}"
    if tree is ANY_ARRAY:
        return "an array"
    shape, dtype = getattr(tree, "shape", None), getattr(tree, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        return shown(tree)
    return f"an array ({dtype}[{','.join(map(str, shape))}])"


def listed(keys: Sequence[object]) -> str:
    """Some keys of a dictionary, the first ones of many."""
    more = [] if len(keys) <= _MOST_SHOWN else [f"and {len(keys) - _MOST_SHOWN} more"]
    return ", ".join([*map(abridged, keys[:_MOST_SHOWN]), *more])


def similar(name: object, names: Sequence[object]) -> object | None:
    """The one of some names that another one, which is not among them, is most likely meant to be; None if none is.

    Example:
        >>> similar("bais", ["bias", "w"]), similar("x", ["bias", "w"])
        ('bias', None)
    """
    if not isinstance(name, str):
        return None
    spellings = {other.casefold(): other for other in names if isinstance(other, str)}
    close = difflib.get_close_matches(name.casefold(), spellings, n=1)
    return spellings[close[0]] if close else None


def is_leaf(tree: PyTree) -> bool:
    """Whether a tree is one leaf; None is none."""
    return jax.tree_util.all_leaves([tree])


def keys_of(tree: PyTree) -> list[Any] | None:
    """The keys of the root of a tree, if that is a dictionary to jax, whatever its type; None otherwise."""
    keys = [path[0] for path, _ in _children(tree)[0]] if not is_leaf(tree) else []
    is_dictionary = all(isinstance(key, DictKey) for key in keys) and (keys or isinstance(tree, Mapping))
    return [key.key for key in keys] if is_dictionary else None


def differing_nodes(
    expected: PyTree, given: PyTree, *, is_prefix: bool, path: KeyPath = ()
) -> Iterator[tuple[KeyPath, PyTree, PyTree]]:
    """The topmost nodes of two trees, at the same key paths, that differ in type, in keys or in the number of children.

    Args:
        expected: a tree.
        given: the other one.
        is_prefix: whether a leaf of `expected` goes with any tree.
        path: that of both.
    """
    if is_leaf(expected) and (is_prefix or is_leaf(given)):
        return
    children, structure = _children(expected)
    others, other_structure = _children(given)
    if structure != other_structure:
        yield path, expected, given
        return
    for (key, child), (_, other) in zip(children, others, strict=True):
        yield from differing_nodes(child, other, is_prefix=is_prefix, path=(*path, *key))


def differences(expected: PyTree, given: PyTree, named: Callable[[KeyPath], str]) -> list[str]:
    """Where the structure of a tree is another than that of its specs; `named` says what is at a key path.

    Example:
        >>> differences({"a": ANY_ARRAY}, {"A": [ANY_ARRAY]}, lambda path: f"x{jax.tree_util.keystr(path)}")
        ["x['a'] is missing", "x['A'] is not among them: did you mean 'a'?"]
    """
    wrong = []
    for path, spec, value in differing_nodes(expected, given, is_prefix=False):
        keys, expected_keys = keys_of(value), keys_of(spec)
        if type(spec) is type(value) and keys is not None and expected_keys is not None and {*keys} != {*expected_keys}:
            missing = [key for key in expected_keys if key not in keys]
            wrong += [f"{named((*path, DictKey(key)))} is missing" for key in missing]
            for key in keys:
                if key not in expected_keys:
                    meant = similar(key, missing)
                    hint = "" if meant is None else f": did you mean {meant!r}?"
                    wrong.append(f"{named((*path, DictKey(key)))} is not among them{hint}")
        elif type(spec) is type(value) and not isinstance(spec, list | tuple):
            structure, said = jax.tree.structure(value), jax.tree.structure(spec)
            wrong.append(f"{named(path)} has the structure {structure}, but its spec says {said}")
        else:
            wrong.append(f"{named(path)} is {kind_of(value)}, but its spec says {kind_of(spec)}")
    return wrong


def _children(tree: PyTree) -> tuple[list[tuple[KeyPath, Any]], PyTreeDef]:
    """The children of the root of a tree with their keys, and its structure above them."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
