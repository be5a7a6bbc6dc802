"""Tables for people: plain text, and HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Rows = Sequence[Sequence[str]]


def number(value: float | None) -> str:
    """Four significant digits, or a dash for what there is not."""
    return "–" if value is None else f"{value:.4g}"


def as_text(header: Sequence[str], rows: Rows) -> str:
    """Columns side by side, names to the left and numbers to the right."""
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = [
        "    ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
    return "\n".join(line.rstrip() for line in lines)


def as_html(header: Sequence[str], rows: Rows) -> str:
    """The same as an HTML table, every cell escaped."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(header, 'th')}</thead><tbody>{body}</tbody></table>"
