"""What fine-tuning gained on held-out notes, and what it cost on other text: bits per byte before and after."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from niels_gpt.data.embedded import iter_stdlib
from niels_gpt.evaluation.exact import score_stream
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.tokenizer import token_sizes
from niels_gpt.workflow.chat_model import Corpus

MOST_TOKENS = 8_192
"""Tokens of each text that are scored: enough for two digits."""


class Comparison(NamedTuple):
    """Bits per byte of one text."""

    text: str
    base: float
    writer: float
    """After the notes."""
    chat: float
    """After the dialogues."""


def compare_with_base(base: GPT, writer: LoadedRun, chat: LoadedRun, corpus: Corpus) -> list[Comparison]:
    """Bits per byte of held-out notes, and of documentation of the Python library, which shows what was forgotten."""
    texts = {
        "notes that it has never seen": (text for _, text in corpus.texts(corpus.held_out)),
        "other text (docstrings of Python)": (text for _, text in iter_stdlib()),
    }
    sizes = token_sizes(writer.tokenizer)
    rows = []
    for name, documents in texts.items():
        ids = _ids(writer, documents)
        scores = [
            score_stream(model, ids, token_sizes=sizes).bits_per_byte for model in (base, writer.model, chat.model)
        ]
        rows.append(Comparison(name, *scores))
    return rows


def _ids(loaded: LoadedRun, texts: Iterable[str]) -> np.ndarray:
    """The first MOST_TOKENS tokens of some texts."""
    parts: list[np.ndarray] = []
    for text in texts:
        parts.append(loaded.encode(text))
        if sum(map(len, parts)) >= MOST_TOKENS:
            break
    return np.concatenate(parts)[:MOST_TOKENS]
