"""A program inside everything else of jax: other programs, control flow, shard_map, refs, checkify, debugging."""

import collections
import functools
import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, jet
from jax.sharding import NamedSharding

from partjit import Mesh, P, colocated, pjit, set_mesh
from partjit.colocated import colocated_python
from partjit.primitive import pjit_p
from tests.colocated import rendezvous
from tests.effort import sample

X = np.arange(32.0, dtype=np.float32).reshape(8, 4) / 32


def laid_out(array, mesh, spec):
    assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim), array.sharding


def equations(jaxpr):
    return [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive is pjit_p]


@pytest.fixture
def sine():
    return pjit(lambda x: jnp.sin(x), in_axis_resources=P("x"), out_axis_resources=P("x"))


# Programs in programs


def test_under_jit_the_specs_hold_and_all_devices_take_part(mesh):
    function = pjit(lambda x: x * 2, in_axis_resources=P("x"), out_axis_resources=P("y", "x"))
    with mesh:
        out = jax.jit(function)(X)
        laid_out(out, mesh, P("y", "x"))
        np.testing.assert_array_equal(out, X * 2)
        assert "sdy.sharding_constraint" in jax.jit(function).lower(X).as_text()


def test_nested_with_other_specs(mesh):
    inner = pjit(lambda x: x + 1, in_axis_resources=P("y"), out_axis_resources=P(None, "x"))
    outer = pjit(lambda x: inner(inner(x)) * 2, in_axis_resources=P("x"), out_axis_resources=P("x", "y"))
    with mesh:
        out = outer(X)
        text = outer.lower(X).as_text()
    np.testing.assert_array_equal(out, (X + 2) * 2)
    laid_out(out, mesh, P("x", "y"))
    assert text.count("func.func private @") == 1  # equal programs share one function


def test_unused_specs_of_a_nested_program_are_no_devices_lost(mesh):
    # The only argument with a spec is not read, so it is pruned; the program runs on the mesh all the same.
    function = pjit(lambda a, b: b + 1, in_axis_resources=(P("x"), None))
    with mesh:
        assert jax.jit(function)(X, X).sharding.device_set == set(mesh.devices.flat)
        assert function(X, X).sharding.device_set == set(mesh.devices.flat)


def test_jax_jit_inside(mesh):
    @jax.jit
    def inner(x):
        return jnp.cos(x)

    with mesh:
        out = pjit(lambda x: inner(x) + 1, in_axis_resources=P("x"), out_axis_resources=P("y"))(X)
    np.testing.assert_allclose(out, np.cos(X) + 1, rtol=1e-6)


# Control flow


def test_scan_while_cond_fori(mesh, sine):
    def scanned(x):
        return jax.lax.scan(lambda c, _: (sine(c), c.sum()), x, None, length=3)

    def looped(x):
        return jax.lax.while_loop(lambda c: sine(c).sum() > 2.0, lambda c: sine(c) * 0.5, x)

    def chosen(x):
        return jax.lax.cond(x.sum() > 0, sine, lambda v: v, x)

    def counted(x):
        return jax.lax.fori_loop(0, 2, lambda i, c: sine(c), x)

    def expected_loop(x):
        while np.sin(x).sum() > 2.0:
            x = np.sin(x) * 0.5
        return x

    with mesh:
        for wrap in (lambda f: f, jax.jit, lambda f: pjit(f, out_axis_resources=None)):
            thrice, loop, one, two = wrap(lambda x: (scanned(x)[0], looped(x), chosen(x), counted(x)))(X)
            np.testing.assert_allclose(thrice, np.sin(np.sin(np.sin(X))), rtol=1e-5)
            np.testing.assert_allclose(loop, expected_loop(X), rtol=1e-5)
            np.testing.assert_allclose(one, np.sin(X), rtol=1e-5)
            np.testing.assert_allclose(two, np.sin(np.sin(X)), rtol=1e-5)
        grad = jax.grad(lambda x: scanned(x)[0].sum())(X)
    np.testing.assert_allclose(grad, np.cos(X) * np.cos(np.sin(X)) * np.cos(np.sin(np.sin(X))), rtol=1e-4)


def test_control_flow_inside(mesh):
    def fun(x):
        y, _ = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)
        return jax.lax.cond(y.sum() > 0, lambda v: v * 2, lambda v: v, y)

    function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        np.testing.assert_allclose(function(X), np.sin(np.sin(X)) * 2, rtol=1e-5)
        np.testing.assert_allclose(jax.vmap(function)(np.stack([X, X]))[1], np.sin(np.sin(X)) * 2, rtol=1e-5)


# shard_map


def test_inside_a_shard_map_over_the_whole_mesh(mesh):
    # Each device has a block of its own: there is nothing left to partition.
    function = pjit(lambda x: x * 2)

    def body(x):
        assert x.shape == (2, 2)
        return function(x) + jax.lax.axis_index("x").astype(x.dtype)

    with mesh:
        mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y")))
        out = mapped(X)
    np.testing.assert_allclose(out, X * 2 + np.repeat(np.arange(4), 2)[:, None])


def test_inside_a_shard_map_over_some_axes(mesh):
    function = pjit(lambda x: x * 2, in_axis_resources=P(None, "y"), out_axis_resources=P(None, "y"))
    with mesh:
        mapped = jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
        out = jax.jit(mapped)(X)
    np.testing.assert_array_equal(out, X * 2)
    laid_out(out, mesh, P("x", "y"))


def test_a_manual_axis_cannot_be_in_a_spec(mesh):
    function = pjit(lambda x: x, in_axis_resources=P("x"))
    with mesh, pytest.raises(ValueError, match="resource axis x is manual here"):
        jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(X)


