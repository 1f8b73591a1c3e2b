"""Executables that make calls of several objects: each has its state, its order, and one call at a time."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from partjit import Mesh, colocated, pjit
from partjit.colocated import colocated_python, colocated_python_class
from partjit.plan.ir.nodes import Fragment
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


def is_one_executable(plan):
    return bool(plan.calls) and [type(node) for node in plan.nodes] == [Fragment]


class Total:
    """What was added so far, and how often."""

    def __init__(self, at=0.0):
        self.at, self.count = float(at), 0

    def add(self, x):
        self.at += float(x)
        return np.float32(self.at)

    def see(self, x) -> None:
        self.at += float(x)
        self.count += 1

    def next(self):
        return self.add(1)

    def position(self):
        return np.float32(self.at)

    def seek(self, position):
        self.at = float(position)


TOTALS = colocated_python_class(Total, uses_jax=False, state=("position", "seek"), devices=jax.devices()[0])
for name in ("add", "next", "position"):
    setattr(TOTALS, name, getattr(TOTALS, name).specialize(out_specs=NUMBER))


def by_hand(n):
    one, other, x, seen = Total(), Total(10), np.float32(1), []
    for _ in range(n):
        x = np.float32(other.add(one.add(x)) / 8)
        one.see(x)
        seen.append(one.position())
    return x, np.array(seen), one.at, other.at


@pytest.mark.parametrize("devices", [1, 8])
def test_a_loop_with_methods_of_two_objects_is_one_executable(devices):
    one, other = TOTALS(), TOTALS(10)

    def step(x, _):
        x = other.add(one.add(x)) / 8
        one.see(x)
        return x, one.position()

    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    program = pjit(lambda x: lax.scan(step, x, None, length=5), in_shardings=None, out_shardings=None)
    with mesh:
        assert is_one_executable(program.plan(jnp.float32(1)))
        x, seen = program(np.float32(1))
    expected = by_hand(5)
    np.testing.assert_allclose(x, expected[0])
    np.testing.assert_allclose(seen, expected[1])
    assert (float(one.position()), float(other.position())) == pytest.approx(expected[2:])


@pytest.mark.parametrize("count", [1, 2])
def test_calls_made_ahead_are_undone_for_each_object(count):
    totals, expected = [[make(10.0 * k) for k in range(count)] for make in (TOTALS, Total)]
    ahead = [total.next.specialize(run_ahead=3) for total in totals]

    def step(x, _, totals=totals):
        seen = [total.position() for total in totals]  # of a call that only shows the state, and may be the first
        return sum(total.add(x) for total in totals) / 8, seen

    program = pjit(lambda x: lax.scan(step, x, None, length=3))
    assert is_one_executable(program.plan(jnp.float32(1)))
    for _ in range(2):
        for following, total in zip(ahead, expected, strict=True):
            assert float(following()) == total.next()
        x, seen = np.float32(1), []
        for _ in range(3):
            x, positions = step(x, None, expected)
            seen.append(positions)
        found = program(jnp.float32(1))
        np.testing.assert_allclose(found[0], x)
        np.testing.assert_allclose(np.transpose(found[1]), seen)


def test_loggers_that_are_two_objects_are_called_by_one_executable():
    totals = [TOTALS(), TOTALS(10)]

    def step(i, x):
        for total in totals:
            total.see(x)
        return x + 1

    program = pjit(lambda x: lax.fori_loop(0, 5, step, x))
    assert is_one_executable(program.plan(jnp.float32(0)))
    assert float(program(jnp.float32(0))) == 5
    assert [float(total.position()) for total in totals] == [10, 20]


def test_a_program_in_a_call_on_its_stream_has_its_object_for_itself():
    """The call is on the stream of those that the program makes, but not one of their object."""

    @colocated_python_class
    class Writer:
        def write(self, i) -> None:
            rendezvous.logs["running"].append(i)
            time.sleep(0.002)
            rendezvous.logs["at once"].append(len(rendezvous.logs["running"]))
            rendezvous.logs["running"].pop()

    writer = Writer()
    own, elsewhere = (writer.write.specialize(stream=stream) for stream in ("own", "elsewhere"))
    program = pjit(lambda x: lax.fori_loop(0, 20, lambda i, x: (own(i), x + 1)[1], x))
    assert is_one_executable(program.plan(jnp.float32(0)))
    outer = colocated_python(program, out_specs_fn=lambda x: x, stream="own", mode="stream")
    x = outer(jnp.float32(0))
    for i in range(20):
        elsewhere(jnp.int32(i))
    colocated.wait(timeout=60)
    assert float(x) == 20
    assert rendezvous.logs["at once"] == [1] * 40
