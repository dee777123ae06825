"""Our weights in the models of `transformers` give our logits: v1 is a Llama, v0 a GPT-NeoX.

There the rotary embedding pairs dimension i with i + D/2, here 2i with 2i + 1. The rows of queries and keys are put in
their order; a score is a sum over dimensions and does not change. The peers compute attention in the open ("eager")
and their norms and rotary tables in float32 even in float64 models, which is what the tolerance allows for.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from niels_gpt import GPT, loss_fn

SIZES = {"V": 97, "T": 32, "C": 64, "L": 3, "H": 4, "d_ff": 96, "dropout": 0.1}
DTYPES = [torch.float32, torch.float64]


def make(norm: str, mlp: str, dtype: torch.dtype) -> GPT:
    """Large random weights, norms away from 1: a difference anywhere shows in the logits."""
    model = GPT({**SIZES, "norm": norm, "mlp": mlp}).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p.dim() == 1) + 0.2 * torch.randn(p.shape, generator=generator))
    return model.to(dtype)


def half_split(rows: torch.Tensor) -> torch.Tensor:
    """Rows (H, D, C) of queries or keys with the even dimensions of each head first, then the odd ones."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)


Order = Callable[[torch.Tensor], torch.Tensor]


def qkv_of(model: GPT, layer: int, order: Order) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The matrices of queries, keys and values, each (H, D, C), the first two in the order of the peer."""
    q, k, v = model.blocks[layer].attn.qkv.weight.view(3, 4, 16, 64)
    return order(q), order(k), v


def fill(peer: PreTrainedModel, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """The peer with these weights and no others: its biases are zeroed, its head is tied."""
    peer = peer.to(dtype).eval()
    left = dict(weights)
    with torch.no_grad():
        for name, p in peer.named_parameters():
            p.copy_(torch.zeros_like(p) if name.endswith(".bias") else left.pop(name))
    assert not left
    assert peer.get_output_embeddings().weight is peer.get_input_embeddings().weight
    return peer


def llama(model: GPT, dtype: torch.dtype, order: Order = half_split) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    weights = {"model.embed_tokens.weight": model.tok_emb.weight, "model.norm.weight": model.norm.weight}
    for layer, block in enumerate(model.blocks):
        at = f"model.layers.{layer}."
        for name, rows in zip(("q_proj", "k_proj", "v_proj"), qkv_of(model, layer, order), strict=True):
            weights[f"{at}self_attn.{name}.weight"] = rows.reshape(64, 64)
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
    for layer, block in enumerate(model.blocks):
        at = f"gpt_neox.layers.{layer}."
        together = torch.stack(qkv_of(model, layer, order), dim=1)  # (H, 3, D, C): head by head
        weights[f"{at}attention.query_key_value.weight"] = together.reshape(192, 64)
        weights[f"{at}attention.dense.weight"] = block.attn.out.weight
        weights[f"{at}mlp.dense_h_to_4h.weight"] = block.mlp.up.weight
        weights[f"{at}mlp.dense_4h_to_h.weight"] = block.mlp.down.weight
        weights[f"{at}input_layernorm.weight"] = block.norm_attn.weight
        weights[f"{at}post_attention_layernorm.weight"] = block.norm_mlp.weight
    return fill(GPTNeoXForCausalLM(config), weights, dtype)


PEERS = {"v0 is a GPT-NeoX": ("layernorm", "gelu", neox), "v1 is a Llama": ("rmsnorm", "swiglu", llama)}


def some_ids(seed: int = 1) -> torch.Tensor:
    return torch.randint(97, (3, 32), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("norm", "mlp", "peer"), PEERS.values(), ids=PEERS.keys())
@torch.no_grad()
def test_the_logits_are_those_of_the_peer(norm: str, mlp: str, peer: Callable[..., PreTrainedModel], dtype) -> None:
    model, ids = make(norm, mlp, dtype), some_ids()
    expected = peer(model, dtype)(ids).logits
    assert expected.dtype == dtype and expected.abs().max() > 3  # spread out, or the comparison says little
    torch.testing.assert_close(model(ids), expected, atol=1e-5, rtol=1e-5)
    unordered = peer(model, dtype, order=lambda rows: rows)(ids).logits
    assert (unordered - expected).abs().max() > 0.1  # positions do matter with these weights


@pytest.mark.parametrize(("norm", "mlp", "peer"), PEERS.values(), ids=PEERS.keys())
def test_the_gradients_are_those_of_the_peer(norm: str, mlp: str, peer: Callable[..., PreTrainedModel]) -> None:
    """The embedding's has passed through every layer; the norms' are named alike in both peers."""
    model, ids, targets = make(norm, mlp, torch.float64), some_ids(), some_ids(2)
    other = peer(model, torch.float64)
    loss_fn(model(ids), targets).backward()
    torch.nn.functional.cross_entropy(other(ids).logits.flatten(0, 1), targets.flatten()).backward()
    pairs = [(model.tok_emb.weight, other.get_input_embeddings().weight)]
    for block, layer in zip(model.blocks, other.base_model.layers, strict=True):
        pairs.append((block.norm_attn.weight, layer.input_layernorm.weight))
        pairs.append((block.norm_mlp.weight, layer.post_attention_layernorm.weight))
    for ours, theirs in pairs:
        assert theirs.grad.abs().max() > 1e-3
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4)
