"""Colocated calls under `jax.vmap`: one call for each example, or one call with a batch."""

import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import P, ShardingError, colocated, pjit
from partjit.colocated import colocated_python, colocated_python_class
from partjit.colocated.runtime.out_specs import OutSpecs
from tests.census import saw, sees
from tests.colocated import rendezvous
from tests.effort import examples

X = np.arange(24, dtype=np.float32).reshape(4, 6)
METHODS = ["sequential", "expand_dims", "broadcast_all"]


def like(x, *_, **__):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def nothing(*_, **__):
    return None


def add(**said):
    """The sum of two arguments, noting what it was called with."""

    def add(x, y):
        rendezvous.logs["add"].append((np.asarray(x).copy(), np.asarray(y).copy()))
        return jnp.asarray(np.asarray(x) + np.asarray(y))

    return colocated_python(add, **{"out_specs_fn": like, **said})


@colocated_python(out_specs_fn=nothing)
def log(x):
    rendezvous.logs["log"].append(np.asarray(x).copy())


def programs(f, mesh, *, around=pjit):
    """A function as it is, and as a program over a mesh."""

    def program(*args, **kwargs):
        with mesh:
            return around(f)(*args, **kwargs)

    return f, program


def seen(name="add"):
    """What a function was called with since the last time, once all calls have ended."""
    colocated.wait(timeout=30)
    found = [*rendezvous.logs[name]]
    rendezvous.clear()
    return found


def shapes(calls):
    return [tuple(x.shape for x in call) for call in calls]


# The methods


@pytest.mark.parametrize(
    ("method", "pure", "expected"),
    [
        ("sequential", False, [((6,), (6,))] * 4),
        ("sequential", True, [((6,), (6,))] * 4),
        ("expand_dims", False, [((4, 6), (1, 6))]),
        ("broadcast_all", True, [((4, 6), (4, 6))]),
    ],
)
def test_each_method_calls_with_the_shapes_it_promises(meeting, mesh, method, pure, expected):
    f = jax.vmap(add(vmap_method=method, pure=pure), (0, None))
    y = np.ones(6, np.float32)
    for run in programs(f, mesh):
        np.testing.assert_array_equal(run(jnp.asarray(X), jnp.asarray(y)), X + y)
        assert shapes(seen()) == expected


def test_calls_with_an_effect_are_made_one_by_one_in_order_unless_stated(meeting, mesh):
    def f(x):
        log(x[0])
        log(x[1])
        return x + 1

    for run in programs(jax.vmap(f), mesh):
        np.testing.assert_array_equal(run(jnp.asarray(X)), X + 1)
        assert [float(x) for x in seen("log")] == [*X[:, 0], *X[:, 1]]  # each call for all examples


def test_a_pure_function_has_to_say_how(meeting, mesh):
    message = (
        r"the colocated function add is pure and called under jax\.vmap with a batched x and nothing says how: give it "
        r"vmap_method=, one of 'sequential', 'expand_dims', 'broadcast_all', or call it outside of what is batched"
    )
    for run in programs(jax.vmap(add(pure=True), (0, None)), mesh):
        with pytest.raises(ValueError, match=message):
            run(jnp.asarray(X), np.ones(6, np.float32))


def test_a_method_is_one_of_three(meeting):
    with pytest.raises(
        ValueError, match="vmap_method must be one of 'sequential', 'expand_dims', 'broadcast_all', but is 'legacy'"
    ):
        add(vmap_method="legacy")
    with pytest.raises(ValueError, match="vmap_method already specified"):
        add(vmap_method="sequential").specialize(vmap_method="expand_dims")


@pytest.mark.parametrize("method", METHODS)
def test_a_call_without_batched_arguments_is_one_call(meeting, mesh, method):
    f = add(vmap_method=method)
    v = np.ones(6, np.float32)
    for run in programs(jax.vmap(lambda x: f(v, v)[0] + x), mesh):
        np.testing.assert_array_equal(run(np.arange(4, dtype=np.float32)), 2 + np.arange(4))
        assert len(seen()) == 1


