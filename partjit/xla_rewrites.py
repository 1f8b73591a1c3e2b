"""The rewrites of a lowered program that XLA makes before it propagates shardings.

* HLO has no broadcast that also permutes dimensions, and one that only adds dimensions of size 1 is a reshape there.
  One that expands dimensions of size 1 is three operations: all dimensions are added, these removed, and added again.
  Shardy propagates through reshapes and transposes before it does through broadcasts.
* The largest elements of an array are selected by one operation, not by a sort and slices.
* Operations that change nothing are folded, in each function by itself, and branches that a constant decides on; see
  `partjit.xla_folds`.
* Calls of functions are inlined. What a function returns and what its call returns are one value, with one sharding.
* What a loop passes on unchanged is captured by its body instead. So it has one sharding, but for what the user has
  sharded: that may be sharded further in the body.
* Operations are in an order of its own; see `partjit.xla_order`.

A program that is not rewritten may get other shardings than the one that is compiled.

Source: `XlaBuilder::BroadcastInDim`, `hlo_function_importer.cc`, `call_inliner.cc`, `zero_sized_hlo_elimination.cc`,
and of the StableHLO passes of XLA `stablehlo_prepare_for_hlo_export.cpp`, `stablehlo_canonicalize_from_hlo_import.cpp`
and `open_while_free_vars_sharding.cc`.
"""

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy, stablehlo

from partjit.shardy import Shardings, nested, run_passes, symbol_of
from partjit.xla_effects import erase_unused
from partjit.xla_folds import AS_IT_IS, FOLDED, FOLDED_REGIONS, Lowered, fold, fold_region
from partjit.xla_order import WITH_BODIES, order_operations

__all__ = ["open_captured", "rewrite", "rewrite_broadcast", "rewrite_operations"]

_CAPTURED = "partjit.captured"  # an attribute of what may become a constraint, and of a module with such operations


def rewrite(module: ir.Module, lowered: Lowered = AS_IT_IS) -> None:
    """Brings a lowered module into the form, and the order, in which XLA propagates shardings.

    Args:
        module: the module, which is changed.
        lowered: how it differs from the one that XLA gets.
    """
    rewrite_operations(module, lowered)
    open_captured(module)


def rewrite_operations(module: ir.Module, lowered: Lowered = AS_IT_IS) -> None:
    """The part of `rewrite` that does not depend on the shardings in the module, which may be changed afterwards."""
    ops, names = _walked(module)
    if any(name.startswith("chlo.") for name in {*names}):
        selections = [op.location for op, name in zip(ops, names, strict=True) if name == "chlo.top_k"]
        # XLA propagates when `chlo` operations (square, erf, ...) are expanded: no sharding goes through them.
        run_passes(module, "builtin.module(func.func(chlo-legalize-to-stablehlo))")
        ops, names = _walked(module)
        _keep_selections(ops, selections)
    gone, folds_regions = set[int](), False
    for k, (op, name) in enumerate(zip(ops, names, strict=True)):
        if k in gone:
            continue
        if name in FOLDED:
            fold(op, lowered)
        elif name == "stablehlo.broadcast_in_dim" and (reshape := rewrite_broadcast(op)) is not None:
            fold(reshape, lowered)
        elif name in FOLDED_REGIONS and (erased := fold_region(op, lowered)) is not None:
            gone.update(k + 1 + number for number in erased)
            folds_regions = True
    if folds_regions:
        lowered.remove_unused(module)  # what another branch has used
        run_passes(module, "builtin.module(symbol-dce)")  # and called
        ops, names = _walked(module)
    if "func.call" in names:
        _inline_calls(module)
        ops, names = _walked(module)
    loops = [op for op, name in zip(ops, names, strict=True) if name == "stablehlo.while"]
    with_bodies = [op for op, name in zip(ops, names, strict=True) if name in WITH_BODIES]
    unused = order_operations(with_bodies, lowered.is_ignored)
    # Shardy's passes would erase what nothing uses, and then what only marks use, which must stay.
    loops = erase_unused(unused, loops)
    captured = [*map(_capture_invariants, loops)]  # what they capture is not replaced any more
    for loop, values in reversed(captured):
        for value in values:
            _add_candidate(value, loop)
    if any(values for _, values in captured):
        module.operation.attributes[_CAPTURED] = ir.UnitAttr.get(module.context)


