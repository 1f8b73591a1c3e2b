"""Parses the text of a sharding, as in `str` of an HloSharding and dumps of HLO.

XLA's own parser crashes the process on some texts (a named sharding that names an axis twice) and reads out of bounds
on others (`{devices=[2,2]0,1,2}`).
"""

import math
import re

from partjit.checks import abridged
from partjit.errors import UnrepresentableShardingError
from partjit.opsharding.superdims import Digit
from partjit.opsharding.tiling import Kind, MalformedShardingError, Tiling, named_tiling, tiled

__all__ = ["from_text"]

_MOST_DIGITS = 4000  # Python refuses to convert a few hundred more
_KIND = r"(?:(?P<kind>replicated|manual|unknown|unreduced)\b|(?P<maximal>maximal))"
_AXIS = re.compile(r"'(?P<name>[^']*)'(?::\((?P<before>[0-9]{1,18})\)(?P<size>[0-9]{1,18}))?")
_BRACES = r"\{(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\")*\}"
_METADATA = rf" metadata=(?:{_BRACES}|\{{(?:[\s,]|{_BRACES})*\}})"


def from_text(text: str) -> Tiling:
    """Parses the text of a sharding: `{devices=[4,1,2]<=[8] last_tile_dim_replicate}`.

    Raises:
        MalformedShardingError: it is no such text; the error says which part of it is wrong, and what it should be.
        UnrepresentableShardingError: it leaves a dimension open.
    """
    reader = _Reader(text)
    try:
        tiling = _read(reader)
    except RecursionError:
        raise MalformedShardingError(f"{abridged(text)} is nested too deeply") from None
    reader.expect(r"\s*$", "nothing more")
    return tiling


