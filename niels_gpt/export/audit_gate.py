"""What must be known of a model before it leaves this machine: was it trained on private text, and what does it recite?

A model that was trained on the user's own text is exported if an audit of exactly these weights says SAFE: of all text
that it was trained on, with settings as strict as the default. Otherwise the export is refused, with the exit codes of
`niels-gpt audit`, unless the user insists (`--anyway`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.data.registry import is_private
from niels_gpt.memorization.audit import (
    LAST_AUDIT,
    NOT_JUDGED,
    NOT_SAFE,
    SAFE,
    SMALLEST_STRIDE,
    AuditRequest,
    AuditVerdict,
    audit_notes,
    counts_text,
    findings,
)
from niels_gpt.memorization.measure import ExtractionSettings
from niels_gpt.memorization.membership import run_history, source_names
from niels_gpt.memorization.progress import ProgressBar, no_progress
from niels_gpt.model.digest import weights_digest
from niels_gpt.pretrained.public_base import public_base
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.runs.pipeline import pipeline_of
from niels_gpt.system import files
from niels_gpt.system.console import error_message, one_line, optional_write, plural
from niels_gpt.system.json_text import parse_json
from niels_gpt.system.private_files import keep_private
from niels_gpt.system.program import command
from niels_gpt.training.tasks.registry import licence_in

FOLDER = "export-audit"
"""Folder in the run for the verdict of an audit that decides whether it may be exported."""
_ORDER = (SAFE, NOT_JUDGED, NOT_SAFE)


@dataclass(frozen=True)
class Clearance:
    """What is known of a model before it is exported."""

    private: list[str]
    """Names of the sources with the user's own text; of the checkpoint, if its training data is not known."""
    verdict: dict[str, Any] | None
    """The fields of the AuditVerdict of these weights that counts: the worst one; None: not audited."""
    base: str = ""
    """The public model that it is or began with; what that was trained on is not known."""
    trained: bool = True
    """Whether it was trained here; False: it was imported."""
    rejected: str = ""
    """Why a stored audit of these weights does not count; empty: there is none, or one that does."""

    @property
    def judgment(self) -> str:
        """SAFE, NOT SAFE or NOT JUDGED."""
        if self.verdict is not None:
            return str(self.verdict["verdict"])
        return NOT_JUDGED if self.private else SAFE

    def sentence(self) -> str:
        """What a model card says of it."""
        if self.verdict is None:
            if self.private:
                return "Not audited. It was trained on private text, and may recite it."
            if not self.base:
                return "Not audited. It was trained on public text only."
            unknown = f"What {self.base} was trained on is not recorded here"
            return f"Not audited. {unknown}" + ("; after that, public text only." if self.trained else ".")
        return (
            f"{self.verdict['verdict']}: {counts_text(self.verdict)} of the training text."
            f"{_known_before(self.verdict)}{_vocabulary(self.verdict)} P(z) is the probability that the model, given "
            "the first half of a passage, continues with exactly the second half. Paraphrases and short secrets are "
            "not covered."
        )


def check(loaded: LoadedRun) -> Clearance:
    """Return what is known of a model: the private sources of its runs, and stored audits of these weights."""
    base = public_base(loaded.home)
    name = "" if base is None else base.name
    verdict, rejected = _stored(loaded)
    return Clearance(private_sources(loaded), verdict, base=name, trained=not _untrained(loaded), rejected=rejected)


def private_sources(loaded: LoadedRun) -> list[str]:
    """Return the sources of the user's own text that a model was trained on, in its run and the runs before.

    An imported model has none of them, unless it is an export of ours that no audit had cleared: then its name. If the
    record of where it comes from is damaged, it may be one: then that file is named.
    """
    base = public_base(loaded.home)
    imported: list[str] = []
    if base is not None and base.private_text:
        imported.append(f"unknown, {base.damaged} is damaged" if base.damaged else base.name)
    if _untrained(loaded):
        return imported
    problems: list[str] = []
    found = dict[str, None].fromkeys(imported)
    for config, _ in run_history(loaded, problems):
        for name in source_names(config):
            name = name or "roam"
            if is_private(licence_in(config, name)):
                found[name] = None
    return [*found, *problems]


