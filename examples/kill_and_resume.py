"""Kill a process of train_distributed.py, go on, and compare with a run that was never killed.

    pip install "partjit[viz]"
    python examples/kill_and_resume.py                        # two processes of four virtual devices
    python examples/kill_and_resume.py --resume-processes 1   # go on in another number of processes

It trains three times: to the end; until a process kills itself (--kill-at), which ends the others; and on from the
last commit of that run. The metrics of the last two together have to be those of the first: each step once,
with the same losses. In as many processes as before these are the same bit for bit; in another number sums may be
taken in another order, and the losses agree to TOLERANCE.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

DEVICES = 8
TOLERANCE = 1e-3  # relative, after some dozens of steps of training
SCRIPT = Path(__file__).with_name("train_distributed.py")


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--processes", type=int, choices=(1, 2, 4), default=2, help="(default: %(default)s)")
    parser.add_argument("--resume-processes", type=int, choices=(1, 2, 4), help="those that go on (default: as many)")
    parser.add_argument("--kill-at", type=int, default=25, metavar="STEP", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default="train_distributed", metavar="DIR", help="(default: %(default)s)")
    return parser.parse_known_args()


def train(processes, *arguments):
    """Run the script in several processes, and return the exit code of the launcher."""
    launch = ["-m", "partjit.launch", "-n", processes, "--devices-per-process", DEVICES // processes]
    command = [sys.executable, *launch, "--grace", 1, "--env", "JAX_PLATFORMS=cpu", SCRIPT, *arguments]
    return subprocess.run([*map(str, command)], check=False).returncode


def metrics_in(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main():
    options, others = parse_options()
    resumed = options.resume_processes or options.processes
    whole, killed = options.out / "never_killed", options.out / "killed"

    print("---- a run that is never killed", flush=True)
    if code := train(options.processes, "--out", whole, *others):
        sys.exit(code)
    print("\n---- a run of which a process is killed", flush=True)
    if train(options.processes, "--out", killed, "--kill-at", options.kill_at, *others) != 128 + 9:
        sys.exit("the run should have been killed; is --kill-at one of its --steps?")
    rows = len(metrics_in(killed))
    print(f"{rows} rows of metrics were written before that", flush=True)
    print("\n---- the same run goes on", flush=True)
    if code := train(resumed, "--out", killed, "--resume", *others):
        sys.exit(code)

    expected, found = metrics_in(whole), metrics_in(killed)
    print("\n step  never killed  killed and resumed")
    for one, other in [*zip(expected, found, strict=False)][9::10]:
        print(f"{one['step']:>5}  {one['loss']:>12.6f}  {other['loss']:>18.6f}")
    if [row["step"] for row in found] != [row["step"] for row in expected]:
        sys.exit("rows of the metrics were lost or doubled")
    losses = [np.array([row["loss"] for row in rows]) for rows in (expected, found)]
    difference = np.max(np.abs(losses[1] / losses[0] - 1))
    if resumed == options.processes:
        same = difference == 0
        print(f"\n{len(found)} steps, each once; losses are {'equal bit for bit' if same else 'NOT EQUAL'}")
    else:
        same = difference < TOLERANCE
        print(f"\n{len(found)} steps, each once; losses differ by {difference:.1e} at most (relative)")
    sys.exit(not same)


if __name__ == "__main__":
    main()
