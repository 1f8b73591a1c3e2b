"""The user's lines that instructions come from, by the tables in the text of a compiled program."""

import re
from collections.abc import Iterator, Mapping

from partjit._jax.sources import is_user_file
from partjit.inspect.user_lines import Site, nearest_lines

__all__ = ["SourceLines", "tags_of", "unescape"]

_TAG = re.compile(r"\beqn:(\d+)\b")


def tags_of(op_name: str) -> tuple[int, ...]:
    """The numbers of the equations in a name stack, outermost first.

    Example:
        >>> tags_of("jit(step)/eqn:3/while/body/transpose(jvp(eqn:12))/dot_general")
        (3, 12)
    """
    return tuple(int(number) for number in _TAG.findall(op_name))


def unescape(text: str) -> str:
    r"""Decodes the escapes of a string in HLO, which writes bytes outside of ASCII as octal numbers.

    Example:
        >>> unescape(r"/home/\303\274/a \"b\".py")
        '/home/ü/a "b".py'
    """
    if "\\" not in text:
        return text
    raw = re.sub(
        rb"\\([0-7]{1,3}|x[0-9a-fA-F]{1,2}|.)", lambda match: _character(match[1]), text.encode("utf-8"), flags=re.S
    )
    return raw.decode("utf-8", "replace")


def _character(escape: bytes) -> bytes:
    if escape[:1].isdigit():
        return bytes([int(escape, 8) & 0xFF])
    if len(escape) > 1:
        return bytes([int(escape[1:], 16)])
    return {b"n": b"\n", b"r": b"\r", b"t": b"\t"}.get(escape, escape)


class SourceLines:
    """The tables FileNames, FunctionNames, FileLocations and StackFrames, and look-ups in them."""

    def __init__(self) -> None:
        self._strings: dict[str, dict[int, str]] = {"FileNames": {}, "FunctionNames": {}}
        self._numbers: dict[str, dict[int, dict[str, int]]] = {"FileLocations": {}, "StackFrames": {}}

    def add(self, table: str, line: str) -> None:
        """Adds a line of the table: `1 "train.py"`, `3 {file_location_id=2 parent_frame_id=1}`."""
        number, _, entry = line.partition(" ")
        if table in self._strings:
            self._strings[table][int(number)] = unescape(entry.strip()[1:-1])
        elif table in self._numbers:
            fields = re.findall(r"(\w+)=(\d+)", entry)
            self._numbers[table][int(number)] = {key: int(value) for key, value in fields}

    def lines(self, metadata: Mapping[str, str]) -> tuple[Site | None, Site | None]:
        """The user's line for the metadata of an instruction, and that of the library it calls: see `nearest_lines`."""
        return nearest_lines(self.frames(metadata))

    def frames(self, metadata: Mapping[str, str]) -> Iterator[Site]:
        """The lines outside of jax and this package for the metadata of an instruction, innermost first."""
        if "stack_frame_id" in metadata:
            yield from self._frames_from(int(metadata["stack_frame_id"]))
        elif "source_file" in metadata:
            yield metadata["source_file"], int(metadata.get("source_line", 0)), ""

    def _frames_from(self, frame_id: int) -> Iterator[Site]:
        seen: set[int] = set()
        while frame_id not in seen:
            seen.add(frame_id)
            frame = self._numbers["StackFrames"].get(frame_id)
            if frame is None:
                return
            location = self._numbers["FileLocations"].get(frame.get("file_location_id", 0), {})
            file = self._strings["FileNames"].get(location.get("file_name_id", 0), "")
            if file and is_user_file(file):
                function = self._strings["FunctionNames"].get(location.get("function_name_id", 0), "")
                yield file, location.get("line", 0), function.rpartition(".")[2]
            # XLA writes the number of the parent plus one; 1 means none.
            frame_id = frame.get("parent_frame_id", 1) - 1
