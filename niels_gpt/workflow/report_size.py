"""How much the report on a new model measures: what fits into the time that is left for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from niels_gpt.evaluation.baselines import PRIMED_BYTES

REPORT_SHARE = 0.2
"""Share of the minutes for the report, at most."""
REPORT_SECONDS = 60.0
"""Time for the report, at most."""
FORWARD = 3
"""A forward pass is about three times as fast as a training step."""
TOKENS_PER_ANSWER = 200
"""Tokens of a question that is asked twice, about: prompt and reply, of which the reply is decoded one by one."""
TOKENS_PER_WINDOW = 50
"""Tokens of a window of the audit that are computed, about: most are given up soon."""
PRIMED_PER_SECOND = 1_000_000
"""Bytes of training text that compressors read in a second on two slow cores, before the held-out notes."""
MOST_TOKENS, MOST_QUESTIONS, MOST_WINDOWS = 8_192, 50, 24_000
"""What is enough: tokens of a compared text for two digits, questions, and windows of the audit."""


class ReportSize(NamedTuple):
    """How much is measured."""

    held_out: int
    """Tokens of held-out notes that are scored."""
    primed: int = PRIMED_BYTES
    """Bytes of training text that the compressors read first, at most."""
    compared: int = MOST_TOKENS
    """Tokens of each text that are scored by the base, too."""
    questions: int = MOST_QUESTIONS
    """Topics of the notes that are asked about."""
    windows: int = MOST_WINDOWS
    """Windows of the audit, about."""


def report_seconds(seconds: float) -> float:
    """The time of the report, if everything may take so many seconds."""
    return min(REPORT_SHARE * seconds, REPORT_SECONDS)


def report_size(seconds: float, metrics: Sequence[Mapping[str, Any]]) -> ReportSize:
    """The size of the report on a model that was trained in so many seconds for everything.

    metrics: those of its run, which say how fast the machine is. A quarter of the time is for the scores, a quarter for
    the questions, and half for the audit.
    """
    speeds = [line["tokens_per_s"] for line in metrics if line.get("tokens_per_s")]
    tokens = FORWARD * (median(speeds) if speeds else 0.0) * report_seconds(seconds)
    scores = int(tokens / 4)
    return ReportSize(
        held_out=max(scores // 2, 1024),
        primed=min(max(int(PRIMED_PER_SECOND * report_seconds(seconds) / 4), 1 << 16), PRIMED_BYTES),
        compared=min(max(scores // 10, 512), MOST_TOKENS),  # by three models, two texts
        questions=min(max(int(tokens / 4 / TOKENS_PER_ANSWER), 4), MOST_QUESTIONS),
        windows=min(max(int(tokens / 2 / TOKENS_PER_WINDOW), 200), MOST_WINDOWS),
    )
