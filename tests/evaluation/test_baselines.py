"""Baselines against plain counts and compressors."""

from __future__ import annotations

import collections
import lzma
import math
import shutil
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.evaluation.baselines import reference_bits, reference_notes, references, unigram_bits

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


def xz_size(stream: bytes) -> int:
    packer = lzma.LZMACompressor(lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)  # its window has 64 MiB
    return len(packer.compress(stream) + packer.flush())


@pytest.mark.parametrize("stream", [TEXT, NOISE, bytes(3000), b"x"])
@pytest.mark.parametrize("train", [TEXT, NOISE, b""])
def test_xz_alone_and_after_the_training_text(stream: bytes, train: bytes) -> None:
    bits = references(stream, train=train)["baselines"]["xz"]
    assert bits["alone"] == pytest.approx(8 * xz_size(stream) / len(stream))
    primed = 8 * (xz_size(train + stream) - xz_size(train)) / len(stream)
    assert bits["primed"] == pytest.approx(primed, abs=8 * 8 / len(stream))  # the window is named in a few bytes


def test_a_compressor_that_has_read_the_text_needs_almost_nothing() -> None:
    """Also if the text is far back, past the windows of gzip (32 KiB) and of xz by default."""
    letters = bytes(torch.randint(97, 113, (3_000_000,), generator=torch.Generator().manual_seed(1)).tolist())
    for name, bits in references(letters[:2000], train=letters)["baselines"].items():
        assert bits["alone"] > 4 and bits["primed"] < 0.5, name


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs the program zstd")
def test_zstd_is_as_good_as_the_program() -> None:
    pytest.importorskip("pyarrow")
    text = bytes(torch.randint(97, 105, (200_000,), generator=torch.Generator().manual_seed(2)).tolist()) * 2
    bits = references(text, train=TEXT)["baselines"]["zstd"]["alone"]
    packed = subprocess.run(["zstd", "--ultra", "-22", "--long=27", "-c"], input=text, capture_output=True, check=True)
    assert bits == pytest.approx(8 * len(packed.stdout) / len(text), rel=0.01)


def test_references() -> None:
    held_out, train = TEXT[:500], TEXT[500:]
    found = references(held_out, train=train)
    assert found["uniform_bits"] == 8.0
    assert found["unigram_bits"] == pytest.approx(naive_unigram(held_out, train))
    assert naive_unigram(held_out, train) != pytest.approx(naive_unigram(held_out, held_out), rel=1e-3)
    assert (found["primed_bytes"], found["primed_whole"]) == (len(train), True)
    titles = [f"{name} {kind}" for kind in ("primed", "alone") for name in found["baselines"]]
    assert list(reference_bits(found)) == [*titles, "unigram", "uniform"]
    assert reference_bits(found)["xz alone"] == found["baselines"]["xz"]["alone"]


def test_only_a_part_of_the_training_text_is_read_if_there_is_much() -> None:
    held_out, train = TEXT[:500], TEXT[500:]
    found = references(held_out, train=NOISE + train, primed=len(train))
    assert found["baselines"] == references(held_out, train=train)["baselines"]
    assert (found["primed_bytes"], found["primed_whole"]) == (len(train), False)
    assert f"{len(train):,}" in reference_notes("val", found)[1]
    assert not references(held_out, train=train, whole=False)["primed_whole"]


def test_a_stream_longer_than_a_chunk() -> None:
    counts = {97: 1_500_000, 98: 700_000, 0: 3}
    stream = b"".join(bytes([byte]) * number for byte, number in counts.items())
    total = sum(counts.values())
    bits = sum(-math.log2((number + 1) / (total + 256)) * number for number in counts.values()) / total
    assert unigram_bits(stream, fitted_on=stream) == pytest.approx(bits, rel=1e-12)
