"""Programs of jax alone: collectives written by hand, loops and stencils."""

import functools

import jax
import jax.numpy as jnp

from partjit import P, pjit, with_sharding_constraint
from truth_models.training import Model, floats, integers, mesh_of, two_axes


def stencil() -> Model:
    """Heat on a sharded grid: neighbours by `roll`, by slices and by a convolution."""

    def step(grid):
        def one(grid, _):
            around = sum(jnp.roll(grid, shift, axis) for shift in (-1, 1) for axis in (0, 1))
            inside = (grid[:-2, 1:-1] + grid[2:, 1:-1] + grid[1:-1, :-2] + grid[1:-1, 2:]) / 4
            grid = 0.9 * grid + 0.025 * around
            return grid.at[1:-1, 1:-1].set(inside), None

        grid, _ = jax.lax.scan(one, grid, length=10)
        kernel = jnp.ones((1, 1, 3, 3)) / 9
        return jax.lax.conv_general_dilated(grid[None, None], kernel, (1, 1), "SAME")[0, 0]

    return Model(
        pjit(step, in_shardings=P("data", "model"), out_shardings=P("data", "model")), (floats(64, 32),), two_axes()
    )


def ring_attention() -> Model:
    """Queries stay, keys and values go around."""
    mesh = mesh_of(ring=8)

    def local(q, k, v):
        def one(carry, _):
            k, v, top, total, out = carry
            scores = jnp.einsum("blhe,bmhe->bhlm", q, k)
            higher = jnp.maximum(top, scores.max(-1))
            scale, weights = jnp.exp(top - higher), jnp.exp(scores - higher[..., None])
            total = total * scale + weights.sum(-1)
            out = out * scale[..., None] + jnp.einsum("bhlm,bmhe->bhle", weights, v)
            pairs = [(i, (i + 1) % 8) for i in range(8)]
            k, v = (jax.lax.ppermute(x, "ring", pairs) for x in (k, v))
            return (k, v, higher, total, out), None

        blank = jnp.zeros((q.shape[0], q.shape[2], q.shape[1])) + 0 * q[0, 0, 0, 0]
        start = (k, v, blank - 1e9, blank, jnp.zeros((*blank.shape, q.shape[3])) + 0 * q[0, 0, 0, 0])
        (_, _, _, total, out), _ = jax.lax.scan(one, start, length=8)
        return (out / total[..., None]).transpose(0, 2, 1, 3)

    around = jax.shard_map(local, mesh=mesh, in_specs=P(None, "ring"), out_specs=P(None, "ring"), check_vma=False)

    def loss(weights, x):
        q, k, v = (jnp.einsum("bld,dhe->blhe", x, w) for w in weights)
        return jnp.mean(around(q, k, v) ** 2)

    step = pjit(jax.value_and_grad(loss), in_shardings=(P(), P(None, "ring")))
    return Model(step, ([floats(32, 4, 8)] * 3, floats(2, 64, 32)), mesh)


def pipeline() -> Model:
    """Four stages, eight microbatches, activations handed on by a permute."""
    mesh = mesh_of(stage=4, data=2)

    def local(w, x):
        stage, count = jax.lax.axis_index("stage"), x.shape[0]

        def one(carry, turn):
            state, out = carry
            state = jnp.where(stage == 0, x[jnp.minimum(turn, count - 1)], state)
            state = jnp.tanh(state @ w[0])
            done = jnp.maximum(turn - 3, 0)
            out = jnp.where((stage == 3) & (turn >= 3), out.at[done].set(state), out)
            return (jax.lax.ppermute(state, "stage", [(i, (i + 1) % 4) for i in range(4)]), out), None

        (_, out), _ = jax.lax.scan(one, (jnp.zeros_like(x[0]), jnp.zeros_like(x)), jnp.arange(count + 3))
        return jax.lax.psum(jnp.where(stage == 3, out, 0), "stage")

    staged = jax.shard_map(
        local, mesh=mesh, in_specs=(P("stage"), P(None, "data")), out_specs=P(None, "data"), check_vma=False
    )

    def loss(w, x):
        return jnp.mean(staged(w, x) ** 2)

    step = pjit(jax.value_and_grad(loss), in_shardings=(P("stage"), P(None, "data")), out_shardings=(None, P("stage")))
    return Model(step, (floats(4, 32, 32), floats(8, 4, 32)), mesh)


