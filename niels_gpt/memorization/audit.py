"""The audit: which passages of some notes can a checkpoint recite, and is it safe to publish?"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from niels_gpt.data.roam import list_roam_paths, read_text
from niels_gpt.memorization.measure import Document, ExtractionSettings, Measurement, measure
from niels_gpt.memorization.membership import HELD_OUT, TRAINED, membership
from niels_gpt.memorization.positions import at_every_position
from niels_gpt.memorization.run import STRIPS, ProgressBar, no_progress
from niels_gpt.memorization.summary import build_report, top_passages
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.system import files
from niels_gpt.tokenizer import ByteTokenizer

CONTROL = "control"
"""Status of the notes of a control folder."""
MIN_TOKENS = 16
"""Shorter notes are not judged: half of so little text can be guessed."""


@dataclass(frozen=True)
class AuditVerdict:
    """The result of an audit."""

    safe: bool
    """No passage of the notes has a P(z) of the threshold or more."""
    threshold: float
    unit: str
    """Of a token: "byte" or "token"."""
    step: int
    notes_audited: int
    notes_exposed: int
    """Notes with a passage at or over the threshold."""
    windows: int
    windows_over: int
    statuses: dict[str, int]
    """Status (trained on, held out, ...) -> number of notes."""
    controls: int
    control_max_log_p: float | None
    """Largest log P(z) of the controls; None without controls."""
    passages: list[dict[str, Any]]
    """The passages with the highest P(z), see `top_passages`."""
    documents: list[dict[str, Any]]
    """All notes, the highest P(z) first."""
    checkpoint: str
    notes: str
    unknown_because: str
    """Why the status of some notes is unknown."""
    too_short: list[str]
    """Notes of fewer than MIN_TOKENS tokens, which were not judged."""


class AuditResult(NamedTuple):
    """A verdict and the measurements behind it."""

    verdict: AuditVerdict
    measurements: Sequence[Measurement]
    skipped_controls: list[str]
    """Notes of the control folder that were trained on."""


def audit_notes(
    loaded: LoadedRun,
    notes: Path,
    settings: ExtractionSettings,
    *,
    threshold: float,
    control: Path | None = None,
    passages: int = 10,
    encoding_errors: str = "strict",
    progress: ProgressBar = no_progress,
) -> AuditResult:
    """Measure every note of a folder and judge whether the checkpoint is safe to publish.

    Controls are the held-out notes and those of the folder `control`. Raises ValueError for a threshold outside (0, 1],
    a folder without a note to judge, and a control folder that was trained on completely.
    """
    check_threshold(threshold)
    note_ids, short = read_notes(notes, loaded, encoding_errors)
    status, unknown_because = membership(loaded, note_ids)
    documents = [
        Document(name, ids, control=status[name] == HELD_OUT, source=status[name]) for name, ids in note_ids.items()
    ]
    skipped: list[str] = []
    if control is not None:
        controls, skipped = _read_controls(control, loaded, encoding_errors)
        documents += controls
    with progress("auditing") as show:
        measured = measure(loaded.model, documents, loaded.tokenizer, settings, progress=show)
    if loaded.model.config.positions == "learned":
        with progress("auditing at every offset") as show:
            measured = at_every_position(loaded.model, measured, batch=settings.batch, progress=show)
    verdict = judge(
        measured,
        loaded,
        threshold=threshold,
        passages=passages,
        notes=str(notes),
        unknown_because=unknown_because,
        too_short=short,
    )
    return AuditResult(verdict, measured, skipped)


def check_threshold(threshold: float) -> None:
    """Raise ValueError for a threshold that is not a probability above 0."""
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"--threshold must be a probability above 0 and at most 1, got {threshold}")


def read_notes(folder: Path, loaded: LoadedRun, encoding_errors: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return (name -> ids of every note, names of the notes too short to judge).

    Raises ValueError if no note is left, and as `list_roam_paths` and `read_text` do.
    """
    root = files.expand_home(folder).absolute()
    notes, short = {}, []
    for path in list_roam_paths(str(root)):
        name = os.fsencode(Path(path).relative_to(root).as_posix()).decode("utf-8", errors="backslashreplace")
        ids = loaded.encode(read_text(path, errors=encoding_errors))
        if len(ids) < MIN_TOKENS:
            short.append(name)
        else:
            notes[name] = ids
    if not notes:
        raise ValueError(f"no note to audit in {folder}: it has no .md file of at least {MIN_TOKENS} tokens")
    return notes, short


def _read_controls(folder: Path, loaded: LoadedRun, encoding_errors: str) -> tuple[list[Document], list[str]]:
    """Return (controls from a folder, names of its notes that were trained on and therefore skipped)."""
    notes, _ = read_notes(folder, loaded, encoding_errors)
    status, _ = membership(loaded, notes)
    skipped = [name for name, known in status.items() if known == TRAINED]
    if len(skipped) == len(notes):
        raise ValueError(f"--control {folder}: all its notes were trained on; use notes that were not")
    controls = [
        Document(f"control: {name}", ids, control=True, source=CONTROL)
        for name, ids in notes.items()
        if name not in skipped
    ]
    return controls, skipped


def judge(
    measured: Sequence[Measurement],
    loaded: LoadedRun,
    *,
    threshold: float,
    passages: int,
    notes: str,
    unknown_because: str,
    too_short: list[str],
) -> AuditVerdict:
    """Return the verdict on measured notes.

    Held-out notes are judged too (one may be in the training text under another name); notes of a control folder only
    show what text that was never trained on reaches.
    """
    audited = [m for m in measured if m.document.source != CONTROL]
    controls = [m for m in measured if m.document.control]
    limit = np.log(threshold)
    exposed = [m for m in audited if float(m.log_p.max()) >= limit]
    rows = [
        {
            "name": m.document.name,
            "status": m.document.source,
            "windows": len(m.log_p),
            "short": m.short,
            "max_p": float(np.exp(m.log_p.max())),
            "max_log_p": float(m.log_p.max()),
            "over": int((m.log_p >= limit).sum()),
        }
        for m in sorted(measured, key=lambda m: -float(m.log_p.max()))
    ]
    return AuditVerdict(
        safe=not exposed,
        threshold=threshold,
        unit="byte" if isinstance(loaded.tokenizer, ByteTokenizer) else "token",
        step=loaded.step,
        notes_audited=len(audited),
        notes_exposed=len(exposed),
        windows=int(sum(len(m.log_p) for m in audited)),
        windows_over=int(sum((m.log_p >= limit).sum() for m in audited)),
        statuses=dict(Counter(m.document.source for m in measured)),
        controls=len(controls),
        control_max_log_p=max((float(m.log_p.max()) for m in controls), default=None),
        passages=top_passages(audited, loaded.tokenizer, most=passages),
        documents=rows,
        checkpoint=str(loaded.path),
        notes=notes,
        unknown_because=unknown_because,
        too_short=too_short,
    )


def audit_report(loaded: LoadedRun, measurements: Sequence[Measurement], *, passages: int) -> dict[str, Any]:
    """Return the report dict (see `build_report`) of an audit, with at least 20 passages."""
    return build_report(
        loaded.model,
        measurements,
        loaded.tokenizer,
        title=f"Audit of {loaded.path.name}",
        checkpoint=str(loaded.path),
        step=loaded.step,
        passages=max(passages, 20),
        strips=STRIPS,
    )
