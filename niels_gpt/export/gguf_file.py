"""Write a model as a GGUF file for llama.cpp, Ollama and others."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from niels_gpt.config import ModelConfig
from niels_gpt.export.gguf_vocabulary import add_vocabulary
from niels_gpt.model.gpt import GPT
from niels_gpt.model.rope import RopeScaling
from niels_gpt.pretrained.layouts import RopePairs
from niels_gpt.system import files
from niels_gpt.tokenizer import AnyTokenizer

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

TYPES = ("f32", "f16", "q8_0", "q4_0")
"""How the matrices are stored. Norms are always f32; with q4_0 the embedding and the head are q8_0, since every logit
depends on their rows alone. Matrices whose rows are no multiple of 32 weights cannot be quantized, and are f16."""
BLOCK = 32
"""Weights that share a scale in q8_0 and q4_0."""


NamedWeight = tuple[str, torch.Tensor]


class _Tensor(NamedTuple):
    """A tensor of the file. Its weights are converted when they are written."""

    name: str
    weight: torch.Tensor
    kind: GGMLQuantizationType


def write_gguf(
    model: GPT, tokenizer: AnyTokenizer, path: Path, *, kind: str = "f32", name: str = "", learned_chat: bool = False
) -> None:
    """Write a model and its tokenizer to `path`, completely or not at all.

    kind: one of TYPES. learned_chat: as for `hugging_face.write_hf`. Raises ValueError for a model that llama.cpp does
    not compute and for weights that are too large for float16, and OSError for a failed write.
    """
    try:
        from gguf import GGUFWriter, quants
    except ImportError:
        raise ValueError("export gguf needs the package gguf: pip install 'niels-gpt[export]'") from None

    if kind not in TYPES:
        raise ValueError(f"--type must be one of {', '.join(TYPES)}, got {kind!r}")
    architecture = architecture_of(model.config)
    tensors = [_Tensor(each, weight, _kind_of(each, weight, kind)) for each, weight in _tensors(model, architecture)]
    with files.atomic_write(path) as file:
        writer = GGUFWriter(file.name, architecture)
        try:
            _add_config(writer, model.config, kind, name)
            add_vocabulary(writer, tokenizer, model.config.V, learned_chat=learned_chat)
            for tensor in tensors:
                _add_info(writer, tensor)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors:  # one at a time: the copy of one matrix is all the memory it takes
                values = tensor.weight.detach().float().cpu().contiguous().numpy()
                _check_range(tensor, values)
                writer.write_tensor_data(quants.quantize(values, tensor.kind))
        except OSError as err:
            if err.errno is None:  # numpy reports a short write without the reason
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from err
            raise
        finally:
            writer.close()


def _add_info(writer: GGUFWriter, tensor: _Tensor) -> None:
    """Declare a tensor: its name, shape, type and size."""
    from gguf import GGMLQuantizationType, quants

    shape = tuple(tensor.weight.shape)
    F32, F16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16
    floats: dict[Any, np.dtype[Any]] = {F32: np.dtype(np.float32), F16: np.dtype(np.float16)}
    dtype = floats.get(tensor.kind)
    if dtype is not None:
        writer.add_tensor_info(tensor.name, shape, dtype, math.prod(shape) * dtype.itemsize)
    else:
        shape = tuple(quants.quant_shape_to_byte_shape(shape, tensor.kind))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), math.prod(shape), tensor.kind)


def _check_range(tensor: _Tensor, values: np.ndarray) -> None:
    """Raise ValueError for a tensor in float16 if its weights are too large for that."""
    if tensor.kind.name != "F16":
        return
    limit, most = float(np.finfo(np.float16).max), float(np.abs(values).max(initial=0.0))
    if limit < most < math.inf:
        raise ValueError(f"{tensor.name} has weights up to {most:g}, but f16 ends at {limit:g}: use --type f32")


def _kind_of(name: str, weight: torch.Tensor, kind: str) -> GGMLQuantizationType:
    """Return how a tensor is stored in a file of this kind; see TYPES."""
    from gguf import GGMLQuantizationType

    if weight.dim() < 2 or name == "position_embd.weight":  # llama.cpp adds the rows of positions as they are
        return GGMLQuantizationType.F32
    if kind == "q4_0" and name in ("token_embd.weight", "output.weight"):
        kind = "q8_0"
    if kind in ("q8_0", "q4_0") and weight.shape[-1] % BLOCK:
        kind = "f16"
    return GGMLQuantizationType[kind.upper()]


_BLOCKS = {
    ("rmsnorm", "swiglu", "rope"): "llama",
    ("layernorm", "gelu", "rope"): "gptneox",
    ("layernorm", "gelu_tanh", "rope"): "gptneox",
    ("layernorm", "gelu", "learned"): "gpt2",
    ("layernorm", "gelu_tanh", "learned"): "gpt2",
}
"""llama.cpp computes every GELU as gelu_tanh."""
_LACKS = {
    "llama": ("bias",),
    "qwen3": ("rope_scale", "bias"),
    "gptneox": ("rope_scale", "head_dim", "qk_norm"),
    "gpt2": ("head_dim", "qk_norm"),
}
"""Architecture -> options of ours that it does not have."""


def architecture_of(config: ModelConfig) -> str:
    """Return llama.cpp's name of the architecture. Raises ValueError if it has none that computes this model."""
    blocks = (config.norm, config.mlp, config.positions)
    if blocks not in _BLOCKS:
        listed = "; ".join(f"{' + '.join(key)} ({value})" for key, value in _BLOCKS.items())
        raise ValueError(f"llama.cpp has no architecture with {' + '.join(blocks)}; supported are {listed}")
    name = "qwen3" if blocks == ("rmsnorm", "swiglu", "rope") and config.qk_norm else _BLOCKS[blocks]
    default = ModelConfig()
    for option in _LACKS[name]:
        if getattr(config, option) != getattr(default, option):
            raise ValueError(f"llama.cpp's architecture {name} ({' + '.join(blocks)}) does not have model.{option}")
    return name


