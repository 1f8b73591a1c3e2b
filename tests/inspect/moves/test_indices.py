"""Rows of a sharded array, at computed indices, are predicted as they are compiled."""

import jax
import numpy as np
import pytest

from benchmarks.truth_operations import make_mesh
from partjit import P, pjit
from partjit.inspect import explain

BOTH = ("x", "y")


def rows_of(spec, wanted):
    step = pjit(lambda table, rows: table[rows], in_shardings=(spec, P()), out_shardings=wanted)
    structs = jax.ShapeDtypeStruct((64, 32), np.float32), jax.ShapeDtypeStruct((16,), np.int32)
    return explain(step, *structs, mesh=make_mesh(), compiled=True)


@pytest.mark.parametrize("wanted", [P(None, "x"), P(None, "y"), P(None, BOTH), P()])
def test_rows_that_are_sharded_over_the_axes_of_the_table_are_summed_as_a_whole(wanted):
    report = rows_of(P(BOTH), wanted)
    assert report.predicted.unknown == ()
    assert report.predicted.counts == report.collectives.counts == {("all-reduce", BOTH): 1}
    assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)


@pytest.mark.parametrize("axis", BOTH)
def test_rows_that_may_be_summed_in_slices_are_marked(axis):
    report = rows_of(P(axis), P(None, axis))
    assert [one.operation for one in report.predicted.unknown] == ["stablehlo.gather"]
    assert report.predicted.bytes_per_step <= report.collectives.bytes_per_step
    assert report.collectives.bytes_per_step <= report.predicted.bytes_per_step_at_most
