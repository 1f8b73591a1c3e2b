"""A program inside everything else of jax: other programs, control flow, shard_map, refs, checkify, debugging."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import NamedSharding

from partjit import Mesh, P, pjit, set_mesh
from partjit.primitive import pjit_p

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
        assert 'sdy.sharding_constraint' in jax.jit(function).lower(X).as_text()


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
            np.testing.assert_allclose(wrap(scanned)(X)[0], np.sin(np.sin(np.sin(X))), rtol=1e-5)
            np.testing.assert_allclose(wrap(looped)(X), expected_loop(X), rtol=1e-5)
            np.testing.assert_allclose(wrap(chosen)(X), np.sin(X), rtol=1e-5)
            np.testing.assert_allclose(wrap(counted)(X), np.sin(np.sin(X)), rtol=1e-5)
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


def test_a_program_nobody_reads_is_dropped_unless_it_has_an_effect(mesh):
    seen = []
    silent = pjit(lambda x: x * 2, in_axis_resources=P("x"))

    def speak(x):
        jax.debug.callback(lambda: seen.append(1))
        return x

    speaking = pjit(speak, in_axis_resources=P("x"))

    def fun(x):
        silent(x)
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "bool", "complex64"])
def test_dtypes(mesh, dtype):
    value = jnp.asarray(np.arange(16) % 2, dtype)
    with mesh:
        out = pjit(lambda x: x, in_axis_resources=P("x"), out_axis_resources=P("y"))(value)
    assert out.dtype == dtype
    assert (out == value).all()


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
