"""Plain-text tables, for terminals."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], *, left: Sequence[int] | None = None, indent: int = 0) -> str:
    """``rows`` in columns as wide as they need.

    Args:
      rows: the cells, as many in each row.
      left: numbers of the columns that are aligned to the left, the others to the right; None: all to the left.
      indent: spaces before each line.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if left is None or i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(" " * indent + "  ".join(cells).rstrip())
    return "\n".join(lines)
