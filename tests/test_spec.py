"""What a spec means: parsing, equality, inserting axes, and where the pieces of an array come to lie."""

import copy
import dataclasses
import inspect
import math
import pickle
from collections import OrderedDict, namedtuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding, SingleDeviceSharding

import partjit
from partjit import (
    FROM_ARRAY,
    FROM_GDA,
    UNSPECIFIED,
    Mesh,
    P,
    ParsedPartitionSpec,
    ShardingError,
    SpecSync,
    UnrepresentableShardingError,
    pjit,
    to_op_sharding,
)
from partjit.spec import parse_spec_tree
from tests.census import is_partitioned, saw, sees

AXES = ("a", "b", "c", "d")
Pair = namedtuple("Pair", ["first", "second"])


def parse(spec, name="in_axis_resources", **options):
    return ParsedPartitionSpec.from_user_input(spec, name, **options)


def identity(x):
    return x


@st.composite
def partitions(draw, max_rank=5):
    """What a spec means: per dimension a tuple of axes, no axis twice."""
    axes = draw(st.permutations(AXES))
    rank = draw(st.integers(0, max_rank))
    cuts = sorted(draw(st.lists(st.integers(0, len(axes)), min_size=rank, max_size=rank)))
    dims = [tuple(axes[start:stop]) for start, stop in zip([0, *cuts], cuts, strict=False)]
    return tuple(draw(st.permutations(dims)))


def spellings(partition):
    """All the ways to write one dimension."""
    ways = [tuple(partition), list(partition)]
    if not partition:
        ways.append(None)
    if len(partition) == 1:
        ways.append(partition[0])
    return ways


@st.composite
def spelled(draw, meaning, padding=0):
    """A PartitionSpec that means `meaning`, in any spelling and followed by up to `padding` whole dimensions."""
    entries = [draw(st.sampled_from(spellings(partition))) for partition in meaning]
    more = draw(st.integers(0, padding))
    return P(*entries, *(draw(st.sampled_from(spellings(()))) for _ in range(more)))


def trimmed(meaning):
    while meaning and meaning[-1] == ():
        meaning = meaning[:-1]
    return meaning


# Entries


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (P(), ()),
        (P(None), ((),)),
        (P(()), ((),)),
        (P([]), ((),)),
        (P("x"), (("x",),)),
        (P(("x",)), (("x",),)),
        (P(["x"]), (("x",),)),
        (P(("y", "x")), (("y", "x"),)),
        (P(["y", "x"]), (("y", "x"),)),
        (P("long name", None, ("y", "x"), ()), (("long name",), (), ("y", "x"), ())),
        (None, ()),
    ],
)
def test_an_entry_becomes_the_tuple_of_its_axes_in_the_given_order(spec, expected):
    parsed = parse(spec)
    assert parsed.partitions == expected
    assert all(type(partition) is tuple for partition in parsed.partitions)
    assert parsed.sync is SpecSync.IN_SYNC
    assert parsed.mesh is None


@sees("an axis name", "two axes in one dimension")
@hypothesis.given(st.data())
def test_parsing_undoes_spelling(data):
    meaning = data.draw(partitions())
    spec = data.draw(spelled(meaning))
    parsed = parse(spec)
    assert parsed.partitions == meaning
    assert parsed.user_spec is spec
    assert parse(parsed.partition_spec).partitions == meaning
    assert parsed.mesh_axes == tuple(axis for partition in meaning for axis in partition)
    assert parsed.unconstrained_dims == frozenset()


@sees("an axis name", "two axes in one dimension")
@hypothesis.given(st.data())
def test_length_indexing_and_iteration_follow_the_partitions(data):
    meaning = data.draw(partitions())
    parsed = parse(data.draw(spelled(meaning)))
    assert len(parsed) == len(meaning)
    assert tuple(parsed) == meaning
    assert [parsed[i] for i in range(-len(meaning), len(meaning))] == [*meaning, *meaning]
    with pytest.raises(IndexError):
        parsed[len(meaning)]


