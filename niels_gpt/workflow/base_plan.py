"""How to fine-tune a base on some notes: all its weights or LoRA, and for how many steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from niels_gpt.chat.formats import chat_problem
from niels_gpt.config import ModelConfig
from niels_gpt.config.public_model import PREFIX, is_public
from niels_gpt.config.yaml_file import to_dict
from niels_gpt.model.sizes import number_of_weights
from niels_gpt.pretrained.find_model import MOST_CONTEXT, find_folder
from niels_gpt.pretrained.folder_tokenizer import folder_tokenizer
from niels_gpt.pretrained.imported_run import import_model
from niels_gpt.pretrained.initial_weights import initial_model, initial_path
from niels_gpt.pretrained.model_folder import open_folder
from niels_gpt.pretrained.public_base import public_base, public_name
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import LoadedRun, find_run, find_tokenizer, is_run, load_run
from niels_gpt.system.device import has_fast_bf16
from niels_gpt.system.host_limits import gib, machine_memory
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer
from niels_gpt.workflow.plan import (
    MIN_STEPS,
    Plan,
    Size,
    StepTimes,
    longest_context,
    measure_steps,
    training_seconds,
    with_steps,
)

RANK = 16
"""Rank of the adapters. On 240 kB of notes 64 gains 0.04 bits per byte, 4 loses 0.18."""
FULL_RATE, LORA_RATE = 3e-3, 1e-2
"""Learning rates at a width of 128, the best of several on held-out notes; they fall with the width."""
EPOCHS = 5
"""Passes over the notes at most: a base needs fewer than a new model."""
BYTES_PER_WEIGHT = 16
"""Memory of a weight that is trained: itself, its gradient and AdamW's two moments, in float32."""
MEMORY_SHARE = 0.5
"""Share of the memory that the weights may take; the rest is for activations."""
FEWER_ROWS = 8
"""A slow machine gets as much as eight times fewer rows per step."""
QUICK_SHARE = 0.02
"""Share of the training time of one step of each phase; steps that take less are measured with all rows."""
LONGEST = {"cpu": 512, "cuda": 1024}
"""Longest context of the fine-tuned model, by kind of device: notes are short, and longer rows cost more."""


@dataclass(frozen=True)
class BasePlan(Plan):
    """How a base will be fine-tuned."""

    base: ModelConfig = field(default_factory=ModelConfig)
    """The model of the base."""
    rank: int = 0
    """Rank of the adapters; 0: all weights are trained."""
    name: str = ""
    """What the user calls the base."""
    reason: str = ""
    """Why all weights are trained, or only adapters."""

    def model(self) -> dict[str, Any]:
        return to_dict(self.base) | {"T": self.size.T, "dropout": self.dropout}

    def train(self, steps: int, rows: int) -> dict[str, Any]:
        rate = (LORA_RATE if self.rank else FULL_RATE) * 128 / max(self.size.C, 128)
        return super().train(steps, rows) | {
            "base_lr": rate,
            "min_lr": rate / 20,
            "optimizer": "adamw",
            "lora": {"rank": self.rank},
        }

    def describe(self) -> str:
        return f"fine-tune {self.name or self.init_from}, {super().describe()}"

    def _tokens(self) -> str:
        return f"{self.vocab_size:,} tokens"

    def _how(self) -> str:
        trained = f"LoRA of rank {self.rank}" if self.rank else "all weights"
        return f"; {trained}: {self.reason}"


def check_base(name: str, folder: Path) -> None:
    """Raise ValueError or OSError if `open_base` would, as far as this is known without reading the weights.

    Missing folders, folders that are no model, unsupported architectures, missing tokenizers and chat templates that
    fail or cannot be masked are found. A public model that is not here is downloaded.
    """
    if is_public(name):
        run = RunFolder(folder)
        if not run.exists:
            opened = open_folder(find_folder(name), context=MOST_CONTEXT)
            tokenizer = folder_tokenizer(opened)
            if tokenizer is None and opened.config.V > 256:
                raise ValueError(
                    f"--base {name} has no tokenizer: name a model with a tokenizer.json or tokenizer.model"
                )
            _check_chat(name, tokenizer or ByteTokenizer())
        elif (earlier := public_base(run)) is None or earlier.name != public_name(name):
            raise ValueError(
                f"{folder} holds {'another model' if earlier is None else earlier.name} of an earlier try, not {name}: "
                f"choose another --run-dir, or remove {folder}"
            )
        return
    path = Path(name)
    if not name or not path.exists():
        raise ValueError(f"--base {name} does not exist: name the folder of a run, or hf: with a public model")
    if (path / "config.json").is_file() and not RunFolder(path).exists:
        raise ValueError(f"--base {name} is a public model, not a run: use --base {PREFIX}{name}")
    run_of_base = find_run(path) if is_run(path) else None
    _check_chat(name, find_tokenizer(initial_model(name).V, initial_path(name), run_of_base, has_option=False))


