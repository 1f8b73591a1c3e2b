# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reading a partitioned transformer
#
# Specs say where arguments and results lie. Where everything in between lies, and what has to be sent for that, is
# worked out by XLA's partitioner. It never fails: whatever the specs are, the step runs and is right. It may be slow,
# and nothing says why.
#
# `partjit.inspect.explain` says it, without compiling or running anything. In this notebook we take a small
# transformer with specs that look reasonable, read what becomes of them, and improve them step by step.

# %%
import os

os.environ["NPROC"] = "32"

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

from partjit import Mesh, P, pjit
from partjit.inspect import draw_array, explain

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))

# %% [markdown]
# ## The model
#
# The parameters of all layers are stacked: their first dimension is the layer. A `scan` goes through them.

# %%
LAYERS, BATCH, LENGTH = 4, 16, 64
VOCAB, WIDTH, HEADS, HIDDEN = 2048, 128, 4, 512

shapes = {
    "embed": (VOCAB, WIDTH),
    "qkv": (LAYERS, 3, WIDTH, HEADS, WIDTH // HEADS),
    "out": (LAYERS, HEADS, WIDTH // HEADS, WIDTH),
    "up": (LAYERS, WIDTH, HIDDEN),
    "down": (LAYERS, HIDDEN, WIDTH),
    "head": (WIDTH, VOCAB),
}
rng = np.random.default_rng(0)
params = {name: rng.normal(scale=0.05, size=shape).astype(np.float32) for name, shape in shapes.items()}
tokens = rng.integers(VOCAB, size=(BATCH, LENGTH)).astype(np.int32)


# %%
def normalize(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attend(layer, x):
    q, k, v = jnp.einsum("blw,cwhd->cblhd", normalize(x), layer["qkv"])
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k)
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    return jnp.einsum("bhlm,bmhd,hdw->blw", jax.nn.softmax(scores), v, layer["out"])


def feed_forward(layer, x):
    return jax.nn.gelu(normalize(x) @ layer["up"]) @ layer["down"]


# %%
def loss_fn(params, tokens):
    def block(x, layer):
        x = x + attend(layer, x)
        return x + feed_forward(layer, x), None

    layers = {name: params[name] for name in ("qkv", "out", "up", "down")}
    x, _ = jax.lax.scan(block, params["embed"][tokens], layers)
    logits = normalize(x) @ params["head"]
    logp = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1))


