"""`niels-gpt export`: a model in the formats of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from niels_gpt.cli.audit import NOT_JUDGED, NOT_SAFE
from niels_gpt.cli.command_line import App
from niels_gpt.cli.options import RunArgument, TokenizerOption, choice_option

if TYPE_CHECKING:
    from niels_gpt.export.audit_gate import Clearance
    from niels_gpt.runs.loading import LoadedRun

app = App(help="Write a model in the formats of other programs.")

AuditOption = Annotated[
    bool, typer.Option("--audit", help="Audit the model first; the verdict is stored in the run and in the model card.")
]
AnywayOption = Annotated[
    bool, typer.Option("--anyway", help="Export even if the audit says NOT SAFE or NOT JUDGED, or was not run.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export at --out.")]


@app.command("hf")
def hf(
    run: RunArgument = None,
    out: Annotated[Path, typer.Option("--out", help="Folder to write.", show_default=False)] = ...,  # type: ignore[assignment]
    dtype: Annotated[
        str, choice_option("--dtype", ("fp32", "bf16", "fp16"), "Type of the weights: fp32, bf16 or fp16.")
    ] = "fp32",
    audit: AuditOption = False,
    anyway: AnywayOption = False,
    overwrite: OverwriteOption = False,
    tokenizer: TokenizerOption = None,
) -> None:
    """Write a folder for transformers: weights, config, tokenizer, model card.

    A model that was trained on your own text is exported only if an audit of its weights says SAFE (--audit runs one).
    Otherwise nothing is written, and the exit code is 3 if it recites some of the text (NOT SAFE), or 4 if it was not
    audited, or not all of the text was (NOT JUDGED). --anyway exports it all the same. Code 1 is any other error.
    """
    from niels_gpt.export.run_export import check_folder, export_hf
    from niels_gpt.export.self_check import TEXTS
    from niels_gpt.runs.loading import load_run

    check_folder(out, overwrite=overwrite)
    loaded = load_run(run, None, "cpu", tokenizer)
    clearance = _cleared(loaded, audit=audit, anyway=anyway)
    architecture, checked = export_hf(loaded, out, clearance, dtype=dtype, overwrite=overwrite)
    print(f"{out}: {architecture}, {loaded.model.num_parameters():,} weights in {dtype}; README.md is the model card")
    if checked is None:
        print("its tokenizer was not compared with ours: transformers is not installed")
    else:
        print(f"transformers {checked} gives {TEXTS} hard texts the ids that they have here")


@app.command("gguf")
def gguf(
    run: RunArgument = None,
    out: Annotated[Path, typer.Option("--out", help="File to write.", show_default=False)] = ...,  # type: ignore[assignment]
    kind: Annotated[
        str,
        choice_option("--type", ("f32", "f16", "q8_0", "q4_0"), "Type of the weights: f32, f16, q8_0 or q4_0."),
    ] = "f32",
    ollama: Annotated[
        bool, typer.Option("--ollama", help="Also write Modelfile, for Ollama, beside the file.")
    ] = False,
    audit: AuditOption = False,
    anyway: AnywayOption = False,
    overwrite: OverwriteOption = False,
    tokenizer: TokenizerOption = None,
) -> None:
    """Write a GGUF file, for llama.cpp and Ollama.

    A model that was trained on your own text needs an audit, as for `export hf`; the exit codes are 3 (NOT SAFE) and 4
    (NOT JUDGED). Models that llama.cpp does not compute are refused, and so is tokenizer.model of others.
    """
    from niels_gpt.export.run_export import check_file, export_gguf
    from niels_gpt.runs.loading import load_run
    from niels_gpt.system.console import short_number

    check_file(out, overwrite=overwrite, with_modelfile=ollama)
    loaded = load_run(run, None, "cpu", tokenizer)
    _cleared(loaded, audit=audit, anyway=anyway)
    architecture = export_gguf(loaded, out, kind=kind, overwrite=overwrite, with_modelfile=ollama)
    size = short_number(out.stat().st_size)
    print(f"{out}: {architecture}, {loaded.model.num_parameters():,} weights in {kind}, {size}B")


def _cleared(loaded: LoadedRun, *, audit: bool, anyway: bool) -> Clearance:
    """Return what is known of the model, or exit if it may not be exported. Offers an audit on a terminal."""
    import sys

    from niels_gpt.cli.audit import show_verdict
    from niels_gpt.cli.run_app import INTERRUPTED
    from niels_gpt.export import audit_gate
    from niels_gpt.memorization import audit as library
    from niels_gpt.system.progress import progress_bar

    clearance = audit_gate.check(loaded)
    asks = audit_gate.needs_audit(clearance) and not anyway and bool(sys.stdin) and sys.stdin.isatty()
    if audit or (asks and typer.confirm(f"{loaded.path} was trained on private text. Audit it now?", default=True)):
        verdict = audit_gate.audit(loaded, progress=lambda title: progress_bar(title, "passages"))
        show_verdict(verdict, None)
        if verdict.interrupted:
            raise typer.Exit(INTERRUPTED)
        clearance = audit_gate.with_verdict(clearance, verdict)
    refusal = audit_gate.refusal(clearance, loaded.path)
    if refusal and not anyway:
        typer.echo(f"error: {refusal.reason}: {refusal.remedy}", err=True)
        raise typer.Exit(NOT_SAFE if clearance.judgment == library.NOT_SAFE else NOT_JUDGED)
    if refusal:
        typer.echo(f"warning: exported although {refusal.reason}", err=True)
    return clearance
