"""Pictures of arrays: what they say each device holds is what it holds, in text and SVG, at any size."""

import io
import itertools
import math
import re
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.sharding import GSPMDSharding
from jax.sharding import AbstractMesh, AxisType, NamedSharding, SingleDeviceSharding
from rich.console import Console

import partjit
from partjit import Mesh, P, colocated, to_op_sharding
from partjit._jax.shardings import HloSharding
from partjit.inspect.arrays import draw_array, draw_mesh
from partjit.render.piece_grid import Dimension, Piece, PieceGrid, arrange, keep, name_devices
from partjit.render.piece_grid_text import lines, plain
from partjit.testing import expected_shards as definition
from partjit.testing import strategies
from tests.census import sees
from tests.colocated import rendezvous
from tests.effort import examples


def held(picture):
    """What a picture says each device holds."""
    return {device: index for index, devices in picture.pieces for device in devices}


def normalized(index, shape):
    # The index of a shard of keys has a dimension for what a key consists of.
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=False))


def names_in_text(text):
    """The contents of the cells of the grids in a text, without those left out."""
    rows = [line.split("│") for line in text.splitlines() if "│" in line]
    # Cells stand between two lines, but for what is between grids next to each other and before the first.
    cells = [cell.strip() for row in rows for cell in row[1:-1]]
    return [cell for cell in cells if re.fullmatch(r"\(?\d[\d,\-…* ()]*", cell) and not re.fullmatch(r"\d+:\d+", cell)]


def cells_in_svg(svg):
    """The devices of each cell."""
    return [found for node in ET.fromstring(svg).iter() if (found := node.get("data-devices"))]


def ids(text):
    """Reads what `name_devices` wrote without abbreviating it."""
    found = []
    for part in text.strip("()").replace("*", "").split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


# What is held


@sees("two mesh axes", "a partitioned value", "a value of several dimensions", "permuted devices")
@given(strategies.sharded_arrays())
@examples(40)
def test_a_picture_says_of_each_device_what_its_shard_says(array):
    picture = draw_array(array)
    said = held(picture)
    assert said == {shard.device.id: normalized(shard.index, array.shape) for shard in array.addressable_shards}
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(array)[said[shard.device.id]], shard.data)


@sees("two mesh axes", "a partitioned value", "permuted devices")
@given(st.data())
@examples(40)
def test_a_picture_of_a_spec_is_what_jax_and_the_definition_say(data):
    mesh = data.draw(strategies.meshes())
    shape = data.draw(strategies.shapes(max_ndim=4, max_size=4096))
    spec = data.draw(strategies.partition_specs(mesh=mesh, shape=shape))
    said = held(draw_array(shape, P() if spec is None else spec, mesh))
    sharding = NamedSharding(mesh, P() if spec is None else spec)
    jaxs = sharding.devices_indices_map(shape)
    assert said == {device.id: normalized(index, shape) for device, index in jaxs.items()}
    assert said == {device.id: index for device, index in definition.pieces(mesh, spec, shape).items()}


@sees("two mesh axes", "a partitioned value")
@given(st.data())
@examples(40)
def test_it_is_the_same_however_the_sharding_is_said(data):
    mesh = data.draw(strategies.meshes(permuted=False))
    spec = data.draw(strategies.partition_specs(mesh=mesh, ndim=2)) or P()
    shape = data.draw(st.tuples(st.integers(0, 13), st.integers(0, 13)))  # divided evenly or not
    expected = held(draw_array(shape, NamedSharding(mesh, spec)))
    proto = to_op_sharding(spec, mesh, 2, as_list=data.draw(st.booleans()))
    sharding = HloSharding.from_proto(proto)
    abstract = AbstractMesh(mesh.axis_sizes, mesh.axis_names)
    for said, on in [(proto, mesh), (str(sharding), abstract), (sharding, mesh), (spec, abstract)]:
        assert held(draw_array(shape, said, on)) == expected
    if not sharding.is_replicated():
        for said in (sharding, str(sharding), proto.SerializeToString()):
            assert held(draw_array(shape, said)) == expected
    if all(size % count == 0 for size, count in zip(shape, proto.tile_assignment_dimensions, strict=False)):
        gspmd = GSPMDSharding(tuple(mesh.devices.flat), sharding)
        assert held(draw_array(shape, gspmd)) == expected


