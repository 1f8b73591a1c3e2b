"""A call with NumPy arrays and numbers is the same whether its kinds of arguments are known or not."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated
from partjit.colocated import colocated_python
from tests.census import saw, sees
from tests.colocated import rendezvous
from tests.effort import examples

pytestmark = pytest.mark.usefixtures("meeting")

VALUES = [True, 3, -4, 2**40, 0.5, 2j, np.int8(3), np.float32(0.5), np.arange(4), np.arange(4.0), np.arange(4.0) + 1]


def look(value, other):
    rendezvous.logs["seen"].append(
        [
            (
                isinstance(x, jax.Array) or type(x).__name__,
                x.dtype.name,
                x.shape,
                getattr(x, "weak_type", None),
                np.asarray(x).tolist(),
            )
            + ((x.sharding, x.committed) if isinstance(x, jax.Array) else (x.flags.writeable,))
            for x in (value, other)
        ]
    )
    return value


@sees("kinds that are known", "a number that is too large", "another layout", "64 bits")
@examples(40)
@given(st.data())
def test_known_kinds_of_arguments_change_nothing(mesh, data):
    rendezvous.clear()
    options = {
        "mode": data.draw(st.sampled_from(["inline", "stream", "auto"])),
        "arrays": data.draw(st.sampled_from(["jax", "numpy"])),
        "out_specs_fn": lambda value, other: value,
    }
    known, unknown = (colocated_python(look, **options) for _ in range(2))
    layouts = [NamedSharding(mesh, P("x")), NamedSharding(mesh, P()), jax.devices()[1]]
    others = [jax.device_put(jnp.arange(8.0), layout) for layout in layouts] + [jnp.arange(8.0), 7, np.arange(3)]
    draws = st.tuples(st.sampled_from(VALUES), st.integers(0, 5), st.booleans())
    times = st.integers(1, 3)
    for value, i, x64 in data.draw(st.lists(draws, min_size=1, max_size=4)):
        for _ in range(data.draw(times)):
            results = []
            for f in (known, unknown):
                unknown._cache.last_with_host_values = None
                hits = known._cache.hits
                with jax.enable_x64(True) if x64 else contextlib.nullcontext():
                    try:
                        result = f(value, others[i])
                        results.append((result.aval, result.sharding, result.committed, np.asarray(result).tolist()))
                    except OverflowError as error:
                        results.append(str(error))
                saw("kinds that are known", when=known._cache.hits > hits)
            saw("a number that is too large", when=isinstance(results[0], str))
            saw("another layout", when=i == 1)
            saw("64 bits", when=x64)
            assert results[0] == results[1]
    colocated.wait()
    seen = rendezvous.logs["seen"]
    assert seen[::2] == seen[1::2]


@pytest.mark.parametrize("arrays", ["jax", "numpy"])
def test_a_numpy_array_may_be_changed_right_after_each_call(arrays, mesh):
    def later(x, y):
        rendezvous.hear("go")
        return x

    f = colocated_python(later, mode="stream", arrays=arrays, out_specs_fn=lambda x, y: x)
    value, y = np.zeros(4, np.float32), jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("x")))
    results = []
    for i in range(3):
        value[:] = i
        results.append(f(value, y))
    rendezvous.say("go")
    assert [np.asarray(result).tolist() for result in results] == [[float(i)] * 4 for i in range(3)]


def test_pending_arguments_and_those_of_programs_are_as_before(mesh):
    f = colocated_python(lambda step, x: x + step, out_specs_fn=lambda step, x: x)
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("x")))
    results = [f(1, x), f(2, f(3, x)), f(4, x), partjit.pjit(f)(5, x), f(6, x)]
    for result, step in zip(results, (1, 5, 4, 5, 6), strict=True):
        np.testing.assert_array_equal(result, np.arange(8.0) + step)
