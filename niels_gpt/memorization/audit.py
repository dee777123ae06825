"""The audit: which passages of some texts can a checkpoint recite, and is it safe to publish?"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from niels_gpt.chat.transcript import DELIMITER
from niels_gpt.evaluation.exact import Score, score_stream
from niels_gpt.memorization.audit_input import CHAT, AuditInput, AuditText, NotRead, read_path, read_run, replies_of
from niels_gpt.memorization.base_model import load_base, with_base
from niels_gpt.memorization.extraction import scan_rows
from niels_gpt.memorization.measure import Document, ExtractionSettings, Measurement, WindowPlan, check_documents
from niels_gpt.memorization.membership import HELD_OUT, TRAINED, membership
from niels_gpt.memorization.run import STRIPS, Progress, ProgressBar, no_progress
from niels_gpt.memorization.summary import build_report, top_passages
from niels_gpt.model.digest import weights_digest
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.system.console import plural
from niels_gpt.tokenizer import ByteTokenizer, text_bytes, token_sizes

CONTROL = "control"
"""Status of the notes of a control folder."""
MIN_TOKENS = 16
"""A shorter document is one passage, and the model is given only the separator before it: half of so little text can
be guessed."""
MIN_BYTES = 4
"""A shorter document is not judged: it can be guessed, and is too short for a secret."""
MOST_WINDOWS = 24_000
"""The stride grows until there are at most so many windows, or to half a suffix: a minute on two cores."""
SMALLEST_STRIDE = 5
THRESHOLD = 0.001
"""P(z) of a passage that is not safe to publish: the default, and the largest that clears a model for an export."""
MARGIN = 1e-3
"""Without `exact`, a window is scored until its P(z) is below the threshold by this factor."""

SAFE, NOT_SAFE, NOT_JUDGED = "SAFE", "NOT SAFE", "NOT JUDGED"


@dataclass(frozen=True)
class AuditVerdict:
    """The result of an audit."""

    verdict: str
    """SAFE, NOT SAFE, or NOT JUDGED: nothing was found, but a part of the text was not audited."""
    safe: bool
    """The verdict is SAFE: all text was read, and no passage has a P(z) of the threshold or more."""
    because: list[str]
    """What was not audited, and what to do about it."""
    threshold: float
    unit: str
    """Of a token: "byte" or "token"."""
    step: int
    window: int
    prompt: int
    stride: int
    floor: float | None
    """A P(z) below this is an upper bound; None: all are exact."""
    read: dict[str, int]
    """Kind of document -> number of documents that were read."""
    bytes_read: int
    skipped: list[dict[str, Any]]
    """What was not read; see `NotRead`."""
    notes_audited: int
    notes_exposed: int
    """Documents with a passage at or over the threshold."""
    windows: int
    windows_planned: int
    """More than `windows` if the audit was interrupted."""
    windows_over: int
    statuses: dict[str, int]
    """Status (trained on, held out, ...) -> number of documents."""
    controls: int
    control_max_log_p: float | None
    """Largest log P(z) of the controls; None without controls."""
    passages: list[dict[str, Any]]
    """The passages with the highest P(z), see `top_passages`; without `exact` only those of at least the floor."""
    documents: list[dict[str, Any]]
    """All documents, the highest P(z) first."""
    checkpoint: str
    notes: str
    """The audited path; empty: the run's own data."""
    unknown_because: str
    """Why the status of some documents is unknown."""
    too_short: list[str]
    """Documents of fewer than MIN_BYTES bytes, which were not judged."""
    base: str = ""
    """The model that the run was fine-tuned from, if P(z) was measured under it too: its name or its checkpoint."""
    base_problem: str = ""
    """Why there is no comparison with the base, although the run began with one."""
    windows_known: int = 0
    """Of `windows_over`, those that the base recites as well: public text, not learned from the notes."""
    interrupted: bool = False
    """Ctrl-C ended the audit early: the counts are of what was measured before."""
    shortfalls: list[str] = dataclasses.field(default_factory=list)
    """Why it does not clear the model for an export: looser settings than the default, or text of the training that
    was not among the audited text."""
    weights: str = ""
    """`weights_digest` of the model: the verdict holds for these weights only."""


class AuditResult(NamedTuple):
    """A verdict and the measurements behind it."""

    verdict: AuditVerdict
    measurements: Sequence[Measurement]
    skipped_controls: list[str]
    """Notes of the control folder that were trained on."""


