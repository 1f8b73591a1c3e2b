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
# # Finding specs
#
# A training step without any specs, and a mesh. Which specs make it fast? `partjit.search_specs` predicts what specs
# would cost on a machine, without compiling or running anything, and improves them until it finds no better ones. In
# this notebook we search the specs of a small model, read the answer, compare it with specs written by hand, ask what
# other specs would cost, and measure at last.

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

# %%
from jax import ShapeDtypeStruct
from jax.sharding import AbstractMesh, AxisType

import partjit
from partjit import Mesh, P, pjit
from partjit.inspect.what_if import Question
from partjit.search import Link, Machine, measure_machine, search_specs

# %% [markdown]
# ## The step
#
# A few layers of a perceptron with residual connections, trained with momentum. No spec is anywhere.

# %%
LAYERS, BATCH, WIDTH, HIDDEN = 4, 512, 256, 1024


def loss_fn(params, x, y):
    for layer in params["layers"]:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return jnp.mean((x @ params["head"] - y) ** 2)


def train_step(params, momentum, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    params = jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum)
    return params, momentum, loss


# %%
layer = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
shapes = {"layers": [layer] * LAYERS, "head": (WIDTH, WIDTH)}
params = jax.tree.map(
    lambda shape: ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=lambda node: isinstance(node, tuple)
)
batch = ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
args = params, params, batch, batch

# %% [markdown]
# ## A search without devices
#
# An `AbstractMesh` has names and sizes, and no devices. The machine says how fast its devices compute, and how fast
# they send along each axis of the mesh: here `model` is within a node and `data` between nodes. Its memory is the limit
# of what a device may need. There are `partjit.search.h100` and others; this one is made up, slow enough for our small
# model. The axes are Auto: along Explicit axes specs are types, and nothing is left to be found.

# %%
abstract = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
machine = Machine("made up", {"f32": 1e12}, 8_000_000, 1e11, {"data": Link(5e9, 1e-6), "model": Link(4e10, 1e-6)})
found = search_specs(train_step, *args, mesh=abstract, machine=machine, donate_argnums=(0, 1), questions=40)
print(found.to_text(6))

# %% [markdown]
# The first line is the estimated time of a step and the memory of a device. The table has the ways to partition that
# have names, where the search starts: the result is never worse than the best of those that fit. Below is Python to
# paste, with the constraints of activations as comments, if there are any.
#
# What takes the time? The table of causes says so:

# %%
print(found.time.to_text(6))

# %% [markdown]
# ## Beside specs written by hand
#
# By hand one might shard the batch over `data` and each pair of matrices by columns and by rows over `model`. `diff`
# has the arrays that are sharded otherwise in what was found.

# %%
by_hand = {"layers": [{"up": P(None, "model"), "down": P("model")}] * LAYERS, "head": P(None, "model")}
in_specs, out_specs = (by_hand, by_hand, P("data"), P("data")), (by_hand, by_hand, P())
for change in found.diff(in_specs, out_specs)[:8]:
    print(change)

# %%
hand = pjit(train_step, in_shardings=in_specs, out_shardings=out_specs, donate_argnums=(0, 1))
report = partjit.inspect.explain(hand, *args, mesh=abstract)
time_by_hand = partjit.estimate_time(report, machine)
print(f"by hand {1e3 * time_by_hand.total:.3f} ms, found {1e3 * found.seconds:.3f} ms")
print(f"by hand {report.memory[0].peak / 1e6:.2f} MB per device, found {found.peak / 1e6:.2f} MB")

# %% [markdown]
# ## What if
#
# The report can be asked what other specs would cost, in milliseconds a question. Say that the head were replicated:

# %%
engine = report.what_if(isolated=False)
replicated = Question({"params['head']": P(), "momentum['head']": P()}, {"result[0]['head']": P()})
for name, question in (("as it is", Question()), ("head replicated", replicated)):
    answer = engine.ask(question)
    print(f"{name:16} sends {answer.bytes_sent_at_most / 1e6:.3f} MB, needs {answer.peak_memory / 1e6:.2f} MB")

# %% [markdown]
# At the end of a cell, `engine.widget()` has a field for each spec, and shows what a change of it would change. (It
# needs anywidget, which `pip install "partjit[notebooks]"` installs; without a page there is nothing to be seen.)

# %%
widget = engine.widget()
widget.specs = {"params['layers'][*]['up']": "P('data')"}
for label, now, then, _ in widget.answer["totals"]:
    print(f"{label:28} {now:>12} -> {then}")

# %% [markdown]
# ## Measured
#
# Our devices are eight virtual ones of one processor. They share its cores, and what they send is copied in memory. A
# search for these has to be told so: `measure_machine` times products, copies and collectives on all of them at once.

# %%
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), (AxisType.Auto,) * 2)
here = measure_machine(mesh, seconds=3)
best = search_specs(train_step, *args, mesh=mesh, machine=here, donate_argnums=(0, 1), questions=40)
print(f"{best.origin}, {len(best.constraints)} constraints, {1e3 * best.seconds:.1f} ms per step estimated")

# %%
everywhere = P(("data", "model"))
steps = {
    "found": best.pjit(donate_argnums=(0, 1)),
    "by hand": hand,
    "data parallel": pjit(
        train_step, in_shardings=(P(), P(), everywhere, everywhere), out_shardings=P(), donate_argnums=(0, 1)
    ),
}


def arguments_of(step):
    shardings = step.lower(*args).compile().input_shardings[0]
    return jax.tree.map(lambda one, sharding: jax.device_put(jnp.full(one.shape, 0.01), sharding), args, shardings)


# %% [markdown]
# The steps are taken in turn, so that whatever else the machine does disturbs all of them alike.

# %%
with mesh:
    state = {name: arguments_of(step) for name, step in steps.items()}
    seconds = {name: [] for name in steps}
    for k in range(12):
        for name, step in steps.items():
            start = time.perf_counter()
            *new, loss = jax.block_until_ready(step(*state[name]))
            state[name] = (*new, *state[name][2:])
            if k > 1:
                seconds[name].append(time.perf_counter() - start)
medians = {name: statistics.median(times) for name, times in seconds.items()}
for name, median in medians.items():
    print(f"{name:14} {1e3 * median:6.1f} ms, {median / medians['found']:.2f} of what was found")

# %% [markdown]
# ## When to distrust it
#
# * The order of such measurements is worth more than their figures, and a few percent are worth nothing on a machine
#   that does other work as well. Where two ways differ by less, prefer the one that is simpler to write.
# * The search compares estimates. What XLA fuses and overlaps, and what it costs to launch an operation, are not in
#   them: compile the best few that it names, and measure, as above.
# * What was found for one machine is not what is best on another, as the two searches above, with the same step, may
#   show.
# * Some data movement is predicted only within bounds; it counts with its upper bound in the search, and is called
#   `unpredicted` in the table of causes, with what it takes as a rule. Where it is large, have the best few measured.
# * Memory is estimated, mostly within 15 %: leave some room below the limit.
