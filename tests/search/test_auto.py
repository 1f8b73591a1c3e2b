"""`pjit` with specs that are AUTO: what a search finds, once for each program, and nothing that is given changed."""

import json
import os
import pathlib
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import partjit
from partjit import AUTO, UNSPECIFIED, Mesh, P, SearchOptions, colocated, pjit, search_specs
from partjit.errors import MemoryLimitError, MissingMeshError
from partjit.inspect import explain
from partjit.search import auto, settled
from partjit.spec import ParsedPartitionSpec
from partjit.testing import partition_specs, sharded_programs
from tests.census import saw, sees
from tests.search.models import MACHINE

ROOT = pathlib.Path(__file__).parents[2]
OPTIONS = {"machine": MACHINE, "questions": 8, "isolated": False}


def on():
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))


def two_layers(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def arrays():
    return {"up": jnp.ones((16, 32)) / 8, "down": jnp.ones((32, 16)) / 8}, jnp.linspace(-1, 1, 8 * 16).reshape(8, 16)


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(auto, "_found", {})
    monkeypatch.setenv("PARTJIT_SEARCH_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def searches(monkeypatch):
    """The programs that are searched while the test runs."""
    made, real = [], auto.SearchedProgram

    def searched(traced, *args):
        made.append(traced.whole.name)
        return real(traced, *args)

    monkeypatch.setattr(auto, "SearchedProgram", searched)
    return made


def automatic(fun=two_layers, in_shardings=AUTO, out_shardings=AUTO, **options):
    search = SearchOptions(**{**OPTIONS, **options})
    return pjit(fun, in_shardings=in_shardings, out_shardings=out_shardings, search=search)


def axes(spec):
    return spec if not isinstance(spec, ParsedPartitionSpec) else [p for p in (*spec.partitions, ()) if p]


@sees("a spec that is given", "a spec that is AUTO", "a spec that the partitioner chooses")
@given(st.data())
@settings(deadline=None, max_examples=8)
def test_what_is_auto_is_what_a_search_finds_and_what_is_given_stays(data):
    mesh = on()
    program = data.draw(sharded_programs(mesh=mesh, partitioned=True, max_steps=3))
    args = program.arguments()

    def some(shape):
        drawn = data.draw(st.one_of(st.just(AUTO), st.just(UNSPECIFIED), partition_specs(mesh=mesh, shape=shape)))
        saw({AUTO: "a spec that is AUTO", UNSPECIFIED: "a spec that the partitioner chooses"}.get(
            drawn if isinstance(drawn, type(AUTO) | type(UNSPECIFIED)) else None, "a spec that is given"
        ))  # fmt: skip
        return drawn

    ins, outs = tuple(map(some, program.arg_shapes)), tuple(map(some, program.result_shapes))
    if AUTO not in (*ins, *outs):
        ins = (AUTO, *ins[1:])
    fun = automatic(program, ins, outs)
    without = [tuple(UNSPECIFIED if spec is AUTO else spec for spec in of) for of in (ins, outs)]
    plain = pjit(program, in_shardings=without[0], out_shardings=without[1])
    found = search_specs(plain, *args, mesh=mesh, in_specs=ins, out_specs=outs, **OPTIONS)
    with mesh:
        own = fun.trace(*args).program
        results = fun(*args)
    for given_specs, specs, searched in ((ins, own.in_specs, found.in_specs), (outs, own.out_specs, found.out_specs)):
        for spec, used, best in zip(given_specs, specs, searched, strict=True):
            wanted = best if spec is AUTO else spec
            parsed = wanted if wanted is UNSPECIFIED else ParsedPartitionSpec.from_user_input(wanted, "spec")
            assert axes(used) == axes(parsed)
    for result, expected, spec in zip(results, program.plain(*args), outs, strict=True):
        np.testing.assert_allclose(result, expected, rtol=2e-4, atol=1e-5)
        if isinstance(spec, P):
            assert result.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, spec), result.ndim)


