"""The laws of the kit: they hold where they should, and where they do not the message is enough to go on."""

import contextlib
import itertools
import typing
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import partjit
from partjit import FROM_ARRAY, UNSPECIFIED, P, pjit
from partjit.testing import (
    assert_collectives,
    assert_laid_out,
    assert_no_collectives,
    assert_no_recompile,
    assert_no_transfers,
    assert_round_trip,
    assert_same_meaning,
)
from partjit.testing.reproduction import describe
from tests.effort import EVERYTHING

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
W = np.linspace(0.5, -0.7, 16, dtype=np.float32).reshape(4, 4)


def affine(params, x):
    return {"y": x @ params["w"] + params["b"][None], "count": jnp.int32(3)}


class Pair(typing.NamedTuple):
    first: object
    second: object


PARAMS = {"w": W, "b": np.ones(4, np.float32)}


@pytest.mark.parametrize(
    ("in_specs", "out_specs"),
    [
        (UNSPECIFIED, UNSPECIFIED),
        ((None, P("x")), {"y": P("x", "y"), "count": None}),
        (({"w": P(None, "y"), "b": P("y")}, P("x")), UNSPECIFIED),
        ([P(), P(("x", "y"))], None),
    ],
)
def test_the_meaning_of_a_right_function_is_the_same(mesh, in_specs, out_specs):
    assert_same_meaning(affine, PARAMS, X, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def test_integers_keys_complex_and_short_floats(mesh):
    def mixed(key, i, z, h):
        return jax.random.fold_in(key, i[0]), i * 2, z * z, h + 1

    args = (jax.random.key(3), np.arange(4), np.array([1 + 2j, 3]).astype(np.complex64), jnp.ones(8, jnp.bfloat16))
    assert_same_meaning(
        mixed, *args, mesh=mesh, in_specs=None, out_specs=(None, P("x"), None, P("x")), vmap=False, grad=False
    )


@pytest.mark.parametrize("wrap", [pjit, jax.jit], ids=["pjit", "jit"])
def test_what_is_compiled_already_is_compared_with_what_it_was_made_of(mesh, wrap):
    with pytest.raises(AssertionError, match=r"^the value differs"):
        assert_same_meaning(wrap(wrong_where_divided), X, mesh=mesh, in_specs=P("x"))


def test_a_function_that_returns_no_arrays_is_refused(mesh):
    message = "result of .*<lambda>, a function given to assert_same_meaning, is <function .*return arrays"
    with pytest.raises(TypeError, match=message):
        assert_same_meaning(lambda x: test_integers_keys_complex_and_short_floats, X, mesh=mesh)
    with pytest.raises(TypeError, match=r"result of .*Mesh.*, a function given to assert_same_meaning, is <function"):
        assert_same_meaning(jnp.sin, X, mesh=mesh, reference=mesh)


def test_a_wrong_dtype_is_found_where_the_values_agree(mesh):
    def shortened(x):
        return x.astype(jnp.bfloat16 if isinstance(x, jax.core.Tracer) else x.dtype)

    with pytest.raises(AssertionError, match=r"^the value is bfloat16\[8\] instead of float32\[8\]"):
        assert_same_meaning(shortened, np.ones(8, np.float32), mesh=mesh)


def test_short_floats_have_their_tolerance_everywhere(mesh):
    x = np.linspace(-1, 1, 64).reshape(8, 8).astype(jnp.bfloat16)
    assert_same_meaning(lambda x, s: x * s.astype(x.dtype), x, np.float32(1.5), mesh=mesh, in_specs=(P("x"), None))


def test_no_arguments_and_no_elements(mesh):
    assert_same_meaning(lambda: jnp.ones(8), mesh=mesh, out_specs=P("x"))
    assert_same_meaning(jnp.sin, np.ones((0, 8), np.float32), mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x"))


def test_an_axis_that_no_spec_uses_divides_a_batch(mesh, monkeypatch):
    axes = []
    vmap = jax.vmap
    monkeypatch.setattr(
        jax, "vmap", lambda fun, **options: axes.append(options["spmd_axis_name"]) or vmap(fun, **options)
    )
    assert_same_meaning(jnp.sin, X, mesh=mesh, in_specs=P("y"), out_specs=P("y"))
    assert axes == [None, "x"]


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4, jnp.float8_e4m3fn])
def test_numbers_that_numpy_lacks(mesh, dtype):
    x = jnp.arange(8).astype(dtype)
    assert_same_meaning(lambda x: x[::-1], x, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(AssertionError, match=r"^the value differs in 6 of 8 elements"):
        assert_same_meaning(lambda x: x, x, mesh=mesh, in_specs=P("x"), reference=lambda x: x.at[1:7].set(x[6:0:-1]))


def test_results_that_depend_on_no_argument(mesh):
    assert_same_meaning(lambda x: (3.0, jnp.ones(8)), X, mesh=mesh, in_specs=P("y"), out_specs=(None, P("y")))


def wrong_where_divided(x):
    """Adds something that only a partitioned program adds."""
    return x + jnp.float32(isinstance(x, jax.core.Tracer))


def test_a_failure_says_what_differs_and_shows_the_simplest_case(mesh):
    with pytest.raises(AssertionError) as caught:
        assert_same_meaning(wrong_where_divided, X, mesh=mesh, in_specs=P("x"), out_specs=P("x", "y"))
    message = str(caught.value)
    assert message.startswith("the value differs in 32 of 32 elements, first at [0, 0]: 0.0 instead of -1.0")
    assert "mesh       (x=4, y=2)" in message
    assert "in_specs   None" in message  # the specs are not to blame
    assert "out_specs  None" in message
    assert "arguments  args[0]: float32[8, 4]" in message
    assert "vmap=False" in message


def test_the_reproduction_runs_and_fails_alike(mesh):
    with pytest.raises(AssertionError) as caught:
        assert_same_meaning(wrong_where_divided, X, mesh=mesh, in_specs=P("x"), out_specs=P("x", "y"))
    first_line, *_ = str(caught.value).splitlines()
    script = str(caught.value).partition("To reproduce it:\n\n")[2]
    devices = 'jax.config.update("jax_num_cpu_devices", 8)\n'
    assert devices in script
    with pytest.raises(AssertionError) as again:
        exec(script.replace(devices, ""), {})  # here the devices exist already
    assert str(again.value).splitlines()[0] == first_line


def plus_one(x):
    return x + 1


def script_of(error):
    """The script in a message, for a process that has the devices already."""
    script = str(error.value).partition("To reproduce it:\n\n")[2]
    return script.replace('jax.config.update("jax_num_cpu_devices", 8)\n', "")


def test_the_reproduction_has_the_reference(mesh):
    with pytest.raises(AssertionError) as caught:
        assert_same_meaning(jnp.sin, X, mesh=mesh, in_specs=P("x"), reference=plus_one)
    first_line, *_ = str(caught.value).splitlines()
    assert f"from {__name__} import plus_one\n" in script_of(caught)
    assert script_of(caught).endswith("    reference=plus_one,\n)")
    with pytest.raises(AssertionError) as again:
        exec(script_of(caught), {})
    assert str(again.value).splitlines()[0] == first_line


def test_a_reference_that_cannot_be_imported_is_written_down_or_to_be_filled_in(mesh):
    scale = 2.0

    def own(x):
        return x + 1

    def scaled(x):
        return x * scale

    def fun_of(text):
        return text.partition("assert_same_meaning(\n    ")[2].partition(",")[0]

    with pytest.raises(AssertionError) as caught:
        assert_same_meaning(jnp.sin, X, mesh=mesh, reference=own)
    assert "\ndef own(x):\n    return x + 1\n" in script_of(caught)
    with pytest.raises(AssertionError):
        exec(script_of(caught), {})
    for reference in (scaled, lambda x: x + 2):
        with pytest.raises(AssertionError) as caught:
            assert_same_meaning(own, X, mesh=mesh, reference=reference)
        assert f"# reference is {reference.__name__} of {__file__}:" in script_of(caught)
        assert script_of(caught).endswith("    reference=reference,\n)")
        assert fun_of(script_of(caught)) == "own"
        with pytest.raises(NameError, match="'reference'"):
            exec(script_of(caught), {})


def test_a_function_and_a_reference_of_one_name_have_two_in_the_script(mesh):
    def times(x):
        return 2 * x

    first = times

    def times(x):
        return 3 * x

    with pytest.raises(AssertionError) as caught:
        assert_same_meaning(first, X, mesh=mesh, reference=times)
    script = script_of(caught)
    assert "\ndef times(x):\n    return 2 * x\n" in script
    assert "\n# reference is times of " in script
    assert script.endswith("    reference=reference,\n)")
    with pytest.raises(AssertionError) as caught:
        assert_same_meaning(wrong_where_divided, X, mesh=mesh, reference=wrong_where_divided)
    assert script_of(caught).count("import wrong_where_divided") == 1


def test_results_elsewhere_than_stated_are_found(mesh, monkeypatch):
    options = {"mesh": mesh, "in_specs": P("x"), "out_specs": P("x")}
    assert_same_meaning(jnp.sin, X, **options)
    with mesh:
        right = pjit(jnp.sin, P("x"), P("x"))(X)
    assert_laid_out(right, mesh, P("x"))
    elsewhere = jax.device_put(np.sin(X), NamedSharding(mesh, P("y")))
    monkeypatch.setattr("partjit.testing.laws.pjit", lambda *_: lambda x: elsewhere)
    with pytest.raises(AssertionError, match=r"^the value: an array of shape \(8, 4\) should be sharded as P\("):
        assert_same_meaning(jnp.sin, X, grad=False, vmap=False, **options)


def test_gradients_and_batches_are_checked_on_request_only(mesh):
    @jax.custom_vjp
    def wrong_gradient(x):
        return x * 2

    def traced(x):
        return jnp.float32(2 if isinstance(x, jax.core.Tracer) else 1)

    wrong_gradient.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * 2,))

    def fun(x):
        return wrong_gradient(x)

    def reference(x):
        return x * 2 + 0 * traced(x)

    assert_same_meaning(fun, X, mesh=mesh, in_specs=P("x"), reference=reference)

    def reference_with_another_gradient(x):
        return jax.lax.stop_gradient(x) + x

    options = {"mesh": mesh, "in_specs": P("x"), "reference": reference_with_another_gradient}
    with pytest.raises(AssertionError, match=r"^the gradient of args\[0\] differs in 32 of 32 elements"):
        assert_same_meaning(fun, X, **options)
    assert_same_meaning(fun, X, grad=False, **options)

    @jax.custom_batching.custom_vmap
    def wrong_batch(x):
        return x * 1

    wrong_batch.def_vmap(lambda size, batched, x: (x * 2, True))
    with pytest.raises(AssertionError, match=r"^the batched value differs"):
        assert_same_meaning(wrong_batch, X, mesh=mesh, in_specs=P("x"), grad=False)
    assert_same_meaning(wrong_batch, X, mesh=mesh, in_specs=P("x"), grad=False, vmap=False)


