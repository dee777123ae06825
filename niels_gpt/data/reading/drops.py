"""What a loader leaves out: counted by reason, said once at the end."""

from __future__ import annotations

import logging

log = logging.getLogger("niels_gpt.data")


class Drops:
    """Counts what is left out, in the caller's dict if there is one.

    A context manager: on leaving it logs one line, if anything was left out.
    """

    def __init__(self, source: str, stats: dict[str, int] | None, *, unit: str = "row") -> None:
        self.source, self.unit = source, unit
        self.counts: dict[str, int] = {}
        self._stats = stats if stats is not None else {}

    def add(self, reason: str, number: int = 1) -> None:
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
            log.warning("%s: left out %d %s: %s", self.source, total, unit, listed)


def is_text(value: object) -> bool:
    """Whether a value is text that can be written as utf-8: not a number, no half of a surrogate pair."""
    if not isinstance(value, str):
        return False
    if value.isascii():
        return True
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
