"""Random models of each family, saved by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.foreign_tokenizers import byte_level, write_folder

SMALL = {
    "vocab_size": 300,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
NEOX = {k: v for k, v in {**SMALL, **HEADS}.items() if k != "num_key_value_heads"} | {"use_parallel_residual": False}
NEOX |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}
GPT2 = {"vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "activation_function": "gelu"}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2": ("Llama", {**SMALL, "rope_theta": 100000.0, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "tinyllama": ("Llama", {**SMALL, **HEADS, "tie_word_embeddings": False}),
    "llama3": ("Llama", {**SMALL, **HEADS, "rope_parameters": LLAMA3, "max_position_embeddings": 512}),
    "mistral": ("Mistral", {**SMALL, **HEADS, "sliding_window": None}),
    "qwen2": ("Qwen2", {**SMALL, **HEADS, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**SMALL, **HEADS, "head_dim": 24, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {**SMALL, **HEADS, "no_rope_layers": [1, 1], "pad_token_id": None}),
    "gpt_neox": ("GPTNeoX", NEOX),
    "gpt2": ("GPT2", GPT2),
    "gpt2_biases": ("GPT2", GPT2 | {"activation_function": "gelu_new"}),
    "gpt_neox_biases": ("GPTNeoX", NEOX),
}
"""Name -> class in transformers and options: the shapes of public models at a reduced size."""


def random_model(name: str, **changes: Any) -> Any:
    """A model of transformers with weights far from their initial values; biases that we do not have are zero."""
    kind, options = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**options, **changes})
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, head)(config).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if key.endswith("bias"):
                p.normal_() if kind == "Qwen2" or name.endswith("_biases") else p.zero_()
            else:
                p.add_(0.2 * torch.randn_like(p))
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Save a model in the Hugging Face format."""
    model.save_pretrained(folder, **options)
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    """Change options in the config.json of a folder."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def add_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level BPE with ChatML tokens, `vocab_size` ids in all."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    config = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer = byte_level(tokens, vocab_size=vocab_size - len(tokens))
    assert tokenizer.get_vocab_size() == vocab_size
    write_folder(folder, tokenizer, config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small SmolLM2 with a tokenizer of fewer ids than its embedding has rows."""
    made = save(random_model("smollm2", vocab_size=400), tmp_path / "SmolLM")
    add_tokenizer(made, 340)
    return made


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with a small Llama."""
    return save(random_model("tinyllama"), tmp_path / "llama")
