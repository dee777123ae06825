"""Progress on stderr: a live display on a terminal, elsewhere a line after two seconds, then every ten."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from niels_gpt.system.console import format_duration, is_quiet
from niels_gpt.system.host_limits import startable

FIRST_LINE_AFTER = 2.0
"""Seconds until the first line is printed where stderr is not a terminal; what ends sooner prints none."""
SECONDS_BETWEEN_LINES = 10.0
"""How often a line is printed after that."""


@contextmanager
def progress_bar(title: str, unit: str = "") -> Iterator[Callable[[int, int | None], None]]:
    """Show how much is done; yield a function of (done, total), with None for an unknown total.

    On a terminal this is a bar. Elsewhere a line is printed after two seconds and then every ten, also while nothing is
    reported.
    """
    if not sys.stderr.isatty():
        line = _Counts(title, unit)
        with _lines(line.text):
            yield line.update
        return
    from rich.progress import Progress

    from niels_gpt.system.terminal import neutralized_terminal, rich_console

    console = rich_console(stderr=True, quiet=is_quiet())
    with Progress(console=console, transient=True) as bar, neutralized_terminal():  # rich has replaced both streams
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def status_line(text: str) -> Iterator[Callable[[str], None]]:
    """Show a text, and for how long it has been running; yield a function that replaces the text."""
    if not sys.stderr.isatty():
        began, current = time.monotonic(), text

        def update(text: str) -> None:
            nonlocal current
            current = text

        with _lines(lambda: f"{current} ({format_duration(time.monotonic() - began)} so far)"):
            yield update
        return
    from rich.markup import escape

    from niels_gpt.system.terminal import neutralized_terminal, rich_console

    console = rich_console(stderr=True, highlight=False, quiet=is_quiet())
    with console.status(escape(text)) as status, neutralized_terminal():
        yield lambda text: status.update(escape(text))


@contextmanager
def _lines(text: Callable[[], str]) -> Iterator[None]:
    """Print a line after FIRST_LINE_AFTER, then every SECONDS_BETWEEN_LINES, from a thread: the work may be one call.

    Prints nothing with --quiet, or if the limits of the process allow no further thread.
    """
    if is_quiet() or not startable(1):
        yield
        return
    ended = threading.Event()

    def run() -> None:
        wait = min(FIRST_LINE_AFTER, SECONDS_BETWEEN_LINES)
        while not ended.wait(wait):
            print(text(), file=sys.stderr, flush=True)
            wait = SECONDS_BETWEEN_LINES

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Counts:
    """The line of a `progress_bar`: what is done, of how much, and the time left where it is known."""

    def __init__(self, title: str, unit: str) -> None:
        self._title, self._unit = title, f" {unit}" if unit else ""
        self._began = time.monotonic()
        self._first: tuple[float, int] | None = None
        self._done = 0
        self._total: int | None = None

    def update(self, done: int, total: int | None) -> None:
        self._first = self._first or (time.monotonic(), done)
        self._done, self._total = done, total

    def text(self) -> str:
        now = time.monotonic()
        so_far = f"{format_duration(now - self._began)} so far"
        if self._first is None:
            return f"{self._title}: {so_far}"
        if not self._total:
            return f"{self._title}: {self._done:,}{self._unit}, {so_far}"
        line = f"{self._title}: {self._done:,} of {self._total:,}{self._unit} ({self._done / self._total:.0%})"
        began, first = self._first
        if self._done <= first:
            return f"{line}, {so_far}"
        return f"{line}, {format_duration((now - began) / (self._done - first) * (self._total - self._done))} left"
