"""Results that branches of the host give as they are."""

import itertools

import numpy as np
import pytest
from jax import lax

from partjit import pjit
from partjit.colocated import colocated_python

pytestmark = pytest.mark.usefixtures("meeting")

like = {"out_specs_fn": lambda *xs: xs[0]}
start = np.arange(1, 9, dtype=np.float32)


def keep(x):
    return x


def test_a_value_outlives_what_branches_in_a_row_in_a_branch_give_it_as(by_the_host):
    call = colocated_python(lambda x: x * 3, **like)

    @pjit
    def program(x, p, q):
        def in_a_row(x):
            return lax.cond(q, call, keep, lax.cond(q, call, keep, x))

        x = x + 1
        y = lax.cond(p, in_a_row, call, x)
        z = x * call(y[:1])  # reads `x` last, and could take its memory
        return y + z, z

    for p, q in itertools.product((False, True), repeat=2):
        x = start + 1
        y = x * 3 if not p else x * 9 if q else x
        z = x * y[0] * 3
        for found, wanted in zip(program(start, p, q), (y + z, z), strict=True):
            np.testing.assert_array_equal(found, wanted)
