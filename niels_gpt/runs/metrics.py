"""The lines of metrics.jsonl: one JSON object per step, and a checksum that JSON readers do not see.

A line ends with 32 blanks: the bits of the CRC-32 of the text before them, a space for 0 and a tab for 1. JSON allows
white space there. As a key, the checksum would differ between equal runs, because a line also contains its speed.
"""

from __future__ import annotations

import json
import math
import warnings
import zlib
from collections.abc import Mapping
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


# --- evaluations ---------------------------------------------------------------------------------


def eval_name(source: str, split: str = "val") -> str:
    """The name of a source's held-out set in metrics: `val_SOURCE`, and `val_chat` for primer's dialogues.

    Tasks over tokens add the means over their sources, `val_pretrain` and `val_sft`.
    """
    return "val_chat" if source == "primer" else f"{split}_{source}"


def headline_evals(evals: Mapping[str, float]) -> dict[str, float]:
    """The evaluations to display. Those with a / in their name are per-document details, for metrics.jsonl only."""
    return {name: value for name, value in evals.items() if "/" not in name}


def is_over_bytes(config: Mapping[str, Any]) -> bool:
    """Whether a run, given its config as a dict, predicts bytes: its losses are then per byte.

    An imported model has no task: one with a larger vocabulary predicts tokens.
    """
    if "task" not in config:
        return bool(config["model"]["V"] <= 256)
    if config["task"] == "splice":
        return bool(config.get("splice", {}).get("documents", "bytes") == "bytes")
    return bool(config["task"] == "bytes")


def selection_loss(config: Mapping[str, Any], evals: Mapping[str, float]) -> float:
    """The loss that selects the best checkpoint, of an evaluation in metrics.jsonl. Raises KeyError if it has none."""
    names = {"pretrain": "val_pretrain", "sft": "val_sft", "splice": "splice"}
    if config["task"] in names:
        return evals[names[config["task"]]]
    return math.fsum(w * evals[eval_name(name)] for name, w in config["train"]["p_val"].items() if w)


def bits_per_byte(config: Mapping[str, Any], evals: Mapping[str, float]) -> float | None:
    """`selection_loss` in bits per byte, if the evaluation alone tells: for bytes, and for documents of a splice."""
    if is_over_bytes(config):
        return selection_loss(config, evals) / math.log(2)
    documents = [v for name, v in evals.items() if name.startswith("bpb/") and not name.startswith("bpb/control ")]
    return sum(documents) / len(documents) if documents else None
