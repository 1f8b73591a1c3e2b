"""An equivariant layer of e3nn-jax on a graph whose edges are sharded."""

import e3nn_jax as e3nn
import jax
import jax.numpy as jnp
import optax

from partjit import P
from truth_models.training import Model, floats, integers, training_step


def messages() -> Model:
    nodes, edges = 32, 128
    kinds, harmonics = e3nn.Irreps("8x0e + 4x1o"), e3nn.Irreps("0e + 1o")
    product = e3nn.FunctionalLinear(e3nn.tensor_product(kinds, harmonics), kinds)
    weights = floats(product.num_weights)

    def loss(weights, positions, features, senders, receivers):
        vectors = positions[receivers] - positions[senders]
        angular = e3nn.spherical_harmonics(harmonics, e3nn.IrrepsArray("1o", vectors), True)
        sent = e3nn.tensor_product(e3nn.IrrepsArray(kinds, features[senders]), angular)
        made = jax.vmap(lambda x: product(weights, x))(sent)
        out = jax.ops.segment_sum(made.array, receivers, nodes)
        return jnp.mean((out - features) ** 2)

    batch = {
        "positions": floats(nodes, 3),
        "features": floats(nodes, kinds.dim),
        "senders": integers(edges),
        "receivers": integers(edges),
    }
    return training_step(loss, weights, optax.adam(1e-3), batch, lambda path, shape: P())
