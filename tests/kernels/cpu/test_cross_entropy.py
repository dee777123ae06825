"""The loss of a head in chunks of rows: value and gradients as torch's, with less memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from niels_gpt.config import ModelConfig
from niels_gpt.kernels.cpu import cross_entropy
from niels_gpt.kernels.cpu.cross_entropy import linear_cross_entropy
from niels_gpt.model.backend import CPU, PLAIN, use_backend
from niels_gpt.model.gpt import GPT

C, V = 24, 301


@pytest.fixture
def chunks(monkeypatch):
    """Make chunks of 16 rows."""
    monkeypatch.setattr(cross_entropy, "LOGITS_BYTES", 1)
    monkeypatch.setattr(cross_entropy, "FEWEST_ROWS", 16)


def inputs(N: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(N)
    h = torch.randn(N, C, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(V, C, generator=generator, dtype=dtype).requires_grad_()
    return h, weight, torch.randint(V, (N,), generator=generator)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("total", [None, 100])
@pytest.mark.parametrize("N", [1, 16, 17, 50])
def test_loss_and_gradients_are_those_of_torch(N: int, total: int | None, transposed: bool, chunks: None) -> None:
    h, weight, targets = inputs(N)
    divisor = None if total is None else torch.tensor(total)
    loss = linear_cross_entropy(h, weight, targets, divisor, transposed=transposed)
    expected = F.cross_entropy(h @ weight.t(), targets, reduction="sum") / (total or N)
    torch.testing.assert_close(loss, expected)
    found, wanted = (torch.autograd.grad(3 * value, (h, weight)) for value in (loss, expected))
    torch.testing.assert_close(found, wanted)


def test_gradients_of_a_loss_that_is_not_scaled(chunks: None) -> None:
    h, weight, targets = inputs(40)
    loss = linear_cross_entropy(h, weight, targets, None)
    expected = torch.autograd.grad(F.cross_entropy(h @ weight.t(), targets), (h, weight))
    for _ in range(2):  # a second backward does not find the gradients changed
        torch.testing.assert_close(torch.autograd.grad(loss, (h, weight), retain_graph=True), expected)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close((h.grad, weight.grad), tuple(2 * g for g in expected))


@pytest.mark.parametrize("of_weight", [False, True])
def test_only_gradients_that_are_wanted(of_weight: bool, chunks: None) -> None:
    h, weight, targets = inputs(40)
    frozen, trained = (h, weight) if of_weight else (weight, h)
    frozen.requires_grad_(False)
    linear_cross_entropy(h, weight, targets, None).backward()
    assert frozen.grad is None
    (expected,) = torch.autograd.grad(F.cross_entropy(h @ weight.t(), targets), trained)
    torch.testing.assert_close(trained.grad, expected)
    with torch.no_grad():
        loss = linear_cross_entropy(h, weight, targets, None)
    torch.testing.assert_close(loss, F.cross_entropy(h @ weight.t(), targets).detach())
    assert not loss.requires_grad


def test_bf16_has_bf16_matmuls_and_a_float32_softmax(chunks: None) -> None:
    h, weight, targets = inputs(50, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(h, weight, targets, None)
        expected = F.cross_entropy(F.linear(h, weight), targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    found, wanted = (torch.autograd.grad(value, (h, weight)) for value in (loss, expected))
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.01 * b.norm()


def test_gradients_of_bfloat16_weights_add_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    h, weight, targets = inputs(600, torch.float32)
    (expected,) = torch.autograd.grad(linear_cross_entropy(h, weight, targets, None), weight)
    half = weight.detach().bfloat16().requires_grad_()
    monkeypatch.setattr(cross_entropy, "LOGITS_BYTES", 1)
    monkeypatch.setattr(cross_entropy, "FEWEST_ROWS", 2)
    (found,) = torch.autograd.grad(linear_cross_entropy(h.bfloat16(), half, targets, None), half)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() < 0.01 * expected.norm()


def test_large_logits_do_not_overflow(chunks: None) -> None:
    h, weight, targets = inputs(30, torch.float32)
    loss = linear_cross_entropy(1e4 * h, weight, targets, None)
    torch.testing.assert_close(loss, F.cross_entropy(1e4 * h @ weight.t(), targets))
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (h, weight)))
    assert linear_cross_entropy(h * float("nan"), weight, targets, None).isnan()


@pytest.mark.parametrize(
    ("N", "V", "expected"), [(10, 100, [10]), (4096, 49152, [316] * 12 + [304]), (300, 10**6, [150, 150])]
)
def test_chunks_are_equal_and_not_too_small(N: int, V: int, expected: list[int]) -> None:
    parts = cross_entropy._chunks(N, V)
    assert [min(part.stop, N) - part.start for part in parts] == expected


class _Largest(TorchDispatchMode):
    """Records the number of elements of the largest result."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("masked", [0, 100, 128])
def test_a_model_uses_it_for_many_logits(
    tied: bool, masked: int, chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients are those of the plain backend, and no tensor has the logits of all positions."""
    monkeypatch.setattr(cross_entropy, "FEWEST_LOGITS", V * 20)
    torch.manual_seed(0)
    model = GPT(ModelConfig(V=V, T=64, C=16, L=1, H=2, dropout=0, tie_embeddings=tied)).double()
    x = torch.randint(V, (2, 64))
    targets = x.roll(-1, 1)
    targets.view(-1)[:masked] = -100
    found = []
    for backend in (CPU, PLAIN):
        model.zero_grad()
        with use_backend(model, backend), _Largest() as largest:
            loss = model.loss(x, targets, total=torch.tensor(99))
            loss.backward()
        found.append((loss.detach(), [p.grad for p in model.parameters()]))
        if backend is CPU:
            assert (largest.elements < (128 - masked) * V) == (masked < 128)
    torch.testing.assert_close(*found)
