"""NumPy arrays and Python numbers as arguments and results of colocated functions, and `arrays="numpy"`."""

import itertools
import operator
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated, pjit
from partjit.colocated import colocated_python, colocated_python_class
from partjit.colocated.runtime.host_values import owned
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

MODES: Any = ["inline", "stream", "auto"]
VALUES = [
    *(True, 3, -1.5, 2 + 1j, np.bool_(True), np.int8(3), np.float32(0.5), np.float64(0.5), np.int64(7)),
    *(np.arange(8), np.arange(8.0), np.arange(16, dtype=np.uint8).reshape(8, 2)[:, ::-1], np.ones((8, 0), bool)),
    *(np.arange(8, dtype=ml_dtypes.bfloat16), np.zeros(8, complex), np.asfortranarray(np.arange(16.0).reshape(8, 2))),
]
OF_OTHER_BYTE_ORDER = [
    np.arange(8, dtype=">f4"),
    np.arange(8, dtype=">i8"),
    np.array(1.5, ">f2"),
    np.ones(8, ">c8"),
]
NOT_OF_JAX = [
    *("text", b"bytes", np.nditer, np.array("text"), np.array([np.nditer]), np.datetime64("2020-01-01")),
    *(np.zeros(2, [("a", int)]), np.ma.masked_array([1, 2], [True, False]), 1j * np.ones(2, np.clongdouble)),
]


def described(array):
    return array.aval.str_short(), array.weak_type, np.asarray(array).tolist()


def specs_of(value, mesh):
    aval = jnp.asarray(value)
    return {
        spec: jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(mesh, spec))
        for spec in (P(), P("x"), P(("x", "y")), P("y"))
        if not spec or aval.ndim
    }


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:30])
def test_a_result_is_the_array_that_jax_makes_of_it_and_sharded_as_specified(value, mesh):
    x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("x")))
    for mode in MODES:
        f = colocated_python(lambda x: {"r": value, "x": x}, mode=mode)
        for result in (f(x), f(x)):
            assert described(result["r"]) == described(jnp.asarray(value))
            assert result["r"].sharding.is_equivalent_to(NamedSharding(mesh, P()), np.ndim(value))
            assert described(result["x"]) == described(x)
        for spec, struct in specs_of(value, mesh).items():
            g = colocated_python(lambda x: value, out_specs=struct, mode=mode)
            pair = colocated_python(lambda x: (value, value), out_specs=(struct, struct), mode=mode)
            program = partjit.pjit(lambda x, g=g: g(x))
            with mesh:
                results = [g(x), g(x), program(x), *pair(x)]
            for result in results:
                assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), result.ndim)
                assert described(result)[::2] == described(jnp.asarray(value))[::2]
                assert not result.weak_type


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:30])
def test_an_argument_is_the_array_that_jax_makes_of_it(value, mesh):
    x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("x")))
    seen = rendezvous.logs["seen"]

    def look(value, x):
        seen_here = rendezvous.logs["seen"]
        seen_here.append((isinstance(value, jax.Array), described(value), value.sharding.device_set))
        return x

    f = colocated_python(look, out_specs_fn=lambda value, x: x)
    in_specs = ((jax.ShapeDtypeStruct(np.shape(value), jnp.asarray(value).dtype), x), {})
    with mesh:
        f(value, x)
        f.specialize(in_specs=in_specs)(value, x)
        partjit.pjit(lambda x: f(value, x))(x)
        partjit.pjit(f)(value, x)
        with jax.disable_jit():
            partjit.pjit(f)(value, x)
    colocated.wait()
    kind, weak, values = described(jnp.asarray(value))
    assert len(seen) == 5
    for is_array, (own_kind, own_weak, own_values), devices in seen:
        assert is_array
        assert (own_kind, own_values) == (kind, values)
        assert devices == x.sharding.device_set
        assert own_weak in (weak, False)
    assert seen[0][1][1] == weak


def test_an_argument_alone_is_on_the_default_device_or_on_those_of_the_function(mesh):
    f = colocated_python(lambda step, x=None: step)
    assert f(3).sharding == jnp.asarray(3).sharding
    assert not f(np.ones(3)).committed
    assert f.specialize(devices=mesh)(3).sharding.device_set == {*mesh.devices.flat}
    uncommitted = jnp.ones(2)
    assert not f(3, uncommitted).committed
    committed = jax.device_put(jnp.ones(2), jax.devices()[3])
    assert f(3, committed).sharding == committed.sharding


