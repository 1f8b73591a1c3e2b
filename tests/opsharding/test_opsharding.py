"""OpSharding to spec and back: everything a spec can say comes back as that spec, everything else is refused."""

import contextlib
import itertools
import math
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.sharding import GSPMDSharding
from jax.sharding import AbstractMesh, NamedSharding

import partjit
from partjit import P, ParsedPartitionSpec, UnrepresentableShardingError, parse_op_sharding, to_op_sharding
from partjit.opsharding import explode_superdims, strides_for_sizes, unflatten_array, unflatten_superdims
from partjit.opsharding.superdims import digits_of, digits_of_array
from partjit.opsharding.text import from_text
from partjit.opsharding.wire import from_bytes
from tests.census import saw, sees
from tests.effort import sample

OpSharding = type(to_op_sharding(None, AbstractMesh((2,), ("x",)), 0))
HloSharding = type(NamedSharding(AbstractMesh((2,), ("x",)), P())._to_xla_hlo_sharding(1))
NAMES = "xyzw"


def mesh_shapes(max_devices, max_axes, smallest=1):
    """All shapes of meshes."""
    for count in range(1, max_axes + 1):
        for shape in itertools.product(range(smallest, max_devices + 1), repeat=count):
            if math.prod(shape) <= max_devices:
                yield shape


def all_partitions(names, rank):
    """All ways to put axes on dimensions: any subset, each axis on one dimension, in any order there."""
    for count in range(len(names) + 1):
        for axes in itertools.permutations(names, count):
            for dims in itertools.combinations_with_replacement(range(rank), count):
                yield tuple(tuple(a for a, d in zip(axes, dims, strict=True) if d == dim) for dim in range(rank))


def tile_of_each_device(mesh, partitions):
    """The definition: along a dimension the tile number is that of the position on its axes, the first one major."""
    positions = np.indices(mesh.axis_sizes).reshape(len(mesh.axis_sizes), -1)
    at = dict(zip(mesh.axis_names, positions, strict=True))
    tiles = []
    for axes in partitions:
        tile = np.zeros(mesh.size, np.int64)
        for axis in axes:
            tile = tile * mesh.shape[axis] + at[axis]
        tiles.append(tile)
    return np.array(tiles).reshape(len(partitions), mesh.size).T


def tiles_of(proto, rank, count):
    """The same from a proto that lists its devices."""
    if not len(proto.tile_assignment_devices):
        return np.zeros((count, rank), np.int64)
    grid = proto.tile_assignment_dimensions
    tiles = np.indices(grid).reshape(len(grid), -1)[:rank].T
    found = np.empty((count, rank), np.int64)
    found[proto.tile_assignment_devices] = tiles
    return found


def visible(mesh, partitions):
    """The partitions without axes of size 1, which a sharding does not show."""
    return tuple(tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in partitions)


@pytest.mark.soak
@pytest.mark.parametrize("max_axes", [1, 2, 3, 4])
def test_every_spec_of_every_small_mesh_comes_back(max_axes):
    shapes = [shape for shape in mesh_shapes(16, max_axes) if len(shape) == max_axes]
    if max_axes == 4:  # a third axis of size 1 adds nothing to the second
        shapes = [shape for shape in shapes if shape.count(1) <= 1]
    assert shapes
    for shape in shapes:
        mesh = AbstractMesh(shape, tuple(NAMES[: len(shape)]))
        for rank in range(1, 4):
            # There are more the more axes there are: a sample of those.
            for partitions in sample([*all_partitions(mesh.axis_names, rank)], [1, 2, 7, 29][max_axes - 1]):
                spec = ParsedPartitionSpec(P(*partitions), partitions)
                expected = visible(mesh, partitions)
                iota, listed = to_op_sharding(spec, mesh, rank), to_op_sharding(spec, mesh, rank, as_list=True)
                of_jax = NamedSharding(mesh, P(*partitions))._to_xla_hlo_sharding(rank)
                for sharding in (iota, listed, of_jax):
                    parsed = parse_op_sharding(sharding, mesh)
                    assert (parsed.partitions or ((),) * rank) == expected, (mesh, partitions, str(sharding))
                assert HloSharding.from_proto(iota) == of_jax
                tiles = tile_of_each_device(mesh, partitions)
                np.testing.assert_array_equal(tiles_of(listed, rank, mesh.size), tiles)


GRIDS = [((8,), 1), ((4, 2), 1), ((2, 4), 1), ((2, 2, 2), 1), ((1, 8, 1), 1), ((2,), 4), ((4,), 2), ((2, 2), 2)]