def test_every_stage_has_the_same_specs_and_searches_once(searches):
    fun, args = automatic(), arrays()
    with on():
        traced = fun.trace(*args)
        structs = fun.eval_shape(*args)
        lowered = fun.lower(*args)
        result = fun(*args)
        again = automatic()(*args)
    report = explain(fun, *args, mesh=on())
    assert searches == ["two_layers"]
    specs = [str(spec) for spec in traced.program.in_specs]
    assert structs.sharding == result.sharding == again.sharding
    assert lowered.compile()(*args).sharding == result.sharding
    shown = [value.spec for value in report.whole.tree.inputs]
    assert [P(*spec) for spec in shown] == [P(*eval(text, {"P": P}), *[None] * (2 - len(eval(text, {"P": P})))) for text in specs]  # fmt: skip  # noqa: E501
    assert {*specs} != {"P()"}


def test_what_was_found_is_kept_for_other_processes_by_program_mesh_and_machine(searches, nothing_is_known):
    def results(fun=two_layers, mesh=None, args=None, **options):
        auto._found.clear()  # as another process
        with mesh or on():
            return automatic(fun, **options).trace(*(args or arrays())).program.in_specs

    first = results()
    assert len(searches) == 1
    assert results() == first
    assert len(searches) == 1
    wide = {"up": jnp.ones((16, 64)), "down": jnp.ones((64, 16))}, arrays()[1]
    others = (
        {"args": wide},
        {"mesh": Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))},
        {"mesh": Mesh(np.array(jax.devices()[:4]).reshape(4, 1), ("data", "model"))},
        {"fun": lambda params, x: jnp.sin(two_layers(params, x))},
        {"machine": partjit.search.h100(on())},
        {"memory": 1e9},
        {"questions": 7},
        {"in_shardings": (AUTO, P("data"))},
        {"constrain": False},
    )
    for number, other in enumerate(others, 2):
        results(**other)
        assert len(searches) == number, other
    files = [*nothing_is_known.iterdir()]
    assert len(files) == len(others) + 1
    assert {json.loads(file.read_text())["program"] for file in files} == {"two_layers", "<lambda>"}
    results(cache=False)
    assert len(searches) == len(others) + 2
    assert len([*nothing_is_known.iterdir()]) == len(files)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"arguments": 3}', "wrong ranks", "\x00"])
