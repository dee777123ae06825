"""Options that several commands share. Importing this module loads typer and the config schema, nothing heavy.

Paths are checked here, when the options are parsed: a command imports torch when it runs, which takes seconds, and a
mistyped path is reported before that. The checks are those of the library, in modules that do not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, get_args, get_origin

import typer

from niels_gpt.config import LAST_SEED, MOST_TOKENS
from niels_gpt.system import files
from niels_gpt.system.urls import location

# typer reads these at run time, so they cannot be strings such as "int | None".
Text = Optional[str]  # noqa: UP045
Count = Optional[int]  # noqa: UP045
Number = Optional[float]  # noqa: UP045
OptionalPath = Optional[Path]  # noqa: UP045


def output_option(name: str, text: str, *, folder: bool = False) -> Any:
    """Return the option of a file or folder to write; an unusable path is refused before any work starts."""

    def check(path: OptionalPath) -> OptionalPath:
        if path is not None:
            files.check_output_path(path, name, folder=folder)
        return path

    return typer.Option(name, callback=check, is_eager=True, help=text)  # eager: checked before what is read


def input_option(name: str, text: str) -> Any:
    """Return the option of a file or folder to read; one that does not exist is refused before any work starts."""

    def check(path: OptionalPath) -> OptionalPath:
        if path is not None and not files.expand_home(path).exists():
            raise FileNotFoundError(f"{name} {path}: no such file or folder")
        return path

    return typer.Option(name, callback=check, help=text)


def config_option(text: str) -> Any:
    """Return the option --config; a file that does not exist is refused before any work starts."""

    def check(path: OptionalPath) -> OptionalPath:
        if path is not None:
            from niels_gpt.config.builtin_configs import find_config

            find_config(path)
        return path

    return typer.Option("--config", callback=check, help=text)


def notes_argument() -> Any:
    """Return the argument of a folder of notes; one that does not exist is refused before any work starts."""

    def check(ctx: typer.Context, path: Path) -> Path:
        from niels_gpt.data.note_selection import check_notes_folder

        if not ctx.resilient_parsing:
            check_notes_folder(path)
        return path

    return typer.Argument(metavar="FOLDER", callback=check, help="Your folder of notes.")


def choice_option(name: str, choices: tuple[str, ...], text: str) -> Any:
    """Return an option with a few allowed values; another value is refused before any work starts."""

    def check(value: Text) -> Text:
        if value is not None and value not in choices:
            listed = " or ".join([", ".join(choices[:-1]), choices[-1]])
            raise ValueError(f"{name} must be {listed}, got {value!r}")
        return value

    return typer.Option(name, callback=check, help=text)


def _go_offline(offline: bool) -> bool:
    if offline:
        from niels_gpt.data.reading.hub import go_offline

        go_offline()
    return offline


OfflineOption = Annotated[
    bool, typer.Option("--offline", callback=_go_offline, help="Never contact the Hub: local files and caches only.")
]


def field_option(cls: type, name: str, panel: str | None = None) -> Any:
    """Return the annotation of a parameter: the option `--name` of a config field, with its type, choices and help.

    What is not given is None, and a list is [].
    """
    from niels_gpt.config.explain import docstrings
    from niels_gpt.config.options import fields_of, kinds_of

    kind = kinds_of(fields_of(cls)[name])[0].type
    settings: dict[str, Any] = {"rich_help_panel": panel, "help": docstrings(cls)[name].partition(". ")[0]}
    given: Any = kind
    if get_origin(kind) is Literal:
        given, settings["metavar"] = Text, "|".join(get_args(kind))
    elif get_origin(kind) is tuple:
        given, settings["metavar"] = list[get_args(kind)[0]], "TEXT"  # type: ignore[misc]
    return Annotated[given, typer.Option(f"--{name.replace('_', '-')}", **settings)]


# --- the model ---------------------------------------------------------------------------------------


def _newest_by_default(ctx: typer.Context, run: OptionalPath) -> OptionalPath:
    return None if ctx.resilient_parsing else run_or_newest(run, ctx.params.get("checkpoint"))


def _newest_trained_by_default(ctx: typer.Context, run: OptionalPath) -> OptionalPath:
    return None if ctx.resilient_parsing else run_or_newest(run, None, imported=False)


def check_runs(ctx: typer.Context, runs: list[Path] | None) -> list[Path] | None:
    """Raise ValueError for a path that names no run, pipeline or checkpoint."""
    from niels_gpt.runs.loading import check_model_path

    for run in runs or () if not ctx.resilient_parsing else ():
        check_model_path(run)
    return runs


def run_or_newest(run: OptionalPath, checkpoint: OptionalPath, *, imported: bool = True) -> OptionalPath:
    """Return the run, or the newest one if neither it nor a checkpoint was given, and print which.

    imported: whether that may be an imported model. Raises ValueError if there is none.
    """
    from niels_gpt.runs.loading import check_model_path, find_run

    if run is not None:
        check_model_path(run)
    elif checkpoint is None:
        from niels_gpt.system.console import hint

        run = find_run(None, imported=imported).path
        hint(f"using {run}")
    return run


def complete_runs(incomplete: str) -> list[str]:
    """Return the runs in runs/ that begin like this, for shell completion."""
    return sorted(str(path.parent) for path in Path("runs").glob("*/config.yaml") if str(path).startswith(incomplete))


RUNS = Path("runs")
RunsDirOption = Annotated[Path, typer.Option("--runs-dir", help="Folder of the runs.")]


def _run_argument(callback: Callable[[typer.Context, OptionalPath], OptionalPath], newest: str) -> Any:
    return typer.Argument(
        metavar="RUN",
        callback=callback,
        autocompletion=complete_runs,
        show_default=False,
        help=f"A run, a pipeline or a checkpoint; default: the newest {newest} in runs/.",
    )


RunArgument = Annotated[OptionalPath, _run_argument(_newest_by_default, "run")]
TrainedRunArgument = Annotated[OptionalPath, _run_argument(_newest_trained_by_default, "run that was trained here")]
ResumeArgument = Annotated[
    OptionalPath,
    typer.Argument(
        metavar="RUN",
        autocompletion=complete_runs,
        show_default=False,
        help="What to resume; default: the newest in runs/ that is not finished.",
    ),
]
CheckpointOption = Annotated[
    OptionalPath,
    typer.Option("--checkpoint", hidden=True, help="A checkpoint instead of the best one of RUN."),
]
"""RUN may be a checkpoint itself; this also takes the tokenizer of a RUN."""
TokenizerOption = Annotated[
    OptionalPath, typer.Option("--tokenizer", help="Tokenizer of the model; default: that of the run.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]
WeightsOption = Annotated[
    str,
    choice_option(
        "--weights",
        ("float32", "int8"),
        "float32 or int8: int8 is approximate, and faster for small batches on a CPU.",
    ),
]

# --- the data ----------------------------------------------------------------------------------------

WikiOption = Annotated[Text, typer.Option("--wiki", help="hub, embedded, or a folder of wikitext files.")]
RoamOption = Annotated[Text, typer.Option("--notes", help="Your folder of markdown notes, or embedded.")]
PrimerOption = Annotated[Text, typer.Option("--primer", help="Your file of dialogues, or embedded.")]
SourceOption = Annotated[
    list[str],
    typer.Option("--source", metavar="NAME=PATH", help="Path of a source in the config (data.sources.NAME.path)."),
]
EncodingOption = Annotated[
    Text,
    choice_option(
        "--encoding-errors",
        ("strict", "replace", "skip"),
        "Files that are not utf-8: strict (stop), replace (substitute bad bytes) or skip.",
    ),
]
SplitOption = Annotated[str, typer.Option("--split", help="train, validation or test, if the source has it.")]
SubsetOption = Annotated[
    Text, typer.Option("--subset", help="Config name of the dataset on the Hub, e.g. wikitext-2-raw-v1.")
]
PathOption = Annotated[OptionalPath, typer.Option("--path", help="Local file or folder with the rows of the source.")]
SourceConfigOption = Annotated[
    OptionalPath, typer.Option("--config", help="YAML file with your own sources (data.sources).")
]
CacheDirOption = Annotated[
    OptionalPath,
    typer.Option("--cache-dir", parser=location, help="Folder of token caches, or its URL; default: as in the config."),
]
VerifyOption = Annotated[bool, typer.Option("--verify", help="Re-hash the token caches before training.")]

# --- the config and the output -----------------------------------------------------------------------

SetOption = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a config value, e.g. train.base_lr=1e-3.")
]


def _check_trackers(names: list[str]) -> list[str]:
    if names:
        from niels_gpt.training.tracking import check_trackers

        check_trackers(names)
    return names


TrackOption = Annotated[
    list[str],
    typer.Option(
        "--track",
        metavar="NAME",
        callback=_check_trackers,
        help="Also write the metrics for tensorboard or wandb (offline), into the run; may be repeated.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]

# --- sampling ----------------------------------------------------------------------------------------

TemperatureOption = Annotated[
    float, typer.Option("--temperature", help="0 is greedy; higher values give more varied text.")
]
TopKOption = Annotated[int, typer.Option("--top-k", help="Sample from the k most likely tokens; 0 for all.")]
TopPOption = Annotated[
    Number, typer.Option("--top-p", help="Sample from the most likely tokens whose probabilities add up to this.")
]
MinPOption = Annotated[
    Number, typer.Option("--min-p", help="Drop tokens less likely than this fraction of the most likely one.")
]
RepetitionPenaltyOption = Annotated[
    float,
    typer.Option(
        "--repetition-penalty", help="Above 1, tokens of the prompt and of the text so far are less likely; 1 is off."
    ),
]
SeedOption = Annotated[
    Count, typer.Option("--seed", min=0, max=LAST_SEED, help="The same seed gives the same text; default: random.")
]
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", min=1, max=MOST_TOKENS, help="Longest continuation, in tokens (or bytes).")
]

# --- extraction --------------------------------------------------------------------------------------

WindowOption = Annotated[
    Count, typer.Option("--window", min=2, help="Tokens (or bytes) per passage; default: 100, or what fits the model.")
]
PromptOption = Annotated[
    Count,
    typer.Option("--prompt", min=1, help="Tokens of each passage that are given to the model; default: half of them."),
]
StrideOption = Annotated[
    int, typer.Option("--stride", min=1, help="Tokens between the starts of neighboring passages.")
]
GreedyOption = Annotated[
    Count,
    typer.Option(
        "--greedy",
        min=0,
        help="Also decode N tokens greedily after prompts of N tokens; 0: do not; default: 32, or what fits the model.",
    ),
]
