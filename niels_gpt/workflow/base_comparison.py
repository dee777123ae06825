"""What fine-tuning gained on held-out notes, and what it cost on other text: bits per byte before and after."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from niels_gpt.config import RunConfig
from niels_gpt.data.embedded import iter_stdlib
from niels_gpt.evaluation.exact import score_stream
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.tokenizer import token_sizes
from niels_gpt.training.score_run import ScoreOptions, Scores, score_held_out
from niels_gpt.training.tasks.base import eval_name


class Comparison(NamedTuple):
    """Bits per byte of one text."""

    text: str
    tokens: int
    """How many were scored."""
    base: float
    writer: float
    """After the notes."""
    chat: float
    """After the dialogues."""


def compare_with_base(
    base: GPT, writer: LoadedRun, chat: LoadedRun, config: RunConfig, scores: Scores, *, most: int
) -> list[Comparison]:
    """Bits per byte of held-out notes, and of documentation of the Python library, which shows what was forgotten.

    config: of the writer. scores: its scores; they are used where they are of the same tokens. most: tokens of each
    text that are scored; if there are more, the name of the text says that these are the first ones.
    """
    options, name = ScoreOptions(limit=most), eval_name("roam")

    def held_out(model: GPT) -> dict[str, float]:
        return score_held_out(writer._replace(model=model), config, options)[name]

    before, after = held_out(base), held_out(chat.model)
    whole = before["tokens"] == scores[name]["tokens"]
    own = scores[name] if whole else held_out(writer.model)
    text = "held-out notes" if whole else "beginning of the held-out notes"
    bits = [each["bits_per_byte"] for each in (before, own, after)]
    rows = [Comparison(text, int(before["tokens"]), *bits)]
    ids = _documentation(writer, most)
    sizes = token_sizes(writer.tokenizer)
    found = [score_stream(model, ids, token_sizes=sizes) for model in (base, writer.model, chat.model)]
    rows.append(Comparison("docstrings of Python", found[0].tokens, *(each.bits_per_byte for each in found)))
    return rows


def _documentation(loaded: LoadedRun, most: int) -> np.ndarray:
    """The first tokens of the documentation of the Python library."""
    parts: list[np.ndarray] = []
    for _, text in iter_stdlib():
        parts.append(loaded.encode(text))
        if sum(map(len, parts)) >= most:
            break
    return np.concatenate(parts)[:most]
