"""Checkpoints: weights, optimizer state, step and model config in one `.pt`, with `config.json` beside it.

The checkpoints of a LoRA run hold only the adapters; the frozen weights are in `base.pt` beside them, written once.
Reading one merges both, so that callers see an ordinary checkpoint.

A checkpoint is data: it is loaded with `weights_only=True` and never runs code. It holds no path, user name or host
name, so that it can be published (what the weights have memorized is another question).
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
from niels_gpt.model.digest import weights_digest
from niels_gpt.model.gpt import GPT
from niels_gpt.model.lora import adapter_state, base_state, has_adapters, is_adapter, merged_state
from niels_gpt.model.sizes import weight_shapes
from niels_gpt.runs.checkpoint_errors import CheckpointError, invalid_entry
from niels_gpt.system import files, host_limits
from niels_gpt.system.private_files import keep_private

BASE = "base.pt"
"""The file of the frozen weights in the folder of the checkpoints of a LoRA run."""


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

    The write is atomic: a kill or a full disk (OSError) leaves the previous file intact. `extra` holds what a run needs
    to resume: numbers, strings, and lists and dicts of them; for a model with adapters also `lora`, a dict of its
    `scale` and the `base` that `save_base` returned. Raises TypeError, before anything is written, for a config that is
    not JSON and for content that `load_checkpoint` would reject.
    """
    state = None if optimizer is None else optimizer.state_dict()
    weights = adapter_state(model) if has_adapters(model) else model.state_dict()
    save_state(path, weights, state, step, config, extra=extra)


def save_state(
    path: str | Path,
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Any] | None,
    step: int,
    config: dict[str, Any] | ModelConfig,
    *,
    extra: dict[str, Any] | None = None,
) -> None:
    """`save_checkpoint` for the state dicts of a model and an optimizer. Weights may have any floating-point type."""
    path = Path(path)
    if path.suffix not in (".pt", ".pth"):
        raise ValueError(f"a checkpoint must be a .pt or .pth file, got {path}")
    config = _plain(to_dict(config) if isinstance(config, ModelConfig) else dict(config))
    json.dumps(config, sort_keys=True)  # raises before anything is written
    payload = {
        "model": dict(weights),
        "optimizer": None if optimizer is None else _plain(optimizer),
        "step": int(step),
        "config": config,
        "extra": _plain(extra or {}),
    }
    if problem := invalid_entry(payload):
        raise TypeError(f"cannot write {path}: its {problem}")
    _check_readable({key: value for key, value in payload.items() if key != "model"})
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_write(path) as file:
        try:
            torch.save(payload, file)
        except RuntimeError as err:  # torch wraps the OSError of a full disk
            if isinstance(err.__context__, OSError):
                raise err.__context__ from None
            raise OSError(28, str(err)) from err
    files.write_json(path.with_name("config.json"), config)


def save_base(folder: Path, model: GPT, *, step: int, data: Mapping[str, str]) -> str:
    """Write the frozen weights of a model with adapters to base.pt of a folder; returns their digest.

    step, data: of the checkpoint that the weights came from.
    """
    path = folder / BASE
    with torch.device("meta"):
        base = GPT(model.config)
    base.load_state_dict(base_state(model), assign=True)
    digest = weights_digest(base)
    save_checkpoint(path, base, None, step, model.config, extra={"data": dict(data), "weights": digest})
    return digest


