"""Options of a splice study: which documents, which spans of them, at which offsets, and how often.

The `splice` section of a run config is built from the two config classes of the spec. `select` chooses documents by
their lengths alone, so that no text is read before the choice is made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from niels_gpt.config.checks import check_int, check_option_names, to_python_number
from niels_gpt.config.options import MOST, Option, check_fields, checked, fields_of
from niels_gpt.system.rng import mix

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger("niels_gpt.splice")

MOST_EPOCHS = 1_000_000
_TWO = "needs two tokens to predict one of them"

ContentMode = Literal["coverage_balanced", "anchor_start", "slide_within", "cyclic_roll"]
FrameMode = Literal["splice", "slide"]
OffsetBound = Literal["tight", "truncate"]
JitterMode = Literal["uniform", "low_discrepancy"]
BalanceMode = Literal["by_coverage", "by_document", "by_temperature"]
Sampler = Literal["enumerate", "quota", "stream"]
SingleSelectMode = Literal["first", "longest", "shortest", "random"]


def count(name: str, value: Any, low: int = 1, high: int = MOST) -> int:
    """Return an integer in [low, high] as int. Raises ValueError; below `low` the message names only `low`."""
    return check_int(name, check_int(name, value, low), low, high)


def check_options(values: dict[str, Any], *, section: str = "") -> dict[str, Any]:
    """Return the options with numpy numbers as Python numbers; S is the length of a frame.

    Raises ValueError that names the first option outside its limits.
    """
    prefix = f"{section}." if section else ""
    declared = {**fields_of(SpliceConfig), "S": Annotated[int, Option(2, why=f"a frame {_TWO}")]}
    return {name: checked(prefix + name, value, declared[name]) for name, value in values.items()}


def parse_axis_shuffle(name: str, value: Any, seed_name: str, seed: Any) -> tuple[bool, int | None]:
    """(whether an axis is shuffled, its own seed) of `shuffle_offsets` or `shuffle_content`: a bool, or a seed.

    Raises ValueError for other types and for two different seeds.
    """
    value = to_python_number(value)
    seed = None if seed is None else check_int(seed_name, seed, -MOST, MOST)
    if isinstance(value, bool):
        if seed is not None and not value:
            raise ValueError(f"{seed_name}={seed} has no effect without {name}: set {name} to true")
        return value, seed
    number = check_int(name, value, -MOST, MOST)
    if seed is not None and seed != number:
        raise ValueError(f"{name}={number} and {seed_name}={seed} are two seeds of one axis: set only one")
    return True, number


@dataclass(frozen=True)
class _DocumentChoice:
    """Fields that the single- and multi-document configs share."""

    base: Annotated[
        str | None, Option(1, why="a folder of token caches; only niels_gpt.levanter.train_lm takes a Levanter config")
    ] = None
    """Folder of token caches; None: `data.token_cache`."""
    dataset_name: Annotated[str | None, Option(1)] = None
    """The pretrain cache (for bytes: the source) to choose documents from; None: the only one."""
    tokenizer: Annotated[str | None, Option(1, since="0.3")] = None
    """The tokenizer of the documents (spm.model, or its folder), if it must be checked; None: that of the cache."""
    doc_key: Annotated[str | None, Option(1)] = None
    """Choose only documents whose text contains this string."""
    min_doc_length: Annotated[int | None, Option(0)] = None
    """Choose only documents with at least this many tokens."""
    max_doc_length: Annotated[int | None, Option(1)] = None
    """Choose only documents with at most this many tokens."""
    content_length: Annotated[int | None, Option(2, why=f"a span {_TWO}")] = None
    """K, the number of tokens in a span; at most S. None: S."""
    content_stride: Annotated[int | tuple[int, ...], Option(1)] = 1
    """Tokens between the starts of spans within a document; or one number per chosen document."""
    offset_stride: Annotated[int | tuple[int, ...], Option(1)] = 1
    """Positions between the offsets of a span within the frame; or one number per chosen document."""
    content_start_mode: ContentMode = "coverage_balanced"
    """`coverage_balanced`: spans of equal length at the right end of the frame. `anchor_start`: the beginning of the
    document at every offset. `slide_within`: every start at every offset. `cyclic_roll`: as `slide_within`, with the
    document wrapped around."""
    min_copy_len: Annotated[int, Option(2, why=f"a span {_TWO}")] = 2
    """Shorter spans are skipped."""
    alpha: Annotated[float | tuple[float, ...], Option(0)] = 0.0
    """Weight of spans near the ends of a document: (K / distance) ** alpha; 0: no extra weight. Or one number per
    chosen document."""
    adaptive_k: bool = True
    """Whether a document shorter than K gives one span of its full length; otherwise it gives none."""
    mode: FrameMode = "splice"
    """`slide`: plain windows of S tokens, for documents of at least S tokens."""
    offset_bound: OffsetBound = "tight"
    """`tight`: a span fits completely into the frame; `truncate`: the end of the frame may cut it off."""
    offset_jitter: Annotated[int, Option(0)] = 0
    """Move a span left by 0 to this many positions (coverage_balanced)."""
    jitter_mode: JitterMode = "uniform"
    """How the distance to move is drawn."""
    shuffle: bool = True
    """Shuffle the examples of an epoch; otherwise the order of enumeration."""
    shuffle_offsets: Annotated[bool | int, Option(since="0.3")] = False
    """Shuffle only the offsets s of each start; an integer is also the seed. Replaces `shuffle`."""
    offset_seed: Annotated[int | None, Option(since="0.3")] = None
    """Seed of shuffle_offsets; None: the seed of the run."""
    shuffle_content: Annotated[bool | int, Option(since="0.3")] = False
    """Shuffle only the starts t within each document; an integer is also the seed. Replaces `shuffle`."""
    content_seed: Annotated[int | None, Option(since="0.3")] = None
    """Seed of shuffle_content; None: the seed of the run."""
    shuffle_per_epoch: Annotated[bool, Option(since="0.3")] = True
    """Use a new order in every epoch; otherwise the order of the first epoch is repeated."""
    eos_before_span: Annotated[bool, Option(since="0.3")] = False
    """Put eos_token_id at position s - 1, before a span."""
    trailing_segment_zero: Annotated[bool, Option(since="0.3")] = False
    """Give the padding after a span segment 0, as the padding before it; otherwise it has the segment of the span."""
    restrict_to_training_subset: bool = False
    """Choose only documents within the first tokens of the cache: those that a short run trains on."""
    max_train_tokens: Annotated[int | None, Option(1)] = None
    """Number of those first tokens; None: max_train_batches * initial_batch_size * S."""
    max_train_batches: Annotated[int | None, Option(1)] = None
    """Number of batches of the short run."""
    initial_batch_size: Annotated[int | None, Option(1)] = None
    """Rows per batch of the short run."""
    pad_token_id: int | None = None
    """Token id that fills the rest of a frame; None: the tokenizer's EOT, or 0."""
    eos_token_id: int | None = None
    """Token id that ends a document; None: the tokenizer's EOT."""
    seed: int | None = None
    """Seed of the jitter and of the streaming sampler; None: train.seed in a run, otherwise 0."""

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Raises TypeError for an unknown option, with what to use instead."""
        check_option_names(cls.__name__, options, [field.name for field in dataclasses.fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self, "splice")
        for axis, seed in (("offsets", "offset_seed"), ("content", "content_seed")):
            name = f"shuffle_{axis}"
            parse_axis_shuffle(f"splice.{name}", getattr(self, name), f"splice.{seed}", getattr(self, seed))
        low, high = self.min_doc_length, self.max_doc_length
        if low is not None and high is not None and low > high:
            raise ValueError(f"splice.min_doc_length={low} is above splice.max_doc_length={high}")

    def _candidates(
        self, lengths: Sequence[int] | np.ndarray, ends: np.ndarray | None, S: int | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
        """Return (all lengths, allowed indices, indices within the length limits, the limits as text)."""
        import numpy as np

        if self.doc_key is not None:
            raise ValueError("splice.doc_key needs the text of the documents: use from_cache, or choose without it")
        values = np.asarray(lengths, dtype=np.int64)
        if values.ndim != 1 or not len(values):
            raise ValueError("no document to choose from")
        allowed = np.ones(len(values), dtype=bool)
        limits = []
        if self.restrict_to_training_subset:
            budget = self.train_tokens(S)
            allowed = (np.cumsum(values) if ends is None else ends) <= budget
            limits.append(f"within the first {budget:,} tokens")
            if not allowed.any():
                raise ValueError(f"splice.restrict_to_training_subset: no document ends {limits[0]}")
        fitting = allowed.copy()
        if self.min_doc_length is not None:
            fitting &= values >= self.min_doc_length
            limits.append(f"at least {self.min_doc_length:,} tokens")
        if self.max_doc_length is not None:
            fitting &= values <= self.max_doc_length
            limits.append(f"at most {self.max_doc_length:,} tokens")
        return values, np.flatnonzero(allowed), np.flatnonzero(fitting), ", ".join(limits) or "no limits"

    def within_limits(
        self, lengths: Sequence[int] | np.ndarray, *, ends: np.ndarray | None = None, S: int | None = None
    ) -> np.ndarray:
        """Return the indices of the documents within the limits. Raises ValueError if there is no document."""
        return self._candidates(lengths, ends, S)[2]

    def train_tokens(self, S: int | None = None) -> int:
        """Return the number of first tokens for restrict_to_training_subset. Raises ValueError if it needs S."""
        if self.max_train_tokens is not None:
            return self.max_train_tokens
        if self.max_train_batches is None or self.initial_batch_size is None:
            raise ValueError(
                "splice.restrict_to_training_subset needs splice.max_train_tokens, or max_train_batches and "
                "initial_batch_size (a run fills them in from its own steps and rows): how much is trained on"
            )
        if S is None:
            raise ValueError("splice.max_train_batches counts frames of S tokens: pass S, or set max_train_tokens")
        return self.max_train_batches * self.initial_batch_size * S

    def warn_about_limits(self) -> None:
        """Log a warning for limits of the training subset that have no effect."""
        batches = [name for name in ("max_train_batches", "initial_batch_size") if getattr(self, name) is not None]
        tokens = ["max_train_tokens"] if self.max_train_tokens is not None else []
        if self.restrict_to_training_subset:
            idle, why = batches if tokens else [], "beside splice.max_train_tokens, which sets the number of tokens"
        else:
            idle, why = tokens + batches, "without splice.restrict_to_training_subset"
        if idle:
            log.warning("%s: no effect %s", ", ".join(f"splice.{name}={getattr(self, name)}" for name in idle), why)

    def dataset_options(self) -> dict[str, Any]:
        """Return the options of the dataset classes that this config sets."""
        names = ("content_length", "content_stride", "offset_stride", "content_start_mode", "min_copy_len", "alpha",
                 "adaptive_k", "mode", "offset_bound", "offset_jitter", "jitter_mode", "shuffle", "shuffle_offsets",
                 "offset_seed", "shuffle_content", "content_seed", "shuffle_per_epoch", "eos_before_span",
                 "trailing_segment_zero")  # fmt: skip
        optional = {name: getattr(self, name) for name in ("pad_token_id", "eos_token_id", "seed")}
        options = {name: getattr(self, name) for name in names}
        return options | {name: value for name, value in optional.items() if value is not None}


@dataclass(frozen=True)
class SpliceSingleDocumentLMConfig(_DocumentChoice):
    """A single document: which one, and how its spans are placed into frames."""

    doc_index: Annotated[int | None, Option(0)] = None
    """Index in the cache; if the document's length is outside the limits, doc_select_mode chooses."""
    doc_select_mode: SingleSelectMode = "first"
    """Which document within the limits to choose; if there is none, the longest of all."""

    def select(
        self, lengths: Sequence[int] | np.ndarray, *, ends: np.ndarray | None = None, S: int | None = None
    ) -> list[int]:
        """Return the index of the document, in a list.

        `ends` are the offsets in the stream where the documents end (default: documents without gaps). Raises
        ValueError if there is no document, or doc_index is out of range.
        """
        values, allowed, candidates, limits = self._candidates(lengths, ends, S)
        if self.doc_index is not None:
            if self.doc_index >= len(values):
                raise ValueError(
                    f"splice.doc_index={self.doc_index}, but there are {len(values)} documents (0 to {len(values) - 1})"
                )
            if self.doc_index in candidates:
                return [int(self.doc_index)]
            log.warning(
                "document %d has %d tokens, outside the limits (%s): choosing by doc_select_mode=%s",
                self.doc_index, values[self.doc_index], limits, self.doc_select_mode,
            )  # fmt: skip
        if not len(candidates):
            longest = _ranked(values, allowed, "longest")[0]
            log.warning("none of %d documents is within the limits (%s): using the longest", len(values), limits)
            return [int(longest)]
        return [int(_ranked(values, candidates, self.doc_select_mode)[0])]


