"""Functions in which jax refuses to run leave it as it was, wherever a signal handler raises."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit._jax import refusal
from partjit._jax.tracing import trace_state_clean


class Interrupt(BaseException):
    """What the handler of a signal raises."""


def test_an_exception_at_any_line_leaves_jax_as_it_was():
    mesh = jax.make_mesh((2,), "x")
    function = refusal.refusing(lambda x: x + 1, "no jax here")
    assert function(1) == 2
    with pytest.raises(RuntimeError, match="no jax here"):
        refusal.refusing(jnp.sin, "no jax here")(np.float32(1))
    places = set()

    def trace(frame, event, _):
        if frame.f_code.co_filename != refusal.__file__:
            return None
        place = frame.f_code.co_name, frame.f_lineno, event
        if event != "exception" and place not in places:
            places.add(place)
            raise Interrupt
        return trace

    while True:
        outer = sys.gettrace()
        sys.settrace(trace)
        try:
            function(1)
            break
        except Interrupt:
            pass
        finally:
            sys.settrace(outer)
        assert trace_state_clean(), places
        with jax.set_mesh(mesh):
            assert float(jnp.sin(jnp.zeros(()))) == 0
    assert len(places) >= 14
