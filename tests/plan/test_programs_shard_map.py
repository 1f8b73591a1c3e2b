"""Colocated calls in the bodies of `shard_map`: once for each shard, with what it has and where it lies."""

import traceback
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from jax.extend.core import check_jaxpr
from jax.sharding import NamedSharding

import partjit
from partjit import P, ShardingError, colocated, pjit
from partjit._jax.meshes import under_mesh
from partjit.colocated import colocated_python, colocated_python_class
from partjit.plan.ir.nodes import Loop
from partjit.plan.passes import cost
from partjit.testing import assert_collectives, assert_no_collectives
from tests.census import saw, sees
from tests.colocated import rendezvous
from tests.plan import random_shard_maps as rs

like = {"out_specs_fn": lambda *xs: xs[0]}
nothing = {"out_specs_fn": lambda *xs: None}
X = np.arange(16, dtype=np.float32).reshape(8, 2)
XY = P("x", "y")
PLACES = rs.PLACES

both = pytest.mark.parametrize("check_vma", [True, False])


@pytest.fixture
def over(mesh):
    """`shard_map` over the mesh, of arrays that are divided by both axes unless something else is said."""

    def over(body, in_specs=XY, out_specs=XY, check_vma=True):
        return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)

    return over


def seen():
    colocated.wait()
    return rendezvous.logs["seen"]


def noting(fun, **kwargs):
    """A colocated function that notes for which shard it is called, and with what, and returns `fun(place, *args)`.

    `fun` gets arrays of NumPy, for XLA would compile each of its operations anew for each device.
    """

    def run(*args):
        place, args = tuple(colocated.mesh_coordinates().values()), [*map(np.asarray, args)]
        rendezvous.logs["seen"].append((place, *(arg.tolist() for arg in args)))
        return fun(place, *args)

    return colocated_python(run, **kwargs)


def blocks(x, rows=4, columns=2):
    """The shards of an array that is divided by both axes, in the order of the mesh."""
    return [block for row in np.split(np.asarray(x), rows) for block in np.split(row, columns, axis=1)]


# The law


@sees("a colocated call", "two streams", "a loop", "a collective", "an axis name", "a partitioned value")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=rs.EXAMPLES, deadline=None)
@given(steps=rs.bodies(), check_vma=st.booleans(), data=st.data())
def test_a_body_means_what_it_means_on_one_device_after_the_other(mesh, over, steps, check_vma, data):
    colocated.wait()
    rendezvous.clear()
    specs = [data.draw(st.sampled_from([P("x", "y"), P(("x", "y")), P("y"), P()])) for _ in range(2)]
    arguments = [np.zeros(_whole(spec), np.float32) for spec in specs]
    for k, x in enumerate(arguments):
        x[...] = (np.arange(x.size).reshape(x.shape) + 3 * k) % 8
    values, called = rs.by_hand(steps, *map(_shards, arguments, specs))
    calls = [step for step in steps if step.op in rs.CALLS]
    event("steps with calls", len(calls))
    saw("a colocated call", when=calls)
    saw("two streams", when=len({step.stream for step in calls if step.op != "pure"}) > 1)
    saw("a loop", when=any(step.op in ("scan", "stack") for step in steps))
    saw("a collective", when=any(step.op in ("psum", "permute", "gather") for step in steps))
    saw("a partitioned value", when=any(any(spec) for spec in specs))
    used = [k for k in range(len(values)) if data.draw(st.booleans())] or [len(values) - 1]

    def body(*args):
        made = rs.traced(steps)(*args)
        return [made[k] + rs.varying_zero() for k in used]

    fun = over(body, tuple(specs), [P("x", "y")] * len(used), check_vma)
    with mesh:
        f = pjit(fun)
        plan = f.plan(*arguments)
        results = f(*arguments)
        colocated.wait()
        for fragment in plan.fragments:
            with under_mesh(mesh):
                check_jaxpr(fragment.jaxpr.jaxpr)
    for result, k in zip(results, used, strict=True):
        np.testing.assert_array_equal(np.asarray(result), np.block([values[k][i : i + 2] for i in range(0, 8, 2)]))
    assert {stream: rendezvous.logs[stream] for stream in rs.STREAMS} == called


def _whole(spec):
    """The shape of an array whose shards are values of a body."""
    parts = [
        int(np.prod([rs.SIZES[axis] for axis in ([names] if isinstance(names, str) else names)])) for names in spec
    ]
    parts += [1] * (2 - len(parts))
    return tuple(size * part for size, part in zip(rs.LOCAL, parts, strict=True))