def test_shard_map_inside(mesh):
    def fun(x):
        total = jax.shard_map(lambda b: jax.lax.psum(b, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
        return total(x)

    with mesh:
        function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P())
        np.testing.assert_allclose(function(X), X.reshape(4, 2, 4).sum(0), rtol=1e-6)
        grad = jax.grad(lambda x: function(x).sum())(X)
    np.testing.assert_allclose(grad, np.ones_like(X))


# Dead code


def test_what_nobody_reads_leaves_the_program(mesh):
    function = pjit(
        lambda a, b, c: (a * 2, b.sum(), c),
        in_axis_resources=(P("x"), P("y"), P()),
        out_axis_resources=(P("x"), None, P("y")),
    )
    with mesh:
        jaxpr = jax.make_jaxpr(jax.jit(lambda a, b, c: function(a, b, c)[2]))(X, X, X)
        inner = jaxpr.jaxpr.eqns[0].params["jaxpr"]
        live, used = jax.interpreters.partial_eval.dce_jaxpr(inner.jaxpr, [True])[:2]
    (eqn,) = [eqn for eqn in live.eqns if eqn.primitive is pjit_p]
    assert list(used) == [False, False, True]
    assert [s.partitions for s in eqn.params["in_specs"]] == [()]
    assert [s.partitions for s in eqn.params["out_specs"]] == [(("y",),)]
    assert len(eqn.params["donated_invars"]) == len(eqn.params["jaxpr"].in_avals) == 1


def test_dead_equations_leave_a_program_of_which_everything_is_read(mesh):
    def fun(a):
        jnp.sin(a)
        return a * 2

    def primitives(jaxpr):
        (eqn,) = jaxpr.eqns
        return [inner.primitive.name for inner in eqn.params["jaxpr"].eqns]

    with mesh:
        jaxpr = jax.make_jaxpr(pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x")))(X)
    assert primitives(jaxpr) == ["sin", "mul"]
    live, used = jax.interpreters.partial_eval.dce_jaxpr(jaxpr.jaxpr, [True])[:2]
    assert list(used) == [True]
    assert primitives(live) == ["mul"]
    again, _ = jax.interpreters.partial_eval.dce_jaxpr(live, [True])[:2]
    assert again.eqns[0].params["jaxpr"] is live.eqns[0].params["jaxpr"]  # and what was compiled for it is found


def test_a_result_nobody_reads_leaves_a_program_that_computes_as_much_without_it(mesh):
    with mesh:
        jaxpr = jax.make_jaxpr(pjit(lambda a: (a, a * 2), out_axis_resources=(P("x"), P("y"))))(X)
    live, used = jax.interpreters.partial_eval.dce_jaxpr(jaxpr.jaxpr, [False, True])[:2]
    assert list(used) == [True]
    (eqn,) = live.eqns
    assert [s.partitions for s in eqn.params["out_specs"]] == [(("y",),)]
    assert len(eqn.outvars) == len(eqn.params["jaxpr"].out_avals) == 1


def test_a_program_nobody_reads_is_dropped_unless_it_has_an_effect(mesh):
    seen = []
    silent = pjit(lambda x: x * 2, in_axis_resources=P("x"))

    def speak(x):
        jax.debug.callback(lambda: seen.append(1))
        return x

    speaking = pjit(speak, in_axis_resources=P("x"))

    def fun(x):
        silent(jnp.cos(x))
        speaking(x)
        return x

    with mesh:
        jaxpr = jax.make_jaxpr(fun)(X)
        live, *_ = jax.interpreters.partial_eval.dce_jaxpr(jaxpr.jaxpr, [True])
        assert [eqn.params["name"] for eqn in live.eqns] == ["speak"]
        jax.jit(fun)(X).block_until_ready()
        jax.effects_barrier()
    assert seen


# Refs, checks, effects


def test_refs_as_arguments_and_closed_over(mesh):
    with set_mesh(mesh):  # which jax looks at when it makes a ref
        total = jax.new_ref(jnp.zeros((8, 4)))
        seen = jax.new_ref(jnp.zeros(()))

        def accumulate(ref, x):
            ref[...] += x
            seen[...] += 1.0
            return ref[...] * 2

        function = pjit(accumulate, out_axis_resources=P("x"))
        for turn in range(3):
            np.testing.assert_allclose(function(total, X), X * (turn + 1) * 2, rtol=1e-6)
        np.testing.assert_allclose(total[...], X * 3, rtol=1e-6)
        assert seen[...] == 3
        jax.jit(lambda x: function(total, x))(X)
        np.testing.assert_allclose(total[...], X * 4, rtol=1e-6)


def test_refs_inside(mesh):
    def fun(x):
        ref = jax.new_ref(jnp.zeros_like(x))
        for _ in range(3):
            ref[...] += x
        return ref[...]

    function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("y"))
    with mesh:
        for wrap in (lambda f: f, jax.jit):
            np.testing.assert_allclose(wrap(function)(X), X * 3, rtol=1e-6)


def test_checkify(mesh):
    def fun(x, y):
        checkify.check(jnp.all(x > 0), "not positive")
        return x / y, y

    function = pjit(fun, in_axis_resources=(P("x"), None), out_axis_resources=(P("x"), None))
    errors = checkify.user_checks | checkify.float_checks
    for wrap in (lambda f: f, jax.jit):
        with mesh:
            checked = wrap(checkify.checkify(function, errors=errors))
            error, (out, _) = checked(X + 1, np.float32(2))
            error.throw()
            np.testing.assert_allclose(out, (X + 1) / 2)
            with pytest.raises(checkify.JaxRuntimeError, match="not positive"):
                checked(X - 1, np.float32(2))[0].throw()
            with pytest.raises(checkify.JaxRuntimeError, match="division by zero"):
                checked(X + 1, np.float32(0))[0].throw()


def test_checkify_gives_away_the_arguments_that_are_donated_and_no_error(mesh):
    def fun(x, y):
        checkify.check(jnp.all(x > 0), "not positive")
        return x + y

    function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"), donate_argnums=1)
    with mesh:
        jaxpr = jax.make_jaxpr(checkify.checkify(lambda x, y: function(function(x, y), x + y)))(X, X)
    first, second = (eqn for eqn in jaxpr.eqns if eqn.primitive is pjit_p)
    assert first.params["donated_invars"] == (False, True)
    assert len(second.invars) > 2, "the error of the first call goes into the second"
    assert second.params["donated_invars"] == (*[False] * (len(second.invars) - 1), True)


def test_debug_print_and_callbacks_run_once_per_call(mesh, capfd):
    def fun(x):
        jax.debug.print("sum {s}", s=x.sum())
        return x + 1

    function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        for _ in range(3):
            function(X).block_until_ready()
        jax.effects_barrier()
    assert capfd.readouterr().out.count("sum 15.5") == 3


# Debugging


def test_disable_jit_runs_the_function_on_values(mesh):
    kinds = []

    def fun(x, n):
        kinds.append(isinstance(x, jax.core.Tracer))
        return x * n

    function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"), static_argnums=1)
    with mesh, jax.disable_jit():
        np.testing.assert_array_equal(function(jnp.asarray(X), 2), X * 2)
        np.testing.assert_array_equal(jax.grad(lambda x: function(x, 2).sum())(jnp.asarray(X)), np.full_like(X, 2))
    assert kinds[0] is False


def test_debug_nans_finds_them_on_the_first_and_on_later_calls_and_backwards(mesh):
    function = pjit(lambda x: jnp.log(x), in_axis_resources=P("x"), out_axis_resources=P("x"), donate_argnums=0)
    root = pjit(lambda x: jnp.sqrt(x) * 0.0, in_axis_resources=P("x"))
    with mesh, jax.debug_nans(True):
        for _ in range(2):
            np.testing.assert_allclose(function(X + 1), np.log(X + 1), rtol=1e-5)
            with pytest.raises(FloatingPointError, match="nan"):
                function(X - 1)
        with pytest.raises(FloatingPointError, match="nan"):
            jax.grad(lambda x: root(x).sum())(X)


def test_a_jaxpr_shows_names_and_specs(mesh):
    def step(w, x):
        return x @ w

    function = pjit(step, in_axis_resources=(P(None, "y"), P(("x",), None)), donate_argnums=1)
    with mesh:
        text = str(jax.make_jaxpr(function)(np.ones((4, 4), np.float32), X))
    assert "pjit[\n" in text
    assert "name=step" in text
    assert "in_specs=(P(None, 'y'), P('x', None))" in text
    assert "out_specs=(UNSPECIFIED)" in text
    assert "mesh=(x=4, y=2)" in text
    assert "donated_invars=(False, True)" in text
    assert "witness" not in text


def test_a_jaxpr_evaluates_to_the_same(mesh, sine):
    with mesh:
        jaxpr = jax.make_jaxpr(lambda x: sine(x) + 1)(X)
        (out,) = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, X)
    np.testing.assert_allclose(out, np.sin(X) + 1, rtol=1e-6)