@pytest.mark.soak
@pytest.mark.parametrize(("grid", "copies"), GRIDS, ids=str)
def test_of_all_orders_of_eight_devices_exactly_those_a_spec_gives_are_converted(grid, copies):
    mesh = AbstractMesh((2, 2, 2), ("x", "y", "z"))
    truth = {}
    for partitions in all_partitions(mesh.axis_names, len(grid)):
        tiles = tile_of_each_device(mesh, partitions)
        if tuple(2 ** len(axes) for axes in partitions) == grid:
            truth[tuple(np.ravel_multi_index(tiles.T, grid))] = partitions
    assert truth
    head = bytes([0x08, 3, 0x1A, len(grid) + (copies > 1), *grid, *([copies, 0x30, 1] if copies > 1 else []), 0x22, 8])
    orders = np.array(list(itertools.permutations(range(8))), np.int8)
    tile_of = np.empty_like(orders)  # per order, the tile that each device holds
    np.put_along_axis(tile_of, orders.astype(np.int64), np.arange(8, dtype=np.int8)[None] // copies, axis=1)
    # All that a spec gives, and of the others a sample.
    is_given = np.array([tiles in truth for tiles in map(tuple, tile_of.tolist())])
    tried = np.sort(np.concatenate([np.flatnonzero(is_given), sample(np.flatnonzero(~is_given), 53)]))
    converted = 0
    for order, tiles in zip(map(bytes, orders[tried]), map(tuple, tile_of[tried].tolist()), strict=True):
        expected = truth.get(tiles)
        try:
            found = parse_op_sharding(head + order, mesh).partitions
        except UnrepresentableShardingError:
            found = None
        assert found == expected, order
        converted += found is not None
    assert converted == len(truth) * math.factorial(copies) ** (8 // copies)


def divisors_of(number):
    return [factor for factor in range(2, number + 1) if number % factor == 0]


@st.composite
def iota_forms(draw):
    """Grids of up to 24 devices with or without copies, in any iota form."""
    count = draw(st.sampled_from([4, 6, 8, 12, 16, 24]))

    def factors():
        sizes, rest = [], count
        while rest > 1 and len(sizes) < 3:
            sizes.append(draw(st.sampled_from(divisors_of(rest))))
            rest //= sizes[-1]
        return [*sizes, *([rest] if rest > 1 else [])]

    reshape = factors()
    perm = draw(st.permutations(range(len(reshape))))
    grid = draw(st.permutations(factors()))
    shapes = [shape for shape in mesh_shapes(count, 3, smallest=2) if math.prod(shape) == count]
    return grid, draw(st.booleans()), reshape, perm, draw(st.sampled_from(shapes))


@sees("different examples", "several elements")
@given(iota_forms())
def test_an_iota_form_and_its_list_mean_the_same(form):
    grid, copies, reshape, perm, shape = form
    mesh = AbstractMesh(shape, tuple(NAMES[: len(shape)]))
    devices = np.arange(math.prod(grid)).reshape(reshape).transpose(perm).ravel()
    end = " last_tile_dim_replicate" if copies else ""
    shape_of = {name: str(sizes).replace(" ", "") for name, sizes in (("grid", grid), ("reshape", reshape))}
    transposed = f"T({','.join(map(str, perm))})" if len(perm) > 1 else ""
    iota = f"{{devices={shape_of['grid']}<={shape_of['reshape']}{transposed}{end}}}"
    listed = f"{{devices={shape_of['grid']}{','.join(map(str, devices))}{end}}}"
    assert str(from_text(iota)) == iota
    if len(devices) <= 16:
        assert str(from_text(listed)) == listed
    rank = len(grid) - copies
    truth = {
        tile_of_each_device(mesh, partitions).tobytes(): partitions
        for partitions in all_partitions(mesh.axis_names, rank)
        if [math.prod(mesh.shape[axis] for axis in axes) for axes in partitions] == grid[:rank]
    }
    tiles = np.empty((mesh.size, rank), np.int64)
    tiles[devices] = np.indices(grid).reshape(len(grid), -1)[:rank].T
    expected = truth.get(tiles.tobytes())
    for text in (iota, listed):
        if expected is None:
            with pytest.raises(UnrepresentableShardingError):
                parse_op_sharding(text, mesh)
        else:
            assert parse_op_sharding(text, mesh).partitions == expected
    # XLA reads what we wrote as the same.
    proto = HloSharding.from_string(iota).to_proto()
    if expected is not None:
        assert parse_op_sharding(proto, mesh).partitions == expected


# Forms


MESH = AbstractMesh((4, 2), ("x", "y"))


def test_every_form_of_one_sharding_is_the_same_spec(mesh):
    hlo = NamedSharding(mesh, P("y", "x"))._to_xla_hlo_sharding(2)
    proto = hlo.to_proto()
    for form in (hlo, proto, proto.SerializeToString(), str(hlo), f"  {hlo} "):
        parsed = parse_op_sharding(form, mesh)
        assert parsed.partitions == (("y",), ("x",))
        assert parsed.user_spec == P("y", "x")
        assert parsed == ParsedPartitionSpec.from_user_input(P("y", "x"), "in_axis_resources")


def test_a_gspmd_sharding(mesh):
    hlo = NamedSharding(mesh, P("y"))._to_xla_hlo_sharding(1)
    assert parse_op_sharding(GSPMDSharding(tuple(mesh.devices.flat), hlo), mesh).partitions == (("y",),)


@pytest.mark.parametrize("grid", [(4, 2), (2, 2, 2)])
def test_what_compiled_programs_say(grid):
    devices = np.array(jax.devices())[[3, 1, 0, 2, 4, 7, 6, 5]].reshape(grid)
    mesh = partjit.Mesh(devices, tuple("xyz"[: len(grid)]))
    ins, outs = NamedSharding(mesh, P(("y", "x"))), (NamedSharding(mesh, P("y")), NamedSharding(mesh, P()))
    function = jax.jit(lambda x: (x * 2, x.sum()), in_shardings=ins, out_shardings=outs)
    executable = function.lower(jnp.zeros((8, 8))).compile().runtime_executable()
    assert [parse_op_sharding(s, mesh).mesh_axes for s in executable.get_output_shardings()] == [("y",), ()]
    (module,) = executable.hlo_modules()
    # On jax 0.12 these are named shardings, whose plain type reads REPLICATED.
    assert [spec.mesh_axes for spec in parse_op_sharding(module.spmd_output_sharding, mesh)] == [("y",), ()]
    (argument,) = module.spmd_parameters_shardings
    assert parse_op_sharding(argument, mesh).partitions == (("y", "x"), ())


@pytest.mark.parametrize(
    ("text", "partitions"),
    [
        ("{replicated}", ()),
        ("{devices=[8]<=[8]}", (("x", "y"),)),
        ("{devices=[8]<=[4,2]T(1,0)}", (("y", "x"),)),
        ("{devices=[8]0,2,4,6,1,3,5,7}", (("y", "x"),)),
        ("{devices=[4,1,2]<=[8] last_tile_dim_replicate}", (("x",), ())),
        ("{devices=[4,1,2]1,0,2,3,5,4,6,7 last_tile_dim_replicate}", (("x",), ())),
        ("{devices=[1,2,2,2]<=[4,2]T(1,0) last_tile_dims={replicated, replicated}}", ((), ("y",))),
        ('{devices=[2,4]<=[4,2]T(1,0) last_tile_dim_replicate metadata={op_name="a}b"}}', (("y",),)),
        ("{mesh['a'=4,'b'=2], [{'b'}, {'a'}]}", (("y",), ("x",))),
        ("{mesh['a'=8], [{'a':(4)2}, {'a':(1)4}]}", (("y",), ("x",))),
        ("{mesh['a'=2,'b'=2,'c'=2], [{'a', 'b'}, {}], replicated={'c'}}", (("x",), ())),
        ("{mesh['a'=4,'one'=1,'b'=2], [{'b', 'one'}, {'a'}]}", (("y",), ("x",))),
        ("{mesh['a'=4,'b'=2], [{'b', 'a':(2)1}, {'a'}]}", (("y",), ("x",))),
        ("{mesh['a'=4,'b'=2], []}", ()),
        ("{mesh[], replicated}", ()),
    ],
)
def test_texts(text, partitions):
    assert parse_op_sharding(text, MESH).partitions == partitions
    if "devices=" in text:
        proto = HloSharding.from_string(text).to_proto()
        for form in (proto, proto.SerializeToString()):
            assert parse_op_sharding(form, MESH).partitions == partitions


@pytest.mark.parametrize("kinds", [["MANUAL"], ["UNREDUCED"], ["REPLICATED"], ["MANUAL", "REPLICATED"]], ids=str)
def test_subgroups_of_a_proto_mean_what_its_bytes_say(kinds):
    proto = to_op_sharding(P("x"), MESH, 1)
    proto.replicate_on_last_tile_dim = False
    proto.tile_assignment_dimensions = [4, 2, *[1] * (len(kinds) - 1)]
    proto.last_tile_dims = [getattr(OpSharding.Type, kind) for kind in kinds]
    for form in (proto, HloSharding.from_proto(proto), proto.SerializeToString()):
        if kinds == ["REPLICATED"]:
            assert parse_op_sharding(form, MESH).partitions == (("x",),)
        else:
            with pytest.raises(
                UnrepresentableShardingError, match=rf"{kinds[0]} subgroup.*The rest of it is P\('x',?\)"
            ):
                parse_op_sharding(form, MESH)


@pytest.mark.parametrize("kinds", [["MANUAL"], ["UNREDUCED"], ["MANUAL", "UNREDUCED"]], ids=str)
@pytest.mark.parametrize("copies", [1, 2])
def test_a_subgroup_of_one_device_says_nothing(kinds, copies):
    """XLA drops it in an HloSharding, but not in the proto and its bytes."""
    proto = to_op_sharding(P("x") if copies == 2 else P("x", "y"), MESH, 2)
    proto.replicate_on_last_tile_dim = False
    proto.tile_assignment_dimensions = [4, 2 // copies, *[1] * len(kinds), copies]
    proto.last_tile_dims = [getattr(OpSharding.Type, kind) for kind in (*kinds, "REPLICATED")]
    for form in (proto, proto.SerializeToString(), HloSharding.from_proto(proto)):
        assert parse_op_sharding(form, MESH).partitions == (("x",), ("y",) if copies == 1 else ())


def test_a_tuple_is_a_list():
    text = "{{replicated}, {devices=[4,2]<=[8]}}"
    for form in (text, HloSharding.from_string(text), HloSharding.from_string(text).to_proto().SerializeToString()):
        assert [spec.partitions for spec in parse_op_sharding(form, MESH)] == [(), (("x",), ("y",))]
    assert parse_op_sharding("{}", MESH) == []


@sees("different examples", "several elements")
@given(st.sampled_from([(4, 2), (2, 4), (2, 2, 2), (8,)]), st.data())
def test_named_shardings_mean_what_xla_reads_in_them(shape, data):
    names = NAMES[: len(shape)]
    axes = data.draw(st.permutations(names))
    ends = sorted(data.draw(st.lists(st.integers(0, len(axes)), min_size=2, max_size=2)))
    dims = [axes[: ends[0]], axes[ends[0] : ends[1]]]
    of_mesh = ",".join(f"'{name}'={size}" for name, size in zip(names, shape, strict=True))
    of_dims = ", ".join("{" + ", ".join(f"'{axis}'" for axis in dim) + "}" for dim in dims)
    named = HloSharding.from_string(f"{{mesh[{of_mesh}], [{of_dims}]}}")
    plain = HloSharding.v3_to_v2_sharding(named)
    mesh = AbstractMesh(shape, tuple(names))
    for form in (named, str(named), named.to_proto(), plain):
        parsed = parse_op_sharding(form, mesh)
        assert (parsed.partitions or ((), ())) == tuple(map(tuple, dims))


# Refusals


REFUSED = {
    "{devices=[2,4]<=[8]}": r"dimension 0 over a factor of 2 of the axis 'x', which has 4 devices.*split 'x' into",
    "{devices=[8]<=[2,2,2]T(1,0,2)}": "a factor of 2 of the axis 'x'",
    "{devices=[8]0,1,2,3,4,5,7,6}": r"order that is no transposition of the mesh \(x=4, y=2\)",
    "{devices=[8]7,6,5,4,3,2,1,0}": "no transposition",
    "{devices=[2,4]1,2,3,0,4,5,6,7 last_tile_dim_replicate}": "a factor of 2 of the axis 'x'",
    "{devices=[8]0,0,1,1,2,2,3,3}": "no transposition",
    "{devices=[4]<=[4]}": r"is for 4 devices, but the mesh \(x=4, y=2\) has 8",
    "{devices=[16]<=[16]}": "is for 16 devices",
    "{maximal device=3}": r"\{maximal\}: the whole value is on one device",
    "{manual}": "each device has a value of its own",
    "{unknown}": "the partitioner has not decided",
    "{unreduced}": "each device holds a partial sum",
    "{devices=[4,2]<=[8] last_tile_dims={manual}}": r"MANUAL subgroup.*The rest of it is P\('x',?\)",
    "{devices=[4,2]<=[8] last_tile_dims={unreduced}}": r"UNREDUCED subgroup.*The rest of it is P\('x',?\)",
    "{devices=[2,2,2]<=[8] last_tile_dims={manual, replicated}}": "Neither does one express the rest: .*factor of 2",
    "{devices=[8]<=[8] shard_as 1}": "belongs to a shard group",
    "{replicated shard_like 2}": "belongs to a shard group",
    "{mesh['a'=4,'b'=2], [{'a'}], manual={'b'}}": r"MANUAL.*The rest of it is P\('x',?\)",
    "{mesh['a'=4,'b'=2], [{'a'}], unreduced={'b'}}": "UNREDUCED",
    "{mesh['a'=4,'b'=2], [{'a', ?}]}": "may be sharded further",
    "{mesh['a'=4,'b'=2], [{'a':(1)2}]}": "a factor of 2 of the axis 'x'",
    "{mesh['a'=4], [{'a'}]}": "is for 4 devices",
    # no shardings at all
    "": "is not in braces",
    "replicated": "is not in braces",
    "{garbage}": "is not the text of a sharding",
    "{devices=[2]}": "is not the text",
    "{devices=[3,3]<=[8]}": r"\[3, 3\] has 9 tiles, but \[8\] are assigned",
    "{devices=[2,2]0,1,2}": "has 4 tiles, but 3 devices are listed",
    "{devices=[0]<=[0]}": r"its grid of tiles is \[0\]",
    "{devices=[2,4]<=[2,4]T(0,0)}": r"\[0, 0\] does not permute 2 dimensions",
    "{devices=[8]<=[8] last_tile_dims={manual,manual}}": r"its grid of tiles is \[8\] and has 2 subgroups",
    "{devices=[2,4]<=[8] last_tile_dims={foo}}": "subgroup 'foo', which is not known",
    "{devices=[,]<=[8]}": "is no list of numbers",
    "{devices=[8]0,1,2,3,4,5,6,99999999999999999999}": "does not fit into 64 bits",
    f"{{devices=[8]0,1,2,3,4,5,6,{2**63}}}": "does not fit into 64 bits",
    f"{{devices=[8]0,1,2,3,4,5,6,{2**63 - 1}}}": "no transposition",
    "{mesh['x'=4], [{'z'}]}": "names 'z', which is no axis of its mesh",
    "{mesh['x'=4,'y'=2], [{'x'},{'x'}]}": "names an axis of its mesh twice",
    "{mesh['x'=4,'y'=2], [{'x':(1)3}]}": "names the part",
    "{mesh['x'=8], [{'x':(0)2}]}": "names the part",
    "{mesh['x'=8], [{'x':(2)0}]}": "names the part",
    "{mesh['x'=0], [{'x'}]}": "is not the text of a named sharding",
    "{mesh['x'=8], [{'x'}": "is not the text of a named sharding",
    "{mesh['x'=8], [{'x'}], manual=3}": "is not the text of a named sharding",
    "{mesh['x'=8], [{'x'}], foo={}}": "has 'foo', which is not known",
    "{mesh['x'], [{'x'}]}": r"has the mesh \['x'\]",
    "{mesh['x'=8]}": "is not the text of a sharding",
    "{" * 100_000: "is nested too deeply",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:80])
def test_what_no_spec_says_is_refused_with_the_reason(text):
    with pytest.raises(UnrepresentableShardingError, match=REFUSED[text]) as caught:
        parse_op_sharding(text, MESH)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, NotImplementedError)


def as_advised(mesh, message):
    """The mesh with one axis split as the message says."""
    advice = re.search(r"split '(\w+)' into axes of ([\d, ]+) and (\d+) devices, in this order", message)
    assert advice, message
    parts = {f"{advice[1]}{i}": int(size) for i, size in enumerate([*advice[2].split(", "), advice[3]])}
    assert min(parts.values()) > 1
    assert math.prod(parts.values()) == mesh.shape[advice[1]]
    axes = [(parts if name == advice[1] else {name: size}).items() for name, size in mesh.shape.items()]
    names, sizes = zip(*itertools.chain(*axes), strict=True)
    return AbstractMesh(sizes, names)


@pytest.mark.parametrize("shape", [(16,), (8, 2), (2, 8), (4, 4)], ids=str)
def test_axes_split_as_advised_have_a_spec_where_any_axes_have(shape):
    finest = AbstractMesh((2, 2, 2, 2), tuple(NAMES))
    reached = set()
    for perm in itertools.permutations(range(4)):
        for grid in ([2, 8], [4, 4], [2, 2, 4]):
            sizes = ",".join(map(str, grid))
            text = f"{{devices=[{sizes}]<=[2,2,2,2]T({','.join(map(str, perm))}) last_tile_dim_replicate}}"
            mesh = AbstractMesh(shape, tuple(NAMES[: len(shape)]))
            while True:
                try:
                    spec = parse_op_sharding(text, mesh)
                    break
                except UnrepresentableShardingError as error:
                    mesh = as_advised(mesh, str(error))
            reached.add(mesh.axis_sizes)
            tiles = tile_of_each_device(finest, parse_op_sharding(text, finest).partitions)
            np.testing.assert_array_equal(tile_of_each_device(mesh, spec.partitions), tiles)
    assert (2, 2, 2, 2) in reached
    assert len(reached) > 2


@pytest.mark.parametrize("sharding", [None, 3, P("x"), [1, 2], NamedSharding(MESH, P("x"))], ids=repr)
def test_what_is_no_sharding_of_xla_is_a_type_error(sharding):
    with pytest.raises(TypeError, match="parse_op_sharding expects an OpSharding"):
        parse_op_sharding(sharding, MESH)


def message(*fields):
    """A protobuf message of these (number, value) pairs, of small numbers, bytes and messages."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            value %= 1 << 64
            digits = [value >> shift & 127 for shift in range(0, max(1, value.bit_length()), 7)]
            out += bytes([number << 3, *(digit | 128 for digit in digits[:-1]), digits[-1]])
        else:
            out += bytes([number << 3 | 2, len(value)]) + value
    return out


AXES = ((1, message((1, b"x"), (2, 4))), (1, message((1, b"y"), (2, 2))))


def named_bytes(*dims, mesh=AXES):
    """An `OpSharding` that is a named sharding, of bytes for its axis of each closed dimension."""
    closed = ((3, message((1, axis), (2, 1))) for axis in dims)
    return message((14, message((2, message(*mesh)), *closed)))


BROKEN = {
    "an axis before the first": (named_bytes(message((1, -1))), "names axis -1 of a mesh of 2"),
    "an axis after the last": (named_bytes(message((1, 2))), "names axis 2 of a mesh of 2"),
    "an axis by a message": (named_bytes(message((1, b"x"))), "names axis b'x' of a mesh of 2"),
    "an axis that is a number": (
        message((14, message((2, message(*AXES)), (3, message((1, 1)))))),
        "but should be a message",
    ),
    "a part of no size": (named_bytes(message((2, message((2, 0))))), "names a part of axis 0, which has 4"),
    "a part after nothing": (named_bytes(message((2, message((1, 0), (2, 2))))), "names a part of axis 0"),
    "a part by a message": (named_bytes(message((2, message((2, b""))))), "names a part of axis 0"),
    "a part after a message": (named_bytes(message((2, message((1, b""), (2, 2))))), "names a part of axis 0"),
    "a part that does not divide": (named_bytes(message((2, message((1, 2), (2, 4))))), "that does not divide it"),
    "a mesh axis of no size": (named_bytes(mesh=((1, message((2, 0))),)), r"its mesh is \[0\]"),
    "a mesh axis by a message": (named_bytes(mesh=((1, message((2, b""))),)), r"its mesh is \[b''\]"),
    "a field of the mesh": (named_bytes(mesh=((3, 1),)), "mesh has a field 3, which is not known"),
    "a field of the named sharding": (message((14, message((9, 1)))), "named sharding has a field 9"),
    "a message nobody knows": (message((15, b"")), "has a field 15, which is not known"),
    "a number nobody knows": (message((15, 1)), "has a field 15, which is not known"),
    "a type nobody knows": (message((1, 77)), "has the type 77, which is not known"),
    "a field that is cut": (message((14, b"12"))[:-1], "the data ends within a field"),
    "a number that is cut": (b"\x08\x80", "the data ends within a number"),
    "a number of eleven bytes": (b"\x08" + b"\x80" * 10 + b"\x01", "the data ends within a number"),
    "a number of more than 64 bits": (b"\x08\xcd" + b"\x80" * 8 + b"\x02", "has the type 77, which is not known"),
    "a large number": (named_bytes(message((1, 2**62))), f"names axis {2**62} of a mesh of 2"),
    "a field of eight bytes": (b"\x09" + bytes(8), "field 1 has a wire type"),
    "a field of four bytes": (b"\x0d" + bytes(4), "field 1 has a wire type"),
    "a field of no number": (message((0, 1)), "has a field 0, which is not known"),
    "a field that is no longer": (message((2, 1)), "has a field 2, which is not known"),
    "an open dimension": (message((14, message((2, message(*AXES)), (3, message((1, b""), (3, 1)))))), "0 is open"),
    "too few devices of a mesh": (named_bytes(b"", mesh=(*AXES, (2, bytes(3)))), r"mesh \[4, 2\] lists 3 devices"),
    "a device below zero": (message((1, 3), (3, 8), (9, -1)), r"but \[-1\] are assigned"),
    "packed devices below zero": (message((1, 3), (3, 1), (4, message((0, -1))[1:])), r"\{devices=\[1\]-1\} is for 1"),
    "a large device": (message((1, 3), (3, 8), (9, message((0, 2**62))[1:])), rf"but \[{2**62}\] are assigned"),
    "a device of a mesh without axes": (message((14, message((2, message((2, 3)))))), "the whole value is on one"),
    "a manual axis": (
        message((14, message((2, message(*AXES)), (3, message((1, b""), (2, 1))), (7, message((1, 1)))))),
        "has a MANUAL subgroup",
    ),
    "an unreduced axis": (
        message((14, message((2, message(*AXES)), (3, message((1, b""), (2, 1))), (5, message((1, 1)))))),
        "has a UNREDUCED subgroup",
    ),
    "a shard group": (message((1, 0), (11, 1), (12, 5), (13, 1)), "belongs to a shard group"),
    "a shard group of a named sharding": (named_bytes(b"") + message((11, 1)), "belongs to a shard group"),
    "a shard group of tiles": (message((1, 3), (3, 8), (9, 8), (11, 1)), "belongs to a shard group"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_message_is_refused_with_what_is_wrong_with_it(what):
    data, text = BROKEN[what]
    with pytest.raises(UnrepresentableShardingError, match=text):
        parse_op_sharding(data, MESH)


@pytest.mark.parametrize(
    ("number", "text"), [(1, "on one device"), (4, "a value of its own"), (5, "has not decided"), (6, "a partial sum")]
)
def test_types_have_the_numbers_of_the_wire_format(number, text):
    with pytest.raises(UnrepresentableShardingError, match=text):
        parse_op_sharding(message((1, number)), MESH)
    assert parse_op_sharding(message((1, 2), (5, message((1, 0)))), MESH) == parse_op_sharding("{{replicated}}", MESH)


def test_the_messages_that_are_broken_would_be_shardings_if_they_were_not():
    halves = message((1, 0), (2, message((1, 1), (2, 2)))), message((1, 1))
    assert parse_op_sharding(named_bytes(message(), message((1, 1))), MESH).partitions == (("x",), ("y",))
    split = AbstractMesh((2, 2, 2), ("a", "b", "c"))
    assert parse_op_sharding(named_bytes(*halves), split).partitions == (("a",), ("c",))
    described = message(
        (14, message((1, 1), (2, message(*AXES)), (6, message((2, b"line 7"))), (3, message((1, message()), (2, 1)))))
    )
    assert parse_op_sharding(described, MESH).partitions == (("x",),)
    assert parse_op_sharding(message((1, 0), (12, 5), (13, 1)), MESH).partitions == ()
    for replicated in (
        named_bytes(message((1, 1)), mesh=((1, message((1, b"one"))), *AXES)),  # one device, without a size
        message((14, message((2, message(*AXES)), (3, message((1, b""), (2, 1))), (4, message((1, 1)))))),
    ):
        assert parse_op_sharding(replicated, MESH).partitions == (("x",),)
    assert parse_op_sharding(named_bytes(message((2, message((2, 2))))), split).partitions == (("a",),)
    assert parse_op_sharding(named_bytes(message((2, message((1, 2))))), split).partitions == ()
    ordered = named_bytes(b"", mesh=(*AXES, (2, bytes([0, 2, 4, 6, 1, 3, 5, 7]))))
    assert parse_op_sharding(ordered, split).partitions == (("c", "a"),)


@pytest.mark.parametrize("count", [1, 127, 128, 129, 130, 300])
def test_lists_of_many_devices_come_back_from_bytes(count):
    mesh = AbstractMesh((2, count), ("x", "y"))
    proto = to_op_sharding(P("y", "x"), mesh, 2, as_list=True)
    assert parse_op_sharding(proto.SerializeToString(), mesh).partitions == visible(mesh, (("y",), ("x",)))
    copied = to_op_sharding(P("y"), mesh, 1, as_list=True)
    assert (parse_op_sharding(copied.SerializeToString(), mesh).partitions or ((),)) == visible(mesh, (("y",),))
    listed = to_op_sharding(P("y"), AbstractMesh((count + 1,), ("y",)), 1, as_list=True)
    assert from_bytes(listed.SerializeToString()).devices == (*range(count + 1),)


@sees("different examples")
@given(st.binary(max_size=24))
def test_any_bytes_are_a_spec_or_refused(data):
    with contextlib.suppress(UnrepresentableShardingError):
        parse_op_sharding(data, MESH)


@sees("different examples")
@given(st.data())
def test_damaged_bytes_are_a_spec_or_refused(data):
    whole = data.draw(
        st.sampled_from(
            [
                HloSharding.from_string(text).to_proto().SerializeToString()
                for text in (
                    "{devices=[4,1,2]<=[8] last_tile_dim_replicate}",
                    "{mesh['x'=4,'y'=2], [{'x':(1)2},{'y'}], manual={'x':(2)2}}",
                    "{{replicated}, {devices=[2,2,2]<=[8] last_tile_dims={manual, replicated}}}",
                )
            ]
        )
    )
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(UnrepresentableShardingError):
        parse_op_sharding(bytes(damaged), MESH)


def test_a_named_sharding_of_an_unlucky_program_does_not_end_the_process():
    # XLA's accessors do: they run in a child, which shows that the precaution is needed.
    code = """
import jax
from jax.sharding import AbstractMesh, NamedSharding
hlo = type(NamedSharding(AbstractMesh((2,), ("x",)), jax.P())._to_xla_hlo_sharding(1))
hlo.from_string("{mesh['x'=4,'y'=2], [{'x'},{'x'}]}")
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode < 0
    with pytest.raises(UnrepresentableShardingError):
        parse_op_sharding(
            b"r\x1a\x12\x0e\n\x05\n\x01x\x10\x04\n\x05\n\x01y\x10\x02\x1a\x04\n\x00\x10\x01\x1a\x02\n\x00", MESH
        )


# The other way


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (P("x", "y"), ValueError, "needs a rank of at least 2, but ndim is 1"),
        (P("z"), ValueError, r"names the axis 'z', which is not found in the mesh \(x=4, y=2\)"),
        (P(("x", "x")), ValueError, "duplicate entries for `x`"),
        ("x", TypeError, "PartitionSpec instances or None"),
    ],
)
def test_specs_that_stand_for_no_sharding(spec, error, message):
    with pytest.raises(error, match=message):
        to_op_sharding(spec, MESH, 1)


