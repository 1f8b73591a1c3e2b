"""Where arguments are and where their specs want them: nothing is ever computed on a wrong layout."""

import copy
import pickle
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from partjit import FROM_ARRAY, FROM_GDA, UNSPECIFIED, Mesh, P, ReshardWarning, ShardingError, pjit, reshard_policy
from tests.effort import EVERYTHING, sample

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
            assert np.asarray(out) == scalar
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


# Never misread


def _layouts():
    found = np.array(jax.devices())
    meshes = {
        "same": Mesh(found.reshape(4, 2), ("x", "y")),
        "other shape": Mesh(found.reshape(2, 4), ("x", "y")),
        "other names": Mesh(found, "z"),
        "reversed": Mesh(found[::-1].reshape(4, 2), ("x", "y")),
        "transposed": Mesh(found.reshape(2, 4).T, ("x", "y")),
    }
    for name, there in meshes.items():
        for spec in [P(there.axis_names[0]), P(None, there.axis_names[-1]) if name != "other names" else P(None), P()]:
            yield f"{name}-{spec}", NamedSharding(there, spec)


IN_SPECS = [P("x"), P(("y", "x")), P(None, "y"), None, P("y", "x")]


LAYOUTS = sample([(f"{name} {in_spec}", sharding, in_spec) for name, sharding in _layouts() for in_spec in IN_SPECS], 2)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("number", "sharding", "in_spec"), [pytest.param(k, *case, id=name) for k, (name, *case) in enumerate(LAYOUTS)]
)
def test_a_committed_array_on_the_devices_of_the_mesh_is_never_misread(mesh, number, sharding, in_spec):
    x = jax.device_put(X, sharding)
    right = placed(mesh, in_spec or P())
    function = pjit(lambda x: x + jnp.arange(32.0).reshape(8, 4), in_axis_resources=in_spec)
    expected = 2 * X
    with mesh, reshard_policy("allow"):
        for argument in (x, x, right, x, X, right, x):
            np.testing.assert_array_equal(function(argument), expected)
        if EVERYTHING or number % 3 == 0:  # each of the specs, and nearly each of the layouts
            np.testing.assert_allclose(jax.vjp(function, x)[1](X)[0], X)
            np.testing.assert_array_equal(jax.vmap(function)(jnp.stack([x, x])), [expected] * 2)
            np.testing.assert_array_equal(jax.jit(function)(right), expected)


@pytest.mark.parametrize("in_spec", [UNSPECIFIED, FROM_ARRAY])
@pytest.mark.parametrize("spec", [P("x"), P("x", "y"), P(("x", "y")), P()])
def test_an_array_on_a_mesh_of_another_shape_keeps_its_place_if_nothing_is_said(mesh, in_spec, spec):
    there = Mesh(mesh.devices.reshape(2, 4), ("x", "y"))
    x = placed(there, spec)
    alone = pjit(lambda x: x * 2, in_axis_resources=in_spec)
    beside = pjit(lambda x, b: x * 2 + b, in_axis_resources=(in_spec, P("x")), out_axis_resources=P("x"))
    with mesh:
        for _ in range(3):
            out = alone(x)
            np.testing.assert_array_equal(out, 2 * X)
            assert out.sharding.is_equivalent_to(x.sharding, 2)
            out = beside(x, X)
            np.testing.assert_array_equal(out, 3 * X)
            assert out.sharding == NamedSharding(mesh, P("x"))


@pytest.mark.parametrize("in_spec", [UNSPECIFIED, FROM_ARRAY])
def test_an_array_on_the_devices_in_another_order_beside_a_spec_is_right_or_refused_by_name(mesh, in_spec):
    batch = placed(Mesh(mesh.devices[::-1], mesh.axis_names), P("x"))
    function = pjit(lambda batch, b: batch * 2 + b, in_axis_resources=(in_spec, P("x")))
    with mesh:
        for _ in range(3):
            try:
                out = function(batch, X)
            except ShardingError as error:
                assert "batch (float32[8,4])" in str(error)  # noqa: PT017
                assert "device_put" in str(error)  # noqa: PT017
            else:
                np.testing.assert_array_equal(out, 3 * X)


