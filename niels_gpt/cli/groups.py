"""Groups of commands that are imported when they are used, so that `--help` is fast."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperGroup

from niels_gpt.cli.command_line import App
from niels_gpt.system.console import hint
from niels_gpt.system.program import command

_MOVED = "niels_gpt.moved"
"""Key of a context: the hint about a former name."""


class Entry(NamedTuple):
    """Where a command is, and the line about it in the help of its group."""

    place: str
    """`MODULE:NAME` in `niels_gpt.cli`, of a function or of an App."""
    help: str


class _Commands(dict[str, Any]):
    """Name -> command, which is imported when it is taken out."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if isinstance(found, Entry):
            found = self[name] = _load(name, found)
        return found

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (dict.get does not call __getitem__)


class Group(TyperGroup):
    """Commands by section. A former name is accepted, with a hint, and not listed."""

    sections: ClassVar[Mapping[str, Mapping[str, Entry]]] = {}
    """Title -> name -> command, in the order of the help; they come before those that are registered."""
    moved: ClassVar[Mapping[str, str]] = {}
    """Former name -> present path below `niels-gpt`, such as `research trace`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        entries = {name: entry for section in self.sections.values() for name, entry in section.items()}
        self.commands = _Commands({**entries, **self.commands})

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in super().list_commands(ctx) if not self._present(ctx, name)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        path = self._present(ctx, cmd_name)
        if not path:
            return super().get_command(ctx, cmd_name)
        ctx.meta[_MOVED] = f"`{ctx.command_path} {cmd_name}` is now `{command(*path)}`"
        return functools.reduce(lambda group, name: group.commands[name], path, ctx.find_root().command)

    def _present(self, ctx: Any, name: str) -> list[str]:
        """The present path of a former name; empty for another name, and for a group that runs alone."""
        path = self.moved.get(name, "").split()
        return path if path[:1] and path[0] in ctx.find_root().command.commands else []

    def invoke(self, ctx: Any) -> Any:
        """Run the command; the hint about its name comes last, so that an error is one line."""
        result = super().invoke(ctx)
        if _MOVED in ctx.meta:
            hint(ctx.meta.pop(_MOVED))
        return result

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the sections, or the registered commands as typer does."""
        if not self.sections:
            super().format_commands(ctx, formatter)
        for title, section in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, entry.help) for name, entry in section.items()])


def group(
    sections: Mapping[str, Mapping[str, Entry]] | None = None, moved: Mapping[str, str] | None = None
) -> type[Group]:
    """The class of a group with these commands."""
    return type("Commands", (Group,), {"sections": sections or {}, "moved": moved or {}})


def _load(name: str, entry: Entry) -> Any:
    module, _, attribute = entry.place.partition(":")
    found = getattr(import_module(f"niels_gpt.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        made: Any = typer.main.get_group(found)
    else:
        app = App(help="")
        app.command(name)(found)
        made = typer.main.get_command(app)
    made.name = name
    return made