def train_step(params, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def step_with(specs):
    return pjit(train_step, in_shardings=(specs, P("data")), out_shardings=(specs, None), donate_argnums=0)


# %% [markdown]
# ## The first specs
#
# Two devices share the batch, and four the model. Attention is divided by heads. For the other matrices it is
# tempting to say: each can be divided by columns, so divide them by columns. The head, whose columns are the
# vocabulary, is divided by rows, because of its long ones.

# %%
first = {
    "embed": P(None, "model"),
    "qkv": P(None, None, None, "model"),
    "out": P(None, "model"),
    "up": P(None, None, "model"),
    "down": P(None, None, "model"),
    "head": P("model", None),
}

before = explain(step_with(first), params, tokens, mesh=mesh)
print(before.to_text(5))

# %% [markdown]
# How to read it, from the top:
#
# * **work**: one step takes so many operations in all, and so many on each device. With eight devices an eighth is
#   the best there is; what is more is done several times.
# * **memory**: an estimate of the most that a device holds at a time.
# * **arrays**: the arguments and results with their specs, and what a device has of them.
# * **collectives**: what devices send each other. `count` are those that look alike, `times` is how often each runs
#   in a step: 4 are those in the loop over layers. The bytes are those that one device sends, for all of them
#   together.
#
# Eighteen megabytes per step, where a device has 1.3 megabytes of parameters. The first line of the last table is a
# third of it: the logits are added up, all of them. Where do they lie, and why?


# %%
def logits_of(report):
    matmuls = [e for e in report.equations if e.primitive == "dot_general" and e.site[2] == "loss_fn"]
    return matmuls[0].outputs[0]


before.why(logits_of(before))

# %% [markdown]
# The vocabulary, dimension 2, is whole: every device of a row of the mesh has all 2048 logits of its tokens. This is
# what that looks like; each box is a piece, with the numbers of the devices that have it:

# %%
logits = logits_of(before)
draw_array(logits.aval.shape, logits.spec, mesh)

# %% [markdown]
# Four devices have the same piece. With the head divided by rows each of them has a part of every sum, and the parts
# are added up by an all-reduce of the largest array of the program.
#
# ## Step 1: the head by columns
#
# Divided by columns, each device computes the logits of its part of the vocabulary, and nothing is added up. The
# softmax then needs the greatest logit of a row and the sum over it, which are small.

# %%
second = {**first, "head": P(None, "model")}
better = explain(step_with(second), params, tokens, mesh=mesh)

logits = logits_of(better)
draw_array(logits.aval.shape, logits.spec, mesh)

# %%
print(better.collectives.to_text(6))

# %% [markdown]
# A third is gone. What is at the top now runs four times: it is in the loop. The all-reduces are what this way of
# dividing a transformer costs: one after attention and one after the feed-forward part, forward and backward. But
# there are all-gathers as well, in `normalize`, where nothing has to be gathered by right.
#
# An all-gather puts together what is divided. So what comes to `normalize` is divided over `model`, and what it does
# next wants all of it. Why is it divided?


# %%
def first_in(report, function):
    equations = [e for e in report.equations if e.site and e.site[2] == function and e.outputs[0].aval.ndim == 3]
    return equations[0].outputs[0]


better.why(first_in(better, "normalize"))

# %% [markdown]
# Dimension 2 is the width. It is divided because of `down`, the last matrix of a layer: its columns are divided, and
# so are the vectors that it gives to the next layer, by way of the `scan`. There whole vectors are needed, and they
# are gathered, in every layer. The columns of `embed` do the same to the vectors that come into the first one.
#
# ## Step 2: whole vectors between layers
#
# A pair of matrices is divided best with the first by columns and the second by rows: `up` and `down`, as `qkv` and
# `out` are already. What is between them is divided, and stays where it is; one sum puts the results together. The
# table of `embed` can be divided by rows too: then each device looks up the words that it has.

# %%
third = {**second, "embed": P("model", None), "down": P(None, "model", None)}
best = explain(step_with(third), params, tokens, mesh=mesh)
print(best.collectives.to_text(6))

# %% [markdown]
# No all-gather is left. `diff` shows what became of the program between two sets of specs:

# %%
difference = before.diff(best)
print(*(f"{name:15} {a / 1e6:5.1f} MB -> {b / 1e6:5.1f} MB" for name, a, b in difference.totals), sep="\n")
for kind, axes, a, b in difference.collectives:
    print(f"{kind} over {', '.join(axes)}: {a} -> {b}")

# %% [markdown]
# Changes do not always add up. With `embed` alone it would have been worse: the vectors between layers are still
# divided because of `down`, and those from the table have to be brought into that form. A report takes about a
# second, so one can just try:

# %%
for names in (["embed"], ["down"], ["embed", "down"]):
    specs = {**second, **{name: third[name] for name in names}}
    report = explain(step_with(specs), params, tokens, mesh=mesh)
    print(f"{' and '.join(names):15} {report.collectives.bytes_per_step / 1e6:5.1f} MB per step")

# %% [markdown]
# ## Was it right?
#
# So far nothing was compiled. `compiled=True` compiles the step and reads the collectives of the optimized program.
# XLA combines some of the small ones, so there are fewer; the bytes are those that were predicted.

# %%
compiled = explain(step_with(third), params, tokens, mesh=mesh, compiled=True)
for report in (best, compiled):
    found = report.collectives
    print(f"{found.source:10} {len(found):3} collectives, {found.bytes_per_step / 1e6:.2f} MB per step")


# %% [markdown]
# And does it help? Eight virtual devices on one processor send each other bytes by copying them in memory. That is
# nothing like the links of real devices, and all eight share the same cores. So the ratio below tells only whether
# there is less to do, not how much quicker a real machine would be. There, bytes weigh more.


# %%
def time_steps(steps, turns=5):
    seconds = {name: [] for name in steps}
    states = dict.fromkeys(steps, params)
    for turn in range(turns + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            states[name], loss = step(states[name], tokens)
            loss.block_until_ready()
            if turn:  # the first one compiles
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


with mesh:
    seconds = time_steps({"first": step_with(first), "third": step_with(third)})
print(f"a step takes {seconds['third'] / seconds['first']:.2f} of the time it took")

# %% [markdown]
# ## The report
#
# At the end of a cell a report is a page: everything above, the whole program line by line with the spec of each
# value, and tables that can be sorted and searched. `best.to_html("report.html")` writes it to a file that needs no
# network.

# %%
best
