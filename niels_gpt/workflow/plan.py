"""How large a model to train on some notes, and for how long: by the text, the machine and the minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch

from niels_gpt.config import DataConfig, RunConfig
from niels_gpt.config.yaml_file import config_from_dict
from niels_gpt.data.note_groups import SplitBy
from niels_gpt.model.gpt import GPT
from niels_gpt.model.lora import add_adapters
from niels_gpt.model.sizes import number_of_weights
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.pipeline import PipelineFolder
from niels_gpt.system import host_limits
from niels_gpt.system.console import format_duration, plural, short_number
from niels_gpt.system.device import has_fast_bf16
from niels_gpt.tokenizer import SPECIAL_TOKENS
from niels_gpt.training.optim.optimizer import make_optimizer
from niels_gpt.training.step import StepRunner
from niels_gpt.training.tasks.base import Batch
from niels_gpt.workflow.report_size import report_seconds

VOCABULARY = 4000
"""Subwords of a new tokenizer, besides its special tokens: fewer make worse answers, more do not help a small model."""
LARGEST_VOCABULARY = 8000
"""Subwords if the notes use many characters."""
BYTES_PER_TOKEN = 3.5
"""Bytes of a subword, about; the plan is made before the tokenizer is trained."""
TOKENS_PER_WEIGHT = 6
"""A size is worth its time if each weight sees this many tokens: with fewer, the next smaller model is better."""
EPOCHS = 10
"""Passes over the notes at most; more only learn them by heart."""
SFT_STEPS = 2000
"""Steps of fine-tuning on dialogues that suffice."""
SFT_SHARE = 0.45
"""Share of the training time for fine-tuning, at most."""
SFT_LENGTH = 64
"""Tokens of a conversation, about: the rest of a row is padding, which costs nothing."""
ABOUT_SHARE = 0.5
"""Share of the fine-tuning rows that are about the notes."""
ROWS_PER_TOPIC, ROWS_OF_BASE = 60, 24
"""Rows about one topic of the notes, for a new model and for a base; a topic that is seen less often is not learned."""
ABOUT_NOTES = "about_notes"
"""Name of the source of dialogues about the notes."""
SMALL = 2_000_000
"""Bytes of notes; fewer are learned by heart quickly, so the model gets dropout."""
PREPARATION_SECONDS = 30
"""Time for the tokenizer, the caches and the measurement of the speed on two slow cores."""
LEAST_SHARE = 0.4
"""Share of the minutes that training gets at least."""
MIN_STEPS = 20
EVALUATION_SHARE = 0.1
"""Share of the training time that evaluations take beside it, at most; a forward pass takes a third of a step."""
MOST_EVALUATIONS, MOST_EVAL_STEPS = 8, 10
"""Evaluations of the first phase, and batches of each, if there is time for them."""
LONG_MEASUREMENT = 1.0
"""Seconds of measured steps; after them the speed is known well enough."""


class Size(NamedTuple):
    """The sizes of a model; see ModelConfig."""

    C: int
    L: int
    H: int
    T: int


SIZES = (
    Size(96, 2, 3, 256),
    Size(128, 3, 4, 256),
    Size(192, 4, 6, 256),
    Size(256, 6, 8, 256),
    Size(384, 8, 6, 512),
    Size(512, 8, 8, 512),
)
"""The models to choose from, small to large."""


@dataclass(frozen=True)
class Plan:
    """What will be trained."""

    size: Size
    vocab_size: int
    """Ids of the tokenizer, special tokens included; 0: the model reads bytes."""
    pretrain_steps: int
    sft_steps: int
    """Steps on dialogues; 0 for bytes, which are trained in one phase."""
    pretrain_rows: int = 8
    sft_rows: int = 48
    dropout: float = 0.0
    precision: str = "fp32"
    seconds: float = 0.0
    """Estimated time of training; 0: unknown."""
    init_from: str = ""
    """Checkpoint that is fine-tuned; empty: the model starts from nothing."""
    about_share: float = ABOUT_SHARE
    """Share of the fine-tuning rows that are about the notes, if there are any."""
    general_dialogues: int = 0
    """Fine-tune on so many dialogues of the package that are not about niels; 0: on all its dialogues."""
    split_by: SplitBy = "shared_text"
    """How notes are held out."""
    most_dialogues: int = 0
    """Fine-tune on so many dialogues that are not about the notes, at most: as many as there are rows; 0: on all."""
    evaluations: int = MOST_EVALUATIONS
    """Evaluations of the first phase."""
    eval_steps: int = MOST_EVAL_STEPS
    """Batches of each of them."""
    sft_eval_steps: int = MOST_EVAL_STEPS
    """Batches of the evaluation after fine-tuning."""

    def model(self) -> dict[str, Any]:
        """The section `model` of a config."""
        C, L, H, T = self.size
        return {"preset": "v1", "C": C, "L": L, "H": H, "T": T, "d_ff": -(-8 * C // 3 // 64) * 64} | {
            "V": self.vocab_size or 256,
            "dropout": self.dropout,
        }

    def train(self, steps: int, rows: int) -> dict[str, Any]:
        """The section `train` of a config, without the sources."""
        rate = 0.01 * (128 / max(self.size.C, 128)) ** 0.5
        return {
            "total_steps": steps,
            "warmup_steps": min(max(steps // 20, 1), steps - 1),
            "base_lr": rate,
            "min_lr": rate / 20,
            "B": rows,
            "optimizer": "muon",
            "precision": self.precision,
        }

    @classmethod
    def of(cls, pretrain: RunConfig, sft: RunConfig | None) -> Plan:
        """The plan behind the configs of both phases; sft: None for bytes."""
        model = pretrain.model
        return cls(
            Size(model.C, model.L, model.H, model.T),
            vocab_size=0 if sft is None else model.V,
            pretrain_steps=pretrain.train.total_steps,
            sft_steps=0 if sft is None else sft.train.total_steps,
            pretrain_rows=pretrain.train.B,
            sft_rows=0 if sft is None else sft.train.B,
            dropout=model.dropout,
            precision=pretrain.train.precision,
            init_from=pretrain.init_from,
            about_share=_about_share(sft or pretrain),
            split_by=pretrain.data.roam_split,
        )

    @property
    def parameters(self) -> int:
        """Weights of the model."""
        return number_of_weights(config_from_dict({"model": self.model()}).model)

    @property
    def rows_per_topic(self) -> int:
        """Rows of fine-tuning about one topic of the notes."""
        return ROWS_OF_BASE if self.init_from else ROWS_PER_TOPIC

    @property
    def subwords(self) -> int:
        """Pieces of a new tokenizer, besides its special tokens."""
        return self.vocab_size - len(SPECIAL_TOKENS)

    def describe(self) -> str:
        """The plan in one sentence."""
        C, L, _, T = self.size
        reads = self._tokens() if self.vocab_size else "bytes"
        size = f"{plural(L, 'layer')}, {C} wide, {T} tokens of context"
        steps = f"{plural(self.pretrain_steps, 'step')} on the notes"
        if self.sft_steps:
            steps += f", then {self.sft_steps:,} on dialogues"
        took = f", about {format_duration(self.seconds)}" if self.seconds else ""
        return f"{short_number(self.parameters)} weights over {reads} ({size}){self._how()}; {steps}{took}"

    def _tokens(self) -> str:
        """What a model over tokens reads."""
        return f"{self.subwords:,} subwords"

    def _how(self) -> str:
        """How the weights are trained, if not all of them from nothing."""
        return ""


def plan_in(folder: PipelineFolder) -> Plan | None:
    """The plan of a model whose training has begun in a folder; None: it has not."""
    if folder.exists:
        phases = folder.read_configs()
        return Plan.of(phases["pretrain"], phases["sft"])
    run = RunFolder(folder.path)
    return Plan.of(run.read_config(), None) if run.exists else None


def data_in(folder: PipelineFolder) -> DataConfig | None:
    """The section `data` of a model whose training has begun in a folder; None: it has not."""
    if folder.exists:
        return folder.read_configs()["pretrain"].data
    run = RunFolder(folder.path)
    return run.read_config().data if run.exists else None


AnyPlan = TypeVar("AnyPlan", bound=Plan)


class StepTimes(NamedTuple):
    """Seconds per step of both phases."""

    pretrain: float
    sft: float


def demo_plan(*, steps: int, device: str) -> Plan:
    """The plan of the demo: a fixed size, and an eleventh of the steps for pretraining.

    Two layers answer as well as three, and faster; more steps on the few notes of the package predict others worse.
    """
    pretrain = max(steps // 11, 1)
    precision = "bf16" if has_fast_bf16(device) else "fp32"
    vocab_size = VOCABULARY + len(SPECIAL_TOKENS)
    return Plan(Size(128, 2, 4, 256), vocab_size, pretrain, max(steps - pretrain, 1), precision=precision)


def make_plan(
    *,
    note_bytes: int,
    held_out_bytes: int,
    characters: int,
    seconds: float,
    device: str,
    measure: Callable[[Plan, str], StepTimes] | None = None,
) -> Plan:
    """Choose bytes or tokens, the size of the model and the steps of both phases.

    note_bytes, held_out_bytes: size of the notes to train on, and of those held out. characters: how many different
    ones they use. seconds: for everything. measure: measures the speed of a plan on the device; by default a few steps
    are run. Raises ValueError if the notes are too short for the smallest context.
    """
    measure = measure or measure_steps
    longest = longest_context(min(note_bytes, held_out_bytes))
    base = Plan(
        SIZES[0],
        _vocabulary(characters),
        pretrain_steps=1,
        sft_steps=1,
        pretrain_rows=8 if device == "cpu" else 32,
        dropout=0.1 if note_bytes < SMALL else 0.0,
        precision="bf16" if has_fast_bf16(device) else "fp32",
    )
    training = training_seconds(seconds)
    chosen: Plan | None = None
    for size in SIZES:
        plan = replace(base, size=size._replace(T=min(size.T, longest)))
        plan = with_steps(plan, measure(plan, device), note_bytes, training)
        seen = plan.pretrain_steps * plan.pretrain_rows * plan.size.T
        if chosen is not None and seen < TOKENS_PER_WEIGHT * plan.parameters:
            break
        chosen = plan
    assert chosen is not None
    return chosen


def longest_context(size: int) -> int:
    """The longest context of which `size` bytes surely hold one window, at up to six bytes a token."""
    for T in (512, 256, 128, 64, 32):
        if size >= 6 * (T + 1):
            return T
    raise ValueError(
        f"too little text: the notes to train on or those held out have only {size:,} bytes, and {6 * 33} are needed; "
        "add notes"
    )


def _vocabulary(characters: int) -> int:
    """Ids of a new tokenizer; 0, for bytes, if less than half of them is left for pieces of several characters."""
    for vocabulary in (VOCABULARY, LARGEST_VOCABULARY):
        if 257 + characters <= vocabulary // 2:
            return vocabulary + len(SPECIAL_TOKENS)
    return 0


def training_seconds(seconds: float) -> float:
    """The time of both phases, if everything may take so many seconds."""
    return max(seconds - PREPARATION_SECONDS - report_seconds(seconds), LEAST_SHARE * seconds)


def with_steps(
    plan: AnyPlan, times: StepTimes, note_bytes: int, seconds: float, *, epochs: int | None = None
) -> AnyPlan:
    """The plan with as many steps as fit into the time; at most `epochs` passes over the notes, by default EPOCHS.

    In little time there are fewer dialogues, and fewer and shorter evaluations.
    """
    tokens = note_bytes / (BYTES_PER_TOKEN if plan.vocab_size else 1)
    most = max(int((epochs or EPOCHS) * tokens / (plan.pretrain_rows * plan.size.T)), MIN_STEPS)
    if not plan.vocab_size:  # one phase over a mix of notes and dialogues
        steps = max(min(int(seconds / times.pretrain), 2 * most), MIN_STEPS)
        plan = replace(plan, pretrain_steps=steps, sft_steps=0, seconds=steps * times.pretrain)
        return _with_evaluations(plan, times)
    sft = max(min(int(SFT_SHARE * seconds / times.sft), SFT_STEPS), MIN_STEPS)
    pretrain = max(min(int((seconds - sft * times.sft) / times.pretrain), most), MIN_STEPS)
    took = pretrain * times.pretrain + sft * times.sft
    rows = sft * plan.sft_rows
    plan = replace(plan, pretrain_steps=pretrain, sft_steps=sft, seconds=took, most_dialogues=rows)
    return _with_evaluations(plan, times)


def _with_evaluations(plan: AnyPlan, times: StepTimes) -> AnyPlan:
    """The plan with evaluations that take about EVALUATION_SHARE of the time of its steps."""
    batches = int(3 * EVALUATION_SHARE * plan.pretrain_steps)
    evaluations = min(max(batches // 3, 2), MOST_EVALUATIONS)
    # After fine-tuning, dialogues of two sources are evaluated, and as many rows of notes.
    each = (2 * times.sft + times.pretrain * plan.sft_rows / plan.pretrain_rows) / 3
    sft = int(EVALUATION_SHARE * plan.sft_steps * times.sft / each) if each else MOST_EVAL_STEPS
    return replace(
        plan,
        evaluations=evaluations,
        eval_steps=min(max(batches // evaluations, 1), MOST_EVAL_STEPS),
        sft_eval_steps=min(max(sft, 1), MOST_EVAL_STEPS),
    )


def measure_steps(plan: Plan, device: str, *, steps: int = 3) -> StepTimes:
    """Measure the seconds of a step of both phases, on random tokens."""
    config = config_from_dict({"model": plan.model(), "train": plan.train(100, plan.pretrain_rows)})
    T, V = plan.size.T, config.model.V
    draw = torch.Generator().manual_seed(0)

    def seconds(rows: int, length: int, supervised: int) -> float:
        x = torch.randint(V, (rows, length), generator=draw)
        targets = torch.randint(V, (rows, length), generator=draw)
        targets[:, : length - supervised] = -100
        return _seconds_per_step(config, Batch(x, targets), device, steps)

    pretrain = seconds(plan.pretrain_rows, T, T)
    if not plan.vocab_size:
        return StepTimes(pretrain, pretrain)
    return StepTimes(pretrain, seconds(plan.sft_rows, min(SFT_LENGTH, T), min(SFT_LENGTH, T) // 2))


def _seconds_per_step(config: RunConfig, batch: Batch, device: str, steps: int) -> float:
    host_limits.prepare_torch()
    model = GPT(config.model)
    if config.train.lora.rank:
        add_adapters(model, config.train.lora)
    model = model.to(device)
    runner = StepRunner(model, make_optimizer(model, config.train), config, device)
    batch = batch.to(torch.device(device))
    taken = []
    for step in range(steps + 1):
        began = time.perf_counter()
        float(runner.step(batch, step=step, lr=0.0).loss)  # waits for the device
        taken.append(time.perf_counter() - began)
        if sum(taken[1:]) > LONG_MEASUREMENT:
            break
    return median(taken[1:])  # the first step includes set-up


def _about_share(config: RunConfig) -> float:
    """The share of the dialogues of a config that are about the notes; a model over bytes is trained on notes, too."""
    shares = {name: share for name, share in config.train.p_train.items() if name != "roam"}
    return round(shares[ABOUT_NOTES] / sum(shares.values()), 6) if ABOUT_NOTES in shares else ABOUT_SHARE
