"""The report: what it finds, counts and compares, and how it reads."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import partjit
from partjit import P, colocated, pjit, with_sharding_constraint
from partjit.inspect import explain
from partjit.inspect.findings import findings_of
from partjit.shardy import TensorSharding
from partjit.testing import meshes, sharded_programs, spec_trees
from tests.census import sees


@pytest.fixture(scope="module")
def mesh():
    return partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def matrix(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def kinds(report):
    return [finding.kind for finding in report.findings]


# Findings


def test_large_values_that_every_device_has_are_found(mesh):
    def fun(x, w):
        return (x @ w.T).sum()

    report = explain(pjit(fun, in_shardings=(None, P("data"))), matrix(64, 64), matrix(8, 64), mesh=mesh, large=1000)
    assert kinds(report) == []
    report = explain(pjit(jnp.sin), matrix(64, 64), mesh=mesh, large=1000)
    assert kinds(report) == ["replicated"]  # what comes of it is none of its own
    (argument,) = report.findings
    assert argument.text == ("the argument x, 16.4 kB, is replicated: it has no spec, and no sharding propagates to it")
    assert kinds(explain(pjit(jnp.sin), matrix(64, 64), mesh=mesh)) == []  # it is not large enough


def test_a_value_that_loses_its_axes_is_found(mesh):
    def fun(x):
        return jnp.sin(with_sharding_constraint(x, P()))

    report = explain(pjit(fun, in_shardings=P("data")), matrix(64, 64), mesh=mesh, large=1000)
    assert "replicated" in kinds(report)
    text = next(f.text for f in report.findings if f.kind == "replicated" and "although" in f.text)
    assert (
        text
        == "b, f32[64,64] P(None, None), 16.4 kB, is replicated, although a, f32[64,64] P('data', None), is sharded"
    )


def test_constraints_that_fight_are_found(mesh):
    def fun(x):
        y = with_sharding_constraint(x, P("data"))
        return with_sharding_constraint(y, P("model"))

    report = explain(pjit(fun), matrix(8, 8), mesh=mesh)
    (fight,) = [finding for finding in report.findings if finding.kind == "fight"]
    first = fun.__code__.co_firstlineno
    assert f"is constrained to P('data', None) at {__file__}:{first + 1} in fun and to P('model', None)" in fight.text
    assert fight.site == (__file__, first + 2, "fun")


def test_findings_alike_are_told_together(mesh):
    def fun(*xs):
        return [with_sharding_constraint(jnp.sin(x), P("data")) for x in xs]

    fun = pjit(fun, out_shardings=[P(None, "data")] * 5)
    text = str(explain(fun, *[matrix(8, 8)] * 5, mesh=mesh))
    assert (
        text.count("moved: return it as it is computed, or shard the values that it is computed from like the result")
        == 1
    )
    assert "    5 x result[{0-4}] is computed as P('data', None) and returned as P(None, 'data')\n" in text
    made = explain(fun, *[matrix(8 * k, 8) for k in range(1, 6)], mesh=mesh)
    assert str(made).count("is computed as P('data', None) and returned as P(None, 'data')") == 3
    assert "    ... and 2 more\n" in str(made)


def test_constraints_that_agree_are_no_fight(mesh):
    def fun(x):
        return with_sharding_constraint(with_sharding_constraint(x, P("data")), P("data", None))

    assert "fight" not in kinds(explain(pjit(fun), matrix(8, 8), mesh=mesh))


def test_results_that_are_moved_are_found(mesh):
    def fun(x):
        return with_sharding_constraint(jnp.sin(x), P("data"))

    (moved,) = explain(pjit(fun, out_shardings=P(None, "data")), matrix(8, 8), mesh=mesh).findings
    assert (moved.kind, moved.text) == (
        "moved",
        "result is computed as P('data', None) and returned as P(None, 'data')",
    )


def test_what_a_loop_needs_in_every_iteration_is_gathered_once(mesh):
    def fun(w, x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, None, length=7)[0]

    fun = pjit(fun, in_shardings=(P("data"), P("data")), out_shardings=P("data"))
    report = explain(fun, matrix(8, 8), matrix(16, 8), mesh=mesh)
    assert [(c.kind, c.times) for c in report.collectives] == [("all-gather", 1)]
    assert report.findings == ()


def test_a_carried_value_that_is_gathered_is_not_loop_invariant(mesh):
    def fun(c, w):
        return jax.lax.scan(lambda c, _: (jnp.sin(c @ w), None), c, None, length=7)[0]

    fun = pjit(fun, in_shardings=(P("data", "model"), P(None, "model")), out_shardings=P("data", "model"))
    report = explain(fun, matrix(16, 8), matrix(8, 8), mesh=mesh)
    assert [(c.kind, c.times) for c in report.collectives] == [("all-gather", 7)]
    assert "in loop" not in kinds(report)


def test_values_that_no_spec_can_describe_are_found(mesh):
    def fun(x):
        return jnp.sin(x.reshape(2, 4, 8)).sum()

    report = explain(pjit(fun, in_shardings=P("data")), matrix(8, 8), mesh=mesh)
    finding = next(finding for finding in report.findings if finding.kind == "parts of axes")
    assert "f32[2,4,8] P('data:(1)2', 'data:(2)2', None), is sharded over parts of mesh axes" in finding.text


def test_a_constraint_that_is_not_kept_is_found(mesh):
    """The partitioners of today keep them all, or refuse: here the annotation is made to say otherwise."""

    def fun(x):
        return with_sharding_constraint(x, P("data", "model"))

    partitioned = explain(pjit(fun), matrix(8, 8), mesh=mesh).whole
    assert [finding.kind for finding in findings_of(partitioned, (), 1 << 20)] == []
    (result,) = partitioned.tree.outputs
    partitioned.inlined.shardings[result.number] = TensorSharding((("data",), ()), ((4,), ()))
    (finding,) = [f for f in findings_of(_reread(partitioned), (), 1 << 20) if f.kind == "not kept"]
    assert finding.text == (
        "the constraint of b requests 'model', but the partitioner made it f32[8,8] P('data', None)"
    )


def _reread(partitioned):
    """The same without what its values remember."""
    for value in partitioned.tree.values:
        value.__dict__.pop("spec", None)
    return partitioned


# Work and memory


def test_work_is_counted_as_often_as_it_is_done(mesh):
    def fun(x, w):
        return jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=5)[0]

    report = explain(pjit(fun, in_shardings=(P("data"), None)), matrix(8, 16), matrix(16, 16), mesh=mesh)
    assert report.flops == (5 * 2 * 8 * 16 * 16, 5 * 2 * 2 * 16 * 16, True)


def test_work_in_a_shard_map_is_done_by_all(mesh):
    def fun(x):
        return jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)

    report = explain(fun, matrix(8, 16), mesh=mesh)
    assert report.flops == (8 * 2 * 2 * 2 * 16, 2 * 2 * 2 * 16, True)


def test_the_dearest_branch_counts(mesh):
    def fun(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, jnp.sin, x)

    flops = explain(fun, matrix(8, 8), mesh=mesh).flops
    assert flops.total >= 2 * 8**3
    assert not flops.is_exact


def test_a_branch_that_is_never_taken_costs_nothing(mesh):
    def fun(x):
        return jax.lax.cond(True, jnp.sin, lambda x: x @ x, x)

    assert explain(fun, matrix(8, 8), mesh=mesh).flops.total < 3 * 8**2


def test_memory_is_what_is_alive_at_once(mesh):
    def products(x, w):
        return ((x @ w) @ w) @ w

    def fused(x):
        return jnp.exp(jnp.tanh(x)).sum()

    (memory,) = explain(pjit(products, in_shardings=(P("data"), P())), *[matrix(64, 64)] * 2, mesh=mesh).memory
    assert (memory.arguments, memory.results, memory.donated) == (5 * 4096, 4096, 0)
    assert (memory.saved, memory.temporaries) == (0, 4096)  # two products, one of them in the memory of the result
    (memory,) = explain(pjit(fused, in_shardings=P("data")), matrix(256, 64), mesh=mesh).memory
    assert (memory.peak, memory.temporaries) == (4 * 4096 + 4 + 64, 64)  # the sum on a device, aligned


def test_memory_in_a_loop_is_counted_once(mesh):
    def fun(x):
        def body(c, _):
            return jnp.sin(c @ c), None

        return jax.lax.scan(body, x, None, length=100)[0]

    (memory,) = explain(fun, matrix(64, 64), mesh=mesh).memory
    assert 3 * 16384 <= memory.peak <= 5 * 16384


# Comparing


def test_reports_of_one_function_are_equal(mesh):
    fun = pjit(lambda x: jnp.sin(x).sum(), in_shardings=P("data"))
    difference = explain(fun, matrix(8, 8), mesh=mesh).diff(explain(fun, matrix(8, 8), mesh=mesh))
    assert not difference
    assert str(difference) == "no difference"


def test_other_specs_show_in_values_and_collectives(mesh):
    def fun(x):
        return jnp.sin(x).sum()

    by_data = explain(pjit(fun, in_shardings=P("data")), matrix(8, 8), mesh=mesh)
    by_model = explain(pjit(fun, in_shardings=P(None, "model")), matrix(8, 8), mesh=mesh)
    difference = by_data.diff(by_model)
    changes = [(change.value, change.before, change.after) for change in difference.changes]
    assert changes == [("x", "P('data', None)", "P(None, 'model')"), ("b", "P('data', None)", "P(None, 'model')")]
    assert difference.collectives == (("all-reduce", ("data",), 1, 0), ("all-reduce", ("model",), 0, 1))
    back = by_model.diff(by_data)
    assert [(c.value, c.after, c.before) for c in back.changes] == changes


def test_an_edit_shows_where_it_was_made(mesh):
    def step(x, extra):
        y = jnp.sin(x)
        y = jnp.cos(y) if extra else y
        return y.sum()

    one, other = (
        explain(pjit(functools.partial(step, extra=extra), in_shardings=P("data")), matrix(8, 8), mesh=mesh)
        for extra in (False, True)
    )
    assert (one.diff(other).unmatched, one.diff(other).changes) == (1, ())


# Reading


@pytest.fixture(scope="module")
def report(mesh):
    def layer(params, x):
        hidden = with_sharding_constraint(jax.nn.relu(x @ params["w1"]), P("data", "model"))
        return (hidden @ params["w2"]).sum()

    specs = {"w1": P(None, "model"), "w2": P("model", None)}
    params = {"w1": matrix(16, 32), "w2": matrix(32, 4)}
    return explain(pjit(layer, in_shardings=(specs, P("data"))), params, matrix(8, 16), mesh=mesh)


def test_a_report_reads_as_tables(report):
    text = str(report)
    assert text.startswith("layer on data=4, model=2: ")
    assert "params['w1']  f32[16,32]  P(None, 'model')" in text
    assert "2 collectives (predicted); a device sends" in text
    assert repr(report) == text


def test_the_jaxpr_has_specs_bytes_and_lines(report):
    lines = str(report.jaxpr).splitlines()
    assert lines[0] == "layer on the mesh data=4, model=2"
    assert lines[1].split() == ["a:f32[16,32]", "P(None,", "'model')", "1.0", "kB", "params['w1']"]
    product = next(line for line in lines if "dot_general" in line)
    assert "d:f32[8,32]" in product
    assert "P('data', 'model')" in product
    assert "# test_report.py:" in product


def test_every_equation_has_a_line_in_the_listing(report):
    numbered = [line.number for line in report.jaxpr.lines if line.number is not None]
    assert numbered == [equation.number for equation in report.equations]


def test_data_is_json(report):
    data = json.loads(json.dumps(report.as_data()))
    assert data["name"] == "layer"
    assert data["mesh"] == {"data": 4, "model": 2}
    assert len(data["collectives"]["predicted"]) == len(report.collectives)


def test_programs_with_calls_tell_of_each_fragment(mesh):
    @colocated.colocated_python(out_specs=matrix(8, 16))
    def load(step):
        raise AssertionError("nothing is run")

    def train(w, start):
        def body(w, i):
            batch = with_sharding_constraint(load(start + i), P("data"))
            return w - 0.1 * jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w), None

        return jax.lax.scan(body, w, jnp.arange(5))[0]

    specs = P(None, "model")
    fun = pjit(train, in_shardings=(specs, None), out_shardings=specs)
    report = explain(fun, matrix(16, 32), jnp.int32(0), mesh=mesh, compiled=True)
    assert [memory.program for memory in report.memory] == [fragment.name for fragment in report.plan.fragments]
    assert {collective.program for collective in report.collectives} <= {f.name for f in report.plan.fragments}
    for collectives in (report.predicted, report.collectives):
        assert {collective.times for collective in collectives} == {5}
    assert str(report.plan) in str(report)


@sees("two mesh axes", "a partitioned value")
@settings(deadline=None, max_examples=10)
@given(st.data())
def test_any_program_can_be_reported(data):
    mesh = data.draw(meshes())
    program = data.draw(sharded_programs(mesh=mesh))
    args = program.arguments()
    specs = data.draw(spec_trees(tuple(args), mesh=mesh))
    report = explain(pjit(program, in_shardings=specs), *args, mesh=mesh)
    assert str(report)
    assert len(str(report.jaxpr).splitlines()) > len(report.equations)
    for memory in report.memory:
        assert memory.peak >= max(memory.arguments, memory.results)
    assert report.flops.per_device <= report.flops.total


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda report: report.diff(3), "Report.diff: other must be a report, .* but is 3, an int"),
        (lambda report: report.to_text("3"), "Report.to_text: most must be a whole number of at least 0, but is '3'"),
        (lambda report: report.to_json(indent="  "), "Report.to_json: indent must be a whole number of at least 0"),
        (lambda report: report.to_html(1), "Report.to_html: path must be the path of a file, .* but is 1, an int"),
        (
            lambda report: report.why(3),
            "Report.why: value must be the name, path or line of a value, .* but is 3, an int",
        ),
        (lambda report: report.collectives.to_text("3"), "Collectives.to_text: most must be a whole number"),
        (lambda report: report.diff(report).to_text("3"), "Difference.to_text: most must be a whole number"),
        (lambda report: explain(np.sin, 1.0, mesh="x"), "explain: mesh must be a mesh, but is 'x', a str"),
        (lambda report: explain(np.sin, 1.0, compiled=1), "explain: compiled must be True or False, but is 1, an int"),
        (lambda report: explain(np.sin, 1.0, large="1 MB"), "explain: large must be a number of bytes, but is '1 MB'"),
    ],
)
def test_what_a_report_cannot_be_asked_is_refused_by_name(call, message):
    with pytest.raises(TypeError, match=message):
        call(_report_of_a_sine())


@functools.cache
def _report_of_a_sine():
    return explain(jnp.sin, jax.ShapeDtypeStruct((8,), np.float32))


def test_of_what_no_lines_are_wanted_none_are_shown():
    with pytest.raises(ValueError, match="most must be at least 0, but is -1"):
        _report_of_a_sine().to_text(-1)
    assert "... and 2 more" in _report_of_a_sine().to_text(0)


def test_the_text_begins_with_what_costs_most_and_says_arrays_of_equal_layers_once(mesh):
    def fun(params, x):
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["w"])
        return params, x

    params = {"layers": [{"w": matrix(8, 8)} for _ in range(12)], "b": np.ones(8, np.float32)}
    specs = {"layers": [{"w": P("model")}] * 11 + [{"w": P(None, "model")}], "b": P()}
    report = explain(pjit(fun, in_shardings=(specs, P("data"))), params, matrix(16, 8), mesh=mesh)
    text = str(report)
    assert text.index("compute: ") < text.index(" collectives (predicted)") < text.index("\narray ")
    lines = [line.split() for line in text.partition("\narray ")[2].splitlines()]
    assert lines[0] == ["type", "spec", "count", "per", "device"]
    assert ["params['layers'][{0-10}]['w']", "f32[8,8]", "P('model',", "None)", "11", "1.4", "kB"] in lines
    assert ["params['layers'][11]['w']", "f32[8,8]", "P(None,", "'model')", "1", "128", "B"] in lines
    assert sum(int(line[-3]) for line in lines[1:]) == 2 * 14  # those that are returned have rows of their own
    assert "count  per device" not in str(explain(pjit(lambda x: x), matrix(8, 8), mesh=mesh))