@pytest.mark.parametrize("spec", [None, P(), P("x"), P(("y", "x")), P(None, "y"), P("y", None, "x")])
def test_round_trips(mesh, spec):
    assert_round_trip(spec, mesh, 3)


def test_a_round_trip_that_loses_something_is_found(mesh, monkeypatch):
    monkeypatch.setattr(
        "partjit.testing.round_trip.parse_op_sharding", lambda *_: partjit.parse_op_sharding("{replicated}", mesh)
    )
    with pytest.raises(AssertionError, match=r"should come back as \[\('x',\)\], but its iota form .* reads \[\(\)\]"):
        assert_round_trip(P("x"), mesh, 1)


# Collectives and transfers


def test_collectives_of_plain_partitioned_jitted_lowered_and_compiled_functions(mesh):
    expected = {"all-reduce": 1}
    x = jax.device_put(X, NamedSharding(mesh, P("x")))
    partitioned = pjit(jnp.sum, P("x"), None)
    assert_collectives(expected, jnp.sum, X, mesh=mesh, in_specs=P("x"), out_specs=None)
    assert_collectives(expected, partitioned, X, mesh=mesh)
    assert_collectives(expected, jax.jit(jnp.sum), x)
    with mesh:
        assert_collectives(expected, partitioned, X)
        assert_collectives(expected, partitioned.lower(X))
        assert_collectives(expected, partitioned.lower(X).compile())
        assert_collectives(expected, partitioned, jax.ShapeDtypeStruct(X.shape, X.dtype))


