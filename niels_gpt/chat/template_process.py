"""A Jinja chat template, rendered in a separate process with limits on time, memory and files."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from niels_gpt.system.untrusted_files import LimitedProcess, LimitExceeded

WORKER = Path(__file__).with_name("template_worker.py")


class TemplateRefused(ValueError):
    """A template that raises an error for a conversation, or exceeds its limits."""


class TemplateProcess:
    """Renders one template. The process starts at the first call, and ends with this object."""

    def __init__(self, source: str, *, where: str) -> None:
        self.source, self.where = source, where
        self._lock = threading.Lock()
        self._process: LimitedProcess | None = None

    def render(self, calls: Sequence[Mapping[str, Any]], now: str) -> list[str]:
        """Return the text of each call, whose variables are given; `now` is what `strftime_now` shows (ISO).

        Raises ValueError for a syntax error, and TemplateRefused if the template raises one or exceeds its limits.
        """
        try:
            with self._lock:
                if self._process is None or not self._process.usable:
                    self._process = self._start()
                answers = self._process.ask([{"variables": dict(call), "now": now} for call in calls])
        except LimitExceeded as err:
            raise TemplateRefused(f"the chat template of {self.where} refuses: {err}") from None
        for answer in answers:
            if "error" in answer:
                raise TemplateRefused(f"the chat template of {self.where} refuses: {_short(answer['error'])}")
        return [answer["text"] for answer in answers]

    def _start(self) -> LimitedProcess:
        process = LimitedProcess(WORKER)
        error = process.ask(self.source)
        if error is not None:
            process.stop()
            raise ValueError(f"the chat template of {self.where} {_short(error)}")
        return process


def _short(text: str) -> str:
    """One line of at most 300 characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= 300 else f"{line[:299]}…"
