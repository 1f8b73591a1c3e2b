"""Functions of NumPy arrays: they get these in place of arrays, and those that promise it do not run jax."""

from collections.abc import Callable

import jax
import numpy as np

from partjit._jax import to_numpy
from partjit._jax.arrays import ArrayImpl
from partjit._jax.refusal import refusing
from partjit._jax.types import PyTree
from partjit.colocated.runtime.failures import add_note
from partjit.colocated.runtime.host_values import HostArgument

__all__ = ["WITH_NUMPY", "as_numpy", "explain_read_only", "with_numpy_arguments", "without_jax"]

WITH_NUMPY = frozenset({ArrayImpl, HostArgument})
"""The types of arguments that have a NumPy array."""


def with_numpy_arguments(target: Callable[..., PyTree], name: str) -> Callable[..., PyTree]:
    """A function of arrays that calls `target` with NumPy arrays, which are read-only.

    A NumPy array is a view where one buffer holds the array, else a copy made of its shards.

    Args:
        target: takes NumPy arrays.
        name: what it is called in messages.
    """

    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        if not kwargs and WITH_NUMPY.issuperset(map(type, args)):
            args = tuple(map(as_numpy, args))
        else:
            args, kwargs = jax.tree.map(as_numpy, (args, kwargs))
        try:
            return target(*args, **kwargs)
        except Exception as error:
            explain_read_only(error, name)
            raise

    return call


def explain_read_only(error: BaseException, name: str) -> None:
    """Adds a note to an exception of NumPy, or of what takes its arrays, that is about a read-only array."""
    if isinstance(error, ValueError | TypeError) and any(
        isinstance(text, str) and "read-only" in text for text in error.args
    ):
        add_note(
            error,
            f"The NumPy arrays that {name} is called with are read-only, as views of other arrays: write into a copy, "
            "np.array(x)",
        )


def without_jax(target: Callable[..., PyTree], name: str) -> Callable[..., PyTree]:
    """A function that calls `target`, in which jax raises a RuntimeError that says what to do."""
    message = (
        f"{name} has uses_jax=False, but runs jax: executables call it while the devices wait for it, and what it runs "
        "might wait for them. Compute with NumPy, or leave uses_jax out"
    )
    return refusing(target, message)


def as_numpy(array: jax.Array) -> np.ndarray:
    """The read-only NumPy array of an array."""
    if type(array) is HostArgument:
        return array.read_only
    value = to_numpy.as_numpy(array)
    if type(array) is not ArrayImpl and value.flags.writeable:  # those that jax makes are read-only
        value = value.view()
        value.flags.writeable = False
    return value
