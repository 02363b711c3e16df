"""Tables for a terminal, or for a file of a fixed width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text


def console(width: int) -> Console:
    """A console as wide as the terminal, or of that width where there is none."""
    found = Console()
    return found if found.is_terminal else Console(width=width)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, names: int = 1, title: str | None = None) -> Table:
    """The first `names` columns are left-aligned, the others, which are numbers, right-aligned. Cells are plain text."""
    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    for number, head in enumerate(heads):
        named = number < names
        made.add_column(head, justify="left" if named else "right", no_wrap=not named, overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))  # as it is: rich would take brackets for styles
    return made