@sees("two mesh axes", "a partitioned value")
@given(st.data())
@examples(40)
def test_the_pieces_cover_every_element_once(data):
    mesh = data.draw(strategies.meshes())
    shape = data.draw(st.lists(st.integers(0, 9), max_size=4).map(tuple))
    spec = data.draw(strategies.partition_specs(mesh=mesh, ndim=len(shape))) or P()
    picture = draw_array(shape, spec, mesh)
    covered = np.zeros(shape, int)
    for index, _ in picture.pieces:
        covered[index] += 1
    assert (covered == 1).all()
    assert sorted(device for _, devices in picture.pieces for device in devices) == sorted(
        device.id for device in mesh.devices.flat
    )
    sizes = [tuple(part.stop - part.start for part in index) for index, _ in picture.pieces]
    # XLA pads to tiles of one size, so a piece is as large as the first one unless it is at the end.
    assert all(one <= first for size in sizes for one, first in zip(size, sizes[0], strict=True))


# What is drawn


@sees("two mesh axes", "a partitioned value")
@given(st.data())
@examples(40)
def test_text_and_svg_show_the_pieces(data):
    mesh = data.draw(strategies.meshes())
    shape = data.draw(st.lists(st.integers(0, 9), max_size=4).map(tuple))
    spec = data.draw(strategies.partition_specs(mesh=mesh, ndim=len(shape))) or P()
    picture = draw_array(shape, spec, mesh)
    devices = sorted([*found] for _, found in picture.pieces)
    assert sorted(map(ids, cells_in_svg(picture.to_svg()))) == devices
    assert sorted(map(ids, names_in_text(picture.to_text(200, table=False)))) == devices


@sees("different examples")
@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 8, 32, 64, 512]), min_size=1, max_size=3),
    spec=st.permutations(["a0", "a1", "a2", None]),
    ndim=st.integers(0, 4),
    width=st.integers(0, 200),
)
@settings(max_examples=50)
def test_what_does_not_fit_is_counted(sizes, spec, ndim, width):
    if np.prod(sizes, dtype=int) > 4096:
        return
    mesh = AbstractMesh(tuple(sizes), tuple(f"a{k}" for k in range(len(sizes))))
    spec = P(*[axis if axis in mesh.axis_names else None for axis in spec[:ndim]])
    picture = draw_array((1024,) * ndim, spec, mesh)
    text = picture.to_text(width)
    assert all(len(line) <= max(width, 24) for line in text.splitlines())
    joined = " ".join(text.split())
    cells = picture.grid.pieces
    assert len(cells) <= 64
    assert sorted(device for _, devices in picture.pieces for device in devices) == [*range(mesh.size)]
    left_out = re.search(r"(\d+) of (\d+) (pieces|cells) are left out", joined)
    assert len(names_in_text(plain(lines(picture.grid, width, table=False)))) + int(
        left_out[1] if left_out else 0
    ) == len(cells)
    drawn = picture.to_svg()
    left_out = re.search(r"(\d+) of \d+ (pieces|cells) are left out", drawn)
    assert len(cells_in_svg(drawn)) + int(left_out[1] if left_out else 0) == len(cells)
    assert drawn == draw_array((1024,) * ndim, spec, mesh).to_svg()


def test_a_row_that_fits_is_not_clipped():
    picture = draw_array((1024,), P("a0"), AbstractMesh((32,), ("a0",)))
    for width in range(90, 150):  # narrower ones leave pieces out, and say so
        assert len(names_in_text(plain(lines(picture.grid, width, table=False)))) == 32


