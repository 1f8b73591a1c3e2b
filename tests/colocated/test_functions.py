"""`colocated_python`: what a function gets, what its caller gets, and when."""

import collections
import contextlib
import dataclasses
import functools
import inspect
import os
import re
import threading
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding

import partjit
from partjit import P, colocated, events, pjit
from partjit.colocated import cheapness, colocated_python, colocated_python_class, simple_calls, specialization
from partjit.colocated.runtime import scheduler
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

MODES = ["inline", "stream", "auto"]
every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def x(mesh):
    return jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("x")))


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, a), jax.tree.map(np.asarray, b))


# What goes in and comes out


@every_mode
def test_a_function_gets_concrete_arrays_where_its_arguments_are(x, mode):
    def look(x):
        assert isinstance(x, jax.Array)
        assert not isinstance(x, jax.core.Tracer)
        rendezvous.logs["seen"].append((x.sharding, np.asarray(x).tolist()))
        return x

    f = colocated_python(look, mode=mode)
    for _ in range(3):
        y = f(x)
        assert y.sharding == x.sharding
        same(y, x)
    colocated.wait()
    assert rendezvous.logs["seen"] == [(x.sharding, np.arange(8.0).tolist())] * 3


@every_mode
def test_trees_keywords_and_none_pass_both_ways(x, mode):
    f = colocated_python(lambda a, *rest, scale=None, **more: {"a": a, "rest": rest, "more": (more, None)}, mode=mode)
    for _ in range(2):
        result = f([x, None], {"k": x}, scale=None, b=x)
        same(result, {"a": [x, None], "rest": ({"k": x},), "more": ({"b": x}, None)})
        assert f(x, scale=x)["more"] == ({}, None)


@every_mode
def test_nothing_comes_back_from_a_function_that_returns_nothing(x, mode):
    f = colocated_python(lambda x: rendezvous.logs["ran"].append(1), mode=mode)
    assert [f(x), f(x), f(x)] == [None, None, None]
    colocated.wait()
    assert len(rendezvous.logs["ran"]) == 3


@every_mode
def test_typed_keys_pass_both_ways(mesh, mode):
    f = colocated_python(lambda key: (key, jax.random.split(key, 2)), mode=mode)
    for impl in ("threefry2x32", "rbg"):
        sharding = NamedSharding(mesh, P())
        key = jax.device_put(jax.random.key(3, impl=impl), sharding)
        for _ in range(3):
            same_key, split = f(key)
            assert same_key.dtype == key.dtype
            assert same_key.sharding.is_equivalent_to(sharding, 0)
            same(jax.random.key_data(same_key), jax.random.key_data(key))
            same(jax.random.key_data(split), jax.random.key_data(jax.random.split(key, 2)))


@every_mode
def test_strings_pass_both_ways(mode):
    words = np.array(["one", "two", "\x00\x01 bytes\x00 \u1234", ""], dtype=np.dtypes.StringDType())
    x = jax.device_put(words, jax.devices()[1])
    f = colocated_python(lambda x: x, mode=mode)
    for _ in range(3):
        y = f(x)
        assert y.sharding == x.sharding
        assert np.asarray(y).tolist() == words.tolist()


@every_mode
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int4, jnp.float8_e4m3fn, np.bool_, np.complex64, np.uint8])
def test_every_dtype_passes_both_ways(mesh, dtype, mode):
    x = jax.device_put(np.ones((8, 2)).astype(dtype), NamedSharding(mesh, P("x", "y")))
    f = colocated_python(lambda x: x, mode=mode)
    for _ in range(2):
        same(f(x).astype(np.complex64), x.astype(np.complex64))


@every_mode
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (8, 0)])
def test_scalars_and_empty_arrays_pass_both_ways(shape, mode):
    f = colocated_python(lambda x: x, mode=mode)
    x = jnp.zeros(shape)
    for _ in range(2):
        same(f(x), x)


def test_the_name_docstring_and_signature_stay(x):
    def documented(x, *, y=None):
        """What it does."""
        return x

    f = colocated_python(documented)
    assert (f.__name__, f.__doc__) == ("documented", "What it does.")
    assert inspect.signature(f) == inspect.signature(documented)
    assert repr(f) == "<colocated documented>"
    g = f.specialize(devices=jax.devices())
    assert (g.__name__, g.__doc__) == ("documented", "What it does.")


def test_lambdas_partials_and_callable_objects_work(x):
    class Adder:
        def __init__(self, n):
            self.n = n

        def __call__(self, x):
            return x + self.n

    same(colocated_python(lambda x: x + 1)(x), x + 1)
    same(colocated_python(functools.partial(jnp.add, 2.0))(x), x + 2)
    same(colocated_python(Adder(3))(x), x + 3)


