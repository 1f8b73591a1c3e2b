"""Plans: where programs are cut, what plans show, and that broken ones are found."""

import copy
import dataclasses
import pickle
import re
import xml.etree.ElementTree as ET
from functools import partial

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from jax.sharding import NamedSharding

import partjit
from partjit import P, pjit
from partjit.colocated import colocated_python
from partjit.plan.ir.legality import PlanError
from partjit.plan.ir.nodes import ColocatedCall, Fragment, Transfer
from partjit.plan.ir.verify import verify
from partjit.plan.ir.walk import walk
from partjit.plan.passes import cost
from partjit.plan.passes.choose_emitted import Executables
from partjit.plan.pipeline import structured
from tests.census import saw, sees
from tests.plan import random_control_flow as rc
from tests.plan.control_flow_traced import Traced

like = {"out_specs_fn": lambda *xs: xs[0]}
nothing = {"out_specs_fn": lambda *xs: None}
keep = colocated_python(lambda x: x, **like)
other = colocated_python(lambda x: x, stream="other", **like)
note = colocated_python(lambda x: None, **nothing)
draw = colocated_python(lambda: jnp.ones(8), out_specs=jax.ShapeDtypeStruct((8,), np.float32))
x = np.ones(8, np.float32)


def heavy(x):
    return x + jnp.sum(jnp.ones((128, 128)) @ jnp.ones((128, 128)) * x[0])


def shape_of(fun, *args):
    """The plan as a word: F for a fragment, i for an inline call, t for one on a thread."""
    plan = pjit(fun).plan(*(args or (x,)))
    letters = {Fragment: "F", Transfer: "T"}
    return "".join(
        ("i" if node.is_inline else "t") if isinstance(node, ColocatedCall) else letters[type(node)]
        for node in plan.nodes
    )


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (lambda x: x + 1, "F"),
        (lambda x: keep(x + 1) - 3, "FiF"),
        (lambda x: keep(x) - 3, "iF"),
        (lambda x: keep(x + 1), "Ft"),
        (lambda x: keep(x), "t"),
        (lambda x: keep(keep(x + 1) + 1) + 1, "FiFiF"),
        (lambda x: keep(keep(x + 1)) + 1, "FiiF"),
        (lambda x: keep(x + 1) + other(x - 1), "FtiF"),
        (lambda x: (keep(x + 1) + 1, x * 2), "FiF"),
        (lambda x: (keep(x + 1) + 1, heavy(x)), "FtFF"),
        (lambda x: (note(x + 1), x * 2)[1], "Ft"),
        (lambda x: (note(x + 1), note(x + 2), x * 2)[2], "Ftt"),
        (lambda x: draw() + x, "iF"),
        (lambda x: draw() + heavy(x), "tFF"),
        (lambda x: (note(x), draw() + x)[1], "tiF"),
        (lambda x: (note(x + 1), keep(x + 2) + 1)[1], "FtiF"),
        (lambda x: (keep(x + 2) + 1, note(x + 1))[0], "FitF"),
        (lambda x: x, "F"),
        (lambda x: (note(x), x)[1], "Ft"),
        (lambda x: 3.0, "F"),
    ],
)
def test_the_cut_makes_the_fewest_fragments_that_allow_the_overlap(fun, expected):
    assert shape_of(fun) == expected


def test_calls_that_nobody_waits_for_split_nothing():
    def step(x, count):
        for i in range(count):
            x = jnp.sin(x)
            note(x * i)
        return x

    for count in (1, 5, 20):
        assert shape_of(lambda x, count=count: step(x, count)) == "F" + "t" * count


def test_nested_programs_are_opened_only_if_they_make_calls():
    @pjit
    def plain(x):
        return jnp.sin(x) + 1

    @jax.checkpoint
    def with_call(x):
        return keep(jnp.cos(x)) * 2

    plan = pjit(lambda x: with_call(plain(x))).plan(x)
    names = [[eqn.primitive.name for eqn in fragment.jaxpr.eqns] for fragment in plan.fragments]
    assert names == [["pjit", "cos"], ["mul"]]


def test_constraints_of_opened_programs_stay():
    mesh = partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    with mesh:
        inner = pjit(lambda x: keep(x + 1) * 2, in_axis_resources=P("y"), out_axis_resources=P("x"))
        plan = pjit(lambda x: inner(x) + 1, in_axis_resources=None, out_axis_resources=None).plan(x)
    specs = [str(eqn.params["spec"]) for f in plan.fragments for eqn in f.jaxpr.eqns if "spec" in eqn.params]
    assert specs == ["PartitionSpec('y',)", "PartitionSpec('x',)"] or specs == ["P('y',)", "P('x',)"]


