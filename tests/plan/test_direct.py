"""Results of calls that only executables get, as NumPy arrays: nobody sees a difference."""

import collections
import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import partjit
from partjit import colocated, events, pjit
from partjit.colocated import colocated_python
from partjit.plan.run.direct import left_to_dispatch
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")


def left(plan, sharding=None):
    default = sharding or SingleDeviceSharding(jax.devices()[0])
    return left_to_dispatch(plan, default, False, lambda value: value.sharding or default)


def direct(plan):
    """The names of the results that are left to the dispatch."""
    return sorted(value.name for value in left(plan).made)


def as_it_is(x):
    return x


def reused(x):
    """In memory that the function keeps, and writes over in each call."""
    buffers = rendezvous.logs["buffers"]
    if not buffers:
        buffers.append(np.empty_like(x))
    buffers[0][...] = x
    return buffers[0]


RETURNED = {
    "the argument": as_it_is,
    "memory that is used again": reused,
    "a new array": np.array,
    "a view": lambda x: x.T.T,
    "an array of jax": lambda x: jnp.asarray(x),
    "a number": lambda x: x.ravel()[0],
    "a Python number": lambda x: x.ravel()[0].item(),
}
DTYPES = [np.float32, np.int8, np.uint32, np.bool_, np.complex64, jnp.bfloat16]


def test_the_results_are_those_by_hand():
    """Whatever the function returns, and of which dtype; several executions are under way at once."""
    seen = collections.Counter()
    for (kind, function), dtype, shape in itertools.product(RETURNED.items(), DTYPES, [(), (7,), (40, 40)]):
        if ("number" in kind and shape) or (kind == "a number" and dtype is jnp.bfloat16 and not shape):
            continue
        if kind == "a Python number" and np.dtype(dtype).kind == "V":
            continue
        rendezvous.clear()
        call = colocated_python(function, arrays="numpy", out_specs_fn=lambda x: x)
        program = pjit(lambda x, call=call: call(x + x) + x)
        given = [jnp.full(shape, i % 2, dtype) for i in range(4)]
        assert len(direct(program.plan(given[0]))) == 1
        for _ in range(2):
            results = [program(x) for x in given]
            for x, result in zip(given, results, strict=True):
                assert result.dtype == x.dtype
                assert isinstance(result, jax.Array)
                np.testing.assert_array_equal(np.asarray(result), np.asarray(x + x + x))
        seen[kind] += 1
        seen[np.dtype(dtype).name] += 1
    assert len(seen) == len(RETURNED) + len(DTYPES)


@pytest.mark.parametrize("donated", [(), 0])
def test_an_array_that_is_returned_as_it_is_can_be_donated_beside_the_result(donated):
    call = colocated_python(as_it_is, out_specs_fn=lambda x: x)
    program = pjit(lambda x: (call(x) * x, x + 1), donate_argnums=donated)
    assert len(direct(program.plan(jnp.ones(8)))) == 1
    for _ in range(3):
        results = program(jnp.full(8, 3.0))
        np.testing.assert_array_equal(np.asarray(results), [[9.0] * 8, [4.0] * 8])


def test_only_what_executables_alone_get_once_is_left_to_them():
    call = colocated_python(lambda x: x * 2, arrays="numpy", out_specs_fn=lambda x: x)
    x = jnp.arange(8.0)

    def given_to_a_call(x):
        return call(call(x + 1)) + 1

    large = jnp.zeros(16_384)
    assert len(direct(pjit(given_to_a_call).plan(x))) == 1
    assert direct(pjit(lambda x: call(x + 1)).plan(x)) == []
    assert direct(pjit(lambda x: (y := call(x + 1), y + 1)).plan(x)) == []
    assert direct(pjit(lambda x: call(x + 1) + 1).plan(large)) == []
    assert len(direct(pjit(lambda x: call(x + 1) + 1).plan(large[1:]))) == 1


