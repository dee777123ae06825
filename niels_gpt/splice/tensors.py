"""Splice frames as tensors for a model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from niels_gpt.splice.frames import Frames
from niels_gpt.splice.packing import PackedFrames


class FrameTensors(NamedTuple):
    """The inputs of a forward pass and its loss."""

    x: torch.Tensor
    """(n, S) int64 token ids."""
    targets: torch.Tensor
    """(n, S) int64: the next token where the loss mask is 1, else -100."""
    segments: torch.Tensor | None
    """(n, S) int32, always on the CPU, where the model reads them; None if every frame is one segment."""
    positions: torch.Tensor | None
    """(n, S) int64; None: 0, 1, 2, ..."""


def to_tensors(frames: Frames | PackedFrames, device: str | torch.device = "cpu") -> FrameTensors:
    """Convert a batch of frames to tensors."""
    x = torch.from_numpy(frames.tokens.astype(np.int64))
    shifted = np.zeros_like(frames.tokens)
    shifted[:, :-1] = frames.tokens[:, 1:]
    targets = torch.from_numpy(np.where(frames.loss_mask != 0, shifted, -100).astype(np.int64))
    one_segment = not frames.segment_ids.size or bool((frames.segment_ids == 1).all())
    segments = None if one_segment else torch.from_numpy(frames.segment_ids)
    positions = torch.from_numpy(frames.positions.astype(np.int64)) if isinstance(frames, PackedFrames) else None
    return FrameTensors(x.to(device), targets.to(device), segments, None if positions is None else positions.to(device))
