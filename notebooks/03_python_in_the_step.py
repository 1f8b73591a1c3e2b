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
# # Python inside of a training step
#
# A training step is not only arithmetic. It reads a batch, writes a line to a log, and now and then a checkpoint.
# That is Python, on the machine that the devices belong to. Usually it stands in a loop around the compiled step, and
# whoever writes the loop decides what waits for what.
#
# With `partjit.colocated` it stands in the step. This notebook begins with calls outside of programs, puts them into
# one, looks at the *plan* that comes out, records what happens, and ends with errors, order and derivatives.

# %%
import os

os.environ["NPROC"] = "32"

import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import partjit
from partjit import Mesh, P, colocated, pjit

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


# %% [markdown]
# ## A call by itself
#
# A colocated function is an ordinary Python function. It gets arrays and returns arrays, and in between it may do
# whatever Python does. This one pretends to read a file: it sleeps for 50 ms. The decorator takes the shape of the
# result, so a caller can continue before there is one.

# %%
rows = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, P("data")))


@colocated.colocated_python(out_specs_fn=lambda step: rows, stream="load")
def load(step):
    time.sleep(0.05)  # reading takes time
    return jnp.asarray(np.random.default_rng(int(step)).normal(size=rows.shape), rows.dtype)


# %% [markdown]
# The call comes back at once. Its result is an array whose value comes later: it has a shape and a sharding already,
# and whoever needs its value waits for it.


# %%
def milliseconds(fun):
    start = time.perf_counter()
    result = fun()
    return result, f"{1e3 * (time.perf_counter() - start):.0f} ms"


step = jax.device_put(np.int32(0), jax.sharding.NamedSharding(mesh, P()))
load(step).block_until_ready()  # the first call looks the function over

batch, seconds = milliseconds(lambda: load(step))
print(f"called: {seconds}, ready: {batch.is_ready()}, {batch.shape} as {batch.sharding.spec}")
_, seconds = milliseconds(lambda: jnp.sum(batch).block_until_ready())
print(f"used:   {seconds}, ready: {batch.is_ready()}")

# %% [markdown]
# ## A call in a program
#
# Here is a training step of a small network. It calls `load` for its batch, and two functions whose results are not
# needed: `log`, and `save`, which writes a checkpoint every other step.
#
# Each has a *stream*: an ordered queue of calls. Calls of one stream run one after the other, in the
# order of the program; different streams run at the same time.

# %%
folder = pathlib.Path(tempfile.mkdtemp())


@colocated.colocated_python(out_specs_fn=lambda step, loss: None, stream="log")
def log(step, loss):
    time.sleep(0.005)  # a slow disk
    with open(folder / "log.txt", "a") as file:
        file.write(f"step {int(step)}: loss {float(loss):.4f}\n")


@colocated.colocated_python(out_specs_fn=lambda step, params: None, stream="save")
def save(step, params):
    if int(step) % 2 == 0:
        time.sleep(0.02)  # a slower disk
        np.savez(folder / f"checkpoint_{int(step)}.npz", **params)


# %%
def loss_fn(params, batch):
    hidden = jnp.tanh(batch @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch) ** 2)


specs = {"up": P(None, "model"), "down": P(None, "model")}


@pjit(in_shardings=(specs, None), out_shardings=(specs, None), donate_argnums=0)
def train_step(params, step):
    batch = load(step)
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    log(step, loss)
    save(step, params)
    return params, loss


# %% [markdown]
# An executable of XLA cannot stop in the middle and run Python. So the program is cut into *fragments*, which are
# compiled, and the calls between them. The plan shows how. What is printed is the very function that runs:


# %%
def new_params():
    rng = np.random.default_rng(0)
    shapes = {"up": (32, 1024), "down": (1024, 32)}
    return {name: rng.normal(scale=0.1, size=shape).astype(np.float32) for name, shape in shapes.items()}


with mesh:
    plan = train_step.plan(new_params(), 0)
print(plan)

# %% [markdown]
# There is one fragment, as without calls. The devices wait for `load`, and for nothing else. Nothing could be done
# while it runs, so the caller runs it itself, *inline*. `log` and `save` are handed what they need and go their own
# way, on threads. The parameters are given away to the next step, and yet `save` may take its time: it gets `x2` and
# `x3`, copies that the fragment makes.
#
# The same as a picture. Boxes with square corners are fragments, and the others are calls:

# %%
plan

# %% [markdown]
# ## What really happens
#
# `partjit.record()` writes down when fragments run, calls run, and somebody waits. We let it watch six steps. The
# step before them is there to compile.


# %%
def train(train_step, count):
    with mesh:
        params, _ = train_step(new_params(), 0)
        colocated.wait()
        with partjit.record() as timeline:
            for step in range(1, count + 1):
                params, loss = train_step(params, step)
            jax.block_until_ready(loss)
            colocated.wait()
    return timeline


timeline = train(train_step, 6)
timeline

