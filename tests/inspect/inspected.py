"""Programs for the tests of origins and look-up, and their values when they are run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

import partjit
from partjit import P, pjit, with_sharding_constraint
from partjit.inspect.marks import mark_p
from partjit.inspect.propagation import partition
from partjit.inspect.tracing import trace_function


def mesh():
    """Eight devices as 4 x 2."""
    return partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def partitioned(fun, *args, of=None):
    """A function of `pjit` after the partitioner's propagation."""
    return partition(trace_function(fun, args, {}, of or mesh()).whole, keep_text=True)


def axes_of(value):
    """The axes that divide a value, once for each dimension."""
    return [] if value.sharding is None else [axis for dim in value.sharding.axes for axis in dim]


def f32(*shape):
    """The type of an array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def evaluated(program, values, *args):
    """What some values of a program outside of its loops are, as results of one program."""
    marked = {
        number: var
        for eqn in program.inlined.jaxpr.eqns
        if eqn.primitive is mark_p
        for number, var in zip(eqn.params["numbers"], eqn.invars, strict=True)
    }
    plain = without_marks(program.inlined.jaxpr)
    computing = plain.replace(jaxpr=plain.jaxpr.replace(outvars=[marked[value.number] for value in values]))
    with mesh():
        return jax.jit(jaxpr_as_fun(computing))(*jax.tree.leaves(args))


def without_marks(jaxpr):
    """A jaxpr without marks, for which there is nothing to run."""
    if not hasattr(jaxpr, "eqns") or (hasattr(jaxpr, "jaxpr") and jaxpr.jaxpr is not jaxpr):
        return jaxpr.replace(jaxpr=without_marks(jaxpr.jaxpr))
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is not mark_p:
            params = {name: stripped(param) for name, param in eqn.params.items()}
            eqns.append(eqn.replace(params=params))
    return jaxpr.replace(eqns=eqns)


def stripped(param):
    """A parameter of an equation without the marks in it."""
    if isinstance(param, tuple):
        return tuple(stripped(each) for each in param)
    return without_marks(param) if hasattr(param, "eqns") else param


def layer(params, x):
    """A layer of a perceptron with a residual connection."""
    hidden = with_sharding_constraint(jax.nn.gelu(x @ params["w1"] + params["b"][None]), P("data", "model"))
    return x + hidden @ params["w2"]


LAYER = {"b": P("model"), "w1": P(None, "model"), "w2": P("model")}


def layer_params(*stack):
    """Parameters of a layer, or of several."""
    key = np.random.default_rng(0)
    draw = functools.partial(key.normal, scale=0.1)
    return {
        name: draw(size=(*stack, *s)).astype(np.float32) for name, s in [("b", (16,)), ("w1", (8, 16)), ("w2", (16, 8))]
    }


def unrolled_loss(params, x):
    """The loss of a model whose layers are in a list, and whose embedding is used twice."""
    x = x @ params["table"]
    for each in params["layers"]:
        x = layer(each, x)
    return jnp.mean((x @ params["table"].T) ** 2)


def scanned_loss(params, x):
    """The same with its layers stacked."""
    x = x @ params["table"]
    x, _ = jax.lax.scan(lambda x, each: (jax.checkpoint(layer)(each, x), None), x, params["layers"])
    return jnp.mean((x @ params["table"].T) ** 2)


def unrolled_params(n=3):
    """Parameters, and their specs."""
    table = np.random.default_rng(1).normal(size=(12, 8)).astype(np.float32)
    specs = {"layers": [LAYER] * n, "table": P()}
    return {"layers": [layer_params() for _ in range(n)], "table": table}, specs


def scanned_params(n=3):
    """Parameters, and their specs."""
    params, _ = unrolled_params()
    return {**params, "layers": layer_params(n)}, {"layers": {k: P(None, *s) for k, s in LAYER.items()}, "table": P()}


BATCH = np.random.default_rng(2).normal(size=(8, 12)).astype(np.float32)


def sgd(loss, specs):
    """A step of gradient descent."""

    @functools.partial(pjit, in_axis_resources=(specs, P("data")), out_axis_resources=(specs, None))
    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step