def test_an_unconstrained_dimension_is_refused():
    spec = ParsedPartitionSpec.from_user_input(P(P.UNCONSTRAINED), "x", allow_unconstrained_dims=True)
    with pytest.raises(UnrepresentableShardingError, match="leaves a dimension to the partitioner"):
        to_op_sharding(spec, MESH, 1)


def test_the_arrays_lie_where_the_proto_says(mesh):
    array = jax.device_put(np.arange(64).reshape(8, 8), NamedSharding(mesh, P(("y", "x"))))
    proto = to_op_sharding(P(("y", "x")), mesh, 2, as_list=True)
    devices = [*mesh.devices.flat]
    for tile, number in enumerate(proto.tile_assignment_devices):
        (shard,) = [shard for shard in array.addressable_shards if shard.device == devices[number]]
        assert shard.index[0].start == tile


# The pieces


@sees("different examples", "several elements")
@given(st.lists(st.integers(2, 4), min_size=1, max_size=4), st.data())
def test_the_pieces_find_every_transposition(sizes, data):
    perm = data.draw(st.permutations(range(len(sizes))))
    assignment = np.arange(math.prod(sizes)).reshape(sizes).transpose(perm).ravel()
    strides = strides_for_sizes(sizes)
    np.testing.assert_array_equal(strides, [math.prod(sizes[i + 1 :]) for i in range(len(sizes))])
    digits = unflatten_superdims(assignment)
    rebuilt = np.zeros(1, np.int64)
    for size, stride in digits:
        rebuilt = np.add.outer(stride * np.arange(size), rebuilt).ravel()
    np.testing.assert_array_equal(rebuilt, assignment)
    assert explode_superdims(sizes, digits) == [(sizes[i], strides[i]) for i in perm]
    named = {f"axis {i}": size for i, size in enumerate(sizes)} | {"one": 1}
    assert unflatten_array(named, assignment) == [f"axis {i}" for i in perm]


