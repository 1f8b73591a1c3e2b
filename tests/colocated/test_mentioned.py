"""What people mention in functions: each thing comes along when the function is copied, or the message names it."""

import dataclasses
import functools
import logging
import pickle
import threading
import typing
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import jax.typing
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import partjit
from partjit import pjit
from partjit.colocated import colocated_python, colocated_python_class, deserialize, serialize

X = np.arange(4, dtype=np.float32)
MENTIONED = {}


def mentioned(make):
    """Adds the maker of a function that returns its argument; only what is local is copied, so it is made inside."""
    MENTIONED[make.__name__.replace("_", " ").strip()] = make
    return make


@mentioned
def annotation():
    def fun(x: jax.Array) -> jax.Array:
        return x

    return fun


@mentioned
def optional_annotation():
    def fun(x: jax.Array | None, y: "jax.Array | None" = None, *, z: typing.Union[jax.Array, None] = None):  # noqa: UP007
        return x

    return fun


@mentioned
def array_like_annotations():
    def fun(x: jnp.ndarray, y: jax.typing.ArrayLike = 1, z: jax.typing.DTypeLike = jnp.float32) -> jnp.ndarray:
        return x

    return fun


@mentioned
def captured_array_class():
    Array = jax.Array
    return lambda x: x if isinstance(x, Array) else 0


@mentioned
def array_class_in_types():
    types = (jax.Array | None, dict[str, jax.Array], typing.Callable[[jax.Array], jax.Array])
    variable = typing.TypeVar("variable", bound=jax.Array)
    return lambda x: (types, variable) and x


@mentioned
def subclass_check_of_abstract_class():
    kinds = (jax.Array, np.ndarray, jax.core.Tracer, jax.sharding.Sharding, jax.ShapeDtypeStruct, jax.Device)
    return lambda x: x if isinstance(x, kinds) else 0


@mentioned
def dataclass_field():
    @dataclasses.dataclass
    class State:
        x: jax.Array
        y: jax.Array | None = None

    return lambda x: State(x).x


@mentioned
def named_tuple_field():
    class State(NamedTuple):
        x: jax.Array

    return lambda x: State(x).x


@mentioned
def protocol():
    class Step(Protocol):
        def __call__(self, x: jax.Array) -> jax.Array: ...

    def fun(x, step: Step | None = None):
        return x

    return fun


@mentioned
def classes_with_inheritance():
    class Base:
        scale: jax.Array

        def __init__(self, x: jax.Array):
            self.x = x

        def get(self) -> jax.Array:
            return self.x

    class Derived(Base):
        def get(self) -> jax.Array:
            return super().get()

    return lambda x: Derived(x).get()


@mentioned
def dtypes():
    wide, narrow = jnp.float32, jnp.dtype("bfloat16")
    extra = (jnp.bfloat16, jnp.int4, jnp.float8_e4m3fn, jax.dtypes.prng_key)
    return lambda x: extra and x.astype(narrow).astype(wide)


@mentioned
def typed_key():
    key = jax.random.key(3)
    return lambda x: x + 0 * jax.random.uniform(key, x.shape)


@mentioned
def partial_of_jit():
    jit = functools.partial(jax.jit, static_argnames=("n",))
    return lambda x: jit(lambda x, n: x * n)(x, n=1)


@mentioned
def jitted_closure():
    one = jnp.float32(1)
    scaled = jax.jit(lambda x, n: x * one * n, static_argnums=1)
    return lambda x: scaled(x, 1)


@mentioned
def jitted_module_function():
    return lambda x: jitted(x) - 1


@mentioned
def jitted_partial():
    add = jax.jit(functools.partial(jnp.add, 0.0))
    return lambda x: add(x)


@mentioned
def lowered_and_compiled():
    lowered, compiled = jax.jit(jnp.positive).lower, jax.jit(jnp.positive).lower(X).compile()
    return lambda x: lowered and compiled(x)


@mentioned
def pjit_closure():
    same = pjit(lambda x: x)
    return lambda x: same(x)


@mentioned
def pjit_of_partial():
    add = pjit(functools.partial(jnp.add, 0.0))
    return lambda x: add(x)


@mentioned
def class_with_compiled_methods():
    class Model:
        @staticmethod
        @jax.jit
        def first(x):
            return x

        @functools.partial(jax.jit, static_argnums=0)
        def second(self, x: jax.Array) -> jax.Array:
            return x

    return lambda x: Model().second(Model.first(x))


@mentioned
def custom_derivatives():
    @jax.custom_vjp
    def one(x):
        return x

    one.defvjp(lambda x: (one(x), None), lambda _, g: (g,))

    @jax.custom_jvp
    def two(x):
        return x

    two.defjvp(lambda x, t: (two(*x), t[0]))

    def fun(x):
        return jax.grad(lambda x: (one(x) * two(x)).sum() / 2)(x)

    return fun


@mentioned
def transformed_functions():
    gradient, batched = jax.grad(lambda x: (x * x).sum() / 2), jax.vmap(lambda x: x)
    return lambda x: batched(gradient(x))


@mentioned
def functions_of_jax():
    add, psum, partial = jnp.add, jax.lax.psum, jax.tree_util.Partial(jnp.add, 0.0)
    return lambda x: psum and partial(add(x, 0))


@mentioned
def sharding_and_tree():
    sharding, tree = SingleDeviceSharding(jax.devices()[0]), jax.tree.structure([1])
    return lambda x: tree.unflatten([jax.device_put(x, sharding)])[0]


