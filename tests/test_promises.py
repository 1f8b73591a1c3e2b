"""The promises that hold for every mesh, spec and program: same meaning, specs are kept, errors are the user's.

`PARTJIT_EXAMPLES` multiplies the number of examples, for a longer hunt.
"""

import math
import os
import re
import traceback

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from hypothesis import HealthCheck, assume, given, note, settings
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import partjit

SCALE = float(os.environ.get("PARTJIT_EXAMPLES", "1"))


def examples(count):
    return settings(
        max_examples=max(1, round(count * SCALE)),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        scale = max(1.0, float(np.max(np.abs(other), initial=0.0)))
        np.testing.assert_allclose(one, other, rtol=3e-4, atol=3e-5 * scale)


def expected_shards(value, mesh, parts):
    """Device -> its piece, from the definition: within a dimension the first axis is the major one."""
    shards = {}
    for place in np.ndindex(mesh.devices.shape):
        coordinate = dict(zip(mesh.axis_names, place, strict=True))
        index = []
        for size, part in zip(value.shape, parts, strict=True):
            number = 0
            for axis in part:
                number = number * mesh.shape[axis] + coordinate[axis]
            piece = size // math.prod(mesh.shape[axis] for axis in part)
            index.append(slice(number * piece, (number + 1) * piece))
        shards[mesh.devices[place]] = value[tuple(index)]
    return shards


def assert_kept(array, mesh, parts):
    assert array.sharding.is_equivalent_to(NamedSharding(mesh, P(*parts)), array.ndim), array.sharding
    assert array.committed
    shards = expected_shards(np.asarray(array), mesh, parts)
    assert {shard.device for shard in array.addressable_shards} == set(shards)
    for shard in array.addressable_shards:
        assert shard.data.shape == shards[shard.device].shape
        np.testing.assert_array_equal(np.asarray(shard.data), shards[shard.device])


def loss(result):
    return sum(jnp.sum(leaf * jnp.cos(leaf)) for leaf in jax.tree.leaves(result))


def plainly(function, *args):
    """The value on one device, without a mesh."""
    return jax.tree.map(np.asarray, jax.jit(function)(*args))


@examples(14)
@given(st.data())
def test_a_call_returns_what_the_function_returns_however_often_and_however_its_arguments_come(data):
    case = data.draw(strategies.cases())
    expected = plainly(case.program.plain, case.x, case.w)
    function = case.pjit()
    with case.enter(), partjit.reshard_policy("allow"):
        arrivals = data.draw(
            st.lists(st.tuples(*[st.sampled_from(strategies.ARRIVALS)] * 2), min_size=2, max_size=4), "arrivals"
        )
        for how in [*arrivals, *reversed(arrivals)]:  # each way again, when the call may be a hot one
            x = strategies.arrive(case.x, how[0], case.mesh, case.parts["x"])
            w = strategies.arrive(case.w, how[1], case.mesh, case.parts["in_w"])
            got = function(x, w)
            assert_same(got, expected)
            for name, array in got.items():
                assert_kept(array, case.mesh, case.parts[name])
        other = plainly(case.program.plain, -case.x, case.w * 2)
        assert_same(function(-case.x, case.w * 2), other)


def batch(x):
    return np.stack([x, -x, x * 2, x / 2])


TRANSFORMATIONS = {
    "jit": lambda f: jax.jit(f),
    "checkpoint": lambda f: jax.checkpoint(f),
    "scan": lambda f: lambda x, w: lax.scan(lambda c, x: (c + 1, f(x, w)), 0, batch(x)),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (jnp.cos(x), jnp.sin(w))),
    "jvp_of_one": lambda f: lambda x, w: jax.jvp(lambda x: f(x, w), (x,), (jnp.cos(x),)),
    "linearize": lambda f: lambda x, w: (lambda y, lin: (y, lin(jnp.cos(x), w)))(*jax.linearize(f, x, w)),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(batch(x), w),
    "vmap_both": lambda f: lambda x, w: jax.vmap(f, (x.ndim, 1), 0)(
        np.moveaxis(batch(x), 0, -1), np.moveaxis(batch(w), 0, -1)
    ),
    "vmap_jvp": lambda f: lambda x, w: jax.vmap(lambda t: jax.jvp(f, (x, w), (t, w)))(batch(x)),
    "jit_vmap": lambda f: lambda x, w: jax.jit(jax.vmap(f, (0, None)))(batch(x), w),
    "cond": lambda f: lambda x, w: lax.cond(True, f, lambda x, w: f(w_like(x), w), x, w),
}
REVERSE = {
    "grad": lambda f: jax.grad(lambda x, w: loss(f(x, w)), (0, 1)),
    "grad_of_one": lambda f: jax.grad(lambda x, w: loss(f(x, w)), 1),
    "vjp": lambda f: lambda x, w: (lambda y, pull: pull(jax.tree.map(jnp.cos, y)))(*jax.vjp(f, x, w)),
    "grad_jit": lambda f: jax.grad(lambda x, w: loss(jax.jit(f)(x, w)), (0, 1)),
    "jit_grad": lambda f: jax.jit(jax.grad(lambda x, w: loss(f(x, w)), (0, 1))),
    "grad_checkpoint": lambda f: jax.grad(lambda x, w: loss(jax.checkpoint(f)(x, w)), (0, 1)),
    "grad_dots_saved": lambda f: jax.grad(
        lambda x, w: loss(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)(x, w)), (0, 1)
    ),
    "grad_scan": lambda f: jax.grad(
        lambda x, w: loss(lax.scan(lambda c, t: (c, f(x * t, w)), 0.0, np.array([0.5, 1.0], np.float32))[1]), (0, 1)
    ),
    "vmap_grad": lambda f: lambda x, w: jax.vmap(jax.grad(lambda x, w: loss(f(x, w)), (0, 1)), (0, None))(batch(x), w),
    "grad_vmap": lambda f: jax.grad(
        lambda x, w: loss(jax.vmap(lambda t: f(x * t, w))(np.array([0.5, 1.0], np.float32))), (0, 1)
    ),
    "jvp_grad": lambda f: lambda x, w: jax.jvp(jax.grad(lambda x, w: loss(f(x, w))), (x, w), (x, w)),
    "grad_grad": lambda f: jax.grad(
        lambda x, w: loss(jax.grad(lambda x, w: loss(f(x, w)), (0, 1))(x, w)),
    ),
}


