"""A process that ends or stalls is an error in the others, in time, and one that waits ends at once."""

import collections
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.effort import EVERYTHING

SCRIPT = pathlib.Path(__file__).parent / "deaths.py"
TRIALS = 100 if EVERYTHING else 5
AT_ONCE = 5.0
STALL_SECONDS = 3.0
LEEWAY_SECONDS = 10.0
"""What is waited for besides: JAX may hold the thread that dispatches until a stopped process does its part."""


@pytest.mark.system
@pytest.mark.soak
@pytest.mark.parametrize("count", [2, 4] if EVERYTHING else [2])
def test_the_end_of_a_process_is_an_error_in_the_others(count):
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "7", str(TRIALS), str(count)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    output = subprocess.run(command, capture_output=True, text=True, timeout=60 + 30 * TRIALS, env=env)
    assert not output.returncode, output.stderr
    trials = [json.loads(line) for line in output.stdout.splitlines() if line.startswith("{")]
    assert len(trials) == TRIALS
    ways = collections.Counter()
    for trial in trials:
        is_coordinator = trial["victim"] == 0
        within = AT_ONCE
        if trial["kind"] == "stop":
            within += STALL_SECONDS + LEEWAY_SECONDS
        assert len(trial["seen"]) == count - 1
        for what, seconds in trial["seen"]:
            is_ended_by_jax = what == "exit code -6" and is_coordinator  # whose service ends with process 0
            assert what.startswith("OtherProcessError: ") or is_ended_by_jax, trial
            assert seconds < within, trial
            ways[trial["kind"], "ended by jax" if is_ended_by_jax else "an error"] += 1
        assert all(seconds < AT_ONCE for _, seconds in trial["own"]), trial
    print(f"{TRIALS} deaths among {count} processes: {dict(ways)}")
