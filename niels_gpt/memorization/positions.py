"""Where in its frame a model knows a text: with learned positions perhaps at one place, and not at another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from niels_gpt.evaluation.scoring import score_rows
from niels_gpt.memorization.extraction import log_probabilities
from niels_gpt.memorization.measure import (
    Document,
    ExtractionSettings,
    Measurement,
    WindowPlan,
)
from niels_gpt.model.gpt import GPT


def at_every_position(
    model: GPT,
    measured: Sequence[Measurement],
    *,
    batch: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Measurement]:
    """The same with the largest P(z) of each window over all places of the frame that it may begin at.

    For learned positions: a model may know a passage at one place, and nothing of it one token further on. Takes as
    many passes as there are places. `progress` is told how many rows of how many are done.
    """
    T, done = model.config.T, 0
    total = sum(len(m.starts) * (T - m.window + 2) for m in measured)

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        if progress is not None:
            progress(done, total)

    best = [m.log_p for m in measured]
    for window in sorted({m.window for m in measured}):  # those of one length share the batches
        own = [i for i, m in enumerate(measured) if m.window == window]
        rows = [measured[i].document.ids[s : s + window] for i in own for s in measured[i].starts.tolist()]
        sizes = [len(measured[i].starts) for i in own]
        prompts = np.repeat([measured[i].prompt for i in own], sizes)
        highest = np.full(len(rows), -np.inf)
        for place in range(T - window + 2):  # what is predicted last needs no place
            highest = np.maximum(highest, score_rows(model, rows, prompts, batch=batch, offset=place, count=count)[0])
        for i, log_p in zip(own, np.split(highest, np.cumsum(sizes)[:-1]), strict=True):
            best[i] = log_p
    return [dataclasses.replace(m, log_p=log_p) for m, log_p in zip(measured, best, strict=True)]


def frame_positions(T: int, window: int, number: int) -> list[int]:
    """Where a window may begin in a frame of T tokens: the first and the last place, and others evenly between."""
    found: list[int] = np.unique(np.linspace(0, T - (window - 1), number).round().astype(int)).tolist()
    return found


def position_map(
    model: GPT,
    documents: Sequence[Document],
    settings: ExtractionSettings | None = None,
    *,
    offsets: int = 9,
    most_windows: int = 200,
) -> dict[str, Any] | None:
    """Mean P(z) and mean log P(z) of each document with its windows at evenly spaced places of the frame.

    None for relative positions (RoPE): P(z) does not depend on the place. Of each document at most `most_windows`
    windows count, evenly spaced. `best_p` is the largest P(z) of `most_windows` / 25 of them at any place at all, and
    `best_offset` that place: the evenly spaced ones can miss where a text is known.
    """
    if getattr(model.config, "positions", "rope") == "rope":
        return None
    settings = settings or ExtractionSettings()
    settings.check(model)
    places = frame_positions(model.config.T, settings.window, offsets)
    found = []
    for document in documents:
        plan = WindowPlan.of(len(document.ids), settings)
        some = np.unique(np.linspace(0, len(plan.starts) - 1, most_windows).round().astype(int))
        each = [
            log_probabilities(
                model,
                document.ids,
                plan.starts[some],
                window=plan.window,
                prompt=plan.prompt,
                batch=settings.batch,
                offset=place,
            )
            for place in places
        ]
        found.append(
            {
                "name": document.name,
                "control": document.control,
                **_best_place(model, document.ids, plan, settings, most_windows // 25),
                "mean_p": [float(np.exp(log_p).mean()) for log_p in each],
                "mean_log_p": [float(log_p.mean()) for log_p in each],
            }
        )
    return {"offsets": places, "documents": found}


def _best_place(
    model: GPT, ids: np.ndarray, plan: WindowPlan, settings: ExtractionSettings, number: int
) -> dict[str, Any]:
    """The largest P(z) of a few windows at any place, and the place."""
    some = plan.starts[np.unique(np.linspace(0, len(plan.starts) - 1, max(number, 1)).round().astype(int))]
    rows, prompts = [ids[s : s + plan.window] for s in some.tolist()], np.full(len(some), plan.prompt)
    each = [
        score_rows(model, rows, prompts, batch=settings.batch, offset=place)[0].max()
        for place in range(model.config.T - plan.window + 2)
    ]
    return {"best_p": float(np.exp(max(each))), "best_offset": int(np.argmax(each))}