def test_parameters_a_reader_wants(mesh, sine):
    with mesh:
        (eqn,) = equations(jax.make_jaxpr(sine)(X))
    assert eqn.params["mesh"] == mesh
    assert eqn.params["in_specs"][0].user_spec == P("x")
    assert eqn.params["out_specs"][0].partitions == (("x",),)
    assert eqn.params["donated_invars"] == (False,)
    assert str(eqn.params["jaxpr"].jaxpr.eqns[0].primitive) == "sin"
    hash(eqn.params["in_specs"])


# Kinds of values


def test_sixty_four_bits(mesh):
    function = pjit(lambda x: x * 2, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        assert function(X.astype(np.float64)).dtype == np.float32
        with jax.enable_x64(True):
            assert function(X.astype(np.float64)).dtype == np.float64
        assert function(X.astype(np.float64)).dtype == np.float32


def test_weak_types_stay_weak(mesh):
    function = pjit(lambda x: x, in_axis_resources=P(), out_axis_resources=P())
    with mesh:
        assert function(1.0).weak_type
        assert not function(np.float32(1.0)).weak_type


def test_typed_keys(mesh):
    function = pjit(lambda k: jax.vmap(jax.random.normal)(k), in_axis_resources=P("x"), out_axis_resources=P("x"))
    keys = jax.random.split(jax.random.key(7), 8)
    with mesh:
        for _ in range(2):
            np.testing.assert_allclose(function(keys), jax.vmap(jax.random.normal)(keys), rtol=1e-6)
        same = pjit(lambda k: k, in_axis_resources=P("x"), out_axis_resources=P("x"))
        for _ in range(2):
            assert (jax.random.key_data(same(keys)) == jax.random.key_data(keys)).all()


def test_partials_of_a_program(mesh):
    function = pjit(lambda a, b: a - b, in_axis_resources=(P("x"), None), out_axis_resources=P("x"))
    with mesh:
        np.testing.assert_array_equal(functools.partial(function, X)(X), X - X)
        leaf = jax.tree_util.Partial(function, X)
        np.testing.assert_array_equal(jax.jit(lambda f, x: f(x))(leaf, X + 1), X - (X + 1))
        wrapped = pjit(functools.partial(lambda a, b: a * b, 3.0), in_axis_resources=P("x"))
        np.testing.assert_array_equal(wrapped(X), X * 3)


def test_one_device(mesh):
    with Mesh(jax.devices()[:1], "x"):
        function = pjit(lambda x: x * 2, in_axis_resources=P("x"), out_axis_resources=P("x"))
        for _ in range(2):
            np.testing.assert_array_equal(function(X), X * 2)


# The same value whatever is around or inside


def body(x):
    return jnp.sin(x) * 2 + x


def expected_body(x):
    return np.sin(x) * 2 + x


def with_own_jvp(f):
    own = jax.custom_jvp(f)
    own.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return own


def with_own_vmap(f):
    own = jax.custom_batching.custom_vmap(f)
    own.def_vmap(lambda size, batched, x: (f(x[0])[None], True))
    return own


def evaluated(f):
    def fun(x):
        jaxpr = jax.make_jaxpr(f)(x)
        return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, x)[0]

    return fun


