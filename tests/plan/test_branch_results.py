"""Results that branches of the host give as they are: they leave a program without another fragment, and only once."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from partjit import P, colocated, pjit
from partjit.colocated import colocated_python
from partjit.plan.ir.legality import PlanError
from partjit.plan.ir.nodes import Branch, ColocatedCall, Fragment
from partjit.plan.ir.verify import verify
from partjit.plan.ir.walk import walk, with_blocks
from partjit.plan.passes.choose_emitted import Executables
from partjit.plan.pipeline import structured
from tests.colocated import rendezvous
from tests.effort import sample

pytestmark = pytest.mark.usefixtures("meeting")

like = {"out_specs_fn": lambda *xs: xs[0]}
nothing = {"out_specs_fn": lambda *xs: None}
start = np.arange(1, 9, dtype=np.float32)


def keep(x):
    return x


def forms(call):
    """Branches that may give what they get as it is, or what other branches have given."""

    def scaled(x):
        return x * 5

    return {
        "a call": lambda x, p, q: lax.cond(p, call, keep, x),
        "equations": lambda x, p, q: lax.cond(p, lambda x: scaled(call(x)), keep, x),
        "of three": lambda x, p, q: lax.switch(jnp.int32(p) + jnp.int32(q), [keep, call, scaled], x),
        "in a branch": lambda x, p, q: lax.cond(p, lambda x: lax.cond(q, call, keep, x), keep, x),
        "or else": lambda x, p, q: lax.cond(p, call, lambda x: lax.cond(q, call, keep, x), x),
        "in a row": lambda x, p, q: lax.cond(q, call, keep, lax.cond(p, call, keep, x)),
        "in a row, in a branch": lambda x, p, q: lax.cond(
            p, lambda x: lax.cond(q, call, keep, lax.cond(x[0] < 0, call, keep, x)), lambda x: call(x) + 1, x
        ),
        "in a loop": lambda x, p, q: lax.fori_loop(
            0, 3, lambda i, c: lax.cond(i == jnp.int32(p), call, lambda c: x, c), x + jnp.float32(q)
        ),
    }


def uses(call):
    """What else has the state of a program: its results, calls, fragments, branches."""
    return [
        lambda x, branch: branch(x),
        lambda x, branch: (branch(x), x),
        lambda x, branch: (branch(x), branch(x)),
        lambda x, branch: (call(x), branch(x)),
        lambda x, branch: (branch(x), call(x[:1]) * x),
        lambda x, branch: (y := branch(x), call(y)[:1] * x, y),
        lambda x, branch: (branch(x), x * 2),
        lambda x, branch: lax.cond(x[0] > 2, lambda y: (call(y), y, y), lambda y: (y, y, y + 1), branch(x)),
        lambda x, branch: lax.cond(x[0] > 2, lambda x, y: (call(y), x), lambda x, y: (y, x), x, branch(x)),
    ]


@pytest.mark.parametrize("name", ["a call", "equations", "of three", "in a branch", "or else", "in a row"])
@pytest.mark.parametrize("donated", [(), 0], ids=["kept", "donated"])
def test_a_state_that_a_branch_may_give_as_it_is_passes_through_no_other_fragment(name, donated, by_the_host):
    form = forms(colocated_python(lambda x: x * 2, **like))[name]
    plan = pjit(lambda x, p, q: form(x + 1, p, q), donate_argnums=donated).plan(start, False, True)
    assert any(isinstance(node, Branch) for node in plan.nodes)
    assert all(node.jaxpr.eqns for node in walk(plan.nodes) if isinstance(node, Fragment)), plan


@pytest.mark.parametrize("name", ["a call", "equations", "of three", "in a branch", "or else", "in a row"])
@pytest.mark.parametrize("spec", [P("x"), P("x", None), P(("x",), None), P(None, None)], ids=str)
def test_so_does_one_whose_spec_the_partitioner_spells_in_another_way(name, spec, mesh, by_the_host):
    form = forms(colocated_python(lambda x: x * 2, **like))[name]
    state = start.reshape(8, 1)
    step = pjit(
        lambda x, p, q: form(x + 1, p, q), in_shardings=(spec, None, None), out_shardings=spec, donate_argnums=0
    )
    with mesh:
        plan = step.plan(state, False, True)
        results = [step(state, p, q) for p, q in itertools.product((False, True), repeat=2)]
    assert all(node.jaxpr.eqns for node in walk(plan.nodes) if isinstance(node, Fragment)), plan
    assert {result.sharding for result in results} == {jax.sharding.NamedSharding(mesh, spec)}


@pytest.mark.soak
@pytest.mark.parametrize("of_caller", [False, True], ids=["computed", "given"])
@pytest.mark.parametrize("spec", [None, P("x")], ids=["one device", "mesh"])
@pytest.mark.parametrize("name", [*forms(None)])
def test_what_a_branch_gives_is_right_whatever_else_has_the_state(name, spec, of_caller, mesh, by_the_host):
    by_hand = forms(lambda x: x * 2)[name], uses(lambda x: x * 2)
    cases = []
    for mode in ("inline", "stream"):
        call = colocated_python(lambda x: x * 2, mode=mode, **like)
        cases += [(forms(call)[name], *pair) for pair in zip(uses(call), by_hand[1], strict=True)]
    for (form, use, use_by_hand), donated in sample([*itertools.product(cases, [(), 0])], 11):

        def program(x, p, q, form=form, use=use):
            return use(x if of_caller else x + 1, lambda x: form(x, p, q))

        run = pjit(program, donate_argnums=donated, **({} if spec is None else {"in_shardings": (spec, None, None)}))
        for p, q in itertools.product((False, True), repeat=2):
            with jax.disable_jit():
                expected = use_by_hand(start + (not of_caller), lambda x, p=p, q=q: by_hand[0](x, p, q))
            if spec is None:
                results = run(jnp.asarray(start), p, q)
            else:
                with mesh:
                    results = run(start, p, q)
            pairs = [*zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)]
            for found, wanted in pairs:  # each is given away without the others
                np.testing.assert_array_equal(found, wanted, err_msg=f"{donated} {p} {q}")
                jax.jit(lambda x: x * 0, donate_argnums=0)(found)


@pytest.mark.parametrize("looks", ["before", "inside", "after"])
@pytest.mark.parametrize("name", [*forms(None)])
def test_a_result_may_be_donated_while_a_call_reads_the_state_that_it_is(name, looks, by_the_host):
    def look(x):
        rendezvous.hear("donated")
        rendezvous.logs["seen"].append(np.asarray(x).tolist())

    look = colocated_python(look, stream="looking", **nothing)
    form = forms(colocated_python(lambda x: x * 2, mode="inline", **like))[name]

    @pjit
    def program(x, p, q):
        x = x + 1
        if looks == "before":
            look(x)
        y = form(x, p, q)
        if looks == "inside":
            y = lax.cond(p, lambda x: x * 3, lambda x: (look(x), x)[1], y)
        if looks == "after":
            look(x)
        return y

    result = program(start, False, False)
    jax.jit(lambda x: x * 0, donate_argnums=0)(result).block_until_ready()
    rendezvous.say("donated")
    colocated.wait(timeout=60)
    with jax.disable_jit():
        given = forms(lambda x: x * 2)[name](start + 1, False, False)
    assert rendezvous.logs["seen"] == [np.asarray(given if looks == "inside" else start + 1).tolist()]


def broken(plan):
    """The plan with one thing wrong, each time another: what a branch gives is somebody else's as well."""
    k, branch = next((k, node) for k, node in enumerate(plan.nodes) if isinstance(node, Branch))
    first = next(node for node in plan.nodes if isinstance(node, Fragment))

    def instead(node, other):
        nodes = tuple(other if found is node else found for found in plan.nodes)
        return dataclasses.replace(plan, nodes=nodes)

    yield "leaves twice", dataclasses.replace(plan, outputs=(*plan.outputs, first.outputs[0]))
    taken = dataclasses.replace(first, name="taken", inputs=first.outputs, outputs=(), donated=(True,))
    yield "donated afterwards", dataclasses.replace(plan, nodes=(*plan.nodes, taken))
    call = next(node for node in walk(branch.blocks[1].nodes) if isinstance(node, ColocatedCall))
    before = dataclasses.replace(call, name="before", outputs=(), pinned=(False,))
    yield "read unpinned", dataclasses.replace(plan, nodes=(*plan.nodes[:k], before, *plan.nodes[k:]))
    block = dataclasses.replace(branch.blocks[0], outputs=(plan.inputs[0],))
    yield "an argument", instead(branch, with_blocks(branch, [block, branch.blocks[1]]))


