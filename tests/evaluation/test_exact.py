"""Exact scores against a sum in which each byte or token counts in the first window that predicts it."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from niels_gpt import GPT, ModelConfig
from niels_gpt.evaluation.exact import Score, score_examples, score_stream

T, V = 16, 256


@functools.cache
def model() -> GPT:
    torch.manual_seed(0)
    gpt = GPT(ModelConfig(V=V, T=T, C=32, L=2, H=2, d_ff=64, dropout=0.5))
    with torch.no_grad():
        for p in gpt.parameters():
            p.copy_(1 + 0.3 * torch.randn(p.shape) if p.dim() == 1 else 1.5 * torch.randn(p.shape) / p.shape[1] ** 0.5)
        gpt.tok_emb.weight.mul_(0.5)
    return gpt.eval()


class Bigrams(nn.Module):
    """The loss of a byte depends on the previous byte only, so the choice of windows does not change the total."""

    def __init__(self, T: int) -> None:
        super().__init__()
        self.config = ModelConfig(V=256, T=T, C=2, L=1, H=1)
        table = 3 * torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
        self.table = nn.Parameter(table, requires_grad=False)
        self.logits = nn.Identity()

    @property
    def device(self) -> torch.device:
        return self.table.device

    def hidden(self, x: torch.Tensor, *, positions: None, segments: None) -> torch.Tensor:
        assert 1 <= x.shape[1] <= self.config.T
        return self.table[x]

    def forward(self, x: torch.Tensor, *, positions: None, segments: None) -> torch.Tensor:
        return self.hidden(x, positions=positions, segments=segments)


@functools.cache
def bigrams(T: int) -> Bigrams:
    return Bigrams(T)


@functools.cache
def bigram_losses() -> torch.Tensor:
    table = bigrams(1).table.double()
    return torch.logsumexp(table, dim=1, keepdim=True) - table  # [before, byte]


def some_bytes(n: int, seed: int = 0) -> bytes:
    return bytes(torch.randint(256, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def some_ids(n: int) -> np.ndarray:
    return torch.randint(V, (n,), generator=torch.Generator().manual_seed(0)).numpy().astype(np.uint16)


def some_sizes() -> np.ndarray:
    """Return bytes per id; some have none, as EOT."""
    return torch.randint(0, 9, (V,), generator=torch.Generator().manual_seed(1)).numpy()


def losses_of(x: Sequence[int], targets: Sequence[int]) -> list[float]:
    """Return the loss of each target of one row in float64; targets of -100 are skipped."""
    with torch.no_grad():
        logits = model()(torch.tensor([list(x)]))[0].double()
    return [(row.logsumexp(0) - row[y]).item() for row, y in zip(logits, targets, strict=True) if y != -100]


def reference(data: Sequence[int], stride: int) -> float:
    """Return nats per token with windows at 0, stride, 2 stride, ..., and one at the end if tokens are left."""
    width = min(T, len(data) - 1)
    starts = [s for s in range(0, len(data), stride) if s + width < len(data)]
    starts.append(len(data) - 1 - width)
    found: dict[int, float] = {}
    for s in starts:
        for k, loss in enumerate(losses_of(data[s : s + width], data[s + 1 : s + width + 1])):
            found.setdefault(s + 1 + k, loss)
    assert sorted(found) == list(range(1, len(data)))
    return math.fsum(found.values()) / len(found)


@settings(max_examples=40)
@given(
    n=st.integers(2, 120), T=st.integers(1, 24), part=st.floats(0, 1), batch=st.integers(1, 5), seed=st.integers(0, 99)
)
def test_every_byte_but_the_first_is_scored_once(n: int, T: int, part: float, batch: int, seed: int) -> None:
    data, stride = some_bytes(n, seed), max(1, round(part * T))
    score = score_stream(bigrams(T), data, stride=stride, batch=batch)
    expected = math.fsum(bigram_losses()[a, b].item() for a, b in itertools.pairwise(data))
    assert score.tokens == n - 1
    assert score.nats_per_token * (n - 1) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("n", "stride"),
    [(2, None), (3, 1), (T, 3), (T + 1, T), (T + 2, T), (T + 2, 1), (2 * T, T - 1), (2 * T + 1, None), (100, 3)],
)
def test_windows(n: int, stride: int | None) -> None:
    """With a model that uses all its context it matters where windows begin and which one counts."""
    ids, sizes = some_ids(n), some_sizes()
    score = score_stream(model(), ids, stride=stride, batch=3, token_sizes=sizes)
    assert score.tokens == n - 1
    assert score.nats_per_token == pytest.approx(reference(ids.tolist(), stride or T), rel=1e-5)
    assert score.bytes == sum(int(sizes[i]) for i in ids.tolist()[1:])
    if n == 100:  # guards: the stride matters for this model
        assert abs(reference(ids.tolist(), 3) - reference(ids.tolist(), T)) > 1e-3


def test_long_sums_are_exact() -> None:
    """20000 equal losses: a float32 sum would drift by more than this."""
    data = b"ab" * 10_000
    losses = bigram_losses()
    a, b = losses[ord("a"), ord("b")].item(), losses[ord("b"), ord("a")].item()
    expected = (10_000 * a + 9_999 * b) / 19_999
    assert score_stream(bigrams(24), data, batch=500).nats_per_token == pytest.approx(expected, rel=2e-7)


def test_bytes_dtypes_and_read_only_arrays() -> None:
    """Token files are memory-mapped."""
    data, ones = some_bytes(70), np.ones(V, dtype=int)
    as_bytes = score_stream(model(), data)
    assert as_bytes.bytes is None
    for array in (np.frombuffer(data, np.uint8), np.array([*data], "<u2"), np.array([*data], "int64")):
        as_ids = score_stream(model(), array, token_sizes=ones)
        assert (as_ids.nats_per_token, as_ids.bytes) == (as_bytes.nats_per_token, 69)
        assert as_ids.bits_per_byte == pytest.approx(as_bytes.bits_per_byte, rel=1e-12)


@settings(max_examples=40)
@given(tokens=st.integers(1, 10**7), nats=st.floats(0, 20), size=st.none() | st.integers(1, 10**8))
def test_bits_per_byte_and_perplexity(tokens: int, nats: float, size: int | None) -> None:
    score = Score(tokens=tokens, nats_per_token=nats, bytes=size)
    assert score.bits_per_byte * (size or tokens) * math.log(2) == pytest.approx(nats * tokens, rel=1e-9)
    assert math.log(score.perplexity) == pytest.approx(nats, rel=1e-9, abs=1e-9)


def test_bfloat16_is_close_to_float32() -> None:
    data = some_bytes(400)
    exact, rough = (score_stream(model(), data, stride=8, precision=p).nats_per_token for p in ("fp32", "bf16"))
    assert rough == pytest.approx(exact, rel=5e-3)
    assert rough != exact


def test_windows_are_cut_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = some_bytes(300)
    expected = score_stream(model(), data, stride=3)
    monkeypatch.setattr("niels_gpt.evaluation.exact.WINDOWS", 7)
    assert score_stream(model(), data, stride=3).nats_per_token == pytest.approx(expected.nats_per_token, rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "rel"), [("fp32", 1e-4), ("bf16", 1e-2)])
def test_on_a_gpu(precision: str, rel: float) -> None:
    data = some_ids(3000)
    wanted = score_stream(model(), data, stride=8).nats_per_token
    on_gpu = copy.deepcopy(model()).to("cuda")
    assert score_stream(on_gpu, data, stride=8, precision=precision).nats_per_token == pytest.approx(wanted, rel=rel)


def test_errors() -> None:
    for stride in (0, T + 1):
        with pytest.raises(ValueError, match=rf"{T}.*{stride}"):
            score_stream(model(), some_bytes(50), stride=stride)
    for data, named in ((b"", "0 bytes"), (b"a", "1 bytes"), (some_ids(1), "1 tokens")):
        with pytest.raises(ValueError, match=named):
            score_stream(model(), data)
    subwords = GPT(ModelConfig(V=257, T=T, C=32, L=1, H=2))
    for text in (b"a text", bytearray(b"a text"), memoryview(b"a text")):
        with pytest.raises(ValueError, match=r"bytes.*V=257.*token_sizes"):
            score_stream(subwords, text)


def some_batches(shapes: list[tuple[int, int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return random rows; half of the targets are -100."""
    draw = torch.Generator().manual_seed(4)
    batches = []
    for shape in shapes:
        x, y = (torch.randint(V, shape, generator=draw) for _ in range(2))
        batches.append((x, torch.where(torch.rand(shape, generator=draw) < 0.5, y, -100)))
    return batches