AROUND = {
    "jit": jax.jit,
    "jit twice": lambda f: jax.jit(jax.jit(f)),
    "pjit": lambda f: pjit(f, in_axis_resources=P("y"), out_axis_resources=P(None, "x")),
    "pjit of jit": lambda f: pjit(jax.jit(f), in_axis_resources=P("y")),
    "jit of pjit": lambda f: jax.jit(pjit(f, out_axis_resources=P("x", "y"))),
    "checkpoint": jax.checkpoint,
    "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "named_call": lambda f: jax.named_call(f, name="named"),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, v: (c, f(jnp.stack([v] * 8))[0]), 0.0, x)[1],
    "map": lambda f: lambda x: jax.lax.map(lambda v: f(jnp.stack([v] * 4))[0], x),
    "switch": lambda f: lambda x: jax.lax.switch(1, [jnp.zeros_like, f, jnp.ones_like], x),
    "switch on a value": lambda f: jax.jit(lambda x: jax.lax.switch((x.sum() > 0).astype(int), [jnp.zeros_like, f], x)),
    "cond in vmap": lambda f: (
        lambda x: jax.vmap(lambda v: jax.lax.cond(v.sum() > -1, f, jnp.zeros_like, v))(x[None])[0]
    ),
    "fori": lambda f: lambda x: jax.lax.fori_loop(0, 1, lambda _, v: f(v), x),
    "while": lambda f: lambda x: jax.lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, f(s[1])), (0, x))[1],
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x]))[1],
    "custom_jvp": with_own_jvp,
    "custom_vmap": with_own_vmap,
    "sequential_vmap": lambda f: lambda x: jax.vmap(jax.custom_batching.sequential_vmap(f))(jnp.stack([x, x]))[0],
    "eval_jaxpr": evaluated,
    "jitted eval_jaxpr": lambda f: jax.jit(evaluated(f)),
    "closure_convert": lambda f: lambda x: jax.closure_convert(f, x)[0](x),
    "optimization_barrier": lambda f: lambda x: jax.lax.optimization_barrier(f(x)),
    "primal of linearize": lambda f: lambda x: jax.linearize(f, x)[0],
    "primal of vjp": lambda f: lambda x: jax.vjp(f, x)[0],
    "partial": lambda f: functools.partial(f),
    "debug names": lambda f: jax.named_scope("scope")(f),
    "scan with remat": lambda f: lambda x: jax.lax.scan(jax.checkpoint(lambda c, _: (f(c), None)), x, length=1)[0],
    "checkify": lambda f: lambda x: checkify.checkify(f, errors=checkify.all_checks)(x)[1],
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_the_value_is_the_same_whatever_is_around(mesh, around):
    function = around(pjit(body, in_axis_resources=P("x"), out_axis_resources=P("x")))
    with mesh:
        np.testing.assert_allclose(function(jnp.asarray(X)), expected_body(X), rtol=1e-5)


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_the_value_is_the_same_whatever_is_inside(mesh, around):
    function = pjit(around(body), in_axis_resources=P("x"), out_axis_resources=P("x", "y"))
    with mesh:
        for _ in range(2):
            out = function(X)
            np.testing.assert_allclose(out, expected_body(X), rtol=1e-5)
            laid_out(out, mesh, P("x", "y"))


@pytest.mark.parametrize("enter", [lambda m: m, set_mesh, jax.set_mesh], ids=["with", "set_mesh", "jax.set_mesh"])
def test_under_jit_with_numpy_arguments_whatever_sets_the_mesh(mesh, enter):
    function = pjit(body, in_axis_resources=P("x"), out_axis_resources=P("y", "x"))
    with enter(Mesh(mesh.devices, mesh.axis_names)):
        out = jax.jit(function)(X)
        laid_out(out, mesh, P("y", "x"))
        text = jax.jit(function).lower(X).compile().as_text()
        np.testing.assert_allclose(out, expected_body(X), rtol=1e-6)
    assert "num_partitions=8" in text


def test_under_jit_with_named_shardings_and_no_mesh(mesh):
    sharding = NamedSharding(mesh, P("x"))
    function = pjit(body, in_shardings=sharding, out_shardings=sharding)
    for wrap in (jax.jit, lambda f: jax.jit(lambda x: jax.lax.map(lambda _: f(x), jnp.arange(2))[0])):
        out = wrap(function)(X)
        np.testing.assert_allclose(out, expected_body(X), rtol=1e-6)
        assert out.sharding.device_set == set(mesh.devices.flat)


@pytest.mark.parametrize("where", ["scan", "while", "cond", "checkpoint", "custom_jvp", "jit"])
def test_under_jit_with_numpy_arguments_and_the_program_deep_inside(mesh, where):
    with mesh:
        out = jax.jit(
            AROUND["jit"](
                AROUND.get(where, AROUND["switch on a value"])(
                    pjit(body, in_axis_resources=P("x"), out_axis_resources=P("x"))
                )
            )
        )(X)
    assert out.sharding.device_set == set(mesh.devices.flat)
    np.testing.assert_allclose(out, expected_body(X), rtol=1e-5)


def test_three_levels_with_other_specs_at_each(mesh):
    inner = pjit(lambda x: x + 1, in_axis_resources=P(("x", "y")), out_axis_resources=P("y"))
    middle = pjit(lambda x: inner(x) * inner(x + 1), in_axis_resources=P("y", "x"), out_axis_resources=None)
    outer = pjit(lambda x: middle(x) + inner(x), in_axis_resources=P("x"), out_axis_resources=P("x", "y"))

    # (x + 1) (x + 2) + x + 1
    value, slope = X**2 + 4 * X + 3, 2 * X + 4
    with mesh:
        for transformed, expected in (
            (outer, value),
            (jax.jit(outer), value),
            (lambda x: jax.vmap(outer)(np.stack([x, x]))[1], value),
            (lambda x: jax.vjp(outer, x)[1](np.ones_like(x))[0], slope),
            (lambda x: jax.jvp(outer, (x,), (x,))[1], slope * X),
        ):
            np.testing.assert_allclose(transformed(X), expected, rtol=1e-5)
        laid_out(outer(X), mesh, P("x", "y"))