@pytest.mark.parametrize("mesh_axes", [("x", "y"), ("y", "x")])
@pytest.mark.parametrize("order", [("x", "y"), ("y", "x")])
@pytest.mark.parametrize("side", ["in", "out"])
def test_axes_of_one_dimension_are_major_to_minor(mesh_axes, order, side):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    spec = P(order)
    with Mesh(devices, mesh_axes):
        if side == "out":
            placed = pjit(identity, out_axis_resources=spec)(np.arange(4))
        else:
            placed = pjit(identity, in_axis_resources=spec)(np.arange(4))
    of_piece = {shard.index[0].start: shard.device.id for shard in placed.addressable_shards}
    assert [of_piece[i] for i in range(4)] == ([0, 1, 2, 3] if order == mesh_axes else [0, 2, 1, 3])
    assert [int(shard.data[0]) for shard in placed.addressable_shards] == [
        shard.index[0].start for shard in placed.addressable_shards
    ]


# Where the pieces lie, by counting


def expected_index(meaning, shape, mesh, coordinates):
    """The slices of an array a device holds, from first principles: mixed-radix digits, major to minor."""
    slices = []
    for axes, size in zip((*meaning, *[()] * (len(shape) - len(meaning))), shape, strict=True):
        piece = 0
        for axis in axes:
            piece = piece * mesh.shape[axis] + coordinates[axis]
        width = size // math.prod(mesh.shape[axis] for axis in axes)
        slices.append((piece * width, (piece + 1) * width))
    return tuple(slices)


@sees("an axis name", "two axes in one dimension", "a partitioned value", "two mesh axes")
@hypothesis.given(st.data())
@hypothesis.settings(max_examples=25)
def test_every_piece_lies_where_the_digits_of_its_axes_say(data):
    sizes = data.draw(st.sampled_from([(8,), (4, 2), (2, 4), (2, 2, 2), (2, 1, 2), (3, 2), (1,)]))
    names = AXES[: len(sizes)]
    mesh = Mesh(np.array(jax.devices())[: math.prod(sizes)].reshape(sizes), names)
    saw("two mesh axes", when=sum(size > 1 for size in sizes) > 1)
    meaning = tuple(tuple(a for a in p if a in names) for p in data.draw(partitions(max_rank=3)))
    padding = 3 - len(meaning)
    spec = data.draw(spelled(meaning, padding))
    saw("a partitioned value", when=is_partitioned(mesh, spec))
    shape = tuple(math.prod(mesh.shape[a] for a in p) for p in (*meaning, *[()] * padding))
    x = np.arange(math.prod(shape)).reshape(shape)
    with mesh:
        placed = pjit(identity, in_axis_resources=spec, out_axis_resources=spec)(x)
    of_device = {device.id: np.argwhere(mesh.devices == device)[0] for device in mesh.devices.flat}
    assert len(placed.addressable_shards) == mesh.size
    for shard in placed.addressable_shards:
        coordinates = dict(zip(names, of_device[shard.device.id], strict=True))
        expected = expected_index(meaning, shape, mesh, coordinates)
        assert tuple(s.indices(n)[:2] for s, n in zip(shard.index, shape, strict=True)) == expected
        np.testing.assert_array_equal(shard.data, x[tuple(slice(*s) for s in expected)])


# Replication


NO_OPS = [P(), P(None), P(()), P((), None), P(None, None, ()), P([], ()), P(None, (), []), None]


@pytest.mark.parametrize("spec", NO_OPS, ids=repr)
@pytest.mark.parametrize("side", ["in", "out", "constraint"])
def test_a_spec_without_axes_replicates(mesh, spec, side):
    x = np.arange(6).reshape(1, 2, 3)
    with mesh:
        if side == "in":
            out = pjit(identity, in_axis_resources=spec)(x)
        elif side == "out":
            out = pjit(identity, out_axis_resources=spec)(x)
        else:
            out = partjit.with_sharding_constraint(x, spec)
    assert out.sharding.is_fully_replicated
    assert out.sharding.device_set == set(mesh.devices.flat)
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(shard.data, x)