def test_what_a_loop_carries_is_left_to_what_reads_it_there():
    """Its predicate, and a state; also one that is a result of the program as well."""
    rendezvous.clear()

    def fewer(x):
        rendezvous.logs["calls"].append(1)
        return np.bool_(len(rendezvous.logs["calls"]) % 4 != 0)

    goes_on = colocated_python(fewer, arrays="numpy", out_specs=jax.ShapeDtypeStruct((), bool))
    halved = colocated_python(lambda x: x / 2, arrays="numpy", out_specs_fn=lambda x: x)

    def repeated(x):
        def body(state):
            y = halved(state[1] * 3)
            return goes_on(y.sum()), y

        return jax.lax.while_loop(lambda state: state[0], body, (jnp.bool_(True), x))[1]

    x = jnp.ones(8)
    for added, fun in enumerate((repeated, lambda x: repeated(x) + 1)):
        program = pjit(fun)
        assert len(direct(program.plan(x))) == 2
        assert [*left(program.plan(x)).returned] == [0] * (1 - added)
        for _ in range(2):
            np.testing.assert_allclose(program(x), 1.5**4 + added)
    scan = pjit(lambda x: jax.lax.scan(lambda x, _: (halved(x + 1), x.sum()), x, None, 3))
    assert len(direct(scan.plan(x))) == 1
    last, sums = scan(x)
    np.testing.assert_allclose(last, 1.0)
    np.testing.assert_allclose(sums, 8.0)


def _returning(way, call, count):
    """A program that returns what it carries through a loop: twice, and beside something that no call makes."""

    def body(state):
        return call(state[0] + state[2]), state[1] * 2, call(state[2] * 3)

    def fun(x):
        start = x, x, x + 1
        if way == "scan":
            last, _ = jax.lax.scan(lambda state, _: (body(state), None), start, None, count)
        elif way == "fori_loop":
            last = jax.lax.fori_loop(0, count, lambda _, state: body(state), start)
        elif way == "while_loop":
            numbered = jax.lax.while_loop(lambda s: s[0] < count, lambda s: (s[0] + 1, body(s[1])), (0, start))
            last = numbered[1]
        else:
            last, _ = jax.lax.scan(
                lambda state, _: (jax.lax.fori_loop(0, count, lambda _, s: body(s), state), None), start, None, 2
            )
        return (*last, last[0])

    return fun


@pytest.mark.parametrize("way", ["scan", "fori_loop", "while_loop", "nested"])
def test_what_a_loop_carries_to_the_end_is_an_array_there(way, tmp_path):
    """However it loops, with no iteration as well; whoever listens or records; of a program and of a compiled one."""
    seen = collections.Counter()
    for count, donated in itertools.product((0, 1, 3), ((), 0)):
        call = colocated_python(as_it_is, arrays="numpy", out_specs_fn=lambda x: x)
        fun = _returning(way, call, count)
        program = pjit(fun, donate_argnums=donated)
        expected = jax.jit(_returning(way, lambda x: x, count))(jnp.ones(8))
        compiled = program.lower(jnp.ones(8)).compile()
        assert {0, 2, 3} >= {*left(program.plan(jnp.ones(8))).returned}
        seen[count] += len(left(program.plan(jnp.ones(8))).returned)
        for run in (program, program, compiled):
            for listens, records in itertools.product((False, True), repeat=2):
                with contextlib.ExitStack() as stack:
                    if listens:
                        stack.enter_context(events.subscribe(lambda event: None))
                    if records:
                        stack.enter_context(colocated.journal(tmp_path / f"{count}{donated}{run is compiled}"))
                    results = run(jnp.ones(8))
                assert all(isinstance(result, jax.Array) for result in results)
                for result, value in zip(results, expected, strict=True):
                    np.testing.assert_array_equal(np.asarray(result), np.asarray(value))
                    assert result.sharding == results[0].sharding
    assert seen[3]