def test_it_is_a_decorator_with_and_without_arguments(x):
    @colocated_python
    def one(x):
        return x + 1

    @colocated_python(mode="inline", out_specs=jax.ShapeDtypeStruct((8,), np.float32))
    def two(x):
        return x + 2

    same(one(x), x + 1)
    same(two(x), x + 2)


@pytest.mark.parametrize("fun", [3, "f", None.__class__.__mro__])
def test_what_is_no_function_is_refused(fun):
    with pytest.raises(TypeError, match="colocated_python: fun must be a function, but is "):
        colocated_python(fun)


@every_mode
def test_a_function_may_use_jax_partjit_files_and_threads(x, mesh, tmp_path, mode):
    path = str(tmp_path / "x.npy")

    def work(x):
        doubled = partjit.pjit(lambda x: 2 * x, in_shardings=P("x"), out_shardings=P("x"))(x)
        np.save(path, np.asarray(doubled))
        totals = []
        thread = threading.Thread(target=lambda: totals.append(jnp.sum(doubled)))
        thread.start()
        thread.join()
        return doubled, totals[0]

    f = colocated_python(work, mode=mode)
    with mesh:
        for _ in range(2):
            doubled, total = f(x)
            same((doubled, total), (2 * x, 2 * x.sum()))
            assert doubled.sharding.is_equivalent_to(x.sharding, 1)
    np.testing.assert_array_equal(np.load(path), 2 * np.asarray(x))


# Captured values


def test_what_is_captured_is_copied_at_the_first_call_of_a_specialization(x):
    seen = [0]

    def count(x):
        seen.append(len(seen))
        return jnp.asarray(seen)

    f = colocated_python(count, mode="inline")
    seen.append(7)
    assert f(x).tolist() == [0, 7, 2]  # what the caller did before the first call is seen
    seen.append(8)
    assert f(x).tolist() == [0, 7, 2, 3]  # its own changes are, from one call to the next; the caller's no more
    assert seen == [0, 7, 8]
    assert f(jnp.zeros(3)).tolist() == [0, 7, 8, 3]  # another specialization, another copy


def test_modules_are_captured_by_reference(x):
    rendezvous.say("a lock is inside")
    assert isinstance(rendezvous._events["a lock is inside"], threading.Event)  # which nobody can copy
    f = colocated_python(lambda x: rendezvous.say("called"))
    f(x)
    assert rendezvous.has_happened("called")


def test_arrays_and_meshes_are_captured(x, mesh):
    y = jax.device_put(np.float32(3), NamedSharding(mesh, P()))

    def use(x):
        assert y.sharding == NamedSharding(mesh, P())
        return jax.device_put(x + y, NamedSharding(mesh, P()))

    result = colocated_python(use)(x)
    same(result, x + 3)
    assert result.sharding == NamedSharding(mesh, P())


def test_what_cannot_be_copied_is_named(x):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot pickle") as caught:
        colocated_python(lambda x: lock.locked() or x)(x)
    assert any("this cannot be copied: lock (a lock)" in note for note in caught.value.__notes__)


def test_a_colocated_function_may_capture_another(x):
    inner = colocated_python(lambda x: x + 1, stream="inner")
    outer = colocated_python(lambda x: inner(inner(x)) * 2)
    for _ in range(3):
        same(outer(x), (x + 2) * 2)


# Errors at a call


class Adder:
    def add(self, x, y=0, *, z):
        return x + y + z


def add(x, y=0, *, z):
    return x + y + z


def wrapped(**options):
    """A wrapper that gives one of the arguments itself."""

    @functools.wraps(add)
    def with_z(*args):
        return add(*args, z=1)

    return colocated_python(with_z, **options)


@pytest.mark.parametrize("in_program", [False, True])
@pytest.mark.parametrize("options", [{}, {"out_specs_fn": lambda x, *_, **__: x}], ids=["", "specs"])
@pytest.mark.parametrize(
    ("args", "kwargs"), [("x", ""), ("", "z"), ("xyy", "z"), ("x", "xz"), ("x", "za"), ("x", "zy")]
)
@pytest.mark.parametrize("is_method", [False, True])
def test_arguments_that_a_function_does_not_take_are_refused_where_python_would(
    x, mesh, in_program, options, args, kwargs, is_method
):
    called = (colocated_python_class(Adder)().add if is_method else colocated_python(add)).specialize(**options)
    args, kwargs = [x] * len(args), dict.fromkeys(kwargs, x)

    def call():
        return called(*args, **kwargs)

    try:
        add(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError, match=rf"^{'Adder.' if is_method else ''}add\(\) "), mesh:
            pjit(call).trace() if in_program else call()
    else:
        call()
    colocated.wait()  # no call was made that failed


