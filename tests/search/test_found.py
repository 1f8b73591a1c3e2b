"""What was found, for arguments of all kinds: as Python to paste, as a function, and as a report."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partjit import Mesh, P, search_specs, specs_like
from partjit.search import Constraint
from partjit.search.python_text import rules_of
from tests.census import sees
from tests.search.models import MACHINE

OPTIONS = {"machine": MACHINE, "questions": 4, "isolated": False}


def grid():
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))


def step(params, *data):
    x, y = data
    grads = jax.grad(lambda p: jnp.sum((jnp.tanh(x["a"] @ p["w"]) - y) ** 2))(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), None


def arrays():
    return {"w": jnp.ones((16, 8)) / 8}, {"a": jnp.ones((8, 16)), "mask": None}, jnp.linspace(0, 1, 64).reshape(8, 8)


def pasted(found, **names: Any):
    exec(found.to_python(), names)
    return names["in_specs"], names["out_specs"]


def test_several_arguments_of_one_parameter_have_names_of_their_own():
    params, *data = arrays()
    found = search_specs(step, params, *data, mesh=grid(), **OPTIONS)
    ins, outs = pasted(found, params=params, data=data, result=(params, None))
    assert jax.tree.leaves((ins, outs)) == jax.tree.leaves((found.in_specs, found.out_specs))
    (number,) = [value.number for value in found._program.inputs if value.path == "params['w']"]
    constrained = dataclasses.replace(found, constraints=(Constraint(P(), "", "", (), (number,)),))
    with grid():
        result, _ = constrained.pjit()(params, *data)
        with pytest.raises(TypeError, match=r"Argument data\[1\] of step"):
            constrained.pjit()(params, data[0], "text")
    np.testing.assert_allclose(result["w"], step(params, *data)[0]["w"], rtol=1e-5)


def test_arguments_without_arrays_need_no_name():
    def with_nothing(nothing, x, empty):
        assert nothing is None
        assert not empty
        return x + 1, None, {}

    x = jnp.ones((8, 8))
    found = search_specs(with_nothing, None, x, {}, mesh=grid(), **OPTIONS)
    ins, outs = pasted(found)
    assert (ins, outs) == ((None, found.in_specs[1], None), (found.out_specs[0], None, None))
    with grid():
        np.testing.assert_array_equal(found.pjit()(None, x, {})[0], x + 1)


def test_scalars_of_python_are_the_same_in_the_report():
    def scaled(params, rate):
        return jax.tree.map(lambda p: p - rate * p, params)

    found = search_specs(
        scaled, {"w": jnp.ones((64, 64), jnp.bfloat16)}, 0.1, mesh=grid(), **{**OPTIONS, "questions": 20}
    )
    assert not found.constraints
    assert found.report.whole.tree.outputs[0].aval.dtype == jnp.bfloat16
    assert found.report.memory[0].peak == found.peak
    assert found.time.at_most == pytest.approx(found.seconds)


@sees("different examples", "several elements", "an axis name")
@given(st.dictionaries(st.tuples(*[st.integers(0, 2)] * 3), st.sampled_from([P(), P("x"), P("y")]), min_size=1))
def test_each_path_has_one_rule(specs):
    tree: dict[str, dict[str, dict[str, P]]] = {}
    for (i, j, k), spec in specs.items():
        tree.setdefault(f"layer_{i}", {}).setdefault(f"{j}", {})[f"w{k}"] = spec
    arrays = jax.tree.map(lambda _: jax.ShapeDtypeStruct((4, 4), jnp.float32), tree)
    assert specs_like(arrays, rules_of(tree)) == tree