class _Reader:
    """Reads a text from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0

    def sees(self, pattern: str) -> re.Match[str] | None:
        return re.compile(pattern).match(self.text, self.position)

    def accept(self, pattern: str) -> re.Match[str] | None:
        match = self.sees(pattern)
        self.position = match.end() if match else self.position
        return match

    def expect(self, pattern: str, what: str, problem: str = "") -> None:
        if not self.accept(pattern):
            raise self.stuck(what, problem)

    def stuck(self, expected: str, problem: str = "") -> MalformedShardingError:
        """The error for something else than what is expected here."""
        is_braced = self.text.strip().startswith("{") and self.text.strip().endswith("}")
        problem = problem or f"{abridged(self.text)} is not {'the text of a sharding' if is_braced else 'in braces'}"
        return MalformedShardingError(problem, expected, span=(self.position, self.position + 1))

    def numbers(self, what: str) -> tuple[int, ...]:
        start, found = self.position, self.sees(r"[0-9,]+")
        parts = found[0].split(",") if found else [""]
        for k, part in enumerate(parts):
            if not 1 <= len(part) <= _MOST_DIGITS:
                self.position = start + len(",".join([*parts[:k], ""]))
                problem = f"{found[0]!r} is no list of numbers" if found else ""
                raise self.stuck("a number" if k else what, problem)
        self.position += len(",".join(parts))
        return tuple(map(int, parts))


def _read(reader: _Reader) -> Tiling:
    reader.expect(r"\s*\{\s*", "an opening brace {")
    if reader.accept(r"\}"):
        return Tiling(Kind.TUPLE)
    if reader.sees(r"\{"):
        elements = [_read(reader)]
        while reader.accept(r"\s*,[\s,]*") and not reader.sees(r"\}"):
            elements.append(_read(reader))
        reader.expect(r"\s*\}", "a comma or the closing brace } of the tuple")
        return Tiling(Kind.TUPLE, elements=tuple(elements))
    if reader.accept(r"devices="):
        tiling = _read_tiling(reader)
    elif reader.sees(r"mesh\["):
        tiling = _read_named(reader)
    elif match := reader.accept(_KIND):
        if match["maximal"]:
            reader.expect(r" device=-?[0-9]+", "the device: maximal device=0")
        tiling = Tiling(Kind[match[0].upper()])
    else:
        raise reader.stuck("devices=[...], replicated, maximal, manual, unknown or unreduced")
    is_grouped = reader.accept(r" shard_(as|like) [0-9]+") is not None
    reader.accept(_METADATA)
    reader.expect(r"\s*\}", "a closing brace }")
    return tiling._replace(shard_group=is_grouped)


def _read_tiling(reader: _Reader) -> Tiling:
    fields: dict[str, tuple[int, ...]] = dict.fromkeys(("grid", "devices", "reshape_dims", "transpose_perm"), ())
    spans: dict[str, tuple[int, int]] = {}

    def read(field: str, what: str) -> None:
        start = reader.position
        fields[field] = reader.numbers(what)
        spans[field] = start, reader.position

    reader.expect(r"\[", "an opening bracket [")
    read("grid", "the number of tiles along each dimension")
    reader.expect(r"\]", "a closing bracket ]")
    if reader.accept(r"<=\["):
        read("reshape_dims", "the sizes that the devices are counted by")
        reader.expect(r"\]", "a closing bracket ]")
        if reader.accept(r"T\("):
            read("transpose_perm", "the order of the sizes")
            reader.expect(r"\)", "a closing parenthesis )")
    else:
        read("devices", "the order of the devices: <=[...], or all their numbers")
    subgroups = _read_subgroups(reader)
    grid, devices, reshape_dims, transpose_perm = fields.values()
    try:
        return tiled(grid, subgroups, devices, reshape_dims, transpose_perm)
    except MalformedShardingError as error:
        error.span = error.span or spans.get(error.field)
        raise


def _read_subgroups(reader: _Reader) -> tuple[Kind, ...]:
    if not reader.accept(r" last_tile_dims=\{"):
        return (Kind.REPLICATED,) if reader.accept(r" last_tile_dim_replicate\b") else ()
    kinds = []
    while not reader.accept(r"\}"):
        name = reader.sees(r"[a-z]+")
        if name is None or name[0].upper() not in Kind.__members__:
            unknown = (
                f"{abridged(reader.text)} has the subgroup {abridged(name[0])}, which is not known" if name else ""
            )
            raise reader.stuck("replicated, manual or unreduced", unknown)
        kinds.append(Kind[name[0].upper()])
        reader.accept(r"[a-z]+[, ]*")
    return tuple(kinds)


def _read_named(reader: _Reader) -> Tiling:
    text, head = reader.text, reader.accept(r"mesh\[([^\]]*)\], ")
    if head is None:
        raise MalformedShardingError(f"{abridged(text)} is not the text of a sharding")
    axes = [
        re.fullmatch(rf"'([^']*)'=([0-9]{{1,{_MOST_DIGITS}}})", part.strip())
        for part in head[1].split(",")
        if part.strip()
    ]
    if not all(axes):
        raise MalformedShardingError(f"{text!r} has the mesh [{head[1]}]")
    sizes = {axis[1]: int(axis[2]) for axis in axes if axis}
    malformed = MalformedShardingError(f"{abridged(text)} is not the text of a named sharding")
    if min(sizes.values(), default=1) < 1:
        raise malformed
    strides = {name: math.prod([*sizes.values()][i + 1 :]) for i, name in enumerate(sizes)}

    def digits() -> list[Digit]:
        group = reader.accept(r"\s*\{([^{}]*)\}")
        if group is None:
            raise malformed
        found = []
        for part in (part.strip() for part in group[1].split(",") if part.strip()):
            if part == "?":
                raise UnrepresentableShardingError(
                    f"no PartitionSpec expresses an open dimension, which may be sharded further, as in {text!r}"
                )
            match = _AXIS.fullmatch(part)
            if match is None or match["name"] not in sizes:
                raise MalformedShardingError(f"{text!r} names {part}, which is no axis of its mesh")
            size, before = sizes[match["name"]], int(match["before"] or 1)
            taken = int(match["size"] or size)
            if before < 1 or taken < 1 or size % (before * taken):
                raise MalformedShardingError(f"{text!r} names the part {part} of an axis of {size} devices")
            found.append((taken, strides[match["name"]] * (size // (before * taken))))
        return found

    dims: list[list[Digit]] = []
    is_closed = reader.accept(r"replicated\b")
    if not is_closed and reader.accept(r"\["):
        while reader.sees(r"\s*\{"):
            dims.append(digits())
            if not reader.accept(r"\s*,"):
                break
        is_closed = reader.accept(r"\s*\]")
    if not is_closed:
        raise malformed
    others: dict[str, list[Digit]] = {"replicated": [], "unreduced": [], "manual": []}
    while match := reader.accept(r"\s*,\s*([^,={}]*)=?"):
        if match[1] not in others:
            raise MalformedShardingError(f"{text!r} has {match[1]!r}, which is not known")
        others[match[1]] += digits()
    return named_tiling([*sizes.values()], (), dims, others["unreduced"], others["manual"])
