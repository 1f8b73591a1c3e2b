"""Calls in loops and branches: the same as the loop or branch in Python, with as few dispatches as there can be."""

import dataclasses
import gc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partjit
from partjit import P, colocated, pjit
from partjit.colocated import colocated_python
from partjit.plan.ir.legality import PlanError
from partjit.plan.ir.nodes import Branch, ColocatedCall, Fragment, Loop
from partjit.plan.ir.verify import verify
from partjit.plan.ir.walk import walk
from partjit.plan.passes.choose_emitted import Executables
from partjit.plan.pipeline import structured
from tests.colocated import rendezvous
from tests.effort import EVERYTHING

pytestmark = pytest.mark.usefixtures("meeting")

lax = jax.lax


@pytest.fixture
def mesh():
    return partjit.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))


def note(name, *arrays):
    rendezvous.logs["calls"].append((name, *(np.asarray(array).round(3).tolist() for array in arrays)))


def twice(x):
    note("twice", x)
    return x * 2


def add(x, y):
    note("add", x, y)
    return x + y


def log(*xs):
    note("log", *xs)


def draw():
    note("draw")
    return jnp.float32(len(rendezvous.logs["calls"]))


def is_small(x):
    note("is_small", x)
    return jnp.sum(x) < 30


class Calls:
    """The functions as colocated ones."""

    def __init__(self, mesh=None):
        like = {"out_specs_fn": lambda x, *_: jax.ShapeDtypeStruct(x.shape, x.dtype)}
        devices = jax.devices()[:1] if mesh is None else mesh
        self.twice = colocated_python(twice, **like)
        self.add = colocated_python(add, **like)
        self.log = colocated_python(log, out_specs_fn=lambda *_: None)
        self.draw = colocated_python(draw, out_specs_fn=lambda: jax.ShapeDtypeStruct((), jnp.float32), devices=devices)
        self.is_small = colocated_python(is_small, out_specs_fn=lambda x: jax.ShapeDtypeStruct((), jnp.bool_))


by_hand = types.SimpleNamespace(twice=twice, add=add, log=log, draw=draw, is_small=is_small)

programs = {}


def program(fun):
    programs[fun.__name__] = fun
    return fun


@program
def scan_with_head_and_tail(c, x):
    def turn(carry, slice_):
        h = jnp.sin(carry) * slice_
        r = c.twice(h)
        return carry + r, jnp.sum(r)

    return lax.scan(turn, x, jnp.arange(1.0, 5.0))


@program
def scan_reversed_and_unrolled(c, x):
    def turn(carry, slice_):
        return c.add(carry, slice_ * jnp.ones_like(carry)), carry[0]

    return lax.scan(turn, x, jnp.arange(6.0), reverse=True, unroll=3)


@program
def scan_without_turns(c, x):
    if c is by_hand:  # which jax.disable_jit cannot do
        return x, jnp.zeros((0, 3))
    return lax.scan(lambda carry, s: (c.twice(carry), s + 1), x, jnp.zeros((0, 3)))


@program
def scan_of_one_turn(c, x):
    return lax.scan(lambda carry, s: (c.twice(carry + 1) + 1, c.twice(s)), x, jnp.ones((1, 3)))


@program
def scan_whose_carry_is_only_called(c, x):
    return lax.scan(lambda carry, _: (c.twice(carry), None), x, None, length=3)[0]


@program
def scan_that_only_logs(c, x):
    def turn(carry, i):
        c.log(i, jnp.sum(carry))
        return carry * 1.5, i

    return lax.scan(turn, x, jnp.arange(4))


@program
def scan_with_a_loader(c, x):
    def turn(carry, _):
        batch = c.draw()
        carry = carry + batch
        c.log(carry)
        return carry, batch

    return lax.scan(turn, x, None, length=4)


@program
def scan_that_swaps(c, x):
    def turn(carry, _):
        a, b, k = carry
        return (b, c.add(a, b) * 0.5, k + 1), (a, k)

    return lax.scan(turn, (x, x + 1, 0), None, length=5)


