"""`niels-gpt research splice select`, `coverage`, `study` and `fit`."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from niels_gpt.cli.command_line import App
from niels_gpt.cli.note_options import NoteOptions, takes_note_options
from niels_gpt.cli.options import (
    Count,
    DeviceOption,
    GreedyOption,
    JsonOption,
    OptionalPath,
    PrimerOption,
    PromptOption,
    RoamOption,
    SetOption,
    StrideOption,
    WikiOption,
    WindowOption,
    config_option,
    output_option,
)

if TYPE_CHECKING:
    import numpy as np

    from niels_gpt.config import RunConfig
    from niels_gpt.config.splice import SpliceConfig
    from niels_gpt.splice.frames import Spans
    from niels_gpt.training.tasks.documents import SourceDocuments
    from niels_gpt.training.tasks.splice_task import SpliceTask

app = App(help="Train on chosen documents at chosen positions.")

ConfigOption = Annotated[
    OptionalPath,
    config_option("YAML file of a splice run, or the name of a built-in one; default: notes, as bytes."),
]
PngOption = Annotated[OptionalPath, output_option("--png", "Write a plot to this file.")]
HtmlOption = Annotated[OptionalPath, output_option("--html", "Write an HTML page to this file.")]

_LISTED = 10
"""Documents that a policy's column lists."""
_PRINTED = 50
"""Chosen documents that are printed."""
_MOST_EXAMPLES = 1_000_000_000
"""Most examples whose coverage is counted: a few minutes."""


@app.command("select")
@takes_note_options
def splice_select(
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006
    wiki: WikiOption = None,
    roam: RoamOption = None,
    primer: PrimerOption = None,
    note_options: NoteOptions = NoteOptions(),
    json: JsonOption = False,
) -> None:
    """Show the documents that a splice run would train on.

    Prints the candidates, their lengths, and what each policy would select. Nothing is trained.
    """
    import dataclasses

    from niels_gpt.training.tasks.documents import open_documents
    from niels_gpt.training.tasks.splice_task import SpliceTask, policy_choices

    data = {"wiki": wiki, "roam": roam, "primer": primer, **note_options.data()}
    resolved = _splice_config(config, set_, data)
    library = open_documents(resolved)
    documents, splice = library.train, resolved.splice
    choices = policy_choices(resolved, library)
    limits = dataclasses.replace(splice.for_run(resolved.train.total_steps, resolved.train.B), doc_key=None)
    candidates = limits.within_limits(documents.lengths, ends=documents.ends, S=resolved.model.T)
    if not json:  # before the selection: if it fails, this shows why
        _show_candidates(library, candidates)
        if not all(isinstance(choice, str) for choice in choices.values()):  # else one error says it
            _show_policies(choices, library, splice)
    task = SpliceTask(resolved, library)
    chosen, names = task.chosen, task.names
    if json:
        controls = [(i, library.held_out.name(i), int(library.held_out.lengths[i])) for i in task.controls]
        _print_json(
            {
                "source": library.source,
                "place": library.path,
                "documents": len(documents.lengths),
                "candidates": len(candidates),
                "chosen": _rows(zip(chosen, names, task.dataset.lengths.tolist(), strict=True)),
                "policies": choices,
                "controls": _rows(controls),
                "examples_per_epoch": len(task.dataset),
            }
        )
        return
    print("\nchosen" + (f" by doc_index={splice.doc_index}" if splice.doc_index is not None else ""))
    for i, name in list(zip(chosen, names, strict=True))[:_PRINTED]:
        print(f"  {i:>6}  {int(documents.lengths[i]):>9,}  {name}")
    if len(chosen) > _PRINTED:
        print(f"  and {len(chosen) - _PRINTED:,} more")
    print("controls (held out, never trained on)")
    for i in task.controls:
        print(f"  {i:>6}  {int(library.held_out.lengths[i]):>9,}  {library.held_out.name(i)}")
    for note in task.notes():
        print(note)


