"""The collectives of a compiled program, read from its text by a parser that shares nothing with `partjit.inspect`.

It is the measure of `truth.py`, so it is short rather than complete: text of another form raises instead of being
skipped.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128, "token": 0, "opaque": 0}

Axes = Mapping[str, int]
Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Moved:
    """One instruction that communicates.

    Attributes:
        kind: one of `KINDS`.
        axes: of the mesh; `("?",)` if the groups are those of no set of axes.
        arrays: how many it moves.
        executions: how often a step executes it; a loop of unknown trip count counts as one iteration.
        is_exact: whether all trip counts around it are known.
        sent: bytes that a device sends in one execution, on average.
    """

    kind: str
    axes: tuple[str, ...]
    arrays: int
    executions: int
    is_exact: bool
    sent: float


@dataclasses.dataclass(frozen=True)
class Line:
    """An instruction: its result's type, opcode, operands' text and attributes' text."""

    name: str
    type: str
    opcode: str
    operands: str
    attributes: str


def balanced(text: str, start: int) -> int:
    """The index after the parenthesis that closes the one at `start`."""
    depth = 0
    for k in range(start, len(text)):
        depth += (text[k] in "([{") - (text[k] in ")]}")
        if depth == 0:
            return k + 1
    raise ValueError(f"unbalanced: {text}")


def parse_line(text: str) -> Line | None:
    found = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", text)
    if found is None:
        return None
    start = found.end()
    end = balanced(text, start) if text[start] == "(" else text.index(" ", start)
    called = re.match(r"\s*([\w\-]+)\(", text[end:])
    if called is None:
        raise ValueError(f"no opcode: {text}")
    opening = end + called.end() - 1
    closing = balanced(text, opening)
    return Line(found[1], text[start:end], called[1], text[opening + 1 : closing - 1], text[closing:])


def parse_program(text: str) -> tuple[str, dict[str, dict[str, Line]]]:
    """The name of the entry, and the instructions of each computation by name."""
    entry, current = "", None
    computations: dict[str, dict[str, Line]] = {}
    for raw in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$", raw)
        if header:
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif raw.startswith("}"):
            current = None
        elif current is not None and (line := parse_line(re.sub(r"/\*.*?\*/", "", raw))) is not None:
            current[line.name] = line
    if not entry:
        raise ValueError("the text has no entry computation")
    return entry, computations


