"""The specs of arguments and results of colocated functions: trees of shapes, dtypes and shardings."""

import inspect
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Sharding

from partjit._jax.arrays import (
    ArrayImpl,
    aval_of_struct,
    type_and_sharding,
    type_sharding_and_commitment,
)
from partjit._jax.shardings import device_list
from partjit._jax.types import PyTree, PyTreeDef
from partjit.arguments import are_positional, flatten_arguments
from partjit.checks import flattened, leaves_of, shown, unsorted
from partjit.colocated.runtime.host_values import KINDS_OF_NUMPY, LARGE, HostValue, is_host_value, owned
from partjit.colocated.runtime.out_spec import OutSpec
from partjit.colocated.runtime.pending import PendingArray, require_array
from partjit.colocated.runtime.unshared import unshared
from partjit.host_objects import without_objects

__all__ = [
    "InSpecs",
    "OutSpecs",
    "argument_paths",
    "check_out_specs",
    "flat_values",
    "spec_structs",
    "struct_of",
]

_flatten = jax.tree_util.tree_flatten
_PLAIN = frozenset({ArrayImpl})
_kind_of_numpy = operator.attrgetter("__class__", "dtype", "shape")


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
            raise ValueError(f"in_specs do not fit the arguments: expected the structure {self.tree}, but got {bare}")
        wrong = []
        for i, (leaf, spec) in enumerate(zip(leaves, self.leaves, strict=True)):
            fits = leaf.shape == spec.shape and leaf.dtype == spec.dtype
            if fits and check_shardings and spec.sharding is not None:
                fits = _is_same(leaf.sharding, spec.sharding, leaf.ndim)
            if not fits:
                wrong.append(f"{paths()[i]} is {_text(leaf)}, but its spec says {_text(spec)}")
        if wrong:
            raise ValueError("in_specs do not fit the arguments: " + "; ".join(wrong))


