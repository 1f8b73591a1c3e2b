"""The body of a `shard_map` with colocated calls, as equations outside of it.

A call becomes a call with arrays over the mesh, whose function is called for each shard. What the devices do before,
between and after calls becomes shard_maps of their own; a value that goes from one to another is an array as well,
whose shards are what the devices have anyhow. A scan with calls is turned inside out: it becomes a scan over such
arrays, whose body is a shard_map.
"""

import collections
import dataclasses
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var, new_jaxpr_eqn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from partjit._jax.effects import without_axes
from partjit._jax.jaxprs import Atom, closed_jaxpr, control_flow_kind, new_var, scan_counts, type_of
from partjit._jax.shard_maps import type_of_shape, varying_axes
from partjit._jax.sources import at_site, nested_source_info
from partjit.calls import inner_jaxprs, makes_calls, names_of_calls
from partjit.colocated.ir.shard_map import called_for_each_shard
from partjit.plan.ir.build import Builder, copied, live
from partjit.plan.ir.nodes import Block, ColocatedCall, Equation, Group, Loop, VarBlock, VarNode
from partjit.plan.ir.walk import is_host, variables
from partjit.plan.passes.cut import grouped
from partjit.plan.passes.forms import REPLICATED, Form

__all__ = ["Body"]

A = TypeVar("A", bound=Atom)

Result: TypeAlias = tuple[Atom, Form]
"""A value of the body, as an array in that form."""

Again: TypeAlias = Mapping[Var, Sequence[Equation]]
"""Variables that are computed again wherever they are read, with the equations that do it."""


@dataclasses.dataclass(frozen=True)
class _Scan:
    """A scan to be turned inside out.

    Attributes:
        eqn: the scan.
        arguments: what it carries and takes slices of, as arrays.
        own: the forms of that in an iteration.
        given: the forms of what an iteration gives.
        results: the forms of its results.
    """

    eqn: JaxprEqn
    arguments: Sequence[Result]
    own: Sequence[Form]
    given: Sequence[Form]
    results: Sequence[Form]


