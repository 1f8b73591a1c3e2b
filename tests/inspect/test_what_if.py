"""An answer to a question is what `explain` says of the function with these specs."""

import functools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import Var, jaxpr_as_fun

import partjit
from partjit import UNSPECIFIED, P, ShardingError, pjit, with_sharding_constraint
from partjit._jax.jaxprs import closed_jaxpr, new_var
from partjit.inspect import asked_process, explain
from partjit.inspect.tracing import trace_function
from partjit.inspect.what_if import Question, WhatIf, WhatIfError
from partjit.inspect.why.lookup import ValueNotFoundError
from partjit.plan.ir.build import constraint
from partjit.spec import ParsedPartitionSpec
from partjit.testing import meshes, partition_specs, sharded_programs
from tests.census import saw, sees
from tests.effort import EVERYTHING
from tests.inspect.inspected import f32, mesh, sgd, unrolled_loss, unrolled_params


def moved(collectives):
    """What collectives and unknown moves are, wherever they come from."""
    known = [(c.kind, c.axes, str(c.groups), c.operand, c.result, c.sent, c.times) for c in collectives]
    return sorted(known), sorted((one.operation, one.bytes_at_most, one.times) for one in collectives.unknown)


def same(answer, report, is_constrained=False):
    """Whether an answer is what a report says.

    A constraint is an equation of the reported program; the memory estimate looks at what uses a value.
    """
    (memory,) = report.memory
    values = (*report.whole.tree.inputs, *report.whole.results)
    specs = {value.path: value.spec for value in values if value.is_array}
    assert moved(answer.collectives) == moved(report.predicted)
    assert answer.flops == pytest.approx(report.flops.per_device, rel=1e-12)
    assert {**answer.arguments, **answer.results} == specs
    assert answer.bytes_sent == pytest.approx(sum(answer.bytes_by_axes.values()))
    assert answer.argument_bytes == memory.arguments
    if not is_constrained:
        assert answer.peak_memory == memory.peak
        assert answer.is_lower_bound == bool(report.predicted.unknown or memory.unknown or not report.flops.is_exact)
        assert [*answer.collectives] == [*report.predicted]
        assert answer.collectives.unknown == report.predicted.unknown
    return True


@st.composite
def asked(draw):
    """A mesh, a program, and specs of its arguments and results before and in a question."""
    mesh = draw(meshes(mesh_shapes=[(4, 2), (2, 2, 2), (8,)]))
    program = draw(sharded_programs(mesh=mesh, partitioned=True, max_steps=3))

    def specs(shapes):
        some = [st.one_of(st.just(UNSPECIFIED), partition_specs(mesh=mesh, shape=shape)) for shape in shapes]
        return tuple(map(draw, some))

    return mesh, program, *(specs(shapes) for shapes in (program.arg_shapes, program.result_shapes) * 2)


@sees("two mesh axes", "a partitioned value", "a collective", "a loop", "a constraint")
@given(asked(), st.data())
@settings(deadline=None, max_examples=60 if EVERYTHING else 15)
def test_an_answer_is_what_explain_says_with_these_specs(drawn, data):
    mesh, program, ins, outs, other_ins, other_outs = drawn
    args = program.arguments()
    engine = WhatIf(pjit(program, in_shardings=ins, out_shardings=outs), *args, mesh=mesh, isolated=False)
    assert same(engine.ask(Question()), explain(pjit(program, in_shardings=ins, out_shardings=outs), *args, mesh=mesh))
    arguments = {leaf.name: spec for leaf, spec in zip(engine.arguments, other_ins, strict=True)}
    results = {leaf.name: spec for leaf, spec in zip(engine.results, other_outs, strict=True)}
    question = Question(arguments, results)
    other = pjit(program, in_shardings=other_ins, out_shardings=other_outs)
    report = explain(other, *args, mesh=mesh)
    assert same(engine.ask(question), report)
    if report.predicted:
        saw("a collective")
    if any(equation.primitive in ("scan", "while") for equation in report.equations):
        saw("a loop")

    traced = trace_function(other, args, {}, mesh).whole.jaxpr
    outer = [*engine._inlined.tree.equations]
    places = {value.number: (k, i) for k, one in enumerate(outer) for i, value in enumerate(one.outputs)}
    choices = [one for one in engine.activations if one.number in places]
    for one in data.draw(st.lists(st.sampled_from(choices), max_size=2, unique=True)) if choices else []:
        spec = data.draw(partition_specs(mesh=mesh, shape=one.shape, divisible=False, unconstrained=True))
        question = Question(arguments, results, {**question.constraints, one.number: spec})
    if question.constraints:
        inside = {places[number]: spec for number, spec in question.constraints.items()}
        fun = pjit(constrained(traced, inside, mesh), in_shardings=other_ins, out_shardings=other_outs)
        assert same(engine.ask(question), explain(fun, *args, mesh=mesh), is_constrained=True)
        saw("a constraint")


