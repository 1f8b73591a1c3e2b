"""The training steps whose time `search_measured.py` measures: large enough that arithmetic and copies take most of it.

GPT-2, BERT and the ResNet are models that their libraries ship; the others are made of what their libraries ship. Each
has the specs that one would write by hand.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from transformers import GPT2Config
from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2LMHeadModel

from partjit import P
from truth_models import equinox, flax_linen, transformers
from truth_models.training import (
    Model,
    columns,
    cross_entropy,
    floats,
    integers,
    megatron,
    next_tokens,
    training_step,
)

__all__ = ["MADE"]


def gpt2() -> Model:
    config = GPT2Config(
        vocab_size=2048,
        n_positions=64,
        n_embd=256,
        n_layer=4,
        n_head=8,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
    )
    model = FlaxGPT2LMHeadModel(config, _do_init=False)

    def loss(params: Any, tokens: Any) -> jax.Array:
        return next_tokens(model(tokens, params=params, train=False).logits, tokens)

    batch = {"tokens": integers(16, 64)}
    return training_step(loss, transformers.shapes_of(model), optax.adamw(1e-3), batch, transformers.spec_of)


def bert() -> Model:
    return transformers.bert(width=256, inner=1024, layers=4, heads=8, vocabulary=2048, positions=64, batch=16)


class Encoder(eqx.Module):
    """A layer of a transformer, of Equinox's layers."""

    attention: eqx.nn.MultiheadAttention
    wide: eqx.nn.Linear
    narrow: eqx.nn.Linear
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]

    def __init__(self, key: Any, width: int = 256) -> None:
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(8, width, key=keys[0])
        self.wide = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.narrow = eqx.nn.Linear(4 * width, width, key=keys[2])
        self.norms = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)

    def __call__(self, x: Any) -> Any:
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h)
        h = jax.vmap(self.norms[1])(x)
        return x + jax.vmap(self.narrow)(jax.nn.gelu(jax.vmap(self.wide)(h)))


def encoder() -> Model:
    """Stacked layers, scanned."""
    params, static = equinox.arrays_of(lambda key: eqx.filter_vmap(Encoder)(jax.random.split(key, 4)))

    def loss(params: Any, x: Any) -> jax.Array:
        def layer(x: Any, own: Any) -> tuple[Any, None]:
            return jax.vmap(eqx.combine(own, static))(x), None

        return jnp.mean((jax.lax.scan(layer, x, params)[0] - x) ** 2)

    def spec_of(path: str, shape: tuple[int, ...]) -> P:
        # The weights of Equinox are outputs by inputs, and here stacked.
        if len(shape) < 3:
            return P()
        return columns(path, shape) if "narrow" in path or "output" in path else megatron((path,))(path, shape)

    return training_step(loss, params, optax.adamw(1e-3), {"x": floats(16, 64, 256)}, spec_of)


def resnet() -> Model:
    """Haiku's ResNet-18 for small images."""

    def forward(images: Any) -> Any:
        return hk.nets.ResNet18(64)(images, is_training=True)

    model, images = hk.transform_with_state(forward), floats(16, 32, 32, 3)
    params, averages = jax.eval_shape(
        lambda key: model.init(key, jnp.zeros(images.shape, images.dtype)), jax.random.key(0)
    )

    def loss(params: Any, images: Any, labels: Any) -> jax.Array:
        state = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), averages)  # training does not read it
        logits, _ = model.apply(params, state, None, images)
        return cross_entropy(logits, labels)

    batch = {"images": images, "labels": integers(16)}
    return training_step(loss, params, optax.sgd(0.1, momentum=0.9), batch, columns)


class Mixture(nn.Module):
    """Layers of four experts between embeddings."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(1024, 128)(tokens)
        for _ in range(3):
            x = x + flax_linen.Experts(capacity=256)(nn.LayerNorm()(x))
        return nn.Dense(1024)(x)


def mixture_of_experts() -> Model:
    model, tokens = Mixture(), integers(8, 64)

    def spec_of(path: str, shape: tuple[int, ...]) -> P:
        return P("model") if len(shape) == 3 else columns(path, shape) if "router" not in path else P()

    return training_step(
        lambda params, tokens: next_tokens(model.apply(params, tokens), tokens),
        flax_linen.shapes_of(model, tokens),
        optax.adamw(1e-3),
        {"tokens": tokens},
        spec_of,
    )


def mamba() -> Model:
    params, static = equinox.arrays_of(
        lambda key: [equinox.Mamba(key, width=128, inner=256, states=8) for key in jax.random.split(key, 2)]
    )

    def loss(params: Any, x: Any) -> jax.Array:
        y = x
        for layer in eqx.combine(params, static):
            y = y + jax.vmap(layer)(y)
        return jnp.mean((y - x) ** 2)

    def spec_of(path: str, shape: tuple[int, ...]) -> P:
        if ".out" in path or ".selection" in path:
            return columns(path, shape)
        return megatron((path,))(path, shape) if len(shape) == 2 else P()

    return training_step(loss, params, optax.adamw(1e-3), {"x": floats(16, 32, 128)}, spec_of)


MADE: dict[str, Callable[[], Model]] = {
    "GPT-2 of transformers": gpt2,
    "BERT of transformers": bert,
    "Equinox transformer": encoder,
    "Haiku ResNet-18": resnet,
    "Linen mixture of experts": mixture_of_experts,
    "Equinox Mamba": mamba,
}
"""Names, and what makes the models."""
