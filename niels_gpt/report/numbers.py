"""Format probabilities and other values for people."""

from __future__ import annotations

import math
from typing import Any


def power(exponent: float) -> str:
    """Format a power of ten, the exponent rounded: 10⁻¹²."""
    return "10" + str(round(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def short(value: float) -> str:
    """Format with three digits: 0.0123, 4.5·10⁻⁹; a value below 1 is not rounded up to 1."""
    if not math.isfinite(value):
        return "-"
    if 0 < 1 - value < 0.0005:
        return "> 0.999"
    if value and abs(value) < 0.001:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}·{power(int(exponent))}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def percent(share: float) -> str:
    """Format a fraction as 97.3%, 0.012%, 4.5·10⁻⁷%; 100% and 0% are exact."""
    if not math.isfinite(share):
        return "-"
    if 0 < 1 - share < 0.0005:
        return "> 99.9%"
    value = 100 * share
    return f"{value:.1f}%".replace(".0%", "%") if value >= 10 or not value else f"{short(value)}%"


def one_in(log_p: float) -> str:
    """Format a probability, given its logarithm: 97 in 100, 1 in 12,300, 1 in 4.2 million, 1 in 10⁵²."""
    if not math.isfinite(log_p):
        return "never"
    exponent = -log_p / math.log(10)
    if exponent >= 14.9998:  # three digits of a number of trillions would be 1e+03
        return f"1 in {power(exponent)}"
    times = 10**exponent
    if times < 1.0005:
        return "nearly every time" if log_p < 0 else "every time"
    if times < 1.995:
        return f"{min(100 / times, 99):.0f} in 100"
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if times >= 0.9995 * size:
            return f"1 in {times / size:.3g} {name}"
    return f"1 in {float(f'{times:.3g}'):,.0f}" if times >= 100 else f"1 in {times:.3g}"


def probability(p: float) -> str:
    """Format as 0.731 or 3.2e-09, for tables in the terminal."""
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}" if p > 0 else "0"


def passage_probability(passage: dict[str, Any]) -> str:
    """Format P(z) of a passage as 0.731, or 3.2e-09 (1 in 310 million)."""
    rare = f" ({one_in(passage['log_p'])})" if passage["p"] < 0.5 else ""
    return f"{probability(passage['p'])}{rare}"


def shorten(text: str, limit: int, *, end: int = 0) -> str:
    """Return a text on one line of at most `limit` characters; the cut is before the last `end` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1 - end] + "…" + line[len(line) - end :]
