"""The audit: which passages of some texts can a checkpoint recite, and is it safe to publish?"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from niels_gpt.chat.transcript import DELIMITER
from niels_gpt.data.note_check import find_secrets
from niels_gpt.evaluation.exact import Score, score_stream
from niels_gpt.evaluation.scoring import CountRows, score_rows
from niels_gpt.memorization.audit_input import (
    CHAT,
    AuditInput,
    AuditText,
    NotRead,
    public_texts,
    read_path,
    read_run,
    replies_of,
    reply_spans,
)
from niels_gpt.memorization.base_model import load_base, with_base
from niels_gpt.memorization.extraction import scan_rows
from niels_gpt.memorization.measure import Document, ExtractionSettings, Measurement, WindowPlan, check_documents
from niels_gpt.memorization.membership import HELD_OUT, TRAINED, membership
from niels_gpt.memorization.origins import with_origins
from niels_gpt.memorization.progress import Progress, ProgressBar, no_progress
from niels_gpt.memorization.run import STRIPS
from niels_gpt.memorization.summary import LEVELS, build_report, top_passages
from niels_gpt.model.digest import weights_digest
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.system.console import plural
from niels_gpt.tokenizer import ByteTokenizer, Tokenizer, private_pieces, text_bytes, token_sizes
from niels_gpt.tokenizer.private_pieces import MIN_NOTES

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

SECRET_TOKENS, TOKENS_BEFORE = 100, 50
"""Most tokens of a secret that are judged, and tokens of text before it that are given, at most."""

LAST_AUDIT = "last-audit.json"
"""File of a run with the fields of its last audit, whatever its settings, for the report of the run."""

SAFE, NOT_SAFE, NOT_JUDGED = "SAFE", "NOT SAFE", "NOT JUDGED"


@dataclass(frozen=True)
class AuditVerdict:
    """The result of an audit."""

    verdict: str
    """SAFE, NOT SAFE, or NOT JUDGED: nothing was found, but a part of the text was not audited."""
    safe: bool
    """The verdict is SAFE: all text was read, no passage and no secret has a P(z) of the threshold or more, and the
    vocabulary has no private pieces."""
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
    min_notes: int = MIN_NOTES
    private_pieces: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Pieces of the vocabulary that stand in fewer than `min_notes` notes and in no public text: `piece`, `notes`."""
    secrets: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """The secrets in the notes (see `find_secrets`): `path`, `line`, `kind`, `p`, `log_p`, and `recited`, whether P(z)
    of the secret, after the text before it, is at or over the threshold."""
    shortfalls: list[str] = dataclasses.field(default_factory=list)
    """Why it does not clear the model for an export: looser settings than the default, or text of the training that
    was not among the audited text."""
    weights: str = ""
    """`weights_digest` of the model: the verdict holds for these weights only."""


@dataclass(frozen=True)
class AuditRequest:
    """What to audit, and how strictly."""

    settings: ExtractionSettings
    notes: Path | None = None
    """A folder or file (see `read_path`), to which the conversations of the run are added: what it was taught to say
    about notes is not in their folder. None: the run's own data (see `read_run`)."""
    threshold: float = THRESHOLD
    control: Path | None = None
    """A folder of notes that were never trained on."""
    passages: int = 10
    """Most passages to list."""
    encoding_errors: str | None = None
    exact: bool = True
    """Score every passage to its end; otherwise only until P(z) is far below the threshold, with the same verdict."""
    adapt_stride: bool = False
    """Increase the stride of the settings for much text (see `adapted_stride`)."""
    sample: int | None = None
    """Audit only so many texts and so many conversations, chosen evenly, and fewer if they have more than
    `most_windows` windows at the largest stride; the verdict is then never SAFE."""
    most_windows: int = MOST_WINDOWS
    min_notes: int = MIN_NOTES
    """Pieces of the vocabulary that stand in fewer notes are private, unless a public text has them."""

    def __post_init__(self) -> None:
        check_threshold(self.threshold)

    @property
    def limit(self) -> float:
        """The logarithm of the threshold."""
        return math.log(self.threshold)

    @property
    def floor(self) -> float | None:
        """A log P(z) below this is an upper bound; None: all are exact."""
        return None if self.exact else math.log(self.threshold * MARGIN)


