"""What one device gets of all, and all need of it: the arguments and the results of callbacks.

From jax 0.11 on Shardy itself reshards them; before, XLA does so without a word in the module.
"""

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from partjit.inspect.walk import Walk

__all__ = ["reshard_callbacks"]


def reshard_callbacks(walk: Walk) -> None:
    """Adds the reshards of callbacks' arguments, and of their results where something uses these as they are."""
    for op in walk.named("stablehlo.custom_call"):
        if "sdy.sharding" not in op.attributes or "@maximal_mesh" not in str(op.attributes["sdy.sharding"]):
            continue
        for number, operand in enumerate(op.operands):
            if not _is_resharded(operand):
                with op.context, op.location, ir.InsertionPoint(op):
                    op.operands[number] = sdy.ReshardOp(operand, _everywhere(operand)).result
        for result in op.results:
            uses = [(use.owner.operation, use.operand_number) for use in result.uses]
            direct = [(owner, number) for owner, number in uses if owner.name != "sdy.reshard"]
            if not direct:
                continue
            with op.context, op.location, ir.InsertionPoint.after(op):
                resharded = sdy.ReshardOp(result, _everywhere(result)).result
            for owner, number in direct:
                owner.operands[number] = resharded


def _is_resharded(value: ir.Value) -> bool:
    return isinstance(value.owner, ir.Operation | ir.OpView) and value.owner.operation.name == "sdy.reshard"


def _everywhere(value: ir.Value) -> ir.Attribute:
    """The sharding of a value that all devices have."""
    dims = ", ".join(["{}"] * len(value.type.shape))
    return ir.Attribute.parse(f"#sdy.sharding<@mesh, [{dims}]>")