@pytest.mark.parametrize("method", METHODS)
def test_trees_keywords_integers_and_nones_are_batched(meeting, mesh, method):
    @colocated_python(
        out_specs_fn=lambda state, k, flag=None: {"x": like(state["x"]), "none": None, "k": like(k)}, vmap_method=method
    )
    def f(state, k, flag=None):
        x, k = np.asarray(state["x"]), np.asarray(k)
        if x.ndim == 2:
            x, k = x + k[:, None] * 0, k + np.zeros(len(x), np.int32)
        return {"x": jnp.asarray(x * 2), "none": None, "k": jnp.asarray(k + 1)}

    def g(x, k):
        return f(flag=None, k=k, state={"x": x})

    for run in programs(jax.vmap(g, (1, None), {"x": 1, "none": None, "k": 0}), mesh):
        result = run(jnp.asarray(X), jnp.int32(3))
        np.testing.assert_array_equal(result["x"], X * 2)
        np.testing.assert_array_equal(result["k"], np.full(6, 4))
        assert result["none"] is None


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_objects_are_batched(meeting, mesh, method):
    class Total:
        def __init__(self):
            self.total = 0.0

        def add(self, x):
            self.total += float(np.sum(x))
            return x * 0 + self.total

    cls = colocated_python_class(Total)
    cls.add = cls.add.specialize(out_specs_fn=like, vmap_method=method)
    x = np.arange(1, 5, dtype=np.float32)
    for run in programs(lambda add: jax.vmap(add)(x), mesh, around=lambda f: lambda add: pjit(lambda: f(add))()):
        expected = np.cumsum(x) if method == "sequential" else np.full(4, 10.0)
        np.testing.assert_array_equal(run(cls().add), expected)


@pytest.mark.parametrize(
    ("take", "returned"), [(lambda x: x[0], "[6]"), (lambda x: x[:3], "[3,6]")], ids=["one", "three"]
)
@pytest.mark.parametrize("method", ["expand_dims", "broadcast_all"])
def test_results_must_have_the_batch_in_front(meeting, mesh, method, take, returned):
    first = colocated_python(lambda x: take(x), out_specs_fn=like, vmap_method=method, mode="inline")
    message = (
        r"<lambda> was called with a batch of the shape \(4,\) in front of its arguments, as "
        rf"vmap_method='{method}' says, and returned "
        rf"float32{re.escape(returned)}: each result must have the batch in front"
    )
    for run in programs(jax.vmap(first), mesh):
        with pytest.raises(ValueError, match=message):
            run(jnp.asarray(X)).block_until_ready()


def test_no_example_of_a_call_without_results_has_any_looked_at(meeting, monkeypatch):
    monkeypatch.setattr(OutSpecs, "fit_numpy", None)
    seen = colocated_python(lambda x: rendezvous.logs["seen"].append(float(x)), out_specs_fn=nothing)
    jax.vmap(seen)(jnp.arange(3.0))
    colocated.wait()
    assert rendezvous.logs["seen"] == [0, 1, 2]


@pytest.mark.parametrize("specs", [None, (), {}], ids=str)
@pytest.mark.parametrize("returned", [None, (), {}, 1], ids=str)
def test_an_example_without_results_returns_as_its_spec_says(meeting, specs, returned):
    f = colocated_python(lambda x: returned, out_specs_fn=lambda x: specs)
    jax.vmap(f)(jnp.arange(3.0))
    if returned == specs:
        colocated.wait()
    else:
        with pytest.raises(ValueError, match=r"called for the example 0 of 3|returned"):
            colocated.wait()


def test_results_that_an_earlier_call_showed_are_known_of_a_batch(meeting, mesh):
    for method in METHODS:
        f = add(out_specs_fn=None, vmap_method=method)
        f(np.ones(6, np.float32), np.ones(6, np.float32))
        for run in programs(jax.vmap(f, (0, None)), mesh):
            np.testing.assert_array_equal(run(jnp.asarray(X), np.ones(6, np.float32)), X + 1)


