"""Progress output of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from niels_gpt.runs.metrics import headline_evals as headline_evals
from niels_gpt.system.console import format_duration, is_quiet, short_number
from niels_gpt.system.files import display_path
from niels_gpt.system.progress import status_line

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement

    from niels_gpt.training.tasks.base import DataTask


class _PipeSafeStream:
    """A stream that discards output once its reader is gone: a closed pipe, a lost terminal."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._discard()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._discard()

    @property
    def rich_proxied_file(self) -> _PipeSafeStream:
        """What rich writes to instead: see `terminal`."""
        return _PipeSafeStream(getattr(self._stream, "rich_proxied_file", self._stream))

    def _discard(self) -> None:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, self._stream.fileno())  # buffered text goes there too, so a later flush does not fail
        os.close(devnull)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def pipe_safe_stdout() -> IO[str]:
    """Standard output that never fails: a run continues after its terminal or pipe is closed."""
    return cast("IO[str]", _PipeSafeStream(sys.stdout))


def say(text: str) -> None:
    """Print a line to `pipe_safe_stdout`."""
    print(text, file=pipe_safe_stdout(), flush=True)


class Reporter(Protocol):
    """Receives the progress of a run."""

    def data(self, task: DataTask) -> None:
        """The training data is loaded."""

    def start(self, *, first: int, total: int) -> None:
        """Training starts at step `first` of `total`."""

    def step(self, line: dict[str, Any]) -> None:
        """A step is done; `line` is its entry in metrics.jsonl."""

    def note(self, text: str) -> None:
        """A message for the user."""

    def sample(self, step: int, prompt: str, text: str) -> None:
        """The model continued the sample prompt after a step."""

    def working(self, text: str) -> AbstractContextManager[object]:
        """What the run does in the block, between two steps: it may take long."""

    def close(self) -> None:
        """The run has ended."""


class Silent:
    """Prints nothing: for library use and tests."""

    def data(self, task: DataTask) -> None: ...
    def start(self, *, first: int, total: int) -> None: ...
    def step(self, line: dict[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def sample(self, step: int, prompt: str, text: str) -> None: ...
    def close(self) -> None: ...

    def working(self, text: str) -> AbstractContextManager[object]:
        return nullcontext()


class WarningsOnly(Silent):
    """Prints warnings on stderr and nothing else: for --quiet."""

    def note(self, text: str) -> None:
        if text.startswith("warning"):
            print(text, file=sys.stderr, flush=True)


class PlainLines:
    """Prints a line every few seconds and at every evaluation: for pipes, files and CI."""

    def __init__(self, every: float = 5.0, *, show_samples: bool = False) -> None:
        self._every, self._show_samples = every, show_samples
        self._printed = float("-inf")
        self._clock = _Clock()

    def data(self, task: DataTask) -> None:
        show_sources(task)

    def start(self, *, first: int, total: int) -> None:
        self._clock.start(first, total)

    def step(self, line: dict[str, Any]) -> None:
        self._clock.tick(line)
        last = self._clock.done == self._clock.total
        if "evals" in line or last or time.monotonic() - self._printed >= self._every:
            self._printed = time.monotonic()
            fields = [f"step {self._clock.done}/{self._clock.total}", *self._clock.fields(line), self._clock.left()]
            say("  ".join(filter(None, fields)))

    def note(self, text: str) -> None:
        say(text)

    def sample(self, step: int, prompt: str, text: str) -> None:
        if self._show_samples:
            say(sample_line(step, prompt, text))

    def working(self, text: str) -> AbstractContextManager[object]:
        return status_line(text)

    def close(self) -> None: ...


NARROWEST_BAR = 10
"""Columns of the terminal that the bar keeps, whatever stands beside it."""


class ProgressBar:
    """A live progress bar with loss, time left and tokens/s; on a narrow terminal, the fields that fit."""

    def __init__(self, *, show_samples: bool = False) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        from niels_gpt.system.terminal import rich_console

        self._show_samples = show_samples
        self._console = rich_console(file=pipe_safe_stdout())
        self._progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),  # only the bar shrinks
            TextColumn("{task.fields[text]}", markup=False),
            console=self._console,
        )
        self._clock = _Clock()
        self._evals: dict[str, float] = {}

    def data(self, task: DataTask) -> None:
        show_sources(task)

    def start(self, *, first: int, total: int) -> None:
        self._clock.start(first, total)
        self._task = self._progress.add_task("train", total=total, completed=first, text="")
        self._progress.start()

    def step(self, line: dict[str, Any]) -> None:
        self._clock.tick(line)
        self._evals = line.get("evals", self._evals)
        loss, *more = self._clock.fields({**line, "evals": self._evals})
        text = self._fit([loss, self._clock.left(), *more])
        self._progress.update(self._task, completed=self._clock.done, text=text)

    def _fit(self, fields: list[str]) -> str:
        """Join the first fields that fit beside the title, the bar and the count; drop the others."""
        count = 2 * len(str(self._clock.total)) + 1
        free = self._console.width - len("training") - NARROWEST_BAR - count - 3  # a space between two columns
        text = ""
        for field in filter(None, fields):
            longer = f"{text}  {field}" if text else field
            if len(longer) > free:
                break
            text = longer
        return text

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def sample(self, step: int, prompt: str, text: str) -> None:
        if self._show_samples:
            self._console.print(sample_line(step, prompt, text), highlight=False, markup=False, style="green")

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        shown = self._progress.tasks[self._task].fields["text"]
        self._progress.update(self._task, text=text)
        yield
        self._progress.update(self._task, text=shown)

    def close(self) -> None:
        self._progress.stop()