def test_a_number_takes_the_dtype_that_is_specified(mesh):
    def spec(dtype):
        return jax.ShapeDtypeStruct((), dtype, sharding=NamedSharding(mesh, P()))

    x = jnp.zeros(())
    allowed = {
        bool: ["bool"],
        int: ["int8", "uint32", "float32", "bfloat16", "complex64"],
        float: ["float16", "float32", "complex64"],
        complex: ["complex64"],
    }
    dtypes = ["bool", "int8", "uint32", "float16", "bfloat16", "float32", "complex64"]
    counts = {True: 0, False: 0}
    for value, dtype in itertools.product([True, 3, 2.0, 1j], dtypes):
        f = colocated_python(lambda _, value=value: value, out_specs=spec(dtype), mode="inline")
        fits = (
            dtype in allowed[type(value)]
            or (type(value) is float and dtype == "bfloat16")
            or (type(value) is int and dtype == "float16")
        )
        counts[fits] += 1
        if fits:
            assert f(x).dtype == dtype
            assert np.asarray(f(x)).item() == value
        else:
            with pytest.raises(
                ValueError,
                match=rf"result is \S+, but its spec says {re.escape(spec(dtype).dtype.name)}\[\]",
            ):
                f(x)
    assert min(counts.values()) > 5
    for value, dtype in [(300, "int8"), (-1, "uint32"), (2**31, "int32"), (10**400, "float32")]:
        with pytest.raises(ValueError, match="its spec says"):
            colocated_python(lambda _, value=value: value, out_specs=spec(dtype), mode="inline")(x)
    for value, dtype in [
        (np.int64(2**40), "int32"),
        (np.array([3, -(2**31) - 1]), "int32"),
        (np.uint64(2**32), "uint32"),
    ]:
        stated = jax.ShapeDtypeStruct(value.shape, dtype)
        for options in ({"mode": "inline"}, {"mode": "stream"}, {"uses_jax": False}):
            f = colocated_python(lambda _, value=value: value, out_specs=stated, **options)
            start = jnp.zeros_like(stated)
            looping = partjit.pjit(lambda x, f=f, start=start: jax.lax.fori_loop(0, 1, lambda i, _: f(x), start))
            for call in (f, partjit.pjit(f), looping):
                with pytest.raises(
                    ValueError, match=rf"result has -?\d{{10,}}, which does not fit, but its spec says {dtype}"
                ):
                    np.asarray(call(x))
        with pytest.raises(OverflowError, match=f"the result of <lambda> has .*, which does not fit {dtype}"):
            colocated_python(lambda _, value=value: value, mode="inline")(x)
    for call in (
        lambda n: colocated_python(lambda n, x: n)({"n": n}, 1.0),
        lambda n: partjit.pjit(lambda x: colocated_python(lambda n, x: x, out_specs_fn=lambda n, x: x)({"n": n}, x))(
            1.0
        ),
    ):
        with pytest.raises(
            OverflowError, match=r"n\['n'\] of <lambda> is 10000000000, an int, which does not fit int32"
        ):
            call(10**10)
    with pytest.raises(
        OverflowError, match=r"result\['r'\] of <lambda> is 10000000000, an int, which does not fit int32"
    ):
        colocated_python(lambda x: {"r": 10**10}, mode="inline")(x)


@pytest.mark.parametrize("value", OF_OTHER_BYTE_ORDER, ids=lambda value: value.dtype.str)
def test_an_array_of_another_byte_order_is_the_array_of_its_values(value):
    """As `np.memmap` and `np.frombuffer` of files of other machines are; jax itself takes none."""
    expected = jnp.asarray(value.astype(value.dtype.newbyteorder("=")))
    stated = jax.ShapeDtypeStruct(expected.shape, expected.dtype)
    for options in ({"mode": "inline"}, {"mode": "stream"}, {"uses_jax": False}):
        f = colocated_python(lambda *_: value, out_specs=stated, **options)
        looping = partjit.pjit(lambda x, f=f: jax.lax.fori_loop(0, 2, lambda i, _: f(i), x))
        unspecified = colocated_python(lambda *_: value, **options)
        for result in (f(1), partjit.pjit(f)(1), looping(expected * 0), unspecified(1), unspecified(value)):
            np.testing.assert_array_equal(result, expected)
            assert result.dtype == expected.dtype


