"""Fragments that are equal are compiled once, and give what each of them would."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import partjit
from partjit import P, colocated, pjit
from partjit.plan.run import program as plans


@colocated.colocated_python(out_specs_fn=lambda x: x)
def shifted(x):
    return x + 1


@pytest.fixture
def compiled(monkeypatch):
    """The executables of each plan that is compiled."""
    found = []

    def compile_fragments(fragments, mesh):
        found.append(original(fragments, mesh))
        return found[-1]

    original = plans.compile_fragments
    monkeypatch.setattr(plans, "compile_fragments", compile_fragments)
    return found


X = np.arange(8, dtype=np.float32).reshape(4, 2)
TABLE = np.linspace(0, 1, 8, dtype=np.float32).reshape(4, 2)


def layers(x):
    for _ in range(4):
        x = jnp.sin(shifted(x))
    return x


def with_numbers(x):
    for scale in (2.0, 3.0, 2.0, 2.0):
        x = jnp.sin(shifted(x)) * scale
    return x


def with_tables(x):
    for k in range(3):
        x = jnp.sin(shifted(x)) * (TABLE + k)
    return x


def unused(x):
    a, b = shifted(x), shifted(x * 2)
    for k in range(4):  # of two arguments, the first one and the second one are used in turn
        a, b = shifted(jnp.sin(a if k % 2 else b)), shifted(jnp.cos(a))
    return a + b


def printed(x):
    for _ in range(3):
        x = jnp.sin(shifted(x))
        jax.debug.print("{}", x.sum())
    return x


def plain(fun, x):
    with jax.disable_jit():
        return np.asarray(fun(x))


@pytest.mark.parametrize("mesh", ["none", "one device", "several", "Explicit"])
@pytest.mark.parametrize("fun", [layers, with_numbers, with_tables, unused, printed], ids=lambda fun: fun.__name__)
def test_equal_fragments_share_an_executable_and_no_others_do(fun, mesh, compiled):
    devices = np.array(jax.devices())
    meshes = {
        "none": None,
        "one device": partjit.Mesh(devices[3:4], ("x",)),
        "several": partjit.Mesh(devices[:4], ("x",)),
        "Explicit": Mesh(devices[:4], ("x",), axis_types=(jax.sharding.AxisType.Explicit,)),
    }
    expected = plain(fun, jnp.asarray(X))
    x = X if meshes[mesh] is None else jax.device_put(X, NamedSharding(meshes[mesh], P("x")))
    program = pjit(fun)
    for _ in range(2):
        np.testing.assert_allclose(program(x), expected, rtol=1e-5)
    (executables,) = compiled
    number = {id(executable) for executable in executables}
    last = mesh in ("one device", "several")  # the sharding of the last fragment's result is open
    if fun is layers:
        assert len(executables) == 4
        assert len(number) == 1 + last
    elif fun is with_numbers:
        assert len(executables) == 4
        assert len(number) == 2 + last
    elif fun is printed:
        assert len(number) == len(executables) == 3
    else:
        assert 1 <= len(number) <= len(executables)
