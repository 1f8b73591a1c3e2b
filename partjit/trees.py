"""Spec trees over value trees: one spec per leaf of the values, from a tree prefix of specs."""

import jax

from partjit._jax.tracing import tree_prefix_errors
from partjit._jax.types import PyTree
from partjit.errors import ShardingError
from partjit.spec import Spec
from partjit.validate import spec_prefix_message

__all__ = ["broadcast_specs"]


def broadcast_specs(specs: PyTree, values: PyTree, arg_name: str) -> list[Spec]:
    """The spec of each leaf of `values`.

    Args:
        specs: a parsed spec tree; each of its leaves applies to the subtree of `values` at its position.
        values: a tree with the structure of the values.
        arg_name: the user's name of the spec tree, for messages.

    Raises:
        ShardingError: `specs` is no tree prefix of `values`; the message says where they differ.
    """
    spec_leaves, spec_tree = jax.tree.flatten(specs)
    try:
        subtrees = spec_tree.flatten_up_to(values)
    except (ValueError, RuntimeError):  # of which the latter is about an array that jax wanted to show, and was deleted
        errors = [str(error(arg_name)) for error in tree_prefix_errors(specs, values)]
        raise ShardingError(spec_prefix_message(arg_name, spec_tree, jax.tree.structure(values), errors)) from None
    return [
        spec
        for spec, subtree in zip(spec_leaves, subtrees, strict=True)
        for _ in range(jax.tree.structure(subtree).num_leaves)
    ]
