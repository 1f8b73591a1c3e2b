"""What is checked before a program runs, and what the errors say. The texts are part of the interface."""

import collections
import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from partjit import (
    AUTO,
    Mesh,
    MissingMeshError,
    P,
    ParsedPartitionSpec,
    ShardingError,
    pjit,
    set_mesh,
    with_sharding_constraint,
)
from partjit.inspect import explain
from partjit.validate import check_specs

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
    assert "leave the dimension unsharded (None): no free axes of the mesh divide 7" in message


@pytest.mark.parametrize("shape", [(8,), (4, 2), (2, 2, 2), (2, 1, 2, 2)])
def test_the_remedy_lists_every_group_of_free_axes_that_divides_up_to_six(shape):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), tuple("abcd"[: len(shape)]))
    sizes = mesh.shape
    for taken in (0, 1):  # axes that the other dimension has
        other, own = mesh.axis_names[:taken], mesh.axis_names[taken:]
        spec = ParsedPartitionSpec.from_user_input(P(own, other), "in_axis_resources")
        divisor = math.prod(sizes[axis] for axis in own)
        groups = [axes for count in range(1, 5) for axes in itertools.combinations(own, count)]
        for size in range(1, 17):
            aval = jax.core.ShapedArray((size, 8), np.dtype("float32"))
            failures = check_specs("pjit arguments", ["x"], [aval], [spec], mesh)
            if size % divisor == 0:
                assert failures == []
                continue
            (found,) = failures
            products = [(math.prod(sizes[axis] for axis in axes), axes) for axes in groups]
            fitting = [f"{n} ({', '.join(axes)})" for n, axes in products if n > 1 and size % n == 0]
            following = next(n for n in itertools.count(size) if n % divisor == 0)
            assert found.remedy.splitlines() == [
                f"make dimension 0 of x a multiple of {divisor}: {following} is the next one",
                f"or shard it over other axes: {size} is divisible by {', '.join(fitting[:6])}"
                if fitting
                else f"or leave the dimension unsharded (None): no free axes of the mesh divide {size}",
            ]


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


@pytest.mark.parametrize(("rank", "entries"), [(0, "0 entries"), (1, "1 entry"), (2, "2 entries")])
def test_a_spec_may_have_as_many_entries_as_the_value_has_dimensions(mesh, rank, entries):
    message = failure(lambda v: v, np.zeros((8,) * rank, np.float32), mesh=mesh, in_axis_resources=P(None, None, None))
    assert message.endswith(f"give v a spec with at most {entries}")


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


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("modle", "model"),
        ("Data", "data"),
        ("MODEL", "model"),
        ("models", "model"),
        ("dta", "data"),
        ("dtst", "data"),
    ],
)
def test_the_closest_axis_is_proposed(named, typo, meant):
    message = failure(lambda v: v, np.zeros((8, 8), np.float32), mesh=named, in_axis_resources=P(None, typo))
    assert f"did you mean {meant!r}?" in message


def test_an_axis_in_the_wrong_case(mesh):
    message = failure(lambda v: v, np.zeros(8, np.float32), mesh=mesh, in_axis_resources=P("X"))
    assert "did you mean 'x'?" in message


# All failures at once


def test_an_unknown_axis_does_not_hide_what_else_is_wrong_with_the_value(mesh):
    message = failure(lambda v: v, np.zeros((8, 3), np.float32), mesh=mesh, in_axis_resources=P("q", "x"))
    assert "resource axis q is undefined" in message
    assert "its dimension 1 should be divisible by 4, but it is equal to 3" in message
    message = failure(lambda v: v, np.zeros(8, np.float32), mesh=mesh, in_axis_resources=P("q", "x"))
    assert "resource axis q is undefined" in message
    assert "rank of at least 2, but it is 1" in message
    message = failure(lambda v: v, np.zeros((8, 8), np.float32), mesh=mesh, in_axis_resources=P("q", ("r", "x")))
    assert "axis q is undefined" in message
    assert "axis r is undefined" in message


def test_arguments_outputs_and_devices_fail_together(mesh):
    elsewhere = jax.device_put(np.zeros(8, np.float32), jax.devices()[3])
    message = failure(
        lambda a, b, c: {"out": a.sum()},
        np.zeros(6, np.float32),
        np.zeros((8, 5), np.float32),
        elsewhere,
        mesh=mesh,
        in_axis_resources=(P("x"), P("x", "y"), None),
        out_axis_resources={"out": P("y")},
        name="everything",
    )
    assert message.startswith("The specs of everything do not fit on the mesh (x=4, y=2), for 4 reasons:")
    for part in ("a (float32[6])", "b (float32[8,5])", "c (float32[8]), is committed", "result['out'] (float32[])"):
        assert message.count(f", {part}") == 1, part


