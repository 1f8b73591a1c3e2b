"""A parser of HLO text: computations, and instructions with operands and attributes.

Of a line only the name, type and opcode are parsed at first; operands, attributes and users are parsed on demand. So
parsing is linear in the text, and fast for the megabytes of a large program.
"""

import functools
import re
from collections.abc import Iterator, Mapping

from partjit.inspect.hlo.source_lines import SourceLines, unescape

__all__ = [
    "Computation",
    "Instruction",
    "Module",
    "leaf_types",
    "parse_instruction",
    "parse_module",
    "type_bytes",
]

# `  ROOT %name = type opcode(operands), attributes`. A type has no blank before one of its parentheses, unless that is
# the beginning of a tuple in a tuple, which is no word.
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)", re.S)
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$", re.S)
_NAME = re.compile(r"%([\w.\-]+)")
_BARE_NAME = re.compile(r"(?:^|[\s,])([A-Za-z_][\w.\-]*)\s*(?=,|$)")
_LEAF = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_METADATA = re.compile(r", metadata=\{((?:[^\"{}]|\"(?:[^\"\\]|\\.)*\"|\{[^{}]*\})*)\}")
_FIELD = re.compile(r"(\w+)=(\"(?:[^\"\\]|\\.)*\"|[^\s}]+)")
_TRIP_COUNT = re.compile(r"\"known_trip_count\":\s*\{\"n\":\s*\"?(\d+)\"?")

_LATER = (", frontend_attributes={", ", metadata={", ", backend_config=")
_CALLING = re.compile(
    r", (body|branch_computations|called_computations|calls|condition|false_computation|to_apply|true_computation)="
)


class Instruction:
    """One instruction.

    Attributes:
        name: without the percent sign.
        type: as written, `(f32[8,16]{1,0}, s32[])`.
        opcode: `all-reduce`, `fusion`.
        is_root: whether it is what its computation returns.
    """

    __slots__ = ("_rest", "is_root", "name", "opcode", "type")

    def __init__(self, name: str, type_: str, opcode: str, rest: str, is_root: bool) -> None:
        self.name, self.type, self.opcode, self.is_root, self._rest = name, type_, opcode, is_root, rest

    def _end_of_operands(self) -> int:
        """The position of the closing parenthesis of the operands."""
        closing = self._rest.find(")")
        if "(" not in self._rest[:closing]:
            return closing
        depth = 1
        for match in re.finditer(r"[()]", self._rest):
            depth += 1 if match[0] == "(" else -1
            if not depth:
                return match.start()
        return len(self._rest)

    @property
    def arguments(self) -> str:
        """The text between the parentheses: names, the value of a constant, or the number of a parameter."""
        return self._rest[: self._end_of_operands()]

    @property
    def operands(self) -> list[str]:
        """The names of its operands, in order."""
        if self.opcode in ("constant", "parameter"):
            return []
        arguments = self.arguments
        return _NAME.findall(arguments) or _BARE_NAME.findall(arguments)

    @property
    def attributes(self) -> Mapping[str, str]:
        """The text of each attribute, by its name."""
        return dict(_attributes(self._rest, self._end_of_operands() + 1))

    @property
    def computations(self) -> list[str]:
        """The computations that it names in any attribute."""
        return [name for attribute in sorted({*_CALLING.findall(self._rest)}) for name in self.names_in(attribute)]

    def names_in(self, attribute: str) -> list[str]:
        """The computations that an attribute names, one or a list in braces."""
        # Attributes whose strings may contain the same text come later.
        start = self._rest.find(f", {attribute}=")
        if start < 0 or any(-1 < self._rest.find(later) < start for later in _LATER):
            return []
        match = re.compile(r"[^=]*=(%?[\w.\-]+|\{[^}]*\})").match(self._rest, start)
        return re.findall(r"[\w.\-]+", match[1]) if match else []

    @property
    def metadata(self) -> Mapping[str, str]:
        """`op_name`, `stack_frame_id`, `source_file` and `source_line`, whichever there are."""
        # A string with the same text would come later.
        start = self._rest.find(", metadata={")
        if start < 0 or (match := _METADATA.match(self._rest, start)) is None:
            return {}
        return {
            key: unescape(value[1:-1]) if value.startswith('"') else value for key, value in _FIELD.findall(match[1])
        }

    @property
    def known_trip_count(self) -> int | None:
        """The trip count that XLA annotates, if it does."""
        match = _TRIP_COUNT.search(self._rest)
        return None if match is None else int(match[1])