@pytest.mark.parametrize("value", NOT_OF_JAX, ids=lambda value: repr(value)[:30])
def test_any_other_result_is_refused_by_its_path(value):
    x = jnp.ones(2)
    message = r"only supports jax.Array as input and output, but got <class '.*'> at "
    for mode in MODES:
        f = colocated_python(lambda x: {"r": [value]}, mode=mode)
        with pytest.raises(ValueError, match=message + r"result\['r'\]\[0\] of"):
            f(x)


@pytest.mark.parametrize("mode", MODES)
def test_whoever_made_a_numpy_array_may_change_it(mode, mesh):
    """As environments and loaders do, that fill one buffer again and again."""

    class Environment:
        def __init__(self):
            self.observation = np.zeros((8, 64), np.float32)

        def step(self, action):
            self.observation += np.asarray(action)
            return self.observation

    spec = jax.ShapeDtypeStruct((8, 64), np.float32, sharding=NamedSharding(mesh, P("x", "y")))
    environment = colocated_python_class(Environment, mode=mode)()
    step = environment.step.specialize(out_specs=spec)
    actions = np.ones((8, 64), np.float32)
    results = []
    for _ in range(4):
        results.append(step(actions))
        actions += 1
    for result, expected in zip(results, [1, 3, 6, 10], strict=True):
        np.testing.assert_array_equal(result, np.full((8, 64), expected, np.float32))
    actions[:] = 1
    program = partjit.pjit(lambda action: step(action))
    with mesh:
        more = [program(actions) for _ in range(2)]
        actions[:] = 100
    for result, expected in zip(more, [11, 12], strict=True):
        np.testing.assert_array_equal(result, np.full((8, 64), expected, np.float32))


@pytest.mark.parametrize("way", ["per_shard", "shard_map"])
def test_a_function_may_use_one_buffer_for_all_shards(way, mesh):
    buffer = np.zeros((2, 2), np.float32)

    def fill(shard):
        buffer[:] = np.asarray(getattr(shard, "data", shard)) + 1
        return buffer

    sharding = NamedSharding(mesh, P("x", "y"))
    x = jax.device_put(np.arange(32, dtype=np.float32).reshape(8, 4), sharding)
    if way == "per_shard":
        spec = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        call = colocated_python(fill, layout="per_shard", out_specs=spec)
    else:
        body = colocated_python(fill, out_specs_fn=lambda x: x)
        specs = {"in_specs": P("x", "y"), "out_specs": P("x", "y"), "check_vma": False}
        call = partjit.pjit(jax.shard_map(body, mesh=mesh, **specs))
    result = call(x)
    np.testing.assert_array_equal(result, np.asarray(x) + 1)
    assert result.sharding == sharding


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.uint8])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_large_array_is_copied_once(order, dtype):
    value = np.asarray(np.arange(300 * 700).reshape(300, 700) % 100, dtype, order=order)
    copy = owned(value)
    assert copy.ctypes.data % 64 == 0  # or XLA would copy it once more
    assert copy.flags.c_contiguous
    np.testing.assert_array_equal(copy.view(np.uint8), np.ascontiguousarray(value).view(np.uint8))
    assert not np.shares_memory(copy, value)


def test_a_constant_of_a_program_is_what_it_was_when_the_program_was_traced(mesh):
    add = colocated_python(operator.add, out_specs_fn=lambda a, x: x)
    memory = np.zeros(4096 + 16, np.float32)
    offset = -memory.ctypes.data % 64 // 4  # jax takes over memory as it is where it is aligned
    constant = memory[offset : offset + 4096]
    x = jax.device_put(np.ones(4096, np.float32), NamedSharding(mesh, P("x")))
    for program in (partjit.pjit(lambda x: add(constant, x)), jax.jit(lambda x: constant + x)):
        with mesh:
            np.testing.assert_array_equal(program(x), 1)
            constant[:] = 100
            np.testing.assert_array_equal(program(x), 1)
        constant[:] = 0


# What a function gets with arrays="numpy"


def look(x, *more):
    for value in (x, *more):
        flags = value.flags.writeable if isinstance(value, np.ndarray) else None
        rendezvous.logs["seen"].append((type(value), flags, np.shape(value)))
    return np.asarray(x) * 2


