"""The key paths of arguments."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partjit import paths, pjit
from partjit.paths import paths_of
from tests.census import saw, sees
from tests.effort import examples

names = st.text("abc", min_size=1, max_size=2)
trees = st.recursive(
    st.integers(0, 9) | st.none(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)
)


class Listed:
    """A tree whose structure has no hash."""

    def __init__(self, keys, leaves):
        self.keys, self.leaves = keys, leaves


jax.tree_util.register_pytree_with_keys(
    Listed,
    lambda x: ([(jax.tree_util.DictKey(k), leaf) for k, leaf in zip(x.keys, x.leaves, strict=True)], x.keys),
    Listed,
)


@sees("known before", "several leaves", "no leaf")
@examples(60)
@given(st.dictionaries(names, trees, max_size=3), st.dictionaries(names, trees, max_size=3))
def test_they_are_those_of_each_argument(given, others):
    for args in (given, others, given, {f"{name}_": arg for name, arg in given.items()}):
        tree = jax.tree.structure(([*args.values()], {}))
        if (tree, tuple(args)) in paths._known.found:
            saw("known before")
        found, counts = paths_of(tree, tuple(args), [*args.values()])
        each = [jax.tree_util.tree_flatten_with_path(arg)[0] for arg in args.values()]
        assert [*counts] == [*map(len, each)]
        assert [*found] == [
            name + jax.tree_util.keystr(path) for name, arg in zip(args, each, strict=True) for path, _ in arg
        ]
        saw("several leaves" if len(found) > 1 else "one leaf" if found else "no leaf")


def test_of_structures_without_a_hash():
    args = [Listed(["u", "v"], [1, 2])]
    for _ in range(2):
        assert paths_of(jax.tree.structure((args, {})), ("x",), args) == (("x['u']", "x['v']"), (2,))


def test_they_are_forgotten_with_the_caches_of_jax():
    args = [{"w": 1}]
    paths_of(jax.tree.structure((args, {})), ("params",), args)
    assert paths._known.found
    jax.clear_caches()
    assert not paths._known.found


def test_not_more_than_so_many_are_kept(monkeypatch):
    monkeypatch.setattr(paths._Known, "MOST", 3)
    paths._known.clear()
    for i in range(1, 9):
        args = [[0] * i]
        assert len(paths_of(jax.tree.structure((args, {})), ("x",), args)[0]) == i
        assert len(paths._known.found) <= 3


def test_an_argument_whose_keys_cannot_be_sorted_is_named():
    with pytest.raises(ValueError, match="Argument second"):
        pjit(lambda first, second: first).trace(1, {1: 2, "a": 3})