def test_unexpected_and_missing_collectives_are_shown(mesh):
    def total(x):
        return jnp.sin(x).sum()

    x = jax.device_put(X, NamedSharding(mesh, P("x")))
    shown = r"but the compiled program has 1 all-reduce\n  all-reduce over x to f32\[\], at test_laws.py:\d+ total$"
    for fun, arg, options in ((total, X, {"mesh": mesh, "in_specs": P("x")}), (jax.jit(total), x, {})):
        with pytest.raises(AssertionError, match=f"^expected no collectives, {shown}"):
            assert_no_collectives(fun, arg, **options)
    with pytest.raises(AssertionError, match="expected 2 all-gather, but the compiled program has no collectives"):
        assert_collectives({"all-gather": 2}, jnp.sin, X, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(ValueError, match="'allreduce' is no collective; the kinds are all-gather"):
        assert_collectives({"allreduce": 1}, jnp.sin, X, mesh=mesh)


def test_transfers_are_found(mesh):
    with mesh:
        double = pjit(lambda x: x * 2, P("x"), P("x"))
        x = double(X)
        with assert_no_transfers():
            x = double(x)
        with pytest.raises(AssertionError, match="a transfer in a block that should have none"), assert_no_transfers():
            double(X)
        with assert_no_transfers(allow_explicit=True):
            jax.device_put(X, NamedSharding(mesh, P("y")))
    with pytest.raises(ZeroDivisionError), assert_no_transfers():
        1 / 0  # noqa: B018


@pytest.mark.parametrize(
    "read", [float, bool, str, int, lambda x: x.item(), lambda x: x.tolist(), lambda x: f"{x:.2f}"]
)
@pytest.mark.parametrize("spec", [None, P()], ids=["one device", "a mesh"])
def test_reads_are_found_on_the_cpu(mesh, read, spec):
    step = jax.jit(lambda x: x + 1)
    x = jax.device_put(jnp.float32(1), None if spec is None else NamedSharding(mesh, spec))
    found = pytest.raises(
        AssertionError, match=r"^a transfer in a block .*: an array float32\[\] is read by Python, as"
    )
    with found, assert_no_transfers():
        read(step(x))
    with pytest.raises(AssertionError, match="is read by Python"), assert_no_transfers():
        jax.device_get(step(x))
    with assert_no_transfers(allow_explicit=True):
        jax.device_get(step(x))
    float(step(x))


def test_reads_of_arrays_on_several_devices_by_numpy_and_in_other_threads(mesh):
    x = jax.device_put(X, NamedSharding(mesh, P("x")))
    with pytest.raises(AssertionError, match=r"an array float32\[8,4\] is read by Python"), assert_no_transfers():
        np.asarray(x)
    with assert_no_transfers(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(np.asarray, x).result().shape == (8, 4)


# Recompilation


def calls(function, arguments, contexts=None):
    """Calls a function that may compile in the first call only."""
    with assert_no_recompile(function, warmup=1) as watched:
        for args, context in zip(arguments, contexts or [contextlib.nullcontext()] * len(arguments), strict=True):
            with context:
                watched(*args)


@pytest.mark.parametrize("wrap", [jax.jit, pjit], ids=["jit", "pjit"])
def test_the_argument_that_caused_a_compilation_is_named(wrap):
    step = wrap(lambda params, x: params["w"] * x)
    w, x = jnp.float32(2), jnp.ones(3)
    with assert_no_recompile(step, warmup=1) as watched:
        for _ in range(3):
            watched({"w": w}, x)
    with assert_no_recompile(step) as watched:
        watched({"w": w}, x)
    cases = [
        (({"w": w}, jnp.ones(4)), r"args\[1\] was float32\[3\] and is float32\[4\]"),
        (
            ({"w": jnp.int32(2)}, x.astype(jnp.int32)),
            r"args\[0\]\['w'\] was float32\[\] and is int32\[\]; args\[1\] was",
        ),
    ]
    for args, message in cases:
        with pytest.raises(AssertionError, match=rf"call 2 of .* traced and compiled: {message}"):
            calls(step, [({"w": w}, x), args])


def test_the_value_of_a_scalar_is_named_only_where_nothing_else_changed():
    step = jax.jit(lambda n, x: x * n, static_argnums=0)
    x = jnp.ones(3)
    with pytest.raises(AssertionError, match=r"compiled: args\[0\] was the int 2 and is the int 3$"):
        calls(step, [(2, x), (3, x)])
    with pytest.raises(AssertionError, match=r"compiled: args\[1\] was float32\[3\] and is float32\[2\]$"):
        calls(step, [(2, x), (5, x[:2])])


@pytest.mark.parametrize("wrap", [jax.jit, pjit], ids=["jit", "pjit"])
def test_a_function_that_is_made_anew_in_each_call_is_named(wrap):
    def step(x):
        return wrap(lambda x: jnp.sin(x) + 1)(x)

    x = np.ones(3, np.float32)
    with pytest.raises(
        AssertionError, match=r"same arguments as the call before, <lambda> is traced again: it is another"
    ):
        calls(step, [(x,), (x,)])
    with (
        pytest.raises(AssertionError, match=r"the block traced and compiled \d+ times \(.*<lambda> 2 times"),
        assert_no_recompile(),
    ):
        step(step(x))
    apply = wrap(lambda fun, x: fun(x), static_argnums=0)
    message = (
        r"args\[0\] was the function <lambda> of test_laws.py:\d+ .*: another function each time; make it once, outs"
    )
    with pytest.raises(AssertionError, match=message):
        calls(apply, [(lambda x: x + 1, x) for _ in range(2)])


def test_a_mesh_and_a_sharding_are_reasons_too(mesh):
    step = pjit(lambda x: x + 1)
    x = jax.device_put(X, NamedSharding(mesh, P("x")))
    y = jax.device_put(X, NamedSharding(mesh, P("y")))
    with pytest.raises(AssertionError, match=r"call 2 .*args\[0\] was float32\[8,4\] with NamedSharding.*and is"):
        calls(step, [(x,), (y,)])
    with pytest.raises(AssertionError, match=r"call 2 .*the ambient mesh was"):
        calls(step, [(X,), (X,)], [contextlib.nullcontext(), mesh])


def test_without_functions_the_whole_block_counts_and_exceptions_come_out():
    x = jnp.ones(3)
    fresh = jax.jit(lambda x: x * 5)
    with pytest.raises(AssertionError, match="the block traced and compiled"), assert_no_recompile():
        fresh(x)
    with assert_no_recompile():
        fresh(x)
    with pytest.raises(ZeroDivisionError), assert_no_recompile():
        1 / 0  # noqa: B018
    with (
        pytest.raises(AssertionError, match="it is the first call here"),
        assert_no_recompile(jax.jit(lambda x: x * 7)) as watched,
    ):
        watched(x)


def test_several_functions():
    one, two = jax.jit(lambda x: x + 1), jax.jit(lambda x: x + 2)
    with assert_no_recompile(one, two, warmup=1) as (watched_one, watched_two):
        watched_two(watched_one(jnp.ones(3)))
    assert watched_one.__wrapped__ is one


# Code for values


@pytest.mark.parametrize(
    "value",
    [
        X,
        np.arange(6).reshape(2, 3) % 2,
        np.array([3.5, np.nan], np.float32),
        np.float32(2.5),
        np.array([True, False]),
        np.array([1 + 2j]),
        {"a": [1, (2,)], "b": None},
        Pair(np.ones(3), [np.float32(2)]),
        np.array([1.5, 2]).astype(jnp.bfloat16),
    ],
    ids=str,
)
def test_values_are_written_as_code(value):
    made = eval(describe(value), {"np": np, "jnp": jnp, "Pair": Pair})
    jax.tree.map(np.testing.assert_array_equal, made, value)
    for m, v in zip(jax.tree.leaves(made), jax.tree.leaves(value), strict=True):
        assert np.asarray(m).dtype == np.asarray(v).dtype


def test_specs_and_meshes_are_written_as_code(mesh):
    explicit = partjit.Mesh(np.array(jax.devices())[[3, 1]], "x", axis_types=(jax.sharding.AxisType.Explicit,))
    names = {"P": P, "Mesh": partjit.Mesh, "NamedSharding": NamedSharding, "np": np, "jax": jax}
    names |= {"UNSPECIFIED": UNSPECIFIED, "FROM_ARRAY": FROM_ARRAY}
    for value in (
        P("x", None, ("y", "z")),
        P(P.UNCONSTRAINED),
        mesh,
        explicit,
        NamedSharding(mesh, P("x")),
        FROM_ARRAY,
    ):
        assert eval(describe(value), names) == value
    assert eval(describe(UNSPECIFIED), names) is UNSPECIFIED


AXIS_TYPES = [*itertools.product([jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], repeat=2)]


@pytest.mark.soak
@pytest.mark.parametrize("types", AXIS_TYPES[1:], ids=lambda types: " ".join(kind.name for kind in types))
def test_the_law_is_checked_over_all_types_of_axes(types):
    """What obeys it passes, what does not is found, and what jax.jit refuses on such a mesh is refused."""
    mesh = partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"), axis_types=types)
    w, x = np.arange(32, dtype=np.float32).reshape(4, 8) / 32, np.ones((8, 4), np.float32)

    def affine(w, x):
        return jnp.tanh(x @ w)

    obeyed = [(P(None, "y"), P("x")), (P(None, "x"), P()), (P("y"), P("x"))]
    for in_specs in obeyed if EVERYTHING else [obeyed[AXIS_TYPES.index(types) - 1]]:
        assert_same_meaning(affine, w, x, mesh=mesh, in_specs=in_specs, vmap=False)
    wrong = {"mesh": mesh, "in_specs": (P("y"), P("x")), "reference": affine, "grad": False, "vmap": False}
    with pytest.raises(AssertionError, match="differ"):
        assert_same_meaning(lambda w, x: affine(w, x) * 1.01, w, x, **wrong)
    contracted = {"mesh": mesh, "in_specs": (P("x"), P(None, "x"))}
    if types[0] is jax.sharding.AxisType.Explicit:
        with pytest.raises(Exception, match="ambiguous"):
            assert_same_meaning(affine, w, x, **contracted)
    else:
        assert_same_meaning(affine, w, x, **contracted)
