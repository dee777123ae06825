"""Measure memorization: the probability that a model recites windows of a document.

Definitions: extraction probability P(z) (Cooper et al. 2025, arXiv 2505.12546), (n, p)-discoverable extraction (Hayes
et al. 2024, arXiv 2410.19482), and the greedy 32/32 score of the Pythia paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from niels_gpt.config.checks import check_int
from niels_gpt.evaluation.exact import Score, score_stream
from niels_gpt.evaluation.scoring import score_rows
from niels_gpt.memorization.extraction import continue_greedily, log_probabilities, longest_run
from niels_gpt.memorization.progress import Progress, no_count
from niels_gpt.model.gpt import GPT
from niels_gpt.tokenizer import AnyTokenizer, fits, token_sizes

MEMORIZED = 0.5
"""A window with this P(z) or more counts as memorized."""


@dataclass(frozen=True)
class Document:
    """A text to measure."""

    name: str
    ids: np.ndarray
    """(L,) token ids; a final EOT counts as a token of no bytes."""
    control: bool = False
    """Never trained on: memorization is the gap to such documents."""
    source: str = ""
    before: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """What precedes the text in training: windows with a negative start begin in it."""
    note: str = ""
    """The file of a note, in an audit; see `AuditText`."""

    def row(self, start: int, end: int) -> np.ndarray:
        """Return the tokens start .. end - 1; those at negative indices are the last ones of `before`."""
        return self.ids[start:end] if start >= 0 else np.append(self.before[start:], self.ids[:end])


@dataclass(frozen=True)
class ExtractionSettings:
    """Which windows to measure, and how."""

    window: int = 100
    """Tokens per window z."""
    prompt: int = 50
    """Tokens of the window that are given to the model; P(z) is the probability of the others, the suffix."""
    stride: int = 5
    """Tokens between the starts of successive windows."""
    greedy: int = 32
    """Prompt length of greedy decoding, and the number of tokens decoded; 0: no greedy decoding."""
    whole_window: bool = False
    """In the map of a document a window counts for all its characters, not only for those of its suffix."""
    batch: int = 0
    """Windows per forward pass; 0: a number that suits the device."""

    def __post_init__(self) -> None:
        for name, low in (("window", 2), ("prompt", 1), ("stride", 1), ("greedy", 0), ("batch", 0)):
            object.__setattr__(self, name, check_int(name, getattr(self, name), low))
        if self.prompt >= self.window:
            raise ValueError(
                f"a prompt of {self.prompt} tokens leaves no suffix in a window of {self.window}: "
                f"set prompt to at most {self.window - 1}, or use a wider window"
            )

    @property
    def suffix(self) -> int:
        """Tokens after the prompt."""
        return self.window - self.prompt

    @classmethod
    def fitting(
        cls,
        T: int,
        *,
        window: int | None = None,
        prompt: int | None = None,
        greedy: int | None = None,
        stride: int = 5,
        whole_window: bool = False,
    ) -> ExtractionSettings:
        """Return the given settings, with defaults (None) that are reduced to fit a small T.

        Raises ValueError for given settings that do not fit.
        """
        if prompt is not None and prompt > T:
            raise ValueError(
                f"a prompt of {prompt} tokens leaves no token to predict in a model of T={T}: "
                f"set --prompt to {T} or less"
            )
        if window is None:
            window = max(min(100, T + 1), 2 if prompt is None else prompt + 1)
        settings = cls(
            window=window,
            prompt=window // 2 if prompt is None else prompt,
            stride=stride,
            greedy=min(32, (T + 1) // 2) if greedy is None else greedy,
            whole_window=whole_window,
        )
        settings.check(T)
        return settings

    def check(self, T: int) -> None:
        """Raise ValueError if windows or greedy continuations do not fit a model of context length T."""
        if self.window - 1 > T:
            raise ValueError(
                f"windows of {self.window} tokens do not fit a model of T={T}: set --window to {T + 1} or less"
            )
        if 2 * self.greedy - 1 > T:
            raise ValueError(
                f"greedy prompts of {self.greedy} tokens and as many decoded ones do not fit a model of T={T}: "
                f"set --greedy to {(T + 1) // 2} or less (0: no greedy decoding)"
            )


@dataclass(frozen=True)
class Measurement:
    """The measurement of one document. Arrays have one entry per window."""

    document: Document
    settings: ExtractionSettings
    bytes: int
    """Bytes of the document's text."""
    starts: np.ndarray
    cuts: np.ndarray
    """First token of each suffix: the tokens from the start to here are the prompt."""
    ends: np.ndarray
    log_p: np.ndarray
    """log P(z), float64."""
    score: Score
    greedy_share: np.ndarray
    """Fraction of the decoded tokens that equal the text; nan where the text ends earlier."""
    greedy_run: np.ndarray
    """Decoded tokens that equal the text, before the first that differs."""
    longest: tuple[int, int]
    """(tokens, start) of the longest verbatim run; start is the index of its first token in the document. It ends with
    the document, or where the prompt and all of the run but its last token fill the model's T."""
    base_log_p: np.ndarray | None = None
    """log P(z) under the model that this one was fine-tuned from, nan where not measured; None without one."""
    base_score: Score | None = None

    @classmethod
    def of(
        cls,
        document: Document,
        settings: ExtractionSettings,
        tokenizer: AnyTokenizer,
        spans: np.ndarray,
        log_p: np.ndarray,
        **scores: Any,
    ) -> Measurement:
        """Return the measurement of windows, (N, 3): start, cut, end. Loss and greedy scores may be unknown."""
        starts, cuts, ends = spans.T
        unknown = {
            "score": Score(len(document.ids) - 1, math.nan),
            "greedy_share": np.full(len(log_p), np.nan),
            "greedy_run": np.zeros(len(log_p), dtype=np.int64),
            "longest": (0, 0),
        }
        size = int(token_sizes(tokenizer)[document.ids].sum())
        return cls(document, settings, size, starts, cuts, ends, log_p, **{**unknown, **scores})

    @property
    def p(self) -> np.ndarray:
        """P(z) of each window."""
        return np.exp(self.log_p)

    @property
    def short(self) -> bool:
        """Whether the document is shorter than a window; it is measured as one window, with the prompt scaled down."""
        return len(self.document.ids) < self.settings.window

    @property
    def rows(self) -> list[np.ndarray]:
        """The tokens of each window."""
        return [self.document.row(*span) for span in zip(self.starts.tolist(), self.ends.tolist(), strict=True)]

    @property
    def greedy_exact(self) -> int:
        """Number of starts whose complete continuation equals the text."""
        return int((self.greedy_share == 1.0).sum())


