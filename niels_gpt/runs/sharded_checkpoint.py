"""Sharded checkpoints: a folder that several processes write together and any number of them reads.

The tensors lie in torch.distributed.checkpoint's files, each part once, whoever had it. `checkpoint.json` comes last:
the step, the configs, and size and sha256 of every file. Like a .pt it is data: it runs no code when it is read and
holds no path. torch's list of parts (`.metadata`) is a pickle, so only the few classes it needs are let in.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from niels_gpt.runs.checkpoint_errors import CheckpointError, wrong_kind
from niels_gpt.system import files

HEAD = "checkpoint.json"
METADATA = ".metadata"


def flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of nested dicts by their path: `optimizer/state/0/exp_avg`."""
    found: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}/")
    return found


def without_tensors(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """What `flat` leaves: the rest of nested dicts, for JSON."""
    nested = {key: without_tensors(value) for key, value in tree.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in tree.items() if not isinstance(value, torch.Tensor | Mapping)}
    return {**plain, **{key: value for key, value in nested.items() if value}}


def write_parts(folder: Path, tensors: Mapping[str, torch.Tensor], *, rank: int, group: Any) -> dict[str, Any]:
    """Write the parts of tensors that lie on this process; called by all of a group together.

    Size and sha256 of the files that this process wrote, for `write_head`. Raises OSError on all processes if one
    cannot write.
    """
    try:
        dcp.save(dict(tensors), storage_writer=_Writer(folder), process_group=group)
    except CheckpointException as err:
        raise OSError(f"cannot write {folder}: {_first(err)}; the checkpoints before it are intact") from err
    own = [*folder.glob(f"__{rank}_*.distcp"), *([folder / METADATA] if rank == 0 else [])]
    return {path.name: {"bytes": path.stat().st_size, "sha256": files.sha256_file(path)} for path in own}


def write_head(folder: Path, head: Mapping[str, Any], written: Iterable[Mapping[str, Any]]) -> None:
    """Complete a folder: what else is to be known, and what all processes have written."""
    listed = {name: entry for part in written for name, entry in part.items()}
    files.write_json(folder / HEAD, {**head, "format": 1, "files": listed})


def read_head(folder: Path, *, verify: bool = True) -> dict[str, Any]:
    """What a sharded checkpoint says of itself. Raises CheckpointError where it is incomplete, or (`verify`: every byte
    is read) damaged."""
    try:
        head: dict[str, Any] = json.loads((folder / HEAD).read_text(encoding="utf-8"))
        listed = dict(head["files"])
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in listed.items()}
        if not {"step", "config", "extra", "optimizer", "tied"} <= head.keys() or METADATA not in listed:
            raise ValueError("it is incomplete")
        if problem := wrong_kind(head) or (None if isinstance(head["tied"], dict) else "tied is no dict"):
            raise ValueError(f"its {problem}")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {HEAD}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as err:
        raise CheckpointError(f"{folder} is damaged: {HEAD} cannot be read ({err})") from None
    for name, (size, sha256) in expected.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise CheckpointError(f"{folder} is damaged: {name} is missing or cut off")
        if verify and files.sha256_file(path) != sha256:
            raise CheckpointError(f"{folder} is damaged: the checksum of {name} is wrong")
    return head


def fill_from_folder(folder: Path, tensors: Mapping[str, torch.Tensor], *, group: Any) -> None:
    """Read a sharded checkpoint into tensors, each process its parts; called by all of a group together.

    Raises CheckpointError where a tensor is not in it, or has another shape.
    """
    try:
        dcp.load(dict(tensors), storage_reader=_Reader(folder), process_group=group)
    except CheckpointException as err:
        raise CheckpointError(f"{folder} cannot be read: {_first(err)}") from err


def read_folder(folder: Path, device: str | torch.device) -> dict[str, Any]:
    """The content of a sharded checkpoint as that of a .pt, whole, in one process. Raises CheckpointError."""
    head = read_head(folder)
    try:
        reader = _Reader(folder)
        parts: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
        tensors = {name: torch.empty(part.size, dtype=part.properties.dtype) for name, part in parts.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as err:
        raise CheckpointError(f"{folder} is damaged: {_first(err)}") from err
    except Exception as err:  # every byte is as it was written: these were written to do harm
        raise CheckpointError(f"{folder} was refused: {err}") from err
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    for name, same in head["tied"].items():
        if same not in list(tensors):  # a list, for what has no hash
            raise CheckpointError(f"{folder} is damaged: {name} is tied to {same}, which is not in it")
        moved[name] = moved[same]
    found: dict[Any, Any] = {"model": {}, "optimizer": head["optimizer"]}
    for name, tensor in moved.items():
        *path, last = (int(part) if part.isdigit() else part for part in name.split("/"))
        node = found
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise CheckpointError(f"{folder} was refused: {name} is a place inside of something else")
        node[last] = tensor
    return {**found, **{key: head[key] for key in ("step", "config", "extra")}}


def _first(err: CheckpointException) -> str:
    """The first reason that a process gave."""
    for problem, _ in err.failures.values():
        return str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
    return str(err)


class _Writer(dcp.FileSystemWriter):
    """torch's writer, without the path of the checkpoint in the list of parts."""

    def storage_meta(self) -> None:
        return None


class _Reader(dcp.FileSystemReader):
    """torch's reader, with a list of parts that cannot run code."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._list = folder / METADATA

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found = _Unpickler(io.BytesIO(self._list.read_bytes())).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"{METADATA} is no list of parts")
        return found


class _Unpickler(pickle.Unpickler):
    """Lets in what torch's list of parts is made of, and nothing else."""

    _ALLOWED = frozenset(
        [
            *(
                ("torch.distributed.checkpoint.metadata", name)
                for name in (
                    "ChunkStorageMetadata",
                    "Metadata",
                    "MetadataIndex",
                    "TensorProperties",
                    "TensorStorageMetadata",
                    "_MEM_FORMAT_ENCODING",
                )
            ),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
        ]
    )

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in self._ALLOWED and not dtype:
            raise pickle.UnpicklingError(
                f"{METADATA} holds code or objects ({module}.{name}), not only a list of parts"
            )
        return super().find_class(module, name)
