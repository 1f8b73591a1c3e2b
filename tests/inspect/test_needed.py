"""What a program computes for nothing counts for nothing."""

import jax
import jax.numpy as jnp
import pytest

from partjit import P, pjit
from partjit.inspect import explain
from partjit.inspect.needed import needed_equations
from tests.inspect.inspected import f32, mesh

X, W = f32(64, 64), f32(64, 64)


def unused_product(x, w):
    _ = jnp.tanh(x @ w) @ w.T
    return x + 1


def unused_loop(x, w):
    _ = jax.lax.scan(lambda c, _: (c @ w, c.sum()), x, None, length=3)
    return x + 1


def unused_carry(x, w):
    (a, _), _ = jax.lax.scan(lambda c, _: ((c[0] * 2, c[1] @ w), None), (x, x), None, length=3)
    return a


def unused_in_a_call(x, w):
    return jax.jit(lambda x: (x @ w, x + 1))(x)[1]


def unused_in_a_branch(x, w):
    return jax.lax.cond(x[0, 0] > 0, lambda x: (x @ w, x + 1), lambda x: (x, x * 2), x)[1]


def unused_in_a_shard_map(x, w):
    both = jax.shard_map(
        lambda x, w: (x @ w, x + 1), mesh=mesh(), in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False
    )
    return both(x, w)[1]


@pytest.mark.parametrize(
    "fun", [unused_product, unused_loop, unused_carry, unused_in_a_call, unused_in_a_branch, unused_in_a_shard_map]
)
@pytest.mark.parametrize("spec", [P("data"), P()])
def test_what_nothing_uses_has_no_operations(fun, spec):
    report = explain(pjit(fun, in_shardings=(spec, P())), X, W, mesh=mesh())
    assert any(one.primitive == "dot_general" for one in report.equations)
    assert report.flops.total < 8 * 64 * 64  # a product has 64 times as many
    assert "redundant" not in {finding.kind for finding in report.findings}


def carried_to_another(x, w):
    """The product of an iteration is what the next one returns."""
    return jax.lax.scan(lambda c, _: ((c[1], c[1] @ w), None), (x, x), None, length=3)[0][0]


def decides_how_often(x, w):
    return jax.lax.while_loop(lambda c: (c[1] @ w).sum() < 1, lambda c: (c[0] + 1, c[1] * 2), (x, x))[0]


def decides_which(x, w):
    return jax.lax.cond((x @ w).sum() > 0, lambda x: x, lambda x: x * 2, x)


def printed(x, w):
    jax.debug.print("{}", (x @ w).sum())
    return x + 1


def printed_in_a_loop(x, w):
    def body(c, _):
        jax.debug.print("{}", c.sum())
        return c @ w, None

    jax.lax.scan(body, x, None, length=3)
    return x + 1


@pytest.mark.parametrize("fun", [carried_to_another, decides_how_often, decides_which, printed, printed_in_a_loop])
def test_what_decides_or_has_an_effect_is_needed(fun):
    report = explain(pjit(fun, in_shardings=(P("data"), P())), X, W, mesh=mesh())
    (product,) = (one for one in report.equations if one.primitive == "dot_general")
    assert product.number in needed_equations(report.whole.tree)
    assert report.flops.total > 2 * 64**3
