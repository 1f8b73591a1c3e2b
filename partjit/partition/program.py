"""A program with colocated calls, from the arguments of a call to its results.

The plan is made and compiled once per jaxpr, shardings and mesh. A call like the last one is recognized at a glance.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from partjit import _compat
from partjit._compat import UnspecifiedValue
from partjit.colocated.pending import PendingArray
from partjit.colocated.streams import current_stream, entered_stream
from partjit.compile import own_sharding
from partjit.partition.assemble import make_plan
from partjit.partition.execute import LoweredFragment, Runnable, compile_fragment, link, lower_fragment
from partjit.partition.flatten import streams_of
from partjit.partition.nodes import ColocatedCall
from partjit.partition.plan import Plan
from partjit.partition.shardings import home_of
from partjit.placement import is_placed
from partjit.primitive import shardings_of

__all__ = ["Placing", "Recent", "lower_plan", "placing_of", "plan_of", "runnable_of"]


def plan_of(args: Sequence[Any], *, jaxpr: Any, in_specs: Any, out_specs: Any, mesh: Any, **params: Any) -> Plan:
    """The plan of a program for arguments placed as these are; the parameters are those of `pjit_p`."""
    in_shardings = tuple(
        own_sharding(arg) if isinstance(sharding, UnspecifiedValue) else sharding
        for arg, sharding in zip(args, shardings_of(in_specs, mesh), strict=True)
    )
    out_shardings = tuple(shardings_of(out_specs, mesh))
    caller = current_stream()
    caller = caller if caller in streams_of(jaxpr.jaxpr) else None
    return _plan(jaxpr, in_shardings, out_shardings, params["donated_invars"], mesh, params["name"], caller)


@_compat.weakref_cache
def _plan(
    jaxpr: Any, in_shardings: Any, out_shardings: Any, donated: tuple[bool, ...], mesh: Any, name: str, caller: Any
) -> Plan:
    info = jaxpr.jaxpr.debug_info
    return make_plan(
        jaxpr,
        in_shardings,
        out_shardings,
        donated,
        mesh,
        name,
        _paths(info.arg_names, len(in_shardings), "x"),
        _paths(info.result_paths, len(out_shardings), "result"),
        caller,
    )


def _paths(paths: Any, count: int, what: str) -> list[str]:
    known = [*paths] if isinstance(paths, tuple | list) and len(paths) == count else [""] * count
    return [path or f"{what}[{i}]" for i, path in enumerate(known)]


@_compat.weakref_cache
def lower_plan(plan: Plan, mesh: Any) -> list[LoweredFragment]:
    """The fragments of a plan, lowered."""
    return [lower_fragment(plan, fragment, mesh) for fragment in plan.fragments]


@_compat.weakref_cache
def _compile_plan(plan: Plan, mesh: Any) -> list[Any]:
    return [compile_fragment(lowered, mesh) for lowered in lower_plan(plan, mesh)]


@_compat.weakref_cache
def _link_plan(plan: Plan, mesh: Any, home: Any) -> Runnable:
    return link(plan, lower_plan(plan, mesh), _compile_plan(plan, mesh), home)


def runnable_of(plan: Plan, args: Sequence[Any], mesh: Any) -> Runnable:
    """The plan compiled, for arguments placed as these are."""
    return _link_plan(plan, mesh, _home(plan, args))


def _home(plan: Plan, args: Sequence[Any]) -> tuple[Any, bool]:
    """Where values lie of which the plan does not say it, and whether they are bound to that place."""
    if not plan.mesh.empty:
        return NamedSharding(plan.mesh, jax.sharding.PartitionSpec()), True
    return home_of([own_sharding(arg) for arg in args])


@dataclasses.dataclass(frozen=True)
class Placing:
    """What has to be done with the arguments of a call before its plan runs.

    Attributes:
        moves: the positions of those that are put in their place, and where that is.
        waits: the positions of those that are waited for if they are pending.
    """

    moves: tuple[tuple[int, Any], ...]
    waits: tuple[int, ...]

    def apply(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments, as the plan wants them."""
        if not self.moves and not self.waits:
            return args
        placed = [*args]
        for i in self.waits:
            if type(placed[i]) is PendingArray:
                placed[i] = placed[i].value()
        if self.moves:
            moved = jax.device_put([placed[i] for i, _ in self.moves], [sharding for _, sharding in self.moves])
            for (i, _), value in zip(self.moves, moved, strict=True):
                placed[i] = value
        return placed


def placing_of(plan: Plan, args: Sequence[Any]) -> Placing:
    """What has to be done with arguments like these."""
    readers: dict[Any, list[Any]] = {}
    for node in plan.nodes:
        for value in node.inputs:
            readers.setdefault(value, []).append(node)
    moves, waits = [], []
    home = _home(plan, args)[0]
    for i, (value, arg) in enumerate(zip(plan.inputs, args, strict=True)):
        nodes = readers.get(value, [])
        by_call = any(isinstance(node, ColocatedCall) for node in nodes)
        is_array = isinstance(arg, jax.Array)
        if isinstance(arg, PendingArray) and (not by_call or len(nodes) > 1):
            waits.append(i)
        if value.sharding is None:
            if by_call and not is_array:
                moves.append((i, home))
            continue
        is_there = is_array and arg.committed and arg.sharding.is_equivalent_to(value.sharding, arg.ndim)
        # The dispatch of an executable places what had no place, and once is enough.
        if not is_there and (by_call or len(nodes) > 1 or not is_placed(arg, value.sharding)):
            moves.append((i, value.sharding))
    return Placing(tuple(moves), tuple(waits))


_KINDS: dict[type, Callable[[Any], Any]] = {
    _compat.ArrayImpl: _compat.type_sharding_and_commitment,
    PendingArray: lambda x: (x.aval, x.sharding, x.committed),
    np.ndarray: lambda x: (x.shape, x.dtype),
    int: type,
    float: type,
    bool: type,
    complex: type,
    **{scalar: lambda x: (type(x),) for scalar in (np.int32, np.int64, np.float32, np.float64, np.bool_)},
}


def _context() -> Any:
    """Everything besides its arguments that a call depends on."""
    scope = entered_stream()
    return _compat.trace_context(), scope


class Recent:
    """The call of a program that was made last, for the next one of its kind."""

    def __init__(self) -> None:
        self._last: Any = None

    def call(self, args: Any, kwargs: Any) -> Any:
        """The result of a call, or None if it is of another kind than the last one."""
        last = self._last
        if last is None:
            return None
        context, tree, kinds, placing, run, out_tree = last
        try:
            leaves = tree.flatten_up_to((args, kwargs))
            if [_KINDS[type(leaf)](leaf) for leaf in leaves] != kinds or _context() != context:
                return None
        except (ValueError, KeyError, AttributeError):
            return None
        if not _compat.is_eager():
            return None
        return out_tree.unflatten(run(placing.apply(leaves)))

    def remember(self, tree: Any, leaves: Sequence[Any], placing: Placing, runnable: Runnable, out_tree: Any) -> None:
        """Has calls with arguments like these recognized from here on."""
        try:
            kinds = [_KINDS[type(leaf)](leaf) for leaf in leaves]
        except KeyError:
            return
        self._last = (_context(), tree, kinds, placing, runnable.run, out_tree)

    def forget(self) -> None:
        """Recognizes nothing until the next call."""
        self._last = None
