"""`partjit explain`: what it prints and writes, what it says of mistakes, and on which devices it works."""

import ast
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

import partjit
from partjit.command import main
from partjit.command.mistakes import Mistake
from partjit.command.target import find, users_code
from partjit.inspect.findings import KINDS

MESH = ["--mesh", "data=4,model=2"]
LARGE = ["shown_model:layer", "--args", "make_large"]

MODEL = """
import sys
from functools import partial

import jax
import jax.numpy as jnp

from partjit import P, pjit
from partjit.mesh import ambient_mesh

print("imported")


@partial(pjit, in_axis_resources=(P("data"), P(None, "model")), out_axis_resources=P("data"))
def layer(x, w):
    return jnp.tanh(x @ w)


@partial(pjit, in_axis_resources=(P("data"), P("data")), out_axis_resources=P("data"))
def windows_of_two(x, w):
    def add_and_multiply(a, b):
        return a[0] + b[0], a[1] * b[1]

    sums, products = jax.lax.reduce_window((x, x), (0.0, 1.0), add_and_multiply, (3, 1), (1, 1), "SAME")
    return sums + products


jitted = jax.jit(lambda x: x.sum())


def plain(x, w, scale=1.0):
    return scale * (x @ w)


class Model:
    @staticmethod
    def apply(x, w):
        return x @ w


def broken(x, w):
    return x @ w.T


@partial(pjit, in_shardings=P("data"))
def halved(x):
    return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x)


def make_args():
    assert not ambient_mesh().empty
    return jax.ShapeDtypeStruct((8, 16), jnp.float32), jnp.ones((16, 4))


def make_large():
    return jax.ShapeDtypeStruct((4096, 16), jnp.float32), jnp.ones((16, 8))


def make_odd():
    return jnp.ones((6, 16)), jnp.ones((16, 4))


def make_named():
    return make_args(), {"scale": 2.0}


def make_single():
    return jnp.ones(8)


def make_one():
    return (jnp.ones(8),)


def make_nothing():
    return load()


def load():
    raise KeyError("no data")


def leave():
    sys.exit(3)


@partial(pjit, in_axis_resources=P("data"), out_axis_resources=P())
def gathered(x):
    return jnp.sin(x)


number = 3
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A directory with a module `shown_model`, and with one that cannot be imported."""
    (tmp_path / "shown_model.py").write_text(MODEL)
    (tmp_path / "needs_more.py").write_text("import there_is_no_such_module\n")
    (tmp_path / "fails.py").write_text("def make():\n    raise RuntimeError('not today')\n\n\nmake()\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "deep.py").write_text("from beside import double\n")
    (tmp_path / "inner" / "beside.py").write_text("def double():\n    return 2 * 2.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield tmp_path
    for name in {"shown_model", "needs_more", "fails", "deep", "beside"} - before:
        sys.modules.pop(name, None)


@pytest.fixture
def run(capsys, model):
    """Runs a command line: the exit code, what it printed, and what it complained of."""

    jax.devices()  # as many as for all tests: a mesh may not ask for more first

    def run_(*arguments):
        code = main(["explain", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run_


# What it says


def test_a_report_is_printed_and_what_it_ran_on_is_told_beside_it(run):
    code, out, err = run("shown_model:layer", *MESH, "--args", "shown_model:make_args")
    assert code == 0
    assert out.startswith("layer on data=4, model=2: 2 equations\n")
    assert "shown_model.py:16 layer" in out
    assert err.splitlines() == ["imported", "partjit explain: using 8 of 8 virtual cpu devices"]


@pytest.mark.parametrize(
    ("function", "make_args", "name"),
    [
        ("shown_model:layer", "make_args", "layer"),
        ("shown_model.py:layer", "shown_model.py:make_args", "layer"),
        ("./shown_model.py:plain", "make_named", "plain"),
        ("shown_model:Model.apply", "make_args", "apply"),
        ("shown_model:jitted", "make_one", "<lambda>"),
    ],
)
def test_functions_and_arguments_may_be_named_in_many_ways(run, function, make_args, name):
    code, out, _ = run(function, *MESH, "--args", make_args, "--json")
    assert code == 0
    assert json.loads(out)["name"] == name


def test_a_file_sees_what_is_beside_it_and_needs_no_arguments_and_no_mesh(run):
    code, out, err = run("inner/deep.py:double")
    assert code == 0
    assert err == (
        "partjit explain: there is no mesh, so nothing is partitioned: say its axes and their sizes, like --mesh "
        "data=4,model=2\n"
    )
    assert out.startswith("double without a mesh: ")


def test_json_is_one_document_with_all_that_was_asked_for(run):
    arguments = ["--args", "make_args", "--compiled", "--jaxpr", "--why", "w", "--json"]
    code, out, _ = run("shown_model:layer", *MESH, *arguments)
    assert code == 0
    data = json.loads(out)
    assert [c["kind"] for c in data["collectives"]["compiled"]] == ["all-gather"]
    assert "tanh" in "\n".join(data["jaxpr"])
    assert "argument w" in data["why"]


def test_reasons_and_the_program_are_printed_instead_of_the_report(run):
    code, out, _ = run("shown_model:layer", *MESH, "--args", "make_args", "--why", "w", "--jaxpr")
    assert code == 0
    assert "'model' shards dimension 1: from argument w" in out
    assert "layer on the mesh data=4, model=2" in out
    assert "a device sends" not in out


def test_other_specs_are_printed_and_are_on_the_page_and_in_the_data(run, model):
    sizes = ["--mesh", "data=512,model=8"]
    code, out, _ = run(*LARGE, *sizes, "--suggest", "--html", "out.html")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "other specs, each tried by itself"
    assert " of memory" in lines[1] or " per step" in lines[1]
    page = (model / "out.html").read_text()
    assert "Other specs" in page
    code, out, _ = run(*LARGE, *sizes, "--suggest", "--json")
    first = json.loads(out)["suggestions"][0]
    assert lines[1].startswith(f"  {first['spec']} for {first['arguments'][0]}")
    assert first["after"]["peak"] < first["before"]["peak"] or first["after"]["sent"] < first["before"]["sent"]
    code, out, _ = run("shown_model:layer", "--mesh", "data=1,model=1", "--args", "make_args", "--suggest")
    assert out == "no other spec of an argument that was tried helps\n"


def test_a_page_is_written(run, model):
    code, out, err = run("shown_model:layer", *MESH, "--args", "make_args", "--html", "out.html")
    assert (code, out) == (0, "")
    assert err.splitlines()[-1] == "partjit explain: wrote out.html"
    page = (model / "out.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "shown_model.py:16" in page


# What it says of mistakes


@pytest.mark.parametrize(
    ("arguments", "code", "message", "span"),
    [
        (["layer"], 2, "FUNCTION should name a function: it is written as module:function", (0, 5)),
        (["shown_model:"], 2, "FUNCTION should name a function", (0, 12)),
        (["shown-model:layer"], 2, "'shown-model' is no name of a module", (0, 11)),
        (["shown_modle:layer"], 1, "there is no module 'shown_modle'; did you mean 'shown_model'?", (0, 11)),
        (["inner/dep.py:f"], 1, "there is no file 'inner/dep.py'; did you mean 'deep.py'?", (0, 12)),
        (["shown_model:laye"], 1, "the module shown_model has no 'laye'; did you mean 'layer'?", (12, 16)),
        (["shown_model:Model.aply"], 1, "has no 'aply'; did you mean 'apply'?", (18, 22)),
        (["shown_model:layer", "--mesh", "data"], 2, "an axis of a mesh is written as its name and size", (0, 4)),
        (["shown_model:layer", "--devices", "-1"], 2, "a number of devices is at least 0", (0, 2)),
        (["shown_model:layer", *MESH, "--devices", "4"], 2, "the mesh has 8 devices, which are more than", None),
        ([*LARGE, "--mesh", "data=16", "--compiled"], 1, "the mesh has 16 devices, but there are 8 (cpu)", None),
        ([*LARGE, "--mesh", "data=512,model=8", "--compiled"], 2, "--compiled needs devices to compile for", None),
        ([*LARGE, "--mesh", "data=2", "--devices", "0", "--compiled"], 2, "with --devices 2 it is", None),
        (["shown_model:layer", "--args", "number"], 1, "--args should name a function that returns", (0, 6)),
        (
            ["shown_model:layer", *MESH, "--args", "make_single"],
            1,
            "make_single should return a tuple of arguments, but returned ArrayImpl: for a single argument, return (",
            None,
        ),
        (["shown_model:layer", "--max-bytes", "20XB"], 2, "a number of bytes is written as 4096, 20MB", (2, 4)),
        (["shown_model:layer", "--max-bytes", "much"], 2, "a number of bytes is written as 4096, 20MB", (0, 4)),
        (["shown_model:layer", "--iterations", "model.py=3"], 2, "is written as model.py:12=100", (0, 10)),
        (["shown_model:layer", "--iterations", "m.py:1=3,m.py:2"], 2, "is written as model.py:12=100", (9, 15)),
        (["shown_model:layer", "--iterations", "m.py:1=3,m.py:1=4"], 2, "trip count of m.py:1 is given twice", (9, 17)),
        (["shown_model:layer", "--fail-on", "moved,replicate"], 2, "did you mean 'replicated'?", (6, 15)),
        (["shown_model:layer", "--fail-on", "x"], 2, "'x' is no kind of finding; there are replicated, fight", (0, 1)),
        (["shown_model:layer", "--html", "no/out.html"], 1, "--html: there is no directory 'no'", (0, 11)),
        (["shown_model:layer", "--html", "inner"], 1, "--html: 'inner' is a directory: name a file in it", (0, 5)),
        (
            ["shown_model:layer", *MESH, "--args", "make_odd"],
            1,
            "explaining shown_model:layer failed: The specs of layer do not fit",
            None,
        ),
        (["shown_model:number"], 1, "explain: fun must be a function, what partjit.pjit or jax.jit made of one", None),
        (
            ["shown_model:layer", *MESH, "--args", "make_args", "--why", "what"],
            1,
            "there is no value 'what' in the program",
            None,
        ),
    ],
)
def test_mistakes_are_told_as_text_and_as_json(run, arguments, code, message, span):
    told, out, err = run(*arguments, "--json")
    assert told == code
    assert message in err
    assert "Traceback" not in err
    assert "partjit/command" not in err
    error = json.loads(out)["error"]
    assert message in error["message"]
    assert error["span"] == (None if span is None else [*span])


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["shown_model:layer", *MESH, "--args", "make_nothing"],
            ["--args make_nothing failed:", "in make_nothing", "return load()", "in load", "KeyError: 'no data'"],
        ),
        (
            ["shown_model:broken", *MESH, "--args", "make_args"],
            ["explaining shown_model:broken failed:", "in broken", "return x @ w.T", "TypeError: dot_general"],
        ),
        (["shown_model:layer", "--args", "leave"], ["--args leave failed:", "in leave", "SystemExit: 3"]),
        (["needs_more:f"], ["importing needs_more failed:", "needs_more.py", "ModuleNotFoundError: No module named"]),
        (["fails:f"], ["importing fails failed:", "make()", "in make", "RuntimeError: not today"]),
        (["fails.py:f"], ["importing fails.py failed:", "make()", "in make", "RuntimeError: not today"]),
    ],
)
def test_an_exception_of_the_users_comes_with_the_users_lines_alone(run, arguments, lines):
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    place = -1
    for line in lines:
        assert err.find(line, place + 1) > place, (line, err)
        place = err.find(line, place + 1)
    files = [line.split('"')[1] for line in err.splitlines() if line.lstrip().startswith("File ")]
    assert {os.path.dirname(file) for file in files} == {os.getcwd()}


def test_a_page_that_cannot_be_written_in_the_end_is_a_mistake(run, model):
    (model / "full").symlink_to("/dev/full")
    code, out, err = run("shown_model:layer", *MESH, "--args", "make_args", "--html", "full")
    assert (code, out) == (1, "")
    assert "--html: 'full' cannot be written: No space left on device" in err


def test_what_is_found_is_what_python_imports(model):
    module = find("shown_model.py:layer", "FUNCTION")
    assert find("shown_model:layer", "FUNCTION") is module  # the module is there once
    assert find("os.path:join", "FUNCTION") is os.path.join
    (model / "json.py").write_text("mine = 1\n")
    assert find("json.py:mine", "FUNCTION") == 1
    assert sys.modules["json"] is json  # is not replaced by the user's
    sys.modules.pop("_explained_json")


def test_an_interrupt_is_no_mistake():
    with pytest.raises(KeyboardInterrupt), users_code("waiting"):
        raise KeyboardInterrupt


def test_notes_of_an_exception_are_told():
    error = ValueError("wrong")
    error.add_note("at line 3")
    with pytest.raises(Mistake, match=r"(?s)trying failed:.*ValueError: wrong\nat line 3$"), users_code("trying"):
        raise error


# On which devices


def start(model, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "partjit", "explain", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=model,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
    )


def without_devices():
    """What tests have set for themselves."""
    return {"XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "-1"}


def test_as_many_devices_as_the_mesh_has_are_made_and_nothing_else_is_printed(model):
    done = start(
        model, "shown_model:layer", "--mesh", "data=4,model=4", "--args", "make_args", "--json", **without_devices()
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["mesh"] == {"data": 4, "model": 4}
    assert done.stderr.splitlines() == ["imported", "partjit explain: using 16 of 16 virtual cpu devices"]


@pytest.mark.parametrize(("mesh", "devices"), [("data=512,model=8", []), ("data=4,model=2", ["--devices", "0"])])
def test_no_devices_are_needed(run, mesh, devices):
    found = {}
    for name, options in {"mesh": ["--mesh", mesh, *devices], "devices": MESH}.items():
        code, out, err = run(*LARGE, *options, "--json", "--why", "w")
        found[name] = json.loads(out)
        assert code == 0
        none = f"no devices: the mesh of {4096 if '512' in mesh else 8} is abstract"
        said = none if name == "mesh" else "8 of 8 virtual cpu devices"
        assert err.splitlines()[-1] == f"partjit explain: using {said}"
    if devices:
        assert found["mesh"] == found["devices"]
    else:
        assert found["mesh"]["mesh"] == {"data": 512, "model": 8}
        assert [(value["path"], value["nbytes_per_device"]) for value in found["mesh"]["arguments"]] == [
            ("x", 512),
            ("w", 64),
        ]


def test_where_there_are_fewer_devices_than_wanted_none_are_used(run):
    code, _, err = run(*LARGE, "--mesh", "data=8,model=2")
    assert (code, err.splitlines()[-1]) == (0, "partjit explain: using no devices: the mesh of 16 is abstract")


@pytest.mark.system
def test_devices_that_were_asked_for_before_are_kept(model):
    flags = {**without_devices(), "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = start(model, "shown_model:layer", *MESH, "--args", "make_args", "--devices", "8", **flags)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        "the mesh has 8 devices, but there are 4 (cpu): something has set their number before, XLA_FLAGS" in done.stderr
    )
    (model / "own_mesh.py").write_text(
        "import jax, numpy as np\nfrom partjit import Mesh, P, pjit\n"
        "mesh = Mesh(np.array(jax.devices()).reshape(2, 3), ('a', 'b'))\n"
        "def make():\n    return (np.ones((4, 6), np.float32),)\n"
        "def double(x):\n    with mesh:\n        return pjit(lambda x: 2 * x, in_shardings=P('a', 'b'))(x)\n"
    )
    done = start(model, "own_mesh:double", "--args", "make", "--devices", "6", **without_devices())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("double on a=2, b=3: ")


@pytest.mark.parametrize(("function", "names"), [("layer", "x, w"), ("jitted", "x"), ("plain", "x, w")])
def test_what_takes_arguments_says_how_to_give_them(run, function, names):
    code, out, err = run(f"shown_model:{function}")
    assert (code, out) == (2, "")
    assert err == (
        f"imported\npartjit explain: error: shown_model:{function} takes {names}: say with --args which function "
        "returns the arguments, like --args make_args with\n  def make_args():\n"
        f"      return ({names},)  # arrays, or such as jax.ShapeDtypeStruct((8, 16), jnp.float32)\n"
    )


def test_trip_counts_can_be_given(run):
    line = next(k for k, text in enumerate(MODEL.splitlines(), 1) if "while_loop" in text)
    arguments = ["shown_model:halved", *MESH, "--args", "make_one"]
    code, out, _ = run(*arguments)
    assert code == 0
    assert f"1 per iteration at shown_model.py:{line}" in out
    code, out, _ = run(*arguments, "--iterations", f"shown_model.py:{line}=7", "--json")
    assert code == 0
    assert {found["times"] for found in json.loads(out)["collectives"]["predicted"]} == {7}
    code, _, err = run(*arguments, "--iterations", "shown_model.py:1=7")
    assert code == 1
    assert f"where no while_loop is; there are shown_model.py:{line}" in err


def test_specs_without_a_mesh_say_how_to_give_one(run):
    code, out, err = run("shown_model:layer", "--args", "make_odd")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(
        "partjit explain: error: shown_model:layer needs a mesh: say its axes and their sizes, like --mesh "
        "data=4,model=2. Without, "
    )


# What it may not exceed


@pytest.mark.parametrize(
    ("limits", "code", "messages"),
    [
        ("--max-bytes 1kB", 0, []),
        ("--max-bytes 20", 3, ["--max-bytes: a device sends 24 B per step, more than 20 B; most in", "all-gather"]),
        ("--fail-on fight", 0, []),
        ("--fail-on fight,moved", 3, ["--fail-on: moved:"]),
        ("--fail-on any --max-bytes 0", 3, ["--max-bytes: a device sends 24 B", "--fail-on: moved:"]),
    ],
)
def test_limits_that_are_not_kept_are_an_exit_code_and_said_on_the_standard_error(run, limits, code, messages):
    arguments = ["shown_model:gathered", *MESH, "--args", "make_one", *limits.split()]
    found, out, err = run(*arguments)
    assert found == code, (out, err)
    assert "a device sends 24 B per step" in out
    assert err.count("partjit explain: error: ") == len([m for m in messages if m.startswith("--")])
    place = -1
    for message in messages:
        assert err.find(message, place + 1) > place, err
        place = err.find(message, place + 1)
    found, out, _ = run(*arguments, "--json")
    assert found == code
    assert len(json.loads(out)["failed"]) == err.count("partjit explain: error: ")


def test_every_kind_of_finding_can_be_named_and_is_documented():
    root = pathlib.Path(partjit.__file__).parents[1]
    text = (root / "docs" / "inspect.md").read_text(encoding="utf-8")
    section = text.partition("## Findings")[2].partition("\n## ")[0]
    documented = {line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")}
    assert documented - {"kind"} == {*KINDS}
    made = {
        ast.literal_eval(node.args[0])
        for path in (root / "partjit" / "inspect").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Finding" and isinstance(node.args[0], ast.Constant)
    }
    assert len(made) >= 7
    assert made <= {*KINDS}


def test_that_more_may_be_sent_than_the_limit_is_said(run):
    arguments = ["shown_model:windows_of_two", *MESH, "--args", "make_large"]
    _, out, _ = run(*arguments, "--json")
    sent = json.loads(out)["collectives"]
    least, most = sent["bytes_per_step"], sent["bytes_per_step_at_most"]
    assert least < most
    said = "partjit explain: --max-bytes: a device sends "
    for limit, is_said in ((int(most), False), (int(most) - 1, True)):
        code, _, err = run(*arguments, "--max-bytes", str(limit))
        assert code == 0
        assert (said in err) == is_said
    assert "and XLA may move more, which is not predicted exactly" in err
    assert err.rstrip().endswith("--compiled says what it moves")
