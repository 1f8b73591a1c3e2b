"""The laws notice when partjit is broken: see `tests/sabotage.py`."""

import subprocess
import sys


def test_each_sabotage_is_noticed_by_a_law():
    ran = subprocess.run([sys.executable, "-m", "tests.sabotage"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    assert ran.stdout.splitlines()[-1] == "not noticed: nothing"