def test_memory_kinds_are_places_too(mesh):
    host = jax.device_put(X, NamedSharding(mesh, P("x"), memory_kind="pinned_host"))
    function = pjit(lambda x: x * 2, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh, reshard_policy("allow"):
        for x in (host, placed(mesh, P("x")), host):
            out = function(x)
            np.testing.assert_array_equal(out, X * 2)
            assert out.sharding == NamedSharding(mesh, P("x"))


def test_an_uncommitted_result_is_placed_silently(mesh):
    result = pjit(lambda x: x + 0)(X)  # on the default device, by default
    assert not result.committed
    function = pjit(lambda x: x * 2, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        for _ in range(3):
            np.testing.assert_array_equal(function(result), X * 2)


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


def _move(function, *args):
    """The messages of the warnings of two calls from one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            function(*args)
    assert all(issubclass(warning.category, ReshardWarning) for warning in caught)
    return [str(warning.message) for warning in caught]


def _other_places():
    found = np.array(jax.devices())
    yield NamedSharding(Mesh(found[::-1].reshape(4, 2), ("x", "y")), P("x"))
    yield NamedSharding(Mesh(found.reshape(2, 4), ("x", "y")), P("x"))
    yield NamedSharding(Mesh(found.reshape(4, 2), ("x", "y")), P("x"), memory_kind="pinned_host")


@pytest.mark.parametrize("sharding", [*_other_places()], ids=["device order", "mesh shape", "memory kind"])
def test_the_two_shardings_of_a_warning_never_read_alike(mesh, sharding):
    function = pjit(lambda x: x, in_axis_resources=P("x"))
    with mesh:
        (message,) = _move(function, jax.device_put(X, sharding))
    before, after = re.search(r"\) from (.*?) to (.*?), moving", message).groups()
    assert before != after


@pytest.mark.parametrize(
    ("source", "target", "moved"),
    [
        (P("x"), P(), 8 * 6 * 4 * 4),  # each device gets the six rows it has not
        (P(), P("x", "y"), 0),
        (P("x"), P(("x", "y")), 0),  # a part of what is there
        (P("y"), P("x"), 4 * 2 * 4 * 4),  # checked below
    ],
)
def test_the_bytes_that_move_are_those_a_device_does_not_hold(mesh, source, target, moved):
    x = placed(mesh, source)
    held = {d: np.zeros(X.shape, bool) for d in mesh.devices.flat}
    for device, index in x.sharding.devices_indices_map(X.shape).items():
        held[device][index] = True
    wanted = NamedSharding(mesh, target).devices_indices_map(X.shape)
    counted = 4 * sum(int((~held[device][index]).sum()) for device, index in wanted.items())
    if source != P("y"):
        assert counted == moved
    with mesh:
        (message,) = _move(pjit(lambda x: x, in_axis_resources=target), x)
    assert f"from {source} to {target}, moving {counted:,} bytes" in message


def test_each_call_site_and_each_function_warns_for_itself(mesh):
    wrong = placed(mesh, P("y"))
    first, second = (pjit(lambda x: x, in_axis_resources=P("x"), name=name) for name in ("first", "second"))
    with mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            first(wrong)
            second(wrong)
            first(wrong)
    lines = sorted((str(w.message).split()[0], w.lineno) for w in caught)
    assert [name for name, _ in lines] == ["first", "first", "second"]
    assert len({line for _, line in lines}) == 3


def test_a_loop_with_warnings_as_errors_never_gets_past_the_first_move(mesh):
    function = pjit(lambda x: x, in_axis_resources=P("x"))
    with mesh:
        for _ in range(3):  # a warning that became an error was not seen by anybody yet
            with pytest.raises(ReshardWarning):  # an error in the whole suite
                function(placed(mesh, P("y")))


def test_a_move_does_not_donate_or_change_the_users_array(mesh):
    x = placed(mesh, P("y"))
    function = pjit(lambda x: x * 2, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh, reshard_policy("allow"):
        for _ in range(3):
            function(x)
            assert x.sharding == NamedSharding(mesh, P("y"))
            np.testing.assert_array_equal(x, X)


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


def test_the_policy_changes_what_a_warm_function_does(mesh):
    function = pjit(lambda x: x * 2, in_axis_resources=P("x"))
    wrong = placed(mesh, P("y"))
    with mesh:
        for _ in range(2):
            with reshard_policy("allow"):
                np.testing.assert_array_equal(function(wrong), X * 2)
            with reshard_policy("error"), pytest.raises(ShardingError, match="bytes"):
                function(wrong)
        with pytest.raises(KeyError), reshard_policy("error"):
            raise KeyError
    assert reshard_policy.current == "warn"


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
    with pytest.raises(ValueError, match="policy must be one of 'allow', 'warn', 'error', but is 'ignore'"):
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
        a, _ = function({"deep": placed(mesh, P("y"))}, X)
        assert a["deep"].sharding.is_equivalent_to(NamedSharding(mesh, P("y")), 2)
        by_keyword = pjit(lambda *, a: a, in_axis_resources=FROM_ARRAY)
        assert by_keyword(a=placed(mesh, P("y"))).sharding.is_equivalent_to(NamedSharding(mesh, P("y")), 2)


@pytest.mark.parametrize("value", [X, 1.0, jnp.asarray(X)])
def test_from_array_of_something_that_has_no_sharding_of_its_own(mesh, value):
    with mesh, pytest.raises(ValueError, match=r"of batch cannot be `pjit.FROM_GDA`"):
        pjit(lambda batch: batch, in_axis_resources=FROM_ARRAY)(value)


def test_from_array_follows_the_array_to_its_mesh():
    function = pjit(lambda x: x * 2, in_axis_resources=FROM_ARRAY)
    for start, count in [(0, 2), (4, 4), (0, 2)]:
        there = Mesh(jax.devices()[start : start + count], "q")
        for _ in range(2):
            out = function(placed(there, P("q")))
            np.testing.assert_array_equal(out, X * 2)
            assert out.sharding.is_equivalent_to(NamedSharding(there, P("q")), 2)


def test_from_array_beside_a_spec_names_an_array_on_other_devices_once(mesh):
    function = pjit(lambda batch, b: b, in_axis_resources=(FROM_ARRAY, P("x")))
    with mesh, pytest.raises(ShardingError, match="incompatible devices") as raised:
        function(placed(Mesh(jax.devices()[:2], "x"), P("x")), X)
    assert str(raised.value).count("batch (float32[8,4])") == 1
    assert "jax.device_put(batch" in str(raised.value)


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
