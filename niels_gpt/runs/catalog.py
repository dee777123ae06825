"""The runs in a folder: find, name, compare and remove them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from niels_gpt.config.yaml_file import differences
from niels_gpt.runs.info import RunInfo, disk_usage, is_locked, read_tree, warn_unreadable
from niels_gpt.runs.pipeline import CACHE, PHASES, holds_caches, pipeline_of
from niels_gpt.runs.source import SECTIONS
from niels_gpt.system import files

RUNS = Path("runs")


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders in a folder of runs: direct ones, and those of pipelines and studies one level below.

    Links are not followed.
    """
    found = []
    for path in _folders(folder):
        if _looks_like_run(path):
            found.append(path)
        else:
            try:
                found += [inner for inner in _folders(path) if _looks_like_run(inner)]
            except OSError as err:
                warn_unreadable(path, "its runs", err)
    return found


def newest_first(folder: Path) -> list[RunInfo]:
    """Return the runs in a folder, newest first."""
    runs = [RunInfo(path, str(path.relative_to(folder))) for path in find_runs(folder)]
    return sorted(runs, key=lambda run: (-run.changed, run.name))


def locate(name: str | Path, folder: Path = RUNS) -> Path:
    """Return the folder that a path or a name in the folder of runs means. Raises ValueError if there is none.

    Of two, the one with runs: `notes` may be the notes, and a model of them in runs/.
    """
    found = [path for path in (Path(name), folder / name) if path.is_dir()]
    if found:
        return next(filter(_holds_runs, found), found[0])
    known = ", ".join(str(path.relative_to(folder)) for path in find_runs(folder)[:8]) or "none"
    raise ValueError(f"no run {name}, also not in {folder}/: name a folder, or one of its runs ({known})")


def resolve_runs(name: str | Path, folder: Path = RUNS) -> list[Path]:
    """Return the runs that a path or a name in the folder of runs means: itself, or those of a pipeline or study.

    Of a pipeline its phases, not the base beside them. Raises ValueError if there is none.
    """
    path = locate(name, folder)
    runs = _runs_in(path)
    return [run for run in runs if pipeline_of(run) == path] or runs


def _runs_in(path: Path) -> list[Path]:
    """Return a run itself, or all runs in a folder, phases in their order. Raises ValueError if there is none."""
    runs = [path] if _looks_like_run(path) else [p for p in _folders(path) if _looks_like_run(p)]
    if not runs:
        raise ValueError(f"{path} is not a run: it has no config.yaml")
    return sorted(runs, key=lambda run: PHASES.index(run.name) if run.name in PHASES else 0)


def unique_names(paths: Sequence[Path], runs_dir: Path) -> dict[str, Path]:
    """Return {name: path}: the path below the folder of runs, else the last part of the path if it is unique."""
    named: dict[str, Path] = {}
    for path in paths:
        name = str(path.relative_to(runs_dir)) if path.is_relative_to(runs_dir) else path.resolve().name
        named[name if name not in named else str(path)] = path
    return named


def config_table(runs: Mapping[str, RunInfo]) -> dict[str, list[Any]]:
    """Return {dotted key: one value per run} of the config keys whose values are not all equal.

    Imported models are compared with the others by the sections that they have.
    """
    trees = [run.tree for run in runs.values()]
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
        return files.display_path(value) if plain else repr(value)
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


def _value(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def check_removable(path: Path) -> list[Path]:
    """Return the runs in a folder that may be removed. Raises ValueError, with the reason, if it may not.

    A run, a pipeline with its caches (also one that was stopped before its training began) or a study may; not a link,
    not a folder that contains the working directory, and not a folder with a run that is being trained.
    """
    if path.is_symlink():
        raise ValueError(f"{path} is a link to {path.resolve()}: name that folder, or remove the link yourself")
    has_caches = holds_caches(path)
    begun = not has_caches or any(_looks_like_run(p) for p in (path, *_folders(path)))
    runs = _runs_in(locate(path)) if begun else []
    real = path.resolve()
    if real in (Path.cwd(), *Path.cwd().parents, Path.home(), *Path.home().parents):
        raise ValueError(f"{path} contains the working directory or your home: remove the run from outside it")
    if not _looks_like_run(path):
        own = {path / CACHE} if has_caches else set()
        others = [p.name for p in path.iterdir() if p.is_dir() and p not in {*runs, *own}]
        if others:
            raise ValueError(f"{path} holds more than runs ({', '.join(sorted(others)[:5])}): name a single run")
    for run in runs:
        if is_locked(run):
            raise ValueError(f"a process is training into {run}: stop it first (Ctrl-C saves the run)")
    return runs


def remove(path: Path) -> int | None:
    """Remove a run, pipeline or study, and return the bytes freed (`disk_usage`).

    Raises ValueError as `check_removable` does.
    """
    runs = check_removable(path)
    with contextlib.ExitStack() as stack:
        for run in runs:
            try:
                stack.enter_context(files.lock(run / "run.lock", wait=files.LOCK_SECONDS))
            except BlockingIOError:
                raise ValueError(f"a process is training into {run}: stop it first (Ctrl-C saves the run)") from None
        size = disk_usage(path)
        hidden = path.with_name(f".{path.name}.gone.tmp")  # a partly removed run never has its name
        path.rename(hidden)
        shutil.rmtree(hidden)
    return size


def _folders(path: Path) -> Iterator[Path]:
    """Yield the visible folders in a folder, without links, by name."""
    try:
        entries = sorted(path.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # a run that is being removed
        return
    for inner in entries:
        if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith("."):
            yield inner


def _holds_runs(path: Path) -> bool:
    """Whether a folder is a run, a pipeline, or a folder with runs."""
    return holds_caches(path) or any(map(_looks_like_run, (path, *_folders(path))))


def _looks_like_run(path: Path) -> bool:
    """Whether a folder is a run, damaged ones included: a config.yaml of a run, or metrics, or checkpoints."""
    if any(path.glob("checkpoints/*.pt")) or (path / "metrics.jsonl").is_file() or (path / "run.lock").is_file():
        return True
    try:
        return bool(read_tree(path))
    except ValueError:
        return False
    except OSError:  # `RunInfo` reports it
        return True
