"""The cross-entropy without all logits compared with torch's."""

import pytest
import torch
import torch.nn.functional as F

from niels_gpt.kernels.cuda import cross_entropy
from tests.kernels.helpers import head_of, near


@pytest.mark.gpu
@pytest.mark.parametrize(("V", "N", "C"), [(7, 5, 16), (256, 1000, 256), (16004, 3000, 512), (50304, 12000, 64)])
def test_linear_cross_entropy(V, N, C, cuda, monkeypatch):
    monkeypatch.setattr(cross_entropy, "LOGITS_SHARE", 0)
    monkeypatch.setattr(cross_entropy, "LOGITS_BYTES", 1 << 27)  # several chunks here too
    h, weight, y, total = head_of(V, N, C, cuda)
    (1.5 * cross_entropy.linear_cross_entropy(h, weight, y, total)).backward()
    found = h.grad, weight.grad
    h.grad = weight.grad = None
    logits = h.float() @ weight.to(torch.bfloat16).float().t()
    expected = F.cross_entropy(logits, y)
    assert torch.allclose(cross_entropy.linear_cross_entropy(h, weight, y, total), expected, rtol=1e-3)
    (1.5 * expected).backward()
    assert near(found[0], h.grad, 0.01)
    assert near(found[1], weight.grad, 0.01)
    assert (found[0][::4] == 0).all()


@pytest.mark.gpu
def test_a_frozen_head_gets_no_gradient(cuda):
    h, weight, y, total = head_of(256, 1000, 64, cuda)
    cross_entropy.linear_cross_entropy(h, weight, y, total).backward()
    expected, h.grad = h.grad, None
    frozen = weight.detach()
    cross_entropy.linear_cross_entropy(h, frozen, y, total).backward()
    assert torch.equal(h.grad, expected)
    assert frozen.grad is None