@program
def scan_of_structures(c, x):
    key = jax.random.key(3)

    def turn(carry, keys):
        state = {"x": carry["x"] + jax.random.uniform(keys), "n": carry["n"] + 1}
        c.log(state["n"])
        state["x"] = c.twice(state["x"]) / 2
        return state, {"first": state["x"][0], "key": keys}

    carry, stacked = lax.scan(turn, {"x": x, "n": jnp.int32(0)}, jax.random.split(key, 3))
    return carry, stacked["first"], jax.random.key_data(stacked["key"])


@program
def scan_with_unused_results(c, x):
    carry, _ = lax.scan(lambda carry, s: (carry * s, c.twice(carry)), x, jnp.arange(1.0, 4.0))
    return carry


@program
def scan_in_a_scan(c, x):
    def outer(carry, s):
        def inner(carry, t):
            r = c.twice(jnp.cos(carry) + t * s)
            return carry * 0.5 + r, r[0]

        carry, ys = lax.scan(inner, carry, jnp.arange(3.0))
        c.log(jnp.sum(carry))
        return carry, ys

    return lax.scan(outer, x, jnp.arange(1.0, 4.0))


@program
def while_with_a_call(c, x):
    return lax.while_loop(lambda v: jnp.sum(v) < 50, lambda v: c.twice(v) + 1, x)


@program
def while_with_head_and_tail(c, x):
    def turn(carry):
        v, n = carry
        h = jnp.sqrt(v + 1)
        return v + c.twice(h) * 2, n + 1

    return lax.while_loop(lambda carry: jnp.sum(carry[0]) < 80, turn, (x, 0))


@program
def while_without_turns(c, x):
    return lax.while_loop(lambda v: jnp.sum(v) < -5, lambda v: c.twice(jnp.exp(v)) + 1, x)


@program
def while_with_a_call_in_the_predicate(c, x):
    return lax.while_loop(c.is_small, lambda v: v + 2, x)


@program
def while_with_calls_everywhere(c, x):
    return lax.while_loop(lambda v: c.is_small(v * 2), lambda v: c.twice(v) + c.draw(), x)


@program
def fori_with_static_bounds(c, x):
    return lax.fori_loop(2, 5, lambda i, v: c.twice(v) + i, x)


@program
def fori_with_traced_bounds(c, x):
    return lax.fori_loop(0, jnp.int32(jnp.sum(x) / 10), lambda i, v: c.add(v, i * jnp.ones_like(v)), x)


@program
def cond_with_calls_in_one_branch(c, x):
    def some(v):
        c.log(jnp.sum(v))
        return c.twice(v)

    first = lax.cond(jnp.sum(x) > 1, some, lambda v: v, x + 1)
    return lax.cond(jnp.sum(x) < 1, some, lambda v: v, first) * 2


@program
def switch_with_calls(c, x):
    branches = [lambda v: v + 1, lambda v: c.twice(v), lambda v: c.twice(jnp.sin(v)) + c.draw()]
    return [lax.switch(i, branches, x) for i in (jnp.int32(jnp.sum(x)) % 3, jnp.int32(jnp.sum(x) + 1) % 3, 2)]


@program
def cond_in_a_scan(c, x):
    def turn(carry, i):
        carry = carry + 1
        carry = lax.cond(i % 2 == 0, lambda v: c.twice(v), lambda v: v, carry)
        lax.cond(i == 3, lambda v: c.log(i, v[0]), lambda v: None, carry)
        return carry, carry[1]

    return lax.scan(turn, x, jnp.arange(5))


@program
def branch_that_is_an_argument(c, x):
    return lax.cond(jnp.sum(x) > 1e6, c.twice, lambda v: v, x), x


@program
def scan_in_a_cond_in_a_while(c, x):
    def turn(carry):
        v, n = carry
        v = lax.cond(
            n % 2 == 0,
            lambda v: lax.scan(lambda s, t: (s + c.twice(t * s) * 0.1, None), v, jnp.arange(2.0))[0],
            lambda v: v - 1,
            v,
        )
        return v, n + 1

    return lax.while_loop(lambda carry: carry[1] < 4, turn, (x, 0))


@program
def loops_in_nested_programs(c, x):
    inner = pjit(lambda v: lax.fori_loop(0, 3, lambda i, v: c.twice(v) - v / 2, v))
    checkpoint = (lambda f: f) if c is by_hand else jax.checkpoint  # which jax.disable_jit does not open
    checked = checkpoint(lambda v: lax.scan(lambda s, _: (c.twice(s), s[0]), v, None, length=2))
    return jax.jit(inner)(x), checked(x + 1)