@pytest.mark.parametrize("axes", [("a", "b", "c"), ("b",), (("a", "c"),), ("c", None, "a"), (None, ("b", "a"))])
@pytest.mark.parametrize("shape", [(6, 10, 15), (5, 7, 9), (4, 9, 6), (12, 2, 3)])
def test_every_remedy_works(axes, shape):
    """Doing what an error proposes, all of it or any one alternative, never leads to the same failure again."""
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3, 1), ("a", "b", "c"))
    spec = P(*axes)
    value = np.zeros(shape, np.float32)
    wrong = [
        dim
        for dim, entry in enumerate(axes)
        if entry and shape[dim] % np.prod([mesh.shape[axis] for axis in ([entry] if isinstance(entry, str) else entry)])
    ]
    function = pjit(lambda v: v, in_axis_resources=spec)
    if not wrong:
        with mesh:
            assert function(value).sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, spec), 3)
        return
    with mesh, pytest.raises(ShardingError) as raised:
        function(value)
    _, *blocks = str(raised.value).split("\n\n")
    assert [int(re.search(r"dimension (\d) should", block)[1]) for block in blocks] == wrong
    padded, whole = list(shape), list(axes)
    for dim, block in zip(wrong, blocks, strict=True):
        padded[dim] = int(re.search(r": (\d+) is the next one", block)[1])
        whole[dim] = None
        for size, names in re.findall(r"(\d+) \(([a-c, ]+)\)", block.partition("is divisible by")[2]):
            names = tuple(names.split(", "))
            assert np.prod([mesh.shape[name] for name in names]) == int(size)
            entries = [*axes]
            entries[dim] = names
            entries = [entry if i == dim or i not in wrong else None for i, entry in enumerate(entries)]
            others = {n for i, e in enumerate(axes) if i != dim for n in ([e] if isinstance(e, str) else e or ())}
            assert not others & set(names), f"{names} of the remedy are already used in {spec}"
            with mesh:
                pjit(lambda v: v, in_axis_resources=P(*entries))(value)
    with mesh:
        assert function(np.zeros(padded, np.float32)).shape == tuple(padded)
        assert all(new - old < 6 for new, old in zip(padded, shape, strict=True))
        assert pjit(lambda v: v, in_axis_resources=P(*whole))(value).shape == shape


def test_the_same_failure_reads_the_same_again_and_a_valid_call_still_works(mesh):
    function = pjit(lambda v: v * 2, in_axis_resources=P("x"), out_axis_resources=P("x"))
    texts = []
    with mesh:
        for shape in [(6,), (8,), (6,), (8,), (6,)]:
            if shape == (8,):
                np.testing.assert_array_equal(function(np.ones(shape)), 2 * np.ones(shape))
                continue
            with pytest.raises(ShardingError) as raised:
                function(np.ones(shape))
            texts.append(str(raised.value))
    assert len(set(texts)) == 1


@pytest.mark.parametrize(
    "outer",
    [
        jax.jit,
        lambda f: jax.grad(lambda v: f(v).sum()),
        lambda f: lambda v: jax.eval_shape(f, v),
        lambda f: jax.checkpoint(f),
        lambda f: pjit(lambda v: f(v)),
    ],
    ids=["jit", "grad", "eval_shape", "checkpoint", "pjit"],
)
def test_validation_is_the_same_under_transformations(mesh, outer):
    function = pjit(lambda value: value * 2, in_axis_resources=P("x"))
    with mesh, pytest.raises(ShardingError, match=r"value \(float32\[6\]\).*divisible by 4, but it is equal to 6"):
        outer(function)(jnp.ones(6))


# Names


class _Model:
    def method(self, weights, *, scale=1.0):
        return weights

    def __call__(self, inputs):
        return inputs


@dataclasses.dataclass
class _Layer:
    w: object


jax.tree_util.register_dataclass(_Layer, data_fields=["w"], meta_fields=[])


