"""`niels-gpt research batch show`: what a training step learned from."""

from __future__ import annotations

from typing import Annotated

import typer

from niels_gpt.cli.command_line import App
from niels_gpt.cli.options import JsonOption, RunArgument

app = App(help="Show what a training step learned from.")


@app.command("show")
def show(
    step: Annotated[int, typer.Option("--step", min=0, is_eager=True, help="Training step, from 0.")],
    run: RunArgument = None,
    chars: Annotated[int, typer.Option("--chars", min=0, help="Characters of text per row; 0 for all.")] = 160,
    json: JsonOption = False,
) -> None:
    """Print the source, document, offset and text of every row of a training step."""
    import dataclasses
    from json import dumps

    from niels_gpt.data.source_paths import display_name
    from niels_gpt.runs.loading import find_run
    from niels_gpt.system import files
    from niels_gpt.training.tasks.documents import uses_bytes
    from niels_gpt.training.trained_data import open_trained_data

    config, task = open_trained_data(find_run(run))
    rows = task.origins(step)
    if json:
        print(dumps([dataclasses.asdict(row) for row in rows], indent=2, ensure_ascii=False))
        return
    past_end = " (past the end of the run)" if step >= config.train.total_steps else ""
    unit = "bytes" if uses_bytes(config) else "tokens"
    kind = "spans for frames" if config.task == "splice" else "rows"
    print(f"step {step} of {config.train.total_steps}{past_end}: {len(rows)} {kind} of {config.model.T} {unit}")
    for row in rows:
        source = display_name(row.source, config.data.wiki)
        document = files.display_path(row.document)
        print(f"\nrow {row.row}  {source}  {document}  offset {row.offset}  (stream {row.stream_offset})")
        text = row.text if not chars or len(row.text) <= chars else row.text[:chars] + "..."
        print(repr(text)[1:-1])
