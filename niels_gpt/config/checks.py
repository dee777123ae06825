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


def unknown_key_message(section: str, key: str, known: list[str]) -> str:
    """Return the error message for an unknown key: with the nearest known key, or all of them."""
    full = f"{section}.{key}" if section else key
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key {full}; {hint}"
