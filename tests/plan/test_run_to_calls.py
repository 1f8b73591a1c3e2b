"""Loops whose calls stand in branches run on the devices to the next call: same calls, same values, few dispatches."""

import collections
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated, pjit
from partjit.colocated import colocated_python
from partjit.plan.ir.nodes import Branch, ColocatedCall, Fragment, Loop
from partjit.plan.ir.walk import walk
from partjit.plan.passes import choose_emitted
from tests.colocated import rendezvous
from tests.effort import sample

lax = jax.lax

pytestmark = pytest.mark.usefixtures("meeting")


def note(name):
    def call(*arrays):
        rendezvous.logs["calls"].append((name, *(np.asarray(array).round(3).tolist() for array in arrays)))

    return call


def fix(i, x):
    note("fix")(i, x)
    return np.asarray(x) * np.float32(0.5) + np.float32(i)


by_hand = types.SimpleNamespace(log=note("log"), save=note("save"), other=note("other"), fix=fix)


def colocated_calls(mode):
    return types.SimpleNamespace(
        **{
            name: colocated_python(getattr(by_hand, name), out_specs_fn=lambda *_: None, mode=mode)
            for name in ("log", "save", "other")
        },
        fix=colocated_python(fix, out_specs_fn=lambda i, x: x, mode=mode),
    )


# How an iteration calls: with its number, what it starts from, what it ends with, something in between, and something
# from outside of the loop.


def is_due(i, every):
    return i % every == every - 1


def without_results(c, i, before, after, between, outside):
    lax.cond(is_due(i, 3), lambda: c.log(i, before, after, between, outside), lambda: None)
    return after


def passed_through(c, i, before, after, between, outside):
    return lax.cond(is_due(i, 3), lambda a: (c.log(i, a, before), a)[1], lambda a: a, after)


def one_of_three(c, i, before, after, between, outside):
    lax.switch(i % 3, [lambda: c.log(i), lambda: None, lambda: c.save(between, outside)])
    return after


def two_that_are_rare(c, i, before, after, between, outside):
    lax.cond(is_due(i, 2), lambda: c.log(i, between), lambda: None)
    lax.cond(is_due(i, 4), lambda: (c.save(after), c.other(before))[0], lambda: None)
    return after


def one_in_the_other(c, i, before, after, between, outside):
    def inner():
        c.log(i)
        lax.cond(is_due(i, 4), lambda: c.save(after), lambda: None)

    lax.cond(is_due(i, 2), inner, lambda: None)
    return after


def in_a_loop_of_its_own(c, i, before, after, between, outside):
    def inner():
        lax.fori_loop(0, 2, lambda k, s: (c.log(i, k, s), s + 1)[1], between)

    lax.cond(is_due(i, 3), inner, lambda: None)
    return after


def before_the_work(c, i, before, after, between, outside):
    lax.cond(is_due(i, 3), lambda: c.log(before), lambda: None)
    return jnp.cos(after)


# The devices need what the call returns: in the next iteration, in this one, to decide whether there is another.


def carried(c, i, before, after, between, outside):
    return lax.cond(is_due(i, 3), lambda x: c.fix(i, x), lambda x: x, after)


def used(c, i, before, after, between, outside):
    fixed = lax.cond(is_due(i, 3), lambda: c.fix(i, between), lambda: between * 2)
    return after + fixed / 32


def used_and_given_back(c, i, before, after, between, outside):
    fixed, same = lax.cond(is_due(i, 2), lambda x: (c.fix(i, between), x), lambda x: (between, x), after)
    return same * 0.25 + fixed / 32


def one_of_three_gives(c, i, before, after, between, outside):
    ways = [lambda x: c.fix(i, x), lambda x: x + outside, lambda x: (c.log(i), c.fix(i, before))[1]]
    return lax.switch(i % 3, ways, after) * 0.5


def fixed_from_the_start(c, i, before, after, between, outside):
    return after + lax.cond(jnp.sum(before) > 3, lambda: c.fix(i, outside), lambda: outside)


WAYS_THAT_GIVE = [carried, used, used_and_given_back, one_of_three_gives, fixed_from_the_start]

WAYS = [
    *WAYS_THAT_GIVE,
    *(without_results, passed_through, one_of_three, two_that_are_rare, one_in_the_other, in_a_loop_of_its_own),
    before_the_work,
]