def _shards(x, spec):
    sharding = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")), spec)
    indices = sharding.devices_indices_map(x.shape)
    return [x[indices[device]] for device in jax.devices()]


@both
def test_no_collective_and_no_fragment_is_added(mesh, over, check_vma):
    double = colocated_python(lambda a: 2 * np.asarray(a), **like)

    def body(call, a):
        k = jax.lax.psum(jax.lax.axis_index("x").astype(a.dtype), "y")  # is computed once, though of nothing
        b = call(a + jax.lax.psum(a, "x") + k)
        c = jax.lax.all_gather(b, "y", axis=1, tiled=True)
        d = call(jax.lax.ppermute(c, "x", [(k, (k + 1) % 4) for k in range(4)]))
        scalar = call(jnp.sum(d))
        return d[:, :1] + jax.lax.psum(scalar, ("x", "y")) + k * call(jax.lax.axis_index("y").astype(a.dtype))

    with mesh:
        f = pjit(over(partial(body, double), check_vma=check_vma))
        expected = jax.jit(over(partial(body, lambda a: 2 * a), check_vma=check_vma))
        np.testing.assert_allclose(f(X), expected(X))
        assert_collectives({"all-reduce": 3, "all-gather": 1, "collective-permute": 1}, expected, X)
        compiled = f.lower(X).compile()
        text = compiled.as_text()
        kinds = ["all-reduce", "all-gather", "collective-permute", "all-to-all", "reduce-scatter"]
        assert [text.count(f" {kind}(") for kind in kinds] == [3, 1, 1, 0, 0]
        assert len(f.plan(X).fragments) == 4  # before, between and after three calls in a row
        assert not f.plan(X).transfers


@both
def test_values_come_and_go_as_they_lie(mesh, over, check_vma):
    """A call whose arguments are those of the shard_map, and whose results are its results, is all there is."""
    call = colocated_python(lambda a, b: (np.add(a, b), b), out_specs_fn=lambda a, b: (a, b))
    same = colocated_python(lambda a, b: (a, b), out_specs_fn=lambda a, b: (a, b))
    specs = P("x", "y"), P(None, ("y", "x"))

    def body(a, b):
        jax.lax.psum(a, "x")  # which nobody needs
        return same(*call(a, b))

    with mesh:
        f = pjit(over(body, specs, specs, check_vma))
        a, b = np.ones((8, 2), np.float32), np.arange(16, dtype=np.float32).reshape(2, 8)
        assert f.plan(a, b).fragments == ()
        first, second = f(a, b)
    assert (first.sharding.spec, second.sharding.spec) == specs
    np.testing.assert_array_equal(second, b)
    for x, y in PLACES:  # the shards of b are columns
        np.testing.assert_array_equal(first[2 * x : 2 * x + 2, y], 1 + b[:, 4 * y + x])


def test_what_only_claims_to_be_replicated_is_not_taken_for_it(mesh, over):
    """Without `check_vma` a result may differ between devices of which its spec says that they have the same."""
    call = colocated_python(lambda a: a, **like)

    def body(a):
        b = a + jax.lax.axis_index(("x", "y")).astype(a.dtype)
        return b, call(b)

    with mesh:
        plan = pjit(over(body, out_specs=(P(), P("x", "y")), check_vma=False)).plan(X)
    (look,) = plan.calls
    assert look.callee.in_shardings[0].spec[0] == ("x", "y")


def test_what_does_not_depend_on_a_call_is_dispatched_while_it_runs(mesh, over, monkeypatch):
    monkeypatch.setattr(cost, "WORTH_A_DISPATCH", 1)
    call = colocated_python(lambda a: a, **like)

    def body(a):
        b = call(a + 1)
        return b + jnp.sin(jax.lax.psum(a, "x"))

    with mesh:
        plan = pjit(over(body)).plan(X)
    assert [type(node).__name__ for node in plan.nodes] == ["Fragment", "ColocatedCall", "Fragment", "Fragment"]


def test_collectives_do_not_wait_for_each_other(mesh, over):
    call, other = colocated_python(lambda a: a, **like), colocated_python(lambda a: a, stream="other", **like)

    def body(a):
        b = jax.lax.psum(call(a), "x")
        return b + other(jax.lax.psum(a, "x"))  # whose argument is there before that of the other psum

    with mesh:
        nodes = pjit(over(body)).plan(X).nodes
    assert [type(node).__name__ for node in nodes] == ["Fragment", "ColocatedCall", "ColocatedCall", "Fragment"]


