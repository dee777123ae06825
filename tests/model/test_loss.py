"""The loss compared with a loop with math.log."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt import loss_fn
from niels_gpt.model.loss import summed_loss


def reference(logits: torch.Tensor, y: torch.Tensor) -> float:
    """Mean cross-entropy over the targets that are not -100, position by position."""
    losses = []
    for row, targets in zip(logits.tolist(), y.tolist(), strict=True):
        for scores, target in zip(row, targets, strict=True):
            if target != -100:
                top = max(scores)
                losses.append(top + math.log(math.fsum(math.exp(s - top) for s in scores)) - scores[target])
    return math.fsum(losses) / len(losses)


def example(B: int, T: int, V: int, seed: int, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(B, T, V, generator=generator), torch.randint(V, (B, T), generator=generator)


@settings(deadline=None, max_examples=20)
@given(B=st.integers(1, 4), T=st.integers(1, 6), V=st.integers(2, 30), seed=st.integers(0, 2**31))
def test_mean_over_all_positions(B: int, T: int, V: int, seed: int) -> None:
    logits, y = example(B, T, V, seed)
    loss = loss_fn(logits, y)
    assert loss.shape == () and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(reference(logits, y), rel=1e-5, abs=1e-6)
    assert summed_loss(logits, y).item() == pytest.approx(B * T * reference(logits, y), rel=1e-5, abs=1e-5)


def test_positions_have_equal_weight() -> None:
    logits, y = example(3, 5, 7, seed=1)
    logits[0] *= 10
    assert loss_fn(logits, y).item() == pytest.approx(reference(logits, y), rel=1e-5)


def test_uniform_logits_cost_ln_V() -> None:
    assert loss_fn(torch.zeros(2, 3, 256), torch.zeros(2, 3, dtype=torch.int64)).item() == pytest.approx(math.log(256))


def test_masked_targets_do_not_count() -> None:
    logits, y = example(3, 6, 11, seed=2)
    y[0, 2:] = -100
    y[2] = -100
    assert loss_fn(logits, y).item() == pytest.approx(reference(logits, y), rel=1e-5)
    assert summed_loss(logits, torch.full_like(y, -100)).item() == 0.0
    elsewhere = logits.clone()
    elsewhere[2] += torch.randn(6, 11)
    assert loss_fn(elsewhere, y).item() == loss_fn(logits, y).item()


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[1000.0, 0.0, -1000.0]]])
    assert loss_fn(logits, torch.tensor([[0]])).item() == 0.0
    assert loss_fn(logits, torch.tensor([[2]])).item() == pytest.approx(2000.0)


def test_gradient_is_softmax_minus_one_hot() -> None:
    logits, y = example(2, 3, 5, seed=3)
    logits.requires_grad_()
    loss_fn(logits, y).backward()
    for b in range(2):
        for t in range(3):
            weights = [math.exp(s) for s in logits[b, t].tolist()]
            for v in range(5):
                expected = (weights[v] / sum(weights) - (v == y[b, t].item())) / 6
                assert logits.grad[b, t, v].item() == pytest.approx(expected, abs=1e-6)


def test_views() -> None:
    """Slices of larger tensors, as evaluation uses them."""
    logits, y = example(4, 8, 9, seed=4)
    assert loss_fn(logits[:, ::2], y[:, ::2]).item() == pytest.approx(reference(logits[:, ::2], y[:, ::2]), rel=1e-5)