def _plain(value: Any) -> Any:
    """The value with numpy scalars replaced by Python numbers: `weights_only` loading rejects numpy's."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value


def _check_readable(value: Any) -> None:
    """Raise TypeError for objects that can be written but not loaded with `weights_only=True`."""

    def without_tensors(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return None
        if isinstance(value, Mapping):
            return {key: without_tensors(item) for key, item in value.items()}
        return type(value)(map(without_tensors, value)) if type(value) in (list, tuple) else value

    buffer = io.BytesIO()
    torch.save(without_tensors(value), buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError as err:
        named = re.search(r"GLOBAL ([\w.]+)", str(err))
        what = f" ({named[1]})" if named else ""
        raise TypeError(
            f"config, extra and optimizer state of a checkpoint may hold only tensors, numbers, strings, lists and "
            f"dicts{what}: anything else could not be loaded again"
        ) from None


def load_checkpoint(
    path: str | Path, device: str | torch.device
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None, int]:
    """(config, model state dict, optimizer state dict or None, step), with tensors on `device`.

    Raises FileNotFoundError, or CheckpointError (a ValueError) for a file that is damaged, holds code, or is not a
    checkpoint.
    """
    payload = read_checkpoint(path, device)
    return payload["config"], payload["model"], payload["optimizer"], payload["step"]


def read_checkpoint(path: str | Path, device: str | torch.device, *, merge: bool = True) -> dict[str, Any]:
    """The full content of a checkpoint, including `extra`; sharded checkpoints (folders) too.

    merge: add the adapters of a LoRA checkpoint to its base; else `model` has both, as the state dict of the model that
    is trained. Raises as `load_checkpoint` does.
    """
    path = Path(path)
    if (path / "checkpoint.json").is_file():
        from niels_gpt.runs.sharded_checkpoint import read_folder

        return read_folder(path, device)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint {path}")
    keep_private([path])
    try:
        _check_archive(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about odd pickles, which are rejected below
            payload = torch.load(path, map_location=device, weights_only=True)
    except CheckpointError:
        raise
    except Exception as err:  # a damaged file can raise any exception anywhere in the reader
        # torch's own messages are not passed on: they advise to load the file without the check.
        if host_limits.is_out_of_memory(err):
            limit = host_limits.memory_limit_text()
            raise CheckpointError(f"{path} does not fit into the memory of {device}{limit}") from err
        if not _is_zip(path):
            raise CheckpointError(f"{path} is damaged or not a checkpoint: torch.save did not write it") from err
        if isinstance(err, pickle.UnpicklingError) or "weights_only" in str(err):
            raise CheckpointError(f"{path} was rejected: it holds code or objects, not only weights") from err
        raise CheckpointError(f"{path} is damaged or not a checkpoint: torch cannot read it") from err
    missing = {"model", "optimizer", "step", "config"} - set(payload if isinstance(payload, dict) else ())
    if missing:
        raise CheckpointError(f"{path} is not a niels-gpt checkpoint: it has no {', '.join(sorted(missing))}")
    payload.setdefault("extra", {})
    if problem := invalid_entry(payload):
        raise CheckpointError(f"{path} is not a niels-gpt checkpoint: its {problem}")
    if "lora" in payload["extra"]:
        payload["model"] = _with_base(path, payload, device, merge=merge)
    return payload


def _with_base(path: Path, payload: Mapping[str, Any], device: str | torch.device, *, merge: bool) -> dict[str, Any]:
    """The weights of a LoRA checkpoint with those of base.pt beside it. Raises CheckpointError if they do not fit."""
    lora, adapters = payload["extra"]["lora"], payload["model"]
    scale, wanted = (lora.get("scale"), lora.get("base")) if isinstance(lora, dict) else (None, None)
    if not isinstance(scale, float) or not isinstance(wanted, str) or not isinstance(adapters, dict):
        raise CheckpointError(f"{path} is not a niels-gpt checkpoint: its extra.lora or its adapters are invalid")
    file = path.with_name(BASE)
    if not file.is_file():
        raise CheckpointError(
            f"{path} holds LoRA adapters, but the weights they belong to are not beside it: copy {BASE} of its run to "
            f"{file}"
        )
    base = read_checkpoint(file, device)
    if base["extra"].get("weights") != wanted:
        raise CheckpointError(
            f"{file} does not hold the weights that {path} was trained on: use {BASE} of the same run"
        )
    shapes = dict(weight_shapes(model_config(base["config"], where=str(file))))
    _compare(shapes.items(), base["model"], where=str(file))
    expected = list(shapes.items())
    for name in adapters:
        matrix, _, kind = name.rpartition(".")
        rows_and_columns = shapes.get(f"{matrix}.weight", ())
        other: Any = adapters.get(f"{matrix}.lora_{'B' if kind == 'lora_A' else 'A'}")
        if not is_adapter(name) or len(rows_and_columns) != 2 or not (is_dense(other) and other.dim() == 2):
            raise CheckpointError(f"{path} is not a niels-gpt checkpoint: {name} is no adapter of its model")
        rows, columns = rows_and_columns
        expected.append((name, (other.shape[1], columns) if kind == "lora_A" else (rows, other.shape[0])))
    state = {**base["model"], **adapters}
    _compare(expected, state, where=str(path))
    return merged_state(state, scale) if merge else state


def _check_archive(path: Path) -> None:
    """Raise CheckpointError for a zip file that is damaged or that `torch.save` did not write; inflate nothing.

    torch stores its records without compression, so a compressed record, or records larger than the file, would only
    fill the memory. torch.load does not compare the checksums of the records.
    """
    problem = None
    size = path.stat().st_size
    if size == 0:
        problem = "it is empty"
    elif not _is_zip(path):  # perhaps the old format of torch.save, which is a row of pickles
        with path.open("rb") as file:
            problem = "it is truncated" if file.read(2) == b"PK" else None
    else:
        try:
            with zipfile.ZipFile(path) as archive:
                entries = archive.infolist()
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                    problem = "it has compressed records, which torch.save does not write"
                elif sum(entry.file_size for entry in entries) > size:
                    problem = f"its records are larger than the file ({size:,} bytes)"
                elif bad := archive.testzip() or next((e.filename for e in entries if e.external_attr), None):
                    # torch writes no attributes; with a flipped "folder" bit it would misread the file
                    problem = f"the checksum of {bad} is wrong"
        except (zipfile.BadZipFile, NotImplementedError, ValueError, LookupError, EOFError, RuntimeError, OSError):
            problem = "its zip directory is damaged"
    if problem is not None:
        raise CheckpointError(f"{path} is damaged or not a checkpoint: {problem}")


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # it has a zip directory, which is damaged
        return True


def load_model(path: str | Path, device: str | torch.device = "cpu") -> tuple[GPT, int]:
    """(model in eval mode, step) of a checkpoint. Raises as `load_checkpoint` does."""
    config, state, _, step = load_checkpoint(path, device)
    model = build_model(config, state, where=str(path))
    return model.to(device).eval(), step


def build_model(config: dict[str, Any], state: dict[str, Any], *, where: str) -> GPT:
    """The model of a config with these weights. Raises CheckpointError if they do not belong together.

    The shapes are compared before the model is built: a config can ask for any amount of memory.
    """
    parsed = model_config(config, where=where)
    _compare(weight_shapes(parsed), state, where=where)
    host_limits.prepare_torch()
    try:
        # No weight depends on T. Check that its RoPE tables could be allocated; untouched memory costs nothing.
        torch.empty(2, parsed.T, parsed.D, dtype=torch.float64)
        with torch.random.fork_rng(devices=[]), torch.device("meta"):  # no initial weights are drawn
            model = GPT(parsed)
    except (RuntimeError, TypeError) as err:  # too much memory, or a size beyond 64 bits
        raise CheckpointError(f"{where} does not fit into memory: its config has model.T={parsed.T}") from err
    # The tensors of the state become the weights; those of an imported model may be bfloat16.
    model.load_state_dict({name: weight.float().contiguous() for name, weight in state.items()}, assign=True)
    if parsed.tie_embeddings:
        model.lm_head.weight = model.tok_emb.weight
    return model


def model_config(config: dict[str, Any], *, where: str) -> ModelConfig:
    """The ModelConfig of a checkpoint. Raises CheckpointError if it is invalid."""
    for name, value in config.items():
        if isinstance(value, torch.Tensor):
            raise CheckpointError(f"{where} has an invalid model config: model.{name} is a tensor, not a number")
    try:
        return ModelConfig.of(config)
    except (ValueError, TypeError) as err:
        raise CheckpointError(f"{where} has an invalid model config: {err}") from err


def check_weights(weights: Mapping[str, torch.Tensor], state: Any, *, where: str) -> None:
    """Raise CheckpointError, naming the first difference, if a state dict does not match the weights of a model."""
    _compare(((name, weight.shape) for name, weight in weights.items()), state, where=where)


def _compare(expected: Iterable[tuple[str, tuple[int, ...]]], state: Any, *, where: str) -> None:
    """`check_weights` for the names and shapes of a model, read lazily up to the first difference."""
    if not isinstance(state, dict):
        raise CheckpointError(f"{where} holds no weights: expected a dict of tensors")
    invalid = next((name for name, value in state.items() if not is_dense(value)), None)
    if invalid is not None:
        raise CheckpointError(f"{where} holds no weights: {invalid} is not a dense floating-point tensor")
    known = set()
    for name, shape in expected:
        if name not in state:
            raise CheckpointError(f"{where} has a different architecture: it has no weight {name}")
        if state[name].shape != shape:
            raise CheckpointError(
                f"{where} has a different architecture: {name} has shape {tuple(state[name].shape)}, "
                f"the model's is {tuple(shape)}"
            )
        known.add(name)
    extra = [name for name in state if name not in known]
    if extra:
        raise CheckpointError(f"{where} has a different architecture: the model has no weight {extra[0]}")


def is_dense(value: Any) -> bool:
    """Whether a value is a floating-point tensor with ordinary storage: not sparse, nested, quantized or on `meta`."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.layout is torch.strided
        and not value.is_nested
        and not value.is_meta
    )
