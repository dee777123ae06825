"""Who shows the progress of a measurement, such as `system.progress.progress_bar`: nobody, by default."""

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
