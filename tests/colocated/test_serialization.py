"""Functions and specs as bytes: they come back equal, once each, and only to those who made them."""

import concurrent.futures
import contextlib
import contextvars
import functools
import hmac
import pickle
import subprocess
import sys
import traceback
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding

import partjit
from partjit import P
from partjit._jax.shardings import DeviceList
from partjit.colocated import deserialize, serialization, serialize
from partjit.testing import meshes, sharded_arrays, shardings
from tests.census import sees
from tests.effort import examples


@sees("two mesh axes", "permuted devices", "an explicit axis")
@examples(40)
@given(meshes(explicit=True))
def test_meshes_come_back_equal(mesh):
    for one in (mesh, jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=mesh.axis_types)):
        back = deserialize(serialize(one))
        assert back == one
        assert type(back) is type(one)
        assert back.axis_types == one.axis_types
        assert [*back.devices.flat] == [*one.devices.flat]


@sees("two mesh axes", "permuted devices", "a partitioned value", "two axes in one dimension")
@examples(40)
@given(shardings())
def test_shardings_come_back_equal(sharding):
    for kind in {memory.kind for memory in jax.devices()[0].addressable_memories()}:
        one = NamedSharding(sharding.mesh, sharding.spec, memory_kind=kind)
        back = deserialize(serialize(one))
        assert back == one
        assert back.memory_kind == kind


@sees("two mesh axes", "permuted devices", "a partitioned value", "a value of several dimensions")
@examples(40)
@given(sharded_arrays())
def test_arrays_come_back_where_they_were(array):
    back = deserialize(serialize(array))
    np.testing.assert_array_equal(back, array)
    assert back.sharding == array.sharding


OTHERS = {
    "device": lambda: jax.devices()[3],
    "single device": lambda: SingleDeviceSharding(jax.devices()[2]),
    "device list": lambda: DeviceList(tuple(jax.devices()[:3])),
    "treedef": lambda: jax.tree.structure({"a": [1, (2, None)], "b": Pair(1, 2)}),
    "struct": lambda: jax.ShapeDtypeStruct((8, 2), jnp.bfloat16, sharding=NamedSharding(small_mesh(), P("x"))),
    "key struct": lambda: jax.ShapeDtypeStruct((2,), jax.random.key(0, impl="rbg").dtype),
    "key dtype": lambda: jax.random.key(0, impl="rbg").dtype,
    "spec": lambda: P("x", ("y", "z"), None),
    "abstract mesh": lambda: small_mesh().abstract_mesh,
}


class Pair(tuple):
    """A pytree node of our own."""

    def __new__(cls, *items):
        return super().__new__(cls, items)

    def __getnewargs__(self):
        return tuple(self)


def small_mesh():
    return partjit.Mesh(jax.devices()[:4], "x", axis_types=(AxisType.Explicit,))


@pytest.mark.parametrize("name", OTHERS)
def test_everything_a_specialization_is_made_of_comes_back_equal(name):
    one = OTHERS[name]()
    assert deserialize(serialize(one)) == one
    assert deserialize(serialize({"nested": [one]})) == {"nested": [one]}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_keep_their_implementation_and_place(impl):
    words = np.arange(32, dtype=np.uint32).reshape(8, 4)[:, : 2 if impl == "threefry2x32" else 4]
    key = jax.device_put(jax.random.wrap_key_data(words, impl=impl), NamedSharding(small_mesh(), P("x")))
    back = deserialize(serialize(key))
    assert back.dtype == key.dtype
    assert back.sharding == key.sharding
    np.testing.assert_array_equal(jax.random.key_data(back), jax.random.key_data(key))


def test_functions_capture_values_and_refer_to_modules():
    module = types.ModuleType("unpicklable")
    module.lock = __import__("threading").Lock()
    sys.modules["unpicklable"] = module
    captured = [1, 2]
    array = jnp.arange(3.0)

    def fun(x):
        return captured, module, np.sin(x) + array, jax.devices()[0]

    back = deserialize(serialize(fun))
    captured.append(3)
    values, same_module, result, device = back(0.0)
    assert values == [1, 2]  # the caller's list has changed, this one has not
    assert same_module is module
    np.testing.assert_array_equal(result, [0, 1, 2])
    assert device == jax.devices()[0]
    del sys.modules["unpicklable"]


