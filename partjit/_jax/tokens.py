"""The tokens by which jax orders what has an effect in the programs that a thread starts one after another."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import dispatch
from jax._src.interpreters import mlir
from jax.extend.core import ClosedJaxpr, Effect

from partjit._jax.arrays import is_computed
from partjit._jax.shardings import device_list
from partjit._jax.types import Device

__all__ = ["allow_memory_kinds", "pass_tokens_on", "wait_for_effect"]

_PAUSE = 0.5e-3
_passed_on: set[Effect] = set()
_TokensOfThread: Any = dispatch.RuntimeTokenSet
_rule_of_jax = _TokensOfThread.get_token_input
_lowered_by_jax: Any = mlir.lower_jaxpr_to_fun


def allow_memory_kinds() -> None:
    """Lets jax lower a program with tokens that has an array in another memory than the default one.

    Where it has, jax finds more results, tokens among them, than it knows memories of.
    """
    mlir.lower_jaxpr_to_fun = _lower_jaxpr_to_fun


def _lower_jaxpr_to_fun(
    ctx: Any,
    name: str,
    jaxpr: ClosedJaxpr,
    effects: Sequence[Effect],
    *,
    propagated_out_mem_kinds: Any = None,
    **more: Any,
) -> Any:
    if propagated_out_mem_kinds is not None:
        propagated_out_mem_kinds = (*[None] * len(effects), *propagated_out_mem_kinds)
    return _lowered_by_jax(ctx, name, jaxpr, effects, propagated_out_mem_kinds=propagated_out_mem_kinds, **more)


def wait_for_effect(effect: Effect, deadline: float | None) -> bool:
    """Waits for what has an ordered effect in the programs that this thread has started, whether it failed or not.

    Args:
        effect: the effect.
        deadline: in seconds of `time.monotonic`, or None.

    Returns:
        Whether it ended by then.
    """
    token: Any = dispatch.runtime_tokens.current_tokens.get(effect)
    if token is None:
        return True
    while deadline is not None and not token._buf.is_ready():  # jax can only wait without a deadline
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the caller gets it with the results
        token.block_until_ready()
    return True


def pass_tokens_on(effect: Effect) -> None:
    """Lets a thread start a program with an effect before the last one with that effect has ended.

    jax waits for the end, and makes a new token, for the case that the devices are others. On the same devices the
    token of the one program can be an argument of the other, which then waits for it as for any argument.
    """
    _passed_on.add(effect)
    _TokensOfThread.get_token_input = _token_input


def _token_input(tokens: Any, effect: Effect, devices: Sequence[Device]) -> Any:
    token = tokens.current_tokens.get(effect) if effect in _passed_on else None
    if token is not None:
        is_on_them = [*device_list(token._buf.sharding)] == [*devices]
        if (is_on_them and not is_computed(token._buf)) or not _has_failed(token._buf):
            return token if is_on_them else _rule_of_jax(tokens, effect, devices)
        del tokens.current_tokens[effect]
    return _rule_of_jax(tokens, effect, devices)


def _has_failed(array: jax.Array) -> bool:
    try:
        array.block_until_ready()
    except jax.errors.JaxRuntimeError:  # its caller gets it with the results
        return True
    return False