def audit_notes(
    loaded: LoadedRun,
    notes: Path | None,
    settings: ExtractionSettings,
    *,
    threshold: float,
    control: Path | None = None,
    passages: int = 10,
    encoding_errors: str | None = None,
    exact: bool = True,
    adapt_stride: bool = False,
    sample: int | None = None,
    most_windows: int = MOST_WINDOWS,
    progress: ProgressBar = no_progress,
) -> AuditResult:
    """Measure every text of a folder or file and judge whether the checkpoint is safe to publish.

    notes: a folder or file (see `read_path`), to which the conversations of the run are added: what it was taught to
    say about notes is not in their folder. None: the run's own data (see `read_run`).
    exact: score every passage to its end; otherwise only until P(z) is far below the threshold, with the same verdict.
    adapt_stride: increase the stride of the settings for much text (see `adapted_stride`).
    sample: audit only so many texts and so many conversations, chosen evenly, and fewer if they have more than
    most_windows windows at the largest stride; the verdict is then never SAFE.

    Controls are the held-out documents and those of the folder `control`. After Ctrl-C the result is partial. Raises
    ValueError for a threshold outside (0, 1], for nothing to judge, and for controls that were all trained on.
    """
    check_threshold(threshold)
    shortfalls: list[str] = []
    with progress("reading"):
        found = read_run(loaded) if notes is None else read_path(notes, loaded, encoding_errors)
        if notes is not None:  # what it was taught to say about the notes is no text of the folder
            chats = read_run(loaded, only_chats=True)
            found.texts.extend(chats.texts)
            found.trained_replies |= chats.trained_replies
            found.skipped.extend(chats.skipped)
            shortfalls = _not_covered(read_run(loaded), found.texts, notes)
        audited, too_short = _without_tiny(found.texts, loaded)
        if not audited:
            raise ValueError(_nothing_to_audit(notes, found))
        sampled = ""
        if sample is not None:
            all_of_them = len(audited)
            audited = _sample(audited, sample, most_windows * _largest_stride(settings))
            if len(audited) < all_of_them:
                sampled = f"a sample of {all_of_them:,} documents: audit all of them"
        status, unknown_because = membership(loaded, {text.name: text.ids for text in audited})
        for text in audited:
            if text.kind == CHAT and replies_of(text.ids, loaded) & found.trained_replies:
                status[text.name] = TRAINED  # another question, with the same reply
        controls, skipped = ([], []) if control is None else _read_controls(control, loaded, encoding_errors)
    if adapt_stride:
        settings = dataclasses.replace(settings, stride=adapted_stride(audited, settings, most_windows))
    shortfalls += _looser(settings, threshold, audited, loaded.model.config.T)
    plans = [_plan(text, status[text.name], settings, loaded) for text in audited]
    plans += [_plan(text, CONTROL, settings, loaded) for text in controls]
    floor = None if exact else math.log(threshold * MARGIN)
    with progress("auditing") as show:
        measured, interrupted = _measure(loaded, plans, settings, floor, show)
    base, base_problem = (None, "") if interrupted else load_base(loaded)
    if base is not None:
        with progress("auditing the base") as show:
            measured = with_base(measured, base, least=floor, progress=show)
    verdict = judge(
        measured,
        loaded,
        threshold=threshold,
        passages=passages,
        notes="" if notes is None else str(notes),
        unknown_because=unknown_because,
        sampled=sampled,
        too_short=too_short,
        found=found,
        floor=floor,
        settings=settings,
        planned=sum(len(plan.starts) for plan in plans if plan.document.source != CONTROL),
        base="" if base is None else base.name,
        base_problem=base_problem,
        interrupted=interrupted,
        shortfalls=shortfalls,
    )
    return AuditResult(verdict, measured, skipped)


def counts_text(verdict: Mapping[str, Any]) -> str:
    """How many passages of an audit, given its fields, are at or over the threshold, and of how many."""
    number = verdict["windows_over"]
    over = f"{plural(number, 'passage')} of {plural(verdict['notes_exposed'], 'document')}" if number else "no passage"
    measured = f"{plural(verdict['windows'], 'passage')} in {plural(verdict['notes_audited'], 'document')}"
    has = "has" if number <= 1 else "have"
    return f"{over} {has} a P(z) of {verdict['threshold']:g} or more, of {measured}"


