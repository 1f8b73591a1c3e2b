"""Random programs with calls, in a row and in loops, branches, derivatives and batches, and all laws they obey.

One program is drawn, compiled once, and checked by each law: it does what it does by hand, in the order of each stream
and with the shardings of its specs; its plan is a function of the program; a call that fails leaves the rest alone;
and without jit the calls are made at once. `PARTJIT_PROFILE=soak` draws a thousand.
"""

import collections
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated, pjit
from partjit.plan.passes import choose_emitted, cost, gather, together
from partjit.plan.passes.fragments import replicated
from partjit.plan.run.direct import left_to_dispatch
from tests.census import of_its_own, saw, sees
from tests.plan import control_flow_operations as operations
from tests.plan import random_control_flow as rc
from tests.plan.control_flow_by_hand import ByHand
from tests.plan.control_flow_traced import Traced

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(rc.SHAPE)
Y = np.cos(np.arange(32, dtype=np.float32)).reshape(rc.SHAPE)
S = np.float32(0.75)

drawn = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    deadline=None,
    max_examples=2 if settings().max_examples <= 100 else settings().max_examples // 5,
)


@pytest.fixture(scope="module")
def meshes():
    """The mesh of a program, by its number of devices."""
    devices = np.array(jax.devices())
    return {
        1: partjit.Mesh(devices[:1].reshape(1, 1), ("x", "y")),
        8: partjit.Mesh(devices.reshape(4, 2), ("x", "y")),
    }


def by_hand(hand, program, turns, fed=()):
    """The results and the recorded calls of a program that is evaluated operation by operation."""
    given = [np.int32(turns), X, Y, S]
    for argument, value in fed:
        given[argument] = value
    results = hand.results(program, [*map(jnp.asarray, given), operations.Tag(turns)])
    return [np.asarray(result) for result in results], [*operations.trace]


def compiled(program, mesh, monkeypatch):
    monkeypatch.setattr(cost, "WORTH_A_DISPATCH", program.worth_a_dispatch)
    monkeypatch.setattr(cost, "WORTH_LEAVING", program.worth_a_dispatch)
    monkeypatch.setattr(choose_emitted, "MOST_BYTES_WAITING", 2**26 if program.emits else -1)
    monkeypatch.setattr(cost, "RUN_AT_ONCE", program.worth_a_dispatch if program.emits else 0)
    monkeypatch.setattr(gather, "MOST_ITERATIONS", program.at_once)
    monkeypatch.setattr(gather, "FEWEST_ITERATIONS", 2)
    monkeypatch.setattr(gather, "MOST_WORK_UNTIL_RETURN", program.work_until_return)
    for limit in ("FOR_HOST_THREAD", "FOR_HOST_THREAD_IN_LOOPS"):
        monkeypatch.setattr(cost, limit, np.inf)
    return pjit(
        Traced(program, mesh),
        in_axis_resources=(None, P("x", "y"), P("y"), None),
        out_axis_resources=program.out_specs,
        donate_argnums=(1,) if program.donated else (),
        host_argnums=4,
    )


def arguments(mesh, turns, transposed=False, passed="jax"):
    if passed != "jax":
        numbers = (turns, S.item()) if passed == "python" else (np.int32(turns), S)
        return [numbers[0], X, Y, numbers[1], operations.Tag(turns)]
    shardings = [NamedSharding(mesh, spec) for spec in (P(), P("x", "y"), P("y"), P())]
    if transposed:
        shardings[1:3] = [Format(Layout((1, 0)), sharding) for sharding in shardings[1:3]]
    found = [jax.device_put(v, where) for v, where in zip([np.int32(turns), X, Y, S], shardings, strict=True)]
    return [*found, operations.Tag(turns)]


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


KINDS = {
    "nested": "a nested function",
    "scan": "a loop",
    "fori": "a loop",
    "while": "a loop",
    "branch": "a branch",
    "derivative": "a derivative",
    "vmap": "a batch",
}
REAL = (
    "a colocated call",
    "two streams",
    "an early call behind a late one",
    "a call without results",
    "a donated argument",
    "a partitioned result",
    "two mesh axes",
)

