"""What jax's stages (`jax.stages`) contain and do not show."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from jax._src.stages import make_args_info
from jax.stages import Compiled, Traced

from partjit._jax.shardings import UNSPECIFIED, MaybeSharding, UnspecifiedValue

__all__ = ["JitParts", "call_through", "jit_parts", "make_args_info"]


class JitParts(NamedTuple):
    """What `jax.jit` knows of a traced call.

    Attributes:
        in_shardings, out_shardings: of arguments and results; UNSPECIFIED where the partitioner chooses.
        donated: for each argument whether its memory may be reused.
        paths: the key paths of the arguments.
        keep_unused: whether arguments that it does not use are passed to it all the same.
    """

    in_shardings: tuple[MaybeSharding, ...]
    out_shardings: tuple[MaybeSharding, ...]
    donated: tuple[bool, ...]
    paths: tuple[str, ...]
    keep_unused: bool


def jit_parts(traced: Traced) -> JitParts:
    """What is known of what `jax.jit(...).trace(...)` returned (private readers: its stages do not show it)."""
    params = traced._params
    in_shardings = tuple(
        (meta.sharding if meta.committed and meta.sharding is not None else UNSPECIFIED)
        if isinstance(sharding, UnspecifiedValue)
        else sharding
        for sharding, meta in zip(params["in_shardings"], traced._meta_tys_flat, strict=True)
    )
    info = traced.jaxpr.jaxpr.debug_info
    count = len(in_shardings)
    names = info.arg_names if info.arg_names and len(info.arg_names) == count else ("",) * count
    paths = tuple(name or f"argument[{i}]" for i, name in enumerate(names))
    return JitParts(
        in_shardings, tuple(params["out_shardings"]), tuple(params["donated_invars"]), paths, params["keep_unused"]
    )


def call_through(compiled: Compiled, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Has a compiled program be called through what `wrap` makes of its call."""
    hidden: Any = compiled
    hidden._call = wrap(copy.copy(compiled))
