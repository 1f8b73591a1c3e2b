"""The order in which XLA sees the operations of a program when it propagates shardings.

HLO has no order but that of dependences. XLA lists the operations of a computation from its results: what they are
computed from comes first, depth first, the first operand of each operation before the second. So the gradient of the
last layer's parameters, say, may come after that of all activations, wherever it was traced. What nobody uses comes
before the results, also if it is one of several results of an operation. Where two shardings conflict, Shardy lets the
one win that it meets first.

Source: `HloComputation::MakeInstructionPostOrder` and `hlo_function_importer.cc` of XLA.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from jax.extend.mlir import ir

from partjit.shardy import nested

__all__ = ["WITH_BODIES", "order_operations"]


WITH_BODIES = ("func.func", "stablehlo.while", "stablehlo.case", "stablehlo.if", "sdy.manual_computation")
"""The operations whose bodies are computations in HLO, in which the order counts."""


def order_operations(ops: Iterable[ir.Operation], is_ignored: Callable[[ir.Operation], bool]) -> list[ir.Operation]:
    """Brings the operations in the bodies of these into the order in which XLA lists them.

    Args:
        ops: operations with bodies.
        is_ignored: whether an operation without results is not in the program that XLA gets. These are last.

    Returns:
        The operations that compute something for nothing, or for what is ignored.
    """
    return [unused for op in ops for body in _bodies(op) for unused in _order(body, is_ignored)]


def _bodies(op: ir.Operation) -> Iterator[list[ir.Operation]]:
    """The operations of each block of an operation."""
    blocks = [block for region in op.regions for block in region.blocks]
    if len(blocks) != 1:
        yield from ([inner.operation for inner in block.operations] for block in blocks)
        return
    found: list[ir.Operation] = []
    append, advance, skip = found.append, ir.WalkResult.ADVANCE, ir.WalkResult.SKIP

    def visit(inner: ir.Operation) -> ir.WalkResult:
        append(inner)
        return skip if len(found) > 1 else advance

    op.walk(visit, ir.WalkOrder.PRE_ORDER)  # a walk over a block in Python takes twice as long
    yield found[1:]


def _order(ops: list[ir.Operation], is_ignored: Callable[[ir.Operation], bool]) -> list[ir.Operation]:
    results, end = [(op.result,) if len(op.results) == 1 else (*op.results,) for op in ops], len(ops) - 1
    without_results = [k for k, values in enumerate(results) if not values and k != end]
    late = {k for k in without_results if is_ignored(ops[k])}
    first = [k for k in without_results if k not in late]
    used = [_used(op) if op.name in WITH_BODIES else [*op.operands] for op in ops]
    for k in late:
        used[k] = []
    makers: dict[ir.Value, int] = {value: k for k, values in enumerate(results) for value in values}
    maker = makers.get
    operands = [[k for value in values if (k := maker(value)) is not None] for values in used]
    found = _post_order(operands, [*first, end], late)
    elements = {k: _elements(ops[k], results[k]) for k in found if len(results[k]) > 1}
    if elements:
        listed = {value for k in {*found, end} for value in used[k]}
        partly = [k for k, values in elements.items() if any(value not in listed for value in values)]
        if partly:
            found = _post_order(operands, [*sorted({*first, *partly}), end], late)
    unused = _post_order(operands, range(end), {*late, *found})
    found += unused
    found = [k for k in (*found, *sorted(late)) if k != end]
    if found != [*range(end)]:
        for k in found:
            ops[k].move_before(ops[end])
    return [ops[k] for k in unused]


def _elements(op: ir.Operation, results: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """The results of an operation that are elements of a tuple in HLO: what gets one that is not used is listed first.

    What a loop does not change is none: XLA takes it from outside.
    """
    if op.name != "stablehlo.while":
        return results
    body = op.regions[1].blocks[0]
    returned = body.operations[len(body.operations) - 1].operands
    changed = [value for value, new, old in zip(results, returned, body.arguments, strict=True) if ir.Value(new) != old]
    return changed if len(changed) > 1 else []


def _used(op: ir.Operation) -> list[ir.Value]:
    """What an operation uses, in its bodies as well."""
    values = [*op.operands]
    for inner in nested(op, ir.WalkOrder.PRE_ORDER):
        values += inner.operands
    return values


def _post_order(operands: Sequence[Sequence[int]], roots: Iterable[int], known: Iterable[int]) -> list[int]:
    """What is needed for the roots, and they themselves, in order, without what is known."""
    found, seen, done = list[int](), {*known}, {*known}
    for root in roots:
        stack = [root]
        while stack:
            place = stack[-1]
            if place not in seen:
                seen.add(place)
                stack += [k for k in reversed(operands[place]) if k not in seen]
                continue
            stack.pop()
            if place not in done:
                done.add(place)
                found.append(place)
    return found