class Body:
    """A body that is put together outside.

    Args:
        out: gets its nodes, in the place of the `shard_map`.
        mesh: its mesh.
        inlined: inlines nested programs in a closed jaxpr, but no loops and branches.
    """

    def __init__(self, out: Builder, mesh: Mesh, inlined: Callable[[ClosedJaxpr], VarBlock]) -> None:
        self._nodes, self._like = out.nodes, out.like
        self._mesh = mesh
        self._inlined = inlined
        self._axes = [axis for axis in mesh.axis_names if axis in self._like.params["newly_manual_axes"]]
        self._context = self._like.params["jaxpr"].eqns[0].ctx
        self._known_arrays: dict[Hashable, dict[Form, Atom]] = collections.defaultdict(dict)
        self._wanted: dict[Hashable, dict[Form, None]] = collections.defaultdict(dict)

    def put(self, value: Atom, form: Form, array: Atom) -> None:
        """Says which array a value is."""
        self._known_arrays[_key(value)][form] = array

    def run(self, nodes: Sequence[VarNode], again: Again, results: Sequence[Result]) -> list[Atom]:
        """Adds what equations and calls do.

        Args:
            nodes: the equations and calls.
            again: the variables that are computed again.
            results: the values that are results.

        Returns:
            The arrays of the results.

        Raises:
            ValueError: each device decides for itself whether there is a call.
        """
        steps = grouped([*map(self._as_host, nodes)], {*variables([value for value, _ in results])})
        self._want(results)
        scans = {}
        for step in steps:
            if isinstance(step, Loop):
                scans[step] = self._planned(step.eqn)
                self._want(scans[step].arguments)
        self._want_what_crosses(steps, again)
        for step in steps:
            if isinstance(step, Group):
                self._add_group([node for node in step.nodes if isinstance(node, Equation)], again)
            elif step in scans:
                self._add_scan(scans[step])
            elif isinstance(step, ColocatedCall):
                self._add_call(step)
        return self._arrays(results)

    # Forms

    def _varying(self, value: Atom) -> Sequence[str]:
        """The axes along which a value may differ between shards; without `check_vma` its type does not say."""
        varying = varying_axes(type_of(value)) if self._like.params["check_vma"] else self._axes
        return [axis for axis in self._axes if axis in varying]

    def _plain(self, value: Atom) -> Form:
        """The form of a value, if nobody wants it in another."""
        axes = self._varying(value)
        return Form(P(tuple(axes)), None if type_of(value).shape else 0) if axes else REPLICATED

    def _fits(self, form: Form, value: Atom) -> bool:
        """Whether an array in that form says of the value what its type says, and so can take its place anywhere."""
        return form.axes == {*self._varying(value)}

    def _chosen(self, value: Atom, *others: Atom) -> Form:
        """A form for a value; one that another has or is to have, if possible, so that nothing is made of that."""
        known = [form for other in others for form in (*self._wanted[_key(other)], *self._known_arrays[_key(other)])]
        return next((form for form in known if self._fits(form, value)), self._plain(value))

    def _want(self, wanted: Iterable[Result]) -> None:
        for value, form in wanted:
            self._wanted[_key(value)][form] = None

    def _want_what_crosses(self, steps: Sequence[VarNode], again: Container[Var]) -> None:
        """Wants every value that is read in another step than that which computes it, in a form that can be read."""
        step_of = {var: k for k, step in enumerate(steps) for var in step.outputs}
        for k, step in enumerate(steps):
            for var in variables(step.inputs):
                is_there = step_of.get(var, k) == k or (var in again and not is_host(step))
                if not is_there and not any(self._fits(form, var) for form in self._wanted[var]):
                    self._want([(var, self._plain(var))])

    # Arrays

    def _known_arrays_of(self, value: Atom) -> dict[Form, Atom]:
        """The arrays that a value is. A literal is one itself."""
        known = self._known_arrays[_key(value)]
        return known if isinstance(value, Var) else {REPLICATED: value, **known}

    def _any_array_of(self, value: Atom) -> tuple[Form, Atom]:
        """An array that a value is, with its form."""
        known = self._known_arrays_of(value)
        form = next((form for form in known if self._fits(form, value)), next(iter(known)))
        return form, known[form]

    def _arrays(self, wanted: Sequence[Result]) -> list[Atom]:
        """The arrays that values are in these forms; what there is not yet is made."""
        missing = {(_key(value), form): value for value, form in wanted if form not in self._known_arrays_of(value)}
        if missing:
            self._add_shard_map([], [(value, form) for (_, form), value in missing.items()])
        return [self._known_arrays_of(value)[form] for value, form in wanted]

    # Equations

    def _add_group(self, nodes: Sequence[Equation], again: Again) -> None:
        """Adds a shard_map of some equations."""
        given = [(var, form) for node in nodes for var in node.outputs for form in self._wanted[var]]
        before = [made for node in nodes for var in variables(node.inputs) for made in again.get(var, ())]
        nodes, _ = live([var for var, _ in given], [*dict.fromkeys([*before, *nodes])])
        if nodes:
            self._add_shard_map(nodes, given)

    def _add_shard_map(self, nodes: Sequence[Equation], given: Sequence[Result]) -> None:
        computed = {var for node in nodes for var in node.outputs}
        read = variables([*(atom for node in nodes for atom in node.inputs), *(value for value, _ in given)])
        sources = [(var, *self._any_array_of(var)) for var in dict.fromkeys(read) if var not in computed]
        eqn = self._shard_map(sources, [node.eqn for node in nodes], given)
        self._nodes.append(Equation(eqn))
        for (value, form), array in zip(given, eqn.outvars, strict=True):
            self.put(value, form, array)

    def _shard_map(
        self, sources: Sequence[tuple[Var, Form, Atom]], eqns: Sequence[JaxprEqn], given: Sequence[Result]
    ) -> JaxprEqn:
        """An equation that is a shard_map.

        Args:
            sources: what it takes: a variable inside of it, and the array of that in some form.
            eqns: what it does.
            given: what it gives.
        """
        like = self._like
        invars = [self._shard(var, form) for var, form, _ in sources]
        outvars = [self._shard(value, form) for value, form in given]
        before = [self._reshape(shard, var) for shard, (var, _, _) in zip(invars, sources, strict=True)]
        after = [self._reshape(value, shard) for shard, (value, _) in zip(outvars, given, strict=True)]
        reshaped = [[eqn for eqn in reshapes if eqn is not None] for reshapes in (before, after)]
        jaxpr = closed_jaxpr(invars, outvars, [*reshaped[0], *eqns, *reshaped[1]], {}).jaxpr
        params = {
            **like.params,
            "jaxpr": jaxpr,
            "in_specs": tuple(form.spec for _, form, _ in sources),
            "out_specs": tuple(form.spec for _, form in given),
        }
        return new_jaxpr_eqn(
            [array for _, _, array in sources],
            [form.array_of(value, self._mesh) for value, form in given],
            like.primitive,
            params,
            without_axes(jaxpr.effects),
            like.source_info,
            like.ctx,
        )

    def _shard(self, value: A, form: Form) -> A | Var:
        """What the shards are of an array of a value: that value, unless they have a dimension more."""
        if form.added is None:
            return value
        return new_var(type_of_shape(type_of(value), form.shard_of(value)))

    def _reshape(self, value: Atom, var: Atom) -> JaxprEqn | None:
        if value is var:
            return None
        old, new = type_of(value), type_of(var)
        (eqn,) = jax.make_jaxpr(lambda x: jax.lax.reshape(x, new.shape))(
            jax.ShapeDtypeStruct(old.shape, old.dtype)
        ).eqns
        info = self._like.source_info
        return new_jaxpr_eqn([value], [var], eqn.primitive, eqn.params, set(), info, self._context)

    def _add_call(self, call: ColocatedCall[Atom, Var]) -> None:
        known = [self._any_array_of(atom) for atom in call.inputs]
        forms = [self._chosen(var, var) for var in call.outputs]
        arrays = [form.array_of(var, self._mesh) for var, form in zip(call.outputs, forms, strict=True)]
        callee = called_for_each_shard(
            call.callee,
            self._mesh,
            [(type_of(array), form.sharding(self._mesh)) for form, array in known],
            [(type_of(array), form.sharding(self._mesh)) for form, array in zip(forms, arrays, strict=True)],
        )
        inputs = tuple(array for _, array in known)
        info = nested_source_info(call.eqn.source_info, self._like.source_info)
        eqn = call.eqn.replace(source_info=info, ctx=self._like.ctx)
        self._nodes.append(dataclasses.replace(call, eqn=eqn, inputs=inputs, outputs=tuple(arrays), callee=callee))
        for var, form, array in zip(call.outputs, forms, arrays, strict=True):
            self.put(var, form, array)

    # Scans

    def _as_host(self, node: VarNode) -> VarNode:
        """A node; a scan with calls, which the devices cannot run, is represented as a loop of these calls."""
        if not isinstance(node, Equation) or not makes_calls(node.eqn):
            return node
        eqn = node.eqn
        if control_flow_kind(eqn) != "scan":
            raise _undecided(eqn)
        calls = filter(is_host, map(self._as_host, self._inlined(eqn.params["jaxpr"]).nodes))
        return Loop(tuple(eqn.invars), tuple(eqn.outvars), Block((), tuple(calls), ()), eqn.params["length"], eqn, ())

    def _planned(self, eqn: JaxprEqn) -> _Scan:
        """What it takes to put a scan outside of the shard_map, if possible with arrays that there are anyhow."""
        num_consts, num_carry = scan_counts(eqn)
        jaxpr = eqn.params["jaxpr"].jaxpr
        own, carries, stacks = jaxpr.invars[num_consts:], eqn.invars[num_consts:][:num_carry], eqn.outvars[num_carry:]
        carried = [
            self._chosen(var, result, initial)
            for var, result, initial in zip(own[:num_carry], eqn.outvars[:num_carry], carries, strict=True)
        ]
        read = eqn.invars[num_consts + num_carry :]
        slices = [self._of_slices(stack, var) for stack, var in zip(read, own[num_carry:], strict=True)]
        written = [self._of_slices(stack, atom) for stack, atom in zip(stacks, jaxpr.outvars[num_carry:], strict=True)]
        return _Scan(
            eqn,
            [*zip([*carries, *read], [*carried, *(form.of_stack for form in slices)], strict=True)],
            [*carried, *slices],
            [*carried, *written],
            [*carried, *(form.of_stack for form in written)],
        )

    def _of_slices(self, stack: Atom, value: Atom) -> Form:
        """A form for the slices of a stack."""
        known = [form.of_slices for form in (*self._wanted[_key(stack)], *self._known_arrays[_key(stack)])]
        return next((form for form in known if form is not None and self._fits(form, value)), self._plain(value))

    def _add_scan(self, scan: _Scan) -> None:
        eqn = scan.eqn
        num_consts, _ = scan_counts(eqn)
        body = copied(Block.of_jaxpr(eqn.params["jaxpr"]))
        consts = [self._any_array_of(atom) for atom in eqn.invars[:num_consts]]
        forms = [*(form for form, _ in consts), *scan.own]
        own = [(var, form, form.array_of(var, self._mesh)) for var, form in zip(body.inputs, forms, strict=True)]
        fixed = [(var, REPLICATED, REPLICATED.array_of(var, self._mesh)) for var in body.consts]
        eqns = [node.eqn for node in body.nodes if isinstance(node, Equation)]
        iteration = self._shard_map([*fixed, *own], eqns, [*zip(body.outputs, scan.given, strict=True)])
        values = dict(zip((array for _, _, array in fixed), body.consts.values(), strict=True))
        jaxpr = closed_jaxpr([array for _, _, array in own], iteration.outvars, [iteration], values)
        results = [form.array_of(var, self._mesh) for var, form in zip(eqn.outvars, scan.results, strict=True)]
        arrays = [*(array for _, array in consts), *self._arrays(scan.arguments)]
        params = {**eqn.params, "jaxpr": jaxpr}
        info = nested_source_info(eqn.source_info, self._like.source_info)
        ctx, effects = self._like.ctx, iteration.effects
        self._nodes.append(Equation(new_jaxpr_eqn(arrays, results, eqn.primitive, params, effects, info, ctx)))
        for var, form, array in zip(eqn.outvars, scan.results, results, strict=True):
            self.put(var, form, array)


def _key(value: Atom) -> Hashable:
    return value if isinstance(value, Var) else id(value)


_UNDECIDED = {
    "while": (
        "while_loop",
        "It can be called in a jax.lax.scan, and in a jax.lax.fori_loop with bounds that are no arrays",
    ),
    "cond": ("cond or switch", "Give the predicate to the function and let it decide"),
}


def _undecided(eqn: JaxprEqn) -> ValueError:
    kind, remedy = _UNDECIDED.get(eqn.primitive.name, (eqn.primitive.name, "Call it before or after"))
    names = ", ".join(names_of_calls(inner_jaxprs(eqn)))
    where = at_site(eqn.source_info)
    return ValueError(
        f"the colocated function {names} is called inside of a {kind}{where} in a shard_map, where each device decides "
        f"for itself whether there is a call. {remedy}; or put the shard_map into the {kind} instead"
    )
