"""Progress of a build on stderr: tokens, rate and time left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from niels_gpt.cache.writing.partial_build import OnProgress, Progress
from niels_gpt.system.console import format_duration, short_number
from niels_gpt.system.progress import status_line


@contextlib.contextmanager
def show_progress(name: str) -> Iterator[OnProgress]:
    """Show the progress of a build: a live line on a terminal, otherwise a line now and then."""
    line = ProgressLine(name)
    with status_line(f"{name}: reading") as show:
        yield lambda progress: show(line.text(progress))


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
        if seconds < 1:  # results come in bursts: a rate over less says nothing
            return done
        done += f" ({progress.workers})" if progress.workers else ""
        done += f", {short_number((progress.tokens - first.tokens) / seconds)} tok/s"
        if progress.share is not None and first.share is not None and progress.share > first.share:
            done += f", {format_duration(seconds * (1 - progress.share) / (progress.share - first.share))} left"
        return done
