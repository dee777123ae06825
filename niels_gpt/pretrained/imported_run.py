"""Import a public model as a run folder, so that the commands of a run work on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from niels_gpt.chat.formats import chat_problem, why_it_cannot_chat
from niels_gpt.config import ModelConfig
from niels_gpt.model.sizes import number_of_weights
from niels_gpt.pretrained.checksums import check_sums
from niels_gpt.pretrained.find_model import MOST_CONTEXT, find_folder
from niels_gpt.pretrained.folder_tokenizer import folder_tokenizer, tokenizer_record
from niels_gpt.pretrained.model_folder import open_folder
from niels_gpt.pretrained.public_base import public_name, source_record
from niels_gpt.runs.checkpoint import save_state
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import list_runs
from niels_gpt.runs.source import read_source
from niels_gpt.system import files
from niels_gpt.system.files import atomic_folder, check_atomic_folder
from niels_gpt.system.private_files import keep_private
from niels_gpt.system.program import command
from niels_gpt.tokenizer import AnyTokenizer


class Imported(NamedTuple):
    """What was imported."""

    run: RunFolder
    folder: Path
    """Where it was read from."""
    model_type: str
    config: ModelConfig
    weights: int
    """Number of weights."""
    context: int
    """The longest context that the model was made for."""
    tokenizer: AnyTokenizer | None
    """None: the folder has none."""
    earlier: Sequence[Path] = ()
    """Runs in runs/ that were imported before from a model of the same name."""


def import_model(
    name: str,
    run: RunFolder,
    *,
    context: int | None = None,
    revision: str | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> Imported:
    """Import a model in the Hugging Face format into a new run folder, completely or not at all.

    name: a folder, or a repository of the Hub (NAME/MODEL). The weights keep their type; training and decoding use
    float32. context: default `MOST_CONTEXT`, or the model's own if that is shorter.
    on_bytes: called with the bytes that have been read and their total.

    Raises ValueError or OSError before anything is written if the model or its tokenizer is not supported.
    """
    if run.exists or run.orphan() is not None:
        raise ValueError(f"{run.path} already holds a run: choose another --run-dir")
    check_atomic_folder(run.path, "--run-dir")
    if run.path.is_dir() and any(run.path.iterdir()):
        raise ValueError(f"{run.path} is not empty: choose another --run-dir")
    opened = open_folder(find_folder(name, revision=revision), context=context or MOST_CONTEXT)
    check_sums(opened.path)
    config = with_context(opened.config, context)
    tokenizer = folder_tokenizer(opened)
    earlier = [other.path for other in list_runs() if _is_import_of(other, public_name(name))]
    keep_private([opened.path, *opened.path.glob("*.safetensors")])
    total, done = sum(stored.nbytes for _, stored in opened.tensors), 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        if on_bytes is not None:
            on_bytes(done, total)

    state = opened.read_state(on_bytes=progress)
    with atomic_folder(run.path) as folder:
        built = RunFolder(folder)
        with built.lock():
            if tokenizer is not None:
                built.write_tokenizer(tokenizer)
            save_state(built.best, state, None, 0, config, extra={"data": tokenizer_record(tokenizer)})
            files.write_json(built.source_path, source_record(name, opened))
            built.write_imported_config(config)
    model_type, weights = opened.family.model_type, number_of_weights(config)
    return Imported(run, opened.path, model_type, config, weights, opened.config.T, tokenizer, earlier)


def default_run_name(name: str) -> str:
    """The name of the run folder of a model if no other is given: that of the model, in lower case."""
    return Path(public_name(name)).name.lower() or "model"


def _is_import_of(run: RunFolder, name: str) -> bool:
    return (read_source(run.path) or {}).get("name") == name


def with_context(config: ModelConfig, context: int | None) -> ModelConfig:
    """The config with another context length. Raises ValueError if it is longer than the model was made for."""
    if config.positions == "learned":
        if context not in (None, config.T):
            raise ValueError(f"--context {context}: the model has learned positions, so its context is {config.T}")
        return config
    if context is not None and not 1 <= context <= config.T:
        raise ValueError(f"--context {context}: the model was made for 1 to {config.T} tokens")
    return dataclasses.replace(config, T=context or min(config.T, MOST_CONTEXT))


def describe(imported: Imported) -> list[str]:
    """Lines about an import, for a person."""
    config = imported.config
    lines = [f"{imported.model_type}, {imported.weights / 1e6:,.1f}M weights, context {config.T:,}"]
    if imported.context > config.T:
        lines[0] += f" of {imported.context:,} (--context N for more)"
    next_command = command("chat", imported.run.path)
    if imported.tokenizer is None and config.V > 256:
        lines.append(f"{imported.folder} has no tokenizer: commands that read or write text need --tokenizer")
        next_command = command("chat", imported.run.path, "--tokenizer", "FOLDER")
    elif imported.tokenizer is not None and imported.tokenizer.loss_notice is not None:
        lines.append(imported.tokenizer.loss_notice)
    if imported.tokenizer is not None and (problem := chat_problem(imported.tokenizer)):
        lines.append(f"warning: {problem}")
        if why_it_cannot_chat(imported.tokenizer):
            next_command = command("generate", imported.run.path, "The ")
    if imported.earlier:
        lines.append(f"a model of this name was imported before: {', '.join(map(str, imported.earlier))}")
    return [*lines, f"run folder: {imported.run.path}", f"next: {next_command}"]
