"""Donated arguments: what is gone after a call, and what is not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from partjit import UNSPECIFIED, Mesh, P, pjit, reshard_policy, set_mesh
from partjit.inspect import explain


@pytest.fixture(params=[1, 8], ids=["one device", "eight devices"])
def mesh(request):
    return Mesh(jax.devices()[: request.param], "x")


def put(mesh, value=1.0, shape=(8, 4)):
    return jax.device_put(np.full(shape, value, np.float32), NamedSharding(mesh, P("x")))


def add(a, b):
    return a + b


def test_the_donated_argument_is_gone_and_the_others_are_not(mesh):
    function = pjit(add, P("x"), P("x"), (), 1)  # the fifth is donation
    with mesh:
        for _ in range(3):
            a, b = put(mesh, 1.0), put(mesh, 2.0)
            np.testing.assert_array_equal(function(a, b), np.full((8, 4), 3.0))
            assert not a.is_deleted()
            assert b.is_deleted()


def test_by_name_and_in_a_tree(mesh):
    function = pjit(lambda state, x: {"w": state["w"] + x}, donate_argnames="state", out_axis_resources=P("x"))
    with mesh:
        state, x = {"w": put(mesh)}, put(mesh)
        function(state, x)
        assert state["w"].is_deleted()
        state = {"w": put(mesh)}
        function(state=state, x=x)
        assert state["w"].is_deleted()
        assert not x.is_deleted()


def test_numbers_count_static_arguments(mesh):
    function = pjit(lambda n, a, b: a * n + b, P("x"), P("x"), static_argnums=0, donate_argnums=(2,))
    with mesh:
        a, b = put(mesh), put(mesh)
        function(2, a, b)
        assert b.is_deleted()
        assert not a.is_deleted()


def test_a_negative_number_counts_from_the_end(mesh):
    function = pjit(add, P("x"), P("x"), donate_argnums=-1)
    with mesh:
        a, b = put(mesh), put(mesh)
        function(a, b)
        assert b.is_deleted()
        assert not a.is_deleted()


@pytest.mark.parametrize("kind", ["function", "compiled", "compiled, explicit"])
def test_what_was_donated_cannot_be_used_again(mesh, kind):
    if kind == "compiled, explicit":
        mesh = jax.make_mesh(mesh.devices.shape, mesh.axis_names, devices=[*mesh.devices.flat])
    function: Any = pjit(add, P("x"), P("x"), donate_argnums=0)
    with set_mesh(mesh):
        a, b = put(mesh), put(mesh)
        if kind != "function":
            function = function.lower(a, b).compile()
        other = jax.jit(lambda a: a + 1)
        for _ in range(2):
            other(put(mesh))
            function(put(mesh), b)
        function(a, b)
        with pytest.raises((RuntimeError, ValueError), match="deleted"):
            other(a)
        for _ in range(2):
            with pytest.raises((RuntimeError, ValueError), match="deleted"):
                function(a, b)
        with pytest.raises((RuntimeError, ValueError), match="deleted"):
            np.asarray(a)
        function(put(mesh), b)


def test_a_buffer_no_result_can_use_stays(mesh):
    function = pjit(lambda a: a.sum(), P("x"), None, donate_argnums=0)
    with mesh:
        a = put(mesh)
        with pytest.warns(UserWarning, match="donated buffers were not usable"):
            assert function(a) == 32
        assert not a.is_deleted()
        assert function(a) == 32


def test_a_deleted_argument_is_refused_on_the_first_and_on_later_calls(mesh):
    function = pjit(add, P("x"), P("x"))
    gone = put(mesh)
    gone.delete()
    with mesh:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Array has been deleted"):
                function(gone, put(mesh))
        function(put(mesh), put(mesh))
        with pytest.raises(RuntimeError, match="Array has been deleted"):
            function(gone, put(mesh))


def test_nothing_is_donated_inside_another_program(mesh):
    function = pjit(add, P("x"), P("x"), donate_argnums=0)
    with mesh:
        a = put(mesh)
        jax.jit(lambda a: function(a, a) + a)(a)
        assert not a.is_deleted()


def test_gradients_of_a_donating_program(mesh):
    function = pjit(lambda w: (w * w).sum(), in_axis_resources=P("x"), donate_argnums=0)
    with mesh:
        w = put(mesh, 3.0)
        for _ in range(2):
            np.testing.assert_array_equal(jax.grad(function)(w), np.full((8, 4), 6.0))


def test_the_memory_of_a_donated_argument_is_reused(mesh):
    with mesh:
        compiled = pjit(add, P("x"), P("x"), donate_argnums=0).lower(put(mesh), put(mesh)).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 8 * 4 * 4 // mesh.size


def test_a_donated_argument_that_is_a_result(mesh):
    function = pjit(lambda a, b: (b, a), P("x"), P("x"), donate_argnums=(0, 1))
    with mesh:
        for _ in range(3):
            a, b = put(mesh, 1.0), put(mesh, 2.0)
            first, second = function(a, b)
            np.testing.assert_array_equal(first, np.full((8, 4), 2.0))
            np.testing.assert_array_equal(second, np.full((8, 4), 1.0))
            assert a.is_deleted()
            assert b.is_deleted()


def test_a_replicated_result_takes_the_memory_of_an_argument_without_a_spec(mesh):
    """Of which jax assumes that it is unsharded, whatever the partitioner makes of it."""
    function = pjit(lambda a, b: (a @ b, a), UNSPECIFIED, (P("x"), None), donate_argnums=0)
    a, b = np.arange(64.0, dtype=np.float32).reshape(8, 8), np.eye(8, dtype=np.float32)
    with mesh:
        compiled = function.lower(a, b).compile()
        assert compiled.memory_analysis().alias_size_in_bytes == a.nbytes
        donated = jnp.asarray(a)
        for result in (*function(a, b), *function(donated, b), *compiled(a, b)):
            np.testing.assert_array_equal(result, a)
        assert explain(function, a, b).whole.tree.inputs[0].shown_spec == "P(None, None)"


def test_a_sharded_result_takes_the_memory_of_an_argument_of_the_shape_of_its_shards(mesh):
    function = pjit(lambda a: jnp.tile(a, (mesh.size, 1)), UNSPECIFIED, P("x"), donate_argnums=0)
    with mesh:
        for _ in range(2):
            a = jnp.arange(3.0)[None]
            np.testing.assert_array_equal(function(a), np.tile(np.arange(3.0), (mesh.size, 1)))


def test_state_is_carried_through_many_steps(mesh):
    function = pjit(lambda s: {"n": s["n"] + 1, "w": s["w"] * 2}, P("x"), P("x"), donate_argnums=0)
    with mesh:
        state = {"n": put(mesh, 0.0), "w": put(mesh, 1.0, (8,))}
        for _ in range(6):
            before = state
            state = function(before)
            assert before["n"].is_deleted()
            assert before["w"].is_deleted()
    np.testing.assert_array_equal(state["n"], np.full((8, 4), 6.0))
    np.testing.assert_array_equal(state["w"], np.full(8, 64.0))


def test_only_the_leaves_of_the_donated_tree_go(mesh):
    function = pjit(lambda s, k: ([x + k["k"] for x in s], k["k"] * 2), P("x"), P("x"), donate_argnums=0)
    with mesh:
        tree, other = [put(mesh, i) for i in range(3)], {"k": put(mesh)}
        function(tree, other)
    assert all(leaf.is_deleted() for leaf in tree)
    assert not other["k"].is_deleted()


def test_numpy_arrays_and_scalars_survive_donation(mesh):
    function = pjit(lambda a, s: a + s, (P("x"), None), P("x"), donate_argnums=(0,))
    value = np.ones((8, 4), np.float32)
    with mesh:
        for _ in range(3):
            np.testing.assert_array_equal(function(value, 1.0), np.full((8, 4), 2.0))
    np.testing.assert_array_equal(value, np.ones((8, 4)))


def test_a_misplaced_argument_that_is_donated_gives_the_right_result(mesh):
    function = pjit(lambda a: a + 1, P("x"), P("x"), donate_argnums=0)
    elsewhere = jax.device_put(np.arange(32, dtype=np.float32).reshape(8, 4), NamedSharding(mesh, P()))
    with mesh, reshard_policy("allow"):
        out = function(elsewhere)
    np.testing.assert_array_equal(out, np.arange(32).reshape(8, 4) + 1)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)


def test_nothing_is_gone_when_a_call_fails(mesh):
    function = pjit(lambda a, b: a + b, P("x"), P("x"), donate_argnums=(0, 1))
    with mesh:
        a = put(mesh)
        with pytest.raises(ValueError, match="rank"):
            function(a, 1.0)
        with pytest.raises(TypeError):
            function(a, "text")
        assert not a.is_deleted()

        def broken(a):
            raise KeyError("inside")

        with pytest.raises(KeyError):
            pjit(broken, P("x"), donate_argnums=0)(a)
        assert not a.is_deleted()


def test_under_vmap_the_batch_is_right(mesh):
    function = pjit(lambda a: a * 2, P("x"), P("x"), donate_argnums=0)
    with mesh:
        batch = jax.device_put(np.ones((3, 8), np.float32), NamedSharding(mesh, P(None, "x")))
        np.testing.assert_array_equal(jax.vmap(function)(batch), np.full((3, 8), 2.0))


def test_a_donating_program_inside_a_loop_reads_its_carry_again(mesh):
    function = pjit(lambda a: a * 2, P("x"), P("x"), donate_argnums=0)

    def loop(a):
        def body(carry, _):
            doubled = function(carry)
            return doubled + carry, carry.sum()

        return jax.lax.scan(body, a, length=3)

    with mesh:
        a = put(mesh)
        for wrap in (lambda f: f, jax.jit, pjit):
            out, sums = wrap(loop)(a)
            np.testing.assert_array_equal(out, np.full((8, 4), 27.0))
            np.testing.assert_array_equal(sums, [32, 96, 288])
    assert not a.is_deleted()


def test_donation_by_an_outer_jit(mesh):
    inner = pjit(lambda a: a * 2, P("x"), P("x"))
    with mesh:
        outer = jax.jit(inner, donate_argnums=0)
        a = put(mesh)
        np.testing.assert_array_equal(outer(a), np.full((8, 4), 2.0))
        assert a.is_deleted()


@pytest.mark.parametrize(("check", "bad"), [(jax.debug_nans, -1.0), (jax.debug_infs, 0.0)])
def test_donated_arguments_are_there_when_a_bad_number_is_looked_for(mesh, check, bad):
    function = pjit(lambda a: jnp.log(a), P("x"), P("x"), donate_argnums=0)
    with mesh, check(True):
        for _ in range(2):
            with pytest.raises(FloatingPointError):
                function(put(mesh, bad))
            np.testing.assert_array_equal(function(put(mesh, 1.0)), np.zeros((8, 4)))
