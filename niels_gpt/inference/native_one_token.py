"""`OneToken` by C kernels, for float32 models on a CPU; `kernels/cpu/decoding.py` says what they gain."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
import torch.nn.functional as F

from niels_gpt.inference.one_token import Activation, OneToken
from niels_gpt.kernels.cpu.decoding import (
    MOST_ROWS,
    MatmulKernel,
    Panels,
    TokenAttention,
    gelu,
    matmul_kernel,
    token_attention,
)
from niels_gpt.kernels.weights import ModelWeights
from niels_gpt.model.gpt import GPT
from niels_gpt.model.kv_cache import KVCache
from niels_gpt.system.host_limits import machine_memory

SHARE = 4
"""Matrices are copied into panels if they take at most 1 / SHARE of the memory: the copy takes as much again."""


class _Block(NamedTuple):
    norm_attn: torch.Tensor
    qkv: Panels
    out: Panels
    norm_mlp: torch.Tensor
    gate: Panels | None
    up: Panels
    down: Panels
    activation: Activation


class _Layout(NamedTuple):
    """The matrices of a model as panels."""

    source: tuple[tuple[int, int, int], ...]
    """Address, rows and version of each matrix that was copied; the head has fewer rows if ids are left out."""
    blocks: list[_Block]
    head: Panels


_layouts: weakref.WeakKeyDictionary[GPT, _Layout] = weakref.WeakKeyDictionary()
"""The panels of a model serve all its decoders: copying v1's matrices takes 20 ms."""


def native_one_token(model: GPT) -> OneToken | None:
    """The pass by C kernels; None if they cannot be compiled or do not compute this model."""
    matrices = _matrices(model.weights())
    if any(matrix.device.type != "cpu" or matrix.dtype != torch.float32 for matrix in matrices):
        return None
    if 4 * sum(matrix.numel() for matrix in matrices) > machine_memory() // SHARE:
        return None
    attention = token_attention(model.config.D)
    matmul = None if attention is None else matmul_kernel()
    return None if attention is None or matmul is None else NativeOneToken(model, matmul, attention)


def _matrices(weights: ModelWeights) -> list[torch.Tensor]:
    return [weights.head, *(matrix for block in weights.blocks for matrix in block.matrices())]


class NativeOneToken(OneToken):
    """`OneToken` for up to MOST_ROWS rows in C; a row's logits do not depend on the rows beside it."""

    def __init__(self, model: GPT, matmul: MatmulKernel, attention: TokenAttention) -> None:
        super().__init__(model)
        weights = model.weights()
        self._model = weakref.ref(model)
        self._matmul, self._attention = matmul, attention
        self._weights = weights
        self._matrices = _matrices(weights)
        self._versioned = [matrix for matrix in self._matrices if not matrix.is_inference()]
        self._version = -1
        self._layout: _Layout | None = None
        self._angles: torch.Tensor | None = None
        if weights.cos is not None and weights.sin is not None:
            self._angles = torch.stack((weights.cos[:, 0], weights.sin[:, 0]), dim=-1).contiguous()  # (T, D/2, 2)

    def __call__(self, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Logits (B, V) for one more id per row (B,), which is added to the cache. No gradients."""
        if ids.shape[0] > MOST_ROWS:
            return super().__call__(ids, cache)
        width, eps, rms, options = (self.config.C,), self._eps, self._rms, self._options
        layout = self._current_layout()
        before = cache.grow(1)
        attend = self._attention.layers(self._angles, cache.buffer, before, self.config.H)
        h = F.embedding(ids, self._embedding)
        if self._positions is not None:
            h = h + self._positions[torch.tensor(before)]
        for layer, block in enumerate(layout.blocks):
            norm, qkv_panels, out, norm_mlp, gate, up, down, activation = block
            x = torch.rms_norm(h, width, norm, eps) if rms else torch.layer_norm(h, width, norm, None, eps, False)
            qkv = qkv_panels.multiply(x)
            if options is not None:
                qkv = self._biased_and_normed(qkv, options[layer])
            h = out.multiply(attend(layer, qkv), h)
            x = (
                torch.rms_norm(h, width, norm_mlp, eps)
                if rms
                else torch.layer_norm(h, width, norm_mlp, None, eps, False)
            )
            if gate is None:
                h = down.multiply(activation(up.multiply(x)), h)
            else:
                h = down.multiply(up.multiply(x).mul_(activation(gate.multiply(x))), h)
        norm = self._norm
        x = torch.rms_norm(h, width, norm, eps) if rms else torch.layer_norm(h, width, norm, None, eps, False)
        return layout.head.multiply(x)

    def _current_layout(self) -> _Layout:
        """The panels, copied again if a matrix has changed in place."""
        version = sum(matrix._version for matrix in self._versioned)
        if self._layout is not None and version == self._version:
            return self._layout
        self._version = version
        model = self._model()
        known = None if model is None else _layouts.get(model)
        shared = len(self._versioned) == len(self._matrices)  # inference tensors have no version
        source = tuple((matrix.data_ptr(), len(matrix), matrix._version) for matrix in self._versioned)
        if shared and known is not None and known.source == source:
            self._layout = known
            return known
        self._layout = _Layout(source, *self._copied())
        if shared and model is not None:
            _layouts[model] = self._layout
        return self._layout

    def _copied(self) -> tuple[list[_Block], Panels]:
        def panels(matrix: torch.Tensor) -> Panels:
            return Panels(matrix, self._matmul)

        blocks = [
            _Block(
                block.norm_attn.weight,
                panels(block.qkv),
                panels(block.out),
                block.norm_mlp.weight,
                None if block.gate is None else panels(block.gate),
                panels(block.up),
                panels(block.down),
                gelu if block.activation is F.gelu else block.activation,
            )
            for block in self._weights.blocks
        ]
        return blocks, panels(self._weights.head)
