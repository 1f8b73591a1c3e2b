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
# # Testing sharded code with properties
#
# A function over many devices can be right on one example, and wrong on another mesh, with another
# spec, or with other numbers. A *property test* states what holds for all of them, and lets
# [hypothesis](https://hypothesis.readthedocs.io) look for a case where it does not. `partjit.testing` has what such
# tests of sharded code need: strategies that draw meshes, specs and arrays that fit together, and laws to check.
#
# The set-up is that of every notebook here: eight virtual CPU devices, and threads enough for them.

# %%
import os

os.environ["NPROC"] = "32"

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

from partjit import Mesh, P, pjit
from partjit import testing as laws

# %% [markdown]
# ## Strategies: what is drawn
#
# A strategy describes values to draw. `drawn` shows a few of them. Hypothesis begins with simple ones, and when a
# test fails it looks for simpler ones that fail as well. For us, simple means few devices, short specs and small
# shapes.
#
# The settings below make a notebook that is quick and shows the same each time: few examples, chosen without chance,
# no limits of time. The phase that is left out looks for the lines that only failing examples run. The axes of the mesh
# are Auto: random specs and programs leave open what types would have to say over Explicit ones.

# %%
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)

quick = settings(
    max_examples=8,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.generate, Phase.shrink],
)


# %%
def drawn(strategy, count):
    seen = []

    @settings(quick, max_examples=count)
    @given(strategy)
    def look(value):
        seen.append(value)

    look()
    return seen


# %%
for some_mesh in drawn(laws.meshes(), 8):
    print(dict(some_mesh.shape), [device.id for device in some_mesh.devices.flat])

# %% [markdown]
# Meshes have one to three axes, sizes that are no powers of two, and sometimes devices in another order. Specs for a
# given mesh come in every spelling, and shapes for a given spec are those that it divides:

# %%
print("specs of matrices   ", *drawn(laws.partition_specs(mesh=mesh, ndim=2), 8), sep="\n  ")
print("shapes for P('data')", *drawn(laws.shapes(spec=P("data"), mesh=mesh), 8))

# %% [markdown]
# ## A function that works
#
# Language models end in a loss over a large vocabulary, and the logits are often sharded over it: each device has
# some of the columns of a row. Here is what the loss means, for one device:


# %%
@jax.jit
def plain_loss(logits, labels):
    picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - picked


# %% [markdown]
# And here is a version by hand for sharded logits, in `jax.shard_map`. To keep `exp` from overflowing, the greatest
# logit is subtracted first. A device sums its part of the exponentials, and `psum` adds the parts. The logit of
# the label is on one device only; the others add zero.


# %%
def loss_on(mesh):
    axis = mesh.axis_names[0]

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(None, axis), P()), out_specs=P())
    def loss(logits, labels):
        logits = logits - jnp.max(logits, axis=1, keepdims=True)
        total = jax.lax.psum(jnp.sum(jnp.exp(logits), axis=1), axis)
        at = labels - jax.lax.axis_index(axis) * logits.shape[1]
        is_here = (at >= 0) & (at < logits.shape[1])
        picked = jnp.take_along_axis(logits, jnp.where(is_here, at, 0)[:, None], axis=1)[:, 0]
        return jnp.log(total) - jax.lax.psum(jnp.where(is_here, picked, 0), axis)

    return loss


# %% [markdown]
# Its author tried it on a batch of one-hot logits, repeated so that every device has the same. It was right.

# %%
logits, labels = np.tile(np.eye(4, dtype=np.float32), (1, 4)), np.arange(4, dtype=np.int32)
assert np.allclose(loss_on(mesh)(logits, labels), plain_loss(logits, labels), atol=1e-6)

# %% [markdown]
# ## A law
#
# `assert_same_meaning` asserts that a partitioned function computes the same values, with the requested output
# shardings. It checks gradients and batches as well, by default. The test draws the mesh, and a shape that the
# logits can have on it.


# %%
@quick
@given(st.data())
def test_loss(data):
    mesh = data.draw(laws.meshes(mesh_shapes=[(1,), (2,), (4,), (8,)]))
    spec = P(None, mesh.axis_names[0])
    rows, columns = data.draw(laws.shapes(spec=spec, mesh=mesh, min_ndim=2, max_ndim=2, max_size=32))
    logits = np.linspace(-2, 2, rows * columns, dtype=np.float32).reshape(rows, columns)
    labels = np.arange(rows, dtype=np.int32) % columns
    given_as = {"mesh": mesh, "in_specs": (spec, P()), "out_specs": P(), "reference": plain_loss}
    laws.assert_same_meaning(loss_on(mesh), logits, labels, **given_as, grad=False, vmap=False)


# %%
try:
    test_loss()
except AssertionError as error:
    print(error)

