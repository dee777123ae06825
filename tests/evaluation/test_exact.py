"""Exact scores of bytes against a sum in which each byte counts in the first window that predicts it."""

from __future__ import annotations

import copy
import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from niels_gpt import GPT, ModelConfig
from niels_gpt.evaluation.exact import Score, score_stream

T = 16


@functools.cache
def model() -> GPT:
    torch.manual_seed(0)
    gpt = GPT(ModelConfig(V=256, T=T, C=32, L=2, H=2, d_ff=64, dropout=0.5))
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

    def hidden(self, x: torch.Tensor, *, positions: None) -> torch.Tensor:
        assert 1 <= x.shape[1] <= self.config.T
        return self.table[x]


@functools.cache
def bigrams(T: int) -> Bigrams:
    return Bigrams(T)


@functools.cache
def bigram_losses() -> torch.Tensor:
    table = bigrams(1).table.double()
    return torch.logsumexp(table, dim=1, keepdim=True) - table  # [before, byte]


def some_bytes(n: int, seed: int = 0) -> bytes:
    return bytes(torch.randint(256, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


@functools.cache
def window_losses(data: bytes) -> list[float]:
    """Return the loss of each byte of a window but the first, in float64."""
    with torch.no_grad():
        logits = model()(torch.tensor([list(data[:-1])]))[0].double()
    return [(row.logsumexp(0) - row[byte]).item() for row, byte in zip(logits, data[1:], strict=True)]


def reference(data: bytes, stride: int) -> float:
    """Return nats per byte with windows at 0, stride, 2 stride, ..., and one at the end if bytes are left."""
    width = min(T, len(data) - 1)
    starts = [s for s in range(0, len(data), stride) if s + width < len(data)]
    starts.append(len(data) - 1 - width)
    found: dict[int, float] = {}
    for s in starts:
        for k, loss in enumerate(window_losses(data[s : s + width + 1])):
            found.setdefault(s + 1 + k, loss)
    assert sorted(found) == list(range(1, len(data)))
    return math.fsum(found.values()) / len(found)


# --- every byte once -------------------------------------------------------------------------------


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
    data = some_bytes(n)
    score = score_stream(model(), data, stride=stride, batch=3)
    assert score.tokens == n - 1
    assert score.nats_per_token == pytest.approx(reference(data, stride or T), rel=1e-5)


@settings(max_examples=15)
@given(n=st.integers(2, 70), stride=st.integers(1, T), batch=st.integers(1, 40))
def test_windows_of_any_stride(n: int, stride: int, batch: int) -> None:
    data = some_bytes(n, seed=5)
    score = score_stream(model(), data, stride=stride, batch=batch)
    assert score.nats_per_token == pytest.approx(reference(data, stride), rel=1e-5)


def test_strides_differ() -> None:
    """Guards the tests above: the stride matters for this model."""
    values = {round(reference(some_bytes(100), stride), 3) for stride in (1, 5, T)}
    assert len(values) == 3


def test_the_batch_size_does_not_matter() -> None:
    data = some_bytes(200)
    values = [score_stream(model(), data, stride=5, batch=batch).nats_per_token for batch in (1, 2, 32, 1000)]
    assert values == pytest.approx([values[0]] * 4, rel=1e-6)


# --- closed forms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 17, 1000])
def test_uniform_logits_cost_eight_bits(n: int) -> None:
    torch.manual_seed(0)
    uniform = GPT(ModelConfig(V=256, T=T, C=8, L=1, H=1))
    with torch.no_grad():
        uniform.tok_emb.weight.zero_()
    score = score_stream(uniform, some_bytes(n))
    assert score.bits_per_byte == pytest.approx(8.0, abs=1e-6)
    assert score.perplexity == pytest.approx(256.0, rel=1e-6)
    assert score.nats_per_token == pytest.approx(math.log(256), rel=1e-6)


def test_a_certain_model_costs_nothing() -> None:
    certain = Bigrams(8)
    certain.table.data = 200.0 * torch.roll(torch.eye(256), 1, dims=1)  # after b comes b + 1
    score = score_stream(certain, bytes(i % 256 for i in range(600)))
    assert score.bits_per_byte == pytest.approx(0.0, abs=1e-9)
    assert score.perplexity == pytest.approx(1.0)


@given(nats=st.floats(0, 20))
def test_bits_and_perplexity(nats: float) -> None:
    score = Score(tokens=5, nats_per_token=nats)
    assert 2**score.bits_per_byte == pytest.approx(math.e**nats, rel=1e-9)
    assert score.perplexity == pytest.approx(2**score.bits_per_byte, rel=1e-9)


def test_long_sums_are_exact() -> None:
    """20000 equal losses: a float32 sum would drift by more than this."""
    data = b"ab" * 10_000
    losses = bigram_losses()
    a, b = losses[ord("a"), ord("b")].item(), losses[ord("b"), ord("a")].item()
    expected = (10_000 * a + 9_999 * b) / 19_999
    assert score_stream(bigrams(24), data, batch=500).nats_per_token == pytest.approx(expected, rel=2e-7)


# --- mode and errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_restored(training: bool) -> None:
    data = some_bytes(60)
    expected = score_stream(model().eval(), data)
    state = torch.get_rng_state()
    model().train(training)
    try:
        assert score_stream(model(), data) == expected  # no dropout
        assert all(module.training is training for module in model().modules())
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        model().eval()


def test_no_gradients_are_recorded() -> None:
    seen: list[bool] = []
    hook = model().lm_head.register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    score_stream(model(), some_bytes(60))
    hook.remove()
    assert seen and not any(seen)


@pytest.mark.parametrize("stride", [0, -1, T + 1])
def test_strides_out_of_range(stride: int) -> None:
    with pytest.raises(ValueError, match=rf"{T}.*{stride}"):
        score_stream(model(), some_bytes(50), stride=stride)


@pytest.mark.parametrize("data", [b"", b"a"])
def test_nothing_to_predict(data: bytes) -> None:
    with pytest.raises(ValueError, match=str(len(data))):
        score_stream(model(), data)


# --- context and precision -------------------------------------------------------------------------


class Counting(Bigrams):
    """After c bytes a zero is 2^c times less likely than any other byte."""

    def hidden(self, x: torch.Tensor, *, positions: None) -> torch.Tensor:
        logits = torch.zeros(*x.shape, 256)
        logits[..., 0] = -math.log(2) * torch.arange(1, x.shape[1] + 1)
        return logits


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_context_of_every_byte(stride: int) -> None:
    """The loss of a zero after c bytes shows c."""
    n = 200

    def loss(context: int) -> float:
        return math.log(255 + 2.0**-context) + context * math.log(2)

    score = score_stream(Counting(16), bytes(n), stride=stride)
    contexts = list(range(1, 17))  # the first window
    while len(contexts) < n - 1:
        contexts += range(16 - stride + 1, 17)
    contexts = contexts[: n - 1]
    left = (n - 1 - 16) % stride  # the last window ends with the stream
    if left:
        contexts[-left:] = range(16 - left + 1, 17)
    assert min(contexts[16:]) >= 16 - stride + 1
    assert score.nats_per_token == pytest.approx(math.fsum(map(loss, contexts)) / (n - 1), rel=1e-6)


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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("precision", "rel"), [("fp32", 1e-4), ("bf16", 1e-2)])
def test_on_a_gpu(precision: str, rel: float) -> None:
    data = some_bytes(3000)
    wanted = score_stream(model(), data, stride=8).nats_per_token
    on_gpu = copy.deepcopy(model()).to("cuda")
    assert score_stream(on_gpu, data, stride=8, precision=precision).nats_per_token == pytest.approx(wanted, rel=rel)
