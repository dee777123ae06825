"""The task over splice datasets: spans of chosen documents, evaluated on a fixed grid, beside held-out controls."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch.nn.functional as F

from niels_gpt.config import RunConfig
from niels_gpt.config.checks import check_int
from niels_gpt.config.splice import SpliceConfig
from niels_gpt.evaluation.sampled import eval_mode
from niels_gpt.model.gpt import GPT
from niels_gpt.splice import MultiSpliceDocumentDataset
from niels_gpt.splice.dataset import metadata
from niels_gpt.splice.frames import Spans
from niels_gpt.splice.packing import PackedFrames, arrange, pack
from niels_gpt.splice.tensors import to_tensors
from niels_gpt.splice.weights import spread
from niels_gpt.system.console import plural
from niels_gpt.system.processes import (
    ALL_ROWS,
    SINGLE_PROCESS,
    RankShare,
    World,
)
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

MAX_DETAILS = 64
"""Documents whose loss is written at each evaluation; of more, only the mean."""
PROMPT_TOKENS = 32
"""Of the first document, for the samples to continue."""


class SpliceTask:
    """Spans of the chosen documents; `library` is where they were chosen from."""

    def __init__(self, config: RunConfig, library: SourceDocuments | None = None) -> None:
        """Raises ValueError for a choice of documents that cannot be made, or that gives no example."""
        self.config = config
        self.library = library = open_documents(config) if library is None else library
        self.tokenizer: AnyTokenizer = library.tokenizer
        check_vocabulary(config, self.tokenizer, library.place)
        for name in ("pad_token_id", "eos_token_id"):
            if (given := getattr(config.splice, name)) is not None:
                check_int(f"splice.{name}", given, 0, self.tokenizer.vocab_size - 1)
        self.chosen, self.dataset = build_dataset(config, library)
        self.names = unique_names(library.train, self.chosen)
        trained = ContentIndex(library.train, self.chosen)
        self.controls = choose_controls(library.held_out, config.splice.controls, self.dataset, trained)
        self._control_set = self._lay_out_controls() if self.controls else None
        relative = config.model.positions == "rope"
        self.packed = relative if config.splice.packed is None else config.splice.packed
        self._sizes = token_sizes(self.tokenizer)

    def _lay_out_controls(self) -> MultiSpliceDocumentDataset:
        """The held-out documents, laid out as the chosen ones are; for evaluation, which moves none."""
        options = self.config.splice.dataset_options()
        options |= dict.fromkeys(("sampler", "epoch_length", "doc_weights", "groups", "curriculum"))
        options |= {"balance_mode": "by_coverage", "alpha": 0.0, "offset_jitter": 0}
        options["content_length"] = self.dataset.layout.K
        return _dataset(self.config, self.library, self.library.held_out, self.controls, options)

    def spans(self, step: int) -> Spans:
        """What a step learns from."""
        train = self.config.train
        plan = self.dataset.plan(train.seed, step, train.B, shuffle=self.config.splice.shuffle)
        return self.dataset.planned(plan)

    def batch(self, step: int, device: str, share: RankShare = ALL_ROWS) -> Batch:
        """A share is of the spans, and packed by itself: packing changes neither loss nor gradients."""
        return Batch(*self._tensors(self.dataset, _part(self.spans(step), share), device)[0])

    def _tensors(self, dataset: MultiSpliceDocumentDataset, spans: Spans, device: str) -> tuple[Any, Any]:
        frames = pack(dataset, spans) if self.packed else dataset.frames(spans)
        return to_tensors(frames, device), frames

    def evaluate(self, model: GPT, device: str, world: World = SINGLE_PROCESS) -> tuple[dict[str, float], float]:
        """`splice` and `control`: the mean loss of the chosen documents and of the controls, each on its fixed grid of
        spans; under `loss/` and `bpb/` those of each document."""
        losses, bits = self._measure(model, self.dataset, device, world)
        found = {"splice": float(np.mean(losses))}
        details = list(zip(self._used_names(), losses, bits, strict=True))
        if self._control_set is not None:
            losses, bits = self._measure(model, self._control_set, device, world)
            found["control"] = float(np.mean(losses))
            names = [f"control {name}" for name in unique_names(self.library.held_out, self.controls)]
            controls = list(zip(names, losses, bits, strict=True))[: MAX_DETAILS // 2]
            details = details[: MAX_DETAILS - len(controls)] + controls
        for name, loss, bpb in details[:MAX_DETAILS]:
            found |= {f"loss/{name}": float(loss), f"bpb/{name}": float(bpb)}
        return found, found["splice"]

    def _used_names(self) -> list[str]:
        """The names of the documents that have examples."""
        return [self.names[i] for i in np.flatnonzero(self.dataset.layout.counts(self.dataset.lengths))]

    def _measure(
        self, model: GPT, dataset: MultiSpliceDocumentDataset, device: str, world: World
    ) -> tuple[np.ndarray, np.ndarray]:
        """(nats per token, bits per byte) of each document that has examples, on its grid."""
        spans = _part(grid(dataset, self.config.splice.eval_examples), world.share)
        nats, tokens, size = (np.zeros(len(dataset.lengths)) for _ in range(3))
        with eval_mode(model):
            for part in _batches(spans, self.config.train.B):
                tensors, frames = self._tensors(dataset, part, device)
                logits = model(tensors.x, **Batch(*tensors).structure())
                losses = F.cross_entropy(logits.flatten(0, 1).float(), tensors.targets.flatten(), reduction="none")
                rows = losses.view(tensors.targets.shape).double().cpu().numpy()
                row, at = (
                    (frames.frame, frames.start) if isinstance(frames, PackedFrames) else (range(len(part.doc)), part.s)
                )
                for doc, i, start, length in zip(part.doc, row, at, part.length, strict=True):
                    here = slice(int(start), int(start + length) - 1)
                    nats[doc] += rows[i, here].sum()
                    tokens[doc] += length - 1
                    size[doc] += self._sizes[frames.tokens[i, here.start + 1 : here.stop + 1]].sum()
        nats, tokens, size = world.total(nats, tokens, size)
        used = tokens > 0
        return nats[used] / tokens[used], nats[used] / np.maximum(size[used], 1) / np.log(2)

    def fingerprint(self) -> dict[str, str]:
        found = {self.library.source: self.library.train.sha256, "documents": digest_indices(self.chosen)}
        return found if self.tokenizer.sha256 is None else {**found, "tokenizer": str(self.tokenizer.sha256)}

    def sample_prompt(self) -> str:
        """The beginning of the first document: how far does the model know it?"""
        doc = int(np.flatnonzero(self.dataset.layout.counts(self.dataset.lengths))[0])
        ids = self.library.train.ids(self.chosen[doc])
        text = self.tokenizer.decode(ids[: min(PROMPT_TOKENS, len(ids) // 2)].tolist()).rstrip("\ufffd")
        return text or self.config.output.sample_prompt

    def origins(self, step: int) -> list[RowOrigin]:
        spans = self.spans(step)
        rows = []
        for row, (doc, t, s, length) in enumerate(zip(*(part.tolist() for part in spans), strict=True)):
            tokens = np.empty(length, dtype=np.int32)
            self.dataset.read(doc, t, tokens)
            text = self.tokenizer.decode(tokens.tolist())
            shelf, number = self.library.train, self.chosen[doc]
            start = int(shelf.ends[number] - shelf.lengths[number]) + t
            rows.append(RowOrigin(row, self.library.source, f"{self.names[doc]} at s={s}", t, start, text))
        return rows

    def describe(self) -> list[SourceRow]:
        held_out = int(sum(self.library.held_out.lengths[i] for i in self.controls))
        trained = int(self.dataset.lengths.sum())
        place, unit = self.library.place, self.library.unit
        return [SourceRow(self.library.source, 1.0, trained, held_out, unit, len(self.chosen), place)]

    def notes(self) -> list[str]:
        """What is trained on, what packing saves, and what a sweep over positions is worth."""
        dataset, model = self.dataset, self.config.model
        lines = [
            f"splice: {plural(len(self.chosen), 'document')} of {sizes(dataset.lengths)} tokens, "
            f"{len(dataset):,} examples per epoch, {plural(len(self.controls), 'held-out control')}"
        ]
        spans = self.spans(0)
        frame, start = arrange(spans.length, dataset.S)
        frames, width = int(frame.max()) + 1, int((start + spans.length).max())
        saved = len(spans.doc) * dataset.S / (frames * width)
        if self.packed and saved > 1:
            lines.append(
                f"packed: {len(spans.doc)} spans of a step lie in {frames} frames of {width} tokens: {saved:.1f} times "
                f"less to compute than one frame of {dataset.S} each, with the same loss and gradients"
            )
        if model.positions == "rope":
            distinct, total = distinct_spans(dataset), int(dataset.layout.counts(dataset.lengths).sum())
            moved = f"{total:,} spans are {distinct:,} distinct ones, repeated" if distinct < total else ""
            if dataset.offset_jitter:
                moved = f"offset_jitter={dataset.offset_jitter} gives nothing new"
            if moved:
                lines.append(
                    "warning: RoPE positions are relative and a span does not see what lies before it, so its offset s "
                    f"changes nothing: {moved}. To study positions set model.positions=learned"
                )
        return lines


def build_dataset(config: RunConfig, library: SourceDocuments) -> tuple[list[int], MultiSpliceDocumentDataset]:
    """(the chosen documents' numbers, their dataset). Raises ValueError."""
    chosen = choose_documents(config.splice, library, config.model.T)
    return chosen, _dataset(config, library, library.train, chosen, config.splice.dataset_options())


def choose_documents(splice: SpliceConfig, library: SourceDocuments, S: int) -> list[int]:
    """The numbers of the documents to train on. Raises ValueError where they cannot be chosen."""
    shelf = library.train
    if splice.doc_key is None:
        return splice.choose(shelf.lengths, ends=shelf.ends, S=S)
    key, tokenizer = splice.doc_key.encode("utf-8"), library.tokenizer
    having = [i for i in range(len(shelf.lengths)) if key in text_bytes(tokenizer, shelf.ids(i))]
    if not having:
        raise ValueError(f"splice.doc_key: none of {len(shelf.lengths):,} documents has {splice.doc_key!r} in it")
    if splice.doc_index is not None and splice.doc_index not in having:
        raise ValueError(f"splice.doc_index={splice.doc_index} is a document without {splice.doc_key!r} in it")
    index = None if splice.doc_index is None else having.index(splice.doc_index)
    among = dataclasses.replace(splice, doc_index=index)
    return [having[i] for i in among.choose(shelf.lengths[having], ends=shelf.ends[having], S=S)]


def _dataset(
    config: RunConfig, library: SourceDocuments, shelf: DocumentSet, indices: list[int], options: dict[str, Any]
) -> MultiSpliceDocumentDataset:
    special = library.tokenizer.special_token_ids()
    documents = shelf.documents(indices)
    return MultiSpliceDocumentDataset(
        S=config.model.T,
        doc_tokens_list=(),
        documents=documents,
        doc_metadata=metadata(indices, documents.lengths, library.source),
        **{"pad_token_id": special.get("eot", 0), "eos_token_id": special.get("eot"), "seed": config.train.seed}
        | options,
    )


def choose_controls(
    shelf: DocumentSet, number: int, dataset: MultiSpliceDocumentDataset, trained: ContentIndex
) -> list[int]:
    """Held-out documents that give examples, those nearest in length to the chosen ones; no copy of a trained one."""
    usable = np.flatnonzero(dataset.layout.counts(shelf.lengths)) if len(shelf.lengths) else np.empty(0, dtype=int)
    return _nearest(shelf, usable, number, float(np.median(dataset.lengths)), trained)


def choose_controls_near(shelf: DocumentSet, number: int, length: float, trained: ContentIndex) -> list[int]:
    """Held-out documents of more than two tokens, those nearest to a length; no copy of a trained one."""
    return _nearest(shelf, np.flatnonzero(shelf.lengths > 2), number, length, trained)


def _nearest(shelf: DocumentSet, usable: np.ndarray, number: int, length: float, trained: ContentIndex) -> list[int]:
    """The usable documents nearest in length whose content was not trained on; ties go to the lower number."""
    distance = np.abs(shelf.lengths[usable] - length)
    order = usable[np.argsort(distance, kind="stable")].tolist()
    return list(itertools.islice((i for i in order if shelf.ids(i) not in trained), number))


def unique_names(shelf: DocumentSet, indices: Iterable[int]) -> list[str]:
    """The names of documents; where two are the same, with their numbers."""
    names = [(i, shelf.name(i)) for i in indices]
    times = Counter(name for _, name in names)
    return [f"{name} ({i})" if times[name] > 1 else name for i, name in names]


def grid(dataset: MultiSpliceDocumentDataset, examples: int) -> Spans:
    """Up to so many spans of every document, evenly over all it has: the same at every evaluation."""
    counts = dataset.layout.counts(dataset.lengths)
    docs = np.flatnonzero(counts)
    taken = np.minimum(counts[docs], examples)
    doc = np.repeat(docs, taken)
    j = np.arange(len(doc)) - np.repeat(np.cumsum(taken) - taken, taken)
    number = spread(j, counts[doc], np.repeat(taken, taken))
    return Spans(doc, *dataset.layout.spans(dataset.lengths[doc], number))


def distinct_spans(dataset: MultiSpliceDocumentDataset) -> int:
    """How many of the spans differ in more than their offset s: the number of (document, t, length)."""
    layout, lengths = dataset.layout, dataset.lengths
    if layout.tight or layout.kind in ("slide", "coverage_balanced"):
        return int(layout.starts(lengths).sum())
    found = 0
    for length, number in zip(*np.unique(lengths, return_counts=True), strict=True):
        starts = int(layout.starts(np.array([length]))[0])
        left = length - np.arange(starts) * layout.k_t
        check_int = np.minimum(layout.K, np.full_like(left, length) if layout.kind == "cyclic_roll" else left)
        # At the right end of the frame a span is cut shorter with every offset, down to min_copy_len.
        cut = (layout.S - layout.m) // layout.k_s - (layout.S - check_int) // layout.k_s
        found += int(number) * int((1 + cut).sum())
    return found


def sizes(lengths: np.ndarray) -> str:
    """`10`, or `10 to 20`."""
    low, high = int(lengths.min()), int(lengths.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _part(spans: Spans, share: RankShare) -> Spans:
    """A share of the spans; the order stays."""
    return Spans(*(part[share.of(len(part))] for part in spans))


def _batches(spans: Spans, size: int) -> Iterable[Spans]:
    for i in range(0, len(spans.doc), size):
        yield Spans(*(part[i : i + size] for part in spans))