def test_none_in_a_spec_tree_is_a_leaf_not_an_empty_subtree(mesh):
    with mesh:
        a, b = pjit(
            lambda d: (d["a"], d["b"]),
            in_axis_resources=({"a": None, "b": P("x")},),
            out_axis_resources=(None, P("x")),
        )({"a": np.ones(3), "b": np.ones(4)})
        assert a.sharding == NamedSharding(mesh, P())
        assert b.sharding == NamedSharding(mesh, P("x"))
        # None is also the spec of a whole subtree, and of a value that is None itself.
        out = pjit(identity, in_axis_resources=(None,), out_axis_resources=None)({"a": [np.ones(3), None], "b": None})
    assert out["b"] is None
    assert out["a"][1] is None
    assert out["a"][0].sharding == NamedSharding(mesh, P())


@pytest.mark.parametrize(
    ("spec", "rank"), [(P(None, None), 1), (P((), ()), 1), (P(None), 0), (P("x", None), 1), (P(None, None, None), 2)]
)
def test_the_length_of_a_spec_counts_even_where_it_says_nothing(mesh, spec, rank):
    phrase = f"rank of at least {len(spec)}, but it is {rank}"
    x = np.ones((4,) * rank)
    with mesh:
        with pytest.raises(ValueError, match=phrase):
            pjit(identity, in_axis_resources=spec)(x)
        with pytest.raises(ValueError, match=phrase):
            pjit(identity, out_axis_resources=spec)(x)
        with pytest.raises(ValueError, match=phrase):
            partjit.with_sharding_constraint(x, spec)
        pjit(identity, in_axis_resources=spec, out_axis_resources=spec)(np.ones((4,) * len(spec)))


# Equality


@sees("an axis name", "two axes in one dimension")
@hypothesis.given(st.data())
def test_specs_are_equal_exactly_when_they_mean_the_same(data):
    left = data.draw(partitions())
    right = data.draw(st.one_of(st.just(left), partitions(), st.permutations(left).map(tuple)))
    a, b = parse(data.draw(spelled(left, 2))), parse(data.draw(spelled(right, 2)))
    same = trimmed(left) == trimmed(right)
    assert (a == b) is same
    assert (b == a) is same
    assert (a != b) is not same
    if same:
        assert hash(a) == hash(b)
    assert len({a, b}) == (1 if same else 2)
    inserted_a, inserted_b = a.insert_axis_partitions(0, ()), b.insert_axis_partitions(0, ())
    assert (inserted_a == inserted_b) is same


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (P("x"), P("y")),
        (P("x"), P(None, "x")),
        (P(("x", "y")), P(("y", "x"))),
        (P(("x", "y")), P("x", "y")),
        (P("x"), P(("x", "y"))),
        (P("x"), P()),
    ],
)
def test_specs_that_lay_out_differently_are_unequal(left, right):
    assert parse(left) != parse(right)
    assert parse(left) == parse(left)


def test_a_spec_that_was_altered_is_unequal_to_one_the_user_wrote():
    written, shifted = parse(P(None, "x")), parse(P("x")).insert_axis_partitions(0, ())
    assert written.partitions == shifted.partitions
    assert written != shifted
    assert parse(P("y", "x")) != parse(P("x")).insert_axis_partitions(0, ("y",))
    assert parse(P("x")) != P("x")
    assert parse(P("x")) != (("x",),)


def test_mesh_and_memory_are_part_of_the_meaning(mesh):
    other = Mesh(mesh.devices.reshape(2, 4), ("x", "y"))
    here, there = parse(NamedSharding(mesh, P("x"))), parse(NamedSharding(other, P("x")))
    assert here.mesh == mesh
    assert here != there
    assert here != parse(P("x"))
    assert here == parse(NamedSharding(mesh, P("x", None)))
    assert hash(here) == hash(parse(NamedSharding(mesh, P(("x",)))))
    host = parse(NamedSharding(mesh, P("x"), memory_kind="unpinned_host"))
    assert host.memory_kind == "unpinned_host"
    assert host.named_sharding(other) == NamedSharding(mesh, P("x"), memory_kind="unpinned_host")


def test_none_means_the_same_as_an_empty_spec():
    assert parse(None) == parse(P())
    assert hash(parse(None)) == hash(parse(P()))
    assert parse(None).user_spec is None


