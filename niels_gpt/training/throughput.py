"""What an update measured: its line for metrics.jsonl, read from the device without making it wait."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from niels_gpt.config import ModelConfig
from niels_gpt.system.device import peak_flops

LAG = 3
"""Updates that CUDA may have in its queue: enough that it never runs dry, few enough to stop soon."""


def flops_per_token(config: ModelConfig, parameters: int) -> int:
    """FLOPs of a forward and backward pass per token: 6 N + 12 L C T, as is usual.

    N are the weights that a token is multiplied with: not an untied embedding, of which a token reads one row.
    Attention counts as if it were not causal.
    """
    lookup = 0 if config.tie_embeddings else config.V * config.C
    return 6 * (parameters - lookup) + 12 * config.L * config.C * config.T


@dataclass
class _Update:
    """An update that the device may still be working on."""

    line: dict[str, Any]
    numbers: torch.Tensor  # loss, gradient norm, supervised targets; on its way to the host
    tokens: int
    began: torch.cuda.Event
    ended: torch.cuda.Event


class ThroughputMeter:
    """Takes updates as they are launched, gives lines as they are done.

    A line has step, loss, lr, grad_norm, tokens_per_s; on CUDA also mfu (where the peak of the device is known),
    memory_gib (the most so far) and stall: the share of the time in which the device had nothing to do.
    """

    def __init__(self, device: str, *, flops: int, processes: int = 1) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._device = device
        self._flops, self._processes = flops, processes
        self._peak = peak_flops(device)
        self._began = 0.0
        self._waiting: deque[_Update] = deque()
        self._before: torch.cuda.Event | None = None
        self._memory = (0.0, 0.0)  # when it was looked at, what it was

    def begin(self) -> None:
        """An update begins, with the making of its batch."""
        self._began = time.perf_counter()

    def fed(self) -> None:
        """Its batch is there: up to here a device that has finished the update before is idle."""
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
        tokens: int,
        supervised: torch.Tensor | None,
    ) -> list[dict[str, Any]]:
        """The update is launched; the lines of those that are done, oldest first."""
        line = {"step": step, "loss": 0.0, "lr": lr, "grad_norm": 0.0, "tokens_per_s": 0.0}
        if supervised is not None:
            line["supervised_per_s"] = 0.0
        numbers = torch.stack([loss, norm.to(loss.dtype), loss if supervised is None else supervised.to(loss.dtype)])
        if not self._cuda:
            return [self._filled(line, numbers, tokens, time.perf_counter() - self._began)]
        ended = torch.cuda.Event(enable_timing=True)
        read = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)  # else the copy would wait
        read.copy_(numbers, non_blocking=True)
        ended.record()
        self._waiting.append(_Update(line, read, tokens, self._start, ended))
        lines = []
        while self._waiting and (len(self._waiting) > LAG or self._waiting[0].ended.query()):
            lines.append(self._done(self._waiting.popleft()))
        return lines

    def drain(self) -> list[dict[str, Any]]:
        """The lines of all updates that are not done yet; waits for them. What comes next is timed by itself."""
        lines = [self._done(update) for update in self._waiting]
        self._waiting.clear()
        self._before = None
        return lines

    def _done(self, update: _Update) -> dict[str, Any]:
        update.ended.synchronize()
        since = update.began if self._before is None else self._before
        seconds = since.elapsed_time(update.ended) / 1000
        line = self._filled(update.line, update.numbers, update.tokens, seconds)
        if self._peak is not None:
            line["mfu"] = round(line["tokens_per_s"] * self._flops / (self._peak * self._processes), 4)
        if time.monotonic() - self._memory[0] > 1.0:
            self._memory = (time.monotonic(), torch.cuda.max_memory_allocated(self._device) / 2**30)
        line["memory_gib"] = round(self._memory[1], 2)
        idle = 0.0 if self._before is None else self._before.elapsed_time(update.began) / 1000
        line["stall"] = round(max(idle, 0.0) / seconds, 4)
        self._before = update.ended
        return line

    def _filled(self, line: dict[str, Any], numbers: torch.Tensor, tokens: int, seconds: float) -> dict[str, Any]:
        line["loss"], line["grad_norm"], supervised = numbers.tolist()
        line["tokens_per_s"] = round(self._processes * tokens / seconds, 1)
        if "supervised_per_s" in line:
            line["supervised_per_s"] = round(self._processes * supervised / seconds, 1)
        return line
