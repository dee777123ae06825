"""GELU as it is put together where torch is slow, next to its formula. RMSNorm is tested with the model."""

import math

import pytest
import torch

from niels_gpt.model import on_cpu


@pytest.mark.parametrize("slow", [False, True])
def test_gelu_and_its_gradient(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "SLOW_GELU", slow)
    x = torch.cat((torch.linspace(-9, 9, 2001), torch.tensor([0.0, -0.0, 30.0, -30.0, 1e20, -1e20])))
    upstream = torch.randn(len(x), generator=torch.Generator().manual_seed(0))
    leaf, kept = x.clone().requires_grad_(), x.clone()
    y = on_cpu.gelu(leaf)
    assert ("GELUOnPlainCPU" in type(y.grad_fn).__name__) == slow
    (found,) = torch.autograd.grad(y, leaf, upstream)
    for value, made, dy, dz in zip(kept.tolist(), y.tolist(), found.tolist(), upstream.tolist(), strict=True):
        below = 0.5 * math.erfc(-value / math.sqrt(2))
        density = math.exp(-0.5 * value * value) / math.sqrt(2 * math.pi)
        assert made == pytest.approx(value * below, rel=1e-5, abs=1e-6)
        assert dy == pytest.approx(dz * (below + value * density), rel=1e-5, abs=2e-6)
    assert torch.equal(leaf.detach(), kept)
