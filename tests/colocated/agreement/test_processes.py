"""What fails in one process fails in all, and the next program is right."""

import os
import pathlib
import re

import pytest

from tests.processes import outputs_of_processes

pytestmark = pytest.mark.system

HERE = pathlib.Path(__file__).parent
KINDS = ("raise", "result", "interrupt", "exit", "argument", "another program")
IS_SOAK = os.environ.get("PARTJIT_PROFILE") == "soak"


@pytest.mark.soak
@pytest.mark.parametrize("count", [2, 4] if IS_SOAK else [2])
def test_a_failure_in_one_process_is_one_in_all(count):
    trials, kinds = (500, (*KINDS, "alarm", "alarm")) if IS_SOAK else (40, KINDS)
    script = HERE / "injections.py"
    timeout = {"PARTJIT_AGREEMENT_TIMEOUT": "60"}
    outputs = outputs_of_processes(script, count, 5, trials, ",".join(kinds), seconds=60 + 2 * trials, **timeout)
    failed = {re.search(r"(\d+) of \d+ failed everywhere", output).group(1) for output in outputs}
    assert len(failed) == 1
    assert int(failed.pop()) > trials // 2


def test_results_are_put_on_devices_by_each_process_and_what_calls_without_results_raise_ends_programs_in_all():
    outputs = outputs_of_processes(HERE / "local_results.py", 2)
    assert all("done" in output for output in outputs)


def test_arrays_of_several_processes_are_moved_in_all_of_them_or_in_none():
    outputs = outputs_of_processes(HERE / "moved_results.py", 2, PARTJIT_AGREEMENT_TIMEOUT="30")
    assert all("done" in output for output in outputs)


@pytest.mark.soak
def test_what_fails_in_one_process_before_a_program_has_begun_ends_it_in_all():
    outputs = outputs_of_processes(HERE / "before_programs.py", 2, PARTJIT_AGREEMENT_TIMEOUT="30")
    assert all("done" in output for output in outputs)
