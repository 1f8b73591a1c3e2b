"""Parses the text of a sharding, as in `str` of an HloSharding and dumps of HLO.

XLA's own parser crashes the process on some texts (a named sharding that names an axis twice) and reads out of bounds
on others (`{devices=[2,2]0,1,2}`).
"""

import math
import re

from partjit.checks import abridged
from partjit.errors import UnrepresentableShardingError
from partjit.opsharding.superdims import Digit
from partjit.opsharding.tiling import Kind, Tiling, malformed, named_tiling, tiled

__all__ = ["from_text"]

_TILED = re.compile(
    r"devices=\[(?P<grid>[\d,]+)\](?:<=\[(?P<reshape>[\d,]+)\](?:T\((?P<perm>[\d,]+)\))?|(?P<devices>[\d,]+))"
    r"(?P<last> last_tile_dim_replicate| last_tile_dims=\{(?P<subgroups>[a-z, ]*)\})?(?P<group> shard_(?:as|like) \d+)?"
)
_PLAIN = re.compile(
    r"(?P<kind>replicated|manual|unknown|unreduced|maximal device=-?\d+)(?P<group> shard_(?:as|like) \d+)?"
)
_METADATA = re.compile(r" metadata=\{.*\}$", re.S)
_NAMED = re.compile(r"mesh\[(?P<mesh>[^\]]*)\], (?P<rest>.*)", re.S)


def from_text(text: str) -> Tiling:
    """Parses the text of a sharding: `{devices=[4,1,2]<=[8] last_tile_dim_replicate}`.

    Raises:
        UnrepresentableShardingError: it is no such text.
    """
    stripped = text.strip()
    if not (stripped.startswith("{") and stripped.endswith("}")):
        raise malformed(f"{abridged(text)} is not in braces")
    body = _METADATA.sub("", stripped[1:-1].strip())
    if body.startswith("{") or not body:
        return Tiling(Kind.TUPLE, elements=tuple(from_text(part) for part in _split(body)))
    if match := _PLAIN.fullmatch(body):
        kind = Kind[match["kind"].partition(" ")[0].upper()]
        return Tiling(kind, shard_group=bool(match["group"]))
    if match := _TILED.fullmatch(body):
        names = [name.strip() for name in (match["subgroups"] or "").split(",") if name.strip()]
        unknown = [name for name in names if name.upper() not in Kind.__members__]
        if unknown:
            raise malformed(f"{abridged(text)} has the subgroup {abridged(unknown[0])}, which is not known")
        replicate = match["last"] == " last_tile_dim_replicate"
        return tiled(
            _numbers(match["grid"]),
            tuple(Kind[name.upper()] for name in names) or (Kind.REPLICATED,) * replicate,
            _numbers(match["devices"]),
            _numbers(match["reshape"]),
            _numbers(match["perm"]),
            bool(match["group"]),
        )
    if match := _NAMED.fullmatch(body):
        return _from_named_text(match["mesh"], match["rest"], text)
    raise malformed(f"{abridged(text)} is not the text of a sharding")


def _numbers(text: str | None) -> tuple[int, ...]:
    parts = text.split(",") if text else []
    if not all(parts):
        raise malformed(f"{text!r} is no list of numbers")
    return tuple(map(int, parts))


def _split(body: str) -> list[str]:
    """The parts between commas outside of braces and brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(body):
        depth += (character in "{[(") - (character in "}])")
        if depth == 0 and character == ",":
            parts.append(body[start:position])
            start = position + 1
    return [part.strip() for part in [*parts, body[start:]] if part.strip()]


_AXIS = re.compile(r"'(?P<name>[^']*)'(?::\((?P<before>\d+)\)(?P<size>\d+))?")


def _from_named_text(mesh: str, rest: str, text: str) -> Tiling:
    axes = [re.fullmatch(r"'([^']*)'=(\d+)", part) for part in _split(mesh)]
    if not all(axes):
        raise malformed(f"{text!r} has the mesh [{mesh}]")
    sizes = {match[1]: int(match[2]) for match in axes if match}
    names, values = [*sizes], [*sizes.values()]
    strides = {name: math.prod(values[i + 1 :]) for i, name in enumerate(names)}
    dims_text, *others_text = _split(rest)
    if dims_text == "replicated":
        dims_text = "[]"
    if not (dims_text.startswith("[") and dims_text.endswith("]")) or any(size < 1 for size in values):
        raise malformed(f"{abridged(text)} is not the text of a named sharding")

    def digits(group: str) -> list[Digit]:
        found = []
        for part in _split(group.strip()[1:-1]):
            if part == "?":
                raise UnrepresentableShardingError(
                    f"no PartitionSpec expresses an open dimension, which may be sharded further, as in {text!r}"
                )
            match = _AXIS.fullmatch(part)
            if match is None or match["name"] not in sizes:
                raise malformed(f"{text!r} names {part}, which is no axis of its mesh")
            size, before = sizes[match["name"]], int(match["before"] or 1)
            taken = int(match["size"] or size)
            if before < 1 or taken < 1 or size % (before * taken):
                raise malformed(f"{text!r} names the part {part} of an axis of {size} devices")
            found.append((taken, strides[match["name"]] * (size // (before * taken))))
        return found

    others: dict[str, list[Digit]] = {"replicated": [], "unreduced": [], "manual": []}
    for other in others_text:
        name, _, group = other.partition("=")
        if name not in others:
            raise malformed(f"{text!r} has {other!r}, which is not known")
        others[name] += digits(group)
    dims = [digits(group) for group in _split(dims_text[1:-1])]
    return named_tiling(values, (), dims, others["unreduced"], others["manual"])
