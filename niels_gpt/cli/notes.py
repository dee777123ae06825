"""`niels-gpt notes`: what is in a folder of notes."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from niels_gpt.cli.command_line import App, Command
from niels_gpt.cli.note_options import NoteOptions, takes_note_options
from niels_gpt.cli.options import Count, DeviceOption, JsonOption, OptionalPath, Text, notes_argument
from niels_gpt.system.program import command

if TYPE_CHECKING:
    from niels_gpt.config import DataConfig
    from niels_gpt.data.note_check import NoteCheck

DEFAULT = "folder"
"""The command that runs for `niels-gpt notes FOLDER`."""
DEFAULT_MINUTES = 10.0
_BASE_PANEL = "Fine-tune a model, instead of starting from nothing"
_DIALOGUES_PANEL = "What it learns to answer"
SECRETS_FOUND = 3
"""Exit code of `check --strict` if there are secrets."""
_SHOWN = 20
"""Secrets, duplicates and files that are printed; --json has all."""


class _NotesGroup(TyperGroup):
    """A group whose first argument may also be a folder: `notes FOLDER` is `notes folder FOLDER`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not (args and (args[0] in self.commands or self._is_misspelled(args[0]))):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)

    def _is_misspelled(self, word: str) -> bool:
        """Whether a word is no path, but almost the name of a command that is typed."""
        return bool(difflib.get_close_matches(word, self.commands.keys() - {DEFAULT})) and not Path(word).exists()


class _FolderContext(typer.Context):
    """The context of `notes folder`, named as it is typed."""

    @property
    def command_path(self) -> str:
        return super().command_path if self.parent is None else self.parent.command_path


class _FolderCommand(Command):
    """The command `notes folder`, which is typed as `notes`."""

    context_class = _FolderContext

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        name = ctx.parent.command_path if ctx.parent is not None else "notes"
        formatter.write_usage(name, "[OPTIONS] FOLDER")
        formatter.write_usage(name, "check [OPTIONS] FOLDER", prefix=" " * len("Usage: "))


app = App(help="A model of your notes, in one command.", cls=_NotesGroup)


@app.callback()
def _group() -> None:
    """Train a model of your notes that chats (`notes FOLDER`), or see what is in them (`notes check FOLDER`)."""


@app.command("check")
@takes_note_options
def check(
    folder: Annotated[Path, notes_argument()],
    note_options: NoteOptions = NoteOptions(),
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 3 if there are secrets.")] = False,
    json: JsonOption = False,
) -> None:
    """Show what would be read, and what should not be learned.

    Counts the notes, their sizes and scripts, and finds duplicates, files that are not text, and secrets (keys,
    passwords, PINs, card, phone and account numbers). Nothing is trained, and no secret is printed.
    """
    import dataclasses
    from json import dumps

    from niels_gpt.data.note_check import check_notes
    from niels_gpt.system.progress import progress_bar

    notes = dataclasses.replace(note_options.notes(), formats="text")
    with progress_bar("reading notes") as show:
        found = check_notes(folder, notes, on_note=show)
    if json:
        print(dumps(found.as_dict(), indent=2))
    else:
        _print_check(found)
    if strict and found.secrets:
        raise typer.Exit(SECRETS_FOUND)


