"""Findings that an expert would write, each with the effect of its suggestion: what the changed program has as well."""

import dataclasses
import html
import re

import jax
import jax.numpy as jnp
import pytest

from partjit import P, pjit, with_sharding_constraint
from partjit.inspect import explain
from partjit.inspect.annotated import shown_spec
from partjit.inspect.changes import Change, facts_of
from partjit.inspect.findings import Finding
from partjit.inspect.folded_findings import folded_findings
from partjit.inspect.outcomes import Costs, outcome_of
from partjit.inspect.places import Known
from partjit.inspect.renewed import renewed_arguments
from partjit.inspect.suggestions import sends_less
from partjit.render.numbers import shown_bytes, shown_flops
from tests.inspect.inspected import f32, mesh


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w["a"]) @ w["b"])


def accumulated(w, xs):
    def body(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(w, x)), None

    grads, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, w), xs)
    return jax.tree.map(lambda p, g: p - g / 16, w, grads)


def momentum(w, state, x):
    state = jax.tree.map(lambda m, g: 0.9 * m + g, state, {"mu": jax.grad(loss)(w, x)})
    return jax.tree.map(lambda p, m: p - m, w, state["mu"]), state


def elementwise(x, y, spec=None):
    y = jnp.tanh(x) + y
    return with_sharding_constraint(y, P() if spec is None else spec) * 2


def there_and_back(x, spec=None):
    y = with_sharding_constraint(jnp.sin(x), P(None, "data") if spec is None else spec)
    return with_sharding_constraint(jnp.tanh(y) * 2, P("data")) + 1


def reported(fun, *args, specs, out=None, **options):
    return explain(pjit(fun, in_shardings=specs, out_shardings=out), *args, mesh=mesh(), **options)


def effect_of(report, change):
    """What a program sends and needs with a change."""
    whole = report.whole
    return outcome_of(whole.lowered, facts_of(whole.unit, whole.inlined, report.donated[0]), change, Known()).costs


def of_kind(report, kind):
    return [finding for finding in report.findings if finding.kind == kind]


W = {"a": f32(256, 128), "b": f32(128, 256)}


def test_sums_that_a_loop_adds_up_need_one_reduction():
    report = reported(accumulated, W, f32(16, 32, 256), specs=(P(), P(None, "data")), out=P())
    found = of_kind(report, "reduced in loop")
    assert {finding.module for finding in found} == {"a", "b"}
    each = 2 * 3 / 4 * 256 * 128 * 4
    assert {finding.effect for finding in found} == {
        f"counted: once it sends {shown_bytes(each)} instead of {shown_bytes(16 * each)}"
    }
    assert found[0].nbytes == 16 * each

    def used(w, x):  # the sum of each iteration is used in it
        return jax.lax.scan(lambda t, x: (t + jnp.tanh(w.T @ x).sum(0), None), jnp.zeros(8), x)[0]

    report = reported(used, f32(32, 8), f32(4, 32, 8), specs=(P("data"), P(None, "data")))
    assert of_kind(report, "reduced in loop") == []


def leapfrog(w, q, xs):
    """A momentum to which gradients over all examples are added, and which the position needs in each iteration."""

    def step(carry, x):
        q, p = carry
        p = p + (q @ x.T - w) @ x
        return (q + 0.1 * p, p), None

    return jax.lax.scan(step, (q, q), xs)[0]


def every_sum(w, q, xs):
    return jax.lax.scan(lambda p, x: (p + w @ x, 2 * p), q, xs)


def next_sum(w, q, xs):
    return jax.lax.scan(lambda p, x: ((new := p + w @ x), new), q, xs)


def until_large(w, q, xs):
    def is_small(carry):
        return carry[1][0, 0] < 100

    return jax.lax.while_loop(is_small, lambda carry: (carry[0] + 1, carry[1] + w @ xs[carry[0]]), (0, q))


@pytest.mark.parametrize("fun", [leapfrog, every_sum, next_sum, until_large])
def test_sums_that_an_iteration_needs_are_reduced_in_it(fun):
    args = f32(16, 256), f32(16, 64), f32(8, 256, 64)
    report = reported(fun, *args, specs=(P(None, "data"), P(), P(None, "data")), out=P())
    assert any(c.times != 1 for c in report.predicted)
    assert of_kind(report, "reduced in loop") == []


