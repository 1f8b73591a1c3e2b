"""Programs with colocated calls and refs, which the host does not have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import P, colocated, pjit
from partjit.colocated import colocated_python
from tests.colocated import rendezvous

lax = jax.lax

pytestmark = pytest.mark.usefixtures("meeting")


def doubled(x):
    rendezvous.logs["calls"].append(float(x[0]))
    return x * 2


KINDS = {"numpy": {"arrays": "numpy"}, "on a thread": {"mode": "stream"}, "answered": {"uses_jax": False}}
double = {name: colocated_python(doubled, out_specs_fn=lambda x: x, **options) for name, options in KINDS.items()}


def update(ref, call):
    ref[...] = call(ref[...]) + 1


def straight(call, x):
    ref = jax.new_ref(x)
    update(ref, call)
    update(ref, call)
    return ref[...]


def in_a_loop(call, x):
    ref = jax.new_ref(x)
    lax.fori_loop(0, 2, lambda _, none: update(ref, call), None)
    return ref[...]


def of_an_iteration(call, x):
    def iteration(_, x):
        ref = jax.new_ref(x)
        update(ref, call)
        return ref[...]

    return lax.fori_loop(0, 2, iteration, x)


def in_branches(call, x):
    ref = jax.new_ref(x)
    for k in range(3):
        lax.cond(x[0] + k < 3, lambda: update(ref, call), lambda: None)
    return ref[...]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", [straight, in_a_loop, of_an_iteration, in_branches])
def test_a_program_has_refs_of_its_own(mesh, program, kind):
    x = np.ones(8, np.float32)
    with mesh:
        step = pjit(lambda x: program(double[kind], x), in_shardings=P("x"), out_shardings=P("x"), donate_argnums=0)
        for _ in range(2):
            rendezvous.clear()
            np.testing.assert_allclose(step(jnp.asarray(x)), 7)
            colocated.wait(timeout=60)
            assert rendezvous.logs["calls"] == [1, 3]


def test_a_call_that_fails_names_its_line_beside_refs():
    fail = colocated_python(lambda x: 1 / 0, out_specs_fn=lambda x: x)
    with pytest.raises(ZeroDivisionError) as caught:
        pjit(lambda x: in_a_loop(fail, x))(np.ones(8, np.float32))
    assert "test_refs.py" in caught.value.__notes__[0]


def test_a_ref_of_the_caller_is_updated():
    ref = jax.new_ref(jnp.ones(8))
    assert float(pjit(lambda ref: (update(ref, double["numpy"]), ref[0])[1])(ref)) == 3
    np.testing.assert_allclose(ref[...], 3)


def test_a_ref_of_the_caller_is_refused_in_a_loop_with_calls():
    ref = jax.new_ref(jnp.ones(8))
    program = pjit(lambda ref: lax.fori_loop(0, 2, lambda _, none: update(ref, double["numpy"]), None))
    with pytest.raises(ValueError, match="doubled is called in a scan that uses a ref from outside of the program at"):
        program(ref)
    np.testing.assert_allclose(ref[...], 1)
