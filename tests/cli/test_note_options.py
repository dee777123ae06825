"""The bundle of options that commands share."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from niels_gpt.cli.note_options import NoteOptions, takes_note_options
from niels_gpt.config import NotesConfig, RunConfig
from niels_gpt.config.yaml_file import with_data


def test_a_command_gets_the_options_as_one_object() -> None:
    got: list[Any] = []
    app = typer.Typer()

    @app.command()
    @takes_note_options
    def command(
        name: Annotated[str, typer.Argument()],
        note_options: NoteOptions = NoteOptions(),
        last: Annotated[int, typer.Option("--last")] = 3,
    ) -> None:
        got.append((name, note_options, last))

    given = ["x", "--exclude", "a", "--last", "4", "--exclude", "b", "--skip-templates", "--encoding-errors", "skip"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert got == [("x", NoteOptions(exclude=("a", "b"), skip_templates=True, encoding_errors="skip"), 4)]
    command("y")
    assert got[1] == ("y", NoteOptions(), 3)


def test_the_options_reach_the_config() -> None:
    config = with_data(RunConfig(), NoteOptions(exclude=("a",), links="text", encoding_errors="skip").data())
    assert config.data.notes == NotesConfig(exclude=("a",), links="text")
    assert config.data.encoding_errors == "skip"
    again = with_data(config, NoteOptions(exclude=("a", "b")).data())
    assert again.data.notes == NotesConfig(exclude=("a", "b"), links="text")
    assert with_data(config, NoteOptions().data()) == config
    assert NoteOptions(exclude=("b",), include_hidden=True).notes(config.data.notes) == NotesConfig(
        exclude=("a", "b"), links="text", include_hidden=True
    )


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--encoding-errors.*'ignore'"):
        NoteOptions(encoding_errors="ignore")
    with pytest.raises(ValueError, match=r"--links.*'drop'"):
        NoteOptions(links="drop")
    with pytest.raises(ValueError, match="--include-hidden"):
        NoteOptions(include_hidden=True).check_applies("wikitext", False)


def test_the_options_as_they_are_typed() -> None:
    options = NoteOptions(exclude=("a b", "c"), strip_front_matter=True, encoding_errors="replace")
    assert options.words() == [
        "--exclude",
        "a b",
        "--exclude",
        "c",
        "--strip-front-matter",
        "--encoding-errors",
        "replace",
    ]
    assert NoteOptions().words() == []
