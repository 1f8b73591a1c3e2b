"""Which operations of a lowered program do more than compute their results: XLA keeps those if nobody uses these."""

from collections.abc import Collection, Iterable

from jax.extend.mlir import ir

from partjit.shardy import nested

__all__ = ["erase_unused", "has_effect"]

_CALL = "stablehlo.custom_call"
_EFFECTS = frozenset(f"stablehlo.{name}" for name in ("infeed", "outfeed", "send", "recv", "rng"))


def has_effect(op: ir.Operation | ir.OpView) -> bool:
    """Whether an operation, what is in it aside, does more than compute its results.

    Source: `HloInstruction::HasSideEffectNoRecurse` of XLA.
    """
    if op.name != _CALL:
        return op.name in _EFFECTS
    flag = op.attributes.get("has_side_effect")
    return flag is not None and ir.BoolAttr(flag).value


def erase_unused(ops: Iterable[ir.Operation], among: Collection[ir.Operation]) -> list[ir.Operation]:
    """Erases those of some operations whose results nothing uses, and what was computed for them alone.

    What has an effect stays, and so do calls of functions, which may have one.

    Returns:
        Those of `among` that are left.
    """
    found: list[ir.Operation] = []  # each after its users
    gone: set[ir.Operation] = set()
    candidates = [*ops]
    while candidates:
        op = candidates.pop()
        if op in gone or not len(op.results) or any(_is_used(value, gone) for value in op.results):
            continue
        both = (op, *(nested(op) if len(op.regions) else ()))
        if any(one.name == "func.call" or has_effect(one) for one in both):
            continue
        found.append(op)
        gone.update(both)
        owners = (value.owner for one in both for value in one.operands)
        candidates += [owner.operation for owner in owners if not isinstance(owner, ir.Block)]
    left = [op for op in among if op not in gone]
    for op in found:  # at last: what refers to an operation that is erased cannot be used any more
        op.erase()
    return left


def _is_used(value: ir.Value, gone: Collection[ir.Operation]) -> bool:
    return any(use.owner.operation not in gone for use in value.uses)
