"""Integers that a loop counts: where the host drives it, it knows them without asking a device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import P, colocated, pjit
from partjit.colocated import colocated_python
from partjit.plan.passes.progressions import progressions
from partjit.plan.run import counters, link
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

COUNT = 7


@colocated_python(out_specs_fn=lambda *_: None)
def log(number, x):
    rendezvous.logs["calls"].append((int(number), float(x.sum())))


@colocated_python(out_specs=jax.ShapeDtypeStruct((), jnp.float32))
def more(x):
    """What the devices need, so that the host drives the loop."""
    return np.float32(1)


@pytest.fixture
def reads(monkeypatch):
    """What the host reads from arrays, which it waits for."""
    found = []
    for module in (counters, link):
        read = module.item_of
        monkeypatch.setattr(module, "item_of", lambda array, read=read: found.append(read(array)) or found[-1])
    return found


def turn(x, number, is_due=lambda number: number % 3 == 0):
    x = x + more(jnp.sum(x))
    jax.lax.cond(is_due(number), lambda: log(number, x), lambda: None)
    return x


def fori(first):
    return lambda x: (jax.lax.fori_loop(first, first + COUNT, lambda i, x: turn(x, i), x), first + COUNT)


def carrying(first, following):
    def fun(x):
        init = (x, first)
        (x, last), _ = jax.lax.scan(lambda s, _: ((turn(*s), following(s[1])), None), init, None, COUNT)
        return x, last

    return fun


def over(numbers, **options):
    def fun(x):
        xs = numbers()
        x, found = jax.lax.scan(lambda x, i: (turn(x, i), i), x, xs, **options)
        return x, found

    return fun


LOOPS = {  # with the numbers of their iterations; those that the host has to read come last
    "fori_loop": (fori(0), range(COUNT)),
    "fori_loop from 5": (fori(5), range(5, 5 + COUNT)),
    "fori_loop from below 0": (fori(-3), range(-3, COUNT - 3)),
    "a carry": (carrying(jnp.int32(2), lambda i: i + 1), range(2, 2 + COUNT)),
    "a carry by 4": (carrying(0, lambda i: 2 + i + 2), range(0, 4 * COUNT, 4)),
    "a carry downwards": (carrying(np.int16(9), lambda i: i - np.int16(2)), range(9, 9 - 2 * COUNT, -2)),
    "arange": (over(lambda: jnp.arange(COUNT)), range(COUNT)),
    "arange from 3": (over(lambda: jnp.arange(3, 3 + COUNT)), range(3, 3 + COUNT)),
    "arange by 2": (over(lambda: jnp.arange(1, 1 + 2 * COUNT, 2)), range(1, 1 + 2 * COUNT, 2)),
    "arange of NumPy": (over(lambda: np.arange(COUNT, dtype=np.int32) * 5), range(0, 5 * COUNT, 5)),
    "arange in reverse": (over(lambda: jnp.arange(COUNT), reverse=True), range(COUNT - 1, -1, -1)),
    "a constant": (over(lambda: jnp.full(COUNT, 6)), [6] * COUNT),
    "other numbers": (over(lambda: np.array([3, 1, 6, 0, 5, 9, 2], np.int32)), [3, 1, 6, 0, 5, 9, 2]),
    "a carry that wraps around": (
        carrying(np.uint8(252), lambda i: i + np.uint8(1)),
        [252, 253, 254, 255, 0, 1, 2],
    ),
    "a carry that doubles": (carrying(1, lambda i: 2 * i), [2**i for i in range(COUNT)]),
}
KNOWN = [*LOOPS][:12]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", LOOPS)
def test_the_host_reads_no_number_that_follows_from_that_of_the_iteration(name, devices, reads):
    fun, numbers = LOOPS[name]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
    x = jax.device_put(np.zeros(4, np.float32), jax.sharding.NamedSharding(mesh, P("x")))
    program = pjit(fun)
    assert ("by the host" in str(program.plan(x))) == (name in KNOWN)
    reads.clear()
    result, last = program(x)
    colocated.wait()
    np.testing.assert_array_equal(result, np.full(4, COUNT, np.float32))
    is_reversed = name.endswith("in reverse")
    if np.ndim(last):
        assert last.tolist() == [*numbers][:: -1 if is_reversed else 1]
    else:
        steps = np.diff([*numbers])
        assert int(last) == numbers[-1] + (steps[-1] if name != "a carry that doubles" else numbers[-1])
    assert rendezvous.logs["calls"] == [(i, 4.0 * (k + 1)) for k, i in enumerate(numbers) if i % 3 == 0]
    if name in KNOWN or devices == 1:  # several may choose by themselves whether to call
        assert bool(reads) == (name not in KNOWN)


@pytest.mark.parametrize("length", [40, 3000])
def test_what_many_operations_compute_is_not_followed(length):
    """Each uses the one before twice: to follow every use would take for ever."""

    def following(i):
        for _ in range(length):
            i = i + i
        return i

    x = np.zeros(4, np.float32)
    jaxpr = jax.make_jaxpr(lambda: jax.lax.scan(lambda i, _: (following(i), None), 1, None, COUNT)[0])()
    eqn = next(eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "scan")
    assert progressions(eqn, {}, {}) == {}
    if length == 40:
        assert "by the host" not in str(pjit(carrying(1, following)).plan(x))
