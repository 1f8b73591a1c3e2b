"""Abstract arguments: each kind means what it says at every stage, with and without a mesh."""

import contextlib

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, SingleDeviceSharding

import partjit
from partjit import FROM_ARRAY, MissingMeshError, P, ShardingError, pjit
from partjit.colocated import colocated_python
from partjit.inspect import explain

SHAPE, DTYPE = (8, 4), np.dtype(np.float32)
ABSTRACT = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
OTHER = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def explicit_twin(mesh):
    return partjit.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)


def struct(sharding=None):
    return jax.ShapeDtypeStruct(SHAPE, DTYPE, sharding=sharding)


def array(sharding):
    return jax.device_put(np.zeros(SHAPE, DTYPE), sharding)


# Says nothing: the program is that of a struct without a sharding.
SILENT = {
    "abstract value": lambda mesh: jax.core.ShapedArray(SHAPE, DTYPE),
    "type of a NumPy array": lambda mesh: jax.typeof(np.zeros(SHAPE, DTYPE)),
    "type of an uncommitted array": lambda mesh: jax.typeof(jnp.zeros(SHAPE, DTYPE)),
    "type over Auto axes": lambda mesh: jax.typeof(array(NamedSharding(mesh, P("x")))),
    "result of eval_shape": lambda mesh: jax.eval_shape(lambda: jnp.zeros(SHAPE, DTYPE)),
    "uncommitted array": lambda mesh: jnp.zeros(SHAPE, DTYPE),
    "NumPy array": lambda mesh: np.zeros(SHAPE, DTYPE),
}

# Says P("x"): the program is that of an array with that sharding. Without a mesh the abstract ones mean nothing.
ABSTRACT_SAYING = {
    "struct on an abstract mesh": lambda mesh: struct(NamedSharding(ABSTRACT, P("x"))),
    "struct on an Explicit abstract mesh": lambda mesh: struct(NamedSharding(EXPLICIT, P("x"))),
    "type over Explicit axes": lambda mesh: jax.typeof(array(NamedSharding(explicit_twin(mesh), P("x")))),
    "abstract value with a sharding": lambda mesh: jax.core.ShapedArray(
        SHAPE, DTYPE, sharding=NamedSharding(EXPLICIT, P("x", None))
    ),
}
SAYING = ABSTRACT_SAYING | {
    "struct on the mesh": lambda mesh: struct(NamedSharding(mesh, P("x"))),
    "struct with a PartitionSpec": lambda mesh: struct(P("x")),
    "committed array": lambda mesh: array(NamedSharding(mesh, P("x"))),
}


def add(x, y):
    return x + y


def text(function, *args):
    return function.lower(*args).as_text()


def is_entered(how, mesh):
    return {"no mesh": contextlib.nullcontext, "with": lambda: mesh, "set": lambda: partjit.set_mesh(mesh)}[how]()


@pytest.mark.parametrize("how", ["no mesh", "with", "set"])
@pytest.mark.parametrize("kind", SILENT)
def test_what_says_nothing_is_left_to_the_partitioner(mesh, how, kind):
    given = SILENT[kind](mesh)
    with is_entered(how, mesh):
        for specs in ({}, {"in_axis_resources": None}):
            function = pjit(add, **specs)
            assert text(function, given, struct()) == text(function, struct(), struct())
            assert function.eval_shape(given, given) == function.eval_shape(struct(), struct())


@pytest.mark.parametrize("how", ["with", "set"])
@pytest.mark.parametrize("kind", SAYING)
def test_what_says_a_sharding_means_it(mesh, how, kind):
    given, meant = SAYING[kind](mesh), struct(NamedSharding(mesh, P("x")))
    with is_entered(how, mesh):
        for specs in ({}, {"in_axis_resources": FROM_ARRAY}):
            function = pjit(add, **specs)
            others = [meant] if specs else [meant, struct(), jax.core.ShapedArray(SHAPE, DTYPE)]
            for other in others:  # mixtures
                assert text(function, given, other) == text(function, meant, other)
                assert text(function, other, given) == text(function, other, meant)
        stated = pjit(add, in_axis_resources=P("y"))
        assert text(stated, given, given) == text(stated, struct(), struct())


def test_an_abstract_argument_compiles_to_the_sharding_it_says(mesh):
    with mesh:
        compiled = (
            pjit(add).lower(struct(NamedSharding(ABSTRACT, P("x"))), jax.core.ShapedArray(SHAPE, DTYPE)).compile()
        )
    x = array(NamedSharding(mesh, P("x")))
    assert compiled.input_shardings[0][0].is_equivalent_to(x.sharding, 2)
    np.testing.assert_array_equal(compiled(x, jax.device_put(x, compiled.input_shardings[0][1])), np.zeros(SHAPE))


@pytest.mark.parametrize("kind", [*SILENT, *SAYING])
def test_plans_and_reports_take_them(mesh, kind):
    given = SAYING.get(kind, SILENT.get(kind))(mesh)
    call = colocated_python(lambda x: x, out_specs_fn=lambda x: x)
    meant = struct(NamedSharding(mesh, P("x"))) if kind in SAYING else struct()
    with mesh:
        program = pjit(lambda x: call(x * 2))
        assert program.plan(given).source == program.plan(meant).source
        reported, expected = (explain(lambda x: x * 2, argument) for argument in (given, meant))
    assert reported.to_text() == expected.to_text()


