"""Moves between devices of different kinds are those of `jax.device_put`; CPU devices play accelerators."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding

from partjit import P
from partjit._jax import moves


def mesh_of(devices, kind=AxisType.Auto):
    return jax.sharding.Mesh(np.array(devices).reshape(2, 2), ("x", "y"), axis_types=(kind, kind))


SPECS = [P(), P("x"), P(None, "y"), P("x", "y"), P("y", "x"), P(("x", "y")), P(("y", "x"))]


def shardings_on(devices):
    kinds = AxisType.Auto, AxisType.Explicit
    on_one = [SingleDeviceSharding(devices[2]), NamedSharding(jax.sharding.Mesh(np.array(devices[:1]), "z"), P("z"))]
    return [*on_one, *(NamedSharding(mesh_of(devices, kind), spec) for kind in kinds for spec in SPECS)]


@pytest.fixture
def reads(accelerators, monkeypatch):
    """What is read."""
    arrays, read = [], moves._read

    def seen(array):
        arrays.append(array)
        return read(array)

    monkeypatch.setattr(moves, "_read", seen)
    return arrays


def test_moves_are_those_of_jax_between_all_shardings(accelerators, reads):
    hosts = jax.devices()[:4]
    values = [np.arange(32, dtype=kind).reshape(4, 8) for kind in (np.float32, np.int8, jnp.bfloat16)]
    values += [np.arange(32).reshape(4, 8) % 2 == 0, np.zeros((0, 8), np.float32)]
    ways = [*itertools.product(shardings_on(accelerators), shardings_on(hosts))]
    ways += [(target, source) for source, target in ways]
    for source, target in ways:
        arrays = [jax.device_put(value, source) for value in values]
        found = moves.moved(arrays, [target] * len(arrays))
        expected = jax.device_put(arrays, [target] * len(arrays))
        for own, meant, value in zip(found, expected, values, strict=True):
            assert (own.aval, own.sharding, own.committed) == (meant.aval, target, True)
            shards = zip(own.addressable_shards, meant.addressable_shards, strict=True)
            assert all(a.device == b.device and np.array_equal(a.data, b.data) for a, b in shards)
            np.testing.assert_array_equal(own, value)
    assert len(reads) > len(ways)


@pytest.mark.parametrize(
    ("source", "target", "read"),
    [
        (P(), P(), [(4, 8)]),
        (P(), P("x", "y"), [(4, 8)]),
        (P("x", "y"), P("x", "y"), [(2, 4)] * 4),
        (P("x"), P("x"), [(2, 8)] * 2),
        (P("x"), P("y"), [(2, 8)] * 2),
        (P("x"), P(), [(4, 8)]),
    ],
)
def test_each_part_is_read_once_and_several_at_the_same_time(accelerators, reads, monkeypatch, source, target, read):
    asked, ask_for = [], moves._Way.ask_for
    monkeypatch.setattr(moves._Way, "ask_for", lambda way, parts: (asked.extend(parts), ask_for(way, parts))[1])
    x = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh_of(accelerators), source))
    y = moves.moved_to(x, NamedSharding(mesh_of(jax.devices()[:4]), target))
    assert len(asked) == (len(read) if len(read) > 1 else 0)
    assert moves._way(x.aval, x.sharding, y.sharding).is_transfer
    assert not moves._way(y.aval, y.sharding, x.sharding).is_transfer
    assert [array.shape for array in reads] == read
    kept = [id(array) for array in (x, *x._arrays)]  # on a GPU an array keeps what is read of it
    assert not any(id(array) in kept for array in reads)


def test_what_is_moved_does_not_end_with_what_it_was_moved_from(accelerators):
    for sharded in (False, True):
        source = NamedSharding(mesh_of(accelerators), P("x")) if sharded else accelerators[0]
        target = NamedSharding(mesh_of(jax.devices()[:4]), P("x")) if sharded else jax.devices()[0]
        x = jax.device_put(np.arange(8, dtype=np.float32), source)
        there = moves.moved_to(x, jax.device_put(x, target).sharding)
        jax.jit(lambda x: x + 1, donate_argnums=0)(x)
        np.testing.assert_array_equal(there, np.arange(8))
        x.delete()
        with pytest.raises(RuntimeError, match="Array has been deleted"):
            moves.moved_to(x, there.sharding)


def test_the_others_are_left_to_jax(accelerators, reads):
    host, device = (SingleDeviceSharding(devices[0]) for devices in (jax.devices(), accelerators))
    key = jax.device_put(jax.random.key(0), device)
    small = jax.device_put(jnp.arange(4, dtype=jnp.int4), device)
    weak = jax.device_put(jnp.asarray(1.5), device)
    (moved_key, moved_small, moved_weak, same) = moves.moved([key, small, weak, weak], [host, host, host, device])
    assert jnp.array_equal(jax.random.key_data(moved_key), jax.random.key_data(jax.random.key(0)))
    assert moved_small.tolist() == [0, 1, 2, 3]
    assert moved_weak.aval.weak_type
    assert same is weak
    assert [x.sharding for x in (moved_key, moved_small, moved_weak)] == [host] * 3
    assert [array.shape for array in reads] == [()]
    beside = [SingleDeviceSharding(devices[1]) for devices in (jax.devices(), accelerators)]
    assert [float(x) for x in moves.moved([moved_weak, weak], beside)] == [1.5, 1.5]
    assert len(reads) == 1, "between devices of a kind jax moves"