class AuditResult(NamedTuple):
    """A verdict and the measurements behind it."""

    verdict: AuditVerdict
    measurements: Sequence[Measurement]
    skipped_controls: list[str]
    """Notes of the control folder that were trained on."""


def audit_notes(loaded: LoadedRun, request: AuditRequest, *, progress: ProgressBar = no_progress) -> AuditResult:
    """Measure every text of a folder or file and judge whether the checkpoint is safe to publish.

    Controls are the held-out documents and those of the folder `control`. After Ctrl-C the result is partial. Raises
    ValueError for nothing to judge, and for controls that were all trained on.
    """
    shortfalls: list[str] = []
    not_audited: list[str] = []
    with progress("reading"):
        own = read_run(loaded)
        found = own
        if request.notes is not None:
            found = read_path(request.notes, loaded, request.encoding_errors)
            chats = read_run(loaded, only_chats=True)
            found.texts.extend(chats.texts)
            found.trained_replies |= chats.trained_replies
            found.skipped.extend(chats.skipped)
            uncovered = _not_covered(own, found.texts, request.notes)
            shortfalls = [f"{entry.name}: {entry.reason}" for entry in uncovered]
            known = {entry.reason for entry in found.skipped}
            found.skipped.extend(entry for entry in uncovered if entry.reason not in known)
        private, unjudged = _judge_vocabulary(loaded, [*own.texts, *found.texts], own, request.min_notes)
        sizes = {text.name: len(text_bytes(loaded.tokenizer, text.ids).strip()) for text in found.texts}
        audited = [text for text in found.texts if sizes[text.name] >= MIN_BYTES]
        if not audited:
            raise ValueError(_nothing_to_audit(request.notes, found))
        if request.sample is not None:
            all_of_them = len(audited)
            audited = _sample(audited, request.sample, request.most_windows * _largest_stride(request.settings))
            if len(audited) < all_of_them:
                not_audited.append(f"a sample of {all_of_them:,} documents: audit all of them")
        not_audited += [unjudged] if unjudged else []
        status, unknown_because = membership(loaded, {text.name: text.ids for text in audited})
        for text in audited:
            if text.kind == CHAT and replies_of(text.ids, loaded) & found.trained_replies:
                status[text.name] = TRAINED  # another question, with the same reply
        controls, skipped = _read_controls(loaded, request)
    settings = replace(request.settings, stride=min(request.settings.stride, request.settings.suffix))
    if request.adapt_stride:
        settings = replace(settings, stride=adapted_stride(audited, settings, request.most_windows))
    request = replace(request, settings=settings)
    plans = [_plan(text, status[text.name], settings, loaded) for text in audited]
    control_plans = [_plan(text, CONTROL, settings, loaded) for text in controls]
    with progress("auditing") as show:
        measured, interrupted = _measure(loaded, [*plans, *control_plans], request, show)
    secrets = [] if interrupted else _judge_secrets(loaded, request, audited, plans)
    base, base_problem = (None, "") if interrupted else load_base(loaded)
    if base is not None:
        with progress("auditing the base") as show:
            measured = with_base(measured, base, least=request.floor, progress=show)
    verdict = judge(
        loaded,
        request,
        measured,
        found,
        planned=sum(len(plan.spans) for plan in plans),
        not_audited=not_audited,
        unknown_because=unknown_because,
        too_short=[name for name, size in sizes.items() if size < MIN_BYTES],
        base="" if base is None else base.name,
        base_problem=base_problem,
        interrupted=interrupted,
        private_pieces=private,
        secrets=secrets,
        shortfalls=[*shortfalls, *_looser(request, audited, loaded.model.config.T)],
    )
    return AuditResult(verdict, measured, skipped)


def counts_text(verdict: Mapping[str, Any]) -> str:
    """How many passages of an audit, given its fields, are at or over the threshold, and of how many."""
    number = verdict["windows_over"]
    over = f"{plural(number, 'passage')} of {plural(verdict['notes_exposed'], 'document')}" if number else "no passage"
    measured = f"{plural(verdict['windows'], 'passage')} in {plural(verdict['notes_audited'], 'document')}"
    has = "has" if number <= 1 else "have"
    return f"{over} {has} a P(z) of {verdict['threshold']:g} or more, of {measured}"


