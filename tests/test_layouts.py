"""Arrays whose layout in memory is not the default one are taken for what they are, wherever they come from."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import partjit
from partjit import colocated, pjit
from partjit._jax.layouts import has_default_layout, in_default_layout
from tests.colocated import rendezvous

VALUES = np.arange(32, dtype=np.float32).reshape(4, 8)
PLACES = ["one", "rows", "columns", "replicated"]
DTYPES = [np.float32, jnp.bfloat16, np.int8, np.bool_, np.complex64, jnp.int4]


@pytest.fixture(scope="module")
def shardings(mesh):
    specs = {"rows": P("x"), "columns": P(None, "y"), "replicated": P()}
    named = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    return {"one": SingleDeviceSharding(jax.devices()[0]), **named}


def array(sharding, *, is_transposed, dtype=np.float32):
    order = (1, 0) if is_transposed else (0, 1)
    return jax.device_put(VALUES.astype(dtype), Format(Layout(order), sharding))


def returning(**options):
    """A function that returns what it is given, in one layout and the other."""

    @colocated.colocated_python(out_specs_fn=lambda x: x, **options)
    def transposed(x):
        rendezvous.logs["seen"].append(np.array(x))
        order = (1, 0) if len(rendezvous.logs["seen"]) % 3 else (0, 1)
        return jax.device_put(np.asarray(x), Format(Layout(order), x.sharding))

    return transposed


def noting(**options):
    @colocated.colocated_python(out_specs_fn=lambda _: None, **options)
    def note(x):
        rendezvous.logs["seen"].append(np.array(x))

    return note


def plain():
    return pjit(lambda x: x + 1)


def donating():
    return pjit(lambda x: x + 1, donate_argnums=0)


def plan_compiled_ahead():
    note, by_sharding = noting(), {}

    def step(x):
        note(x)
        return x + 1

    def call(x):
        if x.sharding not in by_sharding:
            by_sharding[x.sharding] = pjit(step).lower(jax.device_put(VALUES, x.sharding)).compile()
        return by_sharding[x.sharding](x)

    return call


def eager_gradient():
    return lambda x: jax.grad(lambda x: (pjit(lambda x: (x + 1) ** 2)(x) / 2).sum())(x)


def eager_batch():
    return jax.vmap(pjit(lambda row: row + 1))


def constraint():
    def constrained(x):
        is_named = isinstance(x.sharding, NamedSharding)
        return (partjit.with_sharding_constraint(x, x.sharding) if is_named else x) + 1

    return constrained


def note_first():
    note = noting()
    return pjit(lambda x: (note(x), x + 1)[1])


def note_of_a_result():
    note = noting()
    return pjit(lambda x: (note(x * 2), x + 1)[1])


def note_in_a_loop():
    note = noting()
    return pjit(lambda x: jax.lax.fori_loop(0, 2, lambda _, y: (note(y), y + 0.5)[1], x))


def in_order(mode):
    call = returning(mode=mode)
    return pjit(lambda x: call(x) + 1)


def after_a_fragment():
    call = returning()
    return pjit(lambda x: call(x * 2) / 2 + 1)


def answered():
    @colocated.colocated_python(out_specs_fn=lambda x: x, uses_jax=False)
    def same(x):
        return np.asfortranarray(x)

    return pjit(lambda x: same(x) + 1)


def outside_of_programs(mode):
    call = returning(mode=mode)
    add = jax.jit(lambda x: x + 1)
    return lambda x: add(call(x))


PROGRAMS = {
    **{
        program.__name__: program
        for program in (
            plain,
            donating,
            plan_compiled_ahead,
            eager_gradient,
            eager_batch,
            constraint,
            note_first,
            note_of_a_result,
            note_in_a_loop,
            after_a_fragment,
            answered,
        )
    },
    **{f"result, {mode}": lambda mode=mode: in_order(mode) for mode in ("auto", "inline", "stream")},
    **{f"eager result, {mode}": lambda mode=mode: outside_of_programs(mode) for mode in ("auto", "inline", "stream")},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_means_the_same_of_arrays_of_any_layout(meeting, shardings, name):
    run = PROGRAMS[name]()
    for place, is_transposed in itertools.product(PLACES, (True, False, True, True, False, False, True)):
        x = array(shardings[place], is_transposed=is_transposed)
        assert has_default_layout(x) != is_transposed
        result = run(x)
        np.testing.assert_array_equal(np.asarray(result), VALUES + 1, err_msg=f"{place}, {is_transposed}")
        np.testing.assert_array_equal(np.asarray(jnp.negative(result)), -VALUES - 1)
        colocated.wait(timeout=60)
    for seen in meeting.logs["seen"]:
        assert any(np.array_equal(seen, value) for value in (VALUES, VALUES * 2, VALUES + 0.5))


def test_a_program_compiled_ahead_refuses_another_layout_as_jax_does(shardings):
    y = array(shardings["one"], is_transposed=False)
    compiled = pjit(lambda x: x + 1).lower(y).compile()
    np.testing.assert_array_equal(compiled(y), VALUES + 1)
    with pytest.raises(ValueError, match="layouts that disagree"):
        compiled(array(shardings["one"], is_transposed=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_array_is_copied_to_the_default_layout(shardings, dtype):
    for place in PLACES:
        x, y = (array(shardings[place], is_transposed=flag, dtype=dtype) for flag in (True, False))
        assert in_default_layout(y) is y
        copy = in_default_layout(x)
        assert has_default_layout(copy)
        assert not has_default_layout(x)
        assert (copy.sharding, copy.committed, copy.aval) == (x.sharding, x.committed, x.aval)
        np.testing.assert_array_equal(np.asarray(copy), np.asarray(y))


def test_keys_are_copied_to_the_default_layout(shardings):
    data = jax.random.key_data(jax.random.split(jax.random.key(0), 4))
    keys = jax.random.wrap_key_data(jax.device_put(data, Format(Layout((1, 0)), shardings["one"])))
    assert not has_default_layout(keys)
    assert has_default_layout(in_default_layout(keys))
    expected = jax.random.key_data(jax.random.split(jax.random.key(0), 4))
    np.testing.assert_array_equal(jax.random.key_data(pjit(lambda keys: keys)(keys)), expected)