@sees("different examples", "several elements")
@given(st.permutations([(512, "a"), (8, "b"), (31, "c"), (1, "d")]), st.integers(1, 3))
@examples(20)
def test_many_pieces_are_drawn_as_cells_of_neighbours(axes, used):
    sizes, names = zip(*axes[:used], strict=True)
    mesh = AbstractMesh(sizes, names)
    picture = draw_array(tuple(2 * size for size in sizes), P(*names), mesh)
    dims, cells = picture.grid.dimensions, picture.grid.pieces
    assert math.prod(len(dim.labels) for dim in dims) == len(cells) <= 64
    held = {tuple(cut.start for cut in index): ids for index, ids in picture.pieces}
    assert len(held) == mesh.size
    for cell in cells:
        within = [tuple(map(int, dims[k].labels[part].split(":"))) for k, part in enumerate(cell.position)]
        starts = itertools.product(*(range(start, stop, 2) for start, stop in within))
        assert cell.devices == tuple(sorted(device for start in starts for device in held[start]))
    assert ("a cell is a group of " in str(picture.grid.notes)) == (mesh.size > 64)


def test_512_devices_are_all_in_the_svg_of_a_row():
    mesh = AbstractMesh((512,), ("x",))
    cells = cells_in_svg(draw_array((1024,), P("x"), mesh).to_svg())
    assert cells == [f"{k}-{k + 7}" for k in range(0, 512, 8)]


def test_many_pieces_have_colors_in_groups_of_neighbours_none_of_which_comes_again():
    groups = {
        (8, 4): "4 pieces",
        (64, 8): "8 cells",
        (512, 8): "8 cells",
        (13, 1): "up to 2 pieces",
        (31, 7): "7 cells",
    }
    for sizes, group in groups.items():
        drawn = draw_array((8192 * 31 * 13, 4096 * 7), P("x", "y"), AbstractMesh(sizes, ("x", "y"))).to_svg()
        cells = re.findall(r'class="pj-c(\d+)" data-devices="(\d+)', drawn)
        colors = [int(color) for color, _ in sorted(cells, key=lambda cell: int(cell[1]))]
        assert colors == sorted(colors)
        assert len({*colors}) > 6
        assert len({*colors}) <= 12
        assert f"a color is a group of {group}" in drawn
    assert "a color is" not in draw_array((8, 8), P("x"), AbstractMesh((8,), ("x",))).to_svg()


def test_devices_that_hold_the_same_have_the_same_color_in_every_picture():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("x", "y", "z"))
    colors = {}
    for spec in [P("x", "y"), P("y", "x"), P(("y", "x")), P(None, ("x", "y"))]:
        for piece in draw_array((8, 8), spec, mesh).grid.pieces:
            assert colors.setdefault(piece.devices, piece.color) == piece.color
    assert len({*colors.values()}) == 4


def test_rank_2_is_a_grid(mesh):
    x = jax.device_put(jnp.zeros((8, 6)), NamedSharding(mesh, P("x", "y")))
    assert str(draw_array(x)).splitlines() == [
        "float32[8,6] as P('x', 'y') on (x=4, y=2)",
        "192 B in 8 pieces of [2,3]: 24 B on each of 8 devices",
        "  ↓ dim 0: 8 over x=4",
        "  → dim 1: 6 over y=2",
        "",
        "      0:3   3:6",
        "    ┌─────┬─────┐",
        "0:2 │  0  │  1  │",
        "    ├─────┼─────┤",
        "2:4 │  2  │  3  │",
        "    ├─────┼─────┤",
        "4:6 │  4  │  5  │",
        "    ├─────┼─────┤",
        "6:8 │  6  │  7  │",
        "    └─────┴─────┘",
    ]


