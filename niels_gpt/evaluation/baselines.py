"""Baselines that need no model, in bits per byte on the same bytes."""

from __future__ import annotations

import lzma
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from niels_gpt.data.note_groups import LONG_LINE, lines_in_training

PRIMED_BYTES = 32 << 20
"""Most training text that a compressor reads first: it takes a minute or two, and 400 MB of memory."""


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


def compressors() -> dict[str, Callable[[bytes], int]]:
    """Return the compressors of this machine: name -> size of bytes, in a window as large as they are."""
    found: dict[str, Callable[[bytes], int]] = {"xz": _xz_size}
    try:
        import pyarrow

        codec = pyarrow.Codec("zstd", compression_level=22)  # its window of 128 MiB holds priming and held-out text
    except (ImportError, NotImplementedError):  # an environment without datasets, or a build without zstd
        return found
    return found | {"zstd": lambda data: len(codec.compress(data, asbytes=True))}


def _xz_size(data: bytes) -> int:
    options = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": max(len(data), 1 << 12)}
    return len(lzma.compress(data, filters=[options]))


def compressed_bits(
    stream: bytes, *, train: bytes, using: Mapping[str, Callable[[bytes], int]] | None = None
) -> dict[str, dict[str, float]]:
    """Return {compressor: {"alone": bits, "primed": bits}} of a held-out stream, by default for `compressors`.

    alone: it has seen nothing else. primed: it has read the training text, as the model has; the cost is what the
    stream adds to the size of that text.
    """
    texts, found = (stream, train + stream, train), using or compressors()
    with ThreadPoolExecutor() as threads:  # compressors release the GIL
        sizes = {name: [threads.submit(size, text) for text in texts] for name, size in found.items()}
        alone, both, before = ({name: size[i].result() for name, size in sizes.items()} for i in range(3))
    cost = 8.0 / len(stream)
    return {name: {"alone": cost * alone[name], "primed": cost * (both[name] - before[name])} for name in found}


def references(stream: bytes, *, train: bytes, primed: int = PRIMED_BYTES, whole: bool = True) -> dict[str, Any]:
    """Return what a model is compared with on a held-out stream.

    uniform_bits; unigram_bits, fitted on the training text; baselines: see `compressed_bits`; primed_bytes: how much of
    the end of the training text they have read, at most `primed`; primed_whole: whether that is all of it, if `train`
    is the `whole` text; held_out_lines_in_training: see `lines_in_training`.
    """
    held_out, before = ([data.decode("utf-8", "replace")] for data in (stream, train))
    return {
        "uniform_bits": uniform_bits(),
        "unigram_bits": unigram_bits(stream, fitted_on=train),
        "baselines": compressed_bits(stream, train=train[-primed:]),
        "primed_bytes": min(len(train), primed),
        "primed_whole": whole and len(train) <= primed,
        "held_out_lines_in_training": lines_in_training(held_out, before),
    }


def reference_bits(score: Mapping[str, Any]) -> dict[str, float]:
    """Return {title: bits per byte} of the references of a score, as the columns of a table."""
    found = {
        f"{name} {kind}": bits[kind]
        for kind in ("primed", "alone")
        for name, bits in score.get("baselines", {}).items()
    }
    return found | {name: score[f"{name}_bits"] for name in ("unigram", "uniform") if f"{name}_bits" in score}


def reference_notes(name: str, score: Mapping[str, Any]) -> list[str]:
    """Return what a reader of a score must know of its references; `name`: of the held-out set."""
    notes = []
    if "held_out_lines_in_training" in score:
        notes.append(
            f"{name}: {score['held_out_lines_in_training']:.1%} of the bytes of its lines of {LONG_LINE} characters or "
            "more are lines of the training text"
        )
    better = [k for k, bits in score.get("baselines", {}).items() if bits["primed"] < score.get("bits_per_byte", 0)]
    if better:
        notes.append(f"{name}: the model predicts it worse than {' and '.join(better)}, primed")
    if not score.get("primed_whole", True):
        notes.append(f"{name}: the compressors were primed with {score['primed_bytes']:,} bytes of the training text")
    return notes


PRIMED = "xz and zstd, primed, have read the training text first, as the model has; alone, only these bytes."