EIGHT = np.ones(8, np.float32)
WRITES = (
    "The NumPy arrays that <lambda> is called with are read-only, as views of other arrays: write into a copy, "
    "np.array(x)"
)


@pytest.mark.parametrize(
    "options",
    [{"arrays": "numpy"}, {"uses_jax": False}, {"arrays": "numpy", "mode": "inline"}, {"isolate": "process"}],
    ids=["numpy", "without jax", "inline", "in a process"],
)
@pytest.mark.parametrize(
    ("write", "given"),
    [
        (lambda x: operator.iadd(x, 1), EIGHT),
        (lambda x: operator.setitem(x, 0, 1), EIGHT),
        (lambda tree: tree["x"].sort(), {"x": EIGHT}),
    ],
)
def test_what_writes_into_an_argument_is_named_and_what_to_do(mesh, options, write, given):
    f = colocated_python(write, out_specs=jax.ShapeDtypeStruct((8,), np.float32), **options)
    with mesh:
        for call, argument in [(f, given), (f, jax.tree.map(jnp.asarray, given)), (partjit.pjit(f), given)]:
            with pytest.raises(ValueError, match="read-only") as error:
                jax.block_until_ready(call(argument))
            (note,) = [note for note in error.value.__notes__ if "np.array" in note]
            assert note == WRITES


def test_what_writes_into_an_argument_is_named_where_an_executable_calls_it():
    spec = jax.ShapeDtypeStruct((8,), np.float32)
    f = colocated_python(lambda x: operator.iadd(x, 1), out_specs=spec, uses_jax=False)
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(f"is read-only') ({WRITES})")):
        jax.block_until_ready(jax.jit(f)(EIGHT))
    with pytest.raises(ValueError, match="read-only") as error:  # a loop is one executable
        jax.block_until_ready(partjit.pjit(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: f(x), x))(EIGHT))
    assert WRITES in error.value.__notes__


@pytest.mark.parametrize("options", [{"uses_jax": False}, {"arrays": "numpy"}])
def test_what_writes_into_an_argument_is_named_where_it_returns_nothing(options):
    log = colocated_python(lambda x: operator.setitem(x, 0, 1), out_specs_fn=lambda x: None, **options)

    def run():
        partjit.pjit(lambda x: jax.lax.fori_loop(0, 1, lambda _, x: (log(x), x)[1], x * 2))(EIGHT)
        colocated.wait(timeout=60)

    with pytest.raises(ValueError, match="read-only") as error:
        run()
    assert WRITES in error.value.__notes__


@pytest.mark.parametrize(
    "raised", [ValueError("no"), ValueError(), ValueError(3), TypeError("no"), OSError("read-only")]
)
def test_other_errors_have_no_note_about_read_only_arrays(raised):
    def fail(x):
        raise raised

    f = colocated_python(fail, arrays="numpy", mode="inline")
    with pytest.raises(type(raised)) as error:
        f(EIGHT)
    assert not any("np.array" in note for note in getattr(error.value, "__notes__", ()))


