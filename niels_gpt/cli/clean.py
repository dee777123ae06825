"""`niels-gpt cache clean`: what the user's cache folder holds, and freeing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from niels_gpt.cli.options import JsonOption

if TYPE_CHECKING:
    from niels_gpt.system.user_cache import CacheEntry


def clean(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Free it without asking.")] = False,
    json: JsonOption = False,
) -> None:
    """Show what the cache folder holds, and free it.

    It holds byte streams and indexes of texts that were trained on, and compiled kernels: all of it is rebuilt when it
    is needed.
    Runs, token caches and everything outside the cache folder stay.
    """
    import sys
    from json import dumps

    from niels_gpt.system.console import short_number
    from niels_gpt.system.user_cache import cache_folder, list_entries, remove_entry

    entries = list_entries()
    total = sum(entry.bytes for entry in entries)
    if not json:
        _show(entries)
    elif not yes:
        print(dumps({"folder": str(cache_folder()), "bytes": total, "entries": _rows(entries)}, indent=2))
    if not entries or (json and not yes):
        return
    if not yes:
        if not sys.stdin or not sys.stdin.isatty():
            print("nothing was removed: --yes frees it")
            return
        if not typer.confirm(f"free {short_number(total)}B?"):
            return
    removed = [entry for entry in entries if remove_entry(entry)]
    freed = sum(entry.bytes for entry in removed)
    if json:
        print(dumps({"folder": str(cache_folder()), "freed_bytes": freed, "entries": _rows(removed)}, indent=2))
    else:
        print(f"freed {short_number(freed)}B")
    for entry in (entry for entry in entries if entry not in removed):
        print(f"kept {entry.path}: another process is using it", file=sys.stderr)


def _rows(entries: list[CacheEntry]) -> list[dict[str, str | int | float]]:
    return [{"what": e.what, "bytes": e.bytes, "last_used": e.used, "path": str(e.path)} for e in entries]


def _show(entries: list[CacheEntry]) -> None:
    """Print a table: what, size, last use."""
    from datetime import datetime

    from rich.markup import escape
    from rich.table import Table

    from niels_gpt.cli.tables import show_table
    from niels_gpt.system.console import short_number
    from niels_gpt.system.files import display_path
    from niels_gpt.system.user_cache import cache_folder

    size = short_number(sum(entry.bytes for entry in entries))
    print(f"{display_path(cache_folder())}: {size}B" if entries else f"{display_path(cache_folder())} is empty")
    if not entries:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("what", overflow="fold")
    table.add_column("size", justify="right")
    table.add_column("last use", no_wrap=True)
    for entry in entries:
        used = datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M")
        table.add_row(escape(entry.what), f"{short_number(entry.bytes)}B", used)
    show_table(table)
