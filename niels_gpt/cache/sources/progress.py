"""Progress of a build on stderr: tokens, rate and time left."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console

from niels_gpt.cache.writing.partial_build import OnProgress, Progress
from niels_gpt.system.console import format_duration, is_quiet, short_number

SECONDS_BETWEEN_LINES = 5.0
"""How often a line is printed where stderr is not a terminal."""


@contextlib.contextmanager
def show_progress(name: str) -> Iterator[OnProgress]:
    """Show the progress of a build: a live line on a terminal, otherwise a line every few seconds."""
    console = Console(stderr=True, highlight=False, quiet=is_quiet())
    line = ProgressLine(name)
    if console.is_terminal:
        with console.status(f"{name}: reading") as status:
            yield lambda progress: status.update(line.text(progress))
        return

    printed = time.monotonic()

    def on_progress(progress: Progress) -> None:
        nonlocal printed
        text = line.text(progress)
        if time.monotonic() - printed >= SECONDS_BETWEEN_LINES and not is_quiet():
            printed = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    yield on_progress


class ProgressLine:
    """Rate and time left since the first progress: the time to open a source or to resume a build does not count."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first: tuple[float, Progress] | None = None

    def text(self, progress: Progress) -> str:
        """The line for the current progress."""
        now = time.monotonic()
        began, first = self._first = self._first or (now, progress)
        done = f"{self._name}: {short_number(progress.tokens)} tokens of {progress.documents:,} documents"
        seconds = now - began
        if seconds <= 0:
            return done
        done += f", {short_number((progress.tokens - first.tokens) / seconds)} tok/s"
        if progress.share is not None and first.share is not None and progress.share > first.share:
            done += f", {format_duration(seconds * (1 - progress.share) / (progress.share - first.share))} left"
        return done
