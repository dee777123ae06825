"""One run in detail, and how the configs of several differ; from small files, as in `catalog.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from niels_gpt.config import RunConfig
from niels_gpt.config.yaml_file import differences, load_config, to_dict
from niels_gpt.runs.catalog import PHASES, disk_usage, pipeline_of, read_tree, summarize
from niels_gpt.runs.metrics import read_metrics
from niels_gpt.runs.source import SECTIONS, read_source
from niels_gpt.system.files import display_path
from niels_gpt.system.program import command


def describe(path: Path) -> dict[str, Any]:
    """Return the summary of a run with its data, checkpoints, last evaluation, differences from the defaults and next
    commands. A damaged run has the fields of the summary only."""
    summary = summarize(path)
    detail = dataclasses.asdict(summary)
    if summary.state == "damaged":
        return detail
    try:
        config = load_config(path / "config.yaml")
    except ValueError as err:
        return {**detail, "state": "damaged", "problem": str(err)}
    last, imported = detail["last"] or {}, summary.state == "imported"
    checkpoints = _checkpoints(path)
    return {
        **detail,
        "context": config.model.T,
        "vocabulary": config.model.V,
        "source": read_source(path),
        "data": [] if imported else _data(config),
        "last_evals": {name: value for name, value in _last_evals(path).items() if "/" not in name},
        "last": {key: value for key, value in last.items() if key != "evals"} or None,
        "checkpoints": checkpoints,
        "same_files": _same_files(path),
        "differences": _changes(config, SECTIONS if imported else ()),
        "next": _next_commands(path, config, summary.state, bool(checkpoints)),
    }


def config_table(runs: Mapping[str, Path]) -> dict[str, list[Any]]:
    """Return {dotted key: one value per run} of the config keys whose values are not all equal.

    Imported models are compared with the others by the sections that they have.
    """
    trees = [read_tree(path) for path in runs.values()]
    models = [{key: tree[key] for key in SECTIONS} for tree in trees]
    trained = [tree for tree in trees if "train" in tree]
    groups = (group for group in (trained, models) if group)
    keys = dict.fromkeys(key for first, *rest in groups for tree in rest for key in differences(first, tree))
    return {key: [_value(tree, key) for tree in trees] for key in keys}


def without_own_paths(table: Mapping[str, Sequence[Any]], runs: Sequence[Path]) -> dict[str, list[Any]]:
    """Return a `config_table` for people: without the paths of data inside the folder of each run or its pipeline.

    Those paths are None, and keys without another value are dropped. Sources that not all runs have are dicts without
    their empty values.
    """
    folders = [(pipeline_of(run) or run).resolve() for run in runs]
    found = {}
    for key, values in table.items():
        parents = {key.rsplit(".", depth)[0] for depth in range(1, key.count(".") + 1)}
        if not key.startswith("data."):
            found[key] = list(values)
        elif not parents & table.keys():  # else the parent has this value, too
            shown = [_without_paths_in(folder, value) for folder, value in zip(folders, values, strict=True)]
            if any(value is not None for value in shown):
                found[key] = shown
    return found


def _without_paths_in(folder: Path, value: Any) -> Any:
    """Return a config value, or None for a path inside a folder; dicts lose such paths and their empty values."""
    if isinstance(value, Mapping):
        inner = {key: _without_paths_in(folder, item) for key, item in value.items()}
        return {key: item for key, item in inner.items() if item not in (None, "", [], {})} or None
    return None if isinstance(value, str) and Path(value).is_relative_to(folder) else value


def value_text(value: Any) -> str:
    """Return a config value as one line: dicts and lists as in YAML, paths short, other texts escaped if need be.

    Floats have twelve digits at most: 1 - 0.8 is 0.2.
    """
    import yaml

    value = _rounded(value)
    if isinstance(value, str):
        plain = value.isprintable() and value == value.strip() != ""
        return display_path(value) if plain else repr(value)
    if isinstance(value, (dict, list)):
        return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6).strip()
    return str(value)


def _rounded(value: Any) -> Any:
    """Return a config value whose floats, also those in dicts and lists, have twelve digits."""
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


def unique_names(paths: Sequence[Path], runs_dir: Path) -> dict[str, Path]:
    """Return {name: path}: the path below the folder of runs, else the last part of the path if it is unique."""
    named: dict[str, Path] = {}
    for path in paths:
        name = str(path.relative_to(runs_dir)) if path.is_relative_to(runs_dir) else path.resolve().name
        named[name if name not in named else str(path)] = path
    return named


def _value(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _changes(config: RunConfig, sections: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Return {key: (default, value)} of what differs from the defaults of the task; paths of data stand elsewhere.

    sections: those to compare; none: all.
    """
    found = differences(to_dict(RunConfig(task=config.task), sections=sections), to_dict(config, sections=sections))
    return {key: pair for key, pair in found.items() if not key.startswith(("data.", "model.D"))}


