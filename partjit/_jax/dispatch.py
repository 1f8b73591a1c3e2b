"""jax's C++ dispatch: functions that run a compiled program without a Python frame."""

import contextlib
import functools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
from jax._src import api, api_util, config, dispatch, pjit, tree_util
from jax._src.api_util import InternalFloatingPointError
from jax._src.array import ArrayImpl
from jax._src.interpreters import pxla
from jax._src.interpreters.pxla import MeshExecutable
from jax._src.interpreters.pxla import MeshExecutableFastpathData as FastPath
from jax._src.lib import _jax
from jax.extend.core import ClosedJaxpr
from jaxlib._jax import PjitFunction
from jaxlib._jax.config import Config, unset
from jaxlib._profiler import TraceMe

from partjit._jax.types import PyTree, PyTreeDef
from partjit._jax.versions import RELEASE

__all__ = [
    "USE_OF_DONATED_BUFFERS_CRASHES",
    "FastPath",
    "InternalFloatingPointError",
    "PjitFunction",
    "check_results",
    "fast_path_data",
    "fast_path_then",
    "infinities_are_checked",
    "is_profiled",
    "make_cpp_function",
    "recheck_for_nans",
    "results_are_checked",
    "results_unchecked",
    "set_function_for_nans",
    "then_with_arguments",
]

# jax 0.10 runs a compiled function on an array over several devices whose buffers were donated before, if the call is a
# hot one, and the process dies of a segmentation fault. An array marked as deleted is refused as it should be.
USE_OF_DONATED_BUFFERS_CRASHES = RELEASE < (0, 11)

is_profiled: Callable[[], bool] = TraceMe.is_enabled


def make_cpp_function(
    fun: Callable[..., PyTree],
    name: str,
    cache_miss: Callable[..., tuple[PyTree, object, bool]],
    static: tuple[Sequence[int], Sequence[str]],
    key: Hashable,
) -> PjitFunction:
    """The C++ function that runs a compiled program without a Python frame.

    Args:
        fun: the user's function; called as it is under `jax.disable_jit`.
        name: its name.
        cache_miss: `(*args, **kwargs) -> (results, fast path data or None, whether to forget it)`,
            called for every new signature.
        static: the static arguments' (numbers, names).
        key: distinguishes functions made of the same `fun`: all of them share one cache.
    """
    jit_key = pxla.JitGlobalCppCacheKeys(in_shardings_leaves=(key,))
    registry = tree_util.dispatch_registry
    return _jax.pjit(name, fun, cache_miss, *static, jit_key, registry, pxla.cc_shard_arg, _cpp_cache)


# jax's own caches hold 8192 entries as well; this one is never shared with them.
_cpp_cache = _jax.PjitFunctionCache(capacity=8192)


def fast_path_data(
    executable: MeshExecutable,
    out_tree: PyTreeDef,
    args: Sequence[object],
    outs: Sequence[jax.Array],
    jaxpr: ClosedJaxpr,
    consts: Sequence[jax.Array],
) -> FastPath | None:
    """What the C++ function needs to run `executable` by itself, or None where it cannot (effects, refs)."""
    return pjit._get_fastpath_data(executable, out_tree, args, outs, jaxpr.effects, jaxpr.consts, None, consts)


class _Results:
    """The results of an executable, and the function that gets them."""

    def __init__(self, then: Callable[..., object], count: int) -> None:
        self.then = then
        self.leaves = (0,) * count


class _ResultsAtOnce(_Results):
    """As that, where nothing else is needed."""


def _parts(results: _Results) -> tuple[Sequence[int], Callable[..., object]]:
    return results.leaves, results.then


# C++ makes the tree of the results of a call by calling these with the function and the flat results.
_later: Any = functools.partial
_at_once: Any = operator.call
tree_util.register_pytree_node(_Results, _parts, _later)
tree_util.register_pytree_node(_ResultsAtOnce, _parts, _at_once)


