"""The types of a progress display, such as `system.progress.progress_bar`, and the default, which shows none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Progress = Callable[[int, int | None], None]
"""Called with (done, total)."""
ProgressBar = Callable[[str], AbstractContextManager[Progress]]
"""Opens a progress display with this title."""


def no_count(done: int, total: int | None) -> None:
    """Show nothing."""


def no_progress(title: str) -> AbstractContextManager[Progress]:
    """Show nothing."""
    return nullcontext(no_count)