@sees("a transposition", "none")
@given(st.lists(st.integers(2, 4), min_size=1, max_size=5), st.data())
def test_long_and_short_lists_are_read_alike(sizes, data):
    count = math.prod(sizes)
    perm = data.draw(st.permutations(range(len(sizes))))
    assignment = np.arange(count).reshape(sizes).transpose(perm).ravel()
    for i, device in data.draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(-1, count)), max_size=2)):
        j = int(np.flatnonzero(assignment == device)[0]) if data.draw(st.booleans()) and device in assignment else None
        if j is not None:
            assignment[j] = assignment[i]
        assignment[i] = device
    digits = digits_of(assignment.tolist())
    saw("a transposition", when=digits is not None)
    saw("none", when=digits is None)
    assert digits_of_array(assignment) == digits


@pytest.mark.parametrize("assignment", [[0], [1], [0, 2**63 - 1, -2, 3], [-(2**63), 0]])
def test_long_lists_of_nonsense_are_none(assignment):
    assert digits_of_array(np.array(assignment)) == digits_of(assignment)


@pytest.mark.parametrize("axes", [(32, 4), (4, 32), (8, 4, 2, 2)])
def test_long_lists_are_parsed_as_the_iota_form_is(axes):
    mesh = AbstractMesh(axes, tuple("xyzw"[: len(axes)]))
    for partitions in itertools.islice(all_partitions(mesh.axis_names, 2), 60):
        spec = P(*[names or None for names in partitions])
        listed, iota = (to_op_sharding(spec, mesh, 2, as_list=as_list) for as_list in (True, False))
        devices = listed.tile_assignment_devices
        assert parse_op_sharding(listed, mesh).partitions == parse_op_sharding(iota, mesh).partitions
        if not devices:
            continue
        listed.tile_assignment_devices = [devices[1], devices[0], *devices[2:]]
        if listed.replicate_on_last_tile_dim:  # the order of copies does not matter
            assert parse_op_sharding(listed, mesh).partitions == parse_op_sharding(iota, mesh).partitions
        else:
            with pytest.raises(UnrepresentableShardingError, match="no transposition of the mesh"):
                parse_op_sharding(listed, mesh)