@program
def loop_over_what_a_call_gave(c, x):
    y = c.twice(x)
    z, _ = lax.scan(lambda s, t: (s + c.add(s, t), None), y, jnp.stack([y, x]))
    return z, y


@program
def independent_loops(c, x):
    a = lax.fori_loop(0, 3, lambda i, v: c.twice(v + i), x)
    b = lax.fori_loop(0, 2, lambda i, v: v * 3 + i, x)
    return a, b, lax.fori_loop(0, 2, lambda i, v: c.add(v, b), x)


@program
def literals_and_constants(c, x):
    table = jnp.array(np.arange(8, dtype=np.float32))

    def turn(carry, _):
        v, flag = carry
        v = v + c.twice(table) * flag
        c.log(jnp.float32(3))
        v = lax.fori_loop(0, 2, lambda i, u: c.add(u, table) * 0.5, v)
        return (v, 2.0), lax.cond(v[0] > 1, lambda: (c.log(v), 1.0)[1], lambda: 0.0)

    return lax.scan(turn, (x, 1.0), None, length=3)


@program
def captured_values(c, x):
    w = jnp.outer(x, x) / 100

    def turn(v, s):
        return w @ c.twice(v + s) + x, c.draw() + w[0, 0]

    return lax.scan(turn, x, jnp.arange(3.0)), w


def start():
    return np.arange(8, dtype=np.float32) / np.float32(3)


def by_python(fun):
    with jax.disable_jit():
        result = fun(by_hand, start())
    calls = [*rendezvous.logs["calls"]]
    rendezvous.clear()
    return result, calls


def check(expected, calls, run):
    result = run()
    colocated.wait()
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), result, expected)
    made = rendezvous.logs["calls"]
    assert [call[0] for call in made] == [call[0] for call in calls]
    for given, wanted in zip(made, calls, strict=True):
        for a, b in zip(given[1:], wanted[1:], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-3)
    rendezvous.clear()


WHERE = ["a mesh", "one device", "a mesh", "no specs"]


CASES = [
    (name, where)
    for k, name in enumerate(programs)
    for where in (sorted({*WHERE}) if EVERYTHING else [WHERE[k % len(WHERE)]])
]


@pytest.mark.soak
@pytest.mark.parametrize(("name", "where"), CASES)
def test_a_program_with_control_flow_is_what_python_does(name, where, mesh):
    fun = programs[name]
    expected, calls = by_python(fun)
    if where == "one device":
        c = Calls()
        f = pjit(lambda x: fun(c, x))
        for _ in range(2):
            check(expected, calls, lambda: f(start()))
        check(expected, calls, lambda: f.lower(start()).compile()(start()))
        return
    c = Calls(mesh)
    specs = {} if where == "no specs" else {"in_axis_resources": P("x"), "out_axis_resources": None}
    f = pjit(lambda x: fun(c, x), **specs, donate_argnums=() if where == "no specs" else (0,))
    with mesh:
        for _ in range(2):
            check(expected, calls, lambda: f(start()))
        assert str(f.plan(start())) == str(f.plan(start()))


# Dispatches


def turn_of(plan):
    (loop,) = (node for node in plan.nodes if isinstance(node, Loop))
    return [type(node) for node in loop.block.nodes]


def test_the_tail_of_a_turn_and_the_head_of_the_next_are_one_fragment():
    plan = pjit(lambda x: programs["scan_with_head_and_tail"](Calls(), x)).plan(start())
    assert turn_of(plan) == [ColocatedCall, Fragment]
    assert [type(node) for node in plan.nodes] == [Fragment, Loop]
    plan = pjit(lambda x: programs["while_with_head_and_tail"](Calls(), x)).plan(start())
    assert turn_of(plan) == [ColocatedCall, Fragment]
    assert [type(node) for node in plan.nodes] == [Fragment, Loop]


def test_turns_without_device_work_dispatch_nothing():
    plan = pjit(lambda x: programs["scan_whose_carry_is_only_called"](Calls(), x)).plan(start())
    assert turn_of(plan) == [ColocatedCall]


