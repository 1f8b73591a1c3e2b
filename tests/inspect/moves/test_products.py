"""Products of operands that are sharded in any way, to results that are, are predicted as they are compiled."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partjit
from partjit import P, pjit
from partjit.inspect import explain

PRODUCTS = (
    *("ij,jk->ik", "ij,kj->ik", "bij,bjk->bik", "btf,fg->btg", "bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"),
    *("btf,btg->fg", "btf,fhd->bthd", "bthd,hdf->btf", "ij,ij->j", "ab,bc->ca"),
)


def mesh_of(sizes, names):
    return partjit.Mesh(np.array(jax.devices()).reshape(sizes), tuple(names))


def drawn_spec(draw, shape, mesh):
    """A spec of some axes of a mesh, each for a dimension that it divides, at times two of them for one."""
    dims = [()] * len(shape)
    for axis in draw.sample(mesh.axis_names, len(mesh.axis_names)):
        fits = [
            dim
            for dim, axes in enumerate(dims)
            if shape[dim] % np.prod([mesh.shape[name] for name in (*axes, axis)]) == 0
            and (not axes or draw.random() < 0.3)
        ]
        if fits and draw.random() < 0.6:
            dims[draw.choice(fits)] += (axis,)
    return P(*dims)


def drawn_product(draw, mesh):
    """An einsum, the shapes of its operands, their specs, and that of the result."""
    text = draw.choice(PRODUCTS)
    sizes = {letter: draw.choice([8, 16, 32]) for letter in sorted({*text} - {*",->"})}
    operands, result = text.split("->")
    shapes = [tuple(sizes[letter] for letter in part) for part in (*operands.split(","), result)]
    return text, shapes[:2], [drawn_spec(draw, shape, mesh) for shape in shapes]


def assert_predicted_as_compiled(products, mesh):
    def all_of(*pairs):
        return [jnp.einsum(text, *pair) for (text, _, _), pair in zip(products, pairs, strict=True)]

    structs = [tuple(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes) for _, shapes, _ in products]
    specs = tuple(tuple(specs[:2]) for _, _, specs in products)
    step = pjit(all_of, in_shardings=specs, out_shardings=[specs[2] for _, _, specs in products])
    report = explain(step, *structs, mesh=mesh, compiled=True)
    assert report.predicted.unknown == ()
    assert report.predicted.counts == report.collectives.counts
    assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)


def is_known(product, mesh):
    """Whether the prediction is no bound: how some reshards are made is not modelled."""
    text, shapes, (*specs, wanted) = product
    step = pjit(lambda *operands: jnp.einsum(text, *operands), in_shardings=tuple(specs), out_shardings=wanted)
    structs = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    return not explain(step, *structs, mesh=mesh).predicted.unknown


@pytest.mark.parametrize(("sizes", "names"), [((4, 2), "xy"), ((2, 4), "xy"), ((2, 2, 2), "xyz"), ((8,), "x")])
def test_random_products(sizes, names):
    """In one program, in which they have nothing to do with each other: that takes about as long as two."""
    draw, mesh = random.Random(repr((sizes, names))), mesh_of(sizes, names)
    products = [drawn_product(draw, mesh) for _ in range(16)]
    known = [product for product in products if is_known(product, mesh)]
    assert len(known) >= 10
    assert_predicted_as_compiled(known, mesh)


A_OF_HEADS, OF_HEADS = (16, 8, 8, 8), (8, 8, 16)


@pytest.mark.parametrize("wanted", [P(), P("x"), P(None, None, "x")])
def test_what_is_summed_over_different_dimensions_is_sharded_as_the_result(wanted):
    """Only a replicated result is summed by all devices; for others both operands are resharded."""
    specs = [P(None, None, "x"), P(None, "x"), wanted]
    assert_predicted_as_compiled([("bqhd,hdf->bqf", (A_OF_HEADS, OF_HEADS), specs)], mesh_of((8,), "x"))


def test_a_sum_that_all_devices_make_is_over_the_dimensions_of_the_operand_that_stays():
    specs = [P(("y", "x")), P("y", "x"), P()]
    assert_predicted_as_compiled([("btf,btg->fg", ((16, 16, 16), (16, 16, 16)), specs)], mesh_of((4, 2), "xy"))


@pytest.mark.parametrize(
    ("both", "of_x", "count"),
    [(lambda x, w: (x @ w, x @ jnp.sin(w)), P("y", "x"), 1), (lambda x, w: (x @ w, jnp.sin(x) @ w), P("y"), 2)],
)
def test_an_operand_is_gathered_as_often_as_xla_does_for_two_products(both, of_x, count):
    step = pjit(both, in_shardings=(of_x, P(None, "x")), out_shardings=of_x)
    structs = jax.ShapeDtypeStruct((32, 16), np.float32), jax.ShapeDtypeStruct((16, 32), np.float32)
    report = explain(step, *structs, mesh=mesh_of((4, 2), "xy"), compiled=True)
    assert report.predicted.counts == report.collectives.counts == {("all-gather", ("x",)): count}


def test_a_gradient_is_summed_over_the_batch_though_all_of_an_operand_is_there():
    """Another product has gathered it: to gather it within groups, and sum slices, is less work."""

    def both(x, w, y):
        return x @ w, jnp.einsum("btf,btg->fg", x, y)

    specs, out = (P("x", "y"), P("x"), P(None, None, "y")), (P(None, None, "y"), P(None, "y"))
    structs = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((16, 16, 16), (16, 32), (16, 16, 32))]
    report = explain(
        pjit(both, in_shardings=specs, out_shardings=out), *structs, mesh=mesh_of((4, 2), "xy"), compiled=True
    )
    assert report.predicted.unknown == ()
    assert report.predicted.counts == report.collectives.counts
    assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)
