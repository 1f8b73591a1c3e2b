"""Compares two reports that `partjit explain --json` printed: of two versions, under two sets of specs, on two meshes.

Both are predicted, or both are of compiled programs if both were made with --compiled.
"""

import argparse
from typing import TYPE_CHECKING

from partjit import lazy

if TYPE_CHECKING:
    from partjit.command import diffing
else:
    diffing = lazy.module("partjit.command.diffing")

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES: str = """\
examples:
  partjit explain model:train_step --mesh data=8 --args make_args --json > before.json
  partjit explain model:train_step --mesh data=4,model=2 --args make_args --json > after.json
  partjit diff before.json after.json

exit codes:
  0  they were compared
  1  a file cannot be read, or is no report
  2  an argument is malformed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("before", metavar="BEFORE", help="a file with a report; - is the standard input")
    parser.add_argument("after", metavar="AFTER", help="a file with a report; - is the standard input")
    parser.add_argument("--all", action="store_true", help="print every line of every table, not the first 20")


def run(args: argparse.Namespace) -> int:
    """Compares, and prints the differences.

    Raises:
        Mistake: a file cannot be read, or has no report in it.
    """
    return diffing.run(args)
