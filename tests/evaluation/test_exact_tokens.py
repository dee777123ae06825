"""Exact scores of token ids against a loop over tokens, and closed forms of bits per byte."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from niels_gpt import GPT, ModelConfig
from niels_gpt.evaluation.exact import Score, score_examples, score_stream

T, V = 12, 600


@functools.cache
def model() -> GPT:
    torch.manual_seed(0)
    gpt = GPT(ModelConfig(V=V, T=T, C=32, L=2, H=2, d_ff=64, dropout=0.5))
    with torch.no_grad():
        for p in gpt.parameters():
            p.copy_(1 + 0.3 * torch.randn(p.shape) if p.dim() == 1 else 1.5 * torch.randn(p.shape) / p.shape[1] ** 0.5)
        gpt.tok_emb.weight.mul_(0.5)
    return gpt.eval()


class Uniform(nn.Module):
    """All ids are equally likely."""

    def __init__(self) -> None:
        super().__init__()
        self.config = ModelConfig(V=V, T=T, C=2, L=1, H=1)
        self.logits = nn.Identity()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def hidden(self, x: torch.Tensor, *, positions: None) -> torch.Tensor:
        return torch.zeros(*x.shape, V)


def some_ids(n: int, seed: int = 0) -> np.ndarray:
    return torch.randint(V, (n,), generator=torch.Generator().manual_seed(seed)).numpy().astype(np.uint16)


def some_sizes(seed: int = 1) -> np.ndarray:
    return torch.randint(0, 9, (V,), generator=torch.Generator().manual_seed(seed)).numpy()


def token_losses(x: list[int], targets: list[int]) -> list[float]:
    """Return the loss of each target of one row; targets of -100 are skipped."""
    with torch.no_grad():
        logits = model()(torch.tensor([x]))[0].double()
    found = []
    for row, target in zip(logits, targets, strict=True):
        if target != -100:
            found.append(-torch.log_softmax(row, dim=0)[target].item())
    return found


def reference(ids: list[int], stride: int) -> float:
    """Return nats per token; a token counts in the first window that predicts it."""
    width = min(T, len(ids) - 1)
    starts = [s for s in range(0, len(ids), stride) if s + width < len(ids)] + [len(ids) - 1 - width]
    found: dict[int, float] = {}
    for s in starts:
        for k, loss in enumerate(token_losses(ids[s : s + width], ids[s + 1 : s + width + 1])):
            found.setdefault(s + 1 + k, loss)
    assert sorted(found) == list(range(1, len(ids)))
    return math.fsum(found.values()) / len(found)


# --- streams of ids ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "stride"), [(2, None), (T + 1, 1), (T + 2, T), (3 * T + 5, 5), (80, None)])
def test_every_token_but_the_first_is_scored_once(n: int, stride: int | None) -> None:
    ids, sizes = some_ids(n), some_sizes()
    score = score_stream(model(), ids, stride=stride, batch=3, token_sizes=sizes)
    assert score.tokens == n - 1
    assert score.nats_per_token == pytest.approx(reference(ids.tolist(), stride or T), rel=1e-5)
    assert score.bytes == sum(int(sizes[i]) for i in ids.tolist()[1:])


def test_ids_above_255() -> None:
    ids = some_ids(60)
    assert ids.max() > 255
    assert score_stream(model(), ids).nats_per_token == pytest.approx(reference(ids.tolist(), T), rel=1e-5)
    other = score_stream(model(), ids % 256).nats_per_token
    assert other != pytest.approx(reference(ids.tolist(), T), rel=1e-3)


@pytest.mark.parametrize("dtype", ["<u2", "int32", "int64"])
def test_the_dtype_does_not_matter(dtype: str) -> None:
    ids, sizes = some_ids(50), some_sizes()
    assert score_stream(model(), ids.astype(dtype), token_sizes=sizes) == score_stream(model(), ids, token_sizes=sizes)


def test_read_only_arrays() -> None:
    """Token files are memory-mapped."""
    ids = np.frombuffer(some_ids(50).tobytes(), dtype="<u2")
    assert not ids.flags.writeable
    assert score_stream(model(), ids) == score_stream(model(), some_ids(50))


def test_bytes_as_ids_of_one_byte() -> None:
    """The same stream as bytes and as ids of one byte each."""
    data = bytes(some_ids(70).astype(np.uint8))
    as_bytes = score_stream(model(), data)
    as_ids = score_stream(model(), np.frombuffer(data, np.uint8), token_sizes=np.ones(V, dtype=int))
    assert as_ids.nats_per_token == as_bytes.nats_per_token
    assert as_ids.bits_per_byte == pytest.approx(as_bytes.bits_per_byte, rel=1e-12)
    assert (as_bytes.bytes, as_ids.bytes) == (None, 69)


@pytest.mark.parametrize("n", [0, 1])
def test_nothing_to_predict(n: int) -> None:
    with pytest.raises(ValueError, match=f"{n} tokens"):
        score_stream(model(), some_ids(n))


# --- bits per byte -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7])
def test_bits_per_byte_of_uniform_guesses(size: int) -> None:
    """The cost is log2(V) bits for every `size` bytes."""
    score = score_stream(Uniform(), some_ids(100), token_sizes=np.full(V, size))
    assert score.bits_per_byte == pytest.approx(math.log2(V) / size, rel=1e-6)
    assert score.nats_per_token == pytest.approx(math.log(V), rel=1e-6)
    assert score.perplexity == pytest.approx(V, rel=1e-5)  # per token, whatever the sizes
    assert score.bytes == 99 * size


@settings(max_examples=40)
@given(tokens=st.integers(1, 10**7), nats=st.floats(0, 20), size=st.integers(1, 10**8))
def test_bits_per_byte_of_a_score(tokens: int, nats: float, size: int) -> None:
    score = Score(tokens=tokens, nats_per_token=nats, bytes=size)
    assert score.bits_per_byte * size * math.log(2) == pytest.approx(nats * tokens, rel=1e-9)
    assert math.log(score.perplexity) == pytest.approx(nats, rel=1e-9, abs=1e-9)


def test_tokens_without_bytes() -> None:
    """EOT must be predicted, but is not text."""
    sizes = np.array([0 if i % 10 == 0 else 3 for i in range(V)])
    ids = some_ids(200)
    score = score_stream(model(), ids, token_sizes=sizes)
    text = [i for i in ids.tolist()[1:] if i % 10]
    assert len(text) < 195
    assert score.bytes == 3 * len(text)
    assert score.tokens == 199
    assert score.bits_per_byte == pytest.approx(
        reference(ids.tolist(), T) * 199 / (3 * len(text)) / math.log(2), rel=1e-5
    )


# --- examples ----------------------------------------------------------------------------------------


def some_batches(seed: int, shapes: list[tuple[int, int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return random rows; half of the targets are -100."""
    draw = torch.Generator().manual_seed(seed)
    batches = []
    for shape in shapes:
        x, y = (torch.randint(V, shape, generator=draw) for _ in range(2))
        batches.append((x, torch.where(torch.rand(shape, generator=draw) < 0.5, y, -100)))
    return batches


