"""The CPU backend learns what plain torch learns, and hands what its kernels decline to plain torch."""

import shutil
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from niels_gpt.kernels.cpu import backend, native
from niels_gpt.kernels.cpu import ops as cpu_ops
from niels_gpt.model.backend import CPU, PLAIN, use_backend
from niels_gpt.model.gpt import GPT
from niels_gpt.model.kv_cache import KVCache
from niels_gpt.system.device import bf16_autocast
from tests.kernels.helpers import KINDS, model_of

in_c = pytest.mark.skipif(not (shutil.which("gcc") and sys.platform.startswith("linux")), reason="needs Linux and gcc")
DECLINED = KINDS[5]
"""Its attention is plain: the C kernel does not have heads of width 24."""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Calls of the attention in C and of SDPA."""
    assert cpu_ops._attention_kernels(16) is not None, native.problem()  # its self-test calls SDPA
    counts = {"in C": 0, "SDPA": 0}

    def count(key: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counting(*args: object, **kwargs: object) -> torch.Tensor:
            counts[key] += 1
            return function(*args, **kwargs)

        return counting

    monkeypatch.setattr(cpu_ops, "attend", count("in C", cpu_ops.attend))
    monkeypatch.setattr(F, "scaled_dot_product_attention", count("SDPA", F.scaled_dot_product_attention))
    return counts


def model(kind: dict[str, object], **sizes: object) -> GPT:
    return model_of(kind, **{"V": 40, "T": 72, **sizes})


@in_c
@pytest.mark.parametrize(
    ("kind", "mkl"),
    [(KINDS[0], False), (KINDS[1], True), (KINDS[2], False), (KINDS[3], True), (KINDS[4], False), (KINDS[5], True)],
)
def test_it_learns_what_plain_torch_learns(
    kind: dict[str, object], mkl: bool, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_ops, "WITHOUT_MKL", not mkl)
    monkeypatch.setattr(cpu_ops, "MANY", 0)
    monkeypatch.setattr(cpu_ops, "ENOUGH", 0)
    made = model(kind)
    x, y = torch.randint(0, 40, (2, 3, 72))
    found = []
    for chosen in (PLAIN, CPU):
        with use_backend(made, chosen):
            loss = made.loss(x, y)
        found.append((loss.detach(), *torch.autograd.grad(loss, list(made.parameters()))))
    assert counted == ({"in C": 0, "SDPA": 4} if kind == DECLINED else {"in C": 2, "SDPA": 2})  # two layers each
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scored", ["some", "one", "none", "all"])
@pytest.mark.parametrize("total", [None, 7])
def test_positions_without_a_target_do_not_count(
    scored: str, total: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only positions with a target reach the head, and loss and gradients are those of plain torch."""
    made = model(KINDS[2])
    draw = torch.Generator().manual_seed(5)
    x, y = torch.randint(0, 40, (2, 3, 72), generator=draw)
    keep = {
        "some": torch.rand(y.shape, generator=draw) < 0.3,
        "one": torch.arange(y.numel()).view(y.shape) == 100,
        "none": torch.zeros_like(y, dtype=torch.bool),
        "all": torch.ones_like(y, dtype=torch.bool),
    }[scored]
    y = y.masked_fill(~keep, -100)
    rows = []
    logits = backend.CPUBackend.logits
    monkeypatch.setattr(
        backend.CPUBackend,
        "logits",
        lambda self, h, head: rows.append(h.shape[:-1].numel()) or logits(self, h, head),
    )
    found = []
    for chosen in (PLAIN, CPU):
        with use_backend(made, chosen):
            loss = made.loss(x, y, total=None if total is None else torch.tensor(total))
        found.append((loss.detach(), *torch.autograd.grad(loss, list(made.parameters()))))
    assert rows == [int(keep.sum()) or y.numel()]
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5, equal_nan=True)


@in_c
def test_only_large_batches_are_attended_in_c(counted: dict[str, int]) -> None:
    made = model({}, T=128, L=1)
    made(torch.zeros(1, 128, dtype=torch.long))
    assert counted == {"in C": 0, "SDPA": 1}
    made(torch.zeros(4, 128, dtype=torch.long))
    assert counted == {"in C": 1, "SDPA": 1}


@in_c
def test_segments_positions_and_caches_are_declined(counted: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "ENOUGH", 0)
    made, x = model({}, T=24), torch.randint(0, 40, (2, 24), generator=torch.Generator().manual_seed(0))
    ids = torch.arange(24).expand(2, 24)
    with torch.no_grad():
        made(x, segments=ids // 9)
        made(x, positions=ids)
        made(x, cache=KVCache(made.config, 2, device=made.device, dtype=torch.float32))
    assert counted["in C"] == 0


@in_c
def test_under_bf16_autocast_attention_stays_float32(counted: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "ENOUGH", 0)
    made = model({}, L=1)
    x = torch.randint(0, 40, (2, 64), generator=torch.Generator().manual_seed(0))
    exact = made(x)
    with bf16_autocast("cpu"):
        rounded = made(x)
    assert counted["in C"] == 2
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("transposes", [True, False])
def test_the_head_is_transposed_only_for_large_batches(transposes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "WITHOUT_MKL", True)
    monkeypatch.setattr(cpu_ops, "MANY", 10 if transposes else 11)
    made = model({})
    h = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))
    logits = made.logits(h)
    assert ("WithoutMKL" in type(logits.grad_fn).__name__) == transposes
    torch.testing.assert_close(logits, h @ made.tok_emb.weight.t())


def test_why_c_kernels_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "0")
    assert f"{native.VARIABLE}=0" in backend.missing_kernels()
    monkeypatch.delenv(native.VARIABLE)
    monkeypatch.setattr(native, "allowed", lambda: False)
    assert "on Linux only" in backend.missing_kernels()
    monkeypatch.setattr(native, "allowed", lambda: True)
    monkeypatch.setattr(native, "library", lambda name: None)
    monkeypatch.setattr(native, "_problems", {"gelu": "gelu.c: no C compiler: install gcc"})
    assert "install gcc" in backend.missing_kernels()
    monkeypatch.setattr(native, "_problems", {})
    assert backend.missing_kernels() == ""
