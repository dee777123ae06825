"""P(z) by position in the frame: with learned positions a model may know a text at one offset only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from niels_gpt.memorization.extraction import log_probabilities
from niels_gpt.memorization.measure import Document, ExtractionSettings, WindowPlan
from niels_gpt.model.gpt import GPT


def frame_offsets(T: int, window: int, number: int) -> list[int]:
    """Return up to `number` evenly spaced offsets of a window in a frame of T, the first and the last included."""
    offsets: list[int] = _spread(T - (window - 1), number).tolist()
    return offsets


def _spread(last: int, number: int) -> np.ndarray:
    """Return up to `number` evenly spaced integers from 0 to `last`."""
    return np.unique(np.linspace(0, last, number).round().astype(int))


def position_map(
    model: GPT,
    documents: Sequence[Document],
    settings: ExtractionSettings | None = None,
    *,
    offsets: int = 9,
    most_windows: int = 200,
) -> dict[str, Any] | None:
    """Return the mean P(z) and mean log P(z) of each document at evenly spaced offsets in the frame.

    None for relative positions (RoPE), where P(z) does not depend on the offset. At most `most_windows` evenly spaced
    windows of each document count. `best_p` is the largest P(z) of `most_windows` / 25 of them at any offset, and
    `best_offset` that offset: evenly spaced offsets can miss the one at which a text is known.
    """
    if model.config.positions == "rope":
        return None
    settings = settings or ExtractionSettings()
    settings.check(model.config.T)
    frame = frame_offsets(model.config.T, settings.window, offsets)
    entries = []
    for document in documents:
        log_ps = [_log_p(model, document, settings, offset, most_windows) for offset in frame]
        last = model.config.T - WindowPlan.of(len(document.ids), settings).window + 1
        few = max(most_windows // 25, 1)
        best = [_log_p(model, document, settings, offset, few).max() for offset in range(last + 1)]
        entries.append(
            {
                "name": document.name,
                "control": document.control,
                "best_p": float(np.exp(max(best))),
                "best_offset": int(np.argmax(best)),
                "mean_p": [float(np.exp(log_p).mean()) for log_p in log_ps],
                "mean_log_p": [float(log_p.mean()) for log_p in log_ps],
            }
        )
    return {"offsets": frame, "documents": entries}


def _log_p(model: GPT, document: Document, settings: ExtractionSettings, offset: int, number: int) -> np.ndarray:
    """Return log P(z) of up to `number` evenly spaced windows at an offset."""
    plan = WindowPlan.of(len(document.ids), settings)
    starts = plan.starts[_spread(len(plan.starts) - 1, number)]
    shape = {"window": plan.window, "prompt": plan.prompt, "batch": settings.batch}
    return log_probabilities(model, document.ids, starts, **shape, offset=offset)
