"""Objects that are no arrays: host arguments of programs, constants of traced functions, arguments of eager calls."""

import copy
import enum
import gc
import json
import math
import operator
import os
import pathlib
import pickle
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding

from partjit import P, colocated, pjit, with_sharding_constraint
from partjit.colocated import colocated_python, colocated_python_class
from partjit.host_objects import HostConstant, HostReference
from tests.census import saw, sees
from tests.colocated import rendezvous
from tests.effort import examples

pytestmark = pytest.mark.usefixtures("meeting")

nothing = {"out_specs_fn": lambda *xs, **kws: None}
like = {"out_specs_fn": lambda x, *_: x}
X = np.arange(8, dtype=np.float32)
WAYS = [{"mode": "inline"}, {"mode": "stream"}, {"stream": "log"}, {"arrays": "numpy"}]


class Config:
    """It has no hash, and copies would be other objects."""

    __hash__ = None

    def __init__(self, rate=0.1):
        self.rate = rate


def recorded(*values):
    rendezvous.logs["seen"].append(values)


def seen():
    colocated.wait()
    found = [*rendezvous.logs["seen"]]
    rendezvous.logs["seen"].clear()
    return found


def objects():
    return [
        "text",
        pathlib.Path("a"),
        {"rate": 0.1, "name": "x"},
        [1, None],
        Config(),
        None,
        len,
        np.array(["a"]),
        b"",
        3,
    ]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_call_of_a_program_gets_the_object_of_each_execution(mesh, way):
    note = colocated_python(lambda x, config: recorded(float(x), config), **way, **nothing)
    traces = []

    @partial(pjit, host_argnums=1)
    def step(x, config):
        traces.append(config)
        note(jnp.sum(x), config)
        return 2 * x

    given = objects()
    with mesh:
        for each in given:
            np.testing.assert_array_equal(step(X, each), 2 * X)
        for each in given:
            np.testing.assert_array_equal(step(X, config=each), 2 * X)
    found = seen()
    assert [x for x, _ in found] == [28.0] * 2 * len(given)
    assert all(a is b for (_, a), b in zip(found, 2 * given, strict=True))
    assert len(traces) <= 2  # by position and by name


def test_another_object_traces_and_compiles_nothing(compilations):
    note = colocated_python(lambda x, config: recorded(config), stream="log", **nothing)
    step = pjit(lambda x, config: (note(x, config), 2 * x)[1], host_argnames="config")
    step(X, config=Config())
    compilations.clear()
    for _ in range(3):
        step(X, config=Config())
    assert len(seen()) == 4
    assert not compilations


def test_a_call_without_it_is_one_of_another_kind():
    note = colocated_python(lambda x, config: recorded(config), **nothing)
    step = pjit(lambda x, config: (note(x, config), 2 * x)[1], host_argnums=1)
    or_else = pjit(lambda x, config="default": (note(x, config), 2 * x)[1], host_argnums=1)
    for _ in range(2):
        step(X, "given")
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'config'"):
            step(X)
        or_else(X, "given")
        or_else(X)
    assert [config for (config,) in seen()] == ["given", "given", "default"] * 2


def test_objects_are_dropped_after_the_call():
    note = colocated_python(lambda x, config: None, stream="log", **nothing)
    step = pjit(lambda x, config: (note(x, config), 2 * x)[1], host_argnums=1)
    config = Config()
    reference = weakref.ref(config)
    step(X, config)
    note(X, config)
    colocated.wait()
    del config
    gc.collect()
    assert reference() is None


