"""Where arguments are and where their specs want them: nothing is ever computed on a wrong layout."""

import copy
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from partjit import FROM_ARRAY, FROM_GDA, UNSPECIFIED, Mesh, P, ReshardWarning, ShardingError, pjit, reshard_policy

X = np.arange(32.0, dtype=np.float32).reshape(8, 4)


def placed(mesh, spec, value=X):
    return jax.device_put(value, NamedSharding(mesh, spec))


# Silently


@pytest.mark.parametrize("value", [X, jnp.asarray(X)])
def test_what_has_no_place_is_placed_silently(mesh, value):
    function = pjit(lambda x: x * 2, in_axis_resources=P("x", "y"), out_axis_resources=P("y"))
    with mesh:
        for _ in range(3):
            out = function(value)
            np.testing.assert_array_equal(out, X * 2)
            assert out.sharding == NamedSharding(mesh, P("y"))


@pytest.mark.parametrize("scalar", [3, 2.5, True, 1j, np.float32(3), np.int32(4)])
def test_scalars(mesh, scalar):
    function = pjit(lambda s: s, in_axis_resources=P(), out_axis_resources=None)
    with mesh:
        for _ in range(3):
            out = function(scalar)
            assert out == scalar
            assert out.sharding.device_set == set(mesh.devices.flat)


@pytest.mark.parametrize("same", [P("x"), P("x", None), P("x", ()), P(("x",))])
def test_specs_that_mean_the_same_are_no_difference(mesh, same):
    function = pjit(lambda x: x * 2, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:  # a ReshardWarning would be an error here
        np.testing.assert_array_equal(function(placed(mesh, same)), X * 2)


def test_a_committed_array_stays_where_it_is_if_nothing_is_said(mesh):
    with mesh:
        out = pjit(lambda x: x * 2)(placed(mesh, P("y", "x")))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("y", "x")), 2)


# With a warning


def test_a_committed_array_elsewhere_on_the_mesh_is_moved_and_never_misread(mesh):
    function = pjit(lambda x: x * 2, in_axis_resources=P("x"), out_axis_resources=P("x"))
    there = [placed(mesh, spec) for spec in (P("y"), P(None, "x"), P(), P(("y", "x")))]
    with mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore", ReshardWarning)
        for _ in range(3):  # the first and the fast calls, in any order
            for x in [placed(mesh, P("x")), *there, X]:
                np.testing.assert_array_equal(function(x), X * 2)
    for x in there:
        np.testing.assert_array_equal(x, X)  # the argument itself is untouched


def test_one_warning_per_call_site_that_says_what_moves_where(mesh):
    def step(params, batch):
        return params["w"] * 2, batch

    function = pjit(step, in_axis_resources=({"w": P("x")}, P("x")))
    wrong = placed(mesh, P(None, "y"))
    with mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            function({"w": wrong}, X)
        function({"w": placed(mesh, P("x"))}, X)
    (warning,) = caught
    assert issubclass(warning.category, ReshardWarning)
    assert warning.filename == __file__
    message = str(warning.message)
    assert "step is called with committed arrays" in message
    # 8 devices get 2 of 8 rows, of which they hold 2 of 4 columns: 8 x 2 x 2 floats arrive.
    assert "params['w'] (float32[8,4]) from P(None, 'y') to P('x',), moving 128 bytes" in message
    assert "batch" not in message

    with mesh, pytest.warns(ReshardWarning):
        function({"w": wrong}, X)  # another call site


def test_all_moved_arguments_are_in_one_warning(mesh):
    function = pjit(lambda a, b, c: (a, b, c), in_axis_resources=P("x"))
    with mesh, pytest.warns(ReshardWarning) as caught:
        function(placed(mesh, P("y")), X, placed(mesh, P()))
    (warning,) = caught
    assert "a (float32[8,4]) from P('y',)" in str(warning.message)
    # What is replicated is everywhere already.
    assert "c (float32[8,4]) from P() to P('x',), moving 0 bytes" in str(warning.message)


def test_typed_keys_are_moved_too(mesh):
    keys = placed(mesh, P("y"), jax.random.split(jax.random.key(0), 8))
    with mesh, pytest.warns(ReshardWarning):
        out = pjit(lambda k: k, in_axis_resources=P("x"), out_axis_resources=P("x"))(keys)
    assert (jax.random.key_data(out) == jax.random.key_data(keys)).all()


# The policy