def test_a_wrapper_is_called_with_what_it_takes_itself(x, mesh):
    for called in (wrapped(), wrapped(out_specs_fn=lambda x: x)):
        same(called(x), x + 1)
        with mesh:
            same(pjit(lambda x, called=called: called(x))(x), x + 1)


@pytest.mark.parametrize("value", [jax.ShapeDtypeStruct((8,), np.float32), jax.core.ShapedArray((), np.dtype("int32"))])
def test_an_argument_that_is_the_type_of_an_array_is_named(x, value):
    f = colocated_python(lambda x, options: x)
    with pytest.raises(
        ValueError, match=r"colocated_python only supports jax\.Array as input and output, but got"
    ) as error:
        f(x, {"deep": [x, value]})
    assert "options['deep'][1]" in str(error.value)
    assert "NumPy arrays and numbers are converted" in str(error.value)
    f(x, {"deep": [x, x]})
    with pytest.raises(ValueError, match=r"only supports jax\.Array"):
        f(x, {"deep": [x, value]})  # and after a good call as well


@every_mode
@pytest.mark.parametrize("value", [object(), np.datetime64("2020-01-01"), "text"])
def test_a_result_that_is_no_array_is_named(x, value, mode):
    f = colocated_python(lambda x: {"a": x, "b": (x, value)}, mode=mode)
    with pytest.raises(
        ValueError, match=r"colocated_python only supports jax\.Array as input and output, but got"
    ) as error:
        f(x)
    assert "result['b'][1]" in str(error.value)


async def coroutine(x):
    return x


def generator(x):
    yield x


async def both(x):
    yield x


class Waits:
    async def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("fun", "kind"),
    [
        (coroutine, "coroutine is a coroutine function"),
        (functools.partial(coroutine), "coroutine is a coroutine function"),
        (generator, "generator is a generator function"),
        (both, "both is an asynchronous generator function"),
        (Waits(), "Waits is a coroutine function"),
    ],
)
def test_what_returns_before_it_has_run_is_refused_by_name(fun, kind):
    with pytest.raises(TypeError, match=f"colocated_python: fun must return arrays, but .*{kind}: its calls return"):
        colocated_python(fun)


def test_arguments_on_different_devices_are_refused(x, mesh):
    f = colocated_python(lambda x, y: x)
    other = jax.device_put(np.zeros(4), jax.devices()[3])
    with pytest.raises(ValueError, match="All arguments must use the same device list") as error:
        f(x, {"y": other})
    assert f"x ({x.aval.str_short()}) is on [0, 1, 2, 3, 4, 5, 6, 7]" in str(error.value)
    assert "y['y'] (float32[4]) is on [3]" in str(error.value)
    assert "specialize(devices=...)" in str(error.value)
    same(f.specialize(devices=mesh)(x, {"y": other}), x)


def test_without_arguments_the_specs_of_the_results_may_say_where(mesh):
    """If each of them does, and all the same; devices that are given count first."""
    one, all_of_them = (jax.sharding.SingleDeviceSharding(jax.devices()[3]), NamedSharding(mesh, P("x")))

    def spec(sharding=None):
        return jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding)

    def called(out_specs):
        return colocated_python(lambda: jax.tree.map(lambda x: np.ones(8, np.float32), out_specs), out_specs=out_specs)

    for sharding in (one, all_of_them):
        for out_specs in (spec(sharding), {"a": spec(sharding), "b": [spec(sharding)]}):
            found = called(out_specs)()
            assert {x.sharding for x in jax.tree.leaves(found)} == {sharding}
            same(jax.tree.leaves(found)[0], np.ones(8))
    for out_specs in (spec(), (spec(one), spec()), (spec(one), spec(all_of_them)), ()):
        with pytest.raises(ValueError, match="No devices found"):
            called(out_specs)()
    on_two = called(spec()).specialize(devices=jax.devices()[:2])()
    assert on_two.sharding.device_set == {*jax.devices()[:2]}


def test_the_order_of_devices_matters(mesh):
    reverse = partjit.Mesh(mesh.devices.reshape(-1)[::-1], "x")
    x = jax.device_put(np.arange(8.0), NamedSharding(reverse, P("x")))
    y = jax.device_put(np.arange(8.0), NamedSharding(partjit.Mesh(mesh.devices.reshape(-1), "x"), P("x")))
    with pytest.raises(ValueError, match=r"same device list.*in this order"):
        colocated_python(lambda x, y: x)(x, y)