def test_they_go_wherever_calls_are(mesh):
    note = colocated_python(lambda x, config: recorded(config), **nothing)
    add = colocated_python(lambda x, config: x + len(config), **like)
    shards = colocated_python(
        lambda shard, config: recorded(config), layout="per_shard", out_specs_fn=lambda *_: None, mode="inline"
    )
    batched = colocated_python(lambda x, config: x + len(config), vmap_method="expand_dims", **like)

    def nested(x, config):
        return pjit(lambda x, inner: add(x, inner), host_argnums=1)(x, config) + jax.jit(lambda x: add(x, config))(x)

    def loops(x, config):
        x, _ = lax.scan(lambda x, _: (add(x, config), None), x, length=3)
        x = lax.cond(jnp.sum(x) > 0, lambda x: add(x, config), lambda x: x, x)

        def body(i, x):
            lax.cond(i % 2 == 0, lambda: note(x, config), lambda: None)
            return x + 1

        return lax.fori_loop(0, 4, body, x)

    def mapped(x, config):
        def shard(x):
            return add(x, config)

        return jax.shard_map(shard, mesh=mesh, in_specs=P(("x", "y")), out_specs=P(("x", "y")))(x)

    def batches(x, config):
        return jax.vmap(lambda x: batched(x, config) + add(x, config))(x)

    def of_shards(x, config):
        shards(x, config)
        return x

    def derived(x, config):
        return jax.grad(lambda x: jnp.sum(jnp.sin(jax.checkpoint(lambda x: (note(x, config), x * x)[1])(x))))(x)

    cases = {nested: 4 * X / 2 + 6, loops: X + 16, mapped: X + 3, batches: 2 * X + 6, of_shards: X, derived: None}
    for fun, expected in cases.items():
        step = pjit(fun, host_argnums=1, in_axis_resources=P("x"))
        with mesh:
            for config in ("abc", ["a", "b", "c"]):
                result = step(X, config)
                if expected is not None:
                    np.testing.assert_allclose(result, expected)
                found = seen()
                assert all(each is config for (each,) in found), fun
                assert len(found) == {loops: 2, of_shards: 8, derived: 1}.get(fun, 0), fun


def test_transformations_of_the_program_around_it():
    note = colocated_python(lambda x, config: recorded(config), **nothing)
    step = pjit(lambda x, config: (note(x, config), jnp.sum(x**2))[1], host_argnums=1)
    config = Config()
    np.testing.assert_array_equal(jax.grad(step)(X, config), 2 * X)
    assert jax.vmap(step, (0, None))(np.stack([X, X]), config).shape == (2,)
    assert float(jax.jvp(lambda x: step(x, config), (X,), (X,))[1]) == float(2 * np.sum(X**2))
    with jax.disable_jit():
        step(X, config)
    assert [each is config for (each,) in seen()] == [True] * 5
    outer = pjit(lambda x: step(x, config) + step(x, "other"))
    outer(X), outer(X)
    assert [each for (each,) in seen()] == [config, "other"] * 2


def test_a_call_after_the_end_says_so():
    note = colocated_python(lambda x, config: recorded(config), mode="inline", **nothing)

    @partial(jax.custom_vjp, nondiff_argnums=(1,))
    def f(x, config):
        return jnp.sum(x)

    f.defvjp(lambda x, config: (jnp.sum(x), None), lambda config, _, ct: ((note(ct, config), ct * jnp.ones(8))[1],))
    step = pjit(f, host_argnums=1, name="step")
    jax.grad(pjit(lambda x: step(x, "inside")))(X)
    assert seen() == [("inside",)]
    message = r"^config is a host argument of step, whose value is known until step returns"
    with pytest.raises(RuntimeError, match=message):
        jax.block_until_ready(jax.grad(step)(X, "outside"))


def test_it_is_compiled_ahead_of_time_with_its_host_arguments():
    note = colocated_python(lambda x, *more: recorded(*more), **nothing)

    @partial(pjit, static_argnums=0, host_argnums=(1, 3), name="step")
    def step(n, config, x, tag):
        note(x, config, tag)
        return n * x

    compiled = step.lower(2, Config(), X, tag="a").compile()
    config = Config()
    np.testing.assert_array_equal(compiled(config, X, tag="b"), 2 * X)
    assert seen() == [(config, "b")]
    with pytest.raises(TypeError, match="step was compiled with its host argument tag and called without"):
        compiled(config, X)
    unused = pjit(lambda x, config: 2 * x, host_argnums=1)
    np.testing.assert_array_equal(unused.lower(X, "a").compile()(X, "b"), 2 * X)
    np.testing.assert_array_equal(unused(X, Config()), 2 * X)


def rules(x, config):
    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, ct: (ct * config.rate,))
    return jax.grad(lambda x: jnp.sum(identity(x)))(x)


