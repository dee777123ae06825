"""The operations for CPUs compared with their formulas in float64."""

import math
import shutil
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.kernels.cpu import ops as cpu_ops
from niels_gpt.kernels.weights import HeadSizes
from niels_gpt.model.rope import rope_cache
from niels_gpt.system.device import bf16_autocast

in_c = pytest.mark.skipif(not (shutil.which("gcc") and sys.platform.startswith("linux")), reason="needs Linux and gcc")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in C for batches of any size."""
    monkeypatch.setattr(cpu_ops, "MANY", 0)
    monkeypatch.setattr(cpu_ops, "ENOUGH", 0)


# RMSNorm


def norm_weight(dtype: torch.dtype) -> torch.Tensor:
    return (1 + 0.3 * torch.randn(24, generator=torch.Generator().manual_seed(3))).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [0.003, 1.0, 50.0])  # at the first, eps is of the size of the mean square
def test_rms_norm_is_the_formula(size: float, dtype: torch.dtype) -> None:
    weight = norm_weight(dtype)
    x = size * (0.5 + torch.randn(2, 5, 24, dtype=dtype, generator=torch.Generator().manual_seed(4)))
    exact = x.double()
    expected = exact / (exact.square().sum(-1, keepdim=True) / 24 + 1e-5).sqrt() * weight.detach().double()
    for gradients in (True, False):  # a separate implementation each
        result = cpu_ops.rms_norm(x.requires_grad_(gradients), weight, 1e-5)
        assert result.dtype == dtype and result.requires_grad
        assert ("RMSNormOnCPU" in type(result.grad_fn).__name__) == gradients
        tolerance = 1e-5 if dtype == torch.float32 else 1e-13
        torch.testing.assert_close(result.detach().double(), expected, rtol=tolerance, atol=0)


def test_rms_norm_has_the_right_gradient() -> None:
    generator = torch.Generator().manual_seed(5)
    for size in (0.003, 1.0):
        x = size * (0.5 + torch.randn(2, 3, 24, dtype=torch.float64, generator=generator))
        assert torch.autograd.gradcheck(
            lambda x, weight: cpu_ops.rms_norm(x, weight, 1e-5),
            (x.requires_grad_(), norm_weight(torch.float64)),
            eps=1e-6 * size,
            atol=1e-5,
        )


@pytest.mark.parametrize("autocast", [False, True])
def test_rms_norm_has_the_gradient_of_torch(autocast: bool) -> None:
    """In float32, also for a gradient that is not contiguous, and if backward runs inside autocast."""
    weight = norm_weight(torch.float32)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(4, 6, 24, generator=generator)
    upstream = torch.randn(6, 24, 4, generator=generator).permute(2, 0, 1)
    leaf = x.clone().requires_grad_()
    with bf16_autocast("cpu", autocast):
        found = torch.autograd.grad(cpu_ops.rms_norm(leaf, weight, 1e-5), (leaf, weight), upstream)
    expected = torch.autograd.grad(F.rms_norm(leaf, (24,), weight, 1e-5), (leaf, weight), upstream)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert all(gradient.dtype == torch.float32 for gradient in found)


def test_rms_norm_of_zeros() -> None:
    weight, x = norm_weight(torch.float32), torch.zeros(1, 2, 24, requires_grad=True)
    result = cpu_ops.rms_norm(x, weight, 1e-5)
    assert (result == 0).all()
    result.sum().backward()
    torch.testing.assert_close(x.grad, (weight.detach() / 1e-5**0.5).expand(1, 2, 24))
    assert (weight.grad == 0).all()


# GELU


@pytest.mark.parametrize("way", ["F.gelu", "GELUOnPlainCPU", pytest.param("GELUInC", marks=in_c)])
def test_gelu_and_its_gradient(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "SLOW_GELU", way == "GELUOnPlainCPU")
    monkeypatch.setattr(cpu_ops, "MANY", 0 if way == "GELUInC" else 10**9)
    x = torch.cat((torch.linspace(-9, 9, 2001), torch.tensor([0.0, -0.0, 30.0, -30.0, 1e15, -1e15])))
    upstream = torch.randn(len(x), generator=torch.Generator().manual_seed(0))
    leaf, kept = x.clone().requires_grad_(), x.clone()
    y = cpu_ops.gelu(leaf)
    assert (way if way != "F.gelu" else "Gelu") in type(y.grad_fn).__name__
    (found,) = torch.autograd.grad(y, leaf, upstream)
    for value, made, dy, dz in zip(kept.tolist(), y.tolist(), found.tolist(), upstream.tolist(), strict=True):
        below = 0.5 * math.erfc(-value / math.sqrt(2))
        density = math.exp(-0.5 * value * value) / math.sqrt(2 * math.pi)
        assert made == pytest.approx(value * below, rel=1e-5, abs=1e-6)
        assert dy == pytest.approx(dz * (below + value * density), rel=1e-5, abs=2e-6)
    assert torch.equal(leaf.detach(), kept)


@in_c
@pytest.mark.parametrize("n", [1, 3, 15, 16, 17, 64, 65, 1023, 4096, 4097, 9001])
def test_gelu_in_c_of_any_length(n: int, always: None) -> None:
    """Lengths that do not fill the vector registers; nothing is written beyond the end."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).requires_grad_()
    y = cpu_ops.gelu(x)
    assert "GELUInC" in type(y.grad_fn).__name__
    torch.testing.assert_close(y, F.gelu(x.double()).float(), rtol=1e-5, atol=1e-6)


