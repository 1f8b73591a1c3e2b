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
from partjit._jax.arrays import ArrayImpl
from partjit.colocated import cheapness, colocated_python
from partjit.colocated.runtime.host_values import Destination
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


@pytest.fixture(scope="module")
def from_the_first():
    """A function of whether calls are cheap from the first one on, for those made from now on."""
    with pytest.MonkeyPatch.context() as patch:
        yield lambda are_cheap: patch.setattr(cheapness, "_CHEAP_IN_A_ROW", 0 if are_cheap else 10)


CONTEXTS = {
    "64 bits": lambda mesh: jax.enable_x64(True),
    "another default device": lambda mesh: jax.default_device(jax.devices()[2]),
    "a mesh that is set": lambda mesh: jax.set_mesh(mesh),
}


@sees(
    "kinds that are known", "a number that is too large", "another layout", "known without arrays", "cheap", *CONTEXTS
)
@examples(40)
@given(st.data())
def test_known_kinds_of_arguments_change_nothing(mesh, from_the_first, data):
    rendezvous.clear()
    mode = data.draw(st.sampled_from(["inline", "stream", "auto", "cheap"]))
    from_the_first(mode == "cheap")
    saw(mode)
    options = {
        "mode": "auto" if mode == "cheap" else mode,
        "arrays": data.draw(st.sampled_from(["jax", "numpy"])),
        "out_specs_fn": lambda value, other: value,
        "devices": data.draw(st.sampled_from([None, None, [jax.devices()[3]], [*mesh.devices.flat]])),
    }
    known, unknown = (colocated_python(look, **options) for _ in range(2))
    layouts = [NamedSharding(mesh, P("x")), NamedSharding(mesh, P()), jax.devices()[1]]
    others = [jax.device_put(jnp.arange(8.0), layout) for layout in layouts] + [jnp.arange(8.0), 7, np.arange(3)]
    contexts = st.lists(st.sampled_from(["", "", *CONTEXTS]), min_size=1, max_size=4)
    draws = st.tuples(st.sampled_from(VALUES), st.integers(0, 5), contexts)
    for value, i, entered in data.draw(st.lists(draws, min_size=1, max_size=4)):
        for context in entered:
            results = []
            for f in (known, unknown):
                unknown._cache.last_with_host_values = None
                unknown._cache.with_host_values.clear()
                hits = known._cache.hits
                with CONTEXTS[context](mesh) if context else contextlib.nullcontext():
                    try:
                        result = f(value, others[i])
                        results.append((result.aval, result.sharding, result.committed, np.asarray(result).tolist()))
                    except (OverflowError, ValueError) as error:
                        results.append(f"{type(error).__name__}: {error}")
                is_known = known._cache.hits > hits
                saw("kinds that are known", when=is_known)
                saw("known without arrays", when=is_known and not isinstance(others[i], jax.Array))
            saw("a number that is too large", when=str(results[0]).startswith("OverflowError"))
            saw("another layout", when=i == 1)
            for name in CONTEXTS:
                saw(name, when=name == context)
            assert results[0] == results[1]
    colocated.wait()
    seen = rendezvous.logs["seen"]
    assert seen[::2] == seen[1::2]


@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_calls_of_known_kinds_are_recognized_in_any_order(monkeypatch, mode):
    f = colocated_python(look, mode=mode, out_specs_fn=lambda value, other: value)
    kinds = [lambda i, n=n: (np.full(n, i), jnp.arange(3.0)) for n in range(5)] + [lambda i: (i, 3), lambda i: (i, 3.5)]
    for kind in kinds:
        f(*kind(0))
    monkeypatch.setattr(type(f), "_put", None)
    for i in range(1, 3):
        for kind in kinds[::-i]:
            value, other = kind(i)
            np.testing.assert_array_equal(f(value, other), value)


@pytest.mark.parametrize("mode", ["inline", "stream"])
@pytest.mark.parametrize("first", [(), ("train",)], ids=["a number", "a text and a number"])
def test_a_call_like_the_last_one_flattens_its_arguments_once(monkeypatch, first, mode):
    log = colocated_python(lambda *_: rendezvous.logs["seen"].append(1), mode=mode, out_specs_fn=lambda *_: None)
    metrics = {f"metric {i}": jnp.float32(i) for i in range(5)}
    for step in range(3):
        log(*first, step, metrics)
    flattened = []
    flatten = jax.tree_util.tree_flatten
    monkeypatch.setattr(jax.tree_util, "tree_flatten", lambda tree: flattened.append(tree) or flatten(tree))
    log(*first, 3, metrics)
    assert flattened == [((*first, 3, metrics), {})]
    colocated.wait()
    assert len(rendezvous.logs["seen"]) == 4


@pytest.mark.parametrize("other", [2, np.float32(2), jnp.float32(2)], ids=["number", "NumPy", "array"])
def test_an_attribute_error_of_partjit_is_not_taken_for_an_argument_that_is_no_plain_array(monkeypatch, other):
    f = colocated_python(look, mode="inline", out_specs_fn=lambda value, other: value)
    f(1, other)

    def broken(*_, **__):
        raise AttributeError("ours")

    monkeypatch.setattr(Destination, "argument", broken)
    with pytest.raises(AttributeError, match="ours"):
        f(1, other)
    monkeypatch.setattr(Destination, "__init__", broken)
    with pytest.raises(AttributeError, match="ours"):
        f(np.ones(3), other)