def decode() -> Model:
    """A token at a time, with a cache of keys and values that is sharded by heads and batch."""
    heads, width = 4, 32

    def step(params, cache, token, position):
        def layer(x, own):
            weights, (keys, values) = own
            q, k, v = jnp.einsum("bd,cdhe->cbhe", x, weights["qkv"])
            keys = jax.lax.dynamic_update_slice(keys, k[:, None], (0, position, 0, 0))
            values = jax.lax.dynamic_update_slice(values, v[:, None], (0, position, 0, 0))
            scores = jnp.einsum("bhe,blhe->bhl", q, keys)
            scores = jnp.where(jnp.arange(keys.shape[1]) <= position, scores, -1e9)
            attended = jnp.einsum("bhl,blhe,hed->bd", jax.nn.softmax(scores), values, weights["out"])
            x = x + attended
            return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], (keys, values)

        x, cache = jax.lax.scan(layer, params["embed"][token], (params["layers"], cache))
        return cache, jnp.argmax(x @ params["embed"].T, axis=-1)

    def many(params, cache, token):
        def one(carry, position):
            cache, token = step(params, *carry, position)
            return (cache, token), token

        return jax.lax.scan(one, (cache, token), jnp.arange(8))

    layers = {"qkv": (3, width, heads, 8), "out": (heads, 8, width), "up": (width, 64), "down": (64, width)}
    specs = {
        "qkv": P(None, None, None, "model"),
        "out": P(None, "model"),
        "up": P(None, None, "model"),
        "down": P(None, "model"),
    }
    params = {"embed": floats(64, width), "layers": {name: floats(2, *shape) for name, shape in layers.items()}}
    cache = (floats(2, 8, 16, heads, 8),) * 2
    of_cache = P(None, "data", None, "model")
    made = pjit(
        many,
        in_shardings=({"embed": P(), "layers": specs}, of_cache, P("data")),
        out_shardings=((of_cache, P("data")), P(None, "data")),
        donate_argnums=1,
    )
    return Model(made, (params, cache, integers(8)), two_axes())


def attention_mask() -> Model:
    """A causal mask made with `where`, in half precision, with the scores sharded by heads."""

    def attend(q, k, v):
        scores = jnp.einsum("blhe,bmhe->bhlm", q, k)
        mask = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
        scores = jnp.where(mask, scores, jnp.asarray(-1e9, scores.dtype))
        return jnp.einsum("bhlm,bmhe->blhe", jax.nn.softmax(scores), v)

    def loss(weights, x):
        x = x.astype(jnp.bfloat16)
        q, k, v = (jnp.einsum("bld,dhe->blhe", x, w.astype(jnp.bfloat16)) for w in weights)
        return jnp.mean(attend(q, k, v).astype(jnp.float32) ** 2)

    made = pjit(jax.value_and_grad(loss), in_shardings=(P(None, "model"), P("data")))
    return Model(made, ([floats(32, 4, 8)] * 3, floats(8, 64, 32)), two_axes())


def unknown_loop() -> Model:
    """A `while` of unknown trip count around a loop of ten, with an all-reduce in each iteration."""

    def solve(a, b):
        def sweep(x):
            return jax.lax.scan(lambda x, _: (x - 0.01 * (a.T @ (a @ x - b)), None), x, length=10)[0]

        def is_off(state):
            x, count = state
            return (jnp.linalg.norm(a @ x - b) > 1e-3) & (count < 100)

        return jax.lax.while_loop(is_off, lambda state: (sweep(state[0]), state[1] + 1), (jnp.zeros(a.shape[1]), 0))[0]

    made = pjit(solve, in_shardings=(P("data", "model"), P("data")), out_shardings=P("model"))
    return Model(made, (floats(64, 32), floats(64)), two_axes())


def partly_manual() -> Model:
    """A `shard_map` over one axis only; the other is the partitioner's."""
    mesh = two_axes()

    def local(x, w):
        return jax.lax.psum(jnp.tanh(x @ w), "data")

    inner = functools.partial(jax.shard_map, mesh=mesh, axis_names={"data"}, check_vma=False)
    summed = inner(local, in_specs=(P(None, "data"), P("data")), out_specs=P())

    def loss(w, x):
        x = with_sharding_constraint(x, P(None, "data"))
        return jnp.mean(summed(x, w) ** 2)

    made = pjit(
        jax.value_and_grad(loss), in_shardings=(P("data", "model"), P()), out_shardings=(None, P("data", "model"))
    )
    return Model(made, (floats(32, 64), floats(16, 32)), mesh)
