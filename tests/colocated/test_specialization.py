"""`specialize`: what is known of calls beforehand, and how often that is worked out."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding

import partjit
from partjit import P, colocated
from partjit.colocated import colocated_python
from partjit.colocated.options import Mode, Options
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")


def identity(x):
    return x


def put(shape=(8,), dtype=np.float32, device=0):
    return jax.device_put(np.zeros(shape, dtype), SingleDeviceSharding(jax.devices()[device]))


class Counter:
    def add(self, x):
        return x


SPEC = jax.ShapeDtypeStruct((8,), np.float32)


def test_specialize_gives_a_new_callable_and_leaves_the_old_one():
    f = colocated_python(lambda: jnp.ones(3))
    g = f.specialize(devices=jax.devices())
    assert g is not f
    np.testing.assert_array_equal(g(), np.ones(3))
    with pytest.raises(ValueError, match="No devices found"):
        f()


def test_items_can_be_given_one_after_another_in_any_order():
    items = {
        "in_specs": ((SPEC,), {}),
        "out_specs_fn": lambda x: x,
        "devices": jax.devices()[:1],
        "mode": "stream",
        "stream": "a",
    }
    for names in (list(items), list(items)[::-1]):
        f = colocated_python(identity)
        for name in names:
            f = f.specialize(**{name: items[name]})
        np.testing.assert_array_equal(f(put()), np.zeros(8))
    np.testing.assert_array_equal(colocated_python(identity, **items)(put()), np.zeros(8))
    np.testing.assert_array_equal(
        colocated_python(identity).specialize(*[items[name] for name in ("in_specs", "out_specs_fn", "devices")])(
            put()
        ),
        np.zeros(8),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("in_specs", ((SPEC,), {})),
        ("out_specs_fn", lambda x: x),
        ("out_specs", SPEC),
        ("devices", jax.devices),
        ("mode", "inline"),
        ("stream", "a"),
    ],
)
def test_an_item_can_be_given_once(name, value):
    value = value() if name == "devices" else value
    f = colocated_python(identity).specialize(**{name: value})
    with pytest.raises(ValueError, match=f"{name} already specified"):
        f.specialize(**{name: value})
    with pytest.raises(ValueError, match=f"{name} already specified"):
        colocated_python(identity, **{name: value}).specialize(**{name: value})


OPTIONS = {field.name for field in dataclasses.fields(Options)}


@pytest.mark.parametrize(
    ("function", "others", "options"),
    [
        (colocated_python, {"fun"}, OPTIONS),
        (colocated_python(identity).specialize, set(), OPTIONS - {"isolate"}),
        (colocated.colocated_python_class(Counter).add.specialize, set(), OPTIONS - {"isolate"}),
        (
            colocated.colocated_python_class,
            {"cls", "concurrent", "state"},
            {"arrays", "devices", "isolate", "mode", "stream", "uses_jax"},
        ),
    ],
)
def test_every_option_is_a_typed_parameter_and_others_are_refused(function, others, options):
    parameters = inspect.signature(function).parameters
    assert set(parameters) == others | options
    assert {parameters[name].default for name in options} == {None}
    assert parameters["mode"].annotation == Mode | None
    assert parameters["stream"].annotation == str | colocated.Stream | None
    with pytest.raises(
        TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument 'modes'. .* 'mode'\?$"
    ):
        function(modes="inline")
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'donate_argnums'$"):
        function(donate_argnums=0)


def test_out_specs_are_said_in_one_way():
    with pytest.raises(ValueError, match="out_specs and out_specs_fn say the same: give one of them"):
        colocated_python(identity, out_specs=SPEC, out_specs_fn=lambda x: x)
    with pytest.raises(ValueError, match="say the same"):
        colocated_python(identity).specialize(out_specs=SPEC).specialize(out_specs_fn=lambda x: x)


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        ({"mode": "fast"}, ValueError, "mode must be one of 'auto', 'inline', 'stream', but is 'fast'"),
        ({"stream": 3}, TypeError, "stream must be the name of a stream or a Stream, but is 3, an int"),
        ({"devices": []}, ValueError, "devices must name at least one device, but is empty"),
        ({"devices": ["cpu"]}, TypeError, r"devices\[0\] must be a device, as in jax.devices\(\), but is 'cpu', a str"),
        ({"out_specs_fn": 3}, TypeError, "out_specs_fn must be a function of the specs"),
        ({"in_specs": SPEC}, ValueError, r"in_specs must be a pair \(args, kwargs\) of specs"),
        ({"in_specs": (SPEC, {})}, ValueError, r"in_specs\[0\] must be a tuple with a spec for each argument"),
        ({"in_specs": ((3,), {})}, ValueError, r"in_specs: args\[0\] must be a jax.ShapeDtypeStruct, but is 3"),
    ],
)
def test_what_an_item_cannot_be_is_refused(item, error, message):
    with pytest.raises(error, match=message):
        colocated_python(identity).specialize(**item)
    with pytest.raises(error, match=message):
        colocated_python(identity, **item)


@pytest.mark.parametrize("is_traced", [False, True])
def test_what_out_specs_fn_raises_says_where_it_is_from(is_traced):
    f = colocated_python(lambda x, y: x, out_specs_fn=lambda x: x)
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given") as caught:
        partjit.pjit(lambda x, y: f(x, y))(put(), put()) if is_traced else f(put(), put())
    assert caught.value.__notes__[0].startswith("This is from out_specs_fn, called as the function is")


@pytest.mark.parametrize("is_traced", [False, True])
def test_calls_of_shards_without_arguments_are_refused(is_traced):
    f = colocated_python(lambda: 1.0, layout="per_shard", out_specs=SPEC, devices=jax.devices())
    with pytest.raises(ValueError, match="layout='per_shard' calls <lambda> with the shards of its arguments, and"):
        partjit.pjit(lambda: f())() if is_traced else f()


def test_arguments_are_held_to_in_specs():
    f = colocated_python(lambda x, y: x).specialize(in_specs=((SPEC,), {"y": SPEC}))
    f(put(), y=put())
    with pytest.raises(ValueError, match=r"x is float32\[4\] with .*, but its spec says float32\[8\]"):
        f(put((4,)), y=put())
    with pytest.raises(ValueError, match=r"x is int32\[8\].*; y is float16\[8\]"):
        f(put(dtype=np.int32), y=put(dtype=np.float16))
    with pytest.raises(
        ValueError, match=r"args is a tuple of 2, but its spec says a tuple of 1; kwargs\['y'\] is missing"
    ):
        f(put(), put())
    no_array = r"args\[0\] is None, but its spec says an array\. None also stands for an argument that is no array$"
    with pytest.raises(ValueError, match=no_array):
        f("3", y=put())
    with pytest.raises(ValueError, match=r"x is float32\[\] with .*, but its spec says float32\[8\]"):
        f(3, y=put())
    f(put(), y=put())


def test_a_sharding_in_in_specs_is_held_to_by_meaning(mesh):
    sharding = NamedSharding(mesh, P("x"))
    f = colocated_python(identity).specialize(
        in_specs=((jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding),), {})
    )
    f(jax.device_put(np.zeros(8, np.float32), sharding))
    f(jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, P(("x",)))))
    with pytest.raises(ValueError, match=r"x is float32\[8\] with .*spec=P\('y',\).*but its spec says"):
        f(jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, P("y"))))
    for other in (3, [3.0], np.zeros(6, np.float32), np.zeros((), np.float32), np.zeros((8, 8), np.float32)):
        with pytest.raises(ValueError, match="in_specs do not fit the arguments: "):  # it is not put there before
            f(other)
    left_open = colocated_python(identity).specialize(in_specs=((SPEC,), {}), out_specs_fn=identity)
    for device in (0, 3, 0):
        assert left_open(put(device=device)).devices() == {jax.devices()[device]}
    assert left_open.cache_info().specializations == 2


def test_there_is_one_specialization_per_kind_of_arguments(mesh):
    f = colocated_python(lambda *args, **kwargs: None)
    calls = [
        ((put(),), {}),
        ((put((4,)),), {}),
        ((put(dtype=np.int32),), {}),
        ((put(device=1),), {}),
        (([put()],), {}),
        ((), {"x": put()}),
        ((put(), put()), {}),
        ((jax.device_put(np.zeros(8), NamedSharding(mesh, P("x"))),), {}),
        ((jax.device_put(np.zeros(8), NamedSharding(mesh, P("y"))),), {}),
    ]
    for args, kwargs in calls:
        f(*args, **kwargs)
    assert f.cache_info() == (0, len(calls), len(calls))
    for _ in range(3):
        for args, kwargs in calls:
            f(*args, **kwargs)
    assert f.cache_info() == (3 * len(calls), len(calls), len(calls))


def test_equal_shardings_share_a_specialization(mesh):
    f = colocated_python(identity)
    for _ in range(5):
        fresh = partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
        for sharding in (NamedSharding(fresh, P("x")), NamedSharding(fresh, P("x"))):
            f(jax.device_put(np.zeros(8), sharding))
    assert f.cache_info().specializations == 1
    assert f.cache_info().misses == 1


def test_many_sharding_objects_do_not_fill_the_cache(monkeypatch):
    f = colocated_python(identity, mode="inline")
    monkeypatch.setattr(type(f._cache), "_MOST_IDENTITIES", 4)
    for _ in range(10):
        f(put())
        f(put((4,)))
    assert f.cache_info().specializations == 2
    assert len(f._cache._by_identity) <= 4


def test_out_specs_fn_sees_specs_with_shardings_once_per_specialization_in_the_calling_thread(mesh):
    import threading

    seen = []

    def out_specs(x, *, scale):
        seen.append((x, scale, threading.get_ident()))
        return {"x": x, "scale": scale}

    f = colocated_python(lambda x, *, scale: {"x": x, "scale": scale}, out_specs_fn=out_specs, mode="stream")
    sharding = NamedSharding(mesh, P("x"))
    x, scale = (
        jax.device_put(np.zeros(8, np.float32), sharding),
        jax.device_put(np.float32(2), NamedSharding(mesh, P())),
    )
    for _ in range(4):
        jax.block_until_ready(f(x, scale=scale))
    ((x_spec, scale_spec, thread),) = seen
    assert x_spec == jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding)
    assert (scale_spec.shape, scale_spec.dtype, scale_spec.sharding) == ((), np.float32, NamedSharding(mesh, P()))
    assert thread == threading.get_ident()
    jax.block_until_ready(f(jax.device_put(np.zeros(16, np.float32), sharding), scale=scale))
    assert len(seen) == 2


def test_what_out_specs_fn_raises_is_raised_at_the_call_and_forgotten():
    attempts = []

    def out_specs(x):
        attempts.append(1)
        if len(attempts) == 1:
            raise ZeroDivisionError
        return x

    f = colocated_python(identity, out_specs_fn=out_specs)
    with pytest.raises(ZeroDivisionError):
        f(put())
    np.testing.assert_array_equal(f(put()), np.zeros(8))


def test_clearing_the_caches_of_jax_keeps_callables_working(mesh):
    def count(x):
        rendezvous.logs["runs"].append(1)
        return x

    f = colocated_python(count)
    g = f.specialize(in_specs=((SPEC,), {}), out_specs_fn=lambda x: x, devices=mesh)
    for _ in range(3):
        f(put())
        jax.block_until_ready(g(put()))
    pending = colocated_python(lambda x: rendezvous.hear("go") or x, out_specs_fn=lambda x: x, stream="other")(put())
    jax.clear_caches()
    assert f.cache_info() == (0, 0, 0)
    for _ in range(2):
        np.testing.assert_array_equal(f(put()), np.zeros(8))
        np.testing.assert_array_equal(g(put()), np.zeros(8))
    rendezvous.say("go")
    np.testing.assert_array_equal(pending, np.zeros(8))
    assert len(rendezvous.logs["runs"]) == 10


def test_fully_specialized_calls_look_nothing_up(monkeypatch):
    f = colocated_python(identity, mode="inline").specialize(
        in_specs=((SPEC,), {}), out_specs_fn=lambda x: x, devices=jax.devices()[:1]
    )
    x = put()
    f(x)
    monkeypatch.setattr(type(f._cache), "find", None)
    for _ in range(3):
        np.testing.assert_array_equal(f(x), np.zeros(8))
    assert f.cache_info() == (3, 1, 1)


def test_a_stream_is_given_by_name_or_as_itself():
    with colocated.stream("by name") as stream:
        pass
    assert colocated_python(identity, stream="by name").options.stream is stream
    assert colocated_python(identity, stream=stream).options.stream is stream


def test_specializations_of_the_same_in_specs_do_not_mix():
    first = colocated_python(identity, out_specs=SPEC).specialize(in_specs=((SPEC,), {}))
    second = first.specialize(mode="inline")
    first(put())
    second(put(device=1))
    assert first(put(device=1)).devices() == {jax.devices()[1]}
    assert second(put()).devices() == {jax.devices()[0]}


@pytest.mark.parametrize("mode", ["inline", "stream", "auto"])
def test_weak_types_and_commitment_are_those_of_each_call(mode):
    f = colocated_python(lambda x: x + 0, mode=mode)
    arguments = [jnp.asarray(1.0), jnp.float32(3), put((), np.float32), jnp.asarray(2.0), put((), np.float32)]
    for x in arguments:
        for _ in range(2):
            y = f(x)
            assert (y.weak_type, y.committed) == (x.weak_type, x.committed)
            jax.block_until_ready(y)
            assert (y.weak_type, y.committed) == (x.weak_type, x.committed)


def test_a_result_without_a_sharding_stays_uncommitted_with_its_arguments(mesh):
    x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("x")))
    f = colocated_python(lambda x: x + 0, out_specs=SPEC)
    np.testing.assert_array_equal(f(jnp.ones(8)) + x, 2 * np.ones(8))


def test_devices_say_where_results_without_a_sharding_are(mesh):
    d3 = jax.devices()[3]
    x = jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, P("x")))
    assert colocated_python(lambda x: x, out_specs=SPEC, devices=d3)(x).devices() == {d3}
    with pytest.raises(ValueError, match="devices must name each device once"):
        colocated_python(identity, devices=[d3, d3])


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"devices": 5}, "devices must be devices or a mesh, but is 5, an int"),
        ({"mode": np.array(["auto", "inline"])}, r"mode must be one of 'auto', .*, but is <NumPy array <U6\[2\]>"),
        ({"layout": np.arange(3)}, r"layout must be one of 'global', 'per_shard', but is <NumPy array int64\[3\]>"),
        ({"vmap_method": np.arange(3)}, r"vmap_method must be one of .*, but is <NumPy array int64\[3\]>"),
        ({"pure": 1}, "pure must be True or False, but is 1, an int"),
        ({"run_ahead": True}, "run_ahead must be a whole number of at least 0, but is True, a bool"),
    ],
)
def test_an_item_of_a_wrong_type_is_refused_with_the_name_of_what_was_called(item, message):
    with pytest.raises(TypeError, match=f"^colocated_python: {message}"):
        colocated_python(identity, **item)
    with pytest.raises(TypeError, match=f"^identity.specialize: {message}"):
        colocated_python(identity).specialize(**item)


@pytest.mark.parametrize("bad", [3, "x", np.datetime64("2020-01-01"), np.array(["a"])], ids=repr)
def test_out_specs_are_specs_when_they_are_given(bad):
    with pytest.raises(ValueError, match=r"colocated_python: out_specs\['a'\] must be a jax.ShapeDtypeStruct, but is "):
        colocated_python(identity, out_specs={"a": bad})


@pytest.mark.parametrize(
    ("bad", "remedy"),
    [
        (jax.P("x"), r"P\('x',\), which says no shape .* sharding=NamedSharding\(mesh, ...\)\)$"),
        (
            SPEC.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0]),
            r", which says no shape and dtype: give",
        ),
        (lambda x: x, "is given as out_specs_fn$"),
        (np.float32, "float32'>$"),
    ],
)
def test_what_looks_like_a_spec_is_refused_with_what_to_write(bad, remedy):
    with pytest.raises(
        ValueError, match=r"colocated_python: out_specs\['a'\] must be a jax.ShapeDtypeStruct.*" + remedy
    ):
        colocated_python(identity, out_specs={"a": bad})


def test_a_colocated_function_is_not_made_by_its_constructor():
    with pytest.raises(TypeError, match="ColocatedFunction: function must be what colocated_python gives it"):
        colocated.ColocatedFunction(identity, None, None)
