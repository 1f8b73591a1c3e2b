"""The memory of arrays of less than a byte per element: XLA packs arguments and results, and computes with bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partjit
from partjit import P, pjit
from partjit.inspect import explain


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4, jnp.int8, jnp.float32])
@pytest.mark.parametrize(("donate", "result"), [((), P("x")), ((), P()), (0, P("x"))])
def test_arguments_and_results_are_counted_as_xla_packs_them(dtype, donate, result):
    mesh = partjit.Mesh(np.array(jax.devices()).reshape(8), ("x",))
    step = pjit(lambda a, b: (a + a, b), in_shardings=(P("x"), P()), out_shardings=(result, P()), donate_argnums=donate)
    a, b = jax.ShapeDtypeStruct((64, 33), dtype), jax.ShapeDtypeStruct((3,), dtype)  # b ends in the middle of a byte
    report = explain(step, a, b, mesh=mesh, compiled=True)
    (estimate,), (found,) = report.estimates, report.memory
    counted, by_xla = ((one.arguments, one.donated) for one in (estimate, found))
    assert counted == by_xla
    assert abs(estimate.results - found.results) <= 16  # of the pointers of a tuple
