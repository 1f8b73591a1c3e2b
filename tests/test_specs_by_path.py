"""Specs by path: every array has exactly one rule, or the error says which have not."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from partjit import FROM_ARRAY, UNSPECIFIED, P, ShardingError, pjit, spec_table, specs_like
from tests.census import saw, sees

KEYS = ("w", "b", "up", "down", "0", "layers")
SPECS = (P(), P("x"), P(None, "y"), P(("x", "y")), UNSPECIFIED, FROM_ARRAY)
PATTERNS = ("w", "^up", "b$", "layers/[01]/", "up/.*/w", "0", "/", "(up|down)/b", ".", "^$")
STATIC = (None, "relu", jax.nn.relu, object())

leaves = st.one_of(
    st.lists(st.integers(1, 4), max_size=3).map(lambda shape: np.ones(shape, np.float32)),
    st.lists(st.integers(1, 4), max_size=3).map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)),
    st.sampled_from([1, 2.0, True]),
    st.sampled_from(STATIC),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(st.dictionaries(st.sampled_from(KEYS), inner, max_size=3), st.lists(inner, max_size=3)),
    max_leaves=12,
)
often_found = st.sampled_from((".", "w", "0"))
pairs = st.lists(st.tuples(often_found | st.sampled_from(PATTERNS), st.sampled_from(SPECS)), max_size=4)
defaults = st.sampled_from([None, P(), P("y")])


def arrays_of(tree, path=()):
    """(path, rank, leaf) of every array in a tree, and how it is reached, without jax."""
    if isinstance(tree, dict):
        for key in sorted(tree):
            yield from arrays_of(tree[key], (*path, key))
    elif isinstance(tree, list):
        for i, item in enumerate(tree):
            yield from arrays_of(item, (*path, str(i)))
    elif not any(tree is static for static in STATIC):
        yield "/".join(path), np.ndim(tree) if not hasattr(tree, "shape") else len(tree.shape)


def by_hand(path, rank, rules, default):
    """The spec of a leaf, or None where it is an error."""
    found = [spec for pattern, spec in rules if re.search(pattern, path)]
    if len(found) > 1 or (not found and rank and default is None):
        return None
    spec = found[0] if found else default if rank else P()
    return spec if not isinstance(spec, P) or len(spec) <= rank else None


@sees("a value of several dimensions", "an axis name", "several elements", "failures", "a spec for each array")
@given(trees, pairs, defaults)
def test_every_array_gets_the_spec_of_its_only_rule_or_all_failures_are_listed(tree, rules, default):
    wanted = [(path, by_hand(path, rank, rules, default)) for path, rank in arrays_of(tree)]
    failing = [path or "the tree itself" for path, spec in wanted if spec is None]
    saw("failures", when=failing)
    saw("a spec for each array", when=wanted and not failing)
    table = spec_table(tree, rules, default=default)
    assert [(row.path, row.spec) for row in table.rows] == wanted
    assert [row.path or "the tree itself" for row in table.rows if row.problem] == failing
    used = {pattern for pattern, _ in rules if any(re.search(pattern, path) for path, _ in wanted)}
    assert [*table.unused] == [pattern for pattern, _ in rules if pattern not in used]
    if failing:
        with pytest.raises(ShardingError) as caught:
            specs_like(tree, rules, default=default)
        assert [line.partition(" (")[0] for line in str(caught.value).splitlines()[2:-2]] == failing
        assert f"no spec to {len(failing)} of {len(wanted)} array" in str(caught.value)
    else:
        specs = specs_like(tree, rules, default=default)
        assert jax.tree.leaves(specs) == [spec for _, spec in wanted]
        assert jax.tree.structure(specs) == jax.tree.structure(jax.tree.map(array_or_none, tree))


def array_or_none(leaf):
    return None if any(leaf is static for static in STATIC) else leaf


@sees("a value of several dimensions", "an axis name", "several elements", "a spec of the function")
@given(trees, pairs, defaults)
def test_a_function_is_asked_for_the_spec_of_each_array(tree, rules, default):
    def first(path):
        return [(pattern, spec) for pattern, spec in rules if re.search(pattern, path)][:1]

    table = spec_table(
        tree, lambda path, leaf: dict(first(path)).popitem()[1] if first(path) else None, default=default
    )
    wanted = [(path, by_hand(path, rank, first(path), default)) for path, rank in arrays_of(tree)]
    saw("a spec of the function", when=any(first(path) and spec is not None for path, spec in wanted))
    assert [(row.path, row.spec) for row in table.rows] == wanted
    assert table.unused == ()


def test_all_failures_are_in_one_error():
    tree = {"w": np.ones((2, 3), np.float32), "b": np.ones(2, np.float32), "extra": np.ones(1, np.float32)}
    with pytest.raises(ShardingError) as caught:
        specs_like(tree, {"^w|^b": P(None, "x"), "w$": P("x")})
    assert str(caught.value) == (
        "The rules of specs_like give no spec to 3 of 3 arrays:\n\n"
        "b (float32[2]) has the spec P(None, 'x') of the rule '^w|^b', which implies a rank of at least 2, but it is "
        "1\n"
        "extra (float32[1]) is matched by no rule\n"
        "w (float32[2,3]) is matched by 2 rules: '^w|^b' -> P(None, 'x'), 'w$' -> P('x',)\n\n"
        "A leaf needs exactly one rule: add patterns, or narrow them (^ and $ anchor). The spec of a last pattern for "
        "all the rest, such as '.*', belongs in default=. partjit.spec_table shows what matches what."
    )


def test_one_leaf_is_a_tree():
    assert specs_like(np.ones(4), {"^$": P("x")}) == P("x")
    with pytest.raises(ShardingError, match=r"the tree itself \(float.*\[4\]\) is matched by no rule"):
        specs_like(np.ones(4), {})


@pytest.mark.parametrize(
    ("rules", "kind", "message"),
    [
        ({"w": None}, TypeError, r"rules\['w'\] must be a PartitionSpec, .* but is None: write P\(\) for replicated"),
        ({"w": "x"}, TypeError, r"specs_like: rules\['w'\] must be a PartitionSpec"),
        (
            {"(": P()},
            ValueError,
            r"the pattern of rules\[0\] must be a regular expression for str, but is '\(', a str: missing",
        ),
        ({b"w": P()}, TypeError, r"the pattern of rules\[0\] must be a regular expression, but is b'w'"),
        ({re.compile(b"w"): P()}, ValueError, "must be a regular expression for str"),
        ([("w", P(), 3)], TypeError, r"rules\[0\] must be a pair"),
        (P("x"), TypeError, r"rules\[0\] must be a pair of a regular expression and a spec"),
        ("w", TypeError, "rules must be a mapping or a sequence of pairs of a regular expression"),
        ({"w": P("x", "x")}, ValueError, r"rules\['w'\] specification can map every mesh axis to at most one"),
        (lambda path: P(), TypeError, "rules must be a mapping .*, or a function"),
        (str, TypeError, "rules must be a mapping .*, or a function"),
        (lambda path, leaf: 3, TypeError, r"rules\('w', leaf\) must be a PartitionSpec"),
    ],
)
def test_rules_that_are_none_are_refused(rules, kind, message):
    with pytest.raises(kind, match=message):
        specs_like({"w": np.ones((2, 2))}, rules)


def test_a_function_sees_the_leaf():
    tree = {"w": np.ones((8, 2), np.float32), "b": np.ones(2, np.float32), "step": 3}
    specs = specs_like(tree, lambda path, leaf: P("x") if np.ndim(leaf) == 2 else None, default=P())
    assert specs == {"w": P("x"), "b": P(), "step": P()}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """As a module of Equinox: arrays, functions and names in one tree."""

    weight: object
    activation: object
    name: object = dataclasses.field(metadata={"static": True})


def test_specs_of_a_module_are_those_of_its_arrays(mesh):
    module = [
        Layer(np.ones((8, 4), np.float32), jax.nn.relu, "first"),
        Layer(np.ones((4, 8), np.float32), None, "second"),
    ]
    specs = specs_like(module, {"0/weight": P("x"), "1/weight": P(None, "y")})
    assert (specs[0].weight, specs[0].activation, specs[0].name) == (P("x"), None, "first")
    arrays = [dataclasses.replace(module[0], activation=None), module[1]]
    f = pjit(lambda layers: jax.tree.map(lambda w: 2 * w, layers), in_axis_resources=(specs,), out_axis_resources=specs)
    with mesh:
        first, second = f(arrays)
        assert f.lower(arrays).compile()(arrays)[0].weight.sharding.spec == P("x")
    assert (first.weight.sharding.spec, second.weight.sharding.spec) == (P("x"), P(None, "y"))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    assert jax.jit(lambda layers: layers, in_shardings=(shardings,))(arrays)[0].weight.sharding.spec == P("x")


def test_dictionaries_of_haiku_and_states_of_optimizers_are_matched_by_one_set_of_rules():
    params = {"mlp/~/linear_0": {"w": np.ones((8, 4), np.float32), "b": np.ones(4, np.float32)}}
    tree = params, ({"count": np.int32(0), "mu": params},)
    table = spec_table(tree, {"linear_./w": P("x"), "/b$": P()})
    of_params = [(f"mlp/~/linear_0/{name}", spec) for name, spec in (("b", P()), ("w", P("x")))]
    assert [(row.path, row.spec) for row in table.rows] == [
        *((f"0/{path}", spec) for path, spec in of_params),
        ("1/0/count", P()),
        *((f"1/0/mu/{path}", spec) for path, spec in of_params),
    ]
    assert str(table).splitlines()[1].startswith("0/mlp"), "paths are no numbers, which are right-aligned"


def test_the_table_has_sizes_on_a_mesh_and_what_does_not_fit_on_it(mesh):
    tree = {
        "w": np.ones((8, 4), np.float32),
        "odd": np.ones((6, 4), np.float32),
        "key": jax.random.key(0),
        "b": np.ones(8),
    }
    rules = {"w|odd": P("x"), "b": UNSPECIFIED, "key": P(), "none": P()}
    table = spec_table(tree, rules, mesh=mesh)
    assert {row.path: row.nbytes_per_device for row in table.rows} == {"w": 32, "odd": None, "key": 8, "b": None}
    lines = str(table).splitlines()
    assert lines[0].split() == ["path", "array", "spec", "rule", "size", "per", "device"]
    assert lines[-3] == "4 arrays: 264 B, 40 B per device"
    assert lines[-2] == "rules that match nothing: 'none'"
    assert "odd (float32[6,4])" in lines[-1]
    assert "size of its dimension 0 should be divisible by 4" in lines[-1]
    assert "NamedSharding" not in str(table)
    own = NamedSharding(mesh, P("x", "y"))
    (row,) = spec_table({"w": tree["w"]}, {"w": own}, mesh=mesh).rows
    assert (row.spec, row.nbytes_per_device) == (own, 16)
    assert "per device" not in str(spec_table(tree, rules))
    assert str(table).splitlines()[1].split()[0] in table._repr_html_()
    assert repr(table) == str(table)
