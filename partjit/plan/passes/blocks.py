"""The nodes of a program, of a turn of a loop, or of a branch: cut, with their values named and placed."""

import dataclasses
import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import DropVar, Var
from jax.sharding import Mesh, NamedSharding

from partjit._jax.jaxprs import closed_jaxpr
from partjit._jax.shardings import UNSPECIFIED
from partjit._jax.sources import source_site
from partjit.colocated.devices import colocated_sharding
from partjit.plan.ir.control_flow import is_call, is_host, lanes_of, loop_p
from partjit.plan.ir.flat import Flat, variables
from partjit.plan.ir.names import Names
from partjit.plan.ir.nodes import Block, Branch, ColocatedCall, Fragment, Loop, Node, Value, aliases, walk
from partjit.plan.passes.cut import Egress, Step, cut
from partjit.plan.passes.places import or_none, places_of
from partjit.plan.passes.prepare import check_devices, egresses_of, with_stated_arguments
from partjit.plan.passes.steps import postponed, read_by
from partjit.plan.passes.transfers import Transfers

__all__ = ["Surroundings", "program_block"]


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a block shares with the one around it.

    Attributes:
        mesh: the mesh of the program, maybe empty.
        names: what nodes and values are named by.
        constants: arguments of calls that never change; more are put into it.
        home: the place of everything if there is no mesh, as far as it is known.
        transfers: the moves of the block around it.
    """

    mesh: Mesh
    names: Names
    constants: dict[Value, Any]
    home: Any = None
    transfers: Transfers | None = None


def program_block(
    flat: Flat,
    in_shardings: Sequence[Any],
    out_shardings: Sequence[Any],
    donated: Sequence[bool],
    paths: Sequence[str],
    result_paths: Sequence[str],
    around: Surroundings,
) -> tuple[tuple[Value, ...], Block]:
    """The values of a program's arguments, and its nodes; the arguments are those of `make_plan`."""
    ins = [*in_shardings]
    check_devices(flat, around.mesh)
    flat = with_stated_arguments(flat, ins, around.mesh, out_shardings)
    egresses, direct = egresses_of(flat, ins, out_shardings, "program")
    steps = cut([*flat.eqns, *egresses])
    names = [_result_name(path) for path in result_paths]
    assembly = _Assembly(flat, steps, direct, ins, out_shardings, donated, names, around)
    assembly.name_inputs(paths)
    return assembly.inputs, assembly.block()


