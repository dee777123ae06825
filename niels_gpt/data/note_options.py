"""The command-line options that select notes (`data.notes`) and treat encodings: one bundle for all commands."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Optional, get_type_hints

import typer

from niels_gpt.config import NotesConfig

ENCODING_ERRORS = ("strict", "replace", "skip")
LINKS = ("keep", "text")
PANEL = "Which notes are read, and how"
KEYWORD = inspect.Parameter.KEYWORD_ONLY
OptionalText = Optional[str]  # noqa: UP045 (typer reads these at run time)

_OPTIONS: dict[str, Any] = {
    "exclude": Annotated[
        list[str],
        typer.Option(
            "--exclude", rich_help_panel=PANEL, metavar="GLOB", help="Files not to read, as in .gitignore; repeatable."
        ),
    ],
    "include_hidden": Annotated[
        bool,
        typer.Option(
            "--include-hidden", rich_help_panel=PANEL, help="Also read hidden files and folders, and node_modules."
        ),
    ],
    "skip_templates": Annotated[
        bool, typer.Option("--skip-templates", rich_help_panel=PANEL, help="Skip folders named templates.")
    ],
    "respect_front_matter": Annotated[
        bool,
        typer.Option(
            "--respect-front-matter",
            rich_help_panel=PANEL,
            help="Skip notes with `publish: false` or `private: true` on top.",
        ),
    ],
    "strip_front_matter": Annotated[
        bool, typer.Option("--strip-front-matter", rich_help_panel=PANEL, help="Remove the front matter from the text.")
    ],
    "links": Annotated[
        OptionalText,
        typer.Option(
            "--links", rich_help_panel=PANEL, metavar="keep|text", help="text: [[target|label]] becomes label."
        ),
    ],
    "encoding_errors": Annotated[
        OptionalText,
        typer.Option(
            "--encoding-errors",
            rich_help_panel=PANEL,
            metavar="strict|replace|skip",
            help="Files that are not utf-8: stop, substitute bad bytes, or skip them.",
        ),
    ],
}
"""Field of NoteOptions -> its option."""


@dataclass(frozen=True)
class NoteOptions:
    """What the user gave of the options; the defaults change nothing in a config."""

    exclude: tuple[str, ...] = ()
    include_hidden: bool = False
    skip_templates: bool = False
    respect_front_matter: bool = False
    strip_front_matter: bool = False
    links: str | None = None
    encoding_errors: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "exclude", tuple(self.exclude))
        for name, value, allowed in (
            ("--encoding-errors", self.encoding_errors, ENCODING_ERRORS),
            ("--links", self.links, LINKS),
        ):
            if value is not None and value not in allowed:
                listed = " or ".join([", ".join(allowed[:-1]), allowed[-1]])
                raise ValueError(f"{name} must be {listed}, got {value!r}")

    def given(self) -> dict[str, Any]:
        """Return the options of `data.notes` that were given."""
        fields = {key: value for key, value in dataclasses.asdict(self).items() if value}
        return {key: list(value) if key == "exclude" else value for key, value in fields.items() if key in _NOTES}

    def data(self) -> dict[str, Any]:
        """Return the options for `with_data`."""
        return {"encoding_errors": self.encoding_errors, "notes": self.given() or None}

    def notes(self, base: NotesConfig | None = None) -> NotesConfig:
        """Return the config of the notes with the options applied; patterns are added to those of `base`."""
        return with_note_options(base or NotesConfig(), self.given())

    def check_applies(self, source: str, applies: bool) -> None:
        """Raise ValueError if options were given for a source that is not read from the user's folders."""
        if self.given() and not applies:
            first = "--" + next(iter(self.given())).replace("_", "-")
            raise ValueError(f"{first} selects files of your own folders and does not apply to {source}: omit it")

    def words(self) -> list[str]:
        """Return the options as the words of a command."""
        words = [word for pattern in self.exclude for word in ("--exclude", pattern)]
        for key in _OPTIONS:
            value, name = getattr(self, key), f"--{key.replace('_', '-')}"
            if value is True:
                words.append(name)
            elif isinstance(value, str):
                words += [name, value]
        return words


_NOTES = {field.name for field in dataclasses.fields(NotesConfig)}


def with_note_options(notes: NotesConfig, given: dict[str, Any]) -> NotesConfig:
    """Return `notes` with other values; patterns of `exclude` are added, the others replace."""
    added = [pattern for pattern in given.get("exclude", ()) if pattern not in notes.exclude]
    return dataclasses.replace(notes, **{**given, "exclude": (*notes.exclude, *added)})


def takes_note_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of `NoteOptions`; it receives them as its keyword argument `note_options`."""
    signature = inspect.signature(command)
    defaults = {field.name: field.default for field in dataclasses.fields(NoteOptions)}

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        options = NoteOptions(**{name: kwargs.pop(name, default) for name, default in defaults.items()})
        kwargs.setdefault("note_options", options)
        return command(*args, **kwargs)

    hints = get_type_hints(command, include_extras=True) | _OPTIONS
    del hints["note_options"]
    parameters: list[inspect.Parameter] = []  # all by name: typer passes them so, and needs only their order
    for name, parameter in signature.parameters.items():
        added = _OPTIONS if name == "note_options" else {name: hints[name]}
        for option, annotation in added.items():
            default = defaults[option] if option in _OPTIONS else parameter.default
            default = [] if option == "exclude" else default
            parameters.append(inspect.Parameter(option, KEYWORD, default=default, annotation=annotation))
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = hints
    return wrapper
