"""The runs of a folder: what each is, how far it got, how good it is, and what it costs on disk.

Reads config.yaml and metrics.jsonl, opens no checkpoint and imports no torch, so that a hundred runs take a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import stat
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from niels_gpt.config import ModelConfig
from niels_gpt.config.yaml_file import with_defaults
from niels_gpt.model.sizes import number_of_weights
from niels_gpt.runs.metrics import read_metrics, warn_of_damage
from niels_gpt.runs.source import SECTIONS, is_imported
from niels_gpt.runs.stored_config import warn_of_changes
from niels_gpt.runs.validation import bits_per_byte, eval_name, selection_loss
from niels_gpt.system import files
from niels_gpt.system.checked_json import DamagedJSON, read_checked_json, write_checked_json
from niels_gpt.system.console import error_message, one_line
from niels_gpt.system.optional_writes import optional_write

RUNS = Path("runs")
PHASES = ("pretrain", "sft")
CACHE = "cache"
"""Folder of a pipeline with the dialogues, tokenizer and token caches that were made for it."""
_FIRST_FILE = "dialogues.jsonl"
"""What is written into it first, before there is a run or a pretrain.yaml."""
State = Literal["finished", "training", "stopped", "imported", "damaged"]


@dataclass(frozen=True)
class RunSummary:
    """One run, from its small files. What cannot be known is None."""

    name: str
    """Its path below the folder of runs."""
    path: str
    state: State
    """`training`: a process holds its lock; `stopped`: it can be resumed; `imported`: a public model without steps."""
    changed: float
    """When it last wrote metrics or its config: seconds since 1970."""
    disk: int | None
    """Bytes on disk; a file with several names counts once. None: the size of a file cannot be read."""
    task: str | None = None
    parameters: int | None = None
    steps: int | None = None
    """Steps done; None for an imported model, as are `total_steps` and `task`."""
    total_steps: int | None = None
    best_loss: float | None = None
    """Lowest validation loss, in nats per byte or token."""
    best_step: int | None = None
    bits_per_byte: float | None = None
    """The best loss in bits per byte of text; for tokens only if `niels-gpt eval` has measured it."""
    last: dict[str, Any] | None = None
    """The last line of metrics.jsonl."""
    problem: str | None = None
    """Why it is damaged."""


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
                _warn_unreadable(path, "its runs", err)
    return found


def summarize_all(folder: Path) -> list[RunSummary]:
    """Return the summaries of the runs in a folder, newest first."""
    runs = [summarize(path, str(path.relative_to(folder))) for path in find_runs(folder)]
    return sorted(runs, key=lambda run: (-run.changed, run.name))


def locate(name: str | Path, folder: Path = RUNS) -> Path:
    """Return the folder that a path or a name in the folder of runs means. Raises ValueError if there is none."""
    for path in (Path(name), folder / name):
        if path.is_dir():
            return path
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


def pipeline_of(path: Path) -> Path | None:
    """Return the folder of the pipeline that a run is a phase of; None if it is not part of one."""
    return path.parent if path.name in PHASES and (path.parent / "pretrain.yaml").is_file() else None


def summarize(path: Path, name: str | None = None) -> RunSummary:
    """Return the summary of a run; a damaged one is described as such, and never raises."""
    changed = max(_modified(path / file) for file in ("metrics.jsonl", "config.yaml")) or _modified(path)
    basic = RunSummary(name or path.name, str(path), "damaged", changed, disk_usage(path))
    try:
        return dataclasses.replace(basic, **_progress(path))
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as err:
        reason = f"config.yaml has no {err}" if isinstance(err, KeyError) else str(err)
        return dataclasses.replace(basic, problem=reason)


def _progress(path: Path) -> dict[str, Any]:
    """Return the fields of a RunSummary that its config and metrics give. Raises what a damaged file can raise."""
    config = read_tree(path)
    parameters = number_of_weights(ModelConfig.of(config["model"]))
    if is_imported(path):
        return {"state": "imported", "parameters": parameters}
    last, evaluated = _read_metrics(path / "metrics.jsonl")
    steps, total = (last["step"] + 1 if last else 0), config["train"]["total_steps"]
    best = _best(config, evaluated)
    best_step = best["step"] + 1 if best else None
    bits = _measured_bits(path, config, best_step)
    if best and bits is None:
        bits = bits_per_byte(config, best["evals"])
    return {
        "state": "training" if is_locked(path) else "finished" if steps >= total else "stopped",
        "task": config["task"],
        "parameters": parameters,
        "steps": steps,
        "total_steps": total,
        "best_loss": selection_loss(config, best["evals"]) if best else None,
        "best_step": best_step,
        "bits_per_byte": bits,
        "last": last,
    }


def read_tree(path: Path) -> dict[str, Any]:
    """Return config.yaml of a run as a dict, completed with defaults; values are not checked. Raises ValueError.

    An imported model has no sections but those of `source.SECTIONS`.
    """
    import yaml

    file = path / "config.yaml"
    try:
        if file.exists() and not file.is_file():  # reading a pipe would wait for a writer
            raise ValueError("config.yaml is not a file")
        text = file.read_text(encoding="utf-8")
        # The C parser overflows the stack for deep nesting. Each level needs a bracket, or a column of some line.
        deepest = text.count("[") + text.count("{") + max(map(len, text.splitlines()), default=0)
        fast = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        tree = yaml.load(text, Loader=fast if deepest < 1000 else yaml.SafeLoader)
    except FileNotFoundError:
        raise ValueError("it has no config.yaml") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        raise ValueError("config.yaml is not valid YAML") from None
    needed = SECTIONS if is_imported(path) else ("model", "train")
    if not isinstance(tree, dict) or not all(isinstance(tree.get(key), dict) for key in needed):
        raise ValueError("config.yaml is not the config of a run")
    tree = with_defaults({key: tree[key] for key in SECTIONS} if is_imported(path) else tree)
    warn_of_changes(file, tree)
    return tree


def _read_metrics(path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return the last line of metrics.jsonl, and the lines with an evaluation; warns of damaged lines."""
    found = read_metrics(path, containing=b'"evals"')
    warn_of_damage(path, found)
    return found.lines[-1] if found.lines else None, [m for m in found.lines if isinstance(m.get("evals"), dict)]


