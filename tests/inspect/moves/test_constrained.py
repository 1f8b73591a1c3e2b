"""Products, scatters and selections whose results are sharded otherwise than their operands suggest."""

import itertools
import random
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.truth_operations import make_mesh
from partjit import P, pjit, with_sharding_constraint
from partjit.inspect import explain
from partjit.inspect.page.excerpts import Excerpts
from partjit.inspect.page.sections import costs


def explained(fun, specs, *structs):
    return explain(pjit(fun, in_shardings=specs), *structs, mesh=make_mesh(), compiled=True)


def assert_equal(report):
    predicted, compiled = report.predicted, report.collectives
    assert predicted.unknown == ()
    assert predicted.counts == compiled.counts
    assert predicted.bytes_per_step == pytest.approx(compiled.bytes_per_step)


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def integers(*shape):
    return jax.ShapeDtypeStruct(shape, "int32")


def test_what_a_constrained_product_is_not_sharded_along_is_gathered_before_it():
    """Also if the result is smaller than the operand."""

    def fun(x, wide, narrow, w):
        sequence = [with_sharding_constraint(x @ one, P("x")) for one in (wide, narrow)]
        return *map(jnp.sin, sequence), with_sharding_constraint(jnp.cos(x[:, 0]) @ w, P("x"))

    specs = P("x", "y"), P(), P(), P(None, "y")
    report = explained(fun, specs, floats(8, 16, 16), floats(16, 64), floats(16, 4), floats(16, 32))
    assert_equal(report)


def axes_of_products():
    """Those of both operands and of a constrained result, which lacks one at least that its operand has."""
    for x, summed, other, w, a, b in itertools.product((None, "x", "y"), repeat=6):
        pairs = (x, summed), (other, w), (a, b)
        is_less = (x and not a) or (w and not b)
        if is_less and a in (None, x) and b in (None, w) and all(one is None or one != two for one, two in pairs):
            yield [P(*pair) for pair in pairs]


@pytest.mark.parametrize("sizes", [(32, 16, 64), (32, 64, 16)])
def test_random_constrained_products_are_predicted_or_marked(sizes):
    rows, summed, columns = sizes
    draw = random.Random(str(sizes))
    for one, other, result in draw.sample([*axes_of_products()], 8):

        def fun(x, w, result=result):
            return with_sharding_constraint(x @ w, result)

        report = explained(fun, (one, other), floats(rows, summed), floats(summed, columns))
        predicted, compiled = report.predicted, report.collectives
        if predicted.unknown:
            assert predicted.bytes_per_step <= compiled.bytes_per_step <= predicted.bytes_per_step_at_most
        else:
            assert_equal(report)


def test_a_cache_with_a_position_for_each_example_stays_sharded():
    def fun(cache, new, positions):
        return jax.vmap(lambda c, n, at: lax.dynamic_update_slice(c, n, (at, 0)))(cache, new, positions)

    structs = floats(8, 32, 4), floats(8, 1, 4), integers(8)
    report = explained(fun, (P("x", "y"), P("x"), P("x")), *structs)
    assert_equal(report)
    assert report.predicted.counts == {}


def test_the_indices_of_uneven_shards_are_gathered_to_scatter():
    """As in the gradient of the embeddings of all tokens but the last."""

    def loss(table, logits, tokens):
        embedded = jnp.sin(table[tokens[:, :-1]])
        return jnp.sum(embedded) + jnp.sum(jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1))

    specs = P(), P("x", "y"), P("x", "y")
    structs = floats(64, 8), floats(8, 16, 64), integers(8, 16)
    assert_equal(explained(jax.grad(loss, argnums=(0, 1)), specs, *structs))


def test_products_over_devices_of_what_is_scattered():
    def fun(x, at):
        return x.at[at].multiply(2.0), jax.ops.segment_prod(x[:8], at, 4)

    report = explained(fun, (P(), P("x")), floats(32, 16), integers(8))
    assert_equal(report)
    assert report.predicted.counts["all-reduce", ("x",)] == 2


