"""Programs of jax alone whose shardings go through sorts, scans, searches and linear algebra."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from partjit import P, pjit
from truth_models.training import (
    Model,
    Tree,
    cross_entropy,
    floats,
    fully_sharded,
    integers,
    megatron,
    training_step,
    two_axes,
)

BOTH = P(("data", "model"))


def experts_by_sort() -> Model:
    """A mixture of experts with capacity: tokens are sorted by their expert, and what is too much is dropped."""

    def loss(params, x, y):
        (tokens, width), experts = x.shape, params["router"].shape[1]
        capacity = 2 * tokens // experts
        gate, chosen = (one[:, 0] for one in lax.top_k(jax.nn.softmax(x @ params["router"]), 1))
        order = jnp.argsort(chosen)
        expert = chosen[order]
        place = jnp.arange(tokens) - jnp.searchsorted(expert, jnp.arange(experts))[expert]
        is_kept = place < capacity
        slots = jnp.zeros((experts, capacity, width))
        slots = slots.at[expert, jnp.where(is_kept, place, capacity)].add(x[order], mode="drop")
        hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", slots, params["up"]))
        out = jnp.einsum("ecf,efd->ecd", hidden, params["down"])
        back = out[expert, jnp.minimum(place, capacity - 1)] * is_kept[:, None]
        return jnp.mean((jnp.zeros_like(x).at[order].set(back) * gate[:, None] - y) ** 2)

    params = {"router": floats(32, 8), "up": floats(8, 32, 64), "down": floats(8, 64, 32)}
    batch = {"x": floats(64, 32), "y": floats(64, 32)}
    return training_step(loss, params, optax.adam(1e-3), batch, fully_sharded, batch_spec=BOTH)


def linear_attention() -> Model:
    """A gated linear recurrence by an associative scan."""

    def loss(params, x, y):
        keys, values, decays, gates = (x @ params[name] for name in ("k", "v", "w", "r"))

        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        _, states = lax.associative_scan(combine, (jax.nn.sigmoid(decays), keys * values), axis=1)
        return jnp.mean(((jax.nn.sigmoid(gates) * states) @ params["out"] - y) ** 2)

    params = {name: floats(32, 32) for name in ("k", "v", "w", "r", "out")}
    batch = {"x": floats(8, 32, 32), "y": floats(8, 32, 32)}
    return training_step(loss, params, optax.adam(1e-3), batch, megatron(("out",)))


def kalman_filter() -> Model:
    """A filter of many series at once: small systems are solved in each step of a scan."""

    def filtered(transition, observation, process, noise, series):
        def step(carry, observed):
            mean, cov = carry
            mean = mean @ transition.T
            cov = jnp.einsum("ij,bjk,lk->bil", transition, cov, transition) + process
            inner = jnp.einsum("ij,bjk,lk->bil", observation, cov, observation) + noise
            gain = jnp.linalg.solve(inner, jnp.einsum("ij,bjk->bik", observation, cov))
            mean = mean + jnp.einsum("bki,bk->bi", gain, observed - mean @ observation.T)
            return (mean, cov - jnp.einsum("bki,kj,bjl->bil", gain, observation, cov)), mean

        batch = series.shape[1]
        return lax.scan(step, (jnp.zeros((batch, 8)), jnp.tile(jnp.eye(8), (batch, 1, 1))), series)[1]

    args = floats(8, 8), floats(4, 8), floats(8, 8), floats(4, 4), floats(16, 32, 4)
    made = pjit(filtered, in_shardings=(P("model"), P(), P("model"), P(), P(None, "data")))
    return Model(made, args, two_axes())


def policy_update() -> Model:
    """A clipped policy gradient with generalized advantages, by a reversed scan over time."""

    def heads(params, observations):
        hidden = jnp.tanh(observations @ params["hidden"])
        return hidden @ params["policy"], (hidden @ params["value"])[..., 0]

    def update(params, observations, actions, rewards, ends, before):
        values = lax.stop_gradient(heads(params, observations)[1])

        def step(carry, one):
            reward, end, value, following = one
            carry = reward + 0.99 * following * (1 - end) - value + 0.94 * (1 - end) * carry
            return carry, carry

        after = jnp.concatenate([values[1:], values[-1:]])
        _, gains = lax.scan(step, jnp.zeros(values.shape[1]), (rewards, ends, values, after), reverse=True)
        gains = (gains - gains.mean()) / (gains.std() + 1e-8)

        def loss(params):
            logits, values = heads(params, observations)
            logp = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[..., None], -1)[..., 0]
            rate = jnp.exp(logp - before)
            clipped = jnp.minimum(rate * gains, jnp.clip(rate, 0.8, 1.2) * gains)
            return jnp.mean((values - gains) ** 2) / 2 - jnp.mean(clipped)

        value, grads = jax.value_and_grad(loss)(params)
        norm = jnp.maximum(optax.global_norm(grads), 1)
        return jax.tree.map(lambda p, g: p - 0.1 * g / norm, params, grads), value

    params = {"hidden": floats(16, 64), "policy": floats(64, 8), "value": floats(64, 1)}
    specs = {"hidden": P(None, ("data", "model")), "policy": BOTH, "value": BOTH}
    rollout = floats(32, 16, 16), integers(32, 16), floats(32, 16), floats(32, 16), floats(32, 16)
    made = pjit(update, in_shardings=(specs, *[P(None, ("data", "model"))] * 5), out_shardings=(specs, None))
    return Model(made, (params, *rollout), two_axes())


def beam_search() -> Model:
    """The best continuations of each sequence, with a sharded vocabulary."""

    def search(params, start):
        batch, width = start.shape[0], 4

        def step(carry, _):
            hidden, scores, token = carry
            hidden = jnp.tanh(params["embed"][token] + hidden @ params["hidden"])
            logp = jax.nn.log_softmax(hidden @ params["out"])
            scores, best = lax.top_k((scores[..., None] + logp).reshape(batch, -1), width)
            parent, token = best // logp.shape[-1], best % logp.shape[-1]
            hidden = jnp.take_along_axis(hidden, parent[..., None], 1)
            return (hidden, scores, token), (token, parent)

        carry = jnp.zeros((batch, width, 32)), jnp.zeros((batch, width)), jnp.tile(start[:, None], (1, width))
        return lax.scan(step, carry, length=6)[1]

    params = {"embed": floats(64, 32), "hidden": floats(32, 32), "out": floats(32, 64)}
    specs = {"embed": P("model"), "hidden": P(), "out": P(None, "model")}
    return Model(pjit(search, in_shardings=(specs, P("data"))), (params, integers(16)), two_axes())


def contrastive() -> Model:
    """Two towers whose embeddings are gathered by hand over the batch, and sharded by features in between."""
    mesh = two_axes()

    def local(left: jax.Array, right: jax.Array) -> jax.Array:
        left, right = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (left, right))
        scores = 10 * left @ lax.all_gather(right, "data", tiled=True).T
        labels = lax.axis_index("data") * left.shape[0] + jnp.arange(left.shape[0])
        return lax.pmean(cross_entropy(scores, labels), "data")

    compared = jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P(), axis_names={"data"}, check_vma=False
    )

    def loss(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        return compared(jnp.tanh(x @ params["x"]), jnp.tanh(y @ params["y"]))

    params, spec = {"x": floats(32, 16), "y": floats(24, 16)}, P(None, "model")
    made = pjit(jax.value_and_grad(loss), in_shardings=(spec, P("data"), P("data")), out_shardings=(None, spec))
    return Model(made, (params, floats(32, 32), floats(32, 24)), mesh)