def test_replicated_optimizer_state_is_sharded_with_the_effect_that_the_change_has():
    args = W, {"mu": W}, f32(32, 256)
    report = reported(momentum, *args, specs=(P(), P(), P("data")), out=(P(), P()))
    found = of_kind(report, "optimizer state")
    assert [finding.value for finding in found] == [
        value.name for value in report.whole.tree.inputs if value.path.startswith("state")
    ]
    sharded = {"mu": {"a": P("data"), "b": P(None, "data")}}
    changed = reported(momentum, *args, specs=(P(), sharded, P("data")), out=(P(), sharded))
    (effect,) = {finding.effect for finding in found}
    after, before = (shown_bytes(one.collectives.bytes_per_step) for one in (changed, report))
    peak = shown_bytes(report.memory[0].peak)
    assert effect.startswith(f"tried: a device sends {after} instead of {before} and needs about ")
    assert effect.endswith(f" instead of {peak}")
    needed = float(effect.split(" needs about ")[1].split(" kB")[0]) * 1000
    assert needed == pytest.approx(changed.memory[0].peak, rel=0.02)  # the order of operations is not quite the same


def said(change, before):
    """The effect of what a report says after a change, in the words of a finding."""
    (after, peak), (sent, needed) = (
        (shown_bytes(one.predicted.bytes_per_step), shown_bytes(one.memory[0].peak)) for one in (change, before)
    )
    most = shown_bytes(before.predicted.bytes_per_step_at_most)
    sent = sent if sent == most else f"between {sent} and {most}"
    return f"tried: a device sends {after} instead of {sent} and needs about {peak} instead of {needed}"


def zero_1(w, state, x):
    grads = jax.grad(lambda w: (jnp.tanh(x @ w["up"]) @ w["down"]).sum())(w)
    mu = jax.tree.map(jnp.add, state["mu"], grads)
    return jax.tree.map(jnp.subtract, w, mu), {"mu": mu}


def test_parameters_are_sharded_with_their_state_or_like_it_and_never_as_results_alone():
    w, x = {"up": f32(64, 256), "down": f32(256, 64)}, f32(64, 64)
    rows, largest = {"up": P("data"), "down": P("data")}, {"up": P(None, "data"), "down": P("data")}
    report = reported(zero_1, w, {"mu": w}, x, specs=(P(), {"mu": rows}, P("data")), out=(P(), {"mu": rows}), large=1)
    assert of_kind(report, "moved") == []  # to return the new parameters sharded would be paid for by the next step
    found = of_kind(report, "replicated")
    assert [finding.text.rpartition("; ")[2] for finding in found] == ["try P('data', None)", "try P(None, 'data')"]
    both = largest, {"mu": largest}
    better = reported(zero_1, w, {"mu": w}, x, specs=(*both, P("data")), out=both)
    assert {finding.effect for finding in found} == {said(better, report)}
    assert {"shard it and its optimizer state" in finding.suggestion for finding in found} == {True}


def test_a_result_that_is_an_argument_anew_is_sharded_as_both():
    def step(params, x):
        grads = jax.grad(lambda params: jnp.tanh(x @ params["a"] @ params["b"]).sum())(params)
        b = with_sharding_constraint(grads["b"], P(None, "model"))
        return {"a": params["a"], "b": params["b"] - b}

    params, specs = {"a": f32(64, 16), "b": f32(16, 256)}, {"a": P(), "b": P(None, "model")}
    report = reported(step, params, f32(32, 64), specs=(P(), P("data")), out=P(), large=1 << 20)
    (finding,) = of_kind(report, "moved")
    better = reported(step, params, f32(32, 64), specs=(specs, P("data")), out=specs)
    assert finding.effect == said(better, report)
    assert finding.suggestion.startswith("shard it as it is computed, as an argument and as a result, or")


def test_what_a_function_of_lists_returns_is_no_argument_anew():
    def step(xs, w):
        return [*map(jnp.sin, xs), w]

    report = reported(step, [f32(64, 64)] * 2, f32(64, 64), specs=P("data"))
    assert renewed_arguments(report.whole) == {}
    nested = reported(lambda ws: (ws, ws[0].sum()), [f32(8, 8)] * 2, specs=P())
    assert renewed_arguments(nested.whole) == {0: 0, 1: 1}


@pytest.mark.parametrize(
    ("kind", "fun", "specs", "changed"),
    [
        ("gathered elementwise", elementwise, (P("data"), None), P("data")),
        ("back and forth", there_and_back, P("data"), P("data")),
    ],
)
def test_needless_moves_are_found_with_the_effect_of_leaving_them_out(kind, fun, specs, changed):
    args = [f32(64, 256)] * (2 if fun is elementwise else 1)
    report = reported(fun, *args, specs=specs, out=P("data"))
    (finding,) = of_kind(report, kind)
    better = reported(lambda *args: fun(*args, changed), *args, specs=specs, out=P("data"))
    assert better.collectives.bytes_per_step == 0
    assert finding.effect.startswith(f"tried: a device sends 0 B instead of {shown_bytes(finding.nbytes)}")
    assert finding.effect in str(finding)
    assert finding.effect in str(report)
    assert finding.effect in report.to_html()
    for one in (kind, finding.kind):
        assert of_kind(better, one) == []