def test_what_the_devices_wait_for_in_the_next_turn_is_made_by_the_caller():
    c = Calls()
    plan = pjit(lambda x: lax.scan(lambda v, _: (c.twice(jnp.sin(v)), None), x, None, length=3)[0]).plan(start())
    assert turn_of(plan) == [Fragment, ColocatedCall]
    assert plan.calls[0].is_inline


def test_what_nobody_waits_for_splits_no_turn(by_the_host):
    plan = pjit(lambda x: programs["scan_that_only_logs"](Calls(), x)).plan(start())
    assert turn_of(plan) == [Fragment, ColocatedCall]
    assert not any(node.is_inline for node in plan.calls)


def test_loops_and_branches_without_calls_stay_inside_of_xla():
    def fun(x):
        c = Calls()
        x = lax.fori_loop(0, 3, lambda i, v: v * 2, x)
        x = lax.cond(x[0] > 0, lambda v: v, lambda v: -v, x)
        return c.twice(lax.while_loop(lambda v: v[1] < 3, lambda v: v + 1, x))

    plan = pjit(fun).plan(start())
    assert [type(node) for node in plan.nodes] == [Fragment, ColocatedCall]
    names = {eqn.primitive.name for eqn in plan.fragments[0].jaxpr.eqns}
    assert {"cond", "while"} <= names


def test_carried_values_and_stacks_are_donated():
    plan = pjit(lambda x: programs["scan_with_head_and_tail"](Calls(), x)).plan(start())
    (loop,) = (node for node in plan.nodes if isinstance(node, Loop))
    (fragment,) = (node for node in loop.block.nodes if isinstance(node, Fragment))
    given = {v for v, flag in zip(fragment.inputs, fragment.donated, strict=True) if flag}
    # The counter, the carry and the stack; what was computed for the call has no successor of its own memory to need.
    assert {v for v in loop.outputs if v in fragment.inputs} <= given


@pytest.mark.parametrize("is_kept", [False, True])
def test_what_dies_in_a_branch_is_donated_there_by_its_last_reader(is_kept):
    c = Calls()

    def fun(x):
        y = c.twice(x) + 1
        result = lax.cond(y.sum() > 0, lambda v: c.twice(v * 2), lambda v: c.twice(v - 1) + v, y)
        return (result, y) if is_kept else result

    (branch,) = (node for node in pjit(fun).plan(start()).nodes if isinstance(node, Branch))
    donated = [
        [(value in branch.given, flag) for value, flag in zip(node.inputs, node.donated, strict=True)]
        for block in branch.blocks
        for node in block.nodes
        if isinstance(node, Fragment)
    ]
    # v - 1, after which v is read again; a result of a call, which its function may keep, and v; v * 2.
    last = not is_kept
    assert donated == [[(last, False)], [(False, False), (last, last)], [(last, last)]]


def test_a_dear_head_is_not_computed_after_the_last_turn():
    c = Calls()

    def fun(x):
        def turn(v, _):
            return c.twice(jnp.sin(v @ v)) * 1e-3, None

        return lax.scan(turn, x, None, length=3)[0]

    x = np.ones((128, 128), np.float32)
    plan = pjit(fun).plan(x)
    (loop,) = (node for node in plan.nodes if isinstance(node, Loop))
    (fragment,) = (node for node in loop.block.nodes if isinstance(node, Fragment))
    assert "cond" in {eqn.primitive.name for eqn in fragment.jaxpr.eqns}
    np.testing.assert_allclose(pjit(fun)(x)[0, 0], _in_python(fun, x)[0, 0], rtol=1e-5)


@pytest.mark.parametrize("turns", [0, 1, 3])
@pytest.mark.parametrize("first", [None, 0, -1])
def test_a_dear_head_is_computed_before_each_turn(first, turns):
    c = Calls()
    x = np.ones((128, 128), np.float32)

    def turn(v):
        return c.twice(jnp.sin(v @ v) * 1e-3) + 1

    def fun(x):
        if first is None:
            return lax.scan(lambda v, _: (turn(v), None), x, None, length=turns)[0]
        # A counter is no condition: it may be 0 where the loop goes on, and anything where it ends.
        return lax.while_loop(lambda s: s[0] < first + turns, lambda s: (s[0] + 1, turn(s[1])), (first, x))[1]

    expected = np.ones((128, 128))
    for _ in range(turns):
        expected = 2e-3 * np.sin(expected @ expected) + 1
    np.testing.assert_allclose(pjit(fun)(x), expected, rtol=1e-4)
    colocated.wait()
    assert len(rendezvous.logs["calls"]) == turns