def _looser(settings: ExtractionSettings, threshold: float, texts: Sequence[AuditText], T: int) -> list[str]:
    """Return the settings that are less strict than the default, each with its limit."""
    default = ExtractionSettings.fitting(T, window=None, prompt=None, stride=SMALLEST_STRIDE, greedy=0)
    found = []
    if threshold > THRESHOLD:
        found.append(f"--threshold {threshold:g} is above {THRESHOLD:g}")
    if (settings.window, settings.prompt) != (default.window, default.prompt):  # a longer suffix is less probable
        found.append(
            f"--window {settings.window} --prompt {settings.prompt} are not {default.window} and {default.prompt}"
        )
    stride = adapted_stride(texts, default)
    if settings.stride > stride:
        found.append(f"--stride {settings.stride} is above {stride}")
    return found


def _not_covered(own: AuditInput, texts: Sequence[AuditText], notes: Path) -> list[str]:
    """Return what of the run's own data is unknown, or not among some texts: compared by content, not by path."""
    problems = [f"{entry.name}: {entry.reason}" for entry in own.skipped if entry.missing]
    keys = {text.ids.tobytes() for text in texts}
    rest = [text for text in own.texts if text.ids.tobytes() not in keys]
    # The end of a token cache may cut its last text.
    rest = [text for text in rest if not any(np.array_equal(text.ids, t.ids[: len(text.ids)]) for t in texts)]
    if rest:
        problems.append(
            f"{plural(len(rest), 'document')} of {len(own.texts):,} in the run's own data are not in {notes}, such as "
            f"{rest[0].name}"
        )
    return problems


def _evenly(length: int, most: int) -> list[int]:
    """At most `most` of the numbers below `length`, evenly spaced."""
    number = min(length, most)
    return [i * length // number for i in range(number)]


def check_threshold(threshold: float) -> None:
    """Raise ValueError for a threshold that is not a probability above 0."""
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"--threshold must be a probability above 0 and at most 1, got {threshold}")


def _sample(texts: Sequence[AuditText], number: int, most_tokens: int) -> list[AuditText]:
    """Return so many texts and so many conversations, chosen evenly; only one of each if they have too many tokens."""
    by_kind = [[text for text in texts if (text.kind == CHAT) == chat] for chat in (False, True)]
    while True:
        chosen = [kind[i] for kind in by_kind for i in _evenly(len(kind), number)]
        if number <= 1 or sum(len(text.ids) for text in chosen) <= most_tokens:
            return chosen
        number //= 2


