"""Histogram of sample lengths, in bins that double, as text and as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from niels_gpt.report.charts import Chart, Series, save_png, steps

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def count_by_doubling(lengths: Sequence[int] | np.ndarray) -> list[tuple[int, int, int]]:
    """Return (low, high (exclusive), count) of the bins 0, 1, 2-3, 4-7, ..., without empty bins at the ends."""
    values = np.asarray(lengths, dtype=np.int64)
    if not len(values):
        return []
    bins = np.array([int(value).bit_length() for value in values])  # 1 + floor(log2), and 0 for 0
    counts = np.bincount(bins)
    first = int(bins.min())
    return [(2 ** (b - 1) if b else 0, 2**b if b else 1, int(counts[b])) for b in range(first, len(counts))]


def histogram_text(lengths: Sequence[int] | np.ndarray, *, width: int = 40) -> list[str]:
    """Return one line per bin: its range, a bar, the count."""
    bins = count_by_doubling(lengths)
    if not bins:
        return []
    most = max(number for _, _, number in bins)
    labels = [f"{low:,}" if high - low == 1 else f"{low:,} to {high - 1:,}" for low, high, _ in bins]
    pad = max(map(len, labels))
    lines = []
    for label, (_, _, number) in zip(labels, bins, strict=True):
        eighths = -(-number * width * 8 // most)  # rounded up, so that a single sample shows
        bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        lines.append(f"{label:>{pad}}  {bar:<{width}}  {number:,}")
    return lines


def plot_histogram(lengths: Sequence[int] | np.ndarray, path: Path, *, title: str) -> None:
    """Write the histogram as a PNG, atomically."""
    bins = count_by_doubling(lengths)
    counts = Series("samples", *steps(range(len(bins) + 1), [number for *_, number in bins]), style="fill")
    ticks = [(i, f"{low:,}") for i, (low, *_) in enumerate(bins)]
    save_png([Chart(title, "samples", [counts], x_label="characters per sample", x_ticks=ticks, y_low=0)], path)
