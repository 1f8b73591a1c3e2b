"""NumPy arrays that a function returned and that nobody else refers to are used as they are; all others are copied."""

import weakref

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import partjit
from partjit import P
from partjit.colocated import colocated_python
from partjit.colocated.runtime.unshared import unshared
from tests.census import saw, sees
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

KEPT = {  # what a function that returns an array keeps of it
    "nothing": lambda array: None,
    "itself": lambda array: array,
    "a view": lambda array: array[1:],
    "a view of a view": lambda array: array.reshape(8, -1)[2],
    "a weak reference": weakref.ref,
    "a buffer": memoryview,
    "a container": lambda array: {"own": array},
    "a closure": lambda array: lambda: array,
    "an iterator": iter,
}
ARRAYS = {
    "an array": lambda: np.zeros(64),
    "all of another one": lambda: np.zeros(64).reshape(8, 8),
    "a part of another one": lambda: np.zeros(128)[64:],
    "a view of a buffer": lambda: np.frombuffer(bytearray(512)),
}
CONTAINERS = {"tuple": tuple, "list": list, "dict": lambda values: dict(enumerate(values))}
RESULTS = st.recursive(
    st.tuples(st.sampled_from([*ARRAYS]), st.sampled_from([*KEPT])),
    lambda inner: st.tuples(st.sampled_from([*CONTAINERS]), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=4,
)


def made(plan, kept, own):
    """The result of a plan; `kept` gets what is kept of its arrays, and `own` the ids of those that nobody else has."""
    kind, rest = plan
    if kind in CONTAINERS:
        return CONTAINERS[kind]([made(inner, kept, own) for inner in rest])
    array = ARRAYS[kind]()
    kept.append(KEPT[rest](array))
    saw(kind, when=rest == "nothing")
    saw(rest)
    if rest == "nothing" and kind in ("an array", "all of another one"):
        own.append(id(array))
    return array


@sees(*KEPT, *ARRAYS, "different examples")
@given(RESULTS)
def test_the_arrays_are_found_of_which_nobody_keeps_anything(plan):
    kept, own = [], []
    returned = [made(plan, kept, own)]
    assert sorted(unshared(returned, 0)) == sorted(own)
    assert sorted(unshared(returned, 512)) == sorted(own)
    assert not unshared(returned, 513)


def test_an_array_that_is_there_twice_or_in_a_container_of_somebody_else_is_not_found():
    array = np.zeros(64)
    assert not unshared([(array, array)], 0)
    values = [np.zeros(64)]
    assert not unshared([(values,)], 0)
    assert len(unshared([([np.zeros(64)], *range(3))], 0)) == 1


SHAPE = (64, 512)


def aligned(value, *, is_aligned=True):
    """A large array that XLA could use as it is, unless it is copied; or one that it cannot use."""
    others = []
    while True:
        array = np.full(SHAPE, value, np.float32)
        if (array.ctypes.data % 64 == 0) == is_aligned:
            return array
        others.append(array)


def fresh(x):
    result = aligned(np.asarray(x)[0, 0])
    rendezvous.logs["at"].append(result.ctypes.data)
    return result


def misaligned(x):
    return aligned(np.asarray(x)[0, 0], is_aligned=False)


def one_for_all(x):
    """The same array in each call, which it changes."""
    if not rendezvous.logs["own"]:
        rendezvous.logs["own"].append(aligned(0))
    rendezvous.logs["own"][0][:] = np.asarray(x)[0, 0]
    return rendezvous.logs["own"][0]


WAYS = ["inline", "stream", "auto", "sharded", "in a program", "in a program, on a stream", "of shards", "in shard_map"]


def calling(fun, way, mesh):
    """A function that calls `fun` in that way, and its argument."""
    rows = NamedSharding(mesh, P(("x", "y")))
    sharding = rows if way == "sharded" else jax.sharding.SingleDeviceSharding(jax.devices()[0])
    spec = jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=sharding)
    x = jax.device_put(np.zeros(SHAPE, np.float32), sharding)
    if way == "in shard_map":
        alone = partjit.Mesh(np.array(jax.devices()[:1]), ("z",))
        body = colocated_python(fun, out_specs_fn=lambda x: x)
        call = jax.shard_map(body, mesh=alone, in_specs=P("z"), out_specs=P("z"), check_vma=False)
        return partjit.pjit(call), jax.device_put(x, NamedSharding(alone, P("z")))
    if way == "of shards":
        return colocated_python(lambda shard: fun(shard.data), layout="per_shard", out_specs=spec), x
    if way.startswith("in a program"):
        call = colocated_python(fun, out_specs=spec, mode="stream" if way.endswith("stream") else "auto")
        return partjit.pjit(lambda x: call(x + 1) if way == "in a program" else call(x)), x
    return colocated_python(fun, out_specs=spec, mode="inline" if way == "sharded" else way), x


@pytest.mark.parametrize("way", WAYS)
def test_a_large_result_is_used_as_it_is_unless_the_function_keeps_it_or_it_is_misaligned(way, mesh):
    call, x = calling(fresh, way, mesh)
    for i in range(2):
        result = jax.block_until_ready(call(x + i))
        at = {shard.data.unsafe_buffer_pointer() for shard in result.addressable_shards}
        assert rendezvous.logs["at"][-1] in at
    offset = 1 if way == "in a program" else 0
    for fun in (one_for_all, misaligned):
        call, x = calling(fun, way, mesh)
        results = jax.block_until_ready([call(x + i) for i in range(3)])
        for i, result in enumerate(results):
            np.testing.assert_array_equal(result, np.full(SHAPE, i + offset, np.float32))


def test_a_result_outlives_the_function_and_may_be_donated(mesh):
    call, x = calling(fresh, "inline", mesh)
    result = call(x + 3)
    view = np.asarray(result)
    double = jax.jit(lambda x: x * 2, donate_argnums=0)(result)
    np.testing.assert_array_equal(view, 3)
    np.testing.assert_array_equal(double, 6)
