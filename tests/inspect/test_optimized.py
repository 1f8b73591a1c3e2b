"""Collectives read from compiled programs: what was written is what is found, in every form that XLA writes it in."""

import collections
import itertools
import math
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding

import partjit
from partjit import P
from partjit._jax.compiling import no_compilation_cache
from partjit.inspect.collectives import KINDS, total_bytes
from partjit.inspect.hlo import device_groups, optimized, source_lines, trip_counts
from partjit.inspect.hlo import text as hlo
from tests.census import saw, sees
from tests.effort import EVERYTHING


@pytest.fixture(autouse=True, scope="module")
def compiled_here():
    """A compiled program that is kept says on which line the same program was before the file was changed."""
    with no_compilation_cache():
        yield


# Groups of devices


@st.composite
def grids(draw, most=4):
    """The shape of a mesh."""
    return tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=most)))


def groups_along(numbers, axes):
    """The groups of the numbers in a grid along some of its axes, in their order."""
    others = [axis for axis in range(numbers.ndim) if axis not in axes]
    size = math.prod(numbers.shape[axis] for axis in axes)
    return tuple(map(tuple, numbers.transpose(others + list(axes)).reshape(-1, size).tolist()))


@sees("different examples", "several elements")
@given(grids(), st.data())
def test_every_form_of_groups_reads_back_as_the_same_groups(shape, data):
    axes = data.draw(st.permutations(range(len(shape))))[: data.draw(st.integers(0, len(shape)))]
    expected = groups_along(np.arange(math.prod(shape)).reshape(shape), axes)
    as_list = "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in expected) + "}"
    assert device_groups.parse_groups(as_list) == expected
    order = [axis for axis in range(len(shape)) if axis not in axes] + list(axes)
    dims, perm = ",".join(map(str, shape)), ",".join(map(str, order))
    assert device_groups.parse_groups(f"[{len(expected)},{len(expected[0])}]<=[{dims}]T({perm})") == expected
    sizes = ",".join(f"'axis_{k}'={size}" for k, size in enumerate(shape))
    names = ",".join(f"'axis_{axis}'" for axis in axes)
    assert device_groups.parse_groups(f"mesh[{sizes}] {{{names}}}") == expected
    assert device_groups.parse_groups(f"mesh[{sizes}] {{{names}}}".replace("'", "")) == expected


@sees("different examples", "several elements")
@given(grids(), st.data())
def test_groups_of_a_mesh_of_devices_in_another_order_read_back(shape, data):
    axes = data.draw(st.permutations(range(len(shape))))[: data.draw(st.integers(0, len(shape)))]
    numbers = data.draw(st.permutations(range(math.prod(shape))))
    expected = groups_along(np.array(numbers).reshape(shape), axes)
    sizes = ",".join(f"'a{k}'={size}" for k, size in enumerate(shape))
    names = ",".join(f"'a{axis}'" for axis in axes)
    ids = ",".join(map(str, numbers))
    assert device_groups.parse_groups(f"mesh[{sizes}], device_ids=({ids}) {{{names}}}") == expected
    order = data.draw(st.permutations(range(len(shape))))
    moved = np.arange(math.prod(shape)).reshape(shape).transpose(order).reshape(shape)
    iota = f"[{','.join(map(str, shape))}]T({','.join(map(str, order))})"
    for text in (iota, "<=" + iota):
        found = device_groups.parse_groups(f"mesh[{sizes}], device_ids=({text}) {{{names}}}")
        assert found == groups_along(moved, axes)


@sees("different examples", "several elements")
@given(st.lists(st.sampled_from([2, 3]), min_size=2, max_size=4), st.data())
def test_groups_along_parts_of_an_axis_read_back(factors, data):
    # One axis whose size is a product; the parts are its digits.
    parts = data.draw(st.permutations(range(len(factors))))[: data.draw(st.integers(1, len(factors)))]
    expected = groups_along(np.arange(math.prod(factors)).reshape(factors), parts)
    names = ",".join(f"'x':({math.prod(factors[:k])}){factors[k]}" for k in parts)
    assert device_groups.parse_groups(f"mesh['x'={math.prod(factors)}] {{{names}}}") == expected


@sees("different examples", "several elements")
@given(grids(), st.data())
def test_groups_have_the_axes_they_were_made_of(shape, data):
    axes = data.draw(st.sets(st.sampled_from(range(len(shape)))))
    mesh = AbstractMesh(shape, tuple(f"a{k}" for k in range(len(shape))))
    groups = groups_along(np.arange(math.prod(shape)).reshape(shape), data.draw(st.permutations(sorted(axes))))
    shuffled = tuple(tuple(data.draw(st.permutations(group))) for group in data.draw(st.permutations(groups)))
    expected = tuple(f"a{k}" for k in sorted(axes) if shape[k] > 1)
    assert device_groups.axes_of_groups(shuffled, mesh) == expected


