"""The models at the size of v0, as their packages build them: random weights, fp32, tied embeddings."""

from __future__ import annotations

from typing import Any


def niels_gpt(dropout: float = 0.0) -> Any:
    """Our v0."""
    from niels_gpt import GPT, ModelConfig

    return GPT(ModelConfig(dropout=dropout))


def gpt2(dropout: float = 0.0) -> Any:
    """transformers' GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 256, "n_positions": 256, "n_embd": 256, "n_layer": 4, "n_head": 4}
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=None, eos_token_id=None))


def llama() -> Any:
    """transformers' Llama: three matrices of width 688 in the MLP where ours has two of 1024."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 256, "max_position_embeddings": 256, "hidden_size": 256, "intermediate_size": 688}
    depth = {"num_hidden_layers": 4, "num_attention_heads": 4, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**sizes, **depth, bos_token_id=None, eos_token_id=None))


def litgpt() -> Any:
    """litgpt's GPT in the shape of NeoX, without biases, tied as its trainer's tie_embeddings does."""
    from litgpt import GPT, Config

    sizes = {"padded_vocab_size": 256, "block_size": 256, "n_embd": 256, "n_layer": 4, "n_head": 4}
    model = GPT(Config(**sizes, vocab_size=256, rotary_percentage=1.0, parallel_residual=False, bias=False))
    model.transformer.wte.weight = model.lm_head.weight
    return model
