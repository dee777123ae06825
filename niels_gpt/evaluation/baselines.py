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
    counts = _counts(fitted_on) + 1.0
    bits = -np.log2(counts / counts.sum())
    return float(_counts(stream) @ bits) / len(stream)


def _counts(stream: bytes) -> np.ndarray:
    """How often each byte occurs. In parts, because bincount makes eight bytes of each."""
    data, part = np.frombuffer(stream, dtype=np.uint8), 1 << 20
    return sum((np.bincount(data[i : i + part], minlength=256) for i in range(0, len(data), part)), np.zeros(256))


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
