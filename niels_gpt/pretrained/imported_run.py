"""Import a public model as a run folder, so that every command works on it; and read its weights for `init_from`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from niels_gpt.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from niels_gpt.config.public_model import folder_or_id, is_public
from niels_gpt.config.yaml_file import to_dict
from niels_gpt.model.gpt import GPT
from niels_gpt.model.sizes import number_of_weights
from niels_gpt.pretrained.model_folder import ModelFolder, find_folder, open_folder
from niels_gpt.runs.checkpoint import build_model, model_config, read_checkpoint, save_state
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.history import history
from niels_gpt.runs.loading import find_run, is_run
from niels_gpt.system import files
from niels_gpt.system.atomic_folder import atomic_folder
from niels_gpt.system.json_text import parse_json
from niels_gpt.system.program import command
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer, load_tokenizer
from niels_gpt.tokenizer.huggingface import is_byte_vocabulary

MOST_CONTEXT = 8192
"""Context of an imported model unless another is asked for. A KV cache is as long as it, on a GPU from the start."""


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
    files.check_output_path(run.path, "--run-dir", folder=True)
    if run.path.is_dir() and any(run.path.iterdir()):
        raise ValueError(f"{run.path} is not empty: choose another --run-dir")
    opened = open_folder(find_folder(name, revision=revision))
    config = with_context(opened.config, context)
    tokenizer = folder_tokenizer(opened)
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
            save_state(built.best, state, None, 0, config, extra={"data": _data(tokenizer)})
            files.write_json(built.source_path, _source(name, opened))
            built.write_config(_run_config(config))
    return Imported(
        run, opened.path, opened.family.model_type, config, number_of_weights(config), opened.config.T, tokenizer
    )


def _run_config(config: ModelConfig) -> RunConfig:
    """The config of a run without steps, from which others are trained."""
    return RunConfig(task="pretrain", model=config, train=TrainConfig(total_steps=1, warmup_steps=0), data=DataConfig())


def with_context(config: ModelConfig, context: int | None) -> ModelConfig:
    """The config with another context length. Raises ValueError if it is longer than the model was made for."""
    if config.positions == "learned":
        if context not in (None, config.T):
            raise ValueError(f"--context {context}: the model has learned positions, so its context is {config.T}")
        return config
    if context is not None and not 1 <= context <= config.T:
        raise ValueError(f"--context {context}: the model was made for 1 to {config.T} tokens")
    return dataclasses.replace(config, T=context or min(config.T, MOST_CONTEXT))


def folder_tokenizer(opened: ModelFolder) -> AnyTokenizer | None:
    """The tokenizer in the folder of a model; None if there is none.

    Raises ValueError for one that is not supported, or that has more ids than the model.
    """
    if not any((opened.path / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    if opened.config.V == 256 and is_byte_vocabulary(opened.path):
        return ByteTokenizer()
    tokenizer = load_tokenizer(opened.path)
    if tokenizer.vocab_size > opened.config.V:
        raise ValueError(
            f"the tokenizer of {opened.path} has {tokenizer.vocab_size} ids, but the embedding only {opened.config.V}: "
            "this tokenizer does not belong to this model"
        )
    return tokenizer


def _data(tokenizer: AnyTokenizer | None) -> dict[str, str]:
    """What a checkpoint records of the data of a model: the hash of its tokenizer; bytes have none."""
    return {} if tokenizer is None or tokenizer.sha256 is None else {"tokenizer": tokenizer.sha256}


def public_name(name: str) -> str:
    """The name of a model for reports and model cards: its repository, or the last part of the path of its folder."""
    repository = folder_or_id(name)
    folder = files.expand_home(repository)
    return folder.resolve().name if folder.is_dir() else repository


def _source(name: str, opened: ModelFolder) -> dict[str, Any]:
    """Where a model comes from, without a path."""
    return {
        "name": public_name(name),
        "model_type": opened.family.model_type,
        "dtype": str(opened.dtype).removeprefix("torch."),
        "context": opened.config.T,
        "licence": _licence(opened.path),
    }


class PublicBase(NamedTuple):
    """The public model that a run began with."""

    name: str
    licence: str
    """Empty if it is not known."""


def public_base(run: RunFolder) -> PublicBase | None:
    """The public model that a run is, or began with (`init_from`); None if there is none, or it is gone."""
    for past in history(run):
        if past.run.imported:
            return _read_source(past.run)
        if past.from_public and past.start is not None:
            return PublicBase(public_name(past.config.init_from), _licence(past.start))
    return None


def _read_source(run: RunFolder) -> PublicBase | None:
    """What source.json of an imported model says; None if it is damaged."""
    try:
        source = parse_json(run.source_path.read_bytes())
        return PublicBase(str(source["name"]), str(source["licence"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _licence(folder: Path) -> str:
    """The licence in the front matter of README.md; empty if there is none."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    found = re.search(r"^licen[cs]e:\s*(\S.*)$", front[1], re.MULTILINE) if front else None
    return found[1].strip(" '\"") if found else ""


# --- init_from --------------------------------------------------------------------------------------------


class InitialWeights(NamedTuple):
    """What a run starts from."""

    where: str
    """For messages."""
    config: ModelConfig
    step: int
    """Training steps that were done; 0 for a public model."""
    data: Mapping[str, str]
    """Hashes of what it was trained on, as far as they are known; `tokenizer` is that of its tokenizer."""
    read: Callable[[], Mapping[str, torch.Tensor]]
    """The weights, on the device that was named."""


def initial_path(init_from: str) -> Path:
    """The folder or checkpoint that `init_from` names: `hf:` with a folder or repository, a run, or a checkpoint.

    Raises ValueError if there is none.
    """
    if is_public(init_from):
        return find_folder(init_from)
    path = files.expand_home(init_from)
    if not path.exists():
        raise ValueError(f"init_from: no checkpoint {init_from}")
    return find_run(path).model_path() if is_run(path) else path


def initial_model(init_from: str) -> ModelConfig:
    """The model config of what `init_from` names. Raises ValueError or OSError if it cannot be read."""
    path = initial_path(init_from)
    if is_public(init_from):
        return open_folder(path).config
    beside = path.with_name("config.json") if path.is_file() else None
    if beside is not None and beside.is_file():
        try:
            return model_config(json.loads(beside.read_bytes()), where=str(path))
        except ValueError:  # damaged; the checkpoint itself counts
            pass
    return model_config(read_checkpoint(path, "cpu")["config"], where=str(path))


def open_initial(init_from: str, device: str) -> InitialWeights:
    """The weights that `init_from` names, for a device. Raises ValueError or OSError if they cannot be read."""
    path = initial_path(init_from)
    if is_public(init_from):
        opened = open_folder(path)

        def read() -> dict[str, torch.Tensor]:
            return {name: weight.to(device) for name, weight in opened.read_state().items()}

        return InitialWeights(init_from, opened.config, 0, _data(folder_tokenizer(opened)), read)
    saved = read_checkpoint(path, device)
    config = model_config(saved["config"], where=init_from)
    data = saved["extra"].get("data", {})
    return InitialWeights(init_from, config, saved["step"], data, lambda: saved["model"])


def load_initial(init_from: str, device: str | torch.device) -> GPT:
    """The model that `init_from` names, in eval mode. Raises ValueError or OSError if it cannot be read."""
    initial = open_initial(init_from, str(device))
    return build_model(to_dict(initial.config), dict(initial.read()), where=init_from).to(device).eval()


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
    return [*lines, f"run folder: {imported.run.path}", f"next: {next_command}"]
