"""Spec trees over value trees: one spec per leaf of the values, from a tree prefix of specs."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.tree_util import KeyPath

from partjit._jax.tracing import tree_prefix_errors
from partjit._jax.types import PyTree
from partjit.checks import abridged
from partjit.errors import ShardingError
from partjit.spec import Spec
from partjit.structures import differing_nodes, is_leaf, keys_of, kind_of, listed, similar
from partjit.validate import Mismatch, listing

__all__ = ["Values", "broadcast_specs"]


@dataclasses.dataclass(frozen=True)
class Values:
    """How messages name a tree of values.

    Attributes:
        what: the tree: `"the result of step"`.
        path: its key path; for the tuple of the arguments of a call, that of each argument.
        beside: what follows where these are listed: the arguments that are none of them.
    """

    what: str
    path: str | Sequence[str]
    beside: str = ""

    def path_of(self, path: KeyPath) -> str:
        """The key path of a part of it."""
        if isinstance(self.path, str):
            return self.path + jax.tree_util.keystr(path)
        (first, *rest) = path
        assert isinstance(first, jax.tree_util.SequenceKey)  # in the tuple of arguments
        return self.path[int(first.idx)] + jax.tree_util.keystr(tuple(rest))


def broadcast_specs(
    specs: PyTree, values: PyTree, arg_name: str, named: Callable[[], Values], where: str = "pjit"
) -> list[Spec]:
    """The spec of each leaf of `values`.

    Args:
        specs: a parsed spec tree; each of its leaves applies to the subtree of `values` at its position.
        values: a tree with the structure of the values.
        arg_name: the user's name of the spec tree, for messages.
        named: how messages name the values; called if there is one.
        where: the public name of the function that the specs were given to.

    Raises:
        ShardingError: `specs` is no tree prefix of `values`; the message says where they differ.
    """
    spec_leaves, spec_tree = jax.tree.flatten(specs)
    try:
        subtrees = spec_tree.flatten_up_to(values)
    except (ValueError, RuntimeError):  # of which the latter is about an array that jax wanted to show, and was deleted
        name = named()
        mismatches = [
            mismatch
            for path, node, value in differing_nodes(specs, values, is_prefix=True)
            for mismatch in _mismatches(arg_name, path, node, value, name)
        ]
        headline = (
            f"{where} {arg_name} specification must be a tree prefix of the corresponding value, {name.what}, but is "
            "not:"
        )
        raise ShardingError(listing(headline, mismatches)) from None
    return [
        spec
        for spec, subtree in zip(spec_leaves, subtrees, strict=True)
        for _ in range(jax.tree.structure(subtree).num_leaves)
    ]


def _mismatches(arg_name: str, path: KeyPath, specs: PyTree, values: PyTree, name: Values) -> Iterator[Mismatch]:
    """What is wrong with the node of a spec tree at a key path."""
    where = arg_name + jax.tree_util.keystr(path)
    if not path and not isinstance(name.path, str):
        yield _no_arguments(arg_name, specs, name, name.path)
        return
    what = name.path_of(path)
    keys, expected = keys_of(specs), keys_of(values)
    if type(specs) is type(values) and keys is not None and expected is not None and {*keys} != {*expected}:
        yield from _wrong_keys(where, what, keys, expected)
    elif type(specs) is type(values) and not isinstance(specs, list | tuple):
        yield from (Mismatch(str(error(where)), "") for error in tree_prefix_errors(specs, values))
    else:
        remedy = "give one spec for it" if is_leaf(values) else "give one spec for all of it, or specs in its structure"
        yield Mismatch(f"{where} is {kind_of(specs)}, but {what} is {kind_of(values)}", remedy)


def _no_arguments(arg_name: str, specs: PyTree, name: Values, names: Sequence[str]) -> Mismatch:
    """The mismatch of specs that are for another number of arguments, or for no arguments."""
    remedy = (
        f"give one spec for each of them. Note that pjit {arg_name} that are non-trivial pytrees should always be "
        "wrapped in a tuple representing the argument list"
    )
    if len(names) == 1:
        remedy += (
            f". In particular, you're passing in a single argument which means that pjit {arg_name} might need to be "
            "wrapped in a singleton tuple"
        )
    shown = f"({', '.join(names)}{',' if len(names) == 1 else ''})"
    return Mismatch(f"{arg_name} is {kind_of(specs)}, but {name.what} are {shown}{name.beside}", remedy)


def _wrong_keys(where: str, what: str, keys: Sequence[object], expected: Sequence[object]) -> Iterator[Mismatch]:
    """The mismatches of the keys of a dictionary of specs."""
    missing = [key for key in expected if key not in keys]
    for key in keys:
        if key in expected:
            continue
        meant = similar(key, missing)
        if meant is not None:
            missing.remove(meant)
        remedy = f"did you mean {meant!r}?" if meant is not None else f"{what} has the keys {listed(expected)}"
        yield Mismatch(f"{where} has the key {abridged(key)}, which {what} lacks", remedy)
    if missing:
        noun, them = ("key", "it") if len(missing) == 1 else ("keys", "them")
        yield Mismatch(
            f"{where} lacks the {noun} {listed(missing)} of {what}", f"add {them}, or give one spec for all of {what}"
        )
