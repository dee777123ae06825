"""Attention with RoPE over short windows, next to plain float32."""

import pytest
import torch

from niels_gpt.kernels.cuda import attention as cuda_attention
from niels_gpt.model.rope import rope_cache
from tests.kernels.helpers import near


def plain(qkv, sin, cos):
    """(B, n, H, D) by the definition: scores, a mask, a softmax."""
    n, D = qkv.shape[1], qkv.shape[4]
    s, c = sin[:, None], cos[:, None]
    q, k, v = qkv.unbind(2)
    pairs = [
        (x[..., 0::2] * c - x[..., 1::2] * s, x[..., 0::2] * s + x[..., 1::2] * c) for x in (q, k)
    ]  # (B, n, H, D / 2)
    q, k = (torch.stack(pair, -1).flatten(-2) for pair in pairs)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / D**0.5
    scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool, device=qkv.device).triu(1), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def test_not_on_a_cpu():
    assert not cuda_attention.usable(torch.zeros(256, 8, 3 * 64, dtype=torch.bfloat16), 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("B", "n", "wide", "H", "fits"),
    [
        (64, 256, 768, 4, True),
        (64, 257, 768, 4, False),  # a longer window
        (63, 256, 768, 4, False),  # too few programs
        (256, 8, 3 * 128, 1, False),  # a head of 128
        (256, 8, 3 * 48, 1, False),  # not a power of two
    ],
)
def test_where_it_computes(B, n, wide, H, fits, cuda):
    assert cuda_attention.usable(torch.zeros(B, n, wide, dtype=torch.bfloat16, device=cuda), H) is fits
    assert not cuda_attention.usable(torch.zeros(B, n, wide, device=cuda), H)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("B", "n", "H", "D"), [(3, 256, 2, 64), (2, 200, 3, 64), (2, 65, 5, 32), (4, 64, 1, 16), (2, 1, 2, 64)]
)
def test_it_is_attention(B, n, H, D, cuda):
    torch.manual_seed(0)
    qkv = (1.5 * torch.randn(B, n, 3, H, D, device=cuda)).bfloat16().requires_grad_()
    sin, cos = (table[0, 0].to(cuda) for table in rope_cache(n, D))
    weights = torch.randn(B, H, n, D, device=cuda).transpose(1, 2)  # strides of another order
    made = cuda_attention.attend(qkv, sin, cos)
    (made.float() * weights).sum().backward()
    found, qkv.grad = qkv.grad, None
    wanted = plain(qkv.float(), sin, cos)
    assert near(made, wanted, 0.01)
    (wanted * weights).sum().backward()
    assert near(found, qkv.grad, 0.02)
    for part in range(3):  # each of q, k, v by itself, as v's gradients are the largest
        gap = (found[:, :, part].float() - qkv.grad[:, :, part].float()).norm()
        assert gap <= 0.02 * qkv.grad[:, :, part].float().norm() + 1e-3


@pytest.mark.gpu
def test_the_same_bits_again(cuda):
    torch.manual_seed(0)
    qkv = torch.randn(64, 256, 3, 4, 64, device=cuda).bfloat16().requires_grad_()
    sin, cos = (table[0, 0].to(cuda) for table in rope_cache(256, 64))
    made = []
    for _ in range(3):
        y = cuda_attention.attend(qkv, sin, cos)
        made.append((y, *torch.autograd.grad(y.float().square().sum(), qkv)))
    assert all(torch.equal(a, b) for again in made[1:] for a, b in zip(made[0], again, strict=True))
