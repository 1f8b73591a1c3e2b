"""Programs whose calls return their arguments, whose arguments are given away, or whose calls come back to them."""

import contextlib
import functools
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding

import partjit
from partjit import P, colocated, pjit
from partjit.colocated import colocated_python
from partjit.plan.ir.nodes import ColocatedCall, Fragment
from tests.colocated import rendezvous
from tests.effort import sample

like = {"out_specs_fn": lambda *xs: xs[0]}
nothing = {"out_specs_fn": lambda *xs: None}
scalar = jax.ShapeDtypeStruct((), np.float32)
same = colocated_python(lambda x: x, **like)
plus = colocated_python(lambda x: x + 0, **like)
x = np.ones(4, np.float32)


def noting(name, **said):
    return colocated_python(lambda *_: rendezvous.logs["calls"].append(name), **nothing, **said)


# Results that are arguments


def test_a_result_that_is_an_argument_outlives_the_donation_of_the_argument():
    def fun(x):
        y = same(x)
        return y, jnp.cos(plus(y)) + x * 3

    y, z = pjit(fun, donate_argnums=0)(jnp.asarray(x))
    np.testing.assert_allclose(y, x)
    np.testing.assert_allclose(z, np.cos(x) + 3, rtol=1e-6)


@pytest.mark.parametrize("shape", [(), (3,), (0, 4)], ids=str)
@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_keys_that_are_an_argument_outlive_its_donation(mesh, mode, shape):
    def keys():
        return jax.random.split(jax.random.key(3), shape)

    echo = pjit(same.specialize(mode=mode), donate_argnums=0)
    for given in (keys(), keys(), keys()):
        with mesh:
            found = echo(given)
        np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys()))
        assert given.is_deleted()


def test_a_value_and_a_result_that_is_the_same_array_go_into_one_fragment():
    def fun(x):
        u = x + 1
        return jnp.sin(same(u)) * u

    np.testing.assert_allclose(pjit(fun)(x), 2 * np.sin(2 * x), rtol=1e-6)


def test_results_of_a_program_are_other_arrays_than_its_arguments_and_each_other():
    def fun(x):
        y = same(x)
        return y, y, jnp.sin(plus(y))

    given = jnp.asarray(x)
    first, second, _ = pjit(fun)(given)
    assert first is not given
    assert first is not second
    donate = jax.jit(lambda a, b: (a + 1, b + 1), donate_argnums=(0, 1))
    np.testing.assert_allclose(donate(first, second)[0], x + 1)
    np.testing.assert_allclose(given, x)


@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_results_that_a_call_returns_twice_are_two_arrays(mode):
    twice = colocated_python(lambda x: (x, x), out_specs_fn=lambda x: (x, x), mode=mode)
    first, second = pjit(lambda x: twice(x + 1))(x)
    jax.jit(lambda a: a + 1, donate_argnums=0)(first)
    np.testing.assert_allclose(second, x + 1)


@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_an_argument_that_is_returned_with_a_sharding_in_other_words_outlives_its_donation(mode):
    mesh = partjit.Mesh(np.array(jax.devices()[:2])[:, None], ("x", "y"))
    sharded, other_words = (NamedSharding(mesh, spec) for spec in (P("x"), P("x", "y")))
    as_other = jax.ShapeDtypeStruct((4, 4), np.float32, sharding=other_words)
    moved = colocated_python(lambda x: x, out_specs=as_other, mode=mode)
    given = jax.device_put(jnp.ones((4, 4)), sharded)
    with mesh:
        y, z = pjit(lambda x: (moved(x), jnp.cos(moved(x))), in_shardings=P("x"), donate_argnums=0)(given)
    assert given.is_deleted()
    np.testing.assert_allclose(y, 1)
    np.testing.assert_allclose(z, np.cos(1), rtol=1e-6)


