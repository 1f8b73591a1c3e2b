"""Random functions of loops, branches, checkpoints and batches, without colocated calls, as data."""

import functools

import jax
import jax.numpy as jnp
from hypothesis import strategies as st


def programs(depth=2):
    """Lists of steps, each an elementwise operation or a pair of a kind and the steps of its body."""
    step = st.sampled_from(["sin", "times x", "constant"])
    for _ in range(depth):
        step = st.one_of(step, st.tuples(st.sampled_from(sorted(CONTROL)), st.lists(step, min_size=1, max_size=2)))
    nested = st.tuples(st.sampled_from(sorted(CONTROL)), st.lists(step, min_size=1, max_size=2))
    return st.lists(st.one_of(nested, step), min_size=1, max_size=3).filter(lambda steps: any(map(is_nested, steps)))


def is_nested(step):
    return not isinstance(step, str)


def function_of(steps):
    """The function from a vector to a vector of its shape that a program is."""

    def fun(x):
        for step in steps:
            x = apply(step, x)
        return x

    return fun


def apply(step, x):
    match step:
        case "sin":
            return jnp.sin(x)
        case "times x":
            return x * x
        case "constant":  # the same in all iterations of a loop: what jax moves out of it
            return x * jnp.cos(jnp.arange(3.0))
        case kind, body:
            return CONTROL[kind](function_of(body), x)


@jax.custom_jvp
def scaled(x):
    return 2 * x


scaled.defjvp(lambda primals, tangents: (scaled(*primals), 3 * tangents[0]))

CONTROL = {
    "scan": lambda f, x: jax.lax.scan(lambda c, k: (f(c) * k, jnp.sum(c)), x, jnp.arange(2.0))[0],
    "while": lambda f, x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1])), (0, x))[1],
    "fori": lambda f, x: jax.lax.fori_loop(0, 2, lambda _, c: f(c), x),
    "cond": lambda f, x: jax.lax.cond(x[0] > 0.5, f, lambda c: -c, x),
    "switch": lambda f, x: jax.lax.switch(jnp.int32(x[1]), [f, jnp.cos, lambda c: c], x),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "checkpointed scan": lambda f, x: jax.checkpoint(functools.partial(CONTROL["scan"], f))(x),
    "checkpointed while": lambda f, x: jax.checkpoint(functools.partial(CONTROL["while"], f))(x),
    "policy": lambda f, x: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)(x),
    "custom_jvp": lambda f, x: scaled(f(x)),
    "jit": lambda f, x: jax.jit(f)(x),
    "vmap": lambda f, x: jax.vmap(f)(jnp.stack([x, 2 * x]))[0],
    "vmap cond": lambda f, x: jax.vmap(lambda c: jax.lax.cond(c[0] > 0.5, f, lambda c: -c, c))(jnp.stack([x, 2 * x]))[
        1
    ],
}