@app.command("coverage")
@takes_note_options
def splice_coverage(
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006
    steps: Annotated[
        Count, typer.Option("--steps", min=1, max=1_000_000, help="Count the first N steps instead of full epochs.")
    ] = None,
    epochs: Annotated[int, typer.Option("--epochs", min=1, max=100_000, help="Epochs to count.")] = 1,
    png: PngOption = None,
    html: HtmlOption = None,
    wiki: WikiOption = None,
    roam: RoamOption = None,
    primer: PrimerOption = None,
    note_options: NoteOptions = NoteOptions(),
    json: JsonOption = False,
) -> None:
    """Count how often each token is seen and supervised.

    Per document, over epochs or steps of a splice run. No model is needed.
    """
    from niels_gpt.report.coverage import coverage_page, coverage_png, coverage_text
    from niels_gpt.splice.coverage import cover, epoch_spans, frames_needed, step_spans
    from niels_gpt.system import files
    from niels_gpt.system.console import plural
    from niels_gpt.training.tasks.splice_task import SpliceTask

    data = {"wiki": wiki, "roam": roam, "primer": primer, **note_options.data()}
    resolved = _splice_config(config, set_, data)
    task = SpliceTask(resolved)
    dataset, train = task.dataset, resolved.train
    if steps is not None:
        spans = step_spans(dataset, train.seed, steps, train.B)
        title = f"{plural(steps, 'step')} of {plural(train.B, 'example')}"
    else:
        if epochs * len(dataset) > _MOST_EXAMPLES:
            counted = f"{plural(epochs, 'epoch')} of {plural(len(dataset), 'example')}"
            raise ValueError(f"{counted} are more than {_MOST_EXAMPLES:,} examples: count --steps N instead")
        spans = (chunk for epoch in range(epochs) for chunk in epoch_spans(dataset, epoch))
        title = plural(epochs, "epoch")
    lengths: list[np.ndarray] = []
    documents = cover(dataset, task.names, _record_lengths(spans, lengths))
    examples, frames = frames_needed(lengths, dataset.S, train.B, packed=task.packed)
    title = f"{_describe(task)}: {title}"
    _make_folders(png, html)
    if png is not None:
        coverage_png(documents, png, title=title, examples=examples, frames=frames)
    if html is not None:
        files.write_text(html, coverage_page(documents, title=title, examples=examples, frames=frames))
    if json:
        rows = [
            {"name": d.name, "tokens": d.length, "seen": d.seen.tolist(), "supervised": d.supervised.tolist()}
            for d in documents
        ]
        _print_json({"title": title, "examples": examples, "frames": frames, "documents": rows}, indent=None)
        return
    _print_lines(coverage_text(documents, title=title, examples=examples, frames=frames), png, html)


@app.command("study")
@takes_note_options
def splice_study(
    config: Annotated[OptionalPath, config_option("YAML file of the runs, or a built-in name; default: notes.")] = None,
    vary: Annotated[
        str, typer.Option("--vary", metavar="KEY=A,B,C", help="The config value that differs between runs.")
    ] = "splice.num_docs=1,2,4,8",
    out: Annotated[Path, output_option("--out", "Folder of the runs and the report.", folder=True)] = Path(
        "runs/study"
    ),
    window: WindowOption = None,
    prompt: PromptOption = None,
    stride: StrideOption = 5,
    greedy: GreedyOption = None,
    set_: SetOption = [],  # noqa: B006
    wiki: WikiOption = None,
    roam: RoamOption = None,
    primer: PrimerOption = None,
    note_options: NoteOptions = NoteOptions(),
    device: DeviceOption = "auto",
) -> None:
    """Train and measure one run per value of a setting.

    Trains each run, measures what it memorized, and fits log P(z) against epochs and tokens. The same command resumes
    an interrupted study.
    """
    from niels_gpt.cli.memorize import memorize
    from niels_gpt.cli.train import exit_if_stopped, train_and_report
    from niels_gpt.memorization.measure import ExtractionSettings
    from niels_gpt.runs.folder import RunFolder
    from niels_gpt.system.device import resolve_device
    from niels_gpt.training.tasks.splice_task import SpliceTask

    key, equals, listed = vary.partition("=")
    values = [value.strip() for value in listed.split(",")]
    if not equals or not all(values):
        raise ValueError(f"--vary must be KEY=A,B,C, got {vary!r}")
    if len(set(values)) < len(values):
        raise ValueError(f"--vary must have different values, got {vary!r}")
    runs = {value: RunFolder(out / f"{key.split('.')[-1]}-{value}") for value in values}
    device = resolve_device(device)
    data = {"wiki": wiki, "roam": roam, "primer": primer, **note_options.data()}
    notes: list[str] = []
    configs = {value: _splice_config(config, [*set_, f"{key}={value}"], data, notes) for value in values}
    for note in dict.fromkeys(notes):
        print(note)
    shortest = min(resolved.model.T for resolved in configs.values())
    # The same settings for all runs, so that they can be compared.
    settings = ExtractionSettings.fitting(shortest, window=window, prompt=prompt, stride=stride, greedy=greedy)
    for resolved in configs.values():  # fail before the first run is trained
        SpliceTask(resolved)
    for value, run in runs.items():
        resume = run.exists
        print(f"\n{key} = {value}: {run.path}" + (" (resuming)" if resume else ""))
        result = train_and_report(configs[value], run, device=device, resume=resume)
        exit_if_stopped(result.signal, result, run, command="the same command again")
        memorize(
            run.path,
            window=settings.window,
            prompt=settings.prompt,
            stride=settings.stride,
            greedy=settings.greedy,
            device=device,
        )
    print()
    splice_fit([run.path for run in runs.values()], png=out / "law.png", html=out / "law.html")


