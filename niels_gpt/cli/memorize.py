"""`niels-gpt research memorize`: measure what a checkpoint has memorized of its training documents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from niels_gpt.cli.options import (
    CheckpointOption,
    Count,
    DeviceOption,
    EncodingOption,
    GreedyOption,
    JsonOption,
    OptionalPath,
    PromptOption,
    RunArgument,
    StrideOption,
    Text,
    TokenizerOption,
    WindowOption,
    choice_option,
    output_option,
)
from niels_gpt.config.splice import SingleSelectMode

if TYPE_CHECKING:
    from niels_gpt.memorization.measure import Document
    from niels_gpt.runs.loading import LoadedRun


def memorize(
    run: RunArgument = None,
    checkpoint: CheckpointOption = None,
    window: WindowOption = None,
    prompt: PromptOption = None,
    stride: StrideOption = 5,
    greedy: GreedyOption = None,
    whole_window: Annotated[
        bool,
        typer.Option(
            "--whole-window",
            help="In the map of a document, color all characters of a passage, not only its suffix.",
        ),
    ] = False,
    source: Annotated[
        Text,
        typer.Option(
            "--source", help="Source to measure; default: your notes if the run has them, else its largest source."
        ),
    ] = None,
    documents: Annotated[
        Count,
        typer.Option("--documents", min=1, help="Training documents to measure; default: 8, or all of a splice run."),
    ] = None,
    controls: Annotated[
        Count,
        typer.Option(
            "--controls", min=0, help="Held-out documents to compare with; default: 3, or those of a splice run."
        ),
    ] = None,
    select: Annotated[
        Text,
        choice_option(
            "--select", get_args(SingleSelectMode), "Documents to select: random (default), first, longest or shortest."
        ),
    ] = None,
    text: Annotated[list[Path], typer.Option("--text", help="Measure this file; may be repeated.")] = [],  # noqa: B006
    control: Annotated[
        list[Path], typer.Option("--control", help="A file that was never trained on; may be repeated.")
    ] = [],  # noqa: B006
    encoding_errors: EncodingOption = None,
    curve: Annotated[
        bool, typer.Option("--curve/--no-curve", help="Also measure every checkpoint that the run kept.")
    ] = True,
    out: Annotated[
        OptionalPath, output_option("--out", "Folder of the report; default: memorization/ in the run.", folder=True)
    ] = None,
    top: Annotated[int, typer.Option("--top", min=0, help="Passages to list.")] = 20,
    device: DeviceOption = "auto",
    tokenizer: TokenizerOption = None,
    json: JsonOption = False,
) -> None:
    """Measure what a model can recite of its training documents.

    Each passage is split into a prompt and a suffix; P(z) is the probability that the model continues the prompt with
    exactly the suffix. Held-out documents are measured too, for comparison.
    """
    from json import dumps

    from niels_gpt.cli.run_app import INTERRUPTED
    from niels_gpt.memorization.measure import ExtractionSettings
    from niels_gpt.memorization.run import measure_run, report_folder
    from niels_gpt.memorization.selection import (
        SelectedDocuments,
        read_documents,
        select_documents,
    )
    from niels_gpt.report.memorization_report import write_report
    from niels_gpt.runs.loading import load_run
    from niels_gpt.system.progress import progress_bar

    if text:
        ignored = {"--source": source is not None, "--documents": documents is not None, "--select": select is not None}
        given_options = [option for option, is_given in ignored.items() if is_given]
        if given_options:
            raise ValueError(
                f"--text measures the files that it names; {' and '.join(given_options)} chooses training documents: "
                "use one or the other"
            )
    loaded = load_run(run, checkpoint, device, tokenizer)
    settings = ExtractionSettings.fitting(
        loaded.model.config.T, window=window, prompt=prompt, stride=stride, greedy=greedy, whole_window=whole_window
    )
    given = read_documents(text, control, loaded, encoding_errors or "strict")
    if text:
        names = {document.name for document in given}
        selected = SelectedDocuments([*given, *_held_out(loaded, controls, names)])
        out = out or report_folder(loaded, "memorization-texts")  # the report on the training documents stays
    else:
        selected = select_documents(loaded, source=source, number=documents, controls=controls, mode=select or "random")
        selected.documents.extend(given)
    result = measure_run(
        loaded, selected, settings, curve=curve, passages=top, progress=lambda title: progress_bar(title, "windows")
    )
    folder = out or report_folder(loaded)
    write_report(folder, result.report, result.measurements)
    if json:
        print(dumps(result.report, ensure_ascii=False))
    else:
        show_report(result.report, folder)
    if result.interrupted:
        typer.echo(f"interrupted: {result.interrupted}; the report has what is done", err=True)
        raise typer.Exit(INTERRUPTED)


def _held_out(loaded: LoadedRun, controls: int | None, names: set[str]) -> list[Document]:
    """Return held-out documents of the run as controls for given files; print why if there are none."""
    from niels_gpt.memorization.selection import held_out_controls

    try:
        found = held_out_controls(loaded, controls)
    except (ValueError, OSError) as err:
        typer.echo(f"no held-out documents as controls: {err}", err=True)
        return []
    return [document for document in found if document.name not in names]


def show_report(report: dict[str, Any], folder: Path) -> None:
    """Print the table of documents, the passages with the highest P(z), and the paths of the report."""
    from rich.markup import escape
    from rich.table import Table

    from niels_gpt.cli.tables import show_table
    from niels_gpt.report.numbers import passage_probability, probability
    from niels_gpt.system.console import first_few, short_number

    settings = report["settings"]
    unit = f"{report['unit']}s"
    print(
        f"{report['checkpoint']} after {report['step']:,} steps; windows of {settings['window']} {unit}, "
        f"{settings['prompt']} of them given"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("document", overflow="fold")
    compared = ("base mean", "base max", "base bits/byte") if report["base"] else ()
    for name in (unit, "windows", "mean P(z)", "max P(z)", ">= 0.5", "greedy", "longest run", "bits/byte", *compared):
        table.add_column(name, justify="right")
    documents = sorted(report["documents"], key=lambda d: (d["control"], -d["mean_log_p"]))
    for i, d in enumerate(documents):
        if d["control"] and (i == 0 or not documents[i - 1]["control"]):
            table.add_section()
        greedy = d["greedy"]
        table.add_row(
            escape(d["name"]) + (" (control)" if d["control"] else "") + (" (short)" if d["short"] else ""),
            short_number(d["tokens"]),
            f"{d['windows']:,}",
            probability(d["mean_p"]),
            probability(d["max_p"]),
            f"{d['over']['0.5']:,}",
            f"{greedy['exact']:,} of {greedy['starts']:,}",
            f"{d['longest_run']['tokens']:,}",
            f"{d['bits_per_byte']:.3f}",
            *((probability(d["base"]["mean_p"]), probability(d["base"]["max_p"]), f"{d['base']['bits_per_byte']:.3f}")
              if compared else ()),
        )  # fmt: skip
    show_table(table)
    if compared:
        print(f"base: {report['base']}; what this model recites and the base does not, it learned in the fine-tuning")
    elif report.get("base_problem"):
        print(f"not compared with the base: {report['base_problem']}; restore it to see what is new")
    if not any(d["control"] for d in documents):
        print("there are no control documents, so P(z) of text that was never trained on is unknown")
    for passage in [p for p in report["passages"] if not p["control"]][:3]:
        where = f"{passage['document']}, {unit} {passage['start']:,} to {passage['end']:,}"
        known = f", base {probability(passage['base_p'])}" if "base_p" in passage else ""
        print(f"\n{where}: P(z) = {passage_probability(passage)}{known}")
        print(f"  prompt  {_one_line(passage['prompt'][-90:])}")
        print(f"  suffix  {_one_line(passage['suffix'][:90])}")
        if passage["also_in"]:
            print(f"  also in {first_few(passage['also_in'], 3)}")
    if report["positions"] == "rope":
        print("\npositions are relative (RoPE): P(z) does not depend on the offset in the frame")
    elif report["position_map"] is not None:
        show_positions(report["position_map"])
    print(f"\nreport: {folder}/report.html, report.json, documents.csv, windows.csv")


def show_positions(position_map: dict[str, Any]) -> None:
    """Print P(z) of each document at several offsets in the frame."""
    from rich.markup import escape
    from rich.table import Table

    from niels_gpt.cli.tables import show_table
    from niels_gpt.report.numbers import probability

    print("\npositions are learned: the table above is for offset 0 in the frame; mean P(z) by offset:")
    table = Table(box=None, pad_edge=False)
    table.add_column("document", overflow="fold")
    for offset in position_map["offsets"]:
        table.add_column(f"{offset}", justify="right")
    table.add_column("best of all", justify="right")
    for document in position_map["documents"]:
        name = escape(document["name"]) + (" (control)" if document["control"] else "")
        best = f"{probability(document['best_p'])} at {document['best_offset']}"
        table.add_row(name, *map(probability, document["mean_p"]), best)
    show_table(table)


def _one_line(text: str) -> str:
    return repr(text)[1:-1]
