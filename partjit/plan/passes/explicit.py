"""Explicit specs: what those of calls request of their arguments becomes constraints, where nothing gives it anyhow."""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias, cast

from jax.extend.core import DropVar, Var
from jax.sharding import Mesh, Sharding

from partjit._jax.jaxprs import Atom, type_of
from partjit._jax.shardings import UNSPECIFIED, MaybeSharding, UnspecifiedValue
from partjit.devices import devices_of, has_devices_of
from partjit.errors import ShardingError
from partjit.plan.ir.build import Builder, rebuilt
from partjit.plan.ir.nodes import Branch, ColocatedCall, Loop, VarBlock, VarLoop, VarNode
from partjit.plan.ir.walk import walk
from partjit.spec import ParsedPartitionSpec

__all__ = ["check_devices", "explicit", "is_replicated_stack", "results_of_hosts"]

Host: TypeAlias = ColocatedCall[Atom, Var] | VarLoop | Branch[Atom, Var]
"""What the host makes or drives."""


def check_devices(block: VarBlock, mesh: Mesh) -> None:
    """Raises ShardingError if the specs of a call are on other devices than the program."""
    for call in walk(block.nodes):
        if not isinstance(call, ColocatedCall):
            continue
        callee = call.callee
        for what, shardings in (("in_specs", callee.in_shardings), ("out_specs", callee.out_shardings)):
            for sharding in shardings:
                if sharding is None or (what == "out_specs" and not callee.options.has_out_specs):
                    continue
                own = cast(Mesh, sharding.mesh)
                if mesh.empty or not has_devices_of(own, mesh):
                    here = "on no mesh" if mesh.empty else f"on {devices_of(mesh)}"
                    order = ", in this order" if has_devices_of(own, mesh, in_order=False) else ""
                    raise ShardingError(
                        f"{what} of the colocated function {callee.name} name {devices_of(own)}, but "
                        f"the program runs {here}{order}"
                    )


def explicit(
    block: VarBlock, in_shardings: Sequence[MaybeSharding], out_shardings: Sequence[MaybeSharding], mesh: Mesh
) -> tuple[VarBlock, list[MaybeSharding]]:
    """Constrains the arguments of calls to the shardings in their specs, where they would not have them anyhow.

    Args:
        block: a block.
        in_shardings, out_shardings: of its arguments and results, UNSPECIFIED where nothing is known.
        mesh: the mesh, maybe empty.

    Returns:
        The block; and the shardings of its arguments, those left open being what the first call says.
    """
    known = _Known(block, in_shardings, out_shardings)
    nodes: list[VarNode] = []
    for node in block.nodes:
        if isinstance(node, ColocatedCall):
            built = Builder(node.eqn)
            inputs = [
                atom
                if sharding is None or known.agrees(atom, sharding)
                else built.constrain(atom, ParsedPartitionSpec.from_user_input(sharding, "in_specs"), mesh)
                for atom, sharding in zip(node.inputs, node.callee.in_shardings, strict=True)
            ]
            if built.nodes:
                nodes += built.nodes
                node = dataclasses.replace(node, inputs=tuple(inputs))
        nodes.append(node)
    return rebuilt(block, nodes), [known.sharding_of[var] for var in block.inputs]


class _Known:
    """The shardings that values of a block are going to have between its nodes, as the propagation decides.

    Attributes:
        sharding_of: for each variable its sharding; it is missing or UNSPECIFIED where a call may still choose it.
    """

    def __init__(
        self, block: VarBlock, in_shardings: Sequence[MaybeSharding], out_shardings: Sequence[MaybeSharding]
    ) -> None:
        self._consts = block.consts
        self._of_hosts = results_of_hosts(block)
        self.sharding_of = dict(zip(block.inputs, in_shardings, strict=True))
        self._leaves_as: dict[Var, list[Sharding]] = {}
        for atom, wanted in zip(block.outputs, out_shardings, strict=True):
            if isinstance(atom, Var) and not isinstance(wanted, UnspecifiedValue):
                self._leaves_as.setdefault(atom, []).append(wanted)
        for node in block.nodes:
            if isinstance(node, ColocatedCall):
                own = zip(node.outputs, node.callee.out_shardings, strict=True)
                self.sharding_of.update((var, sharding) for var, sharding in own if sharding is not None)

    def agrees(self, atom: Atom, sharding: Sharding) -> bool:
        """Whether an argument of a call has a sharding without a constraint; if it can, it will have it."""
        if not isinstance(atom, Var) or atom in self._consts:
            return True  # each call has constants of its own
        if atom in self._of_hosts and not self._host_agrees(atom, sharding):
            return False
        here = self.sharding_of.get(atom, UNSPECIFIED)
        if isinstance(here, UnspecifiedValue):
            self.sharding_of[atom] = here = sharding
        return here.is_equivalent_to(sharding, type_of(atom).ndim)

    def _host_agrees(self, var: Var, sharding: Sharding) -> bool:
        """Whether a result of a call, loop or branch, which leaves the block as it is, has it."""
        node, k = self._of_hosts[var]
        if isinstance(node, Loop) and node.is_buffer[k] and not is_replicated_stack(sharding):
            return False
        return all(wanted.is_equivalent_to(sharding, type_of(var).ndim) for wanted in self._leaves_as.get(var, ()))


def results_of_hosts(block: VarBlock) -> dict[Var, tuple[Host, int]]:
    """The results of calls, loops and branches, each with its node and its position."""
    hosts = (node for node in block.nodes if isinstance(node, ColocatedCall | Loop | Branch))
    return {v: (node, k) for node in hosts for k, v in enumerate(node.outputs) if not isinstance(v, DropVar)}


def is_replicated_stack(sharding: Sharding) -> bool:
    """Whether a stack may be sharded so in a loop: its slices are written one after the other, each by all devices."""
    spec = getattr(sharding, "spec", ())
    return not spec or spec[0] is None
