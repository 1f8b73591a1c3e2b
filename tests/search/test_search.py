"""What a search promises: nothing worse than any start, fixed specs kept, valid specs, the same result again."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct as S
from jax.ad_checkpoint import checkpoint_name

import partjit
from partjit import Mesh, P, pjit
from partjit.auto_specs import AUTO
from partjit.errors import MemoryLimitError
from partjit.inspect import explain
from partjit.search import Constraint, h100, search_specs
from tests.search.models import MACHINE, MESH, arguments, train_step

OPTIONS = {"mesh": MESH, "machine": MACHINE, "donate_argnums": (0, 1), "questions": 50, "isolated": False}


def leaves(found):
    return [*jax.tree.leaves(found.in_specs), *jax.tree.leaves(found.out_specs)]


@pytest.fixture(scope="module")
def found():
    return search_specs(train_step, *arguments(), **OPTIONS)


@pytest.fixture(scope="module")
def tight(found):
    return search_specs(train_step, *arguments(), **OPTIONS, memory=0.8 * found.peak)


@pytest.mark.parametrize("which", ["found", "tight"])
def test_nothing_is_worse_than_any_start_that_fits(which, request):
    found = request.getfixturevalue(which)
    fitting = [start.seconds for start in found.starts if start.fits]
    assert found.peak <= found.memory
    assert fitting
    assert found.seconds <= min(fitting)
    assert all(other.seconds >= found.seconds and other.fits for other in found.runners_up)
    assert {"data parallel", "ZeRO-3", "Megatron over model", "Megatron over model with ZeRO-3"} <= {
        start.name for start in found.starts
    }


@pytest.mark.parametrize("which", ["found", "tight"])
def test_the_report_on_what_was_found_says_what_the_search_saw(which, request):
    found = request.getfixturevalue(which)
    assert found.time.total == pytest.approx(found.seconds)
    # With constraints as equations the buffers are estimated a little differently.
    assert found.report.memory[0].peak == pytest.approx(found.peak, rel=0.1)


def test_less_memory_is_shared_by_more_devices(found, tight):
    assert tight.peak < found.peak
    assert tight.seconds > found.seconds


def test_layers_and_states_are_sharded_alike(tight):
    params, state, _ = tight.in_specs
    assert params["block_0"] == params["block_1"]
    assert tight.out_specs[:2] == tight.in_specs[:2]
    for path, spec in jax.tree_util.tree_leaves_with_path(params):
        of_state = state["momentum"]
        for key in path:
            of_state = of_state[key.key]
        axes, of_states = (
            {axis for dim in one for axis in (dim if isinstance(dim, tuple) else (dim,))} for one in (spec, of_state)
        )
        assert axes <= of_states


def test_the_same_search_finds_the_same():
    found, again = (search_specs(train_step, *arguments(layers=1), **{**OPTIONS, "questions": 30}) for _ in range(2))
    assert leaves(again) == leaves(found)
    assert [str(one) for one in again.constraints] == [str(one) for one in found.constraints]
    assert (again.seconds, again.questions) == (found.seconds, found.questions)


def test_fixed_specs_stay_fixed():
    fixed = {"block_0": P(), "embedding": P(None, ("model", "data"))}
    options = {**OPTIONS, "questions": 30}
    found = search_specs(
        train_step, *arguments(layers=1), **options, in_specs=(fixed, AUTO, P("model")), out_specs=(AUTO, AUTO, None)
    )
    params, _, tokens = found.in_specs
    assert tokens == P("model")
    assert {*jax.tree.leaves(params["block_0"])} == {P()}
    assert params["embedding"] == P(None, ("model", "data"))
    assert found.out_specs[2] == P()
    same = search_specs(
        train_step, *arguments(layers=1), **{**OPTIONS, "questions": 3}, in_specs=found.in_specs, constrain=False
    )
    assert jax.tree.leaves(same.in_specs) == jax.tree.leaves(found.in_specs)
    assert not [change for change in same.diff(found.in_specs, found.out_specs) if change.path.startswith("params")]


@pytest.mark.parametrize("constrained", [False, True])
def test_what_was_found_runs_and_computes_the_same(constrained):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    sizes = {"layers": 1, "width": 32, "hidden": 64, "size": 8, "vocabulary": 64, "batch": 8, "length": 8}
    args = jax.tree.map(
        lambda s: jnp.asarray(
            np.random.default_rng(0).normal(size=s.shape) * 0.1
            if s.dtype == jnp.float32
            else np.arange(64).reshape(s.shape),
            s.dtype,
        ),
        arguments(**sizes),
    )
    found = search_specs(train_step, *args, mesh=mesh, machine=MACHINE, memory=70_000, questions=30, isolated=False)
    if constrained:
        made = [equation.outputs[0] for equation in found._program.partitioned.inlined.equations if equation.outputs]
        values = [value for value in made if value.is_array and value.aval.shape == (8, 8, 32)]
        constraints = [(P("data", "model"), value) for value in values] + [(P(), found._program.inputs[0])]
        found = dataclasses.replace(
            found, constraints=tuple(Constraint(spec, "", "", (), (value.number,)) for spec, value in constraints)
        )
        assert len(values) > 5
    with mesh:
        results = found.pjit()(*args)
    expected = jax.jit(train_step)(*args)
    for result, other, spec in zip(*map(jax.tree.leaves, (results, expected, found.out_specs)), strict=True):
        np.testing.assert_allclose(result, other, rtol=2e-4, atol=1e-5)
        assert result.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, spec), result.ndim)
    if constrained:
        return
    report = explain(found.pjit(), *args, mesh=mesh, compiled=True)
    assert report.predicted.bytes_per_step * 0.95 <= report.collectives.bytes_per_step
    assert report.collectives.bytes_per_step <= report.predicted.bytes_per_step_at_most * 1.05


def test_the_text_is_python_that_makes_the_specs(tight):
    params, state, tokens = arguments()
    names = {
        "params": params,
        "state": state,
        "tokens": tokens,
        "result": jax.eval_shape(train_step, params, state, tokens),
    }
    exec(tight.to_python(), names)
    assert jax.tree.leaves((names["in_specs"], names["out_specs"])) == leaves(tight)
    assert jax.tree.structure(names["in_specs"]) == jax.tree.structure(tight.in_specs)
    text = tight.to_text()
    assert "ZeRO-3" in text
    assert all(str(constraint) in text for constraint in tight.constraints)


def test_a_difference_names_the_arrays_and_both_specs():
    step = pjit(train_step, in_shardings=(P(), P(), P("data")), donate_argnums=(0, 1))
    found = search_specs(step, *arguments(layers=1), mesh=MESH, machine=MACHINE, questions=30, isolated=False)
    changed = {change.path: change for change in found.diff()}
    assert changed["params['block_0']['up']"].before == P()
    assert all(change.before != change.after for change in changed.values())
    assert str(changed["params['block_0']['up']"]).startswith("params['block_0']['up']: P() -> P(")
    assert not found.diff(found.in_specs, found.out_specs)


def test_too_little_memory_is_an_error_that_says_what_is_in_the_way():
    with pytest.raises(MemoryLimitError) as raised:
        search_specs(train_step, *arguments(layers=1), **{**OPTIONS, "questions": 40}, memory=1e5)
    text = str(raised.value)
    assert text.startswith(
        "search_specs: train_step does not fit into 100.0 kB per device on data=4, model=2: the least"
    )
    assert "too much. In the way are\n" in text
    assert "tests/search" in text or "models.py:" in text
    assert "jax.checkpoint" in text


def test_only_named_activations_are_constrained_on_request():
    def named(w, x):
        hidden = checkpoint_name(jnp.tanh(x @ w["up"]), "hidden")
        return jnp.sin(hidden @ w["down"]).sum(-1)

    args = {"up": S((64, 256), jnp.float32), "down": S((256, 64), jnp.float32)}, S((512, 64), jnp.float32)
    for constrain, arrays in ((["hidden"], {"f32[512,256]"}), (False, set())):
        found = search_specs(
            named, *args, mesh=MESH, machine=MACHINE, constrain=constrain, questions=30, isolated=False
        )
        assert {one.array for one in found.constraints if not one.argument} <= arrays


def test_progress_is_reported_and_the_limits_are_kept():
    seen = []
    search_specs(
        train_step, *arguments(layers=1), **{**OPTIONS, "questions": 12}, progress=lambda *now: seen.append(now)
    )
    assert max(asked for asked, _, _ in seen) <= 12
    assert {limit for _, limit, _ in seen} == {12}
    best = [seconds for _, _, seconds in seen]
    assert best[-1] > 0
    late = search_specs(train_step, *arguments(layers=1), **OPTIONS, time_limit=1e-6)
    assert late.questions <= 2


def test_a_step_without_specs_whose_loop_captures_an_array_is_searched():
    def step(w, x):
        def loss(w):
            return jnp.sum(jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ w), None), x, length=3)[0])

        return w - jax.grad(loss)(w)

    arrays = S((16, 16), np.float32), S((8, 16), np.float32)
    options = {"mesh": MESH, "machine": MACHINE, "memory": 1 << 20, "questions": 6, "progress": False}
    found = search_specs(step, *arrays, **options)
    assert found.seconds <= min(start.seconds for start in found.starts)


@pytest.mark.parametrize("axis_types", [("Explicit", "Explicit"), ("Auto", "Explicit")])
def test_explicit_axes_are_refused(axis_types):
    types = tuple(getattr(jax.sharding.AxisType, name) for name in axis_types)
    mesh = jax.make_mesh((4, 2), ("data", "model"), types)
    with pytest.raises(ValueError, match="search_specs: train_step is on a mesh with axes of type Explicit"):
        search_specs(train_step, *arguments(layers=1), **{**OPTIONS, "mesh": mesh})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh": 3}, "search_specs: mesh must be a mesh"),
        ({"machine": "h100"}, "search_specs: machine must be a Machine"),
        ({"questions": 0}, "search_specs: questions must be at least 1"),
        ({"workers": 0}, "search_specs: workers must be at least 1"),
        ({"isolated": 3}, "search_specs: isolated must be True or False"),
        ({"methods": ["luck"]}, "search_specs: methods must be some of descent, annealing, but is 'luck'"),
        ({"constrain": 3}, "search_specs: constrain must be True, False, or the names of activations"),
        ({"in_specs": (P(), P())}, "in_specs"),
        ({"out_specs": (AUTO, AUTO, P("data"))}, "result"),
        ({"in_specs": (AUTO, AUTO, P("nobody"))}, "nobody"),
        ({"in_specs": (AUTO, AUTO, P(("data", "model"), "model"))}, "model"),
    ],
)
def test_what_cannot_be_searched_is_refused(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        search_specs(train_step, *arguments(layers=1), **{**OPTIONS, **change})
    assert partjit.search.h100 is h100