def open_captured(module: ir.Module) -> bool:
    """The rest of `rewrite`: what loops capture may be sharded further in them, if it has a sharding.

    Returns:
        Whether loops capture anything.
    """
    if _CAPTURED not in module.operation.attributes:
        return False
    del module.operation.attributes[_CAPTURED]
    constraints = [op for op in nested(module.operation) if op.name == "sdy.sharding_constraint"]
    candidates = [op for op in constraints if _CAPTURED in op.attributes]
    shardings = Shardings(module)
    found = [shardings.of(_original(op)) for op in candidates]  # before any of them is one
    for op, sharding in zip(candidates, found, strict=True):
        if sharding is None or not sharding.axes:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
        else:
            with op.context:
                op.attributes["sharding"] = _fully_open(sharding.mesh, len(sharding.axes))
                del op.attributes[_CAPTURED]
    return True


def _walked(module: ir.Module) -> tuple[list[ir.Operation], list[str]]:
    """The operations of a module, each before those in it, and their names."""
    ops = nested(module.operation, ir.WalkOrder.PRE_ORDER)
    return ops, [op.name for op in ops]


def _keep_selections(ops: Sequence[ir.Operation], selections: Sequence[ir.Location]) -> None:
    """Gives the slices that `chlo.top_k` at these locations became the propagation of XLA's own operation.

    Nothing is propagated along the last dimension of that. Along that of a slice it would be.
    """
    for op in ops if selections else ():
        if op.name != "stablehlo.slice" or op.location not in selections:
            continue
        owner, before, after = op.operands[0].owner, op.operands[0].type.shape, op.results[0].type.shape
        if isinstance(owner, ir.Block) or owner.operation.name != "stablehlo.sort" or len(after) >= len(_FACTORS):
            continue
        *batch, source, target = _FACTORS[: len(after) + 1]
        sizes = zip((*batch, source, target), (*before, after[-1]), strict=True)
        rule = f"([{', '.join((*batch, source))}])->([{', '.join((*batch, target))}])"
        given = ", ".join(f"{factor}={size}" for factor, size in sizes)
        attribute = f"#sdy.op_sharding_rule<{rule} {{{given}}}>"
        op.attributes["sdy.sharding_rule"] = ir.Attribute.parse(attribute, op.context)


_FACTORS = "ijklmnopqrstuvwxyz"


def _original(op: Any) -> Any:
    """What a loop captures, possibly through loops around it."""
    value = op.operands[0]
    while not isinstance(value.owner, ir.Block) and _CAPTURED in value.owner.attributes:
        value = value.owner.operands[0]
    return value


def _inline_calls(module: ir.Module) -> None:
    """Replaces the calls of functions by their bodies, whose operations have the locations of the calls as well."""
    functions = {symbol_of(op): op for op in module.body.operations if op.operation.name == "func.func"}
    inlined: set[str] = set()

    def inline_into(function: Any) -> None:
        for call in [op for op in nested(function) if op.name == "func.call"]:
            name = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
            callee = functions[name]
            if name not in inlined:
                inline_into(callee)
                inlined.add(name)
            (body,) = callee.operation.clone().regions[0].blocks
            for argument, operand in zip(body.arguments, call.operands, strict=True):
                argument.replace_all_uses_with(operand)
            *operations, returned = body.operations
            for op in operations:
                op.move_before(call)
                for inner in (*nested(op), op.operation):
                    inner.location = ir.Location.fused([call.location, inner.location])
            for result, value in zip(call.results, returned.operands, strict=True):
                result.replace_all_uses_with(value)
            call.erase()

    with module.context:
        inline_into(functions["main"])
    for name in inlined:
        functions[name].operation.erase()


