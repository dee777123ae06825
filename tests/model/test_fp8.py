"""Products in FP8: what rounding does, what flows back, and that a model still learns."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.config import ModelConfig
from niels_gpt.device import bf16
from niels_gpt.model import fp8, fused, in_fp8
from niels_gpt.model.gpt import GPT
from niels_gpt.model.rope import rope_cache
from tests.model.test_fused import KINDS, gradients, head_of, near


def whole(eighth, scales):
    return eighth.float() * scales


def exact(x):
    """What `in_fp8.rows` stands for, in plain words: to a step of an eighth of the power of two below, of 448ths."""
    found = torch.zeros_like(x)
    for m, row in enumerate(x.tolist()):
        scale = max(map(abs, row)) / 448
        for k, value in enumerate(row):
            size = abs(value) / scale if scale else 0.0
            step = 2.0 ** max(torch.tensor(size).log2().floor().item() if size else -6, -6) / 8
            found[m, k] = (1 if value >= 0 else -1) * round(size / step) * step * scale  # round: ties to even
    return found


@given(st.integers(0, 10_000), st.sampled_from([1e-9, 1.0, 3e4]))
def test_rows_are_rounded_to_three_bits_of_their_largest(seed, size):
    x = size * torch.randn(3, 17, generator=torch.Generator().manual_seed(seed))
    x[1] = 0
    found = whole(*in_fp8.rows(x))
    expected = exact(x)
    assert (found - expected).abs().max() <= 1e-5 * size + 2**-4 * size * 1e-3
    assert ((found - x).abs() <= x.abs() / 16 + x.abs().amax(1, keepdim=True) / 448 / 1024 * 1.01).all()


def test_a_product_and_its_gradients():
    torch.manual_seed(0)
    x = torch.randn(2, 20, 32).to(torch.bfloat16).requires_grad_()
    weight = torch.randn(48, 32).requires_grad_()
    y = fp8.product(x, weight, *in_fp8.matrices([([weight], None)]))
    g = torch.randn(2, 20, 48).to(torch.bfloat16)
    y.backward(g)
    rows = [t.detach().float().flatten(0, -2) for t in (x, g)]
    rounded = exact(weight.detach().view(1, -1)).view(48, 32)
    assert near(y.flatten(0, 1), exact(rows[0]) @ rounded.t(), 0.01)
    assert near(x.grad.flatten(0, 1), exact(rows[1]) @ rounded, 0.01)
    assert near(weight.grad, rows[1].t() @ rows[0], 0.01)
    assert weight.grad.dtype == torch.float32


@given(st.integers(0, 10_000), st.sampled_from([16, 112, 512]), st.sampled_from(["layer_norm", "rms_norm"]))
def test_what_a_norm_made_needs_one_scale(seed, K, norm):
    x = torch.randn(6, K, generator=torch.Generator().manual_seed(seed))
    x[0] *= 1e4
    x[1] = 0
    x[2] = 0
    x[2, seed % K] = 1e6  # as far as a norm goes: sqrt(K)
    x = getattr(F, norm)(x, (K,)).to(torch.bfloat16)
    found, step = whole(*in_fp8.after_norm(x)), K**0.5 / 448
    assert (found - x.float()).abs().max() <= 16.5 * step  # half a step next to 448; NaN is not
    assert ((found - x.float()).abs() <= x.float().abs() / 15.5 + 2**-10 * step).all()


@given(st.integers(0, 10_000))
def test_a_matrix_with_one_scale(seed):
    x = 0.02 * torch.randn(12, 16, generator=torch.Generator().manual_seed(seed))
    found, scale = in_fp8.at_once(x)
    assert scale == x.abs().max() / 448
    assert torch.equal(whole(found, scale), whole(*in_fp8.rows(x.view(1, -1))).view(12, 16))
    assert (in_fp8.at_once(0 * x)[0].float() == 0).all()


def check_matrices(device):
    torch.manual_seed(0)
    shapes = [[(144, 48)], [(48, 80)], [(70, 48), (70, 48)], [(16, 16)], [(16004, 64)]]
    given = [([(5.0**i * torch.randn(shape)).to(device) for i, shape in enumerate(shape)], None) for shape in shapes]
    given[0] = given[0][0], torch.rand(48).add(0.5).to(device)
    given[2] = given[2][0], -torch.rand(48).add(0.5).to(device)
    given[3][0][0].zero_()
    for (members, norm), (eighth, turned, one, by_row, by_column) in zip(given, in_fp8.matrices(given), strict=True):
        whole = torch.cat(members) * (1 if norm is None else norm)
        scale = whole.abs().max() / 448
        assert torch.equal(turned.float(), eighth.float().t())
        assert turned.is_contiguous()
        assert (one.shape, by_row.shape, by_column.shape) == ((), (len(whole), 1), (whole.shape[1], 1))
        assert torch.allclose(
            torch.cat((one.view(1, 1), by_row, by_column)), scale.clamp(min=1e-30 / 448), rtol=1e-6, atol=0
        )
        off = (eighth.float() * scale - whole).abs()
        # half a step of three bits; below 2^-6, of 2^-9
        assert (off <= whole.abs() / 15.9 + 2**-10 * scale * 1.01).all()
        assert (eighth.float().abs().max() == 448) | (scale == 0)


def test_the_matrices_of_a_block():
    check_matrices("cpu")


def test_never_on_a_cpu_and_never_without_gradients():
    with fp8.products(True), bf16("cpu"):
        assert not fp8.on(torch.zeros(1))


# --- on a GPU --------------------------------------------------------------------------------------


@pytest.fixture
def cuda():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs CUDA with FP8")
    return torch.device("cuda")


def same_rounding(eighth, scales, x):
    """The kernel's rounding of x, up to what is decided by the last bit of a float32 division."""
    expected, step = exact(x.float().cpu()), x.float().abs().amax(-1).cpu()[:, None] / 14
    off = (whole(eighth, scales).cpu() - expected).abs()
    return (off <= step).all() and (off > 1e-4 * step).float().mean() < 0.02


