"""The specs of the arguments of a colocated function: a tree of shapes, dtypes and shardings."""

import inspect
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.core import ShapedArray
from jax.sharding import Sharding
from jax.tree_util import KeyPath, SequenceKey

from partjit._jax.arrays import ArrayImpl, type_sharding_and_commitment
from partjit._jax.shardings import device_list
from partjit._jax.types import PyTree, PyTreeDef
from partjit.arguments import are_positional, flatten_arguments
from partjit.checks import flattened, leaves_of, shown
from partjit.colocated.runtime.spec_structs import spec_struct
from partjit.host_objects import without_objects
from partjit.structures import ANY_ARRAY, differences

__all__ = ["InSpecs", "argument_paths"]

_PLAIN = frozenset({ArrayImpl})


def argument_paths(
    signature: inspect.Signature | None, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[str, ...]:
    """The key path of each argument leaf in terms of the function's parameters."""
    return flatten_arguments(signature, args, kwargs, ((), ()), ((), ())).paths


class InSpecs:
    """The shapes, dtypes and shardings of the arguments of a specialization.

    Attributes:
        tree: the structure of `(args, kwargs)`.
        leaves: a ShapeDtypeStruct for each array; without a sharding, any is accepted.
        are_positional: whether each argument is one array, given by position.
    """

    __slots__ = ("_seen", "are_positional", "leaves", "tree")

    def __init__(self, leaves: Sequence[jax.ShapeDtypeStruct], tree: PyTreeDef) -> None:
        self.leaves = tuple(leaves)
        self.tree = tree
        self.are_positional = are_positional(tree)
        self._seen: list[object] | None = None

    def text(self) -> str:
        """The shapes and dtypes of the arguments, in words."""
        return ", ".join(ShapedArray(x.shape, x.dtype).str_short() for x in self.leaves)

    @staticmethod
    def of_user(in_specs: object) -> "InSpecs":
        """From the option `in_specs`: `(args, kwargs)` of ShapeDtypeStructs, or of arrays as examples.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(in_specs, tuple | list) or len(in_specs) != 2 or not isinstance(in_specs[1], dict):
            raise ValueError(
                f"in_specs must be a pair (args, kwargs) of specs, like ((spec_of_x,), {{}}), but is {shown(in_specs)}"
            )
        args, kwargs = in_specs
        if not isinstance(args, tuple | list):
            raise ValueError(f"in_specs[0] must be a tuple with a spec for each argument, but is {shown(args)}")
        leaves, tree = flattened((tuple(args), kwargs), "in_specs")
        paths = argument_paths(None, args, kwargs)
        structs = [spec_struct(leaf, f"in_specs: {path}") for (_, leaf), path in zip(leaves, paths, strict=True)]
        return InSpecs(structs, tree)

    def leaves_of(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> list[jax.Array] | None:
        """The flat arguments if they are plain arrays of the types and shardings remembered, else None.

        A quick test with false negatives. Lists compare the identities of their items first, which suffices for
        repeated calls.
        """
        is_flat = self.are_positional and not kwargs
        leaves = [*args] if is_flat else leaves_of(self.tree, (args, kwargs))
        try:
            if leaves is not None and [*map(type_sharding_and_commitment, leaves)] == self._seen:
                return leaves
        except AttributeError:  # a leaf that is not a plain array
            pass
        return None

    def remember(self, leaves: Sequence[jax.Array]) -> None:
        """Remembers arguments that fit, so that `leaves_of` recognizes others like them."""
        if _PLAIN.issuperset(map(type, leaves)):
            self._seen = [*map(type_sharding_and_commitment, leaves)]

    def check(
        self,
        leaves: Sequence[jax.Array | jax.ShapeDtypeStruct],
        tree: PyTreeDef,
        paths: Callable[[], Sequence[str]],
        *,
        check_shardings: bool = True,
    ) -> None:
        """Raises ValueError that names each argument that contradicts the specs.

        Args:
            leaves, tree: the arguments, or their types.
            paths: returns their key paths.
            check_shardings: whether to check their shardings.
        """
        if self.tree not in (tree, bare := without_objects(tree)):
            expected, given = (one.unflatten([ANY_ARRAY] * one.num_leaves) for one in (self.tree, bare))
            note = "" if bare == tree else ". None also stands for an argument that is no array"
            wrong = "; ".join(differences(expected, given, _named))
            raise ValueError(f"in_specs do not fit the arguments: {wrong}{note}")
        wrong = []
        for i, (leaf, spec) in enumerate(zip(leaves, self.leaves, strict=True)):
            fits = leaf.shape == spec.shape and leaf.dtype == spec.dtype
            if fits and check_shardings and spec.sharding is not None:
                fits = _is_same(leaf.sharding, spec.sharding, leaf.ndim)
            if not fits:
                wrong.append(f"{paths()[i]} is {_text(leaf)}, but its spec says {_text(spec)}")
        if wrong:
            raise ValueError("in_specs do not fit the arguments: " + "; ".join(wrong))


def _is_same(sharding: Sharding, other: Sharding, ndim: int) -> bool:
    return sharding == other or (sharding.is_equivalent_to(other, ndim) and device_list(sharding) == device_list(other))


def _named(path: KeyPath) -> str:
    """A part of `(args, kwargs)`."""
    (first, *rest) = path
    return ("args" if first == SequenceKey(0) else "kwargs") + jax.tree_util.keystr(tuple(rest))


def _text(array: jax.Array | jax.ShapeDtypeStruct) -> str:
    text = f"{jax.numpy.dtype(array.dtype).name}[{','.join(map(str, array.shape))}]"
    return text if array.sharding is None else f"{text} with {array.sharding}"
