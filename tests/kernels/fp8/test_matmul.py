"""FP8 matmuls: their results and gradients, on a CPU with the kernels in plain torch, and on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from niels_gpt.kernels.cuda import cross_entropy
from niels_gpt.kernels.cuda import ops as cuda_ops
from niels_gpt.kernels.fp8 import matmul as fp8
from niels_gpt.kernels.fp8 import quantize
from niels_gpt.model.rope import rope_cache
from tests.kernels.fp8.test_quantize import exact, exact_matrix, restored
from tests.kernels.helpers import head_of, near


def test_a_linear_layer_and_its_gradients():
    torch.manual_seed(0)
    x = torch.randn(2, 20, 32).to(torch.bfloat16).requires_grad_()
    weight = torch.randn(48, 32).requires_grad_()
    y = fp8.linear(x, weight, *quantize.matrices([([weight], None)]))
    g = torch.randn(2, 20, 48).to(torch.bfloat16)
    y.backward(g)
    rows = [t.detach().float().flatten(0, -2) for t in (x, g)]
    rounded = exact_matrix(weight.detach())
    assert near(y.flatten(0, 1), exact(rows[0]) @ rounded.t(), 0.01)
    assert near(x.grad.flatten(0, 1), exact(rows[1]) @ rounded, 0.01)
    assert near(weight.grad, rows[1].t() @ rows[0], 0.01)
    assert weight.grad.dtype == torch.float32


ACTIVATIONS = {False: F.gelu, True: lambda u: F.silu(u.chunk(2, -1)[0]) * u.chunk(2, -1)[1]}


def check_mlp(M, gated, device):
    torch.manual_seed(0)
    C, F_ = 96, 160
    x = F.rms_norm(torch.randn(M, C, device=device), (C,)).to(torch.bfloat16).requires_grad_()
    into = (0.1 * torch.randn(F_ * (1 + gated), C, device=device)).requires_grad_()
    out = (0.8 * torch.randn(C, F_, device=device)).requires_grad_()
    g = (torch.randn(M, C, device=device) * 2.0 ** torch.randint(-20, 0, (M, 1), device=device)).to(torch.bfloat16)
    g[3] = 0
    found = []
    for in_fp8 in (True, False):
        x.grad = into.grad = out.grad = None
        if in_fp8:
            matrices = quantize.matrices([([into], None), ([out], None)])
            y = fp8.mlp(x, into, out, (matrices[0], matrices[1]), gated=gated)
        else:
            y = ACTIVATIONS[gated](x.float() @ into.t()) @ out.t()
        y.backward(g.to(y.dtype))
        found.append((y, x.grad, into.grad, out.grad))
    for a, b in zip(*found, strict=True):
        assert (a - b).float().norm() < 0.09 * b.float().norm()
    # no row loses precision because another is larger
    ours, plain = (grads[1].float() for grads in found)
    assert ((ours - plain).norm(dim=1) <= 0.15 * plain.norm(dim=1)).all()


@pytest.fixture
def kernels_in_plain_torch(monkeypatch):
    """The kernels of an MLP in plain torch, so that the code around them is tested without a GPU."""

    def activate(u, gated):
        parts = [part.float().abs().amax(1, keepdim=True) for part in u.chunk(1 + gated, -1)]
        scales = quantize.power_of_two_scale(parts[0] * parts[1] if gated else parts[0])
        bounds = torch.maximum(parts[0], 1.1 * parts[1]) if gated else torch.full_like(scales, 1.13)
        return (ACTIVATIONS[gated](u.float()) / scales).to(torch.float8_e4m3fn), scales, bounds

    def activate_back(dy, u, factors, shares, gated):
        x = u.float().requires_grad_()
        with torch.enable_grad():
            y = ACTIVATIONS[gated](x)
        y.backward(dy.float() * factors)
        assert x.grad.abs().max() <= 448  # the bound holds
        assert (y * shares).abs().max() <= 448
        du = x.grad.to(torch.float8_e4m3fn)
        return du, quantize.transposed(du), quantize.transposed((y.detach() * shares).to(torch.float8_e4m3fn))

    monkeypatch.setattr(fp8, "_activation", activate)
    monkeypatch.setattr(fp8, "_activation_backward", activate_back)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("M", [40, 250])
def test_mlp(M, gated, kernels_in_plain_torch):
    check_mlp(M, gated, "cpu")


# --- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("M", "F"), [(9, 16), (70, 112), (16, 1536), (33, 3072)])
def test_activations_and_the_bound_on_their_gradient(M, F, gated, hopper):
    torch.manual_seed(0)
    sizes = 2.0 ** (torch.arange(M, device=hopper) % 9 - 4)
    u = (sizes[:, None] * torch.randn(M, F * (1 + gated), device=hopper)).to(torch.bfloat16)
    u[2] = 0
    y = ACTIVATIONS[gated](u.float())
    quantized, scales, bounds = fp8._activation(u, gated)
    assert near(restored(quantized, scales), y, 0.07)
    assert (scales.log2() == scales.log2().round()).all()
    # the gradient is at most the bound times the incoming one, and the bound is not much larger than necessary
    x = u.float().requires_grad_()
    ACTIVATIONS[gated](x).sum().backward()
    largest = x.grad.abs().amax(1)
    assert (largest <= 1.001 * bounds[:, 0] + 1e-6).all()
    assert (bounds[:, 0] <= 8 * largest + 0.7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("M", "F"), [(9, 16), (70, 112), (128, 1536)])
def test_the_backward_of_activations(M, F, gated, hopper):
    torch.manual_seed(0)
    u = torch.randn(M, F * (1 + gated), device=hopper, dtype=torch.bfloat16)
    dy = torch.randn(M, F, device=hopper, dtype=torch.bfloat16)
    factors, shares = (2.0 ** torch.randint(-6, 7, (M, 1), device=hopper) for _ in range(2))
    x = u.float().requires_grad_()
    y = ACTIVATIONS[gated](x)
    y.backward(dy.float() * factors)
    quantized, transposed, again = fp8._activation_backward(dy, u, factors, shares, gated)
    assert near(quantized.float(), x.grad, 0.07)
    assert torch.equal(transposed[:, :M].float(), quantized.float().t())
    assert near(again[:, :M].float(), (y * shares).t(), 0.07)
    assert all((t[:, M:].float() == 0).all() for t in (transposed, again))


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("M", [40, 250])
def test_mlp_on_a_gpu(M, gated, hopper):
    check_mlp(M, gated, hopper)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [True, False])
def test_heads(transposed, hopper):
    torch.manual_seed(0)
    B, n, H, D = 2, 16, 3, 32
    C = H * D
    x = torch.randn(B, n, C, device=hopper)
    x[0, 0] = 0
    x[0, 0, 7] = 1  # a norm makes sqrt(C) of it, its largest
    x = F.rms_norm(x, (C,)).to(torch.bfloat16).requires_grad_()
    weight = (0.1 * torch.randn(3 * C, C, device=hopper)).requires_grad_()
    sin, cos = (table[0, 0].contiguous().to(hopper) for table in rope_cache(n, D))
    given = [torch.randn(B, H, n, D, device=hopper, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    found = []

    def plain():
        qkv = F.linear(x, weight.to(x.dtype)).view(B, n, 3, H, D)
        return cuda_ops.rotated_heads(qkv.flatten(2, 3), sin, cos, H) if transposed else qkv.unbind(2)

    turn = (sin, cos) if transposed else (None, None)
    (matrix,) = quantize.matrices([([weight], None)])
    for make in (lambda: fp8.heads(x, weight, matrix, *turn, H), plain):
        x.grad = weight.grad = None
        made = make()
        torch.autograd.backward(made, given)
        found.append((*made, x.grad, weight.grad))
    for a, b in zip(*found, strict=True):
        assert (a - b).float().norm() < 0.06 * b.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("V", "N", "C"), [(70, 48, 16), (256, 1000, 256), (16004, 3000, 512)])
def test_the_head(V, N, C, hopper, monkeypatch):
    monkeypatch.setattr(cross_entropy, "LOGITS_SHARE", 0)
    monkeypatch.setattr(cross_entropy, "LOGITS_BYTES", 1 << 25)  # several parts
    h, weight, y, total = head_of(V, N, C, hopper)
    found = []
    for in_fp8 in (True, False):
        h.grad = weight.grad = None
        loss = cross_entropy.linear_cross_entropy(h, weight, y, total, fp8=in_fp8)
        (1.5 * loss).backward()
        found.append((loss.detach(), h.grad, weight.grad))
    for a, b in zip(*found, strict=True):
        assert (a - b).float().norm() < 0.06 * b.float().norm()
    assert (found[0][1][::4] == 0).all()