@sees("different examples", "several elements")
@given(st.permutations(range(8)))
def test_the_pieces_refuse_what_is_no_transposition(assignment):
    grids = {tuple(np.arange(8).reshape(2, 2, 2).transpose(perm).ravel()) for perm in itertools.permutations(range(3))}
    if tuple(assignment) in grids:
        unflatten_superdims(assignment)
    else:
        with pytest.raises(NotImplementedError, match="no transposition"):
            unflatten_array({"x": 2, "y": 2, "z": 2}, assignment)


@pytest.mark.parametrize(
    "assignment", [[0, 2, 3, 1], [3, 2, 1, 0], [1, 2, 3, 4], [0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 3, 2]]
)
def test_nonsense_is_refused_by_the_pieces(assignment):
    with pytest.raises(NotImplementedError, match="is no transposition of a grid of devices"):
        unflatten_superdims(assignment)


@pytest.mark.parametrize(
    "text",
    [
        *(f"{{{kind}}}" for kind in ("replicated", "manual", "unreduced", "unknown")),
        "{devices=[8]<=[8]}",
        "{devices=[2,4]<=[4,2]T(1,0)}",
        "{devices=[4,1,2]<=[8] last_tile_dim_replicate}",
        "{devices=[2]1,0}",
        "{devices=[2,2,2]<=[8] last_tile_dims={manual, replicated}}",
        "{devices=[4,2]<=[8] last_tile_dims={manual}}",
        "{{replicated}, {devices=[2,4]<=[8]}}",
    ],
)
def test_a_sharding_is_shown_as_xla_writes_it(text):
    assert str(from_text(text)) == text
    if text != "{unknown}":
        assert str(HloSharding.from_string(text)) == text


