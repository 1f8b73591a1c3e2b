"""Values as messages show them, and the checks that arguments have in common."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from partjit import Mesh, P, checks, pjit
from tests.bad_values import BAD_VALUES
from tests.census import saw, sees


def deleted():
    array = jnp.arange(8.0) + 1
    array.delete()
    return array


@pytest.mark.parametrize("bad", BAD_VALUES, ids=lambda bad: bad.name)
def test_any_value_is_shown_in_a_few_words(bad):
    text = checks.shown(bad.make())
    assert 0 < len(text) < 200
    assert "\n" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("4", "'4', a str"),
        (None, "None"),
        (3, "3, an int"),
        (np.float32(1.5), "np.float32(1.5), a float32"),
        (int, "<class 'int'>"),
        (P("x"), "P('x',)"),
        (np.ones((2, 3), np.int8), "<NumPy array int8[2,3]>"),
        (deleted, "<float32[8] array>"),
        ({"w": [deleted, 5]}, "{'w': [<float32[8] array>, 5]}, a dict"),
    ],
)
def test_a_value_is_shown_with_its_type(value, text):
    value = jax.tree.map(lambda leaf: deleted() if leaf is deleted else leaf, value)
    assert checks.shown(value) == text


@sees("within its bounds", "not within its bounds")
@given(st.integers(-5, 5), st.integers(-5, 5), st.integers(-5, 5), st.sampled_from([int, np.int8, np.int64]))
def test_a_whole_number_is_within_its_bounds(number, least, most, kind):
    saw("within its bounds" if least <= number <= most else "not within its bounds")
    if least <= number <= most:
        found = checks.require_integer("f", "n", kind(number), least, most)
        assert found == number
        assert type(found) is int
    else:
        with pytest.raises(ValueError, match=rf"^f: n must be at (least {least}|most {most}), but is {number}$"):
            checks.require_integer("f", "n", kind(number), least, most)


@pytest.mark.parametrize("value", ["4", 1.5, True, np.True_, None, np.array(3), jnp.int32(3)], ids=str)
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(TypeError, match=r"^f: n must be a whole number of at least 1, but is "):
        checks.require_integer("f", "n", value, 1)


@pytest.mark.parametrize("value", ["ab", b"ab", {"a": 1}, 5, None, np.array(3), jnp.ones(3)], ids=str)
def test_what_holds_no_items_is_refused(value):
    with pytest.raises(TypeError, match=r"^f: n must be a sequence, but is "):
        checks.items_of("f", "n", value, "a sequence")


def test_what_holds_items_gives_them():
    for value in ([1, 2], (1, 2), range(1, 3), np.array([1, 2]), iter([1, 2])):
        assert checks.items_of("f", "n", value, "a sequence") == (1, 2)


@pytest.mark.parametrize(
    ("check", "error", "message"),
    [
        (lambda: checks.require_flag("f", "n", 1), TypeError, "f: n must be True or False, but is 1, an int"),
        (lambda: checks.require_number("f", "n", float("nan"), "seconds"), ValueError, "n must be seconds, but is nan"),
        (lambda: checks.require_number("f", "n", True, "seconds"), TypeError, "n must be seconds, but is True, a bool"),
        (lambda: checks.require_choice("f", "n", np.array(["a"]), "ab"), TypeError, "n must be one of 'a', 'b', but"),
        (lambda: checks.require_choice("f", "n", "c", "ab"), ValueError, "n must be one of 'a', 'b', but is 'c'"),
        (
            lambda: checks.require_choice("f", "n", "c", "a", or_none=True),
            ValueError,
            "n must be 'a' or None, but is 'c'",
        ),
        (
            lambda: checks.require_choice("f", "n", 3, "ab", or_none=True),
            TypeError,
            "n must be 'a', 'b' or None, but is 3",
        ),
        (lambda: checks.require_path("f", "n", 1), TypeError, "n must be the path of a file, .* but is 1, an int"),
        (lambda: checks.require_mesh_type("f", "n", "x"), TypeError, "n must be a mesh, but is 'x', a str: make one"),
        (
            lambda: checks.require_mesh_type("f", "n", AbstractMesh((2,), ("x",))),
            TypeError,
            "n must be a mesh, but is .*: an AbstractMesh has no devices; make one with partjit.Mesh",
        ),
        (lambda: checks.devices_in("f", "n", 5), TypeError, "n must be devices or a mesh, but is 5, an int"),
        (lambda: checks.devices_in("f", "n", [None]), TypeError, r"n\[0\] must be a device, .*, but is None"),
    ],
)
def test_a_message_says_what_was_given_and_what_is_expected(check, error, message):
    with pytest.raises(error, match=message):
        check()


def test_what_is_right_comes_back():
    mesh, devices = Mesh(jax.devices()[:2], "x"), jax.devices()[:2]
    assert checks.require_flag("f", "n", np.True_) is True
    assert checks.require_choice("f", "n", "a", "ab") == "a"
    assert checks.require_number("f", "n", np.float32(0.5), "seconds") == 0.5
    assert checks.require_path("f", "n", pathlib.Path("a")) == pathlib.Path("a")
    assert checks.require_mesh_type("f", "n", mesh) is mesh
    assert checks.devices_in("f", "n", mesh) == checks.devices_in("f", "n", devices) == (*devices,)
    assert checks.devices_in("f", "n", devices[1]) == (devices[1],)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"static_argnums": "a"}, TypeError, "pjit: static_argnums must be the number of an argument, .*, but is 'a'"),
        ({"static_argnums": 5}, ValueError, "static_argnums names the argument number 5, but f takes 2 positional arg"),
        (
            {"donate_argnums": -3},
            ValueError,
            "donate_argnums names the argument number -3, but f takes 2 .* from 0 to 1",
        ),
        ({"static_argnums": True}, TypeError, "static_argnums must be a whole number, but is True, a bool"),
        ({"static_argnums": (0, "y")}, TypeError, r"static_argnums\[1\] must be a whole number, but is 'y', a str"),
        ({"donate_argnums": jnp.arange(2)}, TypeError, r"donate_argnums must be .*, but is <int32\[2\] array>"),
        ({"static_argnames": 3}, TypeError, "static_argnames must be the name of an argument, .*, but is 3, an int"),
        ({"donate_argnames": ["x", 3]}, TypeError, r"donate_argnames\[1\] must be the name of an argument, but is 3"),
        ({"static_argnames": "z"}, ValueError, "static_argnames names the argument 'z', which f lacks: .* are x, y"),
        (
            {"agree": "flag"},
            ValueError,
            r"pjit: agree must be True, \"barrier\" \(the same\), \"ahead\" or False, but is 'flag'",
        ),
        (
            {"agree": 1},
            TypeError,
            r"pjit: agree must be True, \"barrier\" \(the same\), \"ahead\" or False, but is 1, an int",
        ),
        ({"keep_unused": []}, TypeError, r"pjit: keep_unused must be True or False, but is \[\], a list"),
        ({"name": 3}, TypeError, "pjit: name must be the name of the program, a str, or None, but is 3, an int"),
        ({"in_shardings": P("x"), "in_axis_resources": P("x")}, ValueError, "both in_axis_resources and in_shardings"),
        ({"in_shardings": deleted}, TypeError, r"in_shardings leaf .* instances or None, but got <float32\[8\] array>"),
    ],
)
def test_an_option_of_pjit_that_is_none_is_refused_where_it_is_given(options, error, message):
    def f(x, y):
        return x

    options = {name: deleted() if value is deleted else value for name, value in options.items()}
    with pytest.raises(error, match=message):
        pjit(f, **options)


@pytest.mark.parametrize("option", ["static_argnums", "donate_argnums"])
def test_a_number_from_the_end_needs_an_argument(option):
    function = pjit(lambda *args: 1, **{option: -1})
    with pytest.raises(ValueError, match=rf"{option}=\(-1,\).*called with only 0 positional arguments"):
        function()
    assert function(3) == 1


def test_numbers_of_numpy_are_numbers():
    assert pjit(lambda x, n: x * n, static_argnums=np.int64(1))(2, 3) == 6
    assert pjit(lambda x, n: x * n, static_argnums=np.array([1]))(2, 3) == 6


def test_a_type_is_no_argument_of_a_call_that_runs():
    double = pjit(lambda x: 2 * x)
    struct = jax.ShapeDtypeStruct((8,), np.float32)
    assert double.eval_shape(struct).shape == (8,)
    with pytest.raises(
        TypeError, match=r"Argument x of <lambda> is .*ShapeDtypeStruct.*, which has no value .* use lower"
    ):
        double(struct)