# What a call gets


@both
def test_each_shard_comes_as_an_array_on_its_device(mesh, over, meeting, check_vma):
    def look(a):
        place = tuple(colocated.mesh_coordinates().values())
        (device,) = a.devices()
        rendezvous.logs["seen"].append((place, a.shape, device.id, type(a).__name__))
        return a

    with mesh:
        pjit(over(colocated_python(look, **like), check_vma=check_vma))(X)
    assert seen() == [(place, (2, 1), k, "ArrayImpl") for k, place in enumerate(PLACES)]


@pytest.mark.parametrize("options", [{"arrays": "numpy"}, {"uses_jax": False}, {"isolate": "process"}], ids=str)
@pytest.mark.parametrize("mode", ["auto", "inline", "stream"])
def test_functions_of_numpy_get_shards_of_what_nothing_has_put_on_devices(mesh, over, options, mode):
    double = colocated_python(lambda a, k: a * k, mode=mode, **options, **like)
    with mesh:
        y = pjit(over(double, in_specs=(XY, P())))(X, np.float32(2))
    np.testing.assert_array_equal(y, 2 * X)


@pytest.mark.parametrize("options", [{"arrays": "numpy"}, {"uses_jax": False}], ids=str)
@pytest.mark.parametrize("mode", ["auto", "stream"])
def test_functions_of_numpy_get_shards_of_what_an_executable_hands_over(mesh, over, meeting, options, mode):
    note = noting(lambda place, a, k: None, mode=mode, **options, **nothing)

    def body(a):
        return jax.lax.scan(lambda c, k: (note(c, k), (c + 1, None))[1], a, jnp.arange(2.0))[0]

    with mesh:
        y = pjit(over(body))(X)
    np.testing.assert_array_equal(y, X + 2)
    assert seen() == [
        (place, (b + k).tolist(), k) for k in (0.0, 1.0) for place, b in zip(PLACES, blocks(X), strict=True)
    ]


@both
def test_a_replicated_value_is_called_with_on_each_device(mesh, over, meeting, check_vma):
    call = noting(lambda place, s: s + place[0], **like)
    with mesh:
        f = pjit(over(lambda a: a * 0 + call(jax.lax.psum(jnp.sum(a), ("x", "y"))), check_vma=check_vma))
        y = f(X)
    assert seen() == [(place, 120.0) for place in PLACES]
    np.testing.assert_array_equal(y, 120 + np.repeat(np.arange(4), 2)[:, None] * np.ones(2))


def test_positions_literals_and_constants_may_be_arguments(mesh, over, meeting):
    constant = np.float32([7, 8])
    call = noting(lambda place, *args: jnp.float32(0), out_specs=jax.ShapeDtypeStruct((), np.float32))

    def body(a):
        return a + call(jax.lax.axis_index("y"), jnp.float32(3), jnp.asarray(constant), a[:, 0])

    with mesh:
        np.testing.assert_array_equal(pjit(over(body))(X), X)
    assert seen() == [((x, y), y, 3.0, [7.0, 8.0], X[2 * x : 2 * x + 2, y].tolist()) for x, y in PLACES]


@both
def test_keys_and_empty_arrays_pass_the_cut(mesh, over, check_vma):
    call = colocated_python(
        lambda key, e: (key, e, jax.random.uniform(key, ())),
        out_specs_fn=lambda key, e: (key, e, jax.ShapeDtypeStruct((), np.float32)),
    )

    def body(call, a):
        key = jax.random.fold_in(jax.random.key(3), jax.lax.axis_index("x"))
        key, empty, u = call(key, a[:0])
        return jnp.concatenate([a + jax.random.uniform(key, a.shape) + u, empty])

    with mesh:
        y = pjit(over(partial(body, call), check_vma=check_vma))(X)
        plain = partial(body, lambda key, e: (key, e, jax.random.uniform(key, ())))
        np.testing.assert_allclose(y, jax.jit(over(plain, check_vma=check_vma))(X), rtol=1e-6)


