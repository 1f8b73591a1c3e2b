"""Where the partitioner puts every value, told without compiling: complete, and what the compiled program says."""

import copy
import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated, pjit, with_sharding_constraint
from partjit.inspect.propagation import partition
from partjit.inspect.tracing import fragments_of, trace_function
from partjit.shardy import TensorSharding
from partjit.testing import meshes, sharded_programs, spec_trees
from tests.census import sees
from tests.effort import EVERYTHING
from tests.inspect.compiled_shardings import as_asked, computed_from_arguments, values_that_lie_otherwise


def read(fun, *args, mesh=None):
    return partition(trace_function(fun, args, {}, mesh).whole)


def specs_of(partitioned, primitive):
    return [
        value.spec
        for equation in partitioned.tree.walk()
        if equation.primitive == primitive
        for value in equation.outputs
    ]


def matrix(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


MESH_SHAPES = [(4, 2), (2, 2, 2), (8,), (2, 3)]
if jax.__version_info__ >= (0, 12):
    MESH_SHAPES.pop()  # with the questions in it, XLA ends the process where it reshards shards of different sizes


@sees("two mesh axes", "a partitioned value", "a value of several dimensions", "an axis name")
@settings(deadline=None, max_examples=15 if EVERYTHING else 7, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_what_is_told_is_what_is_compiled(data):
    mesh = data.draw(meshes(mesh_shapes=MESH_SHAPES))
    program = data.draw(sharded_programs(mesh=mesh, partitioned=True))
    args = program.arguments()
    specs = data.draw(spec_trees(tuple(args), mesh=mesh))
    with mesh:
        partitioned = read(pjit(program, in_shardings=specs), *args)
    assert [value for value in as_asked(partitioned).tree.values if value.is_array and value.spec is None] == []
    computed = computed_from_arguments(partitioned.tree)
    otherwise, _ = values_that_lie_otherwise(partitioned)
    assert [(str(value), sharding) for value, sharding in otherwise if value.number in computed] == []


@pytest.fixture(scope="module")
def data_model():
    return partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def through(kind):
    """A function of a value that lies as P('data', 'model'), which goes through a nested program of a kind."""
    body = jnp.sin
    match kind:
        case "scan":
            return lambda x: jax.lax.scan(lambda c, _: (body(c), c), x, None, length=3)[0]
        case "while":
            return lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 9, body, x)
        case "cond":
            return lambda x: jax.lax.cond(x[0, 0] > 0, body, jnp.cos, x)
        case "remat":
            return lambda x: jax.grad(lambda x: jax.checkpoint(lambda x: body(body(x)))(x).sum())(x)
        case "jit":
            return jax.jit(lambda x: body(x))
        case "pjit":
            return pjit(lambda x: body(x))
        case "custom_jvp":
            fun = jax.custom_jvp(lambda x: body(x))
            fun.defjvp(lambda xs, ts: (body(*xs), jnp.cos(*xs) * ts[0]))
            return fun
        case "custom_vjp":
            fun = jax.custom_vjp(lambda x: body(x))
            fun.defvjp(lambda x: (body(x), x), lambda x, ct: (jnp.cos(x) * ct,))
            return fun
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["scan", "while", "cond", "remat", "jit", "pjit", "custom_jvp", "custom_vjp"])
def test_nested_programs_are_told_as_they_were_written(kind, data_model):
    fun = pjit(through(kind), in_shardings=P("data", "model"))
    partitioned = read(fun, matrix(8, 4), mesh=data_model)
    inside = [equation for equation in partitioned.tree.walk() if equation.primitive in ("sin", "cos")]
    assert any(equation not in partitioned.tree.equations for equation in inside)
    assert {value.spec for equation in inside for value in equation.outputs} - {None} == {P("data", "model")}
    otherwise, count = values_that_lie_otherwise(partitioned)
    assert otherwise == []
    assert count > 1


def normed(params, x):
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-6) * params["g"][None, None]


def attended(params, x):
    q, k, v = jnp.einsum("bld,dck->cblk", normed(params, x @ params["e"]), params["qkv"])
    scores = jnp.where(jnp.tril(jnp.ones((5, 5), bool))[None], jnp.einsum("bld,bmd->blm", q, k), -1e9)
    return jnp.mean(normed(params, jax.nn.softmax(scores) @ v)[:, 0] ** 2)


