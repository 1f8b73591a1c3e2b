"""Programs that mix the ways in which a mesh has been set over the years, and what sees it where."""

import contextlib
import functools
import importlib.util
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.mesh import thread_resources
from jax.sharding import NamedSharding

import partjit
from partjit import P, pjit, with_sharding_constraint
from partjit.mesh import ambient_mesh

SCRIPT = pathlib.Path(__file__).parents[1] / "docs" / "meshes.py"


def load():
    spec = importlib.util.spec_from_file_location("meshes", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_in_the_documents_are_what_is_seen():
    script = load()
    written = script.DOCUMENT.read_text(encoding="utf-8").partition(script.BEGIN)[2].partition(script.END)[0]
    assert script.tables().splitlines() == written.splitlines()


@contextlib.contextmanager
def old(mesh):
    """jax's own `with mesh:`, which warns that it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with jax.sharding.Mesh(mesh.devices, mesh.axis_names):
            yield


WAYS = {
    "with partjit.Mesh": lambda mesh: mesh,
    "with jax.sharding.Mesh": old,
    "partjit.set_mesh": partjit.set_mesh,
    "jax.set_mesh": lambda mesh: jax.set_mesh(jax.sharding.Mesh(mesh.devices, mesh.axis_names)),
    "use_mesh": lambda mesh: getattr(jax.sharding, "use_mesh", jax.set_mesh)(
        jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    ),
}


class Partitioner:
    """As T5X partitions: each call enters the mesh, and functions find it in what jax keeps of `with mesh:`."""

    def __init__(self, mesh):
        self.mesh = mesh

    def partition(self, fun, in_axis_resources, out_axis_resources, **options):
        pjitted = pjit(fun, in_axis_resources=in_axis_resources, out_axis_resources=out_axis_resources, **options)

        @functools.wraps(fun)
        def call(*args):
            with self.mesh:
                return pjitted(*args)

        call.lower = pjitted.lower
        return call


def constrained(x, spec):
    """As T5X and Flax guard their constraints."""
    return x if thread_resources.env.physical_mesh.empty else jax.lax.with_sharding_constraint(x, spec)


SPECS = {"up": P(None, "y"), "down": P("y", None)}


def entered(mesh):
    return contextlib.nullcontext() if mesh is None else mesh


def loss(params, x, mesh=None):
    with entered(mesh):
        hidden = constrained(jax.nn.relu(x @ params["up"]), P("x", "y"))
        return jnp.mean(constrained(hidden @ params["down"], P("x")) ** 2)


def train_step(params, batch, mesh=None):
    """A step over microbatches, which enters the mesh again inside of the traced function."""

    def microbatch(carry, x):
        with entered(mesh):
            value, grads = jax.value_and_grad(loss)(params, x, mesh)
        return jax.tree.map(jnp.add, carry, (value, grads)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    (value, grads), _ = jax.lax.scan(microbatch, zeros, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments():
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(8, 16)), "down": rng.normal(size=(16, 8))}
    params = jax.tree.map(lambda p: p.astype(np.float32) / 8, params)
    return params, rng.normal(size=(2, 16, 8)).astype(np.float32)


def assert_same(ours, theirs):
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", [None, *WAYS])
def test_a_program_in_the_manner_of_t5x(mesh, way):
    params, batch = arguments()
    expected = jax.jit(train_step)(params, batch)
    step = Partitioner(mesh).partition(
        lambda params, batch: train_step(params, batch, mesh), (SPECS, P(None, "x")), (SPECS, None)
    )
    with contextlib.nullcontext() if way is None else WAYS[way](mesh):
        new, value = step(params, batch)
        new, value = step(new, batch)
        with mesh:
            text = step.lower(params, batch).as_text()
    assert_same((new, value), jax.jit(train_step)(expected[0], batch))
    assert {name: leaf.sharding.spec for name, leaf in new.items()} == SPECS
    assert text.count("sdy.sharding_constraint") >= 2
    assert ambient_mesh().empty


@pytest.mark.parametrize("way", WAYS)
def test_programs_nested_in_each_other(mesh, way):
    params, batch = arguments()

    @functools.partial(pjit, in_axis_resources=(SPECS, P("x")), out_axis_resources=None)
    def inner(params, x):
        return jax.jit(lambda params, x: loss(params, x, mesh))(params, x)

    outer = jax.jit(lambda params, x: inner(params, x) * 2)
    outermost = pjit(lambda params, x: outer(params, x) + 1, in_axis_resources=(SPECS, P("x")))
    expected = loss(params, batch[0])
    with WAYS[way](mesh):
        np.testing.assert_allclose(outer(params, batch[0]), 2 * expected, rtol=1e-4)
        np.testing.assert_allclose(outermost(params, batch[0]), 2 * expected + 1, rtol=1e-4)
        grads = jax.jit(jax.grad(lambda params: outermost(params, batch[0])))(params)
    assert_same(grads, jax.tree.map(lambda g: 2 * g, jax.grad(loss)(params, batch[0])))


@pytest.mark.parametrize("way", WAYS)
def test_a_shard_map_over_some_axes(mesh, way):
    x = np.arange(64, dtype=np.float32).reshape(8, 8)

    def of_shard(a):
        a = with_sharding_constraint(a * 2, P(None, "y"))
        a = pjit(lambda a: a + 1, in_axis_resources=P(None, "y"), out_axis_resources=P(None, "y"))(a)
        return a - jax.lax.pmean(a, "x")

    def fun(x):
        return jax.shard_map(of_shard, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})(x)

    doubled = x * 2 + 1
    expected = doubled - np.tile(doubled.reshape(4, 2, 8).mean(0), (4, 1))
    with WAYS[way](mesh):
        for program in (pjit(fun, in_axis_resources=P("x", "y")), pjit(jax.jit(fun)), jax.jit(pjit(fun))):
            np.testing.assert_allclose(program(x), expected)


def test_a_mesh_entered_inside_of_a_program_without_one(mesh):
    x = np.ones((8, 8), np.float32)
    sharding = NamedSharding(mesh, P("x"))

    def fun(x):
        with mesh:
            return pjit(lambda x: x + 1, in_axis_resources=P("x"), out_axis_resources=P("x"))(x)

    for program in (pjit(fun), jax.jit(fun)):
        assert program(x).sharding.is_equivalent_to(sharding, 2)


def test_another_mesh_entered_inside_of_a_program(mesh):
    other = partjit.Mesh(mesh.devices.T, ("a", "b"))

    def fun(x):
        with other:
            return pjit(lambda x: x + 1, in_axis_resources=P("a"))(x)

    with mesh, pytest.raises(partjit.MeshChangedError, match="Changing the physical mesh is not allowed inside a pjit"):
        pjit(fun)(np.ones((8, 8), np.float32))
    assert ambient_mesh().empty
