"""Tables on the terminal and through a pipe."""

import pytest
from rich.table import Table

from niels_gpt.cli.tables import show_table


def table():
    made = Table(box=None, pad_edge=False)
    made.add_column("name")
    made.add_row(" ".join(["word"] * 26))  # 129 characters
    return made


@pytest.mark.parametrize(("width", "lines"), [({}, 1), ({"width": 129}, 1), ({"width": 128}, 2)])
def test_a_pipe_has_the_width_asked_for(capsys, monkeypatch, width, lines):
    monkeypatch.setenv("COLUMNS", "30")
    show_table(table(), **width)
    assert len(capsys.readouterr().out.splitlines()) == 1 + lines


def test_a_terminal_keeps_its_own_width(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "65")
    show_table(table())
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2
