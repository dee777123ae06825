"""`niels-gpt`: the commands by purpose.

Importing this module loads only typer: a command is imported when it is used, and imports what it needs when it runs,
so that `--help` is fast. A mistake by the user ends in one line on stderr and exit code 1 (NIELS_GPT_DEBUG=1 shows the
traceback).
"""

from __future__ import annotations

from typing import Annotated

import typer

from niels_gpt.cli.command_line import App
from niels_gpt.cli.groups import Entry, group
from niels_gpt.cli.run_app import run_app

SECTIONS = {
    "Start": {
        "notes": Entry("notes:app", "A model of your notes, in one command."),
        "demo": Entry("demo:demo", "Train a small model and chat with it, offline."),
        "chat": Entry("chat:chat", "Chat with a model."),
        "generate": Entry("generate_text:generate", "Continue a text."),
        "serve": Entry("serve:serve", "A page and an HTTP API for your models."),
    },
    "Train": {
        "train": Entry("train:train", "Train one model from a config, or resume a run."),
        "pipeline": Entry("pipeline:pipeline", "Two trainings: on token caches, then for chat."),
        "data": Entry("data:app", "Sources of text: which exist, and what is in them."),
        "tokenizer": Entry("tokenizer:app", "Train a tokenizer, and measure it."),
        "cache": Entry("cache:app", "Token caches: build, verify, free."),
        "config": Entry("config:app", "List, show and explain configs."),
        "import": Entry("import_model:app", "Bring a public model here."),
        "export": Entry("export:app", "Write a model in the formats of other programs."),
    },
    "Look": {
        "runs": Entry("runs:app", "List, show, compare, report and remove runs."),
        "eval": Entry("eval:eval_", "Score a model on held-out text and questions."),
        "audit": Entry("audit:audit", "May I publish it? What of your notes it can recite."),
        "doctor": Entry("doctor:doctor", "What this machine can run, and what is missing."),
    },
    "Research": {
        "research": Entry("research:app", "memorize, trace, splice, batch, lint, inspect, diff."),
    },
}
MOVED = {
    "memorize": "research memorize",
    "trace": "research trace",
    "splice": "research splice",
    "batch": "research batch",
    "report": "runs report",
    "clean": "cache clean",
}

app = App(
    help="A personal language-model workbench: your notes and public text in, your own small GPT out.",
    add_completion=True,
    cls=group(SECTIONS, MOVED),
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from niels_gpt import __version__

        typer.echo(f"niels-gpt {__version__}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see `run_app` for the exit codes."""
    run_app(app, arguments, name="niels-gpt")