def test_nothing_is_propagated_along_what_top_k_selects():
    """So what is computed from the largest elements of a sharded dimension is not summed over devices."""

    def fun(logits, labels):
        values, indices = lax.top_k(logits, 4)
        return values.sum(-1), (indices == labels[:, None]).any(-1)

    report = explained(fun, (P("x", "y"), P("x")), floats(8, 64), integers(8))
    assert_equal(report)
    (selected,) = [one for one in report.values if one.aval.shape == (8, 4) and one.aval.dtype == "float32"]
    assert selected.shown_spec == "P('x', None)"


NEED_ALL = {
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "scan": lambda x: lax.scan(lambda total, row: (total + row, total), jnp.zeros(4), x)[1],
}


@pytest.mark.parametrize("after", NEED_ALL.values(), ids=NEED_ALL)
def test_what_top_k_selects_is_gathered_again_by_what_needs_all_of_it(after):
    def fun(x):
        return after(lax.top_k(x, 4)[0])

    report = explained(fun, P("x"), floats(8, 16))
    assert_equal(report)
    assert sorted(one.result for one in report.predicted) == ["f32[8,16]", "f32[8,4]"]


def test_of_branches_the_one_that_sends_most_counts():
    def fun(x, w, is_wide):
        return lax.cond(is_wide, lambda x: (x @ w).sum(0), lambda x: x.sum(0).sum() + jnp.zeros(16), x)

    report = explained(fun, (P("x", "y"), P("y"), P()), floats(32, 16), floats(16, 16), jax.ShapeDtypeStruct((), bool))
    assert report.predicted.bytes_per_step == pytest.approx(report.collectives.bytes_per_step)
    assert {one.is_exact for one in report.predicted} == {False}
    assert len({one.branch for one in report.predicted}) == 2
    assert "(of branches the one that sends the most counts)" in report.predicted.to_text().splitlines()[0]


def test_a_report_says_that_loops_of_unknown_length_count_once():
    def fun(x):
        return lax.while_loop(lambda x: x.sum() < 100, lambda x: 2 * x, x)

    report = explained(fun, P("x"), floats(32))
    assert (
        report.predicted.to_text().splitlines()[0].endswith("per step (loops of unknown length count as one iteration)")
    )


def test_the_seconds_and_the_shares_of_a_report_count_what_its_total_counts():
    def turned(x):
        return lax.while_loop(lambda x: x[0] < 9, lambda x: lax.fori_loop(0, 10, lambda _, x: x + x.sum(), x), x)

    def branched(x):
        inner = (lambda x: x + x.max(0, keepdims=True)), (lambda x: x - x.min(0, keepdims=True))
        return lax.cond(
            x[0, 0] > 0, lambda x: x - x.sum(0, keepdims=True), lambda x: lax.cond(x[0, 0] > -1, *inner, x), x
        )

    for fun, *shape in ((turned, 32), (branched, 32, 16)):
        report = explain(pjit(fun, in_shardings=P("x")), floats(*shape), mesh=make_mesh(), bandwidth=1.0)
        assert sum(report.seconds.values()) == pytest.approx(report.collectives.bytes_per_step)
        shares = [int(share) for share in re.findall(r"--w:(\d+)%", costs(report, Excerpts("p")))]
        assert sum(shares) == pytest.approx(100, abs=len(shares))  # each is rounded


def test_what_one_operand_is_contracted_along_is_gathered_if_devices_have_the_same_shards():
    """However large the result is: to slice the other operand would leave these devices out."""
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    specs = (P(None, "y"), P(None, "x")), (P("x"), P("y")), (P("x", "y"), P()), (P(), P("y", "x"))

    def fun(*operands):
        return [one @ other for one, other in zip(operands[::2], operands[1::2], strict=True)]

    shapes = (8, 16), (16, 24), (8, 48), (48, 16), (40, 16), (16, 8), (8, 24), (24, 8)
    step = pjit(fun, in_shardings=tuple(itertools.chain(*specs)))
    assert_equal(explain(step, *(floats(*shape) for shape in shapes), mesh=mesh, compiled=True))


def test_operands_that_are_contracted_along_different_dimensions():
    """XLA exchanges one of them."""

    def fun(values, weights):
        return jnp.einsum("bhd,hdf->bf", values, weights)

    assert_equal(explained(fun, (P(None, "x"), P(None, "x")), floats(16, 8, 8), floats(8, 8, 32)))