SAMPLE_CHARACTERS = 100
"""Most characters of a sample that are shown."""


def sample_line(step: int, prompt: str, text: str) -> str:
    """A sample in one line: the question of a chat and its answer, or a text and its continuation."""
    question = re.sub(r"^user: |\nassistant: ?$", "", prompt)
    shown = " ".join(text.split())
    shown = shown if len(shown) <= SAMPLE_CHARACTERS else shown[:SAMPLE_CHARACTERS].rstrip() + " ..."
    return f"  step {step:>5}  {question.strip()}  ->  {shown}"


def show_sources(task: DataTask) -> None:
    """Print the table of a task's sources and its notes. On a terminal, paths are cut to its width."""
    from rich.markup import escape
    from rich.table import Table

    from niels_gpt.system.terminal import rich_console

    console = rich_console(highlight=False, file=pipe_safe_stdout())
    if not console.is_terminal:
        console.width = 10_000  # nothing is cut or wrapped; the table is as wide as its text

    table = Table(box=None, pad_edge=False)
    for name, justify in (("source", "left"), ("share", "right"), ("train", "right"), ("held out", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("documents", justify="right")
    table.add_column("from")
    for row in task.describe():
        sizes = (f"{short_number(size)}{row.unit}" for size in (row.train, row.held_out))
        path = _CutInTheMiddle(display_path(row.path))
        table.add_row(escape(row.source), f"{row.share:.1%}", *sizes, f"{row.documents:,}", path)
    console.print(table)
    for note in task.notes():
        say(note)


class _CutInTheMiddle:
    """A cell of a table whose text loses its middle where the column is too narrow: runs/no…/pretrain/roam."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        text, width = self._text, options.max_width
        if len(text) > width:
            end = width // 2
            text = f"{text[: max(width - end - 1, 0)]}…{text[len(text) - end :]}"
        yield Text(text, no_wrap=True, overflow="ellipsis")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.cells import cell_len
        from rich.measure import Measurement

        return Measurement(1, cell_len(self._text))


def _distinct(evals: dict[str, float]) -> dict[str, float]:
    """The evaluations without those that equal an earlier one, as the mean over a single source does."""
    found: dict[str, float] = {}
    for name, value in evals.items():
        if not any(math.isclose(value, earlier) for earlier in found.values()):
            found[name] = value
    return found


SETTLING_STEPS = 4
"""The first steps, left out of the time estimate: they include compilation and are not typical."""


class _Clock:
    """Smooths tokens/s and estimates the time left."""

    def __init__(self) -> None:
        self.done = self.total = 0
        self._rate = 0.0

    def start(self, first: int, total: int) -> None:
        self.done, self.total = first, total
        self._first = first
        self._since = self._last = (time.monotonic(), first)

    def tick(self, line: dict[str, Any]) -> None:
        if self.done <= self._first + SETTLING_STEPS:
            self._since = self._last
        self.done = line["step"] + 1
        self._last = (time.monotonic(), self.done)
        rate = line["tokens_per_s"]
        self._rate = rate if self._rate == 0.0 else 0.9 * self._rate + 0.1 * rate

    def fields(self, line: dict[str, Any]) -> list[str]:
        """Return what a line of metrics.jsonl says, the most important first."""
        evals = _distinct(headline_evals(line.get("evals") or {}))
        fields = [f"loss {line['loss']:.3f}", *(f"{name} {value:.3f}" for name, value in evals.items())]
        fields.append(f"{short_number(self._rate)} tok/s")
        if "mfu" in line:
            fields.append(f"{line['mfu']:.0%} MFU")
        if "memory_gib" in line:
            fields.append(f"{line['memory_gib']:.1f} GiB")
        return fields

    def left(self) -> str:
        """Return the time left; empty after the first step, from which it cannot be told."""
        if self.done <= self._first + 1 and self.done != self.total:
            return ""
        began, step = self._since
        per_step = (time.monotonic() - began) / max(self.done - step, 1)
        return f"{format_duration(per_step * (self.total - self.done))} left"


def reporter(*, show_samples: bool = False) -> Reporter:
    """The live bar on a terminal, plain lines elsewhere; only warnings with --quiet."""
    if is_quiet():
        return WarningsOnly()
    return (ProgressBar if sys.stdout.isatty() else PlainLines)(show_samples=show_samples)
