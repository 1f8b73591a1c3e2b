"""Ahead of time: trace, lower, compile and eval_shape, never executing. The objects are like those of `jax.stages`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import partjit
from partjit import FROM_ARRAY, P, pjit, with_sharding_constraint

X = np.arange(32, dtype=np.float32).reshape(8, 4)
W = np.ones((4, 2), np.float32)


def affine(x, w):
    return {"y": x @ w, "mean": x.mean()}


program = pjit(affine, in_axis_resources=(P("x", "y"), P("y")), out_axis_resources={"y": P("x"), "mean": None})
ABSTRACT = (jax.ShapeDtypeStruct((8, 4), np.float32), jax.ShapeDtypeStruct((4, 2), np.float32))


@pytest.fixture(scope="module")
def stages(mesh):
    """(traced, lowered, compiled) of `program`."""
    with mesh:
        traced = program.trace(*ABSTRACT)
    lowered = traced.lower()
    return traced, lowered, lowered.compile()


# Without executing


ABSTRACTIONS = {
    "ShapeDtypeStruct": ABSTRACT,
    "ShapedArray": tuple(jax.core.ShapedArray(s.shape, s.dtype) for s in ABSTRACT),
    "arrays": (X, W),
    "mixed": (jnp.asarray(X), ABSTRACT[1]),
}


@pytest.mark.parametrize("args", ABSTRACTIONS.values(), ids=ABSTRACTIONS)
def test_lowering_takes_abstract_and_concrete_arguments(mesh, args):
    with mesh:
        lowered = program.lower(*args)
        out = lowered.compile()(X, W)
    np.testing.assert_allclose(out["y"], X @ W)


def test_nothing_is_executed_before_the_call(mesh):
    executed = []
    function = pjit(lambda x: (jax.debug.callback(lambda: executed.append(1)), x)[1], in_axis_resources=P("x"))
    with mesh:
        lowered = function.lower(ABSTRACT[0])
        compiled = lowered.compile()
        function.eval_shape(ABSTRACT[0])
        jax.effects_barrier()
        assert not executed
        jax.block_until_ready(compiled(X))
        jax.effects_barrier()
    assert executed


def test_lowering_does_not_donate(mesh):
    x = jax.device_put(X, NamedSharding(mesh, P("x")))
    function = pjit(lambda x: x + 1, in_axis_resources=P("x"), out_axis_resources=P("x"), donate_argnums=0)
    with mesh:
        compiled = function.lower(x).compile()
    assert not x.is_deleted()
    compiled(x)
    assert x.is_deleted()


def test_tracing_ahead_of_time_and_calling_share_trace_and_program(mesh, compilations):
    traces = []

    def fun(x):
        traces.append(1)
        return x + 1

    function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        function.eval_shape(ABSTRACT[0])
        function.trace(ABSTRACT[0]).lower()
        function.lower(X)
        assert len(compilations) == 0
        function(X)
    assert len(traces) == 1
    assert len(compilations) == 1


# Validation


def test_lowering_needs_a_mesh_as_a_call_does():
    for stage in (program.trace, program.lower, program.eval_shape):
        with pytest.raises(RuntimeError, match="requires a non-empty mesh"):
            stage(*ABSTRACT)


def test_lowering_validates_as_a_call_does(mesh):
    def message(call, *args):
        with mesh, pytest.raises(ValueError, match="One of pjit arguments") as caught:
            call(*args)
        return str(caught.value)

    bad = (np.ones((6, 3), np.float32), np.ones((3, 2), np.float32))
    abstract = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in bad)
    expected = message(program, *bad)
    assert "x" in expected
    assert message(program.lower, *abstract) == message(program.trace, *bad) == expected
    assert message(program.eval_shape, *abstract) == expected
    with mesh, pytest.raises(TypeError, match="not a valid JAX type"):
        program.lower("text", W)


# What the stages know


def test_the_stages_have_what_jaxs_have(stages):
    traced, lowered, compiled = stages
    jit_traced = jax.jit(affine).trace(*ABSTRACT)
    names = ["args_info", "donate_argnums", "fun_name", "in_avals", "in_tree", "jaxpr", "lower"]
    for name in [*names, "out_avals", "out_info", "out_tree"]:
        assert hasattr(jit_traced, name), name
        assert hasattr(traced, name), name
    assert isinstance(lowered, jax.stages.Lowered)
    assert isinstance(compiled, jax.stages.Compiled)


@pytest.mark.parametrize("static", [False, True])
def test_what_the_stages_know_is_what_jax_jit_knows(mesh, static):
    def fun(x, *, w):
        return {"y": x @ w, "none": None}

    def with_static(x, n, *, w):
        return {"y": x @ w * n, "none": None}

    args = (ABSTRACT[0], 2.0) if static else (ABSTRACT[0],)
    square = jax.ShapeDtypeStruct((4, 4), np.float32)  # so that the result can take the place of x
    options = {"static_argnums": (1,)} if static else {}
    body = with_static if static else fun
    with mesh:
        ours = pjit(body, donate_argnums=0, **options).trace(*args, w=square)
        theirs = jax.jit(body, donate_argnums=0, **options).trace(*args, w=square)
        stages = [(ours, theirs), (ours.lower(), theirs.lower())]
        stages.append((stages[1][0].compile(), stages[1][1].compile()))
    for mine, jaxs in stages:
        assert mine.in_tree == jaxs.in_tree
        assert mine.out_tree == jaxs.out_tree
        assert mine.donate_argnums == jaxs.donate_argnums == (0,)
        assert jax.tree.structure(mine.in_avals) == jax.tree.structure(jaxs.in_avals)
        for a, b in zip(jax.tree.leaves(mine.in_avals), jax.tree.leaves(jaxs.in_avals), strict=True):
            assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        assert jax.tree.structure(mine.args_info) == jax.tree.structure(jaxs.args_info)
        for a, b in zip(jax.tree.leaves(mine.args_info), jax.tree.leaves(jaxs.args_info), strict=True):
            assert (a.shape, a.dtype, a.donated) == (b.shape, b.dtype, b.donated)
        for a, b in zip(jax.tree.leaves(mine.out_info), jax.tree.leaves(jaxs.out_info), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert ours.fun_name == theirs.fun_name
    assert [str(aval) for aval in ours.out_avals] == [str(aval) for aval in theirs.out_avals]


def test_in_avals_and_trees_agree_on_all_stages(stages):
    for stage in stages:
        assert jax.tree.map(lambda a: (a.shape, a.dtype), stage.in_avals) == (
            (((8, 4), np.dtype("float32")), ((4, 2), np.dtype("float32"))),
            {},
        )
        assert stage.in_tree == jax.tree.structure(((0, 0), {}))
        assert stage.out_tree == jax.tree.structure({"y": 0, "mean": 0})
        assert stage.donate_argnums == ()


def test_donated_arguments_are_visible_and_counted_flat(mesh):
    function = pjit(
        lambda tree, n, x: ({k: v + n for k, v in tree.items()}, x),
        in_axis_resources=(P("x"), None),
        out_axis_resources=(P("x"), None),
        static_argnums=1,
        donate_argnums=2,
    )
    tree = {"a": ABSTRACT[0], "b": ABSTRACT[0]}
    with mesh:
        traced = function.trace(tree, 1.0, ABSTRACT[1])
        lowered = traced.lower()
        stages = (traced, lowered, lowered.compile())
    for stage in stages:
        assert stage.donate_argnums == (2,)
        (info_tree, info_x), kwargs = stage.args_info
        assert kwargs == {}
        assert not info_tree["a"].donated
        assert not info_tree["b"].donated
        assert info_x.donated


def test_the_names_of_arguments_and_results_are_in_the_program(stages):
    _, lowered, _ = stages
    text = lowered.as_text(debug_info=True)
    assert "affine" in lowered.as_text().splitlines()[0]
    assert re.search(r'"x"|\bx\b', text)


def test_input_and_output_shardings_are_what_the_specs_say(mesh, stages):
    _, _, compiled = stages
    ((x, w), kwargs) = compiled.input_shardings
    assert kwargs == {}
    assert x.is_equivalent_to(NamedSharding(mesh, P("x", "y")), 2)
    assert w.is_equivalent_to(NamedSharding(mesh, P("y")), 2)
    out = compiled.output_shardings
    assert out["y"].is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    assert out["mean"].is_fully_replicated
    assert len(out["mean"].device_set) == 8


def test_texts_and_analyses_are_there(stages):
    traced, lowered, compiled = stages
    assert "dot_general" in str(traced.jaxpr)
    assert "stablehlo.dot_general" in lowered.as_text()
    assert "stablehlo.dot_general" in str(lowered.compiler_ir("stablehlo"))
    assert "stablehlo.dot_general" in lowered.as_text("stablehlo")
    assert "HloModule" in lowered.as_text("hlo")
    assert lowered.compiler_ir("hlo") is not None
    assert "sharding" in lowered.as_text()
    with pytest.raises(ValueError, match="dialect"):
        lowered.as_text("klingon")
    assert lowered.cost_analysis()
    assert "HloModule" in compiled.as_text()
    assert "num_partitions=8" in compiled.as_text()
    assert compiled.runtime_executable() is not None
    assert compiled.cost_analysis()["flops"] > 0
    memory = compiled.memory_analysis()
    # Per device: x is divided by 8, w by 2.
    assert memory.argument_size_in_bytes == X.nbytes // 8 + W.nbytes // 2


def test_compiler_options_are_passed_on(mesh):
    with mesh:
        lowered = program.lower(*ABSTRACT)
        compiled = lowered.compile(compiler_options={"xla_embed_ir_in_executable": True})
        np.testing.assert_allclose(compiled(X, W)["y"], X @ W)
        with pytest.raises(Exception, match="xla_no_such_option"):
            lowered.compile(compiler_options={"xla_no_such_option": "1"})


# eval_shape


def test_eval_shape_says_shapes_types_and_shardings(mesh):
    with mesh:
        out = program.eval_shape(*ABSTRACT)
    assert out["y"].shape == (8, 2)
    assert out["y"].dtype == np.float32
    assert out["y"].sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    assert out["mean"].shape == ()
    assert out["mean"].sharding.is_fully_replicated
    with mesh:
        chosen = pjit(lambda x: x + 1).eval_shape(X)
        assert chosen.sharding is None
        plain = jax.eval_shape(program, *ABSTRACT)
    assert jax.tree.map(lambda s: (s.shape, s.dtype), plain) == jax.tree.map(lambda s: (s.shape, s.dtype), out)


def test_what_eval_shape_says_is_what_a_call_gives(mesh):
    with mesh:
        promised, given = program.eval_shape(X, W), program(X, W)
    for p, g in zip(jax.tree.leaves(promised), jax.tree.leaves(given), strict=True):
        assert (p.shape, p.dtype) == (g.shape, g.dtype)
        assert p.sharding.is_equivalent_to(g.sharding, g.ndim)
    with mesh:
        assert pjit(lambda x: x * 2).eval_shape(3.0).weak_type
        assert not pjit(lambda x: x * 2).eval_shape(X).weak_type


# Calling what is compiled


def test_a_compiled_program_is_called_outside_the_mesh(mesh, stages):
    _, _, compiled = stages
    for _ in range(3):
        out = compiled(X, W)
        np.testing.assert_allclose(out["y"], X @ W)
        assert out["y"].sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    other = partjit.Mesh(np.array(jax.devices()[:2]), "x")
    with other:
        assert len(compiled(X, W)["y"].sharding.device_set) == 8


def test_trees_are_compiled_and_called_as_trees(mesh):
    function = pjit(
        lambda params, x: ({"y": x @ params["w"]}, x.sum()),
        in_axis_resources=({"w": P(None, "y")}, P("x")),
        out_axis_resources=({"y": P("x")}, None),
    )
    w = jax.ShapeDtypeStruct((4, 4), np.float32)
    with mesh:
        compiled = function.lower({"w": w}, ABSTRACT[0]).compile()
        with pytest.raises(ValueError, match=r"params\['w'\]"):
            function.lower({"w": jax.ShapeDtypeStruct((4, 5), np.float32)}, ABSTRACT[0])
    assert compiled.in_tree == jax.tree.structure((({"w": 0}, 0), {}))
    assert compiled.out_tree == jax.tree.structure(({"y": 0}, 0))
    out, total = compiled({"w": np.ones((4, 4), np.float32)}, X)
    np.testing.assert_allclose(out["y"], X @ np.ones((4, 4)))
    assert total == X.sum()
    with pytest.raises(TypeError):
        compiled({"v": np.ones((4, 4), np.float32)}, X)


def test_a_compiled_program_takes_arrays_that_are_in_place(mesh, stages):
    _, _, compiled = stages
    x = jax.device_put(X, NamedSharding(mesh, P("x", "y")))
    w = jax.device_put(W, NamedSharding(mesh, P("y", None)))
    np.testing.assert_allclose(compiled(x, w)["y"], X @ W)
    np.testing.assert_allclose(compiled(jnp.asarray(X), w)["y"], X @ W)


def test_a_compiled_program_refuses_arrays_that_are_elsewhere(mesh, stages):
    _, _, compiled = stages
    x = jax.device_put(X, NamedSharding(mesh, P("y", "x")))
    with pytest.raises(ValueError, match="input sharding"):
        compiled(x, W)
    with pytest.raises(ValueError, match=r"sharding|devices"):
        compiled(jax.device_put(X, jax.devices()[3]), W)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X,), {}),
        ((X, W, W), {}),
        ((X, (W,)), {}),
        ((X, {"w": W}), {}),
        ((X,), {"w": W}),
        ((X, W), {"more": W}),
        ((X, W.astype(np.int32)), {}),
        ((X, np.ones((4, 4), np.float32)), {}),
        ((X[:4], W), {}),
        ((X, None), {}),
    ],
    ids=["few", "many", "tuple", "dict", "keyword", "extra", "dtype", "shape", "batch", "none"],
)
def test_a_compiled_program_refuses_other_types(stages, args, kwargs):
    _, _, compiled = stages
    with pytest.raises(TypeError):
        compiled(*args, **kwargs)


def test_static_arguments_are_dropped_from_the_compiled_call(mesh):
    function = pjit(lambda n, x, m: x * n + m, in_axis_resources=(P("x"),), static_argnums=(0, 2))
    with mesh:
        compiled = function.lower(3.0, X, 1.0).compile()
    np.testing.assert_array_equal(compiled(X), 3 * X + 1)
    with pytest.raises(TypeError):
        compiled(3.0, X, 1.0)


def test_static_names_are_dropped_too(mesh):
    function = pjit(lambda x, *, n: x * n, in_axis_resources=(P("x"),), static_argnames="n")
    with mesh:
        compiled = function.lower(X, n=3.0).compile()
    np.testing.assert_array_equal(compiled(X), 3 * X)


def test_keyword_arguments_where_the_specs_allow_them(mesh):
    function = pjit(lambda x, *, w: x @ w)
    with mesh:
        compiled = function.lower(X, w=W).compile()
    np.testing.assert_allclose(compiled(X, w=W), X @ W)


def test_a_compiled_program_cannot_be_transformed(stages):
    _, _, compiled = stages
    with pytest.raises(TypeError, match=r"[Cc]annot apply JAX transformations"):
        jax.grad(lambda x: compiled(x, W)["mean"])(X)
    with pytest.raises(TypeError, match=r"[Cc]annot apply JAX transformations"):
        jax.vmap(lambda x: compiled(x, W)["mean"])(np.stack([X, X]))


def test_each_mesh_gets_a_program_of_its_own():
    compiled = []
    for count in (1, 2, 4, 8):
        mesh = partjit.Mesh(np.array(jax.devices()[:count]), "x")
        with mesh:
            compiled.append((mesh, pjit(lambda x: x + 1, P("x"), P("x")).lower(ABSTRACT[0]).compile()))
    for mesh, program in compiled:
        out = program(X)
        np.testing.assert_array_equal(out, X + 1)
        assert out.sharding.device_set == set(mesh.devices.flat)


# Arguments that bring a sharding


def test_an_abstract_argument_with_a_sharding_is_taken_as_committed_to_it(mesh):
    sharding = NamedSharding(mesh, P("x", "y"))
    abstract = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding)
    for specs in (partjit.UNSPECIFIED, FROM_ARRAY):
        with mesh:
            compiled = pjit(lambda x: x + 1, in_axis_resources=specs).lower(abstract).compile()
        ((found,), _) = compiled.input_shardings
        assert found.is_equivalent_to(sharding, 2)
        np.testing.assert_array_equal(compiled(jax.device_put(X, sharding)), X + 1)


def test_shardings_by_name_need_no_ambient_mesh(mesh):
    sharding = NamedSharding(mesh, P("x"))
    function = pjit(lambda x: x + 1, in_shardings=sharding, out_shardings=sharding)
    compiled = function.lower(ABSTRACT[0]).compile()
    assert compiled(X).sharding.is_equivalent_to(sharding, 2)
    assert function.eval_shape(ABSTRACT[0]).sharding == sharding


def test_closed_over_tracers_cannot_be_lowered(mesh):
    def outer(w):
        with pytest.raises(ValueError, match="closes over 1 value"):
            pjit(lambda x: x @ w).lower(X)
        return w.sum()

    with mesh:
        jax.grad(outer)(W)


def test_stages_with_no_arguments_and_no_results(mesh):
    with mesh:
        assert pjit(lambda: None).lower().compile()() is None
        out = pjit(lambda: jnp.arange(8), out_axis_resources=P("x")).lower().compile()()
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 1)


def test_the_lowered_program_carries_the_constraints(mesh):
    function = pjit(lambda x: with_sharding_constraint(x * 2, P("y", "x")) + 1, in_axis_resources=P("x"))
    with mesh:
        text = function.lower(ABSTRACT[0]).as_text()
    assert re.search(r'sharding_constraint.*"y".*"x"', text) or "devices=[2,4]" in text


def test_keep_unused_decides_what_the_executable_is_given(mesh):
    def memory(**options):
        with mesh:
            compiled = pjit(lambda x, w: w + 1, in_axis_resources=(P("x"), None), **options).lower(*ABSTRACT).compile()
        np.testing.assert_array_equal(compiled(X, W), W + 1)
        return compiled.memory_analysis().argument_size_in_bytes

    assert memory(keep_unused=True) - memory() == X.nbytes // 4
