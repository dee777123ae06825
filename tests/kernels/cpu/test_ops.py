"""What stands in for torch on a CPU, next to formulas in float64. RMSNorm is tested with the model."""

import math
import shutil
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.config import ModelConfig
from niels_gpt.kernels.cpu import native
from niels_gpt.kernels.cpu import ops as cpu_ops
from niels_gpt.model.gpt import GPT
from niels_gpt.model.rope import rope_cache

in_c = pytest.mark.skipif(not (shutil.which("gcc") and sys.platform.startswith("linux")), reason="needs Linux and gcc")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in C for batches of any size."""
    monkeypatch.setattr(cpu_ops, "MANY", 0)


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
    """Numbers that do not fill the vectors, and nothing written beyond them."""
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


def naive(qkv: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """Attention by its formula, one query at a time, in float64."""
    n, D = qkv.shape[1], qkv.shape[4]
    q, k, v = qkv.double().unbind(2)  # (B, n, H, D)
    if tables is not None:
        sin, cos = (t.double()[:, None] for t in tables)  # (n, 1, D/2)

        def turned(x: torch.Tensor) -> torch.Tensor:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)

        q, k = turned(q), turned(k)
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


def check_attention(B: int, n: int, H: int, D: int, turned: bool) -> None:
    generator = torch.Generator().manual_seed(n)
    qkv, upstream = torch.randn(B, n, 3, H, D, generator=generator), torch.randn(B, n, H * D, generator=generator)
    tables = tables_of(n, D) if turned else None
    assert cpu_ops.attends(qkv.view(B, n, -1), D)
    y, gradient = both(qkv, lambda x: cpu_ops.attend(x, *(tables or (None, None))), upstream)
    expected, expected_gradient = both(qkv, lambda x: naive(x, tables), upstream)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected_gradient.double(), rtol=1e-5, atol=3e-5)


@in_c
@pytest.mark.parametrize("D", [16, 32, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("turned", [True, False])
def test_attention_in_c_of_heads_of_any_size(D: int, turned: bool, always: None) -> None:
    check_attention(2, 70, 2, D, turned)


@in_c
@settings(max_examples=25)
@given(
    B=st.integers(1, 3), n=st.integers(1, 200), H=st.integers(1, 3), D=st.sampled_from([16, 64]), turned=st.booleans()
)
def test_attention_in_c_of_any_shape(B: int, n: int, H: int, D: int, turned: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_ops, "MANY", 0)
        check_attention(B, n, H, D, turned)


@in_c
def test_attention_in_c_has_the_same_bits_for_any_threads_and_neighbours(always: None) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv, upstream = torch.randn(5, 90, 3, 2, 32, generator=generator), torch.randn(5, 90, 64, generator=generator)
    tables = tables_of(90, 32)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(both(qkv, lambda x: cpu_ops.attend(x, *tables), upstream))
    finally:
        torch.set_num_threads(before)
    alone = both(qkv[3:4].contiguous(), lambda x: cpu_ops.attend(x, *tables), upstream[3:4])
    for y, gradient in found:
        assert torch.equal(y, found[0][0]) and torch.equal(gradient, found[0][1])
        assert torch.equal(y[3:4], alone[0]) and torch.equal(gradient[3:4], alone[1])


@in_c
def test_attention_in_c_sees_nothing_of_the_future(always: None) -> None:
    qkv = torch.randn(1, 100, 3, 1, 16, generator=torch.Generator().manual_seed(0))
    y = cpu_ops.attend(qkv, None, None)
    for at in (1, 15, 16, 63, 64, 99):
        other = qkv.clone()
        other[:, at:] = 1e25  # its scores are beyond float32
        assert torch.equal(cpu_ops.attend(other, None, None)[:, :at], y[:, :at])
        other[:, at:] = math.nan
        assert cpu_ops.attend(other, None, None)[:, at:].isnan().all()  # what is no number is not lost


@in_c
def test_attention_in_c_of_scores_far_apart(always: None) -> None:
    """Where e to the score, or to minus it, is beyond float32."""
    generator = torch.Generator().manual_seed(0)
    qkv, upstream = torch.randn(1, 80, 3, 1, 16, generator=generator), torch.randn(1, 80, 16, generator=generator)
    qkv[:, :, :2] *= 15
    found = both(qkv, lambda x: cpu_ops.attend(x, None, None), upstream)
    q, k, v = (qkv.double()[:, :, i].transpose(1, 2).requires_grad_() for i in range(3))
    scores = (q @ k.mT / 4).masked_fill(torch.ones(80, 80).triu(1).bool(), -math.inf)
    assert scores[scores.isfinite()].abs().max() > 200
    y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    gradients = torch.autograd.grad(y, (q, k, v), upstream.double())
    torch.testing.assert_close(found[0].double(), y.detach(), rtol=1e-4, atol=1e-4)
    expected = torch.stack([g.transpose(1, 2) for g in gradients], dim=2)
    torch.testing.assert_close(found[1].double(), expected, rtol=1e-3, atol=2e-3)


def test_what_attention_in_c_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "_attention_kernels", lambda D: object())
    batch = torch.zeros(8, 256, 3 * 64)
    assert cpu_ops.attends(batch, 16)
    assert not cpu_ops.attends(batch[:7], 16)  # few tokens: SDPA
    assert not cpu_ops.attends(batch, 24) and not cpu_ops.attends(batch, 8)
    assert not cpu_ops.attends(batch.double(), 16) and not cpu_ops.attends(batch.bfloat16(), 16)
    assert not cpu_ops.attends(batch.transpose(0, 1), 16)
    assert not cpu_ops.attends(torch.zeros(1, cpu_ops.LONGEST + 1, 48), 16)


# products


def test_linear_with_the_matrix_turned(monkeypatch: pytest.MonkeyPatch, always: None) -> None:
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


# the whole model


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How often attention went which way."""
    counts = {"in C": 0, "SDPA": 0}
    ours, sdpa = cpu_ops.attend, F.scaled_dot_product_attention

    def count(key: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counting(*args: object, **kwargs: object) -> torch.Tensor:
            counts[key] += 1
            return function(*args, **kwargs)

        return counting

    monkeypatch.setattr(cpu_ops, "attend", count("in C", ours))
    monkeypatch.setattr(F, "scaled_dot_product_attention", count("SDPA", sdpa))
    return counts


@in_c
@pytest.mark.parametrize(
    "options", [{}, {"positions": "learned"}, {"norm": "rmsnorm", "mlp": "swiglu"}], ids=["v0", "learned", "v1"]
)
@pytest.mark.parametrize("mkl", [True, False])
def test_a_model_learns_the_same_with_and_without(
    options: dict[str, str], mkl: bool, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_ops, "WITHOUT_MKL", not mkl)
    torch.manual_seed(0)
    model = GPT(ModelConfig(V=40, T=72, C=32, L=2, H=2, dropout=0.0, **options))
    assert cpu_ops._attention_kernels(16) is not None, native.problem()
    counted["SDPA"] = 0
    x, y = torch.randint(0, 40, (2, 3, 72))
    found = []
    for many in (10**9, 0):
        monkeypatch.setattr(cpu_ops, "MANY", many)
        loss = model.loss(x, y)
        found.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
    assert counted == {"in C": 2, "SDPA": 2}  # a call a layer
    for torchs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=2e-6)


@in_c
def test_a_prompt_goes_through_sdpa_and_a_batch_to_learn_from_does_not(counted: dict[str, int]) -> None:
    model = GPT(ModelConfig(V=40, T=128, C=32, L=1, H=2, dropout=0.0))
    cpu_ops._attention_kernels(16)
    counted["SDPA"] = 0
    model(torch.zeros(1, 128, dtype=torch.long))
    assert counted == {"in C": 0, "SDPA": 1}
    model(torch.zeros(16, 128, dtype=torch.long))
    assert counted == {"in C": 1, "SDPA": 1}


@in_c
def test_under_bf16_autocast_attention_in_c_stays_float32(counted: dict[str, int], always: None) -> None:
    model = GPT(ModelConfig(V=40, T=64, C=32, L=1, H=2, dropout=0.0))
    cpu_ops._attention_kernels(16)
    x = torch.randint(0, 40, (2, 64), generator=torch.Generator().manual_seed(0))
    plain = model(x)
    from niels_gpt.system.device import bf16_autocast

    with bf16_autocast("cpu"):
        rounded = model(x)
    assert counted["in C"] == 2
    torch.testing.assert_close(rounded.float(), plain, rtol=0.05, atol=0.05)