@pytest.mark.parametrize("options", [{}, {"out_specs_fn": lambda i, x: i}], ids=["unspecified", "specified"])
def test_an_inline_call_that_returns_its_number_returns_a_plain_array(options):
    same = colocated_python(lambda i, x: i, mode="inline", **options)
    results = [same(i, jnp.ones(3)) for i in range(3)]
    assert {*map(type, results)} == {ArrayImpl}
    assert [*map(int, results)] == [0, 1, 2]


@pytest.mark.parametrize("beside", ["an array", "a NumPy array"])
@pytest.mark.parametrize("arrays", ["jax", "numpy"])
def test_a_numpy_array_may_be_changed_right_after_each_call(arrays, beside, mesh):
    def later(x, y):
        rendezvous.hear("go")
        return x

    f = colocated_python(later, mode="stream", arrays=arrays, out_specs_fn=lambda x, y: x)
    value, y = np.zeros(4, np.float32), np.arange(8.0, dtype=np.float32)
    if beside == "an array":
        y = jax.device_put(y, NamedSharding(mesh, P("x")))
    results = []
    for i in range(3):
        value[:] = i
        results.append(f(value, y))
    rendezvous.say("go")
    assert [np.asarray(result).tolist() for result in results] == [[float(i)] * 4 for i in range(3)]


@pytest.mark.parametrize("mode", ["inline", "auto", "stream"])
def test_a_function_of_numpy_arrays_gets_them_without_their_being_put_on_devices(mode, monkeypatch):
    spec = jax.ShapeDtypeStruct((4,), np.float32)
    options = {"mode": mode, "arrays": "numpy", "out_specs": spec, "devices": jax.devices()[:2]}
    double = colocated_python(lambda value: value * 2, **options)
    value = np.arange(4, dtype=np.float32)
    for _ in range(3):
        np.testing.assert_array_equal(double(value), value * 2)
    monkeypatch.setattr(Destination, "put", None)
    for i in range(3):
        np.testing.assert_array_equal(double(value + i), value * 2 + 2 * i)


@pytest.mark.parametrize("mode", ["inline", "auto"])
def test_a_call_in_its_caller_that_uses_a_number_alone_puts_nothing_on_devices(mode, monkeypatch):
    monkeypatch.setattr(cheapness, "_CHEAP_IN_A_ROW", 0)
    note = colocated_python(
        lambda i, x: rendezvous.logs["seen"].append(int(i)), mode=mode, out_specs_fn=lambda i, x: None
    )
    note(0, jnp.ones(3))
    monkeypatch.setattr(Destination, "put", None)
    note(1, jnp.ones(3))
    colocated.wait()
    assert rendezvous.logs["seen"] == [0, 1]


@pytest.mark.parametrize("is_in_program", [False, True])
@pytest.mark.parametrize("mode", ["auto", "stream"])
def test_a_number_is_on_the_devices_before_a_function_that_has_computed_with_one_there(mode, is_in_program):
    def note(i, x):
        rendezvous.logs["kinds"].append(type(i))
        rendezvous.logs["seen"].append((x + i).tolist() if rendezvous.logs["computes"] else [float(i)])

    x = jnp.zeros(2)
    note = colocated_python(note, out_specs_fn=lambda i, x: None, mode=mode)
    call = partjit.pjit(lambda i, x: note(i, x)) if is_in_program else note
    for i in range(8):
        if i == 5:
            rendezvous.logs["computes"].append(True)
        call(float(i), x)
        colocated.wait()
    assert rendezvous.logs["seen"] == [[0], [1], [2], [3], [4], [5, 5], [6, 6], [7, 7]]
    assert rendezvous.logs["kinds"][2:] == [colocated.PendingArray] * 4 + [ArrayImpl] * 2


def test_pending_arguments_and_those_of_programs_are_as_before(mesh):
    f = colocated_python(lambda step, x: x + step, out_specs_fn=lambda step, x: x)
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("x")))
    results = [f(1, x), f(2, f(3, x)), f(4, x), partjit.pjit(f)(5, x), f(6, x)]
    for result, step in zip(results, (1, 5, 4, 5, 6), strict=True):
        np.testing.assert_array_equal(result, np.arange(8.0) + step)


@pytest.mark.parametrize("context", ["", *CONTEXTS])
def test_numpy_arrays_of_other_shapes_compile_nothing(context, mesh, compilations):
    f = colocated_python(lambda x: x, arrays="numpy", out_specs_fn=lambda x: x)
    with CONTEXTS[context](mesh) if context else contextlib.nullcontext():
        like, _ = jnp.array(np.ones(3)), f(np.ones(3))
        compilations.clear()
        for n in range(4, 10):
            result = f(np.ones(n))
            assert (result.dtype, result.sharding, result.committed) == (like.dtype, like.sharding, like.committed)
            np.testing.assert_array_equal(result, np.ones(n))
    assert not compilations
