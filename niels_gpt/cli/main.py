"""`niels-gpt`: registers the commands.

Importing this module loads only typer and the option declarations: a command imports what it needs when it runs, so
that `--help` is fast. A mistake by the user ends in one line on stderr and exit code 1 (NIELS_GPT_DEBUG=1 shows the
traceback).
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from niels_gpt.cache.cli import app as cache_app
from niels_gpt.cli import batch, config, data, export, import_model, notes, runs, splice, tokenizer
from niels_gpt.cli.audit import audit
from niels_gpt.cli.chat import chat
from niels_gpt.cli.clean import clean
from niels_gpt.cli.demo import demo
from niels_gpt.cli.doctor import doctor
from niels_gpt.cli.eval import eval_
from niels_gpt.cli.generate_text import generate
from niels_gpt.cli.memorize import memorize
from niels_gpt.cli.pipeline import pipeline
from niels_gpt.cli.report import report
from niels_gpt.cli.serve import serve
from niels_gpt.cli.trace import trace
from niels_gpt.cli.train import train
from niels_gpt.system.command_line import App
from niels_gpt.system.console import run_app


class _Commands(TyperGroup):
    """The commands as the help lists them: `notes` first, although typer lists groups last."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=lambda name: name != "notes")


app = App(
    help="A personal language-model workbench: your notes and public text in, your own small GPT out.",
    add_completion=True,
    cls=_Commands,
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from niels_gpt import __version__

        typer.echo(f"niels-gpt {__version__}")
        raise typer.Exit


app.command()(demo)
app.command()(train)
app.command()(pipeline)
app.command("eval")(eval_)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(memorize)
app.command()(audit)
app.command()(trace)
app.command()(report)
app.command()(doctor)
app.command()(clean)
app.add_typer(notes.app, name="notes")
app.add_typer(batch.app, name="batch")
app.add_typer(data.app, name="data")
app.add_typer(cache_app, name="cache")
app.add_typer(tokenizer.app, name="tokenizer")
app.add_typer(splice.app, name="splice")
app.add_typer(config.app, name="config")
app.add_typer(runs.app, name="runs")
app.add_typer(import_model.app, name="import")
app.add_typer(export.app, name="export")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see `run_app` for the exit codes."""
    run_app(app, arguments, name="niels-gpt")
