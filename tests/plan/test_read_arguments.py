"""Small arrays on one device that only calls read: these see what they would see of arrays that are on the mesh."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated, pjit
from partjit.colocated import colocated_python
from partjit.plan.run import placing
from tests.census import saw, sees
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

NUMBERS = [
    *(True, 3, -1.5, float("nan"), np.int8(-3), np.float16(0.1), np.bool_(False), np.int32(-(2**31))),
    *(ml_dtypes.bfloat16(0.1), np.complex64(2 + 1j)),
]
SHAPES = [(), (3, 2), (0,)]
number = jax.ShapeDtypeStruct((), np.float32)


def note(x) -> None:
    see(x)


def see(x):
    own = (
        (type(x).__name__,) if isinstance(x, np.ndarray) else (x.aval.str_short(), x.weak_type, x.committed, x.sharding)
    )
    value = np.asarray(x)
    rendezvous.logs["seen"].append(repr((own, value.dtype.name, value.shape, value.tolist(), value.flags.writeable)))
    return np.float32(1)


PROGRAMS = {
    "a log at the end": lambda s, x: (colocated_python(note, stream="log")(x), s + 1)[1],
    "a log of NumPy": lambda s, x: (colocated_python(note, arrays="numpy")(x), s + 1)[1],
    "a result at the start": lambda s, x: s + colocated_python(see, out_specs=number)(x),
    "a result of NumPy": lambda s, x: s + colocated_python(see, uses_jax=False, out_specs=number)(x),
    "a result that leaves": lambda s, x: (s + 1, colocated_python(see, out_specs=number)(x))[0],
}


@functools.cache
def program(name, devices, donates):
    mesh = partjit.Mesh(np.array(jax.devices()[:devices]), ("x",))
    return mesh, pjit(PROGRAMS[name], donate_argnums=(1,) if donates else (), name="step")


@pytest.fixture
def moves(monkeypatch):
    """How many arrays were moved."""
    found = []
    monkeypatch.setattr(placing, "device_put", lambda *args: found.append(args) or jax.device_put(*args))
    return found


@sees(*PROGRAMS, "8 devices", "1 device", "different examples", "a number", "donated")
@given(
    st.sampled_from([*PROGRAMS]),
    st.sampled_from([1, 8]),
    st.sampled_from(NUMBERS),
    st.sampled_from(SHAPES),
    st.booleans(),
)
def test_calls_see_what_they_would_see_of_an_array_on_the_mesh(name, devices, value, shape, donates):
    for case in (name, f"{devices} device{'s' * (devices > 1)}", "a number" * (shape == ()), "donated" * donates):
        saw(case)
    mesh, step = program(name, devices, donates)
    rendezvous.clear()
    seen, deleted = [], []
    with mesh:
        for put in (lambda x: jax.device_put(x, NamedSharding(mesh, P())), lambda x: x):
            for _ in range(3):  # known from the second one on
                x = jax.block_until_ready(put(jnp.broadcast_to(jnp.asarray(value), shape)))
                step(jnp.zeros(8), x)
                colocated.wait()
                seen.append(rendezvous.logs["seen"].pop())
                deleted.append(x.is_deleted())
    assert len({*seen}) == 1
    assert len({*deleted[3:]}) == 1, "it does not depend on how often it was called before"
    assert donates or not any(deleted)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", [*PROGRAMS])
def test_what_is_there_is_not_moved(name, devices, moves):
    mesh, step = program(name, devices, False)
    with mesh:
        for _ in range(3):
            step(jnp.zeros(8), jax.block_until_ready(jnp.float32(3)))
    assert not moves


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", [*PROGRAMS])
def test_one_that_is_deleted_is_named_before_anything_is_called(name, devices):
    mesh, step = program(name, devices, False)
    deleted = jnp.float32(3) + 0
    deleted.delete()
    with mesh:
        for is_known in (False, True, True):
            if is_known:
                step(jnp.zeros(8), jnp.float32(3) + 0)
                colocated.wait()
                rendezvous.clear()
            with pytest.raises(RuntimeError, match="x of step was deleted, or donated"):
                step(jnp.zeros(8), deleted)
            colocated.wait()
            assert not rendezvous.logs["seen"]


def test_the_caller_does_not_wait_for_what_is_still_computed():
    mesh, step = program("a log of NumPy", 8, False)

    @jax.jit
    def late(products):
        large = jnp.full((256, 256), 1 / 256, np.float32)  # which is its own square
        return jax.lax.fori_loop(0, products, lambda _, y: large @ y, large)[0, 0]

    def is_in_time(products):
        x = late(products)
        step(jnp.zeros(8), x)
        return not x.is_ready()

    with mesh:
        assert any(map(is_in_time, (1, 100, 1000, 10000)))
        colocated.wait()
    assert len({*rendezvous.logs["seen"]}) == 1
