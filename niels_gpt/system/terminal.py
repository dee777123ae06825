"""Text on a terminal: control characters of notes, models and file names are shown, not obeyed.

A note or a model can contain sequences that move the cursor, rename the window or fill the clipboard. While a command
runs, everything that is printed to a terminal passes through `neutralize`; only rich, which draws tables and bars with
such sequences, writes past it, and `rich_console` neutralizes the text that it is given. A pipe or a file receives
every character as it is.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_BIDI = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = (*(code for code in range(0x20) if code not in b"\t\n"), *range(0x7F, 0xA0))
_SHOWN = {code: f"\\x{code:02x}" for code in _CONTROLS} | {code: f"\\u{code:04x}" for code in _BIDI}


def neutralize(text: str) -> str:
    r"""Return text with control characters and bidirectional overrides as escapes such as \x1b; keep \n, \t, \r\n."""
    return text.replace("\r\n", "\n").translate(_SHOWN)


class _TerminalStream:
    """A terminal that shows control characters instead of obeying them."""

    def __init__(self, stream: IO[str]) -> None:
        self.rich_proxied_file = stream  # rich writes there: its sequences are its own
        self._overwrites = stream is sys.stderr

    def write(self, text: str) -> int:
        # tqdm begins each line of a progress bar on stderr with \r.
        start = "\r" if self._overwrites and text.startswith("\r") else ""
        self.rich_proxied_file.write(start + neutralize(text[len(start) :]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextlib.contextmanager
def neutralized_terminal() -> Iterator[None]:
    """Neutralize what is printed in the block to stdout and stderr, where they are terminals."""
    replaced: dict[str, Any] = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream.isatty() and not isinstance(stream, _TerminalStream):
            replaced[name] = stream
            setattr(sys, name, _TerminalStream(stream))
    try:
        yield
    finally:
        for name, stream in replaced.items():
            setattr(sys, name, stream)


def show_cursor() -> None:
    """Show the cursor, which a live display hides, before an exit that skips the clean-up. Safe in a signal handler."""
    for stream in (sys.__stderr__, sys.__stdout__):
        if stream is not None and not stream.closed and stream.isatty() and os.environ.get("TERM") != "dumb":
            with contextlib.suppress(OSError):
                os.write(stream.fileno(), b"\x1b[?25h")
            return


def rich_console(**options: Any) -> Console:
    """A rich Console that neutralizes text on a terminal; the options are those of `rich.console.Console`."""
    console: Console = _console_class()(**options)
    return console


@functools.cache
def _console_class() -> Any:
    from rich.console import Console
    from rich.file_proxy import FileProxy
    from rich.segment import Segment

    class SafeConsole(Console):
        @property
        def file(self) -> IO[str]:
            file: Any = super().file
            while isinstance(file, FileProxy | _TerminalStream):  # a live display adds a FileProxy
                file = file.rich_proxied_file
            return file

        @file.setter
        def file(self, new_file: IO[str]) -> None:
            self._file = new_file

        def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
            for segment in super().render(*arguments, **options):
                if segment.control or not self.is_terminal:
                    yield segment
                else:
                    yield Segment(neutralize(segment.text), segment.style)

    return SafeConsole