def leaves(type_text: str) -> list[int]:
    """The bytes of each array of a type, which may be a tuple."""
    sizes = []
    for dtype, dims in re.findall(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]", type_text):
        bits = BITS[dtype] if dtype in BITS else int(re.findall(r"\d+", dtype)[0])
        count = math.prod(int(dim.strip("<=")) for dim in dims.split(",") if dim)
        sizes.append(-(-count * bits // 8))
    return sizes


def groups_of(text: str, devices: int) -> Groups:
    """Replica groups in each of the forms that XLA prints: a list, an iota, or axes of a mesh."""
    iota = re.match(r"\[(\d+),(\d+)\]<=(.*)$", text)
    if iota:
        return rows_of(order_of(iota[3]).reshape(int(iota[1]), int(iota[2])))
    of_mesh = re.match(r"@?\w*?mesh\[(.*?)\](?:, device_ids=\(([^)]*(?:\(.*?\))?)\))? \{(.*)\}$", text)
    if of_mesh:
        return groups_of_axes(of_mesh[1], of_mesh[2], of_mesh[3])
    if not re.fullmatch(r"[\d,{} ]*", text):
        raise ValueError(f"replica groups of another form: {text}")
    rows = [tuple(int(n) for n in row.split(",") if n) for row in re.findall(r"\{([\d,]+)\}", text)]
    return tuple(rows) or (tuple(range(devices)),)


def order_of(text: str) -> np.ndarray:
    """The device ids of an iota, `[4,2]T(1,0)`, or of a list, `0,2,1,3`."""
    iota = re.match(r"(?:<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?$", text)
    if iota is None:
        return np.array([int(n) for n in text.split(",")])
    dims = [int(n) for n in iota[1].split(",")]
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose([int(n) for n in iota[2].split(",")]).reshape(-1) if iota[2] else ids.reshape(-1)


def rows_of(ids: np.ndarray) -> Groups:
    return tuple(map(tuple, ids.tolist()))


def groups_of_axes(mesh_text: str, ids_text: str | None, axes_text: str) -> Groups:
    """`'data'=4,'model'=2` with `'data'`, or with a part of an axis: `'data':(1)2`; the ids are those of the mesh."""
    shape = {name: int(size) for name, size in re.findall(r"'?([\w.]+)'?=(\d+)", mesh_text)}
    wanted = re.findall(r"'?([\w.]+)'?(?::\((\d+)\)(\d+))?", axes_text)
    parts: list[tuple[int, bool]] = []  # the size of each part of an axis, and whether the groups vary along it
    for name, size in shape.items():
        cuts = {1, size}
        inside = set()
        for axis, pre, part in wanted:
            if axis == name:
                low, high = (int(pre), int(pre) * int(part)) if part else (1, size)
                cuts |= {low, high}
                inside.add((low, high))
        for low, high in itertools.pairwise(sorted(cuts)):
            parts.append((high // low, any(a <= low and high <= b for a, b in inside)))
    ids = order_of(ids_text) if ids_text else np.arange(math.prod(shape.values()))
    ids = ids.reshape([size for size, _ in parts] or [1])
    last = [k for k, (_, varies) in enumerate(parts) if varies]
    first = [k for k, (_, varies) in enumerate(parts) if not varies]
    count = math.prod(parts[k][0] for k in last)
    return rows_of(ids.transpose([*first, *last] or [0]).reshape(-1, count))


def axes_of(groups: Sequence[Sequence[int]], mesh: Axes) -> tuple[str, ...]:
    """The axes along which the devices of a group differ, if the groups are those of whole axes."""
    ids = np.arange(math.prod(mesh.values())).reshape([*mesh.values()])
    names = [name for name, size in mesh.items() if size > 1]
    wanted = {frozenset(group) for group in groups}
    for count in range(len(names) + 1):
        for chosen in itertools.combinations(names, count):
            last = [k for k, name in enumerate(mesh) if name in chosen]
            first = [k for k, name in enumerate(mesh) if name not in chosen]
            size = math.prod(mesh[name] for name in chosen)
            if {frozenset(row) for row in ids.transpose([*first, *last]).reshape(-1, size).tolist()} == wanted:
                return tuple(chosen)
    return ("?",)


def axes_of_pairs(pairs: Sequence[Sequence[int]], mesh: Axes) -> tuple[str, ...]:
    """The axes along which any device sends."""
    shape = [*mesh.values()]
    places = [(np.unravel_index(a, shape), np.unravel_index(b, shape)) for a, b in pairs]
    return tuple(name for k, name in enumerate(mesh) if any(a[k] != b[k] for a, b in places))


def attribute(line: Line, name: str) -> str | None:
    """The text of an attribute, up to the comma that ends it."""
    found = re.search(rf"[, ]{name}=", line.attributes)
    if found is None:
        return None
    depth, start = 0, found.end()
    for k in range(start, len(line.attributes)):
        character = line.attributes[k]
        # Those of a mesh are part of its attribute.
        if character == "," and depth == 0 and not line.attributes.startswith(", device_ids=(", k):
            return line.attributes[start:k].strip()
        depth += (character in "([{") - (character in ")]}")
    return line.attributes[start:].strip()


def called_by(line: Line) -> Iterator[tuple[str, int | None]]:
    """The computations that an instruction runs, and how often; None if that is unknown."""
    if line.opcode == "while":
        found = re.search(r'"?known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)', line.attributes)
        count = int(found[1]) if found else None
        yield (attribute(line, "body") or "").lstrip("%"), count
        yield (attribute(line, "condition") or "").lstrip("%"), None if count is None else count + 1
    elif line.opcode in ("conditional", "call", "fusion", "async-start", "custom-call"):
        keys = ("branch_computations", "true_computation", "false_computation", "to_apply", "calls")
        for key in (*keys, "called_computations"):
            yield from ((name, 1) for name in re.findall(r"[\w.\-]+", attribute(line, key) or ""))


def times_of(entry: str, computations: Mapping[str, Mapping[str, Line]]) -> dict[str, tuple[int, bool]]:
    """How often each computation runs in a step, and whether that is exact."""
    totals: dict[str, tuple[int, bool]] = collections.defaultdict(lambda: (0, True))

    def run(name: str, times: int, is_exact: bool) -> None:
        before, was_exact = totals[name]
        totals[name] = before + times, was_exact and is_exact
        for line in computations[name].values():
            for callee, count in called_by(line):
                if callee in computations:
                    run(callee, times * (1 if count is None else count), is_exact and count is not None)

    run(entry, 1, True)
    return dict(totals)


def sent_of(kind: str, size: int, operand: float, result: float, share: float) -> float:
    """Bytes that a device sends under bandwidth-optimal algorithms, as docs/inspect.md gives them."""
    if kind == "collective-permute":
        return share * operand
    kept = (size - 1) / size
    return {"all-gather": kept * result, "all-reduce": 2 * kept * operand}.get(kind, kept * operand)


def moved_by(line: Line, inside: Mapping[str, Line], mesh: Axes, times: tuple[int, bool]) -> Moved:
    kind = line.opcode.removesuffix("-start")
    devices = math.prod(mesh.values())
    operands = [inside[name].type for name in re.findall(r"%?([\w.\-]+)(?:,|$)", line.operands) if name in inside]
    operands = operands[:1] if kind == "ragged-all-to-all" else operands
    before = [size for operand in operands for size in leaves(operand)]
    after = leaves(line.type)
    if line.opcode.endswith("-start") and len(after) > len(before):
        after = after[len(before) : 2 * len(before)]  # a start gives the operands, the results, and handles
    if not before:
        raise ValueError(f"no operands: {line}")
    share = 1.0
    if kind == "collective-permute":
        pairs = [
            pair for pair in groups_of(attribute(line, "source_target_pairs") or "", devices) if pair[0] != pair[1]
        ]
        axes, size, share = axes_of_pairs(pairs, mesh), 2, len(pairs) / devices
    else:
        groups = groups_of(attribute(line, "replica_groups") or "{}", devices)
        axes, size = axes_of(groups, mesh), max(map(len, groups))
    arrays = 1 if kind == "all-to-all" else len(before)
    return Moved(kind, axes, arrays, *times, sent_of(kind, size, sum(before), sum(after), share))


def read_program(text: str, mesh: Axes) -> list[Moved]:
    """What a compiled program moves on a mesh of these axes, in the order of its text."""
    entry, computations = parse_program(text)
    times = times_of(entry, computations)
    opcodes = {kind + suffix for kind in KINDS for suffix in ("", "-start")}
    return [
        moved_by(line, lines, mesh, times[name])
        for name, lines in computations.items()
        if name in times
        for line in lines.values()
        if line.opcode in opcodes
    ]


def sent_in_a_step(text: str, mesh: Axes) -> float:
    """Bytes that a device sends in a step; of the branches of a conditional the one that sends most counts."""
    entry, computations = parse_program(text)
    opcodes = {kind + suffix for kind in KINDS for suffix in ("", "-start")}
    known: dict[str, float] = {}

    def cost(name: str) -> float:
        if name not in known:
            known[name] = sum(cost_of(line, name) for line in computations.get(name, {}).values())
        return known[name]

    def cost_of(line: Line, name: str) -> float:
        if line.opcode in opcodes:
            return moved_by(line, computations[name], mesh, (1, True)).sent
        inner = [cost(callee) * (1 if count is None else count) for callee, count in called_by(line)]
        return max(inner, default=0.0) if line.opcode == "conditional" else sum(inner)

    return cost(entry)
