"""The mesh of a call: which contexts set it, how they nest, what a function compiled under one does under another."""

import concurrent.futures
import copy
import io
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import partjit
from partjit import UNSPECIFIED, Mesh, MeshChangedError, P, pjit, set_mesh, with_sharding_constraint
from partjit.mesh import ambient_mesh
from partjit.testing import assert_no_recompile


def devices(count, start=0):
    return np.array(jax.devices()[start : start + count])


def ids(array):
    return [d.id for d in array.sharding.mesh.devices.flat]


def jax_mesh(mesh):
    """The deprecated `with mesh:` of jax, which counts as well."""

    class Entered:
        def __enter__(self):
            with pytest.warns(DeprecationWarning, match="has been deprecated"):
                return jax.sharding.Mesh(mesh.devices, mesh.axis_names).__enter__()

        def __exit__(self, *exc):
            jax.sharding.Mesh(mesh.devices, mesh.axis_names).__exit__(*exc)

    return Entered()


CONTEXTS = {
    "partjit.Mesh": lambda m: m,
    "jax.Mesh": jax_mesh,
    "partjit.set_mesh": set_mesh,
    "jax.set_mesh": jax.set_mesh,
}


@pytest.fixture(params=CONTEXTS.values(), ids=CONTEXTS)
def context(request):
    return request.param


# What a mesh is


def test_forms(mesh):
    flat = Mesh(jax.devices()[:4], "x")
    assert flat == Mesh(devices(4), ("x",)) == Mesh(list(devices(4)), ["x"])
    assert Mesh([[*devices(2)], [*devices(2, 2)]], ("x", "y")).shape == {"x": 2, "y": 2}
    with flat as entered:
        assert entered is flat
    with pytest.raises(ValueError, match="ndim"):
        Mesh(devices(4), ("x", "y"))


def test_a_mesh_is_jaxs_mesh(mesh):
    theirs = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    assert isinstance(mesh, jax.sharding.Mesh)
    assert mesh == theirs
    assert theirs == mesh
    assert (mesh != theirs) is False
    assert (theirs != mesh) is False
    assert hash(mesh) == hash(theirs)
    assert NamedSharding(mesh, P("x")) == NamedSharding(theirs, P("x"))
    assert mesh != jax.sharding.Mesh(mesh.devices, ("x", "z"))
    assert mesh != jax.sharding.Mesh(mesh.devices[::-1], mesh.axis_names)
    assert str(mesh) == str(theirs)


def test_a_mesh_without_axes_is_empty_or_of_one_device():
    empty, one = (partjit.Mesh(np.array(item, dtype=object), ()) for item in (None, jax.devices()[3]))
    assert empty.empty
    assert (one.size, one.axis_names, one.devices.item()) == (1, (), jax.devices()[3])
    with one:
        assert pjit(jnp.sin)(np.ones(4)).devices() == {jax.devices()[3]}
    with empty:
        assert pjit(jnp.sin)(np.ones(4)).devices() == {jax.devices()[0]}
    with pytest.raises(TypeError, match=r"Mesh: devices must be an array or .*: there is 'x', a str in it"):
        partjit.Mesh(np.array("x", dtype=object), ())
    (array := jax.numpy.ones(2)).delete()
    with pytest.raises(TypeError, match=r"Mesh: devices must be an array or .*, but is \[<float32\[2\] array>\]"):
        partjit.Mesh([array], "x")


def test_a_mesh_is_not_equal_to_something_else(mesh):
    assert mesh != 3
    assert mesh is not None
    assert (mesh == "x") is False
    explicit = Mesh(mesh.devices, mesh.axis_names, (AxisType.Explicit,) * 2)
    assert mesh != explicit
    assert explicit == jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)


def test_a_mesh_cannot_be_changed(mesh):
    with pytest.raises(AttributeError):
        mesh.axis_names = ("q",)
    with pytest.raises(ValueError, match="read-only"):
        mesh.devices[0, 0] = mesh.devices[1, 1]


class _FindsDevices(pickle.Unpickler):
    def persistent_load(self, pid):
        return jax.devices()[pid]


class _NamesDevices(pickle.Pickler):
    def persistent_id(self, obj):
        return obj.id if isinstance(obj, jax.Device) else None


