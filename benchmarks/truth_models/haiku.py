"""Models of Haiku, trained by Muon of optax."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax
import optax.contrib

from truth_models.training import Model, integers, megatron, next_tokens, training_step


class Block(hk.Module):
    """Attention and a perceptron, with norms before them."""

    def __call__(self, x):
        h = hk.LayerNorm(-1, True, True)(x)
        mask = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1])))
        x = x + hk.MultiHeadAttention(4, 8, w_init=hk.initializers.VarianceScaling(), model_size=32)(h, h, h, mask=mask)
        h = hk.LayerNorm(-1, True, True)(x)
        return x + hk.Linear(x.shape[-1], name="down")(jax.nn.gelu(hk.Linear(4 * x.shape[-1], name="up")(h)))


def muon() -> Model:
    def forward(tokens):
        x = hk.Embed(64, 32)(tokens)
        for _ in range(2):
            x = Block()(x)
        return hk.Linear(64)(hk.LayerNorm(-1, True, True)(x))

    model, tokens = hk.without_apply_rng(hk.transform(forward)), integers(8, 16)
    params = jax.eval_shape(lambda key: model.init(key, jnp.zeros((8, 16), jnp.int32)), jax.random.key(0))
    return training_step(
        lambda params, tokens: next_tokens(model.apply(params, tokens), tokens),
        params,
        optax.contrib.muon(1e-2),
        {"tokens": tokens},
        megatron(("down", "multi_head_attention/linear")),
    )
