"""Parses specs written as in Python, `P('data', None)`, without running code."""

import ast
from collections.abc import Mapping

from jax.sharding import PartitionSpec as P

from partjit.command.mistakes import CANNOT, Mistake, did_you_mean

__all__ = ["spec_of"]

_HOW = "a spec is written as P('data', None, ('x', 'y')): an axis, several, or None for each dimension"


def spec_of(text: str, mesh: Mapping[str, int]) -> P:
    """Reads a spec: `P('data', None)`, `PartitionSpec(...)`, or only what is in the parentheses. Axes need no quotes.

    Args:
        text: the text of the argument.
        mesh: the axes of the mesh, with their sizes.

    Raises:
        Mistake: the text is malformed, or it names an axis twice or an unknown one.

    Example:
        >>> from partjit.command.spec_text import spec_of
        >>> spec_of("data, None", {"data": 4})
        P('data', None)
    """
    return _Reading(text, mesh).spec()


class _Reading:
    def __init__(self, text: str, mesh: Mapping[str, int]) -> None:
        self.text, self.mesh = text, mesh
        self.named: set[str] = set()
        self.line = " ".join(text.splitlines())
        self.indent = len(self.line) - len(self.line.lstrip())

    def spec(self) -> P:
        source = self.line.strip()
        try:
            tree = ast.parse(source or "()", mode="eval").body
        except SyntaxError as error:
            place = min(self.indent + (error.offset or 1) - 1, len(self.text.rstrip()))
            raise Mistake(_HOW, "SHARDING", self.text, (place, place + 1)) from None
        except (ValueError, RecursionError, MemoryError):  # a text too long or too deeply nested
            raise Mistake(_HOW, "SHARDING", self.text, (0, len(self.text))) from None
        if isinstance(tree, ast.Call):
            if ast.unparse(tree.func).rpartition(".")[2] not in ("P", "PartitionSpec"):
                raise self.wrong(_HOW, tree.func)
            if tree.keywords:
                first = tree.keywords[0]
                raise self.wrong(f"{first.arg}= says what no sharding of XLA's does", first, CANNOT)
            entries = tree.args
        elif isinstance(tree, ast.Tuple):
            entries = tree.elts
        else:
            entries = [tree]
        return P(*map(self.entry, entries))

    def entry(self, node: ast.expr) -> str | tuple[str, ...] | None:
        if isinstance(node, ast.Constant) and node.value is None:
            return None
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(map(self.axis, node.elts))
        if isinstance(node, ast.Attribute) and node.attr == "UNCONSTRAINED":
            raise self.wrong("UNCONSTRAINED leaves a dimension to the partitioner: no sharding says so", node, CANNOT)
        return self.axis(node)

    def axis(self, node: ast.expr) -> str:
        name = node.id if isinstance(node, ast.Name) else node.value if isinstance(node, ast.Constant) else None
        if not isinstance(name, str):
            raise self.wrong(_HOW, node)
        if name not in self.mesh:
            axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
            raise self.wrong(f"{name!r} is no axis of the mesh ({axes}){did_you_mean(name, self.mesh)}", node)
        if name in self.named:
            raise self.wrong(f"the axis {name!r} is used twice, and it can shard only one dimension", node)
        self.named.add(name)
        return name

    def wrong(self, message: str, node: ast.expr | ast.keyword, code: int = 2) -> Mistake:
        # Python counts bytes.
        source = self.line.strip().encode()
        start = self.indent + len(source[: node.col_offset].decode())
        stop = self.indent + len(source[: node.end_col_offset].decode())
        return Mistake(message, "SHARDING", self.text, (start, stop), code)