UNARY = [
    *(operator.abs, operator.index, operator.inv, operator.neg, operator.not_, operator.pos, operator.truth),
    *(bool, bytes, complex, float, int, hex, iter, len, list, next, range, reversed, round, set, sorted, tuple),
    *(
        math.ceil,
        math.floor,
        math.sqrt,
        math.trunc,
        os.fspath,
        open,
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        json.dumps,
    ),
    *(
        np.asarray,
        np.array,
        np.float32,
        np.zeros,
        np.sin,
        np.stack,
        format,
        abs,
        "a{}".format,
        "%d".__mod__,
        [].__getitem__,
    ),
    *(
        lambda config: config(),
        lambda config: config.rate,
        lambda config: config["rate"],
        lambda config: dict(**config),
    ),
    *(
        lambda config: setattr(config, "rate", 1),
        lambda config: delattr(config, "rate"),
        lambda config: {0.1: 1}[config],
    ),
    *(lambda config: operator.setitem(config, 0, 1), lambda config: operator.delitem(config, 0)),
    *(lambda config: isinstance(1, config), lambda config: 1 in config, lambda config: config in [1]),
    *(lambda config: exec("with config: pass", {"config": config}), lambda config: os.path.join(config, "a")),
]
BINARY = [
    *(operator.add, operator.and_, operator.floordiv, operator.lshift, operator.matmul, operator.mod, operator.mul),
    *(operator.or_, operator.pow, operator.rshift, operator.sub, operator.truediv, operator.xor, operator.concat),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, divmod, min, max),
    *(operator.iadd, operator.imul, operator.imatmul, operator.ior),
]
OF_JAX = [
    *(
        lax.sin,
        jnp.sin,
        jnp.asarray,
        jnp.zeros,
        jnp.zeros_like,
        jax.random.key,
        jax.hessian(jnp.sum),
        jax.vmap(jnp.sin),
    ),
    *(lambda config: jax.grad(lambda x: config)(1.0), lambda config: jax.new_ref(config)),
]
AMONG_ARRAYS = {
    "what a loop is over": lambda x, config: lax.scan(lambda x, y: (x + y, None), x, config)[0],
    "what lax.map is over": lambda x, config: lax.map(lambda y: y, config),
    "a changing carry": lambda x, config: lax.scan(lambda _, y: (y, y), config, x)[1],
    "a changing state": lambda x, config: lax.while_loop(lambda _: False, lambda _: x, config),
    "a number of iterations": lambda x, config: lax.fori_loop(0, config, lambda _, x: x, x),
    "a condition of a loop": lambda x, config: lax.while_loop(lambda _: config, lambda x: x, x),
    "a predicate": lambda x, config: lax.cond(config, lambda x: x, lambda x: 2 * x, x),
    "a predicate without operands": lambda x, config: lax.cond(config, lambda: x, lambda: 2 * x),
    "an index of branches": lambda x, config: lax.switch(config, [lambda x: x, lambda x: 2 * x], x),
    "a branch": lambda x, config: lax.cond(x[0] > 0, config, lambda x: x, x),
    "a result of a branch": lambda x, config: lax.cond(x[0] > 0, lambda x: config, lambda x: x, x),
    "an operand": lambda x, config: lax.add(x, config),
    "an operand of a NumPy function": lambda x, config: np.ones(8) @ config,
    "an index": lambda x, config: x[config],
    "an index to be set": lambda x, config: x.at[config].set(0.0),
    "a shape": lambda x, config: x.reshape(-1, config),
    "a type": lambda x, config: x.astype(config),
    "an axis": lambda x, config: jnp.sum(x, axis=config),
    "an axis of the mesh": lambda x, config: lax.psum(x, config),
    "a spec": lambda x, config: with_sharding_constraint(x, config),
    "a device": lambda x, config: jax.device_put(x, config),
    "a tangent": lambda x, config: jax.jvp(lambda x: x, (x,), (config,))[0],
    "an operand in a nested function": jax.jit(lambda x, config: x * config),
    "an operand in a nested program": pjit(lambda x, config: x * config),
    "in a rule for derivatives": rules,
    "in a copied function": lambda x, config: colocated_python(lambda x: x * config.rate, **like)(x),
    "a stream": lambda x, config: colocated_python(lambda x: x, stream=config, **like)(x),
}
MISUSES = {
    **{f"{op.__name__} {i}": lambda x, config, op=op: x if op(config) else 2 * x for i, op in enumerate(UNARY)},
    **{f"{op.__name__}": lambda x, config, op=op: op(config, 2) for op in BINARY},
    **{f"{op.__name__} of it": lambda x, config, op=op: op(x, config) for op in BINARY},
    **{f"{op} {i}": lambda x, config, op=op: op(config) for i, op in enumerate(OF_JAX)},
    **AMONG_ARRAYS,
}


