"""Sharded checkpoints: a folder that several processes write together and any number of processes can read.

torch.distributed.checkpoint writes the tensors, each shard once. `checkpoint.json` is written last: the step, the
configs, size and sha256 of every file, and a checksum of itself. Like a .pt it is data: reading it runs no code, and it
holds no path. The index of the shards (torch's `.metadata`) is a pickle, so only the few classes that it needs may be
unpickled. Only files of the folder are read, whatever checkpoint.json and the index name.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from niels_gpt.runs.checkpoint_errors import CheckpointError, invalid_entry
from niels_gpt.system import files
from niels_gpt.system.checked_json import read_checked_json, write_checked_json
from niels_gpt.system.private_files import keep_private

HEAD = "checkpoint.json"
METADATA = ".metadata"


def flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of nested dicts by path, such as `optimizer/state/0/exp_avg`."""
    tensors: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, torch.Tensor):
            tensors[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping):
            tensors |= flat(value, f"{prefix}{key}/")
    return tensors


def without_tensors(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """Nested dicts without their tensors, for JSON: the counterpart of `flat`."""
    nested = {key: without_tensors(value) for key, value in tree.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in tree.items() if not isinstance(value, torch.Tensor | Mapping)}
    return {**plain, **{key: value for key, value in nested.items() if value}}


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], *, rank: int, group: Any) -> dict[str, Any]:
    """Write the shards of this process. A collective call of the group.

    Returns size and sha256 of the files that this process wrote, for `write_head`. Raises OSError on all processes if
    one cannot write.
    """
    try:
        dcp.save(dict(tensors), storage_writer=_Writer(folder), process_group=group)
    except CheckpointException as err:
        raise OSError(f"cannot write {folder}: {_first_reason(err)}; earlier checkpoints are intact") from err
    written = [*folder.glob(f"__{rank}_*.distcp"), *([folder / METADATA] if rank == 0 else [])]
    return {path.name: {"bytes": path.stat().st_size, "sha256": files.sha256_file(path)} for path in written}


def write_head(folder: Path, head: Mapping[str, Any], written: Iterable[Mapping[str, Any]]) -> None:
    """Complete a folder by writing checkpoint.json; `written` are the results of `write_shards` by rank."""
    listed = {name: entry for of_rank in written for name, entry in of_rank.items()}
    write_checked_json(folder / HEAD, {**head, "format": 1, "files": listed})


def read_head(folder: Path, *, verify: bool = True) -> dict[str, Any]:
    """The content of checkpoint.json. Raises CheckpointError if the checkpoint is incomplete or damaged.

    verify: read every file and compare its sha256."""
    try:
        head = read_checked_json(folder / HEAD)
        listed = dict(head["files"])
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in listed.items()}
        if not {"step", "config", "extra", "optimizer", "tied"} <= head.keys() or METADATA not in listed:
            raise ValueError("it is incomplete")
        if problem := invalid_entry(head) or (None if isinstance(head["tied"], dict) else "tied is not a dict"):
            raise ValueError(f"its {problem}")
        if outside := next((name for name in expected if Path(name).name != name or name == ".."), None):
            raise ValueError(f"it lists {outside!r}, which is not the name of a file in the folder")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {HEAD}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as err:
        raise CheckpointError(f"{folder} is damaged: {HEAD} cannot be read ({err})") from None
    keep_private(folder / name for name in (HEAD, *expected))
    for name, (size, sha256) in expected.items():
        path = folder / name
        if path.is_symlink():
            raise CheckpointError(f"{folder} was rejected: {name} is a link, not a file of the folder")
        if not path.is_file() or path.stat().st_size != size:
            raise CheckpointError(f"{folder} is damaged: {name} is missing or truncated")
        if verify and files.sha256_file(path) != sha256:
            raise CheckpointError(f"{folder} is damaged: the checksum of {name} is wrong")
    return head


def fill_from_folder(folder: Path, tensors: Mapping[str, torch.Tensor], *, group: Any) -> None:
    """Read a sharded checkpoint into tensors; each process reads its shards. A collective call of the group.

    Raises CheckpointError if a tensor is missing or has another shape.
    """
    try:
        dcp.load(dict(tensors), storage_reader=_Reader(folder), process_group=group)
    except CheckpointException as err:
        raise CheckpointError(f"{folder} cannot be read: {_first_reason(err)}") from err
    except (OSError, pickle.UnpicklingError) as err:
        raise CheckpointError(f"{folder} cannot be read: {err}") from err


def read_folder(folder: Path, device: str | torch.device) -> dict[str, Any]:
    """The full content of a sharded checkpoint in one process, as that of a .pt. Raises CheckpointError."""
    head = read_head(folder)
    try:
        reader = _Reader(folder)
        index: Mapping[str, Any] = reader.index.state_dict_metadata
        tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in index.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that there is a single process
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as err:
        raise CheckpointError(f"{folder} is damaged: {_first_reason(err)}") from err
    except OSError as err:
        raise CheckpointError(f"{folder} cannot be read: {err}") from err
    except Exception as err:  # the checksums are right, so the files were written with bad intent
        raise CheckpointError(f"{folder} was rejected: {err}") from err
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    for name, same in head["tied"].items():
        if same not in list(tensors):  # a list: `same` may be unhashable
            raise CheckpointError(f"{folder} is damaged: {name} is tied to {same}, which is not in it")
        moved[name] = moved[same]
    content: dict[Any, Any] = {"model": {}, "optimizer": head["optimizer"]}
    for name, tensor in moved.items():
        *path, last = (int(key) if key.isdigit() else key for key in name.split("/"))
        node = content
        for key in path:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise CheckpointError(f"{folder} was rejected: {name} is a path through a value that is not a dict")
        node[last] = tensor
    return {**content, **{key: head[key] for key in ("step", "config", "extra")}}


def _first_reason(err: CheckpointException) -> str:
    """The first line of the first error among the processes."""
    for problem, _ in err.failures.values():
        return str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
    return str(err)


class _Writer(dcp.FileSystemWriter):
    """torch's writer, without the path of the checkpoint in the index."""

    def storage_meta(self) -> None:
        return None


class _Reader(dcp.FileSystemReader):
    """torch's reader, with an index that cannot run code."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError and pickle.UnpicklingError, which torch would print with a traceback."""
        super().__init__(folder)
        listed = read_head(folder, verify=False)["files"]
        self.index = _Unpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
        if not isinstance(self.index, Metadata):
            raise pickle.UnpicklingError(f"{METADATA} is not an index of shards")
        for shard in (self.index.storage_data or {}).values():
            name = shard.relative_path
            if name not in listed:
                raise pickle.UnpicklingError(f"{METADATA} refers to {name!r}, which {HEAD} does not list")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index


class _Unpickler(pickle.Unpickler):
    """Loads only the classes that torch's index consists of."""

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
                f"{METADATA} holds code or objects ({module}.{name}), not only an index of shards"
            )
        return super().find_class(module, name)
