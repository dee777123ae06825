"""Summarize measurements as one dict of plain values, for JSON, CSV and the HTML report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from niels_gpt.memorization.measure import MEMORIZED, ExtractionSettings, Measurement, chance
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer, text_bytes, token_sizes

FORMAT = 2
"""Version of the report dict."""
LEVELS = (1e-4, 0.01, 0.1, 0.5, 0.9)
"""Windows are counted at or over these values of P(z)."""
SAMPLES = tuple(10**k for k in range(7))
CHANCES = (0.1, 0.5, 0.9)
"""Windows are counted that occur in n of SAMPLES samples with at least these probabilities."""


def build_report(
    loaded: LoadedRun,
    measured: Sequence[Measurement],
    *,
    title: str = "",
    base: str = "",
    checkpoints: Sequence[dict[str, Any]] = (),
    position_map: dict[str, Any] | None = None,
    passages: int = 20,
    strips: int | None = None,
    levels: Sequence[float] = LEVELS,
) -> dict[str, Any]:
    """Return the report dict. `checkpoints` come from `curve_entry`, `position_map` from the function of that name.

    `base` is the checkpoint of the base, if the documents were measured under it too (`base_model.with_base`).
    `passages` limits the ranked passages. `strips` limits the documents whose map is drawn, those with the most likely
    windows first (None: all). Windows are counted at or over the `levels` of P(z). Raises ValueError if nothing was
    measured, or with different settings.
    """
    if not measured:
        raise ValueError("no document to report on: measure at least one")
    settings, tokenizer = measured[0].settings, loaded.tokenizer
    if any(one.settings != settings for one in measured):
        raise ValueError("the documents were measured with different settings: measure them in one call")
    chosen: Iterable[int] = range(len(measured))
    if strips is not None:
        ranked = sorted(chosen, key=lambda i: -float(measured[i].log_p.max()))
        chosen = sorted(ranked[:strips])
    return {
        "format": FORMAT,
        "title": title,
        "checkpoint": str(loaded.path),
        "base": base,
        "step": loaded.step,
        "parameters": loaded.model.num_parameters(),
        "positions": loaded.model.config.positions,
        "unit": "byte" if isinstance(tokenizer, ByteTokenizer) else "token",
        "settings": _settings(settings),
        "documents": [document_row(one, tokenizer, levels) for one in measured],
        "passages": top_passages(measured, tokenizer, most=passages),
        "strips": [strip(measured[i], tokenizer) for i in chosen],
        "checkpoints": sorted(checkpoints, key=lambda entry: entry["step"]),
        "position_map": position_map,
    }


def _settings(settings: ExtractionSettings) -> dict[str, Any]:
    values = {name: getattr(settings, name) for name in ("window", "prompt", "stride", "greedy")}
    return {**values, "map": "window" if settings.whole_window else "suffix"}


def document_row(measured: Measurement, tokenizer: AnyTokenizer, levels: Sequence[float] = LEVELS) -> dict[str, Any]:
    """Return the results of one document. `longest_run.start` is the index of the run's first token."""
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
        **_of_windows(measured),
        "over": _over(p, levels),
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
        **_base_of_document(measured, levels),
    }


def _of_windows(measured: Measurement) -> dict[str, float]:
    """Return the means and the largest value of P(z) over the windows."""
    p = measured.p
    means = {"mean_p": p.mean(), "median_p": np.median(p), "max_p": p.max(), "mean_log_p": measured.log_p.mean()}
    return {name: float(value) for name, value in means.items()}


def _over(p: np.ndarray, levels: Sequence[float]) -> dict[str, int]:
    """Count the windows at or over each level of P(z)."""
    return {_key(level): int((p >= level).sum()) for level in levels}


def discoverable(log_p: np.ndarray) -> dict[str, dict[str, int]]:
    """Count the (n, p)-discoverable windows: str(n) -> str(p) -> count."""
    chances = {n: chance(log_p, n) for n in SAMPLES}
    return {str(n): {_key(least): int((chances[n] >= least).sum()) for least in CHANCES} for n in SAMPLES}