@pytest.mark.parametrize("where", ["a program", "a program in another", "operation by operation"])
def test_anything_else_that_is_done_with_it_is_an_error_that_names_it(where):
    for use, fun in MISUSES.items():
        step = pjit(fun, host_argnames="config", name="step")
        whole = pjit(lambda x, step=step: step(x, config=Config())) if where == "a program in another" else step
        given = {} if where == "a program in another" else {"config": Config()}
        if where == "operation by operation" and use in AMONG_ARRAYS:  # Python runs the loops
            continue
        with jax.disable_jit(where == "operation by operation"), pytest.raises(Exception) as raised:  # noqa: PT011
            whole(X, **given)
        texts = [str(raised.value), *getattr(raised.value, "__notes__", [])]
        start = "config is a host argument of step: only colocated functions get its value"
        assert len([text for text in texts if text.startswith(start)]) == 1, (use, texts)


def test_what_belongs_to_a_function_gets_a_placeholder_of_its_objects():
    def first(x, config):
        call = colocated_python(
            lambda x, config: x, out_specs_fn=lambda x, config: jax.ShapeDtypeStruct(config.n, x.dtype)
        )
        return call(x, config)

    def second(x, config):
        call = colocated_python(lambda x, config: x, **like)
        call.defvjp(lambda x, config: (call(x, config), config), lambda config, ct: (ct * config.rate, None))
        return jax.grad(lambda x: jnp.sum(call(x, config)))(x)

    for fun in (first, second):
        for call in (fun, pjit(lambda x, config, fun=fun: fun(x, config), static_argnums=1)):
            with pytest.raises(
                AttributeError, match=r"^config of .*<lambda> is no array: only .*<lambda> itself gets it"
            ):
                call(X, "text")


def test_it_cannot_be_returned_and_is_nothing_else():
    returning = pjit(lambda x, config: {"c": config}, host_argnums=1)
    for call in (returning, pjit(lambda x: returning(x, "text")["c"] and x)):
        with pytest.raises(TypeError, match=r"^result\['c'\] of <lambda> is its host argument config, but programs re"):
            call(X, *["text"] * (call is returning))
    for options, what in (({"static_argnums": 1}, "static"), ({"donate_argnames": "config"}, "donated")):
        with pytest.raises(ValueError, match=rf"^pjit: .* names a host argument, which cannot be {what} as well"):
            pjit(lambda x, config: x, host_argnums=1, **options)
    with pytest.raises(ValueError, match="pjit: host_argnums names the argument number 2, but <lambda> takes 2"):
        pjit(lambda x, config: x, host_argnums=2)
    with pytest.raises(ValueError, match="pjit: host_argnames names the argument 'c', which <lambda> lacks"):
        pjit(lambda x, config: x, host_argnames="c")


def test_eager_calls_and_constants_of_programs_are_the_objects_too(mesh):
    note = colocated_python(lambda tree, x, tag=None: recorded(tree["config"], tag), stream="log", **nothing)
    step = pjit(lambda x: (note({"config": config, "y": x}, x, tag=tag), 2 * x)[1])
    given = [Config(), "text", b"bytes", np.array("text"), np.ma.masked_array([1], [True]), np.datetime64("2020-01-01")]
    for config, tag in zip(given, reversed(given), strict=True):
        note({"config": config, "y": X}, X, tag=tag)
        step = pjit(lambda x, config=config, tag=tag: (note({"config": config, "y": x}, x, tag=tag), 2 * x)[1])
        step(X), step(X)
        found = seen()
        assert len(found) == 3
        assert all(a is config and b is tag for a, b in found)
    assert note.cache_info().specializations == 1


def typed():
    """What has a type is none of the objects that functions get as they are."""
    config = Config()
    config.aval = None
    return config


def array(mesh, n, spec):
    return jax.device_put(np.arange(n, dtype=np.float32), NamedSharding(mesh, spec))


KINDS = {
    "an object": lambda mesh: Config(),
    "another class": lambda mesh: pathlib.Path("a"),
    "a text": lambda mesh: "".join(["te", "xt"]),
    "a number": lambda mesh: 3,
    "a NumPy array": lambda mesh: np.arange(3),
    "an array": lambda mesh: array(mesh, 8, P("x")),
    "another shape": lambda mesh: array(mesh, 16, P("x")),
    "another sharding": lambda mesh: array(mesh, 8, P()),
    "keys": lambda mesh: jax.random.key(0),
    "nothing": lambda mesh: None,
    "a type": lambda mesh: typed(),
}
SHAPES = [
    lambda x, y: ((x, y), {}),
    lambda x, y: ((x,), {"other": y}),
    lambda x, y: (({"a": x, "b": [y]},), {}),
    lambda x, y: ((x, 7, y), {}),
]


