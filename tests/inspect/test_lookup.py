"""Values are found by what people write: names, paths, lines, and gradients, which are checked by their values."""

import functools
import inspect
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partjit import P, pjit
from partjit.inspect.why.key_paths import common_end, keys_of
from partjit.inspect.why.lookup import ValueNotFoundError, look_up
from tests.census import sees
from tests.effort import examples
from tests.inspect import inspected
from tests.inspect.inspected import BATCH, evaluated, f32, partitioned, sgd


def find_value(*given):
    return look_up(*given).value


MODELS = {
    "unrolled": (inspected.unrolled_loss, inspected.unrolled_params),
    "scanned": (inspected.scanned_loss, inspected.scanned_params),
}


def paths_of(params, prefix="params"):
    return [prefix + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


@functools.cache
def gradient_of(loss):
    """Compiled once for all tests of a model."""
    return jax.jit(jax.grad(loss))


def assert_gradients(program, loss, args, params, paths, factor=1):
    """The value that is found for the gradient of each leaf of `params` is what `jax.grad` gives."""
    with inspected.mesh():
        expected = jax.tree.leaves(gradient_of(loss)(params, BATCH))
    found = [find_value(program.tree, f"gradient of {path}", program.unit.result_paths) for path in paths]
    assert len({value.number for value in found}) == len(found)
    for path, value, gradient in zip(paths, evaluated(program, found, *args), expected, strict=True):
        np.testing.assert_allclose(value, factor * gradient, atol=1e-5, err_msg=path)


@pytest.mark.parametrize("model", MODELS)
def test_the_gradients_of_a_step_of_gradient_descent(model):
    loss, make = MODELS[model]
    params, specs = make()
    program = partitioned(sgd(loss, specs), params, BATCH)
    assert_gradients(program, loss, (params, BATCH), params, paths_of(params))


@pytest.mark.parametrize("model", MODELS)
def test_the_gradients_of_what_only_computes_gradients(model):
    loss, make = MODELS[model]
    params, specs = make()
    program = partitioned(pjit(jax.grad(loss), (specs, P("data")), specs), params, BATCH)
    assert_gradients(program, loss, (params, BATCH), params, paths_of(params))


@pytest.mark.parametrize("model", MODELS)
def test_the_gradients_of_what_returns_none_of_them(model):
    loss, make = MODELS[model]
    params, specs = make()

    def norm(params, x):
        return sum(jnp.vdot(g, g) for g in jax.tree.leaves(jax.grad(loss)(params, x)))

    program = partitioned(pjit(norm, (specs, P("data")), None), params, BATCH)
    paths = [path for path in paths_of(params) if "'w" in path]
    values = evaluated(program, [find_value(program.tree, f"gradient of {path}") for path in paths], params, BATCH)
    with inspected.mesh():
        gradients = dict(zip(paths_of(params), jax.tree.leaves(gradient_of(loss)(params, BATCH)), strict=True))
    for path, value in zip(paths, values, strict=True):
        np.testing.assert_allclose(value, gradients[path], atol=1e-5, err_msg=path)


def test_gradients_that_are_added_up_are_found_as_their_sum():
    loss = inspected.unrolled_loss
    params, specs = inspected.unrolled_params()

    @functools.partial(pjit, in_axis_resources=(specs, P("data")), out_axis_resources=(specs, None))
    def step(params, x):
        def add(total, _):
            value, grads = jax.value_and_grad(loss)(params, x)
            return jax.tree.map(jnp.add, total, grads), value

        grads, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), None, length=3)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), values

    program = partitioned(step, params, BATCH)
    assert_gradients(program, loss, (params, BATCH), params, paths_of(params), factor=3)

    @functools.partial(pjit, in_axis_resources=(specs, P("data")), out_axis_resources=specs)
    def twice(params, x):
        first, second = (jax.grad(lambda p, k=k: k * loss(p, x))(params) for k in (1.0, 2.0))
        return jax.tree.map(lambda p, g, h: p - 0.1 * (g + h), params, first, second)

    assert_gradients(partitioned(twice, params, BATCH), loss, (params, BATCH), params, paths_of(params), factor=3)


