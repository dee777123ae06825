"""Write a safetensors file tensor by tensor, so that one converted tensor at a time is in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from niels_gpt.system import files

DTYPES = {"fp32": (torch.float32, "F32"), "bf16": (torch.bfloat16, "BF16"), "fp16": (torch.float16, "F16")}
"""Option -> (type in memory, its name in the header)."""
_ALIGNMENT = 8


class NamedTensor(NamedTuple):
    """A tensor of the file; `read` returns its elements, in any type and of any device."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def write_safetensors(path: Path, tensors: Sequence[NamedTensor], *, dtype: str = "fp32") -> None:
    """Write tensors in the order given, completely or not at all. Raises OSError that names the path."""
    stored, code = DTYPES[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + stored.itemsize * torch.Size(tensor.shape).numel()
        header[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    with files.atomic_write(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            data = tensor.read().detach().to(device="cpu", dtype=stored).contiguous()
            if tuple(data.shape) != tensor.shape:
                raise ValueError(f"{tensor.name} has the shape {tuple(data.shape)}, expected {tensor.shape}")
            file.write(data.flatten().view(torch.uint8).numpy().data)
