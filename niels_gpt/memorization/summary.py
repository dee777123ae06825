"""What was measured of memorisation as one dict of plain values, for JSON, CSV and the HTML report."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.memorization.measure import MEMORIZED, ExtractionSettings, Measurement, chance
from niels_gpt.model.gpt import GPT
from niels_gpt.system import files
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer, text_bytes, token_sizes

FORMAT = 1
LEVELS = (1e-4, 0.01, 0.1, 0.5, 0.9)
"""The values of P(z) at and over which windows are counted."""
SAMPLES = tuple(10**k for k in range(7))
CHANCES = (0.1, 0.5, 0.9)
"""Windows are counted that show up in that many samples with at least that chance."""


def report(
    model: GPT,
    measured: Sequence[Measurement],
    tokenizer: AnyTokenizer,
    *,
    title: str = "",
    checkpoint: str = "",
    step: int = 0,
    checkpoints: Sequence[dict[str, Any]] = (),
    position_map: dict[str, Any] | None = None,
    passages: int = 20,
    strips: int | None = None,
) -> dict[str, Any]:
    """The report dict. `checkpoints` come from `curve_entry`, `position_map` from the function of that name.

    `passages` limits the ranked passages, `strips` the documents whose map is drawn: those with the most likely windows
    (None: all). Raises ValueError where nothing was measured, or with different settings.
    """
    if not measured:
        raise ValueError("there is no document to report on")
    settings = measured[0].settings
    if any(one.settings != settings for one in measured):
        raise ValueError("the documents were measured with different settings: measure them together")
    chosen: Iterable[int] = range(len(measured))
    if strips is not None:
        likely = sorted(chosen, key=lambda i: -float(measured[i].log_p.max()))
        chosen = sorted(likely[:strips])
    return {
        "format": FORMAT,
        "title": title,
        "checkpoint": checkpoint,
        "step": step,
        "parameters": model.num_parameters(),
        "positions": getattr(model.config, "positions", "rope"),
        "unit": "byte" if isinstance(tokenizer, ByteTokenizer) else "token",
        "settings": _settings(settings),
        "documents": [document_row(one, tokenizer) for one in measured],
        "passages": top_passages(measured, tokenizer, most=passages),
        "strips": [strip(measured[i], tokenizer) for i in chosen],
        "checkpoints": sorted(checkpoints, key=lambda entry: entry["step"]),
        "position_map": position_map,
    }


def _settings(settings: ExtractionSettings) -> dict[str, Any]:
    shown = {name: getattr(settings, name) for name in ("window", "prompt", "stride", "greedy")}
    return {**shown, "map": "window" if settings.whole_window else "suffix"}


def document_row(measured: Measurement, tokenizer: AnyTokenizer) -> dict[str, Any]:
    """The numbers of one document. `longest_run.start` is the index of the run's first token, after its prompt."""
    document, p = measured.document, measured.p
    complete = measured.greedy_share[~np.isnan(measured.greedy_share)]
    tokens, start = measured.longest
    return {
        "name": document.name,
        "source": document.source,
        "control": document.control,
        "tokens": len(document.ids),
        "bytes": measured.bytes,
        "windows": len(p),
        "short": measured.short,
        "mean_p": float(p.mean()),
        "median_p": float(np.median(p)),
        "max_p": float(p.max()),
        "mean_log_p": float(measured.log_p.mean()),
        "over": {_key(level): int((p >= level).sum()) for level in LEVELS},
        "nats_per_token": measured.score.nats_per_token,
        "bits_per_byte": measured.score.bits_per_byte,
        "greedy": {
            "starts": len(complete),
            "share": float(complete.mean()) if len(complete) else None,
            "exact": measured.greedy_exact,
        },
        "longest_run": {
            "tokens": tokens,
            "start": start,
            "text": _text(tokenizer, document.ids[start : start + tokens]),
        },
        "discoverable": discoverable(measured.log_p),
    }


def discoverable(log_p: np.ndarray) -> dict[str, dict[str, int]]:
    """How many windows are (n, p)-discoverable: str(n) -> str(p) -> count."""
    seen = {n: chance(log_p, n) for n in SAMPLES}
    return {str(n): {_key(least): int((seen[n] >= least).sum()) for least in CHANCES} for n in SAMPLES}


def top_passages(
    measured: Sequence[Measurement], tokenizer: AnyTokenizer, *, most: int = 20, least: float = 0.0
) -> list[dict[str, Any]]:
    """The likeliest windows of all documents, best first, at most `most`, with P(z) of at least `least`.

    Of windows whose suffixes overlap only the likeliest is listed.
    """
    if not measured:
        return []
    log_p = np.concatenate([one.log_p for one in measured])
    which = np.repeat(np.arange(len(measured)), [len(one.log_p) for one in measured])
    starts = np.concatenate([one.starts for one in measured])
    taken: list[list[int]] = [[] for _ in measured]
    found: list[dict[str, Any]] = []
    for i in np.argsort(-log_p, kind="stable").tolist():
        p = math.exp(log_p[i])
        if len(found) >= most or p < least:
            break
        one, start = measured[which[i]], int(starts[i])
        width = one.window - one.prompt
        if any(abs(start - other) < width for other in taken[which[i]]):
            continue
        taken[which[i]].append(start)
        ids, cut, end = one.document.ids, start + one.prompt, start + one.window
        found.append(
            {
                "document": one.document.name,
                "control": one.document.control,
                "start": start,
                "end": end,
                "p": p,
                "log_p": float(log_p[i]),
                "prompt": _text(tokenizer, ids[start:cut]),
                "suffix": _text(tokenizer, ids[cut:end]),
            }
        )
    return found


