"""The command-line options that select notes (`data.notes`) and treat encodings: one bundle for all commands."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

from niels_gpt.cli.options import field_option
from niels_gpt.config import DataConfig, NotesConfig
from niels_gpt.config.options import checked, fields_of

PANEL = "Which notes are read, and how"
KEYWORD = inspect.Parameter.KEYWORD_ONLY


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
        for name, cls in (("encoding_errors", DataConfig), ("links", NotesConfig)):
            if getattr(self, name) is not None:
                checked(f"--{name.replace('_', '-')}", getattr(self, name), fields_of(cls)[name])

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
        for key, value in dataclasses.asdict(self).items():
            name = f"--{key.replace('_', '-')}"
            if value is True:
                words.append(name)
            elif isinstance(value, str):
                words += [name, value]
        return words


_NOTES = {field.name for field in dataclasses.fields(NotesConfig)}
_NAMES = [field.name for field in dataclasses.fields(NoteOptions)]


def with_note_options(notes: NotesConfig, given: dict[str, Any]) -> NotesConfig:
    """Return `notes` with other values; patterns of `exclude` are added, the others replace."""
    added = [pattern for pattern in given.get("exclude", ()) if pattern not in notes.exclude]
    return dataclasses.replace(notes, **{**given, "exclude": (*notes.exclude, *added)})


def takes_note_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of `NoteOptions`; it receives them as its keyword argument `note_options`."""
    signature = inspect.signature(command)
    given = {name: field_option(NotesConfig if name in _NOTES else DataConfig, name, PANEL) for name in _NAMES}
    defaults = {field.name: field.default for field in dataclasses.fields(NoteOptions)}

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        options = NoteOptions(**{name: kwargs.pop(name, default) for name, default in defaults.items()})
        kwargs.setdefault("note_options", options)
        return command(*args, **kwargs)

    hints = get_type_hints(command, include_extras=True) | given
    del hints["note_options"]
    parameters: list[inspect.Parameter] = []  # all by name: typer passes them so, and needs only their order
    for name, parameter in signature.parameters.items():
        added = given if name == "note_options" else {name: hints[name]}
        for option, annotation in added.items():
            default = defaults[option] if option in given else parameter.default
            default = [] if option == "exclude" else default
            parameters.append(inspect.Parameter(option, KEYWORD, default=default, annotation=annotation))
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = hints
    return wrapper