@dataclass(frozen=True)
class SpliceMultiDocumentLMConfig(_DocumentChoice):
    """Several documents: which ones, how their spans are placed into frames, and how often each is used."""

    num_docs: Annotated[int, Option(1)] = 10
    """Number of documents."""
    doc_select_mode: SingleSelectMode = "longest"
    """Which documents within the limits to choose; ties go to the lower index."""
    strict_num_docs: bool = True
    """Whether fewer candidates than num_docs is an error; otherwise the longest other documents are added."""
    balance_mode: BalanceMode = "by_temperature"
    """`by_coverage`: every span once. `by_document`: all documents equally often, by repetition. `by_temperature`: in
    proportion to length ** balance_tau."""
    balance_tau: Annotated[float, Option(0, 1)] = 1.0
    """1: proportional to length; 0: equal shares."""
    sampler: Sampler | None = None
    """`enumerate` all spans, use a `quota` per document, or draw a `stream`; None: as balance_mode requires."""
    epoch_length: Annotated[int | None, Option(1)] = None
    """Examples per epoch; None: the number of spans."""
    doc_weights: tuple[float, ...] | None = None
    """One factor per chosen document, in the order of the choice."""
    groups: str | tuple[str, ...] | None = None
    """One label per chosen document, or `source` or `length` (bins of doubling length): groups get equal shares."""
    curriculum: Annotated[int | None, Option(1)] = None
    """Begin with one document and add another every this many steps; the first needs a positive weight."""

    def select(
        self, lengths: Sequence[int] | np.ndarray, *, ends: np.ndarray | None = None, S: int | None = None
    ) -> list[int]:
        """Return the indices of the documents, in the order of doc_select_mode.

        `ends` are the offsets in the stream where the documents end (default: documents without gaps). Raises
        ValueError if there are too few documents.
        """
        import numpy as np

        values, allowed, candidates, limits = self._candidates(lengths, ends, S)
        chosen = _ranked(values, candidates, self.doc_select_mode, self.num_docs)[: self.num_docs]
        missing = self.num_docs - len(chosen)
        if not missing:
            return [int(i) for i in chosen]
        if self.strict_num_docs:
            raise ValueError(
                f"splice.num_docs={self.num_docs}, but only {len(candidates)} of {len(values)} documents are within "
                f"the limits ({limits}): ask for fewer, relax the limits, or set splice.strict_num_docs=false to add "
                "the longest of the others"
            )
        rest = np.setdiff1d(allowed, candidates)
        filled = _ranked(values, rest, "longest")[:missing]
        log.warning(
            "only %d of %d requested documents are within the limits (%s): adding the longest %d others, %d in total",
            len(candidates), self.num_docs, limits, len(filled), len(chosen) + len(filled),
        )  # fmt: skip
        return [int(i) for i in (*chosen, *filled)]

    def dataset_options(self) -> dict[str, Any]:
        names = ("balance_mode", "balance_tau", "sampler", "epoch_length", "doc_weights", "groups", "curriculum")
        return super().dataset_options() | {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class SpliceConfig(SpliceMultiDocumentLMConfig):
    """The `splice` section of a run (task `splice`). The frame length S is the model's context length T."""

    doc_index: Annotated[int | None, Option(0)] = None
    """Train on this one document if its length is within the limits; num_docs is then 1."""
    epochs: Annotated[float | None, Option(0, MOST_EPOCHS, "(]", since="0.3")] = None
    """Train this many epochs; train.total_steps follows from it. None: train.total_steps."""
    documents: Literal["bytes", "tokens"] = "bytes"
    """`bytes`: documents of a byte source (notes, docstrings, dialogues), without a tokenizer. `tokens`: documents of a
    token cache."""
    packed: bool | None = None
    """Pack several spans into one frame: the same loss and gradients with less compute. None: pack if positions are
    relative (RoPE), and neither eos_before_span nor trailing_segment_zero asks for filler."""
    controls: Annotated[int, Option(0)] = 3
    """Number of held-out documents to measure for comparison; they are never trained on and are not copies."""
    eval_examples: Annotated[int, Option(1)] = 16
    """Examples per document in each evaluation: a fixed grid over its spans."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.doc_index is not None:
            object.__setattr__(self, "num_docs", 1)
        filler = [name for name in ("eos_before_span", "trailing_segment_zero") if getattr(self, name)]
        if self.packed and filler:
            raise ValueError(
                f"splice.{' and splice.'.join(filler)} would have no effect with splice.packed=true: packed spans have "
                "no filler. Leave packed out, or set it to false"
            )
        if self.epochs is None:
            return
        if self.curriculum is not None:
            raise ValueError(
                "splice.epochs and splice.curriculum: each new document starts a new epoch, so set train.total_steps"
            )
        if self.restrict_to_training_subset and self.max_train_tokens is None and self.max_train_batches is None:
            raise ValueError(
                "splice.epochs and splice.restrict_to_training_subset: the steps depend on the documents, and these on "
                "the steps: set splice.max_train_tokens or splice.max_train_batches"
            )

    def select(
        self, lengths: Sequence[int] | np.ndarray, *, ends: np.ndarray | None = None, S: int | None = None
    ) -> list[int]:
        if self.doc_index is None:
            return super().select(lengths, ends=ends, S=S)
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(SpliceSingleDocumentLMConfig)}
        return SpliceSingleDocumentLMConfig(**shared).select(lengths, ends=ends, S=S)

    def for_run(self, steps: int, rows: int) -> SpliceConfig:
        """Return the config with the steps and rows of a run where restrict_to_training_subset has none of its own."""
        if not self.restrict_to_training_subset or self.max_train_tokens is not None:
            return self
        return dataclasses.replace(
            self,
            max_train_batches=self.max_train_batches or steps,
            initial_batch_size=self.initial_batch_size or rows,
        )


def _ranked(values: np.ndarray, candidates: np.ndarray, mode: str, number: int = 1) -> np.ndarray:
    """Sort the candidates by a selection mode; ties go to the lower index."""
    import numpy as np

    if mode == "first":
        return candidates
    if mode == "longest":
        return candidates[np.argsort(-values[candidates], kind="stable")]
    if mode == "shortest":
        return candidates[np.argsort(values[candidates], kind="stable")]
    # Seeded by the lengths and the requested number: the same data gives the same choice on every machine.
    digest = hashlib.blake2b(values.astype("<i8").tobytes() + b":%d" % number, digest_size=8).digest()
    keys = mix(candidates.astype(np.uint64) ^ np.frombuffer(digest, "<u8"))
    return candidates[np.argsort(keys, kind="stable")]
