"""Which implementation computes a model: plain torch, or kernels for a device and a precision.

`gpt.py` is the reference. A backend replaces its attention branch, its MLP branch, its norm and its head by faster code
that computes the same, and hands what it does not support to the plain operations. It is chosen once, when a model is
prepared for a device, a precision and a use:

    with use_backend(model, choose("cuda", precision="fp8", use="training")):
        model.loss(x, targets).backward()

A model that was not prepared uses `default_backend`, which looks at its device and at autocast in each forward pass.
Decoders (`inference/`) read the weights by role (`GPT.weights`) and are listed in the same table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import nn

from niels_gpt.kernels.cpu import backend as cpu
from niels_gpt.kernels.cuda import backend as cuda
from niels_gpt.kernels.fp8 import backend as fp8
from niels_gpt.kernels.weights import NormWeights
from niels_gpt.model.loss import loss_fn, summed_loss
from niels_gpt.system.device import HAS_TRITON

if TYPE_CHECKING:
    from niels_gpt.model.gpt import GPT, Block

Branch = Callable[..., torch.Tensor]
Use = Literal["training", "scoring"]


class Backend(Protocol):
    """The operations of a GPT that have faster implementations."""

    def embed(self, h: torch.Tensor) -> torch.Tensor:
        """The embedded tokens (B, n, C) in the dtype of the residual stream."""

    def branches(self, block: Block) -> tuple[Branch, Branch]:
        """The attention branch (x, layer, context) and the MLP branch (x) of a block, each with its norm."""

    def norm(self, x: torch.Tensor, norm: NormWeights) -> torch.Tensor:
        """The final norm of x (B, n, C)."""

    def logits(self, h: torch.Tensor, head: nn.Linear) -> torch.Tensor:
        """h (..., C) times the matrix of the head."""

    def loss(self, h: torch.Tensor, head: nn.Linear, targets: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
        """Cross-entropy at targets (B, n), summed and divided by `total`; None: by their number."""


class PlainBackend:
    """The reference: the modules of `gpt.py` as they are written."""

    def embed(self, h: torch.Tensor) -> torch.Tensor:
        return h

    def branches(self, block: Block) -> tuple[Branch, Branch]:
        return block.attention_branch, block.mlp_branch

    def norm(self, x: torch.Tensor, norm: NormWeights) -> torch.Tensor:
        assert isinstance(norm, nn.Module)
        normalized: torch.Tensor = norm(x)
        return normalized

    def logits(self, h: torch.Tensor, head: nn.Linear) -> torch.Tensor:
        return head(h)

    def loss(self, h: torch.Tensor, head: nn.Linear, targets: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
        return self.cross_entropy(self.logits(h, head), targets, total)

    def cross_entropy(self, logits: torch.Tensor, targets: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
        """`loss` of logits (B, n, V)."""
        return loss_fn(logits, targets) if total is None else summed_loss(logits, targets) / total


PLAIN = PlainBackend()
CPU = cpu.CPUBackend(PLAIN)
CUDA_BF16 = cuda.CUDABackend(PLAIN)
CUDA_FP8 = fp8.FP8Backend(PLAIN)


def choose(device: str | torch.device, *, precision: str = "fp32", use: Use = "training") -> Backend:
    """The fastest backend for a device, a `train.precision` and a use.

    FP8 is for training only: a model that trains in FP8 is scored in bf16.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return CPU
    if kind == "cuda" and HAS_TRITON and precision in ("bf16", "fp8"):
        return CUDA_FP8 if precision == "fp8" and use == "training" else CUDA_BF16
    return PLAIN


def default_backend(kind: str) -> Backend:
    """The backend of a model on a kind of device ("cpu", "cuda", ...) that was not prepared: by autocast's dtype."""
    half = kind == "cuda" and torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    return choose(kind, precision="bf16" if half else "fp32")


@contextlib.contextmanager
def use_backend(model: GPT, backend: Backend) -> Iterator[None]:
    """Compute a model with `backend` inside the block."""
    before, model.prepared_backend = model.prepared_backend, backend
    try:
        yield
    finally:
        model.prepared_backend = before


# --- the table -------------------------------------------------------------------------------------

OPTIONS = (
    "norm=rmsnorm",
    "mlp=swiglu",
    "positions=learned",
    "n_kv_heads",
    "tie_embeddings=false",
    "rope_theta",
    "rope_scale",
    "head_dim",
    "norm_eps",
    "qkv_bias",
    "qk_norm",
    "segments",
    "KV cache",
)
"""What an implementation may support or decline: options of ModelConfig, and ways to call a model."""


class BackendRow(NamedTuple):
    """One implementation and whether it runs here, for `niels-gpt doctor` and the documentation."""

    name: str
    used_for: str
    """Device, precision and use."""
    available: bool
    """Whether it runs on the device that was asked about."""
    reason: str
    """What is missing and how to get it; empty if nothing is. The CPU backend runs without its C kernels."""
    supports: tuple[str, ...]
    """Options it computes itself."""
    declines: dict[str, str]
    """Option -> what happens instead."""


SUPPORT: dict[str, dict[str, str]] = {
    "plain": {},
    "cpu": cpu.DECLINES,
    "cuda-bf16": cuda.DECLINES,
    "cuda-fp8": fp8.DECLINES,
    "one-token": {"segments": "a cache continues one sequence per row"},
    "int8": {"segments": "a cache continues one sequence per row"},
    "cuda-graphs": {
        "qkv_bias": "decoded by one-token",
        "qk_norm": "decoded by one-token",
        "segments": "a cache continues one sequence per row",
    },
}
"""Implementation -> the OPTIONS it declines, and what happens instead. It supports all others."""


def backend_report(device: str) -> list[BackendRow]:
    """The implementations and whether they run on `device` ("cpu", "cuda", "cuda:1", "mps")."""
    on_cpu = torch.device(device).type == "cpu"
    not_cpu = "" if on_cpu else f"for CPUs, not for {device}"
    rows = {
        "plain": ("the reference: fp32 and tf32 on a GPU, and what the others decline", ""),
        "cpu": ("training and scoring on a CPU, fp32 and bf16", not_cpu or cpu.missing_kernels()),
        "cuda-bf16": ("training and scoring on CUDA in bf16; scoring in fp8 runs", cuda.unavailable(device)),
        "cuda-fp8": ("training on CUDA with train.precision=fp8", fp8.unavailable(device)),
        "one-token": ("decoding on any device", ""),
        "int8": ("decoding on a CPU with 8-bit weights, up to 8 rows", not_cpu),
        "cuda-graphs": ("decoding on CUDA, after the first steps of a model", cuda.unavailable(device)),
    }
    return [
        BackendRow(
            name,
            used_for,
            not reason or (name == "cpu" and on_cpu),
            reason,
            tuple(option for option in OPTIONS if option not in SUPPORT[name]),
            SUPPORT[name],
        )
        for name, (used_for, reason) in rows.items()
    ]
