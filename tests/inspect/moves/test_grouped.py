"""Depthwise convolutions, and the gradients of their kernels, are predicted as they are compiled."""

import numpy as np
import pytest
from jax import ShapeDtypeStruct, lax

from benchmarks.truth_operations import make_mesh
from partjit import P, pjit
from partjit.inspect import explain

BATCH, FEATURES, LENGTH = 8, 64, 16
IMAGE = ShapeDtypeStruct((BATCH, FEATURES, LENGTH), np.float32)
KERNEL = ShapeDtypeStruct((FEATURES, 1, 4), np.float32)
# On the mesh (("x", 4), ("y", 2)).
BOTH, X, Y, XY, NONE = P(("y", "x")), P("x"), P(None, "y"), P("x", "y"), P()


def forward(image, kernel):
    numbers = lax.ConvDimensionNumbers(*[(0, 1, 2)] * 3)
    return lax.conv_general_dilated(
        image, kernel, (1,), [(3, 0)], dimension_numbers=numbers, feature_group_count=FEATURES
    )


def of_kernel(image, cotangent):
    numbers = lax.ConvDimensionNumbers(*[(1, 0, 2)] * 3)
    return lax.conv_general_dilated(
        image, cotangent, (1,), [(3, 0)], dimension_numbers=numbers, batch_group_count=FEATURES
    )


# The specs of image, kernel and result.
FORWARD = [
    *((BOTH, NONE, BOTH), (BOTH, P("y"), BOTH), (BOTH, P("y"), X), (BOTH, NONE, XY), (BOTH, P("y"), NONE)),
    *((X, NONE, Y), (X, NONE, XY), (X, P("y"), BOTH), (X, P("y"), X), (X, P("y"), Y), (NONE, P("y"), BOTH)),
    *((Y, NONE, BOTH), (XY, P("y"), BOTH), (XY, NONE, XY), (Y, P("y"), NONE)),
]
# Those of image, cotangent and gradient.
OF_KERNEL = [
    *((BOTH, BOTH, P("y")), (BOTH, X, NONE), (BOTH, Y, NONE), (BOTH, XY, P("y")), (BOTH, NONE, P("x"))),
    *((X, BOTH, P("y")), (X, X, P("x")), (X, Y, P("y")), (X, XY, NONE), (X, NONE, P("x"))),
    *((Y, BOTH, P("x")), (Y, X, P("y")), (Y, Y, P("x")), (XY, XY, P("x")), (XY, Y, P("x")), (NONE, XY, P("x"))),
]


@pytest.mark.parametrize(
    ("fun", "second", "cases"), [(forward, KERNEL, FORWARD), (of_kernel, IMAGE, OF_KERNEL)], ids=["image", "kernel"]
)
def test_convolutions_by_features_are_predicted_as_they_are_compiled(fun, second, cases):
    for *specs, wanted in cases:
        program = pjit(fun, in_shardings=tuple(specs), out_shardings=wanted)
        report = explain(program, IMAGE, second, mesh=make_mesh(), compiled=True)
        assert report.predicted.unknown == ()
        assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step), (specs, wanted)


@pytest.mark.parametrize(("spec", "of_kernel"), [(X, P("y")), (Y, NONE), (XY, P("x"))])
def test_what_is_convolved_in_larger_groups_is_gathered(spec, of_kernel):
    kernel = ShapeDtypeStruct((FEATURES, 2, 4), np.float32)

    def fun(image, kernel):
        return lax.conv_general_dilated(image, kernel, (1,), [(3, 0)], feature_group_count=FEATURES // 2)

    program = pjit(fun, in_shardings=(spec, of_kernel), out_shardings=spec)
    report = explain(program, IMAGE, kernel, mesh=make_mesh(), compiled=True)
    assert report.predicted.unknown == ()
    assert report.predicted.counts == report.collectives.counts
    assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)
