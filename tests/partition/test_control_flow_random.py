"""Random programs with calls in loops, branches, derivatives and batches do what the same program does by hand.

`PARTJIT_PROFILE=soak` draws a thousand of each kind.
"""

import collections
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated, pjit
from partjit.partition import cut, loops
from tests.partition import control_flow_operations as operations
from tests.partition import random_control_flow as rc
from tests.partition.control_flow_by_hand import ByHand
from tests.partition.control_flow_traced import Traced

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(rc.SHAPE)
Y = np.cos(np.arange(32, dtype=np.float32)).reshape(rc.SHAPE)
S = np.float32(0.75)

drawn = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    deadline=None,
    max_examples=rc.EXAMPLES,
)


@pytest.fixture(scope="module")
def meshes():
    """The mesh of a program, by its number of devices."""
    devices = np.array(jax.devices())
    return {
        1: partjit.Mesh(devices[:1].reshape(1, 1), ("x", "y")),
        8: partjit.Mesh(devices.reshape(4, 2), ("x", "y")),
    }


def by_hand(hand, program, turns):
    """The results and the recorded calls of a program that is evaluated operation by operation."""
    results = hand.results(program, [jnp.int32(turns), *map(jnp.asarray, (X, Y, S))])
    return [np.asarray(result) for result in results], [*operations.trace]


def compiled(program, mesh, monkeypatch):
    for module in (cut, loops):
        monkeypatch.setattr(module, "WORTH_A_DISPATCH", program.worth_a_dispatch)
    return pjit(
        Traced(program, mesh),
        in_axis_resources=(None, P("x", "y"), P("y"), None),
        out_axis_resources=program.out_specs,
        donate_argnums=(1,) if program.donated else (),
    )


def arguments(mesh, turns):
    specs = [P(), P("x", "y"), P("y"), P()]
    values = [np.int32(turns), X, Y, S]
    return [jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in zip(values, specs, strict=True)]


def by_lane(recorded, left_out):
    """What was recorded of the calls of each stream and of each object."""
    lanes = collections.defaultdict(list)
    for stream, of, number, sums in recorded:
        # Whether the backward call of a zero cotangent is made is a matter of how well zeros are tracked.
        if number in left_out or (number >= rc.BACKWARD and not any(sums)):
            continue
        lanes["stream", stream].append((number, sums))
        if of is not None:
            lanes["object", of].append((number, sums))
    return lanes


def pure_calls(program):
    return {step.number for step in rc.calls_of(program.steps) if step.pure}


def same_trace(made, meant, pure):
    """Each call once, in the order of its stream and of its object, with its arguments."""
    made, meant = by_lane(made, pure), by_lane(meant, pure)
    assert {lane: [n for n, _ in calls] for lane, calls in made.items()} == {
        lane: [n for n, _ in calls] for lane, calls in meant.items()
    }
    for lane, calls in meant.items():
        for (_, sums), (_, expected) in zip(made[lane], calls, strict=True):
            np.testing.assert_allclose(sums, expected, rtol=1e-4, atol=1e-4)


def same_values(results, expected):
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(np.asarray(result), value, rtol=1e-4, atol=1e-4)


@drawn
@given(rc.random_programs())
def test_a_program_means_what_it_means_by_hand(meshes, monkeypatch, program):
    mesh, hand = meshes[program.devices], ByHand()
    operations.mesh[:] = [mesh]
    function = compiled(program, mesh, monkeypatch)
    with mesh:
        assert (
            function.plan(*arguments(mesh, 0)).source
            == compiled(program, mesh, monkeypatch).plan(*arguments(mesh, 0)).source
        ), "the same program has the same plan"
    expected = []
    operations.start()
    for turns in program.turns:
        expected.append(by_hand(hand, program, turns))
        operations.start(anew=False)
    operations.start()
    for turns, (values, recorded) in zip(program.turns, expected, strict=True):
        with mesh:
            results = function(*arguments(mesh, turns))
        same_values(results, values)
        for result, spec in zip(results, program.out_specs, strict=True):
            if spec is not None:
                assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), result.ndim)
        colocated.wait(timeout=60)
        same_trace(operations.trace, recorded, pure_calls(program))
        assert len(operations.trace) <= len(recorded), "pure calls are made once at most"
        operations.start(anew=False)


@drawn
@given(rc.random_programs(), st.integers(0, 9), st.sampled_from([0, 0, 1, 2]))
def test_what_fails_in_a_turn_is_told_and_leaves_the_rest_alone(meshes, monkeypatch, program, which, turn):
    calls, pure = [step.number for step in rc.calls_of(program.steps)], pure_calls(program)
    assume(calls)
    number = calls[which % len(calls)]
    mesh, turns = meshes[program.devices], program.turns[0]
    operations.mesh[:] = [mesh]
    operations.start()
    expected, recorded = by_hand(ByHand(), program, turns)
    operations.start(failing_call=number, turn=turn)
    fails_by_hand = made_often(recorded, number, turn)
    told = pytest.raises(ValueError, match=f"call {number} fails")
    with told if fails_by_hand else contextlib.nullcontext():
        by_hand(ByHand(), program, turns)
    meant = by_lane(operations.trace, pure)
    function = compiled(program, mesh, monkeypatch)
    operations.start(failing_call=number, turn=turn)
    raised = run_that_may_fail(function, mesh, turns, expected)
    assert bool(raised) == made_often(operations.trace, number, turn)
    for error in raised:
        assert f"call {number} fails" in str(error)
        assert any("control_flow_traced.py" in note for note in error.__notes__), "it names the line of the call"
    order = by_lane(recorded, pure)
    for lane, ran in by_lane(operations.trace, pure).items():
        following = iter(order[lane])
        assert all(any(n == m for m, _ in following) for n, _ in ran), "in program order"
        if meant[lane] and meant[lane][-1][0] == number and fails_by_hand and number not in pure:
            before = ran[: len(meant[lane])]
            assert [n for n, _ in before] == [n for n, _ in meant[lane]], "what came before has been made"
            for (_, sums), (_, hand) in zip(before, meant[lane], strict=True):
                np.testing.assert_allclose(sums, hand, rtol=1e-4, atol=1e-4)
    operations.start()
    assert not run_that_may_fail(function, mesh, turns, expected)
    same_trace(operations.trace, recorded, pure)


def made_often(recorded, number, turn):
    """Whether a call was made so often that it came to the turn in which it fails."""
    return sum(one == number for _, _, one, _ in recorded) > turn


def run_that_may_fail(function, mesh, turns, expected):
    """What a call of the program raises, and then its results and what is left of its calls; results must be right."""
    raised = []
    try:
        with mesh:
            results = function(*arguments(mesh, turns))
        for result, value in zip(results, expected, strict=True):
            try:
                same_values([result], [value])
            except ValueError as error:
                raised.append(error)
    except ValueError as error:
        raised.append(error)
    try:
        colocated.wait(timeout=60)
    except ValueError as error:
        raised.append(error)
    return raised


@drawn
@given(rc.random_programs(without=("zero", "checkpoint")))  # which are no Python there
def test_without_jit_the_calls_are_made_where_they_stand(meshes, program):
    turns = program.turns[0]
    operations.mesh[:] = [meshes[8]]
    operations.start()
    expected, recorded = by_hand(ByHand(), program, turns)
    operations.start()
    with meshes[1], jax.disable_jit():
        results = Traced(program, meshes[1], is_eager=True)(jnp.int32(turns), *map(jnp.asarray, (X, Y, S)))
    same_values(results, expected)
    colocated.wait(timeout=60)
    same_trace(operations.trace, recorded, set())