def fast_path_then(
    data: FastPath, is_given: Sequence[bool], then: Callable[..., object], *, is_at_once: bool = False
) -> FastPath:
    """What a C++ function needs that recognizes more arguments than an executable takes, and has a function go on.

    The C++ function returns `functools.partial(then, results)`, with the flat results of the executable.

    Args:
        data: what the C++ function of the executable needs.
        is_given: for each argument whether the executable takes it; in the order in which it does.
        then: the function.
        is_at_once: whether the C++ function calls `then(results)` instead, and returns what that returns.
    """
    own = len(data.const_args)
    kept = [*data.kept_var_bitvec]
    given = iter(kept[own:])
    results = (_ResultsAtOnce if is_at_once else _Results)(then, len(data.out_avals))
    tree = tree_util.dispatch_registry.flatten(results)[1]
    kept = [*kept[:own], *(is_one and next(given) for is_one in is_given)]
    return data._replace(out_pytree_def=tree, kept_var_bitvec=kept)


_end_of_call: Config[Any] = api._post_hook_state
"""What C++ calls at the end of a call, with its arguments and its result: there jax looks for NaNs."""
_set_end_of_call = _end_of_call.set_local
_end_of_call_here = _end_of_call.get_local


def _at_end(
    outer: Any,
    out: PyTree,
    then: Callable[..., object],
    results: Sequence[jax.Array],
    fun: object,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    returned: PyTree,
) -> None:
    if returned is out:
        _set_end_of_call(outer)
        then(results, args, kwargs)
        return
    outer = _end_of_call.get_global() if outer is unset else outer
    if outer is not None:  # a finalizer has called another function in between, or an interrupt left this behind
        outer(fun, args, kwargs, returned)


def then_with_arguments(out: PyTree, then: Callable[..., object], results: Sequence[jax.Array]) -> PyTree:
    """What a function that C++ calls at once returns, to have `then(results, args, kwargs)` called after it.

    These are the arguments of the C++ function; its call ends after that, and returns `out`.
    """
    outer = _end_of_call_here()
    if type(outer) is functools.partial and outer.func is _at_end:  # an interrupt has left it behind
        outer = outer.args[0]
    _set_end_of_call(functools.partial(_at_end, outer, out, then, results))
    return out


def results_are_checked() -> bool:
    """Whether results are checked for NaNs or infinities: finding where they come from needs all arguments again."""
    return config.debug_nans.value or config.debug_infs.value


def infinities_are_checked() -> bool:
    """Whether results are checked for infinities."""
    return config.debug_infs.value


@contextlib.contextmanager
def results_unchecked() -> Iterator[None]:
    """A context in which results are not checked for NaNs or infinities."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


def check_results(results: Sequence[jax.Array], name: str) -> None:
    """Checks results for NaNs or infinities, as far as the user wants that.

    Raises:
        FloatingPointError: there is one; it says that `name` made it.
    """
    try:
        for array in results:
            dispatch.check_special_array(name, cast(ArrayImpl, array))
    except InternalFloatingPointError as error:
        raise FloatingPointError(f"invalid value ({error.ty}) encountered in {name}") from None


def set_function_for_nans(function: PjitFunction, fun: Callable[..., PyTree] | None, name: str) -> None:
    """Says what is run operation by operation where a result of a C++ function has a NaN.

    Args:
        function: the C++ function.
        fun: the function to run; None if nothing is to be, and `name` is all that the error says.
        name: its name.
    """
    function._fun = fun or _Unrepeatable(name)


class _Unrepeatable:
    """Has jax name what has a NaN, as it names a single operation."""

    _apply_primitive = True

    def __init__(self, name: str) -> None:
        self.__qualname__ = name


def recheck_for_nans(
    error: Exception, fun: Callable[..., PyTree], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> None:
    """Runs `fun` operation by operation to raise FloatingPointError where the first NaN comes from."""
    api_util.maybe_recursive_nan_check(error, fun, args, kwargs)
