"""One run, from its small files: what it is, how far it got, how good it is, what it costs on disk, what to type next.

Opens no checkpoint and imports no torch, so that a hundred runs take a second.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from niels_gpt.config import ModelConfig, RunConfig
from niels_gpt.config.yaml_file import differences, load_config, to_dict, with_defaults
from niels_gpt.model.sizes import number_of_weights
from niels_gpt.runs.environment import DIVERGED, FAILED, STOPPED, Environment, Session, read_environment
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.metrics import (
    bits_per_byte,
    eval_name,
    headline_evals,
    is_over_bytes,
    read_metrics,
    selection_loss,
    warn_of_damage,
)
from niels_gpt.runs.pipeline import CACHE, PHASES, TOPICS, pipeline_of
from niels_gpt.runs.source import SECTIONS, is_imported, read_source
from niels_gpt.runs.stored_config import warn_of_changes
from niels_gpt.system import files
from niels_gpt.system.checked_json import DamagedJSON, read_checked_json, write_checked_json
from niels_gpt.system.console import error_message, one_line, optional_write
from niels_gpt.system.program import command

State = Literal["finished", "training", "stopped", "imported", "damaged"]
PROGRESS = ("task", "parameters", "steps", "total_steps", "best_loss", "best_step", "bits_per_byte")
SUMMARY = ("name", "path", "state", "changed", "disk", *PROGRESS, "last", "problem")
"""The fields of a list of runs."""
EVAL_FILE = "eval.json"
"""Where `niels-gpt eval` stores the scores of the best checkpoint of a run."""


def _from_progress(name: str) -> Any:
    return property(lambda run: run._progress.get(name))


class RunInfo:
    """A run. A field is read when it is first asked for, and kept; a watcher makes a new one if the files change.

    Those of a list of runs never raise: of a damaged run, and of one that does not have them, they are None.
    """

    state: State = _from_progress("state")
    """`training`: a process holds its lock; `stopped`: it can be resumed; `imported`: a public model without steps."""
    problem: str | None = _from_progress("problem")
    """Why it is damaged."""
    task: str | None = _from_progress("task")
    parameters: int | None = _from_progress("parameters")
    steps: int | None = _from_progress("steps")
    """Steps done; None for an imported model, as are `total_steps` and `task`."""
    total_steps: int | None = _from_progress("total_steps")
    best_loss: float | None = _from_progress("best_loss")
    """Lowest validation loss, in nats per byte or token."""
    best_step: int | None = _from_progress("best_step")
    bits_per_byte: float | None = _from_progress("bits_per_byte")
    """The best loss in bits per byte of text; for tokens only if `niels-gpt eval` has measured it."""
    last: dict[str, Any] | None = _from_progress("last")
    """The last line of metrics.jsonl."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """name: its path below the folder of runs."""
        self.path = path
        self.name = name or path.name

    @cached_property
    def changed(self) -> float:
        """When it last wrote metrics or its config: seconds since 1970."""
        return max(_modified(self.path / file) for file in ("metrics.jsonl", "config.yaml")) or _modified(self.path)

    @cached_property
    def disk(self) -> int | None:
        """Bytes on disk; a file with several names counts once. None: the size of a file cannot be read."""
        return disk_usage(self.path)

    @cached_property
    def _progress(self) -> dict[str, Any]:
        try:
            parameters = number_of_weights(ModelConfig.of(self.tree["model"]))
            if is_imported(self.path):
                return {"state": "imported", "parameters": parameters}
            found = read_metrics(self.path / "metrics.jsonl", containing=b'"evals"')
            warn_of_damage(self.path / "metrics.jsonl", found)
            last = found.lines[-1] if found.lines else None
            steps, total = last["step"] + 1 if last else 0, self.tree["train"]["total_steps"]
            evaluated = [line for line in found.lines if "evals" in line]
            best = _best(self.tree, evaluated)
            best_step = best["step"] + 1 if best else None
            bits = _measured_bits(self.path, self.tree, best_step)
            if best and bits is None:
                bits = bits_per_byte(self.tree, best["evals"])
            return {
                "state": "training" if is_locked(self.path) else "finished" if steps >= total else "stopped",
                "task": self.tree["task"],
                "parameters": parameters,
                "steps": steps,
                "total_steps": total,
                "best_loss": selection_loss(self.tree, best["evals"]) if best else None,
                "best_step": best_step,
                "bits_per_byte": bits,
                "last": last,
                "last_evals": headline_evals(evaluated[-1]["evals"]) if evaluated else {},
            }
        except (ValueError, LookupError, TypeError, AttributeError, OSError) as err:
            problem = f"config.yaml has no {err}" if isinstance(err, KeyError) else str(err)
            return {"state": "damaged", "problem": problem}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The fields of a list of runs as JSON values."""
        return {name: getattr(self, name) for name in SUMMARY} | {"path": str(self.path)}

    # --- what a damaged run may not have -------------------------------------------------------------

    @cached_property
    def tree(self) -> dict[str, Any]:
        """Its config as `read_tree` returns it. Raises ValueError."""
        return read_tree(self.path)

    @property
    def unit(self) -> str:
        """What its losses are per: "byte" or "token"."""
        return "byte" if is_over_bytes(self.tree) else "token"

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl, with a warning about damaged ones."""
        return RunFolder(self.path).metrics()

    @cached_property
    def environment(self) -> Environment | None:
        """What its sessions recorded; see `read_environment`."""
        return read_environment(self.path)

    @property
    def last_session(self) -> Session | None:
        """Its last start; None if none is recorded."""
        return self.environment.sessions[-1] if self.environment and self.environment.sessions else None

    @property
    def outcome(self) -> str:
        """Its state; of a stopped run how it ended, if that is recorded."""
        last = self.last_session if self.state == "stopped" else None
        if last is None:
            return self.state
        ends = {None: "killed", STOPPED: f"stopped by {last.reason}", DIVERGED: DIVERGED, FAILED: FAILED}
        return ends.get(last.outcome, "stopped")

    @property
    def failure(self) -> str | None:
        """Why it is damaged, or ended with an error; None for other runs."""
        last = self.last_session if self.state == "stopped" else None
        return (last.reason or last.outcome) if last and last.outcome in (DIVERGED, FAILED) else self.problem

    @cached_property
    def detail(self) -> dict[str, Any]:
        """The summary with data, checkpoints, last evaluation, differences from the defaults and next commands.

        A damaged run has the fields of the summary only.
        """
        if self.state == "damaged":
            return self.summary
        try:
            config = load_config(self.path / "config.yaml")
        except ValueError as err:
            return {**self.summary, "state": "damaged", "problem": str(err)}
        imported = self.state == "imported"
        checkpoints, same_files = _checkpoints(self.path / "checkpoints")
        topics = (pipeline_of(self.path) or self.path) / CACHE / TOPICS
        return {
            **self.summary,
            "context": config.model.T,
            "vocabulary": config.model.V,
            "source": read_source(self.path),
            "topics": str(topics) if config.task != "pretrain" and topics.is_file() else None,
            "data": [] if imported else _data(config),
            "last_evals": self._progress.get("last_evals", {}),
            "last": {key: value for key, value in (self.last or {}).items() if key != "evals"} or None,
            "checkpoints": checkpoints,
            "same_files": same_files,
            "differences": _changes(config, SECTIONS if imported else ()),
            "next": _next_commands(self.path, config, self.state, bool(checkpoints)),
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
            warn_unreadable(path / EVAL_FILE, "the measured bits per byte", err)
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
        warn_unreadable(path, "its size", err)
        return None
    return sum(seen.values())


def _raise_unless_gone(err: OSError) -> None:
    if not isinstance(err, FileNotFoundError):
        raise err


def warn_unreadable(path: Path, what: str, err: Exception) -> None:
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


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
    except OSError as err:
        warn_unreadable(path, "its time", err)
        return 0.0


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


def _checkpoints(folder: Path) -> tuple[dict[str, int | None], dict[str, str]]:
    """Return {name: bytes} of the checkpoints, files and folders, best and latest first; None: it cannot be read.

    And {name: earlier name} of those that are links to another one: they take no more disk space.
    """
    found = folder.iterdir() if folder.is_dir() else ()
    order = {"best.pt": 0, "latest.pt": 1, "latest": 1}
    paths = [p for p in found if not p.name.startswith(".") and p.name != "config.json"]
    paths.sort(key=lambda p: (order.get(p.name, 2), p.name))
    sizes = {p.name: disk_usage(p) for p in paths}
    first: dict[tuple[int, int], str] = {}
    same = {}
    for p in paths:
        with contextlib.suppress(OSError):  # `disk_usage` warned
            info = p.stat()
            name = first.setdefault((info.st_dev, info.st_ino), p.name)
            if name != p.name:
                same[p.name] = name
    return sizes, same


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
            commands.append(command("research", "memorize", path))
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
    states = [RunInfo(pipeline / phase).state for phase in PHASES]
    return "training" not in states and states != ["finished", "finished"]


def _opening(config: RunConfig) -> str:
    """Return a text to continue: the sample prompt if it is a single line, as those of chats are not."""
    prompt = config.output.sample_prompt
    return prompt if prompt.isprintable() else "The "