@pytest.mark.parametrize("axis_types", [None, (AxisType.Explicit, AxisType.Auto)])
def test_a_mesh_can_be_pickled_by_whoever_can_pickle_devices(mesh, axis_types):
    made = Mesh(mesh.devices[::-1], mesh.axis_names, axis_types)
    file = io.BytesIO()
    _NamesDevices(file).dump((made, NamedSharding(made, P("x"))))
    again, sharding = _FindsDevices(io.BytesIO(file.getvalue())).load()
    assert type(again) is Mesh
    assert again == made
    assert again.axis_types == made.axis_types
    assert sharding == NamedSharding(made, P("x"))
    with again:
        assert ambient_mesh() == made


def test_a_mesh_can_be_copied(mesh):
    for axis_types in (None, (AxisType.Explicit, AxisType.Auto)):
        made = Mesh(mesh.devices, mesh.axis_names, axis_types)
        again = copy.deepcopy(made, {id(made.devices): made.devices})
        assert type(again) is Mesh
        assert again == made
        assert again.axis_types == made.axis_types


def test_as_a_decorator_it_is_set_for_each_call_and_keeps_what_the_function_is(mesh):
    @mesh
    def call(x, *, y):
        """Doc."""
        assert ambient_mesh() == mesh
        return x + y

    assert (call.__name__, call.__doc__) == ("call", "Doc.")
    for _ in range(2):
        assert call(1, y=2) == 3
        assert ambient_mesh().empty

    @mesh
    def fails():
        raise KeyError("x")

    with pytest.raises(KeyError):
        fails()
    assert ambient_mesh().empty


def test_as_a_decorator(mesh):
    @mesh
    def call():
        return pjit(lambda x: x, in_axis_resources=P("x"), out_axis_resources=P("x"))(np.ones(8)).sharding

    assert call() == NamedSharding(mesh, P("x"))
    assert ambient_mesh().empty


# Which contexts count


def test_every_context_counts(mesh, context):
    function = pjit(lambda x: x * 2, in_axis_resources=P("x"), out_axis_resources=P("y"))
    with context(mesh):
        for _ in range(3):
            out = function(np.arange(8.0))
            assert out.sharding == NamedSharding(mesh, P("y"))
        assert with_sharding_constraint(np.arange(8.0), P("x")).sharding == NamedSharding(mesh, P("x"))
    assert ambient_mesh().empty
    with pytest.raises(RuntimeError, match="non-empty mesh"):
        function(np.arange(8.0))


def test_the_mesh_is_that_of_the_call_not_of_the_definition(context):
    with context(Mesh(devices(8), "x")):
        function = pjit(lambda x: x + 1, in_axis_resources=P("x"), out_axis_resources=P("x"))
    for start, count in [(0, 2), (0, 4), (0, 2), (4, 2), (0, 8), (4, 2), (0, 4)]:
        with context(Mesh(devices(count, start), "x")):
            for _ in range(3):
                out = function(np.arange(8.0))
                assert ids(out) == list(range(start, start + count))
                np.testing.assert_array_equal(out, np.arange(8.0) + 1)


def test_another_shape_of_the_same_devices_is_another_mesh():
    function = pjit(lambda x: x, in_axis_resources=P("x"), out_axis_resources=P("x"))
    for shape in [(4, 2), (2, 4), (8, 1), (4, 2)]:
        with Mesh(devices(8).reshape(shape), ("x", "y")) as mesh:
            assert function(np.ones(8)).sharding == NamedSharding(mesh, P("x"))


def test_an_argument_placed_on_another_mesh_is_refused(context):
    function = pjit(lambda x: x, in_axis_resources=P("x"), out_axis_resources=P("x"))
    there = Mesh(devices(2, 4), "x")
    x = jax.device_put(np.ones(8), NamedSharding(there, P("x")))
    with context(Mesh(devices(4), "x")):
        function(np.ones(8))
        with pytest.raises(ValueError, match=r"x \(float32\[8\]\), is committed to the incompatible devices \[4, 5\]"):
            function(x)
    with there:
        assert ids(function(x)) == [4, 5]


