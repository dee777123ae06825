"""Training steps on random ids: forward, loss, backward, clipping, fused AdamW; v0, v1 (a Llama) and 124M (a GPT-2).

On a CPU in fp32, v0 also with dropout and under bf16 autocast. On CUDA in bf16; ours also in fp8 for v1 and 124M, and
v1 also with the MLP of nano and GPT-2: two matrices and a GELU, where a Llama has three matrices and 1.125 times the
weights. The share of the peak and the MFU count 6 N + 12 L C T operations per token, where N is the number of weights
(tied ones once). The peak is the best square matmul of the same run, on CUDA the vendor's figure for bf16.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from bench.case import Case, Contender, Role, Work
from bench.models import GPT2_SMALL, PACKAGES, PEERS, SIZES, V0, V1, Size
from bench.training import OURS, Setting, step_work


def _peak(quick: bool) -> Work:
    import torch

    n = 256 if quick else 2048
    a, b, out = torch.randn(n, n), torch.randn(n, n), torch.empty(n, n)
    return Work(lambda: torch.mm(a, b, out=out), gflop=2 * n**3 / 1e9)


def _contender(name: str, setting: Setting, group: str, note: str = "", **options: Any) -> Contender:
    role: Role = "ours" if name == OURS else "peer"
    label = ", ".join(part for part in (name, group or ("fp8" if setting.fp8 else ""), note) if part)
    package = PACKAGES.get(name, "")
    return Contender(
        label, lambda quick: step_work(name, setting, quick), role=role, group=group, package=package, **options
    )


def _v0_on_cpu() -> Case:
    # The target is against the fastest peer, so it belongs to the group that has all peers. With dropout there is only
    # GPT-2, the slowest one: no other peer has dropout on the residual branches as v0 does.
    plain, dropping, bf16 = Setting(V0), Setting(V0, dropout=0.1), Setting(V0, bf16=True)
    contenders = (
        _contender(OURS, plain, "dropout 0", target=1.2),
        *(_contender(peer, plain, "dropout 0") for peer in ("GPT-2", "Llama", "litgpt")),
        _contender(OURS, dropping, "dropout 0.1"),
        _contender("GPT-2", dropping, "dropout 0.1"),
        _contender(OURS, bf16, "bf16"),
        *(_contender(peer, bf16, "bf16") for peer in ("GPT-2", "Llama", "litgpt")),
        _contender("nano", plain, "plain"),  # a reference, not a package: separate group
        Contender("matmul peak (best)", _peak, role="peak"),
    )
    return Case("train_step", "tokens/s", contenders)


def _case(size: Size, device: str, target: float | None, goals: dict[str, str], **options: Any) -> Case:
    setting = Setting(size, device, bf16=device == "cuda")
    ours = [_contender(OURS, setting, "", target=target, goals=goals)]
    if device == "cuda" and size is not V0:  # v0 is not measured in fp8: its matrices are too small
        fp8 = dataclasses.replace(setting, fp8=True)
        ours.append(_contender(OURS, fp8, "", target=target, goals=goals))
        if size.ours.get("mlp") == "swiglu":  # like peers with two matrices per MLP, a ninth fewer weights
            plain = dataclasses.replace(fp8, size=dataclasses.replace(size, ours={}))
            ours.append(_contender(OURS, plain, "", "GELU", target=target, goals=goals))
    name = "train_step" if size is V0 else f"train_step_{size.name}"
    contenders = (*ours, *(_contender(peer, setting, "") for peer in PEERS))
    return Case(name, "tokens/s", contenders, device, **options)


# At 124M a peer needs 41 GiB to warm up and then keeps 23 GiB, so only two start at the same time.
CASES = (
    _v0_on_cpu(),
    *(_case(size, "cpu", None, {}, rounds=5) for size in SIZES.values() if size is not V0),
    _case(V0, "cuda", 1.3, {"GiB": "≥ 1x"}, starts=5),
    _case(V1, "cuda", 1.3, {"GiB": "≥ 1x"}, starts=6),
    _case(GPT2_SMALL, "cuda", 1.25, {"% MFU": "≥ 55", "GiB": "≥ 1x"}, starts=2),
)
