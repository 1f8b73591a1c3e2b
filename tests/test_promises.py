"""The promises as laws over random programs, meshes, specs, shapes and places of the arguments.

1. Same meaning: a partitioned function equals the plain one, under every transformation.
2. Specs are kept: what the user wrote is what the array has, or it is an error.
3. Errors are the user's: what the function raises comes out as it is, and nothing is left behind.

`PARTJIT_PROFILE=soak pytest tests/test_promises.py` draws ten times as many examples, others each time.
"""

import dataclasses
import functools
import math
import re
import traceback
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding

import partjit
from partjit import P, ShardingError, pjit
from partjit.mesh import ambient_mesh
from partjit.testing import assert_laid_out, axes_of, meshes, partition_specs, shapes
from tests import strategies as ours
from tests.census import is_partitioned, of_its_own, saw, sees

SCALE = settings().max_examples / 100


def examples(count, fewer=None):
    """`count` examples times the scale of the profile; `fewer` are enough by default, where a law is expensive."""
    return settings(
        max_examples=fewer if fewer and SCALE <= 1 else max(1, round(count * SCALE)),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


@pytest.fixture(autouse=True, scope="module")
def arguments_may_be_elsewhere():
    with partjit.reshard_policy("allow"):
        yield


def close(actual, expected, tolerance=2e-4):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape
        assert a.dtype == e.dtype
        assert getattr(a, "weak_type", False) == getattr(e, "weak_type", False)
        if e.dtype != jax.dtypes.float0:
            a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
            assert np.isfinite(e).all()
            scale = max(1.0, np.abs(e).max(initial=0.0))
            np.testing.assert_allclose(a / scale, e / scale, rtol=tolerance, atol=tolerance)


def batched(spec, axis=None):
    """The spec of a batch of values, divided over `axis`."""
    return P(axis, *(spec or ()))


# What is done to a function. A use takes the function, its arguments, of which the first `n` are floats, and cotangents
# of its results. Little is done outside of the function itself: every operation on its own is one more compilation.


def partial(f, args, n):
    """`f` as a function of its float arguments."""
    return lambda *floats: f(*floats, *args[n:])


def pullback(f, args, n, cotangents):
    results, back = jax.vjp(partial(f, args, n), *args[:n])
    return back(tuple(map(typed_like, results, cotangents)))


def typed_like(result, cotangent):
    """The cotangent with the sharding of the result, where that is part of its type."""
    sharding = jax.typeof(result).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return jax.sharding.reshard(cotangent, sharding) if explicit else cotangent


def pushforward(f, args, n, cotangents):
    return jax.jvp(partial(f, args, n), tuple(args[:n]), tangents(args[:n]))


def tangents(values):
    """Something of the shape of each value."""
    shapes = [np.shape(value) for value in values]
    return tuple(np.linspace(-1, 1, math.prod(shape), dtype=np.float32).reshape(shape) for shape in shapes)


def pushforward_of_first(f, args, n, cotangents):
    return jax.jvp(lambda first: f(first, *args[1:]), tuple(args[:1]), tangents(args[:1]))


def batch_of_tangents(f, args, n, cotangents):
    """A vmap in which the primals are not batched."""
    return jax.vmap(lambda ts: jax.jvp(partial(f, args, n), tuple(args[:n]), ts))(stacked(tangents(args[:n])))


def forward_over_reverse(f, args, n, cotangents):
    def gradient(*floats):
        return pullback(f, (*floats, *args[n:]), n, cotangents)

    return jax.jvp(gradient, tuple(args[:n]), tangents(args[:n]))


def linearize(f, args, n, cotangents):
    outs, linear = jax.linearize(partial(f, args, n), *args[:n])
    return outs, linear(*tangents(args[:n])), linear(*tangents(args[:n]))


def stacked(values, size=2):
    """A batch: each value and others."""

    def stack(value):
        traced = isinstance(value, jax.core.Tracer)
        value, library = (value, jnp) if traced else (np.asarray(value), np)
        others = [value // 2 if value.dtype == np.int32 else value / (i + 2) for i in range(size - 1)]
        return library.stack([value, *others])

    return tuple(map(stack, values))


def total(f, args, n, cotangents):
    """A scalar function of a scalar."""

    def of(s):
        return sum(jnp.mean(jnp.sin(out)) for out in f(*(arg * s for arg in args[:n]), *args[n:]))

    return of


def scan(f, args, n, cotangents):
    def step(carry, xs):
        outs = f(*xs)
        return carry + sum(jnp.mean(out) for out in outs), outs

    return jax.lax.scan(step, jnp.float32(0.5), stacked(args))


def scanned(f):
    return lambda *args: scan(f, args, None, None)[:1]


def conditional(f, args, n, cotangents):
    outs = [f, lambda *args: f(*args[:n], *(index // 2 for index in args[n:]))]
    choose = jax.jit(lambda first: jnp.clip(jnp.sum(first).astype(int), 0, 1))
    return jax.lax.switch(choose(args[0]), outs, *args)


def call(f, args, n, cotangents):
    return f(*args)


def call_and_call_again(f, args, n, cotangents):
    first, again, last = f(*args), f(*args), f(*args)
    del again
    return first, last


def jitted(use):
    """The use as one compiled program."""
    return lambda f, args, n, cotangents: jax.jit(lambda args, cts: use(f, args, n, cts))(args, cotangents)


def of(transformed, use):
    """The use of a transformed function."""
    return lambda f, args, n, cotangents: use(transformed(f), args, n, cotangents)


def mapped(use, size=2, **options):
    """The vmap of a use."""

    def use_batch(f, args, n, cotangents):
        one = jax.vmap(lambda args, cts: use(f, args, n, cts), **options)
        return one(stacked(args, size), stacked(cotangents, size))

    return use_batch


def of_batch(use, size=2, **options):
    """The use of a vmap."""

    def use_batched(f, args, n, cotangents):
        return use(jax.vmap(f, **options), stacked(args, size), n, stacked(cotangents, size))

    return use_batched


def at_the_end(f, args, n, cotangents):
    """A vmap of the first argument only, over its last dimension, to the last dimension."""
    first = stacked(args[:1])[0]
    first = first.transpose((*range(1, first.ndim), 0))
    return jax.vmap(f, in_axes=(np.ndim(args[0]), *[None] * (len(args) - 1)), out_axes=-1)(first, *args[1:])


save_dots = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)


def ins(in_specs, out_specs):
    return in_specs


def outs(in_specs, out_specs):
    return out_specs


def ins_twice(in_specs, out_specs):
    return in_specs * 2


def outs_twice(in_specs, out_specs):
    return out_specs * 2


def outs_of_batch(in_specs, out_specs):
    return tuple(map(batched, out_specs))


def ins_of_batch(in_specs, out_specs):
    return tuple(map(batched, in_specs))


@dataclasses.dataclass(frozen=True)
class Law:
    """One way to use a function.

    Attributes:
        use: `(f, args, n, cotangents) -> results`.
        specs: `(specs of the float arguments, specs of the results) -> specs of the flat results of the use`, or None
            if jax chooses them.
        order: how often the program is differentiated; twice means smaller programs.
    """

    use: Callable
    specs: Callable | None = None
    order: int = 0


LAWS = {
    "call": Law(call_and_call_again, outs_twice),
    "jit": Law(jitted(call), outs),
    "jvp": Law(pushforward, outs_twice, 1),
    "jvp of the first argument": Law(pushforward_of_first, order=1),
    "vmap of jvp, of the tangents": Law(batch_of_tangents, order=1),
    "grad": Law(pullback, ins, 1),
    "linearize": Law(linearize, lambda ins, outs: outs * 3, 1),
    "jit of grad": Law(jitted(pullback), ins, 1),
    "checkpoint": Law(of(jax.checkpoint, call)),
    "grad of checkpoint": Law(of(jax.checkpoint, pullback), ins, 1),
    "grad of checkpoint that saves dots": Law(jitted(of(save_dots, pullback)), ins, 1),
    "vmap": Law(of_batch(call), outs_of_batch),
    "vmap of one argument, at the end": Law(at_the_end),
    "vmap of vmap": Law(of_batch(of_batch(call))),
    "vmap of grad": Law(mapped(pullback), ins_of_batch, 1),
    "grad of vmap": Law(of_batch(pullback), ins_of_batch, 1),
    "jit of vmap of jvp": Law(jitted(mapped(pushforward)), order=1),
    "scan": Law(scan),
    "grad of scan": Law(jitted(of(scanned, lambda *use: jax.grad(total(*use))(0.7))), order=1),
    "conditional": Law(conditional),
    "reverse over reverse": Law(jitted(lambda *use: jax.grad(lambda s: jax.grad(total(*use))(s) ** 2)(0.8)), order=2),
    "hessian": Law(jitted(lambda *use: jax.hessian(total(*use))(0.8)), order=2),
    "jvp of grad": Law(forward_over_reverse, ins_twice, 2),
}


REAL = ("two mesh axes", "a value of several dimensions", "a partitioned argument", "a partitioned result")
REAL = (*REAL, "a spec inside")
SMALL = {"depth": 1, "max_steps": 2, "max_size": 1}


def check(name, count, *, explicit=False, **options):
    """Checks a law on random cases, of which it sees real ones."""
    law = LAWS[name]
    small = SMALL if SCALE <= 1 or law.order == 2 else {}
    also = ["a derivative that is not zero"] * (law.order > 0) + ["an explicit axis"] * explicit
    also += ["a partitioned result that is where its spec says"] * has_checked_specs(law.specs, explicit)

    @sees(*REAL, *also)
    @of_its_own(name)
    @examples(count)
    @given(ours.cases(explicit=explicit, **small, **options))
    def holds(case):
        hold(case, law.use, law.use, law.specs, derived=law.order > 0)

    holds()


def has_checked_specs(specs, explicit):
    """Whether the results of a use have specs: on Explicit axes a gradient has the type of its argument instead."""
    return specs is not None and not (explicit and specs in (ins, ins_twice, ins_of_batch))


def refusal_of_jit(case, use, n, cotangents):
    """What `jax.jit` raises for the function with arguments of the types that their specs say; None for nothing."""
    specs = [spec or P() for spec in case.in_specs]

    def typed(*args):
        return case.program(*map(partjit.with_sharding_constraint, args, specs))

    try:
        with jax.set_mesh(case.mesh):
            use(jax.jit(typed), ours.placed_args(case), n, cotangents)
    except Exception as error:
        return type(error)
    return None


def hold(case, use, plain_use, specs, *, derived, is_batch=False):
    """Asserts that both uses of a case give the same, and that the results of the first are as `specs` says."""
    n = len(case.program.shapes)
    args = ours.numpy_args(case)
    cotangents = tangents([np.empty(shape) for shape in case.program.result_shapes])
    expected = jitted(plain_use)(case.program.plain, args, n, cotangents)
    try:
        with ours.enter(case):
            results = use(ours.to_pjit(case), ours.placed_args(case), n, cotangents)
    except Exception as error:
        if AxisType.Explicit in case.mesh.axis_types and type(error) is refusal_of_jit(case, use, n, cotangents):
            saw("a refusal")
            return
        raise
    close(results, expected)
    leaves = jax.tree.leaves(results)
    values = [np.asarray(leaf) for leaf in leaves]  # what is asked of a jax.Array compiles a program
    saw("a derivative that is not zero", when=derived and any(np.any(value) for value in values))
    if not has_checked_specs(specs, AxisType.Explicit in case.mesh.axis_types):
        return
    for result, value, spec in zip(leaves, values, specs(case.in_specs[:n], case.out_specs), strict=True):
        # Where nothing depends on what is differentiated, the zeros are jax's own: no program made them. Likewise the
        # batch of a value that does not depend on the example.
        if not (derived and not np.any(value)) and not (is_batch and np.all(value == value[:1])):
            assert_laid_out(result, case.mesh, spec)
            saw("a partitioned result that is where its spec says", when=is_partitioned(case.mesh, spec))


@pytest.mark.soak
@pytest.mark.parametrize("name", LAWS)
def test_a_partitioned_function_means_what_the_plain_one_does_and_is_where_it_says(name):
    check(name, 2)


def test_rules_that_jax_traces_later_find_the_mesh_of_the_program():
    mesh = partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    sharding = NamedSharding(mesh, P("x"))

    def fun(x):
        inner = pjit(lambda x: partjit.with_sharding_constraint(jnp.sin(x), P("y")), P("y"), P(("x", "y")))
        custom = jax.custom_jvp(inner)
        custom.defjvp(lambda primals, tangents: jax.jvp(inner, primals, tangents))
        other = jax.custom_vjp(inner)
        other.defvjp(lambda x: (inner(x), x), lambda x, ct: (inner(ct) * inner(x),))
        return custom(x), other(x)

    function = pjit(fun, in_shardings=sharding, out_shardings=sharding)
    x = np.linspace(-1, 1, 8, dtype=np.float32)
    ones = np.ones_like(x)

    def gradient(x, *cotangents):
        return jax.vjp(function, x)[1](cotangents)[0]

    both = gradient(x, ones, ones)
    close(both, np.cos(x) + np.float32(np.sin(1)) * np.sin(x))
    assert_laid_out(both, mesh, P("x"))
    batch = jax.vmap(lambda x: gradient(x, ones, 0 * ones))(np.stack([x, -x]))
    close(batch, np.cos(np.stack([x, x])))


# A mesh with Explicit axes: jax's own operations outside of the program see the axes only where the mesh is ambient.


@pytest.mark.soak
@pytest.mark.parametrize("name", LAWS if SCALE > 1 else ["call", "grad", "vmap", "jit of grad"])
def test_the_same_on_meshes_with_explicit_axes(name):
    check(name, 1, explicit=True, ambiences=("with", "partjit.set_mesh", "jax.set_mesh"))


@pytest.mark.soak
@pytest.mark.parametrize("name", LAWS if SCALE > 1 else ["call", "jit"])
def test_the_same_on_meshes_with_explicit_axes_that_only_the_program_knows(name):
    check(name, 1, explicit=True, ambiences=("named",))


@pytest.mark.soak
@pytest.mark.parametrize("name", ["vmap", "vmap of grad", "grad of vmap"])
def test_spmd_axis_name_divides_the_batch_and_changes_no_value(name):
    vmap, use = {"vmap": (of_batch, call), "vmap of grad": (mapped, pullback), "grad of vmap": (of_batch, pullback)}[
        name
    ]

    @sees(*REAL, "an axis for the batch", "a partitioned result that is where its spec says")
    @of_its_own(name)
    @examples(2)
    @given(ours.cases(spmd=True, **SMALL), st.integers(1, 2))
    def holds(case, rows):
        size = rows * case.mesh.shape[case.spmd]

        def specs(in_specs, out_specs):
            return [batched(spec, case.spmd) for spec in (out_specs if use is call else in_specs)]

        partitioned = vmap(use, size, spmd_axis_name=case.spmd)
        hold(case, partitioned, vmap(use, size), specs, derived=use is pullback, is_batch=True)

    holds()


@sees("two mesh axes", "a partitioned argument", "a value of several dimensions")
@examples(3)
@given(ours.cases(max_steps=1, depth=1), st.data())
def test_an_spmd_axis_that_a_spec_already_uses_is_always_an_error(case, data):
    used = sorted({axis for spec in case.in_specs for axes in axes_of(spec, 3) for axis in axes})
    assume(used)
    axis = data.draw(st.sampled_from(used))
    size = case.mesh.shape[axis]
    with ours.enter(case), pytest.raises(ShardingError, match=r"spmd_axis_name.*already uses"):
        jax.vmap(ours.to_pjit(case), spmd_axis_name=axis)(*stacked(ours.numpy_args(case), size))


# One function, any sequence of calls


CALL_MESHES = [(4, 2), (2, 4), (2, 2), (1, 8), (8, 1), (1, 1)]


def refused_calls(x):
    """Arguments that no call takes, and what they raise, for a function of an array whose rows are divided."""
    return {
        "no array": ((object(),), TypeError),
        "text": (("text",), TypeError),
        "too few": ((), TypeError),
        "too many": ((x, x), (TypeError, ValueError)),
        "a scalar": ((1.0,), ShardingError),
        "a list": (([x, 1.0],), (TypeError, ValueError)),
        "a row too many": ((np.concatenate([x, x[:1]]),), ShardingError),
    }


@sees("two mesh axes", "different examples")
@examples(6)
@given(meshes(), st.lists(st.sampled_from(sorted(refused_calls(np.ones((1, 1))))), min_size=1, max_size=4))
def test_calls_that_are_refused_do_not_disturb_the_others(mesh, refused):
    assume(mesh.size > 1)
    spec = P(mesh.axis_names)
    x = np.arange(6 * mesh.size, dtype=np.float32).reshape(2 * mesh.size, 3)
    traces = []

    def double(x):
        traces.append(1)
        return x * 2

    function = pjit(double, spec, spec)
    with mesh:
        for name in [*refused, *refused]:
            args, kind = refused_calls(x)[name]
            with pytest.raises(kind):
                function(*args)
            before = len(traces)
            out = function(x)
            np.testing.assert_array_equal(out, 2 * x)
            assert_laid_out(out, mesh, spec)
        assert len(traces) == before  # the good call has been traced once, the first time round


@st.composite
def call_sequences(draw):
    """Meshes called `x` and `y`, and calls: which mesh, and where each of two arguments is."""
    grids = [
        np.array(jax.devices())[draw(st.permutations(range(8)))[: math.prod(shape)]].reshape(shape)
        for shape in draw(st.lists(st.sampled_from(CALL_MESHES), min_size=1, max_size=2))
    ]
    known = [partjit.Mesh(grid, ("x", "y")) for grid in grids]
    place = st.one_of(
        st.sampled_from(["numpy", "uncommitted", "right", "permuted"]), partition_specs(mesh=known[0], shape=(8, 8))
    )
    call = st.tuples(st.sampled_from(known), place, place, st.integers(0, 99))
    return draw(st.lists(call, min_size=4, max_size=8))


def placed(value, place, mesh, spec):
    """The value where `place` says; a spec is a place too."""
    if place == "numpy":
        return value
    if place == "uncommitted":
        return jnp.asarray(value)
    if place == "permuted":  # the same devices, another grid and order
        other = jax.sharding.Mesh(mesh.devices.reshape(-1)[::-1], "other")
        return jax.device_put(value, NamedSharding(other, P("other")))
    return jax.device_put(value, NamedSharding(mesh, (spec if place == "right" else place) or P()))


@sees("two mesh axes", "a partitioned value", "a partitioned result", "two meshes", "an argument elsewhere")
@examples(6, 4)
@given(call_sequences(), st.data())
def test_calls_under_any_meshes_with_arguments_anywhere_do_not_disturb_each_other(calls, data):
    all_axes = partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    spec = partition_specs(mesh=all_axes, shape=(8, 8))
    in_specs, out_spec, inner = (data.draw(spec), data.draw(spec)), data.draw(spec), data.draw(spec)

    def fun(a, b):
        return jnp.sin(partjit.with_sharding_constraint(a, inner)) - b, a.sum(axis=0)

    function = pjit(fun, in_specs, (out_spec, None))
    saw("a partitioned result", when=any(is_partitioned(mesh, out_spec) for mesh, *_ in calls))
    saw("an argument elsewhere", when=any(isinstance(place, P) for _, *places, _ in calls for place in places))
    for mesh, place_a, place_b, number in calls:
        a, b = np.random.default_rng(number).uniform(-1, 1, (2, 8, 8)).astype(np.float32)
        with mesh:
            out, total = function(placed(a, place_a, mesh, in_specs[0]), placed(b, place_b, mesh, in_specs[1]))
        np.testing.assert_allclose(out, np.sin(a) - b, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(total, a.sum(axis=0), rtol=1e-5, atol=1e-5)
        assert_laid_out(out, mesh, out_spec)
        assert_laid_out(total, mesh, None)


# Specs are kept, or it is an error


def fits(mesh, spec, shape):
    return all(
        size % math.prod(mesh.shape[axis] for axis in axes) == 0
        for size, axes in zip(shape, axes_of(spec, len(shape)), strict=True)
    )


@st.composite
def constrained(draw):
    mesh = draw(meshes())
    shape = draw(shapes())
    return mesh, shape, draw(partition_specs(mesh=mesh, shape=shape, divisible=False))


@sees("two mesh axes", "a partitioned value", "a constraint that fits", "an uneven constraint")
@examples(8)
@given(constrained())
def test_a_constraint_is_where_it_says_and_an_uneven_one_keeps_the_value(example):
    mesh, shape, spec = example
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)

    def fun(x):
        return partjit.with_sharding_constraint(x * 2, spec)

    with mesh:
        saw("a constraint that fits" if fits(mesh, spec, shape) else "an uneven constraint")
        if fits(mesh, spec, shape):
            assert_laid_out(partjit.with_sharding_constraint(x, spec), mesh, spec)
            assert_laid_out(pjit(fun, in_axis_resources=None)(x), mesh, spec)
        else:
            with pytest.raises(ShardingError, match="divisible"):
                partjit.with_sharding_constraint(x, spec)
        out = pjit(fun, in_axis_resources=None, out_axis_resources=None)(x)
    np.testing.assert_array_equal(out, 2 * x)
    assert_laid_out(out, mesh, None)


@st.composite
def any_specs(draw, mesh, shape):
    """Specs as a careless user writes them: of any length, with axes that do not exist or do not divide."""
    names = [*mesh.axis_names, "nowhere"]
    used = draw(st.lists(st.sampled_from(names), unique=True, max_size=len(names)))
    entries = [[] for _ in range(draw(st.integers(0, len(shape) + (draw(st.integers(0, 5)) == 0))))]
    for axis in used:
        if entries and (axis != "nowhere" or draw(st.integers(0, 3)) == 0):
            draw(st.sampled_from(entries)).append(axis)
    return P(*(tuple(axes) or None for axes in entries))


@st.composite
def careless_calls(draw):
    mesh = draw(meshes())
    keys = draw(st.lists(st.sampled_from(["w", "b", "scale"]), unique=True, min_size=1))
    values = {key: draw(shapes()) for key in keys}, (draw(shapes()),)
    specs = [jax.tree.map(lambda shape: draw(any_specs(mesh, shape)), values, is_leaf=is_shape) for _ in range(2)]
    return mesh, values, *specs


def is_shape(value):
    return isinstance(value, tuple) and all(isinstance(size, int) for size in value)


def wrong(what, root, mesh, shapes, specs):
    """The failures of a tree of values, from the definition: (kind of value, path, reason, ...)."""
    found = set()
    flat_specs = jax.tree.leaves(specs)
    for (path, shape), spec in zip(
        jax.tree_util.tree_leaves_with_path(shapes, is_leaf=is_shape), flat_specs, strict=True
    ):
        where = what, root[path[0].idx] + jax.tree_util.keystr(path[1:])
        written = axes_of(spec, max(len(spec), len(shape)))
        undefined = {axis for axes in written for axis in axes} - set(mesh.axis_names)
        if len(spec) > len(shape):
            found.add((*where, "rank", len(spec), len(shape)))
        found |= {(*where, "undefined", axis) for axis in undefined}
        for dim, (size, axes) in enumerate(zip(shape, written, strict=False)):
            divisor = math.prod(mesh.shape.get(axis, 0) for axis in axes)
            if divisor and size % divisor:
                found.add((*where, "divisible", dim, divisor, size))
    return found


def listed(message):
    """The failures a message lists, in the same form."""
    found = set()
    for what, path, reason in re.findall(
        r"^One of pjit (arguments|outputs), (\S+) \(float32\[.*\]\), (.*)$", message, re.M
    ):
        if match := re.search(r"rank of at least (\d+), but it is (\d+)", reason):
            found.add((what, path, "rank", *map(int, match.groups())))
        elif match := re.search(r"resource axis (\w+) is undefined", reason):
            found.add((what, path, "undefined", match[1]))
        elif match := re.search(r"dimension (\d+) should be divisible by (\d+), but it is equal to (\d+)", reason):
            found.add((what, path, "divisible", *map(int, match.groups())))
    return found


@sees("two mesh axes", "a partitioned value", "several failures", "no failure")
@examples(20)
@given(careless_calls())
def test_what_cannot_be_kept_is_an_error_that_lists_exactly_what_is_wrong(example):
    mesh, shapes, in_specs, out_specs = example
    args = jax.tree.map(lambda shape: np.ones(shape, np.float32), shapes, is_leaf=is_shape)
    ran = []

    def fun(params, rest):
        jax.debug.callback(lambda: ran.append(1))
        return params, rest

    function = pjit(fun, tuple(in_specs), tuple(out_specs))
    expected = wrong("arguments", ["params", "rest"], mesh, shapes, in_specs)
    expected |= wrong("outputs", ["result[0]", "result[1]"], mesh, shapes, out_specs)
    saw(["no failure", "one failure", "several failures"][min(len(expected), 2)])
    with mesh:
        if expected:
            for _ in range(2):
                with pytest.raises(ShardingError) as caught:
                    function(*args)
                assert listed(str(caught.value)) == expected
                count = len(expected)
                first_line, *_ = str(caught.value).splitlines()
                assert first_line.endswith(f"for {count} reasons:") == (count > 1)
            assert not ran
        else:
            for result, spec in zip(jax.tree.leaves(function(*args)), jax.tree.leaves(out_specs), strict=True):
                assert_laid_out(result, mesh, spec)


# Errors are the user's


class Custom(Exception):
    """An exception whose constructor does not take its `args`."""

    def __init__(self, a, *, b):
        super().__init__(a, b)


class Abort(BaseException):
    """Not an Exception, as KeyboardInterrupt is not."""


EXCEPTIONS = [
    lambda: ValueError("wrong", 3),
    lambda: TypeError("of some type"),
    lambda: RuntimeError(),
    lambda: KeyError("key"),
    lambda: ZeroDivisionError("division"),
    lambda: StopIteration(5),
    lambda: AssertionError(),
    lambda: ShardingError("the user's own"),
    lambda: Custom(1, b=2),
    lambda: Abort("now"),
    lambda: KeyboardInterrupt(),
]

WHERE = {
    "at the top": lambda blame, x: blame(x),
    "in a nested pjit": lambda blame, x: pjit(blame, None, None)(x),
    "in a jit": lambda blame, x: jax.jit(lambda x: blame(x))(x),
    "in a pjit in a scan": lambda blame, x: jax.lax.scan(
        lambda c, _: (pjit(blame, None, None)(c), None), x, None, length=2
    )[0],
    "in a branch": lambda blame, x: jax.lax.cond(x.sum() > 0, blame, lambda x: x, x),
    "in a while": lambda blame, x: jax.lax.fori_loop(0, 2, lambda _, c: blame(c), x),
    "in a checkpoint": lambda blame, x: jax.checkpoint(blame)(x),
    "in a vmap of a pjit": lambda blame, x: jax.vmap(pjit(blame, None, None))(x),
    "in a grad": lambda blame, x: jax.grad(lambda x: blame(x).sum())(x),
    "in a callback of a rule": lambda blame, x: with_rule(blame)(x),
}


def exception_of(function):
    try:
        function()
    except BaseException as error:
        return error
    return None


def with_rule(blame):
    identity = jax.custom_jvp(lambda x: jnp.sin(x))
    identity.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), blame(tangents[0])))
    return lambda x: jax.jvp(identity, (x,), (x,))[1]


ENTRIES = {
    "call": lambda f, x: f(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: jax.vmap(f)(np.stack([x, x])),
    "scan": lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "lower": lambda f, x: f.lower(x),
    "trace": lambda f, x: f.trace(x),
    "eval_shape": lambda f, x: f.eval_shape(x),
    "make_jaxpr": lambda f, x: jax.make_jaxpr(f)(x),
}


@sees("two mesh axes", "different examples", "several failures")
@examples(20, 10)
@given(
    meshes(),
    st.sampled_from(sorted(WHERE)),
    st.sampled_from(sorted(ENTRIES)),
    st.sampled_from(EXCEPTIONS),
    st.integers(1, 3),
)
def test_an_exception_comes_out_as_it_is_and_the_next_call_works(mesh, where, entry, make, failures):
    traces, raised = [], []
    saw("several failures", when=failures > 1)

    def blame(x):
        traces.append(1)
        if len(raised) < failures:
            raised.append(make())
            raise raised[-1]
        return 2 * x

    function = pjit(lambda x: WHERE[where](blame, x), P(mesh.axis_names[0]), P(mesh.axis_names[0]))
    x = np.arange(2 * math.prod(mesh.devices.shape), dtype=np.float32).reshape(-1, 1) + 1
    with mesh:
        for _ in range(failures):
            expected = make()
            caught = exception_of(lambda: ENTRIES[entry](function, x))
            assert caught is raised[-1]
            assert type(caught) is type(expected)
            assert caught.args == expected.args
            assert "blame" in [frame.name for frame in traceback.extract_tb(caught.__traceback__)]
            assert ambient_mesh() == mesh
            assert jax.sharding.get_abstract_mesh().empty
        assert len(traces) == failures  # each attempt traced anew and stopped there
        out = function(x)
        count = len(traces)
        again = function(x)
        assert len(traces) == count > failures
    factor = {"in a pjit in a scan": 4, "in a while": 4}.get(where, 2)
    expected = np.full_like(x, 2) if where == "in a grad" else factor * x
    for result in (out, again):
        np.testing.assert_array_equal(result, expected)
        assert_laid_out(result, mesh, P(mesh.axis_names[0]))
    other = partjit.Mesh(jax.devices()[:1], mesh.axis_names[0])
    with other:  # no trace of the failed ones is left in the thread
        assert_laid_out(function(x), other, P(mesh.axis_names[0]))