def test_the_inner_context_wins_and_the_outer_is_restored(context):
    function = pjit(lambda x: x, in_axis_resources=P("x"), out_axis_resources=P("x"))
    outer, inner = Mesh(devices(4), "x"), Mesh(devices(2, 4), "x")
    with outer:
        assert ids(function(np.ones(8))) == [0, 1, 2, 3]
        if context is not jax.set_mesh:  # jax keeps two states and does not tell which was set last
            with context(inner), outer, context(inner):
                assert ids(function(np.ones(8))) == [4, 5]
        with outer:
            assert ids(function(np.ones(8))) == [0, 1, 2, 3]
        with pytest.raises(KeyError), context(inner):
            raise KeyError
        assert ids(function(np.ones(8))) == [0, 1, 2, 3]
    assert ambient_mesh().empty


def test_a_with_inside_set_mesh_wins():
    with set_mesh(Mesh(devices(4), "x")) as outer:
        with Mesh(devices(2), "x") as inner:
            assert ambient_mesh() == inner
        assert ambient_mesh() == outer


@pytest.mark.parametrize("outer_count", [2, 8])
@pytest.mark.parametrize("outer_form", ["partjit.Mesh", "jax.Mesh", "partjit.set_mesh", "jax.set_mesh"])
@pytest.mark.parametrize("inner_form", ["partjit.Mesh", "jax.Mesh", "partjit.set_mesh", "jax.set_mesh"])
def test_a_call_under_two_contexts_runs_on_the_inner_mesh(outer_form, inner_form, outer_count):
    if (outer_form, inner_form) == ("jax.Mesh", "jax.set_mesh"):
        pytest.skip("jax's `with` and jax's `set_mesh` are two states, and neither tells when it was set")
    function = pjit(lambda x: jnp.sin(x) + 1, in_axis_resources=P("x"), out_axis_resources=P("x"))
    outer, inner = Mesh(devices(outer_count), "x"), Mesh(devices(4, 4), "x")
    with CONTEXTS[outer_form](outer):
        for _ in range(2):
            assert ids(function(np.arange(8.0))) == list(range(outer_count))
            with CONTEXTS[inner_form](inner):
                for _ in range(2):
                    out = function(np.arange(8.0))
                    assert ids(out) == [4, 5, 6, 7]
                    np.testing.assert_allclose(out, np.sin(np.arange(8.0)) + 1, rtol=1e-6)
        assert ids(function(np.arange(8.0))) == list(range(outer_count))


def test_a_context_is_left_on_an_exception(context, mesh):
    with pytest.raises(ZeroDivisionError), context(mesh):
        pjit(lambda x: x / 0 if False else 1 // 0, in_axis_resources=P("x"))(np.ones(8))
    assert ambient_mesh().empty
    with context(mesh):
        with pytest.raises(ValueError, match="divisible"):
            pjit(lambda x: x, in_axis_resources=P("x"))(np.ones(3))
        assert ambient_mesh() == mesh


def test_one_mesh_object_can_be_entered_many_times_and_in_many_threads(mesh):
    def nested(depth):
        if not depth:
            return ambient_mesh()
        with mesh:
            inside = nested(depth - 1)
            assert ambient_mesh() == mesh
        return inside

    assert nested(4) == mesh
    with mesh, concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(found == mesh for found in pool.map(nested, range(1, 9)))
        assert pool.submit(nested, 0).result().empty
    assert ambient_mesh().empty


def test_set_mesh_for_good_and_off_again(mesh):
    set_mesh(mesh)
    try:
        assert pjit(lambda x: x, out_axis_resources=P("x"))(np.ones(8)).sharding == NamedSharding(mesh, P("x"))
        assert jax.jit(lambda x: jax.lax.with_sharding_constraint(x, P("x")))(np.ones(8)).sharding.spec == P("x")
    finally:
        set_mesh(None)
    assert ambient_mesh().empty


def test_jaxs_own_functions_see_the_mesh_inside_a_program(mesh, context):
    def fun(x):
        return jax.lax.with_sharding_constraint(x * 2, P("y"))

    with context(mesh):
        out = pjit(fun, in_axis_resources=P("x"))(np.arange(8.0))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("y")), 1)


def test_none_everywhere_runs_without_a_mesh():
    function = pjit(lambda x: x + 1, in_axis_resources=None, out_axis_resources=None)
    for _ in range(3):
        assert len(function(np.ones(8)).sharding.device_set) == 1


