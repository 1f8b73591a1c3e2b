"""The program that the partitioner is given: the locations of its operations name equations."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir

from partjit import P, pjit, with_sharding_constraint
from partjit.inspect.inlining import TAG, names_in, tags_in
from partjit.inspect.propagation import lower_unit
from partjit.inspect.tracing import trace_function
from partjit.shardy import nested
from tests.inspect.inspected import mesh


@jax.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))


def of_all_kinds(x):
    def turn(carry, _):
        return doubled(jax.nn.softmax(carry)), carry.sum()

    x, sums = jax.lax.scan(jax.checkpoint(turn), x, None, length=3)
    x = jax.lax.cond(sums[0] > 0, jnp.sin, lambda x: jnp.linalg.inv(x @ x.T), x)
    x = with_sharding_constraint(jnp.square(x) + jax.lax.top_k(jnp.sort(x), 2)[0][:, :1], P("data"))
    return jnp.where(x > 0, jnp.cumsum(x, 0), jax.lax.erf(x)).sum()


def test_the_names_in_locations_are_all_that_says_of_which_equations_operations_are():
    step = pjit(lambda x: jax.value_and_grad(of_all_kinds)(x), in_shardings=P("data"))
    with mesh():
        _, module = lower_unit(trace_function(step, (np.ones((8, 8), np.float32),), {}, mesh()).whole)
    ops = nested(module.operation)
    written = [[int(number) for number in re.findall(rf"{TAG}(\d+)", str(op.location))] for op in ops]
    assert [tags_in(names_in(op.location)) for op in ops] == written
    assert {len(tags) for tags in written} >= {0, 1, 2}
    assert any(isinstance(op.location, ir.FusedLoc) for op in ops)


def with_unused_equations(x):
    jax.jit(lambda x: jnp.tanh(x).sum())(x)
    jax.lax.fori_loop(0, 3, lambda _, x: jnp.cos(x), x)
    jax.debug.callback(lambda total: None, jnp.sinh(x).sum())
    return jax.lax.fori_loop(0, 3, lambda _, x: (jnp.exp(x), jnp.sin(x))[1], x)


def test_what_no_result_and_no_effect_needs_is_not_lowered():
    program = trace_function(pjit(with_unused_equations, in_shardings=P("data")), (np.ones(8, np.float32),), {}, mesh())
    inlined, _ = lower_unit(program.whole)
    lowered = {*re.findall(r"= (\w+)", str(inlined.jaxpr))}
    assert {"sin", "sinh"} <= lowered
    assert "debug_callback" in str(inlined.jaxpr)
    assert lowered.isdisjoint({"tanh", "cos", "exp"})
    assert {"tanh", "cos", "exp"} <= {equation.primitive for equation in inlined.equations}, "they are in the report"
