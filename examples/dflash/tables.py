"""Tables for people: with lines on a terminal, plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of cells below a title.

    Attributes:
        columns: their names; none where the rows speak for themselves. Rows are all of one length.
        note: a line below.
    """

    title: str
    rows: Sequence[tuple[str, ...]]
    columns: tuple[str, ...] = ()
    note: str = ""


def show(tables: Sequence[Table]) -> None:
    """Tables with lines on a terminal; elsewhere plain text, to be searched and compared."""
    if sys.stdout.isatty():
        _show_rich(tables)
        return
    for number, table in enumerate(tables):
        rows = [table.columns, *table.rows] if table.columns else list(table.rows)
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))] if rows else []
        lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        print("\n".join([*([""] if number else []), table.title, *(line.rstrip() for line in lines)]))
        if table.note:
            print(f"  {table.note}")


def _show_rich(tables: Sequence[Table]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as RichTable

    console = Console(highlight=False)
    for table in tables:
        shown = RichTable(
            *table.columns,
            title=escape(table.title),
            title_justify="left",
            caption=escape(table.note) or None,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            show_header=bool(table.columns),
        )
        for row in table.rows:
            shown.add_row(*map(escape, row))
        console.print(shown)
