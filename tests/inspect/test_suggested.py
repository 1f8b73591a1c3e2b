"""Suggested specs: what they say of a change is what `explain` says of the function with it, and they help."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import ShapeDtypeStruct as S
from jax.sharding import AbstractMesh, AxisType

from partjit import UNSPECIFIED, P, pjit
from partjit.inspect import asked_process, explain
from partjit.inspect.outcomes import Costs
from partjit.inspect.suggested import SpecSuggestion, helps
from partjit.inspect.what_if import WhatIf
from partjit.testing import meshes, partition_specs, sharded_programs
from tests.census import saw, sees
from tests.effort import EVERYTHING
from tests.inspect.inspected import f32, mesh, sgd, unrolled_loss, unrolled_params


@st.composite
def asked(draw):
    """A mesh, a program, and specs of its arguments and results."""
    mesh = draw(meshes(mesh_shapes=[(4, 2), (8,)]))
    program = draw(sharded_programs(mesh=mesh, partitioned=True, max_steps=3))

    def specs(shapes):
        some = [st.one_of(st.just(UNSPECIFIED), partition_specs(mesh=mesh, shape=shape)) for shape in shapes]
        return tuple(map(draw, some))

    return mesh, program, specs(program.arg_shapes), specs(program.result_shapes)


@sees("a suggestion", "one that sends less", "one that needs less memory")
@given(asked())
@settings(deadline=None, max_examples=60 if EVERYTHING else 24)
def test_what_a_suggestion_says_is_what_explain_says(drawn):
    mesh, program, ins, outs = drawn
    args = program.arguments()
    engine = WhatIf(pjit(program, in_shardings=ins, out_shardings=outs), *args, mesh=mesh, isolated=False)
    report = explain(pjit(program, in_shardings=ins, out_shardings=outs), *args, mesh=mesh)
    found = engine.suggest(workers=1, questions=12)
    assert report.suggest(isolated=False, questions=12) == found
    for one in found[:2]:
        saw("a suggestion")
        other_ins, other_outs = (
            tuple(changed.get(leaf.name, spec) for leaf, spec in zip(leaves, specs, strict=True))
            for changed, leaves, specs in (
                (one.question.arguments, engine.arguments, ins),
                (one.question.results, engine.results, outs),
            )
        )
        other = explain(pjit(program, in_shardings=other_ins, out_shardings=other_outs), *args, mesh=mesh)
        for costs, of in ((one.before, report), (one.after, other)):
            collectives = of.predicted
            assert costs.sent == pytest.approx(collectives.bytes_per_step)
            assert costs.at_most == pytest.approx(collectives.bytes_per_step_at_most)
            assert costs.peak == of.memory[0].peak
        assert helps(one.before, one.after)
        saw("one that sends less" if one.after.at_most < one.before.at_most else "one that needs less memory")


def big():
    params = {"embed": S((512, 256), jnp.float32), "layers": [{"w": S((256, 256), jnp.float32)} for _ in range(3)]}

    def step(params, momentum, x):
        def loss(params):
            h = params["embed"][x]
            for layer in params["layers"]:
                h = jnp.tanh(h @ layer["w"])
            return (h @ params["embed"].T).mean()

        grads = jax.grad(loss)(params)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum

    return step, (params, params, S((64, 16), jnp.int32))


def abstract(types=(AxisType.Auto,) * 2):
    return AbstractMesh((64, 8), ("data", "model"), axis_types=types)


def test_layers_states_and_results_are_changed_together_and_no_devices_are_needed():
    step, args = big()
    fun = pjit(step, in_shardings=(P(), P(), P("data")), out_shardings=P(), donate_argnums=(0, 1))
    with WhatIf(fun, *args, mesh=abstract(), isolated=False) as engine:
        found = engine.suggest(most=10)
        layers = next(one for one in found if "layers" in one.arguments[0])
        assert layers.arguments == tuple(f"{of}['layers'][{k}]['w']" for of in ("params", "momentum") for k in range(3))
        assert len(layers.results) == 6
        assert "params['layers'][0]['w'] and 5 like it, and result[0]['layers'][0]['w'] ...: " in str(layers)
        assert layers.effect.count("-") >= 1
        answer, own = engine.ask(layers.question), engine.ask(type(layers.question)())
        assert (answer.bytes_sent, answer.peak_memory) == (layers.after.sent, layers.after.peak)
        assert (own.bytes_sent_at_most, own.peak_memory) == (layers.before.at_most, layers.before.peak)
        assert engine.suggest(most=1) == found[:1]
        assert len({one.arguments for one in found}) == len(found)


def test_the_number_of_questions_bounds_what_is_tried(monkeypatch):
    params, specs = unrolled_params(1)
    engine = WhatIf(sgd(unrolled_loss, specs), params, f32(8, 12), mesh=mesh(), isolated=False)
    counts, real = [], WhatIf._outcome
    monkeypatch.setattr(WhatIf, "_outcome", lambda self, change: counts.append(change) or real(self, change))
    engine.suggest(questions=3)
    assert len(counts) == 4  # and the program as it is


ABORTING = """
import os, sys
sys.path[:] = {path!r}
from partjit.inspect import asked_process
real = asked_process.outcome_of
def outcome_of(lowered, facts, change, known):
    if any(axes[-1:] == (("model",),) for axes in change.arguments.values()):
        os.abort()
    return real(lowered, facts, change, known)
