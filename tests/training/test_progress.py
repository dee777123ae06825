"""Progress output: plain lines, the live bar, and output whose reader is gone."""

import io
import os
import re
import sys
import time

import pytest

from niels_gpt.system import progress as system_progress
from niels_gpt.training import progress
from niels_gpt.training.progress import PlainLines, ProgressBar, Silent, reporter, say
from niels_gpt.training.tasks.base import SourceRow


@pytest.fixture
def clock(monkeypatch):
    """Time that moves only when it is set."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock.monotonic)
    return clock


def line(step, loss=2.0, **more):
    return {"step": step, "loss": loss, "lr": 0.1, "grad_norm": 1.0, "tokens_per_s": 1000.0, **more}


def test_plain_lines_come_every_few_seconds_at_evaluations_and_at_the_end(capsys, clock):
    lines = PlainLines(every=5.0)
    lines.start(first=0, total=20)
    for step in range(20):
        clock.now += 1.0
        lines.step(line(step, evals={"val_wiki": 3.25}) if step == 7 else line(step, loss=step / 4))
    lines.close()
    printed = capsys.readouterr().out.splitlines()
    assert [int(re.match(r"step (\d+)/20 ", text)[1]) for text in printed] == [1, 6, 8, 13, 18, 20]
    assert "val_wiki 3.250" in printed[2]
    assert "loss 4.750" in printed[-1]
    assert "1k tok/s" in printed[0]
    assert "left" not in printed[0]
    assert "0:14 left" in printed[1]
    assert "0:02 left" in printed[-2]
    assert "0:00 left" in printed[-1]


def test_the_time_left_of_a_resumed_run_counts_only_its_steps(capsys, clock):
    lines = PlainLines(every=0.0)
    lines.start(first=90, total=100)
    for step in (90, 91):
        clock.now += 2.0
        lines.step(line(step))
    assert "0:16 left" in capsys.readouterr().out
    assert "\x1b" not in capsys.readouterr().out


def test_the_time_left_ignores_compilation_in_the_first_steps(capsys, clock):
    lines = PlainLines(every=0.0)
    lines.start(first=0, total=1000)
    for step, seconds in enumerate([30.0, 0.5, 0.5, 5.0, 0.5, *[0.5] * 195]):
        clock.now += seconds
        lines.step(line(step))
    printed = capsys.readouterr().out.splitlines()
    assert "left" not in printed[0]
    assert "8:19 left" in printed[1]
    assert all("left" in text for text in printed[1:])
    assert "6:40 left" in printed[-1]


def test_the_only_step_of_a_run_has_no_time_left(capsys, clock):
    lines = PlainLines()
    lines.start(first=4, total=5)
    clock.now += 7.0
    lines.step(line(4))
    assert "0:00 left" in capsys.readouterr().out


def test_notes_are_printed_verbatim_and_silent_prints_nothing(capsys):
    for kind in (Silent, PlainLines):
        kind().note("resuming runs/[a] at step 3")
    assert capsys.readouterr().out == "resuming runs/[a] at step 3\n"


@pytest.fixture
def closed_pipe(monkeypatch):
    """Standard output is a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        with pytest.raises(BrokenPipeError):
            os.write(writer, b"x")
        monkeypatch.setattr(sys, "stdout", stream)
        yield stream
        print("more", flush=True)  # other output is discarded too


@pytest.mark.parametrize("kind", [PlainLines, ProgressBar])
def test_a_reporter_survives_a_closed_pipe(closed_pipe, kind, monkeypatch):
    monkeypatch.setattr(closed_pipe, "isatty", lambda: kind is ProgressBar, raising=False)
    say("anyone?")
    reporter = kind()
    reporter.note("resuming")
    reporter.start(first=0, total=2)
    for step in range(2):
        reporter.step(line(step, evals={"val_wiki": 3.0}))
    reporter.close()


def test_long_work_between_steps_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(system_progress, "FIRST_LINE_AFTER", 0.01)
    lines = PlainLines()
    lines.start(first=0, total=1)
    with lines.working("evaluating"):
        end, text = time.monotonic() + 60, ""
        while "evaluating (" not in text:
            assert time.monotonic() < end
            time.sleep(0.02)
            text += capsys.readouterr().err