@pytest.mark.parametrize(
    ("fun", "args", "options", "path"),
    [
        (_Model().method, (0,), {}, "weights"),
        (_Model(), (0,), {}, "inputs"),
        (functools.partial(lambda first, second: second, 1.0), (0,), {}, "second"),
        (functools.partial(lambda first, second: first, second=1.0), (0,), {}, "first"),
        (lambda config, x: x, ("static", 0), {"static_argnums": 0}, "x"),
        (lambda x, config, y: y, (1, "static", 0), {"static_argnums": 1}, "y"),
        (lambda x, /, y: y, (1, 0), {}, "y"),
        (lambda *xs: xs, (1, 1, 0), {}, "xs[2]"),
        (lambda pair: pair, ((1, 0),), {}, "pair[1]"),
        (lambda named: named, (Pair(1, {"k": [1, 0]}),), {}, "named.b['k'][1]"),
        (lambda net: net, (_Layer(0),), {}, "net.w"),
        (lambda x, y=None: y, (1, 0), {}, "y"),
    ],
)
def test_a_key_path_is_how_the_function_itself_would_reach_the_value(mesh, fun, args, options, path):
    args = jax.tree.map(lambda v: v if isinstance(v, str) else np.zeros(8 if v else 6, np.float32), args)
    message = failure(fun, *args, mesh=mesh, in_axis_resources=P("x"), **options)
    assert message.startswith("A spec of")
    assert f"One of pjit arguments, {path} (float32[6]), was given" in message


@pytest.mark.parametrize(
    ("fun", "path"),
    [
        (lambda x: x, "result"),
        (lambda x: [x], "result[0]"),
        (lambda x: Pair(None, {"k": x}), "result.b['k']"),
    ],
)
def test_a_result_has_a_path_too(mesh, fun, path):
    message = failure(fun, np.zeros(6, np.float32), mesh=mesh, out_axis_resources=P("x"))
    assert f"One of pjit outputs, {path} (float32[6]), was given" in message


def test_a_keyword_argument_is_named(mesh):
    x = jax.device_put(np.zeros(8, np.float32), jax.devices()[1])
    with (
        mesh,
        pytest.raises(ShardingError, match=r"One of pjit arguments, batch\['y'\] \(float32\[8\]\), is committed"),
    ):
        pjit(lambda a, *, batch: a)(np.ones(8), batch={"x": np.ones(8), "y": x})


# Constraints


def test_an_uneven_constraint_is_padded_in_a_program_and_refused_outside(named):
    x = np.arange(6.0, dtype=np.float32)
    with named:
        out = pjit(lambda v: with_sharding_constraint(v * 2, P("data")) + 1)(x)
        np.testing.assert_array_equal(out, 2 * x + 1)
        np.testing.assert_array_equal(jax.jit(lambda v: with_sharding_constraint(v, P("data")) + 1)(x), x + 1)
        with pytest.raises(ShardingError) as raised:
            with_sharding_constraint({"a": np.zeros(8, np.float32), "b": [x]}, P("data"))
    message = str(raised.value)
    assert "One of with_sharding_constraint arguments, x['b'][0] (float32[6])" in message
    assert "its dimension 0 should be divisible by 4, but it is equal to 6" in message
    assert "x['a']" not in message


@pytest.mark.parametrize("transform", [jax.vmap, lambda f: jax.grad(lambda v: f(v).sum())], ids=["vmap", "grad"])
def test_an_uneven_constraint_outside_any_program_is_never_silently_something_else(named, transform):
    def constrain(v):
        return with_sharding_constraint(v, P("data"))

    with named, pytest.raises(ValueError, match="divisible by 4"):
        transform(constrain)(np.zeros((6,) if transform is not jax.vmap else (2, 6), np.float32))


@pytest.mark.parametrize("inside", [True, False])
def test_the_rank_of_a_constraint(mesh, inside):
    def constrain(v):
        return with_sharding_constraint(v, {"a": P("x", "y")})

    with mesh, pytest.raises(ShardingError, match="One of with_sharding_constraint arguments") as raised:
        (pjit(constrain) if inside else constrain)({"a": np.zeros(8, np.float32)})
    assert "x['a'] (float32[8])" in str(raised.value)
    assert "rank of at least 2, but it is 1" in str(raised.value)


@pytest.mark.parametrize("spec", [P("x"), P(), None])
def test_a_constraint_without_a_mesh(spec):
    for error in (RuntimeError, ValueError, MissingMeshError):
        with pytest.raises(error, match="with_sharding_constraint requires a non-empty mesh"):
            with_sharding_constraint(np.ones(8), spec)


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
    assert message.startswith("The specs of step do not fit on the mesh (data=4, model=2), for 5 reasons:")
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