@sees("an axis name", "two axes in one dimension")
@hypothesis.given(st.data())
def test_specs_survive_copying_and_pickling(data):
    parsed = parse(data.draw(spelled(data.draw(partitions()))))
    for spec in (parsed, parsed.insert_axis_partitions(1, ())):
        for twin in (pickle.loads(pickle.dumps(spec)), copy.copy(spec), copy.deepcopy(spec)):
            assert twin == spec
            assert hash(twin) == hash(spec)
            assert twin.partitions == spec.partitions
            assert twin.sync is spec.sync


@sees("an axis name", "two axes in one dimension")
@hypothesis.given(st.data())
def test_a_spec_cannot_be_changed(data):
    parsed = parse(data.draw(spelled(data.draw(partitions()))))
    with pytest.raises(dataclasses.FrozenInstanceError):
        parsed.partitions = ()
    with pytest.raises(TypeError):
        parsed.partitions[0] = ("x",)


# Inserting axes


@sees("an axis name", "two axes in one dimension")
@hypothesis.given(st.data())
def test_inserting_an_axis_into_a_spec(data):
    meaning = data.draw(partitions())
    before = parse(data.draw(spelled(meaning)))
    dim = data.draw(st.integers(0, 7))
    inserted = data.draw(st.sampled_from([(), ("new",), ("new", "er")]))
    after = before.insert_axis_partitions(dim, inserted)

    # The new dimension is at its place; what was there keeps its order; only whole dimensions fill the gap.
    assert len(after) == max(len(meaning), dim) + 1
    assert after.partitions[dim] == inserted
    rest = after.partitions[:dim] + after.partitions[dim + 1 :]
    assert rest[: len(meaning)] == meaning
    assert all(partition == () for partition in rest[len(meaning) :])
    assert after.sync is (SpecSync.OUT_OF_SYNC if inserted else SpecSync.DIM_PERMUTE)
    # The original is as it was.
    assert before.partitions == meaning
    assert before.sync is SpecSync.IN_SYNC


@sees("different examples", "several elements")
@hypothesis.given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=5))
def test_a_spec_never_comes_back_into_sync(steps):
    spec = parse(P("x", None, "y"))
    lowest = SpecSync.IN_SYNC
    for number, (dim, sharded) in enumerate(steps):
        spec = spec.insert_axis_partitions(dim, (f"new{number}",) if sharded else ())
        lowest = min(lowest, SpecSync.OUT_OF_SYNC if sharded else SpecSync.DIM_PERMUTE)
        assert spec.sync is lowest


@sees("an axis name", "two axes in one dimension")
@hypothesis.given(st.data())
def test_inserting_commutes_with_spelling_and_with_trailing_whole_dimensions(data):
    meaning = data.draw(partitions())
    dim, inserted = data.draw(st.integers(0, 7)), data.draw(st.sampled_from([(), ("new",)]))
    a, b = parse(data.draw(spelled(meaning))), parse(data.draw(spelled(meaning, 3)))
    assert a.insert_axis_partitions(dim, inserted) == b.insert_axis_partitions(dim, inserted)


def test_the_levels_of_sync_are_ordered():
    assert SpecSync.OUT_OF_SYNC < SpecSync.DIM_PERMUTE < SpecSync.IN_SYNC
    assert [*map(int, SpecSync)] == [0, 1, 2]  # as in jax


def test_an_altered_spec_is_never_shown_as_the_users():
    written = parse(P("x"))
    permuted, out_of_sync = written.insert_axis_partitions(0, ()), written.insert_axis_partitions(0, ("y",))
    assert written.user_spec == P("x")
    assert written.unsynced_user_spec(SpecSync.IN_SYNC) == P("x")
    for spec in (permuted, out_of_sync):
        with pytest.raises(AssertionError):
            _ = spec.user_spec
    assert permuted.unsynced_user_spec(SpecSync.DIM_PERMUTE) == P("x")
    with pytest.raises(AssertionError):
        out_of_sync.unsynced_user_spec(SpecSync.DIM_PERMUTE)
    assert out_of_sync.unsynced_user_spec(SpecSync.OUT_OF_SYNC) == P("x")
    # Printing one shows what it is, not what was written.
    assert str(permuted) == str(P(None, "x"))
    assert "DIM_PERMUTE" in repr(permuted)