@pytest.mark.parametrize("is_weak", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_results_of_a_batch_are_as_weakly_typed_as_those_of_one(meeting, method, is_weak):
    f = colocated_python(
        lambda x: x, out_specs_fn=lambda x: jax.ShapeDtypeStruct((), np.float32, weak_type=is_weak), vmap_method=method
    )
    for batched, shape in ((f, ()), (jax.vmap(f), (3,)), (jax.vmap(jax.vmap(f)), (2, 3))):
        (aval,) = jax.make_jaxpr(batched)(np.ones(shape, np.float32)).out_avals
        assert (aval.shape, aval.weak_type) == (shape, is_weak)


def test_an_empty_batch_makes_no_calls_one_by_one(meeting, mesh):
    for run in programs(jax.vmap(add()), mesh):
        assert run(np.zeros((0, 6), np.float32), np.zeros((0, 6), np.float32)).shape == (0, 6)
        assert seen() == []


@pytest.mark.parametrize("method", METHODS)
def test_keys_are_batched(meeting, mesh, method):
    @colocated_python(out_specs_fn=lambda key: jax.ShapeDtypeStruct((), np.uint32), vmap_method=method)
    def last_word(key):
        return np.asarray(jax.random.key_data(key))[..., -1]

    words = np.arange(8, dtype=np.uint32).reshape(4, 2)
    for run in programs(jax.vmap(last_word), mesh):
        np.testing.assert_array_equal(run(jax.random.wrap_key_data(words)), words[:, -1])


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("sequential", [((6,), (6,))] * 8),
        ("expand_dims", [((2, 4, 6), (1, 4, 6))]),
        ("broadcast_all", [((2, 4, 6), (2, 4, 6))]),
    ],
)
def test_each_vmap_adds_an_axis_in_front(meeting, mesh, method, expected):
    f = jax.vmap(jax.vmap(add(vmap_method=method)), (0, None))
    x = np.stack([X, X + 100])
    for run in programs(f, mesh):
        np.testing.assert_array_equal(run(jnp.asarray(x), jnp.asarray(X)), x + X)
        assert shapes(seen()) == expected


def test_equal_pure_calls_of_a_batch_are_one(meeting, mesh):
    f = jax.vmap(add(pure=True, vmap_method="expand_dims"))
    with mesh:
        jax.block_until_ready(pjit(lambda x: (f(x, x), f(x, x)))(X))
    assert len(seen()) == 1


# Together with other transformations


@pytest.fixture(params=METHODS)
def sine(request, meeting):
    """`sin` on the host with its derivative there, noting how often each was called."""

    def of(name, function):
        def fun(x):
            rendezvous.logs[name].append(np.shape(x))
            return jnp.asarray(function(np.asarray(x)))

        fun.__name__ = name
        return colocated_python(fun, out_specs_fn=like, vmap_method=request.param)

    sin, cos = of("sin", np.sin), of("cos", np.cos)
    sin.defvjp(lambda x: (sin(x), x), lambda x, ct: (cos(x) * ct,))
    return sin, 4 if request.param == "sequential" else 1


def test_grad_and_vmap_in_both_orders(sine, mesh):
    sine, calls = sine
    for transformed, is_staged in (
        (jax.vmap(jax.grad(lambda x: jnp.sum(sine(x)))), False),
        (jax.grad(lambda x: jnp.sum(jax.vmap(sine)(x))), False),
        (jax.vmap(jax.grad(jax.checkpoint(lambda x: jnp.sum(sine(x))))), True),
        (jax.grad(jax.checkpoint(lambda x: jnp.sum(jax.vmap(sine)(x)))), True),
    ):
        for run in programs(transformed, mesh)[is_staged:]:
            np.testing.assert_allclose(run(jnp.asarray(X)), np.cos(X), rtol=1e-5, atol=1e-5)
            colocated.wait()
            assert len(rendezvous.logs["sin"]) == len(rendezvous.logs["cos"]) == calls
            rendezvous.clear()