def test_a_file_that_is_damaged_is_searched_again_with_a_warning(content, searches, nothing_is_known):
    with on():
        before = automatic().trace(*arrays()).program.in_specs
        (path,) = nothing_is_known.iterdir()
        good = path.read_text()
        path.write_text(json.dumps({**json.loads(good), "arguments": []}) if content == "wrong ranks" else content)
        auto._found.clear()
        with pytest.warns(UserWarning, match=r"specs that were found before cannot be read from .*\.json: .*again"):
            assert automatic().trace(*arrays()).program.in_specs == before
    assert len(searches) == 2
    assert path.read_text() == good


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with on(), pytest.warns(UserWarning, match="specs that were found cannot be kept in .*PARTJIT_SEARCH_CACHE names"):
        automatic(cache=tmp_path / "file" / "folder").trace(*arrays())
    folder = tmp_path / "some"
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.warns(UserWarning, match="no"):
        settled.keep(folder, "key", "text")
    assert [*folder.iterdir()] == []  # what is written partly is seen by nobody
    monkeypatch.delenv("PARTJIT_SEARCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert settled.folder_of(True) == tmp_path / "partjit" / "search"
    assert settled.folder_of(False) is None


@pytest.fixture
def constrained(monkeypatch):
    """A search that constrains every value of a program that it may, and what it was asked for."""
    options = []

    def searched(task):
        options.append(not task.only_specs)
        unit = task.traced.whole
        inlined = auto.inline_program(unit.jaxpr, unit.mesh, unit.paths, unit.result_paths, {})
        wanted = [v for v in inlined.tree.values if v.is_array and v.aval.shape and v.number >= 0]
        fits = {v.number: (("data",), *[()] * (len(v.aval.shape) - 1)) for v in wanted if v.aval.shape[0] % 4 == 0}
        of = [[((),) * len(aval.shape) for aval in avals] for avals in (unit.jaxpr.in_avals, unit.jaxpr.out_avals)]
        return settled.SettledSpecs(*map(tuple, of), {} if task.only_specs else fits, 1.0, 1, 1)

    monkeypatch.setattr(auto._Task, "_searched", searched)
    return options


def count(text, what="sharding_constraint"):
    return str(text).count(what)


def test_constraints_are_in_the_program_and_change_no_result(constrained):
    fun, args = automatic(), arrays()
    expected = two_layers(*args)
    with on():
        traced = fun.trace(*args)
        assert count(traced.jaxpr) >= 3
        assert "eqn:" not in fun.lower(*args).as_text(debug_info=True)
        assert "result" in traced.jaxpr.jaxpr.debug_info.result_paths[0]
        np.testing.assert_allclose(fun(*args), expected, rtol=1e-5)
        grads = jax.jit(jax.grad(lambda params, x: fun(params, x).sum()))(*args)
        for one, other in zip(*map(jax.tree.leaves, (grads, jax.grad(lambda p, x: two_layers(p, x).sum())(*args)))):  # noqa: B905
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(fun(args[0], x=args[1]), expected, rtol=1e-5)
        with jax.disable_jit():
            np.testing.assert_allclose(fun(*args), expected, rtol=1e-5)


@jax.custom_jvp
def odd(x):
    return jnp.sin(x)


odd.defjvp(lambda primals, tangents: (odd(*primals), 100.0 * tangents[0]))


@pytest.mark.parametrize("wrapped", [odd, jax.checkpoint(jnp.sin), jax.jit(odd)])
def test_derivatives_of_its_own_are_kept_where_a_program_is_transformed(wrapped, constrained):
    def fun(x):
        return wrapped(x).sum()

    x = jnp.linspace(0.0, 1.0, 8)
    searched = automatic(fun)
    with on():
        np.testing.assert_allclose(searched(x), fun(x), rtol=1e-5)
        np.testing.assert_allclose(jax.grad(searched)(x), jax.grad(fun)(x), rtol=1e-5)
        np.testing.assert_allclose(jax.jit(jax.grad(searched))(x), jax.grad(fun)(x), rtol=1e-5)
    assert {*constrained} == {True, False}


@pytest.mark.parametrize("questions", [3, 4, 5])
def test_no_constraint_of_a_parameter_loses_derivatives_of_its_own(questions):
    def fun(params, rate):
        return jax.tree.map(lambda p: p - rate * odd(p), params)

    def total(fun):
        return lambda params: fun(params, 0.1)["w"].sum()

    params = {"w": jnp.linspace(0.0, 1.0, 64 * 64).reshape(64, 64)}
    with on():
        grads = jax.grad(total(automatic(fun, questions=questions)))(params)
    np.testing.assert_allclose(grads["w"], jax.grad(total(fun))(params)["w"], rtol=1e-5)


def test_derivatives_of_its_own_are_kept_where_what_is_closed_over_is_transformed(constrained):
    x = jnp.linspace(0.0, 1.0, 8)

    def total(w, wrap):
        return wrap(lambda x: x - w * odd(x * w))(x).sum()

    with on():
        grad = jax.grad(total)(2.0, automatic)
    np.testing.assert_allclose(grad, jax.grad(total)(2.0, lambda fun: fun), rtol=1e-5)
    assert constrained == [False]


def test_colocated_calls_are_made_with_arguments_of_their_own_specs():
    @colocated.colocated_python
    def doubled(x):
        return 2 * np.asarray(x)

    def fun(w, x):
        return doubled(x @ w) @ w

    doubled = doubled.specialize(out_specs_fn=lambda x: x)
    w, x = jnp.eye(16), jnp.ones((8, 16))
    with on():
        np.testing.assert_allclose(automatic(fun)(w, x), 2 * np.ones((8, 16)), rtol=1e-6)


def test_committed_arrays_and_single_devices():
    params, x = arrays()
    mesh = on()
    placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, P(None, "model")))
    with mesh:
        fun = automatic(in_shardings=(AUTO, UNSPECIFIED))
        assert fun.trace(params, placed).program.in_specs[-1].partition_spec == P(None, "model")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            np.testing.assert_allclose(fun(params, placed), two_layers(params, x), rtol=1e-5)
    with Mesh(jax.devices()[:1], "data"):
        assert automatic()(params, x).sharding.spec == P()