def test_what_gains_nothing_is_not_suggested_and_what_is_small_is_left_out():
    def fun(x, y):
        return with_sharding_constraint(x, P()).sum(), y.T @ y

    report = reported(fun, f32(8), f32(512, 512), specs=(P("data"), P(("data", "model"))), large=1 << 30)
    assert {finding.kind for finding in report.findings} <= {"other spec"}  # of y
    assert len(report.collectives) > 1


def generated(w, x):
    """A loss of values that are made in the step, which nobody shards."""
    noise = jax.random.normal(jax.random.key(0), (x.shape[0], w["a"].shape[0]))
    return (jnp.tanh(noise @ w["a"]) @ w["b"]).sum() + (jnp.tanh(x @ w["a"]) @ w["b"]).sum()


@pytest.mark.parametrize("remedy", ["batch", "constraint"])
def test_products_that_all_devices_along_an_axis_compute_are_found_with_what_spares_them(remedy):
    args, axis = (W, f32(64, 256)), "model" if remedy == "batch" else "data"
    fun, spec = (loss, P("data")) if remedy == "batch" else (generated, P(("data", "model")))
    report = reported(lambda *args: jax.value_and_grad(fun)(*args), *args, specs=(P(), spec), large=1 << 30)
    found = {finding.text.partition("along ")[2].partition(":")[0]: finding for finding in report.findings}
    finding = found[repr(axis)]
    per_device = report.flops.per_device
    assert finding.kind == "redundant"
    if remedy == "batch":
        assert finding.suggestion == f"shard args[1] over 'model' as well: {shown_spec(P(('data', 'model'), None))}"
        better = reported(lambda *args: jax.value_and_grad(fun)(*args), *args, specs=(P(), P(("data", "model"))))
        after = better.flops.per_device
        assert f"computes {shown_flops(after)} instead of {shown_flops(per_device)}, sends " in finding.effect
        assert "redundant" not in {one.kind for one in better.findings}
    else:
        assert finding.suggestion.endswith("to P('data', None) with with_sharding_constraint")
        assert finding.site is not None
        assert finding.site[1] == generated.__code__.co_firstlineno + 3
        noise = 3 * 2 * 64 * 256 * 128 * 3 / 4  # of three of four devices; what is made of it is the smaller part
        (effect,) = re.findall("computes (.*) Mflop instead of", finding.effect)
        assert float(effect) * 1e6 < per_device - noise


def head(params, x):
    return jnp.log(jnp.exp(jnp.tanh(x @ params["w"]) @ params["head"]).sum(-1)).mean()


def test_an_argument_for_which_most_is_sent_is_sharded_along_another_dimension():
    def step(params, state, x):
        mu = jax.tree.map(jnp.add, state["mu"], jax.grad(head)(params, x))
        return jax.tree.map(jnp.subtract, params, mu), {"mu": mu}

    params, x = {"w": f32(64, 128), "head": f32(128, 1024)}, f32(64, 64)
    rows, columns = ({"w": P(None, "model"), "head": spec} for spec in (P("model"), P(None, "data")))
    args, before = (params, {"mu": params}, x), (rows, {"mu": rows})
    report = reported(step, *args, specs=(*before, P("data")), out=before)
    (finding,) = of_kind(report, "other spec")
    after = columns, {"mu": columns}
    better = reported(step, *args, specs=(*after, P("data")), out=after)
    sent = shown_bytes(better.predicted.bytes_per_step)
    assert finding.effect.startswith(f"tried: a device sends {sent} instead of ")
    assert finding.suggestion == "shard it, and what is like it, as P(None, 'data'), as argument and as result"
    assert finding.text.startswith("params['head'], f32[128,1024] P('model', None), and 1 like it: up to ")
    assert finding.site[1] == head.__code__.co_firstlineno + 1
    assert of_kind(better, "other spec") == []


def test_a_change_is_not_advised_if_one_of_its_bounds_rises():
    before = Costs(1000.0, 5000.0, 100)
    assert sends_less(before, Costs(900.0, 4000.0, 100))
    assert not sends_less(before, Costs(1100.0, 2000.0, 100))  # what is sent now may be less
    assert not sends_less(before, Costs(900.0, 5100.0, 100))
    assert not sends_less(before, Costs(990.0, 4900.0, 100))
    assert not sends_less(before, Costs(900.0, 4000.0, 120))


