"""Count the rows that a loader drops by reason, and log them once at the end."""

from __future__ import annotations

import logging

log = logging.getLogger("niels_gpt.data")


class Drops:
    """Count dropped rows by reason, also in the caller's `stats`.

    A context manager: on exit it logs one line if anything was dropped.
    """

    def __init__(self, source: str, stats: dict[str, int] | None, *, unit: str = "row") -> None:
        self.source, self.unit = source, unit
        self.counts: dict[str, int] = {}
        self._stats = stats if stats is not None else {}

    def add(self, reason: str, number: int = 1) -> None:
        """Count `number` rows dropped for a reason."""
        if number:
            self.counts[reason] = self.counts.get(reason, 0) + number
            self._stats[reason] = self._stats.get(reason, 0) + number

    def __enter__(self) -> Drops:
        return self

    def __exit__(self, *_: object) -> None:
        if self.counts:
            listed = ", ".join(f"{number} {reason}" for reason, number in self.counts.items())
            total = sum(self.counts.values())
            unit = self.unit if total == 1 else " or ".join(f"{word}s" for word in self.unit.split(" or "))
            log.warning("%s: dropped %d %s: %s", self.source, total, unit, listed)


def text_problem(value: object) -> str | None:
    """Return the reason to drop a text (not a string, blank, or not utf-8), or None."""
    if not isinstance(value, str):
        return "without text"
    if not value or value.isspace():
        return "empty"
    return None if is_text(value) else "not utf-8"


def is_text(value: object) -> bool:
    """Whether a value is a string that can be encoded as utf-8 (it has no lone surrogate)."""
    if not isinstance(value, str):
        return False
    if value.isascii():
        return True
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
