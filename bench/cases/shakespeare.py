"""Shakespeare at byte level: seconds of training until the validation loss reaches nanoGPT's 1.4697 nats.

Ours is `--config shakespeare-char`, run by `train`. The peer is nano, trained as nanoGPT does it (10.8M weights,
dropout 0.2, 64 x 256 bytes, AdamW, learning rate 1e-3 decaying to 1e-4 over 5,000 steps). The last tenth of the text is
held out. Only training steps count, without the first five, which compile the models, and without the validation
after every hundredth step, over 100 random batches. Each loop reads the loss as often as it does by itself.

`--data PATH` is the text: a file, or a folder of rows.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

from bench.case import Case, Contender, Work, temporary_folder
from bench.peers import ROOT

REACHED, SKIPPED, EVERY, BATCHES = 1.4697, 5, 100, 100
PATHS = ("data/tinyshakespeare.txt", "../shared/data/tiny_shakespeare")


def text_path() -> Path:
    """Return the path of the text. Raises ValueError if there is none."""
    given = os.environ.get("BENCH_DATA")
    for path in [Path(given)] if given else [ROOT / path for path in PATHS]:
        if path.exists():
            return path.resolve()
    raise ValueError(f"no text of Shakespeare at {given or ' or '.join(PATHS)}: give its path with --data PATH")


def _config(device: str, quick: bool) -> Any:
    from niels_gpt.config.yaml_file import load_config

    source = ROOT / "README.md" if quick else text_path()
    overrides = [
        f"data.sources.shakespeare.path={source}",
        f"data.cache_dir={temporary_folder()}",
        f"output.eval_every={EVERY}",
    ]
    overrides += [f"output.eval_steps={BATCHES}", "output.checkpoint_every=1000000", "output.sample_every=0"]
    if quick:
        overrides += ["model={T: 32, C: 32, L: 1, H: 2}", "train.total_steps=12", "train.warmup_steps=0", "train.B=4"]
        overrides += ["output.eval_every=6", "output.eval_steps=2", "output.sample_tokens=1", "train.precision=fp32"]
    return load_config("shakespeare-char", overrides=overrides)


def _found(reached: dict[int, tuple[float, float]], wanted: float) -> dict[str, float]:
    """Return when a loss was first reached, and the best loss, of {steps: (seconds so far, validation loss)}."""
    best = min(loss for _, loss in reached.values())
    first = next(((step, seconds) for step, (seconds, loss) in reached.items() if loss <= wanted), None)
    if first is None:
        raise ValueError(f"{wanted} was not reached in {max(reached)} steps: the best validation loss is {best:.4f}")
    return {"s": first[1], "steps": first[0], "val loss": best}


def _ours(device: str, quick: bool) -> Work:
    config = _config(device, quick)

    def run() -> dict[str, float]:
        from niels_gpt.runs.folder import RunFolder
        from niels_gpt.training.loop import train

        run_folder = RunFolder(temporary_folder())
        train(config, run_folder, device=device)
        seconds, reached = 0.0, {}
        for line in run_folder.metrics():
            if line["step"] >= SKIPPED:
                seconds += config.train.B * config.model.T / line["tokens_per_s"]
            if "evals" in line:
                reached[line["step"] + 1] = (seconds, line["evals"]["val_shakespeare"])
        return _found(reached, math.inf if quick else REACHED)

    from niels_gpt import GPT

    return Work(run, facts={"parameters": GPT(config.model).num_parameters()}, measures=True, warm=False)


def _nano(device: str, quick: bool) -> Work:
    from bench.nano import Nano
    from niels_gpt.training.tasks.byte_task import open_byte_task

    config = _config(device, quick)
    streams = open_byte_task(config).streams["shakespeare"]  # the same bytes with the same split
    # the context of nanoGPT; ours is longer
    size = {"V": 256, "T": min(256, config.model.T), "C": config.model.C, "L": config.model.L, "H": config.model.H}
    parameters = sum(p.numel() for p in Nano(**size).parameters())
    data = {split: streams[split].data for split in ("train", "val")}
    steps, every = (12, 6) if quick else (5000, EVERY)

    def run() -> dict[str, float]:
        wanted = math.inf if quick else REACHED
        compiled = device == "cuda" and not quick
        return _found(_nano_run(Nano(**size, dropout=0.2), data, device, steps, every, wanted, compiled), wanted)

    return Work(run, facts={"parameters": parameters}, measures=True, warm=False)


def _nano_run(
    model: Any, data: dict[str, bytes], device: str, steps: int, every: int, wanted: float, compiled: bool
) -> dict[int, tuple[float, float]]:
    """Train as nanoGPT's train.py does: return {steps: (seconds, validation loss)} until the loss is `wanted`."""
    import torch
    from torch.nn.functional import cross_entropy

    B, T, cuda = 64, model.T, device == "cuda"
    torch.manual_seed(1337)
    torch.set_float32_matmul_precision("high")
    rows = {split: torch.frombuffer(bytearray(text), dtype=torch.uint8) for split, text in data.items()}
    model.to(device)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)

    def loss_of(x: Any, y: Any) -> Any:
        logits = model(x)
        return cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))

    loss_of = torch.compile(loss_of) if compiled else loss_of
    autocast = torch.autocast(device, torch.bfloat16, enabled=cuda)

    def batch(split: str) -> tuple[Any, Any]:
        text = rows[split]
        starts = torch.randint(len(text) - T, (B,)).tolist()
        x, y = (torch.stack([text[i + ahead : i + ahead + T].long() for i in starts]) for ahead in (0, 1))
        return tuple(t.pin_memory().to(device, non_blocking=True) if cuda else t for t in (x, y))  # type: ignore[return-value]

    @torch.no_grad()
    def validate() -> float:
        model.eval()
        with autocast:
            mean = sum(loss_of(*batch("val")).item() for _ in range(BATCHES)) / BATCHES
        model.train()
        return mean

    def wait() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    model.train()
    validate()  # compiles the model
    reached: dict[int, tuple[float, float]] = {}
    x, y = batch("train")
    began, seconds = 0.0, 0.0
    for step in range(steps):
        if step == SKIPPED:
            began = wait()
        falling = 0.5 * (1 + math.cos(math.pi * (step - 100) / (5000 - 100)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1) / 101 if step < 100 else 1e-4 + 9e-4 * falling
        with autocast:
            loss = loss_of(x, y)
        x, y = batch("train")  # while the device is busy
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            loss.item()
        if (step + 1) % every == 0:
            seconds += wait() - began
            reached[step + 1] = (seconds, validate())
            if reached[step + 1][1] <= wanted:
                break
            began = wait()
    return reached


def _case(device: str) -> Case:
    ours = Contender(
        "niels-gpt", lambda quick: _ours(device, quick), role="ours", target=3.0, goals={"val loss": "≤ 1.45"}
    )
    nano = Contender("nano", lambda quick: _nano(device, quick))
    return Case("shakespeare", "s", (ours, nano), device, rounds=1)


CASES = tuple(map(_case, ("cpu", "cuda")))