def test_elements_of_a_tuple_may_have_metadata():
    text = '{{replicated metadata={op_name="a{b}, c"}}, {manual metadata={{op_name="d"}, {op_name="e"}}}}'
    assert str(from_text(text)) == "{{replicated}, {manual}}"
    assert str(from_text("{{replicated} ,, {manual}, }")) == "{{replicated}, {manual}}"


@pytest.mark.parametrize(
    "text", ["{{devices=[{}]<=[8]}}", "{{mesh['x'={}], [{{'x'}}]}}", "{{mesh['x'=8], [{{'x':(1){}}}]}}"]
)
def test_a_number_of_too_many_digits_is_no_sharding(text):
    for digits in (4001, 5000):
        with pytest.raises(UnrepresentableShardingError, match=r"no list|has the mesh|which is no axis"):
            from_text(text.format("9" * digits))


def test_a_number_of_many_digits_is_one():
    many = "9" * 4000
    with pytest.raises(UnrepresentableShardingError, match=rf"its grid \[{many}\] has {many} tiles"):
        from_text(f"{{devices=[{many}]<=[8]}}")
    with pytest.raises(UnrepresentableShardingError, match=f"is for {many} devices"):
        parse_op_sharding(f"{{mesh['x'={many}], [{{'x'}}]}}", MESH)