def strip(measured: Measurement, tokenizer: AnyTokenizer) -> dict[str, Any]:
    """The map of a document: its text, and for every character the largest P(z) of the windows that cover it, to four
    digits; 0 where none does (with suffixes, the first prompt)."""
    document = measured.document
    text, values = character_map(measured, tokenizer)
    distinct, index = np.unique(values, return_inverse=True)
    rounded = [float(f"{value:.4g}") for value in distinct.tolist()]
    return {
        "document": document.name,
        "control": document.control,
        "text": text,
        "p": [rounded[i] for i in index.tolist()],
    }


def character_map(measured: Measurement, tokenizer: AnyTokenizer) -> tuple[str, np.ndarray]:
    """The text of a document, and for every character the largest P(z) of the windows whose suffix (or any part, by
    the settings) has a token that holds a byte of it. A byte that makes no character is a U+FFFD of its own."""
    ids = measured.document.ids
    by_token = np.zeros(len(ids))
    skipped = 0 if measured.settings.whole_window else measured.prompt
    for start, p in zip(measured.starts.tolist(), measured.p.tolist(), strict=True):
        covered = by_token[start + skipped : start + measured.window]
        np.maximum(covered, p, out=covered)
    by_byte = np.repeat(by_token, token_sizes(tokenizer)[ids])
    escaped = text_bytes(tokenizer, ids).decode("utf-8", errors="surrogateescape")  # a surrogate per invalid byte
    codes = np.frombuffer(escaped.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
    invalid = (codes >= 0xDC80) & (codes <= 0xDCFF)
    sizes = 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)  # bytes in utf-8
    sizes[invalid] = 1
    text = np.where(invalid, 0xFFFD, codes).astype("<u4").tobytes().decode("utf-32-le")
    return text, np.maximum.reduceat(by_byte, np.cumsum(sizes) - sizes)


def curve_entry(step: int, measured: Sequence[Measurement]) -> dict[str, Any]:
    """The numbers of all documents at a checkpoint along the run, for the report's `checkpoints`."""
    documents = [
        {
            "name": one.document.name,
            "control": one.document.control,
            "mean_p": float(one.p.mean()),
            "median_p": float(np.median(one.p)),
            "max_p": float(one.p.max()),
            "mean_log_p": float(one.log_p.mean()),
            "memorised": float((one.p >= MEMORIZED).mean()),
            "nats_per_token": one.score.nats_per_token,
        }
        for one in measured
    ]
    return {"step": step, "documents": documents}


def write_json(path: str | Path, found: dict[str, Any]) -> None:
    """Write the report dict, atomically."""
    files.write_json(path, found)


def write_csv(path: str | Path, found: dict[str, Any]) -> None:
    """Write one line per document with all its numbers; those of a dict get a column each, as in `over_0.5`."""
    rows = [dict(_flat(document)) for document in found["documents"]]
    _write_rows(path, list(rows[0]), [list(row.values()) for row in rows])


def write_windows_csv(path: str | Path, measured: Sequence[Measurement]) -> None:
    """Write one line per window. `greedy_run` counts the decoded tokens only, `greedy_share` is empty where the text
    ends before they do."""
    header = ["document", "control", "start", "end", "log_p", "p", "greedy_share", "greedy_run"]
    rows = []
    for one in measured:
        columns = (one.starts, one.starts + one.window, one.log_p, one.p, one.greedy_share, one.greedy_run)
        for values in zip(*(column.tolist() for column in columns), strict=True):
            rows.append([one.document.name, one.document.control, *("" if v != v else v for v in values)])
    _write_rows(path, header, rows)


def _flat(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """The entries of nested dicts, with names joined by _; of the texts only names and sources."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}_")
        elif key != "text":
            yield f"{prefix}{key}", "" if value is None else value


def _write_rows(path: str | Path, header: list[str], rows: Iterable[list[Any]]) -> None:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    # A file name that is not utf-8 keeps its escape.
    files.write_text(path, out.getvalue().encode("utf-8", errors="backslashreplace").decode("utf-8"))


def _text(tokenizer: AnyTokenizer, ids: np.ndarray) -> str:
    """The text of some tokens; characters that are cut show as U+FFFD."""
    return text_bytes(tokenizer, ids).decode("utf-8", errors="replace")


def _key(value: float) -> str:
    """0.0001, not 1e-04."""
    return f"{value:.4f}".rstrip("0")
