"""The pytest plugin: devices before JAX starts, skips, profiles, and silence where nobody asks."""

import os
import subprocess
import sys

import pytest

TEST_OF_DEVICES = """
import jax, os
def test_devices():
    assert len(jax.devices()) == {count}
    assert os.environ["NPROC"]
    assert os.environ["JAX_NUM_CPU_DEVICES"] == "{count}"
"""


@pytest.fixture
def run(tmp_path):
    """Runs pytest in a process of its own, on files given by name, and returns what it printed."""

    def run(*options, environment=(), **files):
        for name, text in files.items():
            suffix = {"ini": "pytest.ini"}.get(name, f"{name}.py")
            (tmp_path / suffix).write_text(text, encoding="utf-8")
        if "ini" not in files:
            (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        clean = {
            key: value for key, value in os.environ.items() if not key.startswith(("JAX", "NPROC", "PARTJIT", "PYTEST"))
        }
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
            cwd=tmp_path,
            env={**clean, **dict(environment)},
            capture_output=True,
            text=True,
            check=False,
        )
        return ran.stdout + ran.stderr

    return run


def test_the_option_and_the_setting_set_the_devices(run):
    assert "1 passed" in run("--partjit-devices=3", test_it=TEST_OF_DEVICES.format(count=3))
    assert "1 passed" in run(ini="[pytest]\npartjit_devices = 5\n", test_it=TEST_OF_DEVICES.format(count=5))
    assert "1 passed" in run(
        "--partjit-devices=2", ini="[pytest]\npartjit_devices = 5\n", test_it=TEST_OF_DEVICES.format(count=2)
    )


def test_the_workers_of_xdist_have_them_too(run):
    assert "1 passed" in run("-n", "1", "--partjit-devices=3", test_it=TEST_OF_DEVICES.format(count=3))


def test_a_conftest_may_use_jax_but_an_earlier_plugin_may_not(run):
    test = TEST_OF_DEVICES.format(count=3)
    assert "1 passed" in run("--partjit-devices=3", conftest="import jax\njax.devices()\n", test_it=test)
    # A module loaded with -p comes before the plugins of packages do their work.
    printed = run("--partjit-devices=3", "-p", "early", early="import jax\njax.devices()\n", test_it=test)
    assert "3 devices were requested" in printed, printed
    assert "JAX is initialized already with 1" in printed
    assert "Use JAX in fixtures and hooks only" in printed


@pytest.mark.parametrize("value", ["0", "-2", "many"])
def test_a_wrong_number_is_one_line(run, value):
    printed = run(ini=f"[pytest]\npartjit_devices = {value}\n", test_it="")
    assert f"partjit_devices must be a number of at least 1, but is '{value}'" in printed
    assert "Traceback" not in printed


def test_what_needs_more_devices_is_skipped_with_the_reason(run):
    test = """
import pytest
@pytest.mark.needs_devices(4)
def test_four(): pass
@pytest.mark.needs_devices(2)
def test_two(): pass
@pytest.mark.needs_devices("two")
def test_wrong(): pass
"""
    printed = run("-rs", "--strict-markers", "--partjit-devices=2", "-k", "not wrong", test_it=test)
    assert "1 passed, 1 skipped" in printed
    assert "needs 4 devices, but there are 2: run pytest with --partjit-devices=4" in printed
    assert "needs_devices takes one number" in run("--partjit-devices=2", "-k", "wrong", test_it=test)


PROFILES = """
from hypothesis import settings
def test_profile():
    default = settings()
    print("profile:", default.derandomize, default.max_examples, default.deadline, "explain" in str(default.phases))
"""


@pytest.mark.parametrize(
    ("environment", "options", "expected"),
    [
        ({}, ["--partjit-devices=1"], "profile: True 100 None False"),
        ({"PARTJIT_PROFILE": "random"}, [], "profile: False 100 None False"),
        ({"PARTJIT_PROFILE": "soak"}, [], "profile: False 1000 None False"),
        ({"PARTJIT_PROFILE": "soak"}, ["--hypothesis-profile=default"], "profile: False 100 0:00:00.2"),
    ],
)
def test_profiles_are_deterministic_by_default(run, environment, options, expected):
    environment = {**environment, "CI": ""}  # hypothesis has settings of its own for CI
    assert expected in run("-s", *options, environment=environment.items(), test_it=PROFILES)


def test_a_profile_that_a_conftest_loads_stays(run):
    own = """
from hypothesis import settings
settings.register_profile("own", max_examples=7)
settings.load_profile("own")
"""
    assert "profile: True 7" in run(
        "-s", "--partjit-devices=1", environment=[("CI", "")], conftest=own, test_it=PROFILES
    )


def test_an_unknown_profile_is_one_line(run):
    printed = run(environment=[("PARTJIT_PROFILE", "fast")], test_it="")
    assert "PARTJIT_PROFILE is 'fast', but the profiles are deterministic, random, soak" in printed


def test_nothing_happens_where_nobody_asks(run):
    test = """
import os, sys
def test_silence():
    assert "jax" not in sys.modules and "partjit" not in sys.modules and "NPROC" not in os.environ
"""
    assert "1 passed" in run(test_it=test)
