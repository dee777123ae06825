"""`niels-gpt import hf`: a public model as a run folder."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from niels_gpt.cli.command_line import App

app = App(help="Import a public model.")


@app.callback()
def root() -> None:
    """Import a public model as a run folder: chat with it, fine-tune it (init_from), audit it, export it."""


@app.command()
def hf(
    model: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER_OR_ID",
            help=(
                "A folder with config.json and *.safetensors, or a repository of the Hugging Face Hub such as "
                "HuggingFaceTB/SmolLM2-135M, which is downloaded."
            ),
        ),
    ],
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Run folder to create; default: runs/ and the name of the model."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", min=1, help="Context in tokens; default: the model's, at most 8192."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit of a repository; not for a folder.")
    ] = None,
) -> None:
    """Import a public model as a run.

    Families (model_type in config.json): Llama (SmolLM2, TinyLlama, Llama 3.2), Mistral, Qwen2 and Qwen3; SmolLM3 if
    every layer has RoPE (the published one is refused); GPT-NeoX and GPT-2 as niels-gpt exports them. What is not
    supported is named before anything is written; see docs/how-to/public-models.md.

    Weights must be safetensors and keep their type. Nothing of the folder is executed.
    """
    from niels_gpt.pretrained.find_model import MOST_CONTEXT, check_model

    check_model(model, revision=revision, context=context or MOST_CONTEXT)  # before torch is imported

    from niels_gpt.pretrained.imported_run import default_run_name, describe, import_model
    from niels_gpt.runs.folder import RunFolder
    from niels_gpt.runs.loading import claimed_run
    from niels_gpt.system.progress import progress_bar

    target = claimed_run(default_run_name(model)) if run_dir is None else nullcontext(RunFolder(run_dir))
    with target as run, progress_bar("reading the weights") as bar:
        imported = import_model(model, run, context=context, revision=revision, on_bytes=bar)
    for line in describe(imported):
        print(line)
