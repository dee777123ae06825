"""Measure steps: their lines for metrics.jsonl, read from the device without blocking it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from niels_gpt.config import ModelConfig
from niels_gpt.system.device import peak_flops

LAG = 3
"""Steps that may be queued on CUDA: enough that it never runs dry, few enough to stop soon after a signal."""


def flops_per_token(config: ModelConfig, parameters: int, *, frozen: int = 0) -> int:
    """FLOPs of a forward and backward pass per token: 6 N + 12 L H D T, as is usual (H D is C by default).

    For a frozen weight it is 4 instead of 6.

    N are the weights that a token is multiplied with: not an untied embedding, of which a token reads one row.
    Attention counts as if it were not causal.
    """
    lookup = 0 if config.tie_embeddings else config.V * config.C
    return 6 * (parameters - lookup) - 2 * max(frozen - lookup, 0) + 12 * config.L * config.H * config.D * config.T


@dataclass
class _PendingStep:
    """A step that the device may still be computing."""

    line: dict[str, Any]
    scalars: torch.Tensor
    """Loss, gradient norm and the counts that are tensors; being copied to the host."""
    counts: dict[str, int | torch.Tensor]
    """What is counted per second, by its name in the line."""
    began: torch.cuda.Event
    ended: torch.cuda.Event


class ThroughputMeter:
    """Receives steps as they are launched, and returns their metrics lines once they are done.

    A line has step, loss, lr, grad_norm and tokens_per_s; with segments also supervised_per_s; on CUDA also mfu (if the
    peak of the device is known), memory_gib (the maximum so far) and stall: the fraction of time the device was idle.
    """

    def __init__(self, device: str, *, flops: int, processes: int = 1) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._device = device
        self._flops, self._processes = flops, processes
        self._peak = peak_flops(device)
        self._began = 0.0
        self._pending: deque[_PendingStep] = deque()
        self._previous_end: torch.cuda.Event | None = None
        self._memory = (0.0, 0.0)  # (time of the last query, its result in GiB)

    def begin(self) -> None:
        """A step begins, with building its batch."""
        self._began = time.perf_counter()

    def batch_ready(self) -> None:
        """The batch is on the device: a device that finished the previous step was idle until now."""
        if self._cuda:
            self._start = torch.cuda.Event(enable_timing=True)
            self._start.record()

    def end(
        self,
        step: int,
        lr: float,
        loss: torch.Tensor,
        norm: torch.Tensor,
        *,
        tokens: int | torch.Tensor,
        supervised: torch.Tensor | None,
    ) -> list[dict[str, Any]]:
        """The step is launched. Returns the lines of the steps that are done, oldest first.

        tokens: without padding; a tensor is read when the step is done.
        """
        counts = {"tokens_per_s": tokens} | ({} if supervised is None else {"supervised_per_s": supervised})
        line = {"step": step, "loss": 0.0, "lr": lr, "grad_norm": 0.0, **dict.fromkeys(counts, 0.0)}
        on_device = [count for count in counts.values() if isinstance(count, torch.Tensor)]
        scalars = torch.stack([scalar.to(loss.dtype) for scalar in (loss, norm, *on_device)])
        if not self._cuda:
            return [self._filled(line, scalars, counts, time.perf_counter() - self._began)]
        ended = torch.cuda.Event(enable_timing=True)
        on_host = torch.empty(scalars.shape, dtype=scalars.dtype, pin_memory=True)  # pinned, so the copy does not block
        on_host.copy_(scalars, non_blocking=True)
        ended.record()
        self._pending.append(_PendingStep(line, on_host, counts, self._start, ended))
        lines = []
        while self._pending and (len(self._pending) > LAG or self._pending[0].ended.query()):
            lines.append(self._finish(self._pending.popleft()))
        return lines

    def drain(self) -> list[dict[str, Any]]:
        """Wait for all pending steps and return their lines. The next step is timed from its own start."""
        lines = [self._finish(pending) for pending in self._pending]
        self._pending.clear()
        self._previous_end = None
        return lines

    def _finish(self, pending: _PendingStep) -> dict[str, Any]:
        pending.ended.synchronize()
        since = pending.began if self._previous_end is None else self._previous_end
        seconds = since.elapsed_time(pending.ended) / 1000
        line = self._filled(pending.line, pending.scalars, pending.counts, seconds)
        if self._peak is not None:
            line["mfu"] = round(line["tokens_per_s"] * self._flops / (self._peak * self._processes), 4)
        if time.monotonic() - self._memory[0] > 1.0:
            self._memory = (time.monotonic(), torch.cuda.max_memory_allocated(self._device) / 2**30)
        line["memory_gib"] = round(self._memory[1], 2)
        idle = 0.0 if self._previous_end is None else self._previous_end.elapsed_time(pending.began) / 1000
        line["stall"] = round(max(idle, 0.0) / seconds, 4)
        self._previous_end = pending.ended
        return line

    def _filled(
        self, line: dict[str, Any], scalars: torch.Tensor, counts: dict[str, int | torch.Tensor], seconds: float
    ) -> dict[str, Any]:
        line["loss"], line["grad_norm"], *from_device = scalars.tolist()
        for name, count in counts.items():
            number = from_device.pop(0) if isinstance(count, torch.Tensor) else count
            line[name] = round(self._processes * number / seconds, 1)
        return line