# What is refused when pjit is applied, without any mesh


@pytest.mark.parametrize(("name", "sides"), [("axis_resources", "old"), ("shardings", "new")])
@pytest.mark.parametrize("side", ["in", "out"])
@pytest.mark.parametrize(
    ("tree", "shown"),
    [
        ("x", "'x'"),
        (("x", "y"), "'x'"),
        ({"w": "model"}, "'model'"),
        ((P("x"), "y"), "'y'"),
        ((P("x"), 3), "3"),
        (object, "object"),
        (NamedSharding, "NamedSharding"),
        ((P("x"), {"a": [None, 1.5]}), "1.5"),
        (SingleDeviceSharding(jax.devices()[0]), "SingleDeviceSharding"),
    ],
    ids=repr,
)
def test_a_leaf_that_is_no_spec_is_refused(side, name, sides, tree, shown):
    argument = f"{side}_{name}"
    with pytest.raises(TypeError) as caught:
        pjit(identity, **{argument: tree})
    message = str(caught.value)
    assert f"{argument} leaf specifications are expected to be PartitionSpec instances or None, but got " in message
    assert shown in message.partition("but got ")[2]


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        (({"w": [None, "x"]},), "in_axis_resources[0]['w'][1]"),
        ((P(), "x"), "in_axis_resources[1]"),
        (Pair(P(), (P(), P("x", "x"))), "in_axis_resources.second[1]"),
    ],
)
def test_a_wrong_leaf_deep_in_a_tree_is_named_by_its_path(tree, path):
    with pytest.raises((TypeError, ValueError)) as caught:
        pjit(identity, in_axis_resources=tree)
    assert path in str(caught.value)


def test_a_bare_name_gets_a_hint_how_to_write_it():
    with pytest.raises(TypeError, match=r"PartitionSpec\('x'\)"):
        pjit(identity, in_axis_resources="x")


@pytest.mark.parametrize(
    "spec",
    [P("x", "x"), P("x", ("y", "x")), P(("x", "x")), P(("x", "y", "x")), P("y", None, ["z", "x"], ("x",))],
    ids=repr,
)
@pytest.mark.parametrize("argument", ["in_axis_resources", "out_axis_resources", "in_shardings", "out_shardings"])
def test_an_axis_used_twice_is_refused(spec, argument):
    with pytest.raises(ValueError, match="duplicate") as caught:
        pjit(identity, **{argument: spec})
    message = str(caught.value)
    assert (
        f"A single {argument} specification can map every mesh axis to at most one positional dimension, but "
        in message
    )
    assert str(spec) in message
    assert "has duplicate entries for `x`" in message


def test_an_axis_used_twice_is_refused_in_constraints_and_all_such_axes_are_named(mesh):
    with mesh, pytest.raises(ValueError, match="has duplicate entries for `x`"):
        partjit.with_sharding_constraint(np.ones((8, 8)), P("x", "x"))
    with pytest.raises(ValueError, match="has duplicate entries for `a`, `b`"):
        parse(P("a", "b", ("c", "b"), "a"))


def test_an_axis_may_be_used_again_by_another_spec(mesh):
    with mesh:
        out = pjit(lambda a, b: a + b, in_axis_resources=(P("x"), P("x")), out_axis_resources=P("x"))(
            np.ones(8), np.ones(8)
        )
    assert out.sharding == NamedSharding(mesh, P("x"))


@pytest.mark.parametrize("spec", [P(P.UNCONSTRAINED), P("x", P.UNCONSTRAINED), P(None, P.UNCONSTRAINED, "y")], ids=repr)
@pytest.mark.parametrize("argument", ["in_axis_resources", "out_axis_resources", "in_shardings", "out_shardings"])
def test_unconstrained_dimensions_are_refused_in_the_specs_of_a_program(spec, argument):
    with pytest.raises(ValueError, match=f"Unconstrained dims are not allowed in {argument}"):
        pjit(identity, **{argument: spec})


