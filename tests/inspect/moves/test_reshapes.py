"""Reshapes of shards that are uneven, or end elsewhere, and what one device has and all need."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.truth_operations import make_mesh
from partjit import P, pjit, with_sharding_constraint
from partjit.inspect import explain


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


SHAPES = [((8, 15), (8, 3, 5)), ((8, 30), (8, 5, 6)), ((8, 3, 5), (8, 15))]
SPECS = [P(None, "x"), P(None, "y"), P("x", "y")]


@pytest.mark.parametrize(("before", "after"), SHAPES)
@pytest.mark.parametrize("is_of_operand", [True, False])
def test_uneven_shards_are_resharded_where_the_other_shape_cannot_have_them(before, after, is_of_operand):
    """On the side that has the other sharding, reshaped, which may be the result or the operand."""

    def reshaped(x, spec):
        operand = with_sharding_constraint(jnp.sin(x), spec) if is_of_operand else jnp.sin(x)
        result = operand.reshape(after)
        return (result if is_of_operand else with_sharding_constraint(result, spec)) * 2

    step = pjit(lambda xs: [reshaped(x, spec) for x, spec in zip(xs, SPECS, strict=True)], in_shardings=P("x"))
    report = explain(step, [floats(*before)] * len(SPECS), mesh=make_mesh(), compiled=True)
    assert report.predicted.unknown == ()
    assert report.predicted.counts == report.collectives.counts
    assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)


def test_the_result_of_a_callback_may_be_sent_to_all_devices():
    """Some versions of Shardy reshard it, some do not: it is on one device."""

    def step(x):
        return jax.pure_callback(lambda: np.zeros(8, np.float32), floats(8))[None] + x

    report = explain(pjit(step, in_shardings=P("x")), floats(16, 8), mesh=make_mesh(), compiled=True)
    (compiled,), (move,) = report.collectives, report.predicted.unknown
    assert compiled.bytes_moved <= move.bytes_at_most
