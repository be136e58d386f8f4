"""Rows as a table in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from rich.table import Table


def ruled(title: str, caption: str, rows: Iterable[Sequence[str]], *, words: Collection[str] | None = None) -> Table:
    """A table with a title, a caption below and rules.

    Args:
        title: above it.
        caption: below it.
        rows: names of columns, then what stands in them.
        words: names of columns that are aligned to the left; by default the first one.
    """
    from rich.table import Table

    return _filled(Table(title=title, caption=caption, caption_justify="left"), rows, words)


def bare(rows: Iterable[Sequence[str]], *, words: Collection[str] | None = None) -> Table:
    """A table of nothing but its rows; arguments as of `ruled`."""
    from rich.table import Table

    return _filled(Table(box=None, pad_edge=False), rows, words)


def _filled(table: Table, rows: Iterable[Sequence[str]], words: Collection[str] | None) -> Table:
    names, *others = rows
    left = names[:1] if words is None else words
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in others:
        table.add_row(*row)
    return table