def constrained(traced, specs, on):
    """A traced program with some results of equations constrained: by the equation's and the result's position."""
    jaxpr, env, eqns = traced.jaxpr, {}, []

    def read(atom):
        return env.get(atom, atom) if isinstance(atom, Var) else atom

    for k, eqn in enumerate(jaxpr.eqns):
        eqns.append(eqn.replace(invars=[*map(read, eqn.invars)]))
        for i, var in enumerate(eqn.outvars):
            if (k, i) in specs:
                env[var] = new_var(var.aval)
                spec = ParsedPartitionSpec.from_user_input(specs[k, i], "constraint", allow_unconstrained_dims=True)
                eqns.append(constraint(var, env[var], spec, on, eqn))
    consts = dict(zip(jaxpr.constvars, traced.consts, strict=True))
    run = jaxpr_as_fun(closed_jaxpr(jaxpr.invars, [*map(read, jaxpr.outvars)], eqns, consts))
    return lambda *args: tuple(run(*args))


def test_activations_in_loops_may_be_constrained_and_say_how_often_they_are_computed():
    def looped(x, w, spec=None):
        def body(x, _):
            y = jnp.tanh(x @ w)
            return (y if spec is None else with_sharding_constraint(y, spec)), None

        return jax.lax.scan(body, x, None, 5)[0]

    args, specs = (f32(16, 16), f32(16, 16)), (P("data"), P(None, "model"))
    engine = WhatIf(pjit(looped, in_shardings=specs), *args, mesh=mesh(), isolated=False)
    (activation,) = [one for one in engine.activations if one.primitive == "tanh"]
    assert (activation.times, activation.shape) == (5, (16, 16))
    assert str(activation) == f"{activation.number}: float32[16,16] of tanh at test_what_if.py:{activation.site[1]}"
    for spec in (P("data"), P(None, "model"), P("data", P.UNCONSTRAINED)):
        answer = engine.ask(Question(constraints={activation.number: spec}))
        fun = pjit(lambda x, w, spec=spec: looped(x, w, spec), in_shardings=specs)
        assert moved(answer.collectives) == moved(explain(fun, *args, mesh=mesh()).predicted)


def test_what_a_while_loop_captures_is_open_in_it_for_any_spec():
    def fun(x, w):
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x)

    args, on = (f32(16, 16), f32(16, 16)), mesh()
    engine = WhatIf(fun, *args, mesh=on, isolated=False)
    for spec in (P("data"), P(None, "model"), P("model", "data"), UNSPECIFIED):
        report = explain(pjit(fun, in_shardings=(P("data"), spec)), *args, mesh=on)
        assert same(engine.ask(Question({"x": P("data"), "w": spec})), report)


