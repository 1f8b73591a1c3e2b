"""The collectives that shardings ask for, without compiling: those that the compiled program has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import partjit
from partjit import P, pjit, with_sharding_constraint
from partjit.inspect import explain
from partjit.testing import meshes, partition_specs
from tests.census import saw, sees
from tests.effort import EVERYTHING

DATA, MODEL = ("data",), ("model",)


@pytest.fixture(scope="module")
def mesh():
    return partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def matrix(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def report_of(fun, in_specs, *args, mesh, out_specs=None):
    return explain(pjit(fun, in_shardings=in_specs, out_shardings=out_specs), *args, mesh=mesh, compiled=True)


CASES = {
    "sum": (lambda x: x.sum(0), P("data"), P(), {("all-reduce", DATA): 1}),
    "product": (lambda x: x @ x.T, P(None, "model"), P(), {("all-reduce", MODEL): 1}),
    "gather": (lambda x: jnp.sin(x), P("data"), P(), {("all-gather", DATA): 1}),
    "slice": (lambda x: jnp.sin(x), P(), P("data"), {}),
    "transposed": (lambda x: jnp.sin(x), P("data"), P(None, "data"), {("all-to-all", DATA): 1}),
    "both axes of a dimension": (lambda x: x.sum(), P(("data", "model")), P(), {("all-reduce", DATA + MODEL): 1}),
    "two dimensions": (
        lambda x: jnp.einsum("ij,ij->", x, jnp.sin(x)),
        P("data", "model"),
        P(),
        {("all-reduce", DATA): 1, ("all-reduce", MODEL): 1},
    ),
    "used three times": (
        lambda x: (jnp.sin(x) @ x, jnp.cos(x) @ x, jnp.tanh(x) @ x),
        P("data"),
        P("data"),
        {("all-gather", DATA): 1},
    ),
    "unused": (lambda x: (x.sum(0), x)[1], P("data"), P("data"), {}),
    "maximum": (lambda x: jax.nn.softmax(x), P(None, "data"), P(None, "data"), {("all-reduce", DATA): 2}),
    "a branch that a constant takes": (
        lambda x: jax.lax.cond(jax.lax.gt(1, 0), lambda x: x @ x.T, lambda x: jnp.sort(x, 1), x),
        P(None, "model"),
        P(),
        {("all-reduce", MODEL): 1},
    ),
}


def told(collectives):
    """What collectives move; the compiled program has the operand of an all-to-all in parts."""
    numbers = [
        (c.kind, c.axes, c.groups, c.group_size, c.operand_bytes, c.result_bytes, c.sent, c.times, c.bytes_moved)
        for c in collectives
    ]
    shapes = [(c.operand, c.result) for c in collectives if c.kind != "all-to-all"]
    return sorted(numbers), sorted(shapes)


@pytest.mark.parametrize("case", CASES)
def test_prediction_and_compiled_program_agree(case, mesh):
    fun, in_specs, out_specs, expected = CASES[case]
    report = report_of(fun, in_specs, matrix(8, 8), mesh=mesh, out_specs=out_specs)
    assert dict(report.predicted.counts) == expected
    assert dict(report.collectives.counts) == expected
    assert report.predicted.bytes_per_step == report.collectives.bytes_per_step
    assert told(report.predicted) == told(report.collectives)


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        (P("x", None, ("z", "y")), P("x", "z"), ["all-gather"]),
        (P("x", None, ("z", "y")), P("z", "x"), ["all-gather", "collective-permute"]),
        (P("x", None, ("y", "z")), P("y", "z"), ["all-gather", "collective-permute"]),
        (P("x", "y", "z"), P(("x", "z")), ["all-gather", "all-to-all"]),
    ],
)
def test_devices_that_have_equal_shards_of_a_dimension_reshard_the_others_among_themselves(before, after, kinds):
    mesh = partjit.Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("x", "y", "z"))
    report = report_of(jnp.sin, before, jnp.ones((32, 16, 8)), mesh=mesh, out_specs=after)
    assert sorted(c.kind for c in report.predicted) == kinds
    assert told(report.predicted) == told(report.collectives)


@sees("two mesh axes", "a partitioned value", "a collective", "no collective")
@given(st.data())
@settings(deadline=None, max_examples=20 if EVERYTHING else 10)
def test_the_product_of_two_matrices_moves_what_its_specs_say(data):
    """Kind, axes, bytes: from the definition of a spec. The contracted dimension is divided alike in both."""
    mesh = data.draw(meshes(mesh_shapes=[(4, 2), (2, 2, 2), (8,)]))
    size = 16
    left = data.draw(partition_specs(mesh=mesh, shape=(size, size)))
    entries = [*(left or ()), None, None][:2]
    report = explain(
        pjit(lambda x, y: x @ y, in_shardings=(left, P(entries[1])), out_shardings=P(entries[0])),
        *[matrix(size, size)] * 2,
        mesh=mesh,
    )
    contracted = (entries[1],) if isinstance(entries[1], str) else tuple(entries[1] or ())
    axes = tuple(name for name in mesh.axis_names if name in contracted and mesh.shape[name] > 1)
    rows = (entries[0],) if isinstance(entries[0], str) else tuple(entries[0] or ())
    held = size * size * 4 // int(np.prod([mesh.shape[name] for name in rows]))
    n = int(np.prod([mesh.shape[name] for name in axes]))
    found = [(c.kind, c.axes, c.group_size, c.operand_bytes, c.bytes_moved) for c in report.collectives]
    saw("a collective" if axes else "no collective")
    assert found == ([("all-reduce", axes, n, held, 2 * (n - 1) / n * held)] if axes else [])


@pytest.mark.parametrize(("shape", "split"), [((8,), (2, 4)), ((8,), (4, 2)), ((4, 2), (2, 2))])
def test_parts_of_an_axis_change_places(shape, split):
    mesh = partjit.Mesh(np.array(jax.devices()).reshape(shape), ("data", "model")[: len(shape)])

    def fun(x):
        return jnp.sin(x).reshape(*split, 16).transpose(1, 0, 2).reshape(x.shape)

    report = report_of(fun, P("data"), matrix(shape[0], 16), mesh=mesh, out_specs=P("data"))
    # Row k of the result is row `came_from[k]` of the argument, and each group of devices along `data` has one row.
    came_from = np.arange(shape[0]).reshape(split).T.ravel()
    devices = np.arange(8).reshape(shape[0], -1)
    pairs = {
        (int(a), int(b))
        for old, new in zip(devices[came_from], devices, strict=True)
        for a, b in zip(old, new, strict=True)
    }
    moving = {(a, b) for a, b in pairs if a != b}
    for (found,) in (report.predicted, report.collectives):
        assert (found.kind, found.axes, found.operand_bytes) == ("collective-permute", DATA, 16 * 4)
        assert {pair for pair in found.groups if pair[0] != pair[1]} == moving
        assert found.sent == len(moving) / 8


def test_loops_count_as_often_as_they_turn(mesh):
    def fun(x):
        def inner(c, _):
            return jnp.sin(with_sharding_constraint(c @ c.T, P("data"))), None

        def outer(c, _):
            return jax.lax.scan(inner, c, None, length=3)[0], None

        return jax.lax.scan(outer, x, None, length=5)[0]

    report = report_of(fun, P("data"), matrix(8, 8), mesh=mesh, out_specs=P("data"))
    assert [(c.kind, c.axes, c.times) for c in report.predicted] == [("all-gather", DATA, 15)]
    assert [(c.kind, c.axes, c.times) for c in report.collectives] == [("all-gather", DATA, 15)]


def test_loops_that_nobody_counts_are_said_to_be_so(mesh):
    def fun(x):
        return jax.lax.while_loop(lambda c: c[0, 0] < 1, lambda c: c + c.sum(0)[None], x)

    report = report_of(fun, P("data"), matrix(8, 8), mesh=mesh, out_specs=P("data"))
    for collectives in (report.predicted, report.collectives):
        in_body = [c for c in collectives if c.operand_bytes == 32]
        assert [(c.times, c.is_exact) for c in in_body] == [(None, False)]


@pytest.mark.parametrize("name", ["psum", "all_gather", "psum_scatter", "all_to_all", "ppermute"])
def test_what_a_shard_map_says_is_told(name, mesh):
    bodies = {
        "psum": lambda x: jax.lax.psum(x, "data"),
        "all_gather": lambda x: jax.lax.all_gather(x, "data", tiled=True),
        "psum_scatter": lambda x: jax.lax.psum_scatter(x, "data", tiled=True),
        "all_to_all": lambda x: jax.lax.all_to_all(x, "data", 1, 0, tiled=True),
        "ppermute": lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 2), (2, 3)]),
    }

    def fun(x):
        return jax.shard_map(bodies[name], mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)

    struct = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    report = explain(pjit(fun, out_shardings=P("data")), struct, mesh=mesh, compiled=True)
    assert len(report.predicted) == 1
    assert told(report.predicted) == told(report.collectives)


@pytest.mark.parametrize("name", ["psum", "ppermute", "all_gather", "psum_scatter"])
def test_a_shard_map_over_some_axes_communicates_shards_over_the_others(name, mesh):
    bodies = {
        "psum": lambda x: jax.lax.psum(x, "data"),
        "ppermute": lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 2), (2, 3), (3, 0)]),
        "all_gather": lambda x: jax.lax.all_gather(x, "data", tiled=True),
        "psum_scatter": lambda x: jax.lax.psum_scatter(x, "data", tiled=True),
    }

    def fun(x, w):
        own = functools.partial(jax.shard_map, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False)
        return own(lambda x, w: bodies[name](x @ w), mesh=mesh, axis_names={"data"})(x, w)

    specs = P("data"), P(None, "model")
    report = explain(pjit(fun, in_shardings=specs), matrix(32, 8), matrix(8, 16), mesh=mesh, compiled=True)
    assert told(report.predicted) == told(report.collectives)
    # One instance of the body for each position along `data`.
    assert 1 <= report.flops.total / (2 * 32 * 8 * 16) < 1.1


@pytest.mark.parametrize("dtype", ["float16", "complex64", "int8", "uint16", "bool", "int4"])
def test_arrays_of_every_type_have_their_names_and_bytes(dtype, mesh):
    struct = jax.ShapeDtypeStruct((16, 8), dtype)
    report = report_of(lambda x: x, P("data"), struct, mesh=mesh, out_specs=P())
    numbers, shapes = told(report.predicted)
    compiled_numbers, compiled_shapes = told(report.collectives)
    assert len(numbers) == 1
    assert numbers == compiled_numbers
    # On the CPU a byte has one such number.
    assert shapes == ([("s4[4,8]", "s4[16,8]")] if dtype == "int4" else compiled_shapes)


def test_what_is_recomputed_is_moved_again(mesh):
    def loss(w, x, checkpoint=jax.checkpoint):
        def layer(x):
            return jnp.sin(with_sharding_constraint(jnp.sin(x @ w), P("data")))

        return checkpoint(layer)(x).sum()

    specs = P("model"), P("data", "model")
    args = matrix(8, 8), matrix(16, 8)
    without = functools.partial(loss, checkpoint=lambda fun: fun)
    report, kept = (report_of(jax.value_and_grad(each), specs, *args, mesh=mesh) for each in (loss, without))
    # What XLA does on the CPU is not asked: there it takes the barrier for nothing when it looks for equal collectives.
    assert [each.predicted.counts["all-reduce", MODEL] for each in (report, kept)] == [2, 1]


def test_every_collective_comes_from_its_equation(mesh):
    def fun(x, w):
        y = jnp.sin(x @ w)  # line one
        return y.sum()  # line two

    report = report_of(fun, (P(None, "data"), P("data", "model")), matrix(8, 8), matrix(8, 8), mesh=mesh, out_specs=P())
    first = fun.__code__.co_firstlineno
    lines = [(c.axes, c.site[1] - first, c.site[2]) for c in report.predicted]
    assert sorted(lines) == [(DATA, 1, "fun"), (MODEL, 2, "fun")]
    assert sorted((c.axes, c.site[1] - first) for c in report.collectives) == [(DATA, 1), (MODEL, 2)]
    for collective in report.predicted:
        assert report.equations[collective.tags[-1]].primitive in ("dot_general", "reduce_sum")


def test_constants_that_a_loop_needs_are_not_gathered(mesh):
    def loss(w, x):
        step = lambda c, row: (jax.nn.softplus(c @ w + row), None)  # noqa: E731
        return jax.lax.scan(step, jnp.zeros((16, 32)), x)[0].sum()

    specs = P(None, "model"), P(None, "data")
    report = report_of(jax.grad(loss), specs, matrix(32, 32), matrix(10, 16, 32), mesh=mesh, out_specs=specs[0])
    assert told(report.predicted) == told(report.collectives)
    assert report.predicted.bytes_per_step < 50_000


def test_what_one_device_gets_from_a_callback_is_marked(mesh):
    def fun(x):
        return x + jax.pure_callback(lambda: np.ones((8, 8), np.float32), matrix(8, 8))

    report = report_of(fun, P("data"), matrix(8, 8), mesh=mesh, out_specs=P("data"))
    assert not report.predicted
    (marked,) = report.predicted.unknown
    assert report.collectives.bytes_per_step <= marked.bytes_at_most


@pytest.mark.parametrize("spec", [P(), P("data"), P("data", "model"), P(None, ("data", "model"))])
def test_what_one_device_needs_for_a_callback_is_gathered(spec, mesh):
    def fun(x):
        return jax.pure_callback(np.asarray, matrix(8, 8), x) + 1

    report = report_of(fun, spec, matrix(8, 8), mesh=mesh)
    (result,) = report.predicted.unknown
    compiled = [one for one in report.collectives if one.kind != "all-reduce"]
    assert sorted((one.kind, one.axes) for one in report.predicted) == sorted((one.kind, one.axes) for one in compiled)
    gathered = report.predicted.bytes_per_step
    assert gathered <= report.collectives.bytes_per_step <= gathered + result.bytes_at_most


def test_what_cpus_send_in_a_wider_type_is_marked(mesh):
    narrow = [jax.ShapeDtypeStruct((16, 16), jnp.bfloat16)] * 2
    specs = P(None, "data"), P("data")
    report = report_of(lambda x, w: (x @ w, x[::2] @ w), specs, *narrow, mesh=mesh)
    assert report.predicted.counts == report.collectives.counts
    assert report.predicted.bytes_per_step_at_most == report.collectives.bytes_per_step
    expected = "  2 x all-reduce of bf16, which CPUs send in a type twice as wide: at most "
    assert report.predicted.to_text().splitlines()[-1].startswith(expected)


def test_the_bound_of_what_is_not_predicted_is_that_of_the_wider_type(mesh):
    def fun(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    bounds = []
    for dtype in (jnp.bfloat16, jnp.float32):
        structs = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((4, 8, 8, 4), (3, 3, 4, 8))]
        step = pjit(fun, in_shardings=(P(None, "data"), P(None, None, "model")))
        (one,) = explain(step, *structs, mesh=mesh).predicted.unknown
        bounds.append(one.bytes_at_most)
    assert bounds[0] == bounds[1]


def in_while(x):
    def body(c):
        step = lambda c, _: (jnp.sin(with_sharding_constraint(c @ c.T, P("data"))), None)  # noqa: E731
        return jax.lax.scan(step, c, None, length=10)[0]

    return jax.lax.while_loop(lambda c: c.sum() < 1, body, x)


def test_loops_in_a_loop_of_unknown_trip_count_count_per_iteration(mesh):
    report = report_of(in_while, P("data"), matrix(8, 8), mesh=mesh, out_specs=P("data"))
    line = f"test_predicted.py:{in_while.__code__.co_firstlineno + 5}"
    for collectives in (report.predicted, report.collectives):
        (gather,) = [c for c in collectives if c.kind == "all-gather"]
        assert (gather.times, gather.is_exact, gather.executions) == (None, False, 10)
        assert gather.shown_times == f"10 per iteration at {line}"
        assert collectives.bytes_per_step >= 10 * gather.bytes_moved
        assert f"10 per iteration at {line}" in str(collectives)
    per = report.as_data()["collectives"]["predicted"][0]["per"]
    assert (per["times"] in (1, 10), per["loops"][0]["line"]) == (True, in_while.__code__.co_firstlineno + 5)


def test_loops_that_a_primitive_is_lowered_to_have_their_trip_counts(mesh):
    """The permutation of an LU factorization is made by one, of which the jaxpr knows nothing."""
    report = report_of(lambda x: jnp.linalg.inv(x[:12]), P(("data", "model")), matrix(16, 4, 4), mesh=mesh)
    times = [sorted(one.executions for one in some) for some in (report.predicted, report.collectives)]
    assert times[0] == times[1]
    assert times[0][-1] == 4


def test_unknown_trip_counts_can_be_given(mesh):
    fun = pjit(in_while, in_shardings=P("data"), out_shardings=P("data"))
    line = f"test_predicted.py:{in_while.__code__.co_firstlineno + 5}"
    report = explain(fun, matrix(8, 8), mesh=mesh, compiled=True, iterations={line: 7})
    for collectives in (report.predicted, report.collectives):
        assert [c.times for c in collectives if c.kind == "all-gather"] == [70]
    with pytest.raises(ValueError, match=rf"iterations names a\.py:1, where no while_loop is; there are {line}"):
        explain(fun, matrix(8, 8), mesh=mesh, iterations={"a.py:1": 7})
    with pytest.raises(TypeError, match="iterations must be a dict from lines of loops"):
        explain(fun, matrix(8, 8), mesh=mesh, iterations=7)


@pytest.mark.parametrize("spec", [P("data"), P(None, "model")])
def test_what_is_the_same_in_every_iteration_moves_once(spec, mesh):
    def fun(w, x):
        def inner(c, _):
            return jnp.tanh(c @ with_sharding_constraint(jnp.sin(w), P())), None

        return jax.lax.scan(lambda c, _: (jax.lax.scan(inner, c, None, length=3)[0], None), x, None, length=5)[0]

    report = report_of(fun, (spec, P("data")), *[matrix(16, 16)] * 2, mesh=mesh, out_specs=P("data"))
    (axes,) = {c.axes for c in report.predicted}
    for collectives in (report.predicted, report.collectives):
        assert [(c.kind, c.axes, c.times) for c in collectives] == [("all-gather", axes, 1)]


def mixed(params, x, y):
    """Perceptrons over tokens and over features, with norms before them."""

    def dense(x, p):
        return x @ p["w"] + p["b"]

    def normed(x, p):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * p["w"] + p["b"]

    x = dense(x, params["in"])
    tokens = normed(x, params["first"]).swapaxes(1, 2)
    x = x + dense(jnp.tanh(dense(tokens, params["up"])), params["down"]).swapaxes(1, 2)
    x = x + dense(jnp.tanh(dense(normed(x, params["second"]), params["wide"])), params["narrow"])
    return jnp.mean((dense(x.mean(1), params["out"]) - y) ** 2)


def test_a_step_with_fully_sharded_parameters_is_predicted_as_compiled(mesh):
    """Which of the conflicting shardings wins depends on the order of the operations; equal gathers are not merged."""
    sizes = {"in": (12, 32), "up": (16, 32), "down": (32, 16), "wide": (32, 64), "narrow": (64, 32), "out": (32, 16)}
    params = {name: {"w": matrix(*shape), "b": matrix(shape[-1])} for name, shape in sizes.items()}
    params |= {name: {"w": matrix(32), "b": matrix(32)} for name in ("first", "second")}
    batch = P(("data", "model"))
    specs = jax.tree.map(lambda x: P(*[None] * int(np.argmax(x.shape)), ("data", "model")), params)

    def step(params, x, y):
        value, grads = jax.value_and_grad(mixed)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    made = pjit(step, in_shardings=(specs, batch, batch), out_shardings=(specs, None))
    with jax.numpy_rank_promotion("allow"):
        report = explain(made, params, matrix(16, 16, 12), matrix(16, 16), mesh=mesh, compiled=True)
    assert report.predicted.unknown == ()
    assert report.predicted.counts == report.collectives.counts
    assert report.predicted.bytes_per_step == report.collectives.bytes_per_step


def unused(x, w):
    """jax leaves some of it out, with what it would move and how it would shard the rest."""
    rolled = jnp.roll(x, 1, 1)
    scores = rolled @ w
    _ = scores - scores.max(1, keepdims=True)
    return jax.nn.softmax(rolled), x[:8]


BOTH = ("data", "model")


@pytest.mark.parametrize("specs", [(P(), P(BOTH)), (P("data"), P("model")), (P("model", "data"), P(BOTH))])
def test_what_is_not_used_moves_nothing_and_decides_nothing(specs, mesh):
    report = report_of(unused, specs, matrix(16, 32), matrix(32, 16), mesh=mesh)
    assert not report.predicted.unknown
    assert report.predicted.counts == report.collectives.counts
    assert report.predicted.bytes_per_step == report.collectives.bytes_per_step
    unknown = [equation for equation in report.equations if equation.outputs[0].spec is None]
    assert [equation.primitive for equation in unknown] == ["dot_general", "reduce_max", "broadcast_in_dim", "sub"]
    assert "nothing uses it, so that it is not computed" in str(report.why(unknown[0].outputs[0]))


def squares(x, w):
    parts = x * 2, w @ x, with_sharding_constraint(x, P("data", "model"))
    return sum((part * part).sum() for part in parts)


@pytest.mark.parametrize("specs", [(P(BOTH), P(None, BOTH)), (P("model", "data"), P(BOTH)), (P("data"), P())])
def test_the_partitioner_begins_with_what_is_used_once_as_if_nobody_looked_at_it(specs, mesh):
    step = pjit(jax.grad(squares, argnums=(0, 1)), in_shardings=specs)
    args = matrix(16, 32), matrix(32, 16)
    with mesh:
        compiled = step.lower(*args).compile()
    for value, sharding in zip(explain(step, *args, mesh=mesh).whole.results, compiled.output_shardings, strict=True):
        assert NamedSharding(mesh, value.spec).is_equivalent_to(sharding, 2)
