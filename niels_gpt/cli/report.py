"""`niels-gpt runs report`: a run, or a comparison of runs, as one HTML page and as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from niels_gpt.cli.options import RUNS, OptionalPath, RunsDirOption, complete_runs, output_option


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN...]",
            autocompletion=complete_runs,
            show_default=False,
            help="A run or a pipeline, by path or name; several are compared. Default: the newest run.",
        ),
    ] = [],  # noqa: B006
    out: Annotated[
        OptionalPath, output_option("--out", "HTML file; default: report.html in RUN, compare-A-B.html for several.")
    ] = None,
    markdown: Annotated[
        OptionalPath, output_option("--markdown", "Markdown file; default: beside the HTML file, with .md.")
    ] = None,
    memorization: Annotated[
        list[Path],
        typer.Option(
            "--memorization",
            metavar="FOLDER",
            help="A report of memorize or audit that is not in RUN; may be repeated.",
        ),
    ] = [],  # noqa: B006
    runs_dir: RunsDirOption = RUNS,
) -> None:
    """Write a report of a run, or compare runs.

    One self-contained HTML file and the same as Markdown: config, data and licences, curves, loss beside xz and zstd,
    samples, speed and hardware, memorization, commands and versions. The run may still be training.
    """
    from niels_gpt.runs.catalog import locate, newest_first, resolve_runs, unique_names
    from niels_gpt.runs.pipeline import pipeline_of
    from niels_gpt.system import files

    for given in memorization:
        if not any((given / name).is_file() for name in ("report.json", "audit.json")):
            raise ValueError(f"--memorization {given} holds no report.json or audit.json: name the folder of a report")
    if runs:
        paths = list(dict.fromkeys(path for run in runs for path in resolve_runs(run, runs_dir)))
    else:
        paths = [newest.path for newest in newest_first(runs_dir)[:1]]
        if not paths:
            raise ValueError(f"no runs in {runs_dir}/: name the folder of a run")
    named = locate(runs[0], runs_dir) if len(runs) == 1 else None
    pipeline = named if all(pipeline_of(path) == named for path in paths) else None
    folder = pipeline or (paths[0] if len(paths) == 1 else None)
    names = unique_names(paths, runs_dir)
    page = out or _default_path(folder, list(names), runs_dir)
    text = markdown or (page.with_suffix(".md") if not page.exists() or page.is_file() else None)
    if text == page:
        raise ValueError(f"--out {page} is the HTML page: for Markdown, use --markdown {page}")

    from niels_gpt.data.reading.hub import go_offline
    from niels_gpt.report.document import html_page
    from niels_gpt.report.document import markdown as to_markdown
    from niels_gpt.report.run_comparison import comparison
    from niels_gpt.report.run_report import pipeline_report, read_facts, run_report

    go_offline()  # a report reads what is on this machine
    facts = {name: read_facts(path) for name, path in names.items()}
    if folder is None:
        document = comparison(facts)
    elif pipeline is not None:
        document = pipeline_report(pipeline, list(facts.values()), memorization=memorization)
    else:
        document = run_report(*facts.values(), memorization=memorization)
    for path, content in ((page, html_page(document)), (text, to_markdown(document))):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_text(path, content)
            print(f"report: {path}")


def _default_path(folder: Path | None, names: list[str], runs_dir: Path) -> Path:
    """Return report.html of a run or a pipeline; for several runs, a file in the folder of runs that names them."""
    if folder is not None:
        return folder / "report.html"
    compared = f"compare-{'-'.join(name.replace('/', '-') for name in names)}"[:200]
    return runs_dir / f"{compared}.html"
