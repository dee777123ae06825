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


def wait_for(pattern, capsys, count=1):
    """Wait until so many lines match, and return all lines; the last is complete."""
    end, text = time.monotonic() + 60, ""
    while len(re.findall(f"^{pattern}$\n", text, re.MULTILINE)) < count:
        assert time.monotonic() < end, (pattern, text)
        time.sleep(0.02)
        text += capsys.readouterr().err
    return text.splitlines()


@pytest.mark.usefixtures("often")
def test_counts_and_time_left(capsys):
    early = r"auditing: 0 of 4,000 passages \(0%\), \d+:\d\d so far"  # on a busy machine
    late = r"auditing: 1,000 of 4,000 passages \(25%\), \d+:\d\d left"
    began = time.monotonic()
    with progress_bar("auditing", "passages") as update:
        update(0, 4000)
        update(1000, 4000)
        lines = wait_for(late, capsys, count=3)
    assert len(lines) <= (time.monotonic() - began) / progress.SECONDS_BETWEEN_LINES
    assert re.fullmatch(f"({early}\n)*({late}\n)+", "".join(f"{line}\n" for line in lines))


@pytest.mark.usefixtures("often")
def test_lines_appear_while_nothing_is_reported(capsys):
    with progress_bar("auditing"):
        wait_for(r"auditing: \d+:\d\d so far", capsys)
    with progress_bar("reading", "texts") as update:
        update(7, None)
        wait_for(r"reading: 7 texts, \d+:\d\d so far", capsys)
    with status_line("training"):
        wait_for(r"training \(\d+:\d\d so far\)", capsys)


@pytest.mark.usefixtures("often")
def test_no_line_after_the_block_even_after_an_error(capsys):
    with pytest.raises(KeyboardInterrupt), progress_bar("auditing"):
        raise KeyboardInterrupt
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_the_first_line_comes_soon(monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST_LINE_AFTER", 0.05)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 3600.0)
    with status_line("training"):
        wait_for(r"training \(\d+:\d\d so far\)", capsys)
        time.sleep(0.2)
    assert capsys.readouterr().err == ""  # the next one would come after an hour
