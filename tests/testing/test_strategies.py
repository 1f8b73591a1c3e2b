"""The strategies of the kit: what they draw fits together, everything is drawn sometime, and failures shrink."""

import math
import random
import subprocess
import sys

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding

import partjit
from partjit import P, UnrepresentableShardingError, parse_op_sharding, pjit
from partjit.testing import (
    ShardedProgram,
    assert_laid_out,
    axes_of,
    meshes,
    op_shardings,
    partition_specs,
    pieces,
    shapes,
    sharded_arrays,
    sharded_programs,
    shardings,
    spec_trees,
)
from tests.census import sees
from tests.effort import examples


def smallest(strategy, condition=lambda _: True, seed=0, phases=(*hypothesis.Phase,)):
    """What a failure of `condition` shrinks to."""
    # All phases, whatever profile a test of the plugin has loaded in this process.
    settings = hypothesis.settings(max_examples=500, database=None, phases=phases)
    return hypothesis.find(strategy, condition, settings=settings, random=random.Random(seed))


def some(strategy, condition):
    """Any example that has a property."""
    return smallest(strategy, condition, phases=[hypothesis.Phase.generate])


@sees("two mesh axes", "a partitioned value", "several elements")
@given(st.data())
def test_specs_fit_the_shapes_they_are_drawn_for(data):
    mesh = data.draw(meshes())
    shape = data.draw(shapes())
    spec = data.draw(partition_specs(mesh=mesh, shape=shape))
    NamedSharding(mesh, P() if spec is None else spec).shard_shape(shape)  # raises if it does not fit
    assert len(spec or ()) <= len(shape)


@sees("two mesh axes", "a partitioned value", "several elements")
@given(st.data())
def test_shapes_fit_the_specs_they_are_drawn_for_or_on_request_do_not(data):
    mesh = data.draw(meshes())
    spec = data.draw(partition_specs(mesh=mesh, ndim=2).filter(lambda spec: spec is not None))
    divisors = [math.prod(mesh.shape[axis] for axis in axes) for axes in axes_of(spec, len(spec))]
    most = data.draw(st.sampled_from([1, 8, 256]))
    shape = data.draw(shapes(spec=spec, mesh=mesh, max_size=most))
    assert math.prod(shape) <= max(most, math.prod(divisors))
    assert all(size % divisor == 0 for size, divisor in zip(shape, divisors, strict=False))
    if any(axes_of(spec, len(spec))):  # rejected where all of them have one device
        shape = data.draw(shapes(spec=spec, mesh=mesh, divisible=False))
        assert any(size % divisor for size, divisor in zip(shape, divisors, strict=False))


@sees("two mesh axes", "a partitioned value")
@given(st.data())
def test_avoided_axes_do_not_appear_and_unconstrained_dimensions_only_on_request(data):
    mesh = data.draw(meshes())
    avoid = mesh.axis_names[0]
    spec = data.draw(partition_specs(mesh=mesh, ndim=3, avoid=[avoid]))
    assert avoid not in [axis for axes in axes_of(spec, 3) for axis in axes]
    assert P.UNCONSTRAINED not in tuple(spec or ())


@sees("two mesh axes", "a partitioned value", "two axes in one dimension")
@examples(30)
@given(st.data())
def test_on_request_every_spec_and_program_partitions(data):
    mesh = data.draw(meshes().filter(lambda mesh: mesh.size > 1))
    spec = data.draw(partition_specs(mesh=mesh, ndim=2, partitioned=True))
    assert partitions(mesh, spec)
    program = data.draw(sharded_programs(mesh=mesh, partitioned=True, max_steps=2, depth=1))
    assert sum(size > 1 for size in program.shapes[0]) > 1
    for shape in (program.shapes[0], program.result_shapes[0]):
        assert partitions(mesh, data.draw(partition_specs(mesh=mesh, shape=shape, partitioned=True)))
    kind, operands, ((first, *_),) = program.steps[0]
    assert (kind, operands) == ("body", (0,))
    assert partitions(mesh, first[1])


