"""One new array that several threads use at once: every call gets all of it, and it stays intact."""

import contextlib
import gc
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import partjit
from partjit import P, events, pjit, reshard_policy
from partjit._jax.arrays import buffers_of, for_another_thread, memory_of, replica_of
from partjit.colocated import colocated_python, deserialize, serialize
from partjit.colocated.runtime import pins
from partjit.colocated.runtime.pins import pin

X = np.arange(8, dtype=np.float32)
THREADS, ROUNDS = 4, 40


@pytest.fixture
def new_array(mesh):
    """Makes arrays over eight devices that nobody has read yet."""
    sharding = NamedSharding(mesh, P(("x", "y")))
    return jax.jit(lambda: jnp.arange(8, dtype=jnp.float32), out_shardings=sharding)


@contextlib.contextmanager
def at_allocation(number, action):
    """Has this thread run `action` in the middle of what allocates, at one allocation of an object that is tracked."""
    here, seen = threading.get_ident(), 0

    def collecting(phase, _):
        nonlocal seen
        if phase == "start" and threading.get_ident() == here:
            seen += 1
            if seen == number:
                action()

    thresholds = gc.get_threshold()
    gc.callbacks.append(collecting)
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collecting)


@contextlib.contextmanager
def switching_often():
    """Lets threads take turns after few instructions each."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def interrupted(use, number, by):
    """Uses something; at one allocation while it does so, another thread uses it as well."""
    others = []

    def from_another_thread():
        other = threading.Thread(target=by)
        other.start()
        other.join(0.05)  # it has to wait for this thread, or it need not
        others.append(other)

    with at_allocation(number, from_another_thread):
        use()
    for other in others:
        other.join()


@pytest.mark.parametrize("number", range(1, 14))  # the list of eight arrays is filled within so many allocations
def test_the_first_use_of_an_array_may_be_interrupted_by_another_thread(new_array, number):
    x = jax.block_until_ready(new_array())
    seen = []
    interrupted(lambda: seen.append(pin(x)), number, by=lambda: seen.append(pin(x)))
    assert len(buffers_of(x)) == 8
    for take in seen:
        np.testing.assert_array_equal(take(), X)


@pytest.mark.parametrize("number", range(1, 14))
def test_the_first_use_of_a_result_may_be_interrupted_by_another_thread(mesh, new_array, number):
    spec = jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(mesh, P(("x", "y"))))
    made = colocated_python(lambda x: new_array(), stream="make", out_specs=spec)(jnp.asarray(X))
    value = jax.block_until_ready(made.value())
    seen = []
    interrupted(lambda: value.addressable_shards, number, by=lambda: seen.append(np.asarray(made)))
    assert len(buffers_of(value)) == 8
    for array in [made, *seen]:
        np.testing.assert_array_equal(array, X)


@pytest.mark.parametrize("number", range(1, 7))
def test_the_first_use_of_a_replica_may_be_interrupted_by_another_thread(mesh, number):
    x = jax.block_until_ready(jax.jit(lambda: jnp.float32(3), out_shardings=NamedSharding(mesh, P()))())
    seen = []
    interrupted(lambda: seen.append(replica_of(x)), number, by=lambda: seen.append(replica_of(x)))
    assert len(buffers_of(x)) == 8
    assert [float(value) for value in [x, *seen]] == [3, *(3 for _ in seen)]


@pytest.mark.parametrize("number", range(1, 14))
def test_what_another_thread_gets_may_be_used_in_the_middle_of_the_first_use(new_array, number):
    x = new_array()
    own = for_another_thread(x)
    assert (own.aval, own.sharding, own.committed, memory_of(own)) == (x.aval, x.sharding, x.committed, memory_of(x))
    x = new_array()
    own = for_another_thread(x)
    interrupted(lambda: x.addressable_shards, number, by=lambda: own.addressable_shards)
    for array in (x, own):
        assert len(buffers_of(array)) == 8
        np.testing.assert_array_equal(array, X)


def test_what_another_thread_gets_ends_with_the_array(new_array):
    x = new_array()
    own = for_another_thread(x)
    x.delete()
    assert own.is_deleted()
    assert for_another_thread(x).is_deleted()


def _asynchronous_call(mesh):
    call = colocated_python(lambda x: x, mode="stream", out_specs=jax.ShapeDtypeStruct((8,), np.float32))
    return lambda x: call(x)


def _inline_call_per_shard(mesh):
    spec = jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(mesh, P(("x", "y"))))
    return colocated_python(lambda shard: shard.data + 0, mode="inline", layout="per_shard", out_specs=spec)


def _move_to_its_spec(mesh):
    return pjit(lambda x: x * 1, in_axis_resources=NamedSharding(mesh, P("y")))


def _capture(mesh):
    return lambda x: deserialize(serialize(lambda: x))()


@pytest.mark.parametrize("make", [_asynchronous_call, _inline_call_per_shard, _move_to_its_spec, _capture])
def test_threads_use_one_new_array_at_once(mesh, new_array, make):
    use = make(mesh)
    errors = []

    def run(x, together):
        together.wait()
        try:
            np.testing.assert_array_equal(use(x), X)
        except Exception as error:
            errors.append(error)

    with reshard_policy("allow"), switching_often():
        for _ in range(ROUNDS):
            x, together = jax.block_until_ready(new_array()), threading.Barrier(THREADS)
            threads = [threading.Thread(target=run, args=(x, together)) for _ in range(THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            np.testing.assert_array_equal(x, X)
    assert not errors, errors[0]


_together = threading.Barrier(2)


def _read_together(x):
    _together.wait(60)
    return jnp.asarray(np.asarray(x))


def test_two_calls_of_a_program_read_one_value_at_once(mesh):
    spec, sharding = jax.ShapeDtypeStruct((8,), np.float32), NamedSharding(mesh, P(("x", "y")))
    first, second = (colocated_python(_read_together, stream=stream, out_specs=spec) for stream in ("first", "second"))

    @pjit
    def program(x):
        x = partjit.with_sharding_constraint(x * 2, sharding)
        return first(x) + second(x)

    with switching_often():
        for _ in range(ROUNDS):
            np.testing.assert_array_equal(program(X), 4 * X)


@pytest.mark.parametrize(("readers", "listens", "others"), [(1, False, 0), (2, False, 2), (1, True, 1)])
def test_what_one_call_of_a_program_alone_reads_is_handed_over_as_it_is(mesh, monkeypatch, readers, listens, others):
    made = []
    monkeypatch.setattr(pins, "for_another_thread", lambda array: made.append(array) or for_another_thread(array))
    call = colocated_python(np.asarray, arrays="numpy", mode="stream", out_specs_fn=lambda x: x)
    sharding = NamedSharding(mesh, P(("x", "y")))

    @pjit
    def program(x):
        x = partjit.with_sharding_constraint(x * 2, sharding)
        return [call(x) for _ in range(readers)]

    with events.subscribe(lambda _: None) if listens else contextlib.nullcontext():  # which waits for what is computed
        for result in program(X):
            np.testing.assert_array_equal(result, 2 * X)
    assert len(made) == others