@app.command(DEFAULT, cls=_FolderCommand)
@takes_note_options
def folder(
    folder: Annotated[Path, notes_argument()],
    minutes: Annotated[
        float,
        typer.Option(
            "--minutes",
            min=0.2,
            max=10_000,
            help="Minutes for the whole command, about: reading, training, evaluation and a quick audit.",
        ),
    ] = DEFAULT_MINUTES,
    run_dir: Annotated[
        OptionalPath, typer.Option("--run-dir", help="Run folder; default: runs/notes, runs/notes-2, ...")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted model in --run-dir, as it was planned.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            rich_help_panel=_BASE_PANEL,
            help="A run folder, a checkpoint, hf:FOLDER (a model in the Hugging Face format) or hf:NAME/MODEL (from "
            "the Hub).",
        ),
    ] = None,
    lora_rank: Annotated[
        Count,
        typer.Option(
            "--lora-rank",
            min=0,
            max=65_536,
            rich_help_panel=_BASE_PANEL,
            help="Rank of LoRA adapters, 0 for all weights; default: all weights if they fit into memory.",
        ),
    ] = None,
    primer: Annotated[
        Text,
        typer.Option("--primer", rich_help_panel=_DIALOGUES_PANEL, help="Your file of dialogues, or embedded."),
    ] = None,
    no_questions: Annotated[
        bool,
        typer.Option(
            "--no-questions",
            rich_help_panel=_DIALOGUES_PANEL,
            help="Teach it no answers about the notes; it then recites less of them.",
        ),
    ] = False,
    note_options: NoteOptions = NoteOptions(),
    allow_data_change: Annotated[
        bool,
        typer.Option("--allow-data-change", help="Resume although notes were removed; recorded in the run."),
    ] = False,
    device: DeviceOption = "auto",
) -> None:
    """Train a model of your notes that you can chat with, in one command.

    `notes check FOLDER` shows what would be read, and trains nothing. `notes FOLDER` chooses the size of the model
    and the steps from your notes, this machine and --minutes. Files that are not utf-8 are skipped unless
    --encoding-errors says otherwise. Some notes are held out, and the best checkpoint is the one that predicts them
    best. With --base, a trained model is fine-tuned with its own tokenizer.
    """
    import contextlib
    import dataclasses
    import shutil
    import time

    began = time.monotonic()  # torch takes seconds to import

    from niels_gpt.cli import first_model
    from niels_gpt.cli.resumable import resumable
    from niels_gpt.data.note_record import check_notes
    from niels_gpt.runs.loading import claimed_run
    from niels_gpt.runs.pipeline import CACHE, PipelineFolder
    from niels_gpt.system import files
    from niels_gpt.system.console import format_duration
    from niels_gpt.system.device import resolve_device
    from niels_gpt.system.progress import progress_bar, status_line
    from niels_gpt.training.progress import say
    from niels_gpt.workflow.base_plan import check_base, open_base
    from niels_gpt.workflow.chat_model import dialogue_file, read_corpus, taught_topics, topics_of
    from niels_gpt.workflow.choose_plan import choose_plan
    from niels_gpt.workflow.plan import data_in, plan_in
    from niels_gpt.workflow.report_size import report_size

    device = resolve_device(device)
    if resume and run_dir is None:
        raise ValueError("--resume needs --run-dir: the folder of the model to continue")
    root = files.expand_home(folder).absolute()
    own_primer = None if primer in (None, "embedded") else str(files.expand_home(primer or "").absolute())
    with contextlib.ExitStack() as new_folder:
        run = PipelineFolder(run_dir if run_dir is not None else new_folder.enter_context(claimed_run("notes")).path)
        asked = {"folder": str(root), **dataclasses.asdict(note_options), "exclude": list(note_options.exclude)}
        asked |= {"no_questions": no_questions, "primer": own_primer or primer, "base": base, "lora_rank": lora_rank}
        asked |= {"minutes": minutes}
        begun = plan_in(run) if resume else None
        if resume:
            asked = _restored(asked, run.read_options() or _options_of(data_in(run)), run.path)
            note_options = NoteOptions(**{name: asked[name] for name in dataclasses.asdict(note_options)})
            no_questions, primer, base, lora_rank, minutes = (
                asked[name] for name in ("no_questions", "primer", "base", "lora_rank", "minutes")
            )
        if lora_rank is not None and base is None:
            raise ValueError("--lora-rank needs --base: adapters change a model that is trained already")
        words = [*note_options.words(), *(["--no-questions"] if no_questions else [])]
        words += ["--minutes", f"{minutes:g}"] if minutes != DEFAULT_MINUTES else []
        for option, value in (("--primer", primer), ("--base", base), ("--lora-rank", lora_rank)):
            words += [] if value is None else [option, str(value)]
        resume_command = command("notes", root, *words, "--run-dir", run.path, "--resume")
        new_folder.enter_context(resumable(lambda: resume_command))
        if begun is None:
            first_model.check_free(run, resume="--resume")
            if resume:
                say(f"no training has begun in {run.path}: starting from the beginning")
                if run.read_options():  # the folder is ours
                    shutil.rmtree(run.path / CACHE, ignore_errors=True)  # notes may be gone since
            run.write_options(asked)
            new_folder.push(lambda kind, *_: run.forget_options() if kind and issubclass(kind, Exception) else None)
            if base is not None:
                with status_line("checking the base"):
                    check_base(base, run.path / "base")
        else:
            start_over = command("notes", root, *words)
            for recorded in (run.path, run.path / CACHE):
                for line in check_notes(recorded, start_over=start_over, keep=allow_data_change):
                    say(line)
        notes = dataclasses.replace(note_options.notes(), formats="text")
        with status_line("reading notes"):
            split_by = "shared_text" if begun is None else begun.split_by
            corpus = read_corpus(folder, notes, errors=note_options.encoding_errors or "skip", split_by=split_by)
        say(f"{corpus.selected.root}: {corpus.selected.summary()}")
        if begun is not None:
            topics = [] if no_questions else taught_topics(topics_of(corpus, begun), run.path / CACHE)
            trained = first_model.resume_training(
                run, device=device, resume_command=resume_command, allow_data_change=allow_data_change
            )
        else:
            first_model.warn_of_dominant_note(corpus)
            first_model.warn_of_secrets(corpus)
            first_model.warn_of_private_notes(corpus)
            loaded = None
            if base is not None:
                with progress_bar("reading the base") as bar:
                    loaded = open_base(base, device, run.path / "base", bar)
            with status_line("measuring the speed of this machine"):
                plan = choose_plan(
                    corpus,
                    loaded,
                    seconds=60 * minutes - (time.monotonic() - began),
                    device=device,
                    rank=lora_rank,
                    own_dialogues=primer is not None,
                    base_name=base or "",
                )
            say(f"plan: {plan.describe()}; into {run.path}")
            if plan.seconds > 60 * minutes:
                took = format_duration(plan.seconds)
                say(f"warning: training takes about {took}, longer than --minutes {minutes:g}: this model is large for "
                    "this machine, and with fewer steps it would learn nothing")  # fmt: skip
            topics = [] if no_questions else topics_of(corpus, plan)
            trained = first_model.build_and_train(
                corpus,
                dialogue_file(primer),
                topics,
                plan,
                run,
                device=device,
                resume_command=resume_command,
                base=loaded,
            )
        print("\nBits per byte on notes that it has never seen; lower is better.")
        size = report_size(60 * minutes, [] if trained.writer.run is None else trained.writer.run.metrics())
        scores = first_model.show_scores_of(trained, limit=size.held_out, primed=size.primed)
        first_model.show_base_comparison(trained, scores, most=size.compared)
        first_model.show_continuation(trained, corpus)
        first_model.show_answers(trained, topics, notes=len(corpus.train), most=size.questions)
        first_model.show_quick_audit(trained, corpus, windows=size.windows)
        for line in first_model.unreadable_lines(corpus):
            say(line)
        print(f"\nDone in {format_duration(time.monotonic() - began)}. Everything is in {run.path}. Try next:")
        print(f"  {command('serve', run.path)}")
        print(f"  {command('chat', run.path)}")
        print(f"  {command('generate', trained.writer.path.parent.parent, first_model.opening(corpus))}")
        print(f"  {command('audit', run.path, '--notes', corpus.selected.root)}")


