"""What functions return and are called with that no array can be: the error names the function and the component."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from partjit import P, pjit, with_sharding_constraint
from partjit.colocated import colocated_python

X = np.arange(8, dtype=np.float32)
same = colocated_python(lambda x: x, out_specs=jax.ShapeDtypeStruct((8,), np.float32))


def without_jit(function, *args):
    with jax.disable_jit():
        return function(*args)


STAGES = {
    "call": lambda function, *args: function(*args),
    "lower": lambda function, *args: function.lower(*args),
    "eval_shape": lambda function, *args: function.eval_shape(*args),
    "plan": lambda function, *args: function.plan(*args),
    "disable_jit": without_jit,
    "nested": lambda function, *args: pjit(lambda *args: function(*args))(*args),
    "grad": lambda function, *args: jax.grad(function)(*args),
}
NO_ARRAYS = {
    "text": "text",
    "object": object(),
    "function": np.sin,
    "array of text": np.array("text"),
    "array of objects": np.array([None]),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", NO_ARRAYS)
@pytest.mark.parametrize("calls", [False, True])
def test_a_result_that_is_no_array_is_named(stage, kind, calls):
    value = NO_ARRAYS[kind]

    def returning(x):
        return {"a": (same(x) if calls else x, value)}

    with pytest.raises(TypeError, match=r"result\['a'\]\[1\] of returning is .* which is not a valid JAX type"):
        STAGES[stage](pjit(returning), X)


def test_what_may_be_returned():
    x = jnp.asarray(X)
    returned = pjit(lambda x: [x, X, 1, 2.5, 1j, True, np.float32(3), None])(x)
    assert [*map(np.asarray, returned[2:7])] == [1, 2.5, 1j, True, 3]
    assert returned[7] is None


@pytest.mark.parametrize("value", [10**30, 2**31, -(2**31) - 1])
@pytest.mark.parametrize("stage", ["call", "lower", "plan", "disable_jit"])
def test_an_integer_without_room_is_named(stage, value):
    function = pjit(lambda tree: tree["n"][0])
    STAGES[stage](function, {"n": [2**31 - 1]})
    with pytest.raises(OverflowError, match=rf"Argument tree\['n'\]\[0\] of <lambda> is {value}.* does not fit int32"):
        STAGES[stage](function, {"n": [value]})
    with pytest.raises(OverflowError, match=rf"result\[0\] of <lambda> is {value}.* does not fit int32"):
        STAGES[stage](pjit(lambda x: [value]), X)


def keys_that_do_not_compare(leaf):
    return [{1: leaf, "a": leaf}]


OF_X = jax.ShapeDtypeStruct(X.shape, X.dtype)
TREES = {
    "The result of <lambda>": lambda: pjit(keys_that_do_not_compare)(X),
    "Argument tree": lambda: pjit(lambda tree: tree).lower(keys_that_do_not_compare(X)),
    "in_axis_resources": lambda: pjit(jnp.sin, in_axis_resources=keys_that_do_not_compare(P())),
    "out_shardings": lambda: pjit(jnp.sin, out_shardings=keys_that_do_not_compare(P())),
    "with_sharding_constraint: x": lambda: with_sharding_constraint(keys_that_do_not_compare(X), P()),
    "shardings": lambda: with_sharding_constraint(X, keys_that_do_not_compare(P())),
    "An argument of called": lambda: called(keys_that_do_not_compare(jnp.asarray(X))),
    "An argument of called, traced": lambda: pjit(lambda x: called(keys_that_do_not_compare(x)))(X),
    "The result of called": lambda: called(jnp.asarray(X)),
    "in_specs": lambda: called.specialize(in_specs=((keys_that_do_not_compare(OF_X),), {})),
    "called.specialize: out_specs": lambda: called.specialize(out_specs=keys_that_do_not_compare(OF_X)),
    "called: out_specs, eager": lambda: called.specialize(out_specs_fn=keys_that_do_not_compare)(jnp.asarray(X)),
    "called: out_specs": lambda: pjit(called.specialize(out_specs_fn=keys_that_do_not_compare))(X),
}


@colocated_python
def called(x):
    return keys_that_do_not_compare(x)


@pytest.mark.parametrize("what", TREES)
def test_keys_that_do_not_compare_are_named(what):
    named = what.partition(",")[0].replace("The result of <lambda>", "The result of keys_that_do_not_compare")
    with pytest.raises(ValueError, match=f"^{named} has a dictionary whose keys do not compare"):
        TREES[what]()


@pytest.mark.parametrize("mode", ["inline", "stream"])
@pytest.mark.parametrize("out", [P(), P(("x", "y"))])
@pytest.mark.parametrize("given", [P(), P(("x", "y")), None])
def test_a_deleted_result_is_named(mesh, mode, out, given):
    spec = jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(mesh, out))
    given_sharding = jax.devices()[0] if given is None else NamedSharding(mesh, given)
    first = []

    def returning(x):
        array = jax.device_put(X, given_sharding)
        if first:
            array.delete()
        first.append(1)
        return {"a": [array]}

    call = colocated_python(returning, mode=mode, out_specs={"a": [spec]})
    x = jnp.asarray(X)
    np.testing.assert_array_equal(call(x)["a"][0], X)
    if mode == "inline" and spec.sharding == given_sharding:
        assert call(x)["a"][0].is_deleted()  # what is returned as it should be is handed out as it is
        return
    message = r"returning returned an array that was deleted or donated: result\['a'\]\[0\] \(float32\[8\]\)"
    with pytest.raises(RuntimeError, match=message):
        np.asarray(call(x)["a"][0])


@pytest.mark.parametrize("specs", [{}, {"out_specs": jax.ShapeDtypeStruct((), np.float32)}])
@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_a_result_of_a_call_that_is_no_array_names_the_function(mode, specs):
    def returning(x):
        return "text"

    call = colocated_python(returning, mode=mode, **specs)
    for _ in range(2):
        with pytest.raises(ValueError, match="got <class 'str'> at result of returning"):
            np.asarray(call(jnp.asarray(X)))


@pytest.mark.parametrize("types", ["Auto", "Explicit"])
@pytest.mark.parametrize("shape", [(), (8,), (8, 4)])
def test_a_result_of_a_callback_needs_no_spec(shape, types):
    def doubled(x):
        return jax.pure_callback(lambda x: 2 * np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(getattr(jax.sharding.AxisType, types),))
    result = pjit(doubled, in_shardings=NamedSharding(mesh, P()))(x)
    assert result.sharding.device_set == {*jax.devices()}
    assert isinstance(result.sharding, NamedSharding)
    np.testing.assert_array_equal(result, 2 * x)