@pytest.mark.parametrize(
    "groups",
    [
        ((0, 1), (2, 3), (4, 5), (6, 7)),  # half of an axis
        ((0, 5), (1, 4), (2, 7), (3, 6)),  # a diagonal
        ((0, 4), (1, 5), (2, 6)),  # not everyone
        ((0, 1, 2, 3),),
        ((0, 1, 2, 3), (0, 1, 2, 3)),  # some twice
        ((0, 4), (1, 5, 2, 6), (3, 7)),  # of several sizes
        ((0, 1, 2), (3, 4, 5, 6, 7)),
        ((0, 1, 4, 6), (2, 3, 5, 7)),
    ],
)
def test_groups_that_are_no_axes_have_none(groups):
    assert device_groups.axes_of_groups(groups, AbstractMesh((2, 4), ("x", "y"))) == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("all", "neither a list, nor an iota, nor axes of a mesh"),
        ("{{0,1},{2,x}}", "neither a list"),
        ("[4,2]<=[9]", "4 groups of 2 are not 9 devices"),
        ("[4,2]<=[2,4]T(0,2)", r"T\(0,2\) is no order of 2 dimensions"),
        ("mesh['x'=2,'y'=4] {'z'}", "names what is no axis of its mesh"),
        ("mesh['x'=2,'y'] {'x'}", "is no mesh"),
        ("mesh['x'=2], device_ids=(0,1,2) {'x'}", "3 devices are no mesh"),
        ("mesh['x'=8] {'x':(3)2}", "does not divide it"),
        ("mesh['x'=8] {'x':(4)4}", "does not divide it"),
        ("mesh['x'=8] {'x':(1)12}", "does not divide it"),
        *((f"{'a' * size}", rf"the groups {'a' * min(size, 200)}{'...' * (size > 200)} of a") for size in (199, 201)),
    ],
)
def test_groups_that_are_not_understood_are_never_guessed(text, why):
    with pytest.raises(ValueError, match=why):
        device_groups.parse_groups(text)


def test_pairs_are_pairs():
    assert device_groups.parse_pairs("{{0,1},{2,2}}") == ((0, 1), (2, 2))
    for group in ("(0,)", "(0, 1, 2)"):
        with pytest.raises(ValueError, match=rf"{re.escape(group)} is no pair"):
            device_groups.parse_pairs(f"{{{{0,1}},{{{group.strip('(,)')}}}}}")
    with pytest.raises(ValueError, match="they are not a list of pairs"):
        device_groups.parse_pairs("[2,2]<=[4]")


@pytest.mark.parametrize(
    ("channel", "global_ids", "groups", "expected"),
    [
        # Two replicas of three partitions: device 3 * replica + partition.
        (False, False, ((0, 1),), ((0, 3), (1, 4), (2, 5))),
        (False, None, ((0,), (1,)), ((0,), (3,), (1,), (4,), (2,), (5,))),
        (False, False, (), ((0, 3), (1, 4), (2, 5))),
        (True, None, ((0, 2), (1,)), ((0, 2), (1,), (3, 5), (4,))),
        (True, None, (), ((0, 1, 2), (3, 4, 5))),
        (True, False, ((0,), (1,)), ((0, 1, 2), (3, 4, 5))),
        (True, False, ((0, 1),), ((0, 1, 2, 3, 4, 5),)),
        (True, True, ((0, 5), (1, 2, 3, 4)), ((0, 5), (1, 2, 3, 4))),
        (True, True, (), ((0, 1, 2, 3, 4, 5),)),
    ],
)
def test_what_the_numbers_of_groups_number(channel, global_ids, groups, expected):
    assert device_groups.expand(groups, 2, 3, channel, global_ids) == expected


def test_a_number_beyond_the_program_is_an_error():
    with pytest.raises(ValueError, match="names device 3, but its program has only 3"):
        device_groups.expand(((0, 3),), 2, 3, True, None)


# Programs as they were written


def meshes():
    return st.builds(
        lambda shape, order: partjit.Mesh(
            np.array(jax.devices())[list(order)].reshape(shape), tuple("abc"[: len(shape)])
        ),
        st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2), (2, 1, 4)]),
        st.permutations(range(8)),
    )


OPERATIONS = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "all_gather": "all-gather",
    "psum_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


@st.composite
def statements(draw, mesh, depth=2):
    """Lists of ("loop", turns, statements) and (operation, axes, pairs of a permute)."""
    found = []
    for _ in range(draw(st.integers(1, 2))):
        if depth and draw(st.booleans()):
            found.append(("loop", draw(st.sampled_from([1, 2, 3, 7])), draw(statements(mesh, depth - 1))))
            continue
        names = [name for name in mesh.axis_names if mesh.shape[name] > 1]
        axes = tuple(draw(st.permutations(names)))[: draw(st.integers(1, len(names)))]
        size = math.prod(mesh.shape[axis] for axis in axes)
        pairs = [(k, t) for k, t in enumerate(draw(st.permutations(range(size)))) if draw(st.booleans())]
        operation = draw(st.sampled_from(sorted(OPERATIONS)))
        if operation == "ppermute":  # jax wants these in the order of the mesh
            axes = tuple(sorted(axes))
        # XLA takes a permute that moves nothing for a copy.
        assume(operation != "ppermute" or any(source != target for source, target in pairs))
        found.append((operation, axes, tuple(pairs)))
    return found


