"""Convert a Llama in the Hugging Face format, as Levanter exports it, into a checkpoint of this project.

`python -m niels_gpt.levanter.hf_checkpoint FOLDER OUT.pt --tokenizer spm.model`; all commands that take a checkpoint
(`memorize`, `generate`) then work on it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from niels_gpt.config import ModelConfig
from niels_gpt.model.gpt import GPT, Norm
from niels_gpt.runs.checkpoint import save_checkpoint


def load_llama(folder: Path) -> GPT:
    """The model in a folder with config.json and *.safetensors.

    Raises ValueError for a model that this project's GPT cannot compute, OSError for a missing file.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _check(config, folder)
    options = ModelConfig(
        V=config["vocab_size"],
        T=config["max_position_embeddings"],
        C=config["hidden_size"],
        L=config["num_hidden_layers"],
        H=config["num_attention_heads"],
        d_ff=config["intermediate_size"],
        n_kv_heads=config.get("num_key_value_heads") or 0,
        tie_embeddings=config.get("tie_word_embeddings", False),
        rope_theta=float(_rope(config).get("rope_theta", 10000.0)),
        dropout=0.0,
        norm="rmsnorm",
        mlp="swiglu",
    )
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    model = GPT(options)
    state = {name: tensor.float() for name, tensor in _state(weights, options, folder).items()}
    model.load_state_dict(state)
    return model.eval()


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """The options of RoPE: newer files have rope_parameters, older ones rope_theta and rope_scaling."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config["rope_theta"], **scaling} if "rope_theta" in config else scaling


def _check(config: dict[str, Any], folder: Path) -> None:
    """Raise ValueError that names the first option of the model that this project's GPT does not have."""
    heads = config.get("num_attention_heads", 1)
    width = config.get("hidden_size", 0) // heads
    expected = {
        "model_type": ("llama", config.get("model_type")),
        "hidden_act": ("silu", config.get("hidden_act", "silu")),
        "rms_norm_eps": (Norm.eps, config.get("rms_norm_eps", 1e-6)),
        "rope_type": ("default", _rope(config).get("rope_type", _rope(config).get("type", "default"))),
        "attention_bias": (False, config.get("attention_bias", False)),
        "mlp_bias": (False, config.get("mlp_bias", False)),
        "head_dim": (width, config.get("head_dim") or width),
    }
    for name, (ours, theirs) in expected.items():
        if theirs != ours:
            raise ValueError(f"{folder}/config.json has {name}={theirs}, but only {name}={ours} can be converted")


def _state(weights: dict[str, torch.Tensor], config: ModelConfig, folder: Path) -> dict[str, torch.Tensor]:
    """The weights under the names and in the order of this project. Raises ValueError for a missing one."""

    def take(name: str) -> torch.Tensor:
        if name not in weights:
            raise ValueError(f"{folder} has no weight {name} in its *.safetensors files: the export is incomplete")
        return weights[name]

    state = {"tok_emb.weight": take("model.embed_tokens.weight"), "norm.weight": take("model.norm.weight")}
    state["lm_head.weight"] = state["tok_emb.weight"] if config.tie_embeddings else take("lm_head.weight")
    for layer in range(config.L):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        q, k, v = (take(f"{theirs}self_attn.{name}_proj.weight") for name in "qkv")
        state[f"{ours}attn.qkv.weight"] = torch.cat((_interleave(q, config.D), _interleave(k, config.D), v))
        state[f"{ours}attn.out.weight"] = take(f"{theirs}self_attn.o_proj.weight")
        for name in ("gate", "up", "down"):
            state[f"{ours}mlp.{name}.weight"] = take(f"{theirs}mlp.{name}_proj.weight")
        state[f"{ours}norm_attn.weight"] = take(f"{theirs}input_layernorm.weight")
        state[f"{ours}norm_mlp.weight"] = take(f"{theirs}post_attention_layernorm.weight")
    return state


def _interleave(rows: torch.Tensor, D: int) -> torch.Tensor:
    """Reorder the rows of queries or keys: RoPE pairs dimension i with i + D/2 there, 2i with 2i + 1 here."""
    halves = rows.view(-1, 2, D // 2, rows.shape[1])
    return halves.transpose(1, 2).reshape(rows.shape)


def convert(folder: Path, out: Path, tokenizer: Path | None = None) -> GPT:
    """Write the model of a folder as a checkpoint; `tokenizer` is copied beside it. Returns the model."""
    model = load_llama(folder)
    step = re.search(r"step-(\d+)$", folder.name)
    save_checkpoint(out, model, None, int(step[1]) if step else 0, model.config)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, out.with_name("tokenizer.model"))
    return model


def main(arguments: list[str]) -> None:
    """Convert as the command line asks; print one line."""
    parser = argparse.ArgumentParser(prog="python -m niels_gpt.levanter.hf_checkpoint", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with config.json and model.safetensors")
    parser.add_argument("out", type=Path, help="checkpoint to write (.pt)")
    parser.add_argument("--tokenizer", type=Path, help="spm.model of the token cache; none for bytes")
    options = parser.parse_args(arguments)
    try:
        model = convert(options.folder, options.out, options.tokenizer)
    except (ValueError, OSError) as err:
        sys.exit(f"error: {err}")
    print(f"{options.out}: {sum(p.numel() for p in model.parameters()):,} weights, V={model.config.V}")


if __name__ == "__main__":
    main(sys.argv[1:])
