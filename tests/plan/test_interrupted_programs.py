"""An exception raised at any line of partjit in a hot call of a program leaves program, lanes and jax usable."""

import collections
import contextlib
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partjit
from partjit import colocated, pjit
from partjit.colocated import colocated_python, colocated_python_class
from partjit.colocated.runtime import lanes, scheduler
from tests.colocated import rendezvous

pytestmark = [pytest.mark.usefixtures("meeting"), pytest.mark.soak]

ROOT = os.path.dirname(partjit.__file__)
number = jnp.float32
triple = jax.jit(lambda x: x * 3)


BESIDE = "beside a fragment, of a number of the host"


class Interrupt(KeyboardInterrupt):
    """What the handler of a signal raises: of another class it would be recognized by the code of the handler."""


def note(x):
    rendezvous.logs["ran"].append(float(x))
    return x + np.float32(1)


class Noting:
    def note(self, x):
        return note(x)


def function(**options):
    return colocated_python(note, out_specs_fn=lambda x: x, **options)


def method(**options):
    return colocated_python_class(Noting)().note.specialize(out_specs_fn=lambda x: x, **options)


CALLEES = {
    "function": function,
    "inline": lambda: function(mode="inline"),
    "on a stream": lambda: function(stream="S"),
    "without jax": lambda: function(uses_jax=False),
    "method": method,
    "method without jax": lambda: method(uses_jax=False),
}
PROGRAMS = {
    "first": (lambda f, x: f(x) * 2, lambda x: (x + 1) * 2),
    "behind a fragment": (lambda f, x: f(x * 2) * 2, lambda x: (x * 2 + 1) * 2),
    "in a loop": (lambda f, x: lax.fori_loop(0, 2, lambda _, y: f(y) + 1, x), lambda x: x + 4),
    BESIDE: (lambda f, x: (f(x), x * 2)[1], lambda x: x * 2),
}


def interrupting(places):
    """A function for `sys.settrace` that raises once, at the first line that is not in `places`, and adds it."""
    begun = len(places)

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(ROOT) or frame.f_code.co_name == "__del__":
            return None
        place = (frame.f_code.co_filename, frame.f_lineno, event)
        if event != "exception" and len(places) == begun and place not in places:
            places[place] = None
            raise Interrupt
        return trace

    return trace


@pytest.mark.parametrize("callee", CALLEES)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_hot_call_that_is_interrupted_at_any_line(program, callee, caplog):
    caplog.set_level("CRITICAL")
    body, expected = PROGRAMS[program]
    called, number = CALLEES[callee](), np.float32 if program == BESIDE else jnp.float32
    run = pjit(lambda x: body(called, x))
    for _ in range(30):
        assert float(run(number(1))) == expected(1)
    colocated.wait()
    each = len(rendezvous.logs["ran"]) // 30
    places, missed = collections.OrderedDict(), 0
    while missed < 2:
        rendezvous.clear()
        before, results = len(places), []
        sys.settrace(interrupting(places))
        try:
            results += [run(number(10)), run(number(20))]
        except (Interrupt, jax.errors.JaxRuntimeError):  # XLA quotes what is raised while it calls Python
            pass
        finally:
            sys.settrace(None)
        assert not scheduler.current_calls()
        with contextlib.suppress(Interrupt):  # of a call that was interrupted in its caller
            colocated.wait(timeout=30)
        assert not lanes.unfinished()
        ran = rendezvous.logs["ran"]
        assert ran == sorted({*ran}), "calls ran in another order, or twice"
        assert [*map(float, results)] == [*map(expected, (10, 20))][: len(results)]
        assert len(ran) >= each * len(results), "calls that were made did not run"
        assert (float(triple(number(1))), float(jax.grad(jnp.sin)(0.0))) == (3, 1), "jax works"
        del ran[:]
        assert float(run(number(30))) == expected(30)
        colocated.wait()
        assert len(ran) == each
        missed = missed + 1 if len(places) == before else 0
    assert len(places) >= (70 if program == "first" else 30), f"interrupted at {len(places)} places only"