def test_calls_without_arguments_are_made_for_each_shard(mesh, over, meeting):
    scalar = jax.ShapeDtypeStruct((), np.float32)
    call = noting(lambda place: jnp.float32(10 * place[0] + place[1]), out_specs=scalar)
    alone = noting(lambda place: None, **nothing)

    def body(a):
        alone()
        return a * 0 + call()

    with mesh:
        f = pjit(over(body))
        for _ in range(2):
            np.testing.assert_array_equal(f(X)[::2], [[10 * x, 10 * x + 1] for x in range(4)])
    assert seen() == [(place,) for place in PLACES] * 4


def test_what_was_seen_of_one_shard_tells_what_a_call_returns(mesh, over):
    call = colocated_python(lambda a: {"sum": a.sum(), "rows": a[:1]})
    with mesh, pytest.raises(ValueError, match=r"it is not known what it returns for \(a: float32\[2,1\]"):
        pjit(over(lambda a: call(a)["rows"]))(X)
    call(jnp.ones((2, 1)))
    with mesh:
        y = pjit(over(lambda a: call(a)["rows"] + call(a)["sum"]))(X)
    np.testing.assert_array_equal(y.ravel(), [b[0, 0] + b.sum() for b in blocks(X)])


def test_methods_of_an_object_share_its_state_over_shards_and_calls(mesh, over, meeting):
    @colocated_python_class
    class Counter:
        def __init__(self, start):
            self.count = start

        def next(self, a):
            self.count += 1
            return np.full(a.shape, self.count, np.float32)

    Counter.next = Counter.next.specialize(out_specs_fn=lambda a: a)
    counter = Counter(100)
    with mesh:
        f = pjit(over(lambda a: counter.next(a) + 1000 * counter.next(a)))
        for k in range(2):
            first = np.arange(101, 109).reshape(4, 2) + 16 * k
            np.testing.assert_array_equal(f(X)[::2], first + 1000 * (first + 8))


# Which calls are made


def test_each_call_is_made_once_for_each_shard_whatever_is_nested_in_what(mesh, over, meeting):
    call = noting(lambda place, a: a + 1, **like)

    @jax.custom_vjp
    def custom(a):
        return call(a)

    custom.defvjp(lambda a: (call(a), None), lambda _, g: (g,))

    def body(a):
        nested = pjit(lambda a: jax.checkpoint(lambda a: custom(jax.jit(call)(a)))(a))
        return nested(a) + jax.lax.psum(call(a), "x")

    with mesh:
        f = pjit(lambda x: jax.jit(lambda x: pjit(over(body))(x) * 2)(x))
        y = f(X)
    columns = [X[k::2].sum(0) + 4 for k in range(2)]
    np.testing.assert_array_equal(y, 2 * (X + 2 + np.stack(columns * 4)))
    assert len(seen()) == 3 * 8


def test_results_that_nobody_needs_keep_effectful_calls_only(mesh, over, meeting):
    call, pure = noting(lambda place, a: a, **like), noting(lambda place, a: a, pure=True, **like)

    def body(a):
        b = a * 4
        jax.lax.psum(pure(a * 5), "x")
        return a + 1, pure(a * 2), call(a * 3), pure(b) + pure(b)

    with mesh:
        y = pjit(lambda x: over(body, out_specs=P("x", "y"))(x)[3])(X)
    np.testing.assert_array_equal(y, 8 * X)
    assert sorted(map(str, seen())) == sorted(
        str((place, (k * block).tolist())) for k in (3, 4) for place, block in zip(PLACES, blocks(X), strict=True)
    )


def test_nobody_waits_for_calls_whose_results_nobody_needs(mesh, over, meeting):
    def wait(a):
        rendezvous.hear("go on")
        rendezvous.logs["seen"].append(tuple(colocated.mesh_coordinates().values()))

    note = colocated_python(wait, stream="log", **nothing)

    def body(a):
        note(a)
        return jax.lax.psum(a, "x")

    with mesh:
        y = pjit(over(body, out_specs=P(None, "y")))(X)
        assert float(y[0, 0]) == X[::2, 0].sum()
        assert rendezvous.logs["seen"] == []
    rendezvous.say("go on")
    assert seen() == PLACES


def test_calls_of_one_stream_are_in_program_order_on_each_device(mesh, over, meeting):
    def named(name, stream):
        def run(a):
            rendezvous.logs[stream].append((name, tuple(colocated.mesh_coordinates().values())))
            return a

        return colocated_python(run, stream=stream, **like)

    first, second, other = named("first", "one"), named("second", "one"), named("other", "two")

    def body(a):
        b = first(jax.lax.psum(second(a), "x"))
        other(a)
        jax.lax.scan(lambda c, _: (c, jax.jit(second)(c)), a, None, length=2)
        return b

    with mesh:
        pjit(over(body))(X)
    colocated.wait()
    expected = [(name, place) for name in ("second", "first", "second", "second") for place in PLACES]
    assert rendezvous.logs["one"] == expected
    assert rendezvous.logs["two"] == [("other", place) for place in PLACES]


