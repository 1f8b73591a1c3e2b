"""What the steps of random programs with control flow do: on the devices, on the hosts, and in derivatives."""

import collections
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated, with_sharding_constraint
from tests.plan.random_control_flow import BACKWARD, OTHERS, SHAPE, Call, Constant

_lock = threading.Lock()
trace: list = []  # (stream, object, call, sums of its arguments and turn of its object), as the functions began
failing: dict = {}  # of the calls that raise, how often they do not before
mesh: list = []  # what functions that run programs of their own run them on
epoch = [0]  # objects start anew in each
_made: collections.Counter = collections.Counter()


def start(*, failing_call: int | None = None, turn: int = 0, anew: bool = True) -> None:
    """Forgets what was recorded, and says which call fails in which of its turns."""
    trace.clear()
    _made.clear()
    failing.clear()
    if failing_call is not None:
        failing[failing_call] = turn
    if anew:
        epoch[0] += 1


# On the devices


def operate(op: str, args: list) -> Any:
    """A device operation; its results are at most one, as its arguments are."""
    x = args[0]
    if op == "mean":
        return (x + args[1]) / 2
    if op == "sine":
        return jnp.sin(2 * x)
    if op == "matmul":
        return (x @ args[1].T) @ x / 16
    if op == "constrain":
        return with_sharding_constraint(x, P("y", "x"))
    if op == "relu":
        return jax.nn.relu(x)
    if op == "sum":
        return jnp.sum(x) / 32
    if op == "scale":
        return x * args[1]
    if op == "collapse":
        return jnp.tensordot(_weights(x.shape[0]), x, 1)
    if op in OTHERS:
        shape, dtype = OTHERS[op]
        return jnp.full(shape, x, dtype)
    if op == "count":
        return jnp.int32(jnp.sum(x.real, dtype=jnp.float32)) % 4
    return (x + 1) % 4  # "next"


def constant(step: Constant) -> Any:
    """A value that jax finds when it traces, in one of the forms it takes."""
    dtype = np.int32 if step.kind == "i" else np.float32
    value = np.full(SHAPE if step.kind == "m" else (), step.value, dtype)
    if step.form == "weak":
        return jnp.asarray(value.item())
    return jnp.asarray(value) if step.form == "jax" else value[()]


def _weights(length: int) -> Any:
    return (1 + np.arange(length, dtype=np.float32)) / max(length, 1) ** 2


def spread(x: Any, length: int) -> Any:
    """An array to go over, of a value."""
    return x[None] * (1 - _weights(length) / 2).reshape(length, *(1,) * x.ndim)


def variant(x: Any, j: int) -> Any:
    """The j-th example of a batch made of a value."""
    return x * np.float32(1 - 0.25 * j)


def anchored(x: Any, anchor: Any) -> Any:
    """A value that has a tangent if the anchor has one; integers have none."""
    return x + 0 * jnp.sum(anchor) if is_varied(x) else x


def is_varied(x: Any) -> bool:
    """Whether it is a matrix or a scalar: what has derivatives, and examples in a batch."""
    return x.dtype == np.float32


def loss(x: Any) -> Any:
    """What is differentiated."""
    return jnp.mean(x)


def is_large(x: Any) -> Any:
    """What ends a loop, or chooses a branch: between the values that come up."""
    return x > 0.2347


def choice(x: Any, count: int) -> Any:
    """The number of a branch, which may be out of range."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.int32(x > 0.1234) + jnp.int32(x > 0.4321)
    return jnp.int32(x > 1) if count == 2 else x - 1


# On the hosts


class Tag:
    """An object that is no array, and cannot be copied."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.Lock()


def host(step: Call, args: tuple, turn: int = 0, tag: Tag | None = None) -> tuple:
    """What a call does: its trace, its work and its results, arrays of NumPy or of jax."""
    assert step.is_decorated == getattr(_here, "is_decorated", False)
    values = [np.asarray(arg) for arg in args]
    _record(step, step.number, values, turn, tag)
    if step.does == "sleep":
        time.sleep(0.001 * (step.number % 3))
    values = [x if is_varied(x) else np.float32(x.sum().real) for x in values]
    batch = max(map(_batch, values), key=len, default=())
    matrix = np.full((*batch, *SHAPE), step.number % 5 / 5 + turn % 3 / 10, np.float32)
    for weight, value in zip((1.0, 0.5), values, strict=False):
        matrix = matrix + np.float32(weight) * (value if _rank(value) else value[..., None, None]).astype(np.float32)
    matrix = np.tanh(matrix)
    if step.result == "same":
        return args[:1]
    if step.does in ("jit", "pjit") and not batch:
        matrix = np.asarray(_on_all_devices(step.does, matrix))
    if step.does == "call":
        matrix = np.asarray(_add_sum(matrix))
    if step.result == "integer":
        return (np.int32((step.number + turn + sum(value.shape == () for value in values)) % 4),)
    return results_of(step, matrix, matrix.mean((-2, -1)), jnp if step.gets == "jax" else np)


