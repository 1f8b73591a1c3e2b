"""Explains how a function is partitioned: the sharding of each value, the collectives, the cost.

Nothing is executed, and without --compiled nothing is compiled. The devices of the mesh need not exist: up to 64
virtual CPU devices take their place, and a larger mesh needs none.
"""

import argparse
from typing import TYPE_CHECKING

from partjit import lazy

if TYPE_CHECKING:
    from partjit.command import explaining
else:  # which imports jax: help, and errors in arguments, need none
    explaining = lazy.module("partjit.command.explaining")

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES: str = """\
examples:
  partjit explain model:train_step --mesh data=4,model=2 --args model:make_args
  partjit explain path/to/model.py:train_step --mesh data=8 --args make_args --compiled --html report.html
  partjit explain model:train_step --mesh data=4,model=2 --args make_args --why "params['w']"
  partjit explain model:train_step --mesh data=512,model=8 --args make_args --suggest
  partjit explain model:train_step --mesh data=512,model=8 --args make_args --json
  partjit explain model:train_step --mesh data=8 --args make_args --max-bytes 20MB --fail-on replicated

FUNCTION is a function, also one made by partjit.pjit or jax.jit; MAKE_ARGS is called without arguments, in the mesh,
and returns the tuple of arguments, or a tuple of them and a dict of keyword arguments: ((x, y), {"rate": 0.1}).
jax.ShapeDtypeStruct will do for an array. Modules are imported from the current directory first.

exit codes:
  0  it was explained
  1  it could not be: something does not exist, a spec does not fit, your code raised an exception
  2  an argument is malformed; a caret shows where
  3  it was explained, and --max-bytes or --fail-on is not kept; the standard error says what is not

JSON: what partjit.inspect.report_data.as_data documents, with "why", "suggestions" ("spec", "arguments", "results", and
"before" and "after": the bytes that a device has "sent" in a step, "at_most", and its "peak" memory), "jaxpr" and
"failed" (what is not kept) on request, or {"error": {"message", "argument", "text", "span": [start, stop] or null}};
`partjit diff` compares two.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("function", metavar="FUNCTION", help="module:function, or path/to/file.py:function")
    parser.add_argument("--mesh", metavar="AXIS=SIZE,...", help="the axes of the mesh, major to minor; by default none")
    parser.add_argument("--args", metavar="MAKE_ARGS", help="a function that returns the arguments; by default none")
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="how many virtual devices, 0 for none; by default as many as the mesh has, if these are 64 at most",
    )
    parser.add_argument("--compiled", action="store_true", help="compile it too, and report on the optimized program")
    parser.add_argument(
        "--iterations",
        metavar="LINE=COUNT,...",
        help="the trip counts of while loops that the program does not say: model.py:12=100",
    )
    parser.add_argument("--why", metavar="VALUE", help="why a value is sharded so: params['w'], model.py:12, a name")
    parser.add_argument(
        "--suggest", action="store_true", help="other specs of single arguments that help most, each tried out"
    )
    parser.add_argument("--jaxpr", action="store_true", help="print the jaxpr, each value with its spec")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page")
    parser.add_argument("--json", action="store_true", help="print JSON, errors included")
    parser.add_argument(
        "--max-bytes", metavar="SIZE", help="fail if a device sends more bytes in a step: 20MB, 1.5GiB, 4096"
    )
    parser.add_argument(
        "--fail-on",
        metavar="KIND,...",
        help="fail if there is a finding of a kind: replicated, reduced-in-loop, ... (see docs/inspect.md), or any",
    )


def run(args: argparse.Namespace) -> int:
    """Explains, and prints or writes the result.

    Raises:
        Mistake: an argument is malformed, or what it names cannot be explained.
    """
    return explaining.run(args)
