"""jax's C++ dispatch: functions that run a compiled program without a Python frame."""

from collections.abc import Callable, Hashable, Mapping, Sequence

import jax
from jax._src import api_util, config, pjit, tree_util
from jax._src.api_util import InternalFloatingPointError
from jax._src.interpreters import pxla
from jax._src.interpreters.pxla import MeshExecutable, MeshExecutableFastpathData
from jax._src.lib import _jax
from jax.extend.core import ClosedJaxpr
from jaxlib._jax import PjitFunction
from jaxlib._profiler import TraceMe

from partjit._jax.types import PyTree, PyTreeDef
from partjit._jax.versions import RELEASE

__all__ = [
    "USE_OF_DONATED_BUFFERS_CRASHES",
    "InternalFloatingPointError",
    "PjitFunction",
    "fast_path_data",
    "is_profiled",
    "make_cpp_function",
    "recheck_for_nans",
    "results_are_checked",
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
) -> MeshExecutableFastpathData | None:
    """What the C++ function needs to run `executable` by itself, or None where it cannot (effects, refs)."""
    return pjit._get_fastpath_data(executable, out_tree, args, outs, jaxpr.effects, jaxpr.consts, None, consts)


def results_are_checked() -> bool:
    """Whether results are checked for NaNs or infinities: finding where they come from needs all arguments again."""
    return config.debug_nans.value or config.debug_infs.value


def recheck_for_nans(
    error: Exception, fun: Callable[..., PyTree], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> None:
    """Runs `fun` operation by operation to raise FloatingPointError where the first NaN comes from."""
    api_util.maybe_recursive_nan_check(error, fun, args, kwargs)
