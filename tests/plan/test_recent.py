"""How many kinds of calls of a program are recognized at a glance."""

import random
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from partjit import P, ReshardWarning, ShardingError, colocated, dispatch, pjit, reshard_policy
from partjit.colocated import colocated_python
from partjit.plan.run import recent
from partjit.testing import assert_no_recompile
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

KINDS = 12


def noted(x) -> None:
    rendezvous.logs["sums"].append(float(x))


def doubled(x):
    return np.asarray(x) * 2


def program(kind):
    """A function of an array and a number, and whether the number is static."""
    is_static = kind == "a static argument"
    log, double = colocated_python(noted), colocated_python(doubled, out_specs_fn=lambda x: x, mode="inline")

    def step(x, k):
        if kind == "a result":
            return double(x + k)
        log(x.sum() + k)
        return 2 * (x + k)

    return pjit(step, static_argnums=(1,) if is_static else ())


def arguments(kind):
    """Arguments of as many kinds as there are."""
    if kind == "a static argument":
        return [(jnp.full(3, k, jnp.float32), k) for k in range(KINDS)]
    return [(jnp.full(1 + k // 2, k, (jnp.float32, jnp.int32)[k % 2]), k) for k in range(KINDS)]


@pytest.fixture
def inferred(monkeypatch):
    """The arguments of the calls that were not recognized."""
    found, real = [], dispatch.infer_program

    def infer(fun, definition, args, kwargs):
        found.append(args)
        return real(fun, definition, args, kwargs)

    monkeypatch.setattr(dispatch, "infer_program", infer)
    return found


def check(step, kind, calls):
    rendezvous.logs["sums"].clear()
    for x, k in calls:
        np.testing.assert_array_equal(step(x, k), 2 * (np.asarray(x) + k))
    colocated.wait()
    sums = [] if kind == "a result" else [float(np.asarray(x).sum()) + k for x, k in calls]
    assert rendezvous.logs["sums"] == sums


@pytest.mark.parametrize("kind", ["a log", "a result", "a static argument"])
def test_calls_of_many_kinds_are_recognized_in_any_order(kind, inferred):
    step, calls = program(kind), arguments(kind)
    check(step, kind, calls)
    assert len(inferred) == KINDS
    inferred.clear()
    for seed in range(3):
        check(step, kind, random.Random(seed).sample(calls, KINDS))
    assert not inferred
    jax.clear_caches()  # which has it recognize nothing
    check(step, kind, calls[:1])
    assert inferred


@pytest.mark.parametrize("kind", ["a log", "a result", "a static argument"])
def test_calls_of_more_kinds_than_are_kept_are_as_right(kind, inferred, monkeypatch):
    monkeypatch.setattr(recent, "_MOST", 6)
    step, calls = program(kind), arguments(kind)
    for seed in range(3):
        check(step, kind, random.Random(seed).sample(calls, KINDS))
    assert len(inferred) > KINDS  # some were forgotten


@pytest.mark.parametrize("host", [False, True])
def test_a_static_argument_without_a_hash_is_named_all_the_same(host):
    log = colocated_python(noted)

    def step(x, k, name):
        log(x.sum() + k)
        return x

    options = {"static_argnums": (1,), "host_argnums": (2,)} if host else {"static_argnums": (1, 2)}
    program = pjit(step, **options)  # with host arguments C++ does not see the call first
    for k in range(KINDS):
        program(jnp.zeros(3), k, "a name")
    with pytest.raises(ValueError, match="static argument number 1 of step is of type list" if host else "hash"):
        program(jnp.zeros(3), [1], "a name")
    colocated.wait()


def drawn_with(returns):
    """A function of an array and typed keys without a call, and what it is with a log of the array."""
    log = colocated_python(noted)

    def draw(x, keys):
        drawn = jax.vmap(lambda key: jax.random.uniform(key, ()))(keys)
        return x + drawn.sum(), jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys) if returns == "keys" else drawn

    def step(x, keys):
        log(x.sum())
        return draw(x, keys)

    return draw, step


def data(leaf):
    return np.asarray(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


@pytest.mark.parametrize("returns", ["numbers", "keys"])
@pytest.mark.parametrize("donates", [False, True])
def test_calls_with_typed_keys_are_recognized(returns, donates, inferred):
    draw, step = drawn_with(returns)
    expected_of, program = jax.jit(draw), pjit(step, donate_argnums=(1,) if donates else ())
    kinds = [(impl, count) for impl in ("threefry2x32", "rbg") for count in (2, 3, 4)]
    for turn in range(3):
        if turn == 1:
            inferred.clear()
        for impl, count in kinds:
            x, keys = jnp.full(2, count, jnp.float32), jax.random.split(jax.random.key(count, impl=impl), count)
            expected = expected_of(x, keys)
            got = program(x, keys)
            assert keys.is_deleted() == (donates and returns == "keys")
            for one, other in zip(got, expected, strict=True):
                assert one.dtype == other.dtype
                np.testing.assert_allclose(data(one), data(other), rtol=1e-6)
    colocated.wait()
    assert rendezvous.logs["sums"] == [2.0 * count for _, count in kinds] * 3
    assert not inferred


def in_a_tree(step, number):
    return step(jnp.float32(1), {"n": number})


def by_name(step, number):
    return step(jnp.float32(1), n=number)


def by_position(step, number):
    return step(jnp.float32(1), number)


@pytest.mark.parametrize("given", [in_a_tree, by_name, by_position])
@pytest.mark.parametrize("reads", ["a fragment", "a call"])
def test_an_integer_of_too_many_bits_is_named_however_well_the_call_is_known(given, reads):
    log = colocated.colocated_python(lambda x: None, out_specs_fn=lambda x: None)

    @pjit
    def step(x, n):
        number = n["n"] if isinstance(n, dict) else n
        y = x * 2 if reads == "a call" else x * 2 + number
        log(number if reads == "a call" else y)
        return y

    path = "n['n']" if given is in_a_tree else "n"
    for _ in range(3):
        for _ in range(4):
            assert given(step, 1) == (2 if reads == "a call" else 3)
        for number in (2**31, 2**70):
            with pytest.raises(OverflowError, match=rf"Argument {re.escape(path)} of step is {number}, an int, which"):
                given(step, number)
        with jax.enable_x64(True):
            for _ in range(4):
                assert given(step, 2**31) == (2 if reads == "a call" else 2**31 + 2)
            with pytest.raises(OverflowError, match=rf"Argument {re.escape(path)} of step is {2**70}, an int, which"):
                given(step, 2**70)
    colocated.wait()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    "spec", [P("data"), P("data", None), P(None, None), P("one"), P("one", "data"), P(("data", "one"))], ids=str
)
def test_a_state_whose_spec_results_spell_in_another_way_is_compiled_for_once(spec, kind):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(4, 1), ("data", "one"), axis_types=(kind,) * 2)
    step = program("a result")
    state = jax.device_put(np.ones((4, 4), np.float32), NamedSharding(mesh, spec))
    k = jax.device_put(np.float32(0), NamedSharding(mesh, P()))
    with jax.set_mesh(mesh), assert_no_recompile(step, warmup=1) as watched:
        for _ in range(3):
            state = watched(state, k)
    np.testing.assert_array_equal(state, np.full((4, 4), 8))


@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_calls_whose_arguments_are_moved_are_recognized_and_still_reported(mesh, inferred, donated):
    """Warned of once for each line, and refused once that is requested, before any call is made."""
    log = colocated_python(noted)

    def step(w, x, k):
        log(k)
        return w + x.sum(), x * 2

    program = pjit(step, in_shardings=(P("x"), P("x"), None), donate_argnums=donated)

    def given(spec, k):
        return [jax.device_put(jnp.full((8, 8), k, jnp.float32), NamedSharding(mesh, s)) for s in (P("x"), spec)]

    def called(k, *spec):
        args = given(P(*spec or (None, "x")), k)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outs = program(*args, k)
        np.testing.assert_array_equal(outs[0], np.full((8, 8), k + 64 * k))
        np.testing.assert_array_equal(outs[1], np.full((8, 8), 2 * k))
        return [warning.category for warning in caught]

    with mesh:
        assert called(1) == [ReshardWarning]
        assert [called(k) for k in range(2, 6)] == [[]] * 4
        assert len(inferred) == 1
        for k in (7, 8):
            outs = called(k, "x"), called(k)
            assert outs == ([], [])
        assert len(inferred) == 2
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            program(*given(P(None, "x"), 9), 9)  # another line
        assert [warning.category for warning in caught] == [ReshardWarning]
        colocated.wait()
        with reshard_policy("error"), pytest.raises(ShardingError, match="does not match"):
            program(*given(P(None, "x"), 10), 10)
        assert len(inferred) == 2
    colocated.wait()
    assert rendezvous.logs["sums"] == [1, 2, 3, 4, 5, 7, 7, 8, 8, 9]
