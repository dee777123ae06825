"""Attention inside segments: a position sees only earlier positions of its row that have the same segment id.

A mask over the frame computes all n^2 scores to throw most of them away. So the tokens of each segment are laid side by
side, segments of about one length form a group, and each group is plain causal attention. Forward and backward of the
attention part on one core (H=4, D=64, 8192 tokens), next to SDPA with a mask: with 8 equal segments per frame 3 times
as fast at S=512 and 5 times at S=1024, with 8 of random lengths 2.0 and 2.9 times. Many groups that save little (filler
and one span, cut elsewhere in every row: 1.2 and 1.6 times, but slower where threads wait for each other at each of
many small calls) are left to the mask.

On CUDA in half precision the kernel for sequences of any lengths (`varlen_attn`) takes them all at once.
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
    """Who sees whom in a batch of frames, worked out once per forward pass for all layers.

    `ids` (B, n) are integers. Those of a segment need not be neighbours. They are read on the CPU: ids that lie there
    cost a GPU no wait.
    """

    def __init__(self, ids: torch.Tensor, *, device: torch.device) -> None:
        self._ids, self._device = ids, device
        rows = ids.detach().cpu().numpy()
        B, n = rows.shape
        places = np.argsort(rows, axis=1, kind="stable")
        ordered = np.take_along_axis(rows, places, axis=1)
        first = np.ones((B, n), dtype=bool)
        first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        self._order = (places + n * np.arange(B)[:, None]).ravel()  # (B n,): the tokens, segment after segment
        self._starts = np.flatnonzero(first)  # where in that order each segment begins
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
        """Few calls, or at most half the scores of the whole frames."""
        shapes, _, _ = self._groups
        B, n = self._ids.shape
        return len(shapes) <= 4 or 2 * sum(count * length**2 for count, length in shapes) <= B * n**2

    @functools.cached_property
    def _mask(self) -> torch.Tensor:
        """(B, 1, n, n): True where a position (third) sees another (fourth); each sees itself, so no row is empty."""
        ids = self._ids.to(self._device, non_blocking=True)
        n = ids.shape[1]
        causal = torch.ones((n, n), dtype=torch.bool, device=self._device).tril()
        return ((ids[:, :, None] == ids[:, None, :]) & causal)[:, None]

    def _in_groups(self, qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """(B n, H, D), one call of SDPA per group of segments."""
        shapes, index, inverse = self._groups
        qk, v = take(qk, index), take(v, index)
        H, D = v.shape[1:]
        sizes = [count * length for count, length in shapes]
        parts = []
        for shape, qk_part, v_part in zip(shapes, qk.split(sizes), v.split(sizes), strict=True):
            q, k = qk_part.view(*shape, 2, H, D).transpose(1, 3).unbind(2)  # (count, H, length, D) each
            y = F.scaled_dot_product_attention(q, k, v_part.view(*shape, H, D).transpose(1, 2), is_causal=shape[1] > 1)
            parts.append(y.transpose(1, 2).reshape(-1, H, D))
        return take(parts[0] if len(parts) == 1 else torch.cat(parts), inverse)

    @functools.cached_property
    def _groups(self) -> tuple[list[tuple[int, int]], torch.Tensor | None, torch.Tensor | None]:
        """(number of segments, length) of each group; which token lies where in them; where each token lies.

        Segments whose lengths differ by less than an eighth, and by less than 16, share a group. The shorter ones are
        followed by a token that is not theirs: attention is causal, so none of their own sees it, and what it gets
        is not read.
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
            own = offsets < lengths  # (count, length)
            tokens = self._order[np.where(own, self._starts[members][:, None] + offsets, 0)]
            inverse[tokens[own]] = filled + np.flatnonzero(own)
            shapes.append(own.shape)
            index.append(tokens.ravel())
            filled += own.size
        return shapes, self._indices(np.concatenate(index)), self._indices(inverse)

    def _in_one_call(self, qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """(B n, H, D) from the kernel that takes sequences of any lengths."""
        order, inverse, edges, longest = self._sequences
        q, k = take(qk.to(v.dtype), order).unbind(1)  # under autocast RoPE gives float32
        kernel = varlen_kernel()
        assert kernel is not None
        return take(kernel(q, k, take(v, order), edges, edges, longest, longest), inverse)

    @functools.cached_property
    def _sequences(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor, int]:
        """The order of the tokens, its inverse, the edges of the segments in it, the longest length."""
        edges = torch.from_numpy(np.append(self._starts, len(self._order)).astype(np.int32))
        inverse = np.argsort(self._order)
        return self._indices(self._order), self._indices(inverse), edges.to(self._device), int(self._lengths.max())

    def _indices(self, index: np.ndarray) -> torch.Tensor | None:
        """On the device; None where taking by it changes nothing."""
        if len(index) == len(self._order) and (index == np.arange(len(index))).all():
            return None
        return torch.from_numpy(index).to(self._device, non_blocking=True)


def take(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """The rows of x at `index`, or all of them."""
    return x if index is None else x.index_select(0, index)


def fits_varlen(v: torch.Tensor) -> bool:
    """Whether torch has the kernel and it takes these values: half precision, an Ampere or later, heads of 8 to 256."""
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
    """torch's attention over sequences of any lengths, made causal; None where this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return None
    attention: Callable[..., Any] = varlen_attn
    known = inspect.signature(attention).parameters
    if "window_size" in known:
        return functools.partial(attention, window_size=(-1, 0))
    return functools.partial(attention, is_causal=True) if "is_causal" in known else None
