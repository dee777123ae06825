"""The loss of the model on any device, and the operators for CUDA next to plain torch."""

import pytest
import torch
import torch.nn.functional as F

from niels_gpt.config import ModelConfig
from niels_gpt.kernels.cuda import ops as cuda_ops
from niels_gpt.model.gpt import GPT, normed
from niels_gpt.model.loss import loss_fn
from niels_gpt.model.rope import rope_cache
from niels_gpt.system.device import bf16_autocast

SMALL = {"V": 70, "T": 24, "C": 32, "L": 2, "H": 2, "dropout": 0.0}
KINDS = [
    {},
    {"positions": "learned"},
    {"norm": "rmsnorm", "mlp": "swiglu"},
]


def model_of(kind, seed=0):
    torch.manual_seed(seed)
    model = GPT(ModelConfig(**SMALL, **kind))
    with torch.no_grad():
        for p in model.parameters():  # norms of other weights than 1, logits that differ
            p.mul_(1 + 0.3 * torch.rand_like(p) if p.dim() == 1 else 3)
    return model


def rows(seed=1, B=5, n=24, V=70):
    ids = torch.randint(V, (B, n + 1), generator=torch.Generator().manual_seed(seed))
    targets = ids[:, 1:].clone()
    targets[::2, ::3] = -100
    return ids[:, :-1], targets


def gradients(model):
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_the_logits(kind):
    model, (x, targets) = model_of(kind), rows()
    expected = sum(
        -model(x)[b, t].log_softmax(-1)[targets[b, t]] for b in range(5) for t in range(24) if targets[b, t] >= 0
    )
    number = int((targets >= 0).sum())
    assert torch.allclose(model.loss(x, targets), expected / number)
    assert torch.allclose(model.loss(x, targets, total=torch.tensor(1000)), expected / 1000)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_add_up_to_the_whole(kind):
    model, (x, targets) = model_of(kind), rows()
    model.loss(x, targets).backward()
    whole = gradients(model)
    total = (targets >= 0).sum()
    for part in (slice(0, 2), slice(2, 5)):
        model.loss(x[part], targets[part], total=total).backward()
    for found, expected in zip(gradients(model), whole, strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


def test_a_part_without_targets_adds_nothing():
    model, (x, _) = model_of({}), rows()
    loss = model.loss(x, torch.full_like(x, -100), total=torch.tensor(7))
    loss.backward()
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients(model))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_activations_change_nothing(kind):
    model, (x, targets) = model_of(kind).train(), rows()
    model.loss(x, targets).backward()
    plain = gradients(model)
    model.checkpoint_activations = True
    loss = model.loss(x, targets)
    loss.backward()
    for found, expected in zip(gradients(model), plain, strict=True):
        assert torch.equal(found, expected)


def test_checkpointed_blocks_draw_the_same_dropout_twice():
    torch.manual_seed(0)
    model = GPT(ModelConfig(**{**SMALL, "dropout": 0.3})).train()
    x, targets = rows()
    found = []
    for again in (False, True):
        model.checkpoint_activations = again
        torch.manual_seed(5)
        model.loss(x, targets).backward()
        found.append(gradients(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_nothing_is_fused_on_a_cpu():
    with bf16_autocast("cpu"):
        assert not cuda_ops.in_bf16(torch.zeros(1))
    assert not cuda_ops.usable(torch.zeros(1, dtype=torch.bfloat16))


# --- on a GPU --------------------------------------------------------------------------------------


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    return torch.device("cuda")


def near(found, expected, share):
    """Within a share of the largest."""
    return (found.float() - expected.float()).abs().max() <= share * expected.float().abs().max()


def head_of(V, N, C, device):
    """(h, weight, targets of which a quarter does not count, how many do)."""
    torch.manual_seed(0)
    h = torch.randn(N, C, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.1 * torch.randn(V, C, device=device)).requires_grad_()
    y = torch.randint(V, (N,), device=device)
    y[::4] = -100
    return h, weight, y, (y >= 0).sum()


@pytest.mark.gpu
@pytest.mark.parametrize(("V", "N", "C"), [(7, 5, 16), (256, 1000, 256), (16004, 3000, 512), (50304, 12000, 64)])
def test_linear_cross_entropy(V, N, C, cuda, monkeypatch):
    monkeypatch.setattr(cuda_ops, "LOGITS_SHARE", 0)
    monkeypatch.setattr(cuda_ops, "LOGITS_BYTES", 1 << 27)  # several parts also here
    h, weight, y, total = head_of(V, N, C, cuda)
    (1.5 * cuda_ops.linear_cross_entropy(h, weight, y, total)).backward()
    found = h.grad, weight.grad
    h.grad = weight.grad = None
    logits = h.float() @ weight.to(torch.bfloat16).float().t()
    expected = F.cross_entropy(logits, y)
    assert torch.allclose(cuda_ops.linear_cross_entropy(h, weight, y, total), expected, rtol=1e-3)
    (1.5 * expected).backward()
    assert near(found[0], h.grad, 0.01)
    assert near(found[1], weight.grad, 0.01)
    assert (found[0][::4] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "n", "H", "D"), [(2, 33, 4, 64), (3, 17, 6, 48), (1, 1, 1, 2), (2, 20, 12, 64)])
def test_turned_heads(B, n, H, D, cuda):
    torch.manual_seed(0)
    qkv = torch.randn(B, n, 3, H, D, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    sin, cos = (table[0, 0].to(cuda) for table in rope_cache(n, D))
    found = cuda_ops.turned_heads(qkv, sin, cos)
    weights = [torch.randn(B, H, n, D, device=cuda).transpose(1, 2) for _ in range(3)]  # strides of another order
    sum((a.float() * w).sum() for a, w in zip(found, weights, strict=True)).backward()
    got = qkv.grad.clone()
    qkv.grad = None
    x = qkv.float()
    q, k, v = x.unbind(2)
    turned = []
    for part in (q, k):
        even, odd = part[..., 0::2], part[..., 1::2]
        pair = (even * cos[:, None] - odd * sin[:, None], even * sin[:, None] + odd * cos[:, None])
        turned.append(torch.stack(pair, dim=-1).flatten(-2))
    expected = (*turned, v)
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


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_model_in_bf16_learns_what_float32_does(kind, checkpointed, cuda):
    model, (x, targets) = model_of(kind).train(), rows()
    loss_fn(model(x), targets).backward()
    expected, loss = gradients(model), model.loss(x, targets).item()
    model.to(cuda).checkpoint_activations = checkpointed
    with torch.autocast("cuda", torch.bfloat16):
        found = model.loss(x.to(cuda), targets.to(cuda))
    found.backward()
    assert abs(found.item() - loss) < 0.01 * loss
    for a, b in zip(gradients(model), expected, strict=True):
        assert (a.cpu() - b).norm() < 0.05 * b.norm()


@pytest.mark.gpu
def test_the_weight_of_a_norm_may_go_into_the_matrix(cuda):
    torch.manual_seed(0)
    for norm in (torch.nn.LayerNorm(64, bias=False), model_of(KINDS[2]).norm.__class__(64)):
        norm.to(cuda).weight.data.uniform_(0.5, 2)
        x, weight = torch.randn(3, 5, 64, device=cuda), torch.randn(16, 64, device=cuda)
        with torch.autocast("cuda", torch.bfloat16):
            assert near(F.linear(*normed(x, norm, weight)), F.linear(norm(x), weight), 0.02)
