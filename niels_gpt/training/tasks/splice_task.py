"""The splice task: spans of chosen documents, evaluated on a fixed grid and compared with held-out controls."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import numpy as np

from niels_gpt.config import RunConfig
from niels_gpt.config.checks import check_int
from niels_gpt.config.schema import TrainConfig, default_warmup
from niels_gpt.config.splice import SingleSelectMode
from niels_gpt.config.splice import log as selection_log
from niels_gpt.data.note_selection import SelectedNotes, selection_lines
from niels_gpt.data.source_paths import display_name
from niels_gpt.evaluation.scoring import token_nats
from niels_gpt.model.eval_mode import eval_mode
from niels_gpt.model.gpt import GPT
from niels_gpt.splice import MultiSpliceDocumentDataset
from niels_gpt.splice.dataset import log_selected, metadata
from niels_gpt.splice.documents import choose
from niels_gpt.splice.frames import Spans
from niels_gpt.splice.packing import PackedFrames, arrange, pack
from niels_gpt.splice.tensors import to_tensors
from niels_gpt.splice.weights import spread
from niels_gpt.system.console import plural
from niels_gpt.system.processes import ALL_ROWS, SINGLE_PROCESS, RankShare, World
from niels_gpt.tokenizer import AnyTokenizer, text_bytes, token_sizes
from niels_gpt.training.tasks.base import Batch, RowOrigin, SourceRow
from niels_gpt.training.tasks.documents import (
    ContentIndex,
    DocumentSet,
    SourceDocuments,
    check_vocabulary,
    digest_indices,
    open_documents,
)

PROMPT_TOKENS = 32
"""Tokens of the first document that prompt a sample."""


class SpliceTask:
    """Spans of the chosen documents; `documents` are all documents of their source."""

    def __init__(self, config: RunConfig, documents: SourceDocuments | None = None) -> None:
        """Raises ValueError if the documents cannot be chosen, or if they give no example."""
        self.config = config
        self.documents = documents = open_documents(config) if documents is None else documents
        self.tokenizer: AnyTokenizer = documents.tokenizer
        check_vocabulary(config, self.tokenizer, documents.path)
        for name in ("pad_token_id", "eos_token_id"):
            if (token := getattr(config.splice, name)) is not None:
                check_int(f"splice.{name}", token, 0, self.tokenizer.vocab_size - 1)
        self.chosen, self.dataset = build_dataset(config, documents)
        self.names = unique_names(documents.train, self.chosen)
        trained = ContentIndex(documents.train, self.chosen)
        self.controls = choose_controls(documents.held_out, config.splice.controls, self.dataset, trained)
        self._control_set = self._control_dataset() if self.controls else None
        relative = config.model.positions == "rope"
        filler = config.splice.eos_before_span or config.splice.trailing_segment_zero
        self.packed = relative and not filler if config.splice.packed is None else config.splice.packed
        self._sizes = token_sizes(self.tokenizer)

    def _control_dataset(self) -> MultiSpliceDocumentDataset:
        """The controls with the layout of the chosen documents, without jitter or sampling weights."""
        options = self.config.splice.dataset_options()
        options |= dict.fromkeys(("sampler", "epoch_length", "doc_weights", "groups", "curriculum"))
        options |= {"balance_mode": "by_coverage", "alpha": 0.0, "offset_jitter": 0, "shuffle_per_epoch": True}
        options |= {"shuffle_offsets": False, "offset_seed": None, "shuffle_content": False, "content_seed": None}
        layout = self.dataset.layout
        options |= {"content_length": layout.K, "content_stride": layout.k_t, "offset_stride": layout.k_s}
        return _dataset(self.config, self.documents, self.documents.held_out, self.controls, options)

    def spans(self, step: int) -> Spans:
        """The spans of a step."""
        train = self.config.train
        return self.dataset.planned(self.dataset.plan(train.seed, step, train.B))

    def batch(self, step: int, share: RankShare = ALL_ROWS) -> Batch:
        """The batch of a share of the spans, packed separately: packing changes neither loss nor gradients."""
        return Batch(*self._tensors(self.dataset, _share_of(self.spans(step), share), "cpu")[0])

    def _tensors(self, dataset: MultiSpliceDocumentDataset, spans: Spans, device: str) -> tuple[Any, Any]:
        frames = pack(dataset, spans) if self.packed else dataset.frames(spans)
        return to_tensors(frames, device), frames

    def evaluate(self, model: GPT, device: str, world: World = SINGLE_PROCESS) -> tuple[dict[str, float], float]:
        """The mean loss of the chosen documents (`splice`) and of the controls (`control`), on a fixed grid of spans.

        `loss/NAME` and `bpb/NAME` are nats per token and bits per byte of single documents, `doc_loss/INDEX` the nats
        of a chosen document by its index."""
        losses, bits = self._measure(model, self.dataset, device, world)
        evals = {"splice": float(np.mean(losses))}
        used = np.flatnonzero(self.dataset.layouts.counts()).tolist()
        details = list(zip([self.names[i] for i in used], losses, bits, strict=True))
        by_index = {f"doc_loss/{self.chosen[i]}": float(loss) for i, loss in zip(used, losses, strict=True)}
        if self._control_set is not None:
            losses, bits = self._measure(model, self._control_set, device, world)
            evals["control"] = float(np.mean(losses))
            names = [f"control {name}" for name in unique_names(self.documents.held_out, self.controls)]
            details += zip(names, losses, bits, strict=True)
        for name, loss, bpb in details:
            evals |= {f"loss/{name}": float(loss), f"bpb/{name}": float(bpb)}
        evals |= by_index
        return evals, evals["splice"]

    def _measure(
        self, model: GPT, dataset: MultiSpliceDocumentDataset, device: str, world: World
    ) -> tuple[np.ndarray, np.ndarray]:
        """(nats per token, bits per byte) of each document that has examples, on the grid of spans."""
        spans = _share_of(grid(dataset, self.config.splice.eval_examples), world.share)
        nats, tokens, size = (np.zeros(len(dataset.lengths)) for _ in range(3))
        with eval_mode(model):
            for batch in _batches(spans, self.config.train.B):
                tensors, frames = self._tensors(dataset, batch, device)
                x, targets, segments, positions = Batch(*tensors)
                targets = targets.cpu()
                found = token_nats(model, x, targets, segments=segments, positions=positions)
                rows = np.zeros(targets.shape)
                rows[targets.numpy() != -100] = found.cpu().double().numpy()
                row, starts = (
                    (frames.frame, frames.start)
                    if isinstance(frames, PackedFrames)
                    else (range(len(batch.doc)), batch.s)
                )
                for doc, i, start, length in zip(batch.doc, row, starts, batch.length, strict=True):
                    span = slice(int(start), int(start + length) - 1)
                    nats[doc] += rows[i, span].sum()
                    tokens[doc] += length - 1
                    size[doc] += self._sizes[frames.tokens[i, span.start + 1 : span.stop + 1]].sum()
        nats, tokens, size = world.sum_arrays(nats, tokens, size)
        used = tokens > 0
        return nats[used] / tokens[used], nats[used] / np.maximum(size[used], 1) / np.log(2)

    def fingerprint(self) -> dict[str, str]:
        hashes = {self.documents.source: self.documents.train.sha256, "documents": digest_indices(self.chosen)}
        return hashes if self.tokenizer.sha256 is None else {**hashes, "tokenizer": str(self.tokenizer.sha256)}

    def sample_prompt(self) -> str:
        """The start of the first document: how well does the model know it?"""
        doc = int(np.flatnonzero(self.dataset.layouts.counts())[0])
        ids = self.documents.train.ids(self.chosen[doc])
        text = self.tokenizer.decode(ids[: min(PROMPT_TOKENS, len(ids) // 2)].tolist()).rstrip("\ufffd")
        return text or self.config.output.sample_prompt

    def origins(self, step: int) -> list[RowOrigin]:
        spans = self.spans(step)
        rows = []
        for row, (doc, t, s, length) in enumerate(zip(*(part.tolist() for part in spans), strict=True)):
            tokens = np.empty(length, dtype=np.int32)
            self.dataset.read(doc, t, tokens)
            text = self.tokenizer.decode(tokens.tolist())
            train, number = self.documents.train, self.chosen[doc]
            start = int(train.ends[number] - train.lengths[number]) + t
            rows.append(RowOrigin(row, self.documents.source, f"{self.names[doc]} at s={s}", t, start, text))
        return rows

    def describe(self) -> list[SourceRow]:
        held_out = int(sum(self.documents.held_out.lengths[i] for i in self.controls))
        trained = int(self.dataset.lengths.sum())
        path, unit = self.documents.path, self.documents.unit
        source = display_name(self.documents.source, path)
        return [SourceRow(source, 1.0, trained, held_out, unit, len(self.chosen), path)]

    def notes(self) -> list[str]:
        """What was read, the size of the dataset, what packing saves, and a warning if offsets have no effect."""
        dataset, model = self.dataset, self.config.model
        lines = [
            *selection_lines(self.selections()),
            f"splice: {plural(len(self.chosen), 'document')} of {sizes(dataset.lengths)} tokens, "
            f"{len(dataset):,} examples per epoch, {plural(len(self.controls), 'held-out control')}",
        ]
        train, epochs = self.config.train, self.config.splice.epochs
        if epochs is not None:
            lines.append(
                f"epochs: {epochs:g} of {len(dataset):,} examples are {train.total_steps:,} steps of {train.B}, with a "
                f"warm-up of {train.warmup_steps:,}"
            )
        spans = self.spans(0)
        frame, start = arrange(spans.length, dataset.S)
        frames, width = int(frame.max()) + 1, int((start + spans.length).max())
        saved = len(spans.doc) * dataset.S / (frames * width)
        if self.packed and saved > 1:
            lines.append(
                f"packed: the {len(spans.doc)} spans of a step fit into {frames} frames of {width} tokens: {saved:.1f} "
                f"times less compute than one frame of {dataset.S} each, with the same loss and gradients"
            )
        if model.positions == "rope":
            distinct, total = int(dataset.layouts.distinct().sum()), int(dataset.layouts.counts().sum())
            effect = f"the {total:,} spans repeat {distinct:,} distinct ones" if distinct < total else ""
            if dataset.offset_jitter:
                effect = f"offset_jitter={dataset.offset_jitter} has no effect"
            if effect:
                lines.append(
                    "warning: RoPE positions are relative and a span does not attend to what precedes it, so its "
                    f"offset s changes nothing: {effect}. To study positions set model.positions=learned"
                )
        return lines

    def selections(self) -> dict[str, SelectedNotes]:
        return self.documents.selections


def with_training_subset(config: RunConfig, stored: RunConfig | None = None) -> RunConfig:
    """The config with the batches of restrict_to_training_subset, if it sets none: those of the run.

    `stored`: the config of the run that is resumed. Its batches stay: with more steps a run keeps its documents.
    """
    splice = config.splice
    if config.task != "splice" or not splice.restrict_to_training_subset:
        return config
    if stored is not None:
        first = stored.splice.for_run(stored.train.total_steps, stored.train.B)
        splice = dataclasses.replace(
            splice,
            max_train_batches=splice.max_train_batches or first.max_train_batches,
            initial_batch_size=splice.initial_batch_size or first.initial_batch_size,
        )
    return dataclasses.replace(config, splice=splice.for_run(config.train.total_steps, config.train.B))


def with_steps_of_epochs(config: RunConfig, notes: list[str] | None = None) -> RunConfig:
    """The config with train.total_steps set to the steps of splice.epochs; unchanged without it.

    A warm-up that the config does not set, or that does not fit, follows from the steps. `notes`: a line is appended
    for each value of the config that is replaced.
    """
    splice, train = config.splice, config.train
    if config.task != "splice" or splice.epochs is None:
        return config
    with _without_log():  # the task logs the same
        examples = len(build_dataset(config, open_documents(config))[1])
    steps = math.ceil(splice.epochs * examples / train.B)
    set_warmup = train.warmup_steps != default_warmup(train.total_steps)
    warmup = train.warmup_steps if set_warmup and train.warmup_steps < steps else default_warmup(steps)
    if notes is not None:
        if train.total_steps not in (TrainConfig.total_steps, steps):
            notes.append(f"splice.epochs={splice.epochs:g} replaces train.total_steps={train.total_steps}")
        if set_warmup and warmup != train.warmup_steps:
            notes.append(
                f"warm-up: {warmup} of {steps} steps instead of {train.warmup_steps}; train.warmup_steps=N sets "
                "another number"
            )
    try:
        changed = dataclasses.replace(train, total_steps=steps, warmup_steps=warmup)
    except ValueError as err:
        of = f"splice.epochs={splice.epochs:g} of {examples:,} examples, train.B={train.B}"
        raise ValueError(f"{of}: {err}") from None
    return dataclasses.replace(config, train=changed)


def build_dataset(config: RunConfig, documents: SourceDocuments) -> tuple[list[int], MultiSpliceDocumentDataset]:
    """(indices of the chosen documents, their dataset). Raises ValueError if they cannot be chosen."""
    chosen = choose_documents(config, documents)
    return chosen, _dataset(config, documents, documents.train, chosen, config.splice.dataset_options())


def choose_documents(config: RunConfig, documents: SourceDocuments) -> list[int]:
    """The indices of the documents to train on. Raises ValueError if they cannot be chosen."""
    train, tokenizer = documents.train, documents.tokenizer
    config.splice.warn_about_limits()
    splice = config.splice.for_run(config.train.total_steps, config.train.B)
    return choose(splice, train.lengths, train.ends, config.model.T, lambda i: text_bytes(tokenizer, train.ids(i)))


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Log no choice of documents."""
    selection_log.disabled = True
    try:
        yield
    finally:
        selection_log.disabled = False


