"""Finds specs for the arguments, results and activations of a function with which a step takes the least time.

Nothing is executed or compiled, and no devices are needed: what specs would cost is predicted. The specs that the
function has are not taken over.
"""

import argparse
from typing import TYPE_CHECKING

from partjit import lazy

if TYPE_CHECKING:
    from partjit.command import searching
else:  # which imports jax: help, and errors in arguments, need none
    searching = lazy.module("partjit.command.searching")

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES: str = """\
examples:
  partjit search model:train_step --mesh data=64,model=4 --args model:make_args --memory 80GB
  partjit search path/to/model.py:train_step --mesh data=16,model=16 --args make_args --machine tpu-v6e
  partjit search model:train_step --mesh slice=2,data=64 --args make_args --machine tpu-v5p --dcn slice --out specs.py

FUNCTION is a function, also one made by partjit.pjit or jax.jit, whose donated arguments are known then; MAKE_ARGS is
called without arguments and returns the tuple of arguments. jax.ShapeDtypeStruct will do for an array.

exit codes:
  0  specs were found
  1  none were, as the memory is too small for all that was tried, or something does not exist or failed
  2  an argument is malformed; a caret shows where

JSON: "seconds", "peak_memory", "in_specs" and "out_specs" (from paths to specs), "constraints", "starts" and "python",
or {"error": {"message", "argument", "text", "span": [start, stop] or null}}
"""

MACHINES = ("h100", "tpu-v5p", "tpu-v6e")
"""The names of machines."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("function", metavar="FUNCTION", help="module:function, or path/to/file.py:function")
    parser.add_argument("--mesh", metavar="AXIS=SIZE,...", required=True, help="the axes of the mesh, major to minor")
    parser.add_argument("--args", metavar="MAKE_ARGS", required=True, help="a function that returns the arguments")
    parser.add_argument("--memory", metavar="SIZE", help="what a device may need: 80GB, 16GiB; by default all it has")
    parser.add_argument("--machine", choices=MACHINES, default="h100", help="the machine; by default nodes of 8 H100")
    parser.add_argument("--dcn", metavar="AXIS,...", help="the axes between slices of TPUs; by default none")
    parser.add_argument("--overlap", type=float, default=0.0, metavar="PART", help="of communication that is hidden")
    parser.add_argument("--questions", type=int, default=200, metavar="N", help="how many specs are asked about")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="how long to search; by default no limit")
    parser.add_argument("--out", metavar="FILE", help="write the specs as Python")
    parser.add_argument("--json", action="store_true", help="print JSON, errors included")


def run(args: argparse.Namespace) -> int:
    """Searches, and prints or writes the result.

    Raises:
        Mistake: an argument is malformed, or nothing was found for what it names.
    """
    return searching.run(args)