@pytest.mark.parametrize("specs", [(None, None, None), (P("x"),), {"a": None}])
def test_in_specs_that_are_no_prefix(mesh, specs):
    message = failure(lambda a, b: a, np.zeros(8), np.zeros(8), mesh=mesh, error=ValueError, in_axis_resources=specs)
    assert "pjit in_axis_resources specification must be a tree prefix of the corresponding value" in message
    assert "should always be wrapped in a tuple representing the argument list" in message
    assert "PyTreeDef" not in message


def step(params, x, y, *, training=True):
    return params["w"] + x + y


_PARAMS = {"w": np.ones(8, np.float32)}
_X = np.ones(8, np.float32)
_FOR_THREE = ({"w": P("x")}, P("x"), P("x"))


@pytest.mark.parametrize("call", [lambda f: f, lambda f: f.lower, lambda f: functools.partial(explain, f)])
@pytest.mark.parametrize("in_shardings", [_FOR_THREE, [*_FOR_THREE], ({"w": AUTO}, P("x"), P("x"))])
@pytest.mark.parametrize(
    ("count", "problem"),
    [
        (1, "step() missing a required argument: 'x'"),
        (2, "step() missing a required argument: 'y'"),
        (4, "step() takes 3 positional arguments but 4 were given"),
    ],
)
def test_a_call_that_does_not_fit_the_function_is_no_matter_of_its_specs(mesh, call, in_shardings, count, problem):
    args = [_PARAMS, _X, _X, _X][:count]
    with mesh, pytest.raises(TypeError) as raised:
        call(pjit(step, in_shardings=in_shardings))(*args)
    assert str(raised.value) == f"{problem}; in_shardings has specs for 3 arguments"


@pytest.mark.parametrize("option", ["static_argnames", "host_argnames"])
def test_arguments_without_specs_are_arguments_of_the_call(mesh, option):
    def scaled(params, x, y, scale):
        return params["w"] * 2

    function = pjit(scaled, in_shardings=_FOR_THREE, **{option: "scale"})
    with mesh, pytest.raises(TypeError) as raised:
        function(_PARAMS, _X, _X, 2, 3)
    assert str(raised.value).startswith("scaled() takes 4 positional arguments but 5 were given")
    with mesh, pytest.raises(TypeError) as raised:
        function(_PARAMS, _X, scale=2)
    assert str(raised.value).startswith("scaled() missing a required argument: 'y'; ")


def test_specs_for_other_arguments_than_the_function_has(mesh):
    with mesh, pytest.raises(ShardingError) as raised:
        pjit(step, in_shardings=(*_FOR_THREE, None))(_PARAMS, _X, _X)
    assert "in_shardings is a tuple of 4, but the arguments of step are (params, x, y)" in str(raised.value)


def test_a_function_without_a_signature_and_specs_for_more_arguments(mesh):
    class Unknown:
        __signature__ = "none"

        def __call__(self, x):
            return x

    with mesh, pytest.raises(ShardingError) as raised:
        pjit(Unknown(), in_shardings=(P("x"), P("x")))(_X)
    assert "in_shardings is a tuple of 2, but the arguments of Unknown are (args[0],)" in str(raised.value)


@pytest.mark.parametrize("untraced", ["static_argnums", "host_argnums"])
def test_static_and_host_arguments_are_none_of_those_that_have_specs(mesh, untraced):
    with mesh, pytest.raises(ShardingError) as raised:
        pjit(lambda n, a: a, in_shardings=(None, P("x")), **{untraced: 0})(2, _X)
    assert "is a tuple of 2, but the traced arguments of <lambda> are (a,); static and host" in str(raised.value)
    assert "static and host arguments, here n, have no specs\n" in str(raised.value)


def named_trees(params, rest):
    return {"w": params["w"], "bias": [params["bias"], rest]}


_TREES = {"w": np.ones(8, np.float32), "bias": np.ones(8, np.float32)}


