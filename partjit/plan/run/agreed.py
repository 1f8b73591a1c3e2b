"""What a plan over several processes has to have in common in all of them."""

import collections
import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.typing import ArrayLike

from partjit._jax.arrays import data_of
from partjit._jax.processes import own_process
from partjit._jax.sources import at_site
from partjit._jax.types import Device
from partjit.colocated.agreement.program import Agreement, Decider
from partjit.colocated.agreement.setup import agreement_of
from partjit.plan.ir.nodes import Branch, ColocatedCall, Fragment, Loop, Node, Transfer, Value
from partjit.plan.ir.walk import blocks_of, walk
from partjit.plan.plan import Plan

__all__ = ["agreement_for", "failing_everywhere", "moving_with_all"]

_RESHARDING = "resharding"
_COMPARED_BYTES = 4096

_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
    "jax_debug_nans",
    "jax_debug_infs",
)
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_FLAGS_OF_ONE_PROCESS = ("--xla_dump", "--xla_force_host_platform_device_count")


def agreement_for(plan: Plan) -> Agreement | None:
    """What the executions of a plan agree on with other processes; None if all of its devices are of this one."""

    def agreement() -> Agreement | None:
        devices = () if plan.mesh.empty else plan.mesh.devices.flat
        text, deciders = lambda: "\n".join(_lines(plan)), lambda: dict(_deciders(plan))
        if not plan.agree:
            return agreement_of(devices, plan.name, text, is_on_plan_alone=True)
        return agreement_of(devices, plan.name, text, _last_node(plan), deciders)

    return plan.made.get("agreement", agreement)


def _last_node(plan: Plan) -> str | None:
    """The fragment with which the plan ends; None if something else may fail after it, or a call that goes on."""
    calls = (node for node in walk(plan.nodes) if isinstance(node, ColocatedCall))
    may_fail_later = any(call.outputs and not call.is_inline for call in calls)
    last = plan.nodes[-1] if plan.nodes else None
    return last.name if isinstance(last, Fragment) and not may_fail_later else None


def _deciders(plan: Plan) -> Iterator[tuple[str, Decider]]:
    """The predicates and indices that each process reads, and the small values that fragments get from calls.

    What the devices compute is the same in all processes if what they get is, in this program or the next one. Of the
    results of calls those that are small are compared, as far as several processes have the same parts: a loop inside
    of a fragment may go by them.
    """
    group = {device.process_index for device in plan.mesh.devices.flat}
    made_by = {value: node for node in walk(plan.nodes) for value in node.outputs}
    used = {*plan.outputs, *_used_for_devices(plan)}
    for node in walk(plan.nodes):
        if isinstance(node, ColocatedCall):
            for k, value in enumerate(node.outputs):
                parts = _shared_parts(value, group) if value in used else {}
                if parts:
                    which = f"result {k}" if len(node.outputs) > 1 else "the result"
                    made_at = "{}:{} in {}".format(*node.site)
                    what = f"{which} of the colocated call of {node.callee.name!r} made at {made_at}"
                    yield value.name, Decider(what, shared=None if [*parts] == [""] else _own_parts(parts))
        elif isinstance(node, Branch):
            is_by_devices = isinstance(made_by.get(node.inputs[0]), Fragment)
            what = f"the index of the {node.eqn.primitive.name}{at_site(node.eqn.source_info)}"
            yield node.name, Decider(what, not is_by_devices and not _begins_with_fragments(node))
        elif isinstance(node, Loop) and node.trip_count is None:
            values = (node.initial[0], node.block.outputs[0])
            is_by_devices = all(isinstance(made_by.get(value), Fragment) for value in values)
            has_fragment = any(isinstance(inner, Fragment) for inner in node.block.nodes)
            what = f"the predicate of the {node.eqn.primitive.name}{at_site(node.eqn.source_info)}"
            at_once = not has_fragment or (not is_by_devices and not _begins_with_fragments(node))
            yield node.name, Decider(what, at_once)


def _begins_with_fragments(node: Loop | Branch) -> bool:
    return all(block.nodes and isinstance(block.nodes[0], Fragment) for block in blocks_of(node))


def _used_for_devices(plan: Plan) -> Iterator[Value]:
    """What fragments read, or may read as what a loop or branch is given and gives, besides what it goes by."""
    for node in walk(plan.nodes):
        goes_by = int(isinstance(node, Loop) and node.trip_count is None)
        if isinstance(node, Fragment | Transfer):
            yield from node.inputs
        elif isinstance(node, Loop):
            yield from (*node.captured, *node.initial[goes_by:])
        elif isinstance(node, Branch):
            yield from node.captured
        for block in blocks_of(node):
            yield from block.outputs[goes_by:]


def _shared_parts(value: Value, group: set[int]) -> Mapping[str, Sequence[Device]]:
    """The devices of each part that several processes have; of "" for all of a value.

    There are none if it is not of all processes, or too large to be compared in less time than the vote takes that this
    goes with.
    """
    sharding = value.sharding
    if sharding is None or not 0 < value.nbytes <= _COMPARED_BYTES:
        return {}
    if {device.process_index for device in sharding.device_set} != group:
        return {}
    parts = collections.defaultdict[str, list[Device]](list)
    for device, index in sharding.devices_indices_map(value.aval.shape).items():
        parts[_index_text(index, value.aval.shape)].append(device)
    return {which: having for which, having in parts.items() if len({device.process_index for device in having}) > 1}


