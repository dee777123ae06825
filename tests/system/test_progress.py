"""Progress without a terminal: lines at intervals, none for quick work."""

from __future__ import annotations

import re
import time

import pytest

from niels_gpt.system import progress
from niels_gpt.system.progress import progress_bar, status_line


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.05)


def test_quick_work_prints_nothing(capsys):
    with progress_bar("auditing") as update, status_line("training") as show:
        update(1, 2)
        show("more")
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("often")
def test_counts_and_time_left(capsys):
    with progress_bar("auditing", "passages") as update:
        update(0, 4000)
        time.sleep(0.02)
        update(1000, 4000)
        time.sleep(0.25)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 6
    assert all(re.fullmatch(r"auditing: 1,000 of 4,000 passages \(25%\), \d:\d\d left", line) for line in lines)


@pytest.mark.usefixtures("often")
def test_lines_appear_while_nothing_is_reported(capsys):
    with progress_bar("auditing"):
        time.sleep(0.2)
    with progress_bar("reading", "texts") as update:
        update(7, None)
        time.sleep(0.2)
    with status_line("training"):
        time.sleep(0.2)
    text = capsys.readouterr().err
    assert "auditing: 0:00 so far" in text and "reading: 7 texts, 0:00 so far" in text
    assert "training (0:00 so far)" in text


@pytest.mark.usefixtures("often")
def test_no_line_after_the_block_even_after_an_error(capsys):
    with pytest.raises(KeyboardInterrupt), progress_bar("auditing"):
        raise KeyboardInterrupt
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().err == ""
