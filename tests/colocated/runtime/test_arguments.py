"""Arguments of a call that has not ended stay as they were, whatever the caller does with them meanwhile."""

import concurrent.futures
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from partjit import Mesh, P, colocated, pjit
from partjit.colocated import colocated_python
from tests.census import saw, sees
from tests.colocated import rendezvous
from tests.effort import examples

pytestmark = [
    pytest.mark.usefixtures("meeting"),
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
]

donating = jax.jit(lambda x: x * 0, donate_argnums=0)
donating_over_x = pjit(lambda x: x * 0, in_axis_resources=P("x"), out_axis_resources=P("x"), donate_argnums=0)


@colocated_python(stream="arguments", out_specs_fn=lambda x: x)
def later(x):
    rendezvous.hear("caller is done")
    return jnp.asarray(np.asarray(x)) if x.dtype != jnp.int4 else x.astype(jnp.int4)


def caller_is_done():
    rendezvous.say("caller is done")


WAYS = {
    "donated": donating,
    "donated twice over": lambda x: [donating(x), jnp.zeros(x.shape)],
    "donated by pjit": donating_over_x,
    "deleted": lambda x: x.delete(),
    "dropped": lambda x: None,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8, np.complex64, jnp.int4, jnp.float4_e2m1fn])
def test_an_argument_stays_intact(mesh, way, dtype):
    for sharding in (NamedSharding(mesh, P("x")), NamedSharding(mesh, P()), jax.devices()[3]):
        if way == "donated by pjit" and sharding != NamedSharding(mesh, P("x")):
            continue
        rendezvous.clear()
        with mesh:
            value = np.arange(8).astype(dtype)
            x = jax.block_until_ready(jax.device_put(value, sharding))
            y = later(x)
            WAYS[way](x)
            del x
            caller_is_done()
            np.testing.assert_array_equal(np.asarray(y).astype(np.complex64), value.astype(np.complex64))


@pytest.fixture(scope="module")
def slow():
    """A product of matrices that takes a while."""
    return jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda _, y: y @ y / jnp.linalg.norm(y), x))


@pytest.mark.parametrize("way", WAYS)
def test_an_argument_that_is_still_computed_stays_intact_and_is_not_waited_for(mesh, slow, way):
    x = jax.device_put(np.eye(500, dtype=np.float32), NamedSharding(mesh, P("x")))
    expected = np.asarray(slow(x))
    computed = slow(x)
    y = later(computed)
    with mesh:
        WAYS[way](computed)
    del computed
    caller_is_done()
    np.testing.assert_array_equal(np.asarray(y), expected)


@pytest.mark.parametrize("way", ["donated", "deleted", "dropped"])
def test_a_pending_argument_stays_intact(mesh, way):
    sharding = NamedSharding(mesh, P("x"))
    x = jax.device_put(np.arange(8.0), sharding)
    first = colocated_python(lambda x: rendezvous.hear("go on") or x + 1, stream="first", out_specs_fn=lambda x: x)
    middle = first(x)
    y = later(middle)
    if way == "deleted":
        middle.delete()  # before it is there
    rendezvous.say("go on")
    if way == "donated":
        donating(middle)
    del middle
    caller_is_done()
    np.testing.assert_array_equal(np.asarray(y), np.arange(8.0) + 1)


def test_typed_keys_and_strings_stay_intact():
    key = jax.random.key(3)
    expected = np.asarray(jax.random.key_data(key))
    keys = colocated_python(lambda k: rendezvous.hear("caller is done") or k, stream="k", out_specs_fn=lambda k: k)
    y = keys(key)
    key._base_array.delete()
    caller_is_done()
    np.testing.assert_array_equal(np.asarray(jax.random.key_data(y)), expected)


def test_an_argument_deleted_before_is_refused_at_the_call():
    x = jnp.ones(3)
    f = colocated_python(lambda x: x, mode="stream", out_specs_fn=lambda x: x)
    result = f(x + 1)
    for array in (x, result, jax.random.key(3)):
        array.delete()
        with pytest.raises(
            RuntimeError, match=r"a colocated function was called with a deleted array: (float|uint)32\["
        ):
            f(array)