def test_an_unconstrained_dimension_is_left_to_the_partitioner(mesh):
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)

    def fun(a):
        return partjit.with_sharding_constraint(a, P(P.UNCONSTRAINED, "y")) * 1

    def whole(a):
        return partjit.with_sharding_constraint(a, P(None, "y")) * 1

    with mesh:
        free = pjit(fun, in_axis_resources=P("x"))(x)
        fixed = pjit(whole, in_axis_resources=P("x"))(x)
    np.testing.assert_array_equal(free, x)
    # What comes from the argument stays where nothing is said, and is undone where None is.
    assert free.sharding.is_equivalent_to(NamedSharding(mesh, P("x", "y")), 2)
    assert fixed.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "y")), 2)


def test_parsing_an_unconstrained_dimension_keeps_it_apart_from_a_whole_one():
    free = parse(P(P.UNCONSTRAINED, "x"), allow_unconstrained_dims=True)
    assert free.unconstrained_dims == {0}
    assert free.mesh_axes == ("x",)
    assert free != parse(P(None, "x"))
    assert parse(P("x", P.UNCONSTRAINED), allow_unconstrained_dims=True) != parse(P("x"))
    assert parse(free.partition_spec, allow_unconstrained_dims=True) == free
    assert free.insert_axis_partitions(0, ()).unconstrained_dims == {1}


def test_unreduced_axes_are_kept_and_refused_where_the_axes_are_auto(mesh):
    spec = P(None, "y", unreduced={"x"})
    parsed = parse(spec)
    assert parsed.partition_spec == spec
    assert (parsed.mesh_axes, parsed.reduction_axes) == (("y",), ("x",))
    assert parsed != parse(P(None, "y"))
    for axes, reason in (({"x"}, "resource axis x is Auto"), ({"z"}, "resource axis z is undefined")):
        function = pjit(identity, out_axis_resources=P(None, unreduced=axes))
        with mesh, pytest.raises(ShardingError, match=reason):
            function(np.ones((8, 8), np.float32))
    with pytest.raises(UnrepresentableShardingError, match="unreduced"):
        to_op_sharding(spec, mesh, 2)


@pytest.mark.parametrize(
    "bad", [P("x", "x"), "x", P(P.UNCONSTRAINED)], ids=["an axis twice", "no spec", "unconstrained"]
)
def test_what_needs_no_mesh_is_checked_when_a_decorator_is_applied(bad):
    decorator = pjit(in_axis_resources=bad)
    with pytest.raises((TypeError, ValueError)):
        decorator(identity)


# NamedSharding


def test_a_named_sharding_brings_its_own_mesh(mesh):
    for ambient in (None, Mesh(jax.devices(), "z")):
        function = pjit(
            lambda x: x + 1,
            in_axis_resources=NamedSharding(mesh, P("x")),
            out_axis_resources=NamedSharding(mesh, P(None, "y")),
        )
        for _ in range(3):
            if ambient is None:
                out = function(np.ones((4, 4)))
            else:
                with ambient:
                    out = function(np.ones((4, 4)))
            assert out.sharding == NamedSharding(mesh, P(None, "y"))
            np.testing.assert_array_equal(out, np.full((4, 4), 2.0))


def test_a_named_sharding_over_an_abstract_mesh_takes_the_ambient_one(mesh):
    abstract = AbstractMesh((4, 2), ("x", "y"))
    assert parse(NamedSharding(abstract, P("x"))).mesh is None
    with mesh:
        out = pjit(identity, in_axis_resources=NamedSharding(abstract, P("x")))(np.ones(4))
    assert out.sharding == NamedSharding(mesh, P("x"))


