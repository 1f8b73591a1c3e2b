"""Runs `partjit explain`."""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from partjit.command.call import arguments_of, require_no_parameters
from partjit.command.limits import Limits, kinds_of, size_of
from partjit.command.mistakes import CANNOT, EXCEEDED, USAGE, Mistake, iterations_of, mesh_of
from partjit.command.target import find, users_code
from partjit.errors import MissingMeshError
from partjit.inspect.annotated import shown_spec
from partjit.inspect.collectives import total_bytes
from partjit.inspect.explain import explain
from partjit.inspect.suggested import SpecSuggestion
from partjit.mesh import Mesh
from partjit.render.numbers import counted

__all__ = ["run"]

_LIKE = "like --mesh data=4,model=2"

_MOST_VIRTUAL = 64
"""The devices of a mesh for which virtual ones are made: that many take no time, and code may look for its devices."""


def run(args: argparse.Namespace) -> int:
    """Explains, and prints or writes the result.

    Raises:
        Mistake: an argument is malformed, or what it names cannot be explained.
    """
    sizes = {} if args.mesh is None else mesh_of(args.mesh)
    wanted = math.prod(sizes.values())
    if args.devices is not None and args.devices < wanted:
        if args.devices < 0:
            given = str(args.devices)
            raise Mistake("a number of devices is at least 0", "--devices", given, (0, len(given)))
        if args.devices:
            raise Mistake(f"the mesh has {wanted} devices, which are more than --devices {args.devices}", code=USAGE)
    if args.html is not None:
        _check_place(args.html)
    # Before code of the user's runs, which may initialize the devices.
    count = (wanted if wanted <= _MOST_VIRTUAL else 0) if args.devices is None else args.devices
    _provide(count)
    progress = _progress()
    progress("importing")
    limits = Limits(
        None if args.max_bytes is None else size_of(args.max_bytes),
        () if args.fail_on is None else kinds_of(args.fail_on),
    )
    iterations = None if args.iterations is None else iterations_of(args.iterations)
    function = find(args.function, "FUNCTION")
    make_args = None
    if args.args is not None:
        make_args = find(args.args, "--args", args.function.rpartition(":")[0])
        if not callable(make_args):
            message = f"--args should name a function that returns the arguments, but it is {type(make_args).__name__}"
            raise Mistake(message, "--args", args.args, (0, len(args.args)), CANNOT)
    mesh = _mesh(sizes, args, progress) if sizes else None
    progress("making the arguments")
    positional, named = ((), {}) if make_args is None else arguments_of(make_args, str(args.args), mesh)
    progress("compiling" if args.compiled else "partitioning")
    if make_args is None:
        require_no_parameters(function, args.function)
    with users_code(f"explaining {args.function}"):
        try:
            report = explain(function, *positional, mesh=mesh, compiled=args.compiled, iterations=iterations, **named)
        except MissingMeshError as error:
            if mesh is not None:
                raise
            reason = str(error).partition(". ")[0]
            message = f"{args.function} needs a mesh: say its axes and their sizes, {_LIKE}. Without, {reason}"
            raise Mistake(message, code=USAGE) from None
    if report.mesh.empty:
        _say(f"there is no mesh, so nothing is partitioned: say its axes and their sizes, {_LIKE}")
    failures = limits.exceeded(report)
    if limits.max_bytes is not None and not total_bytes(report.collectives).is_exact:
        _say("--max-bytes: a loop of unknown trip count counts as one iteration, a branch as its most expensive case")
    if (note := limits.left_open(report)) is not None:
        _say(note)
    why = None
    if args.why is not None:
        progress("looking for reasons")
        with users_code("--why"):
            why = report.why(args.why)
    suggestions: tuple[SpecSuggestion, ...] = ()
    if args.suggest:
        progress("trying other specs")
        with users_code("--suggest"):
            suggestions = report.suggest()
    progress("")
    if args.html is not None:
        _write(args.html, report.to_html(suggestions=suggestions))
    if args.json:
        data = report.as_data()
        data |= {"why": str(why)} if why is not None else {}
        data |= {"suggestions": [*map(_as_data, suggestions)]} if args.suggest else {}
        data |= {"jaxpr": str(report.jaxpr).splitlines()} if args.jaxpr else {}
        data |= {"failed": failures} if limits != Limits(None, ()) else {}
        print(json.dumps(data, allow_nan=False))
    else:
        tried = _shown(suggestions) if args.suggest else None
        parts = [str(part) for part in (why, tried, report.jaxpr if args.jaxpr else None) if part is not None]
        if not parts and args.html is None:
            parts = [report.to_text()]
        if parts:
            print("\n\n".join(parts))
    sys.stdout.flush()  # before what it exceeds, where both are written to one file
    for failure in failures:
        _say(f"error: {failure}")
    return EXCEEDED if failures else 0