def run(statement, x, mesh):
    """Does to `x`, of shape (8, 3), what a statement says; the shape stays."""
    match statement:
        case ("loop", turns, body):

            def turn(x, _):
                for inner in body:
                    x = run(inner, x, mesh)
                return x, None

            return jax.lax.scan(turn, x, None, length=turns)[0]
        case (operation, axes, pairs):
            size = math.prod(mesh.shape[axis] for axis in axes)
            x = jnp.sin(x) if x.dtype == jnp.float32 else x * 3 + 1  # so that nothing is merged with the one before
            match operation:
                case "all_gather":
                    return jnp.max(jax.lax.all_gather(x, axes), axis=0)
                case "psum_scatter":
                    return jnp.concatenate([jax.lax.psum_scatter(x, axes, tiled=True)] * size)
                case "all_to_all":
                    return jax.lax.all_to_all(x, axes, 0, 0, tiled=True)
                case "ppermute":
                    return jax.lax.ppermute(x, axes, pairs)
                case _:
                    return getattr(jax.lax, operation)(x, axes)


def expected(statement, mesh, times):
    """What should be found: kind, axes, groups of device ids or pairs, bytes before and after; and how often."""
    match statement:
        case ("loop", turns, body):
            for inner in body:
                yield from expected(inner, mesh, times * turns)
        case (operation, axes, pairs):
            ids = np.vectorize(lambda device: device.id)(mesh.devices)
            groups = groups_along(ids, [mesh.axis_names.index(axis) for axis in axes])
            size = len(groups[0])
            before, after = 96, {"all_gather": 96 * size, "psum_scatter": 96 // size}.get(operation, 96)
            if operation == "ppermute":
                moved = frozenset((group[a], group[b]) for group in groups for a, b in pairs)
                steps = [np.subtract(*(np.argwhere(ids == id_)[0] for id_ in pair)) for pair in moved]
                axes = [name for k, name in enumerate(mesh.axis_names) if any(step[k] for step in steps)]
            else:
                moved = frozenset(map(frozenset, groups))
            yield (OPERATIONS[operation], tuple(sorted(axes)), moved, before, after), times


@sees("two mesh axes", "different examples", "a collective")
@settings(max_examples=30 if EVERYTHING else 12, deadline=None)
@given(st.data(), st.sampled_from([jnp.float32, jnp.int32]))
def test_what_a_random_shard_map_communicates_is_read(data, dtype):
    mesh = data.draw(meshes())
    program = data.draw(statements(mesh))

    def body(x):
        for statement in program:
            x = run(statement, x, mesh)
        return x

    spec = P(tuple(mesh.axis_names))
    fun = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((64, 3), dtype, sharding=NamedSharding(mesh, spec))
    text = jax.jit(fun).lower(x).compile().as_text()
    found = collections.Counter()
    for one in optimized.read_collectives(text, mesh):
        groups = frozenset(one.groups if one.kind == "collective-permute" else map(frozenset, one.groups))
        found[one.kind, one.axes, groups, one.operand_bytes, one.result_bytes] += one.times
        assert one.is_exact
        saw("a collective")
        assert one.combined == 1  # several parts of one array are one
        assert one.site is not None
        assert one.site[0] == __file__
        assert one.site[2] == "run"
        if one.kind != "collective-permute":
            assert one.group_size == len(one.groups[0])
            assert one.sent == 1
        else:
            assert one.sent == sum(source != target for source, target in one.groups) / 8
    wanted = collections.Counter()
    for statement in program:
        for key, times in expected(statement, mesh, 1):
            wanted[key] += times
    assert found == wanted
    # The same without what XLA says of its loops.
    bare = re.sub(r'"known_trip_count":\{[^}]*\}', '"nothing":{}', text)
    again = [(one.name, one.times) for one in optimized.read_collectives(bare, mesh)]
    assert again == [(one.name, one.times) for one in optimized.read_collectives(text, mesh)]


def compiled_text(fun, mesh, *args, spec=None):
    shardings = NamedSharding(mesh, P(("data", "model")) if spec is None else spec)
    structs = [jax.ShapeDtypeStruct(np.shape(arg), np.result_type(arg), sharding=shardings) for arg in args]
    return jax.jit(fun).lower(*structs).compile().as_text()


@pytest.fixture(scope="module")
def named():
    return partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def over(mesh, body, spec=None):
    spec = P(("data", "model")) if spec is None else spec
    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def test_branches_are_told_apart(named):
    def body(x):
        return jax.lax.cond(
            x[0] > 0,
            lambda x: jax.lax.psum(jnp.sin(jax.lax.psum(x, "data")), "model"),
            lambda x: jax.lax.psum(x, "data"),
            x,
        )

    found = optimized.read_collectives(compiled_text(over(named, body), named, np.ones(64, np.float32)), named)
    assert sorted((one.axes, one.times, one.is_exact) for one in found) == [
        (("data",), 1, False),
        (("data",), 1, False),
        (("model",), 1, False),
    ]
    assert {len(one.branch) for one in found} == {1}
    assert len({one.branch for one in found}) == 2
    # Only the dearer branch: both of its collectives.
    assert total_bytes(found) == (2 * 3 / 4 * 32 + 2 * 1 / 2 * 32, False)


def test_a_loop_of_unknown_length_is_told(named):
    def body(x):
        return jax.lax.while_loop(lambda x: x[0] < 1000, lambda x: jax.lax.psum(x, "data"), x)

    found = optimized.read_collectives(compiled_text(over(named, body), named, np.ones(64, np.float32)), named)
    assert [(one.times, one.is_exact, one.bytes_per_step) for one in found] == [(None, False, None)]
    assert total_bytes(found) == (2 * 3 / 4 * 32, False)


def test_the_condition_of_a_loop_is_looked_at_once_more_than_it_turns(named):
    def body(x):
        return jax.lax.while_loop(
            lambda state: jax.lax.pmax(jnp.where(state[1][0] > 1e9, 9, state[0]), "data") < 5,
            lambda state: (state[0] + 1, jax.lax.psum(state[1], "model")),
            (0, x),
        )[1]

    text = compiled_text(over(named, body), named, np.ones(64, np.float32))
    found = {one.axes: one.times for one in optimized.read_collectives(text, named)}
    # XLA does not know how often it turns, as it asks others.
    assert found == {("data",): None, ("model",): None}
    told = re.sub(r"( while\([^\n]*)", r'\1, backend_config={"known_trip_count":{"n":"5"}}', text)
    found = {one.axes: one.times for one in optimized.read_collectives(told, named)}
    assert found == {("data",): 6, ("model",): 5}


def test_several_arrays_at_once_are_members_each_with_its_line_and_equation(named):
    def body(x, y):
        with jax.named_scope("eqn:3"), jax.named_scope("eqn:31"):
            a = jnp.sin(jax.lax.psum(x, "data"))
        with jax.named_scope("eqn:4"):
            b = jnp.cos(jax.lax.psum(y, "data"))
        return a, b

    first = test_several_arrays_at_once_are_members_each_with_its_line_and_equation.__code__.co_firstlineno
    text = compiled_text(over(named, body), named, np.ones((64, 4), np.float32), np.ones(64, np.float32))
    (found,) = optimized.read_collectives(text, named, program="fragment_1")
    assert found.combined == 2
    assert found.program == "fragment_1"
    assert {(one.operand, one.operand_bytes, one.tags, one.site) for one in found.members} == {
        ("f32[8,4]", 128, (3, 31), (__file__, first + 3, "body")),
        ("f32[8]", 32, (4,), (__file__, first + 5, "body")),
    }
    assert found.operand_bytes == found.result_bytes == 160
    assert {*found.sites} == {one.site for one in found.members}
    assert (found.tags, found.site, found.op_name) == (
        found.members[0].tags,
        found.members[0].site,
        found.members[0].op_name,
    )
    assert found.bytes_moved == 2 * 3 / 4 * 160


def train_step(params, x, mesh):
    """A loss, its gradient and an update: what the partitioner adds is nowhere in it."""

    def loss(params):
        def layer(h, w):
            h = jnp.tanh(h @ w[0]) @ w[1]
            return jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P("data", None))), None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - g, params, gradient)