def w_like(x):
    return jnp.sin(x)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@examples(2)
@given(st.data())
def test_a_transformed_call_returns_what_the_transformed_function_returns(name, data):
    case = data.draw(strategies.cases(max_steps=3))
    transformation = TRANSFORMATIONS[name]
    expected = plainly(transformation(case.program.plain), case.x, case.w)
    with case.enter():
        assert_same(transformation(case.pjit())(case.x, case.w), expected)


@pytest.mark.parametrize("name", REVERSE)
@examples(2)
@given(st.data())
def test_a_differentiated_call_returns_what_the_differentiated_function_returns(name, data):
    case = data.draw(strategies.cases(max_steps=3))
    assume(case.program.reverse)
    transformation = REVERSE[name]
    expected = plainly(transformation(case.program.plain), case.x, case.w)
    with case.enter():
        assert_same(transformation(case.pjit())(case.x, case.w), expected)


@examples(6)
@given(st.data())
def test_a_batch_divided_over_a_mesh_axis_has_the_same_values_and_that_axis_in_its_sharding(data):
    case = data.draw(strategies.cases(reserve_axis=True, max_steps=3))
    size = case.mesh.shape[case.spmd_axis_name]
    x = np.stack([case.x * np.float32(i + 1) for i in range(size)])
    expected = plainly(jax.vmap(case.program.plain, (0, None)), x, case.w)
    mapped = jax.vmap(case.pjit(), (0, None), spmd_axis_name=case.spmd_axis_name)
    with case.enter():
        got = mapped(x, case.w)
        assert_same(got, expected)
        for name in ("y", "total"):
            assert_kept(got[name], case.mesh, ((case.spmd_axis_name,), *case.parts[name]))


