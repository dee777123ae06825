"""`niels-gpt config`: list the built-in configs, print a resolved one, explain a key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from niels_gpt.cli.options import JsonOption, SetOption

if TYPE_CHECKING:
    from niels_gpt.config import RunConfig

app = typer.Typer(no_args_is_help=True, help="List, show and explain configs.")


@app.command("list")
def list_(json: JsonOption = False) -> None:
    """List the configs that come with the package; --config takes their names."""
    from json import dumps

    from niels_gpt.config.builtin_configs import builtin_configs, description

    rows = {name: description(path) for name, path in builtin_configs().items()}
    if json:
        print(dumps([{"name": name, "description": text} for name, text in rows.items()], indent=2))
        return
    width = max(map(len, rows))
    for name, text in rows.items():
        print(f"{name:{width}}  {text}")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE|RUN", help="A built-in config, a YAML file, or a run.")],
    set_: SetOption = [],  # noqa: B006
    json: JsonOption = False,
) -> None:
    """Print a resolved config as YAML: every key with its value. A pipeline has two."""
    from json import dumps

    from niels_gpt.config.yaml_file import dump_config, to_dict

    configs, sections = _load(name, set_), _sections(name)
    if json:
        trees = {phase: to_dict(config, sections=sections) for phase, config in configs.items()}
        print(dumps(trees.get("", trees), indent=2))
        return
    for phase, config in configs.items():
        print((f"# {phase}\n" if phase else "") + dump_config(config, sections=sections), end="" if not phase else "\n")


@app.command("explain")
def explain_(
    key: Annotated[str, typer.Argument(metavar="[KEY]", help="A key or a section, e.g. train.base_lr or train.")] = "",
    json: JsonOption = False,
) -> None:
    """Explain a config key, or all keys of a section: what it does, its type, limits and default."""
    import textwrap
    from json import dumps
    from shutil import get_terminal_size

    from niels_gpt.config.explain import explain

    found = explain(key)
    if json:
        print(dumps([entry._asdict() for entry in found], indent=2, ensure_ascii=False))
        return
    width = min(get_terminal_size().columns, 100)
    for entry in found:
        default = "" if entry.default is None else f" = {entry.default}"
        since = f"since {entry.since}" if entry.since > "0.1" else ""
        facts = ", ".join(fact for fact in (entry.limits, since) if fact)
        print(f"{entry.key}: {entry.type}{default}{f'  ({facts})' if facts else ''}")
        print(textwrap.fill(entry.text, width, initial_indent="    ", subsequent_indent="    "))


def _load(name: str, overrides: list[str]) -> dict[str, RunConfig]:
    """Return {"": config}, or the configs of both phases, of a built-in config, a file, a run or a pipeline."""
    from niels_gpt.config.yaml_file import load_config, load_pipeline, read_sections

    folder = _folder(name)
    if folder is not None and (folder / "config.yaml").is_file():
        return {"": load_config(folder / "config.yaml", overrides=overrides)}
    if folder is not None and (folder / "pretrain.yaml").is_file():
        phases = ("pretrain", "sft")
        for item in overrides:
            if item.split(".")[0] not in phases:
                raise ValueError(f"--set {item}: {folder} is a pipeline: put pretrain. or sft. in front of the key")
        return {
            phase: load_config(
                folder / f"{phase}.yaml",
                overrides=[item.removeprefix(f"{phase}.") for item in overrides if item.startswith(f"{phase}.")],
            )
            for phase in phases
        }
    if {"pretrain", "sft"} & read_sections(name).keys():
        return load_pipeline(name, overrides=overrides)
    return {"": load_config(name, overrides=overrides)}


def _folder(name: str) -> Path | None:
    """Return the folder of a run or pipeline; None if the name is not that of a folder."""
    return next((path for path in (Path(name), Path("runs") / name) if path.is_dir()), None)


def _sections(name: str) -> Sequence[str]:
    """Return the sections that a config has; none: all. An imported model was not trained here."""
    from niels_gpt.runs.source import SECTIONS, is_imported

    folder = _folder(name)
    return SECTIONS if folder is not None and is_imported(folder) else ()