def _data(config: RunConfig) -> list[str]:
    """Return one line per source: its share and where it is read from."""
    if config.task == "splice":
        where = config.data.token_cache if config.splice.documents == "tokens" else _path_of(config, "roam")
        return [f"{config.splice.dataset_name or 'documents'}, from {where}"]
    lines = []
    for name, share in config.train.p_train.items():
        if share:
            where = (
                _path_of(config, name) if config.task == "bytes" else f"{config.data.token_cache}/{config.task}/{name}"
            )
            lines.append(f"{share:.1%} {name}, from {where}")
    return lines


def _path_of(config: RunConfig, source: str) -> str:
    if source in config.data.sources:
        return config.data.sources[source].path
    return str(getattr(config.data, source, "?"))


def _checkpoints(path: Path) -> dict[str, int | None]:
    """Return {name: bytes} of the checkpoints, best and latest first; None for a size that cannot be read."""
    return {p.name: disk_usage(p) for p in _checkpoint_paths(path)}


def _same_files(path: Path) -> dict[str, str]:
    """Return {name: earlier name} of the checkpoints that are links to another one: they take no more disk space."""
    first: dict[tuple[int, int], str] = {}
    same = {}
    for p in _checkpoint_paths(path):
        try:
            info = p.stat()
        except OSError:  # `_checkpoints` warns
            continue
        name = first.setdefault((info.st_dev, info.st_ino), p.name)
        if name != p.name:
            same[p.name] = name
    return same


def _checkpoint_paths(path: Path) -> list[Path]:
    """Return the checkpoints of a run, files and folders: best and latest first."""
    folder = path / "checkpoints"
    found = (
        [p for p in folder.iterdir() if not p.name.startswith(".") and p.name != "config.json"]
        if folder.is_dir()
        else []
    )
    order = {"best.pt": 0, "latest.pt": 1, "latest": 1}
    return sorted(found, key=lambda p: (order.get(p.name, 2), p.name))


def _last_evals(path: Path) -> dict[str, float]:
    lines = read_metrics(path / "metrics.jsonl", containing=b'"evals"').lines
    return next((dict(m["evals"]) for m in reversed(lines) if isinstance(m.get("evals"), dict)), {})


def _next_commands(path: Path, config: RunConfig, state: str, has_checkpoint: bool) -> list[str]:
    """Return what to type next; for a phase of a pipeline, commands on the pipeline where they mean that phase."""
    if state == "imported":
        return [command("chat", path), command("notes", "FOLDER", "--base", path)]
    pipeline = pipeline_of(path)
    commands = []
    if pipeline is not None and _can_resume(pipeline):
        commands.append(command("pipeline", pipeline, "--resume"))
    elif pipeline is None and state == "stopped":
        commands.append(command("train", path, "--resume"))
    if has_checkpoint:
        if config.task == "splice":
            commands.append(command("memorize", path))
        elif config.task == "pretrain":
            commands += [command("generate", path, _opening(config)), command("eval", path)]
        else:
            named = path if pipeline is None else pipeline
            commands += [command("chat", named), command("eval", named)]
    if state == "finished" and (pipeline is None or config.task == "sft"):
        commands.append(command("train", path, "--resume", "--steps", str(2 * config.train.total_steps)))
    return commands


def _can_resume(pipeline: Path) -> bool:
    """Whether a pipeline has steps left, and no process is training it."""
    states = [summarize(pipeline / phase).state for phase in PHASES]
    return "training" not in states and states != ["finished", "finished"]


def _opening(config: RunConfig) -> str:
    """Return a text to continue: the sample prompt if it is a single line, as those of chats are not."""
    prompt = config.output.sample_prompt
    return prompt if prompt.isprintable() else "The "