@examples(8)
@given(st.data())
def test_a_gradient_lies_as_the_spec_of_its_argument_says(data):
    case = data.draw(strategies.cases(max_steps=3))
    assume(case.program.reverse)
    how = data.draw(st.sampled_from(["numpy", "uncommitted", "placed"]), "arrival")
    expected = plainly(jax.grad(lambda x, w: loss(case.program.plain(x, w)), (0, 1)), case.x, case.w)
    function = case.pjit()
    with case.enter():
        x = strategies.arrive(case.x, how, case.mesh, case.parts["x"])
        w = strategies.arrive(case.w, how, case.mesh, case.parts["in_w"])
        for _ in range(2):
            gradient = jax.grad(lambda x, w: loss(function(x, w)), (0, 1))(x, w)
            assert_same(gradient, expected)
            for array, name in zip(gradient, ("x", "in_w"), strict=True):
                assert_kept(array, case.mesh, case.parts[name])


@examples(12)
@given(st.data())
def test_a_dimension_that_does_not_divide_is_an_error_never_a_replicated_array(data):
    mesh = data.draw(strategies.meshes())
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3), "shape")
    parts = data.draw(strategies.partitions(mesh, shape, even=False), "partitions")
    divisors = [math.prod(mesh.shape[axis] for axis in part) for part in parts]
    wrong = [dim for dim, divisor in enumerate(divisors) if shape[dim] % divisor]
    x, spec = strategies.arrays(shape), data.draw(strategies.spelled(parts), "spec")
    calls = {
        "pjit arguments": lambda: partjit.pjit(jnp.sin, spec, None)(x),
        "pjit outputs": lambda: partjit.pjit(jnp.sin, None, spec)(x),
        "with_sharding_constraint arguments": lambda: partjit.with_sharding_constraint(x, spec),
    }
    with data.draw(strategies.entering(mesh))():
        for what, call in calls.items():
            if not wrong:
                result = call()
                if what != "pjit arguments":
                    assert_kept(result, mesh, parts)
                continue
            with pytest.raises(partjit.ShardingError) as info:
                call()
            text = str(info.value)
            assert text.count(f"One of {what}") == len(wrong)
            for dim in wrong:
                assert (
                    f"the size of its dimension {dim} should be divisible by {divisors[dim]}, but it is equal to "
                    f"{shape[dim]}"
                ) in text


BROKEN = {
    "rank": lambda shape, mesh: P(*[None] * (len(shape) + 1)),
    "axis": lambda shape, mesh: P("nowhere"),
    "size": lambda shape, mesh: P(mesh.axis_names[0]),
}


@examples(30)
@given(st.data())
def test_exactly_the_arguments_and_results_whose_specs_do_not_fit_are_listed(data):
    mesh = partjit.Mesh(jax.devices()[:4], "i")
    names = [f"a{i}" for i in range(data.draw(st.integers(1, 6), "count"))]
    shapes = {name: data.draw(strategies.shapes, name) for name in names}
    broken = data.draw(st.dictionaries(st.sampled_from(names), st.sampled_from(list(BROKEN))), "broken")
    for name, how in broken.items():
        if how == "size":
            shapes[name] = [5, *shapes[name][1:]]
    fitting = {name: data.draw(strategies.specs(mesh, shapes[name]), f"spec of {name}") for name in names}
    spec_tree = {name: BROKEN[broken[name]](shapes[name], mesh) if name in broken else fitting[name] for name in names}
    values = {name: strategies.arrays(shapes[name]) for name in names}
    on_results = data.draw(st.booleans(), "on results")
    ran = []

    def fun(tree):
        ran.append(1)
        return tree

    function = partjit.pjit(fun, None if on_results else (spec_tree,), spec_tree if on_results else None)
    with mesh:
        if not broken:
            assert_same(function(values), values)
            return
        with pytest.raises(partjit.ShardingError) as info:
            function(values)
        listed = re.findall(r"^One of pjit (arguments|outputs), (\S+) \(", str(info.value), re.MULTILINE)
        kind, root = ("outputs", "result") if on_results else ("arguments", "tree")
        assert sorted(listed) == sorted((kind, f"{root}[{name!r}]") for name in broken)
        assert str(info.value).startswith(f"{len(broken)} spec")
        # The function's own call with specs that fit is not spoiled by the one that failed.
        fixed = partjit.pjit(fun, None if on_results else (fitting,), fitting if on_results else None)
        if all(shapes[name][0] % 4 == 0 or fitting[name] is None for name in names):
            assert_same(fixed(values), values)


class Mine(Exception):
    """An exception jax and partjit know nothing of; it cannot be made again from its args."""

    def __init__(self, a, *, b):
        super().__init__(a)
        self.b = b


class MineBase(BaseException):
    pass


