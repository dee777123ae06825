"""Tasks over token caches: pretraining on windows of text, and fine-tuning (SFT) on conversations."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from niels_gpt.cache.meta import past_vocabulary
from niels_gpt.cache.mixture import MixedPlan, Mixture
from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
from niels_gpt.cache.sft_dataset import SFTExampleDataset
from niels_gpt.cache.verify import verify_cache
from niels_gpt.chat.formats import chat_format
from niels_gpt.chat.transcript import parse_chat
from niels_gpt.config import RunConfig
from niels_gpt.data.note_selection import SelectedNotes
from niels_gpt.evaluation.sampled import nats_and_targets
from niels_gpt.model.gpt import GPT
from niels_gpt.pretrained.initial_weights import initial_model
from niels_gpt.system.processes import ALL_ROWS, SINGLE_PROCESS, RankShare, World
from niels_gpt.system.rng import generator
from niels_gpt.tokenizer import AnyTokenizer, ForeignTokenizer
from niels_gpt.training.tasks.base import Batch, RowOrigin, SourceRow, eval_name
from niels_gpt.training.tasks.documents import check_vocabulary, open_documents, uses_bytes
from niels_gpt.training.tasks.token_caches import open_caches


def with_vocabulary(config: RunConfig, *, resume: bool = False) -> RunConfig:
    """The config with model.V set to the vocabulary of its token cache; unchanged for tasks over bytes.

    The embedding of a public model may have more rows than its tokenizer has ids; they are kept. `resume`: the config
    is that of a run, so its V is right.
    Raises CacheError if the cache is missing."""
    if uses_bytes(config):
        return config
    tokenizer = open_caches(config).tokenizer
    V = tokenizer.vocab_size
    if config.init_from and isinstance(tokenizer, ForeignTokenizer):
        V = max(V, config.model.V if resume else initial_model(config.init_from).V)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, V=V))


def verify_caches(config: RunConfig) -> None:
    """Verify the checksum of every file of the caches that a config uses. Raises CacheError for the first bad one."""
    if uses_bytes(config):
        return
    if config.task == "splice":
        verify_cache(Path(open_documents(config).path))
        return
    folder = open_caches(config)
    shares = (config.train.p_train, config.train.p_val)
    kinds = [(config.task, name) for p in shares for name, share in p.items() if share]
    if config.task == "sft":
        existing = folder.names("pretrain")
        kinds += [("pretrain", name) for name, share in config.data.retain.items() if share and name in existing]
    for kind, name in dict.fromkeys(kinds):
        verify_cache(folder.path / kind / name)


class _TokenTask(abc.ABC):
    """What both tasks share: a mixture to train on, held-out sets, one tokenizer."""

    kind: str

    def __init__(self, config: RunConfig) -> None:
        """Raises CacheError for caches that are missing, damaged, too short for T, or built with another tokenizer."""
        self.config = config
        self.folder = open_caches(config)
        self.tokenizer: AnyTokenizer = self.folder.tokenizer
        check_vocabulary(config, self.tokenizer, str(self.folder.path))
        shares = config.train
        for option in ("p_train", "p_val"):
            wanted = [name for name, share in getattr(shares, option).items() if share]
            self.folder.check(self.kind, wanted, option=f"train.{option}")
        self._train: Mixture[Any] = Mixture(
            {name: self._open(name, "train") for name, share in shares.p_train.items() if share}, shares.p_train
        )
        self._val = {name: self._open(name, "val") for name, share in shares.p_val.items() if share}

    @abc.abstractmethod
    def _open(self, name: str, split: str) -> Any:
        """The dataset of a cache's split."""

    def plan(self, step: int) -> Any:
        """The rows of a step: source and row number."""
        return self._train.plan(self.config.train.B, generator(self.config.train.seed, "batch", step))

    def fingerprint(self) -> dict[str, str]:
        shas = {name: dataset.fingerprint() for name, dataset in self._train.datasets.items()}
        return {**shas, "tokenizer": str(self.tokenizer.sha256)}

    def _rows(self, step: int, share: RankShare) -> tuple[torch.Tensor, ...]:
        """The tensors of a share of a step's rows."""
        full = self.plan(step)
        rows = share.rows(len(full.row))
        plan = MixedPlan(full.source[rows], full.row[rows])
        tensors = self._train.gather(plan)
        self._check(tensors, [(self._train.datasets[name], row) for name, row in zip(*plan, strict=True)])
        return tensors

    def _check(self, tensors: tuple[torch.Tensor, ...], rows: Sequence[tuple[Any, int]]) -> None:
        """Raise CacheError for an id past the vocabulary, which on a GPU would abort the process.

        rows: (dataset, row number) of each batch row."""
        if not rows:
            return
        x, y = tensors[:2]
        highest = torch.maximum(x.amax(1), y[:, -1])
        row = int(highest.argmax())
        if (token := int(highest[row])) >= self.tokenizer.vocab_size:
            dataset, number = rows[row]
            raise past_vocabulary(token, self.tokenizer.vocab_size, dataset.file(number), self.folder.path)

    def _losses(self, model: GPT, datasets: Mapping[str, Any], device: str, world: World) -> dict[str, float]:
        """The sampled loss of each dataset, on the same rows every time."""
        settings = self.config
        rows = world.share.rows(settings.train.B)
        losses = {}
        for name, dataset in datasets.items():
            draw = generator(settings.train.seed, "eval", name)

            def batches(dataset: Any = dataset, draw: torch.Generator = draw) -> Iterable[tuple[torch.Tensor, ...]]:
                for _ in range(settings.output.eval_steps):
                    plan = dataset.plan(settings.train.B, draw)[rows]
                    tensors = dataset.gather(plan)
                    self._check(tensors, [(dataset, row) for row in plan])
                    yield tensors[0], tensors[-1]

            nats, targets = world.sum_arrays(*nats_and_targets(model, batches(), device=device))
            losses[name] = float(nats / targets)
        return losses

    def notes(self) -> list[str]:
        return []

    def selections(self) -> dict[str, SelectedNotes]:
        return {}  # recorded with the caches

    def _described(self, unit: str) -> list[SourceRow]:
        rows = []
        shares = self.config.train.p_train
        for name in {**self._train.datasets, **self._val}:
            meta = (self._train.datasets.get(name) or self._val[name]).meta or {}
            number = sum(meta.get(f"{split}_{unit}", 0) for split in ("train", "val"))
            train, val = (meta.get(f"{split}_tokens", 0) for split in ("train", "val"))
            path = str(self.folder.path / self.kind / name)
            rows.append(SourceRow(name, shares.get(name, 0.0), train, val, " tokens", number, path))
        return rows