def _untrained(loaded: LoadedRun) -> bool:
    """Whether no text of the user was trained on: an imported model, or a checkpoint of step 0 outside a run.

    A run that ran out of memory in its first step has a checkpoint of step 0, too: the weights of the run before.
    """
    return loaded.step == 0 and (loaded.home is None or loaded.home.imported)


def stored_verdict(loaded: LoadedRun) -> dict[str, Any] | None:
    """Return the worst verdict on exactly these weights among the audits stored in the run or its pipeline.

    An audit with shortfalls clears no model, but what it found to be NOT SAFE is.
    """
    return _stored(loaded)[0]


def _stored(loaded: LoadedRun) -> tuple[dict[str, Any] | None, str]:
    """(the stored verdict, why another one does not count if there is none)."""
    found, rejected = list[dict[str, Any]](), ""
    paths = [path for folder in _folders(loaded) for path in sorted(folder.glob("*/audit.json"))]
    digest = weights_digest(loaded.model) if paths else ""
    for path in paths:
        keep_private([path])
        try:
            verdict = parse_json(path.read_bytes())
            if verdict["weights"] != digest or verdict["verdict"] not in _ORDER:
                continue
            shortfalls = _shortfalls(verdict)
        except (OSError, ValueError, LookupError, TypeError):  # of an older version, or damaged: it proves nothing
            continue
        if not shortfalls or (verdict["verdict"] == NOT_SAFE and not verdict["interrupted"]):
            found.append(verdict)
        else:
            rejected = "; ".join(shortfalls)
    return _worst(found), "" if found else rejected


def _folders(loaded: LoadedRun) -> list[Path]:
    """The run and its pipeline, in whose folders audits are stored."""
    home = loaded.home
    return [] if home is None else [folder for folder in (home.path, pipeline_of(home.path)) if folder is not None]


def _shortfalls(verdict: dict[str, Any]) -> list[str]:
    """Return why a verdict does not clear a model, whatever it says; audits of older versions do not tell."""
    early = ["it was interrupted"] if verdict["interrupted"] else []
    if "private_pieces" not in verdict:
        early.append("an older version made it, which judged neither the starts of texts nor the vocabulary")
    return early + list(verdict.get("shortfalls", []))


