"""Pieces of arrays on one process, where they are the arrays; tests/over_processes has the laws on several."""

import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from partjit import Mesh, MissingMeshError, P, ShardingError, from_process_local, pjit, to_process_local

X = np.arange(16, dtype=np.float32).reshape(8, 2)


@pytest.fixture
def mesh():
    with Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")) as mesh:
        yield mesh


def double(x):
    return 2 * x


def test_the_piece_of_the_only_process_is_the_array(mesh):
    data = {"a": X, "b": 3}
    arrays = from_process_local({"a": P("y", None), "b": None}, data)
    assert arrays["a"].sharding == NamedSharding(mesh, P("y", None))
    jax.tree.map(np.testing.assert_array_equal, arrays, data)
    assert to_process_local(arrays)["a"] is arrays["a"]
    again = from_process_local(arrays["a"].sharding, jnp.asarray(X), {"a": X.shape}["a"])
    np.testing.assert_array_equal(again, X)


def test_specs_in_another_structure_than_the_data(mesh):
    with pytest.raises(ShardingError) as raised:
        from_process_local({"a": P("y", None), "b": None, "c": None}, {"a": X, "b": 3})
    assert str(raised.value) == (
        "from_process_local specs specification must be a tree prefix of the corresponding value, local_data, but is "
        "not:\n\nspecs has the key 'c', which local_data lacks\n    local_data has the keys 'a', 'b'"
    )


def test_both_semantics_are_the_same_and_leave_the_same_fast_path(mesh, monkeypatch):
    functions = [
        pjit(double, in_shardings=P("x"), out_shardings=P("y"), positional_semantics=semantics)
        for semantics in ("global", "local")
    ]
    results = [f(X) for f in functions]
    assert results[0].sharding == results[1].sharding == NamedSharding(mesh, P("y"))
    np.testing.assert_array_equal(results[0], results[1])
    texts = [f.lower(X).compile().as_text() for f in functions]
    assert texts[0] == texts[1]
    assert str(jax.make_jaxpr(functions[0])(X)) == str(jax.make_jaxpr(functions[1])(X))
    assert functions[0].eval_shape(X) == functions[1].eval_shape(X)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(functions[1](x)))(X), np.full_like(X, 2))
    np.testing.assert_array_equal(pickle.loads(cloudpickle.dumps(functions[1]))(X), 2 * X)
    with jax.disable_jit():
        np.testing.assert_array_equal(functions[1](X), 2 * X)
    placed = jax.device_put(X, NamedSharding(mesh, P("x")))
    functions[1](placed)

    def python(*_):
        raise AssertionError("a hot call has no Python in its path")

    monkeypatch.setattr("partjit.dispatch.call_locally", python)
    np.testing.assert_array_equal(functions[1](placed), 2 * X)
    functions[1].clear_cache()
    with pytest.raises(AssertionError, match="no Python"):
        functions[1](placed)


def test_what_is_no_piece_is_refused(mesh):
    with pytest.raises(ShardingError, match=r"the pieces of process 0, local_data\['a'\] \(float32\[8,2\]\)"):
        from_process_local(P(None, "x"), {"a": X})
    with pytest.raises(ShardingError, match="resource axis z is undefined"):
        from_process_local(P("z"), X)
    with pytest.raises(ShardingError, match=r"One of the arrays, global_shape of local_data \(float32\[9,2\]\)"):
        from_process_local(P("x"), X, (9, 2))
    text = (
        r"from_process_local: local_data has the shape \(8, 2\), which is no piece of an array of the global_shape "
        r"\(16, 2\) with the spec P(artitionSpec)?\('x',\): in each dimension it has to be as long as the array, or as "
        r"this process's piece of it; leave global_shape out for one of the shape \(8, 2\)"
    )
    with pytest.raises(ValueError, match=text):
        from_process_local(P("x"), X, (16, 2))
    with pytest.raises(TypeError, match=r"from_process_local: global_shape must be a shape, .*, or a tree of shapes"):
        from_process_local({"a": P("x")}, {"a": X}, {"b": (8, 2)})
    with pytest.raises(ValueError, match="from_process_local: global_shape must be at least 0, but is -8"):
        from_process_local(P("x"), X, (-8, 2))
    with pytest.raises(TypeError, match=r"local_data of from_process_local is .*, which has no value to compute with"):
        from_process_local(P("x"), jax.ShapeDtypeStruct(X.shape, X.dtype))
    with pytest.raises(TypeError, match=r"to_process_local: arrays\[0\] must be a jax.Array"):
        to_process_local([X])
    with pytest.raises(ValueError, match="positional_semantics must be one of 'global', 'local', but is 'both'"):
        pjit(double, positional_semantics="both")


def test_a_spec_needs_a_mesh():
    with pytest.raises(MissingMeshError, match="from_process_local requires a non-empty mesh"):
        from_process_local(P("x"), X)