@in_c
def test_gelu_in_c_keeps_nan(always: None) -> None:
    x = torch.tensor([1.0, math.nan, 2.0]).requires_grad_()
    y = cpu_ops.gelu(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert y.isnan().tolist() == slope.isnan().tolist() == [False, True, False]


# attention


def naive(qkv: torch.Tensor, heads: HeadSizes, tables: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """Attention by its formula, one query at a time, in float64."""
    n, (H, G, D) = qkv.shape[1], heads
    q, k, v = qkv.double().unflatten(2, (H + 2 * G, D)).split((H, G, G), dim=2)
    k, v = (x[:, :, [h * G // H for h in range(H)]] for x in (k, v))  # (B, n, H, D)
    if tables is not None:
        sin, cos = (t.double()[:, None] for t in tables)  # (n, 1, D/2)

        def rotated(x: torch.Tensor) -> torch.Tensor:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)

        q, k = rotated(q), rotated(k)
    rows = []
    for i in range(n):
        scores = torch.einsum("bhd,bjhd->bhj", q[:, i], k[:, : i + 1]) / math.sqrt(D)
        shares = scores.exp() / scores.exp().sum(-1, keepdim=True)
        rows.append(torch.einsum("bhj,bjhd->bhd", shares, v[:, : i + 1]))
    return torch.stack(rows, dim=1).flatten(2)


def tables_of(n: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    sin, cos = rope_cache(n, D)
    return sin[0, 0].contiguous(), cos[0, 0].contiguous()


def both(qkv: torch.Tensor, operation: Callable[[torch.Tensor], torch.Tensor], upstream: torch.Tensor):
    leaf = qkv.clone().requires_grad_()
    y = operation(leaf)
    return y.detach(), *torch.autograd.grad(y, leaf, upstream.to(y.dtype))


def check_attention(B: int, n: int, heads: HeadSizes, rope: bool) -> None:
    generator, (H, G, D) = torch.Generator().manual_seed(n), heads
    qkv, upstream = (torch.randn(B, n, width * D, generator=generator) for width in (H + 2 * G, H))
    tables = tables_of(n, D) if rope else None
    assert cpu_ops.attends(qkv, D)
    y, gradient = both(qkv, lambda x: cpu_ops.attend(x, heads, *(tables or (None, None))), upstream)
    expected, expected_gradient = both(qkv, lambda x: naive(x, heads, tables), upstream)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected_gradient.double(), rtol=1e-5, atol=3e-5)


@in_c
@pytest.mark.parametrize(("D", "rope"), [(16, True), (48, False), (64, True), (80, True), (128, False), (256, True)])
def test_attention_in_c_of_heads_of_any_size(D: int, rope: bool, always: None) -> None:
    check_attention(2, 70, HeadSizes(2, 2, D), rope)


@in_c
@settings(max_examples=15)
@given(
    B=st.integers(1, 3),
    n=st.integers(1, 200),
    G=st.integers(1, 3),
    per_group=st.integers(1, 3),
    D=st.sampled_from([16, 64]),
    rope=st.booleans(),
)
def test_attention_in_c_of_any_shape(B: int, n: int, G: int, per_group: int, D: int, rope: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_ops, "ENOUGH", 0)
        check_attention(B, n, HeadSizes(G * per_group, G, D), rope)


@in_c
def test_attention_in_c_has_the_same_bits_for_any_threads_and_neighbours(always: None) -> None:
    generator, heads = torch.Generator().manual_seed(0), HeadSizes(2, 1, 32)
    qkv, upstream = (torch.randn(5, 90, width * 32, generator=generator) for width in (4, 2))
    tables = tables_of(90, 32)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(both(qkv, lambda x: cpu_ops.attend(x, heads, *tables), upstream))
    finally:
        torch.set_num_threads(before)
    alone = both(qkv[3:4].contiguous(), lambda x: cpu_ops.attend(x, heads, *tables), upstream[3:4])
    for y, gradient in found:
        assert torch.equal(y, found[0][0]) and torch.equal(gradient, found[0][1])
        assert torch.equal(y[3:4], alone[0]) and torch.equal(gradient[3:4], alone[1])


@in_c
def test_attention_in_c_sees_nothing_of_the_future(always: None) -> None:
    qkv, heads = torch.randn(1, 100, 3 * 16, generator=torch.Generator().manual_seed(0)), HeadSizes(1, 1, 16)
    y = cpu_ops.attend(qkv, heads, None, None)
    for at in (1, 15, 16, 63, 64, 99):
        other = qkv.clone()
        other[:, at:] = 1e25  # its scores overflow float32
        assert torch.equal(cpu_ops.attend(other, heads, None, None)[:, :at], y[:, :at])
        other[:, at:] = math.nan
        assert cpu_ops.attend(other, heads, None, None)[:, at:].isnan().all()  # NaN spreads to all that see it


@in_c
def test_attention_in_c_of_scores_far_apart(always: None) -> None:
    """exp(score) and exp(-score) overflow float32."""
    generator = torch.Generator().manual_seed(0)
    qkv, upstream = torch.randn(1, 80, 3, 1, 16, generator=generator), torch.randn(1, 80, 16, generator=generator)
    qkv[:, :, :2] *= 15
    found = both(qkv.view(1, 80, 48), lambda x: cpu_ops.attend(x, HeadSizes(1, 1, 16), None, None), upstream)
    q, k, v = (qkv.double()[:, :, i].transpose(1, 2).requires_grad_() for i in range(3))
    scores = (q @ k.mT / 4).masked_fill(torch.ones(80, 80).triu(1).bool(), -math.inf)
    assert scores[scores.isfinite()].abs().max() > 200
    y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    gradients = torch.autograd.grad(y, (q, k, v), upstream.double())
    torch.testing.assert_close(found[0].double(), y.detach(), rtol=1e-4, atol=1e-4)
    expected = torch.stack([g.transpose(1, 2) for g in gradients], dim=2).flatten(2)
    torch.testing.assert_close(found[1].double(), expected, rtol=1e-3, atol=2e-3)


def test_what_attention_in_c_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "_attention_kernels", lambda D: object())
    batch = torch.zeros(8, 256, 3 * 64)
    assert cpu_ops.attends(batch, 16)
    assert cpu_ops.attends(batch[:2], 16) and not cpu_ops.attends(batch[:1], 16)  # few tokens: SDPA
    assert not cpu_ops.attends(batch, 24) and not cpu_ops.attends(batch, 8)
    assert not cpu_ops.attends(batch.double(), 16) and not cpu_ops.attends(batch.bfloat16(), 16)
    assert not cpu_ops.attends(batch.transpose(0, 1), 16)
    assert not cpu_ops.attends(torch.zeros(1, cpu_ops.LONGEST + 1, 48), 16)


# matmuls


def test_linear_with_a_transposed_matrix(monkeypatch: pytest.MonkeyPatch, always: None) -> None:
    monkeypatch.setattr(cpu_ops, "WITHOUT_MKL", True)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 7, generator=generator).requires_grad_()
    weight = torch.randn(11, 7, generator=generator).requires_grad_()
    upstream = torch.randn(3, 5, 11, generator=generator)
    y = cpu_ops.linear(x, weight)
    assert "LinearWithoutMKL" in type(y.grad_fn).__name__
    dx, dweight = torch.autograd.grad(y, (x, weight), upstream)
    torch.testing.assert_close(y, torch.einsum("bti,oi->bto", x, weight), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx, torch.einsum("bto,oi->bti", upstream, weight), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dweight, torch.einsum("bto,bti->oi", upstream, x), rtol=1e-5, atol=1e-5)


@in_c
def test_kernels_may_first_be_used_in_inference_mode(always: None) -> None:
    cpu_ops._attention_kernels.cache_clear()
    cpu_ops.gelu_kernel.cache_clear()
    with torch.inference_mode():
        qkv = torch.randn(1, 5, 3 * 2 * 16, generator=torch.Generator().manual_seed(1))
        assert cpu_ops.attends(qkv, 16)
        y = cpu_ops.attend(qkv, HeadSizes(2, 2, 16), None, None)
        q, k, v = qkv.view(1, 5, 3, 2, 16).transpose(1, 3).unbind(2)
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    assert torch.allclose(y, expected, atol=1e-6)
    assert cpu_ops.gelu_kernel() is not None