def test_a_named_sharding_with_explicit_axes_is_a_spec(mesh):
    explicit = jax.sharding.Mesh(mesh.devices, ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    out = pjit(
        lambda x: x * 2, in_shardings=NamedSharding(explicit, P("x")), out_shardings=NamedSharding(explicit, P())
    )(np.ones(4))
    assert out.sharding == NamedSharding(explicit, P())


# Trees


def test_a_list_of_in_specs_is_the_argument_list(mesh):
    with mesh:
        listed = pjit(lambda a, b: (a, b), in_axis_resources=[P("x"), None])(np.ones(4), np.ones(3))
        single = pjit(identity, in_axis_resources=[P("x")])(np.ones(4))
        # Below the top a list is a list.
        nested = pjit(identity, in_axis_resources=([P("x"), None],))([np.ones(4), np.ones(3)])
    assert listed[0].sharding == single.sharding == nested[0].sharding == NamedSharding(mesh, P("x"))
    assert listed[1].sharding == nested[1].sharding == NamedSharding(mesh, P())


def test_a_list_of_out_specs_is_a_pytree_of_its_own(mesh):
    with mesh:
        out = pjit(lambda x: [x, x], out_axis_resources=[P("x"), None])(np.ones(4))
        assert out[0].sharding == NamedSharding(mesh, P("x"))
        with pytest.raises(ValueError, match="out_axis_resources"):
            pjit(lambda x: (x, x), out_axis_resources=[P("x"), None])(np.ones(4))
        with pytest.raises(ValueError, match="out_axis_resources"):
            pjit(lambda x: [x, x], out_axis_resources=(P("x"), None))(np.ones(4))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    w: object
    b: object


VALUES = {
    "dict": {"w": np.ones((4, 2)), "b": np.ones((4, 2))},
    "nested": [{"w": np.ones((4, 2))}, (np.ones((4, 2)), {"deep": [np.ones((4, 2))]})],
    "namedtuple": Pair(np.ones((4, 2)), np.ones((4, 2))),
    "ordered dict": OrderedDict(b=np.ones((4, 2)), a=np.ones((4, 2))),
    "dataclass": State(np.ones((4, 2)), [np.ones((4, 2))]),
    "none inside": {"w": np.ones((4, 2)), "b": None},
    "empty": {},
    "leaf": np.ones((4, 2)),
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_one_spec_stands_for_everything_below_it(mesh, values):
    with mesh:
        out = pjit(lambda v, n: (v, n), in_axis_resources=(P("x"), None), out_axis_resources=(P("y", None), None))(
            values, 1.0
        )
    assert jax.tree.structure(out[0]) == jax.tree.structure(values)
    for leaf in jax.tree.leaves(out[0]):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P("y")), 2)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_a_tree_of_specs_may_be_as_deep_as_the_values(mesh, values):
    specs = jax.tree.map(lambda _: P("x"), values, is_leaf=lambda v: v is None)
    with mesh:
        out = pjit(identity, in_axis_resources=(specs,), out_axis_resources=specs)(values)
    assert all(leaf.sharding == NamedSharding(mesh, P("x")) for leaf in jax.tree.leaves(out))


def test_specs_of_different_kinds_mix_in_one_tree(mesh):
    placed = jax.device_put(np.ones(8), NamedSharding(mesh, P("y")))
    with mesh:
        out = pjit(
            identity,
            in_axis_resources=(
                {"spec": P("x"), "none": None, "named": NamedSharding(mesh, P(("x", "y"))), "free": UNSPECIFIED}
                | {"array": FROM_ARRAY},
            ),
        )({"spec": np.ones(8), "none": np.ones(8), "named": np.ones(8), "free": placed, "array": placed})
    specs = {"spec": P("x"), "none": P(), "named": P(("x", "y")), "free": P("y"), "array": P("y")}
    for key, spec in specs.items():
        assert out[key].sharding.is_equivalent_to(NamedSharding(mesh, spec), 1), key


def test_an_unhashable_tree_of_specs_may_be_changed_by_the_caller_afterwards(mesh):
    specs = {"a": P("x"), "b": [None]}
    function = pjit(identity, in_axis_resources=(specs,), out_axis_resources=specs)
    specs["a"] = P("y")
    specs["b"].append(P("x"))
    with mesh:
        out = function({"a": np.ones(8), "b": [np.ones(3)]})
    assert out["a"].sharding == NamedSharding(mesh, P("x"))