def test_every_collective_that_the_partitioner_adds_has_a_line(named):
    specs = (P(None, None, "model"), P(None, "model", None))
    shapes = ((6, 16, 32), (6, 32, 16))
    params = tuple(
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(named, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    )
    x = jax.ShapeDtypeStruct((8, 16), "float32", sharding=NamedSharding(named, P("data")))
    text = jax.jit(lambda params, x: train_step(params, x, named)).lower(params, x).compile().as_text()
    found = optimized.read_collectives(text, named)
    lines = range(train_step.__code__.co_firstlineno, train_step.__code__.co_firstlineno + 14)
    for one in found:
        assert one.site is not None
        assert one.site[0] == __file__
        assert one.site[1] in lines
    in_loops = [one for one in found if one.times == 6]
    # Two products whose sum goes over the model axis; the gradients of the parameters over the data axis.
    assert sorted((one.kind, one.axes) for one in in_loops if one.axes == ("model",)) == [
        ("all-reduce", ("model",)),
        ("all-reduce", ("model",)),
    ]
    assert sum(one.combined for one in found if one.axes == ("data",) and one.operand_bytes > 4) == 2


def test_a_program_for_other_devices_is_refused(named):
    text = compiled_text(over(named, lambda x: jax.lax.psum(x, "data")), named, np.ones(64, np.float32))
    with pytest.raises(
        ValueError, match="is for 8 devices, but the mesh has 4: pass the mesh that it was compiled for"
    ):
        optimized.read_collectives(text, AbstractMesh((4,), ("x",)))
    with pytest.raises(
        ValueError, match="the text of a compiled program begins with HloModule, but this with 'module @jit'"
    ):
        optimized.read_collectives("module @jit", named)
    for size in (79, 80, 81, 90):
        with pytest.raises(ValueError, match=f"but this with '{'x' * min(size, 80)}'$"):
            optimized.read_collectives("x" * size, named)


# Texts that are not written on CPUs


def program(*lines, before="", header="num_partitions=4"):
    body = "\n".join("  " + line for line in lines)
    return f"HloModule jit_f, {header}\n\n{before}\nENTRY %main (x: f32[4]) -> f32[4] {{\n{body}\n}}\n"


FOUR = AbstractMesh((2, 2), ("x", "y"))


@pytest.mark.parametrize(
    ("lines", "kind", "operand", "result", "moved"),
    [
        (
            [
                (
                    "%s = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), channel_id=1, replica_groups={{0,1},{2,3}}, "
                    "dimensions={0}, use_global_device_ids=true"
                ),
                "%d = f32[8]{0} all-gather-done(%s)",
            ],
            "all-gather",
            "f32[4]",
            "f32[8]",
            16,
        ),
        (
            [
                (
                    "%s = f32[4]{0} all-reduce-start(%x), channel_id=1, replica_groups={{0,1},{2,3}}, "
                    "use_global_device_ids=true, to_apply=%add"
                ),
                "%d = f32[4]{0} all-reduce-done(%s)",
            ],
            "all-reduce",
            "f32[4]",
            "f32[4]",
            16,
        ),
        (
            [
                (
                    "%s = ((f32[4]{0}), f32[2]{0}, u32[]) reduce-scatter-start(f32[4]{0} %x), channel_id=1, "
                    "replica_groups={{0,1},{2,3}}, use_global_device_ids=true, dimensions={0}, to_apply=%add"
                ),
                "%u = ((f32[4]{0}), f32[2]{0}, u32[]) reduce-scatter-update(%s)",
                "%d = f32[2]{0} reduce-scatter-done(%u)",
            ],
            "reduce-scatter",
            "f32[4]",
            "f32[2]",
            8,
        ),
        (
            [
                (
                    "%s = (f32[4]{0:T(4)S(1)}, f32[4]{0:T(4)}, u32[], u32[]) collective-permute-start(%x), "
                    "channel_id=1, source_target_pairs={{0,1},{1,0},{2,2}}"
                ),
                "%d = f32[4]{0} collective-permute-done(%s)",
            ],
            "collective-permute",
            "f32[4]",
            "f32[4]",
            8,
        ),
        (
            ["%d = f32[4]{0} collective-broadcast(%x), channel_id=1, replica_groups={{0,1},{2,3}}"],
            "collective-broadcast",
            "f32[4]",
            "f32[4]",
            8,
        ),
        (
            [
                "%i = s32[2]{0} constant({0, 2})",
                "%d = f32[4]{0} ragged-all-to-all(%x, %x, %i, %i, %i, %i), channel_id=1, replica_groups={{0,1},{2,3}}",
            ],
            "ragged-all-to-all",
            "f32[4]",
            "f32[4]",
            8,
        ),
    ],
)
def test_what_other_platforms_write_is_read(lines, kind, operand, result, moved):
    text = program("%x = f32[4]{0} parameter(0)", *lines, "ROOT %r = f32[4]{0} copy(%x)")
    (found,) = optimized.read_collectives(text, FOUR)
    assert (found.kind, found.operand, found.result, found.bytes_moved) == (kind, operand, result, moved)
    assert found.axes == ("y",)
    assert found.group_size == 2
    assert found.combined == 1


@pytest.mark.parametrize("kind", KINDS)
def test_several_operands_are_several_arrays_but_for_those_of_an_exchange(kind):
    groups = "source_target_pairs={{0,1}}" if kind == "collective-permute" else "replica_groups={{0,1},{2,3}}"
    text = program(
        "%x = f32[4]{0} parameter(0)",
        "%y = f32[8]{0} parameter(1)",
        f"ROOT %r = (f32[4]{{0}}, f32[8]{{0}}) {kind}(%x, %y), channel_id=1, {groups}, use_global_device_ids=true",
    )
    (found,) = optimized.read_collectives(text, FOUR)
    operands = [member.operand for member in found.members]
    assert operands == ([] if kind in ("all-to-all", "ragged-all-to-all") else ["f32[4]", "f32[8]"])


def test_a_collective_in_an_asynchronous_computation_counts_once():
    inner = (
        "%wrapped (p: f32[4]) -> f32[4] {\n  %p = f32[4]{0} parameter(0)\n"
        "  ROOT %a = f32[4]{0} all-to-all(%p), channel_id=1, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}\n}\n"
    )
    text = program(
        "%x = f32[4]{0} parameter(0)",
        "%s = ((f32[4]{0}), f32[4]{0}, u32[]) async-start(%x), calls=%wrapped",
        "ROOT %d = f32[4]{0} async-done(%s)",
        before=inner,
    )
    (found,) = optimized.read_collectives(text, FOUR)
    assert (found.axes, found.groups, found.times) == (("x",), ((0, 2), (1, 3)), 1)


def test_what_is_called_from_two_places_counts_twice():
    inner = (
        "%both (p: f32[4]) -> f32[4] {\n  %p = f32[4]{0} parameter(0)\n"
        "  ROOT %a = f32[4]{0} all-reduce(%p), replica_groups={}, to_apply=%add\n}\n"
    )
    text = program(
        "%x = f32[4]{0} parameter(0)",
        "%y = f32[4]{0} call(%x), to_apply=%both",
        "ROOT %z = f32[4]{0} call(%y), to_apply=%both",
        before=inner,
        header="replica_count=4",
    )
    (found,) = optimized.read_collectives(text, FOUR)
    assert (found.axes, found.group_size, found.times) == (("x", "y"), 4, 2)


def test_what_nobody_calls_does_not_count():
    unused = "%unused (p: f32[4]) -> f32[4] {\n  ROOT %a = f32[4]{0} all-reduce(%p), replica_groups={}\n}\n"
    assert optimized.read_collectives(program("ROOT %x = f32[4]{0} parameter(0)", before=unused), FOUR) == []


TABLES = f"""FileNames
1 "/home/\\303\\274/\\"a\\".py"
2 "{jax.__path__[0]}/_src/lax.py"

FunctionNames
1 "f.<locals>.g"
2 "h"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=10 end_line=11 column=0 end_column=4}}
2 {{file_name_id=1 function_name_id=2 line=20 end_line=20 column=0 end_column=4}}
3 {{file_name_id=2 function_name_id=2 line=30 end_line=30 column=0 end_column=4}}

StackFrames
1 {{file_location_id=2 parent_frame_id=1}}
2 {{file_location_id=1 parent_frame_id=2}}
3 {{file_location_id=3 parent_frame_id=3}}
4 {{file_location_id=3 parent_frame_id=1}}
"""


@pytest.mark.parametrize(
    ("metadata", "site", "tags"),
    [
        ('op_name="jit(f)/eqn:1/sin" stack_frame_id=1', ('/home/ü/"a".py', 20, "h"), (1,)),
        ('op_name="sin" stack_frame_id=2', ('/home/ü/"a".py', 10, "g"), ()),
        ('op_name="sin" stack_frame_id=3', ('/home/ü/"a".py', 10, "g"), ()),
        ('op_name="jit(f)/transpose(jvp(eqn:2))/while/body/eqn:30/sin"', None, (2, 30)),
        ('op_name="a" source_file="b.py" source_line=7', ("b.py", 7, ""), ()),
        ('op_type="x" op_name="} {" source_file="b.py" source_line=7', ("b.py", 7, ""), ()),
    ],
)
def test_lines_are_the_innermost_of_the_users(metadata, site, tags):
    text = program(
        "%x = f32[4]{0} parameter(0)",
        f"ROOT %r = f32[4]{{0}} all-reduce(%x), replica_groups={{}}, to_apply=%add, metadata={{{metadata}}}",
        before=TABLES,
    )
    (found,) = optimized.read_collectives(text, AbstractMesh((4,), ("x",)))
    assert (found.site, found.tags) == (site, tags)


@pytest.mark.parametrize("stack_frame_id", [4, 99])
def test_a_collective_without_a_line_takes_that_of_the_nearest_instruction(stack_frame_id):
    text = program(
        '%x = f32[4]{0} parameter(0), metadata={op_name="x"}',
        '%a = f32[4]{0} sin(%x), metadata={op_name="far" source_file="far.py" source_line=1}',
        "%b = f32[4]{0} copy(%a)",
        "%c = f32[4]{0} all-reduce(%b), replica_groups={}, to_apply=%add, "
        f'metadata={{op_name="broadcast.2" stack_frame_id={stack_frame_id}}}',
        'ROOT %r = f32[4]{0} sin(%c), metadata={op_name="near" source_file="near.py" source_line=1}',
        before=TABLES,
    )
    (found,) = optimized.read_collectives(text, AbstractMesh((4,), ("x",)))
    assert (found.site, found.op_name) == (("near.py", 1, ""), "near")


def test_where_a_whole_computation_says_nothing_its_caller_does():
    inner = (
        "%body (p: f32[4]) -> f32[4] {\n  %p = f32[4]{0} parameter(0)\n"
        "  ROOT %a = f32[4]{0} all-reduce(%p), replica_groups={}, to_apply=%add\n}\n"
        "%middle (q: f32[4]) -> f32[4] {\n  %q = f32[4]{0} parameter(0)\n"
        "  ROOT %b = f32[4]{0} call(%q), to_apply=%body\n}\n"
    )
    text = program(
        "%x = f32[4]{0} parameter(0)",
        'ROOT %y = f32[4]{0} call(%x), to_apply=%middle, metadata={op_name="jit(f)/eqn:5/while"}',
        before=inner,
    )
    (found,) = optimized.read_collectives(text, AbstractMesh((4,), ("x",)))
    assert (found.tags, found.op_name) == ((5,), "jit(f)/eqn:5/while")


# Reading text


def test_types_have_bytes():
    assert hlo.type_bytes("(pred[3], s32[2,3]{1,0}, bf16[<=4,2], c64[2], f8e4m3fn[5], token[], opaque[], f32[])") == (
        3 + 24 + 16 + 16 + 5 + 0 + 0 + 4
    )
    assert hlo.type_bytes("s4[5]") == 5
    assert hlo.type_bytes("s4[5]{0:E(4)}") == 3


@pytest.mark.parametrize(
    ("line", "operands", "attributes"),
    [
        ('%a = f32[] add(%b, %c), metadata={op_name="x, y=1"}', ["b", "c"], {"metadata": '{op_name="x, y=1"}'}),
        ("%a = f32[] add(f32[2]{0} %b, (s32[], f32[2]{0}) /*index=1*/%c), x=1", ["b", "c"], {"x": "1"}),
        ("a = f32[] add(b.1, c-2), x={1,2}, y=z", ["b.1", "c-2"], {"x": "{1,2}", "y": "z"}),
        ("%a = f32[] constant({(1, 2)}), x=%b", [], {"x": "%b", "y": None}),
        (
            "%a = f32[] all-reduce(%b), replica_groups=mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'x','y'}, c=1",
            ["b"],
            {"replica_groups": "mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'x','y'}", "c": "1"},
        ),
    ],
)
def test_instructions_are_taken_apart(line, operands, attributes):
    instruction = hlo.parse_instruction(line)
    assert instruction.name == "a"
    assert instruction.operands == operands
    assert {name: instruction.attributes.get(name) for name in attributes} == attributes


@pytest.mark.parametrize("percent", ["%", ""])
@pytest.mark.parametrize(
    ("attributes", "computations"),
    [
        ("", []),
        (", calls={}f", ["f"]),
        (", to_apply={}f.1", ["f.1"]),
        (", condition={}c, body={}b-2", ["b-2", "c"]),
        (", branch_computations={{{}a, {}b, {}c}}", ["a", "b", "c"]),
        (", called_computations={{{}a}}", ["a"]),
        (", true_computation={}t, false_computation={}f", ["f", "t"]),
        (', x=1, calls={}f, metadata={{op_name="g, body={}b"}}', ["f"]),
        (', metadata={{op_name="g, body={}b, calls={{{}c}}"}}', []),
    ],
)
def test_the_computations_that_an_instruction_names(attributes, computations, percent):
    line = f"{percent}a = f32[] fusion({percent}x){attributes.format(*[percent] * 4)}"
    assert hlo.parse_instruction(line).computations == computations


@sees("different examples", "text")
@given(st.text())
def test_strings_come_back_from_how_hlo_writes_them(text):
    short = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "'": "\\'"}
    written = "".join(
        short.get(chr(byte), chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}") for byte in text.encode("utf-8")
    )
    assert source_lines.unescape(written) == text