def test_without_arguments_devices_are_needed():
    f = colocated_python(lambda: jnp.ones(3))
    message = (
        r"No devices found. colocated_python function without input arguments must be first specialized with devices. "
        r"<lambda> is called without arguments: give it specialize\(devices=...\), or out_specs with shardings"
    )
    with pytest.raises(ValueError, match=message):
        f()
    same(f.specialize(devices=jax.devices()[:2])(), jnp.ones(3))


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            jax.jit,
            "the colocated function <lambda> is called in a program of jax.jit.*wrap the outermost function with",
        ),
        (lambda f: jax.jit(lambda x: x + f(jnp.ones(8))), "called in a program of jax.jit"),
        (
            lambda f: jax.grad(lambda x: f(x).sum()),
            "<lambda> has no derivative, and is differentiated with respect to x",
        ),
    ],
    ids=["jit", "jit of a constant", "grad"],
)
def test_a_transformation_that_cannot_have_it_says_so(transform, message):
    f = colocated_python(lambda x: x, out_specs_fn=lambda x: x)
    x = jnp.ones(8)
    with pytest.raises(ValueError, match=message):
        transform(f)(x)
    same(f(x), x)


def test_traced_it_is_one_equation():
    f = colocated_python(lambda x: x)
    f(jnp.ones(8))
    (eqn,) = jax.make_jaxpr(f)(jnp.ones(8)).eqns
    assert eqn.primitive.name == "colocated_call"
    assert jax.eval_shape(f, jnp.ones(8)) == jax.ShapeDtypeStruct((8,), jnp.float32)


def of_named_stream(f):
    def fun(*args):
        with colocated.stream("inner"):
            return f(*args)

    return fun


@pytest.mark.parametrize(
    ("options", "around", "shown"),
    [
        ({}, None, {}),
        ({"pure": True}, None, {"pure": "True"}),
        ({"pure": False}, None, {}),
        ({"layout": "per_shard"}, None, {"layout": "per_shard"}),
        ({"layout": "global"}, None, {}),
        ({"arrays": "numpy"}, None, {"arrays": "numpy"}),
        ({"arrays": "jax"}, None, {}),
        ({"stream": "own"}, None, {"stream": "own"}),
        ({}, of_named_stream, {"stream": "inner"}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_equation_shows_what_was_said_of_its_function(x, options, around, shown):
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    f = colocated_python(lambda x: (x, x), out_specs=(spec, jax.ShapeDtypeStruct((), np.float32)), **options)
    jaxpr = jax.make_jaxpr(around(f) if around else f)(x)
    first = str(x.sharding.spec).replace("PartitionSpec", "P")
    fields = {"name": "<lambda>", "stream": "caller", "in_specs": "(open)", "out_specs": f"({first}, open)", **shown}
    assert dict(re.findall(r"^ +(\w+)=(.*)$", str(jaxpr), re.M)) == fields
    assert [*map(str, jaxpr.effects)] == ["Colocated"] * ("pure" not in shown)


def test_an_equation_shows_how_many_calls_run_ahead_and_its_stream_without_a_name():
    spec = jax.ShapeDtypeStruct((), np.float32)
    f = colocated_python(lambda: jnp.float32(1), out_specs=spec, devices=jax.devices()[0], run_ahead=2)
    assert "run_ahead=2" in str(jax.make_jaxpr(f)())
    with colocated.stream() as nameless:
        pass
    f = colocated_python(lambda x: x, out_specs_fn=lambda x: x, stream=nameless)
    assert f"stream=stream {id(nameless):x}\n" in str(jax.make_jaxpr(f)(jnp.ones(8)))


def test_under_eager_transformations_that_leave_it_alone_it_is_called():
    f = colocated_python(lambda x: 3 * x)
    assert jax.grad(lambda x: x * f(jnp.float32(2)))(1.0) == 6


def test_what_it_returns_must_be_known_when_it_is_traced():
    f = colocated_python(lambda x, y: x)
    with pytest.raises(ValueError, match=r"not known what it returns for \(x: float32\[8\], y\['a'\]: int32\[\]\)"):
        jax.make_jaxpr(f)(jnp.ones(8), {"a": jnp.int32(1)})


# Output specs


def test_results_are_put_where_the_specs_say(x, mesh):
    target = NamedSharding(mesh, P("y"))
    spec = jax.ShapeDtypeStruct((8,), np.float32, sharding=target)
    for mode in MODES:
        f = colocated_python(lambda x: jnp.asarray(np.asarray(x)) + 1, out_specs=spec, mode=mode)
        for _ in range(3):
            y = f(x)
            assert y.sharding == target
            assert y.committed
            same(y, x + 1)
            assert jax.block_until_ready(y).sharding == target


def test_a_sharding_left_open_is_replicated_over_the_devices_of_the_call(x, mesh):
    spec = jax.ShapeDtypeStruct((), np.float32)
    assert colocated_python(jnp.sum, out_specs=spec)(x).sharding == NamedSharding(mesh, P())
    on_one = jax.device_put(np.float32(1), jax.devices()[3])
    assert colocated_python(jnp.sum, out_specs=spec)(on_one).sharding == SingleDeviceSharding(jax.devices()[3])
    y = colocated_python(lambda: jnp.float32(1), out_specs=spec, devices=jax.devices()[2:4])()
    assert y.sharding.is_fully_replicated
    assert {d.id for d in y.devices()} == {2, 3}
    assert {d.id for d in y.value().devices()} == {2, 3}


@every_mode
@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: {"a": x[:4], "b": x}, r"result\['a'\] is float32\[4\], but its spec says float32\[8\]"),
        (lambda x: {"a": x.astype(int), "b": x}, r"result\['a'\] is int32\[8\], but its spec says float32\[8\]"),
        (lambda x: {"a": x}, r"result\['b'\] is missing"),
        (lambda x: {"a": x, "b": x, "c": x}, r"result\['c'\] is not among them"),
        (lambda x: {"a": x, "B": x}, r"result\['b'\] is missing; result\['B'\] is not among them: did you mean 'b'\?"),
        (
            lambda x: {"a": None, "b": [x]},
            r"result\['a'\] is None, but its .*; result\['b'\] is a list of 1, but its spec says an array",
        ),
        (lambda x: {"a": x[:4], "b": x[:2]}, r"result\['a'\] is .*; result\['b'\] is "),
        (lambda x: None, r": result is None, but its spec says a dict with the keys 'a', 'b'\. The specs are those of"),
        (lambda x: [x, x], r": result is a list of 2, but its spec says a dict with the keys 'a', 'b'\."),
        (lambda x: x, r": result is an array \(float32\[8\]\), but its spec says a dict with the keys 'a', 'b'\."),
        (lambda x: collections.OrderedDict(a=x, b=x), r": result is an OrderedDict with the keys 'a', 'b', but its"),
    ],
)
def test_results_that_contradict_their_specs_are_named(x, mode, result, message):
    spec = jax.ShapeDtypeStruct((8,), np.float32)
    f = colocated_python(result, out_specs={"a": spec, "b": spec}, mode=mode)
    with pytest.raises(ValueError, match=message) as error:
        jax.block_until_ready(f(x))
    assert "<lambda> returned what its output specs do not say" in str(error.value)


