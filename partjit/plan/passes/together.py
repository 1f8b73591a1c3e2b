"""Which nodes that follow each other become one executable, as far as it makes calls."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple, TypeAlias

from jax.ref import AbstractRef

from partjit.colocated.runtime.streams import Stream
from partjit.plan.ir.nodes import Branch, ColocatedCall, Fragment, Loop, Node, Value
from partjit.plan.ir.walk import walk
from partjit.plan.passes.choose_emitted import (
    answered_streams,
    calls_made,
    can_be_kept,
    have_one_stream_per_object,
    is_little_to_copy,
)
from partjit.plan.passes.cost import amortizes_leaving, is_run_at_once

__all__ = ["Devices", "Kind", "is_chosen", "runs"]

Kind: TypeAlias = tuple[frozenset[Stream | None], Sequence[ColocatedCall[Value, Value]]]
"""The streams of the calls that an executable waits for, one at most, and all of its calls."""


class Devices(NamedTuple):
    """The devices of a program.

    Attributes:
        wait_in_vain: whether they would wait for calls before all of their work.
        are_cpus: whether all are CPUs.
        are_one_cpu: whether there is one only, a CPU.
        number: how many there are.
        reused: what a block is given whose memory they may reuse.
    """

    wait_in_vain: bool
    are_cpus: bool
    are_one_cpu: bool
    number: int
    reused: Set[Value]


def is_chosen(node: Node) -> bool:
    """Whether a node is to be a part of an executable."""
    return node.is_emitted if isinstance(node, ColocatedCall) else isinstance(node, Loop | Branch) and node.on_devices


def _kind(node: Node) -> Kind | None:
    """What calls there are in a node that is to be a part of an executable; None for a fragment."""
    calls = [inner for inner in walk([node]) if isinstance(inner, ColocatedCall)]
    streams = frozenset([node.stream]) if isinstance(node, ColocatedCall) else answered_streams(node)
    return (streams, calls) if calls else None


def _together(kind: Kind | None, other: Kind | None) -> Kind | None:
    """The kind of an executable with the calls of both; None if there is none."""
    if kind is None or other is None:
        return kind or other
    calls = [*kind[1], *other[1]]
    return (kind[0], calls) if kind[0] == other[0] and have_one_stream_per_object(calls) else None


def runs(nodes: Sequence[Node], devices: Devices) -> Iterator[tuple[Kind | None, Sequence[Node]]]:
    """Pieces of nodes, each with the kind of the executable that is made of it; None if none makes calls.

    Args:
        nodes: the nodes.
        devices: those of the program.
    """
    kind: Kind | None = None
    run: list[Node] = []
    for node in nodes:
        joins = is_chosen(node) or (isinstance(node, Fragment) and not _has_refs(node))
        own = _kind(node) if joins else None
        together = _together(kind, own)
        if run and (not joins or (together is None and own is not None)):
            yield from _settled(kind, run, devices)
            kind, run, together = None, [], own
        if joins:
            kind = together
            run.append(node)
        else:
            yield None, [node]
    if run:
        yield from _settled(kind, run, devices)


def _has_refs(fragment: Fragment[Value, Value]) -> bool:
    """Whether it is given refs: an executable consumes their memory, which would be lost if a call in it failed."""
    return any(isinstance(value.aval, AbstractRef) for value in fragment.inputs)


def _settled(kind: Kind | None, run: Sequence[Node], devices: Devices) -> Iterator[tuple[Kind | None, Sequence[Node]]]:
    """A piece of nodes that follow each other; single calls in it are the host's after all where that is cheaper.

    If the rest is expensive, the host does something else while the devices work, and they reuse the memory of large
    arrays. If it is so cheap that a CPU computes it in the host's own thread, that goes from one to the next in less
    time than an executable takes to call it. A call before all of the rest takes no dispatch of its own, and several
    devices would have to meet for it; on one CPU, an executable that makes calls keeps its caller waiting.
    """
    first = _calls_before_work(run) if devices.wait_in_vain else 0
    if first:
        yield None, [*map(_by_the_host, run[:first])]
        yield from runs(run[first:], devices)
        return
    if any(isinstance(node, ColocatedCall) for node in run):
        own = {value for node in run for value in node.outputs}
        given = {value for node in run for value in node.inputs} - own
        costs = [node.cost for node in run if isinstance(node, Fragment)]
        is_settled = amortizes_leaving(sum(costs)) or (devices.are_one_cpu and all(map(is_run_at_once, costs)))
        if is_settled or _copies_much(run, devices) or not can_be_kept(value.aval for value in given):
            yield from runs([_by_the_host(node) for node in run], devices)
            return
    if kind is not None and kind[0] and _copies_much(run, devices):
        for updates, nodes in itertools.groupby(run, lambda node: _updates(node, devices)):
            own = [*nodes]
            yield None if updates else functools.reduce(_together, map(_kind, own)), own
        return
    yield kind, run


def _copies_much(run: Sequence[Node], devices: Devices) -> bool:
    """Whether an executable that waits for calls would copy for longer than it saves what fragments update in place."""
    copied = {value for node in run if _updates(node, devices) for value in node.inputs} & devices.reused
    return not is_little_to_copy((value.aval for value in copied), sum(map(calls_made, run)) * devices.number)


def _updates(node: Node, devices: Devices) -> bool:
    return isinstance(node, Fragment) and not devices.reused.isdisjoint(node.inputs)


def _calls_before_work(run: Sequence[Node]) -> int:
    """How many calls come before anything else."""
    return next((i for i, node in enumerate(run) if not isinstance(node, ColocatedCall)), len(run))


def _by_the_host(node: Node) -> Node:
    return dataclasses.replace(node, is_emitted=False) if isinstance(node, ColocatedCall) else node