def test_a_function_may_be_called_with_numpy_arrays_everywhere(mesh):
    seen = rendezvous.logs["seen"]
    host = np.arange(32, dtype=np.float32).reshape(8, 4)
    f = colocated_python(look, arrays="numpy", out_specs_fn=lambda x, *more: x)
    where = [NamedSharding(mesh, spec) for spec in (P(), P("y", "x"))]
    runs = {
        "eager": f,
        "inline": colocated_python(look, arrays="numpy", out_specs_fn=lambda x, *more: x, mode="inline"),
        "program": partjit.pjit(lambda x: f(x + 0)),
        "argument": partjit.pjit(lambda x: f(x)),
        "loop": partjit.pjit(lambda x: jax.lax.fori_loop(0, 2, lambda i, y: f(y, i) / 2, x) * 2),
        "vmap": partjit.pjit(jax.vmap(f)),
        "expand": partjit.pjit(
            jax.vmap(colocated_python(look, arrays="numpy", out_specs_fn=lambda x: x, vmap_method="expand_dims"))
        ),
        "shard_map": partjit.pjit(
            lambda x: jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)(x)
        ),
    }
    shapes = {"vmap": (4,), "shard_map": (8 // mesh.shape["x"], 4)}
    for sharding, (name, run) in itertools.product(where, runs.items()):
        seen.clear()
        with mesh:
            result = run(jax.device_put(host, sharding))
        np.testing.assert_array_equal(result, host * 2)
        colocated.wait()
        assert {entry[:2] for entry in seen} == {(np.ndarray, False)}, name
        assert shapes.get(name, (8, 4)) in {shape for *_, shape in seen}, name


def test_a_replicated_array_is_seen_without_a_copy(mesh):
    pointers = rendezvous.logs["pointers"]

    def where(x):
        rendezvous.logs["pointers"].append(x.ctypes.data)
        return 0

    f = colocated_python(where, arrays="numpy", mode="inline")
    for sharding in (jnp.ones(1).sharding, NamedSharding(mesh, P())):
        x = jax.device_put(np.arange(4096.0, dtype=np.float32), sharding)
        f(x)
        assert pointers.pop() in {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}


def test_what_a_function_keeps_does_not_change_when_its_argument_is_donated(mesh):
    kept = rendezvous.logs["kept"]

    def keep(x):
        rendezvous.logs["kept"].append(x)

    keeper = colocated_python(keep, arrays="numpy", out_specs_fn=lambda x: None)

    def step(x):
        keeper(x)
        return x + 1

    program = partjit.pjit(step, donate_argnums=0)
    for spec in (P(), P("x")):
        kept.clear()
        x = jax.device_put(np.zeros((8, 512), np.float32), NamedSharding(mesh, spec))
        with mesh:
            for _ in range(4):
                x = program(x)
        colocated.wait()
        assert [{*np.unique(value).tolist()} for value in kept] == [{0.0}, {1.0}, {2.0}, {3.0}]


def test_the_objects_of_a_class_may_be_called_with_numpy_arrays():
    class Sum:
        def __init__(self):
            self.total = 0

        def add(self, x):
            assert type(x) is np.ndarray
            self.total += x.sum()
            return self.total

    total = colocated_python_class(Sum, arrays="numpy")()
    assert [float(total.add(np.ones(3, np.float32))) for _ in range(3)] == [3.0, 6.0, 9.0]


def test_arrays_is_checked_and_shards_are_refused():
    unknown: Any = "torch"
    with pytest.raises(ValueError, match="arrays must be one of 'jax', 'numpy', but is 'torch'"):
        colocated_python(look, arrays=unknown)
    options: Any = [{"arrays": "numpy"}, {"layout": "per_shard"}]
    for first, second in itertools.permutations(options):
        with pytest.raises(ValueError, match="arrays='numpy' and layout='per_shard' exclude each other"):
            colocated_python(look, **first).specialize(**second)


@pytest.mark.parametrize("options", [{"arrays": "numpy"}, {"uses_jax": False}, {"isolate": "process"}], ids=str)
@pytest.mark.parametrize("mode", ["auto", "inline", "stream"])
def test_typed_keys_are_refused_where_the_call_is_written(options, mode):
    f = colocated_python(lambda tree, x: x, **options, mode=mode, out_specs=jax.ShapeDtypeStruct((), np.float32))
    where = {
        "at the top": lambda key: f({"key": key}, 1.0),
        "a loop": lambda key: jax.lax.scan(lambda key, _: (key, f({"key": key}, 1.0)), key, length=2)[1],
        "a branch": lambda key: jax.lax.cond(True, lambda: f({"key": key}, 1.0), lambda: jnp.float32(0)),
        "a batch": lambda key: jax.vmap(lambda key: f({"key": key}, 1.0))(jax.random.split(key, 2)),
        "a derivative": lambda key: jax.grad(lambda x: x * f({"key": key}, 1.0))(2.0),
    }
    message = r"^tree\['key'\] of .*<lambda> is key<fry>\[\], and NumPy has no typed keys: .* leave out .*uses_jax"
    key = jax.random.key(0)
    for place, fun in where.items():
        with pytest.raises(ValueError, match=message):
            pjit(fun).trace(key)
        if place not in ("a loop", "a branch"):
            with pytest.raises(ValueError, match=message):
                fun(key)
    colocated.wait()  # nothing has run


def test_the_equation_says_what_its_function_gets():
    f = colocated_python(operator.neg, arrays="numpy", out_specs_fn=lambda x: x)
    assert "arrays=numpy" in str(jax.make_jaxpr(f)(1.0))
