"""Other shardings in a lowered program, and what is known of a program whatever its shardings."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.sharding import Mesh

from partjit.errors import UnrepresentableShardingError
from partjit.inspect.flops import FlopCount, count_flops
from partjit.inspect.inlining import ADDED, TAG, InlinedProgram
from partjit.inspect.marks import is_mark, mark, marked_values
from partjit.inspect.places import Known, Origin
from partjit.inspect.propagation import Unit, ranks_of
from partjit.inspect.skeleton import Skeleton, skeleton_of
from partjit.inspect.traffic import Moved, count_traffic
from partjit.opsharding import parse_op_sharding, to_op_sharding
from partjit.shardy import main_of, nested
from partjit.spec import UNCONSTRAINED, ParsedPartitionSpec

__all__ = ["Axes", "Change", "Facts", "add_mesh", "axes_on", "change", "facts_of"]

Axes: TypeAlias = tuple[tuple[str, ...] | None, ...]
"""For each dimension the mesh axes that shard it; None for one that is left to the partitioner."""

_CONSTRAINT = "sdy.sharding_constraint"


def axes_on(spec: ParsedPartitionSpec, mesh: Mesh, rank: int, what: str) -> Axes:
    """The axes of a mesh over which a spec shards an array of some rank.

    The axes of a spec with a mesh of its own, which has the same devices, are those of that mesh: they are translated.

    Args:
        spec: the spec.
        mesh: the mesh.
        rank: the rank of the array.
        what: what errors call it.

    Raises:
        UnrepresentableShardingError: no axes of the mesh say the same.

    Example:
        >>> import jax, numpy as np
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> devices = np.array(jax.devices()[:8])
        >>> line, mesh = Mesh(devices, "x"), Mesh(devices.reshape(4, 2), ("data", "model"))
        >>> axes_on(ParsedPartitionSpec.from_user_input(NamedSharding(line, P("x")), "spec"), mesh, 2, "x")
        (('data', 'model'), ())
    """
    if spec.mesh is not None and spec.mesh.shape_tuple != mesh.shape_tuple:
        try:
            spec = parse_op_sharding(to_op_sharding(spec, spec.mesh, rank), mesh)
        except UnrepresentableShardingError as error:
            raise UnrepresentableShardingError(f"{what} has a NamedSharding over another mesh: {error}") from None
    dims = (None if axes is UNCONSTRAINED else axes for axes in spec.partitions)
    return (*dims, *[()] * (rank - len(spec.partitions)))


@dataclasses.dataclass(frozen=True)
class Change:
    """Other shardings for a program.

    Attributes:
        arguments, results: the axes of arguments and results, by their positions; None leaves one to the partitioner.
        values: the axes that values are constrained to, by their numbers.
        dropped: the numbers of the equations whose constraints are left out.
    """

    arguments: Mapping[int, Axes | None] = dataclasses.field(default_factory=dict)
    results: Mapping[int, Axes | None] = dataclasses.field(default_factory=dict)
    values: Mapping[int, Axes] = dataclasses.field(default_factory=dict)
    dropped: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """What is known of a program whatever its shardings. If its origin is saved, it can be pickled.

    Attributes:
        origin: its name, mesh and equations.
        arguments: the numbers of its arguments.
        ranks: of its results.
        donated: for each argument whether it is.
        count: of its values.
        computing: the numbers of the equations that compute values, by the numbers of the values.
        skeleton, flops, traffic: what memory, FLOPs and memory traffic are computed from.
    """

    origin: Origin
    arguments: tuple[int, ...]
    ranks: tuple[int, ...]
    donated: tuple[bool, ...]
    count: int
    computing: Mapping[int, int]
    skeleton: Skeleton
    flops: FlopCount
    traffic: tuple[Moved, ...]


def facts_of(unit: Unit, inlined: InlinedProgram, donated: Sequence[bool]) -> Facts:
    """What is known of a unit with this inlined program, whose arguments are donated as these flags say."""
    skeleton = skeleton_of(inlined)
    return Facts(
        Origin(unit.name, unit.mesh, inlined.equations),
        tuple(value.number for value in inlined.tree.inputs),
        ranks_of(unit),
        tuple(donated),
        len(inlined.numbers),
        inlined.computing,
        skeleton,
        count_flops(inlined.tree),
        count_traffic(skeleton, inlined),
    )


def change(module: Any, wanted: Change, facts: Facts, known: Known) -> None:
    """Changes shardings in a lowered module."""
    add_mesh(module, facts.origin.mesh.shape)
    _set_ends(module, wanted, facts)
    operations = nested(module.operation) if wanted.dropped or wanted.values else ()
    if wanted.dropped:
        for op in [op for op in operations if op.name == _CONSTRAINT]:
            if (tags := known.tags(op)) and tags[-1] in wanted.dropped:
                op.results[0].replace_all_uses_with(op.operands[0])
                op.erase()
        operations = nested(module.operation)
    if wanted.values:
        _constrain([*marked_values(operations)], wanted.values, facts)


def add_mesh(module: Any, shape: Mapping[str, int]) -> None:
    """Adds the mesh, which a module lacks none of whose arguments and results has a sharding.

    What loops capture refers to it nevertheless, so that such a module cannot be read from bytecode.
    """
    meshes = [op.operation for op in module.body.operations if op.operation.name == "sdy.mesh"]
    if not any(ir.StringAttr(mesh.attributes["sym_name"]).value == "mesh" for mesh in meshes):
        with module.context:
            axes = [sdy.MeshAxisAttr.get(name, size) for name, size in shape.items()]
            attributes = {"sym_name": ir.StringAttr.get("mesh"), "mesh": sdy.MeshAttr.get(axes)}
            where = ir.InsertionPoint.at_block_begin(module.body)
            ir.Operation.create("sdy.mesh", attributes=attributes, loc=ir.Location.unknown(), ip=where)


def _set_ends(module: Any, wanted: Change, facts: Facts) -> None:
    """Sets the shardings of arguments and results."""
    main = main_of(module)
    types = {"arg_attrs": [*main.type.inputs], "res_attrs": [*main.type.results]}
    counts = {"arg_attrs": len(facts.arguments), "res_attrs": len(facts.ranks)}
    for which, specs in (("arg_attrs", wanted.arguments), ("res_attrs", wanted.results)):
        attributes = main.operation.attributes
        dicts = [*attributes[which]] if which in attributes else [ir.DictAttr.get({})] * len(types[which])
        for position, axes in specs.items():
            k = position + len(types[which]) - counts[which]  # constants and tokens come first
            own = {named.name: named.attr for named in dicts[k] if named.name != "sdy.sharding"}
            if axes is not None:
                own["sdy.sharding"] = _written(axes, types[which][k].rank)
            dicts[k] = ir.DictAttr.get(own)
        if specs:
            attributes[which] = ir.ArrayAttr.get(dicts)


def _constrain(marked: Sequence[tuple[int, ir.Value]], wanted: Mapping[int, Axes], facts: Facts) -> None:
    """Constrains values for those that use them; what these use gets numbers of its own."""
    constrained: dict[ir.Value, ir.Value] = {}
    for number, value in marked:
        if number in wanted:
            tag = f"{ADDED}/{TAG}{facts.computing[number]}" if number in facts.computing else ADDED
            constrained[value] = _constrained(value, wanted[number], tag)
        if value in constrained:
            with _after(constrained[value]), ir.Location.unknown():
                mark([constrained[value]], [facts.count + number])


def _constrained(value: ir.Value, axes: Axes, tag: str) -> ir.Value:
    """What those that use a value use instead."""
    uses = [(use.owner, use.operand_number) for use in value.uses]
    with _after(value), ir.Location.name(tag):
        made = sdy.ShardingConstraintOp(value, _written(axes, ir.RankedTensorType(value.type).rank)).result
    for user, k in uses:
        if not is_mark(user.operation):
            user.operands[k] = made
    return made


def _after(value: ir.Value) -> ir.InsertionPoint:
    owner: Any = value.owner
    is_argument = isinstance(owner, ir.Block)
    return ir.InsertionPoint.at_block_begin(owner) if is_argument else ir.InsertionPoint.after(owner)


def _written(axes: Axes, rank: int) -> ir.Attribute:
    """A sharding; a key has one dimension more in the module than in the program."""
    dims = [
        sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(axis) for axis in dim or ()], is_closed=dim is not None)
        for dim in (*axes, *[()] * (rank - len(axes)))
    ]
    return sdy.TensorShardingAttr.get("mesh", dims)