@pytest.mark.parametrize("shapes", [[(1, T)], [(3, T), (2, T), (1, T)], [(4, 5), (1, 1), (2, T)]])
def test_every_target_is_scored_once(shapes: list[tuple[int, int]]) -> None:
    batches, sizes = some_batches(4, shapes), some_sizes()
    score = score_examples(model(), iter(batches), token_sizes=sizes)
    losses, size = [], 0
    for x, targets in batches:
        for row, wanted in zip(x.tolist(), targets.tolist(), strict=True):
            losses += token_losses(row, wanted)
            size += sum(int(sizes[target]) for target in wanted if target != -100)
    assert 0 < len(losses) < sum(x.numel() for x, _ in batches)
    assert score.tokens == len(losses)
    assert score.nats_per_token == pytest.approx(math.fsum(losses) / len(losses), rel=1e-5)
    assert score.bytes == size
    assert score.bits_per_byte == pytest.approx(math.fsum(losses) / size / math.log(2), rel=1e-5)


def test_rows_without_targets_do_not_count() -> None:
    ((x, targets),) = some_batches(5, [(2, T)])
    none = torch.full_like(targets, -100)
    sizes = some_sizes()
    alone = score_examples(model(), [(x, targets)], token_sizes=sizes)
    assert score_examples(model(), [(x, none), (x, targets), (x, none)], token_sizes=sizes) == alone


def test_examples_without_any_target() -> None:
    x = torch.zeros(2, T, dtype=torch.int64)
    for batches in ([], [(x, torch.full_like(x, -100))]):
        with pytest.raises(ValueError, match="target"):
            score_examples(model(), batches, token_sizes=some_sizes())


def test_examples_of_uniform_guesses() -> None:
    score = score_examples(Uniform(), some_batches(6, [(5, T)]), token_sizes=np.full(V, 4))
    assert score.bits_per_byte == pytest.approx(math.log2(V) / 4, rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_restored(training: bool) -> None:
    """And there is no dropout."""
    batches, sizes = some_batches(7, [(3, T)]), some_sizes()
    expected = score_examples(model(), batches, token_sizes=sizes)
    state = torch.get_rng_state()
    model().train(training)
    try:
        assert score_examples(model(), batches, token_sizes=sizes) == expected
        assert all(module.training is training for module in model().modules())
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        model().eval()
