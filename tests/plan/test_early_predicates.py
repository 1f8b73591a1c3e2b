"""Branches by the host on one CPU device: what tells which one is chosen is computed, and read, before the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partjit
from partjit import P, colocated, pjit
from partjit.colocated import colocated_python
from partjit.plan.ir.nodes import Branch, Fragment
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

LARGE, SMALL = np.eye(128, dtype=np.float32), np.eye(4, dtype=np.float32)


@colocated_python(out_specs_fn=lambda *_: None)
def save(step, x):
    rendezvous.logs["calls"].append((int(step), float(x.sum())))


@colocated_python(out_specs_fn=lambda x: x)
def late(x):
    return x + 1


def of_number(step, x):
    return step % 3 == 2


def of_rest(step, x):
    return (step % 3 == 2) & (jnp.sum(x) > -1)


def of_call(step, x):
    return late(step) % 3 == 0


def program(predicate):
    def step(x, number):
        x = x @ x @ x
        jax.lax.cond(predicate(number, x), lambda: save(number, x), lambda: None)
        return x

    return pjit(step, donate_argnums=0)


@pytest.mark.parametrize(
    ("predicate", "x", "equations"),
    [
        # Two products of 128 x 128 amortize a fragment of their own, those of 4 x 4 do not.
        (of_number, LARGE, "apart"),
        (of_number, SMALL, "together"),
        (of_rest, LARGE, "together"),
        (of_rest, SMALL, "together"),
        (of_call, LARGE, "beside the call"),
    ],
)
def test_the_predicate_has_a_fragment_of_its_own_where_it_is_little_and_the_rest_is_not(predicate, x, equations):
    step = program(predicate)
    plan = step.plan(x, 0)
    fragments = [node for node in plan.nodes if isinstance(node, Fragment)]
    products = [[eqn.primitive.name for eqn in node.jaxpr.eqns].count("dot_general") for node in fragments]
    assert isinstance(plan.nodes[-1], Branch)
    if equations == "apart":
        assert products == [0, 2]
        assert plan.nodes[-1].inputs[0] in fragments[0].outputs
    elif equations == "together":
        assert products == [2]
    else:
        assert sum(products) == 2
    for number in range(6):
        x = step(x, number)
    colocated.wait()
    assert rendezvous.logs["calls"] == [(2, len(x)), (5, len(x))]


def test_several_devices_make_the_call_instead_of_waiting_for_one_more_fragment():
    mesh = partjit.Mesh(np.array(jax.devices()[:2]), ("x",))
    step = pjit(program(of_number).__wrapped__, in_shardings=(P("x"), None))
    with mesh:
        (fragment,) = step.plan(LARGE, 0).nodes
        assert [call.callee.name for call in fragment.calls] == ["save"]
        for number in range(3):
            step(LARGE, number)
    colocated.wait()
    assert rendezvous.logs["calls"] == [(2, 128)]