def window_starts(length: int, window: int, stride: int) -> np.ndarray:
    """Return the starts of the windows of a document: 0, stride, ..., and length - window, to cover the tail.

    A document shorter than a window has one start, 0.
    """
    last = max(0, length - window)
    starts = np.arange(0, last + 1, stride, dtype=np.int64)
    return starts if starts[-1] == last else np.append(starts, last)


def chance(log_p: np.ndarray | float, n: int) -> np.ndarray:
    """Return the chance to see a window at least once in n samples: 1 - (1 - p)^n, exact for p near 0 and near 1."""
    log_p = np.asarray(log_p, dtype=np.float64)
    if n < 1:
        raise ValueError(f"n samples must be at least 1, got {n}")
    with np.errstate(divide="ignore"):  # p = 1: log 0
        # log(1 - p): the first form is exact for p near 1, the second for p near 0.
        log_missed = np.where(log_p > -0.5, np.log(-np.expm1(log_p)), np.log1p(-np.exp(log_p)))
    return 0.0 - np.expm1(n * log_missed)  # 0.0, not -0.0, for p = 0


def check_documents(model: GPT, documents: Sequence[Document], tokenizer: AnyTokenizer) -> None:
    """Raise ValueError for documents that cannot be measured, or a tokenizer that does not belong to the model."""
    V = model.config.V
    if not fits(tokenizer, V):
        raise ValueError(
            f"this tokenizer does not belong to this model: it has {tokenizer.vocab_size} ids, the model has V={V}"
        )
    if not documents:
        raise ValueError("no document to measure: give at least one")
    sizes, names = token_sizes(tokenizer), set()
    for document in documents:
        where, ids = f"document {document.name!r}", document.ids
        if document.name in names:
            raise ValueError(f"two documents are named {document.name!r}: give each a different name")
        names.add(document.name)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{where}: ids must be a 1-d array of integers, got {ids.dtype} of shape {ids.shape}")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < V:
            raise ValueError(f"{where} has ids {ids.min()}..{ids.max()}, outside the vocabulary 0..{V - 1}")
        if len(ids) < 2 or not sizes[ids[1:]].any():
            raise ValueError(
                f"{where} has {np.count_nonzero(sizes[ids])} tokens of text, but at least 2 are needed: drop the "
                "document"
            )