def test_allow_says_nothing(mesh):
    with mesh, reshard_policy("allow"):
        pjit(lambda x: x, in_axis_resources=P("x"))(placed(mesh, P("y")))


def test_error_refuses(mesh):
    function = pjit(lambda x: x, in_axis_resources=P("x"))
    with mesh, reshard_policy("error"):
        for _ in range(2):
            with pytest.raises(ShardingError, match=r"Sharding passed to pjit does not match.*x \(float32\[8,4\]\)"):
                function(placed(mesh, P("y")))
        function(placed(mesh, P("x")))
        function(X)
    with mesh, pytest.warns(ReshardWarning):
        function(placed(mesh, P("y")))


def test_the_policy_can_be_set_for_good():
    reshard_policy("allow")
    try:
        assert reshard_policy.current == "allow"
        with reshard_policy("error"):
            assert reshard_policy.current == "error"
        assert reshard_policy.current == "allow"
    finally:
        reshard_policy("warn")


def test_a_policy_that_is_none_of_the_three():
    with pytest.raises(ValueError, match="expects 'allow', 'warn' or 'error', but got 'ignore'"):
        reshard_policy("ignore")
    assert reshard_policy.current == "warn"


# Other devices


@pytest.mark.parametrize("spec", [P("x"), None, UNSPECIFIED])
def test_other_devices_are_an_error_that_says_how_to_move(mesh, spec):
    function = pjit(lambda a, b: b, in_axis_resources=spec)
    with mesh:
        for there in (jax.devices()[3], NamedSharding(Mesh(jax.devices()[:2], "x"), P("x"))):
            with pytest.raises(ValueError, match="incompatible devices") as raised:
                function(X, jax.device_put(X, there))
            message = str(raised.value)
            assert "b (float32[8,4]), is committed to" in message
            assert "the program runs on the devices [0, 1, 2, 3, 4, 5, 6, 7]" in message
            assert "jax.device_put(b, NamedSharding(mesh, spec))" in message


# FROM_ARRAY


def test_from_array_takes_the_sharding_of_the_array(mesh):
    function = pjit(lambda x: x * 2, in_axis_resources=FROM_ARRAY, out_axis_resources=P("x"))
    with mesh:
        for _ in range(2):
            for spec in (P("x"), P("y", "x"), P(), P(None, "y")):
                array = placed(mesh, spec)
                np.testing.assert_array_equal(function(array), X * 2)
                (sharding,), _ = function.lower(array).compile().input_shardings
                assert sharding.is_equivalent_to(array.sharding, 2)


def test_from_array_for_some_of_the_arguments_and_by_keyword(mesh):
    function = pjit(lambda a, b: (a, b), in_axis_resources=(FROM_GDA, P("x")))
    with mesh:
        a, b = function({"deep": placed(mesh, P("y"))}, X)
        assert a["deep"].sharding.is_equivalent_to(NamedSharding(mesh, P("y")), 2)
        by_keyword = pjit(lambda *, a: a, in_axis_resources=FROM_ARRAY)
        assert by_keyword(a=placed(mesh, P("y"))).sharding.is_equivalent_to(NamedSharding(mesh, P("y")), 2)


@pytest.mark.parametrize("value", [X, 1.0, jnp.asarray(X)])
def test_from_array_of_something_that_has_no_sharding_of_its_own(mesh, value):
    with mesh, pytest.raises(ValueError, match=r"of batch cannot be `pjit.FROM_GDA`"):
        pjit(lambda batch: batch, in_axis_resources=FROM_ARRAY)(value)


def test_from_array_is_for_arguments():
    with pytest.raises(ValueError, match=r"out_axis_resources\['a'\] cannot be FROM_ARRAY"):
        pjit(lambda x: {"a": x}, out_axis_resources={"a": FROM_ARRAY})


def test_from_array_is_one_object_for_ever():
    assert pickle.loads(pickle.dumps(FROM_ARRAY)) is FROM_ARRAY
    assert copy.deepcopy(FROM_GDA) is FROM_ARRAY
    assert repr(FROM_ARRAY) == "FROM_ARRAY"


def test_from_array_under_a_transformation_leaves_the_choice_to_the_program(mesh):
    function = pjit(lambda x: jnp.sin(x), in_axis_resources=FROM_ARRAY)
    with mesh:
        np.testing.assert_allclose(jax.grad(lambda x: function(x).sum())(placed(mesh, P("x"))), np.cos(X), rtol=1e-6)
