"""Training steps that are small to trace and large to run, and the machine that they would run on."""

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as S
from jax.sharding import AbstractMesh

from partjit.search import Link, Machine

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
MACHINE = Machine("two links", {"f32": 1e13}, 1 << 34, 1e12, {"data": Link(1e10), "model": Link(1e11)})


def parameters(layers, width, hidden, heads, size, vocabulary):
    block = {
        "query": (width, heads, size),
        "key": (width, heads, size),
        "value": (width, heads, size),
        "out": (heads, size, width),
        "up": (width, hidden),
        "down": (hidden, width),
        "scale": (1, 1, width),
    }
    shapes = {f"block_{k}": block for k in range(layers)} | {"embedding": (vocabulary, width)}
    return jax.tree.map(lambda shape: S(shape, jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple))


def attention(block, x):
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, block[name]) for name in ("query", "key", "value"))
    weights = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k) / q.shape[-1] ** 0.5)
    return jnp.einsum("bshk,hkd->bsd", jnp.einsum("bhst,bthk->bshk", weights, v), block["out"])


def loss(params, tokens):
    x = params["embedding"][tokens]
    for name, block in params.items():
        if name != "embedding":
            x = x + attention(block, x * block["scale"])
            x = x + jax.nn.gelu(x @ block["up"]) @ block["down"]
    logp = jax.nn.log_softmax(x @ params["embedding"].T)
    return -jnp.mean(jnp.take_along_axis(logp, tokens[..., None], -1))


def train_step(params, state, tokens):
    value, grads = jax.value_and_grad(loss)(params, tokens)
    state = {"momentum": jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)}
    return jax.tree.map(lambda p, m: p - 0.01 * m, params, state["momentum"]), state, value


def arguments(layers=2, width=256, hidden=1024, heads=4, size=64, vocabulary=512, batch=16, length=64):
    params = parameters(layers, width, hidden, heads, size, vocabulary)
    return params, {"momentum": params}, S((batch, length), jnp.int32)