@pytest.mark.parametrize(
    ("specs", "problem", "remedy"),
    [
        ({"w": P("x")}, "in_shardings[0] lacks the key 'bias' of params", "add it, or give one spec for all of params"),
        ({}, "in_shardings[0] lacks the keys 'bias', 'w' of params", "add them, or give one spec for all of params"),
        ({"w": P(), "bais": P()}, "in_shardings[0] has the key 'bais', which params lacks", "did you mean 'bias'?"),
        (
            {"w": P(), "bias": P(), "v2": P()},
            "in_shardings[0] has the key 'v2', which params lacks",
            "params has the keys 'bias', 'w'",
        ),
        (
            {"w": P(), "bias": (P(), P())},
            "in_shardings[0]['bias'] is a tuple of 2, but params['bias'] is an array (float32[8])",
            "give one spec for it",
        ),
        (
            [P(), P()],
            "in_shardings[0] is a list of 2, but params is a dict with the keys 'bias', 'w'",
            "give one spec for all of it, or specs in its structure",
        ),
    ],
)
def test_specs_in_another_structure_than_an_argument(mesh, specs, problem, remedy):
    message = failure(named_trees, _TREES, _X, mesh=mesh, in_shardings=(specs, P()))
    headline, *rest = message.splitlines()
    assert headline == (
        "pjit in_shardings specification must be a tree prefix of the corresponding value, the arguments of "
        "named_trees, but is not:"
    )
    assert rest == ["", problem, f"    {remedy}"]


@pytest.mark.parametrize(
    ("specs", "problem", "remedy"),
    [
        (
            {"w": P(), "biases": P()},
            "out_shardings has the key 'biases', which result lacks",
            "did you mean 'bias'?",
        ),
        ({"w": P()}, "out_shardings lacks the key 'bias' of result", "add it, or give one spec for all of result"),
        (
            {"w": P(), "bias": [P()]},
            "out_shardings['bias'] is a list of 1, but result['bias'] is a list of 2",
            "give one spec for all of it, or specs in its structure",
        ),
    ],
)
def test_specs_in_another_structure_than_the_result(mesh, specs, problem, remedy):
    headline, *rest = failure(named_trees, _TREES, _X, mesh=mesh, out_shardings=specs).splitlines()
    assert headline.endswith("tree prefix of the corresponding value, the result of named_trees, but is not:")
    assert rest == ["", problem, f"    {remedy}"]


def test_all_differences_between_structures_are_in_one_error(mesh):
    message = failure(named_trees, _TREES, _X, mesh=mesh, in_shardings=({"W": P(), "bais": P(), "x": P()}, [P()]))
    assert [line for line in message.splitlines()[1:] if line] == [
        "in_shardings[0] has the key 'W', which params lacks",
        "    did you mean 'w'?",
        "in_shardings[0] has the key 'bais', which params lacks",
        "    did you mean 'bias'?",
        "in_shardings[0] has the key 'x', which params lacks",
        "    params has the keys 'bias', 'w'",
        "in_shardings[1] is a list of 1, but rest is an array (float32[8])",
        "    give one spec for it",
    ]


def test_keys_that_are_no_strings_and_many_of_them(mesh):
    layers = {i: np.ones(8, np.float32) for i in range(20)}
    message = failure(
        lambda layers: layers, layers, mesh=mesh, in_shardings=({**dict.fromkeys(range(19), P()), 30: P()},)
    )
    assert "in_shardings[0] has the key 30, which layers lacks\n    layers has the keys 0, 1, 2, 3, 4, 5" in message
    assert "in_shardings[0] lacks the key 19 of layers" in message


def test_other_metadata_is_what_jax_says_of_it(mesh):
    Static = jax.tree_util.register_dataclass(
        dataclasses.make_dataclass("Static", ["a", "n"]), data_fields=["a"], meta_fields=["n"]
    )
    message = failure(lambda s: s.a, Static(_X, 3), mesh=mesh, in_shardings=(Static(P("x"), 4),))
    assert "different pytree metadata at key path\n    in_shardings[0]" in message


def test_values_without_a_name_of_a_function(mesh):
    with mesh, pytest.raises(ShardingError) as raised:
        with_sharding_constraint({"a": jnp.ones(8), "b": jnp.ones(8)}, {"a": P(), "B": P()})
    assert str(raised.value) == (
        "with_sharding_constraint shardings specification must be a tree prefix of the corresponding value, x, but is "
        "not:\n\nshardings has the key 'B', which x lacks\n    did you mean 'b'?"
    )


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


def test_in_specs_that_are_no_prefix_are_reported_for_deleted_arrays_too(mesh):
    x = jnp.ones(4)
    x.delete()
    with mesh, pytest.raises(ShardingError, match="pjit in_shardings specification must be a tree prefix"):
        pjit(lambda xs: xs, in_shardings=([P(), P(), P()],))([x, x])


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
    with (
        mesh,
        pytest.raises(ValueError, match="with_sharding_constraint shardings specification must be a tree prefix"),
    ):
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