class OutSpecs:
    """The results of a specialization.

    Attributes:
        tree: their structure.
        leaves: an OutSpec for each.
        is_leaf: whether the result is one array.
    """

    __slots__ = (
        "_are_large",
        "_glance",
        "_is_none",
        "_is_tuple",
        "_kinds",
        "_scalar_type",
        "_seen",
        "_seen_elsewhere",
        "is_leaf",
        "leaves",
        "tree",
    )

    def __init__(self, leaves: Sequence[OutSpec], tree: PyTreeDef) -> None:
        self.leaves = tuple(leaves)
        self.tree = tree
        self._seen: list[object] | None = None
        self._seen_elsewhere: list[object] | None = None
        self.is_leaf = len(self.leaves) == 1 and jax.tree_util.treedef_is_leaf(tree)
        self._are_large = any(map(OutSpec.is_large, self.leaves))
        # A tuple of NumPy arrays, which most functions of several results return, is recognized in half the time.
        self._is_tuple = tree == jax.tree.structure((0,) * len(self.leaves))
        self._kinds = [(np.ndarray, spec.dtype, spec.shape) for spec in self.leaves]
        self._is_none = tree == jax.tree.structure(None)
        self._scalar_type = self.leaves[0].scalar_type if self.is_leaf else None
        # Only an array on a single device can be uncommitted.
        on_one = any(isinstance(spec.sharding, jax.sharding.SingleDeviceSharding) for spec in leaves)
        self._glance = type_sharding_and_commitment if on_one else type_and_sharding

    @staticmethod
    def of_user(
        out_specs: PyTree, default_sharding: Callable[[tuple[int, ...], int], Sharding], uncommitted: Sequence[Sharding]
    ) -> "OutSpecs":
        """From the option `out_specs`: ShapeDtypeStructs, or arrays as examples.

        Args:
            out_specs: the tree.
            default_sharding: returns the sharding of a spec without one, from its shape and which result it is of.
            uncommitted: the shardings of uncommitted arguments: a result with one of them is uncommitted as well, so
                that it can be combined with arrays on other devices.
        """
        specs, tree = spec_structs(out_specs, "out_specs")
        leaves = []
        for i, spec in enumerate(specs):
            sharding = default_sharding(spec.shape, i) if spec.sharding is None else spec.sharding
            committed = not any(sharding is other for other in uncommitted)
            leaves.append(OutSpec(aval_of_struct(spec), sharding, committed))
        return OutSpecs(leaves, tree)

    def fit(self, returned: Sequence[PyTree], name: str) -> PyTree:
        """The result of the function, each array with its specified sharding.

        Args:
            returned: a list of the result alone. Large NumPy arrays in it are copied if anything else refers to them.
            name: the name of the function in messages.

        Raises:
            ValueError: the shapes, dtypes or structure are not as specified.
        """
        fitted, is_same = self._fitted(returned, name)
        return returned[0] if is_same else self.tree.unflatten(fitted)

    def fit_flat(self, returned: Sequence[PyTree], name: str) -> list[jax.Array]:
        """As `fit`, flat."""
        if self._is_none and returned[0] is None:
            return []
        if self.is_leaf and type(returned[0]) is ArrayImpl and [self._glance(returned[0])] == self._seen:
            return [returned[0]]
        return self._fitted(returned, name)[0]

    def _fitted(self, returned: Sequence[PyTree], name: str) -> tuple[list[jax.Array], bool]:
        """The flat arrays, and whether they are those returned by the function."""
        own = unshared(returned, LARGE) if self._are_large else ()
        (result,) = returned
        if self.is_leaf and type(result) is self._scalar_type:
            return [self.leaves[0].put_numpy(np.asarray(result))], False
        is_array = self.is_leaf and (type(result) is ArrayImpl or type(result) is np.ndarray)
        values: Any = [result] if is_array else leaves_of(self.tree, result)
        if values and type(values[0]) is not ArrayImpl:
            found = self._put_numpy_of(values, own)
            if found is not None:
                return found, False
        try:
            glances = None if values is None else [*map(self._glance, values)]
        except AttributeError:  # a leaf that is not a plain array
            glances = None
        if values is not None and glances is not None:
            if glances == self._seen:
                return values, True
            if glances == self._seen_elsewhere and not any(value.is_deleted() for value in values):
                return [spec.put(value) for spec, value in zip(self.leaves, values, strict=True)], False
        fitted = self.fit_leaves(result, name, own)
        values = self.tree.flatten_up_to(result)
        if _PLAIN.issuperset(map(type, values)):  # remember results that fit, or that all have to be moved
            is_kept = [*map(operator.is_, fitted, values)]
            if all(is_kept):
                self._seen = [*map(self._glance, values)]
            elif not any(is_kept) and all(map(OutSpec.may_put, self.leaves, values)):
                self._seen_elsewhere = [*map(self._glance, values)]
        return fitted, False

    def fit_leaves(self, result: PyTree, name: str, own: Collection[int] = ()) -> list[jax.Array]:
        """The flat arrays of a result, without the quick test; `own` are the ids of arrays that nobody refers to."""
        found = self._put_numpy_of(leaves_of(self.tree, result), own)
        if found is not None:
            return found
        values, tree = flat_values(result, name)
        wrong = [] if tree == self.tree else self._wrong_structure(result)
        if not wrong:
            for i, (value, spec) in enumerate(zip(values, self.leaves, strict=True)):
                if value.is_deleted():
                    raise RuntimeError(
                        f"{name} returned an array that was deleted or donated: {_leaf_paths(result)[i]} "
                        f"({value.aval.str_short()}). Return a copy made before"
                    )
                fits = value.has_dtype(spec.dtype) if type(value) is HostValue else value.dtype == spec.dtype
                if value.shape != spec.shape or not fits:
                    large = value.too_large_for(spec.dtype) if type(value) is HostValue else None
                    text = f"is {value.aval.str_short()}" if large is None else f"has {large}, which does not fit"
                    wrong.append(f"{_leaf_paths(result)[i]} {text}, but its spec says {spec.aval.str_short()}")
        if wrong:
            raise ValueError(
                f"{name} returned what its output specs do not say: {'; '.join(wrong)}. The specs are those of "
                "out_specs or out_specs_fn or, without these, of the first result for arguments of these types and "
                "shardings or, in a program, '-> None'; with mode='inline' and none of them, results may differ"
            )
        return [
            spec.fit(value, lambda i=i: f"{_leaf_paths(result)[i]} of {name}")
            for i, (value, spec) in enumerate(zip(values, self.leaves, strict=True))
        ]

    def fit_numpy(self, result: PyTree, name: str) -> Sequence[np.ndarray]:
        """The flat NumPy arrays and numbers of the result of the function, as specified; raises as `fit`."""
        if self.is_leaf and type(result) is self._scalar_type:
            return [np.asarray(result)]
        if self._is_tuple and type(result) is tuple:
            try:
                if [*map(_kind_of_numpy, result)] == self._kinds:
                    return result
            except AttributeError:  # a number
                pass
        found = self._numpy_of(leaves_of(self.tree, result), None)
        return [*map(np.asarray, self.fit_leaves(result, name))] if found is None else found

    def _put_numpy_of(self, values: Sequence[Any] | None, own: Collection[int]) -> list[jax.Array] | None:
        """The arrays of flat NumPy arrays and numbers that fit; None if there is anything else."""
        found = self._numpy_of(values, lambda value: owned(value, own))
        if found is None:
            return None
        return [spec.put_numpy(value) for value, spec in zip(found, self.leaves, strict=True)]

    def _numpy_of(
        self, values: Sequence[Any] | None, taken: Callable[[np.ndarray], np.ndarray] | None
    ) -> list[np.ndarray] | None:
        """NumPy arrays, as they are `taken`, and numbers that fit; None if there is anything else."""
        if values is None:
            return None
        found: list[np.ndarray] = []
        for value, spec in zip(values, self.leaves, strict=True):
            if type(value) is np.ndarray and value.dtype == spec.dtype and value.shape == spec.shape:
                found.append(value if taken is None else taken(value))
                continue
            if type(value) is spec.scalar_type:
                found.append(np.asarray(value))
                continue
            host = HostValue(value) if is_host_value(value) else None
            if host is None or host.shape != spec.shape or not host.has_dtype(spec.dtype):
                return None
            found.append(host.as_numpy(spec.dtype))
        return found

    def _wrong_structure(self, result: PyTree) -> list[str]:
        expected = {*_leaf_paths(jax.tree.unflatten(self.tree, self.leaves))}
        returned = {*_leaf_paths(result)}
        wrong = [f"{path} is missing" for path in sorted(expected - returned)]
        wrong += [f"{path} is not among them" for path in sorted(returned - expected)]
        return wrong or [f"expected the structure {self.tree}, but got {jax.tree.structure(result)}"]