@pytest.mark.parametrize("option", [{}, {"arrays": "numpy"}, {"uses_jax": False}])
@pytest.mark.parametrize(
    ("result", "returned"),
    [(lambda x: None, "None"), (lambda x: [x, x], "a list of 2"), (lambda x: (x,), "a tuple of 1")],
)
def test_what_is_returned_in_place_of_one_array_is_named(x, option, result, returned):
    f = colocated_python(result, out_specs=jax.ShapeDtypeStruct((8,), np.float32), **option)
    message = f": result is {returned}, but its spec says an array (float32[8]). The specs are those of out_specs"
    for call in (f, pjit(f)):
        with pytest.raises(ValueError, match=re.escape(message)):
            jax.block_until_ready(call(x))


def test_an_array_in_place_of_nothing_is_named(x):
    f = colocated_python(lambda x: x, out_specs_fn=lambda x: None)
    f(x)
    message = r": result is an array \(float32\[8\]\), but its spec says None\."
    with pytest.raises(ValueError, match=message):
        colocated.wait(timeout=60)


def test_a_result_with_other_metadata_is_named(x):
    Static = jax.tree_util.register_dataclass(
        dataclasses.make_dataclass("Static", ["a", "n"]), data_fields=["a"], meta_fields=["n"]
    )
    f = colocated_python(lambda x: Static(x, 3), out_specs=Static(jax.ShapeDtypeStruct((8,), np.float32), 4))
    with pytest.raises(ValueError, match=r": result has the structure PyTreeDef\(.*, but its spec says PyTreeDef\("):
        jax.block_until_ready(f(x))


class Plain:
    def add(self, x):
        return x + 1


class Pair(typing.NamedTuple):
    a: object
    b: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tree:
    a: object


@pytest.mark.parametrize(
    "decorate", [colocated_python, colocated_python(mode="inline"), colocated_python(uses_jax=False)]
)
def test_a_class_whose_objects_are_no_trees_is_refused(decorate):
    with pytest.raises(TypeError) as error:
        decorate(Plain)
    assert str(error.value) == (
        f"colocated_python: fun must be a function, but is {Plain}: its objects are no arrays, which a colocated "
        "function has to return. colocated_python_class makes them live on the hosts, with methods that are colocated "
        "functions"
    )


def test_a_class_that_makes_trees_or_numbers_is_a_function(x):
    same(colocated_python(Pair)(x, x), Pair(x, x))
    for makes_tree in (Tree, functools.partial(Tree)):  # whose constructor is annotated to return nothing
        same(colocated_python(makes_tree)(x), Tree(x))
    assert int(colocated_python(int)(jnp.float32(3))) == 3
    np.testing.assert_array_equal(colocated_python(functools.partial(Pair, 1))(x).b, x)

    class Chosen:
        def __new__(cls, x):
            return x + 1

    same(colocated_python(Chosen)(x), x + 1)


