"""Runs `partjit parse`."""

import argparse
import json
import math
import re

import jax
from jax.sharding import AbstractMesh

from partjit.command.mistakes import CANNOT, Mistake, mesh_of, shape_of
from partjit.command.spec_text import spec_of
from partjit.errors import UnrepresentableShardingError
from partjit.inspect.annotated import shown_spec
from partjit.inspect.arrays import draw_array
from partjit.opsharding import parse_op_sharding, to_op_sharding
from partjit.opsharding.tiling import MalformedShardingError
from partjit.opsharding.wire import from_proto
from partjit.render.numbers import counted
from partjit.spec import ParsedPartitionSpec

__all__ = ["run"]

_MOST_DEVICES = 2**17


def run(args: argparse.Namespace) -> int:
    """Parses, and prints the meaning.

    Raises:
        Mistake: an argument is malformed, or no spec expresses the sharding.
    """
    sizes = mesh_of(args.mesh)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    shape = None if args.shape is None else shape_of(args.shape)
    if args.sharding.lstrip().startswith("{"):
        parsed = _parsed(args.sharding, mesh)
    else:
        parsed = ParsedPartitionSpec.from_user_input(spec_of(args.sharding, sizes), "SHARDING")
    if isinstance(parsed, list) and shape is not None:
        raise Mistake("--shape is that of one array, and the sharding is that of a tuple", code=CANNOT)
    values = jax.tree.leaves(parsed)  # of a tuple, also those of nested ones
    if shape is not None and mesh.size > _MOST_DEVICES:
        message = f"--shape shows which of the devices holds what, and {mesh.size} are too many: leave it out"
        raise Mistake(message, "--mesh", args.mesh, (0, len(args.mesh)), CANNOT)
    for value in values:
        if shape is not None and len(value) > len(shape):
            message = f"the sharding is for rank {len(value)}, but the shape has {len(shape)} dimensions"
            raise Mistake(message, "--shape", str(args.shape), (0, len(str(args.shape))), CANNOT)
    if args.json:
        described = [_described(value, mesh, shape) for value in values]
        print(json.dumps({"mesh": sizes, "values": described}))
    else:
        print("\n\n".join(_text(value, mesh, shape) for value in values))
    return 0


def _parsed(text: str, mesh: AbstractMesh) -> ParsedPartitionSpec | list:
    try:
        return parse_op_sharding(text, mesh)
    except UnrepresentableShardingError as error:
        if isinstance(error, MalformedShardingError):
            if error.expected:
                message = f"this is no sharding: here should be {error.expected}"
                raise Mistake(message, "SHARDING", text, error.span) from None
            raise Mistake(str(error), "SHARDING", text, None, CANNOT) from None
        grids = ((match.span(1), map(int, match[1].split(","))) for match in re.finditer(r"devices=\[([0-9,]+)", text))
        span = next((span for span, grid in grids if math.prod(grid) != mesh.size), None)
        raise Mistake(str(error), "SHARDING", text, span, CANNOT) from None


def _tiles(spec: ParsedPartitionSpec, mesh: AbstractMesh) -> list[int]:
    return [math.prod(mesh.shape[axis] for axis in axes) for axes in spec.partitions]


def _sharding(spec: ParsedPartitionSpec, mesh: AbstractMesh, shape: tuple[int, ...] | None) -> str:
    """As XLA writes it, for the rank of the spec if no shape is given."""
    return str(from_proto(to_op_sharding(spec, mesh, len(spec) if shape is None else len(shape))))


def _described(spec: ParsedPartitionSpec, mesh: AbstractMesh, shape: tuple[int, ...] | None) -> dict[str, object]:
    tiles = _tiles(spec, mesh)
    pieces = None
    if shape is not None:
        pieces = [
            {"index": [[part.start, part.stop] for part in index], "devices": [*devices]}
            for index, devices in draw_array(shape, spec, mesh).pieces
        ]
    return {
        "spec": shown_spec(spec.partition_spec),
        "partitions": [[*axes] for axes in spec.partitions],
        "sharding": _sharding(spec, mesh, shape),
        "tiles": tiles,
        "copies": mesh.size // math.prod(tiles),
        "shape": None if shape is None else [*shape],
        "pieces": pieces,
    }


def _text(spec: ParsedPartitionSpec, mesh: AbstractMesh, shape: tuple[int, ...] | None) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape_tuple)
    lines = [
        shown_spec(spec.partition_spec),
        "",
        f"sharding  {_sharding(spec, mesh, shape)}",
        f"mesh      {axes}: {counted(mesh.size, 'device')}",
    ]
    if shape is not None:
        return "\n".join([*lines, "", str(draw_array(shape, spec, mesh))])
    for dim, (names, tiles) in enumerate(zip(spec.partitions, _tiles(spec, mesh), strict=True)):
        over = ", ".join(f"{name}={mesh.shape[name]}" for name in names)
        lines.append(f"{f'dim {dim}':<10}{f'{tiles} tiles over {over}' if names else 'unsharded'}")
    copies = mesh.size // math.prod(_tiles(spec, mesh))
    if copies > 1:
        over = ", ".join(f"{name}={size}" for name, size in mesh.shape_tuple if name not in spec.mesh_axes and size > 1)
        lines.append(f"copies    {copies} of each tile, over {over}")
    return "\n".join(lines)