def _worst(verdicts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    return max(verdicts, key=lambda verdict: _ORDER.index(verdict["verdict"]), default=None)


def audit(loaded: LoadedRun, *, progress: ProgressBar = no_progress) -> AuditVerdict:
    """Audit the model on its own training text, as `niels-gpt audit` does, and store the verdict in the run."""
    if loaded.home is not None:
        measure = command("audit", loaded.home.path, "--notes", "FOLDER")
        loaded.home.check_data(f"omit --audit; {measure} measures what it knows of your notes")
    T = loaded.model.config.T
    settings = ExtractionSettings.fitting(T, stride=SMALLEST_STRIDE, greedy=0)
    verdict = audit_notes(loaded, AuditRequest(settings, exact=False, adapt_stride=True), progress=progress).verdict
    remember(loaded, verdict)
    return verdict


def remember(loaded: LoadedRun, verdict: AuditVerdict, out: Path | None = None) -> str:
    """Store a verdict in the run, for its report and export; return in one line why an export refuses it, or "".

    out: where it is written already. NOT SAFE is not replaced: text that is gone from the data is still in the weights.
    """
    fields = asdict(verdict)
    shortfalls = _shortfalls(fields)
    if loaded.home is not None and not verdict.interrupted:
        with optional_write(loaded.home.path / LAST_AUDIT):
            files.write_json(loaded.home.path / LAST_AUDIT, fields, mode=0o600)
    if loaded.home is None or shortfalls:
        if verdict.verdict == NOT_SAFE or loaded.home is None or not private_sources(loaded):
            return ""
        return f"export will not accept this audit: {'; '.join(shortfalls)}; use {command('audit', loaded.path)}"
    if out is not None and out.resolve().parent in [folder.resolve() for folder in _folders(loaded)]:
        return ""
    earlier = stored_verdict(loaded)
    if earlier is None or earlier["verdict"] != NOT_SAFE:
        folder = loaded.home.path / FOLDER
        try:
            folder.mkdir(exist_ok=True)
            files.write_json(folder / "audit.json", fields)
        except OSError as err:
            return f"warning: export will not know of this audit: {one_line(error_message(err))}"
    return ""


def with_verdict(clearance: Clearance, verdict: AuditVerdict) -> Clearance:
    """Return what is known of a model after another audit of it."""
    return replace(clearance, verdict=_worst([asdict(verdict), *([clearance.verdict] if clearance.verdict else [])]))


def needs_audit(clearance: Clearance) -> bool:
    """Whether an audit could change whether the model may be exported; an imported one has no text to audit."""
    return bool(clearance.private) and clearance.verdict is None and clearance.trained


class Refusal(NamedTuple):
    """Why a model may not be exported."""

    reason: str
    remedy: str


def refusal(clearance: Clearance, where: Path) -> Refusal | None:
    """Return why a model may not be exported; None if it may."""
    if clearance.judgment == SAFE:
        return None
    if clearance.verdict is None:
        stored = f" (a stored audit does not count: {clearance.rejected})" if clearance.rejected else ""
        remedy = f"--audit, or {command('audit', where)}, finds out what it recites"
        if not clearance.trained:
            remedy = "export the run that it comes from after an audit there"
        return Refusal(
            f"{where} was trained on private text ({', '.join(clearance.private)}) and was not audited{stored}",
            f"{remedy}, or --anyway exports it as it is",
        )
    if clearance.judgment == NOT_SAFE:
        return Refusal(
            f"{where} is NOT SAFE to publish: {'; '.join(findings(clearance.verdict))}",
            _advice(clearance.verdict),
        )
    return Refusal(
        f"{where} is NOT JUDGED: no passage was found that it recites, but a part of the text was not audited "
        f"({'; '.join(clearance.verdict['because'][:3])})",
        "--anyway exports it all the same",
    )


def _advice(verdict: dict[str, Any]) -> str:
    """Return what helps against recited passages: training again does not remove what the base knows."""
    known, over = verdict.get("windows_known", 0), verdict["windows_over"]
    if not known:
        again = "remove them from the data and train again" if over else "train again, with a new tokenizer"
        return f"{again}, or export it with --anyway"
    if known < over:
        return (
            f"the base knows {known:,} of them already, and {over - known:,} were learned here: remove those from the "
            "data and train again, from another base if the others are private too, or export it with --anyway"
        )
    base = verdict["base"]
    return (
        f"the base {base} recites all of them already, and training again does not change that: if they are public "
        "text, export it with --anyway, otherwise train from another base"
    )


def _vocabulary(verdict: dict[str, Any]) -> str:
    """Return a sentence about the private pieces of the vocabulary, or nothing; it does not name them."""
    pieces = verdict.get("private_pieces")
    return f" Its vocabulary has {plural(len(pieces), 'piece')} that few of the notes have." if pieces else ""


def _known_before(verdict: dict[str, Any]) -> str:
    """Return a sentence about what the base knew of the passages at or over the threshold, or nothing."""
    known, over = verdict.get("windows_known", 0), verdict["windows_over"]
    if not verdict.get("base") or not over:
        return ""
    return f" Of these {plural(over, 'passage')} the base knew {known:,} before; {over - known:,} were learned here."