def step(c, way, i, carried, outside):
    between = jnp.sum(carried) + outside
    return way(c, i, carried, carried * 0.5 + between / 16, between, outside)


def scan(c, way, n, x, outside):
    def iteration(carried, i):
        after = step(c, way, i, carried, outside)
        return after, jnp.max(after)

    return lax.scan(iteration, x, jnp.arange(n))


def reverse_scan(c, way, n, x, outside):
    def iteration(carried, slices):
        i, extra = slices
        return step(c, way, i, carried + extra, outside), None

    return lax.scan(iteration, x, (jnp.arange(n), jnp.linspace(0.0, 1.0, n)), reverse=True)[0]


def fori(c, way, n, x, outside):
    return lax.fori_loop(0, n, lambda i, carried: step(c, way, i, carried, outside), x)


def while_(c, way, n, x, outside):
    def iteration(state):
        i, carried = state
        return i + 1, step(c, way, i, carried, outside)

    return lax.while_loop(lambda state: (state[0] < n) & (jnp.sum(state[1]) < 1e6), iteration, (jnp.int32(0), x))


def nested(c, way, n, x, outside):
    def outer(k, carried):
        return fori(c, way, n, carried + k, outside)

    return lax.fori_loop(0, 2, outer, x)


LOOPS = [scan, reverse_scan, fori, while_, nested]


def run_by_hand(loop, way, n, x, outside):
    rendezvous.clear()
    with jax.disable_jit():
        if n == 0 and loop in (scan, reverse_scan):  # which jax.disable_jit cannot do
            expected = (x, np.zeros(0, np.float32)) if loop is scan else x
        else:
            expected = loop(by_hand, way, n, x, outside)
    return jax.tree.map(np.asarray, expected), rendezvous.logs["calls"][:]


SPECS = [None, P(), P(("x", "y"))]
MODES = ["auto", "inline", "driven"]
CASES = [*itertools.product((0, 1, 7), SPECS, MODES, (False, True), LOOPS, WAYS)]
EVERY = 53
"""Among one case in so many, there is each pair of what a case is made of."""


def test_each_two_parts_of_a_case_are_tried_together():
    pairs = [*itertools.combinations(range(len(CASES[0])), 2)]
    tried, meant = (
        {(i, j, str(c[i]), str(c[j])) for c in cases for i, j in pairs} for cases in (CASES[::EVERY], CASES)
    )
    assert tried == meant


@pytest.mark.soak
def test_the_calls_and_the_values_are_those_of_the_loop_in_python(mesh, monkeypatch):
    """Calls are made by the executable, where it can, by the thread that drives the loop, or on a thread from there."""
    fewest, seen = collections.Counter(), collections.Counter()
    x, outside = np.linspace(0, 1, 8, dtype=np.float32), np.float32(0.25)
    for n, spec, mode, donates, loop, way in sample(CASES, EVERY):
        expected, calls = run_by_hand(loop, way, n, x, outside)
        rendezvous.clear()
        monkeypatch.setattr(choose_emitted, "MOST_BYTES_WAITING", -1 if mode == "driven" else 2**26)
        c = colocated_calls("auto" if mode == "driven" else mode)
        shardings = partjit.UNSPECIFIED if spec is None else (NamedSharding(mesh, spec), None)
        fun = functools.partial(loop, c, way, n)
        program = pjit(fun, in_shardings=shardings, donate_argnums=0 if donates else ())
        given = jnp.asarray(x) if spec is None else jax.device_put(x, NamedSharding(mesh, spec))
        dispatched = []
        with partjit.events.subscribe(lambda event: dispatched.append(type(event).__name__)):  # noqa: B023
            result = program(given, outside)
            colocated.wait()
        what = f"{loop.__name__} {way.__name__} {n} {mode} {spec}"
        for found, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=what)
        assert close(rendezvous.logs["calls"], calls), what
        assert given.is_deleted() == donates, what
        stops = len(calls)
        if loop is not nested and way is not in_a_loop_of_its_own:
            # One to begin with, one to each call and one to the end; one before and one after the loop.
            # A branch may ask for itself whether to save, and compute with what a call gives before it gives it.
            inside = stops if way in (one_in_the_other, *WAYS_THAT_GIVE) else 0
            assert dispatched.count("FragmentDispatched") <= stops + inside + 4, what
            fewest[stops] += 1
        seen[bool(calls)] += 1
    assert min(seen.values()) > 3
    assert len(fewest) > 3


