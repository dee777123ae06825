"""Tables on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


def show_table(table: Table, *, width: int = 140) -> None:
    """Print a table as wide as the terminal, or `width` characters wide if the output is piped."""
    from niels_gpt.system.terminal import rich_console

    console = rich_console(highlight=False)
    if not console.is_terminal:
        console.width = width
    console.print(table)


def one_line_cell(text: str) -> Text:
    """Return a cell that is cut at its end, with an ellipsis, where its column is too narrow."""
    from rich.text import Text

    return Text(text, no_wrap=True, overflow="ellipsis")
