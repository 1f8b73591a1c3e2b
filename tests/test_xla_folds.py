"""What XLA folds before it propagates shardings is folded in the same way: the same operations are left."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.mlir import ir

from partjit.inspect.moves.unused import remove_unused
from partjit.inspect.walk import walk_of
from partjit.shardy import Shardings, nested
from partjit.xla_folds import FOLDED
from partjit.xla_rewrites import rewrite

FOLDS = {
    "equal cases": lambda x, i, p: lax.select(p, x, x),
    "equal constant cases": lambda x, i, p: lax.select(p, jnp.zeros_like(x), jnp.zeros_like(x)) + jnp.sin(x),
    "equal cases that are infinite": lambda x, i, p: (
        lax.select(p, jnp.full_like(x, jnp.inf), jnp.full_like(x, jnp.inf)) + jnp.sin(x)
    ),
    "other cases": lambda x, i, p: lax.select(p, jnp.zeros_like(x), jnp.ones_like(x)) + jnp.sin(x),
    "a predicate that is a constant": lambda x, i, p: lax.select(jnp.full(x.shape, False), jnp.cos(x), jnp.sin(x)),
    "a negated predicate": lambda x, i, p: lax.select(~p, jnp.sin(x), jnp.cos(x)),
    "one that is negated twice": lambda x, i, p: (lax.select(~~p, jnp.sin(x), x), lax.select(~p, x, jnp.cos(x))),
    "a predicate that is negated and used": lambda x, i, p: (q := ~p, lax.select(q, x, jnp.cos(x))),
    "plus zero": lambda x, i, p: (x + jnp.zeros_like(x), jnp.zeros_like(x) + x, x - jnp.zeros_like(x)),
    "zero minus": lambda x, i, p: jnp.zeros_like(x) - x,
    "times one": lambda x, i, p: (x * jnp.ones_like(x), 1 * i),
    "times zero": lambda x, i, p: x * 0.0,
    "integers times zero": lambda x, i, p: (i * 0 + lax.population_count(i),),
    "bits": lambda x, i, p: (i & -1, i | 0, i ^ 0, lax.population_count(i) | (i & 0)),
    "truth": lambda x, i, p: (p & True, p | False, ~p | (p & False)),
    "unsigned bits": lambda x, i, p: i.astype(jnp.uint8) & jnp.uint8(255),
    "reshapes": lambda x, i, p: x.reshape(8, 4).reshape(32),
    "reshapes there and back": lambda x, i, p: jnp.sin(x).reshape(8, 4).reshape(4, 8),
    "ones are added and removed": lambda x, i, p: jnp.sin(x)[None].reshape(4, 8),
    "ones are added to a reshape": lambda x, i, p: lax.expand_dims(x.reshape(8, 4), (0,)),
    "ones are added twice": lambda x, i, p: lax.expand_dims(lax.expand_dims(x, (0,)), (2,)),
    "what is repeated": lambda x, i, p: lax.broadcast_in_dim(x[:1], (1, 3, 8), (0, 2)).reshape(3, 8),
    "a dimension of size one moves": lambda x, i, p: lax.transpose(jnp.sin(x)[:1], (1, 0)),
    "a transpose": lambda x, i, p: x.T,
    "constant starts": lambda x, i, p: lax.dynamic_slice(x, (7, 0), (2, 8)),
    "all is sliced": lambda x, i, p: lax.dynamic_slice(jnp.sin(x), (0, 0), (4, 8)),
    "all is updated": lambda x, i, p: lax.dynamic_update_slice(x, jnp.sin(x), (0, 0)),
    "a part is updated": lambda x, i, p: lax.dynamic_update_slice(x, jnp.sin(x[:2]), (1, 0)),
    "nothing is updated": lambda x, i, p: lax.dynamic_update_slice(jnp.sin(x), x[:, :0], (0, 0)),
    "no padding": lambda x, i, p: lax.pad(jnp.sin(x), jnp.float32(0), ((0, 0, 0), (0, 0, 0))),
    "padding": lambda x, i, p: lax.pad(x, jnp.float32(0), ((1, 0, 0), (0, 0, 0))),
    "padding between": lambda x, i, p: lax.pad(x, jnp.float32(0), ((0, 0, 1), (0, 0, 0))),
    "a part of a concatenation": lambda x, i, p: jnp.concatenate([jnp.sin(x), jnp.cos(x)])[4:8],
    "a part of a part": lambda x, i, p: jnp.concatenate([jnp.sin(x), jnp.cos(x)])[5:7],
    "parts of several": lambda x, i, p: jnp.concatenate([jnp.sin(x), jnp.cos(x), x])[1:6],
    "nested concatenations": lambda x, i, p: jnp.concatenate([jnp.concatenate([x, jnp.sin(x)]), x]),
    "nested, and used": lambda x, i, p: (jnp.concatenate([y := jnp.concatenate([x, x]), x]), jnp.sin(y)),
    "nested, and used twice": lambda x, i, p: jnp.concatenate([jnp.concatenate([x, jnp.sin(x)])] * 2),
    "nested, of other dimensions": lambda x, i, p: jnp.concatenate(
        [jnp.concatenate([x[:, :4], x[:, 4:]], 1), jnp.sin(x)]
    ),
    "complex numbers": lambda x, i, p: lax.complex(x, jnp.sin(x)) * jnp.full(x.shape, 1 + 2j, jnp.complex64),
    "nothing is sliced": lambda x, i, p: (jnp.sin(x), jnp.cos(x)[:, 2:2]),
    "nothing is sliced of complex numbers": lambda x, i, p: (jnp.sin(x), lax.complex(x, x)[2:2], i[:0], p[:0]),
    "limits": lambda x, i, p: lax.max(jnp.ones_like(x), lax.min(x, jnp.full_like(x, 5.0))),
    "concatenated with nothing": lambda x, i, p: jnp.concatenate([jnp.sin(x), x[:0]]),
    "a computed predicate": lambda x, i, p: lax.select(
        lax.full(x.shape, 3) < lax.full(x.shape, 2), jnp.sin(x), jnp.cos(x)
    ),
    "a branch that is taken": lambda x, i, p: lax.cond(True, lambda x: jnp.sin(x) + jnp.cos(x), jnp.tan, x),
    "one of three": lambda x, i, p: lax.switch(1, [jnp.sin, lambda x: x, jnp.cos], jnp.tanh(x)),
    "branches in branches": lambda x, i, p: lax.cond(
        False, jnp.sin, lambda x: lax.switch(0, [jnp.cos, jnp.tan], x) * lax.cond(True, jnp.exp, jnp.log, x), x
    ),
    "a branch that decides another one": lambda x, i, p: lax.cond(
        lax.cond(True, lambda: 1, lambda: 0) > 0, jnp.sin, jnp.cos, x
    ),
    "a loop without iterations": lambda x, i, p: lax.while_loop(lambda _: False, jnp.sin, jnp.cos(x)),
    "a loop in a branch that is not taken": lambda x, i, p: lax.cond(
        False, lambda x: lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), x), jnp.cos, x
    ),
}


COUNTED_OUT = ("constant", "broadcast", "parameter", "tuple", "func", "return")
"""What does not compute anything, and constants, which XLA makes as often as they are used."""


def counts(names):
    found = collections.Counter(name.replace("-", "_").removesuffix("_in_dim") for name in names)
    return {name: n for name, n in found.items() if name not in COUNTED_OUT}


@functools.cache
def lowered(name):
    structs = [jax.ShapeDtypeStruct((4, 8), dtype) for dtype in (jnp.float32, jnp.int32, jnp.bool)]
    return jax.jit(FOLDS[name]).lower(*structs)


@pytest.mark.parametrize("name", FOLDS)
def test_the_same_operations_are_left_as_xla_leaves(name):
    text = lowered(name).compiler_ir("hlo").as_hlo_text()
    theirs = re.findall(r"= [^=]*? ([\w\-]+)\(", text[text.index("ENTRY") :])
    module = lowered(name).compiler_ir("stablehlo")
    module = ir.Module.parse(str(module), context=module.context)  # the other one may be compiled
    rewrite(module)
    remove_unused(walk_of(module, Shardings(module)))
    assert module.operation.verify()
    assert counts(op.name.partition(".")[2] for op in nested(module.operation)) == counts(theirs)


PREDICATES = {
    "integers": lambda: lax.lt(3, 2),
    "floats": lambda: lax.lt(3.0, lax.mul(2.0, 2.0)),
    "bf16": lambda: lax.lt(jnp.bfloat16(3), jnp.bfloat16(2) * 2),
    "quotients": lambda: lax.ge(lax.div(-7, 2), -3),
    "quotients of floats": lambda: lax.gt(lax.div(7.0, 2.0), 3.25),
    "remainders": lambda: lax.eq(lax.rem(-7, 2), -1),
    "remainders of floats": lambda: lax.gt(lax.rem(7.0, 2.0), 0.5),
    "integers that overflow": lambda: lax.lt(jnp.int8(120) + jnp.int8(10), jnp.int8(0)),
    "unsigned ones": lambda: lax.lt(jnp.uint8(250) + jnp.uint8(10), jnp.uint8(5)),
    "conversions": lambda: lax.eq(lax.convert_element_type(2.75, jnp.int32), 2),
    "truth": lambda: (lax.gt(2, 1) & ~lax.gt(2, 3)) ^ lax.ne(2, 2),
    "bits": lambda: lax.eq(lax.bitwise_or(lax.bitwise_and(6, 3), 8), 10),
    "limits": lambda: lax.gt(lax.max(lax.min(6, 3), 1) + lax.clamp(0, 6, 3), 5),
    "signs": lambda: lax.lt(lax.sign(lax.neg(lax.abs(-6))), 0),
    "roots": lambda: lax.le(lax.sqrt(9.0), lax.exp(1.0)),
    "infinity": lambda: lax.gt(jnp.float32(jnp.inf), 1.0),
    "all": lambda: jnp.all(lax.full((3,), 0) == lax.full((3,), 0)),
    "any": lambda: jnp.any(lax.full((3, 2), 0) == lax.full((3, 2), 1)),
    "elements": lambda: lax.gt(lax.slice(lax.full((4,), 3.0), (1,), (2,)).reshape(()), 1.0),
    "a sum": lambda: lax.gt(lax.full((3,), 1.0).sum(), 1.0),
    "a power": lambda: lax.gt(lax.pow(2.0, 3.0), 2.0),
    "finite": lambda: lax.is_finite(1.0),
    "another function": lambda: jax.jit(lambda n: n > 3)(5),
}


@functools.cache
def deciding():
    def decided(x):
        return [lax.cond(predicate(), jnp.sin, jnp.cos, x) for predicate in PREDICATES.values()]

    return jax.jit(decided).lower(jax.ShapeDtypeStruct((4,), jnp.float32))


def test_the_same_branches_are_taken():
    """Each conditional is a sine if its predicate is true, a cosine if it is false, or stays, in both."""
    text = deciding().compiler_ir("hlo").as_hlo_text()
    entry = text[text.index("ENTRY") :]
    *_, returned = re.findall(r"ROOT .*?tuple\((.*)\)", entry)
    kinds = dict(re.findall(r"([\w.\-]+) = [^=]*? ([\w\-]+)\(", entry))
    theirs = [kinds[name.split()[-1].lstrip("%")] for name in returned.split(", ")]
    module = deciding().compiler_ir("stablehlo")
    module = ir.Module.parse(str(module), context=module.context)
    rewrite(module)
    assert module.operation.verify()
    (end,) = (op for op in nested(module.operation) if op.name == "func.return" and len(op.operands) == len(PREDICATES))
    ours = [value.owner.operation.name.partition(".")[2].replace("case", "conditional") for value in end.operands]
    assert dict(zip(PREDICATES, ours, strict=True)) == dict(zip(PREDICATES, theirs, strict=True))
    assert {*ours} == {"sine", "cosine", "conditional"}


ORDERED = {
    "add": lax.add,
    "multiply": lax.mul,
    "maximum": lax.max,
    "minimum": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "subtract": lax.sub,
}


@pytest.mark.parametrize("name", ORDERED)
def test_a_constant_is_the_operand_that_it_is_in_xla(name):
    low = jax.jit(lambda x: (ORDERED[name](jnp.full_like(x, 5), x), ORDERED[name](5, x[0]))).lower(jnp.ones(8, int))
    theirs = re.findall(rf" {name}\(([^\s.,]*)", low.compiler_ir("hlo").as_hlo_text())
    module = ir.Module.parse(str(low.compiler_ir("stablehlo")), context=low.compiler_ir("stablehlo").context)
    rewrite(module)
    ours = [op.operands[0].owner for op in nested(module.operation) if op.name == f"stablehlo.{name}"]
    are_constants = [
        not isinstance(owner, ir.Block) and owner.name in ("stablehlo.constant", "stablehlo.broadcast_in_dim")
        for owner in ours
    ]
    assert len(theirs) == 2
    assert are_constants == [first.startswith(("constant", "broadcast")) for first in theirs]


def test_each_fold_is_tried():
    seen = {op.name for name in FOLDS for op in nested(lowered(name).compiler_ir("stablehlo").operation)}
    assert seen >= FOLDED.keys()


@pytest.mark.parametrize("name", ["dynamic_slice", "select"])
def test_operations_in_loops_are_folded(name):
    def body(_, x):
        same = lax.select(x > 0, x, x)
        return jnp.sin(lax.dynamic_slice(same, (0, 0), (4, 8)))

    module = jax.jit(lambda x: lax.fori_loop(0, 3, body, x)).lower(jnp.ones((4, 8))).compiler_ir("stablehlo")
    module = ir.Module.parse(str(module), context=module.context)
    assert any(op.name == f"stablehlo.{name}" for op in nested(module.operation))
    rewrite(module)
    assert not any(op.name == f"stablehlo.{name}" for op in nested(module.operation))


@pytest.mark.parametrize("count", [3, 3000])
def test_what_many_steps_compute_decides_nothing_and_is_not_recursed_into(count):
    def program(x, start):
        for _ in range(count):
            start = start + 1
        return lax.cond(start > 0, jnp.sin, jnp.cos, x)

    traced = jax.jit(lambda x: program(x, jnp.int32(0))).trace(jnp.ones(8))
    module = traced.lower().compiler_ir()
    rewrite(module)
    left = [op.name for op in nested(module.operation)]
    assert ("stablehlo.case" in left) == (count == 3000)
    assert ("stablehlo.sine" in left, "stablehlo.cosine" in left) == (True, count == 3000)
