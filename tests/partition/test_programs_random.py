"""Random programs with colocated calls do what the same program does by hand.

`PARTJIT_PROFILE=soak` draws a thousand of each kind.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from jax.sharding import NamedSharding

from partjit import P, colocated, pjit
from partjit.partition import cut
from tests.partition import random_programs as rp

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(rp.SHAPE)
Y = np.cos(np.arange(32, dtype=np.float32)).reshape(rp.SHAPE)
S = np.float32(0.75)


def by_hand(program, mesh):
    """The results and the recorded calls of a program that is evaluated operation by operation."""
    rp.trace.clear()
    values = [jnp.asarray(v) for v in (X, Y, S)]
    with mesh:
        made = rp.evaluate(program.steps, values, lambda step, args: [*rp.host(step, args)])
    return [np.asarray(made[i]) for i in program.results], [*rp.trace]


def compiled(program, mesh, monkeypatch):
    """A pjit of the program, and what keeps its objects."""
    rp.steps_by_number.update((step.number, step) for step in rp.calls_of(program.steps))
    rp.work["mesh"] = mesh
    call, objects = rp.colocated_calls(mesh)

    def fun(x, y, s):
        values = rp.evaluate(program.steps, (x, y, s), call, rp.WRAPPERS)
        return tuple(values[i] for i in program.results)

    monkeypatch.setattr(cut, "WORTH_A_DISPATCH", program.worth_a_dispatch)
    function = pjit(
        fun,
        in_axis_resources=(P("x", "y"), P("y"), None),
        out_axis_resources=program.out_specs,
        donate_argnums=(0,) if program.donated else (),
    )
    return function, objects


def arguments(mesh):
    return [
        jax.device_put(X, NamedSharding(mesh, P("x", "y"))),
        jax.device_put(Y, NamedSharding(mesh, P("y"))),
        jax.device_put(S, NamedSharding(mesh, P())),
    ]


programs = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    max_examples=rp.EXAMPLES,
)


@programs
@given(rp.random_programs())
def test_a_program_means_what_it_means_by_hand(mesh, monkeypatch, program):
    expected, recorded = by_hand(program, mesh)
    function, objects = compiled(program, mesh, monkeypatch)
    pure = {step.number for step in rp.calls_of(program.steps) if step.pure}
    for _ in range(2):
        rp.trace.clear()
        with mesh:
            results = function(*arguments(mesh))
        for result, value, spec in zip(results, expected, program.out_specs, strict=True):
            np.testing.assert_allclose(np.asarray(result), value, rtol=2e-5, atol=2e-5)
            if spec is not None:
                assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), result.ndim)
        colocated.wait(timeout=60)
        made, meant = rp.by_lane(rp.trace), rp.by_lane(recorded)
        for lane, calls in meant.items():
            effectful = [(n, sums) for n, sums in calls if n not in pure]
            ran = [(n, sums) for n, sums in made[lane] if n not in pure]
            assert [n for n, _ in ran] == [n for n, _ in effectful], "each once, in program order"
            for (_, sums), (_, expected_sums) in zip(ran, effectful, strict=True):
                np.testing.assert_allclose(sums, expected_sums, rtol=1e-4, atol=1e-4)
        assert len(rp.trace) <= len(recorded), "pure calls are made once at most"
    del objects


@programs
@given(rp.random_programs())
def test_what_fails_is_told_and_leaves_the_rest_alone(mesh, monkeypatch, program):
    calls = [step.number for step in rp.calls_of(program.steps)]
    function, objects = compiled(program, mesh, monkeypatch)
    expected, recorded = by_hand(program, mesh)
    for failing in calls[:2]:
        rp.trace.clear()
        rp.failing.add(failing)
        raised = []
        try:
            with mesh:
                results = function(*arguments(mesh))
            for result, value in zip(results, expected, strict=True):
                try:
                    np.testing.assert_allclose(np.asarray(result), value, rtol=2e-5, atol=2e-5)
                except ValueError as error:
                    raised.append(error)
        except ValueError as error:
            raised.append(error)
        try:
            colocated.wait(timeout=60)
        except ValueError as error:
            raised.append(error)
        finally:
            rp.failing.clear()
        assert all(f"call {failing} fails" in str(error) for error in raised)
        assert bool(raised) == any(number == failing for _, _, number, _ in rp.trace)
        order = {lane: [n for n, _ in calls] for lane, calls in rp.by_lane(recorded).items()}
        for lane, ran in rp.by_lane(rp.trace).items():
            numbers = iter(order[lane])
            assert all(n in numbers for n, _ in ran), "in program order"
    with mesh:
        results = function(*arguments(mesh))
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(np.asarray(result), value, rtol=2e-5, atol=2e-5)
    colocated.wait(timeout=60)
    del objects


@programs
@given(rp.random_programs())
def test_plans_are_equal_for_equal_programs(mesh, monkeypatch, program):
    sources = []
    for _ in range(2):
        function, objects = compiled(program, mesh, monkeypatch)
        with mesh:
            plan = function.plan(*arguments(mesh))
        sources.append(plan.source)
        del objects
    assert sources[0] == sources[1]
    awaited = [node for node, needed in _waits(plan) if needed]
    assert len(plan.fragments) <= 2 * len(plan.calls) + 1
    assert len(awaited) <= len(plan.nodes)


def _waits(plan):
    from partjit.partition.emit import waits

    return waits(plan.nodes)
