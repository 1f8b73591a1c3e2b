"""Shardings in groups of devices are those over all devices."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from partjit.inspect.moves.device_grouping import (
    Grouped,
    is_subtiling,
    matching_dims,
    on_assigned_groups,
    replicated_on,
    transposed,
)
from partjit.inspect.moves.tiles import Tiles
from tests.census import saw, sees


@st.composite
def tilings(draw):
    """A sharding of three dimensions over 16 devices in any order."""
    factors = draw(st.permutations(range(4)))
    counts = [1, 1, 1, 1]
    for _ in range(4):
        counts[draw(st.integers(0, 3))] *= 2
    return Tiles.of(np.arange(16).reshape([2] * 4).transpose(factors).reshape(counts))


def places(tiles):
    """Which shard each device has."""
    found = np.empty((len(tiles.counts), tiles.devices.size), int)
    found[:, tiles.devices.ravel()] = np.indices(tiles.devices.shape)[:-1].reshape([len(tiles.counts), -1])
    return found


@sees("copies", "several groups", "a group of several devices")
@given(tilings(), st.sets(st.integers(0, 3)))
@settings(deadline=None)
def test_a_grouped_sharding_is_the_same_over_all_devices(tiles, dims):
    grouped = Grouped.of(tiles, sorted(dims))
    assert grouped.ungrouped() == tiles
    assert grouped.aligned(grouped).ungrouped() == tiles
    assert len(grouped.groups) == math.prod(grouped.sizes)
    if len(grouped.groups) > 1:
        saw("several groups")
        found = matching_dims(tiles, grouped.groups)
        assert found is None or {*found} >= {dim for dim, n in zip(grouped.dims, grouped.sizes, strict=True) if n > 1}
    if grouped.groups.shape[1] > 1:
        saw("a group of several devices")
    if tiles.copies > 1:
        saw("copies")
        halves = Grouped.of(tiles, (3,), [tiles.copies // 2])
        assert halves.ungrouped() == tiles
        assigned = on_assigned_groups(tiles, tiles.copies // 2, halves.groups)
        assert assigned is not None
        assert assigned.ungrouped() == tiles


@sees("a part")
@given(tilings(), st.sets(st.integers(0, 2)), st.permutations(range(3)))
@settings(deadline=None)
def test_what_is_replicated_or_transposed_is_of_the_same_shards(tiles, dims, order):
    whole = replicated_on(tiles, sorted(dims))
    kept = [dim for dim in range(3) if dim not in dims]
    np.testing.assert_array_equal(places(whole)[kept], places(tiles)[kept])
    assert is_subtiling((16, 16, 16), tiles, whole)
    if not whole.is_replicated and whole != tiles:
        saw("a part")
        assert not is_subtiling((16, 16, 16), whole, tiles)
    moved = transposed(tiles, dict(enumerate(order)), 4)
    assert moved is not None
    np.testing.assert_array_equal(places(moved)[list(order)], places(tiles))
