"""The memory of conditionals in loops, also in others' branches, and of primitives that are lowered to nothing."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive, primitives
from jax.interpreters import mlir

import partjit
from partjit import P, pjit
from partjit.inspect import explain
from partjit.inspect.identities import passed_operand

SIZE = 512
BRANCHES = {"returned": lambda x, y: x, "changed": lambda x, y: x - y * 2, "replaced": lambda x, y: y * 3}


@pytest.fixture(scope="module")
def mesh():
    return partjit.Mesh(np.array(jax.devices()).reshape(8), ("data",))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def nested(names, is_nested_first):
    """A conditional in a loop, of which one branch is a conditional."""
    outer, first, second = (BRANCHES[name] for name in names)

    def inner(flags):
        return lambda x, y: jax.lax.cond(flags[1] > 0, second, first, x, y)

    def step(x, y, flags):
        branches = (inner(flags), outer) if is_nested_first else (outer, inner(flags))
        return jax.lax.cond(flags[0] > 0, *branches[::-1], x, y)

    return lambda x, y, flags: jax.lax.scan(lambda x, flags: (step(x, y, flags), None), x, flags)[0]


NESTED = [*itertools.product(itertools.product(BRANCHES, repeat=3), (False, True))]


@pytest.mark.parametrize(("names", "is_nested_first"), random.Random(1).sample(NESTED, 9))
def test_memory_of_conditionals_in_branches_is_that_of_xla(names, is_nested_first, mesh):
    program = pjit(nested(names, is_nested_first), in_shardings=(P("data"), P("data"), P()), out_shardings=P("data"))
    report = explain(program, f32(SIZE, SIZE), f32(SIZE, SIZE), f32(5, 2), mesh=mesh, compiled=True)
    (estimate,), (found,) = report.estimates, report.memory
    assert estimate.unknown == ()
    assert abs(estimate.peak - found.peak) < SIZE * SIZE // 16, (names, is_nested_first, str(estimate), str(found))


def primitive_of(name, function):
    made = Primitive(name)
    made.def_impl(function)
    made.def_abstract_eval(lambda *operands, **_: operands[1])
    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=False))
    return made


second_p = primitive_of("second_of_two", lambda x, y: y)
sum_p = primitive_of("sum_of_two", lambda x, y: x + y)


def refused(x, y):
    raise RuntimeError("only where there is an axis")


refused_p = primitive_of("refused_alone", refused)  # as one that has to be lowered in the scope of an axis


@pytest.mark.parametrize(
    ("primitive", "position"), [(second_p, 1), (sum_p, None), (primitives.add_p, None), (refused_p, None)]
)
def test_what_a_primitive_passes_on_is_told_from_its_lowering(primitive, position):
    jaxpr = jax.make_jaxpr(primitive.bind)(f32(3), f32(3)).jaxpr
    (eqn,) = jaxpr.eqns
    assert passed_operand(eqn) is (None if position is None else eqn.invars[position])


def test_what_a_primitive_passes_on_has_no_buffer_of_its_own(mesh):
    def repeated(x, y):
        return jax.lax.scan(lambda x, _: (second_p.bind(x, jnp.sin(x) * y), None), x, None, length=3)[0]

    report = explain(pjit(repeated, in_shardings=P("data")), f32(SIZE, SIZE), f32(SIZE, SIZE), mesh=mesh, compiled=True)
    (estimate,), (found,) = report.estimates, report.memory
    assert abs(estimate.peak - found.peak) < SIZE * SIZE // 16, (str(estimate), str(found))
