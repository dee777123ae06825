"""The FP8 backend: on a CPU with its kernels in plain torch, and on a GPU."""

import pytest
import torch

from niels_gpt.kernels import replaced
from niels_gpt.kernels.cuda import cross_entropy
from niels_gpt.kernels.cuda import ops as cuda_ops
from niels_gpt.kernels.fp8 import backend, matmul
from niels_gpt.model import gpt
from niels_gpt.model.backend import CUDA_BF16, CUDA_FP8, SUPPORT, config_options, use_backend
from niels_gpt.system.device import bf16_autocast
from tests.kernels.fp8.test_matmul import kernels_in_plain_torch  # noqa: F401
from tests.kernels.helpers import (
    IDS,
    KINDS,
    activation,
    batch_of,
    gradients,
    linear_cross_entropy,
    model_of,
    rotated_heads,
)


def quantized_gradient_of_qkv(dq, dk, dv, sin, cos):
    """The gradient of `rotated_heads`, quantized by row."""
    if sin is None:
        qkv = torch.stack((dq, dk, dv), dim=2)
    else:
        q, k, _ = rotated_heads(torch.cat((dq, dk, dv), dim=2), -sin, cos, dq.shape[2])
        qkv = torch.stack((q, k, dv), dim=2)
    return matmul.rows(qkv.flatten(0, 1).flatten(1).float())


def queries_and_keys(qkv, sin, cos):
    """`ops.rotated_queries_and_keys` in plain torch."""
    return rotated_heads(qkv.flatten(2, 3), sin, cos, qkv.shape[3])[:2]


@pytest.fixture
def plain_kernels(monkeypatch, kernels_in_plain_torch):  # noqa: F811
    fp8_heads = []

    def loss(*args, fp8):
        fp8_heads.append(fp8)
        return linear_cross_entropy(*args)

    monkeypatch.setattr(cuda_ops, "rotated_queries_and_keys", queries_and_keys)
    monkeypatch.setattr(matmul, "_gradient_of_qkv", quantized_gradient_of_qkv)
    monkeypatch.setattr(cuda_ops, "rotated_heads", rotated_heads)
    monkeypatch.setattr(cuda_ops, "activation", activation)
    monkeypatch.setattr(cross_entropy, "linear_cross_entropy", loss)
    return fp8_heads


@pytest.mark.parametrize("kind", KINDS[1:4], ids=IDS[1:4])
def test_it_learns_about_what_bf16_does(kind, plain_kernels):
    model, (x, targets) = model_of(kind, L=1).train(), batch_of(B=2)
    found = []
    for chosen in (CUDA_FP8, CUDA_BF16):
        with use_backend(model, chosen), bf16_autocast("cpu"):
            loss = model.loss(x, targets)
        loss.backward()
        found.append((loss.item(), gradients(model)))
    assert plain_kernels == [True, False]
    (a, ours), (b, theirs) = found
    assert a != b and abs(a - b) < 0.02 * b
    for x, y in zip(ours, theirs, strict=True):
        assert (x - y).norm() < 0.2 * y.norm()


@pytest.mark.parametrize("kind", KINDS[:4], ids=IDS[:4])
@pytest.mark.parametrize("name", ["cuda-bf16", "cuda-fp8"])
def test_plain_torch_attends_only_if_the_table_declines(kind, name, plain_kernels, monkeypatch):
    calls, attend = [], gpt.attend
    monkeypatch.setattr(gpt, "attend", lambda *args: calls.append(1) or attend(*args))
    monkeypatch.setattr(replaced, "changed", lambda names: [])  # it computes the same
    model, (x, targets) = model_of(kind, L=1), batch_of(B=1)
    with use_backend(model, {"cuda-bf16": CUDA_BF16, "cuda-fp8": CUDA_FP8}[name]), bf16_autocast("cpu"):
        model.loss(x, targets)
    assert bool(calls) == (not config_options(model.config).isdisjoint(SUPPORT[name]))


def test_without_gradients_it_is_bf16(plain_kernels):
    model, (x, targets) = model_of({}), batch_of()
    found = []
    for chosen in (CUDA_FP8, CUDA_BF16):
        with use_backend(model, chosen), bf16_autocast("cpu"), torch.no_grad():
            found.append(model.loss(x, targets))
    assert torch.equal(*found) and plain_kernels == [False, False]


def test_rows_of_qkv_that_are_no_multiple_of_16_stay_bf16(plain_kernels):
    x, targets = batch_of()
    for kv, rows, arguments in ((2, 32, 3), (1, 24, 1)):  # the weights and two quantized matrices, or the weights alone
        model = model_of({"n_kv_heads": kv}, C=16, H=4, d_ff=48)
        assert model.layers()[0].attn.qkv.weight.shape[0] == rows
        assert len(CUDA_FP8.branches(model.layers()[0])[0].args) == arguments
    with use_backend(model, CUDA_FP8), bf16_autocast("cpu"):
        model.loss(x, targets).backward()


def test_torch_compile_traces_one_graph():
    """Without a break, so that the compiler fuses what is between the kernels. Nothing is executed here."""

    def compiler(graph, inputs):
        operators = [str(node.target) for node in graph.graph.nodes]
        assert operators.count("niels_gpt.linear_cross_entropy.default") == 1
        assert operators.count("niels_gpt.matrices_fp8.default") == 1  # one block
        raise RuntimeError("traced")

    model, (x, targets) = model_of(KINDS[2], L=1).train(), batch_of()
    loss = torch.compile(model.loss, backend=compiler, fullgraph=True, dynamic=False)
    with (
        use_backend(model, CUDA_FP8),
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(RuntimeError, match="traced"),
    ):
        loss(x, targets)
    torch.compiler.reset()


def test_what_is_missing(monkeypatch):
    assert "--device cuda" in backend.unavailable("cpu")
    monkeypatch.setattr(backend, "bf16_unavailable", lambda device: "")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    for capability, facts in (((8, 0), ("A100", "bf16")), ((8, 9), ()), ((9, 0), ())):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        found = backend.unavailable("cuda")
        assert all(fact in found for fact in facts) and bool(found) == bool(facts)


# --- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS[:4], ids=IDS[:4])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_learns_about_what_bf16_does(kind, compiled, hopper):
    model = model_of(kind, V=256, T=64, C=64).to(hopper).train()
    ids = torch.randint(256, (8, 65), device=hopper)
    found = []
    for chosen in (CUDA_FP8, CUDA_BF16):
        with torch.autocast("cuda", torch.bfloat16), use_backend(model, chosen):
            loss_of = torch.compile(model.loss, dynamic=False) if compiled and chosen is CUDA_FP8 else model.loss
            loss = loss_of(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
            loss.backward()
        found.append((loss.item(), gradients(model)))
    (a, ours), (b, theirs) = found
    assert abs(a - b) < 0.02 * b
    for x, y in zip(ours, theirs, strict=True):
        assert (x - y).norm() < 0.15 * y.norm()