def test_a_cheap_loop_carries_what_it_was_written_with():
    c = Calls()
    plan = pjit(lambda x: lax.scan(lambda v, _: (c.twice(v + 1), None), x, None, length=3)[0]).plan(start())
    (loop,) = (node for node in plan.nodes if isinstance(node, Loop))
    assert [value.aval.shape for value in loop.outputs] == [(8,)]


def _in_python(fun, x):
    with jax.disable_jit():
        return fun(x)


def test_the_size_of_a_plan_and_its_memory_do_not_grow_with_the_turns(new_garbage):
    c = Calls()

    def fun(x, length):
        def turn(v, i):
            c.log(i)
            return c.twice(v) / 2 + 1, None

        return lax.scan(turn, x, jnp.arange(length))[0]

    sizes = {}
    for length in (10, 60):
        f = pjit(lambda x, length=length: fun(x, length))
        plan = f.plan(start())
        sizes[length] = len([*walk(plan.nodes)]), len(plan.source.splitlines())
        f(start()).block_until_ready()
        colocated.wait()
        gc.collect()
        before = len(jax.live_arrays())
        f(start()).block_until_ready()
        colocated.wait()
        gc.collect()
        assert len(jax.live_arrays()) <= before
    assert sizes[10] == sizes[60]


def test_stacks_are_whole_in_the_loop_and_leave_as_asked(mesh):
    c = Calls(mesh)

    def fun(x, xs):
        return lax.scan(lambda v, s: (c.twice(v) - v / 2, v + s), x, xs)

    f = pjit(fun, in_axis_resources=(P("y"), P("x", "y")), out_axis_resources=(P("y"), P("x")))
    xs = np.arange(64, dtype=np.float32).reshape(8, 8)
    with mesh:
        (loop,) = (node for node in f.plan(start(), xs).nodes if isinstance(node, Loop))
        v, ys = f(start(), xs)
    stacks = [value for value in (*loop.captured, *loop.outputs) if value.aval.shape == (8, 8)]
    assert [value.sharding.spec[:1] in ((), (None,)) for value in stacks] == [True, True]
    assert (v.sharding.spec, ys.sharding.spec) == (P("y"), P("x"))
    carry = start()
    for k in range(8):
        np.testing.assert_allclose(ys[k], carry + xs[k], rtol=1e-5)
        carry = carry * 1.5
    np.testing.assert_allclose(v, carry, rtol=1e-5)


def test_what_is_carried_stays_sharded(mesh):
    c = Calls(mesh)
    loops = [
        lambda v: lax.while_loop(lambda v: v[0] < 40, lambda v: c.twice(v) + 1, v),
        lambda v: lax.fori_loop(0, 3, lambda i, v: c.twice(v) + i, v),
        lambda v: lax.scan(lambda v, _: (c.twice(v) - v / 2, None), v, None, length=3)[0],
    ]
    for fun in loops:
        f = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))
        with mesh:
            (loop,) = (node for node in f.plan(start()).nodes if isinstance(node, Loop))
        assert {value.sharding.spec for value in loop.outputs if value.aval.shape == (8,)} == {P("x")}


# What every plan must satisfy