def test_steps_with_parameters_sharded_over_all_axes_are_annotated_as_compiled(data_model):
    params = {"e": matrix(16, 16), "g": matrix(16), "qkv": matrix(16, 3, 16)}
    everywhere = P(("data", "model"))
    specs = dict.fromkeys(params, everywhere)
    step = pjit(jax.grad(attended), in_shardings=(specs, everywhere), out_shardings=specs)
    partitioned = read(step, params, matrix(16, 5, 16), mesh=data_model)
    computed = computed_from_arguments(partitioned.tree)
    otherwise, count = values_that_lie_otherwise(partitioned)
    assert [str(value) for value, _ in otherwise if value.number in computed] == []
    assert count > 80


def test_what_a_loop_passes_on_is_sharded_as_compiled(data_model):
    def loss(params, x):
        w, u, v = params
        step = lambda c, row: (jax.nn.softplus(c @ u + row), c)  # noqa: E731
        y = jax.lax.scan(step, jnp.zeros((16, 16)), jnp.tanh(x @ w).transpose(1, 0, 2))[1].transpose(1, 0, 2)
        return jnp.mean((y + y[:, 0][:, None] @ v) ** 2)

    specs = P("model", "data"), P("model"), P(None, ("data", "model"))
    step = pjit(jax.grad(loss), in_shardings=(specs, P("data", None, "model")), out_shardings=specs)
    partitioned = read(step, (matrix(16, 16),) * 3, matrix(16, 4, 16), mesh=data_model)
    computed = computed_from_arguments(partitioned.tree)
    otherwise, count = values_that_lie_otherwise(partitioned)
    assert [str(value) for value, _ in otherwise if value.number in computed] == []
    assert count > 80


def test_operations_that_jax_lowers_to_functions_are_annotated_as_compiled(data_model):
    def fun(x, y):
        x, y = with_sharding_constraint(x, P("data")), with_sharding_constraint(y, P(None, "data"))
        x, y = jax.lax.cumsum(x) / 4, jax.lax.cumsum(y)
        return with_sharding_constraint(x, P(None, "model")), y

    partitioned = read(pjit(fun, in_shardings=P()), matrix(4, 3), matrix(4, 4), mesh=data_model)
    assert specs_of(partitioned, "cumsum") == [P("data", "model"), P(None, "data")]
    otherwise, count = values_that_lie_otherwise(partitioned)
    assert (otherwise, count) == ([], 8)


def rolled(x):
    return with_sharding_constraint(jnp.roll(jnp.sin(x), 1, 1), P(None, ("data", "model")))


def joined(x):
    x = with_sharding_constraint(jnp.concatenate([x[:, 1:], x, x[:, :0], x], 1), P(None, ("data", "model")))
    return x[:, 2:], jnp.concatenate([x[:0], x[3:3]])


@pytest.mark.parametrize("fun", [rolled, joined])
def test_what_has_no_elements_changes_no_sharding(fun, data_model):
    partitioned = read(pjit(fun, in_shardings=P("model")), matrix(6, 1), mesh=data_model)
    otherwise, count = values_that_lie_otherwise(partitioned)
    assert otherwise == []
    assert count > 4


def test_each_call_of_a_nested_program_is_told_by_itself(data_model):
    double = jax.jit(lambda x: x * 2)

    def fun(x, y):
        return double(x), double(y)

    partitioned = read(pjit(fun, in_shardings=(P("data"), P(None, "model"))), *[matrix(8, 4)] * 2, mesh=data_model)
    assert specs_of(partitioned, "mul") == [P("data", None), P(None, "model")]


def test_specs_of_nested_programs_hold(data_model):
    inner = pjit(jnp.sin, in_shardings=P("data"), out_shardings=P(None, "model"))
    partitioned = read(pjit(inner, in_shardings=P("model")), matrix(8, 4), mesh=data_model)
    (call,) = partitioned.tree.equations
    assert call.inputs[0].spec == P("model", None)
    assert call.bodies["jaxpr"].inputs[0].spec == P("data", None)
    assert call.outputs[0].spec == P(None, "model")


def test_the_body_of_a_shard_map_is_told_per_shard(data_model):
    def fun(x):
        return jax.shard_map(jnp.sin, mesh=data_model, in_specs=P("data", "model"), out_specs=P("data", "model"))(x)

    partitioned = read(fun, matrix(8, 4))
    (inside,) = [equation for equation in partitioned.tree.walk() if equation.primitive == "sin"]
    assert inside.outputs[0].aval.shape == (2, 2)
    assert (inside.outputs[0].spec, inside.outputs[0].nbytes_per_device) == (P(None, None), 16)
    (outside,) = partitioned.tree.outputs
    assert (outside.spec, outside.nbytes_per_device) == (P("data", "model"), 16)