class _Assembly:
    """The nodes of a block being put together.

    Attributes:
        value_of: the value of each variable that other nodes read.
        inputs, outputs: the values of its arguments and results.
    """

    def __init__(
        self,
        flat: Flat,
        steps: Sequence[Step],
        direct: dict[int, Any],
        in_shardings: Sequence[Any],
        out_shardings: Sequence[Any],
        donated: Sequence[bool],
        result_names: Sequence[str | None],
        around: Surroundings,
        captured: Collection[Value] = (),
        following: Collection[Any] = (),
    ) -> None:
        self._flat = flat
        self._direct = direct
        self._out_shardings = out_shardings
        self._result_names = result_names
        self._following = following
        self._around = around
        self._mesh = around.mesh
        self._names = around.names
        self._donated = {var for var, flag in zip(flat.invars, donated, strict=True) if flag}
        self._steps = postponed(steps, flat, self._donated)
        self.value_of: dict[Any, Value] = {}
        self.inputs: tuple[Value, ...] = ()
        self.outputs: dict[int, Value] = {}
        self._of_caller: set[Value] = set()
        self._results: dict[Any, list[int]] = {}
        for i, atom in enumerate(flat.outvars):
            if isinstance(atom, Var):
                self._results.setdefault(atom, []).append(i)
        self._nodes_of_hosts: list[tuple[Any, str]] = []
        self._reads = [read_by(step, flat) for step in self._steps]
        self._readers: dict[Any, list[int]] = {}
        for s, read in enumerate(self._reads):
            for var in read:
                self._readers.setdefault(var, []).append(s)
        self._places, self._home = places_of(
            flat, self._readers, direct, in_shardings, out_shardings, self._mesh, around.home
        )
        self._transfers = Transfers(self._names, self._home, captured, around.transfers)

    def _is_async(self, s: int) -> bool:
        return self._steps[s].is_async

    # Names

    def name_inputs(self, paths: Sequence[str]) -> None:
        """Makes the values of the program's arguments."""
        for var, path in zip(self._flat.invars, paths, strict=True):
            self.value_of[var] = Value(self._names.take(path), var.aval, self._places.get(var))
        self.inputs = tuple(self.value_of[var] for var in self._flat.invars)
        self._of_caller.update(self.inputs)

    def use_inputs(self, values: Sequence[Value]) -> None:
        """Takes values from outside for the arguments."""
        self.value_of.update(zip(self._flat.invars, values, strict=True))
        self.inputs = tuple(values)
        self._of_caller.update(values)

    def _named_result(self, i: int) -> str:
        name = self._result_names[i]
        return self._names.fresh() if name is None else self._names.take(name)

    # Nodes

    def block(self) -> Block:
        """The nodes in the order of the steps."""
        nodes: list[Node] = []
        for s, step in enumerate(self._steps):
            if not step.is_host:
                nodes += self._fragment(s, self._names.fragment())
            elif is_call(step.items[0]):
                nodes += self._call(step)
            else:
                nodes += self._control_flow(step.items[0])
        for i, atom in enumerate(self._flat.outvars):
            if i not in self.outputs:  # an argument of a branch that is its result
                self.outputs[i] = self.value_of[atom]
        return Block(tuple(nodes), tuple(self.outputs[i] for i in range(len(self._flat.outvars))), self._order())

    def _fragment(self, s: int, name: str) -> Iterator[Node]:
        step = self._steps[s]
        eqns = [item for item in step.items if not isinstance(item, Egress)]
        own = {var: None for eqn in eqns for var in eqn.outvars if not isinstance(var, DropVar)}
        results = {i: var for var in own for i in self._results.get(var, ())}
        results |= {item.index: item.atom for item in step.items if isinstance(item, Egress)}
        exports: list[tuple[Any, Value]] = []
        for i, atom in sorted(results.items(), key=operator.itemgetter(0)):
            wanted = or_none(self._out_shardings[i]) or self._home
            if wanted is None and not self._reads[s] and not self._mesh.empty:
                wanted = _replicated(self._mesh)  # nothing else would say on which devices it is
            value = Value(self._named_result(i), atom.aval, wanted)
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
        yield from self._transfers.to_devices([self.value_of[var] for var in self._reads[s]])
        consts = {v: self._flat.consts[v] for eqn in eqns for v in variables(eqn.invars) if v in self._flat.consts}
        consts |= {a: self._flat.consts[a] for a in results.values() if isinstance(a, Var) and a in self._flat.consts}
        jaxpr = closed_jaxpr(self._reads[s], [atom for atom, _ in exports], eqns, consts)
        inputs = tuple(self._transfers.on_device(self.value_of[var]) for var in self._reads[s])
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

    def _value(self, atom: Any, sharding: Any = None) -> Value:
        """The value of what a call, loop or branch reads; a constant is put in that sharding, or replicated."""
        if isinstance(atom, Var) and atom not in self._flat.consts:
            return self.value_of[atom]
        value = Value(self._names.take("constant"), atom.aval, sharding or _replicated(self._mesh))
        self._around.constants[value] = self._flat.consts[atom] if isinstance(atom, Var) else atom.val
        return value

    def _call(self, step: Step) -> Iterator[Node]:
        (eqn,) = step.items
        callee = eqn.params["callee"]
        name = self._names.take(callee.name.rpartition(".")[2])
        inputs = [*map(self._value, eqn.invars, callee.in_shardings)]
        # The program's arguments and results are the caller's, who may give them away while the call runs.
        held = tuple(value in self._of_caller for value in inputs)
        outputs = []
        for k, var in enumerate(eqn.outvars):
            indices = [i for i in self._results.get(var, ()) if i in self._direct]
            wanted = self._result_names[indices[0]] if indices else None
            wanted = wanted or (f"{name}_{k}" if k else f"{name}_result")
            place = self._places.get(var)
            host = None if place is None or indices else colocated_sharding(place)
            value = Value(self._names.take(wanted), var.aval, host or place)
            if host != place and host is not None:  # what only leaves, the thread of the call puts in its place
                self._transfers.is_on_host(value, place)
            self.value_of[var] = value
            self.outputs.update(dict.fromkeys(indices, value))
            if indices:
                self._of_caller.add(value)
            outputs.append(value)
        site = source_site(eqn.source_info) or ("<unknown>", 0, callee.name)
        yield from self._transfers.to_hosts(inputs)
        inputs = [self._transfers.on_host(value) for value in inputs]
        self._nodes_of_hosts.append((eqn, name))
        yield ColocatedCall(
            name, callee, eqn.params["stream"], tuple(inputs), tuple(outputs), step.is_inline, held, site
        )

    # Loops and branches

    def _control_flow(self, eqn: Any) -> Iterator[Node]:
        is_loop = eqn.primitive is loop_p
        name = self._names.take("loop" if is_loop else "branch")
        outputs = []
        for var in eqn.outvars:
            i = next((i for i in self._results.get(var, ()) if i in self._direct), None)
            value_name = None if i is None else self._result_names[i]
            value_name = self._names.fresh() if value_name is None else self._names.take(value_name)
            value = self.value_of[var] = Value(value_name, var.aval, self._places.get(var))
            outputs.append(value)
            if i is not None:
                self.outputs[i] = value
                self._of_caller.add(value)
        make = self._loop if is_loop else self._branch
        node, hoisted = make(eqn, name, tuple(outputs))
        yield from hoisted
        self._nodes_of_hosts.append((eqn, name))
        # What it gives may be the caller's under another name, and is to be pinned then as well.
        for output, values in aliases(node):
            if not values.isdisjoint(self._of_caller):
                self._of_caller.add(output)
        yield node

    def _loop(self, eqn: Any, name: str, carried: tuple[Value, ...]) -> tuple[Loop, list[Node]]:
        captured = eqn.params["captured"]
        body = Flat.of_jaxpr(eqn.params["body"])
        own = body.invars[captured:]
        read_on_devices = {a for e in body.eqns if not is_host(e) for a in variables(e.invars)}
        read = [atom for var, atom in zip(own, body.outvars, strict=True) if var in read_on_devices]
        following = {*variables([*read, *body.outvars[: eqn.params["turns"] is None]])}  # the predicate is read as well
        values = [*map(self._value, eqn.invars[:captured]), *carried]
        block, hoisted = self._nested(body, values, carried, "turn", following)
        initial = [self.value_of[var] for var in eqn.invars[captured:]]
        inputs = (*self._captured_by([block], carried), *initial)
        return Loop(name, inputs, carried, block, eqn.params["turns"]), hoisted

    def _branch(self, eqn: Any, name: str, outputs: tuple[Value, ...]) -> tuple[Branch, list[Node]]:
        index, *values = map(self._value, eqn.invars)
        needed = [self._is_needed_on_devices(var) for var in eqn.outvars]
        blocks, hoisted = [], []
        for branch in eqn.params["branches"]:
            flat = Flat.of_jaxpr(branch)
            following = {*variables([atom for atom, flag in zip(flat.outvars, needed, strict=True) if flag])}
            block, more = self._nested(flat, values, outputs, "branch", following)
            blocks.append(block)
            hoisted += more
        return Branch(name, (index, *self._captured_by(blocks, ())), outputs, tuple(blocks)), hoisted

    def _is_needed_on_devices(self, var: Any) -> bool:
        return var in self._following or any(not self._steps[s].is_host for s in self._readers.get(var, ()))

    def _nested(
        self, flat: Flat, values: Sequence[Value], outputs: Sequence[Value], kind: Any, following: Collection[Any]
    ) -> tuple[Block, list[Node]]:
        """A block of this one, and the moves to be made before it."""
        ins = [_or_unspecified(self._transfers.place_on_devices(value)) for value in values]
        outs = [_or_unspecified(value.sharding) for value in outputs]
        check_devices(flat, self._mesh)
        flat = with_stated_arguments(flat, ins, self._mesh, outs)
        egresses, direct = egresses_of(flat, ins, outs, kind)
        steps = cut([*flat.eqns, *egresses], following)
        captured = values[: len(values) - len(outputs)] if kind == "turn" else values
        donated = [k >= len(captured) for k in range(len(values))]
        around = dataclasses.replace(self._around, home=self._home, transfers=self._transfers)
        names = [None] * len(outputs)
        inner = _Assembly(flat, steps, direct, ins, outs, donated, names, around, {*captured}, following)
        inner.use_inputs(values)
        return inner.block(), inner._transfers.hoisted

    def _captured_by(self, blocks: Sequence[Block], carried: Sequence[Value]) -> list[Value]:
        """What blocks read from outside, once each."""
        own = {*carried, *self._around.constants}
        found: dict[Value, None] = {}
        for block in blocks:
            nodes = [*walk(block.nodes)]
            own.update(value for node in nodes for value in node.outputs)
            found.update((value, None) for node in nodes for value in node.inputs)
            found.update((value, None) for value in block.outputs)
        return [value for value in found if value not in own]

    # Order

    def _order(self) -> tuple[tuple[str, str], ...]:
        """The pairs of calls, loops and branches that stand in one order."""
        last: dict[Any, str] = {}
        pairs: dict[tuple[str, str], None] = {}
        names = {id(eqn): name for eqn, name in self._nodes_of_hosts}
        for eqn in self._flat.eqns:
            if not is_host(eqn):
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


def _or_unspecified(sharding: Any) -> Any:
    return UNSPECIFIED if sharding is None else sharding


def _result_name(path: str) -> str:
    return "out" if path == "result" else path.replace("result", "out", 1)
