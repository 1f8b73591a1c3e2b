"""`partjit search`: what it prints and writes, and what it says of mistakes."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct as S

from partjit.command import main, searching

MODEL = """
import jax, jax.numpy as jnp
from jax import ShapeDtypeStruct as S
from partjit import pjit

def step(params, x):
    grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["up"]) @ p["down"]))(params)
    return jax.tree.map(lambda p, g: p - g, params, grads)

donating = pjit(step, donate_argnums=0)

def make_args():
    return {"up": S((1024, 4096), jnp.float32), "down": S((4096, 1024), jnp.float32)}, S((512, 1024), jnp.float32)

def make_named():
    return make_args(), {"rate": 0.1}
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    (tmp_path / "searched_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)

    def run_(function, *arguments):
        code = main(["search", function, "--questions", "12", *arguments])
        return code, *capsys.readouterr()

    yield run_
    sys.modules.pop("searched_model", None)


CALL = ("searched_model:donating", "--mesh", "data=16,model=4", "--args", "make_args")


def test_specs_are_printed_and_written_as_python_that_makes_them(run, tmp_path):
    code, out, err = run(*CALL, "--memory", "80GB", "--out", "specs.py")
    assert code == 0
    assert out.startswith("step on data=16, model=4, H100: ")
    assert "of 80.0 GB per device" in out
    assert err == "partjit search: wrote specs.py\n"
    params = {"up": S((1024, 4096), jnp.float32), "down": S((4096, 1024), jnp.float32)}
    names = {"params": params, "result": params}
    exec((tmp_path / "specs.py").read_text(), names)
    assert jax.tree.structure(names["in_specs"][0]) == jax.tree.structure(params)
    assert names["out_specs"] == names["in_specs"][0]


def test_json_has_the_specs_by_path_and_the_starts(run):
    code, out, _ = run(*CALL, "--machine", "tpu-v5p", "--dcn", "data", "--json")
    data = json.loads(out)
    assert code == 0
    assert {*data["in_specs"]} == {"[0]['down']", "[0]['up']", "[1]"}
    assert data["seconds"] <= min(start["seconds"] for start in data["starts"] if start["fits"])
    assert data["questions"] <= 12


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((*CALL, "--memory", "1MB"), 1, "step does not fit into 1.0 MB per device on data=16, model=4"),
        ((*CALL, "--memory", "much"), 2, "a number of bytes is written as 4096, 20MB or 1.5GiB"),
        ((*CALL, "--dcn", "data"), 2, "--dcn is about slices of TPUs"),
        ((*CALL, "--machine", "tpu-v6e", "--dcn", "slice"), 2, "'slice' is no axis of the mesh, which has data, model"),
        ((*CALL[:-1], "make_named"), 2, "--args make_named should return positional arguments only"),
        ((*CALL[:-1], "searched_model"), 1, "searched_model"),
        ((*CALL, "--out", "no/such/folder.py"), 1, "--out: 'no/such/folder.py' cannot be written: No such file"),
        ((*CALL, "--machine", "abacus"), 2, "invalid choice: 'abacus'"),
    ],
)
def test_mistakes_say_what_to_do(run, arguments, code, said):
    found, _, err = run(*arguments)
    assert found == code
    assert said in err


def test_a_file_that_cannot_be_written_is_said_before_the_search(run, monkeypatch):
    monkeypatch.setattr(searching, "search_specs", lambda *_, **__: pytest.fail("it searched first"))
    code, _, err = run(*CALL, "--out", "no/such/folder.py")
    assert code == 1
    assert "--out: 'no/such/folder.py' cannot be written" in err