def test_axes_that_a_shard_map_leaves_alone_go_through_its_body(data_model):
    def fun(x):
        mapped = jax.shard_map(jnp.sin, mesh=data_model, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        return mapped(with_sharding_constraint(x, P("data", "model")))

    partitioned = read(fun, matrix(8, 4), mesh=data_model)
    assert specs_of(partitioned, "sin") == [P(None, "model")]
    (mapped,) = [equation for equation in partitioned.tree.walk() if equation.primitive == "shard_map"]
    assert [value.spec for value in mapped.bodies["jaxpr"].inputs] == [P(None, "model")]


def test_functions_that_xla_composes_of_others_pass_shardings_on(data_model):
    """jax lowers some to operations the partitioner knows nothing of until they are expanded."""

    def fun(x):
        return jnp.square(x), jax.lax.erf_inv(x), jnp.arcsin(x), jax.scipy.special.erf(x)

    partitioned = read(pjit(fun, in_shardings=P("data", "model")), matrix(8, 4), mesh=data_model)
    assert {value.spec for value in partitioned.tree.outputs} == {P("data", "model")}


def test_typed_keys_and_scalars_are_told(data_model):
    def fun(keys, scale):
        return jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys) * scale

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    partitioned = read(
        pjit(fun, in_shardings=(P("data"), None)), keys, jax.ShapeDtypeStruct((), jnp.float32), mesh=data_model
    )
    (keys, scale), (result,) = partitioned.tree.inputs, partitioned.tree.outputs
    assert (keys.spec, keys.nbytes_per_device) == (P("data"), 16)
    assert (scale.spec, scale.nbytes_per_device) == (P(), 4)
    assert result.spec == P("data", None)


def test_parts_that_do_not_divide_count_the_largest(data_model):
    def fun(x):
        return jnp.sin(jnp.concatenate([x, x[:1]])).sum()

    partitioned = read(pjit(fun, in_shardings=P("data")), matrix(8, 4), mesh=data_model)
    (sine,) = [equation.outputs[0] for equation in partitioned.tree.walk() if equation.primitive == "sin"]
    assert (sine.aval.shape, sine.spec) == ((9, 4), P("data", None))
    assert (sine.shard_shape, sine.nbytes, sine.nbytes_per_device) == ((3, 4), 144, 48)


def test_results_leave_as_their_specs_say(data_model):
    fun = pjit(jnp.sin, in_shardings=P("data"), out_shardings=P(None, "data"))
    partitioned = read(fun, matrix(8, 4), mesh=data_model)
    (result,) = partitioned.results
    assert (result.path, result.spec) == ("result", P(None, "data"))


@pytest.mark.parametrize("of", ["one device", "no mesh"])
def test_where_there_is_nothing_to_divide_all_is_whole(of):
    mesh = partjit.Mesh(np.array(jax.devices()[:1]), ("x",)) if of == "one device" else None
    partitioned = read(lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=2)[0], matrix(4), mesh=mesh)
    assert {value.spec for value in partitioned.tree.values} <= {P(), P(None)}


def test_explicit_meshes_are_told_like_others():
    types = (jax.sharding.AxisType.Explicit,) * 2
    mesh = partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=types)
    partitioned = read(pjit(jnp.sin, in_shardings=P("data")), matrix(8, 4), mesh=mesh)
    assert partitioned.tree.outputs[0].spec == P("data", None)


def made_by(how, fun, mesh):
    sharding = NamedSharding(mesh, P("data"))
    struct = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)
    match how:
        case "pjit":
            return pjit(fun), (struct,)
        case "jit":
            return jax.jit(fun), (struct,)
        case "jit with shardings":
            return jax.jit(fun, in_shardings=sharding), (matrix(8, 4),)
        case "a plain function":
            return fun, (struct,)
        case "a trace of pjit":
            return pjit(fun).trace(struct), ()
        case "a trace of jit":
            return jax.jit(fun).trace(struct), ()
    raise AssertionError(how)


@pytest.mark.parametrize(
    "how", ["pjit", "jit", "jit with shardings", "a plain function", "a trace of pjit", "a trace of jit"]
)
def test_functions_are_told_whoever_made_them(how, data_model):
    fun, args = made_by(how, lambda x: jnp.sin(x) + 1, data_model)
    partitioned = read(fun, *args)
    assert partitioned.unit.mesh == data_model
    assert partitioned.tree.inputs[0].path.startswith("x")
    assert [value.spec for value in partitioned.tree.values] == [P("data", None)] * 3