@pytest.mark.parametrize("count", [2, 15, 16, 17, 40])
def test_messages_show_sixteen_devices(count):
    assignment = [*range(count)][::-1]
    shown = [*map(str, assignment[:16]), *["..."] * (count > 16)]
    with pytest.raises(NotImplementedError, match=rf"^\[{re.escape(', '.join(shown))}\] is no transposition"):
        unflatten_superdims(assignment)
    text = f"{{devices=[{count}]{','.join(map(str, assignment))}}}"
    with pytest.raises(UnrepresentableShardingError, match=re.escape(f"{{devices=[{count}]{','.join(shown)}}} has")):
        parse_op_sharding(text, AbstractMesh((count,), ("x",)))


def test_pieces_that_do_not_fit():
    with pytest.raises(
        NotImplementedError, match=r"dimensions of sizes \[3, 2\] do not make up \[\(2, 3\), \(3, 1\)\]"
    ):
        explode_superdims([3, 2], [(2, 3), (3, 1)])
    with pytest.raises(NotImplementedError, match="4 devices are no transposition"):
        unflatten_array({"x": 8}, [0, 1, 2, 3])
    with pytest.raises(ValueError, match="must be at least 1, but is 0"):
        strides_for_sizes([2, 0])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: parse_op_sharding("{replicated}", "x"),
            TypeError,
            "parse_op_sharding: mesh must be a mesh, but is 'x'",
        ),
        (lambda: to_op_sharding(P("x"), 5, 1), TypeError, "to_op_sharding: mesh must be a mesh, but is 5, an int"),
        (
            lambda: to_op_sharding(P(), AbstractMesh((2,), ("x",)), 1.5),
            TypeError,
            "ndim must be a whole number .* is 1.5",
        ),
        (lambda: to_op_sharding(P(), AbstractMesh((2,), ("x",)), 2**70), ValueError, "ndim must be at most 1024"),
        (
            lambda: to_op_sharding(P(), AbstractMesh((2,), ("x",)), 1, as_list=1),
            TypeError,
            "as_list must be True or False",
        ),
        (lambda: strides_for_sizes("23"), TypeError, "sizes must be a sequence of whole numbers, but is '23'"),
        (lambda: strides_for_sizes(np.array(4)), TypeError, "sizes must be a sequence of whole numbers, but is <NumPy"),
        (lambda: strides_for_sizes([2, 1.5]), TypeError, r"sizes\[1\] must be a whole number .* is 1.5, a float"),
        (lambda: unflatten_superdims(5), TypeError, "assignment must be a sequence of whole numbers, but is 5"),
        (lambda: explode_superdims([2], [5]), TypeError, r"dims\[0\] must be a pair \(size, stride\), but is 5"),
        (lambda: explode_superdims([2], [(2, 0)]), ValueError, r"dims\[0\] must be at least 1, but is 0"),
        (lambda: unflatten_array([2], [0, 1]), TypeError, "named_sizes must be a mapping from the names of axes"),
    ],
)
def test_what_is_no_sharding_mesh_or_number_is_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()