# How often loops turn


def counted(direction, first, step, bound, most=60):
    compare = {"LT": "<", "LE": "<=", "GT": ">", "GE": ">=", "NE": "!=", "EQ": "=="}[direction]
    value, turns = first, 0
    while eval(f"{value} {compare} {bound}"):
        value, turns = value + step, turns + 1
        if turns > most:
            return None
    return turns


LOOP = """HloModule f

%step (p: s32[]) -> s32[] {{
  %p = s32[] parameter(0)
  %one = s32[] constant({step})
  ROOT %sum = s32[] add(%one, %p)
}}

%body (s: (s32[], s32[])) -> (s32[], s32[]) {{
  %s = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %j = s32[] get-tuple-element(%s), index=1
  %n = s32[] fusion(%i), kind=kLoop, calls=%step
  %u = (s32[], s32[]) tuple(%n, %j)
  ROOT %t = (s32[], s32[]) {state}
}}

%condition (s: (s32[], s32[])) -> pred[] {{
  %s.1 = (s32[], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %bound = s32[] {bound}
  %two = s32[] constant(2)
  %j.1 = s32[] get-tuple-element(%s.1), index=1
  %less = s32[] {compared}
  ROOT %c = pred[] compare(%less, %bound), direction={direction}
}}

ENTRY %main (x: s32[]) -> s32[] {{
  %first = s32[] constant({first})
  %copied = s32[] copy(%first)
  %last = s32[] {last}
  %t.1 = (s32[], s32[]) tuple(%copied, %last)
  %w = (s32[], s32[]) while(%t.1), condition=%condition, body=%body
  ROOT %r = s32[] get-tuple-element(%w), index=0
}}
"""