def rewrite_broadcast(op: Any) -> Any:
    """Replaces a `stablehlo.broadcast_in_dim` by the operations that it is in HLO; returns the reshape if it is one."""
    original, result = op.operands[0], op.result
    out, type_of_original = result.type.shape, original.type
    if not type_of_original.rank and math.prod(out) != 1:
        return None  # most are of scalars
    value, shape = original, type_of_original.shape
    dims = [*ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"])] if shape else []
    order = sorted(range(len(dims)), key=dims.__getitem__)
    kept = [k for k in order if shape[k] == out[dims[k]]]
    adds_ones = math.prod(shape) == math.prod(out) > 0
    if kept == [*range(len(dims))] and not adds_ones:
        return None
    with ir.InsertionPoint(op), op.location:
        if order != sorted(order):
            value = stablehlo.TransposeOp(value, order).result
        if not adds_ones:
            dims.sort()
            before = [*{**dict(enumerate(out)), **dict(zip(dims, value.type.shape, strict=True))}.values()]
            if before != out:
                # All dimensions are there first, by a copy if they were: each user reshards its own.
                value = stablehlo.BroadcastInDimOp(_like(value, before), value, dims).result
                dims = [k for k, n in enumerate(before) if n == out[k]]
                value = _reshaped(value, [out[k] for k in dims])
            op.operands[0] = value
            op.attributes["broadcast_dimensions"] = ir.DenseI64ArrayAttr.get(dims)
            return None
        value = _reshaped(value, out)
    result.replace_all_uses_with(value)
    op.erase()
    return value.owner if value != original and value.owner.name == "stablehlo.reshape" else None


def _like(value: Any, shape: list[int]) -> ir.RankedTensorType:
    return ir.RankedTensorType.get(shape, value.type.element_type)


def _reshaped(value: Any, shape: list[int]) -> Any:
    if value.type.shape == shape:
        return value
    return stablehlo.ReshapeOp(_like(value, shape), value).result


def _capture_invariants(loop: Any) -> tuple[Any, list[Any]]:
    """A loop whose body captures what it is passed and passes on unchanged; and the captured values."""
    cond, body = (region.blocks[0] for region in loop.regions)
    end = body.operations[len(body.operations) - 1]
    operands = [*loop.operands]
    carried, invariant = [], []
    for k, (value, after) in enumerate(zip(operands, [*end.operands], strict=True)):
        (invariant if after in (value, body.arguments[k]) else carried).append(k)
    if not invariant:
        return loop, []
    for k in invariant:
        for passed in (cond.arguments[k], body.arguments[k], loop.results[k]):
            passed.replace_all_uses_with(operands[k])
    returned = [*end.operands]  # what is carried may be what was passed on
    with ir.InsertionPoint(end), end.location:
        stablehlo.ReturnOp([returned[k] for k in carried])
    end.operation.erase()
    for block in (cond, body):
        for k in reversed(invariant):
            block.erase_argument(k)
    with ir.InsertionPoint(loop), loop.location:
        types = [operands[k].type for k in carried]
        new = stablehlo.WhileOp(types, [operands[k] for k in carried]).operation
    for k, result in zip(carried, new.results, strict=True):
        loop.results[k].replace_all_uses_with(result)
    for region, block in zip(new.regions, (cond, body), strict=True):
        block.append_to(region)
    loop.erase()
    return new, [operands[k] for k in invariant]


def _add_candidate(value: Any, loop: Any) -> None:
    """Adds what becomes a constraint of a captured value if that has a sharding."""
    if not isinstance(value.type, ir.RankedTensorType) or not value.type.rank:
        return
    inside = [use for use in value.uses if _is_in(use.owner, loop)]
    with ir.InsertionPoint(loop), loop.location:
        candidate = sdy.ShardingConstraintOp(value, _fully_open("mesh", value.type.rank))
        candidate.operation.attributes[_CAPTURED] = ir.UnitAttr.get()
    for use in inside:
        use.owner.operands[use.operand_number] = candidate.result


def _fully_open(mesh: str, ndim: int) -> sdy.TensorShardingAttr:
    dims = [sdy.DimensionShardingAttr.get([], is_closed=False) for _ in range(ndim)]
    return sdy.TensorShardingAttr.get(mesh, dims)


def _is_in(op: Any, loop: Any) -> bool:
    parent = op.operation.parent
    while parent is not None and parent.operation != loop:
        parent = parent.operation.parent
    return parent is not None