# Loops


@both
def test_a_scan_calls_for_each_shard_in_each_turn(mesh, over, meeting, check_vma):
    call = noting(lambda place, c, k: c + k, **like)

    def body(a):
        def turn(c, k):
            c = call(c, k)
            return c, (jnp.sum(c), c)

        c, (sums, rows) = jax.lax.scan(turn, a, jnp.arange(3.0), reverse=True)
        return c + jnp.sum(sums), rows[0]

    with mesh:
        y, first = pjit(over(body, out_specs=P("x", "y"), check_vma=check_vma))(X)
    np.testing.assert_array_equal(first, X + 3)
    sums = np.kron(np.array([3 * b.sum() + 2 * (2 + 3 + 3) for b in blocks(X)]).reshape(4, 2), np.ones((2, 1)))
    np.testing.assert_array_equal(y, X + 3 + sums)
    assert [place for place, *_ in seen()] == PLACES * 3
    assert [k for *_, k in seen()] == [k for k in (2.0, 1.0, 0.0) for _ in PLACES]


def test_loops_carry_arrays_as_they_come_and_go(mesh, over):
    call = colocated_python(lambda a: np.asarray(a) + 1, **like)
    with mesh:
        f = pjit(
            over(
                lambda a, xs: jax.lax.scan(lambda c, x: (call(c) + x, c), a, xs),
                (P("x", "y"), P(None, "x", "y")),
                (P("x", "y"), P(None, "x", "y")),
            )
        )
        xs = np.stack([X, 2 * X])
        plan = f.plan(X, xs)
        c, rows = f(X, xs)
        assert_no_collectives(f, X, xs)
    np.testing.assert_array_equal(c, 4 * X + 2)
    np.testing.assert_array_equal(rows, np.stack([X, 2 * X + 1]))
    assert (c.sharding.spec, rows.sharding.spec) == (P("x", "y"), P(None, "x", "y"))
    before, loop = plan.nodes
    assert isinstance(loop, Loop)
    assert "shard_map" not in str(before.jaxpr)


@pytest.mark.parametrize(
    ("loop", "kind", "remedy"),
    [
        (lambda f, a: jax.lax.while_loop(lambda c: jnp.all(c < 9), f, a), "while_loop", "in a jax.lax.scan"),
        (lambda f, a: jax.lax.fori_loop(0, a[0, 0].astype(int), lambda _, c: f(c), a), "while_loop", "fori_loop"),
        (
            lambda f, a: jax.lax.cond(a[0, 0] > 1, f, lambda c: c, a),
            "cond or switch",
            "Give the predicate to the function",
        ),
        (
            lambda f, a: jax.lax.scan(
                lambda c, _: (jax.lax.cond(c[0, 0] > 1, f, lambda c: c, c), None), a, None, length=2
            )[0],
            "cond or switch",
            "let it decide",
        ),
    ],
    ids=["while", "fori", "cond", "nested"],
)
def test_where_each_device_decides_for_itself_a_call_is_refused(mesh, over, loop, kind, remedy):
    def decide(a):
        return a

    call = colocated_python(decide, **like)
    with (
        mesh,
        pytest.raises(ValueError, match=f"decide is called inside of a {kind} at .*{__file__.split('/')[-1]}:") as e,
    ):
        pjit(over(lambda a: loop(call, a)))(X)
    assert "in a shard_map, where each device decides for itself" in str(e.value)
    assert remedy in str(e.value)


def test_a_shard_map_with_calls_stands_in_loops_and_branches(mesh, over, meeting):
    call = noting(lambda place, a: a + 1, **like)

    def fun(x):
        x = jax.lax.fori_loop(0, 2, lambda _, x: over(lambda a: call(a * 2))(x), x)
        x = jax.lax.while_loop(lambda x: x[0, 0] < 9, over(call), x)
        return jax.lax.cond(x[0, 0] > 8, over(lambda a: call(a) * 0), lambda x: x, x)

    with mesh:
        np.testing.assert_array_equal(pjit(fun)(X), 0 * X)
    assert len(seen()) == 8 * (2 + 6 + 1)


# Transformations


