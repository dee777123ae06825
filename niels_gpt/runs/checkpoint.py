"""Checkpoints: weights, optimiser state, step and model config in one `.pt`, `config.json` beside it.

A checkpoint is data: it is loaded with `weights_only=True` and never runs code. It holds no path, user
or host name, so that it can be published (what the weights themselves remember is another question).
"""

from __future__ import annotations

import io
import json
import numbers
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from niels_gpt.config import ModelConfig
from niels_gpt.config.yaml_file import to_dict
from niels_gpt.model.gpt import GPT
from niels_gpt.model.sizes import weight_shapes
from niels_gpt.runs.checkpoint_errors import CheckpointError, wrong_kind
from niels_gpt.system import files


def save_checkpoint(
    path: str | Path,
    model: GPT,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    config: dict[str, Any] | ModelConfig,
    *,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint to `path` (.pt or .pth) and its config to `config.json` in the same folder.

    Atomic: a kill or a full disk leaves the previous file intact (OSError). `extra` is for what a
    training run needs to go on: numbers, strings, lists and dicts of them. Raises TypeError, before anything is
    written, for a config that is no JSON and for what `load_checkpoint` would refuse.
    """
    path = Path(path)
    if path.suffix not in (".pt", ".pth"):
        raise ValueError(f"a checkpoint is a .pt or .pth file, got {path}")
    config = _plain(to_dict(config) if isinstance(config, ModelConfig) else dict(config))
    json.dumps(config, sort_keys=True)  # raises before anything is written
    payload = {
        "model": model.state_dict(),
        "optimizer": None if optimizer is None else _plain(optimizer.state_dict()),
        "step": int(step),
        "config": config,
        "extra": _plain(extra or {}),
    }
    if problem := wrong_kind(payload):
        raise TypeError(f"cannot write {path}: its {problem}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_write(path) as file:
        _check_readable({key: value for key, value in payload.items() if key != "model"})
        try:
            torch.save(payload, file)
        except RuntimeError as err:  # torch hides the OSError of a full disk behind its own
            if isinstance(err.__context__, OSError):
                raise err.__context__ from None
            raise OSError(28, str(err)) from err
    files.write_json(path.with_name("config.json"), config)


def _plain(value: Any) -> Any:
    """The same value with Python's numbers in place of numpy's, which a reader would refuse."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value


def _check_readable(value: Any) -> None:
    """Raise TypeError for what could be written but would be refused when it is read: objects other than tensors."""

    def hollow(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return None
        if isinstance(value, Mapping):
            return {key: hollow(item) for key, item in value.items()}
        return type(value)(map(hollow, value)) if type(value) in (list, tuple) else value

    buffer = io.BytesIO()
    torch.save(hollow(value), buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError as err:
        named = re.search(r"GLOBAL ([\w.]+)", str(err))
        what = f" ({named[1]})" if named else ""
        raise TypeError(
            f"config, extra and optimizer state of a checkpoint are tensors, numbers, strings, lists and dicts, "
            f"nothing else{what}: it could never be read again"
        ) from None


def load_checkpoint(
    path: str | Path, device: str | torch.device
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None, int]:
    """(config, model_state_dict, optimizer_state_dict or None, step), tensors on `device`.

    Raises FileNotFoundError, or CheckpointError (a ValueError) for a file that is damaged, holds
    code, or is no checkpoint.
    """
    payload = read_checkpoint(path, device)
    return payload["config"], payload["model"], payload["optimizer"], payload["step"]


def read_checkpoint(path: str | Path, device: str | torch.device) -> dict[str, Any]:
    """The whole content of a checkpoint, `extra` included; also of a sharded one, which is a folder.

    Raises as `load_checkpoint` does.
    """
    path = Path(path)
    if (path / "checkpoint.json").is_file():
        from niels_gpt.runs.sharded_checkpoint import read_folder

        return read_folder(path, device)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint {path}")
    try:
        _check_archive(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice on odd pickles; we refuse them
            payload = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as err:
        if zipfile.is_zipfile(path):
            raise CheckpointError(f"{path} was refused: it holds code or objects, not only weights") from err
        raise CheckpointError(f"{path} is damaged or no checkpoint: torch.save did not write it") from err
    except Exception as err:  # a damaged file can fail anywhere in the reader, with any exception
        reason = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        if path.stat().st_size == 0:
            reason = "it is empty"
        elif isinstance(err, OSError):  # a seek past the end
            reason = "it is cut off"
        elif isinstance(err, LookupError | EOFError):  # whose text is that of nothing a person knows
            reason = "torch.save did not write it"
        raise CheckpointError(f"{path} is damaged or no checkpoint: {reason}") from err
    missing = {"model", "optimizer", "step", "config"} - set(payload if isinstance(payload, dict) else ())
    if missing:
        raise CheckpointError(f"{path} is no niels-gpt checkpoint: it has no {', '.join(sorted(missing))}")
    payload.setdefault("extra", {})
    if problem := wrong_kind(payload):
        raise CheckpointError(f"{path} is no niels-gpt checkpoint: its {problem}")
    return payload


def _check_archive(path: Path) -> None:
    """Raise ValueError for a .pt whose bytes are not those that were written: torch.load skips the CRCs."""
    if not zipfile.is_zipfile(path):
        return  # torch.load says what is wrong with it
    with zipfile.ZipFile(path) as archive:
        bad = archive.testzip()
        if bad is None:  # torch writes no attributes; a flipped "folder" bit would make it read nonsense
            bad = next((entry.filename for entry in archive.infolist() if entry.external_attr), None)
    if bad is not None:
        raise ValueError(f"the checksum of {bad} is wrong")


def load_model(path: str | Path, device: str | torch.device = "cpu") -> tuple[GPT, int]:
    """(model in eval mode, step) of a checkpoint. Raises as `load_checkpoint` does."""
    config, state, _, step = load_checkpoint(path, device)
    model = build_model(config, state, where=str(path))
    return model.to(device).eval(), step


def build_model(config: dict[str, Any], state: dict[str, Any], *, where: str) -> GPT:
    """The model of a config with these weights. Raises CheckpointError where they do not belong together.

    They are compared before anything is made: a config can ask for any amount of memory and any number of layers.
    """
    made = model_config(config, where=where)
    _compare(weight_shapes(made), state, where=where)
    try:
        # T is in no weight. Memory that is asked for and not touched costs nothing: RoPE's tables need about as much.
        torch.empty(2, made.T, made.D, dtype=torch.float64)
        with torch.random.fork_rng(devices=[]):  # initial weights are drawn and overwritten: move no generator
            model = GPT(made)
    except (RuntimeError, TypeError) as err:  # torch's words for too much, and for more than 64 bits
        raise CheckpointError(f"{where} does not fit in memory: its config has model.T={made.T}") from err
    model.load_state_dict(dict(state))
    return model


def model_config(config: dict[str, Any], *, where: str) -> ModelConfig:
    """The ModelConfig of a checkpoint. Raises CheckpointError where it is none."""
    try:
        return ModelConfig.of(config)
    except (ValueError, TypeError, RuntimeError) as err:  # RuntimeError: a tensor where a number is expected
        raise CheckpointError(f"{where} has a config that makes no model: {err}") from err


def load_weights(model: GPT, state: dict[str, Any], *, where: str) -> None:
    """Copy a state dict into a model. Raises CheckpointError that names the first difference."""
    check_weights(model, state, where=where)
    model.load_state_dict(dict(state))


def check_weights(model: GPT, state: Any, *, where: str) -> None:
    """Raise CheckpointError, which names the first difference, where a state dict is not of this model."""
    _compare(((name, weight.shape) for name, weight in model.state_dict().items()), state, where=where)


def _compare(own: Iterable[tuple[str, tuple[int, ...]]], state: Any, *, where: str) -> None:
    """`check_weights` with the names and shapes of a model, which are taken one by one until there is a difference."""
    if not isinstance(state, dict):
        raise CheckpointError(f"{where} holds no weights: expected a dict of tensors")
    strange = next((name for name, value in state.items() if not is_dense(value)), None)
    if strange is not None:
        raise CheckpointError(f"{where} holds no weights: {strange} is no dense tensor of floats")
    known = set()
    for name, shape in own:
        if name not in state:
            raise CheckpointError(f"{where} is of another architecture: it has no weight {name}")
        if state[name].shape != shape:
            raise CheckpointError(
                f"{where} is of another architecture: {name} has shape {tuple(state[name].shape)}, "
                f"the model's is {tuple(shape)}"
            )
        known.add(name)
    extra = [name for name in state if name not in known]
    if extra:
        raise CheckpointError(f"{where} is of another architecture: the model has no weight {extra[0]}")


def is_dense(value: Any) -> bool:
    """Whether a value is a tensor of floats that are all there: none that is sparse, nested, quantised or on `meta`."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.layout is torch.strided
        and not value.is_nested
        and not value.is_meta
    )
