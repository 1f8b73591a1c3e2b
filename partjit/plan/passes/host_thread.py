"""Programs with small executables on a single CPU: what the host's own thread does at once.

It runs the executables, if it waits for one after another anyway: to hand each to a thread of XLA and to wait for it
takes longer than to run a small one. And it makes calls that are brief.
"""

from collections.abc import Iterator, Sequence

from partjit.plan.ir.nodes import Branch, ColocatedCall, Fragment, Loop, Node, Value
from partjit.plan.ir.walk import walk
from partjit.plan.passes import cost

__all__ = ["is_for_host_thread", "makes_brief_calls"]


def is_for_host_thread(nodes: Sequence[Node]) -> bool:
    """Whether the host waits for fragments that threads of XLA would run, and that take less than to hand them over.

    What an executable calls as it runs, a thread of XLA calls anyway.
    """
    inside = [*walk(nodes)]
    fragments = [node for node in inside if isinstance(node, Fragment) and not node.by_one_device]
    costs = [fragment.cost for fragment in fragments]
    if any(fragment.nodes for fragment in fragments) or all(map(cost.is_run_at_once, costs)):
        return False
    made: set[Value] = {value for fragment in fragments for value in fragment.outputs}
    made.update(value for node in inside if isinstance(node, Loop | Branch) for value in node.outputs)
    loops = [node for node in inside if isinstance(node, Loop)]
    if not made.isdisjoint(value for loop in loops for value in _awaited([*walk(loop.block.nodes), loop])):
        return sum(costs) < cost.FOR_HOST_THREAD_IN_LOOPS
    return sum(costs) < cost.FOR_HOST_THREAD and not made.isdisjoint(_awaited(inside))


def makes_brief_calls(nodes: Sequence[Node]) -> bool:
    """Whether brief calls had better be made at once, though their results are not needed yet.

    So it is where the fragments take less than to come back to a call: to submit it, and to have it run by who waits.
    """
    if any(isinstance(node, Loop | Branch) for node in nodes):
        return False
    return sum(node.cost for node in nodes if isinstance(node, Fragment)) < cost.FOR_HOST_THREAD


def _awaited(nodes: Sequence[Node]) -> Iterator[Value]:
    """What the host needs to make its calls, and to know where to go on."""
    for node in nodes:
        if isinstance(node, ColocatedCall) and (node.is_inline or node.is_before_inline):
            yield from node.inputs
        elif isinstance(node, Branch):
            yield node.inputs[0]
        elif isinstance(node, Loop) and node.trip_count is None:
            yield from (node.outputs[0], node.block.outputs[0])