class Computation:
    """A function: its instructions by name."""

    def __init__(self, name: str, is_entry: bool) -> None:
        self.name, self.is_entry = name, is_entry
        self.instructions: dict[str, Instruction] = {}

    @functools.cached_property
    def root(self) -> Instruction | None:
        """The instruction with its result."""
        return next((instruction for instruction in self.instructions.values() if instruction.is_root), None)

    @functools.cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        """The users of each instruction, by its name."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found


class Module:
    """A program.

    Attributes:
        name: `jit_step`.
        computations: by name, callees before their callers.
        replicas, partitions: their numbers; the product is the number of devices.
        lines: the source lines of its instructions.
    """

    def __init__(self, header: str) -> None:
        name = re.match(r"HloModule ([\w.\-]+)", header)
        self.name = name[1] if name else ""
        self.replicas, self.partitions = (_number_in(header, key) for key in ("replica_count", "num_partitions"))
        self.computations: dict[str, Computation] = {}
        self.lines = SourceLines()


def parse_module(text: str) -> Module:
    """Parses `compiled.as_text()`.

    Raises:
        ValueError: it is no such text.

    Example:
        >>> module = parse_module('''HloModule f, num_partitions=2
        ...
        ... ENTRY %main (x: f32[8]) -> f32[8] {
        ...   %x = f32[8]{0} parameter(0)
        ...   ROOT %sum = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
        ... }
        ... ''')
        >>> root = module.computations["main"].root
        >>> root.opcode, root.operands, root.attributes["replica_groups"], type_bytes(root.type)
        ('all-reduce', ['x'], '{{0,1}}', 32)
    """
    lines = text.split("\n")
    if not lines[0].startswith("HloModule "):
        raise ValueError(f"the text of a compiled program begins with HloModule, but this with {lines[0][:80]!r}")
    module, current, table = Module(lines[0]), None, ""
    for line in lines:
        if line.startswith("  "):
            instruction = parse_instruction(line)
            if instruction is not None and current is not None:
                current.instructions[instruction.name] = instruction
        elif current is None:
            match = _COMPUTATION.match(line)
            if match and not line.startswith("HloModule "):
                current = Computation(match[2], match[1] is not None)
                module.computations[match[2]] = current
            elif line[:1].isdigit():
                module.lines.add(table, line)
            else:
                table = line
        elif line.startswith("}"):
            current = None
    return module


def parse_instruction(line: str) -> Instruction | None:
    """Parses a single instruction; None if the line is none.

    Example:
        >>> parse_instruction("ROOT %sum = f32[8]{0} add(%x, %y)").operands
        ['x', 'y']
    """
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    root, name, type_, opcode, rest = match.groups()
    return Instruction(name, type_, opcode, rest, root is not None)


def leaf_types(type_: str) -> list[str]:
    """The types of the arrays in a type, with tuples flattened, without layouts.

    Example:
        >>> leaf_types("((f32[8,16]{1,0}, s32[]), bf16[4])")
        ['f32[8,16]', 's32[]', 'bf16[4]']
    """
    return [f"{dtype}[{shape}]" for dtype, shape, _ in _LEAF.findall(type_)]


def type_bytes(type_: str) -> int:
    """The total size in bytes of the arrays of a type.

    Example:
        >>> type_bytes("(bf16[8,16]{1,0}, pred[3], token[])"), type_bytes("s4[8]{0:E(4)}")
        (259, 4)
    """
    total = 0
    for dtype, shape, layout in _LEAF.findall(type_):
        digits = re.search(r"\d+", dtype)
        # `pred` takes a byte; tokens and opaque values are nothing. Elements below a byte take one unless packed.
        bits = int(digits[0]) if digits else 8 * (dtype == "pred")
        packed = re.search(r"E\((\d+)\)", layout)
        count = 1
        for size in shape.split(","):
            count *= int(size.strip().lstrip("<=")) if size.strip() else 1
        total += -(-count * int(packed[1]) // 8) if packed else count * -(-bits // 8)
    return total


def _attributes(text: str, start: int) -> Iterator[tuple[str, str]]:
    """`name=value` between commas outside of brackets and strings."""
    depth, begin, name = 0, start, None
    for match in re.finditer(r"\"(?:[^\"\\]|\\.)*\"|[{}()\[\]]|=|,", text[start:]):
        token, position = match[0], start + match.start()
        if token in "{[(":
            depth += 1
        elif token in "}])":
            depth -= 1
        elif token == "=" and not depth and name is None:
            name, begin = text[begin:position].strip(), position + 1
        # `mesh[...], device_ids=(...) {...}` is one value with a comma in it.
        elif token == "," and not depth and not text.startswith(", device_ids=", position):
            if name is not None:
                yield name, text[begin:position].strip()
            begin, name = position + 1, None
    if name is not None:
        yield name, text[begin:].strip()


def _number_in(header: str, key: str) -> int:
    match = re.search(rf"\b{key}=(\d+)", header)
    return int(match[1]) if match else 1
