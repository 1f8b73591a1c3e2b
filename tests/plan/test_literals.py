"""Loops with calls that start from literals and from constants: of branches, of nested functions, of other loops."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import colocated, pjit
from tests.colocated import rendezvous
from tests.effort import sample


def noted(a):
    rendezvous.logs["seen"].append(float(np.sum(a)))


def colocated_calls():
    @colocated.colocated_python(out_specs_fn=lambda _: None)
    def log(a):
        noted(a)

    def add(a):
        noted(a)
        return np.asarray(a) + 1

    like = {"out_specs_fn": lambda a: a}
    answered = colocated.colocated_python(add, uses_jax=False, **like)
    cut = colocated.colocated_python(add, arrays="numpy", **like)
    return {"log": lambda a: (log(a), a + 1)[1], "answered": answered, "cut": cut}


def by_hand(a):
    jax.debug.callback(noted, a, ordered=True)
    return a + 1


def fori(call):
    return lambda k, y: jax.lax.fori_loop(0, 2, lambda _, a: call(a) * y, k)


def scan(call):
    return lambda k, y: jax.lax.scan(lambda a, _: (call(a) * y, None), k, None, length=2)[0]


def while_loop(call):
    return lambda k, y: jax.lax.while_loop(lambda a: jnp.sum(a) < 50, lambda a: call(a) * y, k)


def two_loops(call):
    return lambda k, y: jax.lax.fori_loop(0, 2, lambda _, a: a + fori(call)(k, y), k)


def swapping(call):
    return lambda k, y: jax.lax.fori_loop(0, 3, lambda _, two: (two[1], call(two[0]) * y), (k, k))[1]


LOOPS = [fori, scan, while_loop, two_loops, swapping]


def other(k, y):
    return k * 0 + y


def cond(loop, k):
    return lambda x: jax.lax.cond(x > 5, loop, other, k, x)


def switch(loop, k):
    return lambda x: jax.lax.switch(jnp.int32(x > 5), [other, loop, other], k, x)


def known(loop, k):
    return lambda x: jax.lax.switch(0, [lambda k, x: jax.lax.cond(x > 5, loop, other, k, x), other], k, x)


def nested(loop, k):
    return lambda x: jax.lax.cond(x > 5, lambda k, x: jax.lax.cond(x > 6, loop, other, k, x), other, k, x)


def scanned(loop, k):
    def body(c, _):
        return jnp.sum(jax.lax.cond(c > 5, loop, other, k, c)) % 97, None

    return lambda x: jax.lax.scan(body, x, None, length=3)[0]


def predicate(loop, k):
    def goes_on(state):
        return jnp.sum(jax.lax.cond(state[1] > 5, loop, other, state[0], state[1])) < 60

    return lambda x: jax.lax.while_loop(goes_on, lambda state: (state[0] + 1, state[1] + 1), (k, x))[1]


def in_another_loop(loop, k):
    def both(k, x):
        return jax.lax.fori_loop(0, 2, lambda _, a: a + loop(k, x), k)

    return lambda x: jax.lax.cond(x > 5, both, other, k, x)


def in_each_turn(loop, k):
    return lambda x: jax.lax.fori_loop(0, 2, lambda _, c: jnp.sum(loop(k, c)) % 97, x)


def in_each_turn_of_turns(loop, k):
    return lambda x: jax.lax.fori_loop(0, 2, lambda _, c: in_each_turn(loop, k)(c) + 1, x)


def in_each_turn_in_a_branch(loop, k):
    return lambda x: jax.lax.cond(x > 5, in_each_turn(loop, k), lambda x: x, x)


PLACES = [
    cond,
    switch,
    known,
    nested,
    scanned,
    predicate,
    in_another_loop,
    in_each_turn,
    in_each_turn_of_turns,
    in_each_turn_in_a_branch,
]
FORMS = [lambda: 1, lambda: np.float32(1), lambda: jnp.ones(3), lambda: np.ones(3, np.float32)]
KINDS = ["log", "answered", "cut"]
TRIED = {*sample([*itertools.product(KINDS, PLACES, LOOPS)], 2)}


@pytest.mark.soak
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_starts_from_the_literal_or_constant_that_it_is_given(meeting, place, kind):
    call = colocated_calls()[kind]
    for i, loop in enumerate(LOOPS):
        if (kind, place, loop) not in TRIED:
            continue
        start = FORMS[(i // 2 + PLACES.index(place)) % len(FORMS)]()  # each of them in the sample as well
        x = jnp.asarray(7, jnp.asarray(start).dtype)
        meeting.clear()
        expected = jax.jit(place(loop(by_hand), start))(x)
        jax.effects_barrier()
        meant = [*rendezvous.logs["seen"]]
        meeting.clear()
        found = pjit(place(loop(call), start))(x)
        colocated.wait(timeout=60)
        assert meant
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
        assert rendezvous.logs["seen"] == meant


def test_no_program_puts_the_constants_of_calls(meeting, compilations):
    def note(a):
        rendezvous.logs["seen"].append(np.asarray(a).tolist())

    log = colocated.colocated_python(note, out_specs_fn=lambda _: None)
    rows = np.ones(5, np.float32)
    constants = (rows, 2, 2.5, np.int8(3), np.bool_(True))

    @pjit
    def f(x):
        for constant in constants:
            log(constant)
        return -x

    x, before = np.float32(1), len(compilations)
    f(x)
    colocated.wait(timeout=60)
    assert len(compilations) - before == len(f.plan(x).fragments) == 1
    rows[:] = 7  # the program keeps what it was traced with
    f(x)
    colocated.wait(timeout=60)
    assert meeting.logs["seen"] == [[1] * 5, 2, 2.5, 3, True] * 2