def test_what_the_rules_make_passes_jaxs_own_checks(mesh):
    function = pjit(
        lambda w, x: jnp.tanh(x @ w).sum() + w.sum(), in_axis_resources=(P("y"), P("x")), out_axis_resources=None
    )
    w = np.ones((4, 4), np.float32)

    def loss(w, x):
        return function(w, x)

    with mesh, jax.enable_checks(True):
        jax.grad(loss)(w, X)
        jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(w, np.stack([X, X]))
        jax.grad(jax.checkpoint(loss))(w, X)
        jax.jit(jax.grad(lambda w: jax.lax.scan(lambda c, x: (c, loss(c, x)), w, np.stack([X, X]))[1].sum()))(w)
        checkify.checkify(loss, errors=checkify.float_checks)(w, X)
        jax.make_jaxpr(lambda w: jax.linearize(lambda w: loss(w, X), w)[1](w))(w)


def test_no_tracer_is_leaked(mesh):
    function = pjit(body, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh, jax.checking_leaks():
        np.testing.assert_allclose(function(X), expected_body(X), rtol=1e-6)
        jax.grad(lambda x: function(x).sum())(jnp.asarray(X))
        jax.vmap(function)(np.stack([X, X]))
        jax.jit(function)(X)


def test_a_call_of_placed_arrays_transfers_nothing(mesh):
    function = pjit(body, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        x = jax.device_put(X, NamedSharding(mesh, P("x")))
        function(x)
        with jax.transfer_guard("disallow"):
            for _ in range(3):
                x = function(x)
            x = pjit(lambda v: v * 2 + 1, in_axis_resources=P("x"), out_axis_resources=P("y"))(x)
        laid_out(x, mesh, P("y"))


# More of dead code


def test_dead_code_keeps_effects_and_their_inputs(mesh):
    seen = []

    def fun(a, b):
        jax.debug.callback(lambda v: seen.append(float(v)), a.sum())
        return b * 2, a * 3

    function = pjit(fun, in_axis_resources=(P("x"), P("y")), out_axis_resources=(P("y"), P("x")))
    with mesh:
        jax.jit(lambda a, b: function(a, b)[0])(X, X).block_until_ready()
        jax.jit(lambda a, b: (function(a, b), b)[1])(X, X).block_until_ready()
        jax.effects_barrier()
    np.testing.assert_allclose(seen, [X.sum()] * 2, rtol=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize("speaks", [False, True])
def test_dead_code_elimination_keeps_what_is_read(mesh, speaks):
    heard = []

    def fun(a, b, c):
        if speaks:
            jax.debug.callback(heard.append, a[0, 0])
        return a + b, b * c, c - 1, jnp.full_like(X, 7)

    function = pjit(
        fun, in_axis_resources=(P("x"), P("y"), P("x", "y")), out_axis_resources=(P("x"), P("y"), None, P("y", "x"))
    )
    values = (X, X + 1, X + 2)
    needs = np.array([(1, 1, 0), (0, 1, 1), (0, 0, 1), (0, 0, 0)], bool)
    with mesh:
        jaxpr = jax.make_jaxpr(function)(*values)
        whole = function(*values)
        jax.effects_barrier()
        cases = [*itertools.product([False, True], repeat=4)]
        run = sample(cases, 3)
        for used in cases:
            live, kept = jax.interpreters.partial_eval.dce_jaxpr(jaxpr.jaxpr, list(used))[:2]
            assert tuple(kept) == tuple(needs[list(used)].any(axis=0) | [speaks, False, False])
            eqns = [eqn for eqn in live.eqns if eqn.primitive is pjit_p]
            assert len(eqns) == (any(used) or speaks)
            for eqn in eqns:
                ins, outs = np.flatnonzero(kept), np.flatnonzero(used)
                assert [spec.partitions for spec in eqn.params["in_specs"]] == [
                    [(("x",),), (("y",),), (("x",), ("y",))][k] for k in ins
                ]
                assert [spec.partitions for spec in eqn.params["out_specs"]] == [
                    [(("x",),), (("y",),), (), (("y",), ("x",))][k] for k in outs
                ]
                assert len(eqn.params["donated_invars"]) == len(eqn.invars) == len(ins)
                assert len(eqn.outvars) == len(outs)
                if all(kept) and all(used):
                    assert eqn.params["jaxpr"] is jaxpr.eqns[0].params["jaxpr"]  # what was compiled for it is kept
            if used not in run:
                continue
            before = len(heard)
            results = jax.core.eval_jaxpr(live, (), *(v for v, k in zip(values, kept, strict=True) if k))
            jax.effects_barrier()
            assert len(heard) == before + speaks
            for out, expected in zip(results, (w for w, u in zip(whole, used, strict=True) if u), strict=True):
                np.testing.assert_allclose(out, expected)


def test_an_unused_carry_of_a_scan_of_programs(mesh):
    function = pjit(lambda a, b: (a + b, b * 2), in_axis_resources=P("x"), out_axis_resources=P("x"))

    def fun(x):
        (a, _), _ = jax.lax.scan(lambda c, _: (function(*c), None), (x, x), length=3)
        return a

    with mesh:
        expected = X + X * (1 + 2 + 4)
        np.testing.assert_allclose(jax.jit(fun)(X), expected, rtol=1e-6)
        np.testing.assert_allclose(jax.grad(lambda x: fun(x).sum())(X), np.full_like(X, 8))


# More of shard_map


def test_programs_in_a_shard_map_under_grad_and_vmap(mesh):
    function = pjit(lambda x: jnp.sin(x) * 2, in_axis_resources=P(None, "y"), out_axis_resources=P(None, "y"))

    def mapped(x):
        return jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})(x)

    with mesh:
        grad = jax.jit(jax.grad(lambda x: mapped(x).sum()))(X)
        np.testing.assert_allclose(grad, 2 * np.cos(X), rtol=1e-5)
        out = jax.jit(jax.vmap(mapped))(np.stack([X, X + 1]))
    np.testing.assert_allclose(out, 2 * np.sin(np.stack([X, X + 1])), rtol=1e-5)


def test_a_whole_manual_program_under_grad(mesh):
    function = pjit(lambda x: jnp.sin(x) * 2)

    def total(x):
        return jax.shard_map(function, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"))(x).sum()

    with mesh:
        np.testing.assert_allclose(jax.jit(jax.grad(total))(X), 2 * np.cos(X), rtol=1e-5)


def test_collectives_of_a_shard_map_inside_a_program_inside_it(mesh):
    function = pjit(lambda x: x - jax.lax.pmean(x, ("x", "y")))

    def fun(x):
        return jax.shard_map(function, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"))(x)

    with mesh:
        out = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))(X)
    blocks = X.reshape(4, 2, 2, 2)
    np.testing.assert_allclose(out, (blocks - blocks.mean(axis=(0, 2), keepdims=True)).reshape(8, 4), atol=1e-6)


# More of refs


def test_a_ref_with_a_spec_keeps_its_layout(mesh):
    def accumulate(ref, x):
        ref[...] += x * 2
        return ref[0, 0]

    function = pjit(accumulate, in_axis_resources=(P("x", "y"), P("x")), out_axis_resources=None)
    with set_mesh(mesh):
        ref = jax.new_ref(jax.device_put(jnp.zeros((8, 4)), NamedSharding(mesh, P("x", "y"))))
        for turn in range(1, 4):
            np.testing.assert_allclose(function(ref, X), 2 * turn * X[0, 0], rtol=1e-6)
        np.testing.assert_allclose(ref[...], 6 * X, rtol=1e-6)


def test_refs_in_a_scan_over_a_program(mesh):
    def fun(x):
        ref = jax.new_ref(jnp.zeros_like(x))

        def add(v):
            ref[...] += v

        function = pjit(add, in_axis_resources=P("x"))
        jax.lax.fori_loop(0, 3, lambda i, _: function(x), None)
        return ref[...]

    with mesh:
        for wrap in (jax.jit, pjit):
            np.testing.assert_allclose(wrap(fun)(X), 3 * X, rtol=1e-6)


def made_inside(pjit, x):
    def fun(x):
        ref = jax.new_ref(jnp.zeros_like(x))
        jax.lax.fori_loop(0, 3, lambda i, _: ref.__setitem__(..., ref[...] * x + i), None)
        return ref[...]

    return pjit(fun)(x)


def passed_on(pjit, x):
    def fun(x):
        ref = jax.new_ref(x)
        pjit(lambda ref: ref.__setitem__(..., ref[...] * ref[...]))(ref)
        return ref[...] * x

    return pjit(fun)(x)


def made_outside(pjit, x):
    def fun(ref, y):
        ref[...] = ref[...] * jnp.sin(y)
        return ref[...] + y

    ref = jax.new_ref(x)
    y = pjit(fun)(ref, x)
    return ref[...] * (y + pjit(fun)(ref, y))


def in_a_branch(pjit, x):
    def fun(x):
        ref = jax.new_ref(x)
        jax.lax.cond(x[0, 0] < 2, lambda: ref.__setitem__(..., ref[...] * x), lambda: None)
        jax.debug.callback(lambda: None)
        return jnp.sin(ref[...])

    return pjit(fun)(x)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("program", [made_inside, passed_on, made_outside, in_a_branch])
def test_programs_with_refs_have_the_derivatives_that_they_have_under_jit(mesh, program, wrap):
    def derivatives(pjit):
        results, pullback = jax.vjp(functools.partial(program, pjit), x)
        return results, pullback(jnp.cos(results)), jax.jvp(functools.partial(program, pjit), (x,), (x,))

    with set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("x")))
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5),
            wrap(functools.partial(derivatives, functools.partial(pjit, in_axis_resources=P("x"))))(),
            wrap(functools.partial(derivatives, jax.jit))(),
        )