def test_functions_that_remember_results_are_copied_without_these():
    @functools.lru_cache(maxsize=64, typed=True)
    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    fibonacci(3)
    back = deserialize(serialize(fibonacci))
    assert back.cache_parameters() == {"maxsize": 64, "typed": True}
    assert back.cache_info().misses == 0
    assert back(30) == 832040
    assert back.cache_info().misses == 31  # it calls itself, not the one that it is a copy of
    assert fibonacci.cache_info().misses == 4
    assert deserialize(serialize(functools.cache(len)))("1") == 1
    assert deserialize(serialize(known_by_name)) is known_by_name


def test_a_class_with_cached_properties_is_copied():
    class Table:
        @functools.cached_property
        def rows(self):
            return [type(self), __class__]

    table = deserialize(serialize(Table))()
    assert table.rows is table.rows
    assert table.rows == [type(table), type(table)]


def test_functions_by_the_type_of_their_argument_are_copied_after_they_were_called():
    @functools.singledispatch
    def size(x):
        return 1

    @size.register
    def _(x: list):
        return sum(map(size, x))

    class Sizes:
        @functools.singledispatchmethod
        def size(self, x):
            return 1

        @size.register
        def _(self, x: list):
            return sum(map(self.size, x))

    for original in (size, Sizes().size):
        assert original([1, [2, 3]]) == 3
        assert deserialize(serialize(lambda x, original=original: original(x)))([1, [2, 3]]) == 3


def test_functions_that_a_context_manager_decorates_are_copied():
    entered = []

    @contextlib.contextmanager
    def noted(name, *, end):
        entered.append(name)
        yield
        entered.append(end)

    @noted("begin", end="end")
    def function(x):
        return [*entered, x]

    assert function(1) == ["begin", 1]
    back = deserialize(serialize(function))
    assert back(2) == ["begin", "end", "begin", 2]
    assert back(3)[-3:] == ["end", "begin", 3]

    manager = noted("open", end="closed")
    with manager, pytest.raises(TypeError, match="generator"):
        serialize(manager)


@functools.cache
def known_by_name():
    return 0


def test_equal_objects_are_written_once():
    def sharding():
        mesh = partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("a long name of an axis", "another long name"))
        return NamedSharding(mesh, P("a long name of an axis"))

    one, many = len(serialize([sharding()])), len(serialize([sharding() for _ in range(100)]))
    assert many < one + 100 * 40
    assert deserialize(serialize([sharding() for _ in range(100)])) == [sharding()] * 100
    both = deserialize(serialize((sharding(), sharding())))
    assert both[0] is both[1]