@sees("as before", "another kind", "a type", "an array", "an object", "a number", "a NumPy array", "keys", "a thread")
@examples(60)
@given(st.data())
def test_eager_calls_get_their_own_arguments_whatever_those_before_had(mesh, data):
    """An object takes the place of an argument; a call then has arguments of other kinds in one place or in none."""
    rendezvous.clear()
    shape = data.draw(st.sampled_from(SHAPES))
    mode = data.draw(st.sampled_from(["inline", "stream"]))
    saw("a thread", when=mode == "stream")
    f = colocated_python(lambda *args, **kwargs: recorded(args, kwargs), mode=mode, **nothing)
    kinds, given_to = st.sampled_from([*KINDS]), []
    names = [data.draw(kinds), "an object"]
    for place, name in [(0, names[0]), *data.draw(st.lists(st.tuples(st.integers(0, 1), kinds), max_size=5))]:
        saw("as before" if names[place] == name else "another kind")
        names[place] = name
        args, kwargs = shape(*(KINDS[name](mesh) for name in names))
        saw("a type", when="a type" in names)
        for kind in ("an array", "an object", "a number", "a NumPy array", "keys"):
            saw(kind, when=kind in names)
        refusal = None
        try:
            f(*args, **kwargs)
        except ValueError as error:
            refusal = str(error)
        assert refusal is not None or "a type" not in names
        assert refusal is None or "a type" in names or "device" in refusal
        given_to += [(args, kwargs)] * (refusal is None)
    found = seen()
    assert jax.tree.structure(found) == jax.tree.structure(given_to)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(given_to), strict=True):
        if isinstance(other, Config | str | pathlib.Path):
            assert one is other
        elif jax.dtypes.issubdtype(getattr(other, "dtype", None), jax.dtypes.prng_key):
            np.testing.assert_array_equal(jax.random.key_data(one), jax.random.key_data(other))
        else:
            assert isinstance(one, jax.Array)
            assert not isinstance(other, jax.Array) or one.sharding == other.sharding
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("mode", ["inline", "auto", "stream"])
@pytest.mark.parametrize("number", [1, 0.5, np.int32(1), np.ones(2)], ids=["int", "float", "numpy number", "array"])
def test_an_eager_call_with_another_object_and_number_is_recognized(monkeypatch, mode, number):
    call = colocated_python(lambda *args: recorded(*args), mode=mode, **nothing)
    call("a", number, jnp.float32(0))
    monkeypatch.setattr("partjit.colocated.function._flatten", None)
    call("b", number + 1, jnp.float32(1))
    text, *others = seen()[-1]
    assert text == "b"
    for found, expected in zip(others, (number + 1, 1), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_eager_calls_with_objects_are_recognized_in_any_order(monkeypatch):
    call = colocated_python(lambda *args: recorded(*args), mode="inline", **nothing)
    kinds = [lambda i: (str(i), jnp.full(3, i)), lambda i: (str(i), i), lambda i: (Config(i), i, jnp.float32(i))]
    for kind in kinds:
        call(*kind(0))
    seen()
    monkeypatch.setattr("partjit.colocated.function.argument_paths", None)
    for i in range(1, 4):
        for kind in kinds[::-1]:
            text, *others = kind(i)
            call(text, *others)
            ((found, *values),) = seen()
            assert found is text
            for value, other in zip(values, others, strict=True):
                np.testing.assert_array_equal(value, other)


def test_of_eager_calls_with_objects_those_with_64_bits_are_others():
    call = colocated_python(lambda text, x: x, mode="inline", out_specs_fn=lambda text, x: x)
    half = colocated_python(lambda *_: 0.5, mode="inline", out_specs_fn=lambda *_: jax.eval_shape(lambda: 0.5))
    x = jnp.float32(0)
    calls = [lambda: call("a", 1), lambda: call("a", 0.5), lambda: call("a", np.ones(2)), lambda: half("a", x)]
    for _ in range(3):
        for each in calls:
            with jax.enable_x64(True):
                assert each().dtype.itemsize == 8
            assert each().dtype.itemsize == 4


def test_eager_calls_keep_no_object():
    call = colocated_python(recorded_name, mode="stream", **nothing)
    for name in "abc":
        config = Config()
        config.name = name
        call(X[0] + jnp.float32(0), config)
        reference = weakref.ref(config)
        del config
        colocated.wait()
        gc.collect()
        assert reference() is None
    assert seen() == [("a",), ("b",), ("c",)]


def recorded_name(_, config):
    recorded(config.name)


def test_a_call_without_arrays_runs_on_the_default_device_or_on_those_of_the_program(mesh):
    note = colocated_python(lambda text: recorded(text), **nothing)
    note("eager")
    with mesh:
        pjit(lambda text: note(text), host_argnums=0)("program")
    assert seen() == [("eager",), ("program",)]


def test_types_are_refused():
    note = colocated_python(lambda x: None, **nothing)
    for wrong in (jax.ShapeDtypeStruct((), np.float32), jax.core.ShapedArray((), np.dtype("float32"))):
        with pytest.raises(ValueError, match=r"only supports jax.Array as input and output, but got .* at x of"):
            note(wrong)


def test_specs_of_arguments_say_none_for_an_object(mesh):
    spec = jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(mesh, P("x")))
    add = colocated_python(lambda x, n: x + len(n), in_specs=((spec, None), {}), out_specs=spec)
    with mesh:
        np.testing.assert_array_equal(add(X, "abc"), X + 3)
        np.testing.assert_array_equal(pjit(lambda x, n: add(x, n), host_argnums=1)(X, "abcd"), X + 4)