def test_later_results_are_held_to_the_first():
    f = colocated_python(lambda n: jnp.zeros(int(n)))
    f(jnp.int32(3))
    assert f(jnp.int32(3)).shape == (3,)
    with pytest.raises(ValueError, match="or, without these, of the first result"):
        jax.block_until_ready(f(jnp.int32(4)))
    free = colocated_python(lambda n: jnp.zeros(int(n)), mode="inline")
    assert [free(jnp.int32(n)).shape for n in (3, 4, 5)] == [(3,), (4,), (5,)]


def test_weak_types_do_not_depend_on_when_a_call_has_run(x):
    f = colocated_python(lambda x: jnp.asarray(1.0) if x[0] else jnp.float32(1), mode="stream")
    first = f(x + 1)
    assert first.weak_type
    again = f(x)
    assert again.weak_type
    assert jax.block_until_ready(again).weak_type
    assert again.value().weak_type


@pytest.mark.parametrize("bad", [3, "spec", {"a": 3}, [np.float32]])
def test_out_specs_that_are_no_specs_are_refused(x, bad):
    with pytest.raises(ValueError, match=r"out_specs.* must be a jax.ShapeDtypeStruct, but is"):
        colocated_python(lambda x: x, out_specs=bad)(x)


# When it runs


@every_mode
def test_the_function_runs_once_per_call(x, mode):
    f = colocated_python(lambda x: rendezvous.logs["ran"].append(1) or x, mode=mode)
    for count in range(1, 6):
        jax.block_until_ready(f(x))
        colocated.wait()
        assert len(rendezvous.logs["ran"]) == count


def test_a_call_with_known_specs_returns_before_the_function_has_run(x):
    def wait(x):
        rendezvous.hear("caller went on")
        return x + 1

    spec = jax.ShapeDtypeStruct((8,), np.float32, sharding=x.sharding)
    for f in (
        colocated_python(wait, out_specs=spec),
        colocated_python(wait, out_specs_fn=lambda x: x),
        colocated_python(wait).specialize(out_specs=spec),
        colocated_python(wait).specialize(out_specs_fn=lambda x: x),
    ):
        rendezvous.clear()
        y = f(x)
        assert isinstance(y, colocated.PendingArray)
        assert not y.is_ready()
        rendezvous.say("caller went on")
        same(y, x + 1)
        assert y.block_until_ready().is_ready()  # the shards can be read a little before the array is said to be ready


@pytest.mark.parametrize("annotation", [None, "None"])
def test_the_first_call_of_a_function_annotated_to_return_nothing_is_not_waited_for(x, annotation):
    def note(x):
        rendezvous.hear("the call has returned")
        rendezvous.logs["noted"].append(float(x.sum()))

    note.__annotations__["return"] = annotation
    note = colocated_python(note)
    assert note(x) is None
    rendezvous.say("the call has returned")
    colocated.wait()
    assert rendezvous.logs["noted"] == [28]


def test_without_known_specs_only_the_first_call_is_waited_for(x):
    def wait(x):
        if rendezvous.logs["ran"]:
            rendezvous.hear("caller went on")
        rendezvous.logs["ran"].append(1)
        return x

    f = colocated_python(wait)
    assert not isinstance(f(x), colocated.PendingArray)
    y = f(x)
    assert not y.is_ready()
    rendezvous.say("caller went on")
    same(y, x)


def test_a_cheap_function_is_soon_called_without_a_thread(x):
    f = colocated_python(lambda x: rendezvous.logs["threads"].append(threading.get_ident()) or x)
    for _ in range(200):
        jax.block_until_ready(f(x))
    assert threading.get_ident() in rendezvous.logs["threads"][1:]  # the first one shows what is returned
    g = colocated_python(lambda x: rendezvous.logs["g"].append(threading.get_ident()) or x, mode="stream")
    for _ in range(50):
        jax.block_until_ready(g(x))
    assert threading.get_ident() not in rendezvous.logs["g"][1:]


@pytest.fixture
def waits(monkeypatch):
    """A list that gets, of each wait for a call with a deadline, whether the call ended by then."""
    waits, join = [], scheduler.join

    def noted(call, deadline=None):
        has_ended = join(call, deadline)
        if deadline is not None:
            waits.append(has_ended)
        return has_ended

    monkeypatch.setattr(scheduler, "join", noted)
    return waits


