"""`device`, `backend` and `inline` mean what they mean for `jax.jit`."""

import functools
import pickle
import warnings

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding

from partjit import P, pjit, set_mesh
from partjit._jax.versions import RELEASE
from tests.census import saw, sees
from tests.effort import examples

X = np.arange(8, dtype=np.float32)


def on_device(fun, **options):
    with pytest.warns(DeprecationWarning, match="backend and device argument on pjit is deprecated") as caught:
        function = pjit(fun, **options)
    assert {warning.filename for warning in caught} == {__file__}
    return function


def jit_on_device(fun, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return jax.jit(fun, **options)


def sources(mesh):
    """Arguments by where they are."""
    return {
        "NumPy": X,
        "uncommitted": jnp.asarray(X),
        "on another device": jax.device_put(X, jax.devices()[5]),
        "there": jax.device_put(X, jax.devices()[3]),
        "sharded": jax.device_put(X, NamedSharding(mesh, P("x"))),
    }


@functools.cache
def products(option):
    """A function of partjit and one of jax, which all sources share."""
    options = {"device": jax.devices()[3]} if option == "device" else {"backend": "cpu"}
    return on_device(lambda x, *, by=2: x * by, **options), jit_on_device(lambda x, *, by=2: x * by, **options)


@pytest.mark.parametrize("where", ["NumPy", "uncommitted", "on another device", "there", "sharded"])
@pytest.mark.parametrize("option", ["device", "backend"])
def test_arguments_are_moved_to_the_device_and_results_are_committed_to_it(mesh, where, option):
    expected = {jax.devices()[3 if option == "device" else 0]}
    x = sources(mesh)[where]
    ours, theirs = products(option)
    for function in (ours, theirs):
        for out in (function(x), function(x), function(x, by=3), function.lower(X).compile()(X)):  # the second is hot
            assert out.committed
            assert out.devices() == expected
            assert out.sharding.is_equivalent_to(SingleDeviceSharding(*expected), 1)
        np.testing.assert_array_equal(function(x, by=3), X * 3)
    for transformed in (lambda x: jax.vjp(ours, x)[1](X)[0], jax.vmap(ours), jax.jit(ours)):
        if where in ("NumPy", "uncommitted"):
            assert transformed(x).devices() == expected
    with jax.disable_jit():
        np.testing.assert_array_equal(ours(x), X * 2)


def test_a_function_without_arguments_runs_on_its_device():
    assert on_device(lambda: jnp.ones(3), device=jax.devices()[6])().devices() == {jax.devices()[6]}
    assert on_device(lambda: jnp.ones(3), device=jax.devices()[2]).eval_shape().sharding.device_set == {
        jax.devices()[2]
    }


def test_two_devices_are_two_programs():
    def double(x):
        return x * 2

    for device in (*jax.devices()[:3], *jax.devices()[:3]):
        assert on_device(double, device=device)(X).devices() == {device}


def test_a_device_survives_pickling():
    again = cloudpickle.dumps(on_device(lambda x: x + 1, device=jax.devices()[3]))
    with pytest.warns(DeprecationWarning, match="deprecated"):
        assert pickle.loads(again)(X).devices() == {jax.devices()[3]}


def test_donated_arrays_are_moved_too():
    x = jax.device_put(X, jax.devices()[5])
    out = on_device(lambda x: x + 1, device=jax.devices()[3], donate_argnums=0)(x)
    np.testing.assert_array_equal(out, X + 1)


def test_devices_of_a_program_contradict_each_other():
    inner = on_device(lambda x: x + 1, device=jax.devices()[3])
    other = on_device(lambda x: x + 1, device=jax.devices()[4])
    with pytest.raises(ValueError, match="Received incompatible devices for jitted computation"):
        jax.jit(lambda x: inner(x) + other(x))(X)


@pytest.mark.filterwarnings("ignore:backend and device argument")
def test_what_goes_not_together_is_refused_as_by_jit(mesh):
    device = jax.devices()[3]
    for wrap in (pjit, jax.jit):
        with pytest.raises(ValueError, match="can't specify both a device and a backend for"):
            wrap(lambda x: x, device=device, backend="cpu")
        for name in ("in_shardings", "out_shardings"):
            with pytest.raises(ValueError, match=f"then {name} should not be specified"):
                wrap(lambda x: x, device=device, **{name: NamedSharding(mesh, P())})
        with pytest.raises(RuntimeError, match="Unknown backend"):
            wrap(lambda x: x, backend="abacus")(X)
        with set_mesh(mesh), pytest.raises(ValueError, match="Mesh context manager should not be used with"):
            wrap(lambda x: x, device=device)(X)
    with pytest.raises(ValueError, match="in_axis_resources should not be specified"):
        pjit(lambda x: x, P("x"), device=device)
    with mesh, pytest.raises(ValueError, match=r"<lambda> runs on .*3.*, but the mesh \(x=4, y=2\) is set"):
        pjit(lambda x: x, device=device)(X)


def test_as_a_decorator_it_warns_once():
    with pytest.warns(DeprecationWarning, match="deprecated") as caught:

        @pjit(device=jax.devices()[1])
        def f(x):
            return x

    assert len(caught) == 1
    assert f(X).devices() == {jax.devices()[1]}


def summed(x, y):
    return jnp.sum(x * y, axis=0), y


def looped(x, y):
    return jax.lax.scan(lambda carry, x: (carry + x, carry * 2), y[0], x)


def of_results(x, y):
    return x


FUNCTIONS = [summed, looped, of_results, lambda x, y: jnp.ones(3), lambda x, y: jax.nn.relu(x) @ y]
OUTER = [
    lambda f: lambda x, y: f(x, y),
    lambda f: lambda x, y: f(f"{x.shape}" and x, y=y),
    lambda f: jax.jit(lambda x, y: f(x, y)),
    lambda f: pjit(lambda x, y: (f(x, y), f(x + 1, y))),
    lambda f: jax.grad(lambda x, y: sum(out.sum() for out in jax.tree.leaves(f(x, y)))),
    lambda f: jax.vmap(f),
    lambda f: jax.checkpoint(f),
    lambda f: lambda x, y: jax.lax.map(lambda row: f(row[None], y), x),
]


def equations(jaxpr):
    """The primitives and types of equations, nested ones as well; how they print depends on which are shared."""
    found = []
    for eqn in jaxpr.eqns:
        params = [item for value in eqn.params.values() for item in (value if isinstance(value, tuple) else [value])]
        inner = [equations(param) for param in params if hasattr(param, "eqns")]
        found.append((eqn.primitive.name, [str(var.aval) for var in eqn.outvars], inner))
    return found


def traced(fun, x, y):
    return equations(jax.make_jaxpr(fun)(x, y))


@sees("different examples", "equations of an inner jaxpr", "equations that are not nested")
@examples(20)  # of 40
@given(st.sampled_from(FUNCTIONS), st.sampled_from(OUTER))
def test_an_inlined_function_is_its_equations(fun, outer):
    x, y = np.ones((2, 4, 4), np.float32)
    inlined = outer(pjit(fun, inline=True))
    bare = traced(outer(fun), x, y)
    saw("equations of an inner jaxpr" if any(inner for _, _, inner in bare) else "equations that are not nested")
    assert traced(inlined, x, y) == bare
    assert traced(outer(pjit(fun)), x, y) != bare
    if RELEASE < (0, 12):  # later ones inline when they lower
        assert traced(outer(jax.jit(fun, inline=True)), x, y) == bare
    for ours, theirs in zip(jax.tree.leaves(inlined(x, y)), jax.tree.leaves(jax.jit(outer(fun))(x, y)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_a_result_that_is_an_argument_is_an_array():
    same = pjit(lambda x: x, inline=True)

    def checked(number):
        result = same(number)
        assert isinstance(result, jax.Array)
        return result

    for number in (1.0, 2, True, np.float32(1), np.ones(3, np.float64)):
        (aval,) = jax.make_jaxpr(lambda number=number: checked(number))().out_avals
        (of_jit,) = jax.make_jaxpr(lambda number=number: jax.jit(lambda x: x)(number))().out_avals
        assert aval == of_jit


def test_specs_keep_the_equation(mesh):
    inner = pjit(lambda x: x + 1, in_shardings=P("x"), inline=True)
    with mesh:
        jaxpr = jax.make_jaxpr(lambda x: inner(x) * 2)(X)
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["pjit", "mul"]


def test_what_is_not_traced_is_compiled_as_one(mesh, compilations):
    inner = pjit(lambda x: jnp.tanh(x + 1.25) * 3.5 - x, inline=True)
    with mesh:
        inner(X)
    of_vmap = len(compilations)
    jax.vmap(inner)(X)
    assert of_vmap == 1
    assert len(compilations) == 2


def test_policies_of_inlining():
    kinds = getattr(jax, "Inline", ())
    for kind in kinds:
        if kind.name.startswith("XLA"):
            with pytest.raises(ValueError, match=r"inline must be a flag, Inline.JAX_EARLY"):
                pjit(lambda x: x, inline=kind)
        else:
            names = [e.primitive.name for e in jax.make_jaxpr(pjit(lambda x: x + 1, inline=kind))(X).eqns]
            assert names == (["pjit"] if kind.name == "AUTO" else ["add"])
    assert bool(kinds) == (RELEASE >= (0, 12))


def test_on_explicit_axes_inlined_equations_have_the_types_of_their_arguments():
    with set_mesh(jax.make_mesh((4, 2), ("x", "y"), (jax.sharding.AxisType.Explicit,) * 2)):
        x = jax.device_put(np.ones((4, 4), np.float32), P("x", "y"))
        y = jax.device_put(np.ones((4, 4), np.float32), P(None, "y"))
        for fun in (summed, of_results, lambda x, y: jnp.tanh(x) + 1, lambda x, y: jax.sharding.reshard(x, P("y")) * 2):
            for outer in OUTER[:5]:
                assert traced(outer(pjit(fun, inline=True)), x, y) == traced(outer(fun), x, y)
        for ours, theirs in zip(pjit(summed, inline=True)(x, y), summed(x, y), strict=True):
            assert ours.sharding == theirs.sharding
