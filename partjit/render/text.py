"""Tables as text."""

from collections.abc import Sequence

__all__ = ["table"]


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], most: int | None = None) -> str:
    """A table with right-aligned numbers. At most `most` rows are shown; a last line counts the others.

    Example:
        >>> print(table(("kind", "count"), [("all-gather", 2), ("all-reduce", 16)]))
        kind        count
        all-gather      2
        all-reduce     16
    """
    shown = [*rows] if most is None else [*rows[:most]]
    cells = [[*map(str, columns)], *([str(cell) for cell in row] for row in shown)]
    right = [bool(shown) and all(_is_number(row[k]) for row in shown) for k in range(len(columns))]
    widths = [max(len(row[k]) for row in cells) for k in range(len(columns))]
    lines = [
        "  ".join(
            f"{cell:>{width}}" if is_right else f"{cell:<{width}}"
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]
    left_out = len(rows) - len(shown)
    return "\n".join([*lines, *([f"... and {left_out} more"] if left_out else [])])


def _is_number(cell: object) -> bool:
    # A path may start with a digit as well: 0/kernel.
    return isinstance(cell, int | float) or (isinstance(cell, str) and cell[:1].isdigit() and "/" not in cell)
