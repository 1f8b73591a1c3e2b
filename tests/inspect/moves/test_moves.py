"""What XLA's partitioner moves by itself is predicted as it is compiled, or marked."""

import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding

import partjit
from benchmarks.truth_operations import OPERATIONS, make_mesh, report_on, verdict
from partjit import P, pjit
from partjit.inspect import explain


@pytest.fixture(autouse=True)
def lenient():
    """The operations are those of users, who may let jax promote."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


# One of each kind; compiled as one program, which takes about as long as three of them.
TOGETHER = """
    cumsum | cummax | roll by more than a shard | rev of both | pad, uneven | pad, interior | slice, half
    slice, strided | slice of the first | stencil | reduce_window, strided and wide | convolution over space, strided
    sort of both | top_k of both | argmin of both | take | take from columns | segment_sum | dynamic_slice
    dynamic_update_slice | dynamic_update_slice of the other dimension | concatenate | split
    reshape, splitting unevenly | repeat | dot, contracted | dot, one contracted | dot, gathered | gradient of dot
    add, other axes | fft2 | qr | pad to 19 | slice of the last, of both | slice of a column, of both
"""


def test_operations_are_predicted_as_they_are_compiled():
    by_name = {operation.name: operation for operation in OPERATIONS}
    chosen = [by_name[name.strip()] for line in TOGETHER.strip().splitlines() for name in line.split("|")]

    def fun(*arguments):
        return [operation.function(*args) for operation, args in zip(chosen, arguments, strict=True)]

    specs = tuple(operation.specs for operation in chosen)
    report = explain(
        pjit(fun, in_shardings=specs), *[tuple(one.structs) for one in chosen], mesh=make_mesh(), compiled=True
    )
    assert report.predicted.unknown == ()
    assert report.predicted.counts == report.collectives.counts
    assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)


def images(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def of_parameters(fun):
    """The value, and its gradient for the second argument."""

    def both(x, w):
        value, back = jax.vjp(lambda w: jnp.sin(fun(x, w)), w)
        return value, back(jnp.cos(value))[0]

    return both


# What is computed, shapes, and the axes of the operands and of the gradient, for the mesh (("x", 4), ("y", 2)).
PRODUCTS = {
    "a gather in groups is not merged with one among all": (jnp.matmul, (512, 16), (16, 16), P("x", "y"), P(None, "y")),
    "equal gathers are merged": (jnp.matmul, (16, 32), (32, 32), P("x", "y"), P(None, "y")),
    "parameters gathered over the batch's axis": (jnp.matmul, (32, 16), (16, 64), P("x"), P("x", "y")),
    "summed over one axis, then a slice over the other": (jnp.matmul, (64, 16), (16, 8), P(("x", "y")), P(None, "y")),
    "features of 3 x 3": (images, (8, 4, 4, 16), (3, 3, 16, 8), P("x", None, None, "y"), P(None, None, None, "y")),
    "features of 1 x 1": (images, (8, 8, 8, 16), (1, 1, 16, 32), P("x", None, None, "y"), P(None, None, None, "y")),
}


def test_products_and_convolutions_with_their_gradients_are_predicted_as_they_are_compiled():
    """Equal gathers are one if XLA writes their groups in the same form."""

    def fun(*pairs):
        return [of_parameters(case[0])(*pair) for case, pair in zip(PRODUCTS.values(), pairs, strict=True)]

    structs = [tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in case[1:3]) for case in PRODUCTS.values()]
    specs = tuple(case[3:] for case in PRODUCTS.values())
    out = [(None, parameter) for _, parameter in specs]
    step = pjit(fun, in_shardings=specs, out_shardings=out)
    report = explain(step, *structs, mesh=make_mesh(), compiled=True)
    assert report.predicted.unknown == ()
    assert report.predicted.counts == report.collectives.counts
    assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.sum(1),
        lambda x: jnp.concatenate([x, x], 1),
        lambda x: jnp.roll(x, 1, 1),
        lambda x: jnp.sort(x, 1),
        lambda x: x[:, jnp.arange(8) * 2],
        lambda x: (x[:, 3:15], jnp.flip(x, 1), jnp.pad(x, 3)),
        lambda x: (jnp.fft.fft(x, axis=0).real, jnp.cumsum(x, 0)),
        lambda x: (jnp.tile(x, (1, 2)), jnp.linalg.cholesky(x @ x.T + jnp.eye(16))),
        lambda x: jnp.concatenate([x, jnp.ones_like(x)], 0),
    ],
    ids=["sum", "concatenate", "roll", "sort", "gather", "merged", "fft", "gathered", "with constants"],
)
def test_equal_operations_are_merged_where_xla_merges_them(operation):
    def fun(x):
        return jax.tree.map(jnp.sin, operation(x)), jax.tree.map(jnp.cos, operation(x))

    struct = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    report = explain(pjit(fun, in_shardings=P("x", "y")), struct, mesh=make_mesh(), compiled=True)
    assert report.predicted.counts == report.collectives.counts
    assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)


def test_convolutions_of_one_image_exchange_its_halos_once():
    def fun(x, one, other):
        return images(x, one) * jnp.tanh(images(x, other))

    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 16, 8, 4), (3, 3, 4, 8), (3, 3, 4, 8))]
    report = explain(pjit(fun, in_shardings=(P(None, "x", "y"), P(), P())), *structs, mesh=make_mesh(), compiled=True)
    assert report.predicted.counts == report.collectives.counts
    assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)


@pytest.mark.parametrize("spec", [P(), P("x")])
def test_slices_that_are_sharded_further_than_their_operand_exchange_halos(spec):
    """As of the bias of a GRU: XLA shards the operand first."""
    wanted = (P(*spec, *[None] * (1 - len(spec)), "y"),) * 3
    slices = pjit(lambda x: (x[:, :24], x[:, 24:], x[:, :16]), in_shardings=spec, out_shardings=wanted)
    report = explain(slices, jax.ShapeDtypeStruct((16, 32), "float32"), mesh=make_mesh(), compiled=True)
    assert report.predicted.counts == report.collectives.counts
    assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)


@pytest.mark.parametrize("operation", ["windows", "reshape"])
def test_shards_that_fit_nothing_are_gathered_where_xla_gathers_them(operation):
    """All of an array is gathered, where a reshard of it would have moved less."""
    if operation == "windows":
        spec, wanted, shape = P("x"), P(None, "x"), (16, 16, 14)
        functions = [lambda x: lax.pad(x, 0.0, [(0, 0, 0), (0, 0, 0), (1, 2, 0)])]
        functions += [lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3), (1, 1, 1), "SAME")]
    else:  # not as three of four
        spec, wanted, shape = P(None, None, "x"), P(None, None, None, "y"), (8, 16, 96)
        functions = [lambda x: x.reshape(8, 16, 3, 4, 8)]
    step = pjit(lambda x: [f(x) for f in functions], in_shardings=spec, out_shardings=[wanted] * len(functions))
    report = explain(step, jax.ShapeDtypeStruct(shape, "float32"), mesh=make_mesh(), compiled=True)
    assert report.predicted.unknown == ()
    assert report.predicted.counts == report.collectives.counts
    assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)


BOTH = P(("x", "y"))


@pytest.mark.parametrize(
    ("batch", "wanted"),
    [(P("x"), [P("x"), P(None, "x")]), (BOTH, [P("x"), P("y"), P(None, "y"), P("x", "y"), BOTH, P(("y", "x"))])],
)
def test_the_gradient_of_a_parameter_that_is_sharded_as_the_batch_is_summed_whole(batch, wanted):
    """As XLA does it, each device then takes its part; the sum over other axes is one of that part."""
    structs = [jax.ShapeDtypeStruct((16, 16 * (k + 1)), "float32") for k in range(len(wanted))]
    grad = pjit(lambda ys, x: [x.T @ y for y in ys], in_shardings=batch, out_shardings=wanted)
    report = explain(grad, structs, structs[0], mesh=make_mesh(), compiled=True)
    assert report.predicted.unknown == ()
    assert report.predicted.counts == report.collectives.counts
    assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)


@pytest.mark.parametrize("axis", ["x", "y"])
def test_sums_of_which_each_device_makes_a_part_are_sent_where_they_belong(axis):
    """Over 2 of 8 devices XLA sums slices, which neighbours in a group have; over 4 of 8 it sums all of it."""
    left, right = (jax.ShapeDtypeStruct((n, 4, 4), "float32") for n in (64, 16))
    product = pjit(
        lambda a, b: jnp.einsum("nhe,dhe->nd", a, b), in_shardings=P(None, axis), out_shardings=P(None, axis)
    )
    report = explain(product, left, right, mesh=make_mesh(), compiled=True)
    assert report.predicted.unknown == ()
    assert report.predicted.counts == report.collectives.counts
    assert any(kind == "collective-permute" for kind, _ in report.predicted.counts) == (axis == "y")
    assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)


@pytest.mark.parametrize(("sizes", "names"), [((4, 2), "xy"), ((2, 4), "xy"), ((2, 2, 2), "xyz"), ((2, 2, 2), "zxy")])
def test_random_sums_that_are_sharded_within_groups(sizes, names):
    """What is contracted is sharded alike in both operands; the results over any axes, some of them over the same."""
    draw = random.Random(repr((sizes, names)))
    mesh = partjit.Mesh(np.array(jax.devices()).reshape(sizes), tuple(names))
    specs, out, structs = [], [], []
    for _ in range(16):
        axes = draw.sample(names, draw.choice([1, 1, 2]))
        count = math.prod(mesh.shape[axis] for axis in axes)
        if mesh.size // count < count:
            axes = [min(names, key=lambda name: mesh.shape[name])]
        structs.append([jax.ShapeDtypeStruct((n, 32), "float32") for n in draw.choices([8, 16, 32, 64], k=2)])
        specs.append((P(None, tuple(axes)),) * 2)
        wanted = draw.choice([axes, draw.sample(names, len(axes)), draw.sample(names, 1)])
        wanted = [axis for axis in wanted if mesh.shape[axis] < mesh.size // 2 or axis in axes]
        out.append(draw.choice([P(tuple(wanted)), P(None, tuple(wanted))]))

    def fun(*pairs):
        return [jnp.sin(a @ b.T) for a, b in pairs]

    report = explain(
        pjit(fun, in_shardings=tuple(specs), out_shardings=out), *map(tuple, structs), mesh=mesh, compiled=True
    )
    predicted = report.predicted
    assert predicted.unknown == ()
    assert predicted.counts == report.collectives.counts
    assert predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)


def test_the_gradient_of_what_is_scattered_is_predicted_as_it_is_compiled():
    """jax selects among equal constants in it, which XLA folds: the operands of the `select` are not sharded for it."""

    def loss(x, order):
        return jnp.sum(jnp.sin(jnp.zeros_like(x).at[order].set(jnp.cos(x)[order])) * x)

    structs = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((64,), "int32")
    report = explain(
        pjit(jax.value_and_grad(loss), in_shardings=(P("x"), P())), *structs, mesh=make_mesh(), compiled=True
    )
    assert report.predicted.unknown == ()
    assert report.predicted.counts == report.collectives.counts
    assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)


def test_the_gradient_of_an_associative_scan_is_predicted_as_it_is_compiled():
    """It pads what is then sliced, and concatenates arrays of one element over several devices."""

    def loss(x):
        return jnp.mean(lax.associative_scan(jnp.multiply, x, axis=1) ** 2)

    struct = jax.ShapeDtypeStruct((8, 16), "float32")
    report = explain(pjit(jax.grad(loss), in_shardings=P("x", "y")), struct, mesh=make_mesh(), compiled=True)
    assert report.predicted.unknown == ()
    assert report.predicted.counts == report.collectives.counts
    assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)


def test_what_a_nested_function_computes_is_not_folded_with_what_is_sliced_outside_of_it():
    """XLA takes a part of one operand of a concatenation from that operand, but not from a `jax.jit`."""
    fun = pjit(
        lambda x: (jnp.roll(x, 1, 0)[9:12:3], jnp.concatenate([x[11:], x[:11]])[9:12:3]),
        in_shardings=P("x"),
        out_shardings=P(),
    )
    report = explain(fun, jax.ShapeDtypeStruct((12, 6), "float32"), mesh=make_mesh(), compiled=True)
    assert [move.operation for move in report.predicted.unknown] == ["stablehlo.concatenate", "stablehlo.slice"]
    assert report.predicted.bytes_per_step < report.collectives.bytes_per_step


def test_a_product_of_an_array_with_itself_gathers_it_once_more():
    """XLA copies one of the operands, and gathers within the groups of the batch."""

    def fun(x):
        scores = jnp.einsum("bld,bmd->blm", x, x)
        return jnp.sin(scores), jnp.sin(scores @ x), jnp.cumsum(x, 1)

    struct = jax.ShapeDtypeStruct((8, 16, 8), "float32")
    report = explain(pjit(fun, in_shardings=P("x", "y")), struct, mesh=make_mesh(), compiled=True)
    assert report.predicted.unknown == ()
    assert report.predicted.counts == report.collectives.counts
    assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)


@pytest.mark.parametrize("mode", ["wrap", "edge"])
def test_what_continues_an_array_over_its_borders_is_marked(mode):
    """The parts that are repeated are not gathered for it."""
    fun = pjit(lambda x: jnp.sin(jnp.pad(x, ((2, 2), (0, 0)), mode=mode)), in_shardings=P("x"))
    report = explain(fun, jax.ShapeDtypeStruct((32, 16), "float32"), mesh=make_mesh(), compiled=True)
    predicted, compiled = report.predicted, report.collectives
    assert [move.operation for move in predicted.unknown] == ["stablehlo.concatenate"]
    assert all(predicted.counts[key] <= compiled.counts[key] for key in predicted.counts)
    assert predicted.bytes_per_step < compiled.bytes_per_step <= predicted.bytes_per_step_at_most


def test_nothing_is_moved_to_pad_an_empty_array():
    """As the last step of an associative scan does."""
    pad = pjit(lambda x: lax.pad(x[:0], jnp.float32(0), ((2, 0, 1),)), in_shardings=P("y"), out_shardings=P("y"))
    report = explain(pad, jax.ShapeDtypeStruct((8,), "float32"), mesh=make_mesh(), compiled=True)
    assert report.predicted.counts == report.collectives.counts == {}
    assert report.predicted.unknown == ()


def test_gradients_that_are_sharded_further_than_the_batch_are_summed_in_groups():
    structs = [jax.ShapeDtypeStruct((16, 16), "float32")] * 2
    grads = pjit(
        lambda x, y: (x.T @ y, x.T @ jnp.sin(y), x.T @ jnp.cos(y)),
        in_shardings=P("x"),
        out_shardings=(P(("y", "x")), P("y", "x"), P("x", "y")),
    )
    report = explain(grads, *structs, mesh=make_mesh(), compiled=True)
    assert report.predicted.unknown == ()
    assert report.predicted.counts == report.collectives.counts
    assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)


def test_what_is_not_modelled_is_marked():
    (operation,) = [one for one in OPERATIONS if one.name == "gradient of a convolution over space"]
    report = report_on(operation, make_mesh())
    assert verdict(report) == "marked"
    predicted = report.predicted
    assert [move.operation for move in predicted.unknown] == ["stablehlo.convolution"]
    assert predicted.bytes_per_step < report.collectives.bytes_per_step < predicted.bytes_per_step_at_most
    text = predicted.to_text()
    assert "a device sends between 6.1 kB and" in text.splitlines()[0]
    assert "XLA may move data here, which is predicted only within bounds:" in text
    assert "  convolution: at most " in text.splitlines()[-1]
    assert "truth_operations.py:" in text.splitlines()[-1]
    data = report.as_data()["collectives"]
    assert data["unknown"][0]["operation"] == "stablehlo.convolution"
    assert data["bytes_per_step_at_most"] == data["bytes_per_step"] == report.collectives.bytes_per_step


def test_a_program_without_predicted_collectives_is_not_said_to_have_none():
    fun = pjit(lambda x: jnp.pad(x, ((1, 1), (0, 0)), mode="wrap"), in_shardings=P("x"))
    report = explain(fun, jnp.ones((16, 8)), mesh=make_mesh())
    assert report.predicted.unknown
    assert not str(report.predicted).startswith("no collectives (")


def random_spec(draw, mesh, shape):
    dims = [[] for _ in shape]
    for axis in draw.sample(mesh.axis_names, len(mesh.axis_names)):
        dim = draw.randrange(len(shape))
        size = np.prod([mesh.shape[name] for name in (*dims[dim], axis)])
        if draw.random() < 0.7 and shape[dim] % size == 0:
            dims[dim].append(axis)
    return P(*[tuple(dim) or None for dim in dims])


def a_slice(draw, shape):
    bounds = tuple(slice((a := draw.randrange(n)), draw.randrange(a, n) + 1, draw.choice([1, 1, 2])) for n in shape)
    return lambda x: x[bounds]


def padding(draw, shape):
    amounts = [(draw.randrange(-2, 5), draw.randrange(-2, 5), draw.choice([0, 0, 1])) for _ in shape]
    return lambda x: lax.pad(x, jnp.float32(0), amounts)


def a_rotation(draw, shape):
    dim = draw.randrange(len(shape))
    amount = draw.randrange(1, shape[dim])
    return lambda x: jnp.roll(x, amount, dim)


def pooling(draw, shape):
    dim, width, stride = draw.randrange(len(shape)), draw.choice([2, 3]), draw.choice([1, 2])
    sizes, strides = ([n if k == dim else 1 for k in range(len(shape))] for n in (width, stride))
    padding = draw.choice(["SAME", "VALID"])
    return lambda x: lax.reduce_window(x, -jnp.inf, lax.max, sizes, strides, padding)


def an_order(draw, shape):
    dim = draw.randrange(len(shape))
    return draw.choice([lambda x: jnp.sort(x, dim), lambda x: jnp.argmax(x, dim), lambda x: jnp.cumsum(x, dim)])


KINDS = (a_slice, padding, a_rotation, pooling, an_order, lambda draw, shape: lambda x: x)


@pytest.mark.parametrize("sizes", [(4, 2), (2, 2, 2)])
def test_random_operations_and_reshards_are_predicted_or_marked(sizes):
    """In one program for each mesh; what is resharded is one of them."""
    draw = random.Random(sum(sizes))
    mesh = partjit.Mesh(np.array(jax.devices()).reshape(sizes), ("x", "y", "z")[: len(sizes)])
    shapes = [tuple(draw.choice([8, 16]) for _ in range(draw.choice([1, 2, 2, 3]))) for _ in range(24)]
    functions = [KINDS[k % len(KINDS)](draw, shape) for k, shape in enumerate(shapes)]
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    specs = tuple(random_spec(draw, mesh, shape) for shape in shapes)
    results = [jax.eval_shape(function, struct).shape for function, struct in zip(functions, structs, strict=True)]
    out = tuple(random_spec(draw, mesh, shape) if shape and draw.random() < 0.5 else None for shape in results)

    def fun(*arrays):
        return tuple(function(array) for function, array in zip(functions, arrays, strict=True))

    report = explain(pjit(fun, in_shardings=specs, out_shardings=out), *structs, mesh=mesh, compiled=True)
    predicted = report.predicted
    if not predicted.unknown:
        assert predicted.counts == report.collectives.counts
        assert predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)
    assert predicted.bytes_per_step - 1 <= report.collectives.bytes_per_step <= predicted.bytes_per_step_at_most + 1
    assert len(predicted.unknown) <= 4
    assert len(predicted) >= 20


def test_slices_of_what_is_exchanged_are_predicted_or_marked():
    """XLA does not exchange what no slice needs."""
    draw, shape = random.Random(0), (16, 12)
    functions = [KINDS[k % 3](draw, shape) for k in range(9)]
    struct = jax.ShapeDtypeStruct(shape, "float32")
    slices = [a_slice(draw, jax.eval_shape(function, struct).shape) for function in functions]
    specs = tuple(random_spec(draw, make_mesh(), shape) for _ in functions)

    def fun(*arrays):
        return tuple(part(one(array)) for part, one, array in zip(slices, functions, arrays, strict=True))

    report = explain(pjit(fun, in_shardings=specs), *[struct] * len(functions), mesh=make_mesh(), compiled=True)
    predicted = report.predicted
    assert predicted.unknown
    assert all(predicted.counts[key] <= report.collectives.counts[key] for key in predicted.counts)
    assert predicted.bytes_per_step - 1 <= report.collectives.bytes_per_step <= predicted.bytes_per_step_at_most + 1


def test_halos_that_xla_may_merge_have_the_bound_of_each_of_them():
    """A stencil on padded neighbours: memory has the bound of the arrays, as XLA copies them together."""

    def stencil(u):
        padded = jnp.pad(u, 1)
        return (padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]) / 4 - u

    spec = P("x", "y")
    fun = pjit(stencil, in_shardings=spec, out_shardings=spec)
    report = explain(fun, jax.ShapeDtypeStruct((32, 32), "float32"), mesh=make_mesh(), compiled=True)
    sent, most = report.collectives.bytes_per_step, report.predicted.bytes_per_step_at_most
    assert report.predicted.unknown
    assert report.predicted.bytes_per_step <= sent <= most <= 2 * sent
    assert all(move.needed_at_most > move.bytes_at_most == move.bytes_likely for move in report.predicted.unknown)
    assert report.estimates[0].at_least <= report.memory[0].peak <= report.estimates[0].at_most


def test_reshards_among_the_devices_of_manual_axes():
    """In the body of a `shard_map` over some of the axes, the others reshard among themselves."""
    mesh = partjit.Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))

    def body(x):
        return lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P(None, "y")).spec)

    def fun(x):
        return jax.shard_map(body, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})(x)

    with jax.set_mesh(jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        report = explain(
            jax.jit(fun, in_shardings=P(("x", "y")), out_shardings=P("x", "y")), jnp.ones((16, 8)), compiled=True
        )
    assert report.predicted.counts == report.collectives.counts