def test_rank_3_is_a_grid_for_each_part_of_the_third_and_a_table():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("x", "y", "z"))
    text = draw_array(jax.ShapeDtypeStruct((4, 5, 2, 6), jnp.int8), P("x", None, "z", "y"), mesh).to_text(80)
    assert text.splitlines()[2:14] == [
        "  ↓ dim 0: 4 over x=2",
        "  · dim 1: 5 unsharded",
        "  → dim 2: 2 over z=2",
        "  # dim 3: 6 over y=2",
        "",
        "dim 3 = 0:3         dim 3 = 3:6",
        "      0:1   1:2           0:1   1:2",
        "    ┌─────┬─────┐       ┌─────┬─────┐",
        "0:2 │  0  │  1  │   0:2 │  2  │  3  │",
        "    ├─────┼─────┤       ├─────┼─────┤",
        "2:4 │  4  │  5  │   2:4 │  6  │  7  │",
        "    └─────┴─────┘       └─────┴─────┘",
    ]
    assert text.splitlines()[15:18] == [
        "dim 0   dim 1   dim 2   dim 3   holds   devices",
        "0:2     0:5     0:1     0:3     30 B    0",
        "0:2     0:5     0:1     3:6     30 B    2",
    ]


def test_a_long_row_goes_on_below():
    text = draw_array((16,), P("x"), AbstractMesh((8,), ("x",))).to_text(36)
    assert text.splitlines()[-8:] == [
        "    0:2     2:4     4:6     6:8",
        " ┌───────┬───────┬───────┬───────┐",
        " │   0   │   1   │   2   │   3   │",
        " └───────┴───────┴───────┴───────┘",
        "    8:10   10:12   12:14   14:16",
        " ┌───────┬───────┬───────┬───────┐",
        " │   4   │   5   │   6   │   7   │",
        " └───────┴───────┴───────┴───────┘",
    ]


def test_uneven_and_empty_pieces_are_told():
    text = draw_array((6, 3), P("x", "y"), AbstractMesh((4, 2), ("x", "y"))).to_text(80)
    assert "18 elements in 8 pieces of up to [2,2]: up to 4 elements on each of 8 devices" in text
    assert "4 parts do not divide dimension 0 of 6 elements: XLA pads it to 8" in text
    assert "2 parts do not divide dimension 1 of 3 elements: XLA pads it to 4" in text
    assert "( ) without elements" in text
    assert "6:6 │ (6) │ (7) │" in text


@pytest.mark.parametrize(
    ("make", "title", "fact"),
    [
        (lambda: jnp.float32(1), "float32[] on device 0", "4 B in one piece"),
        (lambda: jax.device_put(jnp.ones(3), jax.devices()[5]), "float32[3] on device 5", "12 B in one piece"),
        (
            lambda: jax.device_put(jnp.zeros((0, 8)), NamedSharding(jax.make_mesh((4, 2), ("a", "b")), P("a", "b"))),
            "float32[0,8] as P('a', 'b') on (a=4, b=2)",
            "0 B in 8 pieces of [0,4]: 0 B on each of 8 devices",
        ),
        (
            lambda: jax.device_put(
                jax.random.split(jax.random.key(0), 8), NamedSharding(Mesh(jax.devices()[2:6], "x"), P("x"))
            ),
            "key<fry>[8] as P('x') on (x=4)",
            "64 B in 4 pieces of [2]: 16 B on each of 4 devices",
        ),
        (
            lambda: jax.device_put(np.ones((2, 2), np.int8), NamedSharding(Mesh(jax.devices(), "x"), P())),
            "int8[2,2] as P() on (x=8)",
            "4 B in one piece, a copy on each of 8 devices",
        ),
    ],
)
def test_arrays_of_every_kind(make, title, fact):
    x = make()
    picture = draw_array(x)
    assert (picture.grid.title, picture.grid.facts[0]) == (title, fact)
    assert held(picture) == {s.device.id: normalized(s.index, x.shape) for s in x.addressable_shards}


@colocated.colocated_python(stream="pictures")
def when_told(x):
    rendezvous.hear("told")
    return x


def test_a_pending_array_is_drawn_before_it_is_there(mesh, meeting):
    spec = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    pending = when_told.specialize(out_specs=spec)(jax.device_put(jnp.zeros(8), spec.sharding))
    picture = draw_array(pending)
    assert not pending.is_ready()
    meeting.say("told")
    assert picture == draw_array(spec) == draw_array(jax.block_until_ready(pending))


