"""Read safetensors files tensor by tensor: each is read into its own memory, and the file is not mapped.

The `safetensors` package maps the file, so that by the end all of it counts as memory of the process, beside the model
that was filled from it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MOST_HEADER = 100_000_000
"""Bytes; the limit of the format."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of weights."""
OTHER_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
"""Types of masks and counters, which some files have beside the weights."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is stored."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """The tensor. Raises OSError if the file has become shorter."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(tensor)
        return tensor

    def read_into(self, tensor: torch.Tensor) -> None:
        """Fill a contiguous tensor of the same shape and type. Raises as `read` does."""
        assert tensor.shape == self.shape and tensor.dtype == self.dtype
        buffer = tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(bytearray())
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            done = 0
            while done < len(buffer):
                count = file.readinto(buffer[done:])
                if not count:
                    raise OSError(f"{self.path} ends within a tensor: it was truncated while it was read")
                done += count


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name. Nothing but the header is read.

    Raises ValueError for a file that is not safetensors, is damaged or truncated, or has tensors of other types than
    DTYPES and OTHER_DTYPES.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MOST_HEADER, size - 8):
            raise ValueError(f"{path} is not a safetensors file, or is truncated: download it again")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise ValueError(f"{path} is not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a safetensors file: its header is not an object")
    header.pop("__metadata__", None)
    tensors = {name: _stored(path, name, entry, 8 + length, size) for name, entry in header.items()}
    in_order = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes))
    for (first, before), (second, after) in itertools.pairwise(in_order):
        if before.start + before.nbytes > after.start:
            raise ValueError(f"{path} is damaged: the tensors {first} and {second} overlap; download it again")
    return tensors


def _stored(path: Path, name: str, entry: Any, base: int, size: int) -> StoredTensor:
    try:
        if not isinstance(entry, Mapping):
            raise TypeError
        kind, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is damaged: the entry of the tensor {name} is invalid") from None
    dtype = (DTYPES | OTHER_DTYPES).get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise ValueError(f"{path}: the tensor {name} has the type {kind}; supported are {', '.join(DTYPES)}")
    if end - start != math.prod(shape) * dtype.itemsize or base + end > size:
        raise ValueError(f"{path} is damaged or truncated: the tensor {name} does not fit its offsets")
    return StoredTensor(path, dtype, shape, base + start)
