"""Reference points that need no model, in bits per byte on the same bytes."""

from __future__ import annotations

import gzip
import lzma

import numpy as np


def uniform_bits() -> float:
    """Every byte equally likely."""
    return 8.0


def unigram_bits(stream: bytes, *, fitted_on: bytes) -> float:
    """Byte frequencies of `fitted_on` (one added to each count), used as a code for `stream`."""
    counts = np.bincount(np.frombuffer(fitted_on, dtype=np.uint8), minlength=256) + 1.0
    bits = -np.log2(counts / counts.sum())
    return float(bits[np.frombuffer(stream, dtype=np.uint8)].mean())


def gzip_bits(stream: bytes) -> float:
    """What gzip -9 makes of the stream, headers included."""
    return 8.0 * len(gzip.compress(stream, compresslevel=9, mtime=0)) / len(stream)


def xz_bits(stream: bytes) -> float:
    """What xz -9e makes of the stream, headers included."""
    return 8.0 * len(lzma.compress(stream, preset=9 | lzma.PRESET_EXTREME)) / len(stream)


def reference_bits(stream: bytes, *, train: bytes) -> dict[str, float]:
    """All reference points of a held-out stream; the unigram is fitted on the training stream."""
    return {
        "uniform": uniform_bits(),
        "unigram": unigram_bits(stream, fitted_on=train),
        "gzip": gzip_bits(stream),
        "xz": xz_bits(stream),
    }