def measure(
    model: GPT,
    documents: Sequence[Document],
    tokenizer: AnyTokenizer,
    settings: ExtractionSettings | None = None,
    *,
    progress: Progress = no_count,
) -> list[Measurement]:
    """Measure every document, in order. `progress` is called with (rows done, rows in total).

    Windows of all documents share batches. Raises ValueError for settings that do not fit the model, for documents with
    nothing to predict, and for nan or infinite logits.
    """
    settings = settings or ExtractionSettings()
    settings.check(model.config.T)
    check_documents(model, documents, tokenizer)
    plans = [WindowPlan.of(len(document.ids), settings) for document in documents]
    pairs = list(zip(documents, plans, strict=True))
    total = sum(len(plan.starts) + plan.decodable for plan in plans)
    done = 0

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        progress(done, total)

    rows = [d.ids[s : s + plan.window] for d, plan in pairs for s in plan.starts.tolist()]
    prompts = np.repeat([plan.prompt for plan in plans], [len(plan.starts) for plan in plans])
    log_p, hits = score_rows(model, rows, prompts, batch=settings.batch, count=count)
    ends = np.cumsum([len(plan.starts) for plan in plans])[:-1]
    decoded = np.zeros((0, 0), dtype=np.int64)
    if settings.greedy:
        rows = [d.ids[s : s + plan.greedy] for d, plan in pairs for s in plan.starts[: plan.decodable].tolist()]
        decoded = continue_greedily(model, rows, settings.greedy, batch=settings.batch, count=count)
    sizes = token_sizes(tokenizer)
    measured, at = [], 0
    for (document, plan), doc_log_p, doc_hits in zip(pairs, np.split(log_p, ends), np.split(hits, ends), strict=True):
        scores = _greedy_scores(model, document.ids, plan, decoded[at : at + plan.decodable], doc_hits)
        scores["score"] = score_stream(model, document.ids, token_sizes=sizes)
        at += plan.decodable
        measured.append(Measurement.of(document, settings, tokenizer, plan.spans, doc_log_p, **scores))
    return measured