def _rank(value: Any) -> int:
    return 2 if value.shape[-2:] == SHAPE else 0


def _batch(value: Any) -> tuple:
    return value.shape[: value.ndim - _rank(value)]


def results_of(step: Call, matrix: Any, scalar: Any, xp: Any) -> tuple:
    """The results of a call, of which it has none, one or both."""
    found = {"matrix": [matrix], "scalar": [scalar], "none": [], "both": [matrix, scalar]}[step.result]
    return tuple(map(xp.asarray, found))


def _record(step: Call, number: int, values: list, turn: int, tag: Tag | None = None) -> None:
    with _lock:
        of = step.of if number == step.number else None
        told = float(turn), 0.0 if tag is None else float(tag.number)
        trace.append((step.stream, of, number, (*(float(value.sum().real) for value in values), *told)))
        _made[number] += 1
        fails = failing.get(number) == _made[number] - 1
    if fails:
        raise ValueError(f"call {number} fails")


_here = threading.local()


def decorated(function: Callable) -> Callable:
    """A function that wraps another, which sees that it is called by this one."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return _called_by_wrapper(function, *args, **kwargs)

    return wrapper


def _called_by_wrapper(function: Callable, *args: Any, **kwargs: Any) -> Any:
    _here.is_decorated = True
    try:
        return function(*args, **kwargs)
    finally:
        _here.is_decorated = False


_add_sum = colocated.colocated_python(lambda x: x + np.asarray(x).sum() / np.float32(64), out_specs_fn=lambda x: x)
_programs: dict = {}


def _on_all_devices(how: str, matrix: Any) -> Any:
    key = how, id(mesh[0])
    if key not in _programs:

        def body(x: Any) -> Any:
            return x + jnp.sum(x) / 64

        _programs[key] = (
            jax.jit(body, in_shardings=NamedSharding(mesh[0], P("x")))
            if how == "jit"
            else partjit.pjit(body, in_axis_resources=P("x"), out_axis_resources=P("x"))
        )
    with mesh[0]:
        return _programs[key](matrix)


class Counter:
    """The state of an object: how often it was asked."""

    def __init__(self) -> None:
        self.epoch = self.turns = -1

    def turn(self) -> int:
        """How often it was asked before in this epoch."""
        if self.epoch != epoch[0]:
            self.epoch, self.turns = epoch[0], -1
        self.turns += 1
        return self.turns


# In derivatives, of calls whose rules are not the true ones but simple


def backward(step: Call, args: tuple, cotangents: tuple, xp: Any) -> tuple:
    """The cotangents of the arguments of a call."""
    total = xp.zeros(SHAPE, np.float32)
    for cotangent in cotangents:
        total = total + (cotangent if _rank(cotangent) else cotangent[..., None, None] / 32)
    found = []
    for weight, arg in zip((1.0, 0.5), args, strict=False):
        one = np.float32(weight) * (total if _rank(arg) else total.sum((-2, -1))) * xp.cos(arg)
        found.append(one)
    return tuple(found)


def host_backward(step: Call, args: tuple, cotangents: tuple) -> tuple:
    """The same as a call of its own, which is recorded."""
    values = [np.asarray(value) for value in (*args, *cotangents)]
    given, cotangents = tuple(values[: len(args)]), tuple(values[len(args) :])
    batch = np.broadcast_shapes(*map(_batch, values))  # a cotangent may be one and the same of all examples
    each = [np.broadcast_to(np.abs(one), (*batch, *one.shape[one.ndim - _rank(one) :])) for one in cotangents]
    _record(step, step.number + BACKWARD, each, 0)
    return tuple(map(jnp.asarray, backward(step, given, cotangents, np)))


def tangents(step: Call, args: tuple, given: tuple) -> tuple:
    """The tangents of the results of a call."""
    total = jnp.zeros(SHAPE, np.float32)
    for weight, arg, tangent in zip((1.0, 0.5), args, given, strict=False):
        one = np.float32(weight) * tangent * jnp.cos(arg)
        total = total + (one if _rank(arg) else one[..., None, None])
    return results_of(step, total, jnp.mean(total, (-2, -1)), jnp)


def surrogate(x: Any, cotangent: Any) -> Any:
    """The cotangent of an argument of a function with rules of its own."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return np.zeros(x.shape, jax.dtypes.float0)
    if not is_varied(x):
        return jnp.zeros_like(x)
    return jnp.cos(x) * jnp.mean(cotangent)


def surrogate_tangent(out: Any, given: list) -> Any:
    """The tangent of the result of a function with rules of its own."""
    floats = [jnp.mean(t) for t in given if is_varied(t)]
    return jnp.ones_like(out) * sum(floats) / 4
