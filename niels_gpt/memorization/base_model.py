"""The model that a run was fine-tuned from, and what it already knew: P(z) of the same windows under both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from niels_gpt.evaluation.exact import score_stream
from niels_gpt.memorization.extraction import scan_rows
from niels_gpt.memorization.measure import Measurement
from niels_gpt.memorization.progress import Progress, no_count
from niels_gpt.model.gpt import GPT
from niels_gpt.pretrained.initial_weights import load_initial
from niels_gpt.pretrained.public_base import public_base
from niels_gpt.runs.loading import LoadedRun, history
from niels_gpt.runs.pipeline import PipelineFolder
from niels_gpt.system.console import error_message, one_line
from niels_gpt.tokenizer import AnyTokenizer, token_sizes


class BaseModel(NamedTuple):
    """The weights that fine-tuning started from."""

    model: GPT
    name: str
    """The name of the public model, else the path of the checkpoint."""


def find_base(loaded: LoadedRun) -> tuple[str | None, str]:
    """(the checkpoint or public model that a run was fine-tuned from, why there is none although it began with one).

    Followed through `init_from` to the oldest run. The first phase of the same pipeline is no base: it was trained on
    the same text. A LoRA run holds its base itself, in case the other run is gone.
    """
    found: str | None = None
    for past in history(loaded.home):
        if past.start is None:
            break
        if past.run.base.is_file() and (past.from_public or not past.start.exists()):
            return str(past.run.base), ""
        if past.earlier is None:
            return past.config.init_from, ""
        if not past.start.exists():
            return None, f"{past.start} is gone, from which {past.run.path} was trained"
        pipeline = past.earlier.path.resolve().parent
        if past.earlier.imported or pipeline != past.run.path.resolve().parent or not PipelineFolder(pipeline).exists:
            found = str(past.start)
    return found, ""


def load_base(loaded: LoadedRun) -> tuple[BaseModel | None, str]:
    """(the base of a run, "") or (None, why it cannot be compared with; empty if the run has none)."""
    path, problem = find_base(loaded)
    if path is None:
        return None, problem
    try:
        model = load_initial(path, loaded.model.device)
    except (ValueError, OSError) as err:
        return None, one_line(error_message(err))
    ours, theirs = loaded.model.config, model.config
    if ours.V != theirs.V or theirs.T < ours.T:
        return None, f"{path} has V={theirs.V} and T={theirs.T}, the model V={ours.V} and T={ours.T}"
    public = public_base(loaded.home)
    return BaseModel(model, path if public is None else public.name), ""


def with_base(
    measured: Sequence[Measurement],
    base: BaseModel,
    *,
    least: float | None = None,
    tokenizer: AnyTokenizer | None = None,
    progress: Progress = no_count,
) -> list[Measurement]:
    """The measurements with log P(z) of their windows under the base.

    least: only of windows with a log P(z) of at least this; the others get nan. tokenizer: also score the documents.
    """
    chosen = [np.flatnonzero(m.log_p >= (-np.inf if least is None else least)) for m in measured]
    rows, prompts = list[np.ndarray](), list[int]()
    for m, indices in zip(measured, chosen, strict=True):
        of_document = m.rows
        rows += [of_document[i] for i in indices.tolist()]
        prompts += (m.cuts - m.starts)[indices].tolist()
    values, done = np.full(len(rows), np.nan), 0
    for indices, log_p in scan_rows(base.model, rows, np.array(prompts, dtype=np.int64)):
        values[indices] = log_p
        done += len(indices)
        progress(done, len(rows))
    results = []
    for m, indices, found in zip(
        measured, chosen, np.split(values, np.cumsum([len(c) for c in chosen])[:-1]), strict=True
    ):
        base_log_p = np.full(len(m.log_p), np.nan)
        base_log_p[indices] = found
        score = None
        if tokenizer is not None:
            score = score_stream(base.model, m.document.ids, token_sizes=token_sizes(tokenizer))
        results.append(dataclasses.replace(m, base_log_p=base_log_p, base_score=score))
    return results
