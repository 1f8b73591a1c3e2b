"""The promises as laws over random programs, meshes, specs, shapes and places of the arguments.

1. Same meaning: a partitioned function equals the plain one, under every transformation.
2. Specs are kept: what the user wrote is what the array has, or it is an error.
3. Errors are the user's: what the function raises comes out as it is, and nothing is left behind.

`PARTJIT_EXAMPLES=20 pytest tests/test_promises.py` runs twenty times as many examples.
"""

import contextlib
import dataclasses
import functools
import math
import os
import re
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import partjit
import strategies as ours
from partjit import P, ShardingError, pjit
from partjit.mesh import ambient_mesh

SCALE = float(os.environ.get("PARTJIT_EXAMPLES", "1"))


def examples(count):
    return settings(
        max_examples=max(1, round(count * SCALE)),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


@pytest.fixture(autouse=True, scope="module")
def arguments_may_be_elsewhere():
    with partjit.reshard_policy("allow"):
        yield


def close(actual, expected, tolerance=2e-4):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape
        assert a.dtype == e.dtype
        assert getattr(a, "weak_type", False) == getattr(e, "weak_type", False)
        if e.dtype != jax.dtypes.float0:
            a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
            assert np.isfinite(e).all()
            scale = max(1.0, np.abs(e).max(initial=0.0))
            np.testing.assert_allclose(a / scale, e / scale, rtol=tolerance, atol=tolerance)


def laid_out(array, mesh, spec):
    """Asserts that an array has a sharding, on the user's mesh, and that every device holds the piece it says."""
    assert array.committed
    assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec or P()), array.ndim), (array.sharding, spec)
    if isinstance(array.sharding, NamedSharding):
        assert array.sharding.mesh.axis_types == mesh.axis_types
    whole = np.asarray(array)
    expected = ours.pieces(mesh, spec, array.shape)
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    assert set(shards) == set(expected)
    for device, index in expected.items():
        np.testing.assert_array_equal(np.asarray(shards[device]), whole[index])


def batched(spec, axis=None):
    """The spec of a batch of values."""
    return P(axis, *(spec or ()))


# What is done to a function. Each takes the function and its arguments, of which the first `n` are floats.


def total(f, n, rest):
    """A function of the float arguments alone, with a scalar result that depends on every result of `f`."""
    return lambda *floats: sum(jnp.mean(jnp.sin(out) * (i + 1)) for i, out in enumerate(f(*floats, *rest)))


def gradients(f, args, n):
    return jax.grad(total(f, n, args[n:]), argnums=tuple(range(n)))(*args[:n])


def tangents_of(args, n):
    return tuple(np.cos(np.asarray(arg)).astype(np.float32) for arg in args[:n])


def jvp(f, args, n):
    return jax.jvp(lambda *floats: f(*floats, *args[n:]), tuple(args[:n]), tangents_of(args, n))


def vjp(f, args, n):
    outs, back = jax.vjp(lambda *floats: f(*floats, *args[n:]), *args[:n])
    return outs, back(tuple(np.sin(np.asarray(out)) for out in outs))


def linearize(f, args, n):
    outs, linear = jax.linearize(lambda *floats: f(*floats, *args[n:]), *args[:n])
    return outs, linear(*tangents_of(args, n))


