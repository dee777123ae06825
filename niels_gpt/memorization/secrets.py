"""The secrets in documents, such as passwords and card numbers: how likely a model continues the text with each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from niels_gpt.data.note_check import find_secrets
from niels_gpt.evaluation.scoring import score_rows
from niels_gpt.memorization.measure import Document
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.tokenizer import text_bytes, token_sizes

LENGTH, BEFORE = 100, 50
"""Most tokens of a secret that are judged, and tokens of text before it that are given, at most."""


class SecretScore(NamedTuple):
    """How likely a model writes a secret after the text before it; the secret itself is not stored."""

    path: str
    line: int
    kind: str
    log_p: float


def score_secrets(loaded: LoadedRun, documents: Sequence[Document]) -> list[SecretScore]:
    """Return the log-probability of each secret in some documents, in their order."""
    found, rows, prompts = list[tuple[str, int, str]](), list[np.ndarray](), list[int]()
    sizes, most = token_sizes(loaded.tokenizer), loaded.model.config.T + 1
    for document in documents:
        text = text_bytes(loaded.tokenizer, document.ids).decode("utf-8", "surrogateescape")
        ends = np.cumsum(sizes[document.ids])
        for secret in find_secrets(text, document.name):
            offsets = [len(text[:at].encode("utf-8", "surrogateescape")) for at in (secret.start, secret.end - 1)]
            first, last = np.searchsorted(ends, offsets, side="right").tolist()
            stop = min(last + 1, first + min(LENGTH, most - 1))
            start = max(-len(document.before), first - BEFORE, stop - most)
            found.append((secret.path, secret.line, secret.kind))
            rows.append(document.row(start, stop))
            prompts.append(first - start)
    log_p = score_rows(loaded.model, rows, np.array(prompts, dtype=np.int64))[0].tolist() if rows else []
    return [SecretScore(*entry, value) for entry, value in zip(found, log_p, strict=True)]