@both
@pytest.mark.parametrize("outside", [True, False], ids=["grad of pjit", "pjit of grad"])
def test_derivatives_pass_by_calls(mesh, over, meeting, check_vma, outside):
    look = noting(lambda place, a: None, **nothing)
    weight = noting(lambda place, a: a + 1, **like)

    def body(a):
        stopped = jax.lax.stop_gradient(a)
        look(stopped)
        return jax.lax.psum(jnp.sum(jnp.sin(a) * weight(stopped)), ("x", "y"))

    loss = over(body, out_specs=P(), check_vma=check_vma)
    with mesh:
        g = jax.grad(lambda x: pjit(loss)(x))(X) if outside else pjit(jax.grad(loss))(X)
    np.testing.assert_allclose(g, np.cos(X) * (X + 1), rtol=1e-5, atol=1e-6)
    assert len(seen()) == 16


def test_a_derivative_with_respect_to_an_argument_of_a_call_needs_a_rule(mesh, over):
    call = colocated_python(lambda a: a, **like)
    with mesh, pytest.raises(ValueError, match="has no derivative, and is differentiated with respect to a"):
        pjit(jax.grad(lambda x: jnp.sum(over(call)(x))))(X)


@both
def test_under_vmap_each_shard_of_each_example_is_called_for(mesh, over, meeting, check_vma):
    call = noting(lambda place, a: a + 1, **like)
    batch = np.stack([X, 10 * X])
    with mesh:
        y = pjit(jax.vmap(over(lambda a: call(a) * 2, check_vma=check_vma)))(batch)
    np.testing.assert_array_equal(y, 2 * batch + 2)
    assert [place for place, _ in seen()] == [place for place in PLACES for _ in batch]


def test_vmap_with_one_call_for_the_batch(mesh, over, meeting):
    call = noting(lambda place, a: a + 1, pure=True, vmap_method="expand_dims", **like)
    batch = np.stack([X, 10 * X])
    with mesh:
        np.testing.assert_array_equal(pjit(jax.vmap(over(call)))(batch), batch + 1)
    assert [(place, np.shape(a)) for place, a in seen()] == [(place, (2, 2, 1)) for place in PLACES]


def test_the_type_of_a_result_varies_over_the_mesh(mesh, over):
    call = colocated_python(lambda a: a, **like)
    for replicated in (lambda a: call(a), lambda a: call(jax.lax.psum(a, ("x", "y"))) + 1):
        with (
            mesh,
            pytest.raises(ValueError, match="out_specs which require replication which can't be statically inferred"),
        ):
            pjit(over(replicated, out_specs=P()))(X)


# Where it runs


@both
def test_operation_by_operation_calls_are_made_as_well(mesh, over, meeting, check_vma):
    call = noting(lambda place, a: a + float(place[0]), **like)
    zero = noting(lambda place: jnp.float32(place[1]), out_specs=jax.ShapeDtypeStruct((), np.float32))
    fun = over(lambda a: call(jax.lax.psum(a, "y")) + zero(), check_vma=check_vma)
    expected = X.sum(1, keepdims=True) + np.repeat(np.arange(4), 2)[:, None] + np.arange(2)
    np.testing.assert_array_equal(fun(X), expected)
    with mesh, jax.disable_jit():
        np.testing.assert_array_equal(pjit(fun)(X), expected)
    with mesh:
        np.testing.assert_array_equal(pjit(fun)(X), expected)
    assert len(seen()) == 3 * 16
    assert call.cache_info().specializations == zero.cache_info().specializations == 1


def test_under_jit_it_says_to_use_pjit(mesh, over):
    call = colocated_python(lambda a: a, **like)
    with mesh, pytest.raises(ValueError, match=r"wrap the outermost function with partjit\.pjit instead of jax\.jit"):
        jax.jit(over(call))(X)


def test_the_mesh_may_be_that_of_the_shard_map_or_the_ambient_one(mesh, over, meeting):
    call = noting(lambda place, a: a + 1, **like)
    np.testing.assert_array_equal(pjit(over(call))(X), X + 1)
    for other in (jax.sharding.Mesh(mesh.devices, mesh.axis_names), jax.make_mesh((4, 2), ("x", "y"))):
        ambient_one = jax.shard_map(call, in_specs=XY, out_specs=XY)
        with jax.set_mesh(other):
            for function, x in ((pjit(ambient_one), jax.device_put(X, XY)), (pjit(ambient_one, in_shardings=XY), X)):
                y = function(x)
                np.testing.assert_array_equal(y, X + 1)
                assert y.sharding == NamedSharding(other, XY)
    assert len(seen()) == 5 * 8


