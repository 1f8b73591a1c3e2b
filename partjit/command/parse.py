"""Converts an XLA sharding to a PartitionSpec, and a PartitionSpec to an XLA sharding.

The sharding is as in dumps of HLO and StableHLO, such as {devices=[4,1,2]<=[8] last_tile_dim_replicate}. No devices
are needed, so the mesh may be larger than the machine.
"""

import argparse
from typing import TYPE_CHECKING

from partjit import lazy

if TYPE_CHECKING:
    from partjit.command import parsing
else:
    parsing = lazy.module("partjit.command.parsing")

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES: str = """\
examples:
  partjit parse '{devices=[4,1,2]<=[8] last_tile_dim_replicate}' --mesh data=4,model=2
  partjit parse '{devices=[2,4]<=[4,2]T(1,0)}' --mesh data=4,model=2 --shape 16,32
  partjit parse "P(('data', 'model'), None)" --mesh data=4,model=2 --json

exit codes:
  0  it was parsed
  1  no spec on this mesh expresses the sharding, or the shape does not fit
  2  an argument is malformed; a caret shows where

JSON: {"mesh": {axis: size}, "values": [...]}, with a value for each element of a tuple and one for anything else:
  spec        as Python
  partitions  for each dimension the axes it is sharded over, major to minor
  sharding    as XLA writes it
  tiles       their number along each dimension
  copies      the number of copies of each tile
  shape       that of --shape, or null
  pieces      with --shape: [{"index": [[start, stop], ...], "devices": [position in the mesh, ...]}, ...], or null
or {"error": {"message", "argument", "text", "span": [start, stop] or null}}.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "sharding", metavar="SHARDING", help="the sharding as XLA writes it, or a spec: P('data', None)"
    )
    parser.add_argument("--mesh", required=True, metavar="AXIS=SIZE,...", help="the axes of the mesh, major to minor")
    parser.add_argument("--shape", metavar="SIZE,...", help="the shape of an array, to show the part each device holds")
    parser.add_argument("--json", action="store_true", help="print JSON, errors included")


def run(args: argparse.Namespace) -> int:
    """Parses, and prints the meaning.

    Raises:
        Mistake: an argument is malformed, or no spec expresses the sharding.
    """
    return parsing.run(args)