def test_a_traced_value_is_drawn_where_its_type_says_where_it_is():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    drawn = []
    with jax.set_mesh(mesh):
        jax.jit(lambda x: drawn.append(draw_array(x)) or x)(jax.device_put(jnp.zeros((8, 4)), P("x", "y")))
    assert drawn[0].grid.title == "float32[8,4] as P('x', 'y') on (x=4, y=2)"
    assert held(drawn[0]) == held(draw_array((8, 4), P("x", "y"), mesh))


def test_a_spec_may_say_where_an_array_would_be(mesh):
    x = jax.device_put(jnp.zeros((8, 6)), NamedSharding(mesh, P("x")))
    assert held(draw_array(x, P(None, "y"))) == held(draw_array((8, 6), P(None, "y"), mesh))
    with mesh:
        assert held(draw_array(np.zeros((8, 6)), P("y"))) == held(draw_array((8, 6), P("y"), mesh))


class Elsewhere:
    """A device, half of which are of another process."""

    platform = "cpu"

    def __init__(self, number):
        self.id, self.client = number, self
        self.process_number = number // 4

    @property
    def process_index(self):
        return _Number(self.process_number)


class _Number(int):
    """The index of a device's process, and for its client, which has a method of that name, a call that gives 0."""

    def __call__(self):
        return 0


def test_devices_of_other_processes_have_a_star():
    mesh = jax.sharding.Mesh(np.array([*map(Elsewhere, range(8))]).reshape(4, 2), ("x", "y"))
    text = str(draw_array((8,), P("x"), mesh))
    assert "* on another process" in text
    assert names_in_text(text) == ["0,1", "2,3", "4*,5*", "6*,7*"]
    assert "* on another process" in str(draw_mesh(mesh))
    assert "4*" in draw_array((8,), P(("x", "y")), mesh).to_svg()


def test_unreduced_axes_are_no_copies():
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    text = str(draw_array((8,), NamedSharding(mesh, P("x", unreduced={"y"}))))
    assert "unreduced: along y=2 each device holds a partial sum" in text
    assert "copies over" not in text


def test_unconstrained_dimensions_are_told():
    text = str(draw_array((8, 8), P(P.UNCONSTRAINED, "x"), AbstractMesh((4,), ("x",))))
    assert "the sharding of dimension 0 is left to the partitioner" in text


def test_the_memory_is_told_if_it_is_not_the_usual_one():
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()} - {"device"}
    for kind in kinds:
        sharding = SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
        assert f"in the memory {kind!r}" in str(draw_array((2,), sharding))
    assert "in the memory" not in str(draw_array(jnp.ones(3)))


# Meshes and specs


@sees("two mesh axes", "permuted devices")
@given(strategies.meshes())
def test_the_picture_of_a_mesh_has_its_devices(mesh):
    picture = draw_mesh(mesh)
    assert {piece.position: piece.devices for piece in picture.grid.pieces} == {
        at: (device.id,) for at, device in np.ndenumerate(mesh.devices)
    }
    assert sorted(map(int, cells_in_svg(picture.to_svg()))) == sorted(device.id for device in mesh.devices.flat)
    assert mesh._repr_html_() == picture.to_html()


def test_a_mesh_shows_its_axes():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "<model>"))
    assert str(draw_mesh(mesh)).splitlines()[:3] == [
        "mesh (data=2, <model>=4) of 8 cpu devices",
        "  ↓ data: 2 (Auto)",
        "  → <model>: 4 (Auto)",
    ]
    with mesh:
        assert draw_mesh() == draw_mesh(mesh)
    assert "<model>" not in mesh._repr_html_()