# %% [markdown]
# Time goes from left to right; a row is the caller, the devices, or a stream. The caller is busy loading a batch, and
# the devices have nothing to do meanwhile. Logging and saving happen beside all that.
#
# ## Loading ahead
#
# The batch of the next step does not depend on this one, only on its number, and the program cannot know that the
# number will be one more. An object that counts by itself needs no argument. Then the call can be made in
# advance: `run_ahead=2` keeps two batches ready.


# %%
@colocated.colocated_python_class
class Batches:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def next(self):
        time.sleep(0.05)
        return jnp.asarray(self.rng.normal(size=rows.shape), rows.dtype)


batches = Batches(0)
next_batch = batches.next.specialize(out_specs=rows, stream="load", run_ahead=2)


# %%
@pjit(in_shardings=(specs, None), out_shardings=(specs, None), donate_argnums=0)
def ahead_step(params, step):
    loss, grads = jax.value_and_grad(loss_fn)(params, next_batch())
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    log(step, loss)
    save(step, params)
    return params, loss


ahead = train(ahead_step, 6)
ahead

# %% [markdown]
# The first steps find their batches there. The later ones wait again: a step on these devices takes less time than a
# batch, so loading is what the run takes as long as, and no order of things can change that. The critical path says
# so:


# %%
def path(timeline):
    long = [span for span in timeline.critical_path() if span.seconds > 1e-3]
    return ", ".join(f"{span.name} {1e3 * span.seconds:.0f}" for span in long) + " ms"


print("without:", path(timeline))
print("ahead:  ", path(ahead))

# %% [markdown]
# It is two loaders that help then, or a quicker one. How much of the time of calls was hidden behind other work is
# one number. A run whose host time is all hidden is as quick as one without calls.

# %%
for name, recorded in {"without": timeline, "ahead": ahead}.items():
    print(f"{name:8} {recorded.host_seconds:.2f} s of host time, {recorded.hidden_fraction:.0%} hidden")
print((folder / "log.txt").read_text().splitlines()[-1])
print(sorted(file.name for file in folder.glob("*.npz")))

# %% [markdown]
# ## Errors
#
# What a function raises comes out where its result is needed. Nobody needs the result of a logger, so its error comes
# out of `colocated.wait()`, and is in the log of Python until then. The exception is the function's own, and a note
# tells which line called it.


# %%
@colocated.colocated_python(out_specs_fn=lambda loss: None, stream="log")
def check(loss):
    if float(loss) > 1:
        raise FloatingPointError(f"the loss is {float(loss):.1f}")


@pjit(in_shardings=P("data"), out_shardings=None)
def checked(x):
    loss = jnp.sum(x**2)
    check(loss)
    return loss


# %%
with mesh:
    print(checked(np.ones(8, np.float32)))  # is not affected
    try:
        colocated.wait()
    except FloatingPointError as error:
        print(f"{type(error).__name__}: {error}")
        print(error.__notes__[0].split(" made at ")[0])

# %% [markdown]
# ## Order
#
# Calls of one stream keep the order of the program, also over several executions of it. Two streams promise nothing
# to each other. In `plan.order` are the pairs that must keep their order although no value goes from one to the
# other; pictures show them as dotted lines.


# %%
@colocated.colocated_python(out_specs_fn=lambda x: None, stream="diary")
def begin(x):
    print("begin", int(x))


@colocated.colocated_python(out_specs_fn=lambda x: None, stream="diary")
def end(x):
    print("end", int(x))


@colocated.colocated_python(out_specs_fn=lambda x: None, stream="beside")
def aside(x):
    pass


# %%
@pjit
def program(x):
    begin(x)
    aside(x)
    end(x)
    return x + 1


with mesh:
    x = jnp.int32(0)
    for _ in range(3):
        x = program(x)
    colocated.wait()
    print(program.plan(x).order)

# %% [markdown]
# ## Derivatives
#
# JAX cannot look into a Python function, so it cannot differentiate a call. Its author can say what the derivative
# is: `defvjp` takes the two functions that `jax.custom_vjp` takes. Both may make calls. `np.convolve` with a
# symmetric kernel is linear and its own transpose, so the rule is short.


# %%
@colocated.colocated_python(out_specs_fn=lambda x: x)
def smooth(x):
    return jnp.asarray(np.convolve(x, [0.25, 0.5, 0.25], mode="same"))


@pjit(in_shardings=P("data"), out_shardings=None)
def roughness(x):
    return jnp.sum((x - smooth(x)) ** 2)


x = np.linspace(-1, 1, 8, dtype=np.float32) ** 2
try:
    with mesh:
        jax.grad(roughness)(x)
except Exception as error:
    print(str(error).split(":")[0])

# %% [markdown]
# With the rule there is a gradient, and the call in the backward half is a call like any other: the plan of the
# gradient has two. (The trace that was made above is kept, and it knows of no rule: `clear_cache` lets go of it.)

# %%
smooth.defvjp(lambda x: (smooth(x), None), lambda _, ct: (smooth(ct),))
roughness.clear_cache()

with mesh:
    print(np.round(jax.grad(roughness)(x), 3))
    print(pjit(jax.grad(roughness)).plan(x))
