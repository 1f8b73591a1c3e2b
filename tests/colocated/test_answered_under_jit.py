"""Calls whose results the executables of other wrappers wait for: values, order, failures, and what is refused."""

import functools
import random
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import colocated, pjit
from partjit.colocated import colocated_python, colocated_python_class, under_jit
from tests.colocated import rendezvous
from tests.colocated.test_under_jit import (
    AROUND,
    LOOPS,
    WRAPPERS,
    calls,
    logger,
    note,
    nothing,
    over_8_devices,
    random_block,
)
from tests.effort import sample

lax = jax.lax

pytestmark = pytest.mark.usefixtures("meeting")


def asking(function, **options):
    return colocated_python(function, uses_jax=False, **{"out_specs_fn": lambda x, *_: x, **options})


# Random programs


class Register:
    """Records what it is given, and returns what depends on all that came before."""

    def __init__(self, name):
        self.name, self.total = name, 0

    def record(self, k, x):
        self.total = (self.total * 3 + int(k) + int(np.sum(np.asarray(x)))) % 1009
        rendezvous.logs[self.name].append((int(k), np.asarray(x).tolist()))

    def ask(self, x):
        self.total = (self.total * 5 + int(np.sum(x))) % 1009
        return (x + self.total) % 17


def with_questions(steps, rng):
    """The steps, some of which ask where they added."""
    asked = [("ask" if kind == "add" and rng.random() < 0.7 else kind, k, blocks) for kind, k, blocks in steps]
    return [(kind, k, [with_questions(block, rng) for block in blocks]) for kind, k, blocks in asked]


def run(steps, x, log, ask, around, cond):
    """A program, by hand or traced by jax; `cond` runs one of two blocks, `around` whatever has one."""
    for kind, k, blocks in steps:
        bodies = [functools.partial(run, block, log=log, ask=ask, around=around, cond=cond) for block in blocks]
        if kind == "log":
            log(k, x)
        elif kind == "ask":
            x = ask(x)
        elif kind == "add":
            x = x + k
        elif kind == "cond":
            x = cond(x, bodies)
        else:
            x = around(kind, k, bodies[0], x)
    return x


def around_by_hand(kind, k, body, x):
    for _ in range(k if kind in LOOPS else 1):
        x = body(x)
    return x


def around_by_jax(kind, k, body, x):
    return LOOPS[kind](k, body, x) if kind in LOOPS else AROUND[kind](body)(x)


@pytest.mark.soak
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("seed", sample(range(20), 20))
def test_random_programs_give_what_the_same_program_gives_by_hand(wrapper, seed):
    """An object is asked on one stream and given records on another; each answer depends on all that came before."""
    rng = random.Random(f"answered {wrapper} {seed}")
    steps = [("ask", 0, []), *with_questions(random_block(rng, 2), rng), ("log", 3, []), ("ask", 0, [])]
    program_of = functools.partial(run, steps)
    kind = colocated_python_class(Register, uses_jax=False)("of object")
    log = kind.record.specialize(out_specs_fn=nothing, stream="records")
    ask = kind.ask.specialize(out_specs_fn=lambda x: x, stream=rng.choice([None, "questions", "records"]))
    program = WRAPPERS[wrapper](
        functools.partial(
            program_of,
            log=log,
            ask=ask,
            around=around_by_jax,
            cond=lambda x, bodies: lax.cond(jnp.sum(x) % 2 == 1, bodies[1], bodies[0], x),
        )
    )
    by_hand = Register("by hand")
    x = np.arange(4, dtype=np.int32)
    for _ in range(2):
        expected = program_of(
            x,
            log=by_hand.record,
            ask=by_hand.ask,
            around=around_by_hand,
            cond=lambda x, bodies: bodies[int(x.sum()) % 2](x),
        )
        assert program(jnp.asarray(x)).tolist() == expected.tolist()
    colocated.wait()
    assert rendezvous.logs["of object"] == rendezvous.logs["by hand"]


@pytest.mark.parametrize("method", ["sequential", "expand_dims"])
def test_batches_derivatives_and_pure_calls_are_as_in_programs_of_pjit(method):
    half = asking(lambda x: np.asarray(x) / 2, vmap_method=method, pure=True)

    @jax.custom_jvp
    def f(x):
        return half(x)

    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0] / 2))
    xs = jnp.arange(3.0)
    for transformed in (jax.vmap(f), jax.vmap(jax.grad(f)), jax.grad(lambda x: jax.vmap(f)(x).sum()), jax.vmap(half)):
        np.testing.assert_array_equal(jax.jit(transformed)(xs), pjit(transformed)(xs))


