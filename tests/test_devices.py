"""Values of one program on different devices: the error names each, its shape, both device lists and a remedy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding

import partjit
from partjit import P, ShardingError, pjit, with_sharding_constraint
from partjit.colocated import colocated_python
from partjit.inspect import explain

X = np.arange(8, dtype=np.float32)


def on(first, last):
    return NamedSharding(partjit.Mesh(jax.devices()[first : last + 1], "x"), P("x"))


def put(sharding):
    return jax.device_put(X, sharding)


def struct(sharding):
    return jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)


def add(x, y):
    return x + y


def add_of_tree(params, *, y):
    return params["w"][0] + params["w"][1] + y


def add_all(*xs):
    return sum(xs)


same = colocated_python(lambda x: x, out_specs_fn=lambda x: x)


def add_called(x, y):
    return same(x) + y


LOW, HIGH, LAST = [0, 1, 2, 3], [4, 5, 6, 7], [7]
REVERSED = [3, 2, 1, 0]


def low():
    return put(on(0, 3))


def high():
    return put(on(4, 7))


def backwards():
    mesh = partjit.Mesh(jax.devices()[3::-1], "x")
    return put(NamedSharding(mesh, P("x")))


# function, arguments, keyword arguments; the first committed argument; the others as (path, devices)
ARGUMENTS = {
    "two meshes": (add, lambda: ((low(), high()), {}), ("x", LOW), [("y", HIGH)]),
    "a mesh and a device": (add, lambda: ((low(), put(jax.devices()[7])), {}), ("x", LOW), [("y", LAST)]),
    "two orders": (add, lambda: ((low(), backwards()), {}), ("x", LOW), [("y", REVERSED)]),
    "structs": (add, lambda: ((struct(on(0, 3)), struct(on(4, 7))), {}), ("x", LOW), [("y", HIGH)]),
    "a tree and a keyword": (
        add_of_tree,
        lambda: (({"w": [X, low()]},), {"y": high()}),
        ("params['w'][1]", LOW),
        [("y", HIGH)],
    ),
    "many": (
        add_all,
        lambda: ((X, low(), high(), jnp.asarray(X), low(), put(jax.devices()[7]), high()), {}),
        ("xs[1]", LOW),
        [("xs[2]", HIGH), ("xs[5]", LAST), ("xs[6]", HIGH)],
    ),
    "a colocated call": (add_called, lambda: ((low(), high()), {}), ("x", LOW), [("y", HIGH)]),
}


def without_jit(function, *args, **kwargs):
    with jax.disable_jit():
        function(*args, **kwargs)


STAGES = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "lower": lambda function, *args, **kwargs: function.lower(*args, **kwargs),
    "plan": lambda function, *args, **kwargs: function.plan(*args, **kwargs),
    "eval_shape": lambda function, *args, **kwargs: function.eval_shape(*args, **kwargs),
    "explain": explain,
    "disable_jit": without_jit,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_on_different_devices_without_a_mesh(case, stage):
    function, make, (first, devices), others = ARGUMENTS[case]
    args, kwargs = make()
    if case == "structs" and stage in ("call", "disable_jit"):
        return  # nothing can be called with them
    with pytest.raises(ShardingError) as error:
        STAGES[stage](pjit(function), *args, **kwargs)
    header, *failures = str(error.value).split("\n\n")
    assert (
        header == f"The arguments of {function.__name__} are on different devices, and no mesh says on which it runs:"
    )
    assert failures == [
        f"One of pjit arguments, {path} (float32[8]), is committed to the incompatible devices {ids}, but {first} "
        f"(float32[8]) is on the devices {devices}\n    put them on the same devices, in the same order: "
        f"jax.device_put({path}, NamedSharding(mesh, spec)), or enter the mesh on which the program should run"
        for path, ids in others
    ]


@pytest.mark.parametrize("function", [add, add_called])
def test_a_later_call_is_checked_as_the_first(function):
    compiled = pjit(function)
    for _ in range(3):
        np.testing.assert_array_equal(compiled(low(), low()), 2 * X)
    with pytest.raises(ShardingError, match=r"y \(float32\[8\]\), is committed .* devices \[4, 5, 6, 7\]"):
        compiled(low(), high())
    np.testing.assert_array_equal(compiled(high(), high()), 2 * X)


def test_a_struct_is_where_its_sharding_says_under_a_mesh(mesh):
    with mesh:
        for stage in ("lower", "plan", "explain"):
            with pytest.raises(ShardingError, match=r"x \(float32\[8\]\), is committed .* devices \[0\]"):
                STAGES[stage](pjit(add), struct(SingleDeviceSharding(jax.devices()[0])), X)


@pytest.mark.parametrize("stage", ["call", "lower", "explain"])
@pytest.mark.parametrize("constrain", [with_sharding_constraint, jax.lax.with_sharding_constraint, jax.device_put])
def test_a_constraint_on_other_devices_than_an_argument(stage, constrain):
    def constrained(x):
        return constrain(x * 2, on(4, 7))

    with pytest.raises(ShardingError) as error:
        STAGES[stage](pjit(constrained), low())
    message = str(error.value)
    assert message.startswith(
        "Received incompatible devices for pjitted computation constrained: argument "
        f"{'0' if stage == 'explain' else 'x'} (float32[8]) is on the devices [0, 1, 2, 3], but the "
    )
    assert re.search(r"(sharding_constraint|device_put)( at .*)? on \[4, 5, 6, 7\]\. Put all arguments", message)
    assert "SHARDING" not in message


def test_what_is_differentiated_or_batched_names_its_arguments():
    for transform in (lambda f: jax.grad(lambda x, y: f(x, y).sum()), jax.vmap):
        with pytest.raises(ShardingError) as error:
            transform(pjit(add))(low(), high())
        message = str(error.value)
        assert "(float32[8]) is on the devices [0, 1, 2, 3], but argument" in message
        assert "(float32[8]) on [4, 5, 6, 7]. Put all arguments" in message


def test_a_captured_array_moves_to_the_program():
    captured = high()
    np.testing.assert_array_equal(pjit(lambda x: x + captured)(low()), 2 * X)


def test_an_eager_call_names_all_arguments():
    call = colocated_python(add_all)
    with pytest.raises(ValueError, match="All arguments must use the same device list") as error:
        call(low(), high(), low(), put(jax.devices()[7]))
    assert (
        "add_all got multiple device lists: xs[0] (float32[8]) is on [0, 1, 2, 3], xs[1] (float32[8]) is on "
        "[4, 5, 6, 7], xs[3] (float32[8]) is on [7], in this order. Move them with jax.device_put"
    ) in str(error.value)
