"""Donated arguments: what is gone after a call, and what is not."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from partjit import Mesh, P, pjit


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


def test_what_was_donated_cannot_be_used_again(mesh):
    function = pjit(add, P("x"), P("x"), donate_argnums=0)
    with mesh:
        a, b = put(mesh), put(mesh)
        function(a, b)
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
