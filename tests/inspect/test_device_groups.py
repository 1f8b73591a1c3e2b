"""Groups of devices as arrays: what they are equal to, and the axes that they are the product of."""

import itertools
import math
import pickle

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

import partjit
from partjit.inspect.device_groups import DeviceGroups
from tests.census import sees


@st.composite
def groups_over_axes(draw):
    """A mesh, some of its axes, and the groups along them, in any order and each in any order."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    names = tuple("xyzw"[: len(sizes)])
    chosen = [draw(st.booleans()) for _ in sizes]
    kept = itertools.product(*(range(1 if is_chosen else n) for n, is_chosen in zip(sizes, chosen, strict=True)))
    rows = []
    for start in kept:
        along = itertools.product(*(range(n) if c else (k,) for n, c, k in zip(sizes, chosen, start, strict=True)))
        rows.append(draw(st.permutations([int(np.ravel_multi_index(at, sizes)) for at in along])))
    axes = tuple(name for name, n, is_chosen in zip(names, sizes, chosen, strict=True) if is_chosen and n > 1)
    return AbstractMesh(tuple(sizes), names), axes, draw(st.permutations(rows))


@sees("different examples", "several elements")
@settings(deadline=None, max_examples=40)
@given(groups_over_axes())
def test_the_axes_of_groups_are_those_along_which_they_were_made(drawn):
    mesh, axes, rows = drawn
    groups = DeviceGroups(np.array(rows))
    assert groups.axes(mesh) == axes
    assert groups.group_size == math.prod(mesh.shape[axis] for axis in axes)
    if len(rows) > 1:  # some devices are in none
        assert DeviceGroups(np.array(rows[1:])).axes(mesh) == ()
        assert DeviceGroups(np.array([*rows[1:], rows[1]])).axes(mesh) == ()
    pairs = groups.paired_with(np.roll(groups.positions, 1, axis=1))
    assert pairs.moving == (mesh.size if axes else 0)
    assert {*pairs} == {(one, row[k - 1]) for row in rows for k, one in enumerate(row)}
    assert {*pairs.axes_of_pairs(mesh)} <= {*axes}


def test_they_are_a_sequence_of_tuples():
    groups = DeviceGroups(np.array([[0, 4], [1, 5], [2, 6]]))
    expected = (0, 4), (1, 5), (2, 6)
    assert groups == expected
    assert expected == groups
    assert hash(groups) == hash(expected)
    assert (*groups,) == expected
    assert groups[1:] == expected[1:]
    assert len(groups) == 3
    assert (1, 5) in groups
    assert str(groups) == str(expected)
    assert groups != expected[:2]
    assert groups != DeviceGroups(np.array([[0, 4]]))
    assert groups != "groups"
    assert groups == DeviceGroups(groups.positions.copy())
    assert pickle.loads(pickle.dumps(groups)) == expected
    assert groups.within(np.array([[7, 6, 5, 4, 3, 2, 1]])) == ((7, 3), (6, 2), (5, 1))


def test_they_have_the_ids_of_the_devices_of_a_mesh():
    mesh = partjit.Mesh(jax.devices()[::-1], ("x",))
    groups = DeviceGroups(np.array([[0, 1], [6, 7]]))
    assert groups.on(mesh) == ((7, 6), (1, 0))
    assert groups.on(mesh) != groups
    assert groups.on(AbstractMesh((8,), ("x",))) is groups
    assert groups.on(mesh).on(mesh) == groups.on(mesh)
