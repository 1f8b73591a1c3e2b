"""The machine model: times of collectives and of a step, and what is measured."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from partjit import Mesh, P, pjit
from partjit.inspect import explain
from partjit.inspect.collectives import UnknownMove
from partjit.render.numbers import shown_duration
from partjit.search import Link, Machine, TimedCollective, estimate_time, h100, measure_machine, tpu_v5p, tpu_v6e
from partjit.search.machine import CLASSES
from partjit.search.measure import _SIZES, _fitted
from partjit.search.step_time import seconds_of_step, step_time
from tests.census import saw, sees

ABSTRACT = AbstractMesh((16, 4, 2), ("slice", "data", "model"))
TOY = Machine("toy", {"f32": 1e9, "f16": 4e9}, 1 << 30, 1e8, {"data": Link(1e8), "model": Link(1e7)})


@sees("one axis", "two axes", "another order")
@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 100)), min_size=1, max_size=3),
    st.floats(1.0, 1e6),
    st.randoms(use_true_random=False),
)
def test_a_gather_takes_what_the_axes_take_in_the_best_order(axes, nbytes, random):
    links = {f"a{k}": Link(float(bandwidth), 0.0) for k, (_, bandwidth) in enumerate(axes)}
    sizes = {f"a{k}": size for k, (size, _) in enumerate(axes)}
    machine = Machine("drawn", {"f32": 1.0}, 1, 1.0, links)
    whole = nbytes * math.prod(sizes.values())
    seconds = machine.seconds_to_send("all-gather", sizes, nbytes, whole)
    order = [*sizes]
    random.shuffle(order)
    saw("one axis", len(order) == 1)
    saw("two axes", len(order) == 2)
    saw("another order", order != sorted(order, key=lambda axis: links[axis].bandwidth))
    has, other = nbytes, 0.0
    for axis in order:
        other += (sizes[axis] - 1) * has / links[axis].bandwidth
        has *= sizes[axis]
    assert seconds <= other * (1 + 1e-9)
    assert machine.seconds_to_send("reduce-scatter", sizes, whole, nbytes) == pytest.approx(seconds)
    assert machine.seconds_to_send("all-reduce", sizes, whole, whole) == pytest.approx(2 * seconds)
    most = min(link.bandwidth for link in links.values())
    assert seconds <= (whole - nbytes) / most * (1 + 1e-9), "not more than if all axes were as slow as the slowest"


def test_a_message_takes_its_latency_however_small_it_is():
    machine = Machine("toy", {"f32": 1.0}, 1, 1.0, {"x": Link(1e30, 1.0)})
    for kind, messages in (("all-gather", 3), ("all-reduce", 6), ("all-to-all", 3), ("collective-permute", 1)):
        assert machine.seconds_to_send(kind, {"x": 8}, 1.0, 1.0) == pytest.approx(messages)
    assert machine.seconds_to_send("all-gather", {"x": 1}, 1.0, 1.0) == 0.0


@sees("one axis", "two axes", "two axes together")
@given(
    st.sets(st.sampled_from([("x",), ("y",), ("x", "y")]), min_size=1),
    st.sampled_from([("x",), ("y",), ("x", "y"), ("y", "x")]),
    st.sampled_from(["all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"]),
    st.floats(1.0, 1e6),
)
def test_a_collective_that_was_measured_takes_what_was_measured(measured, axes, kind, nbytes):
    sizes = {axis: {"x": 4, "y": 2}[axis] for axis in axes}
    each = {over: TimedCollective(kind, over, 1.0 + k, 10.0 * (k + 1)) for k, over in enumerate(sorted(measured))}
    links = {"x": Link(1e3, 0.5), "y": Link(1e4, 0.25)}
    plain = Machine("drawn", {"f32": 1.0}, 1, 1.0, links)
    machine = dataclasses.replace(plain, collectives=tuple(each.values()))
    assert machine == dataclasses.replace(plain, collectives=[*each.values()])
    whole = nbytes * math.prod(sizes.values())
    operand, result = (whole, nbytes) if kind == "reduce-scatter" else (nbytes, nbytes)
    if kind == "all-gather":
        result = whole
    seconds = machine.seconds_to_send(kind, sizes, operand, result)
    together = each.get(tuple(sorted(axes)))
    alone = [each.get((axis,)) for axis in axes]
    saw("two axes together", len(axes) == 2 and together is not None)
    saw("two axes", len(axes) == 2 and together is None and None not in alone)
    saw("one axis", len(axes) == 1 and together is not None)
    if together is not None:
        assert seconds == pytest.approx(together.latency + max(operand, result) / together.bandwidth)
    elif None not in alone:
        least = sum(one.latency for one in alone)
        assert least < seconds <= sum(one.seconds(max(operand, result)) for one in alone) * (1 + 1e-9)
    else:
        assert seconds == plain.seconds_to_send(kind, sizes, operand, result)
    other = "all-reduce" if kind != "all-reduce" else "all-gather"
    assert machine.seconds_to_send(other, sizes, nbytes, nbytes) == plain.seconds_to_send(other, sizes, nbytes, nbytes)


@sees("a bandwidth that is read", "one that is not")
@given(st.floats(1e-6, 1e-3), st.floats(1e6, 1e10), st.floats(1e-6, 1e-2), st.sampled_from([2, 4, 6, 8]))
def test_latency_and_bandwidth_are_read_from_the_times_of_a_small_and_a_large_one(latency, bandwidth, call, count):
    sizes = _SIZES["cpu"]
    nbytes = 4 * (sizes.large // count * count)
    seconds = latency + nbytes / bandwidth
    taken = {("all-reduce", ("x",), False): latency, ("all-reduce", ("x",), True): call + seconds, "call": call}
    fitted = _fitted("all-reduce", ("x",), count, sizes, taken)
    assert fitted.latency == latency
    is_read = call < seconds and latency < nbytes / bandwidth  # as in all that is worth to be called a bandwidth
    saw("a bandwidth that is read" if is_read else "one that is not")
    if is_read:
        assert fitted.seconds(nbytes) == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize("preset", [tpu_v5p, tpu_v6e, h100])
def test_presets_connect_every_axis_and_compute_narrower_types_no_slower(preset):
    machine = preset(ABSTRACT)
    assert [*machine.links] == [*ABSTRACT.axis_names]
    rates = [machine.rate(dtypes) for dtypes in CLASSES]
    assert rates == sorted(rates)
    assert hash(machine) == hash(preset(ABSTRACT))
    assert machine == preset(ABSTRACT)


def test_axes_between_nodes_and_between_slices_are_slower():
    assert h100(ABSTRACT).links["data"] == h100(ABSTRACT).links["model"]
    assert h100(ABSTRACT).links["slice"].bandwidth < h100(ABSTRACT).links["data"].bandwidth
    assert h100(ABSTRACT, per_node=4).links["data"] == h100(ABSTRACT).links["slice"], "partly within a node"
    v5p = tpu_v5p(ABSTRACT, dcn=["slice"])
    assert v5p.links["slice"].bandwidth < v5p.links["data"].bandwidth
    with pytest.raises(ValueError, match="dcn must be the name of an axis of the mesh, slice, data, model, but is 'x'"):
        tpu_v5p(ABSTRACT, dcn=["x"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops": {}}, "flops must be the rate of at least one class"),
        ({"flops": {"bf16": 1.0}}, "flops must be by classes of dtypes, f64, f32, f16, 8bit, but is 'bf16'"),
        ({"flops": {"f32": 0}}, r"flops\['f32'\] must be a number of operations per second above 0"),
        ({"memory": 0}, "memory must be at least 1"),
        ({"memory_bandwidth": -1.0}, "memory_bandwidth must be a number of bytes per second above 0"),
        ({"links": {"x": 1e9}}, r"links\['x'\] must be a Link"),
        ({"launch": -1e-6}, "launch must be a number of seconds of at least 0"),
        ({"convolutions": {"f32": 0}}, r"convolutions\['f32'\] must be a number of operations per second above 0"),
        ({"collectives": [Link(1e9)]}, "collectives must be a TimedCollective"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(change, message):
    fields = {"name": "x", "flops": {"f32": 1.0}, "memory": 1, "memory_bandwidth": 1.0, "links": {}}
    with pytest.raises((TypeError, ValueError), match=f"Machine: {message}"):
        Machine(**{**fields, **change})


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


def layer(x, w):
    def body(x, w):
        return jnp.tanh(x @ w), None

    return jax.lax.scan(body, x, w)[0]


ARGS = (jax.ShapeDtypeStruct((64, 32), np.float32), jax.ShapeDtypeStruct((5, 32, 32), np.float32))


def estimate(mesh, specs, **options):
    return estimate_time(explain(pjit(layer, in_shardings=specs), *ARGS, mesh=mesh), TOY, **options)


def test_the_causes_are_those_of_the_program(mesh):
    alone, data, model = (estimate(mesh, specs) for specs in (P(), (P("data"), P()), (P(), P(None, "model"))))
    (product,) = (one for one in alone.causes if one.what == "dot_general f32" and one.kind == "compute")
    assert product.amount == 5 * 2 * 64 * 32 * 32
    assert product.seconds == pytest.approx(product.amount / 1e9)
    assert product.where.startswith("test_machine.py:")
    (shared,) = (one for one in data.causes if one.what == "dot_general f32" and one.kind == "compute")
    assert shared.amount == product.amount / 2
    assert not data.communication
    assert data.computing < alone.computing
    assert {one.what for one in model.causes if one.kind == "collective"} == {"all-reduce over model"}
    reduced = next(one for one in model.causes if one.kind == "collective")
    assert reduced.amount == 5 * 64 * 32 * 4 * 2 * 3 / 4
    assert reduced.seconds == pytest.approx(reduced.amount / 1e7 + 5 * 4e-6)


def test_a_launch_is_counted_for_each_equation_that_is_not_fused(mesh):
    report = explain(pjit(layer, in_shardings=(P("data"), P())), *ARGS, mesh=mesh)
    plain, launched = (estimate_time(report, dataclasses.replace(TOY, launch=launch)) for launch in (0.0, 1e-3))
    launches = [one for one in launched.causes if one.kind == "launch"]
    (product,) = (one for one in launches if one.what == "dot_general f32")
    assert product.amount == 5, "the iterations of the loop"
    assert product.seconds == pytest.approx(5e-3)
    assert launched.seconds_of("launch") == pytest.approx(1e-3 * sum(one.amount for one in launches))
    assert launched.total == pytest.approx(plain.total + launched.seconds_of("launch"))
    assert "launches" in launched.to_text().splitlines()[0]
    assert "launch" not in plain.to_text()


def test_convolutions_have_a_rate_of_their_own(mesh):
    def blurred(x, w):
        return jax.lax.conv(x, w, (1, 1), "SAME")

    fun = pjit(blurred, in_shardings=(P("data"), P()))
    report = explain(fun, *(jax.ShapeDtypeStruct(s, np.float32) for s in ((4, 8, 16, 16), (8, 8, 3, 3))), mesh=mesh)
    plain, slow = (
        estimate_time(report, dataclasses.replace(TOY, memory_bandwidth=1e15, convolutions=rates))
        for rates in ({}, {"f64": 1e8})
    )
    assert slow.seconds_of("compute") == pytest.approx(10 * plain.seconds_of("compute"))
    assert TOY.rate("f32", "conv_general_dilated") == TOY.rate("f32")


@pytest.mark.parametrize("overlap", [0.0, 0.25, 1.0])
def test_overlap_hides_communication_behind_what_is_computed(mesh, overlap):
    step = estimate(mesh, (P(), P(None, "model")), overlap=overlap)
    assert step.hidden == min(overlap * step.communication, step.computing)
    assert step.total == pytest.approx(step.computing + step.communication - step.hidden)
    assert step.total >= max(step.computing, step.communication * (1 - overlap))
    assert sum(cause.seconds for cause in step.causes) == pytest.approx(step.computing + step.communication)
    assert step.to_text().count("\n") == 1 + len(step.causes)
    assert "all-reduce over model" in step._repr_html_()


@sees("a bound", "none")
@given(st.lists(st.integers(1, 10**9), max_size=4), st.floats(0.0, 1.0), st.integers(1, 3))
def test_what_is_not_predicted_is_priced_by_what_it_sends_as_a_rule_and_its_bound_is_said(bounds, overlap, times):
    moves = [UnknownMove(operation="stablehlo.scatter", bytes_at_most=bound, times=times) for bound in bounds]
    of_cpus = UnknownMove(operation="cpu.all-reduce of bf16", bytes_at_most=10**12)
    sizes = {"data": 4, "model": 2}
    estimated = step_time([], [], [*moves, of_cpus], sizes, TOY, overlap)
    most = times * sum(bounds) / TOY.links["model"].bandwidth
    saw("a bound" if bounds else "none")
    assert estimated.at_most == pytest.approx(most)
    assert estimated.total == pytest.approx(times * sum(one.bytes_likely for one in moves) / 1e7)
    assert (estimated.at_most, estimated.total) == pytest.approx(seconds_of_step([], [], moves, sizes, TOY, overlap))
    assert estimated.total <= estimated.at_most
    assert all(0.02 * one.bytes_at_most <= one.bytes_likely <= 0.2 * one.bytes_at_most for one in moves)
    assert of_cpus.bytes_likely == of_cpus.bytes_at_most
    up_to = f" per step, or up to {shown_duration(estimated.at_most)}, on toy: "
    assert (up_to in estimated.to_text()) == bool(bounds)
    assert bounds or " per step on toy: " in estimated.to_text()
    expected = [("unpredicted", "scatter, as a rule")] if bounds else []
    assert [(cause.kind, cause.what) for cause in estimated.causes] == expected


def test_of_branches_in_branches_one_counts(mesh):
    def fun(x):
        inner = (lambda x: x + x.max(0, keepdims=True)), (lambda x: x - x.min(0, keepdims=True))
        return jax.lax.cond(x[0, 0] > 0, lambda x: 2 * x, lambda x: jax.lax.cond(x[0, 0] > -1, *inner, x), x)

    report = explain(pjit(fun, in_shardings=P("data")), ARGS[0], mesh=mesh)
    causes = [cause for cause in estimate_time(report, TOY).causes if cause.kind == "collective"]
    assert sum(cause.amount for cause in causes) == pytest.approx(report.collectives.bytes_per_step)


def test_what_cannot_be_estimated_is_refused(mesh):
    report = explain(pjit(layer, in_shardings=P()), *ARGS, mesh=mesh)
    with pytest.raises(TypeError, match="estimate_time: report must be a report of partjit"):
        estimate_time(layer, TOY)
    with pytest.raises(TypeError, match="estimate_time: machine must be a Machine"):
        estimate_time(report, "h100")
    with pytest.raises(ValueError, match="overlap must be a number between 0 and 1, but is 2"):
        estimate_time(report, TOY, overlap=2)
    with pytest.raises(ValueError, match="machine H100 has no link for the axis 'data' of the mesh, but for x"):
        estimate_time(report, h100(AbstractMesh((8,), ("x",))))


def test_a_measured_machine_has_rates_of_this_one(mesh):
    machine = measure_machine(mesh, seconds=0.05)
    assert [*machine.flops] == ["f32", "f16"]
    assert all(rate > 1e6 for rate in (*machine.flops.values(), machine.memory_bandwidth))
    assert [*machine.links] == ["data", "model"]
    assert all(link.latency > 0 and link.bandwidth > 1e4 for link in machine.links.values())
    over = {one.axes for one in machine.collectives}
    assert over == {("data",), ("model",), ("data", "model")}
    assert len({(one.kind, one.axes) for one in machine.collectives}) == len(machine.collectives) == 5 * len(over)
    assert machine.launch > 0
    assert machine.convolutions["f32"] > 1e6
    assert "all-to-all          data x model" in str(machine)
    with pytest.raises(ValueError, match="seconds must be a number of seconds above 0"):
        measure_machine(mesh, seconds=0)