@dataclass(frozen=True)
class WindowPlan:
    """The windows of a document of a given length; a short document has one shorter window."""

    starts: np.ndarray
    window: int
    prompt: int
    greedy: int
    """Prompt length of greedy decoding, and tokens decoded: half the document if it is shorter than both together."""
    decodable: int
    """Number of starts, from the first on, whose greedy prompt is followed by a token of the text."""

    @classmethod
    def of(cls, length: int, settings: ExtractionSettings) -> WindowPlan:
        """Plan the windows of a document of `length` tokens."""
        window, prompt = settings.window, settings.prompt
        if length < window:
            window, prompt = length, min(length - 1, max(1, round(prompt * length / window)))
        starts = window_starts(length, window, settings.stride)
        greedy = min(settings.greedy, length // 2)
        return cls(starts, window, prompt, greedy, int((starts + greedy < length).sum()) if greedy else 0)

    @property
    def spans(self) -> np.ndarray:
        """(N, 3): start, cut and end of each window, as in `Measurement`."""
        return self.starts[:, None] + [0, self.prompt, self.window]


def _greedy_scores(
    model: GPT, ids: np.ndarray, plan: WindowPlan, decoded: np.ndarray, hits: np.ndarray
) -> dict[str, Any]:
    """Return greedy_share, greedy_run and longest of a `Measurement`; nothing if nothing was decoded.

    `decoded` has a row of tokens for each of the first starts; `hits` are those of `score_rows` for every window.
    """
    number, g = len(decoded), plan.greedy
    if not number:
        return {}
    share, run = np.full(len(plan.starts), np.nan), np.zeros(len(plan.starts), dtype=np.int64)
    starts = plan.starts[:number]
    equal = np.zeros((number, g), dtype=bool)
    for row, start, chosen in zip(equal, starts.tolist(), decoded, strict=True):
        text = ids[start + g : start + 2 * g]
        row[: len(text)] = chosen[: len(text)] == text
    available = np.minimum(g, len(ids) - starts - g)  # tokens of text to compare with
    share[:number] = np.where(available == g, equal.mean(axis=1), np.nan)
    run[:number] = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
    known, ended = run[:number].copy(), run[:number] < available
    if plan.prompt <= 2 * g < plan.window:  # the scores of the windows show how a full run continues
        known = np.where(ended, known, np.maximum(known, plan.prompt + hits[:number] - g))
        ended = ended | (hits[:number] < plan.window - plan.prompt)
    tokens, index = longest_run(model, ids, starts, known, ended, prompt=g)
    return {"greedy_share": share, "greedy_run": run, "longest": (tokens, int(starts[index]) + g)}


# --- by position in the frame: with learned positions a model may know a text at one offset only ----------


def frame_offsets(T: int, window: int, number: int) -> list[int]:
    """Return up to `number` evenly spaced offsets of a window in a frame of T, the first and the last included."""
    offsets: list[int] = _spread(T - (window - 1), number).tolist()
    return offsets


def _spread(last: int, number: int) -> np.ndarray:
    """Return up to `number` evenly spaced integers from 0 to `last`."""
    return np.unique(np.linspace(0, last, number).round().astype(int))


def position_map(
    model: GPT,
    documents: Sequence[Document],
    settings: ExtractionSettings | None = None,
    *,
    offsets: int = 9,
    most_windows: int = 200,
) -> dict[str, Any] | None:
    """Return the mean P(z) and mean log P(z) of each document at evenly spaced offsets in the frame.

    None for relative positions (RoPE), where P(z) does not depend on the offset. At most `most_windows` evenly spaced
    windows of each document count. `best_p` is the largest P(z) of `most_windows` / 25 of them at any offset, and
    `best_offset` that offset: evenly spaced offsets can miss the one at which a text is known.
    """
    if model.config.positions == "rope":
        return None
    settings = settings or ExtractionSettings()
    settings.check(model.config.T)
    frame = frame_offsets(model.config.T, settings.window, offsets)
    entries = []
    for document in documents:
        log_ps = [_log_p(model, document, settings, offset, most_windows) for offset in frame]
        last = model.config.T - WindowPlan.of(len(document.ids), settings).window + 1
        few = max(most_windows // 25, 1)
        best = [_log_p(model, document, settings, offset, few).max() for offset in range(last + 1)]
        entries.append(
            {
                "name": document.name,
                "control": document.control,
                "best_p": float(np.exp(max(best))),
                "best_offset": int(np.argmax(best)),
                "mean_p": [float(np.exp(log_p).mean()) for log_p in log_ps],
                "mean_log_p": [float(log_p.mean()) for log_p in log_ps],
            }
        )
    return {"offsets": frame, "documents": entries}


def _log_p(model: GPT, document: Document, settings: ExtractionSettings, offset: int, number: int) -> np.ndarray:
    """Return log P(z) of up to `number` evenly spaced windows at an offset."""
    plan = WindowPlan.of(len(document.ids), settings)
    starts = plan.starts[_spread(len(plan.starts) - 1, number)]
    shape = {"window": plan.window, "prompt": plan.prompt, "batch": settings.batch}
    return log_probabilities(model, document.ids, starts, **shape, offset=offset)
