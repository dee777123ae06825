"""Splice frames as tensors for a model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from niels_gpt.splice.frames import Frames
from niels_gpt.splice.packing import PackedFrames


class FrameTensors(NamedTuple):
    """What a forward pass and its loss need."""

    x: torch.Tensor
    """(n, S) int64 ids."""
    targets: torch.Tensor
    """(n, S) int64: the id that follows where the loss mask is 1, else -100."""
    segments: torch.Tensor | None
    """(n, S) int32, always on the CPU, where the model reads them; None where no frame has more than one."""
    positions: torch.Tensor | None
    """(n, S) int64; None: 0, 1, 2, ..."""


def to_tensors(frames: Frames | PackedFrames, device: str | torch.device = "cpu") -> FrameTensors:
    """The tensors of a batch of frames."""
    x = torch.from_numpy(frames.tokens.astype(np.int64))
    following = np.zeros_like(frames.tokens)
    following[:, :-1] = frames.tokens[:, 1:]
    targets = torch.from_numpy(np.where(frames.loss_mask != 0, following, -100).astype(np.int64))
    whole = not frames.segment_ids.size or bool((frames.segment_ids == 1).all())
    segments = None if whole else torch.from_numpy(frames.segment_ids)
    positions = torch.from_numpy(frames.positions.astype(np.int64)) if isinstance(frames, PackedFrames) else None
    return FrameTensors(x.to(device), targets.to(device), segments, None if positions is None else positions.to(device))
