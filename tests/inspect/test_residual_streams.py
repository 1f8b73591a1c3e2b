"""What layers pass on and nobody constrains is found, and what is suggested does what the finding says."""

import jax
import jax.numpy as jnp
import pytest

from partjit import P, pjit, with_sharding_constraint
from partjit.inspect import explain
from partjit.render.numbers import shown_bytes
from tests.inspect.inspected import f32, mesh

LAYERS, WIDTH = 4, 64
PARAMS = {"embed": f32(512, WIDTH), "up": f32(LAYERS, WIDTH, 256), "down": f32(LAYERS, 256, WIDTH)}
SPECS = {"embed": P("model", "data"), "up": P(None, "data", "model"), "down": P(None, "model", "data")}
MEGATRON = {"embed": P("model"), "up": P(None, None, "model"), "down": P(None, "model")}
TOKENS = jax.ShapeDtypeStruct((64, 16), jnp.int32)


def layer(x, w):
    hidden = jax.nn.gelu(x @ w["up"])  # it adds arrays of one shape as well, to pass them on to nobody
    return x + hidden @ w["down"]


def unchanged(x):
    return x


def along_the_batch(x):
    return with_sharding_constraint(x, P("data"))


def written_out(x, layers, constrain):
    for k in range(LAYERS):
        x = constrain(layer(x, jax.tree.map(lambda w, k=k: w[k], layers)))
    return x


def scanned(x, layers, constrain):
    return jax.lax.scan(jax.checkpoint(lambda x, w: (constrain(layer(x, w)), None)), x, layers)[0]


def step(through, first=unchanged, sums=unchanged):
    def loss(params, tokens):
        x = first(params["embed"][tokens])
        x = through(x, {name: params[name] for name in ("up", "down")}, sums)
        return jnp.mean(jax.nn.log_softmax(x @ params["embed"].T)[..., 0])

    return lambda params, tokens: jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, tokens))


def reported(fun, specs=SPECS, **options):
    return explain(
        pjit(fun, in_shardings=(specs, P("data")), out_shardings=specs), PARAMS, TOKENS, mesh=mesh(), **options
    )


def unconstrained(report):
    return [finding for finding in report.findings if finding.kind == "unconstrained"]


@pytest.mark.parametrize("through", [written_out, scanned])
def test_what_layers_pass_on_is_found_with_the_effect_of_a_constraint(through):
    report = reported(step(through))
    (finding,) = unconstrained(report)
    assert report.findings[0] is finding
    sums = "1 sum" if through is scanned else "4 sums"
    assert f"f32[64,16,64], and {sums} with outputs of layers are sharded as P(None, None, 'data'), not" in finding.text
    assert finding.suggestion == (
        "constrain it where it is first computed to P('data', None, None) with with_sharding_constraint"
    )
    assert finding.site is not None
    assert finding.site[2] == "loss"

    better = reported(step(through, along_the_batch), compiled=True)
    after, before = finding.effect.split(" instead of ")[:2]
    assert shown_bytes(better.predicted.bytes_per_step) in after
    assert shown_bytes(report.predicted.bytes_per_step) in before
    assert better.collectives.bytes_per_step < 0.6 * report.predicted.bytes_per_step
    assert unconstrained(better) == []


def test_each_of_the_sums_is_to_be_constrained_where_one_constraint_does_not_do():
    specs = {"embed": P("data", "model"), "up": P(None, "data"), "down": P(None, "model")}
    report, one = reported(step(written_out), specs), reported(step(written_out, along_the_batch), specs)
    (finding,) = unconstrained(report)
    assert finding.suggestion.startswith("constrain it and each of the sums to P('data', None, None)")
    each = reported(step(written_out, along_the_batch, along_the_batch), specs)
    # Or less: a constraint that is written is one of gradients too.
    assert "tried: a device sends" in finding.effect
    sent, at_most = each.predicted.bytes_per_step, each.predicted.bytes_per_step_at_most
    assert sent < 0.9 * min(other.predicted.bytes_per_step for other in (report, one))
    assert at_most < 0.9 * min(other.predicted.bytes_per_step_at_most for other in (report, one))


def test_streams_that_are_sharded_as_the_batch_or_constrained_otherwise_are_left_alone():
    assert unconstrained(reported(step(written_out), MEGATRON)) == []
    constrained = step(written_out, lambda x: with_sharding_constraint(x, P(None, None, "data")))
    assert unconstrained(reported(constrained)) == []


def test_arrays_that_slices_are_stacked_to_are_no_values_of_the_stream_of_slices():
    def layers(row, w):
        for _ in range(LAYERS):
            row = row + jnp.tanh(row @ w)
        return row

    def step(rows, w):
        return jax.lax.scan(lambda _, row: (None, layers(jnp.sin(row), w)), None, rows)[1]

    fun = pjit(step, in_shardings=(P("data"), P(None, "model")))
    report = explain(fun, f32(8, 8, WIDTH), f32(WIDTH, WIDTH), mesh=mesh())
    values = {value.name: value for value in report.values}
    assert all(len(values[finding.value].aval.shape) == 2 for finding in unconstrained(report))
    assert str(report)