def test_the_memory_of_an_argument_is_free_after_the_call():
    x = jax.block_until_ready(jnp.arange(8.0) + 1)
    f = colocated_python(lambda x: None, mode="stream", out_specs_fn=lambda x: None)
    f(x)
    colocated.wait()
    pointer = x.unsafe_buffer_pointer()
    y = donating(x)
    assert x.is_deleted()
    assert y.unsafe_buffer_pointer() == pointer  # nobody holds it, so it was given away


step_once = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)


@sees("two streams", "a donated argument")
@examples(30)
@given(st.data())
def test_calls_see_the_values_at_their_calls(data):
    """A state that every step consumes; calls on several streams look at it at random times."""
    rendezvous.clear()
    seen = rendezvous.logs["seen"]
    streams = [
        colocated_python(
            lambda step, x: (
                rendezvous.hear("caller is done") or rendezvous.logs["seen"].append((int(step), x.tolist()))
            ),
            stream=f"look {i}",
            out_specs_fn=lambda step, x: None,
        )
        for i in range(3)
    ]
    x, values = jnp.asarray(np.arange(3, dtype=np.float32)), []
    steps = data.draw(st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=5))
    saw("two streams", when=any(len({*looks}) > 1 for looks in steps))
    saw("a donated argument", when=any(steps))
    for step, looks in enumerate(steps):
        values += [(step, np.asarray(x).tolist())] * len(looks)
        for i in looks:
            streams[i](jnp.int32(step), x)
        x = step_once(x)
    caller_is_done()
    colocated.wait()
    assert sorted(seen) == sorted(values)


@pytest.mark.parametrize("mode", ["stream", "auto"])
def test_a_result_that_is_an_argument_is_another_array(mode):
    f = colocated_python(lambda x: (x, x + 1), mode=mode)
    for _ in range(10):
        x = jax.block_until_ready(jnp.arange(8.0) + 1)
        same, _ = f(x)
        jax.block_until_ready(same)
        donating(x)
        np.testing.assert_array_equal(same, np.arange(8.0) + 1)


def test_copies_and_aliases_are_committed_as_the_argument_was(slow):
    f = colocated_python(
        lambda x: rendezvous.logs["committed"].append(x.committed), mode="stream", out_specs_fn=lambda x: None
    )
    eye = np.eye(500, dtype=np.float32)
    for x in (jnp.asarray(eye), jax.device_put(eye, jax.devices()[0])):
        for argument in (slow(x), jax.block_until_ready(slow(x))):
            f(argument)
    colocated.wait()
    assert rendezvous.logs["committed"] == [False, False, True, True]


@pytest.mark.parametrize("is_ready", [False, True])
def test_copies_and_aliases_are_as_weakly_typed_as_the_argument(is_ready):
    slow = jax.jit(lambda x: jnp.where(jax.lax.fori_loop(0, 20, lambda _, y: y @ y, x)[0, 0] > 0, 2.0, 1.0))
    f = colocated_python(
        lambda x: rendezvous.logs["types"].append((x.dtype.name, x.weak_type)),
        mode="stream",
        out_specs_fn=lambda x: None,
    )
    weak = slow(np.eye(500, dtype=np.float32))
    f(jax.block_until_ready(weak) if is_ready else weak)
    f(jnp.float32(2))
    colocated.wait()
    assert weak.weak_type
    assert rendezvous.logs["types"] == [("float32", True), ("float32", False)]


@pytest.mark.parametrize("kind", ["device", "pinned_host", "unpinned_host"])
@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_arguments_keep_the_kind_of_their_memory(mesh, mode, kind):
    sharding = NamedSharding(mesh, P("x"), memory_kind=kind)
    x = jax.device_put(np.arange(8, dtype=np.float32), sharding)
    call = colocated_python(lambda x: x, mode=mode, out_specs_fn=lambda x: x)
    result = call(x)
    np.testing.assert_array_equal(result, np.arange(8))
    assert result.sharding == sharding


# Arrays that several calls in flight have


def act(action, x):
    """Does something with its argument, and returns its value or the argument itself."""
    value = np.asarray(x).copy()
    match int(action):
        case 0:
            return value
        case 1:
            return x
        case 2:
            rendezvous.logs["kept"].append((x, value))
        case 3:
            x.delete()
        case 4:
            donating(x)
    return value