def test_programs_are_batched_and_batches_are_programs(meeting, mesh):
    f = add()
    y = np.ones(6, np.float32)
    with mesh:
        for whole in (
            jax.vmap(pjit(f), (0, None)),
            pjit(jax.vmap(f, (0, None))),
            pjit(jax.jit(jax.vmap(f, (0, None)))),
            pjit(jax.vmap(jax.jit(f), (0, None))),
            pjit(jax.vmap(pjit(f, in_axis_resources=P("x"), out_axis_resources=P("x")), (0, None))),
        ):
            np.testing.assert_array_equal(whole(X[:, :4], y[:4]), X[:, :4] + 1)
            assert shapes(seen()) == [((4,), (4,))] * 4
    with pytest.raises(ValueError, match=r"wrap the outermost function with partjit\.pjit instead of jax\.jit"):
        jax.jit(jax.vmap(f, (0, None)))(X, y)


# Specs


def struct(mesh, shape, spec):
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=jax.sharding.NamedSharding(mesh, spec))


def calls_of(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "colocated_call":
            yield eqn.params["callee"]
        for inner in eqn.params.values():
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from calls_of(getattr(inner, "jaxpr", inner))


def specs(shardings):
    return [None if sharding is None else sharding.spec for sharding in shardings]


@pytest.mark.parametrize("spmd", [None, "y"])
@pytest.mark.parametrize("method", ["expand_dims", "broadcast_all"])
def test_specs_are_those_of_one_example_and_get_an_axis_in_front(meeting, mesh, method, spmd):
    half = struct(mesh, (4,), P("x"))
    f = add(in_specs=((half, half), {}), out_specs=half, out_specs_fn=None, vmap_method=method)
    batched = jax.vmap(f, (0, None), spmd_axis_name=spmd)
    (callee,) = calls_of(jax.make_jaxpr(batched)(X[:, :4], X[0, :4]).jaxpr)
    assert specs(callee.in_shardings) == [P(spmd, "x"), P(None, "x")]
    assert specs(callee.out_shardings) == [P(spmd, "x")]
    assert callee.in_avals[1].shape == ((4, 4) if method == "broadcast_all" else (1, 4))
    assert "batch=(4,)" in str(jax.make_jaxpr(batched)(X[:, :4], X[0, :4]))
    with mesh:
        result = pjit(batched)(X[:, :4], X[0, :4])
        np.testing.assert_array_equal(result, X[:, :4] + X[0, :4])
        assert result.sharding.is_equivalent_to(callee.out_shardings[0], 2)
    wrong = jax.vmap(f, (0, None), spmd_axis_name="x")
    with pytest.raises(
        ShardingError,
        match=r"spmd_axis_name \('x',\) cannot appear in the specs of what is batched, but one of in_specs of the "
        r"colocated function add has the spec .*'x'.*, which already uses 'x'",
    ):
        jax.make_jaxpr(wrong)(X[:, :4], X[0, :4])


def test_eager_batches_respect_specs(meeting, mesh):
    half = struct(mesh, (4,), P("x"))
    f = add(in_specs=((half, half), {}), out_specs=half, out_specs_fn=None, vmap_method="expand_dims")
    batch, one = jax.sharding.NamedSharding(mesh, P(None, "x")), jax.NamedSharding(mesh, P("x"))
    x, y = jax.device_put(X[:, :4], batch), jax.device_put(X[0, :4], one)
    result = jax.vmap(f, (0, None))(x, y)
    np.testing.assert_array_equal(result, X[:, :4] + X[0, :4])
    assert result.sharding.is_equivalent_to(batch, 2)


@pytest.mark.parametrize("method", METHODS)
def test_shards_of_a_batch(meeting, mesh, method):
    half = struct(mesh, (4,), P("x"))

    @colocated_python(layout="per_shard", in_specs=((half,), {}), out_specs=half, vmap_method=method, out_specs_fn=None)
    def double(shard):
        rendezvous.logs["shards"].append(shard.data.shape)
        return 2 * shard.data

    with mesh:
        np.testing.assert_array_equal(pjit(jax.vmap(double))(X[:, :4]), 2 * X[:, :4])
        found = seen("shards")
        assert found == ([(1,)] * 32 if method == "sequential" else [(4, 1)] * 8)
        np.testing.assert_array_equal(pjit(jax.vmap(double, spmd_axis_name="y"))(X[:, :4]), 2 * X[:, :4])
        assert {*seen("shards")} == {(1,) if method == "sequential" else (2, 1)}


# Predicates


def branch(x):
    return jax.lax.cond(x > 0, lambda x: (log(x), x)[1], lambda x: -x, x)


def switch(x):
    return jax.lax.switch(x.astype(np.int32), [lambda x: x, lambda x: (log(x), x)[1], jnp.sin], x)


def loop(x):
    return jax.lax.while_loop(lambda x: x < 3, lambda x: (log(x), x + 1)[1], x)


def predicate(x):
    return jax.lax.while_loop(lambda x: (log(x), x < 3)[1], lambda x: x + 1, x)


def carried(x):
    """The predicate is batched in the second turn only: what the first one made is carried to it."""
    start = jnp.float32(0), jnp.float32(0)
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (log(c[0]), (c[1] + 1, x))[1], start)[0]