@pytest.mark.parametrize("donated", [1, 2, 3])
@pytest.mark.parametrize("results", [0, 1, 2, 3])
def test_as_many_donated_arguments_are_given_up_as_there_are_results_of_their_kind(donated, results):
    def fun(*args):
        total = sum(map(plus, args))
        return total.sum(), *(total + i for i in range(results))

    args = [jnp.asarray(x) for _ in range(donated)]
    pjit(fun, donate_argnums=tuple(range(donated)))(*args)
    assert sum(arg.is_deleted() for arg in args) == min(donated, results)


def test_donated_arguments_may_be_anything():
    f = pjit(lambda x: (plus(x), x + 1), donate_argnums=0)
    for given in (x, 1.0, np.float32(1), jnp.asarray(x)):
        expected = np.array(given) + 1
        np.testing.assert_allclose(f(given)[1], expected)


BRANCHES = {
    "a branch": lambda p, one, other, v: jax.lax.cond(p, one, other, v),
    "a branch in a branch": lambda p, one, other, v: jax.lax.cond(
        p, lambda v: jax.lax.cond(p, one, other, v), lambda v: v * 3, v
    ),
}


@pytest.mark.parametrize("give", BRANCHES.values(), ids=[*BRANCHES])
def test_a_donated_argument_that_a_branch_gives_lasts_while_a_call_reads_it(meeting, give):
    def look(v):
        rendezvous.hear("the program has returned")
        rendezvous.logs["seen"].append(np.asarray(v).tolist())

    note, looking = noting("taken", stream="notes"), colocated_python(look, mode="stream", **nothing)

    def fun(v, p):
        looking(give(p, lambda v: (note(v), v)[1], lambda v: v * 2, v))
        looking(v)
        return v + 1

    given = jnp.arange(8.0)
    np.testing.assert_array_equal(pjit(fun, donate_argnums=0)(given, True), np.arange(8.0) + 1)
    assert given.is_deleted()
    rendezvous.say("the program has returned")
    colocated.wait(timeout=60)
    assert rendezvous.logs["seen"] == [[*range(8)]] * 2


@pytest.mark.parametrize("give", BRANCHES.values(), ids=[*BRANCHES])
def test_a_donated_argument_lasts_as_long_as_what_a_branch_gives_in_its_place(meeting, give):
    note, inline = noting("seen", stream="notes"), colocated_python(lambda v: v + 0, mode="inline", **like)

    def fun(v, p):
        note(v)  # which may run as long as the program does
        w = give(p, lambda v: v, lambda v: inline(v) * 2, v)
        return w * 2 + inline(w)

    np.testing.assert_array_equal(pjit(fun, donate_argnums=0)(jnp.arange(8.0), True), np.arange(8.0) * 3)
    colocated.wait(timeout=60)
    assert rendezvous.logs["calls"] == ["seen"]


KEPT = {
    "a loop": lambda call, v, p: jax.lax.fori_loop(0, 3, lambda i, v: call(v + 1), v),
    "a branch": lambda call, v, p: jax.lax.cond(p, call, lambda v: v * 3, v) + 1,
    "a branch in a branch": lambda call, v, p: (
        jax.lax.cond(p, lambda v: jax.lax.cond(p, call, lambda v: v * 3, v), lambda v: v * 5, v) + 1
    ),
    "a branch in a loop": lambda call, v, p: jax.lax.fori_loop(
        0, 3, lambda i, v: jax.lax.cond(p, call, lambda v: v * 3, v + 1), v
    ),
}


@pytest.mark.parametrize("mode", ["inline", "stream"])
@pytest.mark.parametrize("program", KEPT.values(), ids=[*KEPT])
def test_what_a_function_returned_and_keeps_is_not_given_away(meeting, program, mode):
    def make(v):
        made = v * 2
        rendezvous.logs["kept"].append((made, np.array(made)))
        return made

    call = colocated_python(make, mode=mode, **like)
    pjit(lambda v, p: program(call, v, p))(jnp.asarray(x), True)
    colocated.wait(timeout=60)
    assert rendezvous.logs["kept"]
    for made, as_it_was in rendezvous.logs["kept"]:
        np.testing.assert_array_equal(made, as_it_was)