def policy_choices(config: RunConfig, documents: SourceDocuments) -> dict[str, list[int] | str]:
    """The documents that each doc_select_mode would choose, or why it cannot. Nothing is logged."""
    choices: dict[str, list[int] | str] = {}
    with _without_log():
        for mode in get_args(SingleSelectMode):
            policy = dataclasses.replace(config.splice, doc_index=None, doc_select_mode=mode)
            try:
                choices[mode] = choose_documents(dataclasses.replace(config, splice=policy), documents)
            except ValueError as err:
                choices[mode] = str(err)
    return choices


def _dataset(
    config: RunConfig, source: SourceDocuments, split: DocumentSet, indices: list[int], options: dict[str, Any]
) -> MultiSpliceDocumentDataset:
    special = source.tokenizer.special_token_ids()
    documents = split.documents(indices)
    log_selected(MultiSpliceDocumentDataset.tag, indices, documents.lengths)
    return MultiSpliceDocumentDataset(
        S=config.model.T,
        doc_tokens_list=(),
        documents=documents,
        doc_metadata=metadata(indices, documents.lengths, source.source),
        **{"pad_token_id": special.get("eot", 0), "eos_token_id": special.get("eot"), "seed": config.train.seed}
        | options
        | {"dataset_name": source.source if split is source.train else f"{source.source} (held out)"},
    )


