"""Functions of pjit are pickled as functions of jax.jit are, and come back whole."""

import copy
import functools
import gc
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import warnings
import weakref

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import partjit
from partjit import FROM_ARRAY, UNSPECIFIED, P, ShardingError, colocated, pjit
from tests.census import saw, sees

ROOT = pathlib.Path(__file__).parents[1]
X = np.arange(16, dtype=np.float32).reshape(8, 2)


def through_bytes(value):
    return pickle.loads(cloudpickle.dumps(value))


@pytest.mark.parametrize("how", [pytest.param("spawn", marks=pytest.mark.system), "pipe"])
def test_workers_compute_what_their_program_does(how):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "NPROC": "32"}
    program = [sys.executable, "-P", "-W", "error", str(ROOT / "tests" / "pickling_main.py"), how]
    ran = subprocess.run(program, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert ran.stdout == "same\n", ran.stderr


def own_mesh():
    return partjit.Mesh(np.array(jax.devices()).reshape(2, 4)[:, ::-1], ("y", "x"))


SPECS = st.sampled_from([UNSPECIFIED, None, P("x"), P(None, "y"), FROM_ARRAY])
OUT_SPECS = st.sampled_from([UNSPECIFIED, None, P("x"), (P("x"), None), (UNSPECIFIED, P("y"))])


@sees("different examples", "a partitioned value", "a lowered program")
@settings(max_examples=15)
@given(st.data())
def test_a_function_that_went_through_bytes_is_lowered_as_before(mesh, data):
    bias = np.float32(data.draw(st.integers(0, 9)))

    def fun(a, times, b, unused):
        return a * times + bias, (a + b).sum(0)

    in_spec = data.draw(SPECS)
    options = {
        data.draw(st.sampled_from(["in_shardings", "in_axis_resources"])): (in_spec, data.draw(SPECS), None),
        data.draw(st.sampled_from(["out_shardings", "out_axis_resources"])): data.draw(OUT_SPECS),
        **data.draw(st.sampled_from([{"static_argnums": 1}, {"static_argnames": "times"}])),
        **data.draw(st.sampled_from([{}, {"donate_argnums": (0,)}, {"donate_argnames": ("a",)}])),
        "keep_unused": data.draw(st.booleans()),
        "name": data.draw(st.sampled_from([None, "step"])),
        "agree": data.draw(st.sampled_from([True, False, "ahead"])),
    }
    function = pjit(fun, **options)
    again = through_bytes(function)
    assert again is not function
    x = jax.device_put(X, NamedSharding(mesh, P("x")))

    def lowered(function):
        try:
            text = function.lower(x, 3, x, x).as_text()
        except ShardingError as error:
            return str(error)
        saw("a lowered program")
        return text

    with mesh, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        assert lowered(function) == lowered(again)
    assert through_bytes(again).__name__ == fun.__name__


def test_the_meshes_of_shardings_are_pickled(mesh):
    shardings = NamedSharding(own_mesh(), P("x")), NamedSharding(mesh, P(None, "y"), memory_kind="device")
    for sharding in shardings:
        assert through_bytes(sharding) == sharding
        function = through_bytes(pjit(lambda x: x + 1, in_shardings=sharding, out_shardings=sharding))
        assert function(X).sharding == sharding
    again = through_bytes(own_mesh())
    assert type(again) is partjit.Mesh
    assert again == own_mesh()


@pytest.mark.parametrize("marker", [UNSPECIFIED, FROM_ARRAY, P.UNCONSTRAINED])
def test_markers_are_themselves(marker):
    for twin in (pickle.loads(pickle.dumps(marker)), through_bytes([marker])[0], copy.deepcopy(marker)):
        assert twin is marker
    assert copy.copy(marker) is marker


def test_a_device_that_is_not_here_is_named():
    data = pickle.dumps(jax.devices()[7], protocol=0).replace(b"I7\n", b"I77\n")
    with pytest.raises(ValueError, match="Invalid device ID 77: the cpu devices here are"):
        pickle.loads(data)


@pjit
def module_level(x):
    return x + 1


def plain(x):
    return x - 1


by_another_name = pjit(plain)
of_a_partial = pjit(functools.partial(jnp.add, 1.0))


class Holder:
    @functools.partial(pjit, static_argnums=0)
    def method(self, x):
        return x * 2


def test_what_can_be_imported_is_the_same_object():
    for function in (module_level, by_another_name, Holder.method):
        for twin in (pickle.loads(pickle.dumps(function)), through_bytes(function), copy.deepcopy(function)):
            assert twin is function
        assert copy.copy(function) is function


def test_what_has_no_name_is_written_by_value(mesh):
    np.testing.assert_array_equal(through_bytes(of_a_partial)(X), X + 1)
    with pytest.raises(pickle.PicklingError, match="_recipe"):
        pickle.dumps(of_a_partial)


def test_stages_and_wrappers_of_what_was_unpickled(mesh):
    function = through_bytes(pjit(lambda x: x * 2, in_shardings=P("x"), out_shardings=P("x")))
    with mesh:
        assert function.eval_shape(X).shape == X.shape
        assert function.trace(X).lower().compile()(X).sharding.spec == P("x")
        assert function(X).sharding.spec == P("x")
        function.clear_cache()
        np.testing.assert_array_equal(jax.jit(function)(X), X * 2)
        np.testing.assert_array_equal(through_bytes(jax.jit(function))(X), X * 2)
        np.testing.assert_array_equal(jax.vmap(function)(X[None]), X[None] * 2)


def test_functions_that_refer_to_each_other_are_written_once():
    counts = {"calls": 0}

    @pjit
    def inner(x):
        counts["calls"] += 1
        return x + 1

    @pjit
    def outer(x):
        return inner(x) * 2

    first, second, counted = through_bytes((outer, inner, counts))
    np.testing.assert_array_equal(first(X), (X + 1) * 2)
    second(X[0])
    assert counted == {"calls": 2}
    assert counts == {"calls": 0}


def test_a_function_may_refer_to_itself():
    @functools.partial(pjit, static_argnums=1)
    def power(x, n):
        assert power.__name__ == "power"
        return x * power(x, n - 1) if n else x

    again = through_bytes(power)
    np.testing.assert_array_equal(again(X, 2), X**3)
    np.testing.assert_array_equal(through_bytes(again)(X, 2), X**3)
    assert "power" in again.lower(X, 1).as_text()


def test_colocated_functions_inside_come_along_and_objects_do_not():
    @colocated.colocated_python(out_specs=jax.ShapeDtypeStruct((8, 2), np.float32), devices=jax.devices()[:1])
    def load(x):
        return jnp.asarray(x) + 1

    def step(x):
        return load(x) * 2

    np.testing.assert_array_equal(through_bytes(pjit(step))(X), (X + 1) * 2)

    @colocated.colocated_python_class
    class Counter:
        def add(self, x):
            return jnp.asarray(x) + 2

    made = through_bytes(Counter)()
    np.testing.assert_array_equal(made.add(X), X + 2)
    objects = [made]
    bytes_of_object = cloudpickle.dumps(pjit(lambda x: objects[0].add(x)))
    del made, objects[:]
    gc.collect()
    colocated.wait()
    with pytest.raises(ValueError, match=r"this colocated Counter object is not one of this process.*send its class"):
        pickle.loads(bytes_of_object)


def test_what_cannot_be_pickled_is_as_for_jit():
    lock = threading.Lock()
    for wrap in (pjit, jax.jit):
        with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock' object"):
            cloudpickle.dumps(wrap(lambda x: (lock, x)[1]))


def test_nothing_is_kept():
    function = pjit(lambda x: x)
    twin = through_bytes(function)
    gone = weakref.ref(function), weakref.ref(twin)
    del function, twin
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