def _restored(asked: dict[str, Any], stored: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options that a model was begun with. Raises ValueError if others were typed.

    asked: as typed, with the defaults. The minutes may change: they choose nothing that is read.
    """
    defaults = {"minutes": DEFAULT_MINUTES, "exclude": [], "folder": None}
    for name, value in asked.items():
        typed = value not in (defaults.get(name), False, None)
        if typed and name != "minutes" and name in stored and value != stored[name]:
            option = "FOLDER" if name == "folder" else f"--{name.replace('_', '-')}"
            before = stored[name] if stored[name] not in ([], False, None) else "not given"
            raise ValueError(
                f"{option} is {value}, but the model in {folder} was begun with another ({before}): omit {option}, or "
                "start over without --resume in another --run-dir"
            )
    kept = {"minutes": asked["minutes"]} if asked["minutes"] != DEFAULT_MINUTES else {}
    return {**asked, **stored, **kept}


def _options_of(data: DataConfig | None) -> dict[str, Any]:
    """Return the options behind the config of a model that an older version began; none if it has no plan."""
    import dataclasses

    if data is None:
        return {}
    options = {**dataclasses.asdict(data.notes), "exclude": list(data.notes.exclude), "folder": data.roam}
    del options["formats"]
    return {**options, "encoding_errors": data.encoding_errors}


def _print_check(found: NoteCheck) -> None:
    from niels_gpt.data.note_selection import NOT_A_NOTE, private_notes_line
    from niels_gpt.data.reading.utf8 import NOT_UTF8
    from niels_gpt.system.console import short_number

    print(f"{found.folder}: {found.summary}")
    if found.private_notes:
        print(private_notes_line(found.private_notes))
    if found.notes:
        print(f"\nsize: {found.words:,} words, {short_number(found.bytes)}B; largest:")
        for path, size in found.largest:
            print(f"  {short_number(size):>8}B  {_safe(path)}")
        if found.dominant:
            print(_safe(found.dominant))
        scripts = [f"{name} {_percent(share)}" for name, share in found.scripts.items() if share >= 0.01]
        others = sum(share for share in found.scripts.values() if share < 0.01)
        if others:
            scripts.append(f"others {_percent(others)}")
        print("\nscripts: " + (", ".join(scripts) or "none"))
    listed = sorted(found.skipped, key=lambda entry: entry.kind == NOT_A_NOTE)  # attachments last
    listed = [entry for entry in listed if entry.kind != NOT_UTF8]  # listed below
    skipped = [f"{_safe(entry.path)}  {entry.reason}" + _count(entry.files) for entry in listed]
    _print_list("skipped", skipped)
    _print_list("not text", [f"{_safe(path)}  {reason}" for path, reason in found.not_text])
    _print_list("same text", [" = ".join(map(_safe, group)) for group in found.duplicates])
    near = [f"{pair.similarity:.0%}  {_safe(pair.first)}  {_safe(pair.second)}" for pair in found.near_duplicates]
    _print_list("almost the same text", near)
    _print_list("secrets", [f"{_safe(secret.path)}:{secret.line}  {secret.kind}" for secret in found.secrets])
    if found.secrets:
        print("A model can recite what it was trained on: remove them, or exclude the files (--exclude, .nielsignore).")


def _print_list(title: str, lines: list[str]) -> None:
    """Print a titled list; its beginning if it is long."""
    print(f"\n{title}: {len(lines):,}" if lines else f"\n{title}: none")
    for line in lines[:_SHOWN]:
        print(f"  {line}")
    if len(lines) > _SHOWN:
        print(f"  and {len(lines) - _SHOWN:,} more (--json has all)")


def _count(files: int) -> str:
    return f", {files:,} files" if files > 1 else ""


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "under 1%"


def _safe(path: str) -> str:
    """Return a path that can be printed: bytes that are not utf-8 are escaped."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