def partitions(mesh, spec):
    return any(mesh.shape[axis] > 1 for axes in axes_of(spec, 3) for axis in axes)


@sees("two mesh axes", "a partitioned value", "a value of several dimensions", "permuted devices")
@examples(40)
@given(sharded_arrays())
def test_arrays_lie_as_they_say(array):
    assert_laid_out(array, array.sharding.mesh, array.sharding.spec)


@pytest.mark.parametrize("dtype", ["bool", "int4", "uint4", "int8", "int32", "float8_e5m2", "bfloat16", "complex64"])
@pytest.mark.parametrize("shape", [(34,), (8, 12), (2, 17), (2, 2, 2), (3, 8, 7), (4096,), (), (0, 4)], ids=str)
def test_no_two_neighbours_are_equal(shape, dtype):
    mesh = partjit.Mesh(jax.devices()[:2], "x")
    array = some(sharded_arrays(mesh=mesh, shape=shape, spec=P(), dtype=jnp.dtype(dtype)), lambda _: True)
    values = np.asarray(array.astype("complex64"))
    assert all((np.diff(values, axis=dim) != 0).all() for dim in range(len(shape)))


@sees("two mesh axes", "a partitioned value", "two axes in one dimension")
@given(shardings(shape=(8, 12)))
def test_shardings_fit_their_shape(sharding):
    sharding.shard_shape((8, 12))


@sees("two mesh axes", "several mesh devices")
@examples(30)
@given(st.data())
def test_op_shardings_are_representable_on_request(data):
    mesh = data.draw(meshes())
    parse_op_sharding(data.draw(op_shardings(mesh=mesh, representable=True)), mesh)
    with pytest.raises(UnrepresentableShardingError):
        parse_op_sharding(data.draw(op_shardings(mesh=mesh, representable=False)), mesh)


TREE = {"w": np.ones((4, 8)), "layers": [(np.ones(8), np.ones((2, 4, 8)))], "empty": {}, "scalar": np.float32(1)}


@pytest.mark.parametrize("prefix", [True, False])
def test_spec_trees_fit_the_tree(prefix):
    mesh = partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))

    @sees("an axis name", "several elements")
    @hypothesis.settings(max_examples=20)
    @given(spec_trees(TREE, mesh=mesh, prefix=prefix))
    def holds(specs):
        with mesh:
            pjit(lambda tree: tree, in_axis_resources=(specs,)).trace(TREE)
        if not prefix:
            is_leaf = lambda leaf: leaf is None or isinstance(leaf, P)  # noqa: E731
            assert len(jax.tree.leaves(specs, is_leaf=is_leaf)) == len(jax.tree.leaves(TREE))

    holds()


def test_everything_is_drawn_sometime():
    mesh = partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    specs = partition_specs(mesh=mesh, ndim=2, unconstrained=True)
    assert some(specs, lambda spec: spec is None) is None
    for condition in (
        lambda spec: spec is not None and P.UNCONSTRAINED in tuple(spec),
        lambda spec: spec is not None and ("y", "x") in tuple(spec),
        lambda spec: spec is not None and len(spec) == 1,
        lambda spec: spec is not None and len(spec) == 2 and spec[1] is None,
    ):
        some(specs, condition)
    some(meshes(), lambda mesh: 1 in mesh.devices.shape and mesh.devices.ndim == 3)
    some(meshes(), lambda mesh: [d.id for d in mesh.devices.flat] != sorted(d.id for d in mesh.devices.flat))
    some(meshes(explicit=True), lambda mesh: set(mesh.axis_types) == {AxisType.Explicit, AxisType.Auto})


