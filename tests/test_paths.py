"""The key paths of arguments."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from partjit import Mesh, P, ReshardWarning, ShardingError, paths, pjit, specs_like
from partjit.paths import folded_texts, paths_of
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


def text(path):
    return f"{path} (float32[7]) does not fit: 7 is no multiple of 8"


def test_texts_about_the_arrays_of_equal_layers_are_one():
    layers = [f"layers[{i}]['w1']" for i in range(12)]
    others = ["embedding", "layers[3]['w2']"]
    found = folded_texts([(path, text(path)) for path in (others[0], *layers, others[1])])
    assert found == [text("embedding"), text("layers[{0-11}]['w1']"), text("layers[3]['w2']")]
    heads = [f"layers[{i}].heads[{j}]" for i in range(2, 4) for j in (0, 1, 5)]
    assert folded_texts([(path, text(path)) for path in heads]) == [text("layers[{2-3}].heads[{0,1,5}]")]
    uneven = [f"blocks[{i}].w{j}" for j, count in ((1, 6), (2, 5), (3, 1)) for i in range(count)]
    found = folded_texts([(path, text(path)) for path in uneven])
    assert found == [text("blocks[{0-5}].w1"), text("blocks[{0-4}].w2"), text("blocks[0].w3")]


def test_messages_do_not_grow_with_the_layers_of_a_model():
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))

    def messages(layers):
        identity = pjit(lambda params: params, in_shardings=P("x"), out_shardings=P("x"))
        odd = [{"w": np.ones(7, np.float32)}] * layers
        with mesh:
            with pytest.raises(ShardingError) as of_specs:
                identity(odd)
            replicated = jax.device_put([{"w": np.ones(8, np.float32)}] * layers, NamedSharding(mesh, P()))
            with pytest.warns(ReshardWarning) as warnings:
                identity(replicated)
        with pytest.raises(ShardingError) as of_rules:
            specs_like(odd, {"b$": P()})
        return [str(of_specs.value), str(warnings[0].message), str(of_rules.value)]

    for few, many in zip(messages(10), messages(90), strict=True):
        assert few.replace("{0-9}", "{0-89}").replace("10", "90").replace("20", "180") == many


def test_texts_that_ranges_do_not_describe_exactly_are_all_there():
    few = [f"w{i}" for i in range(4)]
    not_a_grid = [f"layers[{i}].heads[{j}]" for i in range(3) for j in range(2)][:-1]
    for paths_left in (few, not_a_grid, [""] * 6, ["x"] * 6):
        assert folded_texts([(path, text(path)) for path in paths_left]) == [*map(text, paths_left)]
    sizes = [(f"w[{i}]", f"w[{i}] has the size {i}") for i in range(6)]
    assert folded_texts(sizes) == [one for _, one in sizes]