def carried_alike(call, v):
    """Loops in which two carried values may be one array."""
    yield lambda a, b: (r := call(a) + a * b, r)
    yield lambda a, b: (r := call(a) + a * b, jax.lax.cond(a[0] > 3, lambda v: call(v) + 1, lambda v: v, r))
    yield lambda a, b: (r := call(a) + a * b, jax.lax.cond(a[0] > 3, call, lambda v: v, r))
    yield lambda a, b: (call(a * b), v)
    yield lambda a, b: (a + b, jax.lax.cond(a[0] > 3, call, lambda _: v, b))


@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_carried_values_that_are_one_array_are_not_given_away_as_two(mode):
    call = colocated_python(lambda v: v * 2, mode=mode, **like)
    v = jnp.asarray(x) + 1
    for iteration, by_hand in zip(carried_alike(call, v), carried_alike(lambda v: v * 2, v), strict=True):

        def program(a, b, iteration=iteration):
            return jax.lax.fori_loop(0, 3, lambda i, carry: iteration(*carry), (a, b))

        expected = x, x + 1
        with jax.disable_jit():
            for _ in range(3):
                expected = by_hand(*expected)
        for found, wanted in zip(pjit(program)(x, x + 1), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("mode", ["stream", "inline"])
def test_a_numpy_argument_is_read_as_it_was(meeting, mode):
    def read(v):
        if mode == "stream":
            rendezvous.hear("changed")
        return jnp.sum(v)

    buffer = np.zeros(4200, np.float32)  # memory that jax takes over as it is must be aligned
    offset = (-buffer.ctypes.data % 64) // 4
    aligned = buffer[offset : offset + 4096]
    aligned[:] = 1
    total = pjit(colocated_python(read, mode=mode, out_specs_fn=lambda v: scalar))(aligned)
    aligned[:] = 7
    rendezvous.say("changed")
    assert float(total) == 4096


# Calls that come back


def test_a_function_calls_the_program_it_is_part_of(meeting):
    def host(n):
        return rendezvous.programs["f"](n - 1) if float(n) > 0 else n

    for mode in ("inline", "stream"):
        call = colocated_python(host, mode=mode, stream=f"recursive {mode}", **like)
        rendezvous.programs["f"] = pjit(lambda n, call=call: call(n) + 1)
        assert float(rendezvous.programs["f"](jnp.float32(3))) == 4


def test_first_calls_from_several_threads_meet(meeting):
    def host(v):
        rendezvous.meet("first", 2)
        return v

    call = colocated_python(host, **like)
    f = pjit(lambda v: call(v) + 1)
    f.lower(x).compile()  # what takes long; the first call is still to come
    results = {}

    def work(i):
        results[i] = np.asarray(f(x))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 2


def threads_meet(donated):
    """Whether the calls of two threads meet, each time after one of another signature."""
    rendezvous.clear()

    def host(v, name):
        if rendezvous.logs["together"]:
            rendezvous.meet(f"{int(name)} {v.shape}", 2)
        return v

    call = colocated_python(host, out_specs_fn=lambda v, name: v)
    f = pjit(lambda v, name, calls: (call(v, name) if calls else v) + 1, donate_argnums=donated, static_argnums=2)
    for length in (2, 3):
        f(jnp.zeros(length), 0, True)
    rendezvous.logs["together"].append(True)
    results = {}

    def work(i, v, name):
        with contextlib.suppress(threading.BrokenBarrierError):
            results[name, i] = np.asarray(f(v, name, True))

    for name, length in enumerate((2, 3, 2)):
        assert f(jnp.zeros(2), name, False)[0] == 1
        threads = [threading.Thread(target=work, args=(i, jnp.zeros(length), name)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    return len(results) == 6


@pytest.mark.parametrize("donated", [(), 0])
def test_calls_of_several_threads_meet_after_one_of_another_signature(meeting, donated):
    # A thread that comes after another one, but before that has let it in, waits for the end of its call.
    assert any(threads_meet(donated) for _ in range(3))


# Nothing is lost or done twice


def test_programs_without_results_make_their_calls_once(meeting):
    f = pjit(noting("call"))
    for _ in range(3):
        assert f(x) is None
    colocated.wait()
    assert rendezvous.logs["calls"] == ["call"] * 3


@pytest.mark.parametrize("donated", [(), 0])
@pytest.mark.parametrize("argument", ["as it comes", "computed"])
def test_a_call_before_one_that_fails_is_made(meeting, donated, argument):
    save = noting("save", stream="save")
    bad = colocated_python(lambda v: 1 / 0, **like)

    def fun(p):
        save(p if argument == "as it comes" else p + 1)
        return p - bad(p * 2)

    with pytest.raises(ZeroDivisionError):
        pjit(fun, donate_argnums=donated)(jnp.asarray(x))
    colocated.wait()
    assert rendezvous.logs["calls"] == ["save"]


def test_calls_made_ahead_are_taken_first_from_inside_of_their_stream(meeting):
    def count():
        rendezvous.logs["made"].append(1)
        return jnp.float32(len(rendezvous.logs["made"]))

    following = colocated_python(count, out_specs=scalar, devices=jax.devices()[0], run_ahead=3, stream="data")
    rendezvous.programs["f"] = f = pjit(lambda v: v + following())
    assert float(f(0.0)) == 1
    colocated.wait()
    outer = colocated_python(lambda v: rendezvous.programs["f"](v), stream="data", **like)
    assert float(outer(jnp.float32(0))) == 2
    assert float(f(0.0)) == 3


def test_calls_ahead_need_a_thread():
    call = colocated_python(count := (lambda: jnp.float32(1)), out_specs=scalar, run_ahead=1, mode="inline")
    with pytest.raises(ValueError, match="run_ahead=1 needs a thread"):
        pjit(lambda v: v + call())(0.0)
    del count


def test_pure_calls_are_merged_whoever_said_what_they_return(meeting):
    def note(v):
        rendezvous.logs["calls"].append(1)
        return v + 0

    call = colocated_python(note, pure=True)
    call(jnp.asarray(x))
    rendezvous.logs["calls"].clear()
    np.testing.assert_allclose(pjit(lambda v: call(v) + call(v))(x), 2 * x)
    assert len(rendezvous.logs["calls"]) == 1


# Recognizing calls


def test_static_arguments_are_told_apart_also_from_their_defaults():
    f = pjit(lambda v, n=1: plus(v) * n, static_argnums=1)
    g = pjit(lambda v, n=1: plus(v) * n, static_argnames="n")
    for n in (2, None, 2, 3, None, 1.5):
        given = () if n is None else (n,)
        expected = (1 if n is None else n) * x
        np.testing.assert_allclose(f(x, *given), expected)
        np.testing.assert_allclose(g(x, **({} if n is None else {"n": n})), expected)


def test_several_kinds_of_calls_take_turns(compilations):
    f = pjit(lambda v: plus(v) + 1)
    kinds = [x, x[:2], jnp.asarray(x), 1.0, np.float32(2), x[:3], x[:1]]
    for given in kinds:
        f(given)
    first = len(compilations)
    for given in kinds * 2:
        np.testing.assert_allclose(f(given), np.asarray(given) + 1)
    assert len(compilations) == first


def test_clearing_caches_copies_the_function_anew():
    factor = [1.0]
    call = colocated_python(lambda v: v * factor[0], **like)
    f = pjit(lambda v: call(v) + 0)
    for clear in (f.clear_cache, jax.clear_caches):
        assert float(f(jnp.float32(1))) == factor[0]
        factor[0] += 1
        clear()
        call.specialize()
        f.clear_cache()
        assert float(f(jnp.float32(1))) == factor[0]


# Places


def test_results_that_are_a_calls_own_come_back_on_the_explicit_mesh():
    explicit = jax.make_mesh((8,), ("x",))
    given = jax.device_put(np.arange(16, dtype=np.float32), NamedSharding(explicit, P("x")))
    with jax.set_mesh(explicit):
        for f in (pjit(lambda v: plus(v)), pjit(lambda v: (plus(v), plus(v) * 2)[0])):
            y = f(given)
            assert y.sharding.mesh == explicit
            np.testing.assert_allclose(y + given, 2 * np.arange(16))


def test_results_without_arguments_are_on_the_devices_of_the_program():
    third = jax.devices()[3]
    _, y = pjit(lambda v: (plus(v), jnp.arange(3.0)))(jax.device_put(x, third))
    assert y.sharding == SingleDeviceSharding(third)
    mesh = partjit.Mesh(jax.devices(), "x")
    _, y = pjit(lambda v: (plus(v), jnp.arange(3.0)))(jax.device_put(np.ones(8), NamedSharding(mesh, P("x"))))
    assert len(y.sharding.device_set) == 8


def test_unbatched_calls_under_vmap_are_made_once(meeting):
    call = colocated_python(lambda v: (rendezvous.logs["calls"].append(1), v + 1)[1], **like)
    f = jax.vmap(pjit(lambda v, z: call(v) + z), in_axes=(None, 0))
    np.testing.assert_allclose(f(np.float32(1), x), x + 2)
    assert len(rendezvous.logs["calls"]) == 1


def test_nans_are_found_in_fragments():
    f = pjit(lambda v: plus(jnp.log(v - 2)) * 2)
    consuming = pjit(lambda v: plus(jnp.log(v - 2)) * 2, donate_argnums=0)
    for _ in range(2):
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
            f(x)
        for _ in range(3):  # the next time, C++ dispatches them
            f(x + 3)
            consuming(x + 3)
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
            consuming(x + 0)


def test_nans_are_found_in_fragments_that_make_calls(meeting):
    note = colocated_python(lambda i: rendezvous.logs["calls"].append(int(i)), out_specs_fn=lambda i: None)

    @pjit
    def f(v):
        def body(i, v):
            note(i)
            return jnp.log(v)

        return jax.lax.fori_loop(0, 3, body, v)

    assert f.plan(x).fragments[0].calls
    for count in (0, 3):
        for _ in range(count):
            f(x)
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in f_"):
            f(x)
    colocated.wait()
    assert rendezvous.logs["calls"] == [0, 1, 2] * 5


def later_uses(call):
    """What reads a value after a branch that may have given it as it is."""
    yield lambda x, y: x + y
    yield lambda x, y: (y, x + 1)
    yield lambda x, y: (y, x)
    yield lambda x, y: call(x) + y
    yield lambda x, y: (call(y), x * 2)
    yield lambda x, y: jax.lax.cond(y[0] > 2, lambda x: call(x), lambda x: x, x) + x + y
    yield lambda x, y: jax.lax.fori_loop(0, 2, lambda i, c: call(c) + x, y)
    yield lambda x, y: jax.lax.fori_loop(0, 3, lambda i, c: jax.lax.cond(i > 1, call, lambda c: c, c) + c + y, x)
    yield lambda x, y: (call(y) + 1, call(x) + y, x - y)


def branches(call):
    """Branches that give a value as it is, or twice, or from within another branch."""
    yield lambda x, p: jax.lax.cond(p, call, lambda x: x, x)
    yield lambda x, p: sum(jax.lax.cond(p, lambda x: (call(x), x), lambda x: (x, x), x))
    yield lambda x, p: jax.lax.cond(p, lambda x: jax.lax.cond(x[1] > 0, call, lambda x: x, x), lambda x: x, x)
    yield lambda x, p: jax.lax.cond(p, lambda x: call(x) + x, lambda x: x, x)
    constant = jnp.full(8, 3, jnp.float32)
    yield lambda x, p: jax.lax.cond(p, call, lambda x: constant, x)


@pytest.mark.soak
def test_what_a_branch_gives_as_it_is_may_be_read_after_it(mesh):
    def pairs(call):
        return itertools.product(branches(call), later_uses(call))

    cases = []
    for mode in ("inline", "stream"):
        call = colocated_python(lambda x: x * 2, out_specs_fn=lambda x: x, mode=mode)
        cases += zip(pairs(call), pairs(lambda x: x * 2), strict=True)
    start = np.arange(1.0, 9.0, dtype=np.float32)
    count = 0
    for k, (given, by_hand) in sample([*enumerate(cases)], 5):
        own = k % 2  # whether the program computes the value, or its caller donates it

        def program(x, p, pair=given, own=own):
            branch, use = pair
            x = x + 1 if own else x
            return use(x, branch(x, p))

        run = pjit(program, donate_argnums=0)
        for p in (True, False):
            with jax.disable_jit():
                expected = program(start, p, pair=by_hand)
            with mesh:
                result = run(jax.device_put(start, NamedSharding(mesh, P("x"))), p)
            for found, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=f"case {k}, {p}")
                count += 1
    assert count > 25


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("without_jit", [False, True])
def test_a_function_is_outside_of_all_programs_around_its_call(depth, without_jit, mesh):
    """It may run a program on another mesh, however many programs its call is nested in, compiled or not."""
    rendezvous.programs["on all"] = pjit(lambda x: x * 2, in_shardings=P("x"), out_shardings=P())
    rendezvous.programs["mesh"] = mesh

    def doubled(x):
        with rendezvous.programs["mesh"]:
            return jax.device_put(rendezvous.programs["on all"](np.asarray(x)), x.sharding)

    call = colocated_python(doubled, **like)
    program = call
    for _ in range(depth):
        program = pjit(lambda x, inner=program: inner(x) + 1)
    small = partjit.Mesh(np.array(jax.devices()[:1]), ("one",))
    with small, jax.disable_jit(without_jit):
        np.testing.assert_array_equal(program(jnp.ones(8)), np.full(8, 2.0 + depth))


# Arguments that calls without results get beside what the devices compute

ARGUMENTS = {
    "whole numbers": np.arange(64, dtype=np.int32),
    "floats, one of them no number": np.where(np.arange(64) == 5, np.nan, np.linspace(0, 1, 64)).astype(np.float32),
    "flags": np.arange(64) % 3 == 0,
    "a number": np.float32(3),
    "of 2 bytes": np.arange(64).astype(jnp.bfloat16),
    "more than is copied": np.arange(8192, dtype=np.float32),
}
OWNERS = {
    "keeps it": lambda given: None,
    "deletes it": lambda given: given.delete(),
    "donates it": lambda given: jax.jit(lambda a: a ^ True if a.dtype == bool else a * 0, donate_argnums=0)(given),
}


def look(x, y):
    rendezvous.hear("go")
    rendezvous.logs["looked"].append((np.asarray(x).copy(), np.asarray(y).copy()))


@pytest.mark.usefixtures("meeting")
@pytest.mark.parametrize("sharded", [None, P(), P("x")], ids=str)
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_an_argument_is_seen_by_a_logger_as_it_was_whatever_its_owner_does_then(kind, sharded):
    value = ARGUMENTS[kind]
    if sharded == P("x") and not value.shape:
        return
    mesh = partjit.Mesh(np.array(jax.devices()[: 1 if sharded is None else 4]), ("x",))
    log = colocated_python(look, **nothing)
    step = pjit(lambda w, given: (log(given, jnp.sum(w)), w + 1)[1])
    place = functools.partial(jax.device_put, device=NamedSharding(mesh, sharded or P()))
    w, given = place(np.ones(8, np.float32)), place(value)
    (call,) = [node for node in step.plan(w, given).nodes if isinstance(node, ColocatedCall)]
    assert call.pinned == (kind == "more than is copied", False)
    for owner in OWNERS.values():
        rendezvous.clear()
        given = place(value)
        step(w, given)
        owner(given)
        rendezvous.say("go")
        colocated.wait()
        ((seen, total),) = rendezvous.logs["looked"]
        np.testing.assert_array_equal(seen, value)
        assert (seen.dtype, total) == (value.dtype, 8)
    given = place(value)
    with jax.debug_nans(True):
        step(w, given)  # which has NaNs that no device has computed
        colocated.wait()
    np.testing.assert_array_equal(rendezvous.logs["looked"][-1][0], value)


@pytest.mark.usefixtures("meeting")
@pytest.mark.parametrize(
    "reads", ["nothing else", "another argument", "a call's result", "what is computed of numbers"]
)
def test_no_fragment_is_made_to_copy_an_argument_for_a_logger(reads):
    log = colocated_python(look, **nothing)
    other = {
        "nothing else": lambda w, given: 0,
        "another argument": lambda w, given: w,
        "a call's result": lambda w, given: same(w),
        "what is computed of numbers": lambda w, given: 3,
    }[reads]

    def step(w, given):
        log(given, other(w, given))
        return w + 1

    w, given = jnp.ones(8), jnp.arange(8)
    plan = pjit(step).plan(w, given)
    (call,) = [node for node in plan.nodes if isinstance(node, ColocatedCall) and node.callee.name == "look"]
    assert call.pinned[0]
    assert len([node for node in plan.nodes if isinstance(node, Fragment)]) == 1
    rendezvous.say("go")
    pjit(step)(w, given)
    colocated.wait()
    ((seen, _),) = rendezvous.logs["looked"]
    np.testing.assert_array_equal(seen, given)


@pytest.mark.usefixtures("meeting")
def test_numpy_arrays_and_numbers_stay_on_the_host_where_a_logger_gets_them():
    rendezvous.say("go")
    log = colocated_python(look, **nothing)
    step = pjit(lambda w, given: (log(given, jnp.sum(w)), w + 1)[1])
    for given in (np.arange(8), jnp.arange(8), 7):
        step(jnp.ones(8), given)
        colocated.wait()
        np.testing.assert_array_equal(rendezvous.logs["looked"][-1][0], given)
        plan = step.plan(jnp.ones(8), given)
        (call,) = [node for node in plan.nodes if isinstance(node, ColocatedCall)]
        (fragment,) = [node for node in plan.nodes if isinstance(node, Fragment)]
        assert len(fragment.inputs) == (2 if isinstance(given, jax.Array) else 1)
        assert call.pinned[0] is not isinstance(given, jax.Array)


@pytest.mark.usefixtures("meeting")
def test_what_the_host_computes_of_numbers_takes_no_argument_to_be_copied(mesh):
    rendezvous.say("go")
    log, note = colocated_python(look, **nothing), noting("even")

    def step(w, i, given):
        log(given, i % 2)
        jax.lax.cond(i % 2 == 0, lambda: note(i) and None, lambda: None)
        return w + 1

    w, given = (jax.device_put(jnp.arange(8), NamedSharding(mesh, P("x"))) for _ in range(2))
    plan = pjit(step).plan(w, 3, given)
    by_host = [node for node in plan.nodes if isinstance(node, Fragment) and node.by_one_device]
    assert [[value.name for value in fragment.inputs] for fragment in by_host] == [["i"]]
    (call,) = [node for node in plan.nodes if isinstance(node, ColocatedCall)]
    assert call.pinned == (False, False)
    program = pjit(step)
    for i in range(3):
        program(w, i, given)
    colocated.wait()
    assert [int(odd) for _, odd in rendezvous.logs["looked"]] == [0, 1, 0]
    for seen, _ in rendezvous.logs["looked"]:
        np.testing.assert_array_equal(seen, given)
    assert len(rendezvous.logs["calls"]) == 2