def _shown(suggestions: Sequence[SpecSuggestion]) -> str:
    if not suggestions:
        return "no other spec of an argument that was tried helps"
    return "\n".join(["other specs, each tried by itself", *(f"  {one}" for one in suggestions)])


def _as_data(one: SpecSuggestion) -> dict[str, object]:
    return {
        "spec": shown_spec(one.spec),
        "arguments": [*one.arguments],
        "results": [*one.results],
        "before": one.before._asdict(),
        "after": one.after._asdict(),
    }


def _check_place(path: str) -> None:
    """Refuses a file that cannot be written, before the work is done."""
    folder = os.path.dirname(path) or "."
    problem = ""
    if os.path.isdir(path):
        problem = f"{path!r} is a directory: name a file in it"
    elif not os.path.isdir(folder):
        problem = f"there is no directory {folder!r}"
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        problem = f"{path!r} may not be written"
    if problem:
        raise Mistake(f"--html: {problem}", "--html", path, (0, len(path)), CANNOT)


def _write(path: str, page: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        message = f"--html: {path!r} cannot be written: {error.strerror or error}"
        raise Mistake(message, "--html", path, (0, len(path)), CANNOT) from None
    _say(f"wrote {path}")


def _say(text: str) -> None:
    print(f"partjit explain: {text}", file=sys.stderr)


def _progress() -> Callable[[str], None]:
    """Shows the current step on a line that is cleared at the end, if the standard error is a terminal."""
    if not sys.stderr.isatty():
        return lambda _: None
    return lambda text: print(f"\r\033[K{text and f'{text} ...'}", end="", file=sys.stderr, flush=True)


def _provide(count: int) -> None:
    """Makes jax start with as many virtual CPU devices, unless it has started or their number is set."""
    if (
        count <= 1
        or getattr(jax.config, "jax_num_cpu_devices", 0) >= count
        or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    ):
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # jax has started already
        return


def _mesh(sizes: Mapping[str, int], args: argparse.Namespace, progress: Callable[[str], None]) -> Mesh | AbstractMesh:
    """The mesh, of devices of the default platform if there are enough, else of virtual CPU devices or of none."""
    count = math.prod(sizes.values())
    devices = [] if args.devices == 0 else jax.devices()
    if 0 < len(devices) < count:
        devices = jax.devices("cpu")
    progress("")
    if len(devices) >= count:
        is_virtual = devices[0].platform == "cpu" and len(devices) > 1
        kind = "virtual cpu" if is_virtual else devices[0].platform
        _say(f"using {count} of {counted(len(devices), f'{kind} device')}")
        return Mesh(np.array(devices[:count]).reshape(tuple(sizes.values())), tuple(sizes))
    if not args.compiled and not args.devices:
        _say(f"using no devices: the mesh of {count} is abstract")
        return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    if not args.devices and (not devices or count > _MOST_VIRTUAL):
        raise Mistake(
            f"--compiled needs devices to compile for, and there are none for the mesh: with --devices {count} it is "
            f"compiled for {count} virtual CPU devices, which may take long. Without --compiled none are needed",
            code=USAGE,
        )
    raise Mistake(
        f"the mesh has {count} devices, but there are {len(devices)} ({devices[0].platform}): something has set "
        "their number before, XLA_FLAGS or jax_num_cpu_devices in your module. --devices 0 needs none",
        code=CANNOT,
    )