def close(calls, others):
    assert [call[0] for call in calls] == [call[0] for call in others]
    for call, other in zip(calls, others, strict=True):
        for a, b in zip(call[1:], other[1:], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-2, atol=2e-3)
    return True


@pytest.mark.parametrize("every", [1, 10, 1000])
def test_many_iterations_take_as_many_dispatches_as_calls(every, mesh, by_the_host):
    log = colocated_python(by_hand.log, out_specs_fn=lambda *_: None)

    @pjit
    def program(x):
        def iteration(x, i):
            x = jnp.sin(x) + 1
            lax.cond(i % every == 0, lambda: log(i), lambda: None)
            return x, None

        return lax.scan(iteration, x, jnp.arange(100))[0]

    x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("x")))
    dispatched = []
    with mesh, partjit.events.subscribe(lambda event: dispatched.append(type(event).__name__)):
        program(x)
        colocated.wait()
    calls = len(range(0, 100, every))
    assert rendezvous.logs["calls"] == [("log", i) for i in range(0, 100, every)]
    assert calls <= dispatched.count("FragmentDispatched") <= calls + 2


@pytest.mark.parametrize("gives", [False, True])
@pytest.mark.parametrize("size", [8, 2**20])
def test_what_a_call_gets_takes_a_dispatch_only_where_that_is_cheaper(gives, size, by_the_host):
    """It is computed in the branch of the call, and in vain where the loop ends without a call."""

    def mean_of(x):
        return jnp.mean(jnp.sin(x))

    total = colocated_python(lambda m: m * 2, out_specs_fn=lambda m: m)
    log = colocated_python(by_hand.log, out_specs_fn=lambda *_: None)

    @pjit
    def program(x):
        def iteration(x, i):
            x = x * 0.5
            if gives:
                return x + lax.cond(i % 5 == 1, lambda: total(mean_of(x)), lambda: jnp.float32(0)), None
            return lax.cond(i % 5 == 1, lambda: (log(mean_of(x)), x)[1], lambda: x), None

        return lax.scan(iteration, x, jnp.arange(24))[0]

    expected = np.full(size, 1.0, np.float32)
    for i in range(24):
        expected = expected * np.float32(0.5)
        expected = expected + 2 * np.sin(expected[:1]) * (gives and i % 5 == 1)
    dispatched = []
    with partjit.events.subscribe(lambda event: dispatched.append(type(event).__name__)):
        result = program(jnp.ones(size))
        colocated.wait()
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    count = dispatched.count("FragmentDispatched")
    assert 5 < count <= 8 if size == 8 else count > 10


def test_what_an_iteration_cannot_do_without_stays_in_it(by_the_host):
    """A call in every branch, one beside the branch, and two branches of which the devices need what they give."""
    c = colocated_calls("auto")
    double = colocated_python(lambda x: x * 2, out_specs_fn=lambda x: x)

    def in_every_branch(x, i):
        lax.cond(i % 3 == 0, lambda: c.log(x), lambda: c.save(x))
        return x + 1, None

    def beside(x, i):
        c.log(i)
        lax.cond(i % 3 == 0, lambda: c.save(x), lambda: None)
        return x + 1, None

    def two(x, i):
        x = lax.cond(i % 3 == 0, double, lambda x: x, x)
        return lax.cond(i % 4 == 0, double, lambda x: x, x), None

    for iteration in (in_every_branch, beside, two):
        plan = pjit(lambda x, iteration=iteration: lax.scan(iteration, x, jnp.arange(9))[0]).plan(1.0)
        (loop,) = (node for node in walk(plan.nodes) if isinstance(node, Loop))
        assert loop.trip_count == 9
    assert float(pjit(lambda x: lax.scan(two, x, jnp.arange(9))[0])(1.0)) == 64.0


