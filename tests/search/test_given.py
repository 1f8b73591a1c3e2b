"""What searches and questions make of specs over other meshes, axes of one device, and machines of other meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from partjit import AUTO, FROM_ARRAY, UNSPECIFIED, Mesh, P, SearchOptions, pjit, search_specs
from partjit.errors import ShardingError, UnrepresentableShardingError
from partjit.inspect.what_if import Question, WhatIf
from partjit.search import h100
from tests.search.models import MACHINE

OPTIONS = {"machine": MACHINE, "questions": 6, "isolated": False}


def devices():
    return np.array(jax.devices()[:8])


def grid():
    return Mesh(devices().reshape(4, 2), ("data", "model"))


def on_line(spec):
    return NamedSharding(Mesh(devices(), "x"), spec)


def on_other_grid(spec):
    return NamedSharding(Mesh(devices().reshape(2, 4), ("data", "model")), spec)


def step(params, x):
    grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p["w"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - g, params, grads)


def arrays():
    return {"w": jnp.ones((16, 32)) / 8}, jnp.linspace(-1, 1, 32 * 16).reshape(32, 16)


def test_a_named_sharding_over_another_mesh_of_the_devices_means_what_it_means_there():
    params, x = arrays()
    everywhere = P(("data", "model"))
    found = search_specs(step, params, x, mesh=grid(), **OPTIONS, in_specs=(AUTO, on_line(P("x"))))
    assert found.in_specs[1] == everywhere
    engine = WhatIf(step, params, x, mesh=grid(), isolated=False)
    one, other = (engine.ask(Question({"x": spec})) for spec in (on_line(P("x")), everywhere))
    assert (one.arguments, one.bytes_by_axes, one.peak_memory) == (
        other.arguments,
        other.bytes_by_axes,
        other.peak_memory,
    )
    own = search_specs(pjit(step, in_shardings=(P(), on_line(P("x")))), params, x, mesh=grid(), **OPTIONS)
    assert "its own specs" in [start.name for start in own.starts]
    assert [change.before for change in own.diff() if change.path == "x"] in ([], [everywhere])


def test_specs_in_another_structure_than_the_arguments_or_the_result():
    params, x = arrays()
    found = search_specs(step, params, x, mesh=grid(), **OPTIONS)
    with pytest.raises(ShardingError) as raised:
        search_specs(step, params, x, mesh=grid(), **OPTIONS, in_specs=({"W": AUTO}, AUTO))
    assert str(raised.value) == (
        "search_specs in_specs specification must be a tree prefix of the corresponding value, the arguments, but is "
        "not:\n\nin_specs[0] has the key 'W', which params lacks\n    did you mean 'w'?"
    )
    with pytest.raises(ValueError, match=r"diff in_specs spec.*\s+in_specs is a tuple of 1, but .* are \(params, x\)"):
        found.diff((AUTO,))
    with pytest.raises(ValueError, match=r"diff out_specs specification .*the result.*\s+out_specs lacks the key 'w'"):
        found.diff(out_specs={})


def test_a_named_sharding_over_parts_of_axes_is_refused():
    params, x = arrays()
    with pytest.raises(
        UnrepresentableShardingError, match=r"x, one of in_specs, has a NamedSharding over another mesh"
    ):
        search_specs(step, params, x, mesh=grid(), **OPTIONS, in_specs=(AUTO, on_other_grid(P("model"))))
    with pytest.raises(UnrepresentableShardingError, match=r"x has a NamedSharding over another mesh: .* 'data'"):
        WhatIf(step, params, x, mesh=grid(), isolated=False).ask(Question({"x": on_other_grid(P("model"))}))


@pytest.mark.parametrize("sharding", [on_line, on_other_grid])
@pytest.mark.parametrize("is_placed", [False, True])
def test_beside_auto_specs_over_other_meshes_stay(sharding, is_placed):
    params, x = arrays()
    expected = step(params, x)
    other = sharding(P("x") if sharding is on_line else P("model"))
    spec = UNSPECIFIED if is_placed else other
    fun = pjit(step, in_shardings=(AUTO, spec), search=SearchOptions(**OPTIONS, cache=False))
    with grid():
        traced = fun.trace(params, jax.device_put(x, other) if is_placed else x)
        result = fun(params, jax.device_put(x, other) if is_placed else x)
    assert traced.program.in_specs[-1].mesh.shape == other.mesh.shape
    np.testing.assert_allclose(result["w"], expected["w"], rtol=1e-5)


def test_a_function_on_another_mesh_is_refused():
    params, x = arrays()
    large = AbstractMesh((16, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    on_grid = NamedSharding(grid(), P("data"))
    with grid():
        traced = pjit(step).trace(params, x)
    for mesh, fun, args in (
        (large, pjit(step, in_shardings=on_grid), (params, x)),
        (large, traced, ()),
        (grid(), step, (params, jax.device_put(x, on_line(P("x"))))),
    ):
        with pytest.raises(ValueError, match=r"search_specs: step is on the mesh .*, and mesh is data="):
            search_specs(fun, *args, mesh=mesh, **OPTIONS)


def test_the_sharding_of_an_array_has_to_be_said():
    with pytest.raises(ValueError, match=r"in_specs: x must be a spec .* is FROM_ARRAY.*: give that of an array"):
        search_specs(step, *arrays(), mesh=grid(), **OPTIONS, in_specs=(AUTO, FROM_ARRAY))


def test_axes_of_one_device_may_be_named():
    mesh = AbstractMesh((4, 1, 2), ("data", "one", "model"), axis_types=(AxisType.Auto,) * 3)

    def momentum(params, state, x):
        def loss(params):
            y = x
            for layer in params.values():
                y = jnp.tanh(y @ layer["up"]) @ layer["down"]
            return jnp.sum(y**2)

        mu = jax.tree.map(jnp.add, state["mu"], jax.grad(loss)(params))
        return jax.tree.map(jnp.subtract, params, mu), {"mu": mu}

    struct = jax.ShapeDtypeStruct
    layer = {"up": struct((16, 32), jnp.float32), "down": struct((32, 16), jnp.float32)}
    params, x = {"a": layer, "b": layer}, struct((8, 16), jnp.float32)
    fixed = {"a": {"up": P("one", "data"), "down": P()}, "b": AUTO}
    found = search_specs(
        momentum, params, {"mu": params}, x, mesh=mesh, **{**OPTIONS, "questions": 12}, in_specs=(fixed, AUTO, AUTO)
    )
    assert found.in_specs[0]["a"] == {"up": P("one", "data"), "down": P()}


def test_a_machine_of_another_mesh_is_refused():
    machine = h100(Mesh(devices(), "x"))
    expected = "machine H100 has no link for the axis 'data' of the mesh, but for x"
    with pytest.raises(ValueError, match=expected):
        search_specs(step, *arrays(), mesh=grid(), **{**OPTIONS, "machine": machine})
    search = SearchOptions(**{**OPTIONS, "machine": machine}, cache=False)
    with grid(), pytest.raises(ValueError, match=expected):
        pjit(step, in_shardings=AUTO, search=search)(*arrays())


def test_memory_may_have_no_limit():
    params, x = arrays()
    found = search_specs(step, params, x, mesh=grid(), **OPTIONS, memory=float("inf"))
    assert found.peak < found.memory
    search = SearchOptions(**OPTIONS, memory=float("inf"), cache=False)
    with grid():
        assert pjit(step, in_shardings=AUTO, search=search)(params, x)["w"].shape == (16, 32)
    for memory in (0, -1.0):
        with pytest.raises(ValueError, match="search_specs: memory must be a number of bytes above 0, but is"):
            search_specs(step, params, x, mesh=grid(), **OPTIONS, memory=memory)
