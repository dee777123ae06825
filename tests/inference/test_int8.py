"""Matrices of 8 bits: their rounding, and decoding with them."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt import GPT, ModelConfig
from niels_gpt.inference.decoding import Decoder
from niels_gpt.inference.engine.engine import Engine
from niels_gpt.inference.int8 import MOST_ROWS, Int8GPT, Int8OneToken, one_token, pack
from niels_gpt.inference.one_token import OneToken
from niels_gpt.inference.sampling import Sampling
from niels_gpt.model.kv_cache import KVCache

LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "n_kv_heads": 1, "tie_embeddings": False, "rope_theta": 100.0}
KINDS = [{}, {"norm": "rmsnorm", "mlp": "swiglu"}, {"positions": "learned"}, LLAMA]


def build(**options: object) -> GPT:
    torch.manual_seed(0)
    model = GPT(ModelConfig(**{"V": 60, "T": 24, "C": 64, "L": 2, "H": 2, "dropout": 0.0, **options})).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6) if p.dim() > 1 else p.add_(0.2 * torch.randn_like(p))
    return model


@given(st.integers(0, 1000), st.sampled_from([1e-6, 1.0, 1e4]))
def test_rounding_is_to_the_nearest_of_255_steps_per_row(seed, size):
    weight = size * torch.randn(5, 33, generator=torch.Generator().manual_seed(seed))
    ints, scale = pack(weight)
    step = scale.float()[:, None]
    assert int(ints.abs().max()) <= 127
    assert bool(((ints * step - weight).abs() <= 0.5001 * step).all())
    assert bool((step.squeeze(1) <= weight.abs().amax(1) / 127 * 1.02).all())  # no coarser than necessary


def test_a_row_of_zeros_stays_zero():
    ints, scale = pack(torch.zeros(2, 8))
    assert not ints.any() and bool(torch.isfinite(scale).all())


@pytest.mark.parametrize("options", KINDS)
def test_one_token_at_a_time_gives_the_rounded_models_logits(options):
    model = Int8GPT.of(build(**options))
    ids = torch.randint(60, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        cache = KVCache(model.config, 3, device=model.device, dtype=torch.float32)
        model(ids[:, :5], cache=cache)
        step = one_token(model)
        assert isinstance(step, Int8OneToken)
        for n in range(5, 12):
            logits = step(ids[:, n], cache)
            exact = model(ids[:, : n + 1])[:, -1]
            assert float((logits - exact).abs().max() / exact.std()) < 0.06  # activations have 8 bits of precision


@pytest.mark.parametrize("options", [{}, LLAMA])
def test_a_rounded_model_is_close_to_the_model(options):
    model = build(**options)
    rounded = Int8GPT.of(model)
    ids = torch.randint(60, (4, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        exact, got = model(ids), rounded(ids)
    assert 0.0 < float((got - exact).square().mean().sqrt() / exact.std()) < 0.05
    assert not torch.equal(model.lm_head.weight, rounded.lm_head.weight)  # the model itself is unchanged
    tied = model.config.tie_embeddings
    assert (rounded.tok_emb.weight is rounded.lm_head.weight) == tied
    assert torch.equal(model.tok_emb.weight, rounded.tok_emb.weight) != tied  # looked up, not multiplied: not rounded
    assert rounded.training == model.training


@pytest.mark.parametrize("rows", [MOST_ROWS, MOST_ROWS + 1])
def test_many_rows_are_computed_in_float32(rows):
    model = Int8GPT.of(build())
    ids = torch.randint(60, (rows, 6), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        cache = KVCache(model.config, rows, device=model.device, dtype=torch.float32)
        model(ids[:, :5], cache=cache)
        error = (one_token(model)(ids[:, 5], cache) - model(ids)[:, -1]).abs().max()
    assert (error < 1e-4) == (rows > MOST_ROWS == 8)


def test_decoder_and_engine_take_it_and_a_copy_works():
    model = Int8GPT.of(build())
    greedy = Sampling(0.0, None)
    decoder = Decoder(model, [[1, 2, 3]], max_new_tokens=15, sampling=greedy)
    tokens = [token for _, some in decoder.tokens() for token in some]
    assert isinstance(decoder._one_token, Int8OneToken)
    engine = Engine(copy.deepcopy(model))
    request = engine.submit([1, 2, 3], max_new_tokens=15, sampling=greedy)
    while engine.busy:
        engine.step()
    assert request.tokens == tokens
    assert isinstance(one_token(build()), OneToken)


def test_other_kinds_of_weights_raise():
    with pytest.raises(ValueError, match=r"float32.*CPU.*bfloat16 on cpu"):
        Int8GPT.of(build().bfloat16())