@pytest.mark.system
def test_failures_shrink_to_what_a_reader_takes_in_at_once():
    assert smallest(meshes()).devices.shape == (2,)
    grid = smallest(meshes(), lambda mesh: mesh.devices.ndim == 2)
    assert [device.id for device in grid.devices.flat] == [*range(8)]
    assert grid.devices.shape == (4, 2)
    mesh = partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    assert smallest(partition_specs(mesh=mesh, ndim=3), lambda spec: spec is not None) == P()
    for seed in range(20):  # which failure is met first does not matter
        assert smallest(partition_specs(mesh=mesh, ndim=3), lambda spec: "y" in str(spec), seed) == P("y")
    assert smallest(shapes(min_ndim=2)) == (1, 1)
    programs = [smallest(sharded_programs(mesh=mesh), lambda program: "scan" in repr(program), k) for k in range(3)]
    assert min(len(program.steps) for program in programs) == 1
    assert all(math.prod(shape) == 1 for program in programs for shape in program.shapes)


@sees("two mesh axes", "a value of several dimensions")
@examples(5)
@given(st.data())
def test_programs_run_and_mean_what_the_plain_ones_do(data):
    mesh = data.draw(meshes())
    program = data.draw(sharded_programs(mesh=mesh, max_steps=2, depth=1))
    with mesh:
        results = pjit(program)(*program.arguments())
    assert [result.shape for result in results] == program.result_shapes
    for result, expected in zip(results, program.plain(*program.arguments()), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)


def test_a_program_prints_as_code_that_makes_it():
    mesh = partjit.Mesh(jax.devices(), "x")
    program = some(sharded_programs(mesh=mesh), lambda program: "constraint" in repr(program))
    assert eval(repr(program), {"ShardedProgram": ShardedProgram, "PartitionSpec": P, "P": P}) == program


def test_pieces_follow_the_definition():
    mesh = partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    for spec in (P("x"), P(("y", "x")), P("y", "x"), None):
        expected = NamedSharding(mesh, P() if spec is None else spec).devices_indices_map((8, 8))
        for device, index in pieces(mesh, spec, (8, 8)).items():
            assert [part.indices(8) for part in index] == [part.indices(8) for part in expected[device]]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: partition_specs(mesh=partjit.Mesh(jax.devices(), "x")), TypeError, "needs ndim or shape"),
        (lambda: shapes(spec=P("x")), TypeError, "needs its mesh"),
        (
            lambda: partition_specs(mesh=partjit.Mesh(jax.devices(), "x"), shape=(3, 4), partitioned=True),
            ValueError,
            r"none of the axes \(x=8\) can partition a value of shape \(3, 4\)",
        ),
        (lambda: meshes(mesh_shapes=[(99,)]), ValueError, "there are 8 devices, and every one of"),
        (lambda: sharded_arrays(shape=(2**70,)), ValueError, r"sharded_arrays: shape .* must have at most 2147483647"),
        (
            lambda: shapes(spec=P(), mesh=partjit.Mesh(jax.devices(), "x"), divisible=False),
            ValueError,
            "every shape is divisible",
        ),
    ],
)
def test_what_cannot_be_drawn_says_so(make, error, message):
    with pytest.raises(error, match=message):
        smallest(make())


@pytest.mark.system
def test_the_kit_asks_for_hypothesis_and_the_package_does_not_need_it():
    code = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "hypothesis" else find(name, *rest)
import partjit, sys
assert "hypothesis" not in sys.modules
try:
    import partjit.testing
except ImportError as error:
    assert "pip install 'partjit[testing]'" in str(error)
else:
    raise AssertionError
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_meshes_of_a_single_device_are_warned_of(monkeypatch):
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.warns(UserWarning, match="there is a single device, so nothing is sharded.*--partjit-devices=8"):
        assert find(meshes(), lambda mesh: True).size == 1
    assert find(meshes(mesh_shapes=[(1,), (1, 1)]), lambda mesh: True).size == 1


def test_shapes_are_drawn_for_specs_with_unconstrained_dimensions():
    mesh = partjit.Mesh(jax.devices()[:4], "x")

    @sees("different examples", "several elements")
    @settings(max_examples=10)
    @given(shapes(spec=P(P.UNCONSTRAINED, "x"), mesh=mesh))
    def test(shape):
        assert len(shape) >= 2
        assert shape[1] % 4 == 0

    test()
