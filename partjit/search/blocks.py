"""Repeated blocks, and optimizer state: leaves of which a decision is about all at once.

Layers whose names differ in a number, and which have the same arrays, are decided together. So are a parameter and the
state of the optimizer that has its keys and its shape. A result that has the keys and the shape of an argument is that
argument anew.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from partjit.inspect.why.key_paths import common_end, keys_of

__all__ = ["Leaf", "common_start", "labels_of", "parameter_of", "returned_as", "split_keys"]

_NUMBER = re.compile(r"\d+")
_LEAST = 2


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array among the arguments or results.

    Attributes:
        path: its key path: "params['layers'][0]['w']".
        shape: its shape.
        dtype: the name of its dtype.
        nbytes: its bytes.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the path."""
        return split_keys(self.path)


def split_keys(path: str) -> tuple[str, ...]:
    """The keys of a path; a key that is a path itself, as those of Haiku are, counts as several.

    Example:
        >>> split_keys("params['transformer/h0_attn/query']['w']")
        ('params', 'transformer', 'h0_attn', 'query', 'w')
    """
    keys = keys_of(path) or (path,)
    return tuple(part for key in keys for part in (key.split("/") if "/" in key else [key]) if part)


def labels_of(leaves: Sequence[Leaf]) -> list[str]:
    """A label for each leaf; those of repeated blocks have `*` in the place of the number of the block.

    A block is a subtree with several matrices; a name that differs in a number from that of another subtree, with the
    same arrays in the same places, is one of its instances. Dense_0 and Dense_1, with one matrix each, are none.

    Example:
        >>> def leaf(path, *shape):
        ...     return Leaf(path, shape, "float32", 4)
        >>> labels_of([leaf(f"p['block_{i}']['{name}']", 4, 4) for i in range(2) for name in ("up_0", "up_1")])
        ['p/block_*/up_0', 'p/block_*/up_1', 'p/block_*/up_0', 'p/block_*/up_1']
    """
    root = _Node()
    for number, leaf in enumerate(leaves):
        node = root
        for key in leaf.keys:
            node = node.children.setdefault(key, _Node())
        node.leaves.append((number, leaf))
    labels = [""] * len(leaves)
    _label(root, (), labels)
    return labels


class _Node:
    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.leaves: list[tuple[int, Leaf]] = []
        self._form: tuple[Any, ...] | None = None

    @property
    def form(self) -> tuple[Any, ...]:
        """What subtrees with the same arrays in the same places have in common."""
        if self._form is None:
            own = tuple((leaf.shape, leaf.dtype) for _, leaf in self.leaves)
            self._form = own, tuple(sorted((key, child.form) for key, child in self.children.items()))
        return self._form

    @property
    def matrices(self) -> int:
        own = sum(len(leaf.shape) > 1 for _, leaf in self.leaves)
        return own + sum(child.matrices for child in self.children.values())


def _label(node: _Node, prefix: tuple[str, ...], labels: list[str]) -> None:
    for number, _ in node.leaves:
        labels[number] = "/".join(prefix)
    alike: dict[tuple[str, object], list[str]] = collections.defaultdict(list)
    for key, child in node.children.items():
        if _NUMBER.search(key) and child.matrices >= _LEAST:
            alike[_NUMBER.sub("*", key), child.form].append(key)
    shown = {key: pattern for (pattern, _), keys in alike.items() if len(keys) > 1 for key in keys}
    taken = collections.Counter(shown[keys[0]] for (_, _), keys in alike.items() if keys[0] in shown)
    for (pattern, _), keys in alike.items():
        if taken[pattern] > 1:  # blocks of another kind have the same pattern: name them by their first instance
            shown.update((key, f"{pattern}{keys[0]}") for key in keys if key in shown)
    for key, child in node.children.items():
        _label(child, (*prefix, shown.get(key, key)), labels)


def parameter_of(leaves: Sequence[Leaf], classes: Sequence[Sequence[object]]) -> list[int]:
    """For each leaf the position of the parameter that it is the state of, or its own.

    Where the paths of the two begin to differ, the parameter's has one key that the state's has not, the name of the
    tree of parameters. The dimensions are of the same classes, those of layers are not.

    Example:
        >>> def leaf(path):
        ...     return Leaf(path, (4, 4), "float32", 64)
        >>> a, b, mu = leaf("params['a']['w']"), leaf("params['b']['w']"), leaf("state[0].mu['b']['w']")
        >>> parameter_of([a, b, mu], [("in", "a"), ("in", "b"), ("in", "b")])
        [0, 1, 1]
    """
    keys = [leaf.keys for leaf in leaves]
    by_end: dict[tuple[object, ...], list[int]] = collections.defaultdict(list)
    for k, leaf in enumerate(leaves):
        by_end[leaf.shape, tuple(classes[k]), keys[k][-1:]].append(k)
    matrices = _matrices_below(leaves)
    found = []
    for k, leaf in enumerate(leaves):
        best, most = k, 0
        for p in by_end[leaf.shape, tuple(classes[k]), keys[k][-1:]]:
            common, start = common_end(keys[p], keys[k]), common_start(keys[p], keys[k])
            is_parameter = len(keys[p]) < len(keys[k]) or (
                len(keys[p]) == len(keys[k]) and p < k and matrices[keys[p][: start + 1]] >= _LEAST
            )
            if p != k and is_parameter and common >= len(keys[p]) - start - 1 > 0 and common > most:
                best, most = p, common
        found.append(best)
    return [_last(found, k) for k in range(len(leaves))]


def common_start(keys: Sequence[str], others: Sequence[str]) -> int:
    """The length of the common prefix of two paths.

    Example:
        >>> common_start(("state", "params", "w"), ("state", "mu", "w"))
        1
    """
    return common_end(keys[::-1], others[::-1])


def _matrices_below(leaves: Sequence[Leaf]) -> collections.Counter[tuple[str, ...]]:
    """The number of matrices below each prefix of a path."""
    counts: collections.Counter[tuple[str, ...]] = collections.Counter()
    for leaf in leaves:
        if len(leaf.shape) > 1:
            counts.update(leaf.keys[:k] for k in range(len(leaf.keys) + 1))
    return counts


def _last(parents: Sequence[int], k: int) -> int:
    seen = set[int]()
    while parents[k] != k and k not in seen:
        seen.add(k)
        k = parents[k]
    return k


def returned_as(arguments: Sequence[Leaf], results: Sequence[Leaf]) -> Mapping[int, int]:
    """The positions of results that are arguments anew, and those of the arguments.

    Of the arguments with the shape and dtype of a result it is the one whose path has the longest end in common with
    the result's, each for one result at most.

    Example:
        >>> w, m = Leaf("params['w']", (4,), "float32", 16), Leaf("state['w']", (4,), "float32", 16)
        >>> results = [Leaf(f"result[{k}]['w']", (4,), "float32", 16) for k in range(2)]
        >>> returned_as([w, m], results)
        {0: 0, 1: 1}
    """
    by_type: dict[tuple[object, ...], list[int]] = collections.defaultdict(list)
    for k, leaf in enumerate(arguments):
        by_type[leaf.shape, leaf.dtype].append(k)
    found: dict[int, int] = {}
    taken = set[int]()
    for j, leaf in enumerate(results):
        keys, best, most = leaf.keys, None, 0
        for k in by_type.get((leaf.shape, leaf.dtype), ()):
            own = arguments[k].keys
            common = common_end(own, keys)
            if k not in taken and common > most and (common >= len(own) - 1 or common >= _LEAST):
                best, most = k, common
        if best is not None:
            found[j] = best
            taken.add(best)
    return found
