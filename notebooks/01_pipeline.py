# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The pipeline, stage by stage
#
# `jax.jit` takes a function and makes one compiled program of it. `partjit.pjit` does the same, and takes *specs* as
# well: for every argument and result, which dimension is sharded over which axis of a mesh of devices. XLA then
# chooses the shardings of everything in between.
#
# Between the call and the devices there are seven stages. This notebook looks at the output of each:
#
# ```
#  specs -> validation -> trace -> primitive -> lowering -> compilation -> dispatch
# ```
#
# The first cell asks for eight virtual CPU devices. XLA reads `NPROC` when it starts: a collective over eight devices
# blocks eight threads, so there must be enough of them, also on a machine with two cores.

# %%
import os

os.environ["NPROC"] = "32"

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

from partjit import Mesh, P, ParsedPartitionSpec, ReshardWarning, ShardingError, pjit

# %% [markdown]
# A mesh is a grid of devices whose axes have names. This one is 4 by 2. Its names are what specs refer to.

# %%
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
mesh


# %% [markdown]
# This is the function that we follow: one layer of a network. Its batch `x` is sharded over `data` by rows, its
# weights `w` over `model` by columns. The result is sharded over both.


# %%
@pjit(in_shardings=(P("data", None), P(None, "model")), out_shardings=P("data", "model"))
def layer(x, w):
    return jnp.tanh(x @ w)


x = np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16)
w = np.linspace(-1, 1, 16 * 4, dtype=np.float32).reshape(16, 4)

# %% [markdown]
# ## Stage 1: specs
#
# People write the same spec in several ways. Parsing gives all of them one form: for each dimension a tuple of mesh
# axes, the major one first. What was written is kept beside it, for error messages.

# %%
for spelling in (P("data"), P("data", None), P(("data",)), P(("data", "model"), None), None):
    parsed = ParsedPartitionSpec.from_user_input(spelling, "the spec of x")
    print(f"{spelling!s:40} {parsed.partitions}")

# %% [markdown]
# Parsing knows no array and no mesh yet. So it only finds what is wrong with a spec by itself, and it does that when
# `pjit` is called, not when the function is.

# %%
try:
    pjit(jnp.sin, in_shardings=P("data", "data"))
except ValueError as error:
    print(error)

# %% [markdown]
# ## Stage 2: validation
#
# When the function is called, its arguments are there, and the mesh is the one of the `with` block. Now ranks, axes
# and sizes are checked, for all arguments, before anything runs. All failures come in one error. Each names the
# argument by its path, says what was given and what does not fit, and what to do.

# %%
batch = {"x": np.ones((6, 16), np.float32), "mask": np.ones(8, np.float32)}
wrong = pjit(lambda batch, w: batch["x"] @ w, in_shardings=(P("data", None), P("modell")))

try:
    with mesh:
        wrong(batch, w)
except ShardingError as error:
    print(error)

# %% [markdown]
# ## Stage 3: the trace
#
# Tracing runs the Python function once, with stand-ins for arrays, and writes down what it does. The record is a
# *jaxpr*: one equation per operation. This is what `jax.jit` does as well, and `jax.make_jaxpr` shows it.

# %%
with mesh:
    traced = layer.trace(x, w)
print(traced.jaxpr)

# %% [markdown]
# Specs are not in it. Two `pjit`s of one function with different specs share a trace.
#
# ## Stage 4: the primitive
#
# A jaxpr and the specs of its arguments and results make a program. A program is *one equation*, of a primitive
# called `pjit`. That is how it appears in functions that call it, and it is what transformations of JAX act on. The
# next cell defines `show`, which prints the jaxpr of a function.


# %%
def show(fun, *args):
    with mesh:
        print(jax.make_jaxpr(fun)(*args))


show(lambda x, w: 2 * layer(x, w), x, w)

# %% [markdown]
# ### Under transformations
#
# A transformation applies a rule to the equation. The rule makes a new equation, with another jaxpr inside, and has to
# choose specs for everything that is new.
#
# | transformation | the jaxpr inside becomes | new specs |
# |---|---|---|
# | `jax.jvp` | values and tangents | a tangent is sharded as its primal |
# | partial evaluation | two: what can be computed now, and the rest | of residuals: unspecified |
# | transposition | the linear function backwards | the cotangent of an argument is sharded as the argument |
# | `jax.vmap` | the same on a batch | a leading entry: `None`, or `spmd_axis_name` |
# | dead code elimination | without unused computations | those that are left |
#
# **Forward mode** first. The equation below has one argument more than the one above, the tangent of `w`, and one
# result more. The specs of both are copies of those of `w` and of the result.

# %%
show(lambda x, w, dw: jax.jvp(lambda w: layer(x, w), (w,), (dw,))[1], x, w, w)

# %% [markdown]
# **Partial evaluation** splits a program in two. `jax.linearize` computes what does not depend on the tangent, and
# keeps the rest for later. So there are two equations now.
#
# The second one needs a value that the first one computed. Such a value is called a *residual*. Its spec is
# `UNSPECIFIED` on both sides: it keeps the sharding that XLA's partitioner gives it, and nothing is resharded.


# %%
def linearized(x, w, dw):
    _, derivative = jax.linearize(lambda w: layer(x, w), w)
    return derivative(dw)


show(linearized, x, w, w)

# %% [markdown]
# **Transposition** reverses the second one: from the cotangent of the result to the cotangent of `w`. It is sharded as
# `w`: its spec is `P(None, 'model')`. So gradients have the shardings of their parameters. Reverse mode, `jax.grad`, is
# these three rules one after the other.

