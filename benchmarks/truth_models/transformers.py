"""Models of Hugging Face's transformers that are written in Flax."""

from typing import Any

import jax
import optax
from transformers import BertConfig, GPT2Config
from transformers.models.bert.modeling_flax_bert import FlaxBertForMaskedLM
from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2LMHeadModel

from partjit import P
from truth_models.training import Model, cross_entropy, integers, next_tokens, training_step


def spec_of(path, shape):
    """As in Megatron; the kernels of GPT-2 are outputs by inputs."""
    if len(shape) < 2:
        return P()
    if "embedding" in path or "wte" in path or "wpe" in path:
        return P(None, "model")
    is_second = any(name in path for name in ("c_proj", "['output']"))
    is_reversed = "c_" in path
    return P("model") if is_second != is_reversed else P(None, "model")


def shapes_of(model: Any) -> Any:
    return jax.eval_shape(lambda key: model.init_weights(key, (1, 1)), jax.random.PRNGKey(0))


def gpt2() -> Model:
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, attn_pdrop=0.0)
    model = FlaxGPT2LMHeadModel(config, _do_init=False)

    def loss(params, tokens):
        return next_tokens(model(tokens, params=params, train=True, dropout_rng=jax.random.key(0)).logits, tokens)

    return training_step(loss, shapes_of(model), optax.adamw(1e-3), {"tokens": integers(8, 16)}, spec_of)


def bert(
    width: int = 32,
    inner: int = 64,
    layers: int = 2,
    heads: int = 4,
    vocabulary: int = 64,
    positions: int = 16,
    batch: int = 8,
) -> Model:
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        max_position_embeddings=positions,
    )
    model = FlaxBertForMaskedLM(config, _do_init=False)

    def loss(params, tokens, mask, labels):
        return cross_entropy(model(tokens, attention_mask=mask, params=params, train=False).logits, labels)

    inputs = {name: integers(batch, positions) for name in ("tokens", "mask", "labels")}
    return training_step(loss, shapes_of(model), optax.adamw(1e-3), inputs, spec_of)
