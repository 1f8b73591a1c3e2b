"""Calls in loops of executables, whose arguments are handed over for several iterations at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from partjit import P, colocated, pjit
from partjit.colocated import colocated_python
from partjit.plan.passes import gather
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

AT_ONCE = 4
WAYS = {"returned": 1e8, "handed over": 0}
"""How the host gets the arguments of a loop that has no more iterations than are handed over at once."""

OPTIONS = {"as it is": {}, "numpy": {"arrays": "numpy"}, "on a thread of the devices": {"uses_jax": False}}


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch):
    monkeypatch.setattr(gather, "MOST_ITERATIONS", AT_ONCE)
    monkeypatch.setattr(gather, "FEWEST_ITERATIONS", 2)


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    monkeypatch.setattr(gather, "MOST_WORK_UNTIL_RETURN", WAYS[request.param])
    return request.param


def returns(plan):
    """Whether executables return what their calls get."""
    return any(fragment.gathered for fragment in plan.fragments)


def noted(name, stream=None, **options):
    """A function that notes the values that it is called with."""

    def note(*args):
        rendezvous.logs[name].append(tuple(np.asarray(x).tolist() for x in args))

    return colocated_python(note, out_specs_fn=lambda *_: None, stream=stream, **options)


def while_loop(count, body, x):
    return lax.while_loop(lambda s: s[0] < count, lambda s: (s[0] + 1, body(s[0], s[1])), (jnp.int32(0), x))[1]


LOOPS = {"fori": lambda count, body, x: lax.fori_loop(0, count, body, x), "while": while_loop}


def at_once(plan):
    return [call.at_once for call in plan.calls]


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 11])
def test_each_call_gets_what_is_its_own_in_order(kind, count, devices, monkeypatch):
    """Two calls on a stream and one on another, of the iteration, of sharded arrays, and of what never changes."""
    monkeypatch.setattr(gather, "MOST_WORK_UNTIL_RETURN", 1e8 if count > 2 else 0)
    options = OPTIONS[[*OPTIONS][count % len(OPTIONS)]]
    one, two, other = noted("log", "a", **options), noted("log", "a", **options), noted("other", "b", **options)

    def body(i, x):
        one(i, x.sum())
        other(i > 1, i)
        two(i, x, w, jnp.float32(0.5))
        return x * 2

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
    x = jax.device_put(np.arange(1, 9, dtype=np.float32), jax.NamedSharding(mesh, P("x")))
    w = np.arange(3, dtype=np.int32)
    program = pjit(lambda x: LOOPS[kind](count, body, x))
    many = AT_ONCE if kind == "while" else min(count, AT_ONCE)
    assert at_once(program.plan(x)) == [many] * 3
    assert returns(program.plan(x)) == (kind == "fori" and count in (3, 4))
    values = [np.arange(1, 9) * 2.0**i for i in range(count)]
    log = [call for i, x in enumerate(values) for call in ((i, x.sum()), (i, x.tolist(), w.tolist(), 0.5))]
    for _ in range(2):
        rendezvous.clear()
        np.testing.assert_array_equal(program(x), np.arange(1, 9) * 2.0**count)
        colocated.wait()
        assert rendezvous.logs["log"] == log
        assert rendezvous.logs["other"] == [(i > 1, i) for i in range(count)]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_loop_in_a_loop_and_calls_around_are_in_order(options):
    """Of the outer loop, whose iterations have others' calls in between, each call is handed over alone."""
    log = noted("log", "a", **OPTIONS[options])

    def outer(i, x):
        log(i)
        return lax.fori_loop(0, 6, lambda j, x: (log(10 * i + j), x + 1)[1], x)

    def body(x):
        x = lax.fori_loop(0, 3, outer, x)
        log(-1)
        return lax.fori_loop(0, 5, lambda i, x: (log(-i), x)[1], x)

    program = pjit(body)
    made = [call for i in range(3) for call in (i, *(10 * i + j for j in range(6)))] + [-1, *(-i for i in range(5))]
    for _ in range(3):  # then the functions that use no jax are known to be quick
        rendezvous.clear()
        assert program(jnp.float32(0)) == 18
        colocated.wait()
        assert rendezvous.logs["log"] == [(call,) for call in made]
    assert sorted(at_once(program.plan(jnp.float32(0)))) == [1, 1, AT_ONCE, AT_ONCE]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("count", [4, 9])