def test_a_plan_shows_the_function_that_runs():
    def step(params, n):
        batch = draw()
        loss = jnp.sum(params["w"] * batch)
        note(loss)
        return {"w": params["w"] - loss}, n

    f = pjit(step, donate_argnums=0)
    plan = f.plan({"w": x}, 3)
    assert plan.source == (
        "def step(params_w, n):\n"
        "    (x_lambda_result,) = x_lambda()  # inline, the caller's stream\n"
        "    out_0_w, out_1, x1 = fragment_0(params_w, x_lambda_result, n)  # 3 equations\n"
        "    release(params_w)\n"
        "    del params_w, x_lambda_result, n\n"
        "    x_lambda_2(x1)  # on a thread, the caller's stream\n"
        "    del x1\n"
        "    return (out_0_w, out_1)\n"
    )
    assert str(plan) == plan.source.rstrip()
    assert repr(plan) == "<plan of step: 1 fragment, 2 calls, 0 transfers>"


def test_long_lists_are_cut_short_for_readers_only():
    f = pjit(lambda xs: [keep(x + 1) * 2 for x in xs])
    plan = f.plan([x] * 20)
    assert "... " in str(plan)
    assert "... " not in plan.source
    compile(plan.source, "plan", "exec")


def test_what_repeats_in_a_plan_is_shown_once():
    log = colocated_python(lambda x: None, out_specs_fn=lambda x: None, stream="log")

    def calls(count):
        def fun(x):
            for k in range(count):
                x = keep(jnp.sin(x))
                if k % 2:
                    log(x)
            return x

        return pjit(fun).plan(x)

    few, many = calls(50), calls(200)
    compile(many.source, "plan", "exec")
    assert len(many.source.splitlines()) > 800
    for plan in (few, many):
        assert len(str(plan).splitlines()) < 45
        assert re.search(r"# \.\.\. \d+ times alike, \d+ lines each \.\.\.", str(plan))
        assert str(plan).splitlines()[1] == plan.source.splitlines()[1]
        assert str(plan).splitlines()[-1] == plan.source.splitlines()[-1]
    drawn = many.to_svg()
    assert drawn == many.to_svg()
    assert re.search(r"\d+ times alike", drawn)
    assert len(drawn) < 1.1 * len(few.to_svg())
    # Each node has its cost, if that is given.
    assert "times alike" not in few.to_svg({"nothing": 1.0})


@pytest.mark.parametrize("name", ["lambda", "class", "wait", "release", "fragment_0", "print", "é", "None"])
def test_any_name_gives_a_plan_that_runs(name):
    def fun(**given):
        return {key: keep(value) + 1 for key, value in given.items()}

    fun.__name__ = name
    f = pjit(fun)
    np.testing.assert_array_equal(f(**{name: x, "b": x})[name], x + 1)
    compile(f.plan(**{name: x}).source, "plan", "exec")


def test_the_graph_has_data_and_order_edges():
    def fun(x):
        note(x)
        return keep(x + 1) * 2

    plan = pjit(fun).plan(x)
    graph = plan.graph
    assert nx.is_directed_acyclic_graph(graph)
    note_name, keep_name = (call.name for call in plan.calls)
    assert graph.edges[note_name, keep_name]["kind"] == "order"
    assert graph.edges["fragment_0", keep_name]["kind"] == "data"
    assert graph.edges["fragment_0", keep_name]["nbytes"] == 32
    assert isinstance(graph.nodes["fragment_0"]["node"], Fragment)
    text = plan.to_mermaid()
    assert text.startswith("flowchart TD")
    assert f"{note_name} -.-> {keep_name}" in text
    assert text.count("-->") == sum(data["kind"] == "data" for _, _, data in graph.edges(data=True))


def test_the_critical_path_is_the_longest_chain():
    plan = pjit(lambda x: keep(x + 1) + other(x - 1)).plan(x)
    first, second = (call.name for call in plan.calls)
    costs = {"fragment_0": 1.0, first: 5.0, second: 7.0, "fragment_1": 2.0}
    assert plan.critical_path(costs) == (("fragment_0", second, "fragment_1"), 10.0)
    assert plan.critical_path(lambda node: costs[node.name]) == plan.critical_path(costs)
    assert plan.critical_path()[1] == 3