@pytest.mark.parametrize("is_reversed", [False, True])
def test_an_array_that_stays_has_its_devices_in_the_order_of_the_mesh(is_reversed):
    here, there = [Mesh(jax.devices()[::step], "x") for step in ((-1, 1) if is_reversed else (1, -1))]
    x = jax.device_put(np.ones(8, np.float32), NamedSharding(there, P("x")))
    with there:
        assert pjit(lambda v: v)(x).sharding == x.sharding
    assert "v (float32[8]), is committed to the incompatible devices" in failure(lambda v: v, x, mesh=here)


# Refs


@pytest.mark.parametrize("placed", [P("x"), P(None, "x"), P(), P(("x", "y"))])
def test_a_ref_is_never_moved(mesh, placed):
    ref = jax.new_ref(jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, placed)))
    with mesh:
        for spec in (P("x"), P(None, "x"), P(), P(("x", "y"))):
            function = pjit(lambda ref: ref[...].sum(), in_axis_resources=(spec,))
            if spec == placed:
                assert function(ref) == 64
                continue
            with pytest.raises(ShardingError, match="One of pjit arguments, ref, is a ref with the sharding") as raised:
                function(ref)
            assert f"but its spec says {spec}" in str(raised.value)


@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap, pjit], ids=["jit", "vmap", "pjit"])
@pytest.mark.parametrize("specs", [{"in_axis_resources": P("x")}, {}], ids=["spec", "none"])
def test_a_ref_of_an_enclosing_trace_is_where_that_puts_it(mesh, specs, wrap):
    def fun(x):
        ref = jax.new_ref(x)
        pjit(lambda ref: ref.__setitem__(..., ref[...] * 2), **specs)(ref)
        return ref[...]

    with set_mesh(mesh):
        x = jax.device_put(np.ones((8, 8, 8), np.float32), NamedSharding(mesh, P(None, "x")))
        np.testing.assert_array_equal(wrap(fun)(x), 2 * np.ones((8, 8, 8)))


# Arguments


def test_keyword_arguments_need_unspecified_in_specs(mesh):
    for specs in (P("x"), (P("x"), None), None):
        with mesh, pytest.raises(ValueError, match="pjit does not support kwargs when in_axis_resources is specified"):
            pjit(lambda a, b=None: a, in_axis_resources=specs)(np.ones(8), b=np.ones(8))
    with mesh:
        assert pjit(lambda a, b=None: b, out_axis_resources=P("x"))(np.ones(8), b=np.ones(8)).sharding.spec == P("x")


def test_too_few_positional_arguments(mesh):
    function = pjit(lambda a, b, c: a, static_argnums=(1,), donate_argnums=(2,))
    with (
        mesh,
        pytest.raises(ValueError, match=r"static_argnums=\(1,\), donate_argnums=\(2,\).*only 1 positional argument$"),
    ):
        function(np.ones(8))


def test_static_and_donated_arguments_cannot_intersect():
    with pytest.raises(ValueError, match="cannot intersect"):
        pjit(lambda a, b: a, static_argnums=(0, 1), donate_argnums=1)


def test_unhashable_static_arguments(mesh):
    by_number = pjit(lambda a, n: a, static_argnums=1)
    by_name = pjit(lambda a, n: a, static_argnames="n")
    with mesh, pytest.raises(ValueError, match=r"[Nn]on-hashable static arguments"):
        by_number(np.ones(8), [1])
    with mesh, pytest.raises(ValueError, match=r"[Nn]on-hashable static arguments"):
        by_name(np.ones(8), n=[1])


@pytest.mark.parametrize("value", [3, "f", [lambda: 1], None])
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
    with mesh, pytest.raises(TypeError, match=r"Argument tree\['a'\] of fun .*not a valid JAX type.* the arrays"):
        pjit(lambda tree: 1, name="fun")({"a": value})


def test_both_names_of_one_thing(mesh):
    with pytest.raises(ValueError, match="both in_axis_resources and in_shardings"):
        pjit(lambda a: a, in_axis_resources=None, in_shardings=None)
    with pytest.raises(ValueError, match="both out_axis_resources and out_shardings"):
        pjit(lambda a: a, out_axis_resources=None, out_shardings=P())
