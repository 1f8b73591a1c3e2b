"""What works on one process works on several, or is refused: the laws are in the modules of the processes' script."""

import pathlib

import pytest

from tests.processes import outputs_of_processes

SCRIPT = pathlib.Path(__file__).parent / "main.py"
MODULES = ("pieces", "programs", "calls", "searched")


def _run(count, *modules):
    for output in outputs_of_processes(SCRIPT, count, *modules, seconds=210, PARTJIT_AGREEMENT_TIMEOUT="30"):
        for module in modules:
            assert f"{module}.check_errors: done" in output, output


@pytest.mark.soak
def test_programs():
    _run(2, "pieces", "programs")


@pytest.mark.system
def test_calls():
    _run(2, "calls")


@pytest.mark.system
def test_searches():
    _run(2, "searched")


@pytest.mark.system
def test_four_processes():
    _run(4, *MODULES)
