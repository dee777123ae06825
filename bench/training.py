"""Updates of a model, ours and those of peers: what the cases train_step, memory and stall have in common.

On CUDA all are in bf16 with fp32 weights and compiled (peers as nanoGPT does: autocast, torch.compile in its default
mode, TF32, fused AdamW); ours is the package's own engine on either device, on CUDA also with FP8 products.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from bench import models
from bench.case import NotHere, Work
from bench.models import Size

OURS = "niels-gpt"
LOADS = {
    ("cpu", "v0"): (32, 2),
    ("cpu", "v1"): (2, 1),
    ("cpu", "124m"): (1, 1),
    ("cuda", "v0"): (256, 100),
    ("cuda", "v1"): (64, 20),
    ("cuda", "124m"): (64, 8),
}
"""(rows of an update, updates of a round) by device and size: about a second a round."""


@dataclass(frozen=True)
class Setting:
    """What is trained, and how."""

    size: Size
    device: str = "cpu"
    bf16: bool = False
    fp8: bool = False
    """Only ours can."""
    dropout: float = 0.0
    checkpointed: bool = False


@dataclass
class Trainee:
    """A model that learns one resident batch of random ids, again and again."""

    update: Callable[[], object]
    tokens: int
    """Per update."""
    parameters: int
    notes: list[str] = field(default_factory=list)
    """What our engine had to say, such as that it could not compile."""


def prepare(name: str, setting: Setting, quick: bool) -> Trainee:
    """Ours or a peer, by its name; nothing is run yet."""
    import torch

    from niels_gpt.system.device import emulates_bf16

    size, device = setting.size.scaled(quick), setting.device
    if setting.bf16 and not quick and emulates_bf16(device):
        raise NotHere("the processor has no bfloat16")
    rows = 2 if quick else LOADS[device, size.name][0]
    torch.manual_seed(0)
    options = {"dropout": setting.dropout} if setting.dropout else {}
    make = models.niels_gpt if name == OURS else models.PEERS[name]
    model = make(size, **options).to(device).train()
    ids = torch.randint(0, size.V, (rows, size.T + 1)).to(device)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    notes: list[str] = []
    if name == OURS:
        update = _our_update(model, x, y, setting, quick, notes)
    else:
        update = _peer_update(model, x, y, setting, compiled=device == "cuda" and not quick)
    return Trainee(update, x.numel(), sum(p.numel() for p in model.parameters()), notes)


def _our_update(model: Any, x: Any, y: Any, setting: Setting, quick: bool, notes: list[str]) -> Callable[[], object]:
    from niels_gpt.config import EngineConfig, RunConfig, TrainConfig
    from niels_gpt.training.optim.optimizer import make_optimizer
    from niels_gpt.training.step import StepRunner
    from niels_gpt.training.tasks.base import Batch

    precision: Literal["fp8", "bf16", "fp32"] = "fp8" if setting.fp8 else "bf16" if setting.bf16 else "fp32"
    train = TrainConfig(B=len(x), precision=precision, accumulate=1)  # 1: rather fail than train in parts
    settings = EngineConfig(compile=False if quick else None, checkpoint_activations=setting.checkpointed)
    config = RunConfig(model=model.config, train=train, engine=settings)
    engine = StepRunner(model, make_optimizer(model, train), config, setting.device, note=notes.append)
    batch = Batch(x, y)
    return lambda: engine.step(batch, step=0, lr=3e-4)


def _peer_update(model: Any, x: Any, y: Any, setting: Setting, *, compiled: bool) -> Callable[[], object]:
    import torch
    from torch.nn.functional import cross_entropy

    if setting.device == "cuda":
        torch.set_float32_matmul_precision("high")
    of_transformers = type(model).__module__.startswith("transformers")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def loss_of(x: Any, y: Any) -> Any:
        logits = model(x, use_cache=False).logits if of_transformers else model(x)
        return cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))

    loss_of = torch.compile(loss_of) if compiled else loss_of

    def update() -> None:
        with torch.autocast(setting.device, torch.bfloat16, enabled=setting.bf16):
            loss = loss_of(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def step_work(name: str, setting: Setting, quick: bool) -> Work:
    """Rounds of updates: tokens/s, and on CUDA MFU and the most memory so far."""
    import torch

    made = prepare(name, setting, quick)
    size = setting.size.scaled(quick)
    updates = 1 if quick else LOADS[setting.device, size.name][1]
    flops = 6 * made.parameters + 12 * size.L * size.C * size.T  # per token; N is all weights, the tied ones once
    facts = {"parameters": made.parameters, "tokens per update": made.tokens, "notes": made.notes}

    def run() -> None:
        for _ in range(updates):
            made.update()

    if setting.device == "cpu":
        gflop = flops * made.tokens * updates / 1e9 if name == OURS else None
        return Work(run, made.tokens * updates, gflop, {**facts, "threads": torch.get_num_threads()})

    from niels_gpt.system.device import peak_flops

    peak = peak_flops(setting.device)

    def timed() -> dict[str, float]:
        for _ in range(2):  # what was given back to the device is allocated anew; ours captures its graph
            made.update()
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        torch.cuda.empty_cache()  # the others need it in their turn
        found = {"seconds": seconds, "GiB": torch.cuda.max_memory_allocated() / 2**30}
        if peak:
            found["% MFU"] = 100 * flops * made.tokens * updates / seconds / peak
        return found

    return Work(timed, made.tokens * updates, facts=facts, measures=True)


def memory_work(name: str, setting: Setting, quick: bool) -> Work:
    """The most memory that a few updates took: on CUDA all that was allocated, on a CPU what the process grew by."""
    import importlib

    import torch

    importlib.import_module({OURS: "niels_gpt.training.step", "nano": "bench.nano"}.get(name, _package(name)))
    small = torch.nn.Linear(8, 8)  # libraries that the first update loads are nobody's activations
    small(torch.randn(8, 8)).sum().backward()
    torch.optim.AdamW(small.parameters(), fused=True).step()
    before = peak_of_process()
    made = prepare(name, setting, quick)
    for _ in range(5 if setting.device == "cuda" else 2):
        made.update()
    peak = max(peak_of_process() - before, 0)  # Linux counts by processor, and can be some pages off
    if setting.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        peak = torch.cuda.max_memory_allocated()
    facts = {"parameters": made.parameters, "tokens per update": made.tokens, "notes": made.notes}
    return Work(lambda: {"GiB": peak / 2**30}, facts=facts, measures=True, warm=False)


def _package(name: str) -> str:
    return "litgpt" if name == "litgpt" else "transformers"


def peak_of_process() -> int:
    """The most bytes that this process has had in memory."""
    from pathlib import Path

    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM")]
        return 1024 * int(line.split()[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: in bytes
