"""Replicated numbers and small arrays as arguments of calls on threads, which keep what one device has of them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from partjit import P, colocated
from partjit._jax.arrays import copy_of
from partjit.colocated import colocated_python
from partjit.colocated.runtime import pins, replicated_arguments
from tests.census import saw, sees
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

NUMBERS = [
    *(True, 3, -1.5, float("nan"), np.int8(-3), np.uint32(2**32 - 1), np.float16(0.1), np.float32(1 / 3)),
    *(np.bool_(False), np.int32(-(2**31)), ml_dtypes.bfloat16(0.1), np.complex64(2 + 1j), np.float64(1 / 3)),
]
SHAPES = [(), (5,), (3, 2), (0, 4), (5000,)]
READINGS = {
    "int": lambda x: int(x.real),
    "float": lambda x: float(x.real),
    "bool": bool,
    "item": lambda x: x.item(),
    "NumPy": lambda x: (np.asarray(x).tolist(), np.asarray(x).dtype.name, np.asarray(x).flags.writeable),
    "text": str,
    "computed with": lambda x: (x + x).item(),
    "sharding": lambda x: str(x.sharding),
    "type": lambda x: (x.aval.str_short(), x.weak_type, x.committed, x.shape),
    "shards": lambda x: [(shard.device.id, shard.data.item()) for shard in x.addressable_shards],
    "waited for": lambda x: x.block_until_ready().item(),
    "passed on": lambda x: np.asarray(echo(x)).tolist(),
    "donated twice": lambda x: [np.asarray(donate(echo(x).block_until_ready())).tolist() for _ in range(2)],
}
FATES = {"kept": lambda x: None, "deleted": lambda x: x.delete(), "donated": lambda x: donate(x)}
donate = jax.jit(lambda x: x + x, donate_argnums=0)
echo = colocated_python(lambda x: x, out_specs_fn=lambda x: x, mode="stream", stream="echo")


def read(x, names):
    """What is read of an array, or which errors there are."""
    found = []
    for name in names:
        try:
            found.append(repr(READINGS[name](x)))
        except Exception as error:
            found.append(type(error).__name__)
    return found


def look(x):
    rendezvous.hear("go")
    rendezvous.logs["seen"].append(read(x, rendezvous.logs["readings"][-1]))


note = colocated_python(look, out_specs_fn=lambda x: None, mode="stream")


@jax.jit
def late(x, products=5):
    """The array, when the devices have computed some products of matrices."""
    large = jnp.full((300, 300), 1 / 300, np.float32) + 0 * jnp.sum(x.real).astype(np.float32)
    large = jax.lax.fori_loop(0, products, lambda _, y: large @ y, large)
    return jnp.where(large[0, 0] == 9, jnp.zeros_like(x), x)


def until_in_time(attempt, x):
    """Attempts something with an array that is still computed, for longer each time, until it was in time."""
    assert any(attempt(late(x, products)) for products in (50, 500, 5000))


@sees(*FATES, *READINGS, "still computed", "computed", "different examples", "a number", "64 bits")
@given(
    st.sampled_from(NUMBERS),
    st.sampled_from(SHAPES),
    st.lists(st.sampled_from([*READINGS]), min_size=1, max_size=4),
    st.sampled_from([*FATES]),
    st.booleans(),
)
def test_a_function_sees_what_the_array_was(mesh, number, shape, readings, fate, is_late):
    rendezvous.clear()
    with jax.enable_x64(isinstance(number, np.float64)):
        x = jax.device_put(jnp.broadcast_to(jnp.asarray(number), shape), NamedSharding(mesh, P()))
        x = late(x) if is_late else x
    saw("computed" if x.is_ready() else "still computed")
    saw("a number" if shape == () else "an array")
    saw("64 bits" if x.dtype == np.float64 else "others")
    saw(fate)
    for name in readings:
        saw(name)
    rendezvous.logs["readings"].append(readings)
    note(x)
    expected = read(x, readings)
    FATES[fate](x)
    rendezvous.say("go")
    colocated.wait()
    assert rendezvous.logs["seen"] == [expected]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_function_that_reads_it_costs_no_more_than_one_shard(is_late, mesh, monkeypatch):
    copied = []

    def copy(array):
        copied.append(len(array.addressable_shards))
        return copy_of(array)

    for module in (pins, replicated_arguments):
        monkeypatch.setattr(module, "copy_of", copy)
    monkeypatch.setattr(pins, "capsule_of", lambda _: pytest.fail("a shard was pinned"))
    x = jax.device_put(jnp.float32(2), NamedSharding(mesh, P()))
    rendezvous.logs["readings"].append(["float", "NumPy", "type", "waited for"])
    rendezvous.say("go")

    def is_read_while_computed(x):
        copied.clear()
        note(x)
        was_computed = any(shard.data.is_ready() for shard in x.addressable_shards)
        colocated.wait()
        return not was_computed

    if is_late:
        until_in_time(is_read_while_computed, x)
    else:
        assert not is_read_while_computed(jax.block_until_ready(x))
    assert rendezvous.logs["seen"][-1][0] == "2.0"
    assert copied == [1] * is_late


def test_a_function_may_ask_whether_it_is_computed(mesh):
    def ask(x):
        before = x.is_ready()
        rendezvous.logs["seen"].append((before, x.block_until_ready().is_ready(), float(x)))

    def is_asked_while_computed(x):
        asks(x)
        colocated.wait()
        return rendezvous.logs["seen"][-1] == (False, True, 2)

    asks = colocated_python(ask, out_specs_fn=lambda x: None, mode="stream")
    x = jax.device_put(jnp.float32(2), NamedSharding(mesh, P()))
    assert not is_asked_while_computed(x)
    assert rendezvous.logs["seen"] == [(True, True, 2)]
    until_in_time(is_asked_while_computed, x)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_64_bits_are_kept_where_they_are_not_enabled(shape, mesh):
    with jax.enable_x64(True):
        x = jax.block_until_ready(jax.device_put(np.full(shape, 1 / 3), NamedSharding(mesh, P())))
    np.testing.assert_array_equal(np.asarray(echo(x)), np.full(shape, 1 / 3), strict=True)


def test_of_a_small_array_one_shard_is_kept(mesh, monkeypatch):
    monkeypatch.setattr(pins, "capsules_of", lambda _: pytest.fail("all shards were pinned"))
    x = jax.block_until_ready(jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P())))
    np.testing.assert_array_equal(np.asarray(echo(x)), np.arange(8.0))