acting = colocated_python(act, mode="stream", out_specs_fn=lambda _, x: x)


@sees("two streams", "a kept array", "an array its function deletes", "an argument as a result", "a deleted result")
@examples(40)
@given(st.data())
def test_what_becomes_of_an_array_in_one_call_no_other_call_sees(mesh, data):
    rendezvous.clear()
    steps = st.tuples(
        st.integers(0, 4),
        st.integers(0, 1),
        st.sampled_from(["go on", "wait", "donate", "delete", "donate a result", "delete a result"]),
    )
    steps = data.draw(st.lists(steps, min_size=1, max_size=12))
    saw("two streams", when=len({caller for _, caller, _ in steps}) == 2)
    x, base, results = None, 0, []
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(concurrent.futures.ThreadPoolExecutor(1)) for _ in range(2)]
        for action, caller, then in steps:
            if x is None:
                base += 100
                x = jax.block_until_ready(jax.device_put(np.float32(np.arange(16) + base), NamedSharding(mesh, P("x"))))
            result = callers[caller].submit(acting, action, x).result()
            results.append((result, base))
            saw("a kept array", when=action == 2)
            saw("an array its function deletes", when=action == 3)
            saw("an argument as a result", when=action == 1)
            saw("a deleted result", when=action == 1 and then == "delete a result")
            if then == "wait":
                jax.block_until_ready([result for result, _ in results])
            elif then in ("donate", "delete"):
                donating(x) if then == "donate" else x.delete()
                x = None
            elif then in ("donate a result", "delete a result"):
                result, before = results.pop()
                np.testing.assert_array_equal(result, np.arange(16.0) + before)
                donating(result) if then == "donate a result" else result.delete()
    for result, before in results:
        np.testing.assert_array_equal(result, np.arange(16.0) + before)
    for array, value in rendezvous.logs["kept"]:
        np.testing.assert_array_equal(array, value)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_call_borrows_what_the_one_before_has_not_kept(is_kept):
    def note(x):
        rendezvous.hear("caller is done")
        rendezvous.logs["ids"].append(id(x))
        if is_kept:
            rendezvous.logs["kept"].append(x)

    f = colocated_python(note, mode="stream", out_specs_fn=lambda x: None)
    x = jax.block_until_ready(jnp.arange(8.0) + 1)
    for _ in range(3):
        f(x)
    caller_is_done()
    colocated.wait()
    assert len({*rendezvous.logs["ids"]}) == (3 if is_kept else 1)


def test_a_result_that_is_an_argument_becomes_an_array_when_its_value_is_used():
    f = colocated_python(lambda x: x, mode="stream", out_specs_fn=lambda x: x)
    x = jax.block_until_ready(jnp.arange(8.0) + 1)
    first, second = f(x), f(x)
    colocated.wait()
    assert first.block_until_ready() is first
    assert first.is_ready()
    assert not first.is_deleted()
    assert first.unsafe_buffer_pointer() == x.unsafe_buffer_pointer() == second.unsafe_buffer_pointer()
    first.delete()
    x.delete()
    assert first.is_deleted()
    assert not second.is_deleted()
    np.testing.assert_array_equal(second, np.arange(8.0) + 1)


# Arguments that are returned with a sharding in other words: another array in the same memory


def same_when_done(x):
    rendezvous.hear("caller is done")
    return x


def returning(**said):
    """A function that returns its argument, sharded in other words than that; and an argument."""
    mesh = Mesh(np.array(jax.devices()[:2])[:, None], ("x", "y"))
    out_spec = jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(mesh, P(("x", "y"))))
    x = jax.block_until_ready(jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("x"))))
    return colocated_python(same_when_done, out_specs=out_spec, **said), x


def test_results_of_calls_that_share_an_argument_end_alone():
    call, x = returning(mode="stream")
    results = [call(x) for _ in range(4)]
    caller_is_done()
    for result in results:
        assert donating(result).tolist() == [0] * 8


def test_a_cheap_call_returns_another_array_than_its_argument():
    call, x = returning()
    caller_is_done()
    for _ in range(30):  # on a thread, and then in the caller
        donating(call(x))
    assert x.tolist() == [1] * 8
