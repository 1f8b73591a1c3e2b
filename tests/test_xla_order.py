"""The operations of a lowered program are brought into the order in which XLA lists them."""

import re

import jax
import jax.numpy as jnp
from hypothesis import example, given
from hypothesis import strategies as st
from jax.extend.mlir import ir

from partjit.shardy import main_of, nested
from partjit.xla_folds import Lowered
from partjit.xla_rewrites import rewrite
from tests.census import saw, sees

UNARY = {"sine": jnp.sin, "cosine": jnp.cos, "tanh": jnp.tanh, "exponential": jnp.exp, "negate": jnp.negative}
BINARY = {"add": jnp.add, "multiply": jnp.multiply, "subtract": jnp.subtract, "maximum": jnp.maximum}


@st.composite
def programs(draw):
    """Operations as names and the numbers of their operands, 0 being the argument; and the numbers of the results."""
    operations = []
    for k in range(1, draw(st.integers(2, 12))):
        name = draw(st.sampled_from([*UNARY, *BINARY, "callback", "loop", "branch", "sort", "barrier"]))
        operations.append((name, *(draw(st.integers(0, k - 1)) for _ in range(1 + (name in BINARY)))))
    return operations, draw(st.lists(st.integers(0, len(operations)), min_size=1, max_size=4))


def computed(program, x):
    operations, results = program
    values = [x]
    for name, *of in operations:
        operands = [values[k] for k in of]
        match name:
            case "callback":
                jax.debug.callback(lambda _: None, operands[0])
                values.append(operands[0])
            case "loop":
                values.append(jax.lax.fori_loop(0, x[0].astype(int), lambda _, c: jnp.cos(c) + values[0], operands[0]))
            case "branch":
                # What is captured is computed before, for one branch after the other.
                branches = (lambda x, values=values: x + values[-1], lambda x, values=values: x * values[0])
                values.append(jax.lax.cond(x[0] > 0, *branches, operands[0]))
            case "sort":
                values.append(jax.lax.sort((operands[0], x), num_keys=1)[1])
            case "barrier":
                values.append(jax.lax.optimization_barrier(operands[0]))
            case _:
                values.append((UNARY | BINARY)[name](*operands))
    return [values[k] for k in results]


def listed(text):
    """The operations of the entry computation of HLO, in the order in which XLA lists them."""
    entry = text[text.index("\nENTRY") :]
    found = re.findall(r" = .*?\s([a-z-]+)\(", entry)
    return [name.replace("conditional", "case") for name in found if name in COMPARED]


COMPARED = {*UNARY, *BINARY, "custom-call", "while", "conditional", "sort"}


@sees(*UNARY, *BINARY, "callback", "loop", "branch", "sort", "barrier", "moved")
@example(([("sine", 0), ("loop", 0)], [1, 2]))
@given(programs())
def test_operations_are_in_the_order_in_which_xla_lists_them(program):
    lowered = jax.jit(lambda x: computed(program, x)).lower(jax.ShapeDtypeStruct((4,), jnp.float32))
    module = lowered.compiler_ir()
    before = [op.operation.name for op in main_of(module).body.blocks[0].operations]
    rewrite(module)
    assert module.operation.verify()
    own = [op.operation.name for op in main_of(module).body.blocks[0].operations]
    names = [name.removeprefix("stablehlo.").replace("_", "-") for name in own]
    assert [name for name in names if name.replace("case", "conditional") in COMPARED] == listed(
        lowered.compiler_ir("hlo").as_hlo_text()
    )
    for name, *_ in program[0]:
        saw(name)
    if before != own:
        saw("moved")


def test_what_is_ignored_is_last():
    text = """func.func @main(%0: tensor<4xf32>) -> tensor<4xf32> {
      %1 = stablehlo.sine %0 : tensor<4xf32>
      %2 = stablehlo.cosine %0 : tensor<4xf32>
      stablehlo.custom_call @mark(%1, %2) {has_side_effect = true} : (tensor<4xf32>, tensor<4xf32>) -> ()
      %3 = stablehlo.tanh %0 : tensor<4xf32>
      %4 = stablehlo.add %3, %2 : tensor<4xf32>
      return %4 : tensor<4xf32>
    }"""
    context = jax.jit(lambda x: x).lower(1.0).compiler_ir().context
    for is_ignored, expected in (
        (lambda _: False, "sine cosine custom_call tanh add return"),
        (lambda op: op.name == "stablehlo.custom_call", "tanh cosine add sine custom_call return"),
    ):
        module = ir.Module.parse(text, context=context)
        rewrite(module, Lowered(is_ignored))
        found = [op.name.rpartition(".")[2] for op in nested(module.operation) if op.name != "func.func"]
        assert " ".join(found) == expected
