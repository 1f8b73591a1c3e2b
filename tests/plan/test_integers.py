"""What the host computes of integers is what the devices would."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from partjit.plan.ir.integers import computed_by_host
from tests.census import saw, sees
from tests.effort import examples

TYPES = [bool, np.int8, np.int32, np.uint8, np.uint32]
UNARY = {
    "neg": lax.neg,
    "abs": lax.abs,
    "sign": lax.sign,
    "not": lax.bitwise_not,
    **{f"as {np.dtype(kind)}": lambda a, kind=kind: lax.convert_element_type(a, kind) for kind in TYPES},
}
BINARY = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "rem": lax.rem,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "eq": lax.eq,
    "ne": lax.ne,
    "lt": lax.lt,
    "le": lax.le,
    "gt": lax.gt,
    "ge": lax.ge,
    "%": lambda a, b: a % b,
    "//": lambda a, b: a // b,
    "where": lambda a, b: jnp.where(a > b, a, b),
    "clip": lambda a, b: lax.clamp(lax.min(a, b), a, b),
}
NOT_OF_BOOLEANS = {"neg", "abs", "sign", "add", "sub", "mul", "div", "rem", "%", "//", "clip"}
EDGES = [0, 1, -1, 2, 3, 7, 100, 127, -128, 255, 2**31 - 1, -(2**31), 2**32 - 1]


def takes(name, dtype):
    """Whether jax has an operation for this type."""
    return not ((dtype.kind == "b" and name in NOT_OF_BOOLEANS) or (dtype.kind == "u" and name == "abs"))


def applied(name, a, b):
    return UNARY[name](a) if name in UNARY else BINARY[name](a, b)


@pytest.mark.parametrize("kind", TYPES)
def test_each_operation_is_that_of_the_devices(kind):
    def compute(a, b):
        return [applied(name, a, b) for name in names]

    names = [name for name in (*UNARY, *BINARY) if takes(name, np.dtype(kind))]
    values = {np.array(edge).astype(kind).item() for edge in EDGES}
    pairs = np.array([(a, b) for a in values for b in values if b or kind is bool], kind)  # 0 is left to the devices
    expected = jax.jit(jax.vmap(compute))(*pairs.T)
    function = computed_by_host(jax.make_jaxpr(compute)(kind(0), kind(0)))
    found = [function(*pair) for pair in pairs.tolist()]
    for name, one, other in zip(names, expected, zip(*found, strict=True), strict=True):
        assert np.asarray(one).tolist() == [*other], name
        assert {*map(type, other)} <= {int, bool}
    assert len(pairs) >= 4


@sees("several steps", "a constant", "a conversion", "a comparison", "a quotient")
@examples(30)
@given(st.data())
def test_several_operations_are_those_of_the_devices(data):
    kinds = data.draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=3))
    step = st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(0, 9), st.integers(0, 9), st.sampled_from(EDGES))
    steps = data.draw(st.lists(step, min_size=2, max_size=8))
    seen = set()

    def compute(*args):
        values = [*args]
        for name, i, k, edge in steps:
            a, b = values[i % len(values)], values[k % len(values)]
            if b.dtype != a.dtype:
                b = jnp.asarray(np.array(edge).astype(a.dtype))
                seen.add("a constant")
            if takes(name, a.dtype):
                values.append(applied(name, a, b))
                seen.add(name)
        return tuple(values)

    structs = [jax.ShapeDtypeStruct((), kind) for kind in kinds]
    function = computed_by_host(jax.make_jaxpr(compute)(*structs), lambda *_: None)
    if function is None:  # something is divided by a constant 0
        return
    compiled = jax.jit(compute)
    for _ in range(5):
        args = [np.array(data.draw(st.sampled_from(EDGES))).astype(kind) for kind in kinds]
        expected = [np.asarray(value).item() for value in compiled(*args)]
        found = function(*args)
        assert found is None or [*found] == expected
    if len(seen) > 2:
        saw("several steps")
    if "a constant" in seen:
        saw("a constant")
    if any(name.startswith("as ") for name in seen):
        saw("a conversion")
    if {"eq", "ne", "lt", "le", "gt", "ge"} & seen:
        saw("a comparison")
    if {"div", "rem", "%", "//"} & seen:
        saw("a quotient")


@pytest.mark.parametrize(
    "fun",
    [
        lambda i: jnp.float32(i) > 3,
        lambda i: jnp.arange(3)[i] > 0,
        lambda i: lax.cond(i > 0, lambda: 1, lambda: 2),
        lambda i: lax.integer_pow(i, 3),
        lambda i: lax.select_n(i, 1, 2),
    ],
)
def test_other_operations_and_types_are_left_to_the_devices(fun):
    assert computed_by_host(jax.make_jaxpr(fun)(np.int32(1))) is None


def test_what_is_no_integer_of_the_type_is_left_to_another_function():
    jaxpr = jax.make_jaxpr(lambda i: i + 1)(np.int8(0))
    function = computed_by_host(jaxpr, lambda *args: ("other", *args))
    assert function(127) == (-128,)
    assert function(np.array(3)) == function(jnp.int8(3)) == (4,)
    assert function(128) == ("other", 128)
    assert function(0.5) == ("other", 0.5)
    with pytest.raises(TypeError, match=r"expected integers in the ranges of their types, .*; got \(128,\)"):
        computed_by_host(jaxpr)(128)


@pytest.mark.parametrize("divide", [lax.div, lax.rem])
def test_divisions_by_0_are_left_to_another_function(divide):
    function = computed_by_host(jax.make_jaxpr(divide)(np.int32(0), np.int32(0)), lambda *args: ("other", *args))
    assert function(7, 2) == (int(divide(7, 2)),)
    assert function(7, 0) == ("other", 7, 0)
    assert computed_by_host(jax.make_jaxpr(lambda: divide(np.int32(7), np.int32(0)))()) is None