def test_the_gradients_of_arguments_that_are_one_array_each():
    def loss(w, v, x):
        return jnp.sum(jnp.tanh(x @ w) @ v)

    w, v, x = (np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32) for _ in range(3))
    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(w, v, x)

    def step(w, v, x):
        g, h, _ = jax.grad(loss, (0, 1, 2))(w, v, x)
        return w - g, v - h

    def named(program):
        return evaluated(program, [find_value(program.tree, f"{name} gradient") for name in "wv"], w, v, x)

    for fun in (step, jax.grad(loss, (0, 1, 2))):
        found = named(partitioned(pjit(fun, (P("data"), None, None), None), w, v, x))
        np.testing.assert_allclose(found[0], gradients[0], atol=1e-5)
        np.testing.assert_allclose(found[1], gradients[1], atol=1e-5)


@functools.cache
def program():
    params, specs = inspected.unrolled_params()
    return partitioned(sgd(inspected.unrolled_loss, specs), params, BATCH)


@pytest.mark.parametrize(
    "text",
    [
        "params['layers'][1]['w1']",
        'params["layers"][1]["w1"]',
        "params.layers[1].w1",
        " params [ 'layers' ] [1] . w1 ",
        "params.layers.1.w1",
        "layers[1].w1",
        "['layers'][1]['w1']",
        "[1]['w1']",
        "[1].w1",
    ],
)
def test_an_argument_is_found_by_its_path_however_it_is_written(text):
    assert find_value(program().tree, text).path == "params['layers'][1]['w1']"


@pytest.mark.parametrize(
    "text",
    [
        "gradient of params['table']",
        "params['table'] gradient",
        "grad params.table",
        "grad of table",
        "the gradient of params['table']",
        "params['table']'s gradient",
        "Gradient of [ 'table' ]",
    ],
)
def test_a_gradient_is_found_however_it_is_written(text):
    tree = program().tree
    assert find_value(tree, text) is find_value(tree, "gradient of params['table']")
    assert find_value(tree, text).aval.shape == (12, 8)


def test_a_result_is_found_by_its_path_also_if_it_is_an_argument_or_another_result():
    def fun(x, y):
        z = x + y
        return {"z": z, "same": z, "x": x}

    found = partitioned(pjit(fun, (P("data"), None), None), f32(8, 8), f32(8, 8))
    paths = found.unit.result_paths
    assert find_value(found.tree, "result['z']", paths) is find_value(found.tree, "result.same", paths)
    assert find_value(found.tree, "result['x']", paths).number == find_value(found.tree, "x", paths).number


def test_the_result_of_a_function_that_returns_an_array_is_called_result():
    found = partitioned(pjit(jnp.sin, P("data"), None), f32(8, 8))
    assert find_value(found.tree, "result", found.unit.result_paths) is found.tree.outputs[0]
    assert find_value(found.tree, "result") is found.tree.outputs[0]


def test_every_value_is_found_by_its_name_in_the_printed_program():
    tree = program().tree
    paths = {value.path for value in tree.inputs}
    for value in tree.values:
        if value.name not in paths and value.name != "_":
            assert find_value(tree, value.name) is value


def test_a_name_that_is_also_a_path_means_the_path_and_says_so():
    def fun(a, b):
        return jnp.sin(b) * 2 + a

    tree = partitioned(pjit(fun, None, None), f32(8), f32(8)).tree  # the printed program calls them a and b as well
    assert look_up(tree, "a").note == ""

    def other(b, c):
        return jnp.sin(c) * 2 + b

    tree = partitioned(pjit(other, None, None), f32(8), f32(8)).tree
    found = look_up(tree, "b")
    assert found.value.path == "b"
    assert found.note == "the printed program has another value of that name, b:f32[8] P(None): use 'jaxpr b'"
    assert find_value(tree, "jaxpr b").path == "c"


def test_a_line_means_the_last_value_of_the_forward_pass_there_and_says_so():
    lines, first = inspect.getsourcelines(inspected.layer)
    line = first + next(i for i, text in enumerate(lines) if "return" in text)
    found = look_up(program().tree, f"inspected.py:{line}")
    assert found.value.aval.shape == (8, 8)
    assert found.note.endswith(
        f"equations are from inspected.py:{line}; this is the result of the last of the forward pass there"
    )
    path = pathlib.Path(inspected.__file__)
    for text in (f"{path}:{line}", f"tests/inspect/inspected.py:{line}", f"./tests/inspect/inspected.py:{line}"):
        assert find_value(program().tree, text) is found.value


