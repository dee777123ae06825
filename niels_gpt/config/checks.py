"""Checks of config values. Each error names the option, the value and the limit."""

from __future__ import annotations

import difflib
import math
import numbers
import operator
from collections.abc import Mapping
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


def unknown_key_message(section: str, key: str, known: list[str]) -> str:
    """Return the error message for an unknown key: with what to use instead, the nearest known key, or all of them."""
    full = f"{section}.{key}" if section else key
    if section == "splice" and key in INSTEAD_IN_SPLICE:
        return f"splice has no {key}: {INSTEAD_IN_SPLICE[key]}"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key {full}; {hint}"