def _best(config: dict[str, Any], evaluated: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first line with the lowest selection loss."""
    best, lowest = None, math.inf
    for line in evaluated:
        with contextlib.suppress(KeyError):  # another p_val at that time
            loss = selection_loss(config, line["evals"])
            if loss < lowest:
                best, lowest = line, loss
    return best


def _measured_bits(path: Path, config: dict[str, Any], best_step: int | None) -> float | None:
    """Return the bits per byte that `niels-gpt eval` has measured for the best checkpoint, weighted by p_val."""
    scores = stored_scores(path, best_step)
    if config["task"] == "splice":
        return None
    try:
        weights = {eval_name(name): w for name, w in config["train"]["p_val"].items() if w}
        return math.fsum(w * scores[name]["bits_per_byte"] for name, w in weights.items())
    except (ValueError, LookupError, TypeError):
        return None


EVAL_FILE = "eval.json"
"""Where `niels-gpt eval` stores the scores of the best checkpoint of a run."""


def store_scores(path: Path, result: Mapping[str, Any]) -> None:
    """Store the scores of the best checkpoint in its run; warns if the run cannot be written to."""
    with optional_write(path / EVAL_FILE):
        write_checked_json(path / EVAL_FILE, {key: value for key, value in result.items() if key != "checkpoint"})


def stored_scores(path: Path, best_step: int | None) -> dict[str, dict[str, float]]:
    """Return the scores that `niels-gpt eval` has stored for the best checkpoint of a run; {} if there are none."""
    try:
        stored = read_checked_json(path / EVAL_FILE)
        if stored["step"] == best_step and all(isinstance(score, dict) for score in stored["scores"].values()):
            return dict(stored["scores"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as err:
        if isinstance(err, OSError | DamagedJSON):
            _warn_unreadable(path / EVAL_FILE, "the measured bits per byte", err)
    return {}


def disk_usage(path: Path) -> int | None:
    """Return the bytes of a file, or of all files below a folder; None, with a warning, if a size cannot be read.

    Hard links count once. Symbolic links in the folder are not followed. What disappears meanwhile has no bytes.
    """
    seen: dict[tuple[int, int], int] = {}
    try:
        if not stat.S_ISDIR((info := path.stat()).st_mode):
            return info.st_size
        for root, _, names in os.walk(path, onerror=_raise_unless_gone):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    info = Path(root, name).lstat()
                    seen[info.st_dev, info.st_ino] = info.st_size
    except FileNotFoundError:
        return 0
    except OSError as err:
        _warn_unreadable(path, "its size", err)
        return None
    return sum(seen.values())


def _raise_unless_gone(err: OSError) -> None:
    if not isinstance(err, FileNotFoundError):
        raise err


def _warn_unreadable(path: Path, what: str, err: Exception) -> None:
    reason = error_message(err)
    warnings.warn(one_line(f"{path}: {what} cannot be read: {reason}"), stacklevel=1)


def is_locked(path: Path) -> bool:
    """Whether a process is training into a run."""
    file = path / "run.lock"
    if not file.is_file():
        return False
    try:
        return files.is_locked(file)
    except OSError:  # no permission to read: it cannot be told
        return False


def check_removable(path: Path) -> list[Path]:
    """Return the runs in a folder that may be removed. Raises ValueError, with the reason, if it may not.

    A run, a pipeline with its caches (also one that was stopped before its training began) or a study may; not a link,
    not a folder that contains the working directory, and not a folder with a run that is being trained.
    """
    if path.is_symlink():
        raise ValueError(f"{path} is a link to {path.resolve()}: name that folder, or remove the link yourself")
    has_caches = (path / "pretrain.yaml").is_file() or (path / CACHE / _FIRST_FILE).is_file()
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


def _looks_like_run(path: Path) -> bool:
    """Whether a folder is a run, damaged ones included: a config.yaml of a run, or metrics, or checkpoints."""
    if any(path.glob("checkpoints/*.pt")) or (path / "metrics.jsonl").is_file() or (path / "run.lock").is_file():
        return True
    try:
        return bool(read_tree(path))
    except ValueError:
        return False
    except OSError:  # `summarize` reports it
        return True


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
    except OSError as err:
        _warn_unreadable(path, "its time", err)
        return 0.0
