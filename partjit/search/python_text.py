"""Found specs as Python, to be pasted beside a model."""

import collections
import re
from collections.abc import Mapping

import jax
from jax.sharding import PartitionSpec as P

from partjit._jax.types import PyTree
from partjit.inspect.annotated import shown_spec

__all__ = ["rules_of", "shown_tree"]


def rules_of(tree: PyTree) -> dict[str, P]:
    r"""Rules for `partjit.specs_like` that give the leaves of a tree of specs.

    Numbers in paths are left open where all leaves that differ in these only have the same spec.

    Example:
        >>> rules = rules_of({"layers": [{"w": P("x"), "b": P()}, {"w": P("x"), "b": P("x")}]})
        >>> [(rule, *spec) for rule, spec in rules.items()]
        [('^layers/0/b$',), ('^layers/\\d+/w$', 'x'), ('^layers/1/b$', 'x')]
    """
    leaves = [("/".join(map(_key, path)), spec) for path, spec in jax.tree_util.tree_leaves_with_path(tree)]
    alike: dict[str, set[P]] = collections.defaultdict(set)
    matched: dict[str, list[str]] = collections.defaultdict(list)
    for path, spec in leaves:
        for pattern in _patterns(path):
            alike[pattern].add(spec)
            matched[pattern].append(path)
    rules: dict[str, P] = {}
    taken = set[str]()
    for path, spec in leaves:
        if path not in taken:  # a leaf has one rule
            fitting = (one for one in _patterns(path) if len(alike[one]) == 1 and taken.isdisjoint(matched[one]))
            rules[rule := next(fitting)] = spec
            taken.update(matched[rule])
    return rules


def _patterns(path: str) -> list[str]:
    """Expressions that match a path: with all numbers left open, with each of them, with none."""
    parts = re.split(r"(\d+)", path)
    numbers = range(1, len(parts), 2)
    found = []
    for opened in ({*numbers}, *({k} for k in numbers), set[int]()):
        shown = (r"\d+" if k in opened else re.escape(part).replace(r"\-", "-") for k, part in enumerate(parts))
        found.append(f"^{''.join(shown)}$")
    return found


def _key(key: object) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def shown_tree(tree: PyTree, name: str, known: Mapping[str, PyTree] | None = None) -> str:
    """Python for a tree of specs over the value that `name` stands for; `known` are trees that have names already."""
    leaves = jax.tree.leaves(tree)
    if jax.tree.structure(tree).num_nodes == 1 and leaves:
        return shown_spec(leaves[0])
    for other, value in (known or {}).items():
        if jax.tree.structure(value) == jax.tree.structure(tree) and jax.tree.leaves(value) == leaves:
            return other
    if not leaves:
        return "None"  # as that of any tree without arrays, which a function may have under no name
    lines = [f"    {_raw(pattern)}: {shown_spec(spec)}," for pattern, spec in rules_of(tree).items()]
    return "\n".join([f"specs_like({name}, {{", *lines, "})"])


def _raw(pattern: str) -> str:
    return f'r"{pattern}"' if '"' not in pattern else f"r'{pattern}'"