def choose_controls(
    held_out: DocumentSet, number: int, dataset: MultiSpliceDocumentDataset, trained: ContentIndex
) -> list[int]:
    """The held-out documents with examples that are nearest in length to the chosen ones; no copies of trained ones."""
    lengths = held_out.lengths
    usable = np.flatnonzero(dataset.layout.counts(lengths)) if len(lengths) else np.empty(0, dtype=int)
    return _nearest(held_out, usable, number, float(np.median(dataset.lengths)), trained)


def choose_controls_near(held_out: DocumentSet, number: int, length: float, trained: ContentIndex) -> list[int]:
    """The held-out documents of more than two tokens that are nearest to a length; no copies of trained ones."""
    return _nearest(held_out, np.flatnonzero(held_out.lengths > 2), number, length, trained)


def _nearest(held_out: DocumentSet, usable: np.ndarray, number: int, length: float, trained: ContentIndex) -> list[int]:
    """The usable documents nearest in length whose content was not trained on; ties go to the lower index."""
    distance = np.abs(held_out.lengths[usable] - length)
    order = usable[np.argsort(distance, kind="stable")].tolist()
    return list(itertools.islice((i for i in order if held_out.ids(i) not in trained), number))


def unique_names(documents: DocumentSet, indices: Iterable[int]) -> list[str]:
    """The names of documents; names that occur more than once get the index appended."""
    names = [(i, documents.name(i)) for i in indices]
    occurrences = Counter(name for _, name in names)
    return [f"{name} ({i})" if occurrences[name] > 1 else name for i, name in names]


def grid(dataset: MultiSpliceDocumentDataset, examples: int) -> Spans:
    """Up to `examples` spans of every document, spread evenly over all its spans; the same at every evaluation."""
    counts = dataset.layouts.counts()
    docs = np.flatnonzero(counts)
    sampled = np.minimum(counts[docs], examples)
    doc = np.repeat(docs, sampled)
    j = np.arange(len(doc)) - np.repeat(np.cumsum(sampled) - sampled, sampled)
    number = spread(j, counts[doc], np.repeat(sampled, sampled))
    return Spans(doc, *dataset.layouts.spans(doc, number))


def sizes(lengths: np.ndarray) -> str:
    """The range of lengths as `10`, or `10 to 20`."""
    low, high = int(lengths.min()), int(lengths.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _share_of(spans: Spans, share: RankShare) -> Spans:
    """A share of the spans, in order."""
    return Spans(*(column[share.rows(len(column))] for column in spans))


def _batches(spans: Spans, size: int) -> Iterable[Spans]:
    for i in range(0, len(spans.doc), size):
        yield Spans(*(column[i : i + size] for column in spans))
