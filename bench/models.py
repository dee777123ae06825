"""Our model and those of peers, as their packages build them: random weights, fp32, tied embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Size:
    """A size that every package can build."""

    name: str
    V: int
    T: int
    C: int
    L: int
    H: int
    gated: int
    """Width of an MLP with three matrices; a plain one has two of width 4 C."""
    ours: Mapping[str, Any] = field(default_factory=dict)
    """Options of our model that differ from v0."""
    kv_heads: int = 0
    """Heads of keys and values; 0: H."""
    theta: float = 10_000.0
    """Base of RoPE."""

    def scaled(self, quick: bool) -> Size:
        """Return a tiny size with the same options if `quick`, else itself."""
        ours = {key: 128 if key == "d_ff" else value for key, value in self.ours.items()}
        V = min(self.V, 300)  # above 256 ids are not bytes
        tiny = {"V": V, "T": 64, "C": 64, "L": 2, "H": 2, "gated": 128, "kv_heads": min(self.kv_heads, 1)}
        return dataclasses.replace(self, **tiny, ours=ours) if quick else self  # type: ignore[arg-type]


V0 = Size("v0", V=256, T=256, C=256, L=4, H=4, gated=688)
V1 = Size("v1", 16004, 1024, 512, 8, 8, gated=1536, ours={"d_ff": 1536, "norm": "rmsnorm", "mlp": "swiglu"})
GPT2_SMALL = Size("124m", 50304, 1024, 768, 12, 12, gated=2048, ours={"positions": "learned"})
LLAMA = {"norm": "rmsnorm", "mlp": "swiglu"}
SMOLLM2 = Size(
    "SmolLM2-135M", 49152, 2048, 576, 30, 9, gated=1536, ours={"d_ff": 1536, **LLAMA}, kv_heads=3, theta=100_000.0
)
"""The shape of a public model."""
SMOLLM2_SHALLOW = dataclasses.replace(SMOLLM2, name="SmolLM2, 2 layers", L=2, T=256)
"""For CPUs."""
SIZES = {size.name: size for size in (V0, V1, GPT2_SMALL)}


def niels_gpt(size: Size = V0, dropout: float = 0.0) -> Any:
    """Build our GPT."""
    from niels_gpt import GPT
    from niels_gpt.system import host_limits

    host_limits.prepare_torch()
    return GPT(our_config(size, dropout))


def our_config(size: Size, dropout: float = 0.0) -> Any:
    """Return our ModelConfig of a size."""
    from niels_gpt import ModelConfig

    heads = {"H": size.H, "n_kv_heads": size.kv_heads, "rope_theta": size.theta}
    return ModelConfig(V=size.V, T=size.T, C=size.C, L=size.L, dropout=dropout, **heads, **size.ours)  # type: ignore[arg-type]


def nano(size: Size = V0, dropout: float = 0.0) -> Any:
    """Build the plain GPT of bench/nano.py."""
    from bench.nano import Nano

    return Nano(V=size.V, T=size.T, C=size.C, L=size.L, H=size.H, dropout=dropout)


def gpt2(size: Size = V0, dropout: float = 0.0) -> Any:
    """Build GPT-2 of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": size.V, "n_positions": size.T, "n_embd": size.C, "n_layer": size.L, "n_head": size.H}
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=None, eos_token_id=None))


def llama(size: Size = V0) -> Any:
    """Build Llama of transformers, whose MLP has three matrices instead of two."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": size.V, "max_position_embeddings": size.T, "hidden_size": size.C}
    depth = {"num_hidden_layers": size.L, "num_attention_heads": size.H, "tie_word_embeddings": True}
    depth |= {"num_key_value_heads": size.kv_heads or size.H, "rope_theta": size.theta, "rms_norm_eps": 1e-5}
    config = LlamaConfig(**sizes, **depth, intermediate_size=size.gated, bos_token_id=None, eos_token_id=None)
    return LlamaForCausalLM(config)


def litgpt(size: Size = V0) -> Any:
    """Build litgpt's GPT, tied as its trainer ties it: a Llama if the heads are grouped, else a NeoX without biases."""
    from litgpt import GPT, Config

    sizes = {"padded_vocab_size": size.V, "block_size": size.T, "n_embd": size.C, "n_layer": size.L, "n_head": size.H}
    options: dict[str, Any] = {"rotary_percentage": 1.0, "parallel_residual": False, "bias": False}
    if size.kv_heads:
        options |= {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": size.gated}
        options |= {"n_query_groups": size.kv_heads, "rope_base": int(size.theta), "norm_eps": 1e-5}
    model = GPT(Config(**sizes, vocab_size=size.V, **options))
    model.transformer.wte.weight = model.lm_head.weight
    return model


PEERS: dict[str, Callable[..., Any]] = {"nano": nano, "GPT-2": gpt2, "Llama": llama, "litgpt": litgpt}
PACKAGES = {"GPT-2": "transformers", "Llama": "transformers", "litgpt": "litgpt"}
"""Peer -> the package it needs."""