def turns_of(*, compared="subtract(%i.1, %two)", state="tuple(%n, %j)", percent="%", **values):
    module = hlo.parse_module(LOOP.format(compared=compared, state=state, **values).replace("%", percent))
    main = module.computations["main"]
    return trip_counts.trip_count(main.instructions["w"], main, module)


@sees("different examples", "text")
@given(
    direction=st.sampled_from(["LT", "LE", "GT", "GE", "NE", "EQ"]),
    first=st.integers(-20, 20),
    step=st.integers(-3, 3),
    bound=st.integers(-20, 20),
    is_in_state=st.booleans(),
)
def test_turns_are_counted_as_the_loop_would(direction, first, step, bound, is_in_state):
    values = {"direction": direction, "first": first, "step": step}
    given_bound = "get-tuple-element(%s.1), index=1" if is_in_state else f"constant({bound})"
    found = turns_of(bound=given_bound, last=f"constant({bound})", **values)
    assert found == counted(direction, first - 2, step, bound)


@pytest.mark.parametrize("percent", ["%", ""])
@pytest.mark.parametrize(
    ("compared", "is_known", "function"),
    [
        ("subtract(%i.1, %two)", True, lambda i, j: i - 2),
        ("add(%i.1, %two)", True, lambda i, j: i + 2),
        ("add(%two, %i.1)", True, lambda i, j: 2 + i),
        ("add(%two, %two)", True, lambda i, j: 4),
        ("subtract(%two, %two)", True, lambda i, j: 0),
        ("subtract(%two, %i.1)", False, lambda i, j: 2 - i),
        ("subtract(%i.1, %j.1)", False, lambda i, j: i - j),
        ("subtract(%i.1, %i.1)", False, lambda i, j: 0),
        ("add(%i.1, %j.1)", False, lambda i, j: i + j),
        ("multiply(%i.1, %two)", False, lambda i, j: 2 * i),
    ],
)
def test_turns_are_counted_of_what_is_linear_in_one_counter_and_of_nothing_else(compared, is_known, function, percent):
    for first, step, last, bound in itertools.product((-3, 0, 5), (1, 2), (4,), (-2, 0, 9)):
        turns = next((k for k in range(60) if function(first + k * step, last) >= bound), None)
        values = {"direction": "LT", "first": first, "step": step, "bound": f"constant({bound})"}
        found = turns_of(compared=compared, last=f"constant({last})", percent=percent, **values)
        assert found == (turns if is_known else None)


