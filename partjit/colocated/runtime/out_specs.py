"""The specs of the results of a colocated function, and how what it returned becomes arrays of them."""

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from partjit._jax.arrays import (
    ArrayImpl,
    aval_of_struct,
    type_and_sharding,
    type_sharding_and_commitment,
)
from partjit._jax.layouts import has_default_layout
from partjit._jax.types import PyTree, PyTreeDef
from partjit.checks import leaves_of, unsorted
from partjit.colocated.runtime.host_values import LARGE, HostValue, is_host_value, owned
from partjit.colocated.runtime.out_spec import OutSpec
from partjit.colocated.runtime.pending import PendingArray, require_array
from partjit.colocated.runtime.spec_structs import spec_structs
from partjit.colocated.runtime.unshared import unshared
from partjit.structures import differences

__all__ = ["OutSpecs", "flat_values", "wrong_structure"]

_flatten = jax.tree_util.tree_flatten
_PLAIN = frozenset({ArrayImpl})
_kind_of_numpy = operator.attrgetter("__class__", "dtype", "shape")


class OutSpecs:
    """The results of a specialization.

    Attributes:
        tree: their structure.
        leaves: an OutSpec for each.
        is_leaf: whether the result is one array.
        is_number: whether it is one number, which Python's represent, on devices of this process.
        is_used: whether more than the number was used of one.
    """

    __slots__ = (
        "_are_large",
        "_glance",
        "_have_layouts",
        "_is_tuple",
        "_kinds",
        "_kinds_of_numbers",
        "_number_type",
        "_scalar_type",
        "_seen",
        "_seen_elsewhere",
        "is_leaf",
        "is_none",
        "is_number",
        "is_used",
        "leaves",
        "tree",
    )

    def __init__(self, leaves: Sequence[OutSpec], tree: PyTreeDef) -> None:
        self.leaves = tuple(leaves)
        self.tree = tree
        self.is_used = False
        self._seen: list[object] | None = None
        self._seen_elsewhere: list[object] | None = None
        self.is_leaf = len(self.leaves) == 1 and jax.tree_util.treedef_is_leaf(tree)
        self._are_large = any(map(OutSpec.is_large, self.leaves))
        self._have_layouts = any(len(spec.shape) >= 2 for spec in self.leaves)
        # A tuple of NumPy arrays, which most functions of several results return, is recognized in half the time.
        self._is_tuple = tree == jax.tree.structure((0,) * len(self.leaves))
        self._kinds = [(np.ndarray, spec.dtype, spec.shape) for spec in self.leaves]
        self._kinds_of_numbers = [(spec.scalar_type or np.ndarray, spec.dtype, spec.shape) for spec in self.leaves]
        self.is_none = tree == jax.tree.structure(None)
        self._scalar_type = self.leaves[0].scalar_type if self.is_leaf else None
        kind = self.leaves[0].dtype.kind if self.is_leaf and self._scalar_type is not None else ""
        self._number_type = {"b": bool, "i": int, "u": int, "f": float}.get(kind)
        self.is_number = self.is_leaf and self.leaves[0].is_number_here()
        # Only an array on a single device can be uncommitted.
        on_one = any(isinstance(spec.sharding, jax.sharding.SingleDeviceSharding) for spec in leaves)
        self._glance = type_sharding_and_commitment if on_one else type_and_sharding

    @staticmethod
    def of_user(
        out_specs: PyTree,
        name: str,
        default_sharding: Callable[[tuple[int, ...], int], Sharding],
        uncommitted: Sequence[Sharding],
    ) -> "OutSpecs":
        """From the option `out_specs`: ShapeDtypeStructs, or arrays as examples.

        Args:
            out_specs: the tree.
            name: the name of the function in messages.
            default_sharding: returns the sharding of a spec without one, from its shape and which result it is of.
            uncommitted: the shardings of uncommitted arguments: a result with one of them is uncommitted as well, so
                that it can be combined with arrays on other devices.
        """
        specs, tree = spec_structs(out_specs, f"{name}: out_specs")
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
        if self.is_none and returned[0] is None:
            return None
        arrays = None if self._are_large else self._as_specified(returned[0])
        if arrays is not None:
            made = [spec.put_numpy(owned(array)) for spec, array in zip(self.leaves, arrays, strict=True)]
            return made[0] if self.is_leaf else self.tree.unflatten(made)
        fitted, is_same = self._fitted(returned, name)
        return returned[0] if is_same else self.tree.unflatten(fitted)

    def fit_flat(self, returned: Sequence[PyTree], name: str) -> list[jax.Array]:
        """As `fit`, flat."""
        if self.is_leaf:
            kind = type(returned[0])
            if kind is self._scalar_type:
                return [self.leaves[0].put_numpy(np.asarray(returned[0]))]
            if kind is self._number_type:
                number = self._number_of_python(returned[0])
                if number is not None:
                    return [self.leaves[0].put_numpy(number)]
            if kind is ArrayImpl and [self._glance(returned[0])] == self._seen and self._are_laid_out(returned):
                return [returned[0]]
        elif self.is_none and returned[0] is None:
            return []
        if not self._are_large:
            arrays = self._as_specified(returned[0])
            if arrays is not None:
                return [spec.put_numpy(owned(array)) for spec, array in zip(self.leaves, arrays, strict=True)]
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
        if values is not None and glances is not None and self._are_laid_out(values):
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

    def _are_laid_out(self, values: Sequence[Any]) -> bool:
        """Whether all arrays have the default layout, which a glance does not show."""
        return not self._have_layouts or all(map(has_default_layout, values))

    def fit_leaves(self, result: PyTree, name: str, own: Collection[int] = ()) -> list[jax.Array]:
        """The flat arrays of a result, without the quick test; `own` are the ids of arrays that nobody refers to."""
        found = self._put_numpy_of(leaves_of(self.tree, result), own)
        if found is not None:
            return found
        values, tree = flat_values(result, name)
        wrong = [] if tree == self.tree else wrong_structure(self.tree.unflatten(self.leaves), result)
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
        if self.is_leaf and type(result) is self._number_type:
            number = self._number_of_python(result)
            if number is not None:
                return [number]
        arrays = self._as_specified(result)
        if arrays is not None:
            return arrays
        found = self._numpy_of(leaves_of(self.tree, result), None)
        return [*map(np.asarray, self.fit_leaves(result, name))] if found is None else found

    def _number_of_python(self, value: bool | int | float) -> np.ndarray | None:
        """The NumPy array of a number that is to be one; None for an integer that is too large."""
        try:
            return np.array(value, self.leaves[0].dtype)
        except OverflowError:
            return None

    def _as_specified(self, result: PyTree) -> Sequence[np.ndarray] | None:
        """The NumPy arrays of a result of such and of numbers, one or a tuple, if they are as specified."""
        if self.is_leaf:
            return (result,) if type(result) is np.ndarray and [_kind_of_numpy(result)] == self._kinds else None
        if not self._is_tuple or type(result) is not tuple:
            return None
        try:
            kinds = [*map(_kind_of_numpy, result)]
        except AttributeError:  # a number of Python
            return None
        if kinds == self._kinds:
            return result
        return [*map(np.asarray, result)] if kinds == self._kinds_of_numbers else None

    def _put_numpy_of(self, values: Sequence[Any] | None, own: Collection[int]) -> list[jax.Array] | None:
        """The arrays of flat NumPy arrays and numbers that fit; None if there is anything else."""
        found = self._numpy_of(values, lambda value, spec: owned(value, own, is_for_one=spec.is_on_one_device))
        if found is None:
            return None
        return [spec.put_numpy(value) for value, spec in zip(found, self.leaves, strict=True)]

    def _numpy_of(
        self, values: Sequence[Any] | None, taken: Callable[[np.ndarray, OutSpec], np.ndarray] | None
    ) -> list[np.ndarray] | None:
        """NumPy arrays, as they are `taken`, and numbers that fit; None if there is anything else."""
        if values is None:
            return None
        found: list[np.ndarray] = []
        for value, spec in zip(values, self.leaves, strict=True):
            if type(value) is np.ndarray and value.dtype == spec.dtype and value.shape == spec.shape:
                found.append(value if taken is None else taken(value, spec))
                continue
            if type(value) is spec.scalar_type:
                found.append(np.asarray(value))
                continue
            host = HostValue(value) if is_host_value(value) else None
            if host is None or host.shape != spec.shape or not host.has_dtype(spec.dtype):
                return None
            found.append(host.as_numpy(spec.dtype))
        return found


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


def wrong_structure(specs: PyTree, result: PyTree) -> list[str]:
    """Where the structure of a result is another than that of its specs; ANY_ARRAY is a spec of an array.

    Example:
        >>> from partjit.structures import ANY_ARRAY
        >>> wrong_structure({"loss": ANY_ARRAY}, None), wrong_structure([ANY_ARRAY], [{"a": np.float32(1)}])
        (["result is None, but its spec says a dict with the key 'loss'"],
         ["result[0] is a dict with the key 'a', but its spec says an array"])
    """
    return differences(specs, result, lambda path: f"result{jax.tree_util.keystr(path)}")


def _leaf_paths(tree: PyTree) -> list[str]:
    return [f"result{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
