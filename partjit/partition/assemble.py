"""From a program to its plan: open it, cut it, decide where values lie and whose memory may be reused."""

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
from jax.sharding import Mesh, NamedSharding

from partjit import _compat
from partjit._compat import core
from partjit.colocated.devices import colocated_sharding
from partjit.colocated.streams import Stream
from partjit.mesh import auto_twin
from partjit.partition.cut import Egress, Step, cut, lanes_of
from partjit.partition.donation import donations, may_release
from partjit.partition.flatten import Flat, flatten
from partjit.partition.names import Names
from partjit.partition.nodes import ColocatedCall, Fragment, Node, Transfer, Value
from partjit.partition.places import or_none, places_of
from partjit.partition.plan import Plan
from partjit.partition.prepare import calls_of, check_devices, egresses_of, variables, with_stated_arguments
from partjit.partition.verify import verify

__all__ = ["make_plan"]


def make_plan(
    jaxpr: Any,
    in_shardings: Sequence[Any],
    out_shardings: Sequence[Any],
    donated: Sequence[bool],
    mesh: Mesh,
    name: str,
    paths: Sequence[str],
    result_paths: Sequence[str],
    caller: Stream | None = None,
) -> Plan:
    """The plan of a program.

    Args:
        jaxpr: its closed jaxpr.
        in_shardings, out_shardings: of its arguments and results; UNSPECIFIED where nothing is said.
        donated: for each argument whether the caller gives up its memory.
        mesh: its mesh, maybe empty.
        name: its name.
        paths, result_paths: the key paths of arguments and results.
        caller: see `flatten`.

    Raises:
        ValueError: a call stands in a loop, a branch or a `shard_map`.
        ShardingError: a call's specs are on other devices than the program.
    """
    flat = flatten(jaxpr, caller)
    mesh = auto_twin(mesh)
    if mesh.empty:  # the arguments may bring one along
        mesh = next((cast(Mesh, s.mesh) for s in in_shardings if isinstance(s, NamedSharding)), mesh)
    check_devices(flat, mesh)
    ins = [*in_shardings]
    flat = with_stated_arguments(flat, ins, mesh)
    egresses, direct = egresses_of(flat, out_shardings)
    steps = cut([*flat.eqns, *egresses])
    assembly = _Assembly(flat, steps, direct, [*ins], out_shardings, donated, mesh)
    assembly.name_inputs(paths)
    nodes = assembly.nodes(result_paths)
    outputs = tuple(assembly.outputs[i] for i in range(len(out_shardings)))
    inputs = assembly.inputs
    released = may_release(inputs, donated, [var.aval for var in flat.outvars])
    plan = Plan(
        name,
        mesh,
        inputs,
        outputs,
        tuple(paths),
        tuple(nodes),
        assembly.order(),
        tuple(assembly.constants.items()),
        released,
    )
    plan = donations(plan)
    verify(plan, flat)
    return plan