STAGES = {
    "trace": lambda function, *args: function.trace(*args),
    "lower": lambda function, *args: function.lower(*args),
    "eval_shape": lambda function, *args: function.eval_shape(*args),
    "plan": lambda function, *args: function.plan(*args),
    "explain": explain,
}


@pytest.mark.parametrize("kind", ABSTRACT_SAYING)
def test_without_a_mesh_that_of_the_arguments_is_one_without_devices(mesh, kind):
    given = ABSTRACT_SAYING[kind](mesh)
    own = mesh if kind == "struct on an abstract mesh" else explicit_twin(mesh)
    for specs in ({}, {"in_axis_resources": None}, {"in_axis_resources": FROM_ARRAY}):
        function = pjit(add, **specs)
        found = text(function, given, given), function.plan(given, given).source, explain(function, given, given)
        assert function.trace(given, given).program.mesh.shape == mesh.shape
        with own:
            meant = struct(NamedSharding(own, P("x")))
            assert found[:2] == (text(function, meant, meant), function.plan(meant, meant).source)
            assert found[2].as_data() == explain(function, meant, meant).as_data()
    with pytest.raises(MissingMeshError, match=r"^add cannot be compiled: the abstract mesh \(x=4, y=2\) has no dev"):
        pjit(add).lower(given, given).compile()


def test_of_two_abstract_meshes_neither_is_taken(mesh):
    one, other = struct(NamedSharding(ABSTRACT, P("x"))), struct(NamedSharding(OTHER, P("x")))
    with pytest.raises(
        ShardingError, match=r"but x has a .* on the abstract mesh \(x=4, y=2\) and y one on \(x=2, y=4"
    ):
        pjit(add).lower(one, other)
    specs = (NamedSharding(ABSTRACT, P("x")), NamedSharding(OTHER, P("x")))
    with pytest.raises(ShardingError, match=r"but a spec has a sharding on the abstract mesh .* and a spec one on"):
        pjit(add, in_shardings=specs).lower(struct(), struct())
    # Specs decide before arguments do, and a mesh that is entered before both.
    assert pjit(add, in_shardings=specs[1]).trace(one, one).program.mesh is OTHER
    with mesh:
        assert pjit(add, in_shardings=specs).trace(one, other).program.mesh == mesh


@pytest.mark.parametrize("stage", STAGES)
def test_an_abstract_mesh_of_another_shape_is_refused(mesh, stage):
    for specs in ({}, {"in_axis_resources": FROM_ARRAY}):
        with (
            mesh,
            pytest.raises(ShardingError, match=r"mesh \(x=2, y=4\), and the mesh of the program is \(x=4, y=2\)"),
        ):
            STAGES[stage](pjit(add, **specs), struct(NamedSharding(OTHER, P("x"))), struct(NamedSharding(mesh, P("x"))))
    with mesh:  # with a spec of its own it is moved
        STAGES[stage](pjit(add, in_axis_resources=P("y")), *[struct(NamedSharding(OTHER, P("x")))] * 2)


def test_a_bare_spec_needs_a_mesh(mesh):
    given = struct(P("x"))
    with pytest.raises(ShardingError, match="sharding of y is a bare PartitionSpec, and no mesh is set"):
        pjit(add).lower(struct(), given)


def test_keys_may_be_abstract(mesh):
    dtype = jax.random.key(0).dtype
    for given in (jax.core.ShapedArray((8,), dtype), jax.ShapeDtypeStruct((8,), dtype)):
        assert pjit(lambda keys: keys).eval_shape(given).dtype == dtype
        with mesh:
            assert pjit(lambda keys: keys).lower(given).out_info.dtype == dtype


def test_a_struct_on_one_device_runs_there():
    device = jax.devices()[3]
    compiled = pjit(add).lower(*[struct(SingleDeviceSharding(device))] * 2).compile()
    assert {sharding.device_set.pop() for sharding in compiled.input_shardings[0]} == {device}


# Abstract meshes, on which programs are lowered for devices that are not there


@pytest.mark.parametrize("abstract", [ABSTRACT, EXPLICIT], ids=["Auto", "Explicit"])
def test_under_an_abstract_mesh_programs_are_traced_and_lowered_as_on_devices(mesh, abstract):
    @pjit(in_axis_resources=(P("x"), None), out_axis_resources=P("y"))
    def function(x, y):
        inner = pjit(jnp.sin, in_axis_resources=P("x"), out_axis_resources=P("x"))
        return inner(x) + partjit.with_sharding_constraint(y, P("x"))

    def lowered():
        return function.trace(struct(), struct()).lower(lowering_platforms=("tpu",)).as_text()

    with jax.sharding.use_abstract_mesh(abstract):
        text = lowered()
        with pytest.raises(ShardingError, match="divisible by 4"):
            function.trace(jax.ShapeDtypeStruct((6, 4), DTYPE), struct())
        with pytest.raises(MissingMeshError, match=r"cannot be called: the abstract mesh \(x=4, y=2\) has"):
            function(np.ones(SHAPE, DTYPE), np.ones(SHAPE, DTYPE))
        # Arrays over such axes say on which devices a call runs.
        x = array(NamedSharding(explicit_twin(mesh) if abstract is EXPLICIT else mesh, P("x")))
        y = np.ones(SHAPE, DTYPE)
        np.testing.assert_allclose(function(x, y), np.sin(x) + y, rtol=1e-6)
    with explicit_twin(mesh) if abstract is EXPLICIT else mesh:
        assert text == lowered()