RAISED = {
    "own": lambda: Mine(object(), b=3),
    "base": lambda: MineBase("stop"),
    "key": lambda: KeyError("k"),
    "value": lambda: ValueError("of the user", 1),
    "type": lambda: TypeError(),
    "attribute": lambda: AttributeError("nothing here"),
    "not_implemented": lambda: NotImplementedError("later"),
    "runtime": lambda: RuntimeError("of the user"),
    "assertion": lambda: AssertionError("of the user"),
    "stop": lambda: StopIteration(4),
    "sharding": lambda: partjit.ShardingError("of the user"),
    "interrupt": lambda: KeyboardInterrupt(),
}
CALLERS = {
    "call": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: jnp.sum(f(x))),
    "vmap": jax.vmap,
    "checkpoint": jax.checkpoint,
    "lower": lambda f: f.lower,
    "trace": lambda f: f.trace,
    "eval_shape": lambda f: f.eval_shape,
    "scan": lambda f: lambda x: lax.scan(lambda c, x: (c, f(x)), 0, x),
}
WRAPPERS = {
    "itself": lambda f: f,
    "pjit": lambda f: partjit.pjit(f, P("i"), P()),
    "jit": lambda f: jax.jit(f),
    "checkpoint": lambda f: jax.checkpoint(f),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "cond": lambda f: lambda x: lax.cond(True, f, f, x),
}


@examples(40)
@given(
    st.sampled_from(list(RAISED)),
    st.sampled_from(list(CALLERS)),
    st.lists(st.sampled_from(list(WRAPPERS)), max_size=2),
    st.integers(1, 3),
    st.booleans(),
)
def test_an_exception_of_the_users_function_comes_out_as_it_is_and_the_next_call_works(
    kind, caller, wrappers, failures, before
):
    pending = []
    traces = []

    def the_users_function(x):
        traces.append(1)
        if pending:
            raise pending.pop()
        return x * 2

    inner = the_users_function
    for wrapper in wrappers:
        inner = WRAPPERS[wrapper](inner)
    x = strategies.arrays((8, 8))
    with partjit.Mesh(jax.devices()[:2], "i"):
        function = partjit.pjit(lambda x: inner(x), P("i"), P(None, "i"))
        call = CALLERS[caller](function)
        if before:  # a signature that works does not help, nor suffer
            assert_same(function(x[:2, :2]), x[:2, :2] * 2)
        for _ in range(failures):
            exception = RAISED[kind]()
            args = exception.args
            pending.append(exception)
            with pytest.raises(BaseException) as info:  # noqa: PT011
                call(x)
            note(repr(info.value))
            assert info.value is exception
            assert exception.args == args
            frames = [frame.name for frame in traceback.extract_tb(exception.__traceback__)]
            assert frames[-1] == "the_users_function"
            assert not pending
        if caller in ("lower", "trace", "eval_shape", "grad", "scan"):
            call(x)
        else:
            np.testing.assert_array_equal(call(x), x * 2)
        assert_same(function(x), x * 2)
        count = len(traces)
        assert_same(function(x), x * 2)
        assert len(traces) == count, "the call that failed keeps later ones from being cached"
        if before:
            assert_same(function(x[:2, :2]), x[:2, :2] * 2)
            assert len(traces) == count


@examples(10)
@given(st.data())
def test_one_bad_argument_does_not_spoil_the_calls_around_it(data):
    mesh = data.draw(strategies.meshes())
    spec = P(mesh.axis_names)
    good = strategies.arrays((mesh.size * 2, 3))
    function = partjit.pjit(lambda x: jnp.sin(x), spec, spec)
    bad_calls = {
        "no array": ((object(),), TypeError),
        "text": (("text",), TypeError),
        "too few": ((), TypeError),
        "too many": ((good, good), (TypeError, ValueError)),
        "scalar": ((1.0,), partjit.ShardingError),
        "other tree": (([good, 1.0],), (TypeError, ValueError)),
    }
    with data.draw(strategies.entering(mesh))():
        for name in data.draw(st.lists(st.sampled_from(list(bad_calls)), max_size=3), "bad calls"):
            args, kind = bad_calls[name]
            with pytest.raises(kind):
                function(*args)
            assert_same(function(good), np.sin(good))
            assert_kept(function(good), mesh, (mesh.axis_names, ()))