def test_a_caller_waits_for_the_first_calls_until_they_are_known_to_be_cheap(x, waits, monkeypatch):
    monkeypatch.setattr(cheapness, "_CHEAP_SECONDS", float("inf"))
    monkeypatch.setattr(simple_calls, "TRIAL_SECONDS", rendezvous.SECONDS)
    f = colocated_python(
        lambda x: rendezvous.logs["threads"].append(threading.get_ident()), out_specs_fn=lambda x: None
    )
    for _ in range(20):
        f(x)
    here = threading.get_ident()
    assert [ident == here for ident in rendezvous.logs["threads"]] == [False] * 10 + [True] * 10
    assert waits == [True] * 9  # the first one prepares the function


def test_a_caller_waits_for_few_of_the_calls_that_take_long(x, waits):
    f = colocated_python(lambda x: rendezvous.hear("go on") or x, out_specs_fn=lambda x: x)
    results = [f(x) for _ in range(20)]
    assert waits == [False, False]
    rendezvous.say("go on")
    same(results, [x] * 20)


@pytest.mark.parametrize(
    ("seconds", "has_ended", "most"), [([1], False, 12), ([1e-3], True, 12), ([1e-5, 1e-3], True, 120)]
)
def test_the_trials_are_few_among_many_calls(seconds, has_ended, most):
    shown, trials = cheapness.Cheapness(), 0
    for i in range(1024):
        shown.measured(seconds[i % len(seconds)])
        if shown.trials > 0:
            shown.tried(has_ended)
            trials += 1
    assert 0 < trials <= most
    assert not shown.is_shown


@pytest.fixture(params=[False, True], ids=["function", "method"])
def cheap(request, x, monkeypatch):
    """A function, or method, that is known to be cheap; it writes down the threads that run it."""
    monkeypatch.setattr(cheapness, "_CHEAP_SECONDS", float("inf"))

    def run(x):
        rendezvous.logs["threads"].append(threading.get_ident())
        return x

    of_class = colocated.colocated_python_class(type("Runs", (), {"run": lambda self, x: run(x)}))
    f = of_class().run if request.param else colocated_python(run)
    for _ in range(20):
        jax.block_until_ready(f(x))
    assert rendezvous.logs["threads"][-1] == threading.get_ident()
    return f


def test_a_cheap_call_runs_in_its_caller_as_soon_as_those_before_it_have_ended(x, cheap, monkeypatch):
    monkeypatch.setattr(specialization, "_CATCH_UP_SECONDS", rendezvous.SECONDS)
    before = colocated_python(lambda x: rendezvous.hear("go on") or x, out_specs_fn=lambda x: x, mode="stream")
    before(x)
    threading.Timer(0.05, rendezvous.say, ["go on"]).start()
    same(cheap(x), x)
    assert rendezvous.logs["threads"][-1] == threading.get_ident()


@pytest.mark.parametrize("overtaken", [0, 3])
def test_a_cheap_call_runs_in_its_caller_where_other_callers_run_calls_of_its_object(x, overtaken, monkeypatch):
    """However often one of these is quicker, but for so many times that it would starve."""
    monkeypatch.setattr(cheapness, "_CHEAP_SECONDS", float("inf"))
    monkeypatch.setattr(specialization, "INTERRUPTED_SECONDS", rendezvous.SECONDS)
    monkeypatch.setattr(specialization, "_CATCH_UP_SECONDS", 0)

    def run(self, x):
        if rendezvous.logs["is to wait"]:
            rendezvous.logs["is to wait"].clear()
            rendezvous.say("runs")
            rendezvous.hear("go on")
        rendezvous.logs["threads"].append(threading.get_ident())
        return x

    method = colocated.colocated_python_class(type("Runs", (), {"run": run}))().run
    for _ in range(20):
        jax.block_until_ready(method(x))
    rendezvous.logs["is to wait"].append(True)
    other = threading.Thread(target=method, args=(x,))
    other.start()
    rendezvous.hear("runs")
    threading.Timer(0.05, rendezvous.say, ["go on"]).start()
    is_taken = iter([True] * overtaken)
    run_if_free = scheduler.run_if_free
    monkeypatch.setattr(
        scheduler, "run_if_free", lambda call: scheduler.NOT_FREE if next(is_taken, False) else run_if_free(call)
    )
    same(method(x), x)
    assert rendezvous.logs["threads"][-2:] == [other.ident, threading.get_ident()]


def test_cheap_calls_run_on_a_thread_if_those_before_them_take_long_which_one_waits_to_find_out(x, cheap, waits):
    before = colocated_python(lambda x: rendezvous.hear("go on") or x, out_specs_fn=lambda x: x, mode="stream")
    before(x)
    results = [cheap(x) for _ in range(10)]
    assert waits == [False]
    assert not any(y.is_ready() for y in results)
    rendezvous.say("go on")
    same(results, [x] * 10)
    assert threading.get_ident() not in rendezvous.logs["threads"][-10:]


