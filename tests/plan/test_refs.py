"""Programs with colocated calls and refs, which the host does not have."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import P, ShardingError, colocated, pjit, set_mesh
from partjit.colocated import colocated_python
from tests.colocated import rendezvous
from tests.effort import sample

lax = jax.lax

pytestmark = pytest.mark.usefixtures("meeting")


def doubled(x):
    rendezvous.logs["calls"].append(float(np.asarray(x)[0]))
    return x * 2


KINDS = {"numpy": {"arrays": "numpy"}, "on a thread": {"mode": "stream"}, "answered": {"uses_jax": False}}
double = {name: colocated_python(doubled, out_specs_fn=lambda x: x, **options) for name, options in KINDS.items()}


def update(ref, call):
    ref[...] = call(ref[...]) + 1


def straight(call, x):
    ref = jax.new_ref(x)
    update(ref, call)
    update(ref, call)
    return ref[...]


def in_a_loop(call, x):
    ref = jax.new_ref(x)
    lax.fori_loop(0, 2, lambda _, none: update(ref, call), None)
    return ref[...]


def of_an_iteration(call, x):
    def iteration(_, x):
        ref = jax.new_ref(x)
        update(ref, call)
        return ref[...]

    return lax.fori_loop(0, 2, iteration, x)


def in_branches(call, x):
    ref = jax.new_ref(x)
    for k in range(3):
        lax.cond(x[0] + k < 3, lambda: update(ref, call), lambda: None)
    return ref[...]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", [straight, in_a_loop, of_an_iteration, in_branches])
def test_a_program_has_refs_of_its_own(mesh, program, kind):
    x = np.ones(8, np.float32)
    with mesh:
        step = pjit(lambda x: program(double[kind], x), in_shardings=P("x"), out_shardings=P("x"), donate_argnums=0)
        for _ in range(2):
            rendezvous.clear()
            np.testing.assert_allclose(step(jnp.asarray(x)), 7)
            colocated.wait(timeout=60)
            assert rendezvous.logs["calls"] == [1, 3]


def test_an_eager_derivative_of_a_program_that_has_a_ref_and_an_effect():
    log = colocated_python(
        lambda x: rendezvous.logs["calls"].append(float(np.asarray(x)[0])), out_specs_fn=lambda x: None
    )

    def squared(x):
        ref = jax.new_ref(jnp.zeros_like(x))
        ref[...] = x * x
        log(x)
        return ref[...].sum()

    step = jax.grad(pjit(squared))
    for k in range(1, 4):
        np.testing.assert_array_equal(step(np.full(8, k, np.float32)), 2 * k)
    colocated.wait(timeout=60)
    assert rendezvous.logs["calls"] == [1, 2, 3]


def test_a_call_that_fails_names_its_line_beside_refs():
    fail = colocated_python(lambda x: 1 / 0, out_specs_fn=lambda x: x)
    with pytest.raises(ZeroDivisionError) as caught:
        pjit(lambda x: in_a_loop(fail, x))(np.ones(8, np.float32))
    assert "test_refs.py" in caught.value.__notes__[0]


# Refs of the caller


def by_calls(call, ref, other):
    """Between calls, and in nested functions, which read and write it as well."""
    update(ref, call)
    jax.jit(update, static_argnums=1)(ref, call)
    other[...] += ref[...]
    jax.jit(lambda: update(ref, call))()


def loop(call, ref, other):
    lax.fori_loop(0, 3, lambda _, none: update(ref, call), None)
    update(other, call)


def accumulated(call, ref, other):
    def iteration(total, x):
        ref[...] = 2 * ref[...] + call(x)[0]
        other[...] += call(x)[1]
        return total + jnp.sum(other[...]), jnp.sum(ref[...])

    return lax.scan(iteration, jnp.float32(0), jnp.arange(8.0).reshape(4, 2))


def indexed(call, ref, other):
    """On a mesh with Explicit axes jax indexes no ref that is sharded."""

    def iteration(total, x):
        ref[1] = ref[0] + call(x)[0]
        other[0] += call(x)[1]
        return total + other[0], ref[1]

    return lax.scan(iteration, jnp.float32(0), jnp.arange(8.0).reshape(4, 2))


def nested(call, ref, other):
    def iteration(i, x):
        lax.cond(i == 1, lambda: update(ref, call), lambda: None)
        return lax.fori_loop(0, i, lambda _, x: x + call(other[...]), x + ref[...])

    return lax.fori_loop(0, 3, iteration, 0 * ref[...])


def branches(call, ref, other):
    return lax.switch(jnp.int32(1), [lambda: call(ref[...]), lambda: (update(other, call), call(other[...]))[1]])


def awaited(call, ref, other):
    """A loop whose predicate reads a ref that nobody writes."""

    def iteration(x):
        return call(x) + other[...]

    return lax.while_loop(lambda x: jnp.sum(x) < 9 * jnp.sum(ref[...]), iteration, 0 * ref[...])


PROGRAMS = [by_calls, loop, accumulated, indexed, nested, branches, awaited]


PLACES = ["a device", "a mesh", "a mesh with Explicit axes"]


@pytest.mark.soak
@pytest.mark.parametrize(("program", "kind", "place"), sample([*itertools.product(PROGRAMS, KINDS, PLACES)], 2))
def test_refs_of_the_caller_are_read_and_written_as_without_calls(mesh, program, kind, place):
    if "Explicit" in place:
        if program is indexed:
            pytest.skip("jax refuses it")
        mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, P("x")) if place != "a device" else jax.devices()[0]

    def refs():
        return [jax.new_ref(jax.device_put(k + np.arange(8, dtype=np.float32) / 8, sharding)) for k in (1, 2)]

    def plain(x):
        return x * 2

    expected = refs()
    own = refs()
    captured = refs()
    with contextlib.nullcontext() if place == "a device" else set_mesh(mesh):
        results = jax.jit(lambda *refs: program(plain, *refs))(*expected)
        found = [
            pjit(lambda *refs: program(double[kind], *refs))(*own),
            pjit(lambda x: (program(double[kind], *captured), x)[0])(jnp.ones(())),
        ]
    for result, refs_of_it in zip(found, (own, captured), strict=True):
        jax.tree.map(np.testing.assert_allclose, result, results)
        for one, other in zip(refs_of_it, expected, strict=True):
            np.testing.assert_allclose(one[...], other[...])
            assert one[...].sharding == other[...].sharding
    colocated.wait(timeout=60)


def test_a_ref_that_is_not_on_the_mesh_is_named(mesh):
    step = pjit(lambda state: update(state["count"], double["numpy"]))
    ref = jax.new_ref(jnp.ones(8))
    message = r"state\['count'\], is a ref on the devices \[0\], but the program runs on the devices \[0, .*jax.new_ref"
    with set_mesh(mesh), pytest.raises(ShardingError, match=f"(?s){message}"):
        step({"count": ref})


@pytest.mark.parametrize("call", [lambda x: x, double["numpy"]])
def test_a_captured_ref_that_is_not_on_the_mesh_is_an_error_about_it(mesh, call):
    ref = jax.new_ref(jnp.ones(8))

    def step(x):
        ref[...] = ref[...] + x
        return call(x)

    message = r"What step closes over, .*float32\[8\].*, is a ref on the devices \[0\], .*jax.new_ref\(jax.device_put"
    with set_mesh(mesh), pytest.raises(ShardingError, match=f"(?s){message}"):
        pjit(step)(jnp.ones(8))
    np.testing.assert_array_equal(ref[...], np.ones(8))


def test_only_refs_that_are_written_are_given_to_what_writes_them():
    def program(ref, other):
        lax.fori_loop(0, 2, lambda i, none: ref.at[i].set(double["numpy"](other[...])[i]), None)

    last = pjit(program).plan(jax.new_ref(jnp.ones(8)), jax.new_ref(jnp.ones(8))).fragments[-1]
    assert [type(value.aval).__name__ for value in last.inputs].count("AbstractRef") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_fails_leaves_the_ref_as_it_was(kind):
    def third(x):
        if x[0] > 5:
            raise ArithmeticError("too large")
        return x * 2

    ref = jax.new_ref(jnp.ones(8))
    call = colocated_python(third, out_specs_fn=lambda x: x, **KINDS[kind])
    program = pjit(lambda ref: lax.fori_loop(0, 5, lambda _, none: update(ref, call), None))
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="too large"):
            program(ref)
        np.testing.assert_allclose(ref[...], 1)


def read_by_a_predicate(ref):
    def iteration(i):
        update(ref, double["numpy"])
        return i + 1

    return lax.while_loop(lambda i: ref[0] < 20, iteration, 0)


def written_by_a_predicate(ref):
    def goes_on(i):
        update(ref, double["numpy"])
        return ref[0] < 20

    return lax.while_loop(goes_on, lambda i: i + 1, 0)


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("program", [read_by_a_predicate, written_by_a_predicate])
def test_a_predicate_needs_no_ref_that_is_written(program, is_own):
    """jax does not evaluate it as it is written: the first loop would go on for ever, the second make calls twice."""
    x = jnp.ones(8)
    with pytest.raises(ValueError, match="doubled is called in a while_loop whose predicate needs a ref at "):
        pjit(lambda x: program(jax.new_ref(x) if is_own else x))(x if is_own else jax.new_ref(x))
    assert not rendezvous.logs["calls"]
