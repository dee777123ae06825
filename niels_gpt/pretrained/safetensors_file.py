"""Read safetensors files tensor by tensor: each is read into its own memory, and the file is not mapped.

The `safetensors` package maps the file, so that by the end all of it counts as memory of the process, beside the model
that was filled from it.
"""

from __future__ import annotations

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
"""Floating-point types; others have no place in a model here."""


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

    Raises ValueError for a file that is not safetensors, is damaged or truncated, or has tensors that are not
    floating-point.
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
    return {name: _stored(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _stored(path: Path, name: str, entry: Any, base: int, size: int) -> StoredTensor:
    try:
        if not isinstance(entry, Mapping):
            raise TypeError
        kind, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is damaged: the entry of the tensor {name} is invalid") from None
    if kind not in DTYPES:
        if kind in ("I64", "I32", "I16", "I8", "U8", "BOOL", "U16", "U32", "U64"):  # masks, counters: never weights
            return StoredTensor(path, torch.uint8, shape, base + start)
        raise ValueError(f"{path}: the tensor {name} has the type {kind}; supported are {', '.join(DTYPES)}")
    dtype = DTYPES[kind]
    if end - start != math.prod(shape) * dtype.itemsize or base + end > size:
        raise ValueError(f"{path} is damaged or truncated: the tensor {name} does not fit its offsets")
    return StoredTensor(path, dtype, shape, base + start)
