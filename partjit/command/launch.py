"""Starts a script in several processes of this machine, which form one group of jax.distributed.

The script calls jax.distributed.initialize() and runs unchanged under Slurm, Kubernetes and MPI. Each line of output
has the number of its process in front. The first process that fails ends the others, and Ctrl-C ends all of them.
"""

import argparse
import math
import os
import sys

from partjit.command.mistakes import Mistake
from partjit.launch.supervisor import Job, launch

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES: str = """\
examples:
  partjit launch -n 2 --devices-per-process 4 train.py --steps 100
  partjit launch -n 4 --env JAX_PLATFORMS=cpu -m package.train

exit codes:
  0        all processes ended with 0
  128 + n  the first process that failed was ended by signal n
  2        an argument is malformed
  others   that of the first process that failed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("-n", "--processes", required=True, metavar="COUNT", help="the number of processes")
    parser.add_argument(
        "--devices-per-process",
        default="1",
        metavar="COUNT",
        help="virtual CPU devices, or GPUs, of each process (default: 1)",
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="a variable for the processes; may be repeated"
    )
    parser.add_argument(
        "--grace",
        default="5",
        metavar="SECONDS",
        help="time from SIGTERM to SIGKILL for a process that does not end (default: 5)",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="what each process runs, and its arguments"
    )


def run(args: argparse.Namespace) -> int:
    """Launches the script, and returns the exit code of the processes.

    Raises:
        Mistake: an argument is malformed, or there is no such script.
    """
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not script:
        raise Mistake("there is no script; name one after the options: partjit launch -n 2 train.py")
    if not args.module and not os.path.exists(script[0]):
        raise Mistake(f"there is no file {script[0]!r}; -m is for the name of a module")
    job = Job(
        command=[sys.executable, *(["-m"] if args.module else []), *script],
        count=_count("-n", args.processes),
        devices=_count("--devices-per-process", args.devices_per_process),
        grace=_seconds(args.grace),
        env=dict(map(_variable, args.env)),
    )
    sys.stdout.flush()
    return launch(job)


def _count(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:7]) < 10**6):
        raise Mistake("expected a whole number, 1 or more", name, text, (0, len(text)))
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise Mistake("expected a number of seconds, 0 or more", "--grace", text, (0, len(text)))
    return seconds


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise Mistake("a variable is written as NAME=VALUE", "--env", text, (0, len(text)))
    return name, value