# Broken plans


def flat_of(fun, args):
    traced = fun.trace(*args)
    plan = fun.plan(*args)
    return plan, structured(traced.jaxpr, plan.mesh, executables=Executables.of(plan.mesh, None))


def replaced(plan, k, **changes):
    nodes = [*plan.nodes]
    nodes[k] = dataclasses.replace(nodes[k], **changes)
    return dataclasses.replace(plan, nodes=tuple(nodes))


def without(plan, k):
    return dataclasses.replace(plan, nodes=tuple(node for i, node in enumerate(plan.nodes) if i != k))


def broken(plan):
    """Plans that differ from a good one in one thing that must not be."""
    for k, node in enumerate(plan.nodes):
        yield f"without {node.name}", without(plan, k)
        yield f"{node.name} twice", dataclasses.replace(plan, nodes=(*plan.nodes, node))
        if isinstance(node, Fragment) and node.inputs:
            later = {v for other in plan.nodes[k + 1 :] for v in other.inputs} | {*plan.outputs}
            for i, value in enumerate(node.inputs):
                if value in later:
                    donated = tuple(j == i for j in range(len(node.inputs)))
                    yield f"{node.name} given {value.name}", replaced(plan, k, donated=donated)
            yield f"{node.name} without an argument", replaced(plan, k, inputs=node.inputs[1:])
        if isinstance(node, ColocatedCall):
            for i, pinned in enumerate(node.pinned):
                if pinned and not node.is_inline:
                    loose = tuple(flag and j != i for j, flag in enumerate(node.pinned))
                    yield f"{node.name} not holding", replaced(plan, k, pinned=loose)
    for before, after in plan.order:
        names = [node.name for node in plan.nodes]
        i, j = names.index(before), names.index(after)
        nodes = [*plan.nodes]
        nodes[i], nodes[j] = nodes[j], nodes[i]
        yield f"{after} before {before}", dataclasses.replace(plan, nodes=tuple(nodes))


def complaint(plan, flat):
    try:
        verify(plan, flat)
    except PlanError as error:
        return str(error)
    return "none"


@sees("a colocated call", "two streams", "a donated argument", "a nested function", "a broken plan")
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    max_examples=rc.EXAMPLES,
)
@given(rc.straight_programs(6))
def test_broken_plans_are_found(mesh, monkeypatch, program):
    monkeypatch.setattr(cost, "WORTH_A_DISPATCH", program.worth_a_dispatch)
    monkeypatch.setattr(cost, "WORTH_LEAVING", program.worth_a_dispatch)
    f = pjit(
        Traced(program, mesh),
        in_axis_resources=(None, P("x", "y"), P("y"), None),
        out_axis_resources=program.out_specs,
        donate_argnums=(1,) if program.donated else (),
        host_argnums=4,
    )
    matrix = jax.device_put(np.ones(rc.SHAPE, np.float32), NamedSharding(mesh, P("x", "y")))
    with mesh:
        plan, flat = flat_of(f, (np.int32(1), matrix, matrix, np.float32(1), None))
        verify(plan, flat)
        for what, wrong in broken(plan):
            assert "which is a fault of partjit" in complaint(wrong, flat), what
            saw("a broken plan")


# Pictures


def test_a_plan_is_drawn_with_what_is_in_loops_and_branches():
    @pjit
    def fun(x):
        def turn(v, k):
            return jax.lax.cond(k > 1, keep, lambda v: v, other(v) + 1), None

        return jax.lax.scan(turn, x, jnp.arange(3))[0]

    plan = fun.plan(x)
    drawn = plan.to_svg()
    assert drawn == plan.to_svg()
    root = ET.fromstring(drawn)
    texts = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    for node in walk(plan.nodes):
        assert (node.callee.name if isinstance(node, ColocatedCall) else node.name) in texts
    said = {"arguments", "results", "3 iterations", "one of 2", "case 0", "case 1", "carried in", "carried on", "32 B"}
    assert said <= {*texts}
    assert "nothing to do" in texts, "a branch that gives what it gets"
    assert root.attrib["aria-label"] == "The plan of fun"


