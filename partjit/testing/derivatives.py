"""Whether the derivatives that functions define themselves are those of what they compute.

A wrong `jax.custom_vjp` is wrong with and without partitioning, so that comparing the two does not find it. Here the
derivative is compared with central differences of the values. As floats are short and functions have kinks, this takes
two steps: only where their differences agree is the function smooth enough to judge its derivative.
"""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

__all__ = ["Recorded", "custom_calls", "wrong_derivative"]

_STEP = 2.0**-7
_TOLERANCE = 0.05
_MOST_CALLS = 3  # of one function that are compared
_MOST_LEAVES = 8  # of the arguments of one call


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A call of a function with a derivative of its own.

    Attributes:
        fun: a `jax.custom_vjp` or `jax.custom_jvp`.
        args: its arguments, arrays among them.
    """

    fun: Any
    args: tuple[object, ...]

    def __str__(self) -> str:
        code = getattr(self.fun.fun, "__code__", None)
        where = "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"
        return f"{getattr(self.fun.fun, '__name__', self.fun.fun)} (a jax.{type(self.fun).__name__}{where})"


def custom_calls(fun: Callable[..., object], args: Sequence[object]) -> list[Recorded]:
    """The calls of users' functions with derivatives of their own while `fun(*args)` runs on values.

    Those whose arguments are no values are left out: in `jax.checkpoint` and `jax.shard_map` they are traced.
    """
    found: dict[int, list[Recorded]] = {}
    thread = threading.get_ident()

    def recording(call: Callable[..., object]) -> Callable[..., object]:
        def recorded(self: Any, *args: object, **kwargs: object) -> object:
            own = str(getattr(self.fun, "__module__", "")).startswith("jax.")
            traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs)))
            calls = found.setdefault(id(self), [])
            if threading.get_ident() == thread and not (own or traced or kwargs) and len(calls) < _MOST_CALLS:
                calls.append(Recorded(self, args))
            return call(self, *args, **kwargs)

        return recorded

    kinds = (jax.custom_vjp, jax.custom_jvp)
    originals = [kind.__call__ for kind in kinds]
    for kind, original in zip(kinds, originals, strict=True):
        kind.__call__ = recording(original)  # type: ignore[method-assign]
    try:
        with jax.disable_jit(), contextlib.suppress(Exception):  # not every program runs on values
            fun(*args)
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.__call__ = original  # type: ignore[method-assign]
    return [call for calls in found.values() for call in calls]


def wrong_derivative(fun: Callable[..., object], args: Sequence[object]) -> str | None:
    """How the derivative of a function differs from that of its values; None if it does not, or that is not clear.

    Example:
        >>> @jax.custom_vjp
        ... def double(x):
        ...     return 2 * x
        >>> double.defvjp(lambda x: (2 * x, None), lambda _, ct: (3 * ct,))
        >>> wrong_derivative(double, [jnp.ones(4)])
        'with respect to args[0] it is ... along a random direction, where the values change by ...'
    """
    paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(tuple(args))
    leaves = [leaf for _, leaf in paths_and_leaves]
    is_array = [isinstance(leaf, jax.Array | np.ndarray | np.generic | float) for leaf in leaves]
    floats = [i for i, leaf in enumerate(leaves) if is_array[i] and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]
    rng = np.random.default_rng(0)
    # Of points in general position: functions have kinks at zero above all.
    values = [_near(np.asarray(leaves[i], np.float32), rng) for i in floats]

    @jax.jit
    def outputs(values: Sequence[object]) -> list[jax.Array]:
        complete = list(leaves)
        for i, value in zip(floats, values, strict=True):
            complete[i] = jnp.asarray(value, jnp.result_type(leaves[i]))
        outs = jax.tree.leaves(fun(*jax.tree.unflatten(tree, complete)))
        return [out for out in outs if jnp.issubdtype(jnp.result_type(out), jnp.floating)]

    def total(values: Sequence[object]) -> jax.Array:
        return sum((jnp.sum(out.astype(jnp.float32) * _weights(out)) for out in outputs(values)), jnp.float32(0))

    def exact_total(values: Sequence[object]) -> tuple[float, float]:
        """The sum in 64 bits, and how far rounding of its terms may move it."""
        terms = [np.asarray(out, np.float64) * _weights(out) for out in outputs(values)]
        return sum(float(t.sum()) for t in terms), sum(float(np.abs(t).sum()) for t in terms)

    if any(jnp.finfo(jnp.result_type(leaves[i])).bits < 32 for i in floats):
        return None  # no difference of such values is a derivative
    gradients = jax.jit(jax.grad(total))([*map(jnp.asarray, values)])
    for number, i in [*enumerate(floats)][:_MOST_LEAVES]:
        size = float(np.sqrt(np.mean(np.square(values[number])))) if values[number].size else 0.0
        direction = rng.normal(size=values[number].shape).astype(np.float32) * np.float32(size or 1.0)
        found = float(np.sum(np.asarray(gradients[number], np.float64) * direction))
        slopes, rounding = [], 0.0
        for step in (_STEP, _STEP / 2):
            ends = []
            for sign in (1, -1):
                moved = list(values)
                moved[number] = values[number] + np.float32(sign * step) * direction
                ends.append(exact_total(moved))
            slopes.append((ends[0][0] - ends[1][0]) / (2 * step))
            rounding = 8 * float(np.finfo(np.float32).eps) * max(end[1] for end in ends) / step
        expected, spread = (4 * slopes[1] - slopes[0]) / 3, abs(slopes[1] - slopes[0])
        scale = max(abs(expected), abs(found))
        if not all(map(math.isfinite, (found, expected))) or spread > 2 * _TOLERANCE * scale + rounding:
            continue
        if abs(found - expected) > _TOLERANCE * scale + rounding + 3 * spread:
            name = f"args{jax.tree_util.keystr(paths_and_leaves[i][0])}"
            return (
                f"with respect to {name} it is {found:.4g} along a random direction, where the values change by "
                f"{expected:.4g}"
            )
    return None


def _near(value: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    size = float(np.sqrt(np.mean(np.square(value)))) if value.size else 0.0
    return value + rng.normal(size=value.shape).astype(np.float32) * np.float32(0.03 * (size or 1.0))


def _weights(out: Any) -> np.ndarray:
    """A weight for each element, so that no error of one makes up for that of another."""
    return np.linspace(0.5, 1.5, int(np.prod(np.shape(out)))).reshape(np.shape(out)).astype(np.float32)