def test_the_bar_shows_the_loss_again_after_other_work(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "140")
    bar = ProgressBar()
    bar.start(first=0, total=1)
    bar.step(line(0))

    def text():
        return bar._progress.tasks[0].fields["text"]

    loss = text()
    with bar.working("writing a sample"):
        assert text() == "writing a sample"
    assert text() == loss and "loss" in loss
    bar.close()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal_and_plain_lines_in_a_pipe(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(reporter(), PlainLines)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert isinstance(reporter(), ProgressBar)


def test_the_bar_shows_loss_evaluation_and_speed(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    bar = ProgressBar()
    bar.note("resuming [a] at step 3")
    bar.start(first=3, total=6)
    bar.step(line(3, evals={"val_wiki": 3.25}))
    bar.step(line(4, loss=1.75))
    bar.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert "resuming [a] at step 3" in text
    assert "5/6" in text
    assert "loss 1.750" in text
    assert "val_wiki 3.250" in text  # the last evaluation stays
    assert "1k tok/s" in text


def on_terminal(monkeypatch, width):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    return screen


def lines_on(screen):
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).strip())


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (80, "loss 5.997  0:00 left  val_roam 6.484  9.42k tok/s"),
        (79, "loss 5.997  0:00 left  val_roam 6.484"),
        (50, "loss 5.997"),
        (30, ""),
    ],
)
def test_the_bar_and_the_count_stay_on_a_narrow_terminal(monkeypatch, clock, width, shown):
    screen = on_terminal(monkeypatch, width)
    bar = ProgressBar()
    bar.start(first=1402, total=1404)
    evals = {"val_roam": 6.484, "val_pretrain": 6.484 * (1 + 1e-15)}
    for step in (1402, 1403):
        bar.step(line(step, loss=5.997, evals=evals) | {"tokens_per_s": 9420.0})
    bar.close()
    last = lines_on(screen)[-1]
    assert len(last) <= width
    title, drawn, count, *text = last.split(maxsplit=3)
    assert (title, set(drawn), count, "".join(text)) == ("training", {"━"}, "1404/1404", shown)
    assert len(drawn) >= min(10, width - 21)


def test_equal_evaluations_are_printed_once(capsys, clock):
    lines = PlainLines(every=0.0)
    lines.start(first=0, total=3)
    evals = {"val_roam": 6.484, "val_pretrain": 6.484, "val_sft": 6.4841}
    lines.step(line(0, evals=evals))
    assert capsys.readouterr().out == "step 1/3  loss 2.000  val_roam 6.484  val_sft 6.484  1k tok/s\n"
    assert len(evals) == 3  # metrics.jsonl gets all of them


def test_rates_are_smoothed_and_details_stay_in_the_file(capsys, clock):
    lines = PlainLines(every=0.0)
    lines.start(first=0, total=3)
    evals = {"splice": 2.5, "loss/note.md": 9.0}
    lines.step(line(0, mfu=0.314, memory_gib=12.345, evals=evals))
    lines.step(line(1) | {"tokens_per_s": 2000.0})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step 1/3  loss 2.000  splice 2.500  1k tok/s  31% MFU  12.3 GiB"
    assert "1.1k tok/s" in second  # 0.9 * 1000 + 0.1 * 2000


class Data:
    def __init__(self, path):
        self.path = str(path)

    def describe(self):
        return [SourceRow("roam", 0.25, 1234, 56, "B", 1000, self.path)]

    def notes(self):
        return ["a note"]


def test_sources_are_printed_as_a_table(capsys):
    for kind in (PlainLines, ProgressBar):
        kind().data(Data("[notes] (built)"))
        header, row, note = capsys.readouterr().out.splitlines()
        assert header.split() == ["source", "share", "train", "held", "out", "documents", "from"]
        assert row.split() == ["roam", "25.0%", "1.23kB", "56B", "1,000", "[notes]", "(built)"]
        assert note == "a note"


def test_paths_are_short_and_cut_in_the_middle_on_a_terminal(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    path = "/data/" + "x" * 100 + "/cache/pretrain/roam"
    PlainLines().data(Data(path))
    assert path in capsys.readouterr().out.splitlines()[1]
    PlainLines().data(Data(tmp_path / "runs/notes/cache"))
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "runs/notes/cache"
    screen = on_terminal(monkeypatch, 80)
    ProgressBar().data(Data(path))
    _, row, note = lines_on(screen)
    assert len(row) == 80 and note == "a note"
    assert re.search(r" /data/x+….*/pretrain/roam$", row)