def test_edges_of_a_picture_are_those_of_the_graph():
    plan = pjit(lambda x: (note(x + 1), other(keep(x) + 1))[1]).plan(x)
    drawn = plan.to_svg()
    titles = [title.text for title in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}title")]
    edges = {tuple(title.split("\n")[0].split(" \u2192 ")) for title in titles if " \u2192 " in title}
    assert edges == {*plan.graph.edges}
    (order,) = [title for title in titles if "order without data" in title]
    assert tuple(order.split("\n")[0].split(" \u2192 ")) in plan.order


def test_the_critical_path_of_a_plan_stands_out_with_its_costs():
    plan = pjit(lambda x: (note(x + 1), other(keep(x) + 1))[1]).plan(x)
    assert "critical path" not in plan.to_svg()
    costs = {node.name: 0.25 for node in plan.nodes}
    path, _ = plan.critical_path(costs)
    for given_costs in (costs, lambda node: costs[node.name]):
        drawn = plan.to_svg(given_costs)
        assert drawn.count("250.00 ms") == len(plan.nodes)
        assert len(re.findall(r"<rect [^>]*pj-s-red", drawn)) == len(path)
    assert "ms" not in re.sub(r"<style>.*?</style>", "", plan.to_svg({"nothing": 1.0}))


def test_a_plan_shows_itself_as_a_page():
    @partial(pjit, donate_argnums=0)
    def fun(x):
        note(x)
        return x + 1

    plan = fun.plan(x)
    page = ET.fromstring(plan._repr_html_())
    assert page.find("pre").text == plan.source
    fragments, calls = ([cell.text for cell in table.iter("td")] for table in page.iter("table"))
    (fragment,) = plan.fragments
    assert fragments[:4] == [fragment.name, str(len(fragment.jaxpr.eqns)), "32 B", "64 B"]
    assert fragments[4] == "x"
    (call,) = plan.calls
    assert calls[:5] == [call.name, call.callee.name, call.where, "32 B", "0 B"]
    file, line, function = call.site
    assert calls[5] == f"{file}:{line} in {function}"


def test_a_plan_without_calls_has_no_table_of_them():
    page = ET.fromstring(pjit(lambda x: x + 1).plan(x)._repr_html_())
    assert [caption.text for caption in page.iter("caption")] == ["Fragments"]


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (3, "critical_path: costs must be seconds by the name of a node, .*, but is 3, an int"),
        ({"fragment_0": "long"}, "costs of fragment_0 must be a number of seconds, but is 'long', a str"),
        (lambda node: None, "costs of fragment_0 must be a number of seconds, but is None"),
    ],
)
def test_costs_that_are_none_are_refused_by_name(costs, message):
    plan = pjit(lambda x: x + 1).plan(np.ones(8, np.float32))
    for method in (plan.critical_path, plan.to_svg):
        with pytest.raises(TypeError, match=message):
            method(costs)


KINDS = {
    "same": (lambda total: total, True),
    "shorter": (lambda total: total[:4], False),
    "longer": (lambda total: jnp.concatenate([total, total]), False),
    "of more dimensions": (lambda total: total.reshape(2, 4), False),
    "of a wider dtype": (lambda total: jax.lax.complex(total, total), False),
    "of a narrower dtype": (lambda total: total.astype(jnp.float16), False),
    "of another dtype": (lambda total: total.astype(jnp.int32), False),
}


@pytest.mark.parametrize("order", ["abk", "bka", "kab", "kba"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_many_dying_values_are_donated_as_there_are_results_of_their_kind(order, kind):
    convert, is_same = KINDS[kind]
    for count in range(1, 4):

        def fun(x, count=count):
            values = {"a": x + 1, "b": x + 2, "k": x + 3}
            total = keep(x + 4)
            for name in order:
                total = jnp.sin(total) * values[name]
            return values["k"], *(convert(total + i) for i in range(count))

        plan = pjit(fun).plan(x)
        first, _, second = plan.nodes
        dying = [value for value in second.inputs if value in first.outputs and value not in plan.outputs]
        assert len(dying) == 2
        donated = [value for value, flag in zip(second.inputs, second.donated, strict=True) if flag]
        assert donated == (dying[:count] if is_same else [])


def test_a_copy_of_a_plan_is_the_plan_and_pickles_are_refused():
    plan = pjit(keep).plan(x)
    assert copy.copy(plan) is copy.deepcopy({"plan": plan})["plan"] is plan
    with pytest.raises(TypeError, match=r"the plan of .* cannot be pickled: .* Send `plan.source`"):
        pickle.dumps(plan)