def test_a_shard_map_over_ambient_explicit_axes_is_refused_where_jit_refuses_it(mesh):
    auto, explicit = jax.sharding.Mesh(mesh.devices, mesh.axis_names), jax.make_mesh((4, 2), ("x", "y"))

    def refusals(wrap, body):
        mapped, used = (jax.shard_map(body, in_specs=XY, out_specs=XY) for _ in range(2))
        with jax.set_mesh(auto):
            np.testing.assert_array_equal(wrap(used)(X), X + 1)  # jax lets it keep the mesh of its first use
        with jax.set_mesh(explicit):
            for function in (mapped, used):
                with pytest.raises(ValueError) as caught:  # noqa: PT011
                    wrap(function)(X)
                yield str(caught.value)

    types, meshes = refusals(pjit, colocated_python(lambda a: a + 1, **like))
    assert "does not match the specs of the input" in types
    assert "should match the mesh passed to shard_map" in meshes
    assert (types, meshes) == tuple(refusals(jax.jit, lambda a: a + 1))


def test_other_devices_are_refused(mesh):
    few = partjit.Mesh(np.array(jax.devices()[:2]), "d")
    call = colocated_python(lambda a: a, **like)
    x = jax.device_put(X, NamedSharding(mesh, P("x", "y")))
    with pytest.raises(
        ShardingError, match=r"a shard_map.* over the devices \[0, 1\], but the program runs on the devices"
    ):
        pjit(jax.shard_map(call, mesh=few, in_specs=P("d"), out_specs=P("d")))(x)


def test_a_shard_map_over_some_axes_is_refused(mesh):
    call = colocated_python(lambda a: a, **like)
    some = jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    with (
        mesh,
        pytest.raises(ValueError, match=r"calls <lambda> and leaves the axes 'y' of its mesh to the partitioner"),
    ):
        pjit(lambda x: some(x))(X)


def test_what_makes_no_sense_for_each_shard_is_refused(mesh, over):
    sharded = jax.ShapeDtypeStruct((2, 1), np.float32, sharding=NamedSharding(mesh, P("x")))
    scalar = jax.ShapeDtypeStruct((), np.float32)

    def fun(*args):
        return args[0] if args else jnp.float32(0)

    for options, args, message in (
        (
            {"out_specs": scalar, "run_ahead": 2},
            0,
            r"run_ahead=2 lets calls of fun .* in a shard_map they are made for each",
        ),
        (
            {"layout": "per_shard", **like},
            1,
            r"layout='per_shard' calls fun .* leave it out\. .*mesh_coordinates\(\) says",
        ),
        (
            {"out_specs": sharded},
            1,
            r"out_specs of the colocated function fun name the sharding P\('x',?\), but in a shard_map",
        ),
        ({"in_specs": ((sharded,), {}), **like}, 1, r"in_specs of the colocated function fun .* without shardings"),
    ):
        call = colocated_python(fun, **options)
        with mesh, pytest.raises(ValueError, match=message):
            pjit(over(lambda a, call=call, args=args: a + call(*[a][:args])))(X)


# Coordinates


def test_only_for_a_shard_there_are_coordinates(mesh, meeting):
    with pytest.raises(
        RuntimeError, match=r"no colocated function runs for one shard of a mesh: .* layout='per_shard'"
    ):
        colocated.mesh_coordinates()
    call = colocated_python(lambda x: x + colocated.mesh_coordinates()["x"], mode="inline", **like)
    with mesh, pytest.raises(RuntimeError, match="where no colocated function runs for one shard"):
        pjit(lambda x: call(x) + 1)(X)


@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_shards_have_coordinates_in_every_mode_and_in_what_they_call(mesh, meeting, mode):
    def inner(x):
        rendezvous.logs["seen"].append(colocated.mesh_coordinates())
        return x

    asynchronous = colocated_python(inner, mode="stream", **like)

    def outer(shard):
        asynchronous(shard.data)

    x = jax.device_put(X.reshape(4, 4), NamedSharding(mesh, P("y", "x")))
    colocated_python(outer, layout="per_shard", mode=mode, **nothing)(x)
    colocated.wait()
    assert sorted(seen(), key=str) == [{"x": i, "y": j} for i, j in PLACES]
    with pytest.raises(RuntimeError):
        colocated.mesh_coordinates()


