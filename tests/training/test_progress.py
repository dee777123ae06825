import io
import os
import re
import sys

import pytest

from niels_gpt.system.console import format_duration, short_number
from niels_gpt.training import progress
from niels_gpt.training.progress import (
    Bar,
    PlainLines,
    Silent,
    reporter,
    say,
)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (1000, "1k"),
        (1234, "1.23k"),
        (12_345, "12.3k"),
        (123_456, "123k"),
        (1_000_000, "1M"),
        (3_210_000, "3.21M"),
        (999_999, "1M"),
        (999_999_999, "1G"),
        (2.5e9, "2.5G"),
    ],
)
def test_count(number, text):
    assert short_number(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (41, "0:41"),
        (59.6, "1:00"),
        (187, "3:07"),
        (3599.4, "59:59"),
        (3599.6, "1:00:00"),
        (4350, "1:12:30"),
        (360_000, "100:00:00"),
    ],
)
def test_duration(seconds, text):
    assert format_duration(seconds) == text


@pytest.fixture
def clock(monkeypatch):
    """Time that moves only when told."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(progress.time, "monotonic", made.monotonic)
    return made


def line(step, loss=2.0, **more):
    return {"step": step, "loss": loss, "lr": 0.1, "grad_norm": 1.0, "tokens_per_s": 1000.0, **more}


def test_plain_lines_come_every_few_seconds_at_evaluations_and_at_the_end(capsys, clock):
    lines = PlainLines(every=5.0)
    lines.start(first=0, total=20)
    for step in range(20):
        clock.now += 1.0
        lines.step(line(step, evals={"val_wiki": 3.25}) if step == 7 else line(step, loss=step / 4))
    lines.close()
    shown = capsys.readouterr().out.splitlines()
    assert [int(re.match(r"step (\d+)/20 ", text)[1]) for text in shown] == [1, 6, 8, 13, 18, 20]
    assert "val_wiki 3.250" in shown[2]
    assert "loss 4.750" in shown[-1]
    assert "1k tok/s" in shown[0]
    assert "left" not in shown[0]
    assert "0:14 left" in shown[1]
    assert "0:02 left" in shown[-2]
    assert "0:00 left" in shown[-1]


def test_the_time_left_of_a_resumed_run_counts_its_own_steps(capsys, clock):
    lines = PlainLines(every=0.0)
    lines.start(first=90, total=100)
    for step in (90, 91):
        clock.now += 2.0
        lines.step(line(step))
    assert "0:16 left" in capsys.readouterr().out
    assert "\x1b" not in capsys.readouterr().out


def test_what_is_compiled_at_first_does_not_lengthen_the_time_left(capsys, clock):
    lines = PlainLines(every=0.0)
    lines.start(first=0, total=1000)
    for step, seconds in enumerate([30.0, 0.5, 0.5, 5.0, 0.5, *[0.5] * 195]):
        clock.now += seconds
        lines.step(line(step))
    shown = capsys.readouterr().out.splitlines()
    assert "left" not in shown[0]
    assert "8:19 left" in shown[1]
    assert all("left" in text for text in shown[1:])
    assert "6:40 left" in shown[-1]


def test_the_only_step_of_a_run_leaves_nothing(capsys, clock):
    lines = PlainLines()
    lines.start(first=4, total=5)
    clock.now += 7.0
    lines.step(line(4))
    assert "0:00 left" in capsys.readouterr().out


def test_notes_are_shown_as_they_are(capsys):
    PlainLines().note("resuming runs/[a] at step 3")
    assert capsys.readouterr().out == "resuming runs/[a] at step 3\n"


def test_silent_says_nothing(capsys):
    silent = Silent()
    silent.start(first=0, total=2)
    silent.step(line(0))
    silent.note("x")
    silent.close()
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def nobody(monkeypatch):
    """Standard output is a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        with pytest.raises(BrokenPipeError):
            os.write(writer, b"x")
        monkeypatch.setattr(sys, "stdout", stream)
        yield stream
        print("more", flush=True)  # and so does everything else fall silent


@pytest.mark.parametrize("make", [PlainLines, Bar])
def test_a_reporter_whose_output_is_gone_falls_silent(nobody, make, monkeypatch):
    monkeypatch.setattr(nobody, "isatty", lambda: make is Bar, raising=False)
    made = make()
    made.note("resuming")
    made.start(first=0, total=2)
    for step in range(2):
        made.step(line(step, evals={"val_wiki": 3.0}))
    made.close()


def test_what_is_said_to_nobody(nobody):
    say("anyone?")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal_and_plain_lines_in_a_pipe(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(reporter(), PlainLines)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert isinstance(reporter(), Bar)


def test_the_bar_shows_loss_evaluation_and_speed(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    bar = Bar()
    bar.note("resuming [a] at step 3")
    bar.start(first=3, total=6)
    bar.step(line(3, evals={"val_wiki": 3.25}))
    bar.step(line(4, loss=1.75))
    bar.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert "resuming [a] at step 3" in shown
    assert "5/6" in shown
    assert "loss 1.750" in shown
    assert "val_wiki 3.250" in shown  # the last evaluation stays
    assert "1k tok/s" in shown
