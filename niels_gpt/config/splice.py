"""What a splice study may choose: which documents, which parts of them, where in the frame, how often.

The two config classes are also what the `splice` section of a run is made of. `select` chooses the documents; it looks
at lengths only, so that nothing is read before it is known what.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from niels_gpt.config.checks import check_int, to_python_number

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger("niels_gpt.splice")

ContentMode = Literal["coverage_balanced", "anchor_start", "slide_within", "cyclic_roll"]
FrameMode = Literal["splice", "slide"]
OffsetBound = Literal["tight", "truncate"]
JitterMode = Literal["uniform", "low_discrepancy"]
BalanceMode = Literal["by_coverage", "by_document", "by_temperature"]
Sampler = Literal["enumerate", "quota", "stream"]
SingleSelectMode = Literal["first", "longest", "shortest", "random"]

_CHOICES: dict[str, Any] = {
    "content_start_mode": ContentMode,
    "mode": FrameMode,
    "offset_bound": OffsetBound,
    "jitter_mode": JitterMode,
    "balance_mode": BalanceMode,
    "sampler": Sampler,
    "doc_select_mode": SingleSelectMode,
}
_AT_LEAST = {
    "S": 2,
    "content_length": 2,
    "min_copy_len": 2,
    "content_stride": 1,
    "offset_stride": 1,
    "offset_jitter": 0,
    "epoch_length": 1,
    "curriculum": 1,
    "num_docs": 1,
    "doc_index": 0,
    "min_doc_length": 0,
    "max_doc_length": 1,
    "max_train_tokens": 1,
    "max_train_batches": 1,
    "initial_batch_size": 1,
    "controls": 0,
    "eval_examples": 1,
}
MOST = 2**62
"""No number may be larger: sums and products of what lies behind it stay within 64 bits."""
_OPTIONAL = {"content_length", "sampler", "epoch_length", "curriculum", "doc_index", "min_doc_length", "max_doc_length",
             "max_train_tokens", "max_train_batches", "initial_batch_size"}  # fmt: skip
"""The options that may be None."""
_WHY = {
    "content_length": "a span needs two tokens, so that one can be predicted",
    "min_copy_len": "a span needs two tokens, so that one can be predicted",
    "S": "a frame needs two tokens, so that one can be predicted",
}


def count(name: str, value: Any, low: int = 1, high: int = MOST) -> int:
    """The int of a whole number from low to high. Raises ValueError; of one that is too small it names low alone."""
    return check_int(name, check_int(name, value, low), low, high)


def check_options(values: dict[str, Any], *, section: str = "") -> dict[str, Any]:
    """The options, numbers (numpy's too) as plain ones. Raises ValueError that names the first outside its limits."""
    prefix = f"{section}." if section else ""
    return {name: _checked(prefix, name, value) for name, value in values.items()}


def _checked(prefix: str, name: str, value: Any) -> Any:
    if value is None and name in _OPTIONAL:
        return None
    if name in _CHOICES and value not in get_args(_CHOICES[name]):
        raise ValueError(f"{prefix}{name} must be one of {', '.join(get_args(_CHOICES[name]))}, got {value!r}")
    if name in _AT_LEAST:
        try:
            check_int(f"{prefix}{name}", value, _AT_LEAST[name])
        except ValueError as err:
            raise ValueError(f"{err}: {_WHY[name]}" if name in _WHY else str(err)) from None
        return count(f"{prefix}{name}", value, _AT_LEAST[name])
    value = to_python_number(value)
    if name in ("balance_tau", "alpha") and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{prefix}{name} must be a number, got {value!r}")
    if name == "balance_tau" and not 0.0 <= value <= 1.0:
        raise ValueError(f"{prefix}balance_tau must be in [0, 1], got {value!r}: 1 is by length, 0 is equal shares")
    if name == "alpha" and not 0.0 <= value <= sys.float_info.max:
        raise ValueError(f"{prefix}alpha must be a finite number of at least 0, got {value!r}")
    return float(value) if name in ("balance_tau", "alpha") else value


@dataclass(frozen=True)
class _Choice:
    """What both configs have in common."""

    base: str | None = None
    """Folder of token caches; None: `data.token_cache`."""
    dataset_name: str | None = None
    """The pretrain cache (or, for bytes, the source) whose documents are chosen from; None: the only one."""
    min_doc_length: int | None = None
    """Only documents of at least so many tokens."""
    max_doc_length: int | None = None
    """Only documents of at most so many tokens."""
    content_length: int | None = None
    """K, the tokens of a span; at most S, which is also the default."""
    content_stride: int = 1
    """Tokens between the starts of spans within a document."""
    offset_stride: int = 1
    """Places between the offsets of a span within the frame."""
    content_start_mode: ContentMode = "coverage_balanced"
    """`coverage_balanced`: spans of one length, at the right end of the frame; `anchor_start`: the document's beginning
    at every offset; `slide_within`: every start at every offset; `cyclic_roll`: the same on a ring."""
    min_copy_len: int = 2
    """Spans shorter than this are left out."""
    alpha: float = 0.0
    """More weight to spans near the ends of a document: (K / distance) ** alpha."""
    adaptive_k: bool = True
    """A document shorter than K gives one span of its own length; else it gives none."""
    mode: FrameMode = "splice"
    """`slide`: plain windows of S tokens, for documents of at least S."""
    offset_bound: OffsetBound = "tight"
    """`tight`: a span lies whole in the frame; `truncate`: the frame's end may cut it."""
    offset_jitter: int = 0
    """Move a span left by 0 to this many places (coverage_balanced)."""
    jitter_mode: JitterMode = "uniform"
    """How those are chosen."""
    shuffle: bool = True
    """A new order for every epoch; else the order of enumeration."""
    restrict_to_training_subset: bool = False
    """Choose only among documents within the first tokens of the cache, those that a short run trains on."""
    max_train_tokens: int | None = None
    """How many tokens those are; else max_train_batches * initial_batch_size * S."""
    max_train_batches: int | None = None
    """Batches of the short run."""
    initial_batch_size: int | None = None
    """Rows of its batches."""
    pad_token_id: int | None = None
    """What fills a frame; None: the tokenizer's EOT, or 0."""
    eos_token_id: int | None = None
    """None: the tokenizer's EOT."""
    seed: int | None = None
    """Seeds jitter and the stream; None: train.seed in a run, else 0."""

    def __post_init__(self) -> None:
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name, value in check_options(options, section="splice").items():
            object.__setattr__(self, name, value)
        low, high = self.min_doc_length, self.max_doc_length
        if low is not None and high is not None and low > high:
            raise ValueError(f"splice.min_doc_length={low} is above splice.max_doc_length={high}")
        by_batches = None not in (self.max_train_batches, self.initial_batch_size)
        if self.restrict_to_training_subset and self.max_train_tokens is None and not by_batches:
            raise ValueError(
                "splice.restrict_to_training_subset needs splice.max_train_tokens (or max_train_batches and "
                "initial_batch_size): how many tokens the run trains on"
            )

    def _candidates(
        self, lengths: Sequence[int] | np.ndarray, ends: np.ndarray | None, S: int | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
        """(all lengths, the indices of all that may be taken, of those within the limits, what the limits are)."""
        import numpy as np

        values = np.asarray(lengths, dtype=np.int64)
        if values.ndim != 1 or not len(values):
            raise ValueError("there is no document to choose from")
        there = np.ones(len(values), dtype=bool)
        said = []
        if self.restrict_to_training_subset:
            budget = self.train_tokens(S)
            there = (np.cumsum(values) if ends is None else ends) <= budget
            said.append(f"within the first {budget:,} tokens")
            if not there.any():
                raise ValueError(f"splice.restrict_to_training_subset: no document lies {said[0]}")
        ok = there.copy()
        if self.min_doc_length is not None:
            ok &= values >= self.min_doc_length
            said.append(f"at least {self.min_doc_length:,} tokens")
        if self.max_doc_length is not None:
            ok &= values <= self.max_doc_length
            said.append(f"at most {self.max_doc_length:,} tokens")
        return values, np.flatnonzero(there), np.flatnonzero(ok), ", ".join(said) or "no limits"

    def within_limits(
        self, lengths: Sequence[int] | np.ndarray, *, ends: np.ndarray | None = None, S: int | None = None
    ) -> np.ndarray:
        """The indices of the documents that may be chosen. Raises ValueError where there is none at all."""
        return self._candidates(lengths, ends, S)[2]

    def train_tokens(self, S: int | None = None) -> int:
        """The first tokens of a cache, which restrict_to_training_subset keeps to. Raises ValueError without S."""
        if self.max_train_tokens is not None:
            return self.max_train_tokens
        assert self.max_train_batches is not None and self.initial_batch_size is not None
        if S is None:
            raise ValueError("splice.max_train_batches counts frames of S tokens: pass S, or set max_train_tokens")
        return self.max_train_batches * self.initial_batch_size * S

    def dataset_options(self) -> dict[str, Any]:
        """The options of the dataset classes that this config sets."""
        names = ("content_length", "content_stride", "offset_stride", "content_start_mode", "min_copy_len", "alpha",
                 "adaptive_k", "mode", "offset_bound", "offset_jitter", "jitter_mode")  # fmt: skip
        given = {name: getattr(self, name) for name in ("pad_token_id", "eos_token_id", "seed")}
        options = {name: getattr(self, name) for name in names}
        return options | {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class SpliceSingleDocumentLMConfig(_Choice):
    """One document: which, and how it is laid into frames."""

    doc_index: int | None = None
    """Its number in the cache; if its length is outside the limits, the policy chooses."""
    doc_select_mode: SingleSelectMode = "first"
    """Which of the documents within the limits; if there is none, the longest of all."""

    def select(
        self, lengths: Sequence[int] | np.ndarray, *, ends: np.ndarray | None = None, S: int | None = None
    ) -> list[int]:
        """The index of the document, in a list. `ends` are the documents' ends in the stream (default: one after the
        other). Raises ValueError where there is no document, or doc_index is none of them."""
        values, there, candidates, limits = self._candidates(lengths, ends, S)
        if self.doc_index is not None:
            if self.doc_index >= len(values):
                raise ValueError(f"splice.doc_index={self.doc_index}, but there are {len(values)} documents, from 0")
            if self.doc_index in candidates:
                return [int(self.doc_index)]
            log.warning(
                "document %d has %d tokens, which is outside the limits (%s): choosing by %s",
                self.doc_index, values[self.doc_index], limits, self.doc_select_mode,
            )  # fmt: skip
        if not len(candidates):
            longest = _ranked(values, there, "longest")[0]
            log.warning("no document of %d fits the limits (%s): taking the longest", len(values), limits)
            return [int(longest)]
        return [int(_ranked(values, candidates, self.doc_select_mode)[0])]


@dataclass(frozen=True)
class SpliceMultiDocumentLMConfig(_Choice):
    """Several documents: which, how they are laid into frames, and how often each comes."""

    num_docs: int = 10
    """How many."""
    doc_select_mode: SingleSelectMode = "longest"
    """Which of the documents within the limits; ties go to the one that comes first."""
    strict_num_docs: bool = True
    """Fewer candidates than num_docs is an error; else the longest of the other documents fill up."""
    balance_mode: BalanceMode = "by_temperature"
    """`by_coverage`: every span once; `by_document`: all documents equally often, by repetition; `by_temperature`: in
    proportion to length ** balance_tau."""
    balance_tau: float = 1.0
    """1 is by length, 0 is equal shares."""
    sampler: Sampler | None = None
    """`enumerate` all spans, share out a `quota` per document, or draw a `stream`; None: as the balance mode needs."""
    epoch_length: int | None = None
    """Examples per epoch; None: as many as there are spans."""
    doc_weights: tuple[float, ...] | None = None
    """One factor per chosen document, in their order."""
    groups: str | tuple[str, ...] | None = None
    """One label per chosen document, or `source` or `length` (bins that double): groups get equal shares."""
    curriculum: int | None = None
    """Begin with one document, which needs a weight; another joins every so many steps."""

    def select(
        self, lengths: Sequence[int] | np.ndarray, *, ends: np.ndarray | None = None, S: int | None = None
    ) -> list[int]:
        """The indices of the documents, in the order of the policy. `ends` are the documents' ends in the stream
        (default: one after the other). Raises ValueError where there are too few."""
        import numpy as np

        values, there, candidates, limits = self._candidates(lengths, ends, S)
        chosen = _ranked(values, candidates, self.doc_select_mode, self.num_docs)[: self.num_docs]
        missing = self.num_docs - len(chosen)
        if not missing:
            return [int(i) for i in chosen]
        if self.strict_num_docs:
            raise ValueError(
                f"splice.num_docs={self.num_docs}, but only {len(candidates)} of {len(values)} documents fit the "
                f"limits ({limits}): ask for fewer, loosen the limits, or set splice.strict_num_docs=false to fill up"
            )
        rest = np.setdiff1d(there, candidates)
        filled = _ranked(values, rest, "longest")[:missing]
        log.warning(
            "only %d of the %d documents asked for fit the limits (%s): the longest %d of the rest fill up, %d in all",
            len(candidates), self.num_docs, limits, len(filled), len(chosen) + len(filled),
        )  # fmt: skip
        return [int(i) for i in (*chosen, *filled)]

    def dataset_options(self) -> dict[str, Any]:
        names = ("balance_mode", "balance_tau", "sampler", "epoch_length", "doc_weights", "groups", "curriculum")
        return super().dataset_options() | {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class SpliceConfig(SpliceMultiDocumentLMConfig):
    """The `splice` section of a run (task `splice`). The frame is as long as the model's context, S = model.T."""

    doc_index: int | None = None
    """Train on this one document (num_docs is 1 then), if its length is within the limits."""
    doc_key: str | None = None
    """Choose only among documents whose text has this in it."""
    documents: Literal["bytes", "tokens"] = "bytes"
    """`bytes`: documents of a byte source (notes, docstrings, dialogues; no tokenizer needed); `tokens`: of a token
    cache."""
    packed: bool | None = None
    """Lay several spans into one frame: the same loss and gradients for less work. None: where positions are relative
    (RoPE)."""
    controls: int = 3
    """Held-out documents that are measured beside the chosen ones, and never trained on, nor copies of those."""
    eval_examples: int = 16
    """Examples per document and evaluation: a fixed grid over its spans."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.doc_index is not None:
            object.__setattr__(self, "num_docs", 1)

    def choose(self, lengths: Sequence[int] | np.ndarray, *, ends: np.ndarray | None = None, S: int) -> list[int]:
        """The documents to train on. Raises ValueError as `select` does."""
        if self.doc_index is None:
            return self.select(lengths, ends=ends, S=S)
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(SpliceSingleDocumentLMConfig)}
        return SpliceSingleDocumentLMConfig(**shared).select(lengths, ends=ends, S=S)


def _ranked(values: np.ndarray, candidates: np.ndarray, mode: str, number: int = 1) -> np.ndarray:
    """The candidates in the order of a policy; ties go to the lower index."""
    import numpy as np

    if mode == "first":
        return candidates
    if mode == "longest":
        return candidates[np.argsort(-values[candidates], kind="stable")]
    if mode == "shortest":
        return candidates[np.argsort(values[candidates], kind="stable")]
    # Seeded by the lengths and the number asked for: the same data gives the same choice, on every machine.
    digest = hashlib.blake2b(values.astype("<i8").tobytes() + b":%d" % number, digest_size=8).digest()
    keys = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little"))).random(len(candidates))
    return candidates[np.argsort(keys, kind="stable")]
