"""The weights that a run starts from: what `init_from` names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from niels_gpt.config import ModelConfig
from niels_gpt.config.public_model import is_public
from niels_gpt.config.yaml_file import to_dict
from niels_gpt.model.gpt import GPT
from niels_gpt.pretrained.checksums import check_sums
from niels_gpt.pretrained.find_model import find_folder
from niels_gpt.pretrained.folder_tokenizer import folder_tokenizer, tokenizer_record
from niels_gpt.pretrained.model_folder import open_folder
from niels_gpt.runs.checkpoint import build_model, model_config, read_checkpoint
from niels_gpt.runs.loading import find_run, is_run, tokenizer_path
from niels_gpt.system import files
from niels_gpt.tokenizer import has_tokenizer


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


def initial_model(init_from: str, context: int = 1) -> ModelConfig:
    """The model config of what `init_from` names. Raises ValueError or OSError if it cannot be read.

    context: tokens of context that will be used, which a sliding window of a public model may refuse.
    """
    path = initial_path(init_from)
    if is_public(init_from):
        return open_folder(path, context=context).config
    beside = path.with_name("config.json") if path.is_file() else None
    if beside is not None and beside.is_file():
        try:
            return model_config(json.loads(beside.read_bytes()), where=str(path))
        except ValueError:  # damaged; the checkpoint itself counts
            pass
    return model_config(read_checkpoint(path, "cpu")["config"], where=str(path))


def initial_tokenizer(init_from: str) -> Path | None:
    """The file or folder of the tokenizer of what `init_from` names; None if it has none. Raises ValueError."""
    path = initial_path(init_from)
    if not is_public(init_from):
        return tokenizer_path(path)
    return path if has_tokenizer(path) else None


def open_initial(init_from: str, device: str) -> InitialWeights:
    """The weights that `init_from` names, for a device. Raises ValueError or OSError if they cannot be read."""
    path = initial_path(init_from)
    if is_public(init_from):
        opened = open_folder(path, context=1)
        check_sums(path)

        def read() -> dict[str, torch.Tensor]:
            return {name: weight.to(device) for name, weight in opened.read_state().items()}

        return InitialWeights(init_from, opened.config, 0, tokenizer_record(folder_tokenizer(opened)), read)
    saved = read_checkpoint(path, device)
    config = model_config(saved["config"], where=init_from)
    data = saved["extra"].get("data", {})
    return InitialWeights(init_from, config, saved["step"], data, lambda: saved["model"])


def load_initial(init_from: str, device: str | torch.device) -> GPT:
    """The model that `init_from` names, in eval mode. Raises ValueError or OSError if it cannot be read."""
    initial = open_initial(init_from, str(device))
    return build_model(to_dict(initial.config), dict(initial.read()), where=init_from).to(device).eval()