def test_what_was_carried_to_a_failure_is_an_array():
    rendezvous.clear()

    def third_fails(x):
        rendezvous.logs["calls"].append(1)
        if len(rendezvous.logs["calls"]) == 3:
            raise ValueError("the third")
        return x * 2

    doubled = colocated_python(lambda x: x * 2, arrays="numpy", out_specs_fn=lambda x: x)
    call = colocated_python(third_fails, arrays="numpy", out_specs_fn=lambda x: x)
    program = pjit(
        lambda x: jax.lax.fori_loop(0, 5, lambda _, s: (doubled(s[0] + 1), call(s[1] + 1)), (x, x)), donate_argnums=0
    )
    assert len(left(program.plan(jnp.ones(8))).returned) == 2
    for _ in range(2):
        rendezvous.clear()
        with pytest.raises(ValueError, match="the third") as caught:
            program(jnp.ones(8))
        so_far, reused = partjit.results_so_far(caught.value)
        assert reused is None
        assert isinstance(so_far, jax.Array)
        np.testing.assert_array_equal(np.asarray(so_far), 22.0)  # (((1 + 1) * 2 + 1) * 2 + 1) * 2


def test_on_several_devices_only_what_the_host_reads_is(mesh):
    halved = colocated_python(lambda x: x / 2, arrays="numpy", out_specs_fn=lambda x: x)
    goes_on = colocated_python(
        lambda x: np.bool_(x.sum() > 9), arrays="numpy", out_specs=jax.ShapeDtypeStruct((), bool)
    )

    def repeated(x):
        return jax.lax.while_loop(
            lambda state: state[0], lambda state: (goes_on(y := halved(state[1] + 1)), y), (True, x)
        )[1]

    with mesh:
        program = pjit(repeated, in_shardings=partjit.P("x"))
        plan = program.plan(jnp.full(8, 8.0))
        found = program(jnp.full(8, 8.0))
    (value,) = left(plan, jax.sharding.NamedSharding(mesh, partjit.P())).made
    assert value.aval.dtype == bool
    x = np.full(8, 8.0)
    while x.sum() > 9:
        x = (x + 1) / 2
    np.testing.assert_allclose(found, x, rtol=1e-6)


def test_numbers_of_64_bits_are_put_where_these_are_enabled():
    with jax.enable_x64(True):
        call = colocated_python(lambda x: x * 2, arrays="numpy", out_specs_fn=lambda x: x)
        program = pjit(lambda x: call(x + 1) + 1)
        x = jnp.full(3, 2.0**40 + 0.5)
        assert direct(program.plan(x)) == []
        compiled = program.lower(x).compile()
        assert program(x).dtype == np.float64
    np.testing.assert_array_equal(np.asarray(compiled(x)), np.asarray(x) * 2 + 3)


def test_the_transfer_guard_has_nothing_to_say():
    """As for other results, which are put explicitly; in a thread, and everywhere."""
    call = colocated_python(lambda x: x * 2, arrays="numpy", out_specs_fn=lambda x: x)
    program = pjit(lambda x: call(x + 1) + 1)
    x = jnp.arange(8.0)
    expected = np.asarray(program(x))
    for level in ("disallow", "log", "allow"):
        with jax.transfer_guard(level):
            np.testing.assert_array_equal(np.asarray(program(x)), expected)
    before = jax.config.jax_transfer_guard
    try:
        jax.config.update("jax_transfer_guard", "disallow")
        found = program(x)
    finally:
        jax.config.update("jax_transfer_guard", before)
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_listeners_and_journals_see_the_same(tmp_path):
    call = colocated_python(lambda x: x * 2, arrays="numpy", out_specs_fn=lambda x: x)
    program = pjit(lambda x: call(x + 1) + 1)
    x = jnp.arange(8.0)
    expected = np.asarray(program(x))
    found = []
    with events.subscribe(found.append):
        np.testing.assert_array_equal(np.asarray(program(x)), expected)
    assert any(type(event).__name__ == "CallFinished" for event in found)
    for _ in range(2):  # then from what the journal has
        with colocated.journal(tmp_path / "journal", results=True):
            np.testing.assert_array_equal(np.asarray(program(x)), expected)


def test_a_wrong_result_is_named():
    call = colocated_python(lambda x: x[:4], arrays="numpy", out_specs_fn=lambda x: x)
    program = pjit(lambda x: call(x + 1) * 2)
    assert direct(program.plan(jnp.ones(8)))
    with pytest.raises(ValueError, match=r"result is float32\[4\], but its spec says float32\[8\]"):
        program(jnp.ones(8))
