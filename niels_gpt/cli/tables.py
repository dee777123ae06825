"""Tables in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def show_table(table: Table, *, width: int = 140) -> None:
    """Print a table: as wide as the terminal, or as `width` where output is piped."""
    console = Console(highlight=False)
    if not console.is_terminal:  # a pipe has no width to keep to
        console.width = width
    console.print(table)
