"""The CUDA backend: what it fuses and what it declines, on a CPU with its operators in plain torch, and on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from niels_gpt.config import LoRAConfig
from niels_gpt.kernels.cuda import attention, backend, cross_entropy, ops
from niels_gpt.model.backend import CUDA_BF16, use_backend
from niels_gpt.model.gpt import Norm
from niels_gpt.model.lora import add_adapters
from niels_gpt.system.device import bf16_autocast
from tests.kernels.helpers import (
    IDS,
    KINDS,
    activation,
    batch_of,
    gradients,
    linear_cross_entropy,
    model_of,
    near,
    rotated_heads,
)


@pytest.fixture
def calls(monkeypatch):
    """The fused operators in plain torch, for any device; counts their calls."""
    counts = dict.fromkeys(("rotated_heads", "activation", "linear_cross_entropy"), 0)
    stand_ins = {"rotated_heads": (ops, rotated_heads), "activation": (ops, activation)}
    stand_ins["linear_cross_entropy"] = (cross_entropy, linear_cross_entropy)
    for name, (module, function) in stand_ins.items():

        def counting(*args, name=name, function=function, **options):
            counts[name] += 1
            return function(*args, **options)

        monkeypatch.setattr(module, name, counting)
    return counts


def check_adapters(kind, device):
    """Train adapters with B not zero: the loss and the gradients of A and B are those of float32."""
    model, (x, targets) = model_of(kind).train(), batch_of()
    add_adapters(model, LoRAConfig(rank=3))
    for name, weight in model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(weight, std=0.1)
    model, x, targets = model.to(device), x.to(device), targets.to(device)
    loss = model.loss(x, targets)
    loss.backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    with use_backend(model, CUDA_BF16), bf16_autocast(device):
        found = model.loss(x, targets)
    found.backward()
    assert abs(found.item() - loss.item()) < 0.01 * loss.item()
    ours = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert ours.keys() == expected.keys()
    assert all("lora_" in name for name in ours)
    for name, gradient in expected.items():
        assert (ours[name] - gradient).norm() < 0.05 * gradient.norm(), name


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_adapters(kind, calls):
    check_adapters(kind, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_adapters_on_a_gpu(kind, cuda):
    check_adapters(kind, "cuda")


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_it_learns_what_float32_does(kind, calls):
    model, (x, targets) = model_of(kind).train(), batch_of()
    streams = set()
    loss = model.loss(x, targets)
    loss.backward()
    expected = gradients(model)
    for block in model.layers():
        block.register_forward_hook(lambda module, args, output: streams.update((args[0].dtype, output.dtype)))
    with use_backend(model, CUDA_BF16), bf16_autocast("cpu"):
        found = model.loss(x, targets)
    found.backward()
    assert streams == {torch.bfloat16}
    fused = kind.get("positions") != "learned"
    assert calls == {"rotated_heads": 2 if fused else 0, "activation": 2, "linear_cross_entropy": 1}
    assert abs(found.item() - loss.item()) < 0.01 * loss.item()
    for a, b in zip(gradients(model), expected, strict=True):
        assert (a - b).norm() < 0.05 * b.norm()


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids=["v0", "llama"])
def test_segments_and_positions_are_declined(kind, calls):
    model, (x, _) = model_of(kind), batch_of()
    ways = {
        "segments": torch.arange(24).expand(5, 24) // 9,
        "positions": torch.arange(24).flip(0).expand(5, 24).contiguous(),
    }
    for name, ids in ways.items():
        expected = model(x, **{name: ids})
        with use_backend(model, CUDA_BF16), bf16_autocast("cpu"), torch.no_grad():
            found = model(x, **{name: ids})
        assert near(found, expected, 0.03)
    assert calls["rotated_heads"] == 0


def test_total_divides_the_loss(calls):
    model, (x, targets) = model_of({}), batch_of()
    with use_backend(model, CUDA_BF16), bf16_autocast("cpu"), torch.no_grad():
        mean, other = model.loss(x, targets), model.loss(x, targets, total=torch.tensor(1000.0))
    assert torch.allclose(mean * int((targets >= 0).sum()), other * 1000, rtol=1e-5)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_the_weight_of_a_norm_moves_into_the_matrix(norm):
    torch.manual_seed(0)
    made = Norm.of(model_of({"norm": norm}, C=64).config)
    torch.nn.init.uniform_(made.weight, 0.5, 2)
    x, weight = torch.randn(3, 5, 64), torch.randn(16, 64)
    torch.testing.assert_close(F.linear(*backend.norm_and_matrix(x, made, weight)), F.linear(made(x), weight))


def test_what_is_missing_here():
    assert "--device cuda" in backend.unavailable("cpu")


def test_what_is_missing_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(backend, "HAS_TRITON", False)
    assert "Triton" in backend.unavailable("cuda")
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    assert "Tesla T4" in backend.unavailable("cuda") and "fp32" in backend.unavailable("cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert backend.unavailable("cuda") == ""


# --- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=IDS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_gpu_learns_what_float32_does(kind, checkpointed, cuda):
    """Autocast alone chooses the backend of a model that was not prepared."""
    model, (x, targets) = model_of(kind).train(), batch_of()
    loss = model.loss(x, targets)
    loss.backward()
    expected = gradients(model)
    model.to(cuda).checkpoint_activations = checkpointed
    with torch.autocast("cuda", torch.bfloat16):
        assert model.backend is CUDA_BF16
        found = model.loss(x.to(cuda), targets.to(cuda))
    found.backward()
    assert abs(found.item() - loss.item()) < 0.01 * loss.item()
    for a, b in zip(gradients(model), expected, strict=True):
        assert (a.cpu() - b).norm() < 0.05 * b.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_short_windows_have_one_attention_kernel(compiled, cuda, monkeypatch):
    torch.manual_seed(0)
    model = model_of({}, V=70, T=100, C=64, L=2, H=2).to(cuda)
    ids = torch.randint(70, (128, 101), device=cuda)
    loss = torch.compile(model.loss) if compiled else model.loss
    calls, attend = [], attention.attend
    monkeypatch.setattr(attention, "attend", lambda *args: calls.append(1) or attend(*args))
    found = []
    for fewest in (256, 10**9):
        monkeypatch.setattr(attention, "FEWEST", fewest)
        torch.compiler.reset()
        with torch.autocast("cuda", torch.bfloat16), use_backend(model, CUDA_BF16):  # compiled code cannot choose it
            value = loss(ids[:, :-1], ids[:, 1:])
        value.backward()
        found.append([value.detach(), *gradients(model)])
    assert len(calls) == 2  # one per layer, when it is traced or when it runs
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() < 0.03 * b.norm()