def broken(node):
    """Loops and branches that differ from a good one in one thing that must not be."""
    for k, block in enumerate(node.blocks):

        def with_block(k=k, block=block, **changes):
            new = dataclasses.replace(block, **changes)
            if isinstance(node, Loop):
                return dataclasses.replace(node, block=new)
            return dataclasses.replace(node, blocks=tuple(new if i == k else b for i, b in enumerate(node.blocks)))

        for i, inner in enumerate(block.nodes):
            others = tuple(other for j, other in enumerate(block.nodes) if j != i)
            yield f"without {inner.name}", with_block(nodes=others)
            yield f"{inner.name} twice", with_block(nodes=(*block.nodes, inner))
            if isinstance(inner, Loop | Branch):
                for what, wrong in broken(inner):
                    nodes = tuple(wrong if j == i else other for j, other in enumerate(block.nodes))
                    yield f"{inner.name} {what}", with_block(nodes=nodes)
            if isinstance(inner, Fragment):
                captured = {*node.captured} if isinstance(node, Loop) else {*node.inputs} - {*node.given}
                for j, value in enumerate(inner.inputs):
                    if value in captured:
                        given = dataclasses.replace(inner, donated=tuple(m == j for m in range(len(inner.inputs))))
                        nodes = tuple(given if m == i else other for m, other in enumerate(block.nodes))
                        yield f"{inner.name} given {value.name} from outside", with_block(nodes=nodes)
        if block.outputs:
            yield "giving less", with_block(outputs=block.outputs[1:])
            types = {(value.aval.shape, value.aval.dtype) for value in block.outputs}
            if len(types) > 1:
                turned = (*block.outputs[1:], block.outputs[0])
                kinds = [[(v.aval.shape, v.aval.dtype) for v in values] for values in (turned, block.outputs)]
                if kinds[0] != kinds[1]:
                    yield "giving otherwise", with_block(outputs=turned)
    if isinstance(node, Loop):
        yield "starting from less", dataclasses.replace(node, inputs=node.inputs[:-1])
        for value in node.captured:
            if value.aval.shape == node.outputs[0].aval.shape and value.aval.dtype == node.outputs[0].aval.dtype:
                inputs = (*node.captured, value, *node.initial[1:])
                yield "starting from what it captures", dataclasses.replace(node, inputs=inputs)


def complaint(plan, flat):
    try:
        verify(plan, flat)
    except PlanError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", programs)
def test_broken_loops_and_branches_are_found(name, mesh):
    c = Calls(mesh)
    f = pjit(lambda x: programs[name](c, x), in_axis_resources=P("x"), out_axis_resources=None)
    with mesh:
        plan = f.plan(start())
        flat = structured(f.trace(start()).jaxpr, plan.mesh, executables=Executables.of(plan.mesh, None))
    verify(plan, flat)
    for k, node in enumerate(plan.nodes):
        if isinstance(node, Loop | Branch):
            for what, wrong in broken(node):
                nodes = tuple(wrong if i == k else other for i, other in enumerate(plan.nodes))
                assert complaint(dataclasses.replace(plan, nodes=nodes), flat), f"{node.name} {what}"


# Failures


