"""How long it takes to import partjit, beside jax: each import in processes of their own, which alternate.

`from partjit import Mesh, P, pjit` imports all that a program without colocated calls needs; `import partjit` alone
imports no jax. What is measured is the processor time of a process, which a busy machine disturbs less; the wall time,
and the import of all that partjit has, are for information. `partjit --help` is compared with `import jax` too.

All modules are imported from bytecode, which the first process of each kind writes to a directory of the benchmark:
where `PYTHONDONTWRITEBYTECODE` is set, modules of a package that pip did not install would be compiled each time.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import NamedTuple

import report

BOUND = 1.15
HELP_BOUND = 0.5

NAMES = "from partjit import Mesh, P, pjit, with_sharding_constraint"
PROGRAMS = {
    "import jax": ["-c", "import jax"],
    "import partjit": ["-c", "import partjit"],
    NAMES: ["-c", NAMES],
    "everything": ["-c", "from partjit import *"],
    "partjit --help": ["-m", "partjit", "--help"],
}
BOUNDS: Mapping[str, float] = {"import partjit": BOUND, NAMES: BOUND, "partjit --help": HELP_BOUND}


class Seconds(NamedTuple):
    """What a process took."""

    cpu: float
    wall: float


def measure(arguments: list[str], bytecode: str) -> Seconds:
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{arguments} failed")
    return Seconds(usage.ru_utime + usage.ru_stime, time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--repeats", type=int, default=11, help="processes of each kind")
    options = parser.parse_args()
    times: dict[str, list[Seconds]] = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as bytecode:
        for repeat in range(options.repeats + 1):
            for name, arguments in PROGRAMS.items():
                seconds = measure(arguments, bytecode)
                if repeat:
                    times[name].append(seconds)
    rows = []
    for name, found in times.items():
        cpu, wall = ([statistics.median(column), min(column)] for column in zip(*found, strict=True))
        row: dict[str, object] = {"process": name, "cpu s": cpu[0], "min cpu s": cpu[1], "wall s": wall[0]}
        (jax_cpu, jax_min), (jax_wall, _) = (
            [statistics.median(column), min(column)] for column in zip(*times["import jax"], strict=True)
        )
        ratio = cpu[0] / jax_cpu
        row |= {"cpu ratio": ratio, "min ratio": cpu[1] / jax_min, "wall ratio": wall[0] / jax_wall}
        bound = BOUNDS.get(name)
        rows.append(row | {"bound": bound or "", "verdict": "" if bound is None else report.verdict(ratio, bound)})
    report.set_up_devices(1)
    report.report({"imports": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
