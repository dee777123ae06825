"""Which implementation computes a model: plain torch, or kernels for a device and a precision.

`gpt.py` is the reference. A backend replaces its attention branch, its MLP branch, its norm and its head by faster code
that computes the same, and hands what it does not support to the plain operations. Where the code or the modules of a
model are not those that it replaces (`kernels/replaced.py`), the whole model is plain. A backend is chosen once, when
a model is prepared for a device, a precision and a use:

    with use_backend(model, choose("cuda", precision="fp8", use="training")):
        model.loss(x, targets).backward()

A model that was not prepared uses `default_backend`, which looks at its device and at autocast in each forward pass.
Decoders (`inference/`) read the weights by role (`GPT.weights`) and are listed in the same table, which `decodes`
enforces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn

from niels_gpt.config import ModelConfig
from niels_gpt.kernels import replaced
from niels_gpt.kernels.cpu import backend as cpu
from niels_gpt.kernels.cuda import backend as cuda
from niels_gpt.kernels.fp8 import backend as fp8
from niels_gpt.kernels.weights import NormWeights
from niels_gpt.model.loss import loss_fn, summed_loss
from niels_gpt.system.device import HAS_TRITON

GPT: TypeAlias = Any
Block: TypeAlias = Any
"""Those of `gpt.py`, which imports this file."""
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

    def loss(
        self, model: GPT, x: torch.Tensor, targets: torch.Tensor, total: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        """Cross-entropy of ids x at targets (B, n), summed and divided by `total`; None: by their number.

        `options` are those of `GPT.hidden`.
        """


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

    def loss(
        self, model: GPT, x: torch.Tensor, targets: torch.Tensor, total: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        return self.cross_entropy(model(x, **options), targets, total)

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


def backend_of(model: GPT, *, blocks: bool = False) -> Backend:
    """The backend of a model: the one set by `use_backend`, else the default for its device if it is `usable`.

    `blocks`: for all of the model, not only its final norm and head, which take less time to look at.
    """
    if model.prepared_backend is not None:
        return model.prepared_backend
    if torch.compiler.is_compiling():  # what `usable` looks at cannot be traced
        return PLAIN
    return usable(model, default_backend(model.device.type), blocks=blocks)


def usable(model: GPT, backend: Backend, *, blocks: bool = True) -> Backend:
    """`backend`; PLAIN if the model's code, modules or options are not those that it replaces, or by request."""
    if backend is PLAIN or replaced.plain_wanted():
        return PLAIN
    if replaced.changed(replaced.BRANCHES):
        _report_change()
        return PLAIN
    known = config_options(model.config).issubset(OPTIONS) and replaced.replaceable_parts(model, blocks=blocks)
    return backend if known else PLAIN


def name_of(backend: Backend) -> str:
    """The name of a backend in `SUPPORT`."""
    named = {"cpu": CPU, "cuda-bf16": CUDA_BF16, "cuda-fp8": CUDA_FP8}
    return next((name for name, known in named.items() if known is backend), "plain")


def decodes(name: str, model: GPT) -> bool:
    """Whether a decoder of `SUPPORT` computes a model: its code, its modules, and all its options."""
    if replaced.plain_wanted() or not replaced.replaceable(model):
        return False
    if replaced.changed(replaced.FORWARD):
        _report_change()
        return False
    used = options_of(model) - {"mlp=gelu"}
    return used.issubset(OPTIONS) and used.isdisjoint(SUPPORT[name])


def halves(model: GPT) -> tuple[Callable[..., torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """`hidden` and `logits` of a model, which together are its forward, for logits of few positions.

    If its forward is another, the first computes all logits and the second returns them.
    """
    name = replaced.GPT_FORWARD
    unchanged = not replaced.changed((name,)) and getattr(model.forward, "__func__", None) is replaced.find(name)
    return (model.hidden, model.logits) if unchanged else (model, lambda logits: logits)


def _report_change() -> None:
    """Say once which code was changed and what that costs."""
    names = replaced.changed(replaced.FORWARD)
    on_gpu, on_cpu = ("up to 4 times", "about 20 times"), ("1.1 to 1.2 times", "1.5 to 2.5 times")  # v0, lab notebook
    step, token = on_gpu if torch.cuda.is_available() else on_cpu
    cost = f"a training step takes {step} as long, a generated token {token}"
    replaced.warn_once(f"{replaced.explain(names)}: plain torch computes the model; {cost}")


@contextlib.contextmanager
def use_backend(model: GPT, backend: Backend) -> Iterator[None]:
    """Compute a model with `backend` inside the block, if it is `usable`."""
    before, model.prepared_backend = model.prepared_backend, usable(model, backend)
    try:
        yield
    finally:
        model.prepared_backend = before


# --- the table -------------------------------------------------------------------------------------

OPTIONS = (
    "norm=rmsnorm",
    "mlp=swiglu",
    "mlp=other",
    "positions=learned",
    "n_kv_heads",
    "tie_embeddings=false",
    "rope_theta",
    "rope_scale",
    "head_dim",
    "norm_eps",
    "qkv_bias",
    "bias",
    "qk_norm",
    "segments",
    "KV cache",
)
"""What an implementation may support or decline: options of ModelConfig, and ways to call a model. `mlp=other` is any
activation that kernels do not know. No implementation supports an option that is not listed."""


_UNLISTED = {"V", "T", "C", "L", "H", "D", "d_ff", "dropout", "mlp", "rope_low", "rope_high", "rope_context"}
"""Fields of ModelConfig that no implementation depends on: sizes, details of options, and `mlp`, which blocks state."""


def options_of(model: GPT) -> set[str]:
    """The OPTIONS that a model uses."""
    weights = model.weights()
    used = {*config_options(model.config), *(f"mlp={block.mlp}" for block in weights.blocks)}
    if any("qkv" in block.biases for block in weights.blocks):
        used.add("qkv_bias")
    if weights.norm.bias is not None or model.lm_head.bias is not None or any(b.biased for b in weights.blocks):
        used.add("bias")
    return used


@functools.cache
def config_options(config: ModelConfig) -> frozenset[str]:
    """The options of a config that are not the defaults, written as in OPTIONS."""
    default, used = ModelConfig(), set()
    for name in (field.name for field in dataclasses.fields(config) if field.name not in _UNLISTED):
        value = getattr(config, name)
        if value != getattr(default, name):
            used.add(f"{name}={str(value).lower()}" if isinstance(value, str) or value is False else name)
    return frozenset(used)


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
    "one-token": {"bias": "decoded by plain torch", "segments": "a cache continues one sequence per row"},
    "int8": {"bias": "decoded by plain torch", "segments": "a cache continues one sequence per row"},
    "cuda-graphs": {
        "mlp=other": "decoded by one-token",
        "qkv_bias": "decoded by one-token",
        "bias": "decoded by plain torch",
        "qk_norm": "decoded by one-token",
        "segments": "a cache continues one sequence per row",
    },
}
"""Implementation -> the OPTIONS it declines, and what happens instead. It supports all others."""


def why_plain() -> str:
    """Why no model is computed by kernels: the variable, or edited code of what is imported; empty if they are used."""
    if replaced.plain_wanted():
        return f"{replaced.VARIABLE}=plain"
    return replaced.explain(replaced.changed(replaced.FORWARD))


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