def stacked(args, count=2):
    return [np.stack([np.asarray(arg) // (k + 1) if arg.dtype == np.int32 else np.asarray(arg) / (k + 1) for k in range(count)]) for arg in args]


def total_of_batch(f, args, n):
    """The gradient of a function of a vmap."""
    batch = stacked(args)
    mapped = jax.vmap(f)
    return jax.grad(total(mapped, n, batch[n:]), argnums=tuple(range(n)))(*batch[:n])


def scaled(f, args, n):
    """A scalar function of a scalar."""
    return lambda s: total(f, n, args[n:])(*(arg * s for arg in args[:n]))


def by_checkpoint(f, args, n, policy=None):
    return gradients(jax.checkpoint(f, policy=policy), args, n)


def scanned(f, args, n):
    def step(carry, xs):
        outs = f(*xs)
        return carry + sum(jnp.mean(out) for out in outs), outs

    return jax.lax.scan(step, np.float32(0.5), tuple(stacked(args)))


def same(specs):
    return specs


@dataclasses.dataclass(frozen=True)
class Law:
    """One way to use a function.

    Attributes:
        use: `(f, args, n) -> results`.
        specs: `(in_specs of floats, out_specs, spmd axis) -> specs of the flat results`, or None if nothing is promised.
        order: how often the program is differentiated; more often means smaller programs.
    """

    use: callable
    specs: callable = None
    order: int = 0


LAWS = {
    "call": Law(lambda f, args, n: f(*args), lambda ins, outs: outs),
    "jit": Law(lambda f, args, n: jax.jit(f)(*args), lambda ins, outs: outs),
    "grad": Law(gradients, lambda ins, outs: ins, 1),
    "jit of grad": Law(lambda f, args, n: jax.jit(lambda *a: gradients(f, a, n))(*args), lambda ins, outs: ins, 1),
    "jvp": Law(jvp, lambda ins, outs: outs * 2, 1),
    "vjp": Law(vjp, lambda ins, outs: outs + ins, 1),
    "linearize": Law(linearize, lambda ins, outs: outs * 2, 1),
    "checkpoint": Law(lambda f, args, n: jax.checkpoint(f)(*args)),
    "grad of checkpoint": Law(by_checkpoint, lambda ins, outs: ins, 1),
    "grad of checkpoint that saves dots": Law(
        functools.partial(by_checkpoint, policy=jax.checkpoint_policies.dots_saveable), lambda ins, outs: ins, 1
    ),
    "vmap": Law(
        lambda f, args, n: jax.vmap(f)(*stacked(args)), lambda ins, outs: tuple(batched(spec) for spec in outs)
    ),
    "vmap of some, to the last dimension": Law(
        lambda f, args, n: jax.vmap(
            f, in_axes=(args[0].ndim, *[None] * (len(args) - 1)), out_axes=-1
        )(np.stack([args[0], np.asarray(args[0]) / 2], -1), *args[1:])
    ),
    "vmap of grad": Law(
        lambda f, args, n: jax.vmap(lambda *a: gradients(f, a, n))(*stacked(args)),
        lambda ins, outs: tuple(batched(spec) for spec in ins),
        1,
    ),
    "grad of vmap": Law(total_of_batch, lambda ins, outs: tuple(batched(spec) for spec in ins), 1),
    "vmap of vmap": Law(lambda f, args, n: jax.vmap(jax.vmap(f))(*stacked(stacked(args)))),
    "scan": Law(scanned),
    "grad of scan": Law(
        lambda f, args, n: jax.grad(lambda s: scanned(lambda *xs: f(*(x * s for x in xs[:n]), *xs[n:]), args, n)[0])(0.7),
        order=1,
    ),
    "jit of vmap of jvp": Law(
        lambda f, args, n: jax.jit(jax.vmap(lambda *a: jax.jvp(
            lambda *floats: f(*floats, *a[n:]), a[:n], tuple(map(jnp.sin, a[:n])))))(*stacked(args)),
        order=1,
    ),
    "hessian": Law(lambda f, args, n: jax.hessian(scaled(f, args, n))(np.float32(0.8)), order=2),
    "reverse over reverse": Law(
        lambda f, args, n: jax.grad(lambda s: jax.grad(scaled(f, args, n))(s) ** 2)(np.float32(0.8)), order=2
    ),
    "conditional": Law(
        lambda f, args, n: jax.lax.cond(np.asarray(args[0]).sum() > 0, f, lambda *a: f(*[x / 2 for x in a[:n]], *a[n:]), *args)
    ),
}  # fmt: skip


def on_one_device(use, case):
    """What the plain function gives: no mesh, no specs, one device."""
    plain = functools.partial(case.program, partitioned=False)
    n = len(case.program.shapes)
    return use(plain, numpy_args(case), n)


def numpy_args(case):
    return ours.numpy_args(case)


@pytest.mark.parametrize("name", LAWS)
def test_a_partitioned_function_means_what_the_plain_one_does_and_is_where_it_says(name):
    law = LAWS[name]

    @examples(6)
    @given(ours.cases(depth=1 if law.order == 2 else 2, max_steps=2 if law.order == 2 else 4))
    def holds(case):
        n = len(case.program.shapes)
        expected = on_one_device(law.use, case)
        with ours.enter(case):
            function = ours.to_pjit(case)
            results = law.use(function, ours.placed_args(case), n)
        close(results, expected)
        if law.specs is not None:
            specs = law.specs(case.in_specs[:n], case.out_specs)
            for result, spec in zip(jax.tree.leaves(results), specs, strict=True):
                laid_out(result, case.mesh, spec)

    holds()
