"""The kit finds faults: each of these is one that somebody could make, patched in, and a law that it breaks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.interpreters import ad, batching

import partjit
from partjit import P, ParsedPartitionSpec, with_sharding_constraint
from partjit.primitive import pjit_p, sharding_constraint_p
from partjit.rules.batching import insert_batch_axis
from partjit.testing import (
    assert_collectives,
    assert_round_trip,
    assert_same_meaning,
    axes_of,
    partition_specs,
    shapes,
)
from tests.census import sees

pytestmark = pytest.mark.system

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
OF_X = {"in_specs": P("x", "y"), "out_specs": P("y")}


def sine(x):
    return jnp.sin(x) * 2


def constrained(x):
    return jnp.sin(with_sharding_constraint(x, P("y"))) * x


@pytest.fixture(autouse=True)
def empty_caches():
    """What was made without the fault does not hide it, and what is made with it is not used again."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def indivisible_shapes_are_refused(mesh):
    @sees("an axis name")
    @settings(max_examples=3)
    @given(st.data())
    def holds(data):
        spec = data.draw(partition_specs(mesh=mesh, ndim=2).filter(lambda spec: axes_of(spec, 2) != ((), ())))
        x = np.ones(data.draw(shapes(spec=spec, mesh=mesh, divisible=False)), np.float32)
        try:
            with mesh:
                partjit.pjit(sine, spec)(x)
        except partjit.ShardingError:
            return
        except Exception as error:
            raise AssertionError(f"XLA itself had to refuse {x.shape} with {spec}") from error
        raise AssertionError(f"{x.shape} was accepted with {spec}")

    holds()


def fails(mesh, fun=sine, match="", **options):
    with pytest.raises(AssertionError, match=match):
        assert_same_meaning(fun, X, mesh=mesh, **{**OF_X, **options})


def test_without_a_fault_all_laws_hold(mesh):
    for specs in ({}, {"out_specs": P(("y", "x"))}, {"out_specs": P(None, "y")}):
        assert_same_meaning(sine, X, mesh=mesh, **{**OF_X, **specs})
    assert_same_meaning(constrained, X, mesh=mesh, **OF_X, reference=lambda x: jnp.sin(x) * x)
    indivisible_shapes_are_refused(mesh)


def test_spec_parsing_that_mixes_up_the_order_of_axes(mesh, monkeypatch):
    monkeypatch.setattr("partjit.spec._parse_partition", lambda entry: tuple(sorted(np.ravel(entry or ()).tolist())))
    fails(mesh, match="should be sharded as", out_specs=P(("y", "x")))


def test_spec_parsing_that_forgets_a_dimension(mesh, monkeypatch):
    monkeypatch.setattr(
        ParsedPartitionSpec, "partition_spec", property(lambda spec: P(*[axes or None for axes in spec.partitions[:1]]))
    )
    fails(mesh, match="should be sharded as", out_specs=P(None, "y"))


def test_validation_that_lets_everything_pass(mesh, monkeypatch):
    monkeypatch.setattr("partjit.infer.check_specs", lambda *_, **__: [])
    with pytest.raises(AssertionError, match=r"had to refuse|was accepted"):
        indivisible_shapes_are_refused(mesh)


def test_batching_that_forgets_where_the_batch_is(mesh, monkeypatch):
    right = batching.fancy_primitive_batchers[pjit_p]

    def wrong(axis_data, args, dims, **params):
        outs, out_dims = right(axis_data, args, dims, **params)
        return [jnp.flip(out, 0) if dim == 0 else out for out, dim in zip(outs, out_dims, strict=True)], out_dims

    monkeypatch.setitem(batching.fancy_primitive_batchers, pjit_p, wrong)
    fails(mesh, match="^the batched value differs")


def test_batching_that_puts_the_axis_of_the_batch_at_the_end(mesh, monkeypatch):
    monkeypatch.setattr(
        "partjit.rules.batching.insert_batch_axis",
        lambda spec, dim, *rest: insert_batch_axis(spec, len(spec.partitions), *rest),
    )
    fails(mesh, match="^the batched value")


def test_transposition_that_loses_a_factor(mesh, monkeypatch):
    right = ad.primitive_transposes[pjit_p]

    def wrong(cts_in, *primals, **params):
        cts = right(cts_in, *primals, **params)
        return [ct if ct is None or isinstance(ct, ad.Zero) else ct / 2 for ct in cts]

    monkeypatch.setitem(ad.primitive_transposes, pjit_p, wrong)
    fails(mesh, match=r"^the gradient of args\[0\] differs")


def test_transposition_that_replicates_the_cotangent(mesh, monkeypatch):
    right = ad.primitive_transposes[pjit_p]

    def wrong(cts_in, *primals, in_specs, **params):
        nowhere = tuple(dataclasses.replace(s, partitions=()) if hasattr(s, "partitions") else s for s in in_specs)
        return right(cts_in, *primals, in_specs=nowhere, **params)

    monkeypatch.setitem(ad.primitive_transposes, pjit_p, wrong)
    fails(mesh, match=r"^the gradient of args\[0\]: an array of shape")


def test_a_constraint_whose_transpose_is_wrong(mesh, monkeypatch):
    monkeypatch.setitem(ad.primitive_transposes, sharding_constraint_p, lambda ct, x, **_: (ct * 3,))
    fails(mesh, constrained, r"^the gradient of args\[0\] differs", reference=lambda x: jnp.sin(x) * x)


def test_a_constraint_that_is_lowered_to_nothing(mesh, monkeypatch):
    def gathered(x):
        return with_sharding_constraint(jnp.sin(x), None)

    expected = {"all-gather": 1}
    options = {"mesh": mesh, "in_specs": P("x"), "out_specs": partjit.UNSPECIFIED}
    assert_collectives(expected, gathered, X, **options)
    monkeypatch.setattr("partjit.primitive.lower_constraint", lambda ctx, x, *_: [x])
    jax.clear_caches()
    with pytest.raises(AssertionError, match="expected 1 all-gather, but the compiled program has no collectives"):
        assert_collectives(expected, gathered, X, **options)


def test_an_op_sharding_read_with_its_axes_in_another_order(mesh, monkeypatch):
    monkeypatch.setattr(
        "partjit.opsharding.convert._iota_digits", lambda tiling: [(size, 1) for size in tiling.reshape_dims]
    )
    with pytest.raises((AssertionError, partjit.UnrepresentableShardingError)):
        assert_round_trip(P("y", "x"), mesh, 2)
