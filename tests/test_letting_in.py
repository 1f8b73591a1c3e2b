"""Programs with calls let further calls in while the first one with its signature runs, whatever was called before."""

import collections
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import P, colocated, letting_in, pjit
from partjit.colocated import colocated_python
from partjit.plan.run import recent
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

double = colocated_python(lambda x: 2 * x, arrays="numpy", out_specs_fn=lambda x: x)


@pytest.fixture
def let_in(monkeypatch):
    """How many signatures were let in."""
    seen = collections.Counter()
    real = letting_in.LettingIn.let_in

    def counted(self, args, kwargs, *how):
        seen["signatures"] += 1
        return real(self, args, kwargs, *how)

    monkeypatch.setattr(letting_in.LettingIn, "let_in", counted)
    return seen


def arguments_of_all_kinds(mesh):
    """Of which no two have the same signature; by kind."""
    sharding = jax.sharding.NamedSharding(mesh, P("x"))
    x = np.arange(8.0, dtype=np.float32)
    return {
        **{f"an array of {dtype.__name__}": jnp.asarray(x, dtype) for dtype in (jnp.float32, jnp.int8, jnp.bfloat16)},
        **{f"of NumPy of {dtype.__name__}": x.astype(dtype) for dtype in (np.float32, np.int8)},
        **{f"of size {size}": jnp.zeros((size, 8)) for size in range(1, 4)},
        "committed": jax.device_put(x, jax.devices()[1]),
        "sharded": jax.device_put(x, sharding),
        "replicated": jax.device_put(x, jax.sharding.NamedSharding(mesh, P())),
        **{type(number).__name__: number for number in (1, 1.5, np.float32(2), np.int32(3))},
        "a tree": {"a": [jnp.ones(8), np.ones(3, np.float32)]},
    }


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("way", ["by position", "by name", "donated", "beside a static argument"])
def test_of_signatures_in_turns_each_call_does_what_it_does_alone(mesh, way):
    def fun(tree, scale=1):
        return [double(jnp.asarray(x).astype(jnp.float32)) * float(scale) for x in jax.tree.leaves(tree)]

    options = {"donated": {"donate_argnums": 0}, "beside a static argument": {"static_argnums": 1}}.get(way, {})
    program = pjit(fun, **options)
    for _ in range(3):
        for tree in arguments_of_all_kinds(mesh).values():
            expected = [np.asarray(x).astype(np.float32) * 2 for x in jax.tree.leaves(tree)]
            if way == "beside a static argument":
                same(program(tree, 3), [3 * x for x in expected])
            else:
                same(program(tree=tree) if way == "by name" else program(tree), expected)


def test_of_more_signatures_than_are_kept_each_call_is_right(monkeypatch, let_in):
    monkeypatch.setattr(letting_in, "_MOST_REPLACED", 3)
    monkeypatch.setattr(letting_in, "_SECONDS_APART", 1e9)
    program = pjit(lambda x: double(x) + 1)
    for _ in range(3):
        for size in range(1, 7):
            same(program(jnp.ones(size)), np.full(size, 3.0))
    assert 3 <= let_in["signatures"] <= 4, "then no more, until they come less often"


@pytest.mark.parametrize("most", [0, 3, 100])
def test_calls_that_wait_for_each_other_with_the_same_signature_end(most, monkeypatch):
    """Of two threads, for each of several signatures, in turns: the first call would otherwise keep the second out."""
    monkeypatch.setattr(letting_in, "_MOST_REPLACED", most)
    find = recent.Recent.short_cut
    # Not before the other thread is let in.
    monkeypatch.setattr(recent.Recent, "short_cut", lambda *given: (time.sleep(0.01), find(*given))[1])
    rendezvous.clear()

    def meet(x):
        if x.size < 6:
            rendezvous.logs["barrier"][0].wait(timeout=30)
        return x

    rendezvous.logs["barrier"].append(threading.Barrier(2))
    call = colocated_python(meet, mode="inline", arrays="numpy", out_specs_fn=lambda x: x)
    program = pjit(lambda x: call(x + 1) + 1)
    program(jnp.ones(6))  # so that it is known to make calls
    found = []

    def run():
        for _ in range(3):
            for size in range(1, 6):
                found.append(np.asarray(program(jnp.ones(size))))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert len(found) == 30
    for array in found:
        same(array, np.full(array.shape, 3.0))


def test_calls_without_a_plan_are_dispatched_by_cpp_beside_those_with_one(let_in):
    """A static argument says whether a step logs."""
    log = colocated_python(
        lambda x: rendezvous.logs["seen"].append(float(x)), stream="log", out_specs_fn=lambda _: None
    )
    traced = []

    def step(x, logs):
        traced.append(logs)
        if logs:
            log(x.sum())
        return x + 1

    program = pjit(step, static_argnums=1)
    for i in range(12):
        same(program(jnp.ones(3), i % 3 == 0), np.full(3, 2.0))
    colocated.wait()
    assert [*rendezvous.logs["seen"]] == [3.0] * 4
    assert let_in["signatures"] <= 4, "both are known from then on, and the one with calls has a short cut"
    assert program._cache_size() == 2
    before = let_in["signatures"]
    for i in range(12):
        program(jnp.ones(3), i % 3 == 0)
    assert let_in["signatures"] == before
    assert traced == [True, False]
    program.clear_cache()
    same(program(jnp.ones(3), True), np.full(3, 2.0))
    colocated.wait()
