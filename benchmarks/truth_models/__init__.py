"""The models that `truth.py` reads: names, and where they are made. A library is imported with its first model."""

MODELS = {
    "transformer, 24 layers": "own:transformer",
    "stencil": "plain:stencil",
    "ring attention": "plain:ring_attention",
    "pipeline": "plain:pipeline",
    "decoding with a cache": "plain:decode",
    "attention mask, bf16": "plain:attention_mask",
    "loop of unknown length": "plain:unknown_loop",
    "shard_map over one axis": "plain:partly_manual",
    "Linen language model": "flax_linen:language_model",
    "Linen language model, bf16": "flax_linen:half_precision",
    "Linen ViT, FSDP": "flax_linen:vit",
    "Linen ResNet": "flax_linen:resnet",
    "Linen U-Net": "flax_linen:unet",
    "Linen LSTM": "flax_linen:lstm",
    "Linen mixture of experts": "flax_linen:mixture_of_experts",
    "Linen scan, accumulation": "flax_linen:scanned",
    "Equinox transformer": "equinox:transformer",
    "Equinox Mamba": "equinox:mamba",
    "NNX language model": "flax_nnx:language_model",
    "NNX decoding": "flax_nnx:decode",
    "NNX GRU": "flax_nnx:recurrent",
    "Haiku with Muon": "haiku:muon",
    "GPT-2 of transformers": "transformers:gpt2",
    "BERT of transformers": "transformers:bert",
    "jraph graph network": "jraph:graph_network",
    "Diffrax neural ODE": "diffrax:neural_ode",
    "Optimistix least squares": "optimistix:least_squares",
    "Lineax conjugate gradients": "optimistix:conjugate_gradients",
    "NumPyro inference": "numpyro:variational",
    "Distrax flow": "distrax:flow",
    "e3nn messages": "e3nn_jax:messages",
    "BlackJAX chains": "blackjax:chains",
    "Penzai perceptron": "penzai:perceptron",
    "OTT transport": "ott:transport",
}
"""Names, and the module of this package and the function that make them."""

FASTER = {"transformer, 24 layers": 0.15}
"""The models of which the report must be cheaper than of others, and its bound."""
