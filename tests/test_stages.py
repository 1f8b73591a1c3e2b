"""Stopping before execution: trace, lower, compile and eval_shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from partjit import UNSPECIFIED, P, ShardingError, pjit

STRUCT = jax.ShapeDtypeStruct((8, 4), "float32")
X = np.arange(32.0, dtype=np.float32).reshape(8, 4)


def affine(params, x, scale=None):
    return {"y": x @ params["w"]}, x.sum()


@pytest.fixture
def function():
    return pjit(
        affine,
        in_axis_resources=({"w": P(None, "y")}, P("x")),
        out_axis_resources=({"y": P("x")}, None),
        donate_argnums=1,
    )


@pytest.fixture
def lowered(mesh, function):
    with mesh:
        return function.lower({"w": jax.ShapeDtypeStruct((4, 4), "float32")}, STRUCT)


def placed(mesh, spec, value):
    return jax.device_put(value, NamedSharding(mesh, spec))


def test_tracing_tells_everything_without_executing(mesh):
    ran = []

    def fun(x):
        jax.debug.callback(lambda: ran.append(1))
        return {"y": x * 2}

    function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"), donate_argnums=0)
    with mesh:
        traced = function.trace(STRUCT)
        traced.lower().compile()
        shape = function.eval_shape(STRUCT)
    assert traced.fun_name == "fun"
    assert traced.jaxpr.in_avals[0].shape == (8, 4)
    assert traced.in_tree == jax.tree.structure(((0,), {}))
    assert traced.out_tree == jax.tree.structure({"y": 0})
    assert traced.donate_argnums == (0,)
    assert traced.args_info[0][0].donated
    assert traced.in_avals[0][0].dtype == np.float32
    assert traced.out_info["y"].shape == shape["y"].shape == (8, 4)
    assert shape["y"].sharding == NamedSharding(mesh, P("x"))
    assert ran == []


@pytest.mark.parametrize(
    "example", [STRUCT, X, jnp.asarray(X), jax.core.ShapedArray((8, 4), jnp.float32)], ids=["struct", "np", "jnp", "aval"]
)
def test_anything_with_a_shape_and_a_dtype_will_do(mesh, example):
    with mesh:
        compiled = pjit(lambda x: x * 2, in_axis_resources=P("x"), out_axis_resources=P("x")).lower(example).compile()
    np.testing.assert_array_equal(compiled(placed(mesh, P("x"), X)), X * 2)


def test_a_compiled_program_runs_outside_of_the_mesh(mesh, lowered):
    compiled = lowered.compile()
    w = np.ones((4, 4), np.float32)
    for _ in range(3):
        out, total = compiled({"w": placed(mesh, P(None, "y"), w)}, placed(mesh, P("x"), X))
        np.testing.assert_allclose(out["y"], X @ w)
        assert total == X.sum()
        assert out["y"].sharding == NamedSharding(mesh, P("x"))


def test_lowering_needs_a_mesh(function):
    with pytest.raises(RuntimeError, match="pjit requires a non-empty mesh"):
        function.lower({"w": jax.ShapeDtypeStruct((4, 4), "float32")}, STRUCT)


def test_metadata_agrees_along_the_stages(mesh, lowered):
    compiled = lowered.compile()
    tree = jax.tree.structure((({"w": 0}, 0), {}))
    assert lowered.in_tree == compiled.in_tree == tree
    assert jax.tree.map(str, lowered.in_avals) == jax.tree.map(str, compiled.in_avals)
    assert lowered.donate_argnums == compiled.donate_argnums == (1,)
    assert lowered.out_tree == compiled.out_tree == jax.tree.structure(({"y": 0}, 0))
    (params, x), _ = compiled.input_shardings
    assert params["w"].is_equivalent_to(NamedSharding(mesh, P(None, "y")), 2)
    assert x.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    out, total = compiled.output_shardings
    assert out["y"].is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    assert total.is_fully_replicated


def test_texts_and_analyses(lowered):
    compiled = lowered.compile()
    assert "stablehlo.dot_general" in lowered.as_text()
    assert "affine" in lowered.as_text("stablehlo")
    assert "HloModule" in lowered.as_text("hlo")
    assert "dot_general" in str(lowered.compiler_ir("stablehlo"))
    assert lowered.compiler_ir("hlo") is not None
    assert "HloModule" in compiled.as_text()
    assert lowered.cost_analysis()["flops"] > 0
    assert compiled.cost_analysis()["flops"] > 0
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    assert compiled.runtime_executable() is not None


@pytest.mark.parametrize(
    "args",
    [
        (X,),
        ({"w": X[:4]}, X, X),
        ({"v": X[:4]}, X),
        ({"w": np.ones((4, 4), np.float32)}, X[:4]),
        ({"w": np.ones((4, 4), np.int32)}, X),
    ],
    ids=["arity", "more", "tree", "shape", "dtype"],
)
def test_a_compiled_program_refuses_other_arguments(lowered, args):
    with pytest.raises(TypeError):
        lowered.compile()(*args)


def test_a_compiled_program_refuses_keywords_it_was_not_compiled_with(mesh, lowered):
    with pytest.raises(TypeError):
        lowered.compile()({"w": np.ones((4, 4), np.float32)}, X, scale=1.0)


def test_a_compiled_program_refuses_another_sharding(mesh, lowered):
    with pytest.raises(ValueError, match="input sharding"):
        lowered.compile()(
            {"w": placed(mesh, P("x"), np.ones((4, 4), np.float32))}, placed(mesh, P("x"), X)
        )


def test_a_compiled_program_cannot_be_differentiated(mesh):
    with mesh:
        compiled = pjit(lambda x: x.sum(), in_axis_resources=P("x")).lower(X).compile()
    with pytest.raises(TypeError, match="transformations"):
        jax.grad(compiled)(placed(mesh, P("x"), X))


def test_static_arguments_are_gone_after_lowering(mesh):
    function = pjit(lambda n, x, flag: x * n if flag else x, in_axis_resources=P("x"), static_argnums=(0, 2))
    with mesh:
        compiled = function.lower(3, STRUCT, True).compile()
    assert compiled.in_tree == jax.tree.structure(((0,), {}))
    np.testing.assert_array_equal(compiled(placed(mesh, P("x"), X)), X * 3)


def test_keywords_may_be_lowered_where_they_may_be_called(mesh):
    with mesh:
        compiled = pjit(lambda x, y: x - y, out_axis_resources=P("x")).lower(STRUCT, y=STRUCT).compile()
    np.testing.assert_array_equal(compiled(X, y=X), X - X)


def test_the_sharding_of_a_struct_counts_where_nothing_is_said(mesh):
    struct = jax.ShapeDtypeStruct((8, 4), "float32", sharding=NamedSharding(mesh, P("y", "x")))
    with mesh:
        compiled = pjit(lambda x: x * 2, in_axis_resources=UNSPECIFIED).lower(struct).compile()
    assert compiled.input_shardings[0][0].is_equivalent_to(NamedSharding(mesh, P("y", "x")), 2)


def test_lowering_validates(mesh, function):
    with mesh, pytest.raises(ShardingError, match=r"params\['w'\]"):
        function.lower({"w": jax.ShapeDtypeStruct((4, 5), "float32")}, STRUCT)


def test_what_closes_over_a_tracer_cannot_be_lowered_alone(mesh):
    def outer(a):
        pjit(lambda x: x + a).lower(STRUCT)
        return a

    with mesh, pytest.raises(ValueError, match="closes over 1 value"):
        jax.jit(outer)(1.0)
