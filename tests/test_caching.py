"""What is traced and compiled, and when: counted, never timed. Also how a pjit function looks as a Python object."""

import functools
import gc
import inspect
import os
import pickle
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import partjit
from partjit import FROM_ARRAY, Mesh, P, colocated, pjit
from partjit.testing import assert_no_recompile


def counted(body):
    """`body` as a function that counts in `.traces` how often Python runs it."""

    def fun(*args, **kwargs):
        fun.traces += 1
        return body(*args, **kwargs)

    fun.traces = 0
    return fun


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def submesh(devices, name="x"):
    return Mesh(np.array(jax.devices())[devices], name)


class Eq:
    """Equal and hash-equal to every other of its kind with the same value."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Eq) and self.value == other.value

    def __hash__(self):
        return hash(self.value)


# Equal things are found again


def test_rewrapping_with_equal_specs_and_an_equal_mesh_traces_and_compiles_once(compilations):
    fun = counted(lambda a, b: a @ b)
    for i in range(4):
        devices = np.array(jax.devices()).reshape(4, 2).copy()
        mesh = (Mesh if i % 2 else partjit.Mesh)(devices, ("x", "y"))
        with mesh:
            out = pjit(fun, in_axis_resources=(P("x", None), None), out_axis_resources=P("x", "y"))(
                ones(8, 2), ones(2, 4)
            )
        assert out.sharding == NamedSharding(mesh, P("x", "y"))
    assert fun.traces == 1
    assert len(compilations) == 1


@pytest.mark.parametrize("respelled", [P("x", None), P(["x"]), P(("x",), ()), P("x", ())])
def test_specs_of_equal_meaning_share_trace_and_program(mesh, compilations, respelled):
    fun = counted(lambda a: a + 1)
    with mesh:
        pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))(ones(8, 4))
        pjit(fun, in_axis_resources=respelled, out_axis_resources=respelled)(ones(8, 4))
    assert fun.traces == 1
    assert len(compilations) == 1


def test_a_short_spec_never_passes_for_an_equal_longer_one(mesh):
    def fun(a):
        return a * 2

    with mesh:
        # P() fits a scalar, P(None) does not, though both partition nothing.
        assert pjit(fun, in_axis_resources=P(), out_axis_resources=P())(2.0) == 4.0
        with pytest.raises(ValueError, match="rank of at least 1, but it is 0"):
            pjit(fun, in_axis_resources=P(None), out_axis_resources=P())(2.0)
        with pytest.raises(ValueError, match="rank of at least 1, but it is 0"):
            pjit(fun, in_axis_resources=P(), out_axis_resources=P(None))(2.0)


def test_other_specs_of_one_function_share_the_trace_but_never_the_program(mesh):
    fun = counted(lambda a: a + 1)
    specs = [P("x"), P("y"), P(None, "x"), P(("x", "y")), P(("y", "x")), None, P("x", "y")]
    functions = [pjit(fun, in_axis_resources=P("x"), out_axis_resources=spec) for spec in specs]
    x = ones(8, 8)
    with mesh:
        for _ in range(2):
            for function, spec in zip(functions, specs, strict=True):
                out = function(x)
                assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec or P()), 2), spec
    assert fun.traces == 1


def test_one_function_under_pjit_and_jit_keeps_both_results(mesh):
    def fun(a):
        return a + 1

    ours, theirs = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x")), jax.jit(fun)
    for _ in range(3):
        with mesh:
            assert ours(ones(8)).sharding == NamedSharding(mesh, P("x"))
            assert len(theirs(ones(8)).sharding.device_set) == 1


def test_a_hot_call_runs_no_python_of_ours(mesh):
    package = os.path.dirname(partjit.__file__)
    files = []

    def profile(frame, event, argument):
        # C++ compares the keys of its cache where their hashes collide, and meshes are a part of them.
        if event == "call" and frame.f_code.co_name not in ("__eq__", "__hash__"):
            files.append(frame.f_code.co_filename)

    x = jax.device_put(ones(8), NamedSharding(mesh, P("x")))
    positional = pjit(lambda a: a + 1, in_axis_resources=P("x"), out_axis_resources=P("x"))
    keyword = pjit(lambda *, a: a + 1)
    static = pjit(lambda a, n: a + n, in_axis_resources=(FROM_ARRAY,), static_argnums=1)
    for call in (lambda: positional(x), lambda: keyword(a=x), lambda: static(x, 2), lambda: positional(ones(8))):
        with mesh:
            for _ in range(3):
                files.clear()
                gc.disable()  # a collection may come in the middle, and runs finalizers of what other tests left
                sys.setprofile(profile)
                try:
                    call()
                finally:
                    sys.setprofile(None)
                    gc.enable()
        assert files, "the profiler saw at least the call itself"
        assert not [file for file in files if file.startswith(package)]


def test_a_hundred_hot_calls_trace_and_compile_nothing(mesh):
    fun = counted(lambda tree, *, scale: jax.tree.map(lambda leaf: leaf * scale, tree))
    function = pjit(fun)
    tree = {"w": ones(8, 4), "b": [ones(4), ones(2)]}
    with mesh, assert_no_recompile(function, warmup=1) as watched:
        for _ in range(100):
            watched(tree, scale=2.0)
    assert fun.traces == 1


# New types


def test_a_new_shape_or_dtype_is_one_more_trace_and_an_old_one_none(mesh):
    fun = counted(lambda a: a + a)
    function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))
    inputs = [ones(8), ones(16), ones(8, dtype=np.int32), ones(8, 1)]
    with mesh:
        for i, x in enumerate(inputs, 1):
            function(x)
            assert fun.traces == i
        for x in reversed(inputs):
            np.testing.assert_array_equal(function(x), 2 * x)
    assert fun.traces == len(inputs)


def test_a_weak_type_is_a_type_of_its_own(mesh):
    function = pjit(counted(lambda a: a * jnp.ones((), jnp.bfloat16)))
    with mesh:
        assert function(2.0).dtype == jnp.bfloat16
        with jax.numpy_dtype_promotion("standard"):
            assert function(np.float32(2)).dtype == jnp.float32
        assert function(2.0).dtype == jnp.bfloat16


def test_new_values_and_new_places_of_one_type_are_not_traced_again(mesh):
    fun = counted(lambda a: a + 1)
    function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh, partjit.reshard_policy("allow"):
        values = [
            ones(8),
            jnp.zeros(8),
            jax.device_put(ones(8), NamedSharding(mesh, P("x"))),
            jax.device_put(2 * ones(8), NamedSharding(mesh, P("y"))),
            jax.device_put(3 * ones(8), NamedSharding(mesh, P())),
        ]
        for _ in range(2):
            for value in values:
                out = function(value)
                np.testing.assert_array_equal(out, np.asarray(value) + 1)
                assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 1)
    assert fun.traces == 1


def test_another_tree_of_the_same_leaves_is_another_trace(mesh):
    fun = counted(lambda t: sum(jax.tree.leaves(t)))
    function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        for tree in ((ones(8), ones(8)), [ones(8), ones(8)], {"a": ones(8), "b": ones(8)}, (ones(8), ones(8))):
            function(tree)
    assert fun.traces == 3


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("jax_enable_x64", (False, True)),
        ("jax_default_matmul_precision", (None, "float32")),
        ("jax_numpy_rank_promotion", ("raise", "allow")),
        ("jax_numpy_dtype_promotion", ("strict", "standard")),
    ],
)
def test_a_setting_that_changes_the_trace_is_part_of_the_key(mesh, option, values):
    fun = counted(lambda a: a + jnp.arange(8).sum().astype(a.dtype))
    function = pjit(fun)
    before = getattr(jax.config, option)
    try:
        with mesh:
            for value in (*values, *values):
                jax.config.update(option, value)
                function(ones(8))
    finally:
        jax.config.update(option, before)
    assert fun.traces == 2


# Static arguments


def test_one_trace_per_distinct_static_value(mesh):
    fun = counted(lambda n, a: a * n.value)
    function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"), static_argnums=0)
    with mesh:
        for n in (2, 3, 2, 3, 4, 2):
            np.testing.assert_array_equal(function(Eq(n), ones(8)), n * ones(8))
    assert fun.traces == 3


@pytest.mark.parametrize("given", ["by position", "by name"])
def test_equal_static_values_of_different_types_are_different(mesh, given):
    reprs = []
    traced = pjit(lambda a, n: reprs.append(repr(n)) or a + 1, in_axis_resources=(P("x"),), static_argnames="n")
    values = [1, True, 1.0, 1 + 0j, np.float32(1), True, 1.0, 1]
    with mesh:
        for value in values:
            traced(ones(8), value) if given == "by position" else traced(ones(8), n=value)
    assert reprs == [*map(repr, values[:5])]


def test_a_static_value_that_is_not_an_array_is_never_looked_at_as_one(mesh):
    def fun(mode, a, activation):
        return {"double": 2, "triple": 3}[mode] * activation(a)

    function = pjit(fun, in_axis_resources=(P("x"),), out_axis_resources=P("x"), static_argnums=(0, 2))
    with mesh:
        np.testing.assert_array_equal(function("double", ones(8), jnp.negative), -2 * ones(8))
        np.testing.assert_array_equal(function("triple", ones(8), jnp.abs), 3 * ones(8))


@pytest.mark.parametrize("static", [{"static_argnums": 1}, {"static_argnums": -1}, {"static_argnames": "n"}])
def test_static_positions_do_not_appear_in_the_in_specs(mesh, static):
    def fun(a, n):
        return a[:n]

    function = pjit(fun, in_axis_resources=(P("x"),), out_axis_resources=None, **static)
    with mesh:
        assert function(ones(8), 4).shape == (4,)
        assert function(ones(8), 8).shape == (8,)


def test_a_static_between_two_arguments_shifts_their_specs(mesh):
    def fun(a, n, b):
        return a * n, b * n

    function = pjit(fun, in_axis_resources=(P("x"), P("y")), static_argnums=1)
    with mesh:
        lowered = function.lower(ones(4, 3), 2.0, ones(2, 3))
        ((a, b), _) = lowered.compile().input_shardings
    assert a.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    assert b.is_equivalent_to(NamedSharding(mesh, P("y")), 2)


def test_a_static_name_may_be_given_by_keyword_even_with_in_specs(mesh):
    traces = []

    def fun(a, n=1):
        traces.append(n)
        return a * n

    function = pjit(fun, in_axis_resources=(P("x"),), out_axis_resources=P("x"), static_argnames="n")
    with mesh:
        np.testing.assert_array_equal(function(ones(8)), ones(8))
        np.testing.assert_array_equal(function(ones(8), n=3), 3 * ones(8))
        np.testing.assert_array_equal(function(ones(8), n=3), 3 * ones(8))
        np.testing.assert_array_equal(function(ones(8), 3), 3 * ones(8))
        np.testing.assert_array_equal(function(ones(8), n=4), 4 * ones(8))
    assert sorted(set(traces)) == [1, 3, 4]
    assert len(traces) <= 4  # by position and by keyword are different calls


@pytest.mark.parametrize("value", [[1], {"a": 1}, np.ones(2)])
def test_an_unhashable_static_is_refused(mesh, value):
    function = pjit(lambda a, n: a, in_axis_resources=(None,), static_argnums=1)
    with mesh, pytest.raises((TypeError, ValueError), match=r"[Hh]ash"):
        function(ones(8), value)


def test_donated_arguments_are_counted_as_the_user_counts(mesh):
    # Position 2 is the second array, since 1 is static.
    function = pjit(
        lambda a, n, b: (a + n, b + n),
        in_axis_resources=(P("x"), P("x")),
        out_axis_resources=(P("x"), P("x")),
        static_argnums=1,
        donate_argnums=2,
    )
    sharding = NamedSharding(mesh, P("x"))
    a, b = jax.device_put((ones(8), ones(8)), sharding)
    with mesh:
        function(a, 1.0, b)
    assert b.is_deleted()
    assert not a.is_deleted()


# Positional order, old and new names


def test_the_positional_order_is_the_classic_one(mesh):
    function = pjit(lambda a, n, b: (a * n, b), (P("x"), P("y")), (P("y"), P("y")), (1,), (2,))
    a = jax.device_put(ones(8), NamedSharding(mesh, P("x")))
    b = jax.device_put(ones(8), NamedSharding(mesh, P("y")))
    with mesh:
        out, _ = function(a, 3.0, b)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("y")), 1)
    assert b.is_deleted()
    assert not a.is_deleted()
    parameters = list(inspect.signature(pjit).parameters)
    assert parameters[:5] == [
        "fun",
        "in_axis_resources",
        "out_axis_resources",
        "static_argnums",
        "donate_argnums",
    ]


def test_old_and_new_names_share_everything_but_messages(mesh, compilations):
    fun = counted(lambda a: a + 1)
    old = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("y"))
    new = pjit(fun, in_shardings=P("x"), out_shardings=P("y"))
    with mesh:
        assert old(ones(8)).sharding == new(ones(8)).sharding
    assert fun.traces == 1
    assert len(compilations) == 1


# Exceptions


def test_an_exception_while_tracing_propagates_unchanged_and_the_next_call_retries(mesh):
    class Oops(Exception):
        pass

    error = Oops("once")
    pending = [error, error]

    @counted
    def fun(a):
        if pending:
            raise pending.pop()
        return a + 1

    function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        for i in (1, 2):
            with pytest.raises(Oops) as caught:
                function(ones(8))
            assert caught.value is error
            assert fun.traces == i
        np.testing.assert_array_equal(function(ones(8)), 2 * ones(8))
        function(ones(8))
    assert fun.traces == 3


def test_a_failure_of_the_specs_is_found_again_without_a_trace_and_cured_by_a_good_call(mesh):
    fun = counted(lambda a: a + 1)
    function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        for _ in range(3):
            with pytest.raises(partjit.ShardingError, match="divisible by 4"):
                function(ones(6))
        np.testing.assert_array_equal(function(ones(8)), 2 * ones(8))
    assert fun.traces <= 2


def test_the_mesh_context_is_left_whole_by_an_exception_in_the_function(mesh):
    def fun(a):
        raise KeyError("inside")

    with mesh:
        with pytest.raises(KeyError):
            pjit(fun)(ones(8))
        assert pjit(lambda a: a, out_axis_resources=P("x"))(ones(8)).sharding.mesh == mesh
    with pytest.raises(RuntimeError, match="requires a non-empty mesh"):
        pjit(lambda a: a, out_axis_resources=P("x"))(ones(8))


# clear_cache and lifetimes


def test_clear_cache_forgets_traces_and_programs(mesh, compilations):
    fun = counted(lambda a: a + 1)
    function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))
    other = pjit(lambda a: a * 2, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        function(ones(8))
        other(ones(8))
        function.clear_cache()
        before = len(compilations)
        np.testing.assert_array_equal(function(ones(8)), 2 * ones(8))
        assert fun.traces == 2
        assert len(compilations) == before + 1
        other(ones(8))
        assert len(compilations) == before + 1


def test_jax_clear_caches_leaves_functions_working(mesh):
    fun = counted(lambda a: a + 1)
    function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        function(ones(8))
        jax.clear_caches()
        np.testing.assert_array_equal(function(ones(8)), 2 * ones(8))
        np.testing.assert_array_equal(function(ones(8)), 2 * ones(8))
    assert fun.traces == 2


@pytest.mark.parametrize("keep_unused", [False, True])
def test_a_dropped_function_is_collected_with_what_it_closes_over(mesh, keep_unused):
    def make(big):
        return lambda a: a + big

    big = jnp.ones(8)
    function = pjit(make(big), in_axis_resources=P("x"), out_axis_resources=P("x"), keep_unused=keep_unused)
    with mesh:
        function(ones(8))
        function(ones(8))
    alive = weakref.ref(big)
    function.clear_cache()
    del function, big
    gc.collect()
    assert alive() is None


# Gradients


def test_repeated_gradients_trace_and_compile_nothing(mesh):
    fun = counted(lambda w, a: jnp.sum(jnp.tanh(a @ w)))
    function = pjit(fun, in_axis_resources=(P(None, "y"), P("x")), out_axis_resources=None)
    grad = jax.grad(function)
    w, a = ones(4, 2), ones(8, 4)
    with mesh:
        grad(w, a)
        grad(w, a)
        with assert_no_recompile():
            for _ in range(5):
                grad(w, a)
                jax.grad(function)(w, a)
    assert fun.traces == 1


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda x: jax.value_and_grad(f)(x),
        lambda f: lambda x: jax.jvp(f, (x,), (x,)),
        lambda f: lambda x: jax.vjp(f, x)[1](jnp.float32(1)),
        lambda f: lambda x: jax.linearize(f, x)[1](x),
        lambda f: jax.vmap(f, in_axes=1),
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (x,)),
        lambda f: jax.grad(lambda x: jax.vmap(f, in_axes=1)(x).sum()),
    ],
    ids=["value_and_grad", "jvp", "vjp", "linearize", "vmap", "checkpoint", "jvp of grad", "vmap in grad"],
)
def test_a_transformation_applied_again_compiles_nothing(mesh, transform):
    fun = counted(lambda x: jnp.sum(jnp.sin(x) * x))
    function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=None)
    x = jnp.ones((4, 2), jnp.float32)
    with mesh:
        for _ in range(2):
            first = transform(function)(x)
        traces = fun.traces
        with assert_no_recompile():
            results = [transform(function)(x) for _ in range(3)]
    assert fun.traces == traces
    for result in results:
        jax.tree.map(np.testing.assert_array_equal, result, first)


# Meshes


def test_each_call_runs_on_the_mesh_of_that_call_also_with_a_warm_cache(compilations):
    fun = counted(lambda a: a * 2)
    function = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))
    subsets = [[0, 1], [0, 1, 2, 3], [4, 5], [5, 4], [7, 3, 1, 0]]
    for _ in range(3):
        for devices in subsets:
            with submesh(devices):
                out = function(ones(8))
            assert [shard.device.id for shard in sorted(out.addressable_shards, key=lambda s: s.index[0].start)] == (
                devices
            )
    assert len(compilations) == len(subsets)


def test_concurrent_calls_on_different_meshes_get_the_right_value_on_the_right_devices():
    fun = counted(lambda a, k: a * k)
    function = pjit(fun, in_axis_resources=(P("x"), None), out_axis_resources=P("x"))
    subsets = [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1, 2, 3], [4, 5, 6, 7], [3, 2], [7, 6, 5, 4]]
    start = threading.Barrier(len(subsets))
    problems = []

    def work(number, devices):
        mesh = submesh(devices)
        start.wait()
        for step in range(10):
            with mesh:
                out = function(ones(8), np.float32(number + step))
            shards = sorted(out.addressable_shards, key=lambda shard: shard.index[0].start)
            if [shard.device.id for shard in shards] != devices:
                problems.append(f"{devices}: on {out.sharding}")
            if not (np.asarray(out) == number + step).all():
                problems.append(f"{devices}: {out}")

    def guarded(*args):
        try:
            work(*args)
        except BaseException as error:
            problems.append(repr(error))
            start.abort()

    threads = [threading.Thread(target=guarded, args=pair) for pair in enumerate(subsets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_concurrent_first_calls_of_many_functions_are_all_right(mesh):
    functions = [
        pjit(lambda a, n=n: a + n, in_axis_resources=P("x"), out_axis_resources=P("x"), name=f"add{n}")
        for n in range(6)
    ]
    start, results, problems = threading.Barrier(12), {}, []

    def work(thread):
        start.wait()
        try:
            with mesh:
                for n in range(6):
                    n = (n + thread) % 6
                    results[thread, n] = np.asarray(functions[n](ones(8)))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert len(results) == 72
    for (_, n), value in results.items():
        np.testing.assert_array_equal(value, (1 + n) * ones(8))


# Odd arguments and results


def test_no_arguments(mesh):
    for specs in (partjit.UNSPECIFIED, None, (), P("x")):
        function = pjit(lambda: jnp.arange(8), in_axis_resources=specs, out_axis_resources=P("x"))
        with mesh:
            for _ in range(2):
                out = function()
                np.testing.assert_array_equal(out, np.arange(8))
                assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 1)


def test_no_results(mesh):
    for specs in (partjit.UNSPECIFIED, None, P("x")):
        with mesh:
            assert pjit(lambda a: None, in_axis_resources=P("x"), out_axis_resources=specs)(ones(8)) is None
            assert pjit(lambda a: (), in_axis_resources=P("x"), out_axis_resources=specs)(ones(8)) == ()
            assert pjit(dict, out_axis_resources=specs)() == {}


def test_none_among_arguments_and_results(mesh):
    function = pjit(
        lambda a, nothing, tree: (a + 1, None, {"b": tree["b"], "n": None}),
        in_axis_resources=(P("x"), None, P("y")),
        out_axis_resources=(P("y"), None, P("x")),
    )
    with mesh:
        for _ in range(2):
            out, nothing, tree = function(ones(8), None, {"b": ones(8), "none": None})
            assert nothing is None
            assert tree["n"] is None
            assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("y")), 1)
            assert tree["b"].sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 1)


def test_the_same_array_twice(mesh):
    function = pjit(lambda a, b: (a + b, b), in_axis_resources=(P("x"), P("x")), out_axis_resources=(P("x"), P("y")))
    x = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("x")))
    with mesh:
        for _ in range(2):
            total, same = function(x, x)
            np.testing.assert_array_equal(total, 2 * np.arange(8))
            np.testing.assert_array_equal(same, np.arange(8))
            assert same.sharding.is_equivalent_to(NamedSharding(mesh, P("y")), 1)


def test_the_same_array_twice_with_different_specs(mesh):
    function = pjit(lambda a, b: a + b, in_axis_resources=(P("x"), P("y")), out_axis_resources=None)
    with mesh:
        for x in (np.arange(8), jnp.arange(8)):
            for _ in range(2):
                np.testing.assert_array_equal(function(x, x), 2 * np.arange(8))


def test_an_input_as_an_output_takes_the_out_spec_and_leaves_the_input_alone(mesh):
    function = pjit(lambda a: (a, a), in_axis_resources=P("x", "y"), out_axis_resources=(P("y", "x"), None))
    x = jax.device_put(np.arange(64).reshape(8, 8), NamedSharding(mesh, P("x", "y")))
    with mesh:
        for _ in range(2):
            first, second = function(x)
            np.testing.assert_array_equal(first, np.asarray(x))
            assert first.sharding.is_equivalent_to(NamedSharding(mesh, P("y", "x")), 2)
            assert second.sharding.is_fully_replicated
            assert len(second.sharding.device_set) == 8
    assert x.sharding == NamedSharding(mesh, P("x", "y"))


def test_a_constant_output_is_laid_out_as_its_spec_says(mesh):
    table = np.arange(16.0, dtype=np.float32).reshape(8, 2)
    function = pjit(
        lambda a: (table, 3, jnp.zeros(8), True),
        in_axis_resources=P("x"),
        out_axis_resources=(P("x", "y"), None, P("x"), None),
    )
    with mesh:
        for _ in range(2):
            values = function(ones(8))
            np.testing.assert_array_equal(values[0], table)
            assert values[0].addressable_shards[0].data.shape == (2, 1)
            assert values[1] == 3
            assert len(values[1].sharding.device_set) == 8
            assert values[2].addressable_shards[0].data.shape == (2,)
            assert values[3].dtype == bool


def test_an_unused_argument_with_a_spec_is_fine(mesh):
    for keep_unused in (False, True):
        function = pjit(
            lambda a, b: b + 1,
            in_axis_resources=(P("x"), P()),
            out_axis_resources=None,
            keep_unused=keep_unused,
        )
        with mesh:
            for _ in range(2):
                out = function(ones(8), 1.0)
                assert out == 2
                assert len(out.sharding.device_set) == 8


@pytest.mark.parametrize("captured", [np.arange(8.0, dtype=np.float32), jnp.arange(8.0), jnp.ones(8)])
def test_a_captured_array_is_a_constant_of_the_program(mesh, captured):
    function = pjit(lambda a: a + captured, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        for _ in range(3):
            out = function(ones(8))
            np.testing.assert_array_equal(out, 1 + np.asarray(captured))
            assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 1)


def test_a_captured_array_that_is_sharded_on_the_mesh(mesh):
    captured = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("y")))
    function = pjit(lambda a: a + captured, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        for _ in range(3):
            np.testing.assert_array_equal(function(ones(8)), 1 + np.arange(8))


def test_the_out_spec_wins_over_what_the_partitioner_would_choose(mesh):
    function = pjit(lambda a: a, in_axis_resources=P("x", "y"), out_axis_resources=P("y", "x"))
    x = np.arange(64).reshape(8, 8)
    with mesh:
        for _ in range(2):
            out = function(x)
            np.testing.assert_array_equal(out, x)
            assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("y", "x")), 2)
            assert out.addressable_shards[0].data.shape == (4, 2)


# Keyword arguments


@pytest.mark.parametrize("specs", [partjit.UNSPECIFIED, FROM_ARRAY])
def test_keyword_arguments_where_the_in_specs_allow_them(mesh, specs):
    fun = counted(lambda a, b: a - b)

    def named(a, *, b):
        return fun(a, b)

    function = pjit(named, in_axis_resources=specs, out_axis_resources=P("x"))
    sharding = NamedSharding(mesh, P("y"))
    a, b = jax.device_put((2 * ones(8), ones(8)), sharding)
    with mesh:
        for _ in range(3):
            out = function(a, b=b)
            np.testing.assert_array_equal(out, ones(8))
            assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 1)
    assert fun.traces == 1


def test_the_order_of_keywords_does_not_matter(mesh):
    fun = counted(lambda *, a, b: a - b)
    function = pjit(fun)
    with mesh:
        np.testing.assert_array_equal(function(a=3 * ones(8), b=ones(8)), 2 * ones(8))
        np.testing.assert_array_equal(function(b=ones(8), a=3 * ones(8)), 2 * ones(8))
    assert fun.traces == 1


def test_defaults_of_the_function_hold(mesh):
    function = pjit(lambda a, b=5.0: a + b, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        np.testing.assert_array_equal(function(ones(8)), 6 * ones(8))


# As a Python object


class Model:
    scale = 3.0

    @functools.partial(pjit, in_axis_resources=(P("x"),), out_axis_resources=P("x"), static_argnums=0)
    def static_self(self, a):
        """Scales."""
        return a * self.scale

    @staticmethod
    @pjit(in_axis_resources=P("x"), out_axis_resources=P("x"))
    def without_self(a):
        return a * 2

    @classmethod
    @pjit(in_axis_resources=(P("x"),), out_axis_resources=P("x"), static_argnums=0)
    def with_class(cls, a):
        return a * cls.scale

    def plain(self, a):
        return a * self.scale


def test_methods(mesh):
    model, other = Model(), Model()
    other.scale = 5.0
    x = ones(8)
    with mesh:
        for _ in range(2):
            np.testing.assert_array_equal(model.static_self(x), 3 * x)
            np.testing.assert_array_equal(other.static_self(x), 5 * x)
            np.testing.assert_array_equal(Model.static_self(model, x), 3 * x)
            np.testing.assert_array_equal(Model.without_self(x), 2 * x)
            np.testing.assert_array_equal(model.without_self(x), 2 * x)
            np.testing.assert_array_equal(Model.with_class(x), 3 * x)
            bound = pjit(model.plain, in_axis_resources=P("x"), out_axis_resources=P("x"))
            np.testing.assert_array_equal(bound(x), 3 * x)
    assert model.static_self.__doc__ == "Scales."
    assert model.static_self.__name__ == "static_self"


def test_a_method_of_a_pytree_needs_no_static_self(mesh):
    @functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=[])
    class Layer:
        def __init__(self, w):
            self.w = w

        @pjit(in_axis_resources=(P("y"), P("x")), out_axis_resources=P("x"))
        def __call__(self, a):
            return a * self.w.sum()

    with mesh:
        np.testing.assert_array_equal(Layer(ones(2))(ones(8)), 2 * ones(8))


def test_rebinding_a_method_traces_once(mesh):
    class Counter:
        traces = 0

        def step(self, a):
            Counter.traces += 1
            return a + 1

    counter = Counter()
    functions = [pjit(counter.step, in_axis_resources=P("x"), out_axis_resources=P("x")) for _ in range(3)]
    with mesh:
        for function in functions:
            np.testing.assert_array_equal(function(ones(8)), 2 * ones(8))
        pjit(Counter().step, in_axis_resources=P("x"), out_axis_resources=P("x"))(ones(8))
    assert Counter.traces == 2  # one per object


def test_partials_and_callable_objects(mesh):
    def add(a, b, *, scale):
        return (a + b) * scale

    class Adder:
        def __call__(self, a):
            return a + 1

    x = ones(8)
    with mesh:
        partial = pjit(functools.partial(add, scale=2.0), in_axis_resources=P("x"), out_axis_resources=P("x"))
        for _ in range(2):
            np.testing.assert_array_equal(partial(x, x), 4 * x)
        assert partial.__wrapped__.func is add
        leading = pjit(functools.partial(add, 1.0, scale=2.0), in_axis_resources=P("x"), out_axis_resources=P("x"))
        np.testing.assert_array_equal(leading(x), 4 * x)
        np.testing.assert_array_equal(pjit(Adder(), out_axis_resources=P("x"))(x), 2 * x)
        np.testing.assert_array_equal(pjit(jnp.negative, out_axis_resources=P("x"))(x), -x)
        np.testing.assert_array_equal(pjit(jax.jit(lambda a: a + 1), out_axis_resources=P("x"))(x), 2 * x)
        np.testing.assert_array_equal(pjit(jax.vmap(lambda a: a + 1), out_axis_resources=P("x"))(x), 2 * x)


def test_a_decorator_with_and_without_arguments(mesh):
    @pjit
    def bare(a):
        return a + 1

    @pjit()
    def empty(a):
        return a + 1

    @pjit(out_axis_resources=P("x"))
    def specs(a):
        return a + 1

    with mesh:
        for function in (bare, empty, specs):
            np.testing.assert_array_equal(function(ones(8)), 2 * ones(8))
        assert specs(ones(8)).sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 1)
    assert [f.__name__ for f in (bare, empty, specs)] == ["bare", "empty", "specs"]


def _module_level(a: float, b: int = 3) -> float:
    """Adds."""
    return a + b


module_level = pjit(_module_level)


@pjit
def decorated(a):
    return a + 1


def test_metadata_is_that_of_the_function():
    assert module_level.__name__ == "_module_level"
    assert module_level.__qualname__ == "_module_level"
    assert module_level.__doc__ == "Adds."
    assert module_level.__module__ == __name__
    assert module_level.__wrapped__ is _module_level
    assert inspect.signature(module_level) == inspect.signature(_module_level)
    assert "_module_level" in repr(module_level)
    assert callable(module_level)


def test_a_given_name_is_the_name_of_the_program(mesh):
    def fun(a):
        return a + 1

    with mesh:
        assert "my_step" in pjit(fun, name="my_step").lower(ones(8)).as_text().splitlines()[0]
        assert pjit(fun, name="my_step").__name__ == "fun"


def test_a_decorated_function_pickles_by_its_name():
    assert pickle.loads(pickle.dumps(decorated)) is decorated


def test_what_wraps_a_function_takes_over_its_attributes_but_not_its_methods(mesh):
    function = pjit(_module_level, in_axis_resources=P("x"), out_axis_resources=P("x"))
    function.note = "mine"
    with jax.set_mesh(mesh):
        text = jax.jit(function).lower(ones(8), ones(8)).as_text()
        assert "mhlo.num_partitions = 8" in text
        assert jax.jit(function).note == "mine"
        assert function.lower(ones(8), ones(8)).as_text() != text  # the outer program has no specs of its own

    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    assert wrapper.note == "mine"
    assert wrapper.__wrapped__ is function
    for name in ("trace", "lower", "eval_shape", "clear_cache"):
        assert hasattr(function, name)
        assert not hasattr(wrapper, name)


def test_functions_are_compared_and_hashed_by_identity():
    one, two = pjit(_module_level), pjit(_module_level)
    assert one != two
    assert len({one, two, one}) == 2


def test_attributes_can_be_set_and_weak_references_taken():
    function = pjit(_module_level)
    function.note = "mine"
    assert function.note == "mine"
    assert not hasattr(pjit(_module_level), "note")
    assert weakref.ref(function)() is function


def alternating():
    """Ways of calling, each with the structures of arguments that calls alternate between."""
    x = jnp.arange(8.0)
    structures = [(x,), (x, 2), (x, x), ([x, x],), ([x],), ({"a": x},), ({"b": x},), (((x,), {"c": x}),)]
    nothing = {"out_specs_fn": lambda *_: None}
    seen = colocated.colocated_python(lambda *_: None, stream="alternating", **nothing)
    inline = colocated.colocated_python(lambda *_: None, mode="inline", **nothing)
    cheap = colocated.colocated_python(lambda *_: None, **nothing)
    same = colocated.colocated_python(lambda *xs: xs, out_specs_fn=lambda *xs: xs)

    def program(*xs):
        cheap(*xs)
        return jax.tree.map(lambda x: x + 1, xs)

    calls = {"a program": pjit(lambda *xs: jax.tree.map(lambda x: x + 1, xs)), "a program with a call": pjit(program)}
    calls |= {"on a stream": seen, "inline": inline, "cheap": cheap, "results": same}
    return {name: (call, structures) for name, call in calls.items()}


@pytest.mark.parametrize("name", alternating())
def test_arguments_of_another_structure_are_not_read(name, monkeypatch):
    """What tells calls apart reads no array: neither its values, nor for the text of an error that nobody sees."""
    call, structures = alternating()[name]
    for args in structures * 3:  # until all is compiled, and cheap calls are known
        jax.block_until_ready(call(*args))
    colocated.wait()
    shown = []
    kind = type(jnp.ones(()))
    own = kind.__repr__
    monkeypatch.setattr(kind, "__repr__", lambda array: shown.append(array.shape) or own(array))
    assert repr(jnp.ones(2))
    assert shown == [(2,)]
    for args in structures * 2:
        jax.block_until_ready(call(*args))
    colocated.wait()
    assert shown == [(2,)]
