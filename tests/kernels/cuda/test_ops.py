"""The fused operators for CUDA compared with plain torch."""

import pytest
import torch
import torch.nn.functional as F

from niels_gpt.kernels.cuda import ops as cuda_ops
from niels_gpt.model.rope import rope_cache
from tests.kernels.helpers import near


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("B", "n", "H", "G", "D"),
    [(2, 33, 4, 4, 64), (3, 17, 6, 6, 48), (1, 1, 1, 1, 2), (2, 20, 12, 12, 64), (2, 33, 9, 3, 64), (3, 17, 8, 1, 48)],
)
def test_rotated_heads(B, n, H, G, D, cuda):
    torch.manual_seed(0)
    qkv = torch.randn(B, n, H + 2 * G, D, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    sin, cos = (table[0, 0].to(cuda) for table in rope_cache(n, D))
    found = cuda_ops.rotated_heads(qkv, sin, cos, H)
    weights = [torch.randn(B, N, n, D, device=cuda).transpose(1, 2) for N in (H, G, G)]  # strides of another order
    sum((a.float() * w).sum() for a, w in zip(found, weights, strict=True)).backward()
    got = qkv.grad.clone()
    qkv.grad = None
    x = qkv.float()
    q, k, v = x.split((H, G, G), dim=2)
    rotated = []
    for part in (q, k):
        even, odd = part[..., 0::2], part[..., 1::2]
        pair = (even * cos[:, None] - odd * sin[:, None], even * sin[:, None] + odd * cos[:, None])
        rotated.append(torch.stack(pair, dim=-1).flatten(-2))
    expected = (*rotated, v)
    for a, b in zip(found, expected, strict=True):
        assert near(a, b, 0.005)
    sum((a * w).sum() for a, w in zip(expected, weights, strict=True)).backward()
    assert near(got, qkv.grad, 0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2, 50, 1536, 2816])
def test_activations(width, cuda):
    torch.manual_seed(0)

    def swiglu(x):
        return F.silu(x[..., :width]) * x[..., width:]

    for gated, plain, size in ((False, F.gelu, width), (True, swiglu, 2 * width)):
        x = (3 * torch.randn(3, 7, size, device=cuda)).to(torch.bfloat16).requires_grad_()
        y = cuda_ops.activation(x, gated)
        weights = torch.randn(y.shape, device=cuda)
        (y.float() * weights).sum().backward()
        found = x.grad.clone()
        x.grad = None
        expected = plain(x.float())
        assert near(y, expected, 0.005)
        (expected * weights).sum().backward()
        assert near(found, x.grad, 0.01)