def test_too_little_memory_and_what_cannot_be_searched_are_errors():
    params, x = arrays()
    explicit = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Explicit,) * 2)
    with on(), pytest.raises(MemoryLimitError, match="pjit: two_layers does not fit into 100 B per device on data=4"):
        automatic(memory=100)(params, x)
    with pytest.raises(MissingMeshError, match="pjit requires a non-empty mesh to search the specs of two_layers"):
        automatic()(params, x)
    with jax.set_mesh(explicit), pytest.raises(ValueError, match=r"pjit: two_layers is on a mesh .* of type Explicit"):
        automatic()(params, x)
    with pytest.raises(ValueError, match="specs cannot be AUTO with positional_semantics='local'"):
        pjit(two_layers, in_shardings=(AUTO, None), positional_semantics="local")
    with on(), pytest.raises(TypeError, match="expected to be PartitionSpec instances or None, but got AUTO"):
        partjit.with_sharding_constraint(x, AUTO)
    with pytest.raises(TypeError, match=r"pjit: search must be partjit.SearchOptions or None"):
        pjit(two_layers, search=3)


def test_inside_of_a_shard_map_nothing_can_be_searched():
    params, x = arrays()
    mapped = jax.shard_map(lambda x: automatic()(params, x), mesh=on(), in_specs=P("data"), out_specs=P("data"))
    for fun in (mapped, jax.jit(mapped)):
        with on(), pytest.raises(ValueError, match="two_layers cannot be AUTO inside of a shard_map over data, model"):
            fun(x)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"machine": "h100"}, "SearchOptions: machine must be a partjit.search.Machine"),
        ({"memory": 0}, "SearchOptions: memory must be a number above 0"),
        ({"questions": 0}, "SearchOptions: questions must be at least 1"),
        ({"overlap": 2}, "SearchOptions: overlap must be a number between 0 and 1"),
        ({"methods": ["luck"]}, "SearchOptions: methods must be some of descent, annealing, but is 'luck'"),
        ({"constrain": 3}, "SearchOptions: constrain must be True, False, or the names of activations"),
        ({"isolated": 2}, "SearchOptions: isolated must be True or False"),
        ({"workers": 0}, "SearchOptions: workers must be at least 1"),
        ({"cache": 3.0}, "SearchOptions: cache must be a folder, True or False"),
        ({"progress": 3.0}, "SearchOptions: progress"),
    ],
)
def test_options_that_are_wrong_are_refused_at_once(options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        SearchOptions(**options)


SCRIPT = """
import sys, jax
jax.config.update("jax_num_cpu_devices", 8)
from tests.search.models import MACHINE, arguments, train_step
import partjit
from partjit import AUTO, SearchOptions, pjit
import numpy as np
search = SearchOptions(machine=MACHINE, questions=20, isolated=False, cache=sys.argv[1])
step = pjit(train_step, in_shardings=AUTO, out_shardings=AUTO, donate_argnums=(0, 1), search=search)
with partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")):
    step.trace(*arguments(layers=1))
"""


def test_keys_have_as_many_dimensions_as_in_the_program(searches):
    def step(w, x, key):
        own, after = jax.random.split(key)
        kept = jax.random.bernoulli(own, 0.9, (x.shape[0], 1))
        grad = jax.grad(lambda w: jnp.sum(jnp.where(kept, x @ w, 0) ** 2))(w)
        return w - 0.1 * grad, after, jax.random.split(own, 8)

    args = jnp.ones((16, 32)) / 8, jnp.linspace(-1, 1, 8 * 16).reshape(8, 16), jax.random.key(0)
    with on():
        results = automatic(step)(*args)
    assert searches == ["step"]
    for result, expected in zip(results, jax.jit(step)(*args), strict=True):
        if jnp.issubdtype(result.dtype, jax.dtypes.prng_key):
            result, expected = jax.random.key_data(result), jax.random.key_data(expected)
        np.testing.assert_allclose(result, expected, rtol=1e-5)


@pytest.mark.system
def test_other_processes_find_the_same_under_the_same_key(tmp_path):
    made = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        folder = tmp_path / seed
        subprocess.run([sys.executable, "-c", SCRIPT, folder], env=environment, check=True, timeout=200)
        made.append({path.name: path.read_text() for path in folder.iterdir()})
    assert len(made[0]) == 1
    assert made[0] == made[1]
