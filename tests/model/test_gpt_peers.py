"""The models of `transformers` give our logits with our weights: v1 is a Llama, v0 is a GPT-NeoX.

Their rotary embedding pairs dimension i with i + D/2, ours 2i with 2i + 1, so the rows of queries and keys are
reordered; a score is a sum over dimensions and does not change. The peers compute attention without a fused kernel
("eager"), and their norms and rotary tables in float32 even in float64 models; the tolerance allows for that.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from niels_gpt import GPT, loss_fn

SIZES = {"V": 97, "T": 32, "C": 64, "L": 3, "H": 4, "d_ff": 96, "dropout": 0.1}


def make(options: dict[str, object], dtype: torch.dtype) -> GPT:
    """A model with large random weights and norms away from 1: a difference anywhere shows in the logits."""
    model = GPT({**SIZES, **options}).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p.dim() == 1) + 0.2 * torch.randn(p.shape, generator=generator))
    return model.to(dtype)


def half_split(rows: torch.Tensor) -> torch.Tensor:
    """Rows (heads, D, C) of queries or keys with the even dimensions of each head first, then the odd ones."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)


Order = Callable[[torch.Tensor], torch.Tensor]


def qkv_of(model: GPT, layer: int, order: Order) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The matrices of queries, keys and values, each (heads, D, C), the first two in the order of the peer."""
    kv = model.config.kv_heads
    q, k, v = model.layers()[layer].attn.qkv.weight.view(-1, 16, 64).split((4, kv, kv))
    return order(q), order(k), v


def fill(peer: PreTrainedModel, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """Set the weights of the peer to these, all of them, and its biases to zero."""
    peer = peer.to(dtype).eval()
    left = dict(weights)
    with torch.no_grad():
        for name, p in peer.named_parameters():
            p.copy_(torch.zeros_like(p) if name.endswith(".bias") else left.pop(name))
    assert not left
    return peer


def llama(model: GPT, dtype: torch.dtype, order: Order = half_split) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=32,
        num_key_value_heads=model.config.kv_heads,
        rope_parameters={"rope_type": "default", "rope_theta": model.config.rope_theta},
        rms_norm_eps=1e-5,
        tie_word_embeddings=model.config.tie_embeddings,
        attn_implementation="eager",
    )
    weights = {"model.embed_tokens.weight": model.tok_emb.weight, "model.norm.weight": model.norm.weight}
    if not model.config.tie_embeddings:
        weights["lm_head.weight"] = model.lm_head.weight
    for layer, block in enumerate(model.layers()):
        at = f"model.layers.{layer}."
        for name, rows in zip(("q_proj", "k_proj", "v_proj"), qkv_of(model, layer, order), strict=True):
            weights[f"{at}self_attn.{name}.weight"] = rows.reshape(-1, 64)
        weights[f"{at}self_attn.o_proj.weight"] = block.attn.out.weight
        weights[f"{at}mlp.gate_proj.weight"] = block.mlp.gate.weight
        weights[f"{at}mlp.up_proj.weight"] = block.mlp.up.weight
        weights[f"{at}mlp.down_proj.weight"] = block.mlp.down.weight
        weights[f"{at}input_layernorm.weight"] = block.norm_attn.weight
        weights[f"{at}post_attention_layernorm.weight"] = block.norm_mlp.weight
    return fill(LlamaForCausalLM(config), weights, dtype)


def neox(model: GPT, dtype: torch.dtype, order: Order = half_split) -> PreTrainedModel:
    config = GPTNeoXConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=32,
        layer_norm_eps=1e-5,
        hidden_act="gelu",
        rotary_pct=1.0,
        use_parallel_residual=False,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    weights = {"gpt_neox.embed_in.weight": model.tok_emb.weight, "gpt_neox.final_layer_norm.weight": model.norm.weight}
    for layer, block in enumerate(model.layers()):
        at = f"gpt_neox.layers.{layer}."
        together = torch.stack(qkv_of(model, layer, order), dim=1)  # (H, 3, D, C): head by head
        weights[f"{at}attention.query_key_value.weight"] = together.reshape(192, 64)
        weights[f"{at}attention.dense.weight"] = block.attn.out.weight
        weights[f"{at}mlp.dense_h_to_4h.weight"] = block.mlp.up.weight
        weights[f"{at}mlp.dense_4h_to_h.weight"] = block.mlp.down.weight
        weights[f"{at}input_layernorm.weight"] = block.norm_attn.weight
        weights[f"{at}post_attention_layernorm.weight"] = block.norm_mlp.weight
    return fill(GPTNeoXForCausalLM(config), weights, dtype)


V1: dict[str, object] = {"norm": "rmsnorm", "mlp": "swiglu"}
PEERS = {
    "v0 is a GPT-NeoX": ({}, neox),
    "v1 is a Llama": (V1, llama),
    "grouped queries, an untied head and another theta": (
        {**V1, "n_kv_heads": 2, "tie_embeddings": False, "rope_theta": 500.0},
        llama,
    ),
}
each_peer = pytest.mark.parametrize(("options", "peer"), PEERS.values(), ids=PEERS.keys())


def some_ids(seed: int = 1) -> torch.Tensor:
    return torch.randint(97, (3, 32), generator=torch.Generator().manual_seed(seed))


@each_peer
@torch.no_grad()
def test_the_logits_are_those_of_the_peer(options: dict[str, object], peer: Callable[..., PreTrainedModel]) -> None:
    for dtype, tolerance in ((torch.float32, 2e-4), (torch.float64, 2e-5)):
        model, ids = make(options, dtype), some_ids()
        expected = peer(model, dtype)(ids).logits
        assert expected.dtype == dtype and expected.abs().max() > 3  # small logits would hide errors
        torch.testing.assert_close(model(ids), expected, atol=tolerance, rtol=1e-5)
    unordered = peer(model, dtype, order=lambda rows: rows)(ids).logits
    assert (unordered - expected).abs().max() > 0.1  # positions matter with these weights


@torch.no_grad()
def test_each_option_changes_the_logits() -> None:
    """Otherwise the comparison above would not test it."""
    options, _ = PEERS["grouped queries, an untied head and another theta"]
    model, ids = make(options, torch.float64), some_ids()
    logits = model(ids)
    other = GPT({**SIZES, **options, "rope_theta": 10000.0}).double().eval()
    other.load_state_dict(model.state_dict())
    assert (other(ids) - logits).abs().max() > 0.1
    tied = GPT({**SIZES, **options, "tie_embeddings": True}).double().eval()
    tied.load_state_dict(model.state_dict())
    assert (tied(ids) - logits).abs().max() > 0.1


@each_peer
def test_the_gradients_are_those_of_the_peer(options: dict[str, object], peer: Callable[..., PreTrainedModel]) -> None:
    """The gradient of the embedding has passed every layer; the norms have the same names in both peers."""
    model, ids, targets = make(options, torch.float64), some_ids(), some_ids(2)
    other = peer(model, torch.float64)
    loss_fn(model(ids), targets).backward()
    torch.nn.functional.cross_entropy(other(ids).logits.flatten(0, 1), targets.flatten()).backward()
    pairs = [(model.tok_emb.weight, other.get_input_embeddings().weight)]
    pairs.append((model.lm_head.weight, other.get_output_embeddings().weight))
    for block, layer in zip(model.layers(), other.base_model.layers, strict=True):
        pairs.append((block.norm_attn.weight, layer.input_layernorm.weight))
        pairs.append((block.norm_mlp.weight, layer.post_attention_layernorm.weight))
    for ours, theirs in pairs:
        assert theirs.grad.abs().max() > 1e-3
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4)