def message(text):
    with pytest.raises(ValueNotFoundError) as caught:
        find_value(program().tree, text)
    return str(caught.value)


def test_what_there_is_not_is_told_with_what_is_near():
    assert message("parms['layers'][1]['w1']").startswith(
        "there is no value \"parms['layers'][1]['w1']\" in the program; did you mean params['layers'][1]['w1'] or "
    )
    assert "A value is named by its name in the printed program, by the path of an argument" in message("???")
    assert message("  ").startswith("no value is named by an empty text. A value is named by")
    assert message("gradient of parms['table']").startswith(
        "there is no argument parms['table']; there are params['table'], "
    )
    assert message("inspected.py:1").startswith("no equation is from line 1 of inspected.py; the nearest are ")
    assert message("nothing.py:1").startswith("there is no value 'nothing.py:1' in the program. A value is named by")


def test_what_may_mean_several_is_told_with_all_of_them():
    several = "params['layers'][0]['w1'], params['layers'][1]['w1'], params['layers'][2]['w1']"
    assert message("w1").startswith(f"'w1' may mean any of {several}")
    assert message("gradient of w1") == f"'w1' may mean any of {several}: write more of the path"


def test_an_end_that_an_argument_and_a_result_have_means_the_argument_and_says_so():
    found = look_up(program().tree, "table")
    assert found.value.path == "params['table']"
    assert found.note == "result[0]['table'] has this suffix as well"


def test_an_end_that_parameters_and_optimizer_state_have_means_the_parameter_and_says_so():
    def step(params, state, x):
        grads = jax.grad(lambda params: jnp.sum((x @ params["w"]) ** 2))(params)
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, ({"w": grads["w"]}, {"w": grads["w"]}))
        return jax.tree.map(lambda p, m: p - m, params, state[0]), state

    of_array = inspected.f32(8, 8)
    tree = partitioned(pjit(step), {"w": of_array}, ({"w": of_array}, {"w": of_array}), inspected.f32(4, 8)).tree
    found = look_up(tree, "w")
    assert found.value.path == "params['w']"
    assert found.note.startswith("state[0]['w'], state[1]['w'], ")
    assert found.note.endswith(" have this suffix as well")
    assert find_value(tree, "w gradient") is find_value(tree, "params['w'] gradient")


def test_a_module_means_its_parameter_or_the_last_value_there():
    found = look_up(program().tree, "layers/1/w1")
    assert (found.value.path, found.note) == ("params['layers'][1]['w1']", "")
    assert find_value(program().tree, "layers/1/w1 gradient") is find_value(program().tree, "layers[1].w1 gradient")

    def fun(x):
        with jax.named_scope("Block_0"), jax.named_scope("Norm"):
            return jnp.sin(jnp.cos(x)) + 1

    of = partitioned(pjit(fun, P("data"), None), inspected.f32(8))
    found = look_up(of.tree, "Block_0/Norm")
    assert found.value is of.tree.equations[-1].outputs[0]
    assert found.note == "3 equations are in Block_0/Norm; this is the result of the last one there"
    with pytest.raises(ValueNotFoundError, match="there is no value 'Block_0/Dense'"):
        look_up(of.tree, "Block_0/Dense")


def test_an_argument_without_a_gradient_is_told():
    assert message("gradient of x").startswith(
        "no gradient of x was recognized: no value of a backward pass has the shape (8, 12) and belongs to it"
    )


KEYS = st.lists(st.from_regex(r"[a-z_][a-z0-9_]{0,5}|[0-9]{1,3}", fullmatch=True), max_size=4)


@sees("different examples", "several elements")
@given(st.data(), st.from_regex(r"[a-z_]\w{0,5}", fullmatch=True), KEYS)
@examples(40)
def test_a_path_is_read_the_same_however_its_keys_are_written(data, name, keys):
    space = st.sampled_from(["", " "])
    ways = ["[{}]", "['{}']", '["{}"]', ".{}"]
    written = name
    for key in keys:
        gap, way = data.draw(space), data.draw(st.sampled_from(ways))
        written += gap + way.format(key)
    assert keys_of(written) == (name, *keys)
    assert common_end(("other", *keys), keys_of(written)) == len(keys)