def findings(verdict: Mapping[str, Any]) -> list[str]:
    """What makes a model NOT SAFE, given the fields of its audit; empty if nothing was found."""
    limit, over = f"P(z) >= {verdict['threshold']:g}", verdict["windows_over"]
    secrets, pieces = verdict.get("secrets", ()), verdict.get("private_pieces", ())
    found, recited = list[str](), sum(secret["recited"] for secret in secrets)
    if over:
        found.append(f"{plural(over, 'passage')} of {plural(verdict['notes_exposed'], 'document')} have {limit}")
    if recited:
        found.append(f"{recited:,} of {plural(len(secrets), 'secret')} in the notes have {limit}")
    if pieces:
        found.append(
            f"{plural(len(pieces), 'piece')} of the vocabulary stand in fewer than {verdict['min_notes']} notes and in "
            "no public text"
        )
    return found


def verdict_lines(verdict: Mapping[str, Any]) -> list[str]:
    """The verdict of an audit, given its fields, in sentences: what was measured, and what was not."""
    limit, documents = f"P(z) >= {verdict['threshold']:g}", plural(verdict["notes_audited"], "document")
    nothing = f"no verbatim passage found ({limit}) in {documents}"
    if verdict["verdict"] == SAFE:
        return [
            f"SAFE: {nothing}.",
            "This does not cover paraphrases, secrets shorter than a passage, or text that was not audited.",
        ]
    if verdict["verdict"] == NOT_JUDGED:
        return [f"NOT JUDGED: {nothing}, but this was not audited:", *verdict["because"]]
    often = f": each passage occurs once in {1 / verdict['threshold']:,.0f} samples or more often"
    often = often if verdict["windows_over"] else ""
    rest = ["And this was not audited:", *verdict["because"]] if verdict.get("because") else []
    return [f"NOT SAFE TO PUBLISH: {'; '.join(findings(verdict))}{often}.", *rest]


def passage_origin(passage: Mapping[str, Any], unit: str) -> str:
    """Where a passage of an audit comes from: the note and line, where they are known."""
    document = passage["document"]
    if "note" not in passage:
        return f"{document}, from {unit} {max(passage['start'], 0):,}"
    learned = (
        "" if document.partition(": ")[2] == passage["note"] or document == passage["note"] else f", in {document}"
    )
    return f"{passage['note']}, line {passage['line']:,}{learned}"


def _looser(request: AuditRequest, texts: Sequence[AuditText], T: int) -> list[str]:
    """Return the settings that are less strict than the default, each with its limit."""
    settings, default = request.settings, ExtractionSettings.fitting(T, stride=SMALLEST_STRIDE, greedy=0)
    found = []
    if request.threshold > THRESHOLD:
        found.append(f"--threshold {request.threshold:g} is above {THRESHOLD:g}")
    if (settings.window, settings.prompt) != (default.window, default.prompt):  # a longer suffix is less probable
        found.append(
            f"--window {settings.window} --prompt {settings.prompt} are not {default.window} and {default.prompt}"
        )
    stride = adapted_stride(texts, default)
    if settings.stride > stride:
        found.append(f"--stride {settings.stride} is above {stride}")
    if request.min_notes < MIN_NOTES:
        found.append(f"--min-notes {request.min_notes} is below {MIN_NOTES}")
    return found


def _not_covered(own: AuditInput, texts: Sequence[AuditText], notes: Path) -> list[NotRead]:
    """Return what of the run's own data is unknown, or not among some texts: compared by content, not by path."""
    problems = [entry._replace(remedy="restore it") for entry in own.skipped if entry.missing]
    keys = {text.ids.tobytes() for text in texts}
    rest = [text for text in own.texts if text.ids.tobytes() not in keys]
    # The end of a token cache may cut its last text.
    rest = [text for text in rest if not any(np.array_equal(text.ids, t.ids[: len(text.ids)]) for t in texts)]
    if rest:
        reason = f"{plural(len(rest), 'document')} of {len(own.texts):,} are not in {notes}, such as {rest[0].name}"
        problems.append(NotRead("the run's own data", reason, True, 0, "audit it without --notes"))
    return problems


def check_threshold(threshold: float) -> None:
    """Raise ValueError for a threshold that is not a probability above 0."""
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"--threshold must be a probability above 0 and at most 1, got {threshold}")