def top_passages(
    measured: Sequence[Measurement], tokenizer: AnyTokenizer, *, most: int = 20, least: float = 0.0
) -> list[dict[str, Any]]:
    """Return the windows with the highest P(z) of all documents, at most `most`, with P(z) of at least `least`.

    Of windows whose suffixes overlap, or are the same text (of another document, too, or a part of it), only the one
    with the highest P(z) is listed: tokens cut .. end - 1 of the document. `also_in` are the names of the other
    documents that contain its suffix.
    """
    if not measured:
        return []
    log_p = np.concatenate([one.log_p for one in measured])
    counts = [len(one.log_p) for one in measured]
    which, offsets = np.repeat(np.arange(len(measured)), counts), np.cumsum([0, *counts])
    listed: list[list[tuple[int, int]]] = [[] for _ in measured]
    passages: list[dict[str, Any]] = []
    suffixes: list[bytes] = []
    for i in np.argsort(-log_p, kind="stable").tolist():
        p = math.exp(log_p[i])
        if len(passages) >= most or p < least:
            break
        one, index = measured[which[i]], int(i - offsets[which[i]])
        start, cut, end = int(one.starts[index]), int(one.cuts[index]), int(one.ends[index])
        if any(cut < other_end and other_cut < end for other_cut, other_end in listed[which[i]]):
            continue
        listed[which[i]].append((cut, end))  # also if it is not listed itself: its neighbors overlap the same text
        ids = one.document.ids
        suffix = _text(tokenizer, ids[cut:end])
        if any(_same_text(suffix, other["suffix"]) for other in passages):
            continue
        passages.append(
            {
                "document": one.document.name,
                "control": one.document.control,
                "start": start,
                "cut": cut,
                "end": end,
                "p": p,
                "log_p": float(log_p[i]),
                **_base_of_window(one, index),
                "prompt": _text(tokenizer, one.document.row(start, cut)),
                "suffix": suffix,
                "also_in": [],
            }
        )
        suffixes.append(text_bytes(tokenizer, ids[cut:end]).strip())
    for one in measured if passages else ():
        text = text_bytes(tokenizer, one.document.ids)
        for passage, suffix_bytes in zip(passages, suffixes, strict=True):
            if suffix_bytes and suffix_bytes in text and one.document.name != passage["document"]:
                passage["also_in"].append(one.document.name)
    return passages


def _same_text(one: str, other: str) -> bool:
    """Whether two suffixes are the same text, or one is a part of the other."""
    one, other = one.strip(), other.strip()
    return one in other or other in one if one and other else one == other


def _base_of_window(measured: Measurement, index: int) -> dict[str, float]:
    """Return P(z) of a window under the base; nothing if it was not measured."""
    if measured.base_log_p is None or np.isnan(measured.base_log_p[index]):
        return {}
    log_p = float(measured.base_log_p[index])
    return {"base_p": math.exp(log_p), "base_log_p": log_p}


def _base_of_document(measured: Measurement, levels: Sequence[float]) -> dict[str, Any]:
    """Return the results of a document under the base; nothing if it was not measured."""
    if measured.base_log_p is None or measured.base_score is None:
        return {}
    p = np.exp(measured.base_log_p)
    return {
        "base": {
            "mean_p": float(p.mean()),
            "max_p": float(p.max()),
            "mean_log_p": float(measured.base_log_p.mean()),
            "over": _over(p, levels),
            "bits_per_byte": measured.base_score.bits_per_byte,
        }
    }


def strip(measured: Measurement, tokenizer: AnyTokenizer) -> dict[str, Any]:
    """Return the map of a document: its text, and for every character the largest P(z) of the windows that cover it.

    P(z) is rounded to four digits; 0 where no window covers a character (by suffixes, the first prompt).
    """
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
    """Return the text of a document, and for every character the largest P(z) of the windows that cover it.

    A window covers a character if its suffix (or any part of it, by the settings) has a token with a byte of the
    character. Every byte of invalid utf-8 is a separate U+FFFD.
    """
    ids = measured.document.ids
    by_token = np.zeros(len(ids))
    begins = np.maximum(measured.starts, 0) if measured.settings.whole_window else measured.cuts
    for begin, end, p in zip(begins.tolist(), measured.ends.tolist(), measured.p.tolist(), strict=True):
        covered = by_token[begin:end]
        np.maximum(covered, p, out=covered)
    by_byte = np.repeat(by_token, token_sizes(tokenizer)[ids])
    escaped = text_bytes(tokenizer, ids).decode("utf-8", errors="surrogateescape")  # one surrogate per invalid byte
    codes = np.frombuffer(escaped.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
    invalid = (codes >= 0xDC80) & (codes <= 0xDCFF)
    sizes = 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)  # bytes per character in utf-8
    sizes[invalid] = 1
    text = np.where(invalid, 0xFFFD, codes).astype("<u4").tobytes().decode("utf-32-le")
    return text, np.maximum.reduceat(by_byte, np.cumsum(sizes) - sizes)


def curve_entry(step: int, measured: Sequence[Measurement]) -> dict[str, Any]:
    """Return the results of all documents at one checkpoint, for the report's `checkpoints`."""
    documents = [
        {
            "name": one.document.name,
            "control": one.document.control,
            **_of_windows(one),
            "memorized": float((one.p >= MEMORIZED).mean()),
            "nats_per_token": one.score.nats_per_token,
        }
        for one in measured
    ]
    return {"step": step, "documents": documents}


def _text(tokenizer: AnyTokenizer, ids: np.ndarray) -> str:
    """Return the text of some tokens; incomplete characters become U+FFFD."""
    return text_bytes(tokenizer, ids).decode("utf-8", errors="replace")


def _key(value: float) -> str:
    """Format a level as 0.0001, not 1e-04."""
    return f"{value:.4f}".rstrip("0") if value >= LEVELS[0] else f"{value:g}"
