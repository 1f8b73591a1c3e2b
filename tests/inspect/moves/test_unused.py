"""What a program computes for nothing is not predicted, as XLA removes it."""

from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.truth_operations import make_mesh
from partjit import P, pjit
from partjit.inspect import explain
from partjit.inspect.moves import unused
from partjit.inspect.places import known_of_copies
from partjit.inspect.propagation import lower_unit, propagated
from partjit.inspect.tracing import trace_function
from partjit.inspect.walk import walk_of
from partjit.shardy import Shardings, nested
from partjit.xla_rewrites import open_captured


def loops(x):
    """A sum that is carried through two loops and not used in the end."""

    def body(_, carried):
        total, y = carried
        return total + jnp.sin(y).sum(), jnp.cos(y)

    def outer(_, carried):
        return lax.fori_loop(0, 3, body, carried)

    total, y = lax.fori_loop(0, 2, outer, (jnp.float32(0), x))
    jnp.isnan(total)
    return y


def branches(x):
    lax.cond(x[0, 0] > 0, lambda x: x.sum(), lambda x: x.max(), x)
    return x * 2


def branches_with_effects(x):
    """Sums of which the first alone is used; the conditional is there for its effect."""

    def called(x):
        jax.debug.callback(lambda: None)
        return x[:, 0].sum() * 0 + 1, x.sum(1), jnp.cos(x), (x.T @ x).astype(int)

    def others(x):
        return jnp.float32(2), x.max(1), jnp.tile(x.sum(0), (16, 1)), (x.T @ x > 3).astype(int)

    return lax.cond(x[0, 0] > 0, called, others, x)[2]


def calls(x):
    jax.jit(lambda x: x.sum())(x)
    return x * 2


def kept(x):
    """A loop whose condition is what it sums up, and a value that it returns."""
    total = lax.while_loop(lambda c: c[0] < 100, lambda c: (c[0] + jnp.sin(c[1]).sum(), jnp.cos(c[1])), (0.0, x))
    return total[1]


def around(x):
    """A loop that needs a sum which it has computed in an earlier iteration of the loop around it."""

    def inner(_, carried):
        total, scale, y = carried
        return total + jnp.sin(y).sum(), scale, lax.cond(scale > 0, lambda y: jnp.cos(y) * scale, jnp.sin, y)

    def outer(_, carried):
        total, scale, y = lax.fori_loop(0, 3, inner, carried)
        return scale, total, y

    return lax.fori_loop(0, 4, lambda _, c: lax.fori_loop(0, 2, outer, c), (jnp.float32(0), jnp.float32(1), x))[2]


@pytest.mark.parametrize("fun", [loops, branches, calls, kept, around])
def test_what_is_computed_for_nothing_is_not_predicted(fun):
    struct = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    report = explain(pjit(fun, in_shardings=P("x")), struct, mesh=make_mesh(), compiled=True)
    assert report.predicted.counts == report.collectives.counts
    assert bool(report.predicted) == (fun in (kept, around))


def constants(x):
    """Constants, which Shardy copies for each use, and an equation that is not used."""
    jax.jit(lambda x: jnp.tanh(x).min())(x)
    return jnp.where(jnp.arange(32) < 3, x, jnp.ones((16, 32))) + jnp.ones((16, 32)).T.T


@pytest.mark.parametrize("fun", [loops, branches, calls, kept, constants])
def test_what_is_known_to_be_unused_is_what_copies_lose(fun):
    struct = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    _, module = lower_unit(trace_function(pjit(fun, in_shardings=P("x")), (struct,), {}, make_mesh()).whole)
    lowered = module.operation
    known = known_of_copies(lowered)
    assert (known.unused is None) == (fun is loops)
    names = []
    for unused_there in (None, known.unused):
        copy = lowered.clone()
        open_captured(copy)
        walk = propagated(copy)[0].walk
        count = len(walk.names)
        left = unused.remove_unused(walk, unused_there)
        names.append([op.name for op in nested(copy)])
        assert left.names == names[-1]
    assert names[0] == names[1]
    assert (len(names[0]) < count) == (fun in (loops, constants))  # what equations leave unused is not lowered


@pytest.mark.parametrize("fun", [loops, around])
def test_bodies_are_walked_once_however_deep_they_are(fun):
    struct = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    _, module = lower_unit(trace_function(pjit(fun, in_shardings=P("x")), (struct,), {}, make_mesh()).whole)
    open_captured(module)
    walk = propagated(module)[0].walk
    with mock.patch.object(unused, "nested", wraps=nested) as walks:
        unused.remove_unused(walk)
    assert 0 < walks.call_count <= sum(len(op.regions) > 0 for op in nested(module.operation))


def test_what_branches_with_effects_compute_for_nothing_is_not_predicted():
    """XLA keeps what the effects need, and the result that is used."""
    struct = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    report = explain(pjit(branches_with_effects, in_shardings=P("x")), struct, mesh=make_mesh(), compiled=True)
    assert report.predicted.counts == report.collectives.counts


def test_effects_stay():
    def fun(x):
        jax.debug.callback(lambda x: None, x.max())
        jax.jit(lambda x: x.min())(x)
        return x

    module = jax.jit(fun).lower(jnp.ones(4)).compiler_ir()
    unused.remove_unused(walk_of(module, Shardings(module)))
    names = [op.operation.name for op in nested(module.operation)]
    assert names.count("stablehlo.custom_call") == 1
    assert "func.call" not in names
    assert module.operation.verify()
