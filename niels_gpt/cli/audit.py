"""`niels-gpt audit`: which passages of my text can this checkpoint recite?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from niels_gpt.cli.options import (
    Count,
    DeviceOption,
    EncodingOption,
    JsonOption,
    OptionalPath,
    PromptOption,
    TokenizerOption,
    TrainedRunArgument,
    WindowOption,
    input_option,
    output_option,
)

if TYPE_CHECKING:
    from niels_gpt.memorization.audit import AuditVerdict

NOT_SAFE = 3
"""Exit code if some passage can be recited; 1 is an error, 2 a wrong option."""
NOT_JUDGED = 4
"""Exit code if none was found, but a part of the text was not audited."""


def audit(
    run: TrainedRunArgument = None,
    notes: Annotated[
        OptionalPath,
        input_option("--notes", "The folder or file to look for; default: the run's own notes and sources."),
    ] = None,
    control: Annotated[
        OptionalPath,
        input_option("--control", "A folder of notes that were never trained on, in addition to held-out ones."),
    ] = None,
    threshold: Annotated[
        float, typer.Option("--threshold", help="A passage with this P(z) or more is not safe to publish.")
    ] = 0.001,
    window: WindowOption = None,
    prompt: PromptOption = None,
    stride: Annotated[
        Count,
        typer.Option(
            "--stride",
            min=1,
            help="Tokens between neighboring passages, at most a suffix; default: 5, more for much text.",
        ),
    ] = None,
    min_notes: Annotated[
        int,
        typer.Option(
            "--min-notes",
            min=1,
            help="A piece of the vocabulary that fewer notes have, and no public text, is private.",
        ),
    ] = 3,
    top: Annotated[int, typer.Option("--top", min=1, help="Passages to list.")] = 10,
    out: Annotated[
        OptionalPath,
        output_option(
            "--out", "Folder for a report with a page and tables; slower, as all P(z) are exact.", folder=True
        ),
    ] = None,
    encoding_errors: EncodingOption = None,
    device: DeviceOption = "auto",
    tokenizer: TokenizerOption = None,
    json: JsonOption = False,
) -> None:
    """List the passages of my notes that a checkpoint can recite.

    Each passage is split into a prompt and a suffix; P(z) is the probability that the model continues the prompt with
    exactly the suffix. The secrets that `notes check` finds are judged one by one, and so are the pieces of a
    vocabulary that was learned from the notes. Exit code 0: all text was read, and no verbatim passage, secret or
    private piece was found; 3: some were; 4: none was, but a part of the text was not audited.
    """
    from dataclasses import asdict
    from json import dumps

    from niels_gpt.cli.run_app import INTERRUPTED
    from niels_gpt.export import audit_gate
    from niels_gpt.memorization import audit as library
    from niels_gpt.memorization.measure import ExtractionSettings
    from niels_gpt.report.memorization_report import write_report
    from niels_gpt.runs.loading import load_run
    from niels_gpt.system import files
    from niels_gpt.system.console import first_few
    from niels_gpt.system.progress import progress_bar

    library.check_threshold(threshold)
    loaded = load_run(run, None, device, tokenizer)
    settings = ExtractionSettings.fitting(
        loaded.model.config.T, window=window, prompt=prompt, stride=stride or library.SMALLEST_STRIDE, greedy=0
    )
    request = library.AuditRequest(
        settings,
        notes,
        threshold,
        control,
        passages=top,
        encoding_errors=encoding_errors,
        exact=out is not None,
        adapt_stride=stride is None,
        min_notes=min_notes,
    )
    result = library.audit_notes(loaded, request, progress=lambda title: progress_bar(title, "passages"))
    verdict = result.verdict
    if result.skipped_controls:
        typer.echo(f"skipped as controls, because they were trained on: {first_few(result.skipped_controls)}", err=True)
    if out is not None:
        if not verdict.interrupted:
            report = library.audit_report(loaded, result.measurements, passages=top, verdict=verdict)
            write_report(out, report, result.measurements)
        out.mkdir(parents=True, exist_ok=True)
        files.write_json(out / "audit.json", asdict(verdict))
    if json:
        print(dumps(asdict(verdict), indent=2, ensure_ascii=False))
    else:
        show_verdict(verdict, out)
    rejected = audit_gate.remember(loaded, verdict, out)
    if rejected and not verdict.interrupted:
        typer.echo(rejected, err=json)
    if verdict.interrupted:
        raise typer.Exit(INTERRUPTED)
    code = {library.SAFE: 0, library.NOT_SAFE: NOT_SAFE, library.NOT_JUDGED: NOT_JUDGED}[verdict.verdict]
    if code:
        raise typer.Exit(code)


def show_verdict(verdict: AuditVerdict, out: Path | None) -> None:
    """Print what was read, the ranked passages, the secrets, the vocabulary, the controls, and the verdict."""
    from dataclasses import asdict

    from niels_gpt.memorization.audit import passage_origin, verdict_lines
    from niels_gpt.report.numbers import passage_probability, probability
    from niels_gpt.system.console import first_few

    print(f"{verdict.checkpoint} after {verdict.step:,} steps")
    _show_input(verdict)
    if verdict.passages:
        print("\npassages with the highest P(z)" + (", so far" if verdict.interrupted else ""))
    elif verdict.floor is not None:
        print(f"\nno passage has P(z) >= {verdict.floor:g}")
    for rank, passage in enumerate(verdict.passages, 1):
        where = passage_origin(passage, verdict.unit)
        known = f"; base {probability(passage['base_p'])}" if "base_p" in passage else ""
        if passage.get("base_p", 0.0) >= verdict.threshold:
            known += ", already known to the base"
        print(f"{rank:>3}. P(z) = {passage_probability(passage)}{known}  {where}")
        print(f"     prompt  {passage['prompt'][-70:]!r}")
        print(f"     suffix  {passage['suffix'][:70]!r}")
        if passage["also_in"]:
            print(f"     also in {first_few(passage['also_in'], 3)}")
    _show_secrets(verdict)
    _show_vocabulary(verdict)
    _show_controls(verdict)
    _show_base(verdict)
    if out is not None:
        written = "audit.json" if verdict.interrupted else "report.html, audit.json, documents.csv, windows.csv"
        print(f"report: {out}/{written}")
    first, *rest = verdict_lines(asdict(verdict))
    print(f"\n{first}")
    for line in rest:
        print(f"  {line}" if line in verdict.because else line)


def _show_secrets(verdict: AuditVerdict) -> None:
    """Print the secrets in the notes and whether they are recited; not the secrets themselves."""
    from niels_gpt.report.numbers import passage_probability

    if verdict.secrets:
        print("\nsecrets in the notes, and the probability of each after the text before it")
    for secret in verdict.secrets:
        recited = "recited" if secret["recited"] else "not recited"
        print(f"  {secret['path']}:{secret['line']}  {secret['kind']}: {recited}, P(z) = {passage_probability(secret)}")


def _show_vocabulary(verdict: AuditVerdict) -> None:
    """Print the pieces of the vocabulary that stand in few notes."""
    from niels_gpt.system.console import first_few, plural

    pieces = [f"{piece['piece']!r} ({plural(piece['notes'], 'note')})" for piece in verdict.private_pieces]
    if pieces:
        print(f"\npieces of the vocabulary that few notes have, and no public text: {first_few(pieces, 20)}")
        print("whoever has the tokenizer can read them; a tokenizer that is trained again does not have them")


def _show_input(verdict: AuditVerdict) -> None:
    """Print what was read, and what was skipped and why."""
    from niels_gpt.memorization.audit import MIN_BYTES
    from niels_gpt.memorization.membership import UNKNOWN
    from niels_gpt.system.console import first_few, plural, short_number

    kinds = ", ".join(plural(number, kind) for kind, number in verdict.read.items())
    print(f"read {kinds}, {short_number(verdict.bytes_read)}B, {_where(verdict)}")
    by_reason: dict[str, list[tuple[str, int]]] = {}
    for entry in verdict.skipped:
        by_reason.setdefault(entry["reason"], []).append((entry["name"], entry["files"]))
    for reason, entries in by_reason.items():
        number = sum(files for _, files in entries)
        counted = f" {plural(number, 'file')}" if number > len(entries) else ""
        print(f"skipped{counted} {first_few([name for name, _ in entries])}: {reason}")
    if verdict.too_short:
        short = plural(len(verdict.too_short), "document")
        print(f"{short} of fewer than {MIN_BYTES} bytes not judged: {first_few(verdict.too_short)}")
    status = ", ".join(f"{number:,} {name}" for name, number in verdict.statuses.items())
    done = f"{verdict.windows:,} of " if verdict.interrupted else ""
    print(
        f"{plural(verdict.notes_audited, 'document')} audited ({status}), "
        f"{done}{plural(verdict.windows_planned, 'passage')} of {verdict.window} {verdict.unit}s, {verdict.prompt} of "
        f"them given, one every {plural(verdict.stride, verdict.unit)}"
    )
    if UNKNOWN in verdict.statuses:
        print(f"some are {UNKNOWN}: {verdict.unknown_because}")


def _where(verdict: AuditVerdict) -> str:
    return f"from {verdict.notes}" if verdict.notes else "the run's own data"


def _show_controls(verdict: AuditVerdict) -> None:
    """Print what text reaches that was never trained on."""
    import math

    from niels_gpt.report.numbers import one_in, probability
    from niels_gpt.system.console import plural

    highest = verdict.control_max_log_p
    if highest is None:
        print("\nno held-out notes to compare with: --control FOLDER adds notes that were never trained on")
        return
    bound = verdict.floor is not None and highest < math.log(verdict.floor)
    reached = f"below {verdict.floor:g}" if bound else f"{probability(math.exp(highest))} ({one_in(highest)})"
    print(f"\ncontrols, never trained on: {plural(verdict.controls, 'document')}; their highest P(z) is {reached}")
    if highest >= math.log(verdict.threshold):
        print("that is over the threshold too: such text can be guessed, or was trained on as a part of other notes")


def _show_base(verdict: AuditVerdict) -> None:
    """Print which passages were known before the fine-tuning."""
    if verdict.base_problem:
        print(f"not compared with the base: {verdict.base_problem}; restore it to see what is new")
    elif verdict.base and not verdict.windows_over:
        print(f"compared with the base {verdict.base}")
    elif verdict.base:
        new = verdict.windows_over - verdict.windows_known
        print(
            f"base: {verdict.base}; of {verdict.windows_over:,} passages over the threshold it already knows "
            f"{verdict.windows_known:,}, and {new:,} were learned in the fine-tuning"
        )
