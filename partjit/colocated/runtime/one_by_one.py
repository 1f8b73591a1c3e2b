"""A batch of calls as one call: the function runs once for each example, in their order."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from partjit._jax.types import PyTree, PyTreeDef
from partjit.colocated.journaling.identity import current_examples
from partjit.colocated.runtime.failures import add_note
from partjit.colocated.runtime.host_values import Destination
from partjit.colocated.runtime.out_specs import OutSpecs

__all__ = ["Examples", "one_by_one"]


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """The examples of a batch.

    Attributes:
        size: how many there are.
        batched: for each argument whether it has the examples at axis 0; the others are the same for all.
        in_avals: the arguments for one example.
        in_tree: the structure of `(args, kwargs)`.
        out_specs: the results for one example.
        name: the name of the function, in messages.
        inner: the examples in each of these; None if each is one call.
    """

    size: int
    batched: tuple[bool, ...]
    in_avals: tuple[ShapedArray, ...]
    in_tree: PyTreeDef
    out_specs: OutSpecs
    name: str
    inner: "Examples | None"


def one_by_one(target: Callable[..., PyTree], examples: Examples) -> Callable[..., PyTree]:
    """A function of batched arguments that calls `target` with those of one example at a time, and stacks its results.

    The arguments of an example are NumPy arrays if those of the batch are; else arrays, which are put on the devices of
    the batch, numbers only when more than the number is used.

    Args:
        target: the function of one example, or of the examples in it.
        examples: the examples.

    Raises:
        ValueError: when called: the result for an example is not as specified.
    """
    if examples.inner is not None:
        target = one_by_one(target, examples.inner)
    own, tree, size = examples.out_specs, examples.in_tree, examples.size
    are_positional = tree == jax.tree.structure(((0,) * len(examples.batched), {}))

    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves = args if are_positional else tree.flatten_up_to((args, kwargs))
        given = [
            _examples_of(leaf, aval) if is_batched else itertools.repeat(leaf)
            for leaf, aval, is_batched in zip(leaves, examples.in_avals, examples.batched, strict=True)
        ]
        stacks = [np.empty((size, *spec.shape), spec.dtype) for spec in own.leaves]
        stack, kind = (stacks[0], (own.leaves[0].dtype, own.leaves[0].shape)) if own.is_leaf else (None, None)
        is_without_results = own.tree == _NOTHING
        outside, i = current_examples.get(), 0
        try:
            for i, example in enumerate(zip(*given, strict=False)):
                current_examples.set((*outside, i))
                if are_positional:
                    result = target(*example)
                else:
                    args, kwargs = tree.unflatten(example)
                    result = target(*args, **kwargs)
                if result is None and is_without_results:
                    continue
                # Each is taken now: the function may use the memory of its result again.
                if stack is not None and type(result) is np.ndarray and (result.dtype, result.shape) == kind:
                    stack[i] = result
                    continue
                for each, array in zip(stacks, own.fit_numpy(_as_numpy(result), examples.name), strict=True):
                    each[i] = array
        except BaseException as error:
            add_note(error, f"It was called for the example {i} of {size}, as jax.vmap has it")
            raise
        finally:
            current_examples.set(outside)
        return own.tree.unflatten(stacks)

    return call


def _examples_of(batch: jax.Array | np.ndarray, aval: ShapedArray) -> Iterator[jax.Array | np.ndarray]:
    host = np.asarray(batch)
    rows = iter(host) if aval.shape else (host[i, ...] for i in range(len(host)))  # which are arrays as well
    if isinstance(batch, np.ndarray):
        return rows
    destination = Destination(aval, _of_one(batch.sharding), batch.committed, is_explicit=True)
    return map(destination.when_used, rows)


def _of_one(sharding: Sharding) -> Sharding:
    """The sharding of one example of a batch that is sharded so."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


_NOTHING = jax.tree.structure(None)


def _as_numpy(result: PyTree) -> PyTree:
    """A result with NumPy arrays in place of arrays."""
    if type(result) is np.ndarray:
        return result
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, result)
