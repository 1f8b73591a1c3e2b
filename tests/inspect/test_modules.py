"""Every report says which of the user's lines and which module a thing comes from, also where a library computes it."""

import dataclasses
import functools
import importlib.util
import inspect
import json
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from partjit import P, pjit, with_sharding_constraint
from partjit.inspect import explain
from partjit.inspect.modules import folded, is_within, module_of
from partjit.inspect.page.excerpts import Excerpts
from partjit.inspect.user_lines import is_installed, nearest_lines
from partjit.render.numbers import shown_duration
from tests.inspect.inspected import f32, mesh

LIBRARY = """
import jax

def dense(x, w, name):
    with jax.named_scope(name):
        return x @ w

def stack(x, ws):
    return jax.lax.scan(lambda x, w: (dense(x, w, "Dense"), None), x, ws)[0]

def recurrent(kernels, state, xs):
    def cell(state, x):
        return jax.numpy.tanh(state @ jax.numpy.concatenate(kernels, 1) + x), None
    return jax.lax.scan(cell, state, xs)[0]
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("env") / "site-packages" / "layers.py"
    path.parent.mkdir()
    path.write_text(LIBRARY, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("layers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model(library, params, x):
    for k, w in enumerate(params["first"]):
        with jax.named_scope(f"Block_{k}"):
            x = library.dense(x, w, "Dense_0")
    with jax.named_scope("Tail"):
        return jnp.mean(library.stack(x, params["tail"]) ** 2)


def step(library, params, x):
    grads = jax.grad(functools.partial(model, library))(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


@pytest.fixture(scope="module")
def report(library):
    specs = {"first": [P("model")] * 2, "tail": P(None, "model")}
    params = {"first": [f32(16, 16)] * 2, "tail": f32(3, 16, 16)}
    made = pjit(functools.partial(step, library), in_shardings=(specs, P("data")), out_shardings=specs)
    return explain(made, params, f32(8, 16), mesh=mesh(), compiled=True, large=1)


def line_of(text):
    lines, first = inspect.getsourcelines(model)
    return first + next(k for k, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("source", ["predicted", "compiled"])
def test_the_line_is_the_users_with_that_of_the_library_beside_it(report, library, source):
    found = report.predicted if source == "predicted" else report.collectives
    of_library = [one for one in found if one.library is not None]
    assert {one.site[0] for one in found} == {__file__}
    assert {one.library[0] for one in of_library} == {library.__file__}
    lines = {(one.site[1], one.library[1]) for one in of_library}
    assert {(line_of("library.dense"), 6), (line_of("library.stack"), 6)} <= lines
    assert lines <= {(line_of("library.dense"), 6), (line_of("library.stack"), 6), (line_of("library.stack"), 9)}
    assert f"test_modules.py:{line_of('library.dense')} model (layers.py:6)" in found.to_text(None)


@pytest.mark.parametrize("source", ["predicted", "compiled"])
def test_layers_have_rows_of_their_modules(report, source):
    found = report.predicted if source == "predicted" else report.collectives
    modules = {module for one in found for module in one.modules} | {move.module for move in found.unknown}
    for name in ("Block_0/Dense_0", "Block_1/Dense_0", "Tail/Dense"):
        assert any(is_within(module, name) for module in modules)
    assert ("Block_{0-1}/Dense_0" in found.to_text(None)) or found.unknown


def test_a_parameter_ends_the_path_of_what_reads_it_and_of_its_gradient(report):
    of_products = [one for one in report.equations if one.primitive == "dot_general"]
    assert [one.module for one in of_products if "Block" in one.module and "transpose(" in one.scope] == [
        "Block_1/Dense_0/1",
        "Block_1/Dense_0/1",
        "Block_0/Dense_0/0",
    ]


def test_without_scopes_the_module_is_the_path_of_the_parameter():
    def loss(params, x):
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        return x.sum()

    def update(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x))

    found = explain(update, {"layers": [f32(16, 16)] * 2}, f32(8, 16), mesh=mesh())
    products = [one.module for one in found.equations if one.primitive == "dot_general"]
    assert products == ["layers/0", "layers/1", "layers/1", "layers/1", "layers/0"]


def test_the_module_is_said_everywhere(report):
    data = json.loads(report.to_json())
    assert "Block_1/Dense_0" in {one["module"].rpartition("/")[0] for one in data["collectives"]["predicted"]}
    assert 6 in {one["library"]["line"] for one in data["collectives"]["compiled"] if one["library"]}
    assert "Block_1/Dense_0" in str(report.jaxpr)
    assert "in Block_0/Dense_0/0" in str(report.why("params['first'][0] gradient"))
    page = report.to_html()
    assert "Block_{0-1}/Dense_0" in page
    assert "in <a" in page


def test_a_finding_says_its_module():
    def fought(x):
        with jax.named_scope("Tail"):
            return with_sharding_constraint(with_sharding_constraint(x, P("data")), P("model"))

    findings = explain(pjit(fought), f32(64, 64), mesh=mesh()).findings
    assert {(finding.kind, finding.module) for finding in findings} >= {("fight", "Tail")}
    assert all("in Tail" in str(finding) for finding in findings if finding.module)


def test_what_belongs_to_a_module_is_found(report):
    found = report.find("Block_0/Dense_0")
    assert found.equations
    assert all("Block_0/Dense_0" in equation.module for equation in found.equations)
    assert all("Block_0/Dense_0" in " ".join(c.modules) for c in found.collectives)
    assert [value.path for value in report.find("first/0").parameters] == ["params['first'][0]"]
    everything = report.find("Block_*")
    assert len(everything.equations) > 2 * len(found.equations) - 2
    text = str(everything)
    assert text.startswith(f"Block_*: {len(everything.equations)} equations, 0 parameters; a device sends ")
    assert "Block_{0-1}/Dense_0" in text
    assert "Block_*" in everything._repr_html_()
    with pytest.raises(LookupError, match=r"there is no module 'Block_2' in the program; there are .*Block_"):
        report.find("Block_2")
    with pytest.raises(TypeError, match="module must be the path of a module"):
        report.find(2)


def test_the_seconds_over_each_axis_are_those_of_the_stated_bandwidth(report):
    assert report.seconds == {}
    for bandwidth, data in ((1e3, 1e3), ({"data": 5e2, "model": 1e3}, 5e2)):
        stated = dataclasses.replace(report, bandwidth=bandwidth)
        sent = {
            axis: sum(c.bytes_per_step for c in report.collectives if c.axes == (axis,)) for axis in ("data", "model")
        }
        assert stated.seconds == pytest.approx({("data",): sent["data"] / data, ("model",): sent["model"] / 1e3})
        assert f"network: data {shown_duration(sent['data'] / data)}, model " in str(stated)
        assert "over data" in stated.to_html()
        assert {one["axes"][0] for one in stated.as_data()["network"]} == {"data", "model"}
    for wrong in (0, -1.0, {"data": 0}):
        with pytest.raises(ValueError, match="bandwidth must be a number of bytes per second above 0"):
            explain(jnp.sin, f32(8), bandwidth=wrong)


@pytest.mark.parametrize("axes", [["x"], [], ["x", "y", "z"], ["X", "y"]], ids=str)
def test_bandwidths_are_those_of_the_axes_of_the_mesh(axes):
    mesh = AbstractMesh((2, 4, 1), ("x", "y", "one"))
    explain(jnp.sin, f32(8), mesh=mesh, bandwidth={"x": 1e9, "y": 1e9})
    with pytest.raises(ValueError, match=r"bandwidth is given for .*, but the axes of the mesh are x, y, one: give"):
        explain(jnp.sin, f32(8), mesh=mesh, bandwidth=dict.fromkeys(axes, 1e9))


def test_the_page_begins_with_what_sends_most_and_has_a_tree_of_modules(report):
    page = report.to_html()
    assert page.index("Sends most") < page.index(">Findings</h2>") < page.index("By module (compiled)")
    assert "<b>Tail" in page
    assert "The tree of arguments" in page


def test_what_is_computed_before_a_loop_of_a_library_has_the_line_that_calls_it(library):
    """The frames of an equation of a body end there, also if it is the same in all iterations and comes before."""

    def loss(kernels, state, xs):
        return library.recurrent(kernels, state, xs).sum()

    report = explain(jax.grad(loss), [f32(8, 4)] * 2, f32(8), f32(3, 8), mesh=mesh())
    joined = [one for one in report.whole.tree.walk() if one.primitive == "concatenate"]
    assert joined
    assert {one.site for one in joined} == {(__file__, inspect.getsourcelines(loss)[1] + 1, "loss")}
    assert {one.library[0] for one in joined} == {library.__file__}


def test_lines_of_cells_are_shown_as_in_tracebacks(monkeypatch):
    names = {"/tmp/ipykernel_1/2.py": ("Cell", "In[3]")}
    shell = types.SimpleNamespace(compile=types.SimpleNamespace(format_code_name=names.get))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    excerpts = Excerpts("p")
    link = excerpts.link(("/tmp/ipykernel_1/2.py", 7, "loss"))
    assert "ipykernel" not in f"{link}{excerpts.shown()}"
    assert 'title="In[3]:7 in loss"' in link


def test_lines_of_installed_packages_and_python_are_not_the_users():
    assert is_installed(json.__file__)
    assert is_installed(jax.__file__)
    assert is_installed("<frozen runpy>")
    assert is_installed(r"C:\env\Lib\site-packages\flax\core.py")
    assert not is_installed(__file__)
    assert not is_installed("<stdin>")
    assert nearest_lines([]) == (None, None)
    own, other = (__file__, 1, "f"), (json.__file__, 2, "g")
    assert nearest_lines([own, other]) == (own, None)


@pytest.mark.parametrize(
    ("scope", "module"),
    [
        ("", ""),
        ("jvp()", ""),
        ("jit(f)/jit(main)/transpose(jvp(Model))/Block_1/while/body/Dense_0.attend", "Model/Block_1/Dense_0.attend"),
        ("checkpoint/rematted_computation/cond/branch_1_fun/Inner", "Inner"),
        ("vmap(jvp(a/b))/c", "a/b/c"),
        ("Block/body/while/cond", "Block/body"),
    ],
)
def test_a_module_is_what_is_left_of_a_scope_without_what_jax_adds(scope, module):
    assert module_of(scope) == module


def test_paths_that_differ_in_numbers_are_folded_and_others_listed():
    assert folded(["a/3", "a/1", "a/1", "a/2"]) == "a/{1-3}"
    assert folded(["a/1", "b"]) == "a/1, b"
    assert folded(["a/1", "b", "a/2", "c", "d"]) == "a/{1-2}, b and 2 more"
    assert folded([]) == ""
    assert [is_within(path, searched) for path, searched in [("a/b/c", "b"), ("a/b/c", "c/b"), ("", "a")]] == [
        True,
        False,
        False,
    ]