def test_scalars_in_the_body_of_a_scatter_in_a_shard_map_have_no_sharding():
    @functools.partial(jax.shard_map, in_specs=(P("data"), P("data")), out_specs=P("data"), axis_names={"data"})
    def count(w, numbers):
        return w.at[numbers].add(1.0)

    args = f32(32, 16), jax.ShapeDtypeStruct((32,), jnp.int32)
    with mesh():
        report = explain(pjit(count, in_shardings=(P(None, "model"), P("data")), out_shardings=P(None, "model")), *args)
        engine = WhatIf(count, *args, isolated=False)
    question = Question({"w": P(None, "model"), "numbers": P("data")}, {"result": P(None, "model")})
    assert same(engine.ask(question), report)
    assert same(engine.ask(question), report)  # once more, with what is known now


def test_an_answer_to_a_training_step_and_what_is_known_of_its_leaves():
    params, specs = unrolled_params(1)
    step = sgd(unrolled_loss, specs)
    engine = WhatIf(step, params, f32(8, 12), mesh=mesh(), isolated=False)
    leaves = {leaf.name: leaf for leaf in engine.arguments}
    first = leaves["params['layers'][0]['w1']"]
    assert (first.shape, first.dtype, first.nbytes, first.spec) == ((8, 16), jnp.float32, 512, P(None, "model"))
    assert [leaf.name for leaf in engine.results][-1] == "result[1]"
    answer = engine.ask(Question({"x": None}))
    assert answer.arguments["x"] == P(None, None)
    assert answer.bytes_sent < engine.ask(Question()).bytes_sent
    assert answer.memory_traffic > answer.argument_bytes


def test_arguments_are_read_once_and_results_written_once():
    engine = WhatIf(lambda x, w: jnp.tanh(x @ w) * 2, f32(32, 64), f32(64, 16), mesh=mesh(), isolated=False)
    read, product, result = 4 * (32 * 64 + 64 * 16), 4 * 32 * 16, 4 * 32 * 16
    assert engine.ask(Question()).memory_traffic == read + 2 * product + result
    answer = engine.ask(Question({"x": P("data"), "w": P(None, "model")}))
    assert answer.memory_traffic == 32 * 64 + 2 * 64 * 16 + (2 * product + result) / 8

    def looped(x, w):
        return jax.lax.fori_loop(0, 10, lambda _, x: jnp.tanh(x @ w), x)

    once = 4 * (3 * 16 * 16) + 2 * 4 * 16 * 16  # two operands, a product, which is read again, and what is carried
    answer = WhatIf(looped, f32(16, 16), f32(16, 16), mesh=mesh(), isolated=False).ask(Question())
    assert answer.memory_traffic >= 10 * once


WRONG = [
    (Question({"params": P()}), ValueNotFoundError, "there is no argument 'params': did you mean x, w?"),
    (Question({}, {"x": P()}), ValueNotFoundError, "there is no result 'x': did you mean result?"),
    (Question({}, {}, {99: P()}), ValueNotFoundError, "there is no activation 99 in fun"),
    (Question({"x": P("rows")}), ShardingError, r"x \(float32\[8,16\]\), was given .* axis rows is undefined"),
    (Question({"x": P(None, None, "data")}), ShardingError, r"x \(float32\[8,16\]\), .* rank of at least 3"),
    (
        Question({"w": P(None, "data")}),
        ShardingError,
        "w .* dimension 1 should be divisible by 4, but it is equal to 6",
    ),
    (
        Question(
            {},
            {
                "result": P("data", "model"),
            },
        ),
        None,
        "",
    ),
    (Question({}, {"result": P(None, ("data", "model"))}), ShardingError, "result .* divisible by 8"),
    (Question({}, {}, {2: P("data", None, "model")}), ShardingError, "2: float32.8,6. of dot_general .* rank"),
    (Question({}, {}, {2: P(None, "data")}), None, ""),
    (Question({"x": "data"}), TypeError, r"Question.arguments\['x'\] .* got 'data'"),
    (Question({}, {}, {2: UNSPECIFIED}), TypeError, r"Question.constraints\[2\] must be a PartitionSpec"),
    (Question({"x": P("data", "data")}), ValueError, r"Question.arguments\['x'\] .* duplicate entries for `data`"),
    (Question({"x": P(P.UNCONSTRAINED)}), ValueError, r"not allowed in Question.arguments\['x'\]"),
    (Question([P()]), TypeError, "arguments must be a dict from the names of arguments to specs"),
    ({"x": P()}, TypeError, "question must be a Question"),
]