RARE = (
    "a call in a call",
    "a call of a decorated function",
    "a call that returns an integer",
    "a call that returns its argument",
    "a call with an object that is no array",
    "a result that is an argument of the next call",
    "arguments of NumPy",
    "types of 64 bits",
)
"""What a soak sees besides."""


@pytest.mark.soak
@pytest.mark.parametrize("about", ["a row", *KINDS, "a row, no jax", "scan, no jax", "while, no jax", "branch, no jax"])
def test_a_random_program_obeys_all_laws(meshes, monkeypatch, about):
    """One example is the simplest program of its kind, which is a real case; the other is any of it."""
    about, _, no_jax = about.partition(", ")
    given_jax = {"without_jax": True if no_jax else None}
    kind = rc.straight_programs(**given_jax) if about == "a row" else rc.random_programs(3, about=about, **given_jax)
    real = [one for one in REAL if one != "two streams" or not no_jax]
    real += ["a call that its executable waits for"] * (no_jax != "" and about != "while")
    if drawn.max_examples >= 100:
        real += RARE if not no_jax else [one for one in RARE if one != "a call in a call"]
        real += ["a call beside those that its executable waits for"] * (no_jax != "" and about != "a row")
    if no_jax and about == "a row":  # where they would be the host's
        monkeypatch.setattr(together, "_calls_before_work", lambda run: 0)
    is_loop = about in ("scan", "fori")
    fails = ["a call that fails in a later iteration"] * is_loop
    # Which call fails, and in which iteration: first the one in the loop, in the second iteration.
    which, turn = st.integers(2 * is_loop, 9), st.sampled_from([1, 0, 2] if is_loop else [0, 1, 2])
    more = {"a row": 3, "while": 2, "scan": 4, "branch": 3}.get(about, 0) * (no_jax != "")

    @sees(*real, KINDS.get(about, "a nested function"), "a program without jit", "a call that fails", *fails)
    @of_its_own(about + no_jax)
    @settings(drawn, max_examples=drawn.max_examples + more)
    @given(kind, which, turn)
    def holds(program, which, turn):
        obeys_all_laws(meshes, monkeypatch, program, which, turn)

    holds()


def obeys_all_laws(meshes, monkeypatch, program, which, turn):
    mesh = meshes[program.devices]
    operations.mesh[:] = [mesh]
    hand = by_hand_for_each(program)
    function = compiled(program, mesh, monkeypatch)
    has_the_plan_of_its_equal(function, compiled(program, mesh, monkeypatch), program, mesh)
    means_what_it_means_by_hand(function, program, mesh, hand)
    if calls := [step.number for step in rc.calls_of(program.steps)]:
        survives_a_failure(function, program, mesh, hand[0], calls[which % len(calls)], turn)
    # Every other one, for each of its operations is compiled by itself; scans of nothing and checkpoints are no Python.
    if which % 2 == 0 and not rc.has(program.steps, "zero", "checkpoint"):
        makes_its_calls_without_jit(program, meshes, hand[0])


def by_hand_for_each(program):
    """The results and the recorded calls of a program, for each of its numbers of iterations."""
    hand, found, fed = ByHand(), [], []
    operations.start()
    for turns in program.turns:
        found.append(by_hand(hand, program, turns, fed))
        fed = [(argument, found[-1][0][result]) for argument, result in program.fed]
        operations.start(anew=False)
    return found


def has_the_plan_of_its_equal(function, equal, program, mesh):
    with mesh:
        plan, same = (one.plan(*arguments(mesh, 0)) for one in (function, equal))
    assert plan.source == same.source, "the same program has the same plan"
    saw("a call that its executable waits for", when=any(call.is_answered for call in plan.calls))
    beside = (f for f in plan.fragments if f.waits_for_calls and not all(call.is_answered for call in f.calls))
    saw("a call beside those that its executable waits for", when=any(beside))
    saw("calls of several iterations at once", when=any(call.at_once > 1 for call in plan.calls))
    saw("an executable that returns what its calls get", when=any(fragment.gathered for fragment in plan.fragments))
    saw("executables in the caller's thread", when=plan.in_host_thread)
    default = replicated(mesh)
    left = left_to_dispatch(plan, default, True, lambda value: value.sharding or default)
    saw("a result as the function returned it", when=left.made)
    if rc.is_straight(program.steps):
        assert len(plan.fragments) <= 2 * len(plan.calls) + 1


