"""Reading an OpSharding: how long `parse_op_sharding` takes, as a ratio to jax's own reader.

Three contestants take turns within one process: jax's `parse_flatten_op_sharding`, the same once more, and
`parse_op_sharding`; the ratio is that of their fastest turns. The second turn of jax's shows what a ratio of 1 looks
like on this machine. No devices are needed: the meshes are abstract.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.sharding import AbstractMesh, NamedSharding

import report
from partjit import P, parse_op_sharding, to_op_sharding

BOUND = 1.0
MESHES = {8: AbstractMesh((4, 2), ("x", "y")), 4096: AbstractMesh((64, 64), ("x", "y"))}
SPECS = {"P('x')": P("x"), "P(('y', 'x'))": P(("y", "x")), "P('y', 'x')": P("y", "x")}


def seconds(function: Callable[..., Any], sharding: Any, mesh: AbstractMesh, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function(sharding, mesh)
    return (time.perf_counter() - start) / calls


def measure(sharding: Any, mesh: AbstractMesh, repeats: int) -> list[float]:
    """The fastest turn of each contestant, in seconds per call."""
    contestants = [parse_flatten_op_sharding, parse_flatten_op_sharding, parse_op_sharding]
    calls = max(1, round(2e-3 / seconds(contestants[0], sharding, mesh, 3)))
    turns = [[seconds(function, sharding, mesh, calls) for function in contestants] for _ in range(repeats)]
    return [min(turn) for turn in zip(*turns, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50, help="turns of each contestant (default 50)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    report.set_up_devices(1)
    rows = []
    for form in ("HloSharding", "iota", "list"):
        for count, mesh in MESHES.items():
            for name, spec in SPECS.items():
                sharding = (
                    NamedSharding(mesh, spec)._to_xla_hlo_sharding(2)
                    if form == "HloSharding"
                    else to_op_sharding(spec, mesh, 2, as_list=form == "list")
                )
                jax_time, control, own = measure(sharding, mesh, options.repeats)
                rows.append(
                    {
                        "form": form,
                        "spec": name,
                        "devices": count,
                        "jax us": jax_time * 1e6,
                        "partjit us": own * 1e6,
                        "control ratio": control / jax_time,
                        "ratio": own / jax_time,
                        "bound": str(BOUND) if form != "list" else "none",
                        "verdict": report.verdict(own / jax_time, BOUND) if form != "list" else "-",
                    }
                )
    report.report({"reading an OpSharding": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
