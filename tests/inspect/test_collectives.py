"""What collectives cost: the formulas against counted transfers, and sums over branches and loops."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partjit.inspect.collectives import KINDS, Collective, Member, bytes_moved, taken, total_bytes
from partjit.inspect.hlo.rematerialization import Rematerialization
from tests.census import sees


class Ring:
    """Devices in a ring, each of which holds blocks of bytes; what is passed to the next one is counted."""

    def __init__(self, size):
        self.size, self.sent = size, [0] * size

    def all_gather(self, block):
        """Each has one block and ends up with all: in every turn it passes on the one it got last."""
        held = [{k} for k in range(self.size)]
        newest = [*range(self.size)]
        for _ in range(self.size - 1):
            for k in range(self.size):
                self.sent[k] += block
                held[(k + 1) % self.size].add(newest[k])
            newest = [newest[k - 1] for k in range(self.size)]
        assert all(blocks == {*range(self.size)} for blocks in held)

    def reduce_scatter(self, block):
        """Each has a block for everyone and ends up with the sum of those for itself, which go once around."""
        sums = [[{k} for _ in range(self.size)] for k in range(self.size)]  # whose are summed up, of each block
        for turn in range(self.size - 1):
            passed = [(k, (k - 1 - turn) % self.size) for k in range(self.size)]
            moving = [sums[k][which] for k, which in passed]
            for (k, which), partial in zip(passed, moving, strict=True):
                self.sent[k] += block
                sums[(k + 1) % self.size][which] |= partial
        assert all(sums[k][k] == {*range(self.size)} for k in range(self.size))

    def all_to_all(self, block):
        """Each has a block for everyone, and hands those for others over directly."""
        got = [{k} for k in range(self.size)]
        for k, other in itertools.permutations(range(self.size), 2):
            self.sent[k] += block
            got[other].add(k)
        assert all(blocks == {*range(self.size)} for blocks in got)

    def broadcast(self, block):
        """What the first one has goes along the ring."""
        has = [k == 0 for k in range(self.size)]
        for k in range(self.size - 1):
            assert has[k]
            self.sent[k] += block
            has[k + 1] = True
        assert all(has)

    @property
    def mean(self):
        return sum(self.sent) / self.size


sizes = st.integers(1, 9)
blocks = st.integers(1, 1000)


@sees("different examples")
@given(n=sizes, block=blocks)
def test_the_formulas_count_what_a_ring_sends(n, block):
    all_gather, reduce_scatter, all_reduce, all_to_all, broadcast = (Ring(n) for _ in range(5))
    all_gather.all_gather(block)
    assert bytes_moved("all-gather", n, block, n * block) == pytest.approx(all_gather.mean)
    reduce_scatter.reduce_scatter(block)
    assert bytes_moved("reduce-scatter", n, n * block, block) == pytest.approx(reduce_scatter.mean)
    all_reduce.reduce_scatter(block)
    all_reduce.all_gather(block)
    assert bytes_moved("all-reduce", n, n * block, n * block) == pytest.approx(all_reduce.mean)
    all_to_all.all_to_all(block)
    for kind in ("all-to-all", "ragged-all-to-all"):
        assert bytes_moved(kind, n, n * block, n * block) == pytest.approx(all_to_all.mean)
    broadcast.broadcast(block)
    assert bytes_moved("collective-broadcast", n, block, block) == pytest.approx(broadcast.mean)


@sees("different examples")
@given(a=sizes, b=sizes, block=blocks)
def test_over_two_axes_it_costs_the_same_axis_by_axis(a, b, block):
    # Gather over one axis, then what came of it over the other.
    steps = bytes_moved("all-gather", a, block, a * block) + bytes_moved("all-gather", b, a * block, a * b * block)
    assert bytes_moved("all-gather", a * b, block, a * b * block) == pytest.approx(steps)
    # Scatter over one, then the rest over the other.
    whole = a * b * block
    steps = bytes_moved("reduce-scatter", a, whole, whole / a) + bytes_moved("reduce-scatter", b, whole / a, block)
    assert bytes_moved("reduce-scatter", a * b, whole, block) == pytest.approx(steps)


@sees("different examples")
@given(n=st.integers(2, 9), block=blocks, data=st.data())
def test_a_permute_costs_what_goes_to_others(n, block, data):
    targets = data.draw(st.permutations(range(n)))
    pairs = [(k, target) for k, target in enumerate(targets) if data.draw(st.booleans())]
    sent = sum(k != target for k, target in pairs) / n
    assert bytes_moved("collective-permute", n, block, block, sent) == pytest.approx(sent * block)


@pytest.mark.parametrize("kind", KINDS)
def test_alone_a_device_sends_nothing(kind):
    assert bytes_moved(kind, 1, 100, 100, sent=0.0) == 0


def test_what_is_no_collective_is_refused():
    with pytest.raises(ValueError, match="'all-scatter' is no collective; the kinds are all-gather, all-reduce, "):
        bytes_moved("all-scatter", 2, 1, 1)
    with pytest.raises(ValueError, match="a group has at least one device, but group_size is 0"):
        bytes_moved("all-reduce", 0, 1, 1)


def collective(size=100, **more):
    """An all-reduce over two devices, which costs its size."""
    given = {"kind": "all-reduce", "axes": ("x",), "group_size": 2, "operand": "u8[]", "result": "u8[]", "name": "a"}
    return Collective(**{**given, "operand_bytes": size, "result_bytes": size, **more})


def test_a_collective_costs_as_often_as_it_runs():
    assert collective(size=100, times=24).bytes_per_step == 2400
    assert collective(size=100, times=0).bytes_per_step == 0
    assert collective(size=100, times=None, is_exact=False).bytes_per_step is None


def test_the_lines_of_a_collective_are_those_of_its_members_each_once():
    here, there = ("a.py", 1, "f"), ("a.py", 2, "f")
    members = [
        Member(operand="", result="", operand_bytes=1, result_bytes=1, site=s) for s in (here, there, here, None)
    ]
    assert collective(site=here, members=tuple(members)).sites == (here, there)
    assert collective(members=tuple(members)).combined == 4
    assert collective().combined == 1
    assert collective().sites == ()


@sees("different examples", "several elements")
@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 50), st.text("pq", max_size=1))))
def test_without_branches_the_total_is_the_sum(drawn):
    them = [collective(size, times=times, program=program) for size, times, program in drawn]
    total = total_bytes(them)
    assert total.bytes == pytest.approx(sum(one.bytes_per_step for one in them))
    assert total.is_exact


def test_an_unknown_number_of_turns_counts_once_and_is_told():
    total = total_bytes([collective(10), collective(7, times=None, is_exact=False)])
    assert total == (17, False)


# A program as a tree: sizes of collectives, and conditionals whose branches are such trees.
trees = st.recursive(
    st.lists(st.integers(1, 100), max_size=3),
    lambda inner: st.tuples(st.lists(st.integers(1, 100), max_size=3), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=8,
)


def listed(tree, branch, names):
    """The collectives of a tree, one conditional in each node."""
    own, branches = tree if isinstance(tree, tuple) else (tree, [])
    yield from (collective(size, branch=branch, is_exact=not branch) for size in own)
    name = f"conditional.{next(names)}"
    for number, inner in enumerate(branches):
        yield from listed(inner, (*branch, (name, number)), names)


def cost(tree):
    own, branches = tree if isinstance(tree, tuple) else (tree, [])
    return sum(own) + max(map(cost, branches), default=0)


@sees("different examples", "several elements")
@given(trees, trees)
def test_of_branches_the_dearest_counts(tree, other):
    them = [*listed(tree, (), itertools.count())]
    assert total_bytes(them).bytes == pytest.approx(cost(tree))
    assert total_bytes(them).is_exact == all(not one.branch for one in them)
    assert sum(one.bytes_per_step for one in taken(them)) == pytest.approx(cost(tree))
    # Another fragment of a plan, whose conditionals have the same names.
    more = [dataclasses.replace(one, program="other") for one in listed(other, (), itertools.count())]
    assert total_bytes([*them, *more]).bytes == pytest.approx(cost(tree) + cost(other))


def test_conditionals_of_different_programs_are_different():
    them = [
        collective(size, branch=(("conditional.1", number),), program=program)
        for program, sizes in (("a", (10, 1)), ("b", (1, 10)))
        for number, size in enumerate(sizes)
    ]
    assert total_bytes(them).bytes == 20


@pytest.mark.parametrize("record", [Collective, Member, Rematerialization])
def test_records_of_many_fields_are_made_by_their_names_and_stay_as_they_are(record):
    names = [field.name for field in dataclasses.fields(record)]
    with pytest.raises(TypeError, match="positional argument"):
        record(*names)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record(**dict.fromkeys(names)), names[0], 1)