@pytest.mark.parametrize("shapes", [[(1, T)], [(3, T), (2, T), (1, T)], [(4, 5), (1, 1), (2, T)]])
def test_every_target_is_scored_once(shapes: list[tuple[int, int]]) -> None:
    batches, sizes = some_batches(shapes), some_sizes()
    score = score_examples(model(), iter(batches), token_sizes=sizes)
    losses, size = [], 0
    for x, targets in batches:
        for row, wanted in zip(x.tolist(), targets.tolist(), strict=True):
            losses += losses_of(row, wanted)
            size += sum(int(sizes[target]) for target in wanted if target != -100)
    assert 0 < len(losses) < sum(x.numel() for x, _ in batches)
    assert (score.tokens, score.bytes) == (len(losses), size)
    assert score.nats_per_token == pytest.approx(math.fsum(losses) / len(losses), rel=1e-5)


def test_rows_without_targets_do_not_count() -> None:
    ((x, targets),) = some_batches([(2, T)])
    none, sizes = torch.full_like(targets, -100), some_sizes()
    alone = score_examples(model(), [(x, targets)], token_sizes=sizes)
    assert score_examples(model(), [(x, none), (x, targets), (x, none)], token_sizes=sizes) == alone
    for batches in ([], [(x, none)]):
        with pytest.raises(ValueError, match="target"):
            score_examples(model(), batches, token_sizes=sizes)


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_restored(training: bool) -> None:
    """And there is no dropout."""

    def scores() -> tuple[Score, Score]:
        examples = score_examples(model(), some_batches([(3, T)]), token_sizes=some_sizes())
        return examples, score_stream(model(), some_bytes(60))

    expected, state = scores(), torch.get_rng_state()
    model().train(training)
    try:
        assert scores() == expected
        assert all(module.training is training for module in model().modules())
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        model().eval()
