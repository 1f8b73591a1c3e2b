"""What one device has and all need: the results of callbacks.

From jax 0.11 on Shardy itself reshards them; before, XLA does so without a word in the module.
"""

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from partjit.inspect.walk import Walk

__all__ = ["reshard_results"]


def reshard_results(walk: Walk) -> None:
    """Adds the reshards of callbacks' results where something uses these as they are."""
    for op in walk.named("stablehlo.custom_call"):
        if "sdy.sharding" not in op.attributes or "@maximal_mesh" not in str(op.attributes["sdy.sharding"]):
            continue
        for result in op.results:
            uses = [(use.owner.operation, use.operand_number) for use in result.uses]
            direct = [(owner, number) for owner, number in uses if owner.name != "sdy.reshard"]
            if not direct:
                continue
            dims = ", ".join(["{}"] * len(result.type.shape))
            with op.context, op.location, ir.InsertionPoint.after(op):
                everywhere = ir.Attribute.parse(f"#sdy.sharding<@mesh, [{dims}]>")
                resharded = sdy.ReshardOp(result, everywhere).result
            for owner, number in direct:
                owner.operands[number] = resharded
