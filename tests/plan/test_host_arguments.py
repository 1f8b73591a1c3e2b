"""NumPy arrays and Python numbers that a program is called with and that only its calls read."""

import operator
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated, pjit
from partjit.colocated import colocated_python
from partjit.colocated.runtime.host_values import HostArgument
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

nothing = {"out_specs_fn": lambda *xs: None}
VALUES = [3, -1.5, True, np.int64(7), np.float32(0.5), np.arange(8), np.arange(16.0).reshape(8, 2), np.arange(6)[::2]]
WAYS = [{"mode": "inline"}, {"mode": "stream"}, {"stream": "log"}]


@pytest.fixture
def puts(monkeypatch):
    """The threads in which such arguments were put on devices."""
    threads = rendezvous.logs["puts"]  # which a function refers to, and does not copy
    real = HostArgument.array

    def array(self):
        threads.append(threading.current_thread())
        return real(self)

    monkeypatch.setattr(HostArgument, "array", array)
    return threads


def seen(x):
    kind = "jax" if isinstance(x, jax.Array) else type(x).__name__
    rendezvous.logs["seen"].append((kind, x.dtype.name, np.asarray(x).tolist()))


def logged():
    colocated.wait()
    found = [*rendezvous.logs["seen"]]
    rendezvous.logs["seen"].clear()
    return found


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_call_gets_the_array_of_the_program(mesh, value, way):
    expected = jnp.asarray(value)
    for arrays, kind in (("jax", "jax"), ("numpy", "ndarray")):
        note = colocated_python(seen, arrays=arrays, **way, **nothing)

        @pjit
        def step(x, value, note=note):
            note(value)
            return 2 * x

        with mesh:
            for _ in range(3):
                np.testing.assert_array_equal(step(np.ones(8, np.float32), value), np.full(8, 2.0))
            step.lower(np.ones(8, np.float32), value).compile()(np.ones(8, np.float32), value)
        assert logged() == [(kind, expected.dtype.name, expected.tolist())] * 4


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_of_a_number_no_array_is_made_before_more_than_the_number_of_one_was_used(way, puts):
    def look(step, loss):
        numbers = int(step), float(step), bool(step), step.item(), int(np.asarray(step)), f"{float(loss):.2f}"
        rendezvous.logs["seen"].append((*numbers, step.shape, step.dtype.name, len(rendezvous.logs["puts"])))
        rendezvous.logs["seen"].append((int(step + 1), len(rendezvous.logs["puts"])))

    note = colocated_python(look, **way, **nothing)
    step = pjit(lambda x, i: (note(i, jnp.sum(x)), 2 * x)[1])
    for i in range(2):
        puts.clear()
        step(jnp.ones(8), i)
        were_used = i > 0
        assert logged() == [(i, float(i), bool(i), i, i, "8.00", (), "int32", were_used), (i + 1, 1)]


READINGS = [int, float, bool, operator.index, complex, str, repr, hash, round, np.asarray, len, list]
READINGS += [lambda x: x.item(), lambda x: x.item(0), lambda x: x.item(1), lambda x: x + 1, lambda x: x.tolist()]
READINGS += [lambda x: f"{x}", lambda x: f"{x:.1f}", lambda x: [7, 8, 9][x], lambda x: x == 3, pickle.dumps]


@pytest.mark.parametrize(
    "value", [3, 0, -1.5, 2.7, float("nan"), float("inf"), True, np.float32(0.1), 2 + 1j], ids=repr
)
def test_a_number_is_read_as_its_array_is(value):
    def read(x, reading):
        try:
            found = reading(x)
        except Exception as error:
            return type(error)
        return np.asarray(found).dtype.name, repr(found)

    def look(x):
        rendezvous.logs["seen"].extend(read(x, reading) for reading in READINGS)

    note = colocated_python(look, stream="log", **nothing)
    pjit(lambda x, value: (note(value), 2 * x)[1])(jnp.ones(8), value)
    assert logged() == [read(jnp.asarray(value), reading) for reading in READINGS]


def test_it_has_the_sharding_of_the_program(mesh):
    def look(*values):
        rendezvous.logs["seen"].append([value.sharding for value in values])

    f = pjit(lambda x, y: colocated_python(look, **nothing)(x, y), in_axis_resources=(P("x"), None))
    with mesh:
        f(np.arange(8), 3)
    ((x, y),) = logged()
    assert x.is_equivalent_to(NamedSharding(mesh, P("x")), 1)
    assert y.is_equivalent_to(NamedSharding(mesh, P()), 0)


def test_it_is_put_on_devices_once_and_by_the_thread_of_a_call(mesh, puts):
    def look(value):
        rendezvous.logs["seen"].append(int(jnp.asarray(value) + 0))

    note = colocated_python(look, stream="log", **nothing)

    @pjit
    def step(x, i):
        note(i)
        note(i)
        return 2 * x

    with mesh:
        for i in range(3):
            step(np.ones(8), i)
    assert logged() == [0, 0, 1, 1, 2, 2]
    assert puts
    assert threading.current_thread() not in puts


