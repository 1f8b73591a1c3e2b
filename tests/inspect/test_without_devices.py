"""Reports, plans and lowered programs on abstract meshes: they are those of a mesh of devices of the same shape."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import partjit
from partjit import MissingMeshError, ShardingError, pjit, with_sharding_constraint
from partjit.colocated import colocated_python
from partjit.inspect import explain
from partjit.testing import meshes, sharded_programs, spec_trees
from tests.census import sees
from tests.inspect.inspected import LAYER, f32, layer, layer_params

AXES = ("data", "model")
HUGE = AbstractMesh((512, 8), AXES, axis_types=(AxisType.Auto,) * 2)


def data_model():
    return partjit.Mesh(np.array(jax.devices()).reshape(4, 2), AXES)


def abstract(mesh, kind=AxisType.Auto):
    """The mesh without devices, which does not say what these were."""
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(kind,) * len(mesh.axis_names))


def step(params, x):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(lambda p: (layer(p, x) ** 2).mean())(params))


TRAIN = pjit(step, in_shardings=(LAYER, P("data")), out_shardings=LAYER, donate_argnums=0)
ARGS = (layer_params(), f32(4096, 8))


@sees("two mesh axes", "a partitioned value")
@settings(deadline=None, max_examples=10)
@given(st.data())
def test_a_report_is_that_on_devices(data):
    mesh = data.draw(meshes())
    program = data.draw(sharded_programs(mesh=mesh))
    args = program.arguments()
    fun = pjit(program, in_shardings=data.draw(spec_trees(tuple(args), mesh=mesh)))
    assert explain(fun, *args, mesh=abstract(mesh)).as_data() == explain(fun, *args, mesh=mesh).as_data()


noted = colocated_python(lambda x: x * 2, out_specs_fn=lambda x: x)
watched = colocated_python(lambda i: None, out_specs_fn=lambda i: None)


def with_calls(params, x):
    def body(params, i):
        watched(i)
        return step(params, noted(x)), None

    return jax.lax.scan(body, params, jnp.arange(3))[0]


@pytest.mark.parametrize("kind", ["a plan", "Explicit axes", "jit"])
def test_so_are_those_of(kind):
    mesh, args = data_model(), ARGS
    auto = abstract(mesh)
    if kind == "jit":
        fun, on_auto = (
            jax.jit(step, in_shardings=jax.tree.map(lambda spec, m=m: NamedSharding(m, spec), (LAYER, P("data"))))
            for m in (mesh, auto)
        )
    elif kind == "a plan":
        fun = on_auto = pjit(with_calls, in_shardings=(LAYER, P("data")), out_shardings=LAYER)
    else:
        mesh, auto = partjit.Mesh(mesh.devices, AXES, (AxisType.Explicit,) * 2), abstract(mesh, AxisType.Explicit)
        fun = on_auto = pjit(lambda x, w: jnp.sin(x) @ w, in_shardings=(P("data"), P(None, "model")))
        args = (f32(64, 64), f32(64, 64))
    found, expected = explain(on_auto, *args, mesh=auto), explain(fun, *args, mesh=mesh)
    assert found.as_data() == expected.as_data()
    assert str(found.why(found.whole.tree.outputs[0].name)) == str(expected.why(expected.whole.tree.outputs[0].name))
    if expected.plan is not None:
        assert found.plan.source == expected.plan.source
        assert found.plan.transfers == ()


def test_hosts_of_accelerators_are_moved_to():
    device = jax.sharding.AbstractDevice("TPU v5p", 2, "tpu")
    mesh = abstract(data_model()).update(abstract_device=device)
    fun = pjit(lambda x: jnp.sin(noted(x * 2)), in_shardings=P("data"))
    plan = explain(fun, f32(8, 8), mesh=mesh).plan
    assert [transfer.name for transfer in plan.transfers] == ["to_hosts", "to_devices"]


ENTERED = {
    "an argument": (TRAIN, {"mesh": HUGE}),
    "use_abstract_mesh": (TRAIN, {}),
    "NamedShardings": (
        pjit(step, in_shardings=jax.tree.map(lambda spec: NamedSharding(HUGE, spec), (LAYER, P("data")))),
        {},
    ),
    "old names of specs": (pjit(step, in_axis_resources=(LAYER, P("data")), out_axis_resources=LAYER), {"mesh": HUGE}),
}


@pytest.mark.parametrize("how", ENTERED)
def test_a_mesh_of_thousands_is_given_as(how):
    fun, options = ENTERED[how]
    small = (jax.tree.map(lambda s: np.ones(s.shape, s.dtype), ARGS[0]), jnp.ones(ARGS[1].shape))
    with jax.sharding.use_abstract_mesh(HUGE if how == "use_abstract_mesh" else AbstractMesh((), ())):
        report = explain(fun, *ARGS, **options)
        assert explain(fun, *small, **options).as_data() == report.as_data()
    assert report.mesh.size == 4096
    gathered = [c for c in report.collectives if c.axes == ("data",) and c.kind == "all-reduce"]
    assert {c.group_size for c in gathered} == {512}
    assert report.whole.tree.inputs[-1].nbytes_per_device == 4096 * 8 * 4 // 512
    for text in (str(report), report.to_html(), report.to_json()):
        assert text


def test_what_needs_devices_says_so():
    on_huge = jax.tree.map(lambda spec: NamedSharding(HUGE, spec), (LAYER, P("data")))
    fun = pjit(step, in_shardings=on_huge)
    has_none = r"the abstract mesh \(data=512, model=8\) has no devices.*enter a mesh of devices: `with partjit.Mesh"
    with pytest.raises(MissingMeshError, match=f"explain: compiled=True needs devices to compile for: {has_none}"):
        explain(fun, *ARGS, compiled=True)
    with pytest.raises(MissingMeshError, match=f"step cannot be compiled: {has_none}"):
        fun.lower(*ARGS).compile()
    small = jax.tree.map(lambda s: np.ones(s.shape, s.dtype), ARGS)
    with pytest.raises(MissingMeshError, match=f"step cannot be called: {has_none}"):
        fun(*small)
    planned = pjit(lambda x: noted(x), in_shardings=NamedSharding(HUGE, P("data")))
    with pytest.raises(MissingMeshError, match=f"<lambda> cannot be compiled: {has_none}"):
        planned.lower(f32(512, 8)).compile()
    with pytest.raises(MissingMeshError, match=f"<lambda> cannot be called: {has_none}"):
        planned(np.ones((512, 8), np.float32))


def test_it_compiles_for_devices_that_are_given_then():
    fun = pjit(jnp.sin, in_shardings=NamedSharding(abstract(data_model()), P("data")))
    compiled = fun.lower(f32(8, 8)).compile(device_assignment=jax.devices())
    assert compiled.input_shardings[0][0].shard_shape((8, 8)) == (2, 8)


def test_an_array_on_devices_is_refused_where_its_sharding_would_count():
    x = jax.device_put(np.ones((8, 8), np.float32), jax.devices()[3])
    with pytest.raises(ShardingError, match=r"x .*committed to the devices \[3\].*\n.*jax.ShapeDtypeStruct"):
        explain(lambda x: x + 1, x, mesh=HUGE)
    explain(pjit(lambda x: x + 1, in_shardings=P("model")), x, mesh=HUGE)


@pytest.mark.parametrize("how", ["a mesh", "a NamedSharding", "a constraint"])
def test_a_program_on_a_mesh_without_devices_takes_no_other_inside(how):
    mesh = data_model()
    inner = {
        "a mesh": pjit(jnp.sin, in_shardings=P("data")),
        "a NamedSharding": pjit(jnp.sin, in_shardings=NamedSharding(mesh, P("data"))),
        "a constraint": lambda x: with_sharding_constraint(x, NamedSharding(mesh, P("data"))),
    }[how]

    def outer(x):
        with mesh if how == "a mesh" else contextlib.nullcontext():
            return inner(x)

    changed = r"=512, model=8\) with no devices.*with devices \[0, 1"
    constrained = (
        r"has a NamedSharding over the incompatible devices \[0, .* but the program is on the abstract mesh, which"
    )
    with pytest.raises(ShardingError, match=constrained if how == "a constraint" else changed):
        explain(pjit(outer, in_shardings=P("data")), f32(512, 8), mesh=HUGE)


def test_callbacks_need_devices():
    def fun(x):
        return jax.lax.scan(lambda c, _: (c + jax.pure_callback(np.sin, f32(8, 8), c), None), x, length=2)[0]

    has_none = (
        r"cannot be lowered on the abstract mesh \(data=512, model=8\): it has pure_callback, which jax lowers for"
    )
    for lowered in (
        lambda: explain(fun, f32(8, 8), mesh=HUGE),
        lambda: pjit(fun, out_shardings=NamedSharding(HUGE, P())).lower(f32(8, 8)),
    ):
        with pytest.raises(MissingMeshError, match=f"fun {has_none}"):
            lowered()