@app.command("fit")
def splice_fit(
    runs: Annotated[list[Path], typer.Argument(help="Runs that `niels-gpt research memorize` has measured.")],
    png: PngOption = None,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> None:
    """Fit the memorization law over the checkpoints of several runs.

    log P(z) = c1 log(epochs) + c2 log(tokens) + c3
    """
    from dataclasses import asdict

    from niels_gpt.memorization.law import fit_law, law_points
    from niels_gpt.report.law import law_page, law_png, law_text
    from niels_gpt.system import files

    points = [point for run in runs for point in law_points(run)]
    law = fit_law(points)
    title = "log P(z) against epochs and tokens"
    _make_folders(png, html)
    if png is not None:
        law_png(points, law, png, title=title)
    if html is not None:
        files.write_text(html, law_page(points, law, title=title))
    if json:
        _print_json({"law": asdict(law), "points": [asdict(point) for point in points]})
        return
    _print_lines(law_text(law), png, html)


def _splice_config(
    config: Path | None, overrides: list[str], data: Mapping[str, Any], notes: list[str] | None = None
) -> RunConfig:
    """Return the config of a splice run; `notes` are those of `load_config`.

    Raises ValueError for a config of another task.
    """
    import dataclasses

    from niels_gpt.config.yaml_file import load_config, with_data
    from niels_gpt.training.tasks.registry import with_derived_values

    resolved = with_data(load_config(config, overrides=overrides, notes=notes), data)
    if config is None:
        resolved = dataclasses.replace(resolved, task="splice")
    if resolved.task != "splice":
        raise ValueError(f"{config} has task {resolved.task}: it must be splice")
    return with_derived_values(resolved)


def _show_candidates(library: SourceDocuments, candidates: np.ndarray) -> None:
    from niels_gpt.data.source_paths import display_name
    from niels_gpt.report.histogram import histogram_text
    from niels_gpt.system import files
    from niels_gpt.system.console import plural

    lengths = library.train.lengths
    source = display_name(library.source, library.path)
    held_out = plural(len(library.held_out.lengths), "document")
    print(
        f"{source} ({files.display_path(library.path)}): {plural(len(lengths), 'document')} to train on, "
        f"{len(candidates):,} within the limits, {held_out} held out"
    )
    print("tokens per document:")
    for line in histogram_text(lengths[candidates] if len(candidates) else lengths):
        print(f"  {line}")


def _show_policies(choices: Mapping[str, list[int] | str], library: SourceDocuments, splice: SpliceConfig) -> None:
    """Print what each policy would select, in columns."""
    import itertools

    from rich.markup import escape
    from rich.table import Table

    from niels_gpt.cli.tables import show_table
    from niels_gpt.training.tasks.splice_task import unique_names

    table = Table(box=None, pad_edge=False, title_justify="left")
    columns = []
    for mode, chosen in choices.items():
        table.add_column(f"{mode}{' (config)' if mode == splice.doc_select_mode else ''}", overflow="fold")
        if isinstance(chosen, str):
            columns.append([chosen])
            continue
        names = unique_names(library.train, chosen[:_LISTED])
        column = [f"{name} ({int(library.train.lengths[i]):,})" for i, name in zip(chosen, names, strict=False)]
        columns.append(column + ([f"and {len(chosen) - _LISTED:,} more"] if len(chosen) > _LISTED else []))
    for row in itertools.zip_longest(*columns, fillvalue=""):
        table.add_row(*map(escape, row))
    print("\nwhat each policy would select, with tokens:")
    show_table(table)


def _record_lengths(spans: Iterable[Spans], lengths: list[np.ndarray]) -> Iterator[Spans]:
    """Yield the spans and append their lengths: an epoch may be too long to store."""
    for chunk in spans:
        lengths.append(chunk.length.astype("int32"))
        yield chunk


def _describe(task: SpliceTask) -> str:
    """Return the source and the balance mode, for a title."""
    splice = task.config.splice
    mode = f"{splice.balance_mode}, tau {splice.balance_tau:g}" if len(task.chosen) > 1 else splice.content_start_mode
    return f"{task.documents.source}, {mode}"


def _rows(documents: Iterable[tuple[int, str, int]]) -> list[dict[str, Any]]:
    return [{"document": i, "name": name, "length": length} for i, name, length in documents]


def _print_json(value: Any, *, indent: int | None = 2) -> None:
    print(json_module.dumps(value, indent=indent, ensure_ascii=False))


def _print_lines(lines: Iterable[str], *written: Path | None) -> None:
    """Print lines, then the paths of the files that were written."""
    for line in lines:
        print(line)
    for path in written:
        if path is not None:
            print(f"wrote {path}")


def _make_folders(*paths: Path | None) -> None:
    for path in paths:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