def _check_chat(name: str, tokenizer: AnyTokenizer) -> None:
    """Raise ValueError if the base cannot learn the dialogues."""
    if problem := chat_problem(tokenizer):
        raise ValueError(f"--base {name} cannot be used: {problem}")


def open_base(name: str, device: str, folder: Path, on_bytes: Callable[[int, int], None] | None = None) -> LoadedRun:
    """Load the base that a user named: a run, a pipeline, a checkpoint, or `hf:` with a public model.

    A public model is imported into `folder` first, unless an earlier try did that. Raises as `check_base` does.
    """
    check_base(name, folder)
    if not is_public(name):
        return load_run(name, None, device, has_option=False)
    if not RunFolder(folder).exists:
        import_model(name, RunFolder(folder), on_bytes=on_bytes)
    return load_run(folder, None, device, has_option=False)


def make_base_plan(
    loaded: LoadedRun,
    *,
    note_bytes: int,
    held_out_bytes: int,
    seconds: float,
    device: str,
    rank: int | None = None,
    name: str = "",
    measure: Callable[[Plan, str], StepTimes] | None = None,
) -> BasePlan:
    """Choose all weights or LoRA, the context and the steps of both phases for a base.

    note_bytes, held_out_bytes and seconds are as for `make_plan`. rank: of the adapters, 0 for all weights; None: all
    weights if they fit into memory. name: what the user calls the base. Raises ValueError if the notes are too short
    for the context.
    """
    base, kind = loaded.model.config, torch.device(device).type
    T = min(base.T, longest_context(min(note_bytes, held_out_bytes)), LONGEST.get(kind, LONGEST["cuda"]))
    if base.positions == "learned":  # its table of positions has T rows
        T = base.T
        if note_bytes < 6 * (T + 1) or held_out_bytes < 6 * (T + 1):
            raise ValueError(f"too little text: the base needs {6 * (T + 1):,} bytes of notes, and as many held out")
    rank, reason = (rank, "as asked for") if rank is not None else _choose_rank(base, device)
    plan = BasePlan(
        Size(base.C, base.L, base.H, T),
        vocab_size=0 if isinstance(loaded.tokenizer, ByteTokenizer) else loaded.tokenizer.vocab_size,
        pretrain_steps=1,
        sft_steps=1,
        pretrain_rows=8 if kind == "cpu" else 32,
        dropout=base.dropout,
        precision="bf16" if has_fast_bf16(device) else "fp32",
        init_from=str(loaded.path.absolute()),
        base=base,
        rank=rank,
        name=name,
        reason=reason,
    )
    training = training_seconds(seconds)
    plan, times = _fitting_rows(plan, device, training, measure or measure_steps)
    return with_steps(plan, times, note_bytes, training, epochs=EPOCHS)


def _fitting_rows(
    plan: BasePlan, device: str, seconds: float, measure: Callable[[Plan, str], StepTimes]
) -> tuple[BasePlan, StepTimes]:
    """(the plan with as many rows per step as allow MIN_STEPS of both phases in the time, the times of these steps).

    On a CPU an eighth of the rows is measured first, to which the time is proportional if the base is large.
    """
    few = replace(plan, pretrain_rows=plan.pretrain_rows // FEWER_ROWS, sft_rows=plan.sft_rows // FEWER_ROWS)
    if torch.device(device).type != "cpu":
        return plan, measure(plan, device)
    times = measure(few, device)
    if FEWER_ROWS * sum(times) < QUICK_SHARE * seconds:
        return plan, measure(plan, device)
    factor = FEWER_ROWS
    while factor > 1 and factor * MIN_STEPS * sum(times) > seconds:
        factor //= 2
    fitting = replace(few, pretrain_rows=factor * few.pretrain_rows, sft_rows=factor * few.sft_rows)
    return fitting, StepTimes(factor * times.pretrain, factor * times.sft)


def _choose_rank(base: ModelConfig, device: str) -> tuple[int, str]:
    """(rank of the adapters or 0, why)."""
    needed = BYTES_PER_WEIGHT * number_of_weights(base)
    have = machine_memory()
    if torch.device(device).type == "cuda":
        have = torch.cuda.mem_get_info(device)[1]
    sizes = f"{gib(needed)} for the weights, gradients and moments, of {gib(have)}"
    if needed <= MEMORY_SHARE * have:
        return 0, f"they fit into memory ({sizes})"
    return min(RANK, base.C, base.d_ff), f"all weights do not fit into memory ({sizes})"
