"""Loops whose executables make calls of several streams: those of each are in order, and overlap with the others."""

import threading
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from partjit import P, colocated, pjit
from partjit.colocated import colocated_python, colocated_python_class
from partjit.colocated.runtime.emission_on_streams import ExecutionOnStreams
from partjit.colocated.runtime.streams import Stream
from partjit.plan.ir.nodes import Fragment
from partjit.plan.passes import gather
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")


@pytest.fixture(autouse=True)
def each_alone(monkeypatch):
    """Each iteration hands over the arguments of its calls; what it costs less is for `test_gather`."""
    monkeypatch.setattr(gather, "MOST_ITERATIONS", 1)


def emits(plan):
    """Whether executables make all calls of a plan."""
    return bool(plan.calls) and all(isinstance(node, Fragment) for node in plan.nodes)


PAIRS = {"two streams": ("one", "other"), "the stream of the caller and another": (None, "other")}


def noted(name, stream, wait=lambda i: None):
    """A function that notes what it is called with, and where, after a wait."""

    def note(i):
        wait(int(i))
        rendezvous.logs[name].append((int(i), threading.get_ident()))

    return colocated_python(note, out_specs_fn=lambda *_: None, stream=stream)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("devices", [1, 2])
def test_calls_of_two_streams_in_one_executable_overlap(pair, devices):
    """Those of each stream run in order, on a thread of their own: the first of one waits for the last of the other.

    That one waits for the first to begin: a thread that is done with its own may run those of the other stream.
    """

    def wait(i):
        if i == 0:
            rendezvous.say("begun")
            rendezvous.hear("last")

    def reached(i):
        if i == 4:
            rendezvous.hear("begun")
            rendezvous.say("last")

    one = noted("one", PAIRS[pair][0], wait)
    other = noted("other", PAIRS[pair][1], reached)
    program = pjit(lambda x: lax.fori_loop(0, 5, lambda i, x: (one(i), other(i), x + 1)[2], x))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
    x = jax.device_put(np.ones(8, np.float32), jax.NamedSharding(mesh, P("x")))
    assert emits(program.plan(x))
    for k in range(3):
        rendezvous.clear()
        assert program(x).tolist() == [6.0] * 8
        colocated.wait()
        for name in ("one", "other"):
            assert [i for i, _ in rendezvous.logs[name]] == [0, 1, 2, 3, 4], (name, k)
        assert {thread for _, thread in rendezvous.logs["one"]}.isdisjoint(t for _, t in rendezvous.logs["other"])


def test_calls_of_two_streams_wait_for_earlier_ones_of_their_own():
    one, other = noted("calls", "one"), noted("others", "other")
    late = colocated_python(
        lambda i: (rendezvous.hear("may go on"), rendezvous.logs["calls"].append((-1, 0)))[1],
        stream="one",
        out_specs_fn=lambda i: None,
    )
    program = pjit(lambda x: lax.fori_loop(0, 3, lambda i, x: (one(i), other(i), x)[2], x))
    late(jnp.int32(0))
    program(jnp.ones(8))
    while len(rendezvous.logs["others"]) < 3:
        time.sleep(1e-3)
    assert rendezvous.logs["calls"] == []
    rendezvous.say("may go on")
    colocated.wait()
    assert [i for i, _ in rendezvous.logs["calls"]] == [-1, 0, 1, 2]


def test_a_failure_on_one_stream_is_of_that_one():
    def fail(i):
        if int(i) == 1:
            raise ValueError("one is wrong")
        rendezvous.logs["one"].append(int(i))

    one = colocated_python(fail, stream="one", out_specs_fn=lambda *_: None)
    other = noted("other", "other")
    program = pjit(lambda x: lax.fori_loop(0, 3, lambda i, x: (one(i), other(i), x)[2], x))
    program(jnp.ones(8))
    colocated.wait("other")
    assert [i for i, _ in rendezvous.logs["other"]] == [0, 1, 2]
    with pytest.raises(ValueError, match="one is wrong"):
        colocated.wait("one")
    assert rendezvous.logs["one"] == [0, 2]


def test_calls_of_an_executable_that_fails_end_on_all_streams(meeting):
    one, other = noted("one", "one"), noted("other", "other")

    def body(i, x):
        one(i)
        other(i)
        return x + jax.pure_callback(broken, jax.ShapeDtypeStruct((), jnp.float32), i)

    def broken(i):
        if int(i) == 2:
            raise ValueError("broken")
        return np.float32(1)

    program = pjit(lambda x: lax.fori_loop(0, 4, body, x))
    with pytest.raises(Exception, match="broken"):
        jax.block_until_ready(program(jnp.ones(8)))
    colocated.wait(timeout=20)
    for name in ("one", "other"):
        assert [i for i, _ in rendezvous.logs[name]][:2] == [0, 1]


def test_an_object_with_calls_on_two_streams_is_driven_by_the_host():
    @colocated_python_class
    class Writer:
        def one(self, i) -> None:
            rendezvous.logs["calls"].append((int(i),))

        other = one

    writer = Writer()

    def body(i, x):
        with colocated.stream("one"):
            writer.one(i)
        with colocated.stream("other"):
            writer.other(i)
        return x

    program = pjit(lambda x: lax.fori_loop(0, 3, body, x))
    assert not any(fragment.calls for fragment in program.plan(jnp.ones(8)).fragments)
    program(jnp.ones(8))
    colocated.wait()
    assert rendezvous.logs["calls"] == [(i,) for i in range(3) for _ in range(2)]


@pytest.mark.parametrize("made", [0, 2])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_end_of_an_execution_is_said_once_by_whichever_stream_is_last(made, order):
    """Its number, which another execution then gets, is given back once."""
    streams, run = [Stream("one"), Stream("other")], []

    class Noted(NamedTuple):
        which: int
        positions: frozenset = frozenset({0})
        devices: int = 1

        def run(self, stream, parent, handed_over):
            run.append((self.which, stream))

    execution = ExecutionOnStreams([Noted(0), Noted(1)], (), 2**31 - 1, streams, None)
    for which in range(made):
        execution.receive(which, which, 0, [])
    execution.end(made)
    assert [execution.run_calls_of(streams[k]) for k in order] == [False, True]
    assert run == [(k, streams[k]) for k in order if k < made]
