"""What the benchmarks share: the set-up of the devices, and the report as a table or as JSON."""

import json
import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax

Row = Mapping[str, Any]


def set_up_devices(count: int, at_least: int | None = None) -> list[Any]:
    """The first `count` devices: virtual ones of the CPU, unless JAX_PLATFORMS names another platform.

    Args:
        count: how many.
        at_least: how many suffice, if not all.
    """
    # XLA's CPU client reads NPROC when it is created and sizes its thread pool from it. A collective blocks one thread
    # per device until all have arrived, so eight virtual devices on few cores can wait for each other for ever.
    os.environ.setdefault("NPROC", "32")
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    # A compilation that is read from a disk would be measured as a compilation.
    jax.config.update("jax_enable_compilation_cache", False)
    devices = jax.devices()
    needed = count if at_least is None else at_least
    if len(devices) < needed:
        raise SystemExit(f"this benchmark needs {needed} devices, but JAX has {len(devices)} of {devices[0].platform}")
    return devices[:count]


def environment() -> dict[str, Any]:
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": jax.devices()[0].device_kind,
        "cpus": os.cpu_count(),
    }


def verdict(ratio: float, bound: float) -> str:
    return "ok" if ratio <= bound else "ABOVE"


def median_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median between two of the values that contain the true one with 95 %, as far as so few can."""
    ordered = sorted(values)
    first = max(0, math.floor((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2))
    return ordered[first], statistics.median(ordered), ordered[len(ordered) - 1 - first]


def show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Prints rows that have the same keys: text to the left, numbers to the right."""
    header = list(rows[0])
    cells = [[show(row[key]) for key in header] for row in rows]
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    left = [isinstance(rows[0][key], str) for key in header]
    print(f"\n{title}")
    for line in [header, ["-" * width for width in widths], *cells]:
        print(
            "  ".join(
                cell.ljust(width) if is_left else cell.rjust(width)
                for cell, width, is_left in zip(line, widths, left, strict=True)
            ).rstrip()
        )


def report(tables: Mapping[str, Sequence[Row]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"environment": environment(), **tables}, indent=2))
        return
    print(", ".join(f"{key} {value}" for key, value in environment().items()))
    for title, rows in tables.items():
        print_table(title, rows)
