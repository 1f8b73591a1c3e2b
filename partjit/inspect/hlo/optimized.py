"""The collectives of a compiled program, read from its text: device groups, trip counts and source lines."""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

from jax.sharding import AbstractMesh, Mesh

from partjit.inspect.collectives import KINDS, Collective, Member
from partjit.inspect.hlo.device_groups import (
    Groups,
    axes_of_groups,
    axes_of_pairs,
    device_ids,
    expand,
    parse_groups,
    parse_pairs,
)
from partjit.inspect.hlo.instruction_sources import InstructionSources
from partjit.inspect.hlo.text import Computation, Instruction, leaf_types, parse_module, type_bytes
from partjit.inspect.hlo.trip_counts import trip_count
from partjit.inspect.times import ONCE, Times, given_trip_count

__all__ = ["read_collectives"]

# Kinds without the attribute `use_global_device_ids`: with a channel, their groups are of partitions.
_OF_PARTITIONS = ("all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all")
_OPCODES = {kind + suffix: kind for kind in KINDS for suffix in ("", "-start")}


def read_collectives(
    hlo_text: str,
    mesh: Mesh | AbstractMesh,
    program: str | None = None,
    iterations: Mapping[str, int] | None = None,
) -> list[Collective]:
    """The collectives of a compiled program, in the order of its text.

    An instruction in a computation with several callers counts for all of them; with callers in different branches,
    there is one collective for each branch. In a loop of unknown trip count, `times` is None. A collective in a branch
    counts as if the branch were taken, see `total_bytes`.

    Args:
        hlo_text: `compiled.as_text()`.
        mesh: the mesh it was compiled for, whose axes name the device groups.
        program: its name; by default the one in the text.
        iterations: trip counts of loops by their lines, `model.py:12`, for those that the text does not say.

    Raises:
        ValueError: the text is not that of a compiled program, or of one for another number of devices than the mesh
            has, or the groups of a collective cannot be parsed.

    Example:
        >>> import jax
        >>> from jax.sharding import NamedSharding
        >>> from partjit import Mesh, P
        >>> mesh = Mesh(jax.devices(), ("x",))
        >>> x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=NamedSharding(mesh, P("x")))
        >>> (found,) = read_collectives(jax.jit(jax.numpy.sum).lower(x).compile().as_text(), mesh)
        >>> found.kind, found.axes, found.operand, found.bytes_moved
        ('all-reduce', ('x',), 'f32[]', 7.0)
    """
    module = parse_module(hlo_text)
    found = []
    sources = InstructionSources(module)
    contexts = _contexts(sources, iterations or {})
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode not in _OPCODES or not contexts[computation.name]:
                continue
            if (devices := module.replicas * module.partitions) != mesh.size:
                raise ValueError(
                    f"read_collectives: the program {module.name} is for {devices} devices, but the mesh has "
                    f"{mesh.size}: pass the mesh that it was compiled for"
                )
            one = _collective(instruction, computation, sources, mesh, program or module.name)
            found += [
                dataclasses.replace(
                    one,
                    times=times.exact,
                    per=times if times.loops else None,
                    is_exact=not times.loops and not branch,
                    branch=branch,
                )
                for branch, times in contexts[computation.name].items()
            ]
    return found


_Branch = tuple[tuple[str, int], ...]


def _contexts(sources: InstructionSources, iterations: Mapping[str, int]) -> Mapping[str, dict[_Branch, Times]]:
    """The branches in which each computation runs, and how often in a step."""
    found: dict[str, dict[_Branch, Times]] = collections.defaultdict(dict)
    for computation in reversed(sources.module.computations.values()):  # callers before what they call
        if computation.is_entry:
            found[computation.name][()] = ONCE
        for branch, times in found[computation.name].items():
            for name, factor, inner in _calls(computation, sources, iterations):
                already, more = found[name].get((*branch, *inner)), times * factor
                found[name][*branch, *inner] = more if already is None else already + more
    return found


def _calls(
    computation: Computation, sources: InstructionSources, iterations: Mapping[str, int]
) -> Iterator[tuple[str, Times, _Branch]]:
    """(computation, how often, in which branch) of the callees of a computation, without reductions and the like."""
    for instruction in computation.instructions.values():
        match instruction.opcode:
            case "while":
                count = trip_count(instruction, computation, sources.module)
                site = None
                if count is None:
                    site = sources.of([instruction], computation).site
                    count = given_trip_count(site, iterations)
                body, condition = (Times(count), Times(count + 1)) if count is not None else (Times(1, (site,)),) * 2
                yield from ((name, body, ()) for name in instruction.names_in("body"))
                yield from ((name, condition, ()) for name in instruction.names_in("condition"))
            case "conditional":
                names = instruction.names_in("branch_computations")
                names = names or [
                    name for key in ("true_computation", "false_computation") for name in instruction.names_in(key)
                ]
                yield from ((name, ONCE, ((instruction.name, number),)) for number, name in enumerate(names))
            case "call":
                yield from ((name, ONCE, ()) for name in instruction.names_in("to_apply"))
            case "fusion" | "async-start" | "custom-call":
                for key in ("calls", "called_computations"):
                    yield from ((name, ONCE, ()) for name in instruction.names_in(key))


