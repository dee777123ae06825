"""Baselines that need no model, in bits per byte on the same bytes."""

from __future__ import annotations

import gzip
import lzma

import numpy as np


def uniform_bits() -> float:
    """Return the cost of a byte when all are equally likely."""
    return 8.0


def unigram_bits(stream: bytes, *, fitted_on: bytes) -> float:
    """Return the cost of `stream` in a code from the byte frequencies of `fitted_on`, with add-one smoothing."""
    counts = _counts(fitted_on) + 1.0
    bits = -np.log2(counts / counts.sum())
    return float(_counts(stream) @ bits) / len(stream)


def _counts(stream: bytes) -> np.ndarray:
    """Count the 256 bytes, chunk by chunk: bincount converts its input to eight bytes per value."""
    data, chunk = np.frombuffer(stream, dtype=np.uint8), 1 << 20
    return sum((np.bincount(data[i : i + chunk], minlength=256) for i in range(0, len(data), chunk)), np.zeros(256))


def gzip_bits(stream: bytes) -> float:
    """Return the size under gzip -9, headers included."""
    return 8.0 * len(gzip.compress(stream, compresslevel=9, mtime=0)) / len(stream)


def xz_bits(stream: bytes) -> float:
    """Return the size under xz -9e, headers included."""
    return 8.0 * len(lzma.compress(stream, preset=9 | lzma.PRESET_EXTREME)) / len(stream)


def reference_bits(stream: bytes, *, train: bytes) -> dict[str, float]:
    """Return all baselines of a held-out stream; the unigram is fitted on the training stream."""
    return {
        "uniform": uniform_bits(),
        "unigram": unigram_bits(stream, fitted_on=train),
        "gzip": gzip_bits(stream),
        "xz": xz_bits(stream),
    }
