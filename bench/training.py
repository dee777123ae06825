"""Training steps of our model and of peers, for the cases train_step, memory and stall.

On CUDA all models run in bf16 with fp32 weights and are compiled; peers as nanoGPT does it: autocast, torch.compile in
its default mode, TF32, fused AdamW. Ours is the package's StepRunner on either device, on CUDA also with fp8 matmuls.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from bench import models
from bench.case import Unavailable, Work
from bench.models import Size

OURS = "niels-gpt"
ROWS_AND_STEPS = {
    ("cpu", "v0"): (32, 2),
    ("cpu", "v1"): (2, 1),
    ("cpu", "124m"): (1, 1),
    ("cuda", "v0"): (256, 100),
    ("cuda", "v1"): (64, 20),
    ("cuda", "124m"): (64, 8),
    ("cpu", "SmolLM2, 2 layers"): (1, 1),
    ("cuda", "SmolLM2-135M"): (16, 10),
}
"""(rows per step, steps per round) by device and size: about one second per round."""


@dataclass(frozen=True)
class Setting:
    """The model, the device and the options of a training step."""

    size: Size
    device: str = "cpu"
    bf16: bool = False
    fp8: bool = False
    """Ours only."""
    dropout: float = 0.0
    checkpointed: bool = False
    lora: int = 0
    """Rank of LoRA, ours only; 0: all weights are trained."""
    lora_in_half: bool = False
    """LoRA in the last half of the blocks only."""


@dataclass
class Trainer:
    """A model that trains on one resident batch of random ids, again and again."""

    step: Callable[[], object]
    tokens: int
    """Per step."""
    parameters: int
    notes: list[str] = field(default_factory=list)
    """Notes of the StepRunner, for example that compiling failed."""


def prepare(name: str, setting: Setting, quick: bool) -> Trainer:
    """Return ours or a peer, by name, ready for its first step."""
    import torch

    from niels_gpt.system.device import emulates_bf16

    size, device = setting.size.scaled(quick), setting.device
    if setting.bf16 and not quick and emulates_bf16(device):
        raise Unavailable("the processor has no bfloat16")
    rows = 2 if quick else ROWS_AND_STEPS[device, size.name][0]
    torch.manual_seed(0)
    options = {"dropout": setting.dropout} if setting.dropout else {}
    make = models.niels_gpt if name == OURS else models.PEERS[name]
    model = make(size, **options)
    if setting.lora:
        _add_adapters(model, setting)
    model = model.to(device).train()
    ids = torch.randint(0, size.V, (rows, size.T + 1)).to(device)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    notes: list[str] = []
    if name == OURS:
        step = _our_step(model, x, y, setting, quick, notes)
    else:
        step = _peer_step(model, x, y, setting, compiled=device == "cuda" and not quick)
    return Trainer(step, x.numel(), sum(p.numel() for p in model.parameters()), notes)


def _add_adapters(model: Any, setting: Setting) -> None:
    """Freeze the weights of our model, and add LoRA to its matrices."""
    settings = _lora_config(setting, model.config.L)
    importlib.import_module("niels_gpt.model.lora").add_adapters(model, settings)


def _lora_config(setting: Setting, blocks: int) -> Any:
    """Return the options of LoRA. Raises Unavailable if niels-gpt has none: older versions are measured, too."""
    make = getattr(importlib.import_module("niels_gpt.config"), "LoRAConfig", None)
    if make is None:
        raise Unavailable("this version of niels-gpt has no LoRA")
    return make(rank=setting.lora, layers=(blocks + 1) // 2 if setting.lora_in_half else 0)


def _our_step(model: Any, x: Any, y: Any, setting: Setting, quick: bool, notes: list[str]) -> Callable[[], object]:
    from niels_gpt.config import EngineConfig, RunConfig, TrainConfig
    from niels_gpt.training.optim.optimizer import make_optimizer
    from niels_gpt.training.step import StepRunner
    from niels_gpt.training.tasks.base import Batch

    precision: Literal["fp8", "bf16", "fp32"] = "fp8" if setting.fp8 else "bf16" if setting.bf16 else "fp32"
    lora: dict[str, Any] = {"lora": _lora_config(setting, model.config.L)} if setting.lora else {}
    train = TrainConfig(B=len(x), precision=precision, accumulate=1, **lora)  # 1: fail rather than split the batch
    settings = EngineConfig(compile=False if quick else None, checkpoint_activations=setting.checkpointed)
    config = RunConfig(model=model.config, train=train, engine=settings, init_from="a base" if setting.lora else "")
    runner = StepRunner(model, make_optimizer(model, train), config, setting.device, note=notes.append)
    batch = Batch(x, y)
    return lambda: runner.step(batch, step=0, lr=3e-4)


def _peer_step(model: Any, x: Any, y: Any, setting: Setting, *, compiled: bool) -> Callable[[], object]:
    import torch
    from torch.nn.functional import cross_entropy

    if setting.device == "cuda":
        torch.set_float32_matmul_precision("high")
    is_transformers = type(model).__module__.startswith("transformers")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def loss_of(x: Any, y: Any) -> Any:
        logits = model(x, use_cache=False).logits if is_transformers else model(x)
        return cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))

    loss_of = torch.compile(loss_of) if compiled else loss_of

    def step() -> None:
        with torch.autocast(setting.device, torch.bfloat16, enabled=setting.bf16):
            loss = loss_of(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def step_work(name: str, setting: Setting, quick: bool) -> Work:
    """Return rounds of steps: tokens/s, and on CUDA also MFU and peak memory."""
    import torch

    trainer = prepare(name, setting, quick)
    size = setting.size.scaled(quick)
    steps = 1 if quick else ROWS_AND_STEPS[setting.device, size.name][1]
    flops = 6 * trainer.parameters + 12 * size.L * size.C * size.T  # per token; tied weights count once
    facts = {"parameters": trainer.parameters, "tokens per step": trainer.tokens, "notes": trainer.notes}

    def run() -> None:
        for _ in range(steps):
            trainer.step()

    if setting.device == "cpu":
        gflop = flops * trainer.tokens * steps / 1e9 if name == OURS and not setting.lora else None
        return Work(run, trainer.tokens * steps, gflop, {**facts, "threads": torch.get_num_threads()})

    from niels_gpt.system.device import peak_flops

    peak = peak_flops(setting.device)

    def timed() -> dict[str, float]:
        for _ in range(2):  # allocate again what was freed below; ours captures its graph
            trainer.step()
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        torch.cuda.empty_cache()  # the other contenders need the memory
        measured = {"seconds": seconds, "GiB": torch.cuda.max_memory_allocated() / 2**30}
        if peak and not setting.lora:
            measured["% MFU"] = 100 * flops * trainer.tokens * steps / seconds / peak
        return measured

    return Work(timed, trainer.tokens * steps, facts=facts, measures=True)


def memory_work(name: str, setting: Setting, quick: bool) -> Work:
    """Return the peak memory of a few steps: allocated bytes on CUDA, growth of the process on a CPU."""
    import torch

    importlib.import_module({OURS: "niels_gpt.training.step", "nano": "bench.nano"}.get(name, _package(name)))
    small = torch.nn.Linear(8, 8)  # loads libraries that would otherwise count as activations
    small(torch.randn(8, 8)).sum().backward()
    torch.optim.AdamW(small.parameters(), fused=True).step()
    before = peak_memory()
    trainer = prepare(name, setting, quick)
    for _ in range(5 if setting.device == "cuda" else 2):
        trainer.step()
    peak = max(peak_memory() - before, 0)  # Linux counts per processor and can be off by some pages
    if setting.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        peak = torch.cuda.max_memory_allocated()
    facts = {"parameters": trainer.parameters, "tokens per step": trainer.tokens, "notes": trainer.notes}
    return Work(lambda: {"GiB": peak / 2**30}, facts=facts, measures=True, warm=False)


def _package(name: str) -> str:
    return "litgpt" if name == "litgpt" else "transformers"


def peak_memory() -> int:
    """Return the largest resident size of this process so far, in bytes."""
    from pathlib import Path

    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM")]
        return 1024 * int(line.split()[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: in bytes
