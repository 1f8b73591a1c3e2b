"""A graph network of jraph: gathers and segment sums over nodes and edges that are sharded."""

import jax
import jax.numpy as jnp
import jraph
import optax

from partjit import P
from truth_models.training import Model, floats, integers, training_step

NODES, EDGES, WIDTH = 64, 256, 16


def layer_of(params):
    def update_edges(edges, sent, received, _):
        return jax.nn.relu(jnp.concatenate([edges, sent, received], -1) @ params["edges"])

    def update_nodes(nodes, _, received, __):
        return jax.nn.relu(jnp.concatenate([nodes, received], -1) @ params["nodes"])

    return jraph.GraphNetwork(update_edges, update_nodes)


def graph_network() -> Model:
    def apply(params, nodes, senders, receivers):
        counts = (jnp.array([len(nodes)]), jnp.array([len(senders)]))
        graph = jraph.GraphsTuple(nodes, nodes[senders], receivers, senders, None, *counts)
        for layer in params:
            graph = layer_of(layer)(graph)
        return graph.nodes

    def loss(params, nodes, senders, receivers):
        return jnp.mean((apply(params, nodes, senders, receivers) - nodes) ** 2)

    params = [{"edges": floats(3 * WIDTH, WIDTH), "nodes": floats(2 * WIDTH, WIDTH)} for _ in range(2)]
    batch = {"nodes": floats(NODES, WIDTH), "senders": integers(EDGES), "receivers": integers(EDGES)}
    return training_step(
        loss, params, optax.adam(1e-3), batch, lambda path, shape: P(None, "model") if len(shape) == 2 else P()
    )
