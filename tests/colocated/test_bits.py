"""What a colocated function returns has 64 bits where they are enabled, whatever it returned elsewhere before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import colocated, pjit
from partjit.colocated import colocated_python

RETURNED = {
    "a number": (lambda x, *_: 0.1, float),
    "a number of NumPy": (lambda x, *_: np.asarray(0.1, jnp.result_type(float)), float),
    "an integer": (lambda x, *_: 3, int),
    "an array of jax": (lambda x, *_: jnp.asarray(3), int),
}


def eager(function, kind):
    one = jnp.float32(1)
    return lambda: function(one)


def eager_with_a_number(function, kind):
    return lambda: function(1.0)


def eager_with_an_object(function, kind):
    one, text = jnp.float32(1), "an object"
    return lambda: (function(one), function(one, text))[1]


def in_programs(function, kind):
    return lambda: pjit(lambda x: function(x))(jnp.float32(1))


def in_a_loop(function, kind):
    program = pjit(lambda x: jax.lax.fori_loop(0, 2, lambda _, y: function(x), jnp.zeros((), kind)))
    return lambda: program(jnp.float32(1))


@pytest.mark.parametrize("made", [eager, eager_with_a_number, eager_with_an_object, in_programs, in_a_loop])
@pytest.mark.parametrize("what", RETURNED)
@pytest.mark.parametrize("known", ["specs", "the first result"])
def test_results_have_the_bits_of_where_the_call_is_made(made, what, known):
    returned, kind = RETURNED[what]
    spec = {"out_specs_fn": lambda *_: jax.ShapeDtypeStruct((), jnp.result_type(kind))} if known == "specs" else {}
    for first in (False, True):
        function = colocated_python(returned, **spec)
        call = made(function, kind)
        for bits in (first, not first, first, first, not first, not first):
            with jax.enable_x64(bits):
                if known != "specs" and made in (in_programs, in_a_loop):
                    function(jnp.float32(1))
                assert call().dtype == jnp.result_type(kind), (first, bits)
    colocated.wait()
