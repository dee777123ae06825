"""Splice datasets: spans of chosen documents, each laid into a frame of S tokens.

An example is a number. What lies behind it, (document, t, s), is computed when it is asked for, so a billion examples
cost no more memory than ten. Plan (`spans`: integers), then gather (`frames`: row copies).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Literal, Self, overload

import numpy as np

from niels_gpt.config.checks import check_int
from niels_gpt.config.splice import (
    MOST,
    check_options,
    count,
    log,
)
from niels_gpt.splice.documents import MAX_ID, Documents
from niels_gpt.splice.frames import FrameBuilder, Frames, SpanOrigin, Spans, StepPlan
from niels_gpt.splice.layout import Layout
from niels_gpt.splice.packing import PackedFrames, pack
from niels_gpt.splice.permutation import Permutation, draws, mix, uniform
from niels_gpt.splice.weights import AliasTable, DocumentShares, EdgeWeights, read_groups, read_weights, spread
from niels_gpt.system.allocator import keep_freed_memory
from niels_gpt.system.rng import derive_seed

SHOWN = 20
"""Documents that the log lists."""
_TAU = {"by_coverage": 1.0, "by_document": 0.0}


class SpliceDataset:
    """What both datasets are: documents, a layout of spans, and an order of examples."""

    tag = "splice"
    """What its lines in the log begin with."""

    def __init__(
        self,
        documents: Documents,
        *,
        pad_token_id: int | None,
        eos_token_id: int | None,
        alpha: float,
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
        **layout_options: Any,
    ) -> None:
        self.layout = layout = Layout(**layout_options)
        checked = check_options(
            {
                "alpha": alpha,
                "balance_mode": balance_mode,
                "balance_tau": balance_tau,
                "sampler": sampler,
                "epoch_length": epoch_length,
                "offset_jitter": offset_jitter,
                "jitter_mode": jitter_mode,
                "curriculum": curriculum,
            }
        )
        if pad_token_id is None and eos_token_id is None:
            raise ValueError("what fills a frame? pass pad_token_id, or eos_token_id to fill with that")
        for name, value in (("pad_token_id", pad_token_id), ("eos_token_id", eos_token_id)):
            if value is not None:
                check_int(name, value, -MAX_ID, MAX_ID)
        self.S, self.documents = layout.S, documents
        self.pad_token_id = int(pad_token_id if pad_token_id is not None else eos_token_id)  # type: ignore[arg-type]
        self.eos_token_id = eos_token_id
        self.alpha, self.balance_mode, self.balance_tau = checked["alpha"], balance_mode, checked["balance_tau"]
        self.sampler, self.epoch_length, self.seed = sampler, checked["epoch_length"], seed or 0
        self._key = derive_seed(self.seed, "splice examples")
        self.offset_jitter, self.jitter_mode = checked["offset_jitter"], jitter_mode
        self.curriculum = checked["curriculum"]
        self.lengths = documents.lengths
        number = len(self.lengths)
        self.doc_weights = None if doc_weights is None else read_weights(doc_weights, number)
        self.groups = None if groups is None else read_groups(groups, number)
        self._check_modes()
        if not number:
            raise ValueError("no examples: no document was chosen")
        counts = layout.counts(self.lengths)
        self._usable = np.flatnonzero(counts)
        if not len(self._usable):
            raise ValueError(self._nothing())
        self._counts = counts[self._usable]
        self._edges = EdgeWeights(layout.K, layout.k_t, self.alpha) if self.alpha else None
        self._stages: dict[int, Self] = {}
        self._builder = FrameBuilder(self.S, self.pad_token_id)
        self._arrange()
        first = int(self._usable[0])
        if self.curriculum is not None and self.doc_weights is not None and not self.doc_weights[first]:
            raise ValueError(
                f"curriculum begins with document {first}, which doc_weights gives 0: give it a weight, or leave it out"
            )
        self._log()
        keep_freed_memory()

    def _check_modes(self) -> None:
        """Raise ValueError for options that do not go together."""
        kind = self.layout.kind
        alone = len(self.lengths) == 1 and self.sampler == "quota"
        weighted = alone or self.sampler == "stream" or self.balance_mode == "by_temperature"
        if self.alpha and (kind != "coverage_balanced" or not weighted):
            raise ValueError(
                f"alpha={self.alpha:g} weights the starts of coverage_balanced spans: use content_start_mode="
                "'coverage_balanced' with balance_mode='by_temperature' or sampler='stream' (or a single document); "
                f"here it is {kind}, {self.balance_mode}, sampler {self.sampler}"
            )
        if self.offset_jitter and kind != "coverage_balanced":
            raise ValueError(
                f"offset_jitter={self.offset_jitter} moves coverage_balanced spans; {kind} has offsets of its own"
            )
        if self.sampler == "enumerate":
            for name in ("epoch_length", "doc_weights", "groups"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} needs sampler='quota' or 'stream': enumerated examples come once each")
            if self.balance_mode == "by_temperature":
                raise ValueError("by_temperature shares examples out: use sampler='quota' or 'stream'")

    def _nothing(self) -> str:
        """What to say where no document gives an example."""
        shortest, longest = int(self.lengths.min()), int(self.lengths.max())
        have = f"a document of {longest}" if len(self.lengths) == 1 else f"{len(self.lengths)} documents of {shortest} "
        have += " tokens" if len(self.lengths) == 1 else f"to {longest} tokens"
        rule = self.layout
        if rule.kind == "slide":
            why = f"mode='slide' needs at least S={rule.S} tokens; use mode='splice' for shorter documents"
            if rule.m > rule.S:
                why = f"min_copy_len={rule.m} is longer than the frames of mode='slide', S={rule.S}"
        elif rule.m > rule.K:
            why = f"content_length K={rule.K} is below min_copy_len={rule.m}: spans have K tokens"
        elif longest < rule.m:
            why = f"min_copy_len={rule.m} is longer: lower it, or choose longer documents"
        else:
            why = f"K={rule.K} is longer and adaptive_k is off: turn it on, or lower content_length"
        return f"no examples: {have}, and {why}"

    def _arrange(self, documents: int | None = None) -> None:
        """Lay out the examples of the first `documents` usable documents (default: all)."""
        if documents is not None:
            self._usable, self._counts = self._usable[:documents], self._counts[:documents]
        self._lengths = self.lengths[self._usable]
        self._quotas = self._counts
        if self.sampler == "enumerate":
            if self.balance_mode == "by_document":
                self._quotas = np.full_like(self._counts, self._counts.max())
        else:
            chosen = np.zeros(len(self.lengths), dtype=bool)
            chosen[self._usable] = True
            tau = _TAU.get(self.balance_mode, self.balance_tau)
            shares = DocumentShares(self.lengths, chosen, tau, self.doc_weights, self.groups)
            self._quotas = shares.quotas(self.epoch_length or int(self._counts.sum()))[self._usable]
            if self.sampler == "stream":
                self._alias = AliasTable(shares.floats()[self._usable])
        self._ends = np.cumsum(self._quotas)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def quotas(self) -> list[int]:
        """How many examples of an epoch each document has (for a stream: on average, rounded)."""
        return self._all_quotas().tolist()

    def _all_quotas(self) -> np.ndarray:
        check_int = np.zeros(len(self.lengths), dtype=np.int64)
        check_int[self._usable] = self._quotas
        return check_int

    def spans(self, indices: Sequence[int] | np.ndarray, epoch: int | np.ndarray = 0) -> Spans:
        """What examples are made of. Raises IndexError for a number outside the dataset."""
        n = len(self)
        index = _numbers(indices, n)
        if len(index):
            if not -n <= index.min() <= index.max() < n:
                raise IndexError(f"an example's number is in {-n}..{n - 1}, got {index.min()}..{index.max()}")
            index = np.where(index < 0, index + n, index)
        epochs = np.broadcast_to(np.asarray(epoch, dtype=np.int64), index.shape)
        if self.sampler == "stream":
            at, number = self._drawn(index, epochs)
        else:
            at = np.searchsorted(self._ends, index, side="right")
            number = self._chosen(at, index - self._ends[at] + self._quotas[at])
        lengths = self._lengths[at]
        t, s, length = self.layout.spans(lengths, number)
        if self.offset_jitter and s.any():
            s = s - self._jitter(index, epochs, np.minimum(self.offset_jitter, s))
        return Spans(self._usable[at], t, s, length)

    def _chosen(self, at: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Which span of its document example j of a document's quota is."""
        counts = self._counts[at]
        if self.sampler == "enumerate":
            return j if self.balance_mode == "by_coverage" else j % counts
        quotas = self._quotas[at]
        if self._edges is None:
            return spread(j, counts, quotas)
        return self._edges.start(np.maximum(self._lengths[at], self.layout.K), (j + 0.5) / quotas)

    def _drawn(self, index: np.ndarray, epochs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(document among the usable, span) of each example of the stream."""
        bits = draws(self._key, epochs, index)
        at, third = self._alias.draw(uniform(bits, 0), uniform(bits, 1)), uniform(bits, 2)
        if self._edges is None:
            return at, np.minimum((third * self._counts[at]).astype(np.int64), self._counts[at] - 1)
        return at, self._edges.start(np.maximum(self._lengths[at], self.layout.K), third)

    def _jitter(self, index: np.ndarray, epochs: np.ndarray, most: np.ndarray) -> np.ndarray:
        """How far to move each span to the left: 0 .. most."""
        if self.jitter_mode == "uniform":
            u = uniform(draws(self._key, epochs, index), 3)
            return np.minimum((u * (most + 1)).astype(np.int64), most)
        # Of every most + 1 neighbours each goes to another place, and each goes round all places from epoch to epoch.
        block, within = np.divmod(index, most + 1)
        turn = (mix(block.astype(np.uint64) ^ mix(np.array([self._key], dtype=np.uint64))) >> np.uint64(1)).astype(
            np.int64
        )
        return (within + turn % (most + 1) + epochs) % (most + 1)

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
        """The frames of examples, arrays (n, S); packed: several examples in each. Jitter and the stream sampler differ
        from epoch to epoch."""
        spans = self.spans(indices, epoch)
        return pack(self, spans) if packed else self.frames(spans)

    def frames(self, spans: Spans) -> Frames:
        """The spans laid into frames."""
        return self._builder.build(spans, self.read if self.layout.kind == "cyclic_roll" else self.documents.read)

    def read(self, doc: int, t: int, out: np.ndarray) -> None:
        """Fill `out` with tokens of a document from t on; cyclic_roll goes on at its beginning."""
        left = int(self.lengths[doc]) - t
        if len(out) <= left:
            self.documents.read(doc, t, out)
        else:
            self.documents.read(doc, t, out[:left])
            self.documents.read(doc, 0, out[left:])

    def __getitem__(self, index: int) -> Frames:
        batch = self.get_batch([index])
        origin = SpanOrigin(*(int(part[0]) for part in batch.origin))  # type: ignore[index]
        return Frames(batch.tokens[0], batch.loss_mask[0], batch.segment_ids[0], origin)

    def __iter__(self) -> Iterator[Frames]:
        return map(self.__getitem__, range(len(self)))

    def triples(self, epoch: int = 0) -> np.ndarray:
        """(n, 3): document, t and s of every example, in order."""
        spans = self.spans(np.arange(len(self)), epoch)
        return np.stack((spans.doc, spans.t, spans.s), axis=1)

    def epoch(self, seed: int, epoch: int, rank: int = 0, world_size: int = 1) -> Iterator[int]:
        """The numbers of all examples in a new order; ranks take turns, and together have each once.

        Raises ValueError for a rank outside 0..world_size-1.
        """
        _check_rank(rank, world_size)
        return self._walk(self._order(seed, epoch), rank, world_size)

    def _walk(self, order: Permutation, rank: int, world_size: int) -> Iterator[int]:
        positions = range(rank, len(self), world_size)
        for i in range(0, len(positions), 4096):
            yield from order(np.asarray(positions[i : i + 4096])).tolist()

    def _order(self, seed: int, epoch: int) -> Permutation:
        return Permutation(len(self), derive_seed(seed, "splice", epoch))

    def stage(self, step: int) -> int:
        """How many documents are in use at a step: all that have examples, unless a curriculum adds them one by one.

        Raises ValueError for a step below 0.
        """
        step = count("step", step, 0)
        if self.curriculum is None:
            return len(self._usable)
        return min(1 + step // self.curriculum, len(self._usable))

    def plan(
        self, seed: int, step: int, B: int, rank: int = 0, world_size: int = 1, *, shuffle: bool = True
    ) -> StepPlan:
        """The examples of a training step, a pure function of its arguments: B rows for all ranks together, of which
        rank r has r, r + world_size, ... Epoch follows epoch; a document that joins begins a new one.

        Raises ValueError for a B below 1, a step below 0 or past 2**62 examples, and a rank outside 0..world_size-1."""
        _check_rank(rank, world_size)
        B = count("B", B)
        step = count("step", step, 0, MOST // B)
        documents = self.stage(step)
        dataset = self.first(documents)
        began = 0 if self.curriculum is None else (documents - 1) * self.curriculum
        positions = (step - began) * B + np.arange(rank, B, world_size)
        epochs, within = np.divmod(positions, len(dataset))
        indices = within
        if shuffle:
            stage_seed = seed if self.curriculum is None else derive_seed(seed, "stage", documents)
            for epoch in np.unique(epochs).tolist():
                rows = epochs == epoch
                indices[rows] = dataset._order(stage_seed, epoch)(within[rows])
        return StepPlan(indices, epochs, documents)

    def gather(self, plan: StepPlan) -> Frames:
        """The frames of a plan."""
        return self.first(plan.documents).get_batch(plan.indices, plan.epochs)

    def planned(self, plan: StepPlan) -> Spans:
        """What the examples of a plan are made of."""
        return self.first(plan.documents).spans(plan.indices, plan.epochs)

    def first(self, documents: int) -> Self:
        """The dataset of the first so many documents that have examples."""
        if documents == len(self._usable):
            return self
        if documents not in self._stages:
            part = copy.copy(self)
            part._arrange(documents)
            self._stages = {documents: part}  # one at a time: the next stage has no use for it
        return self._stages[documents]

    def _log(self) -> None:
        """What was made, for the curious; what may surprise, as a warning."""
        rule, number = self.layout, len(self.lengths)
        if number > len(self._usable):
            log.warning(
                "%d of %d documents give no example (shorter than %d tokens)",
                number - len(self._usable), number, rule.shortest(),
            )  # fmt: skip
        if self.offset_jitter and not (rule.S - rule.content(self._lengths)).any():
            log.warning(
                "offset_jitter=%d changes nothing: spans of K = S = %d fill the frame", self.offset_jitter, rule.S
            )
        if not log.isEnabledFor(logging.INFO):
            return
        tag = self.tag
        more = f" and {number - SHOWN} more" if number > SHOWN else ""
        log.info(
            "[%s] num_docs=%d doc_lengths=%s%s S=%d content_length=%d content_stride=%d offset_stride=%d mode=%s "
            "balance_mode=%s sampler=%s total_pairs=%d",
            tag, number, self.lengths[:SHOWN].tolist(), more, rule.S, rule.K, rule.k_t, rule.k_s, rule.kind,
            self.balance_mode, self.sampler, len(self),
        )  # fmt: skip
        quotas = self._all_quotas()[:SHOWN]
        log.info("[%s] pairs_per_doc=%s%s", tag, quotas.tolist(), more)
        if self.sampler != "enumerate":
            more_factors = [name for name in ("doc_weights", "groups") if getattr(self, name) is not None]
            tau = _TAU.get(self.balance_mode, self.balance_tau)
            log.info("[%s] doc_probs ~ %s normalized", tag, " * ".join([f"length^{tau:g}", *more_factors]))
            fractions = np.round(quotas / len(self), 4).tolist()
            log.info("[%s] expected_doc_fraction=%s%s", tag, fractions, more)


def _numbers(indices: Sequence[int] | np.ndarray, n: int) -> np.ndarray:
    """The numbers of examples, int64. Raises ValueError for what are none, IndexError for huge ones."""
    try:
        given = np.asarray(indices if hasattr(indices, "__len__") else list(indices))
    except (TypeError, ValueError):
        raise ValueError(f"examples are chosen by a list of integers, got {indices!r}") from None
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        if given.dtype == object and all(isinstance(i, int) for i in given.flat):
            raise IndexError(f"an example's number is in {-n}..{n - 1}, got {max(given.flat, key=abs)}")
        raise ValueError(f"examples are chosen by a list of integers, got {given.dtype} of shape {given.shape}")
    return given.astype(np.int64)


def _check_rank(rank: int, world_size: int) -> None:
    integers = all(hasattr(number, "__index__") for number in (rank, world_size))
    if not integers or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..world_size-1, got rank={rank}, world_size={world_size}")