def test_a_plan_in_which_a_branch_gives_what_others_have_is_broken(by_the_host):
    call = colocated_python(lambda x: x * 2, mode="stream", **like)
    run = pjit(lambda x, p: lax.cond(p, call, keep, x + 1))
    plan = run.plan(start, False)
    program = structured(run.trace(start, False).jaxpr, plan.mesh, executables=Executables.of(plan.mesh, None))
    verify(plan, program)
    expected = {
        "leaves twice": "which others have",
        "donated afterwards": "which was donated",
        "read unpinned": "which leaves under another name",
        "an argument": "which others have",
    }
    for what, wrong in broken(plan):
        with pytest.raises(PlanError, match=expected.pop(what)):
            verify(wrong, program)
    assert not expected


def test_a_value_outlives_what_branches_in_a_row_in_a_branch_give_it_as(by_the_host):
    call = colocated_python(lambda x: x * 3, **like)

    @pjit
    def program(x, p, q):
        def in_a_row(x):
            return lax.cond(q, call, keep, lax.cond(q, call, keep, x))

        x = x + 1
        y = lax.cond(p, in_a_row, call, x)
        z = x * call(y[:1])  # reads `x` last, and could take its memory
        return y + z, z

    for p, q in itertools.product((False, True), repeat=2):
        x = start + 1
        y = x * 3 if not p else x * 9 if q else x
        z = x * y[0] * 3
        for found, wanted in zip(program(start, p, q), (y + z, z), strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_a_loop_gives_one_argument_as_a_carried_value_and_another_that_is_its_own(by_the_host):
    """What an iteration computes is no argument, whatever a branch beside it gives."""
    look = colocated_python(lambda x: None, mode="inline", **nothing)
    tick = colocated_python(lambda: None, devices=jax.devices()[:1], **nothing)

    @pjit
    def program(n, x, y):
        def iteration(i, carry):
            count, mine, other = carry
            mine, other = other, lax.cond(i % 2 == 0, lambda: x, lambda: (look(count), mine)[1])
            tick()
            return count + 1, mine, other

        return lax.fori_loop(0, n, iteration, (jnp.zeros(3), y, 2 * y))

    for n in range(4):
        mine, other = start, 2 * start
        for i in range(n):
            mine, other = other, start + 1 if i % 2 == 0 else mine
        results = program(n, start + 1, start)
        for found, wanted in zip(results, (np.full(3, n), mine, other), strict=True):
            np.testing.assert_array_equal(found, wanted)