def _weighted_mean(losses: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The weighted mean of the losses; weights without a loss do not count."""
    total = sum(weights[name] for name in losses)
    return sum(weights[name] * loss for name, loss in losses.items()) / total


class PretrainTask(_TokenTask):
    """Next-token prediction over windows of the mixed pretrain caches."""

    kind = "pretrain"

    def _open(self, name: str, split: str) -> PretrainTokenStreamDataset:
        return self.folder.pretrain(name, split, T=self.config.model.T)

    def batch(self, step: int, share: RankShare = ALL_ROWS) -> Batch:
        return Batch(*self._rows(step, share))

    def evaluate(self, model: GPT, device: str, world: World = SINGLE_PROCESS) -> tuple[dict[str, float], float]:
        """The loss of every held-out cache, and `val_pretrain`, their mean by p_val."""
        losses = self._losses(model, self._val, device, world)
        mean = _weighted_mean(losses, self.config.train.p_val)
        return {**{eval_name(name): loss for name, loss in losses.items()}, "val_pretrain": mean}, mean

    def origins(self, step: int) -> list[RowOrigin]:
        plan = self.plan(step)
        x = self._train.gather(plan)[0]
        rows = []
        for row, (name, window) in enumerate(zip(plan.source, plan.row, strict=True)):
            dataset = self._train.datasets[name]
            document, offset = dataset.locate(window)
            text = self.folder.tokenizer.render(x[row].tolist())
            rows.append(RowOrigin(row, name, f"document {document}", offset, dataset.position(window), text))
        return rows

    def sample_prompt(self) -> str:
        return self.config.output.sample_prompt

    def describe(self) -> list[SourceRow]:
        return self._described("documents")


class SFTTask(_TokenTask):
    """Conversations of the mixed SFT caches, with a loss on the assistant's tokens only."""

    kind = "sft"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        existing = self.folder.names("pretrain")
        self._retained = {
            name: self.folder.pretrain(name, "val", T=config.model.T)
            for name, share in config.data.retain.items()
            if share and name in existing
        }

    def _open(self, name: str, split: str) -> SFTExampleDataset:
        return self.folder.sft(name, split, T=self.config.model.T)

    def batch(self, step: int, share: RankShare = ALL_ROWS) -> Batch:
        x, _, targets = self._rows(step, share)
        return Batch(x, targets)

    def evaluate(self, model: GPT, device: str, world: World = SINGLE_PROCESS) -> tuple[dict[str, float], float]:
        """The loss of every held-out cache, and `val_sft`, their mean by p_val.

        `val_pretrain` is the mean loss of the pretrain caches of data.retain: does the model forget them?"""
        losses = self._losses(model, self._val, device, world)
        mean = _weighted_mean(losses, self.config.train.p_val)
        evals = {**{eval_name(name): loss for name, loss in losses.items()}, "val_sft": mean}
        if self._retained:
            retained = self._losses(model, self._retained, device, world)
            evals["val_pretrain"] = _weighted_mean(retained, self.config.data.retain)
        return evals, mean

    def origins(self, step: int) -> list[RowOrigin]:
        plan = self.plan(step)
        rows = []
        for row, (name, example) in enumerate(zip(plan.source, plan.row, strict=True)):
            dataset = self._train.datasets[name]
            tokens = dataset.example(example)[: self.config.model.T]
            start = int(dataset.bounds[example])
            rows.append(RowOrigin(row, name, f"example {example}", 0, start, self.folder.tokenizer.render(tokens)))
        return rows

    def sample_prompt(self) -> list[int]:
        """The sample prompt as a conversation; text that is not a transcript becomes a user message."""
        text = self.config.output.sample_prompt
        try:
            messages = parse_chat(text)
        except ValueError:
            messages = [{"role": "user", "content": text}]
        return chat_format(self.folder.tokenizer).fit(messages, limit=self.config.model.T).ids

    def describe(self) -> list[SourceRow]:
        return self._described("examples")
