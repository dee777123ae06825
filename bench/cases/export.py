"""`niels-gpt export hf` and `export gguf` of v1 with random weights, in a new process; the start of Python counts."""

from __future__ import annotations

import shutil
from pathlib import Path

from bench import commands
from bench.case import Case, Contender, Work, temporary_folder
from bench.cases.build_cache import documents


def write_run(folder: Path, quick: bool) -> int:
    """Write a run of v1 with random weights and a trained tokenizer, and return its number of weights."""
    import dataclasses

    import torch

    from niels_gpt import GPT
    from niels_gpt.config import PRESETS, DataConfig, ModelConfig, RunConfig, TrainConfig
    from niels_gpt.runs.checkpoint import save_checkpoint
    from niels_gpt.runs.folder import RunFolder
    from niels_gpt.tokenizer import load_tokenizer, train_tokenizer

    texts = documents(quick)[:3000]
    tokenizer = load_tokenizer(train_tokenizer(texts, folder / "trained", vocab_size=1000 if quick else 16_000))
    torch.manual_seed(0)
    sizes = {"C": 64, "L": 2, "H": 2, "d_ff": 128} if quick else {}
    config = dataclasses.replace(ModelConfig(**{**PRESETS["v1"], "dropout": 0.0, **sizes}), V=tokenizer.vocab_size)
    model = GPT(config)
    run = RunFolder(folder / "run")
    run.path.mkdir(parents=True)
    save_checkpoint(run.best, model, None, 0, config, extra={"data": {"tokenizer": tokenizer.sha256}})
    run.write_tokenizer(tokenizer)
    run.write_config(RunConfig(task="pretrain", model=config, train=TrainConfig(total_steps=1), data=DataConfig()))
    return sum(weight.numel() for weight in model.parameters())


def _work(kind: str, quick: bool, *options: str) -> Work:
    commands.require("export", kind)
    folder = temporary_folder()
    weights = write_run(folder, quick)
    out = folder / ("exported" if kind == "hf" else "model.gguf")

    def run() -> dict[str, float]:
        done = commands.run(["export", kind, str(folder / "run"), "--out", str(out), "--anyway", *options])
        shutil.rmtree(out) if out.is_dir() else out.unlink()
        return {"seconds": done.seconds, "s": done.seconds, "GiB": done.peak_bytes / 2**30}

    return Work(run, facts={"weights": weights}, measures=True)


CASE = Case(
    "export",
    "s",
    (
        Contender("export hf", lambda quick: _work("hf", quick), "ours", "hf", target=5.0),
        Contender("export gguf, f32", lambda quick: _work("gguf", quick), "ours", "gguf", target=5.0),
        Contender(
            "export gguf, q8_0", lambda quick: _work("gguf", quick, "--type", "q8_0"), "ours", "q8_0", target=5.0
        ),
    ),
    rounds=5,
)