@pytest.fixture(scope="module")
def small():
    def fun(x, w):
        return jnp.tanh(x @ w)

    return WhatIf(fun, f32(8, 16), f32(16, 6), mesh=mesh(), isolated=False)


@pytest.mark.parametrize(("question", "error", "text"), WRONG)
def test_a_wrong_question_is_refused_with_the_name_of_what_is_wrong(small, question, error, text):
    if error is None:
        assert small.ask(question)
        return
    with pytest.raises(error, match=f"(?s){text}"):
        small.ask(question)
    assert small.ask(Question()).bytes_sent == 0


def test_all_that_is_wrong_is_in_one_error(small):
    with pytest.raises(ShardingError, match="for 2 reasons") as caught:
        small.ask(Question({"x": P("rows"), "w": P(None, "data")}))
    assert "x (float32[8,16])" in str(caught.value)
    assert "w (float32[16,6])" in str(caught.value)


def test_without_several_devices_nothing_is_sent():
    one = partjit.Mesh(jax.devices()[:1], "x")
    fun = jnp.sin
    answer = WhatIf(fun, f32(8), mesh=one, isolated=False).ask(Question({"x": P("x")}))
    assert same(answer, explain(fun, f32(8), mesh=one))


def test_explicit_axes_are_refused():
    explicit = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Explicit,) * 2)
    with pytest.raises(ValueError, match="on a mesh with axes of type Explicit"):
        WhatIf(pjit(jnp.sin, in_shardings=P("data")), f32(8, 4), mesh=explicit, isolated=False)


ABORTING = """
import os, sys
sys.path[:] = {path!r}
from partjit.inspect import asked_process
real = asked_process.outcome_of
def outcome_of(lowered, facts, change, known):
    if change.values:
        print("Check failed: it was asked", file=sys.stderr, flush=True)
        os.abort()
    return real(lowered, facts, change, known)
asked_process.outcome_of = outcome_of
asked_process.serve({program!r})
"""


def test_what_aborts_ends_another_process_and_the_next_question_is_answered(monkeypatch):
    monkeypatch.setattr(asked_process, "_PROGRAM", ABORTING)
    params, specs = unrolled_params(1)
    args, step = (params, f32(8, 12)), sgd(unrolled_loss, specs)
    good = [Question({"x": spec}) for spec in (P("data"), None, P(("data", "model")))]
    here = WhatIf(step, *args, mesh=mesh(), isolated=False)
    with WhatIf(step, *args, mesh=mesh()) as engine:
        bad = Question(constraints={engine.activations[0].number: P("data")})
        with pytest.raises(WhatIfError, match=r"killed by signal 6, Aborted\. It wrote: Check failed: it was asked"):
            engine.ask(bad)
        answers = engine.ask_many([*good, bad], workers=2, missing_ok=True)
        assert answers.pop() is None
        # They are the same in every process, with the devices of groups.
        assert answers == here.ask_many(good, workers=1)
        assert engine.ask(good[0]) == answers[0]
        (process, *_) = engine._processes
        before = process.pid
        assert engine.ask(good[1]) == answers[1]
        assert process.pid == before
    assert [process.pid for process in engine._processes] == [None, None]


def test_a_number_of_workers_is_at_least_one_and_there_may_be_no_question(small):
    with pytest.raises(ValueError, match="workers"):
        small.ask_many([Question()], workers=0)
    assert small.ask_many([]) == []