def test_parsing_a_tree_keeps_its_structure():
    tree = {"a": (P("x"), None), "b": [UNSPECIFIED, FROM_ARRAY]}
    parsed = parse_spec_tree(tree, "in_axis_resources")
    assert parsed["a"] == (parse(P("x")), parse(None))
    assert parsed["b"][0] is UNSPECIFIED
    assert parsed["b"][1] is FROM_ARRAY


def test_from_array_is_for_arguments_only():
    assert FROM_GDA is FROM_ARRAY
    for twin in (pickle.loads(pickle.dumps(FROM_ARRAY)), copy.copy(FROM_ARRAY), copy.deepcopy(FROM_ARRAY)):
        assert twin is FROM_ARRAY
    assert repr(FROM_ARRAY) == "FROM_ARRAY"  # as it is written
    for argument in ("out_axis_resources", "out_shardings"):
        with pytest.raises(ValueError, match=rf"{argument}\['w'\].*FROM_ARRAY"):
            pjit(identity, **{argument: {"w": FROM_ARRAY}})


def test_unspecified_is_the_default_on_both_sides(mesh):
    placed = jax.device_put(np.ones((8, 2)), NamedSharding(mesh, P(None, "y")))
    with mesh:
        for function in (pjit(identity), pjit(identity, UNSPECIFIED, UNSPECIFIED)):
            assert function(placed).sharding.is_equivalent_to(placed.sharding, 2)
    parameters = inspect.signature(pjit).parameters
    assert parameters["in_axis_resources"].default is parameters["out_axis_resources"].default is UNSPECIFIED


def test_old_and_new_names_together_are_refused():
    with pytest.raises(ValueError, match="in_axis_resources and in_shardings"):
        pjit(identity, in_axis_resources=P("x"), in_shardings=P("x"))
    with pytest.raises(ValueError, match="out_axis_resources and out_shardings"):
        pjit(identity, out_axis_resources=None, out_shardings=None)


def test_values_are_the_same_whatever_the_spec(mesh):
    x = jnp.arange(64.0, dtype=jnp.float32).reshape(8, 8)
    with mesh:
        for spec in [None, P("x"), P(None, "x"), P("y", "x"), P(("x", "y")), P(None, ("y", "x"))]:
            out = pjit(lambda a: a @ a.T, in_axis_resources=spec, out_axis_resources=spec)(x)
            np.testing.assert_array_equal(out, x @ x.T)


# What is no part of a spec


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda spec: spec.insert_axis_partitions("0", ()),
            TypeError,
            "dim must be a whole number of at least 0, but is '0'",
        ),
        (lambda spec: spec.insert_axis_partitions(-1, ()), ValueError, "dim must be at least 0, but is -1"),
        (lambda spec: spec.insert_axis_partitions(2**70, ()), ValueError, "dim must be at most 1024"),
        (
            lambda spec: spec.insert_axis_partitions(0, "x"),
            TypeError,
            r"partition must be a tuple of mesh axes, .*but is 'x'",
        ),
        (
            lambda spec: spec.insert_axis_partitions(0, ([],)),
            TypeError,
            "an axis is named by a str or another hashable",
        ),
        (lambda spec: spec.unsynced_user_spec(2), TypeError, "min_sync must be a SpecSync, but is 2, an int"),
        (lambda spec: spec.named_sharding("x"), TypeError, "mesh must be a mesh, but is 'x'"),
        (lambda spec: ParsedPartitionSpec(P("x"), ("x",)), TypeError, r"partitions\[0\] must be a tuple of mesh axes"),
        (
            lambda spec: ParsedPartitionSpec(P("x"), 5),
            TypeError,
            "partitions must be a tuple with, per dimension, .* is 5",
        ),
        (lambda spec: ParsedPartitionSpec("x", ()), TypeError, "unsafe_user_spec must be a PartitionSpec or None"),
        (lambda spec: ParsedPartitionSpec(None, (), 2), TypeError, "sync must be a SpecSync, but is 2, an int"),
    ],
)
def test_what_is_no_part_of_a_spec_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make(ParsedPartitionSpec.from_user_input(P("x"), "spec"))
