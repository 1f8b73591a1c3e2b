"""Models of Flax Linen, trained by optax."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from partjit import P
from truth_models.training import (
    Model,
    columns,
    cross_entropy,
    floats,
    fully_sharded,
    integers,
    megatron,
    next_tokens,
    training_step,
)

SECOND = ("'out'", "Dense_1", "down")


class Block(nn.Module):
    """Attention and a perceptron, with norms before them."""

    causal: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0]) if self.causal else None
        h = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, deterministic=True, dtype=self.dtype)(h, h, mask=mask)
        h = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(h)


class LanguageModel(nn.Module):
    """A causal transformer."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 32, dtype=self.dtype)(tokens)
        for _ in range(2):
            x = Block(causal=True, dtype=self.dtype)(x)
        return nn.Dense(64, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))


def shapes_of(model, *args):
    return jax.eval_shape(lambda key: model.init(key, *(jnp.zeros(x.shape, x.dtype) for x in args)), jax.random.key(0))


def language_model(dtype: Any = jnp.float32) -> Model:
    model, tokens = LanguageModel(dtype), integers(8, 16)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return training_step(
        lambda params, tokens: next_tokens(model.apply(params, tokens), tokens),
        shapes_of(model, tokens),
        optimizer,
        {"tokens": tokens},
        megatron(SECOND),
    )


def half_precision() -> Model:
    return language_model(jnp.bfloat16)


class ViT(nn.Module):
    """Patches by a strided convolution, a class token, and the head on `x[:, 0]`."""

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(32, (4, 4), strides=(4, 4))(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = self.param("token", nn.initializers.zeros, (1, 1, 32))
        x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], axis=1)
        x = x + self.param("position", nn.initializers.normal(0.02), (1, x.shape[1], 32))
        for _ in range(2):
            x = Block()(x)
        return nn.Dense(16)(nn.LayerNorm()(x)[:, 0])


def vit() -> Model:
    model, images = ViT(), floats(16, 16, 16, 3)
    return training_step(
        lambda params, images, labels: cross_entropy(model.apply(params, images), labels),
        shapes_of(model, images),
        optax.adamw(1e-3),
        {"images": images, "labels": integers(16)},
        fully_sharded,
        batch_spec=P(("data", "model")),
    )


class ResNet(nn.Module):
    """Bottlenecks with batch norm and strides."""

    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(self.norm(nn.Conv(16, (3, 3))(x))), (2, 2), (2, 2))
        for features, stride in ((16, 1), (32, 2)):
            y = nn.relu(self.norm(nn.Conv(features, (1, 1))(x)))
            y = nn.relu(self.norm(nn.Conv(features, (3, 3), strides=(stride, stride))(y)))
            y = self.norm(nn.Conv(2 * features, (1, 1))(y))
            x = nn.relu(y + self.norm(nn.Conv(2 * features, (1, 1), strides=(stride, stride))(x)))
        return nn.Dense(16)(x.mean((1, 2)))

    def norm(self, x):
        return nn.BatchNorm(use_running_average=False)(x)


def resnet() -> Model:
    model, images = ResNet(), floats(16, 16, 16, 4)
    variables = shapes_of(model, images)

    def loss(params, images, labels):
        logits, _ = model.apply(params, images, mutable=["batch_stats"])
        return cross_entropy(logits, labels)

    optimizer = optax.sgd(0.1, momentum=0.9)
    return training_step(loss, variables, optimizer, {"images": images, "labels": integers(16)}, columns)


class UNet(nn.Module):
    """Down and up again, with connections across."""

    @nn.compact
    def __call__(self, x):
        across = []
        for features in (8, 16):
            x = nn.silu(nn.GroupNorm(4)(nn.Conv(features, (3, 3))(x)))
            across.append(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.silu(nn.Conv(32, (3, 3))(x))
        for features in (16, 8):
            x = jnp.concatenate([nn.ConvTranspose(features, (2, 2), strides=(2, 2))(x), across.pop()], axis=-1)
            x = nn.silu(nn.GroupNorm(4)(nn.Conv(features, (3, 3))(x)))
        return nn.Conv(4, (1, 1))(x)


def unet() -> Model:
    model, images = UNet(), floats(8, 16, 16, 4)
    return training_step(
        lambda params, images: jnp.mean((model.apply(params, images) - images) ** 2),
        shapes_of(model, images),
        optax.adam(1e-3),
        {"images": images},
        columns,
    )


class Recurrent(nn.Module):
    """Embeddings, an LSTM and a head."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.RNN(nn.OptimizedLSTMCell(32))(nn.Embed(64, 32)(tokens))
        return nn.Dense(64)(x)


def lstm() -> Model:
    model, tokens = Recurrent(), integers(8, 16)
    return training_step(
        lambda params, tokens: next_tokens(model.apply(params, tokens), tokens),
        shapes_of(model, tokens),
        optax.adam(1e-3),
        {"tokens": tokens},
        columns,
    )


class Experts(nn.Module):
    """A mixture: each token goes to its two best of four experts, up to their capacity."""

    capacity: int = 64

    @nn.compact
    def __call__(self, x):
        tokens, width, experts, capacity = x.shape[0] * x.shape[1], x.shape[-1], 4, self.capacity
        flat = x.reshape(tokens, width)
        gates, chosen = jax.lax.top_k(jax.nn.softmax(nn.Dense(experts, name="router")(flat)), 2)
        sent = jax.nn.one_hot(chosen, experts)  # tokens, choices, experts
        place = jnp.cumsum(sent.reshape(-1, experts), axis=0).reshape(sent.shape) * sent - 1
        dispatch = jax.nn.one_hot(place, capacity) * sent[..., None]
        combine = jnp.einsum("tkec,tk->tec", dispatch, gates)
        up = self.param("up", nn.initializers.lecun_normal(), (experts, width, 2 * width))
        down = self.param("down", nn.initializers.lecun_normal(), (experts, 2 * width, width))
        inside = nn.gelu(jnp.einsum("tkec,td,edh->ech", dispatch, flat, up))
        return jnp.einsum("tec,ech,ehd->td", combine, inside, down).reshape(x.shape)


class MixtureModel(nn.Module):
    """Two layers of experts between embeddings."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 32)(tokens)
        for _ in range(2):
            x = x + Experts()(nn.LayerNorm()(x))
        return nn.Dense(64)(x)


def mixture_of_experts() -> Model:
    model, tokens = MixtureModel(), integers(8, 16)

    def spec_of(path, shape):
        return P("model") if len(shape) == 3 else columns(path, shape) if "router" not in path else P()

    return training_step(
        lambda params, tokens: next_tokens(model.apply(params, tokens), tokens),
        shapes_of(model, tokens),
        optax.adamw(1e-3),
        {"tokens": tokens},
        spec_of,
    )


def scanned() -> Model:
    """Layers under `nn.scan` and `nn.remat`, with gradients accumulated over four microbatches."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return Block()(x), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            many = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return many()(x, None)[0]

    model, x = Stack(), floats(16, 8, 32)

    def loss(params, x):
        def one(total, part):
            return total + jnp.mean(model.apply(params, part) ** 2), None

        return jax.lax.scan(one, jnp.zeros(()), x.reshape(4, 4, 8, 32))[0]

    def spec_of(path, shape):  # the first dimension is that of the layers
        return megatron(SECOND)(path, shape) if len(shape) > 2 else P()

    return training_step(loss, shapes_of(model, x), optax.sgd(0.1), {"x": x}, spec_of)
