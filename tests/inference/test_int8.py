"""Matrices of 8 bits: what rounding does, and decoding with them."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt import GPT, ModelConfig
from niels_gpt.inference.decoding import Decoder
from niels_gpt.inference.engine.engine import Engine
from niels_gpt.inference.int8 import (
    MOST_ROWS,
    Int8GPT,
    Int8OneToken,
    one_token,
    pack,
)
from niels_gpt.inference.one_token import OneToken
from niels_gpt.inference.sampling import Sampling
from niels_gpt.model.kv_cache import KVCache

KINDS = [{}, {"norm": "rmsnorm", "mlp": "swiglu"}, {"positions": "learned"}]


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
    whole, scale = pack(weight)
    step = scale.float()[:, None]
    assert int(whole.abs().max()) <= 127
    assert bool(((whole * step - weight).abs() <= 0.5001 * step).all())
    assert bool((step.squeeze(1) <= weight.abs().amax(1) / 127 * 1.02).all())  # no coarser than it must be


def test_a_row_of_zeros_stays_zero():
    whole, scale = pack(torch.zeros(2, 8))
    assert not whole.any() and bool(torch.isfinite(scale).all())


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


@pytest.mark.parametrize("options", KINDS)
def test_a_rounded_model_is_close_to_the_model(options):
    model = build(**options)
    rounded = Int8GPT.of(model)
    ids = torch.randint(60, (4, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        exact, got = model(ids), rounded(ids)
    assert 0.0 < float((got - exact).square().mean().sqrt() / exact.std()) < 0.05
    assert rounded.tok_emb.weight is rounded.lm_head.weight
    assert not torch.equal(model.tok_emb.weight, rounded.tok_emb.weight)  # the model itself is as it was


def test_many_rows_take_float32_again_and_are_the_model():
    model = Int8GPT.of(build())
    rows = MOST_ROWS + 1
    ids = torch.randint(60, (rows, 6), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        cache = KVCache(model.config, rows, device=model.device, dtype=torch.float32)
        model(ids[:, :5], cache=cache)
        torch.testing.assert_close(one_token(model)(ids[:, 5], cache), model(ids)[:, -1], atol=1e-4, rtol=1e-4)


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


def test_other_kinds_of_weights_are_refused():
    with pytest.raises(ValueError, match="float32 models on a CPU, not bfloat16 on cpu"):
        Int8GPT.of(build().bfloat16())