class _Assembly:
    """The nodes of a plan being put together.

    Attributes:
        value_of: the value of each variable that other nodes read.
        inputs, outputs: the values of the program's arguments and results.
        constants: arguments of calls that never change.
    """

    def __init__(
        self,
        flat: Flat,
        steps: Sequence[Step],
        direct: dict[int, Any],
        in_shardings: list[Any],
        out_shardings: Sequence[Any],
        donated: Sequence[bool],
        mesh: Mesh,
    ) -> None:
        self._flat = flat
        self._direct = direct
        self._out_shardings = out_shardings
        self._mesh = mesh
        self._donated = {var for var, flag in zip(flat.invars, donated, strict=True) if flag}
        self._steps = self._postponed(steps)
        self.value_of: dict[Any, Value] = {}
        self.inputs: tuple[Value, ...] = ()
        self.outputs: dict[int, Value] = {}
        self.constants: dict[Value, Any] = {}
        fragments = (f"fragment_{i}" for i in range(len(steps)))
        self._names = Names("wait", "release", *fragments)  # which the plan's source means something else by
        self._on_host: dict[Value, Value] = {}
        self._on_device: dict[Value, Value] = {}
        self._of_host: dict[Value, Any] = {}
        self._of_caller: set[Value] = set()
        self._results: dict[Any, list[int]] = {}
        for i, atom in enumerate(flat.outvars):
            if isinstance(atom, core.Var):
                self._results.setdefault(atom, []).append(i)
        self._nodes_of_calls: list[tuple[Any, str]] = []
        self._reads = [self._read_by(step) for step in self._steps]
        self._readers: dict[Any, list[int]] = {}
        for s, read in enumerate(self._reads):
            for var in read:
                self._readers.setdefault(var, []).append(s)
        self._places, self._home = places_of(flat, self._readers, direct, in_shardings, out_shardings, mesh)

    # What is read where

    def _read_by(self, step: Step) -> list[Any]:
        """The variables a step needs from outside, once each, in the order of their first use."""
        own: set[Any] = set()
        found: dict[Any, None] = {}
        for item in step.items:
            for var in variables([item.atom] if isinstance(item, Egress) else item.invars):
                if var not in own and var not in self._flat.consts:
                    found[var] = None
            if not isinstance(item, Egress):
                own.update(item.outvars)
        return [*found]

    def _postponed(self, steps: Sequence[Step]) -> list[Step]:
        """Calls that nobody waits for, with arguments that the program gives away, come after the fragment that takes
        these: it can return copies of them. Otherwise each would have to be copied by itself.
        """
        moved = [*steps]
        last_fragment = {
            var: step for step in steps if not step.is_call for var in self._read_by(step) if var in self._donated
        }
        position = {id(eqn): i for i, eqn in enumerate(self._flat.eqns)}
        produced_for_others = {var for step in steps for var in self._read_by(step)}
        for step in [s for s in steps if s.is_call and not s.is_inline]:
            (eqn,) = step.items
            targets = [last_fragment[var] for var in variables(eqn.invars) if var in last_fragment]
            if not targets or not produced_for_others.isdisjoint(eqn.outvars):
                continue
            here, there = moved.index(step), max(moved.index(target) for target in targets)
            # Never behind a call that comes after it in the program: should that fail, it would not be made at all.
            hopped = [other.items[0] for other in moved[here + 1 : there] if other.is_call]
            if here < there and all(position[id(other)] < position[id(eqn)] for other in hopped):
                moved.insert(there + 1, step)
                moved.pop(here)
        return moved

    def _is_async(self, s: int) -> bool:
        return self._steps[s].is_call and not self._steps[s].is_inline

    # Names

    def name_inputs(self, paths: Sequence[str]) -> None:
        """Makes the values of the program's arguments."""
        for var, path in zip(self._flat.invars, paths, strict=True):
            self.value_of[var] = Value(self._names.take(path), var.aval, self._places.get(var))
        self.inputs = tuple(self.value_of[var] for var in self._flat.invars)
        self._of_caller.update(self.inputs)

    # Nodes

    def nodes(self, result_paths: Sequence[str]) -> list[Node]:
        """The nodes in the order of the steps."""
        nodes: list[Node] = []
        fragments = 0
        for s, step in enumerate(self._steps):
            if step.is_call:
                nodes += self._call(s, result_paths)
            else:
                nodes += self._fragment(s, f"fragment_{fragments}", result_paths)
                fragments += 1
        return nodes

    def _fragment(self, s: int, name: str, result_paths: Sequence[str]) -> Iterator[Node]:
        step = self._steps[s]
        eqns = [item for item in step.items if not isinstance(item, Egress)]
        own = {var: None for eqn in eqns for var in eqn.outvars if not isinstance(var, core.DropVar)}
        results = {i: var for var in own for i in self._results.get(var, ())}
        results |= {item.index: item.atom for item in step.items if isinstance(item, Egress)}
        exports: list[tuple[Any, Value]] = []
        for i, atom in sorted(results.items(), key=operator.itemgetter(0)):
            wanted = or_none(self._out_shardings[i]) or self._home
            if wanted is None and not self._reads[s] and not self._mesh.empty:
                wanted = _replicated(self._mesh)  # nothing else would say on which devices it is
            value = Value(self._names.take(_result_name(result_paths[i])), atom.aval, wanted)
            exports.append((atom, value))
            self.outputs[i] = value
            self._of_caller.add(value)
        for var in own:
            readers = [r for r in self._readers.get(var, ()) if r != s]
            if not readers:
                continue
            place = self._places[var]
            shared = next((value for atom, value in exports if atom is var and _agree(value.sharding, place)), None)
            # What leaves the program is the caller's to give away, so a call that may still run has its own.
            if shared is not None and not any(map(self._is_async, readers)):
                if shared.sharding is None and place is not None:
                    shared = self._replaced(exports, shared, dataclasses.replace(shared, sharding=place))
                self.value_of[var] = shared
            else:
                self.value_of[var] = Value(self._names.fresh(), var.aval, place)
                exports.append((var, self.value_of[var]))
        copies = {}
        for var in self._reads[s]:
            later = [r for r in self._readers[var] if r > s]
            if var in self._donated and later and all(map(self._is_async, later)):
                original = self.value_of[var]
                copies[var] = Value(self._names.take(original.name + "_copy"), var.aval, original.sharding)
                exports.append((var, copies[var]))
        yield from self._on_devices([self.value_of[var] for var in self._reads[s]])
        consts = {v: self._flat.consts[v] for eqn in eqns for v in variables(eqn.invars) if v in self._flat.consts}
        consts |= {
            a: self._flat.consts[a] for a in results.values() if isinstance(a, core.Var) and a in self._flat.consts
        }
        jaxpr = _compat.closed_jaxpr(self._reads[s], [atom for atom, _ in exports], eqns, consts)
        inputs = tuple(self._on_device.get(value, value) for value in map(self.value_of.__getitem__, self._reads[s]))
        yield Fragment(name, jaxpr, inputs, tuple(v for _, v in exports), (False,) * len(inputs), step.cost)
        self.value_of.update(copies)

    def _replaced(self, exports: list[tuple[Any, Value]], old: Value, new: Value) -> Value:
        for k, (atom, value) in enumerate(exports):
            if value is old:
                exports[k] = (atom, new)
        for i, value in self.outputs.items():
            if value is old:
                self.outputs[i] = new
                self._of_caller.add(new)
        return new

    def _call(self, s: int, result_paths: Sequence[str]) -> Iterator[Node]:
        step = self._steps[s]
        (eqn,) = step.items
        callee = eqn.params["callee"]
        name = self._names.take(callee.name.rpartition(".")[2])
        inputs = []
        for atom in eqn.invars:
            if isinstance(atom, core.Var) and atom not in self._flat.consts:
                inputs.append(self.value_of[atom])
            else:
                value = Value(self._names.take("constant"), atom.aval, _replicated(self._mesh))
                self.constants[value] = self._flat.consts[atom] if isinstance(atom, core.Var) else atom.val
                inputs.append(value)
        # The program's arguments and results are the caller's, who may give them away while the call runs.
        held = tuple(value in self._of_caller for value in inputs)
        outputs = []
        for k, var in enumerate(eqn.outvars):
            indices = [i for i in self._results.get(var, ()) if i in self._direct]
            wanted = _result_name(result_paths[indices[0]]) if indices else f"{name}_{k}" if k else f"{name}_result"
            place = self._places.get(var)
            host = None if place is None or indices else colocated_sharding(place)
            value = Value(self._names.take(wanted), var.aval, host or place)
            if host != place and host is not None:  # what only leaves, the thread of the call puts in its place
                self._of_host[value] = place
            self.value_of[var] = value
            self.outputs.update(dict.fromkeys(indices, value))
            if indices:
                self._of_caller.add(value)
            outputs.append(value)
        site = _compat.source_site(eqn.source_info) or ("<unknown>", 0, callee.name)
        yield from self._on_hosts(inputs)
        on_hosts = [*inputs]
        for k, value in enumerate(inputs):
            on_hosts[k] = self._on_host.get(value, value)
        self._nodes_of_calls.append((eqn, name))
        yield ColocatedCall(
            name, callee, eqn.params["stream"], tuple(on_hosts), tuple(outputs), step.is_inline, held, site
        )

    # Accelerators

    def _moved(self, values: Sequence[Value], known: dict[Value, Value], name: str, target: Any) -> Iterator[Node]:
        """A transfer of those values for which `target` says so and of which no copy is known yet."""
        moves = {}
        for value in values:
            there = target(value)
            if there is not None and value not in known:
                moves[value] = known[value] = Value(self._names.take(f"{value.name}_{name}"), value.aval, there)
        if moves:
            yield Transfer(self._names.take(f"to_{name}"), tuple(moves), tuple(moves.values()))

    def _on_hosts(self, values: Sequence[Value]) -> Iterator[Node]:
        def target(value: Value) -> Any:
            place = value.sharding or self._home
            host = None if place is None else colocated_sharding(place)
            return None if host == place else host

        yield from self._moved(values, self._on_host, "hosts", target)

    def _on_devices(self, values: Sequence[Value]) -> Iterator[Node]:
        yield from self._moved(values, self._on_device, "devices", self._of_host.get)

    # Order

    def order(self) -> tuple[tuple[str, str], ...]:
        """The pairs of calls that stand in one order."""
        last: dict[Any, str] = {}
        pairs: dict[tuple[str, str], None] = {}
        names = {id(eqn): name for eqn, name in self._nodes_of_calls}
        for eqn in calls_of(self._flat):
            if eqn.params["callee"].is_pure:
                continue
            name = names[id(eqn)]
            for lane in lanes_of(eqn):
                if lane in last:
                    pairs[last[lane], name] = None
                last[lane] = name
        return tuple(pairs)


def _agree(sharding: Any, place: Any) -> bool:
    return sharding is None or place is None or sharding == place


def _replicated(mesh: Mesh) -> Any:
    return None if mesh.empty else NamedSharding(mesh, jax.sharding.PartitionSpec())


def _result_name(path: str) -> str:
    return "out" if path == "result" else path.replace("result", "out", 1)