asked_process.outcome_of = outcome_of
asked_process.serve({program!r})
"""


def test_what_ends_a_process_is_no_suggestion(monkeypatch):
    fun = pjit(lambda x, w: jnp.tanh(x @ w), in_shardings=(P("data"), P("model")))
    report = explain(fun, np.ones((64, 128), np.float32), np.ones((128, 256), np.float32), mesh=mesh())
    before = report.suggest(isolated=False, questions=6)
    assert before[0].spec[-1] == "model"
    monkeypatch.setattr(asked_process, "_PROGRAM", ABORTING)
    after = report.suggest(questions=6, workers=1)
    assert after
    assert all(one.spec[-1] != "model" for one in after if one.spec)
    page = report.to_html(suggestions=before)
    assert "Other specs" in page
    assert before[0].effect in page
    assert "Other specs" not in report.to_html()


def test_what_has_no_other_specs():
    one = explain(jnp.sin, f32(8), mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), "x"))
    assert one.suggest() == ()
    fun = pjit(jnp.sin, in_shardings=P("data"))
    explicit = explain(fun, S((64, 8), jnp.float32), mesh=abstract((AxisType.Explicit,) * 2))
    with pytest.raises(ValueError, match=r"Report.suggest: sin is on a mesh with axes of type Explicit"):
        explicit.suggest()
    with pytest.raises(ValueError, match=r"Report.suggest: most must be at least 1"):
        one.suggest(0)
    with pytest.raises(TypeError, match=r"Report.to_html: suggestions must be suggestions, as Report.suggest"):
        one.to_html(suggestions=[3])


@pytest.mark.parametrize(
    ("after", "effect"),
    [
        (Costs(1000.0, 4000.0, 100), "-1.0 kB per step at most"),
        (Costs(1500.0, 4000.0, 100), "-1.0 kB per step at most, +500 B at least"),
        (Costs(500.0, 6000.0, 90), "+1.0 kB per step at most, -500 B at least, -10 B of memory"),
        (Costs(500.0, 4000.0, 100), "-1.0 kB per step at most"),
        (Costs(1500.0, 5000.0, 100), "+500 B at least"),
        (Costs(0.0, 4000.0, 100), "-1.0 kB per step"),
        (Costs(1000.0, 5000.0, 120), "+20 B of memory"),
    ],
)
def test_an_effect_says_both_bounds_where_they_leave_it_open(after, effect):
    assert SpecSuggestion(P("x"), ("w",), (), Costs(1000.0, 5000.0, 100), after).effect == effect
