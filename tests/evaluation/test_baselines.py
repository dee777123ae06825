"""Baselines against plain counts and compressors."""

from __future__ import annotations

import collections
import lzma
import math
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.evaluation.baselines import gzip_bits, reference_bits, unigram_bits, xz_bits

TEXT = ("The quick brown fox jumps over the lazy dog. " * 40 + "Zwölf Boxkämpfer jagen Viktor. " * 9).encode("utf-8")
NOISE = bytes(torch.randint(256, (5000,), generator=torch.Generator().manual_seed(0)).tolist())
some = st.binary(min_size=1, max_size=300)


def naive_unigram(stream: bytes, train: bytes) -> float:
    counts = collections.Counter(train)
    total = len(train) + 256
    return math.fsum(-math.log2((counts[byte] + 1) / total) for byte in stream) / len(stream)


@settings(max_examples=40)
@given(stream=some, train=st.binary(max_size=300))
def test_unigram(stream: bytes, train: bytes) -> None:
    assert unigram_bits(stream, fitted_on=train) == pytest.approx(naive_unigram(stream, train), rel=1e-9)


def test_unigram_by_hand() -> None:
    assert unigram_bits(b"abc", fitted_on=b"") == pytest.approx(8.0)
    assert unigram_bits(bytes(range(256)), fitted_on=bytes(range(256)) * 3) == pytest.approx(8.0)
    # "a" has 768 of 1024 counts (767 seen, one added), each unseen byte has 1
    train = b"a" * 767 + b"b"
    assert unigram_bits(b"a", fitted_on=train) == pytest.approx(math.log2(1024 / 768))
    assert unigram_bits(b"b", fitted_on=train) == pytest.approx(math.log2(1024 / 2))
    assert unigram_bits(b"z", fitted_on=train) == pytest.approx(10.0)
    assert unigram_bits(b"az", fitted_on=train) == pytest.approx((math.log2(1024 / 768) + 10.0) / 2)


def gzip_size(stream: bytes) -> int:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)  # 31: with gzip header and trailer
    return len(packer.compress(stream) + packer.flush())


def xz_size(stream: bytes) -> int:
    packer = lzma.LZMACompressor(lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)
    return len(packer.compress(stream) + packer.flush())


@pytest.mark.parametrize("stream", [TEXT, NOISE, bytes(3000), b"x"])
def test_compressors(stream: bytes) -> None:
    assert gzip_bits(stream) == pytest.approx(8 * gzip_size(stream) / len(stream))
    assert xz_bits(stream) == pytest.approx(8 * xz_size(stream) / len(stream))


def test_reference_bits() -> None:
    held_out, train = TEXT[:500], TEXT[500:]
    assert reference_bits(held_out, train=train) == pytest.approx(
        {
            "uniform": 8.0,
            "unigram": naive_unigram(held_out, train),
            "gzip": 8 * gzip_size(held_out) / 500,
            "xz": 8 * xz_size(held_out) / 500,
        }
    )
    assert naive_unigram(held_out, train) != pytest.approx(naive_unigram(held_out, held_out), rel=1e-3)


def test_a_stream_longer_than_a_chunk() -> None:
    counts = {97: 1_500_000, 98: 700_000, 0: 3}
    stream = b"".join(bytes([byte]) * number for byte, number in counts.items())
    total = sum(counts.values())
    bits = sum(-math.log2((number + 1) / (total + 256)) * number for number in counts.values()) / total
    assert unigram_bits(stream, fitted_on=stream) == pytest.approx(bits, rel=1e-12)