# %%
with mesh:
    y, backward = jax.vjp(lambda w: layer(x, w), w)
show(backward, y)

# %% [markdown]
# **Batching** adds a leading axis to batched values, and a leading entry to their specs. Here that entry is `None`:
# every device has its shard of all five batches. `w` has no batch, so its spec stays.

# %%
batches = np.stack([x] * 5)
show(jax.vmap(layer, in_axes=(0, None)), batches, w)

# %% [markdown]
# With `spmd_axis_name` the batch is sharded as well, over an axis that is still free.


# %%
@pjit(in_shardings=P("data"), out_shardings=P("data"))
def double(x):
    return 2 * x


show(jax.vmap(double, spmd_axis_name="model"), np.stack([x, x]))

# %% [markdown]
# **Dead code elimination** is what JAX does when results turn out not to be needed, for example in the part that
# `jax.checkpoint` recomputes. We apply it by hand here: of two results only the second is used. The argument
# `w` and the product leave the program, and their specs leave with them.

# %%
from jax.interpreters import partial_eval as pe


@pjit(in_shardings=(P("data"), P(None, "model")), out_shardings=(P("data", "model"), P("data")))
def two_results(x, w):
    return x @ w, jnp.sum(x, axis=1)


with mesh:
    jaxpr = jax.make_jaxpr(two_results)(x, w).jaxpr
print(pe.dce_jaxpr(jaxpr, [False, True])[0])

# %% [markdown]
# ## Stage 5: lowering
#
# A program that is to run is translated to StableHLO, the language of XLA. Each argument and result carries its spec
# as an attribute, `sdy.sharding`. Values in between have none: XLA's partitioner chooses theirs.

# %%
lowered = traced.lower()
_, _, function = lowered.as_text().partition("func.func public ")
print(function.replace("}, %", "},\n           %").replace(" -> (tensor<8x4xf32> {", "\n    -> (tensor<8x4xf32> {"))

# %% [markdown]
# ## Stage 6: compilation
#
# The partitioner chooses the sharding of every value, writes the program of one device, and adds communication where a
# device needs data of others. This layer needs none: each device has complete rows of `x` and columns of `w`. If `w` is
# sharded by rows instead, each device has partial sums, which have to be all-reduced.

# %%
import re

by_rows = pjit(lambda x, w: jnp.tanh(x @ w), in_shardings=(P("data"), P("model", None)))

with mesh:
    other = by_rows.lower(x, w).compile()
for name, compiled in {"by columns": lowered.compile(), "by rows": other}.items():
    collectives = re.findall(r" (all-[a-z]+|reduce-scatter|collective-permute)\(", compiled.as_text())
    print(f"{name}: {collectives or 'no collectives'}")

# %% [markdown]
# The second notebook reads larger programs, and does not search their text for it.
#
# ## Stage 7: dispatch
#
# The first call of a function goes through all stages. The next ones do not: a function of `pjit` *is* an object of
# JAX's C++ dispatch, which recognizes the types of arguments and starts the program.

# %%
from partjit.inspect import draw_array

with mesh:
    y = layer(x, w)
draw_array(y)

# %% [markdown]
# Every device has a piece of 2 by 2. A NumPy array is sharded by the spec of its argument. An array that is
# committed to another sharding is resharded, and a warning names the argument and the cost.
# `reshard_policy` turns the warning into an error, or off.

# %%
import warnings

misplaced = jax.device_put(x, jax.sharding.NamedSharding(mesh, P(None, "model")))
with mesh, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", ReshardWarning)
    layer(misplaced, w)
print(caught[0].message)

# %% [markdown]
# ## What is cached
#
# A trace is kept by function, types, static arguments and mesh; a compiled program by jaxpr, specs and mesh. To see
# it, we count. JAX reports every compilation to listeners, and a traced function can count by itself.

# %%
compilations, traces = [], []


def on_event(event, seconds, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        compilations.append(seconds)


def cube(x):
    traces.append(x)
    return x**3


jax.monitoring.register_event_duration_secs_listener(on_event)

# %%
rows = pjit(cube, in_shardings=P("data"), out_shardings=P("data"))
again = pjit(cube, in_shardings=P("data"), out_shardings=P("data"))
columns = pjit(cube, in_shardings=P(None, "model"), out_shardings=P(None, "model"))
same_mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def count(what, fun, mesh, x):
    traces.clear(), compilations.clear()
    with mesh:
        fun(x)
    print(f"{what:40} {len(traces)} traces, {len(compilations)} compilations")


# %%
count("the first call", rows, mesh, x)
count("the second call", rows, mesh, x)
count("the same function and specs once more", again, mesh, x)
count("a mesh that is made anew", rows, same_mesh, x)
count("the same function with other specs", columns, mesh, x)
count("another shape", rows, mesh, x[:4])

# %% [markdown]
# That another `pjit` of the same function neither traces nor compiles is worth something: wrapping a function inside
# of a loop, by mistake or not, costs little.
#
# ## When a program calls Python
#
# One stage was left out. If the function makes *colocated calls*, calls of Python functions on the hosts of the
# devices, its jaxpr cannot become one executable. It is cut into fragments then, and what is dispatched is a *plan*.
# A program without calls has a plan of one fragment:

# %%
with mesh:
    print(layer.plan(x, w))

# %% [markdown]
# The third notebook is about plans with more in them.