def _add_config(writer: GGUFWriter, config: ModelConfig, kind: str, name: str) -> None:
    from gguf import GGML_QUANT_VERSION, LlamaFileType

    file_types = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}
    writer.add_name(name or "niels-gpt")
    writer.add_file_type(LlamaFileType[file_types[kind]])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_context_length(config.T)
    writer.add_embedding_length(config.C)
    writer.add_block_count(config.L)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.H)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_vocab_size(config.V)
    writer.add_key_length(config.D)
    writer.add_value_length(config.D)
    if config.norm == "rmsnorm":
        writer.add_layer_norm_rms_eps(config.norm_eps)
    else:
        writer.add_layer_norm_eps(config.norm_eps)
        writer.add_parallel_residual(False)
    if config.positions == "rope":
        writer.add_rope_dimension_count(config.D)
        writer.add_rope_freq_base(config.rope_theta)


def _tensors(model: GPT, architecture: str) -> Iterator[NamedWeight]:
    """Yield (name, weight) of each tensor of the file.

    llama.cpp expects biases in a `gptneox` and a `gpt2`; zeros if the model has none.
    """
    weights, config = model.weights(), model.config
    biased = architecture in ("gptneox", "gpt2")

    def with_bias(name: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Iterator[NamedWeight]:
        yield f"{name}.weight", weight
        if biased or bias is not None:
            yield f"{name}.bias", torch.zeros(weight.shape[0]) if bias is None else bias

    yield "token_embd.weight", weights.embedding
    if weights.positions is not None:
        yield "position_embd.weight", weights.positions
    yield from with_bias("output_norm", weights.norm.weight, weights.norm.bias)
    if architecture == "gptneox" or not config.tie_embeddings:
        yield "output.weight", model.lm_head.weight  # all V rows: `weights.head` has those of the tokenizer's ids
    scaling = RopeScaling.of(config)
    if scaling is not None:
        yield "rope_freqs.weight", _frequency_divisors(config, scaling)
    for layer, block in enumerate(weights.blocks):
        at = f"blk.{layer}"
        yield from with_bias(f"{at}.attn_norm", block.norm_attn.weight, block.norm_attn.bias)
        heads = _projections(block.qkv, config, architecture)
        qkv_bias, bias_of = block.biases.get("qkv"), block.biases.get
        biases = [None] * 3 if qkv_bias is None else _projections(qkv_bias, config, architecture)
        if biased:
            together = None if qkv_bias is None else torch.cat([bias for bias in biases if bias is not None])
            yield from with_bias(f"{at}.attn_qkv", torch.cat(heads), together)
        else:
            for letter, rows, bias in zip("qkv", heads, biases, strict=True):
                yield from with_bias(f"{at}.attn_{letter}", rows, bias)
        for letter, norm in (("q", block.norm_q), ("k", block.norm_k)):
            if norm is not None:
                yield f"{at}.attn_{letter}_norm.weight", RopePairs(config.D).to_theirs(norm.weight)
        yield from with_bias(f"{at}.attn_output", block.out, bias_of("out"))
        yield from with_bias(f"{at}.ffn_norm", block.norm_mlp.weight, block.norm_mlp.bias)
        if block.gate is not None:
            yield f"{at}.ffn_gate.weight", block.gate
        yield from with_bias(f"{at}.ffn_up", block.up, bias_of("up"))
        yield from with_bias(f"{at}.ffn_down", block.down, bias_of("down"))


def _projections(qkv: torch.Tensor, config: ModelConfig, architecture: str) -> list[torch.Tensor]:
    """Return the rows of queries, keys and values. llama.cpp rotates halves; of a `llama`, neighbors, as here."""
    q, k, v = qkv.split([heads * config.D for heads in (config.H, config.kv_heads, config.kv_heads)])
    if architecture in ("gptneox", "qwen3"):
        q, k = (RopePairs(config.D).to_theirs(rows) for rows in (q, k))
    return [q, k, v]


def _frequency_divisors(config: ModelConfig, scaling: RopeScaling) -> torch.Tensor:
    """Return by how much llama.cpp must divide each frequency of RoPE, (D/2,)."""
    frequency = config.rope_theta ** (-torch.arange(0, config.D, 2, dtype=torch.float64) / config.D)
    return (frequency / scaling(frequency)).float()