def test_named_shardings_bring_their_mesh(mesh):
    sharding = NamedSharding(mesh, P("x"))
    function = pjit(lambda x: x + 1, in_axis_resources=sharding, out_axis_resources=NamedSharding(mesh, P("y")))
    for _ in range(3):
        assert function(np.arange(8.0)).sharding == NamedSharding(mesh, P("y"))
    with Mesh(devices(2), "q"):  # not asked
        assert function(np.arange(8.0)).sharding == NamedSharding(mesh, P("y"))


def test_other_threads_do_not_inherit_a_with(mesh, context):
    function = pjit(lambda x: x, in_axis_resources=P("x"))
    with context(mesh):
        function(np.ones(8))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: ambient_mesh().empty).result()
            with pytest.raises(RuntimeError, match="non-empty mesh"):
                pool.submit(function, np.ones(8)).result()


def test_threads_on_different_meshes_get_their_own_devices():
    function = pjit(lambda x: x * 2, in_axis_resources=P("x"), out_axis_resources=P("x"))
    barrier = threading.Barrier(4)

    def work(i):
        mesh = Mesh(devices(2, 2 * i), "x")
        barrier.wait()
        for k in range(20):
            with mesh:
                out = function(np.full(8, float(k)))
            assert ids(out) == [2 * i, 2 * i + 1]
            assert np.asarray(out)[0] == 2 * k
        return True

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


# Changing the mesh inside of a program


@pytest.mark.parametrize(
    "inner", [lambda: Mesh(devices(4), "x"), lambda: Mesh(devices(8)[::-1], "x"), lambda: Mesh(devices(8), "z")]
)
def test_changing_the_mesh_while_tracing_is_refused(inner):
    inner_function = pjit(lambda x: x)

    def outer_function(x):
        with inner():
            return inner_function(x)

    with Mesh(devices(8), "x"):
        for error in (RuntimeError, MeshChangedError, ValueError):
            with pytest.raises(error, match="Changing the physical mesh is not allowed") as raised:
                pjit(outer_function, in_axis_resources=P("x"))(np.ones(8))
            for mesh in (Mesh(devices(8), "x"), inner()):
                ((name, size),) = mesh.shape.items()
                assert f"the mesh ({name}={size}) with devices {[d.id for d in mesh.devices]}" in str(raised.value)
        assert inner_function(np.ones(8)).shape == (8,)


@pytest.mark.parametrize("inner_set", [set_mesh, lambda m: m], ids=["set_mesh", "Mesh"])
@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.grad(lambda x: f(x).sum()), jax.vmap, jax.jit])
def test_changing_the_mesh_is_refused_under_transformations_and_leaves_the_outer_mesh(transform, inner_set):
    inner_function = pjit(lambda x: x * 2)

    def outer_function(x):
        with inner_set(Mesh(devices(2), "x")):
            return inner_function(x)

    with Mesh(devices(8), "x") as mesh:
        for _ in range(2):
            with pytest.raises((RuntimeError, ValueError)):
                transform(pjit(outer_function))(np.ones((8, 8)))
            assert ambient_mesh() == mesh
        assert pjit(lambda x: x, out_axis_resources=P("x"))(np.ones(8)).sharding == NamedSharding(mesh, P("x"))
    assert ambient_mesh().empty


@pytest.mark.parametrize("options", [{"in_axis_resources": P("x")}, {"out_axis_resources": None}, {}])
@pytest.mark.parametrize("there", [lambda: devices(2), lambda: devices(8)[::-1]], ids=["fewer", "reversed"])
def test_an_inner_program_that_brings_a_mesh_of_other_devices_is_refused(options, there):
    inner = pjit(lambda x: x + 1, in_shardings=NamedSharding(Mesh(there(), "x"), P("x")))
    with Mesh(devices(8), "x"), pytest.raises(MeshChangedError, match="Changing the physical mesh is not allowed"):
        pjit(lambda x: inner(x) * 2, **options)(np.ones(8))


def test_entering_the_same_mesh_again_while_tracing_is_fine():
    with Mesh(devices(8), "x") as mesh:

        def outer(x):
            with Mesh(devices(8), "x"):
                return pjit(lambda x: x + 1, in_axis_resources=P("x"))(x)

        assert pjit(outer, out_axis_resources=P("x"))(np.ones(8)).sharding == NamedSharding(mesh, P("x"))


# Replication