# Failures


def test_a_failure_says_for_which_shard(mesh, over, meeting):
    def fail(a):
        if colocated.mesh_coordinates() == {"x": 1, "y": 0}:
            raise FileNotFoundError("shard.npy")
        rendezvous.logs["seen"].append(tuple(colocated.mesh_coordinates().values()))
        return a

    with mesh, pytest.raises(FileNotFoundError, match=r"shard\.npy") as e:
        pjit(over(lambda a: colocated_python(fail, **like)(a) + 1))(X)
    text = "".join(traceback.format_exception(e.value))
    assert "It was called for the shard at {'x': 1, 'y': 0} of the mesh" in text
    assert "This happened in the colocated call of 'fail' made at" in text
    assert seen() == PLACES[:2]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda a: a[0], r"returned float32\[1\] as result 0, but its output specs, which are those of one shard, say"),
        (
            lambda a: (a, a),
            r"those of one shard, do not say: result is a tuple of 2, but its spec says an array \(float32\[2,1\]\)",
        ),
        (lambda a: a.astype(int), r"returned int32\[2,1\] as result 0"),
    ],
    ids=["shape", "structure", "dtype"],
)
def test_results_that_are_not_as_said_are_refused(mesh, over, returned, message):
    with mesh, pytest.raises(ValueError, match=message):
        pjit(over(lambda a: colocated_python(returned, **like)(a) + 1))(X)


def test_results_may_be_given_away_though_they_are_the_arguments(mesh, over):
    same = colocated_python(lambda a: (a, a), out_specs_fn=lambda a: (a, a))
    x = jax.device_put(X, NamedSharding(mesh, P("x", "y")))
    with mesh:
        first, second = pjit(over(same, out_specs=P("x", "y")))(x)
        for given in (first, second):
            jax.jit(lambda x: x + 1, donate_argnums=0)(given)
    np.testing.assert_array_equal(x, X)


def test_results_of_per_shard_calls_may_be_given_away_though_they_are_the_arguments(mesh):
    x = jax.device_put(X, NamedSharding(mesh, XY))
    stated = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=x.sharding)
    same = colocated_python(lambda shard: shard.data, layout="per_shard", out_specs=stated, mode="inline")
    with mesh:
        for given in (same(x), pjit(lambda x: same(x), in_axis_resources=XY, out_axis_resources=XY)(x)):
            jax.jit(lambda x: x + 1, donate_argnums=0)(given)
    np.testing.assert_array_equal(x, X)


# Accelerators


@pytest.mark.parametrize("shared", [False, True], ids=["a CPU device each", "one for all"])
def test_on_accelerators_the_hosts_have_the_shards(accelerators, monkeypatch, meeting, shared):
    from partjit.colocated import devices

    if shared:
        fake = devices.colocated_cpu_devices

        def one(of):
            if isinstance(of, jax.sharding.Mesh):
                return jax.sharding.Mesh(np.array(one([*of.devices.flat])).reshape(of.devices.shape), of.axis_names)
            return [fake(of)[0]] * len(of)

        monkeypatch.setattr(devices, "colocated_cpu_devices", one)
        devices.colocated_sharding.cache_clear()

    def look(a, s):
        where = tuple(colocated.mesh_coordinates().values())
        rendezvous.logs["seen"].append((where, a.tolist(), float(s), [d.id for d in a.devices()]))
        return np.asarray(a) + where[0], np.asarray(s) + 1

    mesh = partjit.Mesh(np.array(accelerators).reshape(2, 2), ("x", "y"))
    call = colocated_python(look, out_specs_fn=lambda a, s: (a, s))

    def body(a):
        b, s = call(a * 2, jnp.sum(a))
        return b + s, jax.lax.psum(s, "x")[None]

    with mesh:
        f = pjit(jax.shard_map(body, mesh=mesh, in_specs=P("x", "y"), out_specs=(P("x", "y"), P("y"))))
        y, s = f(np.arange(4, dtype=np.float32).reshape(2, 2))
        assert {d.id for d in y.devices()} == {4, 5, 6, 7}
    np.testing.assert_array_equal(y, [[1, 4], [8, 11]])
    np.testing.assert_array_equal(s, [4, 6])
    hosts = [0] * 4 if shared else range(4)
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert seen() == [(p, [[2.0 * k]], float(k), [h]) for k, (p, h) in enumerate(zip(places, hosts, strict=True))]
