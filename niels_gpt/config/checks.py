"""Checks of config values. Each error names the option, the value and the limit."""

from __future__ import annotations

import difflib
import math
import numbers
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any


def check_int(name: str, value: Any, low: int = 1, high: int | None = None) -> int:
    """Return an integer in [low, high] as int; numpy integers are accepted, bools are not.

    Raises ValueError.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low or (high is not None and number > high):
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be an integer {limits}, got {value!r}")
    return number


def to_python_number(value: Any) -> Any:
    """Convert numpy numbers to Python's, also inside tuples and lists; return other values unchanged."""
    if isinstance(value, tuple | list):
        return type(value)(map(to_python_number, value))
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def check_probabilities(p: Mapping[str, float], *, name: str = "p") -> None:
    """Raise ValueError unless p is a non-empty distribution (sum within 1e-6 of 1, no negatives)."""
    if not p:
        raise ValueError(f"{name} is empty: give at least one source a probability")
    for key, value in p.items():
        if not (isinstance(value, numbers.Real) and value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name}[{key!r}] must be a finite number of at least 0, got {value!r}")
    total = math.fsum(p.values())
    if abs(total - 1.0) > 1e-6:
        listed = ", ".join(f"{k}={v:g}" for k, v in p.items())
        raise ValueError(f"{name} must sum to 1 (within 1e-6), but {listed} sum to {total:.6g}")


INSTEAD_IN_SPLICE = {
    "K": "set content_length",
    "S": "set model.T, the length of a frame",
    "Pos": "set model.T, the length of a frame",
    "seq_len": "set model.T, the length of a frame",
    "k_t": "set content_stride",
    "k_s": "set offset_stride",
    "k_window": "set mode: slide and content_stride",
    "window_stride": "set mode: slide and content_stride",
    "max_offset": "set offset_bound (tight or truncate)",
    "tau": "set balance_tau",
    "rng_key": "set seed",
    "key": "set seed, or doc_key for documents that contain a text",
    "global_seed": "set seed, or train.seed for the whole run",
    "J": "set offset_jitter",
    "copy_len": "set min_copy_len or content_length",
    "min_len": "set min_doc_length",
    "max_len": "set max_doc_length",
    "hash": "set doc_select_mode: random, or doc_index",
    "batch_schedule": "set train.B and train.total_steps, or initial_batch_size and max_train_batches of a subset",
    "batch_size": "set train.B",
    "max_pairs": "set balance_mode: by_document, or epoch_length",
    "streaming": "set sampler: stream",
    "enumeration_mode": "set sampler: enumerate",
    "the_tokenizer": "set tokenizer",
    "eos_id": "set eos_token_id",
    "pad_id": "set pad_token_id",
    "ignore_id": "only the tokens of a span are predicted; set pad_token_id for the filler",
    "rank": "torchrun sets it",
    "world_size": "torchrun sets it",
    "debug": "use --verbose",
    "segment_ids": "they follow from the span; see trailing_segment_zero and packed",
    "loss_mask": "it follows from the span: all tokens of the span but the last predict the next",
    "s_fixed": "set content_length: coverage_balanced spans are at S - K; or offset_jitter",
    "split": "documents come from the train split, controls from the val split",
    "stride": "set content_stride and offset_stride",
    "text_key": "the cache is built from text already; see `niels-gpt cache build`",
    "doc_selector": "set min_doc_length, max_doc_length, doc_key and doc_select_mode",
    "doc_tokens": "documents come from base and dataset_name; arrays are for Python (SpliceDocumentDataset)",
    "doc_tokens_list": "documents come from base and dataset_name; arrays are for Python (MultiSpliceDocumentDataset)",
    "doc_metadata": "set groups",
    "type": "task: splice replaces it (niels_gpt.levanter.train_lm takes Levanter's data.type)",
    "configs": "this is a part of Levanter's base: use niels_gpt.levanter, or base: FOLDER of token caches",
    "train_weights": "this is a part of Levanter's base: set doc_weights for documents",
    "train_urls": "build a token cache of the files first, and set base and dataset_name",
    "validation_urls": "held-out documents come from the val split of the cache; set controls",
    "cache_dir": "set base, the folder of token caches",
    "format": "the cache is built from text already; see `niels-gpt cache build`",
}
"""Names of the splice specification that are not keys of the section `splice`: what to use instead."""

INSTEAD_IN_PYTHON = {
    "Pos": "pass S, the length of a frame, to the dataset (the classes of niels_gpt.levanter take Pos)",
    "seq_len": "pass S, the length of a frame, to the dataset",
    "S": "pass it to the dataset",
    "rng_key": "pass seed, an integer (the classes of niels_gpt.levanter take rng_key)",
    "key": "pass seed, an integer (the classes of niels_gpt.levanter take key)",
    "global_seed": "pass seed",
    "base": "from_cache takes base and dataset_name; this class takes arrays (or the `documents` of a cache)",
    "tokenizer": "from_cache takes a tokenizer; this class takes token ids",
    "epochs": "a dataset is one epoch; plan(seed, step, B) covers all of them (niels_gpt.levanter has epochs)",
    "batch_size": "pass B to plan(seed, step, B)",
    "batch_schedule": "pass B to plan(seed, step, B)",
    "rank": "pass it to epoch or plan",
    "world_size": "pass it to epoch or plan",
    "doc_index": "use the single-document class, or num_docs (from_cache: doc_indices)",
    "doc_indices": "from_cache takes it",
    "num_docs": "use the multi-document class",
    "doc_tokens": "pass doc_tokens_list, one array per document",
    "doc_tokens_list": "pass doc_tokens, one array, or use MultiSpliceDocumentDataset",
    "doc_metadata": "pass groups, or use MultiSpliceDocumentDataset",
    "debug": "set the logger niels_gpt.splice to INFO",
    "split": "pass it to from_cache",
}
"""As INSTEAD_IN_SPLICE, for the classes; names that are missing here have the same substitute as in a config."""


def unknown_key_message(section: str, key: str, known: list[str], splice_options: Collection[str] = ()) -> str:
    """Return the error message for an unknown key: with what to use instead, the nearest known key, or all of them.

    `splice_options`: the keys of the section `splice`; one at the top or in `data` is pointed there.
    """
    full = f"{section}.{key}" if section else key
    if section == "splice" and key in INSTEAD_IN_SPLICE:
        return f"splice has no {key}: {INSTEAD_IN_SPLICE[key]}"
    if section in ("", "data") and key == "type":
        return (
            f"unknown key {full}: set task: splice and write the options into the section splice, or train with "
            "python -m niels_gpt.levanter.train_lm, which takes Levanter's data.type"
        )
    if section in ("", "data") and key in splice_options:
        return f"unknown key {full}: it belongs to task: splice, set splice.{key}"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key {full}; {hint}"


def check_option_names(owner: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for an option that a splice class does not have, with what to use instead."""
    for name in given:
        if name not in known:
            instead = INSTEAD_IN_PYTHON.get(name) or INSTEAD_IN_SPLICE.get(name)
            near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
            hint = instead or (f"did you mean {near[0]}?" if near else f"its options: {', '.join(known)}")
            raise TypeError(f"{owner} has no option {name}: {hint}")