def test_small_products_and_those_in_a_shard_map_may_be_repeated():
    small = reported(lambda w, x: (x @ w).sum(), f32(64, 64), f32(64, 64), specs=(P(), P("data")))
    assert of_kind(small, "redundant") == []
    local = jax.shard_map(lambda w, x: jnp.tanh(x @ w), mesh=mesh(), in_specs=(P(), P("data")), out_specs=P("data"))
    manual = reported(local, f32(256, 256), f32(64, 256), specs=(P(), P("data")))
    assert manual.flops.per_device > 1e6
    assert of_kind(manual, "redundant") == []


def test_findings_are_in_the_order_of_what_their_suggestions_spare():
    def fun(a, x, y):  # the product is replicated, and larger than what is gathered for nothing; but it is used so
        product = a.T @ a
        return jnp.tanh(product) @ product, elementwise(x, y)

    args = f32(64, 512), f32(256, 256), f32(256, 256)
    report = reported(fun, *args, specs=(P("data"), P("data"), None), out=(P(), P("data")), large=1 << 19)
    first, *_, last = (finding for finding in report.findings if finding.kind not in ("redundant", "other spec"))
    assert (first.kind, last.kind) == ("gathered elementwise", "replicated")
    assert first.nbytes < last.nbytes


def test_a_change_has_the_effect_of_other_specs():
    def fun(x, w):
        return jnp.sin(x @ w).sum(0), jnp.cos(w)

    args = f32(64, 64), f32(64, 64)
    report = reported(fun, *args, specs=(P("data"), P()))
    values = {equation.primitive: equation.outputs[0].number for equation in report.equations}
    cases = [
        (Change(), {}),
        (Change(arguments={1: ((), ("model",))}), {"specs": (P("data"), P(None, "model"))}),
        (Change(results={1: (("data",), ())}), {"out": (None, P("data"))}),
    ]
    for change, specs in cases:
        other = reported(fun, *args, **{"specs": (P("data"), P()), **specs})
        found = effect_of(report, change)
        assert (found.sent, found.peak) == (other.collectives.bytes_per_step, other.memory[0].peak)
    found = effect_of(report, Change(values={values["sin"]: ((), ("model",))}))
    assert found.sent > report.collectives.bytes_per_step
    # The report itself stays what it was.
    assert report.whole.tree.inputs[1].shown_spec == "P(None, None)"


def test_findings_that_repeat_from_layer_to_layer_are_one_for_text_page_data_and_programs():
    def step(params, xs):
        def body(total, x):
            def wide(params):
                return sum((jnp.tanh(x @ layer["up"]) @ layer["down"]).sum() for layer in params["layers"])

            return jax.tree.map(jnp.add, total, jax.grad(wide)(params)), None

        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), xs)[0]

    params = {"layers": [{"up": f32(64, 32), "down": f32(32, 64)}] * 12}
    report = reported(step, params, f32(4, 64, 64), specs=(P(), P(None, "data")), out=P())
    found = of_kind(report, "reduced in loop")
    assert len(found) == 24
    both = [one for one in report.folded_findings if one.kind == "reduced in loop"]
    assert {finding for one in both for finding in one.findings} == {*found}
    assert [one.module for one in both] == ["layers/{0-11}/down", "layers/{0-11}/up"]
    many = both[0]
    assert many.text == f"12 x {many.findings[0].text}"
    assert many.nbytes == sum(finding.nbytes for finding in many.findings)
    assert str(report).count("is reduced over 'data'") == 2
    assert f"{many.text}{many.where}" in str(report)
    section = html.unescape(report.to_html()).partition('class="pj-findings"')[2].partition("</section>")[0]
    assert section.count("is reduced over 'data'") == 2
    data = report.as_data()
    (folded,) = (each for each in data["folded_findings"] if each["module"] == many.module)
    assert (folded["count"], folded["values"]) == (12, [finding.value for finding in many.findings])
    assert len(data["findings"]) == sum(each["count"] for each in data["folded_findings"])


def test_findings_of_different_shapes_specs_or_lines_are_not_folded():
    advice, made = "give it a spec", []
    for k, (shape, line) in enumerate([("2,3", 1), ("2,3", 1), ("2,3", 2), ("3,2", 1)]):
        finding = Finding("replicated", 24 + (shape == "3,2"), f"v{k}, f32[{shape}], is replicated", advice)
        made.append(dataclasses.replace(finding, value=f"v{k}", site=("model.py", line, "loss")))
    assert [len(one.findings) for one in folded_findings(made)] == [2, 1, 1]
    assert folded_findings([]) == ()
