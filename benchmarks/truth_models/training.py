"""What the models share: a step, its arguments as structs, and a mesh; training steps with specs by path."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from partjit import Mesh, P, pjit

Tree = Any
SpecOf = Callable[[str, tuple[int, ...]], P]


@dataclasses.dataclass(frozen=True)
class Model:
    """A function to be explained.

    Attributes:
        step: a function of `pjit`.
        args: its arguments, as structs.
        mesh: that of the call.
    """

    step: Any
    args: tuple[Tree, ...]
    mesh: Mesh


def mesh_of(**axes: int) -> Mesh:
    count = math.prod(axes.values())
    return Mesh(np.array(jax.devices()[:count]).reshape([*axes.values()]), tuple(axes))


def two_axes() -> Mesh:
    return mesh_of(data=4, model=2)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def by_path(tree: Tree, spec_of: SpecOf) -> Tree:
    """Specs for the leaves of a tree, by their paths and shapes."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: spec_of(jax.tree_util.keystr(path), leaf.shape) if hasattr(leaf, "shape") else None, tree
    )


def columns(path: str, shape: tuple[int, ...]) -> P:
    """The last dimension of matrices over `model`."""
    return P(*[None] * (len(shape) - 1), "model") if len(shape) > 1 else P()


def fully_sharded(path: str, shape: tuple[int, ...]) -> P:
    """The largest dimension that both axes divide over both, as in FSDP."""
    for k in sorted(range(len(shape)), key=lambda k: -shape[k]):
        if shape[k] % 8 == 0:
            return P(*[None] * k, ("data", "model"))
    return P()


def megatron(second: tuple[str, ...]) -> SpecOf:
    """Matrices over `model`: by rows those whose path has one of these names, by columns the others."""

    def spec_of(path: str, shape: tuple[int, ...]) -> P:
        if len(shape) < 2:
            return P()
        if any(name in path for name in second):
            return P(*[None] * (len(shape) - 2), "model", None)
        return P(*[None] * (len(shape) - 1), "model")

    return spec_of


def training_step(
    loss: Callable[..., jax.Array],
    params: Tree,
    optimizer: Any,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    spec_of: SpecOf,
    *,
    batch_spec: P | None = None,
) -> Model:
    """A step of an optax optimizer on `loss(params, **batch)`; parameters and the optimizer's state are donated.

    The batch is sharded over `data` unless `batch_spec` says otherwise; keys are replicated.
    """
    state = jax.eval_shape(optimizer.init, params)

    def step(params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree, jax.Array]:
        value, grads = jax.value_and_grad(lambda params: loss(params, **batch))(params)
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(lambda p, u: p + u, params, updates), state, value

    of_params, of_state = by_path(params, spec_of), by_path(state, spec_of)
    of_batch = {
        name: P() if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else batch_spec or P("data")
        for name, x in batch.items()
    }
    made = pjit(
        step,
        in_shardings=(of_params, of_state, of_batch),
        out_shardings=(of_params, of_state, None),
        donate_argnums=(0, 1),
    )
    return Model(made, (params, state, dict(batch)), two_axes())


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logp, labels[..., None], axis=-1))


def next_tokens(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return cross_entropy(logits[:, :-1], tokens[:, 1:])