def test_a_mesh_without_devices_shows_their_positions():
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    picture = draw_mesh(mesh)
    assert str(picture).splitlines()[0] == "mesh (data=2, model=4) of 8 devices, which are not chosen yet"
    of_devices = draw_mesh(Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model")))
    assert picture.grid.pieces == of_devices.grid.pieces
    with jax.sharding.use_abstract_mesh(mesh):
        assert draw_mesh() == picture


def test_neighbours_of_a_large_mesh_are_one_cell():
    picture = draw_mesh(AbstractMesh((512, 8), ("data", "model"), axis_types=(AxisType.Auto,) * 2))
    pieces = picture.grid.pieces
    assert len(pieces) == 64
    assert sorted(device for piece in pieces for device in piece.devices) == [*range(4096)]
    assert pieces[9].devices == tuple(range(64 * 8 + 1, 128 * 8, 8))
    assert picture.grid.dimensions[0].labels[1] == "64:128"
    assert "a cell is a group of 64 x 1 devices" in str(picture)


def test_a_parsed_spec_shows_itself_in_a_notebook():
    spec = partjit.ParsedPartitionSpec.from_user_input(P("a<b", None, ("x", "y")), "in_axis_resources")
    html = spec._repr_html_()
    assert ET.fromstring(html) is not None
    for cells in [("dim 0", "a&lt;b"), ("dim 1", "unsharded"), ("dim 2", "x, y")]:
        assert "".join(f"<td>{cell}</td>" for cell in cells) in html
    assert "OUT_OF_SYNC" in spec.insert_axis_partitions(0, ("z",))._repr_html_()


# Other ways to show it


def test_a_notebook_gets_markup_with_everything_escaped():
    mesh = AbstractMesh((2,), ("<script>&",))
    html = draw_array((4,), P("<script>&"), mesh)._repr_html_()
    assert "<script>" not in html
    ET.fromstring(html)


def test_rich_shows_the_same_text_in_color(mesh):
    picture = draw_array(jax.device_put(jnp.zeros((8, 6)), NamedSharding(mesh, P("x", "y"))))
    for color in (None, "truecolor"):
        console = Console(file=io.StringIO(), width=40, color_system=color, force_terminal=bool(color))
        console.print(picture)
        shown = console.file.getvalue()
        assert (color is None) == ("\x1b[" not in shown)
        bare = re.sub(r"\x1b\[[0-9;]*m", "", shown)
        assert [line.rstrip() for line in bare.splitlines()] == picture.to_text(40).splitlines()


def test_the_text_is_as_wide_as_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "33")
    picture = draw_array((1024, 1024), P("x", "y"), AbstractMesh((8, 64), ("x", "y")))
    assert max(map(len, str(picture).splitlines())) <= 33
    assert repr(picture) == str(picture) == picture.to_text(33)


# The arrangement


@sees("different examples")
@given(count=st.integers(0, 60), most=st.integers(1, 20))
def test_what_is_kept_is_the_beginning_and_the_end(count, most):
    kept = keep(count, most)
    if count <= most:
        assert kept == [*range(count)]
        return
    gap = kept.index(None)
    assert kept[:gap] == [*range(gap)]
    assert kept[gap + 1 :] == [*range(count - (most - gap), count)]
    assert len(kept) == most + 1


@sees("different examples", "several elements")
@given(st.sets(st.integers(0, 64), min_size=1), st.sets(st.integers(0, 64)))
def test_names_of_devices_read_back(devices, others):
    name = name_devices(sorted(devices), frozenset(others))
    assert sorted(ids(name)) == sorted(devices)
    starred = [part for part in name.split(",") if part.endswith("*")]
    assert sorted(ids(",".join(starred)) if starred else []) == sorted(devices & others)


@sees("different examples", "several elements")
@given(st.lists(st.integers(0, 600), min_size=1, unique=True).map(sorted), st.integers(5, 30))
def test_short_names_of_devices_are_short(devices, room):
    name = name_devices(devices, room=room)
    assert len(name) <= max(room, len(f"{devices[0]},…"))
    assert name.startswith(str(devices[0]))


@pytest.mark.parametrize(
    ("devices", "room", "name"),
    [
        (range(0, 512, 2), 20, "0,2,…,510"),
        ([k for k in range(64) if k % 8 < 4], 20, "0-3,8-11,…,56-59"),
        ([0, 1, 2, 7, 9, 12, 40], 10, "0,… (7)"),
        (range(8), 20, "0-7"),
        ([3, 4], 20, "3,4"),
    ],
)
def test_patterns_of_devices_are_seen(devices, room, name):
    assert name_devices(devices, room=room) == name


