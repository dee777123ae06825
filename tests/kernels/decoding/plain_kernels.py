"""The decode kernels in plain torch: the same arguments, any grid.

With these in place of the Triton kernels everything around them runs on a CPU; on CUDA the kernels are compared with
them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from niels_gpt.inference.sampling import Sampling, choose
from niels_gpt.kernels.decoding.step import LOW, STORE


class Kernel:
    """A function that is launched like a kernel: `kernel[grid](*args, **constants)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.params = [
            SimpleNamespace(name=name, do_not_specialize=True) for name in inspect.signature(function).parameters
        ]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(
            *args: Any, num_warps: int = 4, launch_pdl: bool = False, maxnreg: int | None = None, **constants: Any
        ) -> None:
            self.function(*args, **constants)

        return launch


def linear(x, w, shift, out, moments, N, K, rows, parts, eps, norm, epilogue, **constants):
    """Matmuls in float32: vector_kernel, lean_kernel and deep_kernel."""
    if epilogue == 3 and "M" in constants:
        assert parts == -(-N // constants["BN"])  # each program writes one part of the sums
    value = x.view(rows, K)
    if norm == 1:
        value = F.layer_norm(value, (K,), eps=eps)
    elif norm == 2:
        value = F.rms_norm(value, (K,), eps=eps)
    result = value @ w.view(N, K).t()
    if epilogue == 1:
        result = F.gelu(result)
    elif epilogue == 2:
        result = result[:, ::2] * F.silu(result[:, 1::2])
    elif epilogue == 3:
        result = result + out
    out.copy_(result)
    if epilogue == 3:
        moments.zero_()
        moments[:, 0, 0], moments[:, 0, 1] = out.sum(1), out.square().sum(1)


def paired_kernel(x, w, factor, *others, **constants):
    high, low = w.float()
    linear(x, (high + low / LOW) * factor[:, None], factor, *others)


def wide_kernel(*args, **constants):
    assert args[-1] == STORE
    paired_kernel(*args)


def attend_kernel(
    qkv, sin, cos, cache, part, edges, arrived, y, lengths, slots, T, H, G, span, scale, D, ROPE, **constants
):
    for b, slot in enumerate(slots.tolist()):
        pos = min(int(lengths[slot]), T - 1)
        q, k, v = qkv[b].view(H + 2 * G, D).split((H, G, G))
        if ROPE:
            rotation = torch.complex(cos.view(T, D // 2)[pos], sin.view(T, D // 2)[pos])
            q, k = (
                torch.view_as_real(torch.view_as_complex(t.reshape(-1, D // 2, 2)) * rotation).flatten(1)
                for t in (q, k)
            )
        cache[slot, 0, :, pos], cache[slot, 1, :, pos] = k, v
        keys, values = cache[slot, :, :, : pos + 1].repeat_interleave(H // G, dim=1)
        share = ((keys @ q[:, :, None]).squeeze(-1) * scale).softmax(-1)  # (H, S)
        y[b] = (share[:, None] @ values).reshape(-1)


def sample_kernel(
    logits, embedding, positions, h, moments, lengths, tokens, slots, ring, clock, uniform, drawn, numbers, counts,
    scratch, V, T, C, parts, width, idle, stock, LEARNED, **constants,
):  # fmt: skip
    for b, slot in enumerate(slots.tolist()):
        pos, turn, now = int(lengths[slot]), int(drawn[slot]), int(clock[b])
        temperature, top_p, min_p = numbers[slot].tolist()
        sampling = Sampling(temperature, int(counts[slot]), top_p or None, min_p)  # an idle slot has no top_p
        token = int(choose(logits[b : b + 1], sampling, uniform[slot, turn % stock][None]))
        tokens[slot] = token
        ring[now % width, b] = token
        clock[b] = now + 1
        drawn[slot] = turn + 1
        lengths[slot] = 0 if slot == idle else min(pos + 1, T)
        h[b] = embedding[token]
        if LEARNED:
            h[b] += positions[min(pos + 1, T - 1)]
        moments[b] = 0
        moments[b, 0] = torch.stack((h[b].sum(), h[b].square().sum()))


kernels = SimpleNamespace(
    vector_kernel=Kernel(linear),
    paired_kernel=Kernel(paired_kernel),
    wide_kernel=Kernel(wide_kernel),
    lean_kernel=Kernel(linear),
    deep_kernel=Kernel(linear),
    attend_kernel=Kernel(attend_kernel),
    sample_kernel=Kernel(sample_kernel),
)


class Replay:
    """Stands in for a captured graph on a CPU."""

    def __init__(self, rows: Any, steps: int) -> None:
        self.rows, self.steps = rows, steps

    def replay(self) -> None:
        for _ in range(self.steps):
            self.rows()
