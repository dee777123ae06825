"""Attention inside segments: a position sees only earlier positions of its row that have the same segment id.

A mask over the frame computes all n^2 scores and throws most of them away. Instead the tokens of each segment are
gathered, segments of similar length form a group, and each group is plain causal attention. Forward and backward of the
attention on one core (H=4, D=64, 8192 tokens), compared with SDPA and a mask: with 8 equal segments per frame 3 times
as fast at S=512 and 5 times at S=1024, with 8 of random lengths 2.0 and 2.9 times. Many groups that save little (filler
and one span, cut at another position in every row: 1.2 and 1.6 times, but slower where threads wait for each other at
each of many small calls) use the mask.

On CUDA in half precision torch's kernel for sequences of any lengths (`varlen_attn`) computes all in one call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


class Segments:
    """Which positions see each other in a batch of frames, computed once per forward pass for all layers.

    `ids` (B, n) are integers; tokens of a segment need not be adjacent. They are read on the CPU: if they are there
    already, nothing waits for the GPU.
    """

    def __init__(self, ids: torch.Tensor, *, device: torch.device) -> None:
        self._ids, self._device = ids, device
        rows = ids.detach().cpu().numpy()
        B, n = rows.shape
        order = np.argsort(rows, axis=1, kind="stable")
        ordered = np.take_along_axis(rows, order, axis=1)
        first = np.ones((B, n), dtype=bool)
        first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        self._order = (order + n * np.arange(B)[:, None]).ravel()  # (B n,): token indices, segment by segment
        self._starts = np.flatnonzero(first)  # index in that order of the first token of each segment
        self._lengths = np.diff(self._starts, append=B * n)

    def attend(self, qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention (B, n, C) of H query heads, then G key heads (B, n, H + G, D), and values (B, n, G, D)."""
        B, n, G, D = v.shape
        H = qk.shape[2] - G
        if G < H:  # grouped-query attention: repeat keys and values for each query head
            q, k = qk.split((H, G), dim=2)
            k, v = (t.repeat_interleave(H // G, dim=2) for t in (k, v))
            qk = torch.cat((q, k), dim=2)
        qk = qk.unflatten(2, (2, H))
        if fits_varlen(v):
            y = self._in_one_call(qk.reshape(B * n, 2, H, D), v.reshape(B * n, H, D))
        elif self._worth_grouping:
            y = self._in_groups(qk.reshape(B * n, 2, H, D), v.reshape(B * n, H, D))
        else:
            q, k = qk.transpose(1, 3).unbind(2)  # (B, H, n, D) each
            y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), attn_mask=self._mask).transpose(1, 2)
        return y.reshape(B, n, H * D)

    @functools.cached_property
    def _worth_grouping(self) -> bool:
        """Whether groups are few, or compute at most half the scores of the full frames."""
        shapes, _, _ = self._groups
        B, n = self._ids.shape
        return len(shapes) <= 4 or 2 * sum(count * length**2 for count, length in shapes) <= B * n**2

    @functools.cached_property
    def _mask(self) -> torch.Tensor:
        """(B, 1, n, n): True where a query (dim 2) sees a key (dim 3); each sees itself, so no row is empty."""
        ids = self._ids.to(self._device, non_blocking=True)
        n = ids.shape[1]
        causal = torch.ones((n, n), dtype=torch.bool, device=self._device).tril()
        return ((ids[:, :, None] == ids[:, None, :]) & causal)[:, None]

    def _in_groups(self, qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention (B n, H, D) with one call of SDPA per group of segments."""
        shapes, index, inverse = self._groups
        qk, v = take(qk, index), take(v, index)
        H, D = v.shape[1:]
        sizes = [count * length for count, length in shapes]
        results = []
        for shape, qk_group, v_group in zip(shapes, qk.split(sizes), v.split(sizes), strict=True):
            q, k = qk_group.view(*shape, 2, H, D).transpose(1, 3).unbind(2)  # (count, H, length, D) each
            y = F.scaled_dot_product_attention(q, k, v_group.view(*shape, H, D).transpose(1, 2), is_causal=shape[1] > 1)
            results.append(y.transpose(1, 2).reshape(-1, H, D))
        return take(results[0] if len(results) == 1 else torch.cat(results), inverse)

    @functools.cached_property
    def _groups(self) -> tuple[list[tuple[int, int]], torch.Tensor | None, torch.Tensor | None]:
        """(number of segments, length) of each group; the token at each index of the groups; the index of each token.

        Segments whose lengths differ by less than an eighth, and by less than 16, share a group. The shorter ones are
        padded with some other token: attention is causal, so their own tokens do not see it, and its result is not
        read.
        """
        step = np.clip(self._lengths // 8, 1, 16)
        rounded = -(-self._lengths // step) * step
        shapes, index = [], []
        inverse = np.empty_like(self._order)
        filled = 0
        for size in np.unique(rounded):
            members = np.flatnonzero(rounded == size)
            lengths = self._lengths[members][:, None]
            offsets = np.arange(lengths.max())
            real = offsets < lengths  # (count, length): not padding
            tokens = self._order[np.where(real, self._starts[members][:, None] + offsets, 0)]
            inverse[tokens[real]] = filled + np.flatnonzero(real)
            shapes.append(real.shape)
            index.append(tokens.ravel())
            filled += real.size
        return shapes, self._indices(np.concatenate(index)), self._indices(inverse)

    def _in_one_call(self, qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention (B n, H, D) by the kernel for sequences of any lengths."""
        order, inverse, edges, longest = self._sequences
        q, k = take(qk.to(v.dtype), order).unbind(1)  # under autocast RoPE returns float32
        kernel = varlen_kernel()
        assert kernel is not None
        return take(kernel(q, k, take(v, order), edges, edges, longest, longest), inverse)

    @functools.cached_property
    def _sequences(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor, int]:
        """(order of the tokens, its inverse, offsets of the segments in it, longest length)."""
        edges = torch.from_numpy(np.append(self._starts, len(self._order)).astype(np.int32))
        inverse = np.argsort(self._order)
        return self._indices(self._order), self._indices(inverse), edges.to(self._device), int(self._lengths.max())

    def _indices(self, index: np.ndarray) -> torch.Tensor | None:
        """An index on the device; None if it is the identity."""
        if len(index) == len(self._order) and (index == np.arange(len(index))).all():
            return None
        return torch.from_numpy(index).to(self._device, non_blocking=True)


def take(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """The rows of x at `index`; x itself if it is None."""
    return x if index is None else x.index_select(0, index)


def fits_varlen(v: torch.Tensor) -> bool:
    """Whether torch's varlen kernel takes v: half precision, Ampere or later, D a multiple of 8 up to 256."""
    return (
        v.is_cuda
        and v.dtype in (torch.bfloat16, torch.float16)
        and v.shape[-1] % 8 == 0
        and v.shape[-1] <= 256
        and torch.cuda.get_device_capability(v.device) >= (8, 0)
        and varlen_kernel() is not None
    )


@functools.cache
def varlen_kernel() -> Callable[..., torch.Tensor] | None:
    """torch's causal attention over sequences of any lengths; None if this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return None
    attention: Callable[..., Any] = varlen_attn
    known = inspect.signature(attention).parameters
    if "window_size" in known:
        return functools.partial(attention, window_size=(-1, 0))
    return functools.partial(attention, is_causal=True) if "is_causal" in known else None