# More of checks


CHECKS = {
    "user": (lambda x: checkify.check(jnp.all(x < 2), "too big: {v}", v=x.max()) or x, X + 5, "too big: "),
    "nan": (jnp.log, X - 5, "nan generated by primitive: log"),
    "index": (lambda x: x[jnp.int32(100) + x.astype(int)[0, 0]], X, "out-of-bounds"),
    "division": (lambda x: x / (x * 0), X + 1, "division by zero"),
}


WHERE_CHECKED = ["outside", "inside", "vmap", "scan", "nested"]


@pytest.mark.soak
@pytest.mark.parametrize(("what", "where"), sample([*itertools.product(CHECKS, WHERE_CHECKED)], 3))
def test_failing_checks_are_found(mesh, what, where):
    fun, value, message = CHECKS[what]
    function = pjit(fun, in_axis_resources=P("x"))
    checked = {
        "outside": lambda: checkify.checkify(function, errors=checkify.all_checks)(value)[0],
        "inside": lambda: pjit(lambda x: checkify.checkify(fun, errors=checkify.all_checks)(x)[0])(value),
        "vmap": lambda: checkify.checkify(jax.vmap(function), errors=checkify.all_checks)(np.stack([value] * 2))[0],
        "scan": lambda: checkify.checkify(
            lambda x: jax.lax.scan(lambda c, v: (c, function(v)), 0, x), errors=checkify.all_checks
        )(np.stack([value] * 2))[0],
        "nested": lambda: checkify.checkify(
            pjit(lambda x: function(x), out_axis_resources=None), errors=checkify.all_checks
        )(value)[0],
    }[where]
    with mesh:
        error = checked()
        assert message in error.get()
        with pytest.raises(checkify.JaxRuntimeError):
            error.throw()