def test_functions_of_numpy_arrays_get_it_without_a_device_array(mesh, puts):
    def note(i, table):
        assert not table.flags.writeable
        seen(i)
        seen(table)

    call = colocated_python(note, arrays="numpy", stream="log", **nothing)
    step = pjit(lambda x, i, table: (call(i, table), 2 * x)[1])
    with mesh:
        step(np.ones(8), 5, np.arange(3))
    assert [value for *_, value in logged()] == [5, [0, 1, 2]]
    assert not puts


@pytest.mark.parametrize("arrays", ["jax", "numpy"])
def test_whoever_made_it_may_change_it_after_the_call(mesh, arrays):
    def note(i):
        rendezvous.hear("changed")
        seen(i)

    call = colocated_python(note, arrays=arrays, stream="log", **nothing)
    step = pjit(lambda x, table: (call(table), 2 * x)[1])
    table = np.arange(3)
    with mesh:
        step(np.ones(8), table)
    table[:] = 7
    rendezvous.say("changed")
    assert [value for *_, value in logged()] == [[0, 1, 2]]


def test_what_the_devices_read_as_well_is_an_array_of_theirs(mesh):
    call = colocated_python(lambda n: n + 1, out_specs_fn=lambda n: n)

    def returned(x, n):
        call(n)
        return x, n

    def given_by_a_branch(x, n):
        return x, jax.lax.cond(jnp.sum(x) > 0, lambda n: n, lambda n: call(n), n)

    def predicate(x, n):
        return x, jax.lax.cond(n > 3, lambda x: call(x), lambda x: x, x)

    def index(x, n):
        return x, jax.lax.switch(n, [lambda x: call(x), lambda x: call(call(x)), lambda x: x], x)

    def carried(x, n):
        return x, jax.lax.fori_loop(0, 3, lambda _, n: call(n), n)

    def captured(x, n):
        return x, jax.lax.fori_loop(0, 3, lambda _, total: call(total) + call(n), 0)

    def bound(x, n):
        return x, jax.lax.fori_loop(0, n, lambda _, total: call(total), 0)

    x = np.ones(8, np.float32)
    for fun in (returned, given_by_a_branch, predicate, index, carried, captured, bound):
        with mesh:
            for n in (np.int32(1), np.int32(2)):
                with jax.disable_jit():
                    expected = pjit(fun)(x, n)
                result = pjit(fun)(x, n)
                assert jax.tree.map(np.ndarray.tolist, jax.tree.map(np.asarray, result)) == jax.tree.map(
                    np.ndarray.tolist, jax.tree.map(np.asarray, expected)
                )
                assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(result))


def test_it_may_be_donated_differentiated_around_and_batched(mesh):
    note = colocated_python(seen, stream="log", **nothing)

    def step(x, i):
        note(i)
        return jnp.sum(x**2)

    x = np.ones(8, np.float32)
    with mesh:
        assert float(pjit(step, donate_argnums=1)(x, 1)) == 8
        np.testing.assert_array_equal(jax.grad(pjit(step))(x, 2), 2 * x)
        np.testing.assert_array_equal(jax.vmap(pjit(step), (0, None))(np.stack([x, 2 * x]), 3), [8, 32])
        pjit(jax.vmap(pjit(step), (None, 0)))(x, np.arange(4, 6))
    assert [value for *_, value in logged()] == [1, 2, 3, 4, 5]


def test_an_integer_of_too_many_bits_is_named(mesh):
    note = colocated_python(seen, stream="log", **nothing)
    step = pjit(lambda x, i: (note(i), 2 * x)[1], name="step")
    with mesh:
        step(np.ones(8), 1)
        for _ in range(2):
            with pytest.raises(
                OverflowError, match=r"^Argument i of step is 1099511627776, an int, which does not fit int32"
            ):
                step(np.ones(8), 2**40)
    assert [value for *_, value in logged()] == [1]


def test_on_accelerators_it_stays_on_the_hosts(accelerators, monkeypatch):
    from partjit._jax import arrays

    devices = []
    real = arrays.xc.batched_device_put

    def put(aval, sharding, *args, **options):
        devices.append({device.id for device in sharding.device_set})
        return real(aval, sharding, *args, **options)

    def look(i, x):
        rendezvous.logs["seen"].append((int(i + 0), sorted(device.id for device in i.devices())))

    note = colocated_python(look, stream="log", **nothing)
    step = pjit(lambda x, i: (note(i, x), 2 * x)[1])
    with partjit.Mesh(accelerators, "x") as mesh:
        x = jax.device_put(np.ones(8), NamedSharding(mesh, P()))
        step(x, 0)
        monkeypatch.setattr(arrays.xc, "batched_device_put", put)
        for i in range(1, 3):
            step(x, i)
    assert logged() == [(i, [0, 1, 2, 3]) for i in range(3)]
    assert {0, 1, 2, 3} in devices
    assert {4, 5, 6, 7} not in devices
