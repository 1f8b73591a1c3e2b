"""What a plan over several processes has to have in common in all of them."""

import contextlib
import os
from collections.abc import Iterator, Sequence

import jax

from partjit.colocated.agreement.program import Agreement, agreement_of
from partjit.plan.ir.nodes import ColocatedCall, Fragment, Loop, Node, Value, blocks_of, walk
from partjit.plan.plan import Plan

__all__ = ["agreement_for", "failing_everywhere"]


def agreement_for(plan: Plan) -> Agreement | None:
    """What the executions of a plan agree on with other processes; None if all of its devices are of this one."""

    def agreement() -> Agreement | None:
        devices = () if plan.mesh.empty else plan.mesh.devices.flat
        return agreement_of(devices, plan.name, lambda: "\n".join(_lines(plan)), _last_node(plan))

    return plan.made.get("agreement", agreement)


def _last_node(plan: Plan) -> str | None:
    """The fragment with which the plan ends; None if something else may fail after it, or a call that goes on."""
    calls = (node for node in walk(plan.nodes) if isinstance(node, ColocatedCall))
    may_fail_later = any(call.outputs and not call.is_inline for call in calls)
    last = plan.nodes[-1] if plan.nodes else None
    return last.name if isinstance(last, Fragment) and not may_fail_later else None


@contextlib.contextmanager
def failing_everywhere(plan: Plan) -> Iterator[None]:
    """In which what is raised here, before the plan runs, ends it in all of its processes."""
    try:
        yield
    except BaseException as error:
        if (agreement := agreement_for(plan)) is not None:
            agreement.fail(error)
        raise


def _lines(plan: Plan) -> Iterator[str]:
    """The plan node after node, and what else decides how it is compiled."""
    yield f"jax {jax.__version__}"
    for option in ("jax_enable_x64", "jax_default_matmul_precision"):
        yield f"{option} = {getattr(jax.config, option)}"
    yield f"mesh {dict(plan.mesh.shape)} of devices {[device.id for device in plan.mesh.devices.flat]}"
    yield f"{plan.name}({_listed(plan.inputs)}) -> {_listed(plan.outputs)}"
    yield from _of_nodes(plan.nodes, "  ")


def _of_nodes(nodes: Sequence[Node], indent: str) -> Iterator[str]:
    for node in nodes:
        line = f"{indent}{node.name}({_listed(node.inputs)}) -> {_listed(node.outputs)}"
        if isinstance(node, ColocatedCall):
            file, number, _ = node.site
            yield f"{line} at {os.path.basename(file)}:{number}, {node.where}"
        elif isinstance(node, Fragment):
            yield line
            yield from (f"{indent}  {text}" for text in str(node.jaxpr).splitlines())
        else:
            yield line + (f" {node.trip_count} times" if isinstance(node, Loop) else "")
        for block in blocks_of(node):
            yield from _of_nodes(block.nodes, indent + "  ")


def _listed(values: Sequence[Value]) -> str:
    return ", ".join(f"{value.name}: {value}" for value in values)
