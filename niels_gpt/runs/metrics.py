"""The lines of metrics.jsonl: one JSON object per step, and a checksum that JSON readers do not see.

A line ends with 32 blanks: the bits of the CRC-32 of the text before them, a space for 0 and a tab for 1. JSON allows
white space there. As a key, the checksum would differ between equal runs, because a line also contains its speed.
"""

from __future__ import annotations

import json
import warnings
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.system.console import plural
from niels_gpt.system.json_text import parse_json

BLANKS = 32
"""Number of blanks at the end of a line. An edit by hand is accepted if they are deleted."""
NUMBERS = ("lr", "grad_norm", "tokens_per_s")
"""Fields of a line that are numbers, if it has them."""
_TO_BLANKS = bytes.maketrans(b"01", b" \t")


class Metrics(NamedTuple):
    """The intact lines of a file, without their checksums, and where the others are."""

    lines: list[dict[str, Any]]
    damaged: list[int]
    """Numbers of the damaged lines, from 1."""
    torn: bool
    """Whether the last line is incomplete: the process was killed, or is writing it."""


def encode_line(line: dict[str, Any]) -> bytes:
    """A line with its checksum and a line end."""
    text = json.dumps(line).encode("ascii")
    return text + _checksum(text) + b"\n"


def _checksum(text: bytes) -> bytes:
    return format(zlib.crc32(text), f"0{BLANKS}b").encode("ascii").translate(_TO_BLANKS)


def parse_line(text: bytes) -> dict[str, Any] | None:
    """A line; None if it is damaged, or is not the line of a step.

    Accepts a line without a checksum: one of an older version.
    """
    if not _checksum_fits(text):
        return None
    try:
        line = parse_json(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and _is_step(line) else None


def _is_step(line: dict[str, Any]) -> bool:
    """Whether the fields that readers use have their types; a line without a checksum may hold anything."""
    evals = line.get("evals", {})
    return (
        _is_number(line.get("step"), int)
        and _is_number(line.get("loss"))
        and all(_is_number(line.get(name, 0.0)) for name in NUMBERS)
        and isinstance(evals, dict)
        and all(map(_is_number, evals.values()))
    )


def _checksum_fits(text: bytes) -> bool:
    """Whether a line has the checksum of its text, or none."""
    before = text.rstrip(b" \t")
    return len(before) == len(text) or text[len(before) :] == _checksum(before)


def read_metrics(path: Path, *, containing: bytes = b"") -> Metrics:
    """The lines of a file; none if it does not exist.

    containing: return only the last line and those with these bytes. The others are not parsed, which takes most of
    the time; their checksums are compared.
    """
    data = path.read_bytes() if path.is_file() else b""
    texts = data.removesuffix(b"\n").split(b"\n") if data else []
    lines: list[dict[str, Any]] = []
    damaged: list[int] = []
    for number, text in reversed(list(enumerate(texts, 1))):
        if lines and containing not in text and _checksum_fits(text):
            continue
        line = parse_line(text)
        if line is None:
            damaged.insert(0, number)
        else:
            lines.append(line)
    torn = bool(damaged) and damaged[-1] == len(texts) and not data.endswith(b"\n")
    return Metrics(lines[::-1], damaged[:-1] if torn else damaged, torn)


def warn_of_damage(path: Path, metrics: Metrics) -> None:
    """Warn once of lines that were skipped."""
    found = []
    if metrics.damaged:
        numbers = ", ".join(map(str, metrics.damaged[:5])) + (", ..." if len(metrics.damaged) > 5 else "")
        found.append(f"{plural(len(metrics.damaged), 'damaged line')} (line {numbers})")
    if metrics.torn:
        found.append("an incomplete last line")
    if found:
        warnings.warn(f"{path} has {' and '.join(found)}: skipped; the checkpoints are not affected", stacklevel=1)


def _is_number(value: Any, kind: Any = int | float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
