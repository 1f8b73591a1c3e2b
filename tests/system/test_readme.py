"""The README tells the truth: its program runs and prints what stands there, and so do its error and its jaxpr."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import Mesh, P, ShardingError, pjit

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()


def block(after: str) -> str:
    """The first fenced block behind a marker."""
    found = re.search(re.escape(after) + r".*?```\w*\n(.*?)```", README, re.DOTALL)
    assert found, after
    return found[1]


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def test_the_program_runs_and_prints_what_stands_below_it():
    program = block("## The idea in twenty lines")
    printed = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    assert printed.stdout == block(program + "```")


def test_the_program_prints_the_same_on_a_mesh_of_jax_whose_axes_are_explicit():
    program = block("## The idea in twenty lines")
    ours = 'with Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")):'
    assert ours in program
    made = program.replace(ours, 'with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"))):')
    printed = subprocess.run([sys.executable, "-W", "error", "-c", made], capture_output=True, text=True, check=True)
    assert printed.stdout == block(program + "```")


def test_the_report_prints_what_stands_below_it(tmp_path):
    program = block("## Reading what was partitioned")
    (tmp_path / "model.py").write_text(program)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "model.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ran.stdout.replace(f"{tmp_path}/", "") == block(program + "```")
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_colocated_functions_run():
    program = block("## Python beside the devices")
    ran = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.count("mean") == 3
    assert ran.stderr == ""


def test_the_program_with_colocated_calls_runs_and_prints_its_plan():
    program = block("**Inside a program**")
    whole = block("## Python beside the devices") + program
    ran = subprocess.run([sys.executable, "-W", "error", "-c", whole], capture_output=True, text=True, check=True)
    assert block(program + "```") in ran.stdout
    assert ran.stdout.count("mean") == 6
    assert ran.stderr == ""


def test_the_processes_fail_together_and_go_on(tmp_path):
    program = block("## Several processes")
    (tmp_path / "train.py").write_text(program)
    command = block(program + "```").split()
    assert command[0] == "python"
    ran = subprocess.run(
        [sys.executable, *command[1:]],
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    for line in block(f"{' '.join(command)}\n```").splitlines():
        assert re.search(f"^{re.escape(line[:4])}.*{re.escape(line[4:])}$", ran.stdout, re.MULTILINE)


def test_the_specs_found_are_those_shown():
    program = block("## Specs found automatically")
    ran = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == block(program + "```")


def test_the_property_test_passes():
    program = block("## Testing your own sharded code")
    set_up = "import jax\njax.config.update('jax_num_cpu_devices', 8)\n"
    subprocess.run([sys.executable, "-W", "error", "-c", f"{set_up}{program}\ntest_affine()"], check=True)


def test_the_error_is_the_one_shown(mesh):
    specs = {"w1": P(None, "model"), "w2": P(None, "model")}

    @pjit(in_axis_resources=(specs, P("data"), P("data")))
    def step(params, x, y):
        return params, x, y

    params = {"w1": jnp.ones((16, 31)), "w2": jnp.ones((32, 4))}
    with mesh, pytest.raises(ShardingError) as error:
        step(params, jnp.ones((6, 16)), jnp.ones((8, 4)))
    assert f"ShardingError: {error.value}\n" == block("<!-- error -->")


def test_the_jaxpr_is_the_one_shown(mesh):
    @pjit(in_axis_resources=(P("data"), None), out_axis_resources=P("data"))
    def affine(x, w):
        return x @ w

    with mesh:
        jaxpr = str(jax.make_jaxpr(affine)(jnp.ones((8, 4)), jnp.ones((4, 2))))
    assert "".join(block("<!-- jaxpr -->").split()) in "".join(jaxpr.split())