def test_those_after_one_that_fails_are_made(options, count, way):
    def fail(i):
        if int(i) in (1, 3):
            raise ValueError(f"{int(i)} is wrong")
        rendezvous.logs["log"].append(int(i))

    log = colocated_python(fail, stream="a", out_specs_fn=lambda *_: None, **OPTIONS[options])
    program = pjit(lambda x: lax.fori_loop(0, count, lambda i, x: (log(i), x + 1)[1], x))
    assert returns(program.plan(jnp.ones(8))) == (way == "returned" and count == AT_ONCE)
    for _ in range(3):
        rendezvous.clear()
        program(jnp.ones(8))
        with pytest.raises(ValueError, match=r"1 is wrong\n(.*\n)*.*ValueError: 3 is wrong"):
            colocated.wait()
        assert rendezvous.logs["log"] == [i for i in range(count) if i not in (1, 3)]


def test_loops_that_follow_each_other_are_one_executable_that_returns_what_their_calls_get(way):
    """The arguments that all iterations share among them are those of the program, and what is computed before."""
    log, other = noted("log", "a"), noted("other", None, arrays="numpy")

    def body(x):
        y = x * 2
        x = lax.fori_loop(0, 3, lambda i, x: (log(i, y), other(x), x + 1)[2], x)
        return lax.fori_loop(0, 2, lambda i, x: (log(-i, x), x + 1)[1], x) * 10

    program = pjit(body, donate_argnums=0)
    plan = program.plan(jnp.float32(5))
    assert returns(plan) == (way == "returned")
    assert len(plan.fragments) == 1
    for _ in range(2):
        rendezvous.clear()
        assert program(jnp.float32(5)) == 100
        colocated.wait()
        assert rendezvous.logs["log"] == [(0, 10), (1, 10), (2, 10), (0, 8), (-1, 9)]
        assert rendezvous.logs["other"] == [(5,), (6,), (7,)]


@pytest.mark.parametrize("count", [3, 9])
@pytest.mark.parametrize("devices", [1, 8])
def test_calls_without_arguments_are_counted(count, devices, way):
    """Where others have some, and where none has any."""
    tick = colocated_python(lambda: rendezvous.logs["log"].append(()), stream="a", out_specs_fn=lambda: None)
    log = noted("log", "a")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
    x = jax.device_put(np.ones(8, np.float32), jax.NamedSharding(mesh, P("x")))

    def alone(x):
        return lax.fori_loop(0, count, lambda _, x: (tick(), x + 1)[1], x)

    def both(x):
        return lax.fori_loop(0, count, lambda i, x: (tick(), log(i), x)[2], alone(x))

    for fun, made in (
        (alone, [()] * count),
        (both, [()] * count + [call for i in range(count) for call in ((), (i,))]),
    ):
        program = pjit(fun)
        assert returns(program.plan(x)) == (fun is both and way == "returned" and count == 3)
        rendezvous.clear()
        np.testing.assert_array_equal(program(x), np.ones(8) + count)
        colocated.wait()
        assert rendezvous.logs["log"] == made


def test_calls_before_what_fails_are_made(meeting):
    """An executable that calls other code hands over what its calls get, which it would not return if that fails."""

    def broken(x):
        raise ValueError("broken")

    def body(x):
        x = lax.fori_loop(0, 3, lambda i, x: (log(i), x + 1)[1], x)
        return x + jax.pure_callback(broken, jax.ShapeDtypeStruct((), jnp.float32), x[0])

    log = noted("log", "a")
    program = pjit(body)
    with pytest.raises(Exception, match="broken"):
        jax.block_until_ready(program(jnp.ones(8)))
    colocated.wait(timeout=60)
    assert rendezvous.logs["log"] == [(0,), (1,), (2,)]
    assert at_once(program.plan(jnp.ones(8))) == [3]


def test_calls_of_a_program_in_a_call_of_their_stream_are_a_part_of_it(way):
    log = noted("log", "a")
    program = pjit(lambda x: lax.fori_loop(0, 3, lambda i, x: (log(i), x + 1)[1], x))

    def calling(x):
        result = program(x)
        rendezvous.logs["log"].append("in the call")
        return result

    outer = colocated_python(calling, stream="a", out_specs_fn=lambda x: x)
    assert outer(jnp.float32(0)) == 3
    assert rendezvous.logs["log"] == [(0,), (1,), (2,), "in the call"]