class Nested:
    """Serializes within serializing."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return read_nested, (serialize(self.value),)


def read_nested(data):
    return Nested(deserialize(data))


def test_serializing_may_call_itself():
    sharding = NamedSharding(small_mesh(), P("x"))
    first, nested, last = deserialize(serialize((sharding, Nested([sharding, Nested(sharding)]), sharding)))
    assert first == last == nested.value[0] == nested.value[1].value == sharding


def test_threads_do_not_meet():
    def round_trip(i):
        mesh = partjit.Mesh(jax.devices()[: i % 8 + 1], "x")
        things = [NamedSharding(mesh, P("x")), mesh, i, lambda: i]
        *back, function = deserialize(serialize(things))
        return back == things[:-1] and function() == i

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trip, range(200)))


# Refusals


def test_a_device_that_is_not_there_is_named():
    data = serialize(jax.devices()[3])
    payload = data[serialization._CODE_BYTES :].replace(b"K\x03", b"K\x63")  # the device's id in the pickle
    with pytest.raises(ValueError, match=r"Invalid device ID 99: the cpu devices here are \[0, 1, 2, 3, 4, 5, 6, 7\]"):
        deserialize(bytes(serialization._CODE_BYTES) + payload, authenticate=False)


class Bomb:
    """Runs code when it is read."""

    def __reduce__(self):
        return exec, ("raise SystemExit('it ran')",)


@pytest.mark.parametrize("damage", ["foreign", "altered", "short", "empty", "another key"])
def test_bytes_of_others_are_refused_before_they_run(damage):
    payload = pickle.dumps(([], pickle.dumps(Bomb())))
    made = serialize("fine")
    data = {
        "foreign": bytes(32) + payload,
        "altered": made[:-3] + bytes([made[-3] ^ 1]) + made[-2:],
        "short": made[:20],
        "empty": b"",
        "another key": hmac.digest(b"another", payload, "sha256") + payload,
    }[damage]
    with pytest.raises(ValueError, match="were not made by this group of processes"):
        deserialize(data)


@pytest.mark.system
def test_another_process_is_another_group():
    program = "import sys, partjit.colocated as c; sys.stdout.buffer.write(c.serialize([1, 2]))"
    data = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    with pytest.raises(ValueError, match="not made by this group"):
        deserialize(data)
    assert deserialize(data, authenticate=False) == [1, 2]


def test_a_tracer_is_not_captured():
    with pytest.raises(jax.errors.ConcretizationTypeError, match="serialize/pickle a traced value"):
        jax.jit(lambda x: serialize(x) and x)(1.0)


def test_the_traceback_of_a_copy_shows_the_lines_of_its_functions():
    def outer():
        def inner():
            raise KeyError("inner")

        inner()

    with pytest.raises(KeyError) as caught:
        deserialize(serialize(outer))()
    frames = traceback.extract_tb(caught.value.__traceback__)[-2:]
    assert [(frame.filename, frame.line) for frame in frames] == [
        (__file__, "inner()"),
        (__file__, 'raise KeyError("inner")'),
    ]


def test_cloudpickle_is_needed_at_use_only(monkeypatch):
    monkeypatch.setattr(serialization, "_cloudpickle", None)
    serialization._pickler_class.cache_clear()
    for use in (lambda: serialize(1), lambda: deserialize(b"")):
        with pytest.raises(ModuleNotFoundError, match="pip install cloudpickle"):
            use()
    serialization._pickler_class.cache_clear()


def test_context_variables_stay_what_they_are_within_a_process(monkeypatch):
    variable = contextvars.ContextVar("variable", default=1)
    assert deserialize(serialize(lambda: variable))() is variable
    data = serialize({"v": [variable, variable]})
    monkeypatch.setattr(serialization, "_process", "another")
    with pytest.raises(ValueError, match="the context variable 'variable' belongs to another process"):
        deserialize(data)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": 5}, "deserialize: data must be the bytes that serialize made, but is 5, an int"),
        ({"data": "x"}, "deserialize: data must be the bytes that serialize made, but is 'x', a str"),
        ({"data": b"", "authenticate": None}, "deserialize: authenticate must be True or False, but is None"),
    ],
)
def test_what_is_no_bytes_is_not_read(arguments, message):
    with pytest.raises(TypeError, match=message):
        deserialize(**arguments)


def test_a_colocated_function_of_a_module_changes_copies_and_its_helpers_the_module(tmp_path, monkeypatch):
    (tmp_path / "module_of_helpers.py").write_text(
        "import numpy as np\n"
        "from partjit import colocated\n"
        "copied, shared = [], []\n"
        "def helper(x):\n"
        "    shared.append(float(x))\n"
        "@colocated.colocated_python(out_specs_fn=lambda x: None, mode='inline')\n"
        "def note(x):\n"
        "    copied.append(float(x))\n"
        "    helper(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("module_of_helpers")
    module.note(np.float32(3))
    assert (module.copied, module.shared) == ([], [3.0])
    del sys.modules["module_of_helpers"]