# %% [markdown]
# It is not right. The first line says what is wrong, and the next ones show the simplest case that still fails: two
# devices, and a row of two logits, one for each. Each device has subtracted *its own* greatest logit, and the parts
# of the sum do not belong together. With one device, or with equal logits everywhere, the results are right.
#
# The case is small enough to follow by hand: from `[-1, 1]` both devices make a zero, so the sum is `2`, and the loss
# `log 2`, which is `0.69`. The rest of the message is a script that runs this case alone, without hypothesis.
#
# ## The repair
#
# The greatest logit has to be that of the row: `pmax` finds it. That operation has no derivative in JAX, and needs
# none here: what is subtracted does not change the loss, so the gradient may stop there.


# %%
def loss_on(mesh):
    axis = mesh.axis_names[0]

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(None, axis), P()), out_specs=P())
    def loss(logits, labels):
        greatest = jnp.max(jax.lax.stop_gradient(logits), axis=1, keepdims=True)
        logits = logits - jax.lax.pmax(greatest, axis)
        total = jax.lax.psum(jnp.sum(jnp.exp(logits), axis=1), axis)
        at = labels - jax.lax.axis_index(axis) * logits.shape[1]
        is_here = (at >= 0) & (at < logits.shape[1])
        picked = jnp.take_along_axis(logits, jnp.where(is_here, at, 0)[:, None], axis=1)[:, 0]
        return jnp.log(total) - jax.lax.psum(jnp.where(is_here, picked, 0), axis)

    return loss


# %%
test_loss()

line = Mesh(jax.devices()[:4], "x")
specs = {"in_specs": (P(None, "x"), P()), "out_specs": P()}
laws.assert_same_meaning(loss_on(line), logits, labels, mesh=line, **specs, reference=plain_loss, vmap=False)

# %% [markdown]
# No message: the property holds for what was tried, and the gradients are right for the last case.

# %% [markdown]
# ## Specs for a whole tree
#
# What a function of `pjit` computes must not depend on its specs at all. `spec_trees` draws them for a tree of
# arrays. A spec may stand for a subtree, as in `pjit` itself.


# %%
def network(params, x):
    hidden = jnp.tanh(x @ params["up"] + params["bias"])
    return hidden @ params["down"]


params = {
    "up": np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8),
    "bias": np.zeros((1, 8), np.float32),
    "down": np.linspace(1, -1, 16, dtype=np.float32).reshape(8, 2),
}
for tree in drawn(laws.spec_trees(params, mesh=mesh), 6):
    print(tree)


# %%
@settings(quick, max_examples=3)
@given(laws.spec_trees(params, mesh=mesh), laws.partition_specs(mesh=mesh, shape=(8, 4)))
def test_network(specs, spec):
    x = np.linspace(0, 1, 32, dtype=np.float32).reshape(8, 4)
    laws.assert_same_meaning(network, params, x, mesh=mesh, in_specs=(specs, spec), vmap=False)


test_network()

# %% [markdown]
# ## What a program should not do
#
# A law can be about cost as well. Rows are independent of each other in this network, so a batch sharded by rows
# should need no communication, unless the weights are sharded too.

# %%
x = np.ones((8, 4), np.float32)

laws.assert_no_collectives(network, params, x, mesh=mesh, in_specs=(None, P("data")))

by_columns = {"up": P(None, "model"), "bias": P(None, "model"), "down": P("model", None)}
try:
    laws.assert_no_collectives(network, params, x, mesh=mesh, in_specs=(by_columns, P("data")))
except AssertionError as error:
    print(str(error)[:400])

# %% [markdown]
# And a loop should compile its step once. `assert_no_recompile` watches calls of a function and names the argument
# that changed if one of them compiles. A batch that is shorter at the end of an epoch is the usual reason.

# %%
step = pjit(network, in_shardings=(None, P("data")))
try:
    with mesh, laws.assert_no_recompile(step, warmup=1) as watched:
        for rows in (8, 8, 4):
            watched(params, x[:rows])
except AssertionError as error:
    print(error)

# %% [markdown]
# ## Random programs
#
# Transformations and tools have to work on any program. `sharded_programs` draws small
# differentiable ones, with constraints, nested `pjit`s, loops, branches and custom rules inside. Of thirty, this is
# the shortest with a loop:

# %%
programs = drawn(laws.sharded_programs(mesh=mesh), 30)
with mesh:
    texts = [str(jax.make_jaxpr(program)(*program.arguments())) for program in programs]
print(min((text for text in texts if "scan[" in text), key=len))

# %% [markdown]
# `program.plain` is the same program without constraints and nested pjits. partjit itself is tested by comparing the
# two, with many more examples than here.


# %%
@settings(quick, max_examples=3)
@given(laws.sharded_programs(mesh=mesh, max_steps=2))
def test_programs(program):
    laws.assert_same_meaning(program, *program.arguments(), mesh=mesh, reference=program.plain, vmap=False)


test_programs()

# %% [markdown]
# ## In pytest
#
# The functions above are ordinary tests: put them into a file, and run `pytest --partjit-devices=8`. The plugin that
# comes with partjit starts JAX with eight devices, and sets `NPROC`. It makes hypothesis draw the same examples in
# every run; with `PARTJIT_PROFILE=random` they are others each time. `docs/testing.md` lists the strategies and laws.