def test_a_call_that_fails_in_a_turn_says_where_and_the_program_can_be_called_again():
    @colocated_python(out_specs_fn=lambda i, x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    def work(i, x):
        rendezvous.logs["turns"].append(int(i))
        if int(i) in rendezvous.logs["fails at"]:
            raise RuntimeError("no more")
        return x + 1

    @pjit
    def fun(x):
        return lax.scan(lambda v, i: (work(i, v) * 2, None), x, jnp.arange(6))[0]

    rendezvous.logs["fails at"].append(3)
    with pytest.raises(RuntimeError, match="no more") as failure:
        fun(start()).block_until_ready()
    assert any("test_control_flow.py" in note for note in failure.value.__notes__)
    assert rendezvous.logs["turns"] == [0, 1, 2, 3]
    rendezvous.clear()
    expected = start()
    for _ in range(6):
        expected = (expected + 1) * 2
    np.testing.assert_allclose(fun(start()), expected)
    assert rendezvous.logs["turns"] == [*range(6)]


def test_a_call_that_nobody_waits_for_fails_where_its_result_is_used():
    @colocated_python(out_specs_fn=lambda i: jax.ShapeDtypeStruct((), jnp.int32), stream="aside")
    def check_it(i):
        if int(i) == 2:
            raise RuntimeError("two")
        return i

    def fun(x):
        def turn(carry, i):
            return (carry[0] + 1, check_it(i)), None

        return lax.scan(turn, (x, jnp.int32(0)), jnp.arange(3))[0]

    result, last = pjit(fun)(start())
    np.testing.assert_allclose(result, start() + 3)
    with pytest.raises(RuntimeError, match="two"):
        int(last)


# Other users of plans


def test_a_plan_is_printed_and_drawn_with_its_loops_and_branches():
    c = Calls()

    @pjit
    def fun(x):
        def turn(v, i):
            v = c.twice(v) + 1
            return lax.cond(i == 1, c.twice, lambda v: v, v), None

        return lax.scan(turn, x, jnp.arange(3))[0]

    plan = fun.plan(start())
    text = str(plan)
    assert all(part in text for part in ("for _ in range(3):  # loop", "match read(", "case _:"))
    assert any(isinstance(node, Branch) for node in walk(plan.nodes))
    drawn = plan.to_mermaid()
    assert all(part in drawn for part in ('subgraph loop["loop: 3 iterations"]', 'subgraph branch["branch: one of 2"]'))
    assert repr(plan) == "<plan of fun: 4 fragments, 2 calls, 0 transfers, 1 loop, 1 branch>"
    assert [*plan.graph.nodes] == ["arguments", "fragment_0", "loop", "fragment_3", "results"]


def test_events_tell_every_turn_and_keep_nothing(new_garbage):
    c = Calls()

    @pjit
    def fun(x):
        return lax.scan(lambda v, i: (c.twice(v + i) - 1, None), x, jnp.arange(12.0))[0]

    fun(start())
    seen, alive = [], []

    def listen(event):
        seen.append(type(event).__name__)
        if seen[-1] == "CallStarted":
            gc.collect()
            alive.append(len(jax.live_arrays()))

    with partjit.events.subscribe(listen):
        fun(start()).block_until_ready()
    assert seen.count("CallStarted") == 12
    assert seen.count("FragmentDispatched") == 13
    assert max(alive[-3:]) <= max(alive[:3]) + 2


def test_a_call_in_a_batch_says_where_it_stands():
    c = Calls()

    def body(x):
        return c.twice(x) + 1  # this line

    line = body.__code__.co_firstlineno + 1
    for batched in (jax.vmap(body), jax.vmap(jax.jit(body)), jax.vmap(jax.checkpoint(body))):
        (call,) = pjit(batched).plan(jnp.ones((2, 3))).calls
        assert call.site == (__file__, line, "body")


def weak_loops(call):
    def often(i, x):
        lax.cond(i % 2 == 0, lambda: call(x), lambda: None)

    def scan(x, length=3, reverse=False, each=call):
        def iteration(carry, i):
            each(carry) if each is call else each(i, carry)
            return carry * 1.5, (jnp.asarray(2.0) * 1, i + 1, carry, carry * jnp.float32(1))

        return lax.scan(iteration, x, jnp.arange(length), reverse=reverse)

    yield lambda x: scan(x)
    yield lambda x: scan(x, reverse=True)
    yield lambda x: scan(x, length=0)
    yield lambda x: scan(x, each=often)
    yield lambda x: lax.fori_loop(0, 3, lambda i, v: (call(v[0]), (v[0] * 2, v[1] * jnp.float32(2)))[1], (x, x * 1))
    yield lambda x: lax.while_loop(lambda v: v[0] < 5, lambda v: (call(v[0]), (v[0] + 1, v[0]))[1], (x, x))
    yield lambda x: lax.fori_loop(0, 3, lambda i, v: (often(i, v), v * 2)[1], x)
    for other in (lambda v: v * 3, lambda v: v, lambda v: v * jnp.float32(2)):
        yield lambda x, other=other: lax.cond(x > 0, lambda v: (call(v), v * 2)[1], other, x)
        yield lambda x, other=other: lax.cond(x > 0, lambda v: (call(v), v)[1], other, x)
        yield lambda x, other=other: lax.switch(np.int32(1), [other, lambda v: (call(v), v)[1]], x)


def test_results_are_as_weakly_typed_as_without_calls():
    host = colocated_python(log, out_specs_fn=lambda x: None)

    def all_of(call):
        return lambda x: [fun(x) for fun in weak_loops(call)]

    kinds = set()
    for x in (1.0, np.float32(1)):
        expected, found = jax.eval_shape(all_of(lambda x: None), x), pjit(all_of(host))(x)
        for one, wanted in zip(found, expected, strict=True):
            types = [[leaf.weak_type for leaf in jax.tree.leaves(tree)] for tree in (one, wanted)]
            assert types[0] == types[1]
            kinds.add(tuple(types[0]))
    assert len(kinds) > 5
