"""The plan of a program does not depend on how specs are spelled that mean the same.

The partitioner has a spelling of its own: without unsharded dimensions at the end, and without axes of size 1.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding

import partjit
from partjit import P, pjit
from partjit.colocated import colocated_python

MESHES = {
    shape: partjit.Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("data", "model"))
    for shape in ((2, 2), (4, 1), (1, 1))
}
SPELLINGS = [
    ((2, 2), P("model"), P("model", None)),
    ((2, 2), P(), P(None, None)),
    ((4, 1), P("data"), P(("data", "model"))),
    ((4, 1), P(), P("model", None)),
    ((1, 1), P(), P("data", "model")),
]
STATE = jax.ShapeDtypeStruct((8, 8), np.float32)


def programs(mesh, spec):
    """Programs of a state, with calls whose specs and results are sharded like it."""
    stated = jax.ShapeDtypeStruct(STATE.shape, STATE.dtype, sharding=NamedSharding(mesh, spec))
    look = colocated_python(lambda x: None, stream="looks", out_specs_fn=lambda x: None)
    number = colocated_python(lambda x: x, out_specs_fn=lambda x: x)
    changed = colocated_python(lambda x: x, out_specs=stated)
    checked = colocated_python(lambda x: x, in_specs=((stated,), {}), out_specs=stated)
    answered = colocated_python(lambda x: x, uses_jax=False, out_specs=stated)
    shards = colocated_python(lambda x: x.data, layout="per_shard", in_specs=((stated,), {}), out_specs=stated)

    def step(w):
        return jnp.sin(w) @ w

    def changed_now_and_then(change):
        return lambda w, i: lax.cond(i % 3 == 0, change, lambda w: w, w)

    def looks(w, _):
        w = step(w)
        look(w)
        return w, None

    return {
        "a look": lambda w, i: looks(w, i)[0],
        "a look now and then": lambda w, i: lax.cond(i % 3 == 0, lambda w: looks(w, i)[0], step, w),
        "looks in a loop": lambda w, i: lax.scan(looks, w, None, length=3)[0],
        "a number": lambda w, i: step(w) * number(jnp.sum(w)),
        "numbers in a loop": lambda w, i: lax.fori_loop(0, 3, lambda _, w: step(w) * number(jnp.sum(w)), w),
        "changed": lambda w, i: step(changed(step(w))),
        "changed at the end": lambda w, i: changed(step(w)),
        "changed in a loop": lambda w, i: lax.fori_loop(0, 3, lambda _, w: changed(step(w)), w),
        "the argument changed now and then": changed_now_and_then(changed),
        "changed now and then": lambda w, i: changed_now_and_then(changed)(step(w), i),
        "scaled now and then": lambda w, i: changed_now_and_then(lambda w: w * number(jnp.sum(w)))(step(w), i),
        "checked": lambda w, i: step(checked(step(w))),
        "answered in a loop": lambda w, i: lax.fori_loop(0, 3, lambda _, w: answered(step(w)), w),
        "shards": lambda w, i: step(shards(w)),
        "shards in a loop": lambda w, i: lax.fori_loop(0, 3, lambda _, w: shards(step(w)), w),
    }


@pytest.mark.parametrize(("shape", "spec", "respelled"), SPELLINGS, ids=str)
def test_a_plan_does_not_depend_on_how_specs_are_spelled(shape, spec, respelled):
    mesh = MESHES[shape]

    def shown(spec):
        found = {}
        for name, program in programs(mesh, spec).items():
            step = pjit(program, in_shardings=(spec, None), out_shardings=spec, donate_argnums=0)
            with mesh:
                plan = step.plan(STATE, 3)
            calls = [(call.is_inline, call.is_answered, call.pinned) for call in plan.calls]
            found[name] = str(plan), [(len(f.outputs), f.donated) for f in plan.fragments], calls
        return found

    assert shown(respelled) == shown(spec)


def test_a_plan_is_the_same_each_time_whichever_of_several_spellings_a_branch_may_give():
    def planned():
        look = colocated_python(lambda x: None, out_specs_fn=lambda x: None)

        def program(i, *xs):
            def one_of(*xs):
                look(xs[0])
                return xs

            *xs, last = lax.cond(i % 3 == 0, one_of, lambda *xs: xs[::-1], *xs)
            look(last)
            return *xs, last

        specs = P("data"), P("model"), P("data", "model"), P(None, "data")
        step = pjit(program, in_shardings=(None, *specs), donate_argnums=(1, 2, 3, 4))
        with MESHES[1, 1]:
            plan = step.plan(3, *[STATE] * 4)
        return plan.source, [value.sharding for node in plan.nodes for value in node.outputs]

    first = planned()
    assert [planned() for _ in range(8)] == [first] * 8


@pytest.mark.parametrize("spec", [P("data"), P(None), P("data", None), P("model"), P(("data", "model"), None)], ids=str)
def test_a_state_is_not_copied_for_a_branch_and_is_updated_in_place(spec):
    look = colocated_python(lambda x: None, stream="looks", out_specs_fn=lambda x: None)
    as_is = colocated_python(lambda x: x, out_specs_fn=lambda x: x)

    def program(x, i):
        x = 2 * x
        x = x * as_is(jnp.sum(x))
        lax.cond(i % 10 == 0, lambda: look(x), lambda: None)
        return x

    step = pjit(program, in_shardings=(spec, None), out_shardings=spec, donate_argnums=0)
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    with MESHES[4, 1]:
        fragments = [fragment for fragment in step.plan(x, 0).fragments if not fragment.by_one_device]
        result = step(x, 0)
    assert len(fragments) == 2
    for fragment in fragments:
        assert [value.aval.shape for value in fragment.outputs].count(x.shape) == 1
        given = zip(fragment.inputs, fragment.donated, strict=True)
        assert [flag for value, flag in given if value.aval.shape == x.shape] == [True]
    np.testing.assert_array_equal(result, 2 * x * (2 * x).sum())
