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
# Specs are the shardings of arguments and results. The shardings of everything in between, and the collectives that
# they require, are chosen by XLA's partitioner, if the axes of the mesh are of type Auto. It never fails: whatever the
# specs are, the step runs and is correct. It may be slow, and nothing says why. (Over axes of type Explicit, those of
# `jax.make_mesh`, the program itself has to say what types leave open: `docs/meshes.md`.)
#
# `partjit.inspect.explain` does, without compiling or running anything. In this notebook we take a small transformer
# with specs that look reasonable, read their consequences, and improve them step by step.

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

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)

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
# The batch is sharded over two devices, and the model over four. Attention is sharded by heads. For the other
# matrices it is tempting to shard each by columns, which is always possible. The head, whose columns are the
# vocabulary, is sharded by rows, because its rows are long.

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
# * **compute**: the FLOPs of one step in total, and per device. With eight devices an eighth is optimal; more means
#   that computations are replicated.
# * **memory**: an estimate of the peak memory of a device.
# * **look at**: findings, if there are any, the most costly kind first. A suggestion of another sharding is tried out,
#   and the finding says what a device then sends and needs.
# * **arrays**: the arguments and results with their specs, and their bytes per device.
# * **collectives**: `count` is the number of equal ones, `times` is how often each runs in a step: those with 4 are
#   in the loop over layers. The bytes are those that one device sends, for all of them together. `module` is the
#   scope that a library of modules enters for each layer or, without one, the parameter that is read there.
#
# A device sends many times what it has of the parameters. The first line of the last table is the largest part: all
# logits are all-reduced. How are they sharded, and why?


# %%
def logits_of(report):
    matmuls = [e for e in report.equations if e.primitive == "dot_general" and e.site[2] == "loss_fn"]
    return matmuls[0].outputs[0]


before.why(logits_of(before))

# %% [markdown]
# The vocabulary, dimension 2, is unsharded: every device of a row of the mesh has all 2048 logits of its tokens. In
# the picture each box is a piece, with the numbers of the devices that hold it:

# %%
logits = logits_of(before)
draw_array(logits.aval.shape, logits.spec, mesh)

# %% [markdown]
# Four devices have the same piece. With the head sharded by rows each of them has a partial sum of every logit, and
# an all-reduce of the largest array of the program adds them.
#
# ## Step 1: the head by columns
#
# Sharded by columns, each device computes the logits of its part of the vocabulary, and nothing is reduced. The
# softmax then needs the maximum and the sum of each row, which are small.

# %%
second = {**first, "head": P(None, "model")}
better = explain(step_with(second), params, tokens, mesh=mesh)

logits = logits_of(better)
draw_array(logits.aval.shape, logits.spec, mesh)

# %%
print(better.collectives.to_text(6))

# %% [markdown]
# That all-reduce is gone. The collectives at the top now run four times: they are in the loop. The all-reduces are the
# cost of tensor parallelism: one after attention and one after the feed-forward part, forward and backward. But there
# are all-gathers as well, where none should be needed.
#
# The vectors between the layers, which `normalize` reads first, are sharded over `model`, and the matrices need them
# replicated. Why are they sharded?


# %%
def first_in(report, function):
    equations = [e for e in report.equations if e.site and e.site[2] == function and e.outputs[0].aval.ndim == 3]
    return equations[0].outputs[0]


better.why(first_in(better, "normalize"))

# %% [markdown]
# Dimension 2 is the width. It is sharded because of `down`, the last matrix of a layer: its columns are sharded, and
# so are the vectors that the `scan` carries to the next layer. There unsharded vectors are needed, so they are
# gathered, in every layer. The columns of `embed` do the same to the vectors that enter the first one.
#
# ## Step 2: unsharded vectors between layers
#
# A pair of matrices is best sharded with the first by columns and the second by rows: `up` and `down`, as `qkv` and
# `out` are already. The values between them stay sharded; one all-reduce adds the results. The table of `embed` can
# be sharded by rows too: then each device looks up the tokens that it has.

# %%
third = {**second, "embed": P("model", None), "down": P(None, "model", None)}
best = explain(step_with(third), params, tokens, mesh=mesh)
print(best.collectives.to_text(6))

# %% [markdown]
# No all-gather is left. `diff` shows what changed between the two sets of specs:

# %%
difference = before.diff(best)
print(*(f"{name:15} {a / 1e6:5.1f} MB -> {b / 1e6:5.1f} MB" for name, a, b in difference.totals), sep="\n")
for kind, axes, a, b in difference.collectives:
    print(f"{kind} over {', '.join(axes)}: {a} -> {b}")

# %% [markdown]
# Changes are not always additive. With `embed` alone it would have been worse: the vectors between layers are still
# sharded because of `down`, and those from the table have to be resharded. A report takes about a second, so one can
# just try:

# %%
for names in (["embed"], ["down"], ["embed", "down"]):
    specs = {**second, **{name: third[name] for name in names}}
    report = explain(step_with(specs), params, tokens, mesh=mesh)
    print(f"{' and '.join(names):15} {report.collectives.bytes_per_step / 1e6:5.1f} MB per step")

# %% [markdown]
# ## Was it right?
#
# So far nothing was compiled. `compiled=True` compiles the step and reads the collectives of the optimized program.
# XLA combines some of the small ones, so there are fewer; the bytes are as predicted.

# %%
compiled = explain(step_with(third), params, tokens, mesh=mesh, compiled=True)
for report in (best, compiled):
    found = report.collectives
    print(f"{found.source:10} {len(found):3} collectives, {found.bytes_per_step / 1e6:.2f} MB per step")


# %% [markdown]
# And does it help? Eight virtual devices on one processor communicate by copying memory, unlike the links of real
# devices, and all eight share the same cores. So the ratio below shows only whether there is less to do, not the
# speedup on a real machine, where communication costs more.


# %%
def time_steps(steps, rounds=5):
    seconds = {name: [] for name in steps}
    states = dict.fromkeys(steps, params)
    for k in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            states[name], loss = step(states[name], tokens)
            loss.block_until_ready()
            if k:  # the first one compiles
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


with mesh:
    seconds = time_steps({"first": step_with(first), "third": step_with(third)})
print(f"a step takes {seconds['third'] / seconds['first']:.2f} of the time it took")

# %% [markdown]
# ## The report
#
# At the end of a cell a report is displayed as a page: everything above, the program line by line with the spec of
# each value, and tables that can be sorted and searched. `best.to_html("report.html")` writes it to a self-contained
# file.

# %%
best