def _collective(
    instruction: Instruction,
    computation: Computation,
    sources: InstructionSources,
    mesh: Mesh | AbstractMesh,
    program: str,
) -> Collective:
    kind, module = _OPCODES[instruction.opcode], sources.module
    done = _done(instruction, computation)
    operands = [computation.instructions[name] for name in instruction.operands]
    if kind == "ragged-all-to-all":  # the others are the target, offsets and sizes
        operands = operands[:1]
    arrays = [leaf for operand in operands for leaf in leaf_types(operand.type)]
    results = leaf_types(done.type)
    # An all-to-all of several operands moves the shards of one array; other kinds move as many arrays.
    parts = len(results) == len(arrays) > 1 and kind != "all-to-all"
    members = _members(arrays, results, operands, done, instruction, computation, sources) if parts else ()
    traced = members[0] if members else sources.of([done, instruction], computation)
    attributes = instruction.attributes
    groups, axes, size, sent = _between(
        kind,
        attributes.get("source_target_pairs" if kind == "collective-permute" else "replica_groups", "{}"),
        "channel_id" in attributes,
        None if kind in _OF_PARTITIONS else attributes.get("use_global_device_ids") == "true",
        (module.replicas, module.partitions),
        mesh,
    )
    return Collective(
        kind=kind,
        axes=axes,
        group_size=size,
        operand=", ".join(arrays),
        result=", ".join(results),
        operand_bytes=sum(map(type_bytes, arrays)),
        result_bytes=sum(map(type_bytes, results)),
        groups=groups,
        sent=sent,
        site=traced.site,
        tags=traced.tags,
        op_name=traced.op_name,
        library=traced.library,
        module=traced.module,
        name=instruction.name,
        program=program,
        members=members,
    )


# A program has many collectives, but few different groups.
@functools.lru_cache(maxsize=1024)
def _between(
    kind: str, text: str, channel: bool, global_ids: bool | None, counts: tuple[int, int], mesh: Mesh | AbstractMesh
) -> tuple[Groups, tuple[str, ...], int, float]:
    """The groups of a collective, their axes, their size, and the fraction of devices that send."""
    if kind == "collective-permute":
        pairs = parse_pairs(text)
        groups = expand(pairs, *counts, channel, None) if pairs else ()
        axes = axes_of_pairs(groups, mesh)
        sent = sum(source != target for source, target in groups) / mesh.size
        return device_ids(groups, mesh), axes, math.prod(mesh.shape[name] for name in axes), sent
    groups = expand(parse_groups(text), *counts, channel, global_ids)
    return device_ids(groups, mesh), axes_of_groups(groups, mesh), max(map(len, groups)), 1.0


def _done(instruction: Instruction, computation: Computation) -> Instruction:
    """The instruction with the result: an asynchronous collective has separate instructions for start and end."""
    done = instruction
    while done.opcode.endswith(("-start", "-update")):
        ends = [user for user in computation.users.get(done.name, []) if user.opcode.endswith(("-done", "-update"))]
        if not ends:
            break
        done = ends[0]
    return done


def _members(
    arrays: list[str],
    results: list[str],
    operands: list[Instruction],
    done: Instruction,
    instruction: Instruction,
    computation: Computation,
    sources: InstructionSources,
) -> tuple[Member, ...]:
    # XLA gives the `get-tuple-element` of a combined result the metadata of the original collective.
    takers: dict[int, list[Instruction]] = {}
    for user in computation.users.get(done.name, []):
        if user.opcode == "get-tuple-element":
            takers.setdefault(int(user.attributes["index"]), []).append(user)
    members = []
    for k, (array, result) in enumerate(zip(arrays, results, strict=True)):
        own = [*takers.get(k, []), *([operands[k]] if len(operands) == len(arrays) else []), done, instruction]
        sizes = {"operand_bytes": type_bytes(array), "result_bytes": type_bytes(result)}
        members.append(Member(operand=array, result=result, **sizes, **vars(sources.of(own, computation))))
    return tuple(members)
