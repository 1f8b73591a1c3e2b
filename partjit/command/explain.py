"""Explains how a function is partitioned: the sharding of each value, the collectives, the cost.

Nothing is executed, and without --compiled nothing is compiled. The devices of the mesh need not exist: virtual CPU
devices take their place.
"""

import argparse
import contextlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import numpy as np

from partjit.command.mistakes import CANNOT, USAGE, Mistake, mesh_of
from partjit.command.target import find, users_code
from partjit.inspect.explain import explain
from partjit.mesh import Mesh
from partjit.render.numbers import counted

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES: str = """\
examples:
  partjit explain model:train_step --mesh data=4,model=2 --args model:make_args
  partjit explain path/to/model.py:train_step --mesh data=8 --args make_args --compiled --html report.html
  partjit explain model:train_step --mesh data=4,model=2 --args make_args --why "params['w']"

FUNCTION is a function, also one made by partjit.pjit or jax.jit; MAKE_ARGS is called without arguments, in the mesh,
and returns the tuple of arguments, or a tuple of them and a dict of keyword arguments: ((x, y), {"rate": 0.1}).
jax.ShapeDtypeStruct will do for an array. Modules are imported from the current directory first.

exit codes:
  0  it was explained
  1  it could not be: something does not exist, a spec does not fit, your code raised an exception
  2  an argument is malformed; a caret shows where

JSON: what partjit.inspect.report_data.as_data documents, with "why" and "jaxpr" on request,
or {"error": {"message", "argument", "text", "span": [start, stop] or null}}.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("function", metavar="FUNCTION", help="module:function, or path/to/file.py:function")
    parser.add_argument("--mesh", metavar="AXIS=SIZE,...", help="the axes of the mesh, major to minor; by default none")
    parser.add_argument("--args", metavar="MAKE_ARGS", help="a function that returns the arguments; by default none")
    parser.add_argument("--devices", type=int, metavar="N", help="how many virtual devices; by default as the mesh has")
    parser.add_argument("--compiled", action="store_true", help="compile it too, and report on the optimized program")
    parser.add_argument("--why", metavar="VALUE", help="why a value is sharded so: params['w'], model.py:12, a name")
    parser.add_argument("--jaxpr", action="store_true", help="print the jaxpr, each value with its spec")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page")
    parser.add_argument("--json", action="store_true", help="print JSON, errors included")


def run(args: argparse.Namespace) -> int:
    """Explains, and prints or writes the result.

    Raises:
        Mistake: an argument is malformed, or what it names cannot be explained.
    """
    sizes = {} if args.mesh is None else mesh_of(args.mesh)
    wanted = math.prod(sizes.values())
    if args.devices is not None and args.devices < wanted:
        if args.devices < 1:
            given = str(args.devices)
            raise Mistake("a number of devices is at least 1", "--devices", given, (0, len(given)))
        raise Mistake(f"the mesh has {wanted} devices, which are more than --devices {args.devices}", code=USAGE)
    if args.html is not None:
        _check_place(args.html)
    # Before code of the user's runs, which may initialize the devices.
    _provide(wanted if args.devices is None else args.devices)
    progress = _progress()
    progress("importing")
    function = find(args.function, "FUNCTION")
    make_args = None
    if args.args is not None:
        make_args = find(args.args, "--args", args.function.rpartition(":")[0])
        if not callable(make_args):
            message = f"--args should name a function that returns the arguments, but it is {type(make_args).__name__}"
            raise Mistake(message, "--args", args.args, (0, len(args.args)), CANNOT)
    mesh = _mesh(sizes, progress) if sizes else None
    progress("making the arguments")
    positional, named = ((), {}) if make_args is None else _arguments(make_args, str(args.args), mesh)
    progress("compiling" if args.compiled else "partitioning")
    if make_args is None:
        _check_needs_none(function, args.function)
    with users_code(f"explaining {args.function}"):
        report = explain(function, *positional, mesh=mesh, compiled=args.compiled, **named)
    why = None
    if args.why is not None:
        progress("looking for reasons")
        with users_code("--why"):
            why = report.why(args.why)
    progress("")
    if args.html is not None:
        _write(args.html, report.to_html())
    if args.json:
        data = report.as_data()
        data |= {"why": str(why)} if why is not None else {}
        data |= {"jaxpr": str(report.jaxpr).splitlines()} if args.jaxpr else {}
        print(json.dumps(data, allow_nan=False))
    else:
        parts = [str(part) for part in (why, report.jaxpr if args.jaxpr else None) if part is not None]
        if not parts and args.html is None:
            parts = [report.to_text()]
        if parts:
            print("\n\n".join(parts))
    return 0


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


def _mesh(sizes: Mapping[str, int], progress: Callable[[str], None]) -> Mesh:
    """The mesh, of devices of the default platform if there are enough, of virtual CPU devices otherwise."""
    count = math.prod(sizes.values())
    devices = jax.devices()
    if len(devices) < count:
        devices = jax.devices("cpu")
    kind = "virtual cpu" if devices[0].platform == "cpu" and len(devices) > 1 else devices[0].platform
    if len(devices) < count:
        raise Mistake(
            f"the mesh has {count} devices, but there are {len(devices)} ({devices[0].platform}): something has set "
            "their number before, XLA_FLAGS or jax_num_cpu_devices in your module",
            code=CANNOT,
        )
    progress("")
    _say(f"using {count} of {counted(len(devices), f'{kind} device')}")
    return Mesh(np.array(devices[:count]).reshape(tuple(sizes.values())), tuple(sizes))


def _check_needs_none(function: object, text: str) -> None:
    """Raises a `Mistake` if a function that is called without arguments has parameters that need some."""
    try:
        parameters = inspect.signature(cast(Any, function)).parameters.values()
    except (TypeError, ValueError):  # it is no function, or has no signature
        return
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in optional]
    if needed:
        raise Mistake(
            f"{text} takes {', '.join(needed)}: say with --args which function returns the arguments, like --args "
            "make_args",
            code=USAGE,
        )


def _arguments(
    make_args: Callable[[], object], text: str, mesh: Mesh | None
) -> tuple[tuple[object, ...], dict[str, Any]]:
    with users_code(f"--args {text}"), mesh or contextlib.nullcontext():
        made = make_args()
    if not isinstance(made, tuple):
        raise Mistake(
            f"--args {text} should return a tuple of arguments, but returned {type(made).__name__}: for a single "
            "argument, return (argument,)",
            code=CANNOT,
        )
    match made:
        case (tuple() as positional, dict() as named) if all(isinstance(name, str) for name in named):
            return positional, named
    return made, {}
