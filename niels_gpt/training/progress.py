"""What the terminal shows while a run goes on: a live bar, or plain lines where output is piped."""

from __future__ import annotations

import os
import sys
import time
from typing import IO, Any, Protocol, cast

from niels_gpt.system.console import format_duration, short_number


class _Lasting:
    """A stream that falls silent when nobody reads it any more: a closed pipe, a lost terminal."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._hush()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._hush()

    def _hush(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # so that what is still in a buffer has a way to go
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lasting_output() -> IO[str]:
    """Standard output for those who go on when nobody listens."""
    return cast("IO[str]", _Lasting(sys.stdout))


def say(text: str) -> None:
    """Print a line, to whoever is there."""
    print(text, file=lasting_output(), flush=True)


class Reporter(Protocol):
    """What the loop tells while it runs."""

    def start(self, *, first: int, total: int) -> None:
        """Training begins at step `first` of `total`."""

    def step(self, line: dict[str, Any]) -> None:
        """An update is done; `line` is its entry in metrics.jsonl."""

    def note(self, text: str) -> None:
        """Something a person should read."""

    def close(self) -> None:
        """Nothing more comes."""


class Silent:
    """Says nothing: for libraries and tests."""

    def start(self, *, first: int, total: int) -> None: ...
    def step(self, line: dict[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class PlainLines:
    """A line every few seconds and at every evaluation; for pipes, files and CI."""

    def __init__(self, every: float = 5.0) -> None:
        self._every = every
        self._shown = float("-inf")
        self._clock = _Clock()

    def start(self, *, first: int, total: int) -> None:
        self._clock.start(first, total)

    def step(self, line: dict[str, Any]) -> None:
        self._clock.tick(line)
        last = self._clock.done == self._clock.total
        if "evals" in line or last or time.monotonic() - self._shown >= self._every:
            self._shown = time.monotonic()
            say(f"step {self._clock.done}/{self._clock.total}  {self._clock.text(line)}")

    def note(self, text: str) -> None:
        say(text)

    def close(self) -> None: ...


class Bar:
    """A live progress bar with loss, tokens/s and time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = Console(file=lasting_output())
        self._progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            console=self._console,
        )
        self._clock = _Clock()
        self._evals: dict[str, float] = {}

    def start(self, *, first: int, total: int) -> None:
        self._clock.start(first, total)
        self._task = self._progress.add_task("train", total=total, completed=first, text="")
        self._progress.start()

    def step(self, line: dict[str, Any]) -> None:
        self._clock.tick(line)
        self._evals = line.get("evals", self._evals)
        text = self._clock.text({**line, "evals": self._evals})
        self._progress.update(self._task, completed=self._clock.done, text=text)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._progress.stop()


def shown(evals: dict[str, float]) -> dict[str, float]:
    """The evaluations to look at; those with a / in their name are details, for the file."""
    return {name: value for name, value in evals.items() if "/" not in name}


SETTLING = 4
"""Updates at the beginning of a run that say little about the rest, the first nothing: models are compiled then."""


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
        if self.done <= self._first + SETTLING:
            self._since = self._last
        self.done = line["step"] + 1
        self._last = (time.monotonic(), self.done)
        rate = line["tokens_per_s"]
        self._rate = rate if self._rate == 0.0 else 0.9 * self._rate + 0.1 * rate

    def text(self, line: dict[str, Any]) -> str:
        parts = [f"loss {line['loss']:.3f}"]
        parts += [f"{name} {value:.3f}" for name, value in shown(line.get("evals") or {}).items()]
        parts.append(f"{short_number(self._rate)} tok/s")
        if "mfu" in line:
            parts.append(f"{line['mfu']:.0%} MFU")
        if "memory_gib" in line:
            parts.append(f"{line['memory_gib']:.1f} GiB")
        if self.done > self._first + 1 or self.done == self.total:
            began, step = self._since
            per_step = (time.monotonic() - began) / max(self.done - step, 1)
            parts.append(f"{format_duration(per_step * (self.total - self.done))} left")
        return "  ".join(parts)


def reporter() -> Reporter:
    """The live bar on a terminal, plain lines elsewhere."""
    return Bar() if sys.stdout.isatty() else PlainLines()