@pytest.mark.parametrize("direction", ["LT", "LE", "GT", "GE", "NE", "EQ"])
def test_turns_are_counted_up_to_the_bound(direction):
    for first, step in itertools.product(range(-7, 8), range(-3, 4)):
        found = turns_of(direction=direction, first=first + 2, step=step, bound="constant(0)", last="constant(0)")
        assert found == counted(direction, first, step, 0), (first, step)


@pytest.mark.parametrize(
    ("state", "compared", "turns"),
    [
        ("tuple(%n, %j)", "subtract(%i.1, %two)", 5),
        ("copy(%u)", "subtract(%i.1, %two)", 5),
        ("copy(%s)", "subtract(%i.1, %two)", None),
        ("tuple(%j, %n)", "subtract(%i.1, %two)", None),
        ("tuple(%j, %n)", "subtract(%j.1, %two)", None),
        ("add-dependency(%u, %n)", "subtract(%i.1, %two)", None),
        ("call(%n, %j), to_apply=%step", "subtract(%i.1, %two)", None),
        ("while(%n, %j), condition=%c, body=%b", "subtract(%i.1, %two)", None),
    ],
)
def test_turns_are_counted_of_what_the_body_adds_to_its_own(state, compared, turns):
    values = {"direction": "LT", "first": 0, "step": 1, "bound": "constant(3)", "last": "constant(0)"}
    assert turns_of(state=state, compared=compared, **values) == turns


def test_turns_that_depend_on_an_argument_are_not_known():
    values = {"direction": "LT", "first": 0, "step": 1, "bound": "get-tuple-element(%s.1), index=1"}
    assert turns_of(last="constant(7)", **values) == 9
    assert turns_of(last="parameter(0)", **values) is None


@pytest.mark.parametrize("says_where", [True, False])
def test_reading_is_linear_in_the_text(says_where):
    """So long a chain of collectives takes minutes if the way to the nearest line is walked for each of them."""
    names = ["x", *(f"a{k}" for k in range(3000))]
    lines = ["%x = f32[4]{0} parameter(0)" + ', metadata={source_file="a.py"}' * says_where]
    lines += [f"%{b} = f32[4]{{0}} all-reduce(%{a}), replica_groups={{}}" for a, b in itertools.pairwise(names)]
    start = time.perf_counter()
    found = optimized.read_collectives(program(*lines), AbstractMesh((4,), ("x",)))
    assert time.perf_counter() - start < 10  # where it takes a fraction of a second
    assert len(found) == 3000
    assert {one.site for one in found} == ({("a.py", 0, "")} if says_where else {None})
