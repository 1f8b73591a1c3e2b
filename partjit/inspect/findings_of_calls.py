"""Findings about colocated calls: those that cost more than they need, and what to write instead."""

from collections.abc import Iterator, Sequence

from jax.sharding import NamedSharding

from partjit.colocated.devices import platforms_of
from partjit.colocated.ir.emission import ANSWERED
from partjit.colocated.ir.primitive import colocated_call_p
from partjit.inspect.findings import Finding
from partjit.plan.ir.nodes import ColocatedCall, Fragment, Loop, Node, Value
from partjit.plan.ir.walk import blocks_of, walk
from partjit.plan.plan import Plan

__all__ = ["findings_of_calls"]

_Call = ColocatedCall[Value, Value]


def findings_of_calls(plan: Plan) -> tuple[Finding, ...]:
    """The findings about the calls of a plan, in its order."""
    return tuple(_in_block(plan.nodes, plan.outputs, None))


def _in_block(nodes: Sequence[Node], outputs: Sequence[Value], loop: Loop[Value, Value] | None) -> Iterator[Finding]:
    read = {*outputs, *(value for node in nodes for value in node.inputs)}
    on_devices = {value for node in nodes if isinstance(node, Fragment) for value in node.inputs}
    captured = set() if loop is None else {*loop.block.inputs[: len(loop.captured)]}
    for node in nodes:
        if isinstance(node, Fragment):
            yield from (_unused(call) for call in node.calls if call.outputs and not call.is_answered)
            yield from (_left_to_others(call) for call in node.calls if loop is not None and _is_for_others(call, loop))
        if isinstance(node, ColocatedCall):
            if loop is not None and node.callee.is_pure and captured.issuperset(node.inputs):
                yield _invariant(node, loop)
            if loop is not None and _makes_one_call(loop):
                yield _one_by_one(node, loop)
            elif node.outputs and read.isdisjoint(node.outputs):
                yield _unused(node)
            elif _could_run_ahead(node) and not on_devices.isdisjoint(node.outputs):
                yield _waited_for(node)
            elif loop is not None and node.is_inline and _may_not_use_jax(node):
                yield _taking_turns(node, loop)
            elif loop is not None and node.is_inline and _is_for_others(node, loop):
                yield _left_to_others(node)
            elif loop is not None and not node.outputs and _is_beside_answers(node, loop):
                yield _shared_stream(node, loop)
        for block in blocks_of(node):
            yield from _in_block(block.nodes, block.outputs, node if isinstance(node, Loop) else None)


def _invariant(call: _Call, loop: Loop[Value, Value]) -> Finding:
    return _finding(
        "invariant call",
        call,
        f"{call.callee.name} is pure and called in every iteration{_times(loop)} with the same arguments",
        "call it before the loop",
    )


def _unused(call: _Call) -> Finding:
    return _finding(
        "unused result",
        call,
        f"{call.callee.name} returns what nothing uses, which is put to the devices nevertheless",
        "let it return None, with out_specs_fn=lambda *args: None, or say pure=True if it is to be left out",
    )


def _could_run_ahead(call: _Call) -> bool:
    options = call.callee.options
    return not call.inputs and not options.run_ahead and options.mode != "inline" and call.callee.shards is None


def _waited_for(call: _Call) -> Finding:
    return _finding(
        "waited for",
        call,
        f"the devices wait for {call.callee.name}, which has no arguments and could be called earlier",
        "let it run ahead: specialize(run_ahead=2)",
    )


def _may_not_use_jax(call: _Call) -> bool:
    options = call.callee.options
    on_cpus = all(platforms_of(v.sharding) <= ANSWERED for v in call.outputs if v.sharding)
    return on_cpus and options.arrays == "numpy" and options.uses_jax is None and options.isolate is None


def _taking_turns(call: _Call, loop: Loop[Value, Value]) -> Finding:
    return _finding(
        "taking turns",
        call,
        f"the host calls {call.callee.name} in every iteration{_times(loop)}, and the devices wait meanwhile",
        "say uses_jax=False if it neither runs jax nor waits for arrays: then the loop is one executable",
    )


def _is_for_others(call: _Call, loop: Loop[Value, Value]) -> bool:
    """Whether the host drives a loop of several devices without an end of its own for other methods of its objects."""
    on_one = all(not isinstance(v.sharding, NamedSharding) or v.sharding.mesh.size == 1 for v in loop.outputs)
    if on_one or loop.trip_count is not None or call.callee.options.uses_jax is not False:
        return False
    objects = {other.callee.definition.function.lane for other in _calls_in(loop)} - {None}
    return len(objects) > 1 and call.callee.definition.function.others_use_jax


def _calls_in(loop: Loop[Value, Value]) -> list[_Call]:
    calls = [node for node in walk([loop]) if isinstance(node, ColocatedCall)]
    return [*calls, *(inner for node in walk([loop]) if isinstance(node, Fragment) for inner in node.calls)]


def _left_to_others(call: _Call) -> Finding:
    return _finding(
        "taking turns",
        call,
        f"the host calls {call.callee.name} in every iteration, and the devices wait meanwhile: other methods of the "
        "objects may use jax, and one of them may be what ends the loop",
        "say uses_jax=False of their classes: then the loop is one executable",
    )


def _is_beside_answers(call: _Call, loop: Loop[Value, Value]) -> bool:
    """Whether a call that may use jax is on the stream of one for which the executable of a loop could wait."""
    on_stream = [other for other in _calls_in(loop) if other.stream is call.stream]
    answered = [other for other in on_stream if other.callee.options.uses_jax is False]
    results = [value for other in answered for value in other.outputs]
    on_cpus = all(platforms_of(value.sharding) <= ANSWERED for value in results if value.sharding)
    return bool(results) and on_cpus and call not in answered


def _shared_stream(call: _Call, loop: Loop[Value, Value]) -> Finding:
    return _finding(
        "shared stream",
        call,
        f"the host makes {call.callee.name} and a call on its stream, for which the devices could wait{_times(loop)}",
        "put it on a stream of its own, stream='log', or say uses_jax=False of it: then the loop is one executable",
    )


def _makes_one_call(loop: Loop[Value, Value]) -> bool:
    """Whether a loop does nothing but make a call with one slice after the other."""
    body = loop.eqn.params.get("jaxpr")
    eqns = [] if body is None else body.jaxpr.eqns
    return loop.eqn.primitive.name == "scan" and len(eqns) == 1 and eqns[0].primitive is colocated_call_p


def _one_by_one(call: _Call, loop: Loop[Value, Value]) -> Finding:
    return _finding(
        "one by one",
        call,
        f"{call.callee.name} is called for one slice after the other{_times(loop)}, and the loop does nothing else",
        "call it once with all slices: vmap_method='expand_dims' under jax.vmap, or without the loop",
    )


def _times(loop: Loop[Value, Value]) -> str:
    return "" if loop.trip_count is None else f" ({loop.trip_count:,} times)"


def _finding(kind: str, call: _Call, text: str, suggestion: str) -> Finding:
    nbytes = sum(value.nbytes for value in (*call.inputs, *call.outputs))
    return Finding(kind, nbytes, text, suggestion, call.site)
