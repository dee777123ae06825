"""Read and write safetensors files tensor by tensor.

The `safetensors` package maps a file that it reads, so that by the end all of it counts as memory of the process,
beside the model that was filled from it; and it writes tensors that are all in memory. Here each tensor is read into
its own memory, and one converted tensor at a time is written.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from niels_gpt.system import files
from niels_gpt.system.untrusted_files import is_untrusted_file

MOST_HEADER = 100_000_000
"""Bytes; the limit of the format."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Name in the header -> type of weights."""
OTHER_DTYPES = {
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip
"""Types of masks and counters, which a file may have beside its weights."""
_ALIGNMENT = 8


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

    def split(self, rows: int) -> list[StoredTensor]:
        """The tensor as tensors of at most so many rows, as torch.split divides it."""
        row = self.nbytes // max(self.shape[0], 1)
        return [
            replace(self, shape=(min(rows, self.shape[0] - first), *self.shape[1:]), start=self.start + first * row)
            for first in range(0, self.shape[0], rows)
        ]

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

    Raises ValueError for a file that is not safetensors, is damaged or truncated, or has a tensor of a type that is not
    known (8-bit floats, for example), and as `is_untrusted_file`.
    """
    is_untrusted_file(path)
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
        if not isinstance(kind, str) or not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is damaged: the entry of the tensor {name} is invalid") from None
    dtype = (DTYPES | OTHER_DTYPES).get(kind)
    if dtype is None:
        raise ValueError(f"{path}: the tensor {name} has the type {kind}; supported are {', '.join(DTYPES)}")
    if end - start != math.prod(shape) * dtype.itemsize or base + end > size:
        raise ValueError(f"{path} is damaged or truncated: the tensor {name} does not fit its offsets")
    return StoredTensor(path, dtype, shape, base + start)


class NamedTensor(NamedTuple):
    """A tensor to write; `read` returns its elements, in any type and of any device."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def write_safetensors(path: Path, tensors: Sequence[NamedTensor], dtype: torch.dtype) -> None:
    """Write tensors in the order given, completely or not at all, in one of DTYPES.

    Raises OSError, and ValueError for weights that are too large for this type.
    """
    code = next(name for name, known in DTYPES.items() if known == dtype)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + dtype.itemsize * torch.Size(tensor.shape).numel()
        header[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    with files.atomic_write(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            values = tensor.read().detach()
            data = values.to(device="cpu", dtype=dtype).contiguous()
            if tuple(data.shape) != tensor.shape:
                raise ValueError(f"{tensor.name} has the shape {tuple(data.shape)}, expected {tensor.shape}")
            if data.isinf().any() and not values.isinf().any():
                most, limit = float(values.abs().max()), torch.finfo(dtype).max
                raise ValueError(
                    f"{tensor.name} has weights up to {most:g}, but {dtype} ends at {limit:g}: use bf16 or fp32"
                )
            file.write(data.flatten().view(torch.uint8).numpy().data)
