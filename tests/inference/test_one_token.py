"""The one-token pass gives the logits of GPT.forward, which the other tests hold to a naive reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from niels_gpt import GPT, ModelConfig
from niels_gpt.inference.decoding import Decoder
from niels_gpt.inference.one_token import OneToken
from niels_gpt.inference.sampling import Sampling
from niels_gpt.model.kv_cache import KVCache

CONFIG = ModelConfig(V=50, T=12, C=32, L=3, H=4)
OPTIONS = [{}, {"norm": "rmsnorm", "mlp": "swiglu"}, {"norm": "rmsnorm"}, {"mlp": "swiglu"}]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=["v0", "v1", "rmsnorm", "swiglu"])


def make_model(options: dict[str, str] | None = None) -> GPT:
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(CONFIG, **(options or {}))).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))  # norms off 1, weights off their small start
    return model


def cache_for(model: GPT, batch: int) -> KVCache:
    return KVCache(model.config, batch, device=model.device, dtype=torch.float64)


@every_option
@pytest.mark.parametrize("batch", [1, 3])
def test_token_by_token_equals_the_whole_window(batch: int, options: dict[str, str]) -> None:
    model = make_model(options)
    x = torch.randint(0, CONFIG.V, (batch, CONFIG.T))
    cache, one = cache_for(model, batch), OneToken(model)
    with torch.no_grad():
        whole = model(x)
        for t in range(CONFIG.T):
            torch.testing.assert_close(one(x[:, t], cache), whole[:, t], rtol=1e-9, atol=1e-9)
    assert cache.lengths == [CONFIG.T] * batch


@every_option
@pytest.mark.parametrize("mkl", [True, False])
def test_with_matrices_as_they_lie_and_turned(mkl: bool, options: dict[str, str], monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    model = make_model(options)
    x = torch.randint(0, CONFIG.V, (3, CONFIG.T))
    cache, one = cache_for(model, 3), OneToken(model)
    with torch.no_grad():
        whole = model(x)
        for t in range(CONFIG.T):
            torch.testing.assert_close(one(x[:, t], cache), whole[:, t], rtol=1e-9, atol=1e-9)
        assert (one._turned is None) == mkl
        single = OneToken(model)
        single(x[:1, 0], cache_for(model, 1))
        assert single._turned is None


@pytest.mark.parametrize("mkl", [True, False])
@pytest.mark.parametrize("name", ["tok_emb.weight", "blocks.1.attn.qkv.weight", "blocks.2.mlp.gate.weight"])
def test_weights_that_change_in_place_are_seen(mkl: bool, name: str, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    model = make_model(OPTIONS[1])
    x = torch.randint(0, CONFIG.V, (3, 1))
    one = OneToken(model)
    with torch.no_grad():
        before = one(x[:, 0], cache_for(model, 3))
        model.get_parameter(name).mul_(1.5)
        after = one(x[:, 0], cache_for(model, 3))
        assert not torch.allclose(before, after)
        torch.testing.assert_close(after, model(x)[:, 0], rtol=1e-9, atol=1e-9)


@every_option
def test_rows_of_different_lengths_do_not_see_each_other(options: dict[str, str]) -> None:
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


@every_option
def test_single_precision_is_close(options: dict[str, str]) -> None:
    model = make_model(options).float()
    x = torch.randint(0, CONFIG.V, (2, CONFIG.T))
    cache, one = KVCache(model.config, 2, device=model.device, dtype=torch.float32), OneToken(model)
    with torch.no_grad():
        whole = model(x)
        for t in range(CONFIG.T):
            torch.testing.assert_close(one(x[:, t], cache), whole[:, t], rtol=1e-4, atol=1e-4)


@every_option
def test_cached_decoding_gives_the_ids_of_uncached(options: dict[str, str]) -> None:
    """Prompts of different lengths, past T: prefill, single tokens and recomputed windows all take part."""
    model = make_model(options)
    prompts = [[3], [1, 4, 1, 5, 9], list(range(14))]
    sampling = Sampling(temperature=1.0)
    decoded = []
    for use_cache in (True, False):
        numbers = torch.Generator().manual_seed(1)
        decoder = Decoder(model, prompts, max_new_tokens=20, sampling=sampling, generator=numbers, use_cache=use_cache)
        for _ in range(20):
            decoder.step()
        decoded.append(decoder.ids)
    assert decoded[0] == decoded[1]
    assert all(len(set(ids)) > 8 for ids in decoded[0])  # varied, or the comparison says little


def test_past_T_is_refused() -> None:
    model = make_model()
    cache, one = cache_for(model, 1), OneToken(model)
    with torch.no_grad():
        model(torch.zeros(1, CONFIG.T, dtype=torch.long), cache=cache)
        with pytest.raises(ValueError, match="T=12"):
            one(torch.tensor([0]), cache)
