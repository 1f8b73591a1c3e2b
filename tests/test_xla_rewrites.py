"""Rewrites of a lowered program compute the same, by operations that HLO has."""

import functools
import math
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from partjit.shardy import main_of, nested
from partjit.xla_rewrites import rewrite, rewrite_broadcast
from tests.census import saw, sees


@st.composite
def broadcasts(draw):
    """Shapes of operand and result, and the dimensions of the result that those of the operand are."""
    out = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    dims = draw(st.permutations(range(len(out))))[: draw(st.integers(0, len(out)))]
    return [draw(st.sampled_from((1, out[dim]))) for dim in dims], dims, out


@functools.cache
def context():
    return jax.jit(lambda x: x).lower(1.0).compiler_ir().context


def rewritten(shape, dims, out):
    operand, result = (f"tensor<{''.join(f'{size}x' for size in sizes)}f32>" for sizes in (shape, out))
    text = f"""func.func @main(%0: {operand}) -> {result} {{
      %1 = stablehlo.broadcast_in_dim %0, dims = {dims} : ({operand}) -> {result}
      return %1 : {result}
    }}"""
    module = ir.Module.parse(text, context=context())
    for op in [op for op in nested(module.operation) if op.operation.name == "stablehlo.broadcast_in_dim"]:
        rewrite_broadcast(op)
    assert module.operation.verify()
    return module


