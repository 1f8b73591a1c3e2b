"""Programs whose executables the host's own thread runs, on a single CPU: it waits for one after another anyway.

To hand each to a thread of XLA and to wait for it takes longer than to run a small one.
"""

from collections.abc import Sequence

from partjit.plan.ir.nodes import Branch, ColocatedCall, Fragment, Loop, Node, Value, walk
from partjit.plan.passes import cost

__all__ = ["is_small", "waits_for_threads"]


def is_small(nodes: Sequence[Node]) -> bool:
    """Whether executing each fragment once takes so few operations that they need not run beside the host."""
    return cost.is_for_host_thread(sum(node.cost for node in walk(nodes) if isinstance(node, Fragment)))


def waits_for_threads(nodes: Sequence[Node]) -> bool:
    """Whether the host waits for fragments that threads would run, to make a call or to know where to go on."""
    inside = [*walk(nodes)]
    fragments = [node for node in inside if isinstance(node, Fragment) and not node.by_one_device]
    if all(cost.is_run_at_once(fragment.cost) for fragment in fragments):
        return False
    made: set[Value] = {value for fragment in fragments for value in fragment.outputs}
    made.update(value for node in inside if isinstance(node, Loop | Branch) for value in node.outputs)
    awaited: set[Value] = set()
    for node in inside:
        if isinstance(node, ColocatedCall) and (node.is_inline or node.is_before_inline):
            awaited.update(node.inputs)
        elif isinstance(node, Branch):
            awaited.add(node.inputs[0])
        elif isinstance(node, Loop) and node.trip_count is None:
            awaited.update((node.outputs[0], node.block.outputs[0]))
    return not made.isdisjoint(awaited)