@sees("different examples", "several elements")
@given(
    counts=st.lists(st.integers(1, 5), max_size=4),
    limits=st.fixed_dictionaries({name: st.integers(1, 6) for name in ("columns", "rows", "bands", "panels")}),
)
def test_an_arrangement_shows_no_piece_twice_and_all_if_there_is_room(counts, limits):
    dims = tuple(Dimension(f"dim {k}", "", tuple(map(str, range(n)))) for k, n in enumerate(counts))
    positions = [*itertools.product(*map(range, counts))]
    pieces = tuple(Piece(at, (k,), k) for k, at in enumerate(positions))
    layout = PieceGrid("", (), dims, "", pieces)
    shown = arrange(layout, **limits).pieces
    assert len(shown) == len({piece.position for piece in shown}) > 0
    assert {piece.position for piece in arrange(layout, columns=5, rows=5, bands=5, panels=25).pieces} == {*positions}


# Errors


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (3.0,),
            TypeError,
            "draw_array: x must be an array, a jax.ShapeDtypeStruct or a shape, but is 3.0, a float: put a number",
        ),
        (({"w": 1},), TypeError, "x must be .* but is {'w': 1}, a dict: .* map over a tree with jax.tree.map"),
        (
            (np.ones(3),),
            ValueError,
            "this ndarray has no sharding: put it onto devices with jax.device_put, or give one",
        ),
        (((3,),), ValueError, r"a shape has no sharding: .*draw_array\(x, spec, mesh\)"),
        (
            (jax.ShapeDtypeStruct((3,), np.float32),),
            ValueError,
            r"make it with one, jax.ShapeDtypeStruct\(..., sharding",
        ),
        (((3,), P("x")), ValueError, r"the spec P\('x'\) names axes of a mesh, and there is none: give it as `mesh`"),
        (
            ((3,), P("q"), AbstractMesh((2,), ("x",))),
            ValueError,
            r"names the axis 'q', which the mesh \(x=2\) does not",
        ),
        (((3,), P(None, "x"), AbstractMesh((2,), ("x",))), ValueError, r"a rank of at least 2, but the shape is \[3\]"),
        (
            ((3,), 7),
            TypeError,
            "spec must be a Sharding, a PartitionSpec, or an OpSharding or its text, but is 7, an int",
        ),
        (((3,), "{devices=[2,2]<=[4]}"), ValueError, r"<=\[4\]} is for a rank of 2, but the shape is \[3\]"),
        (((3,), "{replicated}"), ValueError, "does not determine which devices hold what: give the `mesh` it is for"),
        (((3,), "{{replicated}}", AbstractMesh((2,), ("x",))), ValueError, "is the sharding of a tuple"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_a_remedy(arguments, error, message):
    with pytest.raises(error, match=message):
        draw_array(*arguments)


def test_a_traced_value_without_a_sharding_is_refused():
    with pytest.raises(ValueError, match=r"this value is traced, and its sharding is decided when .* is compiled"):
        jax.jit(draw_array)(jnp.ones(3))


def test_no_mesh_is_refused():
    with pytest.raises(ValueError, match=r"draw_mesh: the mesh is empty: give one, or set it with partjit.set_mesh"):
        draw_mesh()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: draw_array((8,), P("x"), "x"), TypeError, "draw_array: mesh must be a mesh, but is 'x', a str"),
        (
            lambda: draw_array((True,), P()),
            TypeError,
            r"draw_array: x must be .* or a shape, but is \(True,\), a tuple",
        ),
        (lambda: draw_array((-1,), P()), ValueError, r"x must be a shape of sizes of at least 0, but is \(-1,\)"),
        (lambda: draw_mesh("x"), TypeError, "draw_mesh: mesh must be a mesh, but is 'x', a str"),
        (
            lambda: draw_mesh(Mesh(jax.devices(), "x")).to_text("80"),
            TypeError,
            "to_text: width must be a number of char",
        ),
        (lambda: draw_mesh(Mesh(jax.devices(), "x")).to_text(10**9), ValueError, "width must be .* from 0 to 10000"),
    ],
)
def test_what_is_no_mesh_shape_or_width_is_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()
