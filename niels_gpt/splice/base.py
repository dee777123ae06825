"""Splice datasets: spans of chosen documents, each copied into a frame of S tokens.

An example is an index. Its span (document, t, s) is computed on demand, so a billion examples use no more memory than
ten. Plan (`spans`: integers), then gather (`frames`: row copies).
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Literal, Self, overload

import numpy as np

from niels_gpt.config.checks import check_int, check_option_names
from niels_gpt.config.splice import MOST, check_options, count, log, parse_axis_shuffle
from niels_gpt.splice.axis_order import CHUNK, MAX_ROWS, AxisOrder, AxisShuffles
from niels_gpt.splice.documents import MAX_ID, Documents
from niels_gpt.splice.frames import FrameBuilder, Frames, SpanOrigin, Spans, StepPlan
from niels_gpt.splice.layout import DocumentLayouts
from niels_gpt.splice.packing import PackedFrames, pack
from niels_gpt.splice.permutation import Permutation, draws, mix, uniform
from niels_gpt.splice.weights import (
    AliasTable,
    DocumentEdges,
    DocumentShares,
    first_spread,
    parse_groups,
    parse_weights,
    per_document,
    spread,
)
from niels_gpt.system.host_limits import keep_freed_memory
from niels_gpt.system.rng import derive_seed

SHOWN = 20
"""Maximum number of documents listed in the log."""
ORDER_OPTIONS = ("shuffle", "shuffle_offsets", "offset_seed", "shuffle_content", "content_seed", "shuffle_per_epoch",
                 "eos_before_span", "trailing_segment_zero", "dataset_name")  # fmt: skip
"""The `order_options` of both datasets."""
_TAU = {"by_coverage": 1.0, "by_document": 0.0}
"""Exponent of the document length for the balance modes that fix it."""


class SpliceDataset:
    """Base of both datasets: documents, a layout of spans, and an order of examples."""

    tag = "splice"
    """Prefix of its log lines."""

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Raises TypeError for an unknown option, with what to use instead."""
        check_option_names(cls.__name__, options, cls.option_names())
        return super().__new__(cls)

    @classmethod
    def option_names(cls) -> list[str]:
        """The names of all options of the class."""
        own = [name for name in inspect.signature(cls.__init__).parameters if name not in ("self", "order_options")]
        return [*own, *ORDER_OPTIONS]

    def __init__(
        self,
        documents: Documents,
        *,
        pad_token_id: int | None,
        eos_token_id: int | None,
        alpha: float | Sequence[float],
        offset_jitter: int,
        jitter_mode: str,
        seed: int | None,
        balance_mode: str = "by_coverage",
        balance_tau: float = 1.0,
        sampler: str = "enumerate",
        epoch_length: int | None = None,
        doc_weights: Sequence[float] | np.ndarray | None = None,
        groups: Sequence[Hashable] | None = None,
        curriculum: int | None = None,
        shuffle: bool = True,
        shuffle_offsets: bool | int = False,
        offset_seed: int | None = None,
        shuffle_content: bool | int = False,
        content_seed: int | None = None,
        shuffle_per_epoch: bool = True,
        eos_before_span: bool = False,
        trailing_segment_zero: bool = False,
        dataset_name: str | None = None,
        **layout_options: Any,
    ) -> None:
        self.layouts = DocumentLayouts(documents.lengths, **layout_options)
        self.layout = layout = self.layouts.first
        """The layout of the first document; those of the others differ in their strides only."""
        checked = check_options(
            {
                "balance_mode": balance_mode,
                "balance_tau": balance_tau,
                "sampler": sampler,
                "epoch_length": epoch_length,
                "offset_jitter": offset_jitter,
                "jitter_mode": jitter_mode,
                "curriculum": curriculum,
                "shuffle": shuffle,
                "shuffle_per_epoch": shuffle_per_epoch,
                "eos_before_span": eos_before_span,
                "trailing_segment_zero": trailing_segment_zero,
                "dataset_name": dataset_name,
            }
        )
        if pad_token_id is None and eos_token_id is None:
            raise ValueError("a frame needs a filler token: pass pad_token_id, or eos_token_id to use that")
        for name, value in (("pad_token_id", pad_token_id), ("eos_token_id", eos_token_id)):
            if value is not None:
                check_int(name, value, -MAX_ID, MAX_ID)
        self.S, self.documents = layout.S, documents
        self.pad_token_id = int(pad_token_id if pad_token_id is not None else eos_token_id)  # type: ignore[arg-type]
        self.eos_token_id = eos_token_id
        self.balance_mode, self.balance_tau = balance_mode, checked["balance_tau"]
        self.sampler, self.epoch_length, self.seed = sampler, checked["epoch_length"], seed or 0
        self._key = derive_seed(self.seed, "splice examples")
        self.offset_jitter, self.jitter_mode = checked["offset_jitter"], jitter_mode
        self.curriculum = checked["curriculum"]
        self.lengths = documents.lengths
        self.dataset_name = dataset_name
        number = len(self.lengths)
        alphas = per_document("alpha", alpha, number).astype(np.float64)
        self.alpha = float(alphas.max(initial=0.0))
        """The largest weight exponent of a document."""
        self.shuffle, self.shuffle_per_epoch = checked["shuffle"], checked["shuffle_per_epoch"]
        offset_axis, content_axis = (
            parse_axis_shuffle(name, on, seed_name, own)
            for name, on, seed_name, own in (
                ("shuffle_offsets", shuffle_offsets, "offset_seed", offset_seed),
                ("shuffle_content", shuffle_content, "content_seed", content_seed),
            )
        )
        self.axis_shuffles = AxisShuffles(*offset_axis, *content_axis)
        self.doc_weights = None if doc_weights is None else parse_weights(doc_weights, number)
        self.groups = None if groups is None else parse_groups(groups, number)
        self._check_modes()
        if not number:
            raise ValueError("no examples: no document was selected")
        counts = self.layouts.counts()
        self._usable = np.flatnonzero(counts)
        if not len(self._usable):
            raise ValueError(self._no_examples_message())
        self._counts = counts[self._usable]
        self._edges = None
        if self.alpha:
            self._edges = DocumentEdges(self.lengths, layout.K, self.layouts.strides[0], alphas)
        self._stages: dict[int, Self] = {}
        if eos_before_span and eos_token_id is None:
            raise ValueError("eos_before_span needs eos_token_id: the token to put before each span")
        self._builder = FrameBuilder(
            self.S,
            self.pad_token_id,
            before=eos_token_id if eos_before_span else None,
            trailing_segment=0 if trailing_segment_zero else 1,
        )
        self._arrange()
        first = int(self._usable[0])
        if self.curriculum is not None and self.doc_weights is not None and not self.doc_weights[first]:
            raise ValueError(
                f"curriculum starts with document {first}, whose doc_weights entry is 0: give it a weight, or drop it"
            )
        self._log()
        keep_freed_memory()

    def _check_modes(self) -> None:
        """Raise ValueError for options that contradict each other."""
        kind = self.layout.kind
        if self.alpha and (kind != "coverage_balanced" or self.sampler == "enumerate"):
            raise ValueError(
                f"alpha={self.alpha:g} weights the starts of coverage_balanced spans: use content_start_mode="
                f"'coverage_balanced' with sampler='quota' or 'stream', not {kind} with sampler='{self.sampler}'"
            )
        if self.axis_shuffles and self.sampler == "stream":
            raise ValueError(
                "shuffle_offsets and shuffle_content order the examples of an epoch, and sampler='stream' draws them "
                "at random: use sampler='enumerate' or 'quota', or no axis shuffle"
            )
        if not self.shuffle_per_epoch and self.sampler == "stream":
            raise ValueError(
                "shuffle_per_epoch=False repeats the order of the first epoch, and sampler='stream' draws others "
                "in every epoch: use sampler='quota', or leave shuffle_per_epoch out"
            )
        if self.offset_jitter and kind != "coverage_balanced":
            raise ValueError(
                f"offset_jitter={self.offset_jitter} needs content_start_mode='coverage_balanced', not {kind}"
            )
        if self.sampler == "enumerate":
            for name in ("epoch_length", "doc_weights", "groups"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} needs sampler='quota' or 'stream': enumerate yields every example once")
            if self.balance_mode == "by_temperature":
                raise ValueError("balance_mode='by_temperature' needs sampler='quota' or 'stream'")

    def _no_examples_message(self) -> str:
        """The error message for documents that give no example."""
        shortest, longest = int(self.lengths.min()), int(self.lengths.max())
        have = f"1 document of {longest}" if len(self.lengths) == 1 else f"{len(self.lengths)} documents of {shortest} "
        have += " tokens" if len(self.lengths) == 1 else f"to {longest} tokens"
        layout = self.layout
        if layout.kind == "slide":
            why = f"mode='slide' needs at least S={layout.S} tokens; use mode='splice' for shorter documents"
            if layout.m > layout.S:
                why = f"min_copy_len={layout.m} is longer than the frames of mode='slide', S={layout.S}"
        elif layout.m > layout.K:
            why = f"content_length K={layout.K} is below min_copy_len={layout.m}: spans have K tokens"
        elif longest < layout.m:
            why = f"min_copy_len={layout.m} is longer: lower it, or select longer documents"
        else:
            why = f"K={layout.K} is longer and adaptive_k is off: turn it on, or lower content_length"
        return f"no examples: {have}, and {why}"

    def _arrange(self, documents: int | None = None) -> None:
        """Set up the examples of the first `documents` usable documents (default: all)."""
        if documents is not None:
            self._usable, self._counts = self._usable[:documents], self._counts[:documents]
        self._lengths = self.lengths[self._usable]
        self._quotas = self._counts
        if self.sampler == "enumerate":
            if self.balance_mode == "by_document":
                self._quotas = np.full_like(self._counts, self._counts.max())
        else:
            usable = np.zeros(len(self.lengths), dtype=bool)
            usable[self._usable] = True
            tau = _TAU.get(self.balance_mode, self.balance_tau)
            shares = DocumentShares(self.lengths, usable, tau, self.doc_weights, self.groups)
            self._quotas = shares.quotas(self.epoch_length or int(self._counts.sum()))[self._usable]
            if self.sampler == "stream":
                self._alias = AliasTable(shares.floats()[self._usable])
        self._ends = np.cumsum(self._quotas)
        widths, max_rows = self._row_widths(), None
        if self.axis_shuffles and widths is None:
            self._starts = self.layouts.starts()[self._usable]
            max_rows = self._max_rows()
        self._axis_order = AxisOrder(self.axis_shuffles, self._ends, widths, self._row_begins, max_rows)

    def _row_widths(self) -> np.ndarray | None:
        """Examples per start of each usable document; None if they differ within a document."""
        if self.layout.kind in ("slide", "coverage_balanced"):
            return np.ones(len(self._usable), dtype=np.int64)
        widths = self.layouts.widths()
        return None if widths is None or self.sampler != "enumerate" else widths[self._usable]

    def _max_rows(self) -> np.ndarray:
        """Upper bound of the rows of each usable document in the tables of shuffle_content and shuffle_offsets.

        It holds for every stage of a curriculum: raises ValueError for too long a document before the first step.
        """
        if self.sampler == "enumerate":
            rows = np.where(self._starts == 1, 1, self._starts * -(-self._quotas // self._counts))
        else:
            rows = np.minimum(self._starts, self._quotas if self.curriculum is None else len(self))
        most = int(rows.argmax())
        if rows[most] > MAX_ROWS:
            raise ValueError(
                "shuffle_content and shuffle_offsets need a table of the starts of a document, and document "
                f"{self._own_index(most)} has {rows[most]:,}, more than {MAX_ROWS:,}: use shuffle, a longer "
                "content_stride, or content_start_mode='coverage_balanced'"
            )
        return rows

    def _own_index(self, at: int) -> int:
        """The index of a usable document where the documents come from (a cache), else in the list of documents."""
        doc = int(self._usable[at])
        indices = getattr(self.documents, "indices", None)
        return doc if indices is None else int(indices[doc])

    def _row_begins(self, at: int) -> np.ndarray:
        """The first example of each row (consecutive examples of one start) of a usable document, from 0."""
        doc, starts = int(self._usable[at]), int(self._starts[at])
        count, quota = int(self._counts[at]), int(self._quotas[at])
        if starts == 1:
            return np.zeros(1, dtype=np.int64)
        begins = np.empty(starts * (-(-quota // count) if self.sampler == "enumerate" else 1), dtype=np.int64)
        for first in range(0, len(begins), CHUNK):
            repeat, start = np.divmod(np.arange(first, min(first + CHUNK, len(begins))), starts)
            numbers = self.layouts.first_numbers(doc, start)
            begins[first : first + len(start)] = (
                repeat * count + numbers if self.sampler == "enumerate" else first_spread(numbers, count, quota)
            )
        used = np.empty(len(begins), dtype=bool)  # a small quota skips starts
        np.less(begins[:-1], np.minimum(begins[1:], quota), out=used[:-1])
        used[-1] = begins[-1] < quota
        return begins if used.all() else begins[used]

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def quotas(self) -> list[int]:
        """Number of examples per epoch of each document (for a stream: the rounded average)."""
        return self._all_quotas().tolist()

    def _all_quotas(self) -> np.ndarray:
        quotas = np.zeros(len(self.lengths), dtype=np.int64)
        quotas[self._usable] = self._quotas
        return quotas

    def spans(self, indices: Sequence[int] | np.ndarray, epoch: int | np.ndarray = 0) -> Spans:
        """The spans of examples. Raises IndexError for an index outside the dataset."""
        n = len(self)
        index = _example_indices(indices, n)
        if len(index):
            if not -n <= index.min() <= index.max() < n:
                raise IndexError(f"example indices must be in {-n}..{n - 1}, got {index.min()}..{index.max()}")
            index = np.where(index < 0, index + n, index)
        epochs = np.broadcast_to(np.asarray(epoch, dtype=np.int64), index.shape)
        if self.sampler == "stream":
            at, number = self._draw(index, epochs)
        else:
            at = np.searchsorted(self._ends, index, side="right")
            number = self._span_numbers(at, index - self._ends[at] + self._quotas[at])
        t, s, length = self.layouts.spans(self._usable[at], number)
        if self.offset_jitter and s.any():
            s = s - self._jitter(index, epochs, np.minimum(self.offset_jitter, s))
        return Spans(self._usable[at], t, s, length)

    def _span_numbers(self, at: np.ndarray, j: np.ndarray) -> np.ndarray:
        """The span number within its document of example j of the document's quota."""
        counts = self._counts[at]
        if self.sampler == "enumerate":
            return j if self.balance_mode == "by_coverage" else j % counts
        quotas = self._quotas[at]
        if self._edges is None:
            return spread(j, counts, quotas)
        return self._edges.start(self._usable[at], (j + 0.5) / quotas)

    def _draw(self, index: np.ndarray, epochs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index among the usable documents, span number) of each example of the stream sampler."""
        bits = draws(self._key, epochs, index)
        at, third = self._alias.draw(uniform(bits, 0), uniform(bits, 1)), uniform(bits, 2)
        if self._edges is None:
            return at, np.minimum((third * self._counts[at]).astype(np.int64), self._counts[at] - 1)
        return at, self._edges.start(self._usable[at], third)

    def _jitter(self, index: np.ndarray, epochs: np.ndarray, most: np.ndarray) -> np.ndarray:
        """How many positions to move each span left: 0 .. most."""
        if self.jitter_mode == "uniform":
            u = uniform(draws(self._key, epochs, index), 3)
            return np.minimum((u * (most + 1)).astype(np.int64), most)
        # Each of `most + 1` consecutive examples gets a different shift; over the epochs an example gets every shift.
        block, within = np.divmod(index, most + 1)
        hashed = mix(block.astype(np.uint64) ^ mix(np.array([self._key], dtype=np.uint64)))
        first = (hashed >> np.uint64(1)).astype(np.int64)
        return (within + first % (most + 1) + epochs) % (most + 1)

    @overload
    def get_batch(
        self, indices: Sequence[int] | np.ndarray, epoch: int | np.ndarray = 0, *, packed: Literal[False] = False
    ) -> Frames: ...
    @overload
    def get_batch(
        self, indices: Sequence[int] | np.ndarray, epoch: int | np.ndarray = 0, *, packed: Literal[True]
    ) -> PackedFrames: ...
    def get_batch(
        self, indices: Sequence[int] | np.ndarray, epoch: int | np.ndarray = 0, *, packed: bool = False
    ) -> Frames | PackedFrames:
        """The frames of examples, arrays (n, S); packed: several examples per frame.

        Jitter and the stream sampler depend on the epoch. Raises ValueError for packed frames with eos_before_span or
        trailing_segment_zero: they have no filler.
        """
        if packed and (self._builder.before is not None or self._builder.trailing_segment == 0):
            raise ValueError(
                "packed frames have no filler: use packed=False with eos_before_span, trailing_segment_zero"
            )
        spans = self.spans(indices, epoch)
        return pack(self, spans) if packed else self.frames(spans)

    def frames(self, spans: Spans) -> Frames:
        """The spans copied into frames."""
        return self._builder.build(spans, self.read if self.layout.kind == "cyclic_roll" else self.documents.read)

    def read(self, doc: int, t: int, out: np.ndarray) -> None:
        """Fill `out` with the tokens of a document from t on; past its end, continue at its beginning (cyclic_roll)."""
        left = int(self.lengths[doc]) - t
        if len(out) <= left:
            self.documents.read(doc, t, out)
        else:
            self.documents.read(doc, t, out[:left])
            self.documents.read(doc, 0, out[left:])

    def __getitem__(self, index: int) -> Frames:
        batch = self.get_batch([index])
        origin = SpanOrigin(*(int(column[0]) for column in batch.origin))  # type: ignore[index]
        return Frames(batch.tokens[0], batch.loss_mask[0], batch.segment_ids[0], origin)

    def __iter__(self) -> Iterator[Frames]:
        return map(self.__getitem__, range(len(self)))

    def triples(self, epoch: int = 0) -> np.ndarray:
        """(n, 3): document, t and s of every example, in enumeration order."""
        spans = self.spans(np.arange(len(self)), epoch)
        return np.stack((spans.doc, spans.t, spans.s), axis=1)

    def epoch(self, seed: int, epoch: int, rank: int = 0, world_size: int = 1) -> Iterator[int]:
        """All example indices in the order of an epoch; rank r yields positions r, r + world_size, ...

        Raises ValueError for a rank outside 0..world_size-1.
        """
        _check_rank(rank, world_size)
        return self._walk(seed, epoch, rank, world_size)

    def _walk(self, seed: int, epoch: int, rank: int, world_size: int) -> Iterator[int]:
        positions = range(rank, len(self), world_size)
        for i in range(0, len(positions), 4096):
            yield from self.order(seed, np.asarray(positions[i : i + 4096]) + epoch * len(self))[0].tolist()

    def _permuted(self, positions: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """The example indices at positions of an epoch: one axis permuted, or the whole epoch."""
        epoch = epoch if self.shuffle_per_epoch else 0
        if self.axis_shuffles:
            return self._axis_order(positions, seed, epoch)
        return Permutation(len(self), derive_seed(seed, "splice", epoch))(positions)

    def stage(self, step: int) -> int:
        """Number of documents in use at a step: all usable ones, unless a curriculum adds them one by one.

        Raises ValueError for a step below 0.
        """
        step = count("step", step, 0)
        if self.curriculum is None:
            return len(self._usable)
        return min(1 + step // self.curriculum, len(self._usable))

    def plan(
        self, seed: int, step: int, B: int, rank: int = 0, world_size: int = 1, *, shuffle: bool | None = None
    ) -> StepPlan:
        """The examples of a training step, a pure function of the arguments.

        The B rows are those of all ranks together; rank r has rows r, r + world_size, ... Epochs follow each other; a
        document that joins (curriculum) starts a new one. Raises ValueError for B below 1, a step below 0 or past 2**62
        examples, and a rank outside 0..world_size-1.
        """
        _check_rank(rank, world_size)
        B = count("B", B)
        step = count("step", step, 0, MOST // B)
        documents = self.stage(step)
        dataset = self.first(documents)
        first_step = 0 if self.curriculum is None else (documents - 1) * self.curriculum
        positions = (step - first_step) * B + np.arange(rank, B, world_size)
        stage_seed = seed if self.curriculum is None else derive_seed(seed, "stage", documents)
        indices, epochs = dataset.order(stage_seed, positions, shuffle=shuffle)
        return StepPlan(indices, epochs, documents)

    def order(
        self, seed: int, positions: Sequence[int] | np.ndarray, *, shuffle: bool | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(example index, epoch) at each position of the endless sequence of epochs. A curriculum is not applied.

        `shuffle=False` is the order of enumeration; None: as the options of the dataset say.
        """
        epochs, indices = np.divmod(np.asarray(positions, dtype=np.int64), len(self))
        if shuffle or (shuffle is None and (self.shuffle or self.axis_shuffles)):
            for epoch in np.unique(epochs).tolist():
                rows = epochs == epoch
                indices[rows] = self._permuted(indices[rows], seed, epoch)
        return indices, epochs

    def gather(self, plan: StepPlan) -> Frames:
        """The frames of a plan."""
        return self.first(plan.documents).get_batch(plan.indices, plan.epochs)

    def planned(self, plan: StepPlan) -> Spans:
        """The spans of a plan."""
        return self.first(plan.documents).spans(plan.indices, plan.epochs)

    def first(self, documents: int) -> Self:
        """The dataset of the first `documents` usable documents."""
        if documents == len(self._usable):
            return self
        if documents not in self._stages:
            stage = copy.copy(self)
            stage._arrange(documents)
            self._stages = {documents: stage}  # keep only one: later steps use later stages
        return self._stages[documents]

    def _log(self) -> None:
        """Log the layout (info), and warn about options that have no effect."""
        layout, number = self.layout, len(self.lengths)
        if number > len(self._usable):
            log.warning(
                "%d of %d documents give no example (shorter than %d tokens)",
                number - len(self._usable), number, layout.shortest(),
            )  # fmt: skip
        if self.offset_jitter and not (layout.S - layout.content(self._lengths)).any():
            log.warning(
                "offset_jitter=%d has no effect: spans of K = S = %d fill the frame", self.offset_jitter, layout.S
            )
        self._warn_about_axes()
        if not log.isEnabledFor(logging.INFO):
            return
        tag = self.tag
        strides = (
            values[0] if len(set(values)) == 1 else values[:SHOWN]
            for values in map(np.ndarray.tolist, self.layouts.strides)
        )
        named = "" if self.dataset_name is None else f"dataset={self.dataset_name} "
        more = f" and {number - SHOWN} more" if number > SHOWN else ""
        log.info(
            "[%s] %snum_docs=%d doc_lengths=%s%s S=%d content_length=%d content_stride=%s offset_stride=%s mode=%s "
            "balance_mode=%s sampler=%s total_pairs=%d",
            tag, named, number, self.lengths[:SHOWN].tolist(), more, layout.S, layout.K, *strides, layout.kind,
            self.balance_mode, self.sampler, len(self),
        )  # fmt: skip
        quotas = self._all_quotas()[:SHOWN]
        log.info("[%s] pairs_per_doc=%s%s", tag, quotas.tolist(), more)
        if self.sampler != "enumerate":
            factors = [name for name in ("doc_weights", "groups") if getattr(self, name) is not None]
            tau = _TAU.get(self.balance_mode, self.balance_tau)
            log.info("[%s] doc_probs ~ %s normalized", tag, " * ".join([f"length^{tau:g}", *factors]))
            fractions = np.round(quotas / len(self), 4).tolist()
            log.info("[%s] expected_doc_fraction=%s%s", tag, fractions, more)

    def _warn_about_axes(self) -> None:
        """Warn about a shuffled axis with nothing to shuffle: the epoch stays in order, because it replaces shuffle."""
        starts = self.layouts.starts()[self._usable]
        single = {
            "shuffle_offsets": (
                self.axis_shuffles.offsets,
                (self._counts == starts).all(),
                "every start has one offset",
            ),
            "shuffle_content": (self.axis_shuffles.content, (starts == 1).all(), "every document has one start"),
        }
        idle = {name: why for name, (on, nothing, why) in single.items() if on and nothing}
        for name, why in idle.items():
            order = ""
            if len(idle) == self.axis_shuffles.offsets + self.axis_shuffles.content:
                order = ", and the examples stay in the order of enumeration, because it replaces shuffle"
            log.warning("%s has no effect with content_start_mode=%s: %s%s", name, self.layout.kind, why, order)


def _example_indices(indices: Sequence[int] | np.ndarray, n: int) -> np.ndarray:
    """Example indices as int64. Raises ValueError for other types, IndexError for integers past 64 bits."""
    try:
        given = np.asarray(indices if hasattr(indices, "__len__") else list(indices))
    except (TypeError, ValueError):
        raise ValueError(f"example indices must be a list of integers, got {indices!r}") from None
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        if given.dtype == object and all(isinstance(i, int) for i in given.flat):
            raise IndexError(f"example indices must be in {-n}..{n - 1}, got {max(given.flat, key=abs)}")
        raise ValueError(f"example indices must be a list of integers, got {given.dtype} of shape {given.shape}")
    return given.astype(np.int64)


def _check_rank(rank: int, world_size: int) -> None:
    integers = all(hasattr(number, "__index__") for number in (rank, world_size))
    if not integers or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..world_size-1, got rank={rank}, world_size={world_size}")
