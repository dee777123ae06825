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
    def wait_for(line):
        end, text = time.monotonic() + 20, ""
        while line not in text:
            assert time.monotonic() < end, (line, text)
            time.sleep(0.02)
            text += capsys.readouterr().err

    with progress_bar("auditing"):
        wait_for("auditing: 0:0")
    with progress_bar("reading", "texts") as update:
        update(7, None)
        wait_for("reading: 7 texts, 0:0")
    with status_line("training"):
        wait_for("training (0:0")


@pytest.mark.usefixtures("often")
def test_no_line_after_the_block_even_after_an_error(capsys):
    with pytest.raises(KeyboardInterrupt), progress_bar("auditing"):
        raise KeyboardInterrupt
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_the_first_line_comes_soon(monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST_LINE_AFTER", 0.05)
    with status_line("training"):
        end, text = time.monotonic() + 5, ""
        while "training (0:0" not in text:
            assert time.monotonic() < end < progress.SECONDS_BETWEEN_LINES + time.monotonic()
            time.sleep(0.02)
            text += capsys.readouterr().err
        time.sleep(0.2)
    assert capsys.readouterr().err == ""  # the next one would come after ten seconds