@pytest.mark.parametrize(
    ("f", "kind"),
    [(branch, "cond"), (switch, "cond"), (loop, "while_loop"), (predicate, "while_loop"), (carried, "while_loop")],
)
@pytest.mark.parametrize(
    "around",
    [
        lambda f: f,
        jax.jit,
        lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 2)[0],
        lambda f: lambda x: jax.lax.cond(True, f, f, x),
    ],
)
def test_an_effect_behind_a_batched_predicate_is_refused(meeting, f, kind, around):
    message = (
        rf"the colocated function log is called at .*test_vmap\.py:\d+ in .* in a {kind} whose predicate is "
        r"batched by jax\.vmap.*give the predicate to the function and let it decide"
    )
    with pytest.raises(ValueError, match=message):
        jax.make_jaxpr(jax.vmap(around(f)))(jnp.arange(3.0))
    jax.make_jaxpr(around(f))(jnp.float32(1))  # not batched


def test_an_effect_behind_a_predicate_of_the_whole_batch_is_fine(meeting, mesh):
    def f(x, k):
        x = jax.lax.cond(k > 0, lambda x: (log(x), x)[1], lambda x: -x, x)
        return jax.lax.while_loop(lambda c: c[0] < k, lambda c: (log(c[1]), (c[0] + 1, c[1] * 2))[1], (0, x))[1]

    batched = jax.vmap(f, (0, None))
    jax.make_jaxpr(batched)(jnp.arange(3.0), 2)
    with mesh:
        np.testing.assert_array_equal(pjit(batched)(jnp.arange(3.0), 2), 4 * np.arange(3.0))
    assert [float(x) for x in seen("log")] == [0, 1, 2, 0, 1, 2, 0, 2, 4]


def test_pure_calls_may_stand_behind_a_batched_predicate(meeting, mesh):
    double = colocated_python(lambda x: 2 * x, out_specs_fn=like, pure=True, vmap_method="expand_dims")
    f = jax.vmap(lambda x: jax.lax.cond(x > 1, double, lambda x: -x, x))
    with mesh:
        np.testing.assert_array_equal(pjit(f)(jnp.arange(3.0)), [0, -1, 4])


def test_loops_without_calls_are_batched_as_ever(meeting):
    x = np.arange(5, dtype=np.float32)
    f = jax.vmap(lambda x: jax.lax.while_loop(lambda x: x < 3, lambda x: x + 1, x))
    np.testing.assert_array_equal(jax.jit(f)(x), [3, 3, 3, 3, 4])
    g = jax.vmap(lambda x: jax.lax.cond(x > 1, jnp.sin, jnp.cos, x))
    np.testing.assert_allclose(jax.jit(g)(x), [*np.cos(x[:2]), *np.sin(x[2:])], rtol=1e-6)


# Any of it


axes = st.sampled_from([0, 1, None])
pairs = st.tuples(axes, axes).filter(lambda pair: pair != (None, None))