@pytest.mark.parametrize("spec", [None, P(), P(None), P(()), P((), None)])
def test_none_is_replicated_over_all_devices(mesh, spec):
    with mesh:
        out = pjit(lambda x: x.sum(axis=1, keepdims=True), in_axis_resources=P("x"), out_axis_resources=spec)(
            np.ones((8, 2))
        )
    assert out.sharding.device_set == set(mesh.devices.flat)
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(shard.data, out)


# Axes of type Explicit


@pytest.fixture
def explicit(mesh):
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)


@pytest.mark.parametrize("set_it", [set_mesh, jax.set_mesh])
def test_explicit_axes_behave_like_auto_ones_and_results_come_back_on_them(mesh, explicit, set_it):
    def fun(a, b):
        return with_sharding_constraint(jnp.sin(a @ b), P("x")), a.sum(axis=0)

    function = pjit(fun, in_axis_resources=(P("x"), P(None, "y")), out_axis_resources=(P("x", "y"), UNSPECIFIED))
    a = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    b = np.ones((4, 8), np.float32)
    with mesh:
        expected, expected_sum = function(a, b)
    with set_it(explicit):
        placed = jax.device_put(a, NamedSharding(explicit, P("x")))
        for argument in (placed, a, placed):
            out, out_sum = function(argument, b)
            assert out.sharding == NamedSharding(explicit, P("x", "y"))
            assert out_sum.sharding.mesh == explicit
            np.testing.assert_allclose(out, expected, rtol=1e-6)
            np.testing.assert_allclose(out_sum, expected_sum)
        compiled = function.lower(placed, b).compile()
        b_placed = jax.device_put(b, NamedSharding(explicit, P(None, "y")))
        assert compiled(placed, b_placed)[1].sharding.mesh == explicit


def test_explicit_axes_under_transformations(explicit):
    function = pjit(lambda x: jnp.sin(x) * 2, in_axis_resources=P("x", "y"), out_axis_resources=P("x", "y"))
    total = pjit(lambda x: jnp.sum(jnp.sin(x) * 2), in_axis_resources=P("x", "y"), out_axis_resources=None)
    x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    sharding = NamedSharding(explicit, P("x", "y"))
    with set_mesh(explicit):
        x_placed = jax.device_put(x, sharding)
        results = {
            "grad": jax.grad(total)(x_placed),
            "jit of grad": jax.jit(jax.grad(lambda v: function(v).sum()))(x_placed),
            "checkpoint": jax.grad(jax.checkpoint(total))(x_placed),
            "jvp": jax.jvp(function, (x_placed,), (jax.device_put(np.ones_like(x), sharding),))[1],
            "jit": jax.jit(lambda v: function(v) - function(v) + 2 * jnp.cos(v))(x_placed),
        }
        for name, result in results.items():
            assert result.sharding == sharding, name
            np.testing.assert_allclose(result, 2 * np.cos(x), rtol=1e-5, err_msg=name)
        batched = jax.vmap(function)(jnp.stack([x_placed] * 2))
        assert batched.sharding.mesh == explicit
        np.testing.assert_allclose(batched, [2 * np.sin(x)] * 2, rtol=1e-5)
        carried, _ = jax.lax.scan(lambda c, _: (function(c), None), x_placed, None, length=2)
        np.testing.assert_allclose(carried, 2 * np.sin(2 * np.sin(x)), rtol=1e-5)


def test_explicit_axes_of_another_mesh_with_a_warm_cache(explicit, mesh):
    """The same program on Auto, Explicit and fewer devices in turn: results always on the mesh of the call."""
    function = pjit(lambda x: (x * 2, x.sum()), in_axis_resources=P("x"), out_axis_resources=(P("y"), None))
    small = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[4:])
    for current in [mesh, explicit, small, explicit, mesh, small]:
        with set_mesh(current):
            for _ in range(3):
                out, total = function(np.arange(8.0))
                assert out.sharding == NamedSharding(current, P("y"))
                assert total.sharding.mesh == current
                np.testing.assert_array_equal(out, 2 * np.arange(8.0))
                assert np.asarray(total) == 28


