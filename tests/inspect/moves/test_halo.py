"""Halo exchanges: whoever needs elements of another shard gets them, and nobody sends more than a shard."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from partjit.inspect.moves.halo import Window, exchange, part_read, unread
from tests.census import saw, sees


def windows_over(n):
    cut = st.integers(-n // 2, n // 2)
    slices = st.builds(Window, stride=st.integers(1, 3), low=cut, high=cut)
    small = st.integers(1, 2)
    wide = st.builds(Window, size=st.integers(1, 4), stride=small, low=cut, high=cut, dilation=small)
    return slices | wide | st.builds(Window, low=st.integers(0, 3), high=cut, base_dilation=st.integers(1, 3))


def needed(n, count, window):
    """Which shard needs elements of which: from the definition of a window."""
    full = 1 + (n - 1) * window.base_dilation + window.low + window.high
    number = (full - 1 - (window.size - 1) * window.dilation) // window.stride + 1
    own, each = -(-n // count), -(-number // count)
    pairs = set()
    for output in range(number):
        for k in range(window.size):
            at, rest = divmod(output * window.stride + k * window.dilation - window.low, window.base_dilation)
            if not rest and 0 <= at < n:
                pairs.add((at // own, output // each))
    return number, {(a, b) for a, b in pairs if a != b}


@sees("an exchange", "nothing to exchange", "a gather instead")
@given(st.data())
@settings(deadline=None, max_examples=200)
def test_every_shard_gets_what_it_needs(data):
    count = data.draw(st.sampled_from([2, 4, 8]))
    n = count * data.draw(st.integers(1, 4))
    window = data.draw(windows_over(n))
    number, pairs = needed(n, count, window)
    assume(number > 0)
    try:
        shifts = exchange([n, 3], [count, 1], [window, Window()])
    except NotImplementedError:
        assume(False)
    if shifts is None:
        saw("a gather instead")
        return
    saw("an exchange" if shifts else "nothing to exchange")
    assert pairs <= {pair for shift in shifts for pair in shift.pairs}
    for shift in shifts:
        assert (shift.dim, shift.shape[1]) == (0, 3)
        assert 0 < shift.shape[0] <= n // count
        assert len({a for a, _ in shift.pairs}) == len({b for _, b in shift.pairs}) == len(shift.pairs)


@pytest.mark.parametrize(
    ("window", "expected"),
    {
        "the next element": (Window(size=2, high=1), [(1, ((1, 0), (2, 1), (3, 2)))]),
        "both neighbours": (
            Window(size=3, low=1, high=1),
            [(1, ((0, 1), (1, 2), (2, 3))), (1, ((1, 0), (2, 1), (3, 2)))],
        ),
        "every other": (Window(stride=2, high=-1), []),
        "the first half": (Window(high=-8), [(4, ((0, 1), (1, 2))), (2, ((1, 3),))]),
        "the last": (Window(low=-15), [(1, ((3, 0),))]),
        "the first": (Window(high=-15), []),
    }.values(),
)
def test_exchanges_of_sixteen_elements_on_four_shards(window, expected):
    found = exchange([16], [4], [window])
    assert [(shift.shape[0], shift.pairs) for shift in found] == expected


def test_dimensions_are_exchanged_one_after_the_other():
    """The second exchange sends the borders that the first one brought, too."""
    window = Window(size=3, low=1, high=1)
    shapes = [shift.shape for shift in exchange([8, 8], [2, 2], [window, window])]
    assert shapes == [(1, 4), (1, 4), (6, 1), (6, 1)]


def test_sums_over_everything_are_gathered():
    assert exchange([16], [4], [Window(size=16, low=15)]) is None
    assert np.shape(exchange([16], [1], [Window(size=16, low=15)])) == (0,)


@sees("a halo that is read", "one that is not", "not known")
@given(st.data())
@settings(deadline=None, max_examples=200)
def test_halos_are_unread_if_all_that_is_sliced_is_in_the_shard_before(data):
    count = data.draw(st.sampled_from([2, 4]))
    n = count * data.draw(st.integers(2, 5))
    window = Window(low=data.draw(st.integers(-1, 2)), high=data.draw(st.integers(-2, 2)))
    m = n + window.low + window.high
    reader = Window(low=-data.draw(st.integers(0, 2)), stride=data.draw(st.integers(1, 3)))
    assume(exchange([n], [count], [window]) and 1 - reader.low < m)
    own, after = n // count, -(-m // count)
    try:
        found = unread([n], [m], [count], [window], [[reader]])
        start, limit = part_read(m, count, reader)
    except NotImplementedError:
        saw("not known")
        return
    number = -(-(m + reader.low) // reader.stride)
    each = -(-number // count)
    places = [(k, at) for k in range(number) if (at := k * reader.stride - reader.low) < m]
    assert all(start <= at - (k // each) * after < limit for k, at in places)
    inside = all((at - window.low) // own == k // each for k, at in places if 0 <= at - window.low < n)
    saw("one that is not" if found else "a halo that is read")
    assert inside or not found