def test_passing_checks_say_nothing_and_the_result_keeps_its_spec(mesh):
    function = pjit(body, in_axis_resources=P("x"), out_axis_resources=P("y", "x"))
    with mesh:
        error, out = checkify.checkify(function, errors=checkify.all_checks)(X)
    assert error.get() is None
    laid_out(out, mesh, P("y", "x"))


# More of debugging


def test_disable_jit_with_nested_programs_and_keywords(mesh):
    seen = []

    def inner(x):
        seen.append(x)
        return x + 1

    function = pjit(lambda x, *, k: pjit(inner, in_axis_resources=P("x"))(x) * k)
    with mesh, jax.disable_jit():
        np.testing.assert_allclose(function(jnp.asarray(X), k=2.0), (X + 1) * 2)
    (value,) = seen
    np.testing.assert_array_equal(value, X)
    with mesh:
        np.testing.assert_allclose(function(X, k=2.0), (X + 1) * 2)


def test_ordered_effects(mesh, capfd):
    def fun(x):
        jax.debug.print("first {s}", s=x.sum(), ordered=True)
        jax.debug.print("second", ordered=True)
        return x + 1

    with Mesh(jax.devices()[:1], "x"):
        function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))
        for wrap in (lambda f: f, jax.jit):
            wrap(function)(X).block_until_ready()
        jax.effects_barrier()
    assert capfd.readouterr().out == "first 15.5\nsecond\n" * 2
    with mesh, pytest.raises(ValueError, match=r"[Oo]rdered effects"):
        pjit(fun, in_axis_resources=P("x"))(X)


def test_effects_in_a_nested_program_of_a_scan_under_grad(mesh):
    seen = []

    def fun(x):
        jax.debug.callback(lambda v: seen.append(1), x.sum())
        return jnp.sin(x)

    function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        jax.grad(lambda x: jax.lax.scan(lambda c, _: (function(c), None), x, length=3)[0].sum())(X)
        jax.effects_barrier()
    assert len(seen) == 3


def test_the_name_of_the_program_is_in_profiles_of_its_operations(mesh):
    @pjit
    def inner_step(x):
        with jax.named_scope("attention"):
            return jnp.sin(x)

    with mesh:
        text = pjit(lambda x: inner_step(x) + 1, name="outer_step").lower(X).as_text(debug_info=True)
    assert "outer_step" in text
    assert "inner_step" in text
    assert "attention" in text


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: jax.jit(lambda x: jax.lax.map(f, x[None])[0])])
def test_an_exported_program_is_the_same(mesh, wrap):
    function = pjit(body, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        exported = jax.export.export(wrap(function))(jax.ShapeDtypeStruct(X.shape, X.dtype))
        out = jax.jit(exported.call)(jax.device_put(X, NamedSharding(mesh, P("x"))))
    assert exported.nr_devices == 8
    np.testing.assert_allclose(out, expected_body(X), rtol=1e-6)


def test_compile_time_values_inside(mesh):
    def fun(x):
        with jax.ensure_compile_time_eval():
            count = int(jnp.arange(4).sum())
        return x * count

    with mesh:
        np.testing.assert_allclose(pjit(fun, in_axis_resources=P("x"))(X), X * 6)


# More kinds of values


@pytest.mark.parametrize("shape", [(0,), (0, 4), (8, 0), (0, 0)], ids=str)
def test_empty_arrays(mesh, shape):
    function = pjit(lambda x: (x * 2, x.sum()), in_axis_resources=P("x"), out_axis_resources=(P("x"), None))
    value = np.zeros(shape, np.float32)
    with mesh:
        for call in (function, jax.jit(function)):
            for _ in range(2):
                out, total = call(value)
                assert out.shape == shape
                assert total == 0
        if shape != (0,):
            assert jax.grad(lambda x: function(x)[1])(value).shape == shape


@pytest.mark.parametrize(
    "value", [1, True, 2.5, 1j, np.float32(3), np.int8(4), np.bool_(False), np.array(5.0, np.float32)], ids=repr
)
def test_scalars_have_the_types_jit_gives_them(mesh, value):
    def fun(x):
        return x, x + x

    function, plain = pjit(fun, in_axis_resources=P(), out_axis_resources=P()), jax.jit(fun)
    with mesh:
        for _ in range(2):
            ours, theirs = function(value), plain(value)
            for a, b in zip(ours, theirs, strict=True):
                assert (a.dtype, a.weak_type, a.shape) == (b.dtype, b.weak_type, b.shape)
                assert np.asarray(a) == np.asarray(b)
                assert len(a.sharding.device_set) == 8


def test_an_integer_that_does_not_fit_overflows_as_in_jit(mesh):
    with mesh:
        with pytest.raises(OverflowError):
            jax.jit(lambda x: x)(2**40)
        with pytest.raises(OverflowError):
            pjit(lambda x: x, in_axis_resources=None)(2**40)
        with jax.enable_x64(True):
            assert pjit(lambda x: x, in_axis_resources=None)(2**40) == 2**40


def test_sixty_four_bit_inputs_are_narrowed_as_in_jit(mesh):
    def double(values):
        return {dtype: value + value for dtype, value in values.items()}

    function = pjit(double, in_axis_resources=P("x"), out_axis_resources=P("x"))
    theirs = jax.jit(double)
    values = {dtype: np.arange(8, dtype=dtype) for dtype in ("float64", "int64", "uint64", "complex128")}
    with mesh:
        for enabled in (False, True, False):
            with jax.enable_x64(enabled):
                expected = theirs(values)
                for _ in range(2):
                    for dtype, out in function(values).items():
                        assert out.dtype == expected[dtype].dtype
                        assert (out.dtype == dtype) is enabled
                        np.testing.assert_array_equal(out, 2 * values[dtype])


NARROW = ["bfloat16", "float16", "float8_e4m3fn", "int4", "int8", "uint8", "int16", "uint32", "bool", "complex64"]


def test_narrow_types_stay_and_compute(mesh):
    numbers = np.arange(8) % 2
    values = {dtype: numbers.astype(jnp.dtype(dtype)) for dtype in NARROW}
    function = pjit(
        lambda values: (values, jax.tree.map(jnp.flip, values)),
        in_axis_resources=P("x"),
        out_axis_resources=(P("y"), None),
    )
    with mesh:
        for _ in range(2):
            same, flipped = function(values)
            for dtype in NARROW:
                assert same[dtype].dtype == flipped[dtype].dtype == dtype
                np.testing.assert_array_equal(np.asarray(same[dtype]).astype(complex), numbers)
                np.testing.assert_array_equal(np.asarray(flipped[dtype]).astype(complex), numbers[::-1])


def test_bfloat16_gradients_are_bfloat16(mesh):
    function = pjit(lambda x: (x * x).sum(), in_axis_resources=P("x"), out_axis_resources=None)
    value = np.arange(8).astype(jnp.bfloat16)
    with mesh:
        grad = jax.grad(function)(value)
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(grad).astype(float), 2 * np.arange(8))


