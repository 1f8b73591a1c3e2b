"""The fields of the what-if widget: their texts as specs, what follows what, and what is shown of an answer."""

import re
import shutil
import subprocess
from importlib import resources

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from partjit import UNSPECIFIED, ShardingError, pjit
from partjit.inspect import explain
from partjit.inspect.live.answers import Fields
from partjit.inspect.live.spec_field import spec_in, text_of
from partjit.inspect.what_if import Question, WhatIf
from tests.census import saw, sees
from tests.inspect.inspected import f32, mesh

AXES = ("data", "model")


def step(params, state, x):
    def loss(params):
        for layer in params["layers"]:
            x_ = jnp.tanh(x @ layer["in"]) @ layer["out"]
        return jnp.mean(x_**2)

    grads = jax.grad(loss)(params)
    state = jax.tree.map(lambda m, g: 0.9 * m + g, state, grads)
    return jax.tree.map(lambda p, m: p - m, params, state), state


LAYER = {"in": f32(16, 32), "out": f32(32, 16)}
ARGS = ({"layers": [LAYER] * 3}, {"layers": [LAYER] * 3}, f32(8, 16))


@pytest.fixture(scope="module")
def engine():
    return WhatIf(pjit(step, donate_argnums=(0, 1)), *ARGS, mesh=mesh(), isolated=False)


@pytest.fixture(scope="module")
def fields(engine):
    return Fields(engine)


IN = "params['layers'][0]['in']"


@sees("None", "UNSPECIFIED", "several axes", "an unsharded dimension")
@given(st.one_of(st.none(), st.just(UNSPECIFIED), st.lists(st.sampled_from([None, *AXES, AXES, ()]), max_size=4)))
def test_what_is_written_in_a_field_is_read_from_it(entries):
    spec = P(*entries) if isinstance(entries, list) else entries
    if spec is None or spec is UNSPECIFIED:
        saw(text_of(spec))
    else:
        for feature, entry in (("several axes", AXES), ("an unsharded dimension", None)):
            if entry in entries:
                saw(feature)
        assert spec_in("x", f"({text_of(spec)[2:-1]}{',' if entries else ''})") == spec
    assert spec_in("x", text_of(spec)) == spec


@pytest.mark.parametrize(
    "text", ["P('data'", "3", "P(x=1)", "f('data')", "P(('data', 3))", "P([[]])", "'\\0", "P" * 3 + "()"]
)
def test_a_text_that_is_no_spec_is_shown_how_one_is_written(text):
    with pytest.raises(ValueError, match=r"^params\['w'\]: a spec is written as P\('data', None, ") as error:
        spec_in("params['w']", text)
    assert str(error.value).endswith(f"It is {text!r}")


def test_an_answer_is_that_of_the_question_and_rows_say_what_changes(engine, fields):
    texts = {IN: "P(None, 'model')"}
    answer = fields.answer(texts, follow=False)
    then = engine.ask(Question({IN: P(None, "model")}))
    now = engine.ask(Question())
    assert answer["error"] == ""
    assert answer["axes"][IN] == [[], ["model"]]
    assert [IN, "P(None, None)", "P(None, 'model')"] in answer["specs"]
    assert {name for name, *_ in answer["specs"]} == {
        name
        for side in ("arguments", "results")
        for name, spec in getattr(then, side).items()
        if spec != getattr(now, side)[name]
    }
    changes = {row[0]: row[3] for row in answer["totals"]}
    for label, before, after in (
        ("bytes a device sends", now.bytes_sent, then.bytes_sent),
        ("of it arguments", now.argument_bytes, then.argument_bytes),
        ("FLOPs of a device", now.flops, then.flops),
    ):
        assert changes[label] == ("same" if before == after else "less" if after < before else "more")
    assert changes["of it arguments"] == "less"
    assert eval(answer["python"], {"Question": Question, "P": P}) == Question({IN: P(None, "model")})


def test_the_state_and_results_of_a_parameter_follow_it_unless_they_have_a_field_of_their_own(fields):
    question = fields.question({IN: "P('data')", "state['layers'][0]['in']": "P()"}, True)
    assert question.arguments == {IN: P("data"), "state['layers'][0]['in']": P()}
    assert question.results == {"result[0]['layers'][0]['in']": P("data"), "result[1]['layers'][0]['in']": P()}
    alone = fields.question({IN: "P('data')"}, True)
    assert alone.arguments == dict.fromkeys([IN, "state['layers'][0]['in']"], P("data"))
    assert alone.results == dict.fromkeys(["result[0]['layers'][0]['in']", "result[1]['layers'][0]['in']"], P("data"))
    assert fields.question({IN: "P('data')"}, False) == Question({IN: P("data")})


def test_a_star_stands_for_the_numbers_of_layers(fields):
    assert [*fields.texts({"params['layers'][*]['in']": "P('data')"})] == [
        f"params['layers'][{k}]['in']" for k in range(3)
    ]


@pytest.mark.parametrize("spec", [P("dat"), P("data", None, "model"), P(("data", "model"), "x"), P("data", "data")])
def test_what_is_wrong_is_said_as_pjit_says_it(fields, spec):
    specs = {"layers": [{"in": spec, "out": None}, *[{"in": None, "out": None}] * 2]}
    answer = fields.answer({IN: text_of(spec)})
    assert answer["wrong"] == [IN]
    with mesh(), pytest.raises((ShardingError, ValueError)) as error:
        pjit(step, in_shardings=(specs, None, None)).trace(*ARGS)
    said = str(error.value)
    if not isinstance(error.value, ShardingError):  # found where specs are parsed, whose place is named first
        said = said.partition(": ")[2] or said
        assert said in answer["error"] or answer["error"].partition(": ")[2] in said
        return
    assert answer["error"] == said


def test_layers_that_are_wrong_alike_are_one_error(fields):
    answer = fields.answer({f"params['layers'][{k}]['in']": "P('dat')" for k in range(3)})
    assert answer["error"].count("One of pjit arguments, params['layers'][0]['in'] (float32[16,32])") == 1
    assert len(answer["wrong"]) == 3


def test_a_name_that_is_not_there_is_an_error_with_similar_ones(fields):
    assert fields.answer({"params['layers'][0]['inn']": "P()"})["error"].endswith(
        f"did you mean {IN}, params['layers'][2]['in'], params['layers'][1]['in']?"
    )


def test_a_report_is_asked_as_the_function_is(engine):
    report = explain(pjit(step, donate_argnums=(0, 1)), *ARGS, mesh=mesh())
    asked = report.what_if(isolated=False)
    question = Question({IN: P("data")})
    a, b = asked.ask(question), engine.ask(question)
    assert (a.peak_memory, a.bytes_by_axes, a.arguments) == (b.peak_memory, b.bytes_by_axes, b.arguments)
    assert [leaf.is_donated for leaf in asked.arguments] == [leaf.is_donated for leaf in engine.arguments]


def test_the_script_is_a_module_without_imports():
    script = resources.files("partjit.inspect.live").joinpath("what_if.js").read_text(encoding="utf-8")
    assert "export default { render };" in script
    assert not re.search(r"\bimport\b|https?:|innerHTML|eval\(", script)
    node = shutil.which("node")
    if node:
        checked = subprocess.run(
            [node, "--input-type=module", "--check"], input=script, text=True, capture_output=True, check=False
        )
        assert checked.returncode == 0, checked.stderr
