"""Processes that are killed while they write, and started again: no committed call is lost or made twice."""

import collections
import os
import random
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.effort import EVERYTHING

STEPS, EVERY, WIDTH = 12, 3, 24
"""Those of the program."""
OPERATIONS = 60
"""A little less operations on files than an undisturbed run makes."""
TOTALS = [4 * k * (k + 1) // 2 for k in range(1, STEPS + 1)]
CHAINS = 25 if EVERYTHING else 1


def start(path, count, keeps, last, victim):
    """The exit codes and outputs of the program in processes, of which one kills itself; then the others are killed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", f"{__package__}.killed_process"]
    processes = [
        subprocess.Popen(
            [*command, str(number), str(count), address, str(path), str(int(keeps)), str(last * (number == victim))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PARTJIT_AGREEMENT_TIMEOUT": "30"},
        )
        for number in range(count)
    ]
    try:
        deadline = time.monotonic() + 120
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() == -signal.SIGKILL for process in processes):
                break  # the others would wait for it, which is tested elsewhere
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
    outputs = [process.communicate()[0] for process in processes]
    return [process.returncode for process in processes], outputs


def run_chain(path, generator, counts, keeps):
    """Starts and kills the program, once with each number of processes, and then lets it end; returns the kills."""
    kills = 0
    for attempt, count in enumerate(counts):
        last = generator.randint(1, OPERATIONS // (attempt + 1))
        codes, outputs = start(path, count, keeps, last, generator.randrange(count))
        assert all(code in (0, -signal.SIGKILL) for code in codes) or -signal.SIGKILL in codes, "\n".join(outputs)
        kills += -signal.SIGKILL in codes
        check_rows(path)
    count = counts[-1]
    codes, outputs = start(path, count, keeps, 0, 0)
    assert codes == [0] * count, "\n".join(outputs)
    assert f"ended with {[float(TOTALS[-1] / 4)] * (4 // count)}" in outputs[0]
    rows = (path / "metrics").read_bytes()
    assert rows == b"".join(row(k) for k in range(STEPS))
    check_ledgers(path, kills, keeps, counts)
    return kills


def row(k):
    return f"{k} {TOTALS[k]:g}".ljust(WIDTH - 1).encode() + b"\n"


def check_rows(path):
    """The rows of each moment are those of an undisturbed run, as far as they go."""
    if (path / "metrics").exists():
        rows = (path / "metrics").read_bytes()
        rows = rows[: len(rows) // WIDTH * WIDTH]
        assert rows == b"".join(row(k) for k in range(len(rows) // WIDTH))


def check_ledgers(path, kills, keeps, counts):
    """Every effect came with a key of its own; a call was made again at most once per kill, with the same key."""
    for number in range(counts[-1]):
        found = collections.defaultdict(list)
        for line in (path / f"ledger-{number}").read_text().splitlines():
            key, step = line.split()
            found[key].append(int(step))
        assert all(len({*steps}) == 1 for steps in found.values())
        steps = sorted(steps[0] for steps in found.values())
        assert len({*steps}) == len(steps)
        if number < min(counts):
            assert steps == [*range(STEPS)]
        again = sum(len(steps) - 1 for steps in found.values())
        assert again <= kills * (1 if keeps and len({*counts}) == 1 else EVERY)


@pytest.mark.soak
@pytest.mark.parametrize("keeps", [False, True] if EVERYTHING else [True])
def test_one_process_that_is_killed_goes_on(tmp_path, keeps):
    kills = 0
    for chain in range(CHAINS):
        generator = random.Random(f"{chain} {keeps}")
        path = tmp_path / str(chain)
        path.mkdir()
        kills += run_chain(path, generator, [1, 1] if EVERYTHING else [1], keeps)
    assert kills >= CHAINS


@pytest.mark.soak
@pytest.mark.system
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("counts", [(2, 2), (2, 1, 2), *([(2, 1), (1, 2)] if EVERYTHING else [])], ids=str)
def test_processes_of_which_one_is_killed_go_on_as_another_number(tmp_path, counts, keeps):
    assert run_chain(tmp_path, random.Random(f"{counts} {keeps}"), counts, keeps)