@sees("a batch of several", "a batch of batches", "in a program", "not in a program")
@examples(6, in_soak=100)
@hypothesis.given(
    method=st.sampled_from(METHODS),
    outer=pairs,
    inner=st.none() | pairs,
    out=st.sampled_from([0, 1]),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    in_program=st.booleans(),
)
def test_a_batch_is_what_its_examples_are(mesh, method, outer, inner, out, sizes, in_program):
    saw("a batch of several", when=sizes[0] > 1)
    saw("a batch of batches", when=inner is not None)
    saw("in a program" if in_program else "not in a program")
    rendezvous.clear()

    @colocated_python(out_specs_fn=like, vmap_method=method, arrays="numpy")
    def host(x, y):
        rendezvous.logs["host"].append(x.shape)
        return np.sin(x) + 2 * y

    def batched(f):
        return jax.vmap(f if inner is None else jax.vmap(f, inner, out), outer, out)

    arguments = []
    for k in range(2):
        shape = [3]
        for size, axis in ((sizes[1], inner and inner[k]), (sizes[0], outer[k])):
            if axis is not None:
                shape.insert(axis, size)
        arguments.append(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    expected = jax.jit(batched(lambda x, y: jnp.sin(x) + 2 * y))(*arguments)
    with mesh:
        f = batched(host)
        np.testing.assert_allclose((pjit(f) if in_program else f)(*arguments), expected, rtol=1e-6)
        colocated.wait(timeout=30)
    examples = sizes[0] * (1 if inner is None else sizes[1])
    assert len(rendezvous.logs["host"]) == (examples if method == "sequential" else 1)


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_transformations_take_numpy_arrays_and_numbers(meeting, method):
    f = colocated_python(lambda x: x * 2, out_specs_fn=lambda x: x, vmap_method=method)
    f.defjvp(lambda primals, tangents: (f(*primals), 2 * tangents[0]))
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    for run in (jax.vmap(f), lambda x: jax.vmap(pjit(lambda x: f(x)))(x), lambda x: jax.jvp(f, (x,), (x,))[1]):
        np.testing.assert_array_equal(run(x), 2 * x)


def test_a_batch_whose_sharding_contradicts_the_specs_is_named(meeting, mesh):
    """Outside of programs, where nothing is resharded."""
    one = jax.ShapeDtypeStruct((8,), np.float32, sharding=jax.sharding.NamedSharding(mesh, P("x")))
    like = {"out_specs_fn": lambda x: x, "vmap_method": "expand_dims"}
    f = colocated_python(lambda x: x, in_specs=((one,), {}), **like)
    right, wrong = (
        jax.device_put(np.ones((3, 8), np.float32), jax.sharding.NamedSharding(mesh, P(None, a))) for a in "xy"
    )
    assert jax.vmap(f)(right).sharding == right.sharding
    with pytest.raises(ValueError, match=r"in_specs do not fit the arguments: x is float32\[3,8\] with .*'y'"):
        jax.vmap(f)(wrong)
    jax.vmap(colocated_python(lambda x: x, **like))(wrong).block_until_ready()


# One by one, by the host


GIVEN = {"arrays": {}, "numpy": {"arrays": "numpy"}, "no jax": {"uses_jax": False}}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("sharded", [False, True])
def test_the_host_goes_through_the_examples_in_one_call(meeting, mesh, given, sharded):
    """Each is given as for a single call, and its result is taken before the function uses that memory again."""

    def fun(tag, x, scale):
        kind = "jax" if isinstance(x, jax.Array) else x.flags.writeable
        rendezvous.logs["add"].append((tag, kind, x.shape, float(scale)))
        own = rendezvous.logs.setdefault("own", [np.empty(6, np.float32)])[0]
        own[...] = np.asarray(x) * float(scale)
        return {"y": own, "n": np.float32(own[0])}

    spec = {"y": jax.ShapeDtypeStruct((6,), np.float32), "n": jax.ShapeDtypeStruct((), np.float32)}
    host = colocated_python(fun, out_specs=spec, **GIVEN[given])
    f = jax.vmap(lambda x, scale: host("tag", x, scale), (0, None))
    x = jax.device_put(X, jax.NamedSharding(mesh, P("x" if sharded else None)))
    for run in programs(f, mesh):
        result = run(x, np.float32(3))
        np.testing.assert_array_equal(result["y"], 3 * X)
        np.testing.assert_array_equal(result["n"], 3 * X[:, 0])
        kind = "jax" if given == "arrays" else False
        assert seen() == [("tag", kind, (6,), 3.0)] * 4
    with mesh:
        (call,) = pjit(f).plan(x, np.float32(3)).calls
    assert [aval.shape for aval in call.callee.in_avals] == [(4, 6), ()]


def test_an_example_that_fails_is_named_and_those_after_it_are_not_made(meeting, mesh):
    def fun(x):
        rendezvous.logs["add"].append(float(x[0]))
        if x[0] == X[2, 0]:
            raise ValueError("this one")
        return x

    for run in programs(jax.vmap(colocated_python(fun, out_specs_fn=like, arrays="numpy")), mesh):
        with pytest.raises(ValueError, match=r"this one\n.*It was called for the example 2 of 4, as jax\.vmap has it"):
            jax.block_until_ready(run(X))
        assert seen() == X[:3, 0].tolist()


def test_a_wrong_result_of_an_example_is_the_error_of_a_single_call(meeting, mesh):
    wrong = colocated_python(lambda x: np.zeros(3, np.float32), out_specs_fn=like)
    with pytest.raises(ValueError, match=r"result is float32\[3\], but its spec says float32\[6\]"):
        jax.block_until_ready(jax.vmap(wrong)(X))


def test_examples_in_examples_come_in_the_order_of_both(meeting, mesh):
    x = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    host = colocated_python(lambda x: rendezvous.logs["add"].append(float(x[0])), out_specs_fn=lambda x: None)
    for run in programs(jax.vmap(jax.vmap(host)), mesh):
        run(x)
        assert seen() == x[..., 0].ravel().tolist()


@pytest.mark.parametrize("given", GIVEN)
def test_examples_that_a_function_keeps_stay_as_they_are_though_the_batch_is_donated(meeting, mesh, given):
    keep = colocated_python(lambda x: rendezvous.logs["kept"].append(x), out_specs_fn=lambda x: None, **GIVEN[given])
    program = pjit(lambda x: (jax.vmap(keep)(x), x + 1)[1], donate_argnums=0)
    first = np.arange(8 * 1024, dtype=np.float32).reshape(8, 1024)
    x = jax.device_put(first, jax.NamedSharding(mesh, P("x")))
    with mesh:
        for _ in range(4):
            x = program(x)
    colocated.wait()
    np.testing.assert_array_equal(np.stack(rendezvous.logs["kept"]), np.concatenate([first + k for k in range(4)]))


@pytest.mark.parametrize("keys", [False, True], ids=["one call", "calls in a loop"])
@pytest.mark.parametrize("method", METHODS)
def test_results_without_a_sharding_have_the_batch_over_explicit_axes(method, keys):
    call = colocated_python(lambda _, x: 2 * np.asarray(x), arrays="jax", out_specs_fn=lambda _, x: like(x))
    call = call.specialize(vmap_method=method)
    given = jax.random.split(jax.random.key(0), 4) if keys else X
    program = pjit(jax.vmap(lambda k, x: call(k, x) + x), in_shardings=P("x"))
    for size in (4, 2):
        mesh = jax.make_mesh((size,), ("x",), devices=jax.devices()[:size])
        with jax.set_mesh(mesh):
            result = program(given, X)
        np.testing.assert_array_equal(result, 3 * X)
        assert result.sharding == jax.sharding.NamedSharding(mesh, P("x", None))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loop", ["scan", "while"])
def test_numbers_have_a_type_that_a_nested_jit_in_a_loop_is_batched_with_over_explicit_axes(method, loop):
    of_one = jax.ShapeDtypeStruct((), np.float32)
    call = colocated_python(lambda x: np.asarray(x).sum(-1), out_specs=of_one, vmap_method=method)

    def larger(x):
        def body(largest):
            return jnp.where(largest > 20, largest, call(x))

        if loop == "scan":
            return jax.lax.scan(lambda c, _: (body(c), None), call(x), length=2)[0]
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, body(c[1])), (0, call(x)))[1]

    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        result = pjit(jax.vmap(larger), in_shardings=P("x"))(X)
    np.testing.assert_array_equal(result, X.sum(-1))
    assert result.sharding == jax.sharding.NamedSharding(mesh, P("x"))
