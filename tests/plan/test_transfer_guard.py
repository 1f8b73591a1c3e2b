"""Under jax's transfer guard: calls move what they were made for, explicitly, and what a function moves is its own."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated, pjit
from partjit.colocated import colocated_python

lax = jax.lax
number = jax.ShapeDtypeStruct((), np.float32)
truth = jax.ShapeDtypeStruct((), np.bool_)


class Calls:
    """A call of each kind, of functions that do not move anything themselves."""

    def __init__(self, **options):
        is_numpy = options.get("uses_jax") is False or "arrays" in options
        add = (lambda x: x + np.float32(1)) if is_numpy else (lambda x: -x)
        self.change = colocated_python(add, out_specs_fn=lambda x: x, **options)
        self.mean = colocated_python(lambda x: np.float32(2), out_specs=number, **options)
        self.goes_on = colocated_python(lambda x, i: np.bool_(int(i) < 3), out_specs=truth, **options)
        self.log = colocated_python(lambda *args: None, out_specs_fn=lambda *_: None, **options)


def straight(calls, x):
    calls.log(x, 1.5, 3)
    return calls.change(x) * calls.mean(x), calls.change(x)


def logged(calls, x):
    return lax.scan(lambda x, i: (x + 1, calls.log(i, x)), x, length=3)


def loop(calls, x):
    return lax.fori_loop(0, 3, lambda i, x: (calls.change(x) + i, calls.log(i, x))[0], x)


def branch(calls, x):
    return lax.cond(jnp.sum(x) > 0, calls.change, lambda x: x, x)


def awaited(calls, x):
    return lax.while_loop(lambda c: calls.goes_on(*c), lambda c: (c[0] * 2, c[1] + 1), (x, 0))


def differentiated(calls, x):
    return jax.grad(lambda x: jnp.sum(x * calls.change(lax.stop_gradient(x))))(x)


KINDS = {
    "jax": {},
    "on a thread": {"mode": "stream"},
    "numpy": {"arrays": "numpy", "mode": "inline"},
    "numpy on a thread": {"arrays": "numpy", "mode": "stream"},
    "answered": {"uses_jax": False},
}
CALLS = {kind: Calls(**options) for kind, options in KINDS.items()}
PROGRAMS = [straight, logged, loop, branch, awaited, differentiated]


@pytest.mark.parametrize("axes", [None, "Auto", "Explicit"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fun", PROGRAMS)
def test_programs_with_calls_run_where_implicit_transfers_are_disallowed(mesh, fun, kind, axes):
    value = np.arange(8, dtype=np.float32)
    if axes == "Explicit":
        mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    sharding = jax.devices()[0] if axes is None else NamedSharding(mesh, P("x"))
    with contextlib.nullcontext() if axes is None else partjit.set_mesh(mesh):
        x = jax.device_put(value, sharding)
        program = pjit(lambda x: fun(CALLS[kind], x))
        results = []
        for guard in ("allow", "disallow", "disallow"):
            with jax.transfer_guard(guard):
                results.append(jax.block_until_ready(program(x)))
                colocated.wait(timeout=60)
    for result in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, result, results[0])


@pytest.mark.parametrize("kind", KINDS)
def test_eager_calls_run_where_implicit_transfers_are_disallowed(mesh, kind):
    for sharding in (jax.devices()[0], NamedSharding(mesh, P("x"))):
        x = jax.device_put(np.ones(8, np.float32), sharding)
        expected = np.asarray(CALLS[kind].change(x))
        with jax.transfer_guard("disallow"):
            results = [jax.block_until_ready(call(x)) for call in (CALLS[kind].change, CALLS[kind].mean)]
        np.testing.assert_array_equal(results[0], expected)
        assert results[1] == 2


def test_shards_are_put_together_where_implicit_transfers_are_disallowed(mesh):
    x = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, P("x")))
    call = colocated_python(lambda shard: np.asarray(shard.data) * 2, layout="per_shard", out_specs_fn=lambda x: x)
    with jax.transfer_guard("disallow"), mesh:
        results = [call(x), pjit(call)(x)]
    for result in results:
        np.testing.assert_array_equal(result, 2 * np.arange(8))


@pytest.mark.parametrize("options", [{"stream": "numbers"}, {"mode": "stream"}, {"layout": "per_shard"}], ids=str)
def test_numbers_that_the_host_knows_are_put_where_implicit_transfers_are_disallowed(mesh, options):
    def use(*args):
        for arg in args:
            jax.block_until_ready(-(arg if isinstance(arg, jax.Array) else arg.data))

    call = colocated_python(use, out_specs_fn=lambda *_: None, **options)

    @pjit
    def step(x, count):
        call(x, 1.5, 3, count)
        return x, count + 1

    x, count = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("x"))), jnp.int32(0)
    with jax.transfer_guard("allow"):
        _, count = step(x, count)
    for _ in range(2):
        with jax.transfer_guard("disallow"):
            _, count = step(x, count)
            colocated.wait(timeout=60)


@pytest.mark.parametrize("guard", ["disallow", "disallow_explicit"])
def test_arguments_of_the_caller_are_transfers_of_the_caller(guard):
    with jax.transfer_guard(guard), pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        jax.block_until_ready(CALLS["jax"].change(np.ones(8, np.float32)))


def test_explicit_transfers_are_those_of_calls_as_well():
    x = jnp.ones(8)
    with jax.transfer_guard("disallow_explicit"), pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        jax.block_until_ready(CALLS["numpy"].change(x))