def flat_values(result: PyTree, name: str, *, waits: bool = True) -> tuple[list[jax.Array | HostValue], PyTreeDef]:
    """The flat result of a function, of arrays and `HostValue`s.

    Args:
        result: what the function returned.
        name: its name in messages.
        waits: whether to wait for results of other calls in it, which are pending otherwise.

    Raises:
        ValueError: a leaf is none of these.
    """
    try:
        leaves, tree = _flatten(result)
    except ValueError as error:
        raise unsorted(error, f"The result of {name}") from None
    for i, leaf in enumerate(leaves):
        if type(leaf) is ArrayImpl:
            continue
        if type(leaf) is PendingArray:
            leaves[i] = leaf.value() if waits else leaf
        elif is_host_value(leaf):
            leaves[i] = HostValue(leaf)
        else:
            require_array(leaf, lambda i=i: f"{_leaf_paths(result)[i]} of {name}")
    return leaves, tree


def spec_struct(leaf: Any, path: str) -> jax.ShapeDtypeStruct:
    """A user's spec as a ShapeDtypeStruct.

    Raises:
        ValueError: it has no shape and dtype.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        if isinstance(leaf.shape, tuple) and getattr(leaf.dtype, "kind", None) not in KINDS_OF_NUMPY:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
    except (AttributeError, TypeError, ValueError):  # attributes of these names that are something else
        pass
    raise ValueError(f"{path} must be a jax.ShapeDtypeStruct, but is {shown(leaf)}")


def struct_of(aval: ShapedArray | jax.ShapeDtypeStruct, sharding: Sharding | None) -> jax.ShapeDtypeStruct:
    """The spec of a value, from its abstract value or another spec, with a sharding."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def spec_structs(specs: PyTree, what: str) -> tuple[list[jax.ShapeDtypeStruct], PyTreeDef]:
    """The leaves of a tree of specs as ShapeDtypeStructs, and its structure; ValueError that names what is none."""
    with_paths, tree = flattened(specs, what)
    return [spec_struct(leaf, f"{what}{jax.tree_util.keystr(path)}") for path, leaf in with_paths], tree


def check_out_specs(where: str, name: str, out_specs: PyTree) -> PyTree:
    """The tree of specs of results, checked."""
    spec_structs(out_specs, f"{where}: {name}")
    return out_specs


def _leaf_paths(tree: PyTree) -> list[str]:
    return [f"result{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _is_same(sharding: Sharding, other: Sharding, ndim: int) -> bool:
    return sharding == other or (sharding.is_equivalent_to(other, ndim) and device_list(sharding) == device_list(other))


def _text(array: jax.Array | jax.ShapeDtypeStruct) -> str:
    text = f"{jax.numpy.dtype(array.dtype).name}[{','.join(map(str, array.shape))}]"
    return text if array.sharding is None else f"{text} with {array.sharding}"