def evaluated(op, operand):
    shape = op.result.type.shape
    match op.operation.name:
        case "stablehlo.transpose":
            return operand.transpose([*ir.DenseI64ArrayAttr(op.attributes["permutation"])])
        case "stablehlo.reshape":
            return operand.reshape(shape)
        case "stablehlo.broadcast_in_dim":
            dims = [*ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"])]
            assert dims == sorted(dims)
            assert [shape[dim] for dim in dims] == [*operand.shape]
            return np.broadcast_to(np.expand_dims(operand, [k for k in range(len(shape)) if k not in dims]), shape)
    raise AssertionError(op)


@sees("stablehlo.transpose", "stablehlo.reshape", "stablehlo.broadcast_in_dim", "nothing")
@given(broadcasts())
def test_what_stands_for_a_broadcast_computes_the_same(broadcast):
    shape, dims, out = broadcast
    operand = np.arange(math.prod(shape)).reshape(shape)
    axes = sorted(range(len(dims)), key=dims.__getitem__)
    placed = np.expand_dims(operand.transpose(axes), [k for k in range(len(out)) if k not in dims])
    module = rewritten(shape, dims, out)
    block = main_of(module).regions[0].blocks[0]
    value, found = block.arguments[0], operand
    *made, end = block.operations
    for op in made:
        assert op.operands[0] == value
        value, found = op.result, evaluated(op, found)
        saw(op.operation.name)
    assert end.operands[0] == value
    np.testing.assert_array_equal(found, np.broadcast_to(placed, out), strict=True)
    if not made:
        saw("nothing")


@pytest.mark.parametrize(
    ("shape", "dims", "out"),
    [
        ((8,), (1,), (4, 8)),
        ((8,), (0,), (8, 1)),
        ((1, 8), (0, 1), (4, 8)),
        ((1, 8), (1, 2), (4, 3, 8)),
        ((1, 8), (0, 2), (4, 1, 8)),
        ((2, 1, 8, 1), (0, 1, 2, 3), (2, 3, 8, 1)),
        ((1, 1), (0, 1), (1, 4)),
        ((), (), (4,)),
    ],
)
def test_a_broadcast_is_the_operations_that_it_is_in_hlo(shape, dims, out):
    """With copies of what has all dimensions: each user of a value reshards its own."""
    low = jax.jit(lambda x: lax.broadcast_in_dim(x, out, dims)).lower(jax.ShapeDtypeStruct(shape, np.float32))
    theirs = re.findall(r"= f32(\[[\d,]*\]).*? (broadcast|reshape)\(", low.compiler_ir("hlo").as_hlo_text())
    module = rewritten(shape, [*dims], out)
    *ours, _ = main_of(module).regions[0].blocks[0].operations
    made = [(str([*op.result.type.shape]).replace(" ", ""), op.operation.name.split(".")[1]) for op in ours]
    assert [(shown, name.removesuffix("_in_dim")) for shown, name in made] == theirs


def run(module, *values):
    """The results of a module, by the interpreter of StableHLO."""
    with module.context:
        attributes = [ir.DenseElementsAttr.get(np.asarray(value)) for value in values]
        found = stablehlo.eval_module(ir.Module.parse(str(module)), attributes)
    return [np.array(ir.DenseFPElementsAttr(result)) for result in found]


# Calls


def test_calls_that_are_inlined_compute_the_same_where_they_are():
    twice = jax.jit(lambda x: (x + x, x), keep_unused=True)

    @jax.jit
    def swapped(x, y):
        (double, same), (y, _) = twice(x), twice(y)
        return jax.lax.while_loop(lambda x: x < 99, lambda x: twice(x)[0] + same, y), double

    def program(x, y):
        with jax.named_scope("first"):
            x, y = swapped(x, y)
        with jax.named_scope("second"):
            return (*swapped(x, y), y)

    values = np.float32(3), np.float32(5)
    module = jax.jit(program).lower(*values).compiler_ir()
    rewrite(module)
    assert module.operation.verify()
    operations = nested(module.operation)
    assert [op.name for op in operations if op.name.startswith("func.")] == ["func.return", "func.func"]
    located = [str(op.location) for op in operations if op.name == "stablehlo.add"]
    for scope in ("first", "second"):
        assert sum(scope in location for location in located) == len(located) // 2 > 2
    np.testing.assert_array_equal(run(module, *values), program(*values))


# Loops


@st.composite
def random_loops(draw, depth=2):
    """What each carried value becomes: one of them as it is, the sum of two, or what an inner loop makes of it."""
    count = draw(st.integers(1, 4))
    ways = st.tuples(st.sampled_from(["kept", "kept", "sum"]), st.integers(0, count - 1), st.integers(0, count - 1))
    inner = draw(random_loops(depth - 1)) if depth and draw(st.booleans()) else None
    return [draw(ways) for _ in range(count)], inner


def run_loop(loop, values):
    """Runs it twice, in jax; there is one value more than it changes, which counts."""
    ways, inner = loop

    def body(state):
        count, *xs = state
        if inner is not None:
            ys = run_loop(inner, [xs[k % len(xs)] for k in range(len(inner[0]))])
            xs = [xs[0], *ys[: len(xs) - 1], *xs[1 + len(ys) :]][: len(xs)]
        return (count + 1, *(xs[a] if way == "kept" else xs[a] + xs[b] for way, a, b in ways))

    return jax.lax.while_loop(lambda state: state[0] < 2, body, (jax.numpy.int32(0), *values))[1:]


@sees("one captures", "nested", "a value carried as another one that is kept")
@settings(max_examples=30, deadline=None)
@given(random_loops())
def test_loops_that_capture_compute_the_same(loop):
    values = [np.float32(10.0**k) for k in range(len(loop[0]))]

    def program(*xs):
        return run_loop(loop, xs)

    module = jax.jit(program, keep_unused=True).lower(*values).compiler_ir()
    carried = str(module).count("%iterArg")
    rewrite(module)
    assert module.operation.verify()
    text = str(module)
    for own, expected in zip(run(module, *values), program(*values), strict=True):
        np.testing.assert_allclose(own, expected)
    saw("one captures", when=text.count("%iterArg") < carried)
    saw("nested", when=loop[1] is not None)
    ways = loop[0]
    kept = {k for k, (way, a, _) in enumerate(ways) if way == "kept" and a == k}
    saw(
        "a value carried as another one that is kept",
        when=any(way == "kept" and a in kept and a != k for k, (way, a, _) in enumerate(ways)),
    )