@pytest.mark.parametrize(("longer", "are_cheap"), [([0.005], True), ([0.005] * 3, False), ([1], False)])
def test_a_cheap_function_remains_so_when_its_thread_is_interrupted_but_not_when_it_takes_long(longer, are_cheap):
    shown = cheapness.Cheapness()
    for _ in range(1000):
        shown.measured(1e-5)
    for seconds in longer:
        shown.measured(seconds)
    assert shown.is_shown == shown.is_shown_alone == are_cheap


@pytest.mark.parametrize("is_method", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_calls_without_a_thread_emit_the_events_of_others(x, is_method, fails, monkeypatch):
    monkeypatch.setattr(cheapness, "_CHEAP_SECONDS", float("inf"))

    def run(x):
        if rendezvous.logs["fails"]:
            raise LookupError("no")
        return rendezvous.logs["threads"].append(threading.get_ident()) or x

    of_class = colocated.colocated_python_class(type("Runs", (), {"run": lambda self, x: run(x)}))
    f = of_class().run if is_method else colocated_python(run)
    for _ in range(20):
        jax.block_until_ready(f(x))
    rendezvous.logs["fails"] += [True] * fails
    seen = []
    with events.subscribe(seen.append), contextlib.suppress(LookupError):
        jax.block_until_ready(f(x))
    last = events.CallFailed if fails else events.CallFinished
    assert [type(event) for event in seen] == [events.CallQueued, events.CallStarted, last]
    assert {event.thread for event in seen} == {rendezvous.logs["threads"][-1]} == {threading.get_ident()}


def test_inline_calls_run_in_the_caller_and_raise_there(x):
    def fail(x):
        rendezvous.logs["thread"].append(threading.get_ident())
        raise OSError("no disk")

    f = colocated_python(fail, mode="inline", out_specs=jax.ShapeDtypeStruct((8,), np.float32))
    with pytest.raises(OSError, match="no disk"):
        f(x)
    assert rendezvous.logs["thread"] == [threading.get_ident()]


def test_an_inline_call_does_not_overtake_those_before_it(x):
    def slow(x):
        rendezvous.hear("go")
        rendezvous.logs["order"].append("slow")
        return x

    def quick(x):
        rendezvous.logs["order"].append("quick")
        return x

    queued = colocated_python(slow, out_specs_fn=lambda x: x)(x)
    threading.Timer(0.05, rendezvous.say, ["go"]).start()
    colocated_python(quick, mode="inline")(x)
    same(queued, x)
    assert rendezvous.logs["order"] == ["slow", "quick"]


def test_results_are_not_copied():
    f = colocated_python(lambda x: rendezvous.logs["kept"].append(jnp.ones(100_000)) or rendezvous.logs["kept"][-1])
    x = jnp.ones(())
    for _ in range(2):
        y = jax.block_until_ready(f(x))
        assert y.unsafe_buffer_pointer() == rendezvous.logs["kept"][-1].unsafe_buffer_pointer()


def test_arguments_are_not_copied():
    f = colocated_python(lambda x: rendezvous.logs["at"].append(x.unsafe_buffer_pointer()), mode="stream")
    x = jax.block_until_ready(jnp.ones(100_000))
    f(x)
    f(x)
    colocated.wait()
    assert rendezvous.logs["at"] == [x.unsafe_buffer_pointer()] * 2


def test_arguments_on_accelerators_come_on_the_cpu_devices_of_their_hosts(accelerators):
    mesh = partjit.Mesh(accelerators, "x")
    x = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("x")))
    spec = jax.ShapeDtypeStruct((8,), np.float32, sharding=x.sharding)

    def look(x):
        rendezvous.logs["devices"].append(sorted(d.id for d in x.devices()))
        return x + 1

    for mode in MODES:
        y = colocated_python(look, mode=mode, out_specs=spec)(x)
        same(y, x + 1)
        assert y.sharding == x.sharding
        assert y.value().sharding == x.sharding if isinstance(y, colocated.PendingArray) else True
    one = jax.device_put(np.zeros(3), accelerators[2])
    colocated_python(look)(one)
    colocated.wait()
    assert rendezvous.logs["devices"] == [[0, 1, 2, 3]] * 3 + [[2]]
    # A result that is on its way to the accelerators is moved back where the next function runs.
    slow = colocated_python(lambda x: rendezvous.hear("go") or x + 1, stream="slow", out_specs=spec)
    y = colocated_python(look, mode="stream", out_specs=spec)(slow(x))
    assert not y.is_ready()
    rendezvous.say("go")
    same(y, x + 2)
    assert rendezvous.logs["devices"][-1] == [0, 1, 2, 3]


def test_processes_are_what_functions_run_in(x):
    assert int(colocated_python(lambda x: jnp.asarray(os.getpid()))(x)) == os.getpid()
