"""Which fragments a process dispatches before all have agreed, and on what a process that failed dispatches them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partjit
from partjit import P, pjit
from partjit.colocated import colocated_python
from partjit.plan.passes.propagate import default_sharding
from partjit.plan.run.ahead import zeros_of

double = colocated_python(lambda x: x + x, out_specs_fn=lambda x: x, mode="inline")
log = colocated_python(lambda x: None, out_specs_fn=lambda x: None)


def twice(x):
    y = double(x + jnp.sum(x))
    return y * jnp.sum(y), y


def with_a_number(x):
    return double(x + 1) * jnp.sum(x)


def until_large(x):
    """The devices would go by a number that is another one where it is zero."""
    start = jnp.sum(x), double(x)
    return jax.lax.while_loop(lambda v: v[0] < 1e3, lambda v: (2 * v[0], v[1] + jnp.sum(v[1])), start)[1]


def if_positive(x):
    return jax.lax.cond(jnp.sum(x) > 0, lambda v: v + jnp.sum(v), lambda v: v, double(x))


def in_python(x):
    y = double(x)
    return y + jax.pure_callback(np.log, jax.ShapeDtypeStruct((), y.dtype), jnp.sum(y))


def carried(x):
    return jax.lax.fori_loop(0, 3, lambda _, v: double(v * 2) + 1, x)


def logged(x):
    return jax.lax.fori_loop(0, 3, lambda _, v: (log(v[0]), v * 2)[1], x)


def ahead(fun, mesh, **options):
    """What zeros each fragment of a program would be dispatched on; None for one that waits."""
    with mesh:
        plan = pjit(fun, in_shardings=P("x"), **options).plan(np.ones((8, 2), np.float32))
    default = default_sharding(plan.mesh, ()).sharding
    made = [zeros_of(plan, fragment, lambda value: value.sharding or default) for fragment in plan.fragments]
    return [
        (fragment, None if zeros is None else zeros()) for fragment, zeros in zip(plan.fragments, made, strict=True)
    ]


@pytest.mark.parametrize("fun", [twice, with_a_number, carried])
def test_zeros_are_of_the_types_and_shardings_of_what_they_stand_for(fun, mesh):
    for fragment, zeros in ahead(fun, mesh, agree="ahead"):
        for value, array in zip(fragment.inputs, zeros, strict=True):
            assert (array.shape, array.dtype) == (value.aval.shape, value.aval.dtype)
            assert value.sharding is None or array.sharding.is_equivalent_to(value.sharding, array.ndim)
            assert not np.asarray(array).any()


@pytest.mark.parametrize(
    ("fun", "options"),
    [(twice, {"agree": "barrier"}), (twice, {"agree": False}), (logged, {"agree": "ahead"})],
    ids=["a barrier", "no agreement", "calls of the executable"],
)
def test_nothing_is_dispatched_ahead(fun, options, mesh):
    assert all(zeros is None for _, zeros in ahead(fun, mesh, **options))


def test_a_process_whose_dispatch_would_wait_for_the_others_waits_before(mesh):
    of_one = partjit.Mesh(mesh.devices.flat[:1], "x")
    assert all(zeros is None for _, zeros in ahead(twice, of_one, agree="ahead"))


@pytest.mark.parametrize("fun", [until_large, if_positive, in_python])
def test_a_fragment_that_goes_by_what_it_is_given_waits(fun, mesh):
    *_, (_, zeros) = ahead(fun, mesh, agree="ahead")
    assert zeros is None


@pytest.mark.parametrize("fun", [twice, carried])
def test_who_takes_over_memory_that_is_still_there_if_another_fails_waits(fun, mesh):
    waiting = [fragment for fragment, zeros in ahead(fun, mesh, agree="ahead", donate_argnums=0) if zeros is None]
    assert waiting
    assert all(any(fragment.donated) for fragment in waiting)