def test_they_take_their_place_among_calls_of_their_stream(way):
    """Those of an execution wait for an earlier call, and a later call for them, though what they get is there."""
    log = noted("log", "a")
    slow = colocated_python(
        lambda x: (rendezvous.hear("may go on"), rendezvous.logs["log"].append("slow"))[1],
        stream="a",
        out_specs_fn=lambda x: None,
    )
    program = pjit(lambda x: lax.fori_loop(0, 3, lambda i, x: (log(i), x + 1)[1], x))
    slow(jnp.float32(0))
    jax.block_until_ready(program(jnp.float32(0)))
    log(jnp.int32(-1))
    assert rendezvous.logs["log"] == []
    rendezvous.say("may go on")
    colocated.wait()
    assert rendezvous.logs["log"] == ["slow", (0,), (1,), (2,), (-1,)]


def test_an_array_that_a_function_keeps_stays_as_it_is():
    kept = rendezvous.logs["kept"]
    keep = colocated_python(
        lambda x: rendezvous.logs["kept"].append(x), stream="a", arrays="numpy", out_specs_fn=lambda x: None
    )
    program = pjit(lambda x: lax.fori_loop(0, 9, lambda i, x: (keep(x), x + 1)[1], x))
    for k in range(2):
        program(jnp.full(3, 10.0 * k))
    colocated.wait()
    assert [x.tolist() for x in kept] == [[10.0 * k + i] * 3 for k in range(2) for i in range(9)]
    assert not any(x.flags.writeable for x in kept)


def test_what_is_updated_from_its_own_elements_is_what_the_program_says(way):
    note = noted("note")

    def f(x):
        moved = x.at[1:].set(x[:-1])

        def body(i, total):
            note(lax.dynamic_update_slice(x, x[:2] * 0.5, (1,)), moved)
            return total + i

        return lax.fori_loop(0, AT_ONCE, body, jnp.int32(0))

    assert int(pjit(f)(jnp.arange(1.0, 5.0))) == 6
    colocated.wait()
    assert rendezvous.logs["note"] == [([1, 0.5, 1, 4], [1, 1, 2, 3])] * AT_ONCE


def test_the_plan_says_how_many_at_once():
    log = noted("log", "a")
    plan = pjit(lambda x: lax.fori_loop(0, 9, lambda i, x: (log(i), x + 1)[1], x)).plan(jnp.ones(8))
    assert "as its executable runs, 4 iterations at once, stream a" in plan._repr_html_()
    assert "calls note as it runs" in plan.source
    plan = pjit(lambda x: lax.fori_loop(0, 4, lambda i, x: (log(i), x + 1)[1], x)).plan(jnp.ones(8))
    assert "when its executable has run, 4 iterations at once, stream a" in plan._repr_html_()
    assert "calls note when it has run" in plan.source


APART = {
    "much work": lambda log, i, x: (log(i), jnp.sum(jnp.zeros((8, 2**18)) + x[:, None], 1))[1],
    "large arguments": lambda log, i, x: (log(jnp.tile(x, 2**13) + i), x)[1],
    "so few that it saves nothing": lambda log, i, x: (log(jnp.tile(x, 2**11) + i), x)[1],
    "in a branch": lambda log, i, x: (lax.cond(i > 3, log, lambda i: None, i), x)[1],
    "beside a call in a branch": lambda log, i, x: (log(i), lax.cond(i > 3, log, lambda i: None, i), x)[2],
    "beside a callback": lambda log, i, x: (log(i), x + jax.pure_callback(np.float32, jnp.float32(0), i))[1],
    "beside a while_loop": lambda log, i, x: (log(i), lax.while_loop(lambda y: y[0] < i, jnp.exp, x))[1],
    "beside a print": lambda log, i, x: (log(i), jax.debug.print("{}", i), x)[2],
}


@pytest.mark.parametrize("case", APART)
def test_each_is_handed_over_at_once_where_one_could_wait_for_it_or_it_saves_nothing(case, monkeypatch):
    """Whoever watches sees what long iterations do, and code of others finds the calls made that come before it."""
    if case == "so few that it saves nothing":
        monkeypatch.undo()
    log = noted("log", "a")
    plan = pjit(lambda x: lax.fori_loop(0, 9, lambda i, x: APART[case](log, i, x), x)).plan(jnp.ones(8))
    assert set(at_once(plan)) == {1}