def test_many_threads_run_one_compiled_function():
    kind = colocated_python_class(Register, uses_jax=False)("threads")
    ask = kind.ask.specialize(out_specs_fn=lambda x: x)
    plus = asking(lambda x: np.asarray(x) + 1)
    program = jax.jit(lambda x: (lax.fori_loop(0, 5, lambda _, x: plus(x), x), ask(x)))
    results = {}

    def run_ten(k):
        results[k] = [int(program(jnp.int32(k))[0]) for _ in range(10)]

    threads = [threading.Thread(target=run_ten, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {k: [k + 5] * 10 for k in range(4)}


# Order


def test_a_call_waits_for_those_before_it_on_its_stream():
    def note_late(k):
        time.sleep(0.05)
        note(k)

    log = logger(note_late, stream="one")
    ask = asking(lambda k: (note(k), k)[1], stream="one")
    program = jax.jit(lambda k: (log(k), ask(k + 1))[1])
    for k in (0, 10):
        assert program(jnp.int32(k)) == k + 1
    assert calls() == [(0,), (1,), (10,), (11,)]


def test_the_devices_do_not_wait_for_ever_for_calls_before(monkeypatch):
    monkeypatch.setattr(under_jit, "MOST_SECONDS", 0.2)

    def hear_late(_):
        rendezvous.hear("end")

    log = logger(hear_late, stream="slow")
    ask = asking(lambda k: k, stream="slow")
    with pytest.raises(jax.errors.JaxRuntimeError, match="waits for calls before it, which do not end"):
        jax.jit(lambda k: (log(k), ask(k))[1])(jnp.int32(1)).block_until_ready()
    rendezvous.say("end")
    colocated.wait()
    assert jax.jit(ask)(jnp.int32(3)) == 3


# Failures


def test_a_failure_ends_its_program_names_the_call_and_leaves_the_next_ones_alone():
    def fails_at_three(k):
        note(k)
        if k == 3:
            raise ValueError("three it is")
        return k

    ask = asking(fails_at_three)

    def f(n):
        return lax.fori_loop(0, n, lambda i, k: k + ask(jnp.int32(i)), 0)

    program = jax.jit(f)
    for n in (2, 6, 2):
        if n == 2:
            assert program(n) == 1
            continue
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            program(n).block_until_ready()
        line = f.__code__.co_firstlineno + 1
        text = (
            f"the colocated call of 'fails_at_three' made at {__file__}:{line} in <lambda> failed: ValueError('three it"
        )
        assert text in str(caught.value)
        assert "in fails_at_three" in str(caught.value)
    assert calls() == [(0,), (1,), (0,), (1,), (2,), (3,), (0,), (1,)]


def test_jax_is_refused_in_the_function():
    ask = asking(lambda x: jnp.sin(x))
    with pytest.raises(jax.errors.JaxRuntimeError, match="uses_jax=False"):
        jax.jit(ask)(1.0).block_until_ready()


# What is refused


@pytest.mark.parametrize(
    ("options", "x", "reason"),
    [
        ({"mode": "stream"}, 1.0, "cannot wait for what a call with mode='stream' returns"),
        ({"mode": "inline"}, 1.0, "cannot make a call with mode='inline' in its caller"),
        (
            {"out_specs_fn": lambda x: jax.ShapeDtypeStruct(x.shape, "int4")},
            1.0,
            r"cannot take a result of the type int4\[\] from Python",
        ),
        ({}, None, "is compiled for 8 devices, which would wait for each other for ever where a call fails"),
    ],
)
def test_what_cannot_be_waited_for_is_refused(options, x, reason):
    ask = asking(lambda x: x, **options)
    x = jax.device_put(jnp.arange(8), over_8_devices()) if x is None else x
    with pytest.raises(
        ValueError, match=f"^the colocated function <lambda> is called in a program of jax.jit, which {reason}"
    ):
        jax.jit(lambda x: ask(x))(x)


def test_other_platforms_are_refused():
    ask = asking(lambda x: x)
    with pytest.raises(ValueError, match="which is compiled for cuda, where it cannot wait for what a call returns"):
        jax.jit(lambda x: ask(x)).trace(1.0).lower(lowering_platforms=("cuda",))


def test_a_function_sees_the_settings_of_its_program_whichever_thread_runs_that():
    slow = jax.jit(lambda x: lax.fori_loop(0, 30, lambda _, x: jnp.sin(x @ x), x)[0, 0])
    x = jnp.ones((200, 200))

    def look(x):
        note(jax.config.jax_default_matmul_precision)
        rendezvous.logs["threads"].append(threading.get_ident())
        return x

    with jax.default_matmul_precision("highest"):
        program = jax.jit(asking(look))
        for _ in range(20):  # until another thread runs one, as the argument is still being computed
            program(slow(x)).block_until_ready()
            if rendezvous.logs["threads"][-1] != threading.get_ident():
                break
    assert {*calls()} == {("highest",)}