@pytest.mark.gpu
def test_on_where_it_is_wanted(cuda):
    x = torch.zeros(1, device=cuda)
    with torch.autocast("cuda", torch.bfloat16):
        assert not fp8.on(x)
        with fp8.products(True):
            assert fp8.on(x)
            with torch.no_grad():
                assert not fp8.on(x)
    with fp8.products(True):
        assert not fp8.on(x)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [16, 112, 1536])
def test_what_kernels_write_in_fp8(width, cuda):
    torch.manual_seed(0)
    x = torch.randn(9, width, device=cuda, dtype=torch.bfloat16)
    assert same_rounding(*in_fp8.rows(x), x)
    for gated in (False, True):
        u = torch.randn(9, width * (1 + gated), device=cuda, dtype=torch.bfloat16)
        y, *eighth = fp8._activate(u, gated)
        assert torch.equal(y, fused.activation(u, gated))
        assert near(whole(*eighth), y, 0.07)
        dy = torch.randn_like(y)
        factors = 2.0 ** torch.arange(-4, 5, device=cuda)[:, None]
        du, *eighth = fp8._activate_back(dy, factors, u, gated)
        assert torch.equal(du, fused.activate_back(dy * factors.to(dy.dtype), u, gated))
        assert near(whole(*eighth), du, 0.07)


@pytest.mark.gpu
def test_the_matrices_of_a_block_on_a_gpu(cuda):
    check_matrices(cuda)


@pytest.mark.gpu
@pytest.mark.parametrize("turned", [True, False])
def test_heads(turned, cuda):
    torch.manual_seed(0)
    B, n, H, D = 2, 16, 3, 32
    C = H * D
    x = torch.randn(B, n, C, device=cuda)
    x[0, 0] = 0
    x[0, 0, 7] = 1  # a norm makes sqrt(C) of it, its largest
    x = F.rms_norm(x, (C,)).to(torch.bfloat16).requires_grad_()
    weight = (0.1 * torch.randn(3 * C, C, device=cuda)).requires_grad_()
    sin, cos = (table[0, 0].contiguous().to(cuda) for table in rope_cache(n, D))
    given = [torch.randn(B, H, n, D, device=cuda, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    found = []

    def plain():
        qkv = F.linear(x, weight.to(x.dtype)).view(B, n, 3, H, D)
        return fused.turned_heads(qkv, sin, cos) if turned else qkv.unbind(2)

    turn = (sin, cos) if turned else (None, None)
    (matrix,) = in_fp8.matrices([([weight], None)])
    for make in (lambda: fp8.heads(x, weight, matrix, *turn, H), plain):
        x.grad = weight.grad = None
        made = make()
        torch.autograd.backward(made, given)
        found.append((*made, x.grad, weight.grad))
    for a, b in zip(*found, strict=True):
        assert (a - b).float().norm() < 0.06 * b.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("V", "N", "C"), [(70, 48, 16), (256, 1000, 256), (16004, 3000, 512)])
def test_the_head(V, N, C, cuda, monkeypatch):
    monkeypatch.setattr(fused, "LOGITS_SHARE", 0)
    monkeypatch.setattr(fused, "LOGITS_BYTES", 1 << 25)  # several parts
    h, weight, y, total = head_of(V, N, C, cuda)
    found = []
    for eight in (True, False):
        h.grad = weight.grad = None
        loss = fused.linear_cross_entropy(h, weight, y, total, eight=eight)
        (1.5 * loss).backward()
        found.append((loss.detach(), h.grad, weight.grad))
    for a, b in zip(*found, strict=True):
        assert (a - b).float().norm() < 0.06 * b.float().norm()
    assert (found[0][1][::4] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_in_fp8_learns_what_bf16_does(kind, compiled, cuda):
    torch.manual_seed(0)
    config = ModelConfig(V=256, T=64, C=64, L=2, H=2, dropout=0.0, **kind)
    model = GPT(config).to(cuda).train()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.3 * torch.rand_like(p) if p.dim() == 1 else 3)
    ids = torch.randint(256, (8, 65), device=cuda)
    found = []
    for wanted in (True, False):
        with torch.autocast("cuda", torch.bfloat16), fp8.products(wanted):
            loss_of = torch.compile(model.loss, dynamic=False) if compiled and wanted else model.loss
            loss = loss_of(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
            loss.backward()
        found.append((loss.item(), gradients(model)))
    (a, ours), (b, plain) = found
    assert abs(a - b) < 0.02 * b
    for x, y in zip(ours, plain, strict=True):
        assert (x - y).norm() < 0.15 * y.norm()
