"""The one-token pass gives the logits of GPT.forward, which other tests compare with a naive reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from niels_gpt import GPT, ModelConfig
from niels_gpt.inference.one_token import OneToken
from niels_gpt.model.kv_cache import KVCache

CONFIG = ModelConfig(V=50, T=12, C=32, L=3, H=4)
V1 = {"norm": "rmsnorm", "mlp": "swiglu"}
OPTIONS: dict[str, dict[str, object]] = {
    "v0": {},
    "v1": V1,
    "learned": {"norm": "rmsnorm", "positions": "learned", "n_kv_heads": 1},
    "llama": {**V1, "n_kv_heads": 2, "tie_embeddings": False, "rope_theta": 50.0},
}


def make_model(options: dict[str, object] | None = None) -> GPT:
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(CONFIG, **(options or {}))).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))  # norms away from 1, weights larger than at the start
    return model


def cache_for(model: GPT, batch: int) -> KVCache:
    return KVCache(model.config, batch, device=model.device, dtype=torch.float64)


@pytest.mark.parametrize(("kind", "batch"), [("v0", 3), ("v1", 3), ("llama", 1), ("learned", 3), ("learned", 2)])
def test_token_by_token_equals_the_full_window(kind: str, batch: int) -> None:
    model = make_model(OPTIONS[kind])
    x = torch.randint(0, CONFIG.V, (batch, CONFIG.T))
    cache, one = cache_for(model, batch), OneToken(model)
    with torch.no_grad():
        expected = model(x)
        for t in range(CONFIG.T):
            torch.testing.assert_close(one(x[:, t], cache), expected[:, t], rtol=1e-9, atol=1e-9)
    assert cache.lengths == [CONFIG.T] * batch


@pytest.mark.parametrize("name", ["tok_emb.weight", "blocks.2.mlp.gate.weight", "blocks.1.attn.qkv.weight"])
def test_weights_that_change_in_place_are_seen(name: str) -> None:
    model = make_model(V1)
    x = torch.randint(0, CONFIG.V, (3, 1))
    one = OneToken(model)
    with torch.no_grad():
        before = one(x[:, 0], cache_for(model, 3))
        model.get_parameter(name).mul_(1.5)
        after = one(x[:, 0], cache_for(model, 3))
        assert not torch.allclose(before, after)
        torch.testing.assert_close(after, model(x)[:, 0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_rows_of_different_lengths_do_not_see_each_other(options: dict[str, object]) -> None:
    model = make_model(options)
    x = torch.randint(0, CONFIG.V, (3, CONFIG.T))
    lengths = [2, 7, 4]
    cache, one = cache_for(model, 3), OneToken(model)
    with torch.no_grad():
        model(x[:, :7], cache=cache)
        cache.lengths = list(lengths)
        for step in range(4):
            ids = torch.stack([x[row, n + step] for row, n in enumerate(lengths)])
            logits = one(ids, cache)
            for row, n in enumerate(lengths):
                alone = model(x[row : row + 1, : n + step + 1])[0, -1]
                torch.testing.assert_close(logits[row], alone, rtol=1e-9, atol=1e-9)


def test_gelu_in_float32() -> None:
    """GELU's factors 1 / sqrt(2) are part of the matmuls."""
    model = make_model().float()
    x = torch.randint(0, CONFIG.V, (2, CONFIG.T))
    cache, one = KVCache(model.config, 2, device=model.device, dtype=torch.float32), OneToken(model)
    with torch.no_grad():
        expected = model(x)
        for t in range(CONFIG.T):
            torch.testing.assert_close(one(x[:, t], cache), expected[:, t], rtol=1e-4, atol=1e-4)


def test_weights_of_inference_mode() -> None:
    """Such tensors have no version counter."""
    with torch.inference_mode():
        model = make_model()
        ids = torch.tensor([1, 2])
        logits = OneToken(model)(ids, cache_for(model, 2))
        torch.testing.assert_close(logits, model(ids[:, None])[:, 0], rtol=1e-9, atol=1e-9)


def test_a_token_past_T_raises() -> None:
    model = make_model()
    cache, one = cache_for(model, 1), OneToken(model)
    with torch.no_grad():
        model(torch.zeros(1, CONFIG.T, dtype=torch.long), cache=cache)
        with pytest.raises(ValueError, match="T=12"):
            one(torch.tensor([0]), cache)