def test_methods_and_rules_for_derivatives_get_them():
    @colocated_python_class
    class Writer:
        def __init__(self):
            self.names = []

        def write(self, name, x):
            self.names.append(name)
            recorded(*self.names)

    writer = Writer()
    writer.write = writer.write.specialize(**nothing)
    writer.write("a", X)
    pjit(lambda x, name: (writer.write(name, x), x)[1], host_argnums=1)(X, "b")
    assert seen() == [("a",), ("a", "b")]
    scale = colocated_python(lambda x, config: x * config.rate, **like)
    scale.defvjp(lambda x, config: (scale(x, config), config), lambda config, ct: (scale(ct, config), None))
    step = pjit(lambda x, config: jax.grad(lambda x: jnp.sum(scale(x, config)))(x), host_argnums=1)
    for rate in (2.0, 3.0):
        np.testing.assert_array_equal(step(X, Config(rate)), np.full(8, rate))


def test_calls_made_ahead_have_no_arguments():
    ahead = colocated_python(lambda name: jnp.ones(()), out_specs=jax.ShapeDtypeStruct((), np.float32), run_ahead=2)
    with pytest.raises(ValueError, match="which can only be done with calls that have no arguments"):
        pjit(lambda x, name: x + ahead(name), host_argnums=1)(X, "text")


class Level(enum.IntEnum):
    LOW = 1


class Rate(float, enum.Enum):
    LOW = 0.5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [Level.LOW, Rate.LOW])
def test_a_class_made_of_a_number_is_one_wherever_a_call_is(way, number):
    seen = rendezvous.logs["numbers"] = []
    show = colocated_python(lambda x, n: rendezvous.logs["numbers"].append((str(n.dtype), float(n))), **nothing, **way)
    for x in (jnp.asarray(X), X):
        show(x, number), show(x, number)
    pjit(lambda x, n: show(x, n))(X, number), pjit(lambda x: show(x, number))(X)
    colocated.wait()
    assert seen == [(str(jax.jit(lambda n: n)(number).dtype), float(number))] * 6


@pytest.mark.parametrize("in_program", [False, True])
def test_specs_of_results_that_are_no_arrays_are_refused(in_program):
    f = colocated_python(lambda x, text: x, out_specs_fn=lambda x, text: {"x": x, "text": text})
    with pytest.raises(
        ValueError, match=r"out_specs\['text'\] is an argument that is no array .*or None where nothing is"
    ):
        pjit(lambda x: f(x, "a"))(X) if in_program else f(X, "a")


def test_no_cache_of_functions_gets_a_placeholder():
    """Whatever has a like hash would be compared with it, and that is refused."""
    assert not any(map(callable, (HostReference("step", "config"), HostConstant("step", "config", "adam"))))
