"""`niels-gpt audit`: which passages of my notes can this checkpoint recite?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from niels_gpt.cli.options import (
    DeviceOption,
    EncodingOption,
    JsonOption,
    OptionalPath,
    PromptOption,
    RunArgument,
    StrideOption,
    TokenizerOption,
    WindowOption,
    output_option,
)

if TYPE_CHECKING:
    from niels_gpt.memorization.audit import AuditVerdict
    from niels_gpt.memorization.measure import ExtractionSettings

NOT_SAFE = 3
"""Exit code if some passage can be recited; 1 is an error, 2 a wrong option."""


def audit(
    notes: Annotated[Path, typer.Option("--notes", is_eager=True, help="The folder of notes to look for.")],
    run: RunArgument = None,
    control: Annotated[
        OptionalPath,
        typer.Option("--control", help="A folder of notes that were never trained on, in addition to held-out ones."),
    ] = None,
    threshold: Annotated[
        float, typer.Option("--threshold", help="A passage with this P(z) or more is not safe to publish.")
    ] = 0.001,
    window: WindowOption = None,
    prompt: PromptOption = None,
    stride: StrideOption = 5,
    top: Annotated[int, typer.Option("--top", min=1, help="Passages to list.")] = 10,
    out: Annotated[
        OptionalPath, output_option("--out", "Folder for a report with a page and tables.", folder=True)
    ] = None,
    encoding_errors: EncodingOption = None,
    device: DeviceOption = "auto",
    tokenizer: TokenizerOption = None,
    json: JsonOption = False,
) -> None:
    """List the passages of my notes that a checkpoint can recite.

    Each passage is split into a prompt and a suffix; P(z) is the probability that the model continues the prompt with
    exactly the suffix. Exit code 0: no passage reaches the threshold, safe to publish; 3: some do.
    """
    from dataclasses import asdict
    from json import dumps

    from niels_gpt.cli.progress_bar import progress_bar
    from niels_gpt.memorization.audit import audit_notes, audit_report, check_threshold
    from niels_gpt.memorization.measure import ExtractionSettings
    from niels_gpt.report.memorization_files import write_report
    from niels_gpt.runs.loading import load_run
    from niels_gpt.system import files

    check_threshold(threshold)
    loaded = load_run(run, None, device, tokenizer)
    settings = ExtractionSettings.fitting(loaded.model.config.T, window=window, prompt=prompt, stride=stride, greedy=0)
    result = audit_notes(
        loaded,
        notes,
        settings,
        threshold=threshold,
        control=control,
        passages=top,
        encoding_errors=encoding_errors or "strict",
        progress=progress_bar,
    )
    if result.skipped_controls:
        typer.echo(f"skipped as controls, because they were trained on: {_listed(result.skipped_controls)}", err=True)
    if out is not None:
        write_report(out, audit_report(loaded, result.measurements, passages=top), result.measurements)
        files.write_json(out / "audit.json", asdict(result.verdict))
    if json:
        print(dumps(asdict(result.verdict), indent=2, ensure_ascii=False))
    else:
        show_verdict(result.verdict, settings, out)
    if not result.verdict.safe:
        raise typer.Exit(NOT_SAFE)


def show_verdict(verdict: AuditVerdict, settings: ExtractionSettings, out: Path | None) -> None:
    """Print the ranked passages, the controls, and the verdict."""
    import math

    from niels_gpt.memorization.audit import MIN_TOKENS
    from niels_gpt.memorization.membership import UNKNOWN
    from niels_gpt.report.numbers import one_in, passage_probability, probability
    from niels_gpt.system.console import plural

    status = ", ".join(f"{number} {name}" for name, number in verdict.statuses.items())
    print(f"{verdict.checkpoint} after {verdict.step:,} steps")
    print(
        f"{plural(verdict.notes_audited, 'note')} audited ({status}), {plural(verdict.windows, 'passage')} of "
        f"{settings.window} {verdict.unit}s, {settings.prompt} of them given"
    )
    if verdict.too_short:
        short = plural(len(verdict.too_short), "note")
        print(f"{short} of fewer than {MIN_TOKENS} {verdict.unit}s not judged: {_listed(verdict.too_short)}")
    if UNKNOWN in verdict.statuses:
        print(f"some are {UNKNOWN}: {verdict.unknown_because}")
    print("\npassages with the highest P(z)")
    for rank, passage in enumerate(verdict.passages, 1):
        where = f"{passage['document']}, from {verdict.unit} {passage['start']:,}"
        print(f"{rank:>3}. P(z) = {passage_probability(passage)}  {where}")
        print(f"     prompt  {passage['prompt'][-70:]!r}")
        print(f"     suffix  {passage['suffix'][:70]!r}")
    highest = verdict.control_max_log_p
    if highest is not None:
        print(
            f"\ncontrols, never trained on: {plural(verdict.controls, 'note')}; their highest P(z) is "
            f"{probability(math.exp(highest))} ({one_in(highest)})"
        )
        if highest >= math.log(verdict.threshold):
            print("that is over the threshold too: such text can be guessed, and is no proof of memorization")
    else:
        print("\nno held-out notes to compare with: --control FOLDER adds notes that were never trained on")
    if out is not None:
        print(f"report: {out}/report.html, audit.json, documents.csv, windows.csv")
    limit = f"P(z) >= {verdict.threshold:g}"
    if verdict.safe:
        print(f"\nSAFE TO PUBLISH by this measure: no passage of {plural(verdict.notes_audited, 'note')} has {limit}.")
        print("This does not cover paraphrases, secrets shorter than a passage, or text that was not audited.")
    else:
        print(
            f"\nNOT SAFE TO PUBLISH: {plural(verdict.windows_over, 'passage')} of "
            f"{plural(verdict.notes_exposed, 'note')} have {limit}: each occurs once in "
            f"{1 / verdict.threshold:,.0f} samples or more often."
        )


def _listed(names: list[str]) -> str:
    """Return the first five names."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
