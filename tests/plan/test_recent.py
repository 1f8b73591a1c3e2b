"""How many kinds of calls of a program are recognized at a glance."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import colocated, dispatch, pjit
from partjit.colocated import colocated_python
from partjit.plan.run import recent
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


def test_a_static_argument_without_a_hash_is_named_all_the_same():
    step, calls = program("a static argument"), arguments("a static argument")
    for x, k in calls:
        step(x, k)
    with pytest.raises(ValueError, match="hash"):
        step(calls[0][0], [1])
    colocated.wait()
