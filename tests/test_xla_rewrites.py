"""What stands for a broadcast in HLO: it computes the same, by operations that HLO has."""

import functools
import math

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.mlir import ir

from partjit.shardy import main_of, nested
from partjit.xla_rewrites import rewrite_broadcast
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
            assert math.prod(shape) > operand.size
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