def _index_text(index: tuple[slice, ...] | None, shape: Sequence[int]) -> str:
    """Which part of an array an index is, as "0:4, :"; empty if it is all of it."""
    spans = [span.indices(size)[:2] for span, size in zip(index or (), shape, strict=True)]
    texts = [":" if span == (0, size) else f"{span[0]}:{span[1]}" for span, size in zip(spans, shape, strict=True)]
    return ", ".join(texts) if {*texts} != {":"} else ""


def _own_parts(parts: Mapping[str, Sequence[Device]]) -> Sequence[tuple[Device, str]]:
    """The parts that this process has, each with a device that has it."""
    here = own_process()
    own = {which: [d for d in having if d.process_index == here] for which, having in parts.items()}
    return [(devices[0], which) for which, devices in own.items() if devices]


def moving_with_all(plan: Plan, moves: Sequence[str]) -> Callable[[Callable[[], Any]], Any] | None:
    """What reshards arguments in all processes of a plan, or in none; None if each may do so for itself.

    Resharding is a program over the devices of all: in one of them alone it would wait for the others for ever, or meet
    the collective of another program.

    Args:
        plan: the plan.
        moves: what is resharded, in words that are the same in all processes.
    """
    if not plan.agree or not moves:
        return None
    text = "\n".join([f"the arguments of {plan.name} that are resharded", *moves])
    devices = () if plan.mesh.empty else plan.mesh.devices.flat
    key = "agreement on resharding", text
    agreement = plan.made.get(key, lambda: agreement_of(devices, plan.name, lambda: text, _RESHARDING))
    return None if agreement is None else functools.partial(agreement.before, _RESHARDING)


@contextlib.contextmanager
def failing_everywhere(plan: Plan) -> Iterator[None]:
    """In which what is raised here, before the plan runs, ends it in all of its processes."""
    agreement = agreement_for(plan)
    begun = 0 if agreement is None else agreement.begun
    try:
        yield
    except BaseException as error:
        if agreement is not None:
            agreement.fail(error, begun)
        raise


def _lines(plan: Plan) -> Iterator[str]:
    """The plan node after node, and what else decides how it is compiled."""
    yield f"jax {jax.__version__}"
    yield from (f"{option} = {getattr(jax.config, option)}" for option in _OPTIONS)
    yield from (f"{name} = {' '.join(_flags_of(os.environ.get(name, '')))}" for name in _FLAGS)
    yield f"agree = {plan.agree}"
    yield f"mesh {dict(plan.mesh.shape)} of devices {[device.id for device in plan.mesh.devices.flat]}"
    donated = [value.name for value in plan.inputs if value in plan.released]
    yield f"{plan.name}({_listed(plan.inputs)}) -> {_listed(plan.outputs)}{_donating(donated)}"
    yield from (f"  {value.name} = {_digest(constant)}" for value, constant in plan.constants)
    yield from _of_nodes(plan.nodes, "  ")


def _of_nodes(nodes: Sequence[Node], indent: str) -> Iterator[str]:
    for node in nodes:
        line = f"{indent}{node.name}({_listed(node.inputs)}) -> {_listed(node.outputs)}"
        if isinstance(node, ColocatedCall):
            file, number, _ = node.site
            yield f"{line} at {os.path.basename(file)}:{number}, {node.where}"
        elif isinstance(node, Fragment):
            yield line + _donating([v.name for v, given in zip(node.inputs, node.donated, strict=True) if given])
            yield from (f"{indent}  {text}" for text in str(node.jaxpr).splitlines())
            yield from (f"{indent}  constant {_digest(constant)}" for constant in _constants(node.jaxpr))
        else:
            yield line + (f" {node.trip_count} times" if isinstance(node, Loop) else "")
        for block in blocks_of(node):
            yield from _of_nodes(block.nodes, indent + "  ")


def _constants(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[ArrayLike]:
    """The constants of a jaxpr, and of the nested programs in it, whose text does not show them."""
    yield from getattr(jaxpr, "consts", ())
    for eqn in jaxpr.eqns:
        for param in eqn.params.values():
            for inner in param if isinstance(param, tuple) else (param,):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from _constants(inner)


def _flags_of(text: str) -> list[str]:
    """The flags of XLA that decide what is compiled."""
    return sorted(flag for flag in text.split() if not flag.startswith(_FLAGS_OF_ONE_PROCESS))


def _donating(names: Sequence[str]) -> str:
    return f", reuses the memory of {', '.join(names)}" if names else ""


def _digest(constant: ArrayLike) -> str:
    """An array in a line; of one of which parts are in other processes only the type, as no process has all of it."""
    aval = cast(ShapedArray, jax.typeof(constant))
    if isinstance(constant, jax.Array):
        if not (constant.is_fully_addressable or constant.is_fully_replicated):
            return aval.str_short()
        constant = data_of(constant)
    return f"{aval.str_short()} {hashlib.sha256(np.asarray(constant).tobytes()).hexdigest()[:16]}"


def _listed(values: Sequence[Value]) -> str:
    return ", ".join(f"{value.name}: {value}" for value in values)
