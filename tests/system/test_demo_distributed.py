"""The demo over several processes goes on after one of them was killed, in as many processes or in another number."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.system.documents import DEMO

EXAMPLES = DEMO.parent
STEPS, KILL_AT, COMMITTED = 14, 12, 9
LIMIT = 300


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "fox.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 40)
    return ["--steps", str(STEPS), "--commit-every", "3", "--text", str(text)]


@pytest.fixture(scope="module")
def compared(tmp_path_factory, options):
    """A folder with runs in two processes, never killed, and killed and resumed in one; and what was printed."""
    folder = tmp_path_factory.mktemp("compared")
    ours = ["--resume-processes", "1", "--kill-at", str(KILL_AT), "--out", str(folder)]
    return folder, finished([sys.executable, str(EXAMPLES / "kill_and_resume.py"), *ours, *options])


def launch(*args):
    launcher = ["-m", "partjit.launch", "-n", "2", "--devices-per-process", "4", "--grace", "1"]
    return finished([sys.executable, *launcher, str(EXAMPLES / "train_distributed.py"), *args])


def finished(command):
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)


def metrics_in(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_goes_on_in_another_number_of_processes(compared):
    folder, result = compared
    assert result.returncode == 0, result.stderr
    assert "process 1 was ended by SIGKILL; ending process 0\n" in result.stderr
    rows = re.search(r"^(\d+) rows of metrics were written before that$", result.stdout, re.MULTILINE)
    assert COMMITTED <= int(rows[1]) < KILL_AT
    assert f"1 process, 8 devices, out {folder}/killed, from step {COMMITTED} on\n" in result.stdout
    verdict = rf"^{STEPS} steps, each once; losses differ by \d\.\de[-+]\d\d at most"
    assert re.search(verdict, result.stdout, re.MULTILINE)
    for run in ("never_killed", "killed"):
        assert [row["step"] for row in metrics_in(folder / run)] == [*range(1, STEPS + 1)]


def test_goes_on_exactly_in_as_many_processes(compared, options, tmp_path):
    folder, _ = compared
    killed = launch("--out", str(tmp_path), "--kill-at", str(KILL_AT), *options)
    assert killed.returncode == 128 + 9
    expected = metrics_in(folder / "never_killed")
    rows = metrics_in(tmp_path)
    assert rows == expected[: len(rows)]
    resumed = launch("--out", str(tmp_path), "--resume", *options)
    assert resumed.returncode == 0, resumed.stderr
    assert metrics_in(tmp_path) == expected


def test_resuming_nothing_is_one_line_in_each_process(options, tmp_path):
    result = launch("--out", str(tmp_path), "--resume", *options)
    assert result.returncode == 2
    message = f"train_distributed.py: error: argument --resume: there is no journal in '{tmp_path}'"
    assert f"] {message}; start without it\n" in result.stderr