def means_what_it_means_by_hand(function, program, mesh, hand):
    operations.start()
    fed = []
    calls = zip(program.turns, program.transposed, program.passed, program.x64, hand, strict=True)
    for turns, transposed, passed, x64, (values, recorded) in calls:
        args = arguments(mesh, turns, transposed, passed)
        for argument, value in fed:
            args[argument] = value
        with mesh, jax.enable_x64(x64), partjit.reshard_policy("allow"):
            results = function(*args)
        fed = [(argument, results[result]) for argument, result in program.fed]
        same_values(results, values)
        for result, spec in zip(results, program.out_specs, strict=True):
            if spec is not None:
                assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), result.ndim)
        colocated.wait(timeout=60)
        same_trace(operations.trace, recorded, pure_calls(program))
        pure = pure_calls(program)
        made, meant = (collections.Counter(n for *_, n, _ in r if n in pure) for r in (operations.trace, recorded))
        assert made <= meant, "pure calls are made once at most"
        operations.start(anew=False)


def survives_a_failure(function, program, mesh, hand, number, turn):
    """A call that fails in one of its iterations leaves the rest alone, and the next call of the program is right."""
    (expected, recorded), pure, turns = hand, pure_calls(program), program.turns[0]
    operations.start(failing_call=number, turn=turn)
    fails_by_hand = made_often(recorded, number, turn)
    told = pytest.raises(ValueError, match=f"call {number} fails")
    with told if fails_by_hand else contextlib.nullcontext():
        by_hand(ByHand(), program, turns)
    meant = by_lane(operations.trace, pure)
    operations.start(failing_call=number, turn=turn)
    raised = run_that_may_fail(function, mesh, turns, expected, recorded)
    assert bool(raised) == made_often(operations.trace, number, turn)
    saw("a call that fails", when=raised)
    saw("a call that fails in a later iteration", when=raised and turn)
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
    assert not run_that_may_fail(function, mesh, turns, expected, recorded)
    same_trace(operations.trace, recorded, pure)


def made_often(recorded, number, turn):
    """Whether a call was made so often that it came to the turn in which it fails."""
    return sum(one == number for _, _, one, _ in recorded) > turn


def run_that_may_fail(function, mesh, turns, expected, recorded):
    """What a call of the program raises, and then its results and what is left of its calls; results must be right.

    The state of an object is another one where a call of it was not made, because its argument failed. Then the results
    of its later calls are others as well.
    """
    raised, wrong = [], None
    try:
        with mesh:
            results = function(*arguments(mesh, turns))
        for result, value in zip(results, expected, strict=True):
            try:
                same_values([result], [value])
            except ValueError as error:
                raised.append(error)
            except AssertionError as error:
                wrong = error
    except ValueError as error:
        raised.append(error)
    try:
        colocated.wait(timeout=60)
    except ValueError as error:
        raised.append(error)
    if wrong is not None and not (raised and calls_of_objects(operations.trace) < calls_of_objects(recorded)):
        raise wrong
    return raised


def calls_of_objects(recorded):
    """How often each call of an object is among those that were made."""
    return collections.Counter((of, number) for _, of, number, _ in recorded if of is not None)


def makes_its_calls_without_jit(program, meshes, hand):
    expected, recorded = hand
    operations.mesh[:] = [meshes[8]]
    operations.start()
    with meshes[1], jax.disable_jit():
        tag = operations.Tag(program.turns[0])
        results = Traced(program, meshes[1], is_eager=True)(jnp.int32(tag.number), *map(jnp.asarray, (X, Y, S)), tag)
    same_values(results, expected)
    colocated.wait(timeout=60)
    same_trace(operations.trace, recorded, set())
    saw("a program without jit")
