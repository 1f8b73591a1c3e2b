"""The driver: from a jaxpr to its plan, pass by pass.

The first passes go inside out: the body of a loop or branch is rewritten before what is around it. Those that partition
go outside in: what a block is given is sharded as the propagation of the surrounding one says. The last see all of it.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from functools import partial

from jax.extend.core import ClosedJaxpr, Var
from jax.sharding import Mesh, NamedSharding, Sharding

from partjit._jax.caches import weakref_cache
from partjit._jax.jaxprs import Atom, type_of
from partjit._jax.shardings import MaybeSharding, or_unspecified
from partjit.arguments import known_paths
from partjit.calls import chooses_whether_to_call
from partjit.colocated.runtime.streams import Stream
from partjit.devices import is_over_processes
from partjit.plan.ir.legality import check_stage
from partjit.plan.ir.names import Names
from partjit.plan.ir.nodes import Block, Branch, Group, Loop, VarBlock, VarBranch, VarLoop, VarNode
from partjit.plan.ir.untyped import over_auto_axes
from partjit.plan.ir.verify import verify
from partjit.plan.ir.walk import is_host, variables, with_blocks
from partjit.plan.passes.bind import bind
from partjit.plan.passes.choose_emitted import Executables, can_be_answered, choose_emitted
from partjit.plan.passes.control_flow import control_flow
from partjit.plan.passes.cut import cut
from partjit.plan.passes.donate import donations, kept_by_branches, may_release, shared_by_branches
from partjit.plan.passes.emit import emit
from partjit.plan.passes.explicit import check_devices, explicit
from partjit.plan.passes.forward import Kind, forward
from partjit.plan.passes.fragments import fragments, is_copied_for_calls, replicated
from partjit.plan.passes.from_numbers import Numbers, counters_among, with_own_predicates
from partjit.plan.passes.from_numbers import counted as counted_along
from partjit.plan.passes.host_thread import is_for_host_thread, makes_brief_calls
from partjit.plan.passes.inline import inline
from partjit.plan.passes.own_initial import own_initial_values, reshard_initial_values
from partjit.plan.passes.own_shards import own_shards
from partjit.plan.passes.pin import pin
from partjit.plan.passes.propagate import default_without_mesh, mesh_or_of_arguments, propagate
from partjit.plan.passes.prune import merge, prune
from partjit.plan.passes.refs import without_refs
from partjit.plan.passes.rotate import rotate
from partjit.plan.passes.run_to_calls import run_to_calls
from partjit.plan.passes.shard_maps import meshes_of_shard_maps, shard_maps
from partjit.plan.passes.transfers import transfers
from partjit.plan.plan import Plan
from partjit.primitive import keep_where

__all__ = ["make_plan", "structured"]


def structured(
    jaxpr: ClosedJaxpr,
    mesh: Mesh,
    caller: Stream | None = None,
    executables: Executables | None = None,
    *,
    carried: slice | None = None,
    counted: Collection[int] = (),
) -> VarBlock:
    """The program of a closed jaxpr, with its calls, loops and branches as nodes.

    Args:
        jaxpr: the closed jaxpr.
        mesh: the mesh of the program, maybe empty.
        caller: the stream of the caller, if the program names it as well, so that both are one order.
        executables: what its executables can do; None if no call is to be a part of them.
        carried: if it is an iteration, which of its arguments are carried: if the host drives it, it may reuse these.
        counted: which of them follow from the number of the iteration: then it knows these.

    Raises:
        ValueError: a call is where the host cannot make it.
        ShardingError: a shard_map with calls is over other devices than the program.
    """

    def inlined(inner: ClosedJaxpr) -> VarBlock:
        return merge(prune(inline(Block.of_jaxpr(inner), caller)))

    block: VarBlock = Block.of_jaxpr(jaxpr)
    if executables is not None and carried is not None:
        own = Numbers(counters=frozenset(block.inputs[k] for k in counted) if executables.make_calls else frozenset())
        executables = executables._replace(donated=frozenset(block.inputs[carried]), numbers=own)
    passes: list[tuple[Callable[[VarBlock], VarBlock], str]] = [
        (partial(inline, caller=caller), "inlined"),
        (prune, "inlined"),
        (partial(shard_maps, mesh=mesh, inlined=inlined), "unmapped"),
        (
            partial(
                control_flow,
                mesh=mesh,
                structured=partial(structured, mesh=mesh, caller=caller, executables=executables),
            ),
            "structured",
        ),
        *(
            []
            if executables is None
            else [
                (partial(with_own_predicates, numbers=executables.numbers), "structured"),
                (partial(choose_emitted, executables=executables), "structured"),
            ]
        ),
        (rotate, "structured"),
        (run_to_calls, "structured"),
        (merge, "structured"),
        (prune, "structured"),
        (own_initial_values, "structured"),
    ]
    pruned = None
    for apply, stage in passes:
        if apply is not prune or block is not pruned:  # most programs have nothing that the passes in between change
            block = apply(block)
        pruned = block if apply is prune else pruned
        check_stage(block, stage)
    return block


@dataclasses.dataclass(frozen=True)
class _Edges:
    """What surrounds a block.

    Attributes:
        kind: what it is a block of.
        in_shardings, out_shardings: of its arguments and results; UNSPECIFIED where nothing is known.
        donated: for each argument whether its memory may be reused.
        copied: the arguments that a fragment copies for calls in less time than it takes to pin them.
        awaited: the variables that the devices wait for as soon as it has ended.
    """

    kind: Kind
    in_shardings: Sequence[MaybeSharding]
    out_shardings: Sequence[MaybeSharding]
    donated: Sequence[bool]
    copied: Collection[Var] = ()
    awaited: Collection[Var] = ()


def _partitioned(
    block: VarBlock,
    edges: _Edges,
    executables: Executables,
    default: Sharding | None,
    shardings: dict[Var, Sharding | None],
) -> VarBlock:
    """A block, and those inside of it, made of fragments; `shardings` gets those of the variables between them."""
    mesh, given = executables.mesh, block
    block, ins = explicit(block, edges.in_shardings, edges.out_shardings, mesh)
    block, direct = forward(block, ins, edges.out_shardings, edges.kind, not is_over_processes(mesh))
    donated = {*keep_where(block.inputs, edges.donated)}
    answered = partial(can_be_answered, executables=executables)
    early, numbers = executables.on_one_cpu, executables.numbers
    groups = cut(block, edges.awaited, donated, answered, reads_early=early, numbers=numbers)
    check_stage(groups, "cut")
    crossing = [var for node in groups.nodes for var in variables(node.inputs) if var not in block.consts]
    found = propagate(block, crossing, direct, ins, edges.out_shardings, mesh, default)
    # A loop may start from what the iteration around it carries: its sharding is known, the loop may need another.
    others = {
        var: other
        for var, own in zip(block.inputs, ins, strict=True)
        if isinstance(own, Sharding) and isinstance(other := found[var], NamedSharding)
        if not other.is_equivalent_to(own, type_of(var).ndim)
    }
    if others:
        return _partitioned(reshard_initial_values(given, others, mesh), edges, executables, default, shardings)
    shardings.update(found)
    made = fragments(groups, shardings, edges.out_shardings, donated, edges.copied, mesh, default)
    check_stage(made, "fragments")
    on_devices = {var for node in groups.nodes if isinstance(node, Group) for var in node.inputs}.union(edges.awaited)

    def sharding_of(atom: Atom) -> Sharding | None:
        return shardings[atom] if isinstance(atom, Var) and atom in shardings else replicated(mesh)

    def nested(node: VarNode) -> VarNode:
        if not isinstance(node, Loop | Branch):
            return node
        is_loop = isinstance(node, Loop)
        given = [*node.captured, *(node.outputs if is_loop else ())]
        outs = [or_unspecified(shardings.get(var)) for var in node.outputs]
        ins = [or_unspecified(sharding_of(atom)) for atom in given]
        blocks = []
        own = executables._replace(numbers=_known_in_iterations(node, executables))
        for inner in node.blocks:
            awaited = (
                _awaited_next(node)
                if is_loop
                else {*variables(keep_where(inner.outputs, [var in on_devices for var in node.outputs]))}
            )
            donated = [k >= len(node.captured) for k in range(len(given))]
            inside = _Edges("iteration" if is_loop else "branch", ins, outs, donated, awaited=awaited)
            blocks.append(_partitioned(inner, inside, own, default, shardings))
        return with_blocks(node, blocks)

    return dataclasses.replace(made, nodes=tuple(map(nested, made.nodes)))


def _known_in_iterations(node: VarLoop | VarBranch, executables: Executables) -> Numbers:
    """The number of the iteration of a loop, if the host knows it."""
    if not isinstance(node, Loop) or node.counter is None or node.trip_count is None or not executables.make_calls:
        return Numbers()
    return Numbers(counters=frozenset([node.carried[node.counter]]))


def _awaited_next(loop: VarLoop) -> Collection[Var]:
    """The results of an iteration that the devices need in the next one; the predicate is read as well."""
    read = {atom for node in loop.block.nodes if not is_host(node) for atom in variables(node.inputs)}
    pairs = zip(loop.carried, loop.block.outputs, strict=True)
    return {*variables([*(out for var, out in pairs if var in read), *loop.block.outputs[: loop.trip_count is None]])}


@weakref_cache
def make_plan(
    jaxpr: ClosedJaxpr,
    in_shardings: tuple[MaybeSharding, ...],
    out_shardings: tuple[MaybeSharding, ...],
    donated: tuple[bool, ...],
    mesh: Mesh,
    name: str,
    agree: bool | str,
    caller: Stream | None,
    numbers: tuple[int, ...] = (),
    on_devices: tuple[int, ...] = (),
) -> Plan:
    """The plan of a program, made once.

    Args:
        jaxpr: its closed jaxpr, whose debug information has the key paths of arguments and results.
        in_shardings, out_shardings: of its arguments and results; UNSPECIFIED where nothing is known.
        donated: for each argument whether the caller gives up its memory.
        mesh: its mesh, maybe empty.
        name: its name.
        agree: see `PlanData`.
        caller: see `structured`.
        numbers: the positions of the arguments that are Python numbers, or NumPy's, if it chooses whether to call.
        on_devices: the positions of those given to calls without results that are arrays on devices.

    Raises:
        ValueError: a call is where the host cannot make it.
        ShardingError: a call's specs are on other devices than the program.
    """
    jaxpr, out_shardings, mesh = over_auto_axes(without_refs(jaxpr), out_shardings, mesh)
    mesh = mesh_or_of_arguments(mesh, in_shardings)
    if mesh.empty:
        mesh = next(meshes_of_shard_maps(jaxpr.jaxpr), mesh)
    default = default_without_mesh(mesh, in_shardings)
    arguments = jaxpr.jaxpr.invars
    known = [arguments[i] for i in numbers if not donated[i]]
    counters: Collection[Var] = ()
    if chooses_whether_to_call(jaxpr.jaxpr):
        arrays = [var for i, var in enumerate(arguments) if i not in numbers and _has_whole_numbers(in_shardings[i])]
        counters = counters_among(inline(Block.of_jaxpr(jaxpr), caller), arrays, known)
    executables = Executables.of(mesh, default, known, counters, keep_where(arguments, donated))
    program = structured(jaxpr, mesh, caller, executables)
    along = counted_along(program, executables.numbers)
    check_devices(program, mesh)
    shardings: dict[Var, Sharding | None] = {}
    copied = [arguments[i] for i in on_devices if executables.wait_for_calls and is_copied_for_calls(arguments[i])]
    edges = _Edges("program", in_shardings, out_shardings, donated, copied)
    partitioned = _partitioned(program, edges, executables, default, shardings)
    if is_over_processes(mesh) and (named := own_shards(program, shardings, mesh)) is not program:
        program, shardings = named, {}
        partitioned = _partitioned(program, edges, executables, default, shardings)
    # Which the plan's source means something else by.
    names = Names("wait", "release", "read", "know", "count", "range", "_")
    info = jaxpr.jaxpr.debug_info
    paths = known_paths(info.arg_names, len(in_shardings), "x[{}]")
    result_paths = known_paths(info.result_paths, len(out_shardings), "result[{}]")
    bound = bind(partitioned, shardings, paths, result_paths, mesh, names)
    check_stage(bound.block, "bound", [*bound.constants])
    bound = emit(bound, mesh, on_cpus=executables.wait_for_calls, on_one_cpu=executables.on_one_cpu, donated=donated)
    check_stage(bound.block, "bound", [*bound.constants])
    # Over several processes a move is a program of all of them.
    bound = transfers(bound, names, default, is_left_to_calls=not is_over_processes(mesh))
    block = pin(bound.block, bound.constants)
    released = may_release(block.inputs, donated, [value.aval for value in block.outputs]) - shared_by_branches(block)
    own_counters = {block.inputs[i] for i in along.inputs} if along is not None else set()
    donating, _ = donations(block, released - own_counters, released)
    released -= kept_by_branches(donating)
    plan = Plan(
        name,
        mesh,
        block.inputs,
        block.outputs,
        tuple(paths),
        donating.nodes,
        block.order,
        tuple(bound.constants.items()),
        released,
        agree,
        along,
        executables.on_one_cpu and is_for_host_thread(donating.nodes),
        executables.on_one_cpu and makes_brief_calls(donating.nodes),
    )
    verify(plan, program)
    return plan


def _has_whole_numbers(sharding: MaybeSharding) -> bool:
    """Whether each device has the number itself, and no summand of it."""
    return not (isinstance(sharding, NamedSharding) and sharding.spec.unreduced)
