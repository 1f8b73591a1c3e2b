"""Models of Flax NNX: the state of a module is the argument, and the module is merged in the step."""

import jax.numpy as jnp
import optax
from flax import nnx

from partjit import P, pjit
from truth_models.training import Model, by_path, floats, integers, megatron, next_tokens, two_axes

SPECS = megatron(("down", "'out'"))


class Block(nnx.Module):
    """Attention and a perceptron with dropout, with norms before them."""

    def __init__(self, width, rngs, decode=False):
        self.first, self.second = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=decode, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, mask=None):
        x = x + self.attention(self.first(x), mask=mask)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.second(x)))))


class LanguageModel(nnx.Module):
    """A causal transformer."""

    def __init__(self, rngs, decode=False):
        self.embed, self.head = nnx.Embed(64, 32, rngs=rngs), nnx.Linear(32, 64, rngs=rngs)
        self.blocks = nnx.List([Block(32, rngs, decode) for _ in range(2)])

    def __call__(self, tokens, mask=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def language_model() -> Model:
    def make():
        model = LanguageModel(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    definition, state = nnx.split(nnx.eval_shape(make))

    def step(state, tokens):
        model, optimizer = nnx.merge(definition, state)

        def loss(model):
            return next_tokens(model(tokens, nnx.make_causal_mask(tokens)), tokens)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    specs = by_path(state, SPECS)
    made = pjit(step, in_shardings=(specs, P("data")), out_shardings=(specs, None), donate_argnums=0)
    return Model(made, (state, integers(8, 16)), two_axes())


def decode() -> Model:
    """One token, with the caches of NNX's own attention."""

    def make():
        model = LanguageModel(nnx.Rngs(0), decode=True)
        model.eval()
        for block in model.blocks:
            block.attention.init_cache((8, 16, 32))
        return model

    definition, state = nnx.split(nnx.eval_shape(make))

    def step(state, tokens):
        model = nnx.merge(definition, state)
        logits = model(tokens)
        return nnx.state(model), jnp.argmax(logits[:, -1], axis=-1)[:, None]

    def spec_of(path, shape):
        return P("data", None, "model") if "cached_" in path else SPECS(path, shape)

    specs = by_path(state, spec_of)
    made = pjit(step, in_shardings=(specs, P("data")), out_shardings=(specs, P("data")), donate_argnums=0)
    return Model(made, (state, integers(8, 1)), two_axes())


def recurrent() -> Model:
    """A GRU under `nnx.RNN`, with forward only."""
    definition, state = nnx.split(nnx.eval_shape(lambda: nnx.RNN(nnx.GRUCell(16, 32, rngs=nnx.Rngs(0)))))
    specs = by_path(state, SPECS)
    made = pjit(lambda state, x: nnx.merge(definition, state)(x), in_shardings=(specs, P("data")))
    return Model(made, (state, floats(8, 12, 16)), two_axes())