def test_typed_keys_with_specs_inside_and_under_transformations(mesh):
    keys = jax.random.split(jax.random.key(3), (8, 2))

    def fun(k, x):
        noise = jax.vmap(jax.vmap(lambda k: jax.random.normal(k)))(k)
        return noise * x.sum(), jax.random.wrap_key_data(jax.random.key_data(k))

    function = pjit(fun, in_axis_resources=(P("x", "y"), P("x")), out_axis_resources=(P("x"), P("y", None)))
    expected, _ = jax.jit(fun)(keys, X)
    with mesh:
        out, again = function(keys, X)
        np.testing.assert_allclose(out, expected, rtol=1e-5)
        assert again.dtype == keys.dtype
        laid_out(again, mesh, P("y"))
        _, pull = jax.vjp(lambda x: function(keys, x)[0], X)
        np.testing.assert_allclose(pull(np.ones_like(expected))[0][0, 0], (expected / X.sum()).sum(), rtol=1e-4)
        np.testing.assert_allclose(jax.jit(function)(keys, X)[0], expected, rtol=1e-5)
        batch, _ = jax.vmap(function, in_axes=(None, 0))(keys, np.stack([X, X]))
        np.testing.assert_allclose(np.asarray(batch)[1], expected, rtol=1e-5)
    scalar = jax.random.key(0)
    with mesh:
        same = pjit(lambda k: jax.random.split(k, 8), in_axis_resources=P(), out_axis_resources=P("x"))(scalar)
    assert (jax.random.key_data(same) == jax.random.key_data(jax.random.split(scalar, 8))).all()


def test_many_kinds_of_containers(mesh):
    Point = collections.namedtuple("Point", ["a", "b"])

    def fun(ordered, default, point, nested):
        return {"o": ordered["z"] + default["k"], "p": Point(point.b, point.a), "n": nested[1][0]}

    function = pjit(
        fun,
        in_axis_resources=(P("x"), P("x"), Point(P("x"), P("y")), None),
        out_axis_resources={"o": P("x"), "p": P("y"), "n": None},
    )
    default = collections.defaultdict(list, k=X)
    with mesh:
        for _ in range(2):
            out = function(collections.OrderedDict(z=X, a=X), default, Point(X, X + 1), (None, [X]))
            assert isinstance(out["p"], Point)
            np.testing.assert_allclose(out["p"].a, X + 1)
            np.testing.assert_allclose(out["o"], 2 * X)
            laid_out(out["p"].b, mesh, P("y"))


def test_programs_inside_partials_that_are_arguments(mesh):
    function = pjit(lambda w, x: x * w, in_axis_resources=(None, P("x")), out_axis_resources=P("x"))

    def apply(f, x):
        return f(x)

    with mesh:
        for w in (2.0, 3.0):
            leaf = jax.tree_util.Partial(function, jnp.float32(w))
            for wrap in (jax.jit, pjit):
                np.testing.assert_allclose(wrap(apply)(leaf, X), w * X)
            np.testing.assert_allclose(
                jax.grad(lambda w, f=function: jax.tree_util.Partial(f, w)(X).sum())(w), X.sum(), rtol=1e-5
            )
        static = jax.jit(apply, static_argnums=0)
        np.testing.assert_allclose(static(functools.partial(function, 2.0), X), 2 * X)
        np.testing.assert_allclose(pjit(apply, static_argnums=0)(function.__wrapped__.__get__(2.0), X), 2 * X)


# Taylor series


@pytest.mark.parametrize("types", ["Auto", "Explicit"])
@pytest.mark.parametrize("order", [1, 3])
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, pjit])
def test_jet_has_the_terms_of_the_function_sharded_as_their_values(types, order, around):
    def function(x, w):
        return jnp.sin(x @ w), jnp.exp(x)

    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(getattr(jax.sharding.AxisType, types),) * 2)
    program = around(pjit(function, in_shardings=(P("x"), None), out_shardings=P("x")))
    args, series = (X, X[:4]), [[k * X for k in range(order)], [X[:4]] * order]
    with jax.set_mesh(mesh):
        values, terms = jet.jet(program, args, series)
    for expected, found in zip(
        jax.tree.leaves(jet.jet(function, args, series)), jax.tree.leaves((values, terms)), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
        laid_out(found, mesh, P("x"))


def test_jet_makes_calls_without_results_once_and_names_those_with_results(meeting):
    note = colocated_python(lambda x: rendezvous.logs["noted"].append(float(x)), out_specs_fn=lambda x: None)
    double = colocated_python(lambda x: 2 * x, out_specs_fn=lambda x: x)
    _, terms = jet.jet(pjit(lambda x: (note(x), jnp.sin(x))[1]), (0.0,), ([1.0, 0.0],))
    colocated.wait()
    assert rendezvous.logs["noted"] == [0.0]
    np.testing.assert_allclose(terms, [1, 0], atol=1e-6)
    with pytest.raises(ValueError, match=r"<lambda> has no Taylor series, and jax.experimental.jet needs one with .*x"):
        jet.jet(pjit(lambda x: double(x)), (0.0,), ([1.0],))