def test_a_call_may_stop_the_loop():
    """Early stopping: the host looks at the loss now and then."""

    def has_converged(loss):
        note("has_converged")(loss)
        return bool(loss < 0.1)

    look = colocated_python(has_converged, arrays="numpy", out_specs_fn=lambda loss: jax.ShapeDtypeStruct((), bool))

    def iteration(state):
        i, x, _ = state
        x = x * 0.9
        return i + 1, x, lax.cond(i % 10 == 9, lambda: look(jnp.abs(x)), lambda: jnp.zeros((), bool))

    program = pjit(lambda x: lax.while_loop(lambda state: ~state[2] & (state[0] < 1000), iteration, (0, x, False)))
    dispatched = []
    with partjit.events.subscribe(lambda event: dispatched.append(type(event).__name__)):
        count, x, stopped = program(1.0)
    assert (int(count), bool(stopped)) == (30, True)
    np.testing.assert_allclose(x, 0.9**30, rtol=1e-5)
    assert [entry[0] for entry in rendezvous.logs["calls"]] == ["has_converged"] * 3
    assert dispatched.count("FragmentDispatched") <= 2 * 3 + 3  # the branch computes what it passes


def test_an_iteration_with_effects_of_jax_runs_by_itself(capfd):
    c = colocated_calls("auto")

    def iteration(x, i):
        jax.debug.print("iteration {}", i)
        lax.cond(i % 3 == 0, lambda: c.log(x), lambda: None)
        return x + 1, None

    program = pjit(lambda x: lax.scan(iteration, x, jnp.arange(4))[0])
    assert float(program(1.0)) == 5.0
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n"))[1:] == [f"iteration {i}" for i in range(4)]


def test_the_plan_shows_how_far_the_devices_run(mesh, by_the_host):
    c = colocated_calls("auto")

    def iteration(x, i):
        x = jnp.sin(x)
        lax.cond(i % 3 == 0, lambda: c.log(i, x), lambda: None)
        return x, None

    with mesh:
        plan = pjit(lambda x: lax.scan(iteration, x, jnp.arange(9))[0]).plan(np.ones(8, np.float32))
    kinds = [type(node) for node in walk(plan.nodes)]
    assert kinds.count(Loop) == kinds.count(Branch) == kinds.count(ColocatedCall) == 1
    (loop,) = (node for node in plan.nodes if isinstance(node, Loop))
    assert [type(node) for node in loop.block.nodes] == [Fragment, Branch]
    fragment = loop.block.nodes[0]
    assert [eqn.primitive.name for eqn in fragment.jaxpr.eqns].count("while") == 1
    assert "while read(" in plan.source


def test_a_call_that_fails_ends_the_loop_there(mesh):
    def fail_at_four(i):
        note("log")(i)
        if i == 4:
            raise RuntimeError("no room on the disk")

    log = colocated_python(fail_at_four, out_specs_fn=lambda i: None, mode="inline")

    def iteration(x, i):
        lax.cond(i % 2 == 0, lambda: log(i), lambda: None)
        return x + 1, None

    program = pjit(lambda x: lax.scan(iteration, x, jnp.arange(9))[0])
    with pytest.raises(RuntimeError, match="no room on the disk"):
        program(1.0).block_until_ready()
    colocated.wait()
    assert rendezvous.logs["calls"] == [("log", 0), ("log", 2), ("log", 4)]


@pytest.mark.parametrize("on_devices", [False, True])
@pytest.mark.parametrize("body", ["gives", "takes"])
def test_a_branch_reads_a_number_that_loops_around_it_pass_on_unchanged(body, on_devices, request):
    if not on_devices:
        request.getfixturevalue("by_the_host")
    c = colocated_calls("auto")

    def loop(fix, log, x):
        def inner(state, j):
            scale, x = state
            if body == "gives":
                return (scale, lax.cond(j == 1, lambda: fix(j, x) * scale, lambda: x)), None
            lax.cond(j == 1, lambda: log(x * scale), lambda: None)
            return (scale, x + 1), None

        return lax.scan(lambda x, i: (lax.scan(inner, (2.0, x), jnp.arange(3))[0][1], None), x, jnp.arange(2))[0]

    program = pjit(lambda x: loop(c.fix, c.log, x))
    x = jnp.float32(1.0)
    assert float(program(x)) == float(loop(lambda i, x: x * 0.5 + jnp.float32(i), lambda x: None, x))
    colocated.wait()
    assert len(rendezvous.logs["calls"]) == 2