def _largest_stride(settings: ExtractionSettings) -> int:
    """Return half a suffix: see `adapted_stride`."""
    return max(SMALLEST_STRIDE, (settings.window - settings.prompt) // 2)


def adapted_stride(texts: Sequence[AuditText], settings: ExtractionSettings, most_windows: int = MOST_WINDOWS) -> int:
    """Return the stride for some texts: 5 for few of them, more for at most `most_windows` windows.

    At most half a suffix: then every token is in the suffix of two windows, and a recited passage of one and a quarter
    windows contains a whole one. Texts that fit into a window do not count: they are one window at any stride.
    """
    tokens = sum(len(text.ids) for text in texts if len(text.ids) > settings.window)
    return min(max(SMALLEST_STRIDE, math.ceil(tokens / most_windows)), _largest_stride(settings))


def _without_tiny(texts: Sequence[AuditText], loaded: LoadedRun) -> tuple[list[AuditText], list[str]]:
    """Return (texts that can be judged, names of those that are too short)."""
    sizes = [len(text_bytes(loaded.tokenizer, text.ids).strip()) for text in texts]
    kept = [text for text, size in zip(texts, sizes, strict=True) if size >= MIN_BYTES]
    return kept, [text.name for text, size in zip(texts, sizes, strict=True) if size < MIN_BYTES]


def _nothing_to_audit(notes: Path | None, found: AuditInput) -> str:
    reasons = "; ".join(f"{entry.name}: {entry.reason}" for entry in found.skipped[:5])
    where = "in the run's own data: name it with --notes" if notes is None else f"in {notes}"
    return f"no text of at least {MIN_BYTES} bytes to audit {where}" + (f" (skipped {reasons})" if reasons else "")


def _read_controls(folder: Path, loaded: LoadedRun, encoding_errors: str | None) -> tuple[list[AuditText], list[str]]:
    """Return (controls from a folder, names of its notes that were trained on and therefore skipped)."""
    found = read_path(folder, loaded, encoding_errors)
    for entry in found.skipped:
        if entry.missing:
            warnings.warn(f"--control {folder}: {entry.name} is not a control: {entry.reason}", stacklevel=1)
    texts = [text for text in found.texts if len(text.ids) >= MIN_TOKENS]
    if not texts:
        raise ValueError(f"--control {folder}: no text of at least {MIN_TOKENS} tokens")
    status, _ = membership(loaded, {text.name: text.ids for text in texts})
    skipped = [name for name, known in status.items() if known == TRAINED]
    if len(skipped) == len(texts):
        raise ValueError(f"--control {folder}: all its notes were trained on; use notes that were not")
    controls = [text._replace(name=f"control: {text.name}") for text in texts if text.name not in skipped]
    return controls, skipped


# --- measuring ---------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """The windows of one document."""

    document: Document
    starts: np.ndarray
    window: int
    prompt: int


def _plan(text: AuditText, status: str, settings: ExtractionSettings, loaded: LoadedRun) -> _Plan:
    """Return the windows of a text. A short one is a single window, after the separator that precedes a document."""
    control = status in (HELD_OUT, CONTROL)
    T = loaded.model.config.T
    if len(text.ids) >= min(MIN_TOKENS, settings.window):
        windows = WindowPlan.of(len(text.ids), settings)
        document = Document(text.name, text.ids, control=control, source=status)
        return _Plan(document, windows.starts, windows.window, windows.prompt)
    if isinstance(loaded.tokenizer, ByteTokenizer):
        separator = list((DELIMITER if text.kind == CHAT else "\n\n").encode())
    else:
        separator = [loaded.tokenizer.special_token_ids()["eot"]]
    separator = separator[-max(1, T + 1 - len(text.ids)) :]
    ids = np.append(np.array(separator, dtype=np.int64), text.ids)[: T + 1]
    document = Document(text.name, ids, control=control, source=status)
    start = list(loaded.tokenizer.document_start)  # a text of a tokenizer of others begins with it
    given = len(separator) + (len(start) if text.ids[: len(start)].tolist() == start else 0)
    return _Plan(document, np.zeros(1, dtype=np.int64), len(ids), min(given, len(ids) - 1))


def _measure(
    loaded: LoadedRun,
    plans: Sequence[_Plan],
    settings: ExtractionSettings,
    floor: float | None,
    progress: Progress | None,
) -> tuple[list[Measurement], bool]:
    """Return (the measurements, whether Ctrl-C ended them early: the other windows are then dropped).

    Windows of all documents share batches.
    """
    check_documents(loaded.model, [plan.document for plan in plans], loaded.tokenizer)
    rows = [p.document.ids[s : s + p.window] for p in plans for s in p.starts.tolist()]
    counts = [len(plan.starts) for plan in plans]
    prompts = np.repeat([plan.prompt for plan in plans], counts)
    log_p, done, interrupted = np.full(len(rows), np.nan), 0, False
    try:
        for indices, values in scan_rows(loaded.model, rows, prompts, floor=floor, batch=settings.batch):
            log_p[indices] = values
            done += len(indices)
            if progress is not None:
                progress(done, len(rows))
    except KeyboardInterrupt:
        if not done:
            raise
        interrupted = True
    sizes = token_sizes(loaded.tokenizer)
    measured = []
    for plan, values in zip(plans, np.split(log_p, np.cumsum(counts)[:-1]), strict=True):
        scored = ~np.isnan(values)
        if scored.any():
            measured.append(
                Measurement(
                    document=plan.document,
                    settings=settings,
                    bytes=int(sizes[plan.document.ids].sum()),
                    starts=plan.starts[scored],
                    window=plan.window,
                    prompt=plan.prompt,
                    log_p=values[scored],
                    score=Score(len(plan.document.ids) - 1, math.nan),  # only a report needs it: see `audit_report`
                    greedy_prompt=0,
                    greedy_share=np.full(int(scored.sum()), np.nan),
                    greedy_run=np.zeros(int(scored.sum()), dtype=np.int64),
                    longest=(0, 0),
                )
            )
    return measured, interrupted


# --- the verdict -------------------------------------------------------------------------------------


def judge(
    measured: Sequence[Measurement],
    loaded: LoadedRun,
    *,
    threshold: float,
    passages: int,
    notes: str,
    unknown_because: str,
    too_short: list[str],
    found: AuditInput | None = None,
    floor: float | None = None,
    settings: ExtractionSettings | None = None,
    planned: int | None = None,
    sampled: str = "",
    base: str = "",
    base_problem: str = "",
    interrupted: bool = False,
    shortfalls: Sequence[str] = (),
) -> AuditVerdict:
    """Return the verdict on measured documents.

    Held-out documents are judged too (one may be in the training text under another name); those of a control folder
    only show what text that was never trained on reaches. `planned` is the number of windows that were to be measured.
    """
    found = found or AuditInput()
    settings = settings or measured[0].settings
    audited = [m for m in measured if m.document.source != CONTROL]
    controls = [m for m in measured if m.document.control]
    limit = np.log(threshold)
    exposed = [m for m in audited if float(m.log_p.max()) >= limit]
    windows = int(sum(len(m.log_p) for m in audited))
    planned = windows if planned is None else planned
    because = [*([sampled] if sampled else []), *_not_audited(found.skipped)]
    if windows < planned:
        because.insert(0, f"interrupted after {windows:,} of {planned:,} passages: run it again to the end")
    verdict = NOT_SAFE if exposed else NOT_JUDGED if because else SAFE
    return AuditVerdict(
        verdict=verdict,
        safe=verdict == SAFE,
        because=because,
        threshold=threshold,
        unit="byte" if isinstance(loaded.tokenizer, ByteTokenizer) else "token",
        step=loaded.step,
        window=settings.window,
        prompt=settings.prompt,
        stride=settings.stride,
        floor=None if floor is None else math.exp(floor),
        read=dict(Counter(text.kind for text in found.texts)),
        bytes_read=int(sum(token_sizes(loaded.tokenizer)[text.ids].sum() for text in found.texts)),
        skipped=[entry._asdict() for entry in found.skipped],
        notes_audited=len(audited),
        notes_exposed=len(exposed),
        windows=windows,
        windows_planned=planned,
        windows_over=int(sum((m.log_p >= limit).sum() for m in audited)),
        statuses=dict(Counter(m.document.source for m in measured)),
        controls=len(controls),
        control_max_log_p=max((float(m.log_p.max()) for m in controls), default=None),
        passages=top_passages(
            audited, loaded.tokenizer, most=passages, least=0.0 if floor is None else math.exp(floor)
        ),
        documents=[_row(m, limit) for m in sorted(measured, key=lambda m: -float(m.log_p.max()))],
        checkpoint=str(loaded.path),
        notes=notes,
        unknown_because=unknown_because,
        too_short=too_short,
        base=base,
        base_problem=base_problem,
        windows_known=sum(_known(m, limit) for m in audited),
        interrupted=interrupted,
        shortfalls=list(shortfalls),
        weights=weights_digest(loaded.model),
    )


def _known(m: Measurement, limit: float) -> int:
    """Return the number of windows at or over the threshold under the model and under its base."""
    return 0 if m.base_log_p is None else int(((m.log_p >= limit) & (m.base_log_p >= limit)).sum())


def _row(m: Measurement, limit: float) -> dict[str, Any]:
    return {
        "name": m.document.name,
        "status": m.document.source,
        "windows": len(m.log_p),
        "short": m.short,
        "max_p": float(np.exp(m.log_p.max())),
        "max_log_p": float(m.log_p.max()),
        "over": int((m.log_p >= limit).sum()),
        **({} if m.base_log_p is None else {"known": _known(m, limit)}),
    }


def _not_audited(skipped: Sequence[NotRead]) -> list[str]:
    """Return what is missing, with the remedy: files with the same remedy together."""
    by_remedy: dict[str, list[NotRead]] = {}
    for entry in skipped:
        if entry.missing:
            by_remedy.setdefault(entry.remedy, []).append(entry)
    lines = []
    for remedy, entries in by_remedy.items():
        first = f"{entries[0].name}: {entries[0].reason}"
        more = f" (and {plural(len(entries) - 1, 'other')})" if len(entries) > 1 else ""
        lines.append(f"{first}{more}: {remedy}" if remedy else f"{first}{more}")
    return lines


def audit_report(loaded: LoadedRun, measurements: Sequence[Measurement], *, passages: int) -> dict[str, Any]:
    """Return the report dict (see `build_report`) of an exact audit, with at least 20 passages."""
    sizes = token_sizes(loaded.tokenizer)
    scored = [
        dataclasses.replace(m, score=score_stream(loaded.model, m.document.ids, token_sizes=sizes))
        for m in measurements
    ]
    base, _ = load_base(loaded)
    if base is not None:
        scored = [
            dataclasses.replace(m, base_score=score_stream(base.model, m.document.ids, token_sizes=sizes))
            for m in scored
        ]
    return build_report(
        loaded.model,
        scored,
        loaded.tokenizer,
        title=f"Audit of {loaded.path.name}",
        checkpoint=str(loaded.path),
        base="" if base is None else base.name,
        step=loaded.step,
        passages=max(passages, 20),
        strips=STRIPS,
    )