@mentioned
def errors():
    kinds = (jax.errors.JaxRuntimeError, partjit.ShardingError)

    def fun(x):
        try:
            return x
        except kinds:
            return x

    return fun


@mentioned
def random_generator():
    rng = np.random.default_rng(0)
    return lambda x: x + 0 * np.float32(rng.random())


@mentioned
def logger():
    log = logging.getLogger("partjit.tests")
    return lambda x: log.debug("called") or x


@mentioned
def another_colocated_function():
    same = colocated_python(lambda x: x)
    return lambda x: same(x)


@mentioned
def partial():
    return functools.partial(lambda scale, x: scale * x, 1.0)


@jax.jit
def jitted(x):
    return x + 1


@pytest.mark.parametrize("name", MENTIONED)
def test_what_a_function_mentions_comes_along(name):
    fun = MENTIONED[name]()
    x = jnp.asarray(X)
    np.testing.assert_array_equal(deserialize(serialize(fun))(x), X)
    colocated = colocated_python(fun, out_specs=jax.ShapeDtypeStruct(X.shape, X.dtype))
    np.testing.assert_array_equal(colocated(x), X)
    np.testing.assert_array_equal(pjit(lambda x: colocated(x) * 2)(x), X * 2)


def test_the_classes_of_jax_come_back_as_themselves():
    classes = [jax.Array, jnp.ndarray, jax.typing.ArrayLike, jax.Array | None, jax.ShapeDtypeStruct, jax.Device]
    assert deserialize(serialize(classes)) == classes


def test_a_class_whose_fields_and_methods_mention_arrays_is_colocated():
    @colocated_python_class
    class Accumulator:
        total: jax.Array | None

        def __init__(self, total: jax.Array):
            self.total = total

        def add(self, x: jax.Array) -> jax.Array:
            self.total = self.total + x
            return self.total

    accumulator = Accumulator(jnp.asarray(X))
    np.testing.assert_array_equal(accumulator.add(jnp.asarray(X)), 2 * X)


def test_what_has_no_qualified_name_is_not_pickled_by_one():
    with pytest.raises(AttributeError):
        _ = pjit(functools.partial(jnp.add, 0.0)).__qualname__
    same = pjit(functools.partial(jnp.add, 0.0))
    assert deserialize(serialize(same)) is same


# What cannot be copied is named


class Keeper:
    """Has what cannot be copied in an attribute."""

    def __init__(self):
        self.event = threading.Event()

    def __call__(self, x):
        return x


lock = threading.Lock()


def _in_a_container():
    config = {"locks": [1, lock]}
    return lambda x: config and x


def _in_another_function():
    own = lock

    def inner(x):
        return own and x

    return lambda x: inner(x)


def _as_default():
    def fun(x, guard=lock):
        return x

    return fun


UNCOPYABLE = {
    "a container": (_in_a_container, "config['locks'][1] (a lock)"),
    "another function": (_in_another_function, "own (a lock, captured by inner)"),
    "a default": (_as_default, "the default of guard (a lock)"),
    "a partial": (lambda: functools.partial(lambda guard, x: x, lock), "args[0] (a lock)"),
    "a keyword of a partial": (lambda: functools.partial(lambda x, guard: x, guard=lock), "guard (a lock)"),
    "an object": (Keeper, "self.event (an Event)"),
    "a method": (lambda: Keeper().__call__, "self.event (an Event)"),
}


@pytest.mark.parametrize("where", UNCOPYABLE)
def test_what_cannot_be_copied_is_named_wherever_it_is(where):
    make, named = UNCOPYABLE[where]
    for use in (serialize, lambda fun: colocated_python(fun)(jnp.asarray(X))):
        with pytest.raises(TypeError, match="cannot pickle") as caught:
            use(make())
        assert f"this cannot be copied: {named}. Make it inside" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("mode", ["r", "a", "r+", "w+", "a+", "rb", "ab+"])
@pytest.mark.parametrize("isolate", [None, "process"])
def test_an_open_file_is_refused_and_not_copied(tmp_path, mode, isolate):
    (tmp_path / "log").write_text("before")
    with (tmp_path / "log").open(mode) as file:
        captures = colocated_python(lambda x: file.write("x") and x, isolate=isolate)
        with pytest.raises((TypeError, pickle.PicklingError), match=r"[cC]annot (be copied|pickle)") as caught:
            captures(X)
        assert any("this cannot be copied: file (a " in note for note in caught.value.__notes__)
        gets = colocated_python(lambda x, into: into.write("x") and x, isolate=isolate, out_specs_fn=lambda x, into: x)
        if isolate:
            with pytest.raises(TypeError, match=r"into of <lambda>, of type \w+, cannot be pickled for its worker pro"):
                np.asarray(gets(X, file))


def test_what_an_object_cannot_be_made_of_is_named():
    class Plain:
        def __init__(self, guard):
            self.guard = guard

        def get(self, x):
            return x

    class Guarded(Plain):
        shared = lock

    for cls, argument, named in [(Plain, lock, "args[0] (a lock)"), (Guarded, 1, "Guarded.shared (a lock)")]:
        with pytest.raises(TypeError, match="cannot pickle") as caught:
            colocated_python_class(cls)(argument).get(jnp.asarray(X))
        notes = "\n".join(caught.value.__notes__)
        assert f"this cannot be copied: {named}. Make it inside" in notes
        assert f"{cls.__name__} and the arguments of its constructor are copied for its host" in notes