def _sample(texts: Sequence[AuditText], number: int, most_tokens: int) -> list[AuditText]:
    """Return so many texts and so many conversations, chosen evenly; only one of each if they have too many tokens."""
    by_kind = [[text for text in texts if (text.kind == CHAT) == chat] for chat in (False, True)]
    while True:
        numbers = [min(len(kind), number) for kind in by_kind]
        chosen = [kind[i * len(kind) // n] for kind, n in zip(by_kind, numbers, strict=True) for i in range(n)]
        if number <= 1 or sum(len(text.ids) for text in chosen) <= most_tokens:
            return chosen
        number //= 2


def _largest_stride(settings: ExtractionSettings) -> int:
    """Return half a suffix: see `adapted_stride`."""
    return max(SMALLEST_STRIDE, settings.suffix // 2)


def adapted_stride(texts: Sequence[AuditText], settings: ExtractionSettings, most_windows: int = MOST_WINDOWS) -> int:
    """Return the stride for some texts: 5 for few of them, more for at most `most_windows` windows.

    At most half a suffix: then every token is in the suffix of two windows, and a recited passage of one and a quarter
    windows contains a whole one. Texts that fit into a window do not count: they are one window at any stride.
    """
    tokens = sum(len(text.ids) for text in texts if len(text.ids) > settings.window)
    return min(max(SMALLEST_STRIDE, math.ceil(tokens / most_windows)), _largest_stride(settings))


def _nothing_to_audit(notes: Path | None, found: AuditInput) -> str:
    reasons = "; ".join(f"{entry.name}: {entry.reason}" for entry in found.skipped[:5])
    where = "in the run's own data: name it with --notes" if notes is None else f"in {notes}"
    return f"no text of at least {MIN_BYTES} bytes to audit {where}" + (f" (skipped {reasons})" if reasons else "")


def _read_controls(loaded: LoadedRun, request: AuditRequest) -> tuple[list[AuditText], list[str]]:
    """Return (controls from a folder, names of its notes that were trained on and therefore skipped)."""
    folder = request.control
    if folder is None:
        return [], []
    found = read_path(folder, loaded, request.encoding_errors)
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
    spans: np.ndarray
    """(N, 3) int64: start, cut and end of each window, as in `Measurement`."""
    edges: dict[int, bool]
    """Index of a window at an edge of a text -> whether it is at the start (else at the end)."""


def _plan(text: AuditText, status: str, settings: ExtractionSettings, loaded: LoadedRun) -> _Plan:
    """Return the windows of a text: every token is in the suffix of at least one.

    Of a conversation over tokens, every token of the replies, from which alone a model learns. The first tokens of a
    text follow what precedes a document in training, the separator. The edges are the first and the last suffix of a
    text, or of each reply.
    """
    ids, length, suffix = text.ids, len(text.ids), settings.suffix
    if isinstance(loaded.tokenizer, ByteTokenizer):
        before = np.frombuffer((DELIMITER if text.kind == CHAT else "\n\n").encode(), dtype=np.uint8).astype(np.int64)
    else:
        before = np.array([loaded.tokenizer.special_token_ids()["eot"]], dtype=np.int64)
    opening = list(loaded.tokenizer.document_start)  # a text of a tokenizer of others begins with it
    first = len(opening) if ids[: len(opening)].tolist() == opening else 0
    first = max(first, int(np.argmax(token_sizes(loaded.tokenizer)[ids] > 0)))  # after the role of the first turn
    first = min(first, length - 1)
    replies = reply_spans(ids, loaded) if text.kind == CHAT else []
    only_replies = bool(replies) and not isinstance(loaded.tokenizer, ByteTokenizer)  # of a chat, that is learned
    spans, edges = list[tuple[int, int, int]](), dict[int, bool]()

    def add(cut: int, end: int, tokens: int) -> None:
        """Add a window of at most so many tokens."""
        spans.append((max(-len(before), end - min(tokens, loaded.model.config.T + 1)), cut, end))

    if length > settings.window or (length >= MIN_TOKENS and not only_replies):
        plan = WindowPlan.of(length, settings)
        step = max(settings.stride, suffix // 2) if length > settings.window else suffix
        for cut in range(first, 0 if only_replies else plan.prompt, step):
            if cut > first or replies:
                add(cut, min(cut + suffix, length), settings.window + len(before))
        spans += map(tuple, plan.spans.tolist())
    for begin, end in replies or [(first, length)]:
        edges[len(spans)] = True
        add(begin, min(begin + suffix, end), 2 * settings.window)
        if end - begin > suffix:
            edges[len(spans)] = False
            add(end - suffix, end, settings.window)
    control = status in (HELD_OUT, CONTROL)
    document = Document(text.name, ids, control=control, source=status, before=before, note=text.note)
    return _Plan(document, np.array(spans, dtype=np.int64), edges)


def _best_passage(tokens: np.ndarray, limit: float, suffix: int, *, at_start: bool) -> tuple[int, int]:
    """Return [begin, end) of the passage that the model knows best, given the log-probability of each token.

    A header or a signature is shorter than a suffix, and unknown text beside it hides it. So a passage of at least
    MIN_TOKENS tokens counts if its P(z) is over the threshold and it begins with the text (ends with it); or if each of
    its tokens is, on average, as probable as those of a suffix at the threshold. Without such a passage, all of it.
    """
    sums = np.append(0.0, np.cumsum(tokens))
    begins, ends = np.arange(len(sums))[:, None], np.arange(len(sums))[None, :]
    log_p, lengths = sums[None, :] - sums[:, None], ends - begins
    gain = log_p - lengths * limit / suffix
    at_edge = begins == 0 if at_start else ends == len(tokens)
    known = (lengths >= min(MIN_TOKENS, len(tokens))) & (np.where(at_edge, log_p - limit, gain) >= 0)
    if not known.any():
        return 0, len(tokens)
    known = known & at_edge if (known & at_edge).any() else known
    begin, end = np.unravel_index(int(np.argmax(np.where(known, gain, -np.inf))), gain.shape)
    return int(begin), int(end)


def _measure_edges(
    loaded: LoadedRun, plans: Sequence[_Plan], request: AuditRequest, count: CountRows
) -> dict[tuple[int, int], float]:
    """Score the windows at the edges, and reduce them to the best passage. Return {(plan, window): log P(z)}.

    With learned positions, at all offsets in the frame; see `scan_rows`.
    """
    model, settings = loaded.model, request.settings
    where = [(number, index) for number, plan in enumerate(plans) for index in plan.edges]
    spans = [plans[number].spans[index].tolist() for number, index in where]
    rows = [plans[number].document.row(span[0], span[2]) for (number, _), span in zip(where, spans, strict=True)]
    prompts = np.array([cut - start for start, cut, _ in spans], dtype=np.int64)
    found: dict[tuple[int, int], float] = {}
    for offset in range(model.config.T if model.config.positions == "learned" else 1):
        fitting = [i for i, row in enumerate(rows) if offset + len(row) - 1 <= model.config.T]
        tokens: dict[int, np.ndarray] = {}
        some = [rows[i] for i in fitting]
        score_rows(model, some, prompts[fitting], batch=settings.batch, offset=offset, count=count, tokens=tokens)
        for n, i in enumerate(fitting):
            (number, index), (_, cut, end) = where[i], spans[i]
            begin, stop = _best_passage(tokens[n], request.limit, settings.suffix, at_start=plans[number].edges[index])
            text = text_bytes(loaded.tokenizer, plans[number].document.ids[cut + begin : cut + stop])
            if sum(map(str.isalnum, text.decode("utf-8", "replace"))) < MIN_TOKENS // 2:
                begin, stop = 0, end - cut  # a line of dashes, or an indentation: no passage
            log_p = float(tokens[n][begin:stop].sum())
            if log_p > found.get((number, index), -math.inf):
                found[number, index] = log_p
                plans[number].spans[index, 1:] = cut + begin, cut + stop
    return found


def _measure(
    loaded: LoadedRun, plans: Sequence[_Plan], request: AuditRequest, progress: Progress
) -> tuple[list[Measurement], bool]:
    """Return (the measurements, whether Ctrl-C ended them early: the other windows are then dropped).

    Windows of all documents share batches. Loss is measured for a report only: see `audit_report`.
    """
    batch = request.settings.batch
    check_documents(loaded.model, [plan.document for plan in plans], loaded.tokenizer)
    windows = [(n, i) for n, plan in enumerate(plans) for i in range(len(plan.spans))]
    inner = [k for k, (n, i) in enumerate(windows) if i not in plans[n].edges]
    spans = [plans[n].spans[i].tolist() for n, i in windows]
    rows = [plans[windows[k][0]].document.row(spans[k][0], spans[k][2]) for k in inner]
    prompts = np.array([spans[k][1] - spans[k][0] for k in inner], dtype=np.int64)
    log_p, done, interrupted = np.full(len(windows), np.nan), 0, False

    def count(number: int) -> None:
        nonlocal done
        done += number
        progress(min(done, len(windows)), len(windows))

    try:
        for indices, values in scan_rows(loaded.model, rows, prompts, floor=request.floor, batch=batch):
            log_p[np.array(inner)[indices]] = values
            count(len(indices))
        edges = _measure_edges(loaded, plans, request, count)
        log_p = np.array([edges.get(window, value) for window, value in zip(windows, log_p.tolist(), strict=True)])
    except KeyboardInterrupt:
        if not done:
            raise
        interrupted = True
    measured = []
    for plan, values in zip(plans, np.split(log_p, np.cumsum([len(p.spans) for p in plans])[:-1]), strict=True):
        known = ~np.isnan(values)
        if known.any():
            spans, values = plan.spans[known], values[known]
            measured.append(Measurement.of(plan.document, request.settings, loaded.tokenizer, spans, values))
    return measured, interrupted


def _judge_vocabulary(
    loaded: LoadedRun, texts: Sequence[AuditText], own: AuditInput, min_notes: int
) -> tuple[list[dict[str, Any]], str]:
    """Return (the private pieces of a vocabulary that was learned here, what cannot be said of it).

    Conversations that `notes` wrote repeat the text of a note, and are no other notes.
    """
    tokenizer = loaded.tokenizer
    if not isinstance(tokenizer, Tokenizer):
        return [], ""
    different = {text.ids.tobytes(): text.ids for text in texts if not text.made}
    decoded = (text_bytes(tokenizer, ids).decode("utf-8", "replace") for ids in different.values())
    found = set(private_pieces(tokenizer, decoded, public_texts(loaded), min_notes=min_notes).values())
    known = sorted((piece for piece in found if piece.notes), key=lambda piece: (piece.notes, piece.text))
    unknown = sorted(piece for piece in found if not piece.notes)
    problem = ""
    if unknown and any(entry.missing for entry in own.skipped):
        problem = f"{plural(len(unknown), 'piece')} of the vocabulary, which may stand in text that was not read"
        unknown = []
    return [{"piece": piece.text, "notes": piece.notes} for piece in [*unknown, *known]], problem


def _judge_secrets(
    loaded: LoadedRun, request: AuditRequest, texts: Sequence[AuditText], plans: Sequence[_Plan]
) -> list[dict[str, Any]]:
    """Return the secrets in the notes, the most probable first, without the secrets; see `AuditVerdict.secrets`."""
    found, rows, prompts = list[dict[str, Any]](), list[np.ndarray](), list[int]()
    sizes, most = token_sizes(loaded.tokenizer), loaded.model.config.T + 1
    for kind, document in zip((text.kind for text in texts), (plan.document for plan in plans), strict=True):
        if kind == CHAT or len(document.ids) < 2:
            continue
        text = text_bytes(loaded.tokenizer, document.ids).decode("utf-8", "surrogateescape")
        ends = np.cumsum(sizes[document.ids])
        for secret in find_secrets(text, document.note or document.name):
            offsets = [len(text[:at].encode("utf-8", "surrogateescape")) for at in (secret.start, secret.end - 1)]
            first, last = np.searchsorted(ends, offsets, side="right").tolist()
            stop = min(last + 1, first + min(SECRET_TOKENS, most - 1))
            start = max(-len(document.before), first - TOKENS_BEFORE, stop - most)
            found.append({"path": secret.path, "line": secret.line, "kind": secret.kind})
            rows.append(document.row(start, stop))
            prompts.append(first - start)
    scores = score_rows(loaded.model, rows, np.array(prompts, dtype=np.int64))[0].tolist() if rows else []
    for entry, log_p in zip(found, scores, strict=True):
        entry |= {"log_p": log_p, "p": math.exp(log_p), "recited": log_p >= request.limit}
    return sorted(found, key=lambda secret: -secret["log_p"])


# --- the verdict -------------------------------------------------------------------------------------


def judge(
    loaded: LoadedRun,
    request: AuditRequest,
    measured: Sequence[Measurement],
    found: AuditInput | None = None,
    *,
    planned: int | None = None,
    not_audited: Sequence[str] = (),
    **known: Any,
) -> AuditVerdict:
    """Return the verdict on measured documents.

    Held-out documents are judged too (one may be in the training text under another name); those of a control folder
    only show what text that was never trained on reaches. `planned` is the number of windows that were to be measured,
    `known` are fields of the verdict.
    """
    found, settings, limit = found or AuditInput(), request.settings, request.limit
    audited = [m for m in measured if m.document.source != CONTROL]
    controls = [m for m in measured if m.document.control]
    exposed = sum(float(m.log_p.max()) >= limit for m in audited)
    windows = sum(len(m.log_p) for m in audited)
    planned = windows if planned is None else planned
    because = [*not_audited, *_not_audited(found.skipped)]
    if windows < planned:
        because.insert(0, f"interrupted after {windows:,} of {planned:,} passages: run it again to the end")
    unsafe = exposed or known.get("private_pieces") or any(secret["recited"] for secret in known.get("secrets", ()))
    verdict = NOT_SAFE if unsafe else NOT_JUDGED if because else SAFE
    floor = None if request.floor is None else math.exp(request.floor)
    passages = top_passages(audited, loaded.tokenizer, most=request.passages, least=floor or 0.0)
    return AuditVerdict(
        verdict=verdict,
        safe=verdict == SAFE,
        because=because,
        threshold=request.threshold,
        unit="byte" if isinstance(loaded.tokenizer, ByteTokenizer) else "token",
        step=loaded.step,
        window=settings.window,
        prompt=settings.prompt,
        stride=settings.stride,
        floor=floor,
        read=dict(Counter(text.kind for text in found.texts)),
        bytes_read=int(sum(token_sizes(loaded.tokenizer)[text.ids].sum() for text in found.texts)),
        skipped=[entry._asdict() for entry in found.skipped],
        notes_audited=len(audited),
        notes_exposed=exposed,
        windows=windows,
        windows_planned=planned,
        windows_over=int(sum((m.log_p >= limit).sum() for m in audited)),
        statuses=dict(Counter(m.document.source for m in measured)),
        controls=len(controls),
        control_max_log_p=max((float(m.log_p.max()) for m in controls), default=None),
        passages=with_origins(passages, [m.document for m in audited], loaded.tokenizer),
        documents=[_row(m, limit) for m in sorted(measured, key=lambda m: -float(m.log_p.max()))],
        checkpoint=str(loaded.path),
        notes="" if request.notes is None else str(request.notes),
        windows_known=sum(_known(m, limit) for m in audited),
        min_notes=request.min_notes,
        weights=weights_digest(loaded.model),
        **known,
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


def audit_report(
    loaded: LoadedRun, measurements: Sequence[Measurement], *, passages: int, verdict: AuditVerdict | None = None
) -> dict[str, Any]:
    """Return the report dict (see `build_report`) of an exact audit, with at least 20 passages.

    With a verdict, `audit` has its lines, threshold, private pieces and secrets.
    """
    base, _ = load_base(loaded)

    def score(model: GPT, m: Measurement) -> Score:
        return score_stream(model, m.document.ids, token_sizes=token_sizes(loaded.tokenizer))

    scored = [
        replace(m, score=score(loaded.model, m), base_score=None if base is None else score(base.model, m))
        for m in measurements
    ]
    report = build_report(
        loaded,
        scored,
        title=f"Audit of {loaded.path.name}",
        base="" if base is None else base.name,
        passages=max(passages, 20),
        strips=STRIPS,
        levels=LEVELS if verdict is None else sorted({*LEVELS, verdict.threshold}),
    )
    with_origins(report["passages"], [m.document for m in measurements], loaded.tokenizer)
    if verdict is not None:
        fields = ("verdict", "threshold", "min_notes", "private_pieces", "secrets")
        report["audit"] = {name: getattr(verdict, name) for name in fields}
        report["audit"]["lines"] = verdict_lines(dataclasses.asdict(verdict))
    return report