def test_a_call_under_a_mesh_is_not_served_by_what_another_mesh_compiled(context):
    function = pjit(lambda x: x * 3, in_axis_resources=P("x"), out_axis_resources=P("x"))
    meshes = [Mesh(devices(2), "x"), Mesh(devices(2, 2), "x"), Mesh(devices(4), "x"), Mesh(devices(4)[::-1], "x")]
    for current in meshes:
        with context(current):
            function(np.ones(8))
    with assert_no_recompile(function) as watched:
        for current in [*meshes, *meshes[::-1]]:
            with context(Mesh(current.devices, current.axis_names)):  # equal, not the same
                assert ids(watched(np.ones(8))) == [d.id for d in current.devices.flat]


def test_both_orders_of_a_with_and_a_set_mesh_are_compiled():
    function = pjit(lambda x: x * 3, in_axis_resources=P("x"), out_axis_resources=P("x"))
    one, other = Mesh(devices(4), "x"), Mesh(devices(2, 4), "x")
    for _ in range(2):
        with one, jax.set_mesh(other):
            assert ids(function(np.ones(8))) == [4, 5]
        with jax.set_mesh(other), jax_mesh(one):
            assert ids(function(np.ones(8))) == [0, 1, 2, 3]


def test_arrays_of_one_mesh_do_not_pass_for_arrays_of_another_on_the_fast_path():
    function = pjit(lambda x: x * 2, in_axis_resources=P("x"), out_axis_resources=P("x"))
    first, second = Mesh(devices(4), "x"), Mesh(devices(4, 4), "x")
    x = {m: jax.device_put(np.arange(8.0), NamedSharding(m, P("x"))) for m in (first, second)}
    for _ in range(3):
        for here, there in [(first, second), (second, first)]:
            with here:
                assert function(x[here]).sharding == NamedSharding(here, P("x"))
                with pytest.raises(ValueError, match="incompatible devices"):
                    function(x[there])


def test_one_trace_serves_both_ways_of_setting_a_mesh(mesh):
    count = []

    def fun(x):
        count.append(1)
        return x

    function = pjit(fun, in_axis_resources=P("x"))
    for make in (lambda m: m, set_mesh, jax.set_mesh, jax_mesh):
        with make(mesh):
            function(np.ones(8))
    assert len(count) <= 3  # jax keeps its two states apart in its own key, and a `with` of ours can be told from jax's


def test_the_public_names():
    assert partjit.P is partjit.PartitionSpec is jax.sharding.PartitionSpec
    assert partjit.FROM_GDA is partjit.FROM_ARRAY


# What makes no mesh


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Mesh(jax.devices()[0], "x"), ValueError, r"axis_names .* but devices.ndim is 0 .* \('x',\)"),
        (
            lambda: Mesh(jax.devices(), 5),
            TypeError,
            "Mesh: axis_names must be a sequence of names, .*, but is 5, an int",
        ),
        (lambda: Mesh(jax.devices(), ["x", "y"]), ValueError, r"devices.ndim is 1 and axis_names are \('x', 'y'\)"),
        (lambda: Mesh(np.array(jax.devices()).reshape(2, 4), "xx"), ValueError, r"devices.ndim is 2"),
        (lambda: Mesh(np.array(jax.devices()).reshape(2, 4), ["x", "x"]), ValueError, "name each axis differently"),
        (
            lambda: Mesh(jax.devices(), [None]),
            TypeError,
            r"axis_names\[0\] must be the name of an axis, a str, but is None",
        ),
        (lambda: Mesh(8, "x"), TypeError, "Mesh: devices must be an array .* of devices, .*, but is 8, an int"),
        (lambda: Mesh([0, 1], "x"), TypeError, "there is .*0.* in it"),
        (lambda: Mesh([], "x"), ValueError, r"devices must be .*, but is \[\], a list: there is none"),
        (lambda: Mesh([jax.devices(), [1]], "xy"), TypeError, "Mesh: devices must be an array or"),
        (lambda: Mesh(jax.devices(), "x", "Auto"), TypeError, "axis_types must be a tuple with a .*AxisType"),
        (lambda: Mesh(jax.devices(), "x", ("Auto",)), TypeError, r"axis_types\[0\] must be a jax.sharding.AxisType"),
        (lambda: Mesh(jax.devices(), "x", (AxisType.Auto,) * 2), ValueError, "axis_types .* there are 2 for 1 axes"),
        (lambda: set_mesh("x"), TypeError, "set_mesh: mesh must be a mesh, but is 'x', a str: make one with"),
    ],
)
def test_what_is_no_mesh_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make()
    assert ambient_mesh().empty
