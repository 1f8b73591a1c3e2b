"""What is checked before a program runs, and what the errors say. The texts are part of the interface."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import Mesh, MissingMeshError, P, ShardingError, pjit, with_sharding_constraint

Pair = collections.namedtuple("Pair", "a b")


@pytest.fixture
def named(mesh):
    """The same devices with the names models use."""
    return Mesh(mesh.devices, ("data", "model"))


def failure(fun, *args, mesh, error=ShardingError, **options):
    with mesh, pytest.raises(error) as raised:
        pjit(fun, **options)(*args)
    return str(raised.value)


# Dimensions that do not divide


@pytest.mark.parametrize(
    ("spec", "shape", "dim", "divisor"),
    [
        (P("x"), (3, 2), 0, 4),
        (P(None, "y"), (8, 3), 1, 2),
        (P(("x", "y")), (12, 2), 0, 8),
        (P(("y", "x")), (12, 2), 0, 8),
        (P(None, ("x", "y"), None), (8, 4, 8), 1, 8),
    ],
)
@pytest.mark.parametrize("what", ["arguments", "outputs"])
def test_an_indivisible_dimension_is_named_with_its_divisor(mesh, spec, shape, dim, divisor, what):
    options = {"in_axis_resources": spec} if what == "arguments" else {"out_axis_resources": spec}
    message = failure(lambda value: value, np.zeros(shape, np.float32), mesh=mesh, **options)
    path = "value" if what == "arguments" else "result"
    assert re.search(
        rf"One of pjit {what}, {path} \(float32.*was given the resource assignment of {re.escape(str(spec))}, which "
        rf"implies that the size of its dimension {dim} should be divisible by {divisor}, but it is equal to "
        rf"{shape[dim]} \({divisor} is ",
        message,
    )


def test_the_remedy_names_the_next_size_and_the_axes_that_do_divide(named):
    message = failure(lambda x: x, np.zeros((6, 4), np.float32), mesh=named, in_axis_resources=P("data"))
    assert "make dimension 0 of x a multiple of 4: 8 is the next one" in message
    assert "6 is divisible by 2 (model)" in message
    message = failure(lambda x: x, np.zeros((7, 4), np.float32), mesh=named, in_axis_resources=P("data"))
    assert "leave the dimension whole (None): no free axes of the mesh divide 7" in message


def test_the_mesh_and_the_axes_that_make_the_divisor_are_shown(named):
    message = failure(lambda x: x, np.zeros(6, np.float32), mesh=named, in_axis_resources=P(("data", "model")))
    assert "8 is data=4 * model=2; mesh: data=4, model=2" in message


def test_zero_is_divisible(mesh):
    with mesh:
        assert pjit(lambda x: x, in_axis_resources=P("x"), out_axis_resources=P("x"))(np.zeros((0, 2))).shape == (0, 2)


# Ranks


@pytest.mark.parametrize("spec", [P("x", "y"), P(None, None), P("x", None), P((), ("x", "y"))])
@pytest.mark.parametrize("what", ["arguments", "outputs"])
def test_the_length_of_a_spec_is_the_least_rank(mesh, spec, what):
    options = {"in_axis_resources": spec} if what == "arguments" else {"out_axis_resources": spec}
    message = failure(lambda v: v, np.zeros(8, np.float32), mesh=mesh, **options)
    assert f"One of pjit {what}" in message
    assert "implies that it has a rank of at least 2, but it is 1" in message


def test_a_scalar_has_rank_zero(mesh):
    assert "rank of at least 1, but it is 0" in failure(lambda v: v, 1.0, mesh=mesh, in_axis_resources=P("x"))
    out = failure(lambda v: v.sum(), np.zeros((8, 2), np.float32), mesh=mesh, out_axis_resources=P("x", "y"))
    assert "rank of at least 2, but it is 0" in out
    with mesh:
        assert pjit(lambda v: v, in_axis_resources=P(), out_axis_resources=P())(1.0) == 1.0


def test_a_spec_of_the_wrong_rank_is_found_with_a_warm_cache_of_its_twin(mesh):
    # P() and P(None) are equal, but only one of them may stand for a scalar.
    def fun(v):
        return v

    with mesh:
        pjit(fun, in_axis_resources=P())(1.0)
    assert "rank of at least 1" in failure(fun, 1.0, mesh=mesh, in_axis_resources=P(None))


# Axes


@pytest.mark.parametrize("what", ["arguments", "outputs"])
def test_an_axis_the_mesh_does_not_have(named, what):
    options = {"in_axis_resources": P("dat")} if what == "arguments" else {"out_axis_resources": P("dat")}
    message = failure(lambda v: v, np.zeros(8, np.float32), mesh=named, **options)
    assert "but resource axis dat is undefined" in message
    assert "Resource axis: dat of P('dat',) is not found in mesh" in message
    assert "did you mean 'data'?" in message


def test_an_axis_that_resembles_none(named):
    message = failure(lambda v: v, np.zeros(8, np.float32), mesh=named, in_axis_resources=P("q"))
    assert "name one of its axes, or declare the axis in the mesh" in message


def test_an_unknown_axis_of_a_constraint(mesh):
    message = failure(lambda v: with_sharding_constraint(v, P("q")), np.zeros(8, np.float32), mesh=mesh)
    assert "One of with_sharding_constraint arguments" in message
    assert "resource axis q is undefined" in message


# All failures at once


def test_every_failure_of_a_call_is_listed_with_its_path(named):
    specs = {"layers": P("data", "model"), "bias": P("modle"), "scale": P()}

    def step(params, batch):
        return {"loss": batch.sum(), "state": params["scale"]}

    params = {
        "layers": [{"w": np.zeros((4, 2), np.float32)} for _ in range(3)] + [{"w": np.zeros((5, 3), np.float32)}],
        "bias": np.zeros(2, np.float32),
        "scale": np.zeros((), np.float32),
    }
    message = failure(
        step,
        params,
        np.zeros(8, np.float32),
        mesh=named,
        in_axis_resources=(specs, P("data", None)),
        out_axis_resources={"loss": P("data"), "state": None},
    )
    assert message.startswith("5 specs of step do not fit on the mesh (data=4, model=2):")
    failures = [line for line in message.splitlines() if line.startswith("One of")]
    paths = [re.search(r", ([^ ]+) \(float32", line)[1] for line in failures]
    assert paths == [
        "params['bias']",
        "params['layers'][3]['w']",
        "params['layers'][3]['w']",
        "batch",
        "result['loss']",
    ]


def test_a_call_with_bad_specs_reports_them_even_if_the_function_raises(mesh):
    def fun(a):
        raise KeyError("because the argument has the wrong shape")

    assert "divisible by 4" in failure(fun, np.zeros(3, np.float32), mesh=mesh, in_axis_resources=P("x"))


def test_parameters_are_called_what_the_function_calls_them(mesh):
    def fun(first, *rest, last):
        return first

    message = failure(
        fun,
        np.zeros(8, np.float32),
        np.zeros(8, np.float32),
        np.zeros(3, np.float32),
        mesh=mesh,
        error=(ShardingError, TypeError),
        in_axis_resources=P("x"),
    )
    assert "rest[1] (float32[3])" in message


def test_nothing_is_executed_before_the_checks(mesh):
    ran = []

    def fun(a):
        jax.debug.callback(lambda: ran.append(1))
        return a

    failure(fun, np.zeros(8, np.float32), mesh=mesh, out_axis_resources=P("x", "y"))
    jax.effects_barrier()
    assert not ran


def test_lowering_validates_like_a_call(mesh):
    with mesh, pytest.raises(ShardingError, match="divisible by 4, but it is equal to 6"):
        pjit(lambda x: x, in_axis_resources=P("x")).lower(jax.ShapeDtypeStruct((6,), "float32"))


# Trees


@pytest.mark.parametrize("specs", [(None, None, None), ({"a": None}, None), (P("x"),)])
def test_in_specs_that_are_no_prefix(mesh, specs):
    message = failure(lambda a, b: a, np.zeros(8), np.zeros(8), mesh=mesh, error=ValueError, in_axis_resources=specs)
    assert "pjit in_axis_resources specification must be a tree prefix of the corresponding value" in message
    assert "should always be wrapped in a tuple representing the argument list" in message


def test_todays_name_is_in_the_message_where_it_was_used(mesh):
    message = failure(lambda a: a, np.zeros(8), mesh=mesh, error=ValueError, in_shardings=(None, None))
    assert "pjit in_shardings specification must be a tree prefix" in message


def test_an_unwrapped_container_of_specs_for_the_only_argument(mesh):
    pair = Pair(np.ones(8, np.float32), np.ones(8, np.float32))
    specs = Pair(P("x"), P("y"))
    message = failure(lambda p: p, pair, mesh=mesh, error=ValueError, in_axis_resources=specs)
    assert "might need to be wrapped in a singleton tuple" in message
    with mesh:
        out = pjit(lambda p: p, in_axis_resources=(specs,), out_axis_resources=specs)(pair)
    assert out.b.sharding.spec == P("y")


def test_out_specs_that_are_no_prefix_say_where(mesh):
    message = failure(
        lambda a: {"y": a, "z": a}, np.zeros(8), mesh=mesh, error=ValueError, out_axis_resources={"y": None, "q": None}
    )
    assert "pjit out_axis_resources specification must be a tree prefix of the corresponding value" in message
    assert "'q'" in message
    assert "'z'" in message
    assert "argument list" not in message


def test_a_list_is_the_argument_list_for_inputs_and_a_tree_for_outputs(mesh):
    with mesh:
        a, b = pjit(lambda a, b: (a, b), in_axis_resources=[P("x"), None], out_axis_resources=(P("x"), None))(
            np.ones(8), np.ones(8)
        )
        (c,) = pjit(lambda a: [a], out_axis_resources=[P("x")])(np.ones(8))
    assert a.sharding.spec == c.sharding.spec == P("x")
    assert b.sharding.is_fully_replicated
    assert "tree prefix" in failure(
        lambda a: (a, a), np.ones(8), mesh=mesh, error=ValueError, out_axis_resources=[None, None]
    )


def test_a_constraint_tree_that_is_no_prefix(mesh):
    with mesh, pytest.raises(ValueError, match="with_sharding_constraint shardings specification must be a tree prefix"):
        with_sharding_constraint((jnp.ones(8), jnp.ones(8)), (None, None, None))


# Meshes


@pytest.mark.parametrize("options", [{"in_axis_resources": P("x")}, {"out_axis_resources": P()}])
def test_a_spec_without_a_mesh(mesh, options):
    function = pjit(lambda a: a, **options)
    for error in (RuntimeError, ValueError, MissingMeshError):
        with pytest.raises(error, match="pjit requires a non-empty mesh"):
            function(np.ones(8))
    with mesh:
        function(np.ones(8))
    with pytest.raises(RuntimeError, match="pjit requires a non-empty mesh"):
        function(np.ones(8))


def test_named_shardings_over_other_devices_than_the_mesh(mesh):
    half = Mesh(mesh.devices[:2], ("x", "y"))
    message = failure(
        lambda a, b: a,
        np.ones(8),
        np.ones(8),
        mesh=mesh,
        in_axis_resources=(P("x"), jax.sharding.NamedSharding(half, P("x"))),
    )
    assert "b (float32[8]), has a NamedSharding over the incompatible devices [0, 1, 2, 3]" in message


# Arguments


def test_keyword_arguments_need_unspecified_in_specs(mesh):
    for specs in (P("x"), (P("x"), None), None):
        with mesh, pytest.raises(ValueError, match="pjit does not support kwargs when in_axis_resources is specified"):
            pjit(lambda a, b=None: a, in_axis_resources=specs)(np.ones(8), b=np.ones(8))
    with mesh:
        assert pjit(lambda a, b=None: b, out_axis_resources=P("x"))(np.ones(8), b=np.ones(8)).sharding.spec == P("x")


def test_too_few_positional_arguments(mesh):
    function = pjit(lambda a, b, c: a, static_argnums=(1,), donate_argnums=(2,))
    with mesh, pytest.raises(ValueError, match=r"static_argnums=\(1,\), donate_argnums=\(2,\).*only 1 positional argument$"):
        function(np.ones(8))


def test_static_and_donated_arguments_cannot_intersect():
    with pytest.raises(ValueError, match="cannot intersect"):
        pjit(lambda a, b: a, static_argnums=(0, 1), donate_argnums=1)


def test_unhashable_static_arguments(mesh):
    by_number = pjit(lambda a, n: a, static_argnums=1)
    by_name = pjit(lambda a, n: a, static_argnames="n")
    with mesh, pytest.raises(ValueError, match="[Nn]on-hashable static arguments"):
        by_number(np.ones(8), [1])
    with mesh, pytest.raises(ValueError, match="[Nn]on-hashable static arguments"):
        by_name(np.ones(8), n=[1])


@pytest.mark.parametrize("value", [3, "f", [lambda: 1]])
def test_what_is_not_callable(value):
    with pytest.raises(TypeError, match="Expected a callable value, got"):
        pjit(value)


def test_a_generator_function():
    def generator():
        yield 1

    with pytest.raises(TypeError, match="generator function"):
        pjit(generator)


@pytest.mark.parametrize("value", ["text", object(), b"bytes"])
def test_an_argument_that_is_no_array(mesh, value):
    with mesh, pytest.raises(TypeError, match=r"Argument tree\['a'\] of fun .*not a valid JAX type"):
        pjit(lambda tree: 1, name="fun")({"a": value})


def test_both_names_of_one_thing(mesh):
    with pytest.raises(ValueError, match="both in_axis_resources and in_shardings"):
        pjit(lambda a: a, in_axis_resources=None, in_shardings=None)
    with pytest.raises(ValueError, match="both out_axis_resources and out_shardings"):
        pjit(lambda a: a, out_axis_resources=None, out_shardings=P())