def test_static_arguments_stay_static(data_model):
    fun = jax.jit(lambda x, n: x * n, static_argnums=1)
    sharding = NamedSharding(data_model, P("data"))
    partitioned = read(fun, jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding), 3)
    assert partitioned.tree.outputs[0].spec == P("data", None)


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match=r"explain: fun must be a function, what partjit\.pjit or jax\.jit made of one"):
        read(3)
    with pytest.raises(TypeError, match="sin is traced already and takes no arguments"):
        read(jax.jit(jnp.sin).trace(1.0), 1.0)


@pytest.fixture(scope="module")
def step_with_calls():
    struct = matrix(8, 16)

    @colocated.colocated_python(out_specs=struct)
    def load(step):
        raise AssertionError("nothing is run")

    @colocated.colocated_python(stream="log", out_specs_fn=lambda loss: None)
    def log(loss):
        raise AssertionError("nothing is run")

    @functools.partial(pjit, in_shardings=(P(None, "model"), None), out_shardings=P(None, "model"))
    def train(w, start):
        def body(w, i):
            batch = with_sharding_constraint(load(start + i), P("data"))
            loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
            log(loss)
            return w - 0.1 * grad, None

        return jax.lax.scan(body, w, jnp.arange(5))[0]

    return train, (matrix(16, 32), jnp.int32(0))


def test_programs_with_calls_are_told_whole_and_piece_by_piece(step_with_calls, data_model):
    train, args = step_with_calls
    subject = trace_function(train, args, {}, data_model)
    whole = partition(subject.whole)
    assert specs_of(whole, "colocated_call") == [P("data", None)]
    assert specs_of(whole, "dot_general")[0] == P("data", "model")
    fragments = fragments_of(subject.plan)
    assert [unit.times for unit in fragments] == [1, 5]
    for unit in fragments:
        pieces = partition(unit)
        assert [value for value in as_asked(pieces).tree.values if value.is_array and value.spec is None] == []
        assert values_that_lie_otherwise(pieces)[0] == []
    inside = partition(fragments[1])
    assert set(specs_of(inside, "dot_general")) >= {P("data", "model")}


def test_equations_come_from_lines_of_this_file(step_with_calls, data_model):
    train, args = step_with_calls
    partitioned = read(train, *args, mesh=data_model)
    assert {equation.site[0] for equation in partitioned.tree.walk()} == {__file__}
    assert all(equation.site[2] in ("body", "train", "<lambda>") for equation in partitioned.tree.walk())


@pytest.mark.parametrize(
    ("loop", "turns"),
    [
        (lambda x: jax.lax.fori_loop(2, 7, lambda i, c: c * i, x), 5),
        (lambda x: jax.lax.fori_loop(0, x.astype(int)[0, 0], lambda i, c: c * 2, x), None),
        (lambda x: jax.lax.while_loop(lambda c: c[1] < 4, lambda c: (c[0] * 2, c[1] + 1), (x, 0))[0], 4),
        (lambda x: jax.lax.while_loop(lambda c: c[1] < 4, lambda c: (c[0] * 2, c[1] + 2), (x, 0))[0], None),
        (lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 4, lambda c: c * 2, x), None),
        (lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=6)[0], 6),
    ],
)
def test_loops_turn_as_often_as_is_known(loop, turns, data_model):
    partitioned = read(loop, matrix(8, 4), mesh=data_model)
    (equation,) = [
        equation
        for equation in partitioned.tree.walk()
        if any(inner.primitive == "mul" for body in equation.bodies.values() for inner in body.equations)
    ]
    assert equation.trip_count == turns


def test_a_spec_describes_shardings_over_whole_axes_of_the_mesh():
    assert TensorSharding((("data", "model"), ()), ((4, 2), ())).is_of_whole_axes
    assert not TensorSharding((("model",), ("data:(1)2",)), ((2,), (2,))).is_of_whole_axes
    assert not TensorSharding((("data",),), ((4,),), mesh="another").is_of_whole_axes


def test_equal_shardings_are_one_object_wherever_they_come_from():
    sharding = TensorSharding((("data",), ()), ((4,), ()))
    assert TensorSharding(axes=(("data",), ()), parts=((4,), ()), mesh="mesh") is sharding
    assert pickle.loads(pickle.dumps(sharding)) is copy.deepcopy(sharding) is sharding
    assert dataclasses.replace(sharding, mesh="another") != sharding
    assert dataclasses.replace(dataclasses.replace(sharding, mesh="another"), mesh="mesh") is sharding
    assert TensorSharding(((), ()), ((), ())) is TensorSharding.replicated(2)
