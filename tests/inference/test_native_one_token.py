"""The one-token pass in C gives the logits of GPT.forward, for every option of the model."""

from __future__ import annotations

import gc

import pytest
import torch

from niels_gpt import GPT, ModelConfig
from niels_gpt.inference import native_one_token as module
from niels_gpt.inference.int8 import one_token
from niels_gpt.inference.native_one_token import NativeOneToken, native_one_token
from niels_gpt.inference.one_token import OneToken
from niels_gpt.kernels.cpu import native
from niels_gpt.model.kv_cache import KVCache

pytestmark = pytest.mark.skipif(not native.allowed() or native.find_compiler() is None, reason="no C compiler")

SIZES = {"V": 50, "T": 24, "C": 64, "L": 2, "H": 4}
CONFIG = ModelConfig(**SIZES)
V1 = {"norm": "rmsnorm", "mlp": "swiglu"}
OPTIONS: dict[str, dict[str, object]] = {
    "v0": {},
    "v1": V1,
    "learned": {"norm": "rmsnorm", "positions": "learned", "n_kv_heads": 1},
    "llama": {**V1, "n_kv_heads": 2, "tie_embeddings": False, "rope_theta": 50.0},
    "qwen": {**V1, "n_kv_heads": 2, "qkv_bias": True, "qk_norm": True, "head_dim": 32},
}


def make_model(options: dict[str, object] | None = None) -> GPT:
    torch.manual_seed(0)
    model = GPT(ModelConfig(**{**SIZES, **(options or {})})).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # norms away from 1, weights larger than at the start
    return model


def native_pass(model: GPT) -> NativeOneToken:
    found = native_one_token(model)
    assert isinstance(found, NativeOneToken), native.problem()
    return found


def cache_for(model: GPT, batch: int) -> KVCache:
    return KVCache(model.config, batch, device=model.device, dtype=torch.float32)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("batch", [1, 3])
def test_token_by_token_equals_the_full_window(options: dict[str, object], batch: int) -> None:
    model = make_model(options)
    x = torch.randint(0, CONFIG.V, (batch, CONFIG.T))
    cache, one = cache_for(model, batch), native_pass(model)
    with torch.no_grad():
        expected = model(x)
        for t in range(CONFIG.T):
            torch.testing.assert_close(one(x[:, t], cache), expected[:, t], rtol=1e-4, atol=1e-4)
    assert cache.lengths == [CONFIG.T] * batch


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_rows_of_different_lengths(options: dict[str, object]) -> None:
    """A row's logits are those of the row alone, bit by bit."""
    model = make_model(options)
    x = torch.randint(0, CONFIG.V, (3, CONFIG.T))
    lengths = [2, 7, 4]
    cache, one = cache_for(model, 3), native_pass(model)
    with torch.no_grad():
        model(x[:, :7], cache=cache)
        cache.lengths = list(lengths)
        alone = [cache_for(model, 1) for _ in lengths]
        for row, n in enumerate(lengths):
            alone[row].buffer.copy_(cache.buffer[:, row : row + 1])
            alone[row].lengths = [n]
        for step in range(4):
            ids = torch.stack([x[row, n + step] for row, n in enumerate(lengths)])
            logits = one(ids, cache)
            for row, n in enumerate(lengths):
                expected = model(x[row : row + 1, : n + step + 1])[0, -1]
                torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)
                assert torch.equal(one(ids[row : row + 1], alone[row])[0], logits[row])


@pytest.mark.parametrize("name", ["tok_emb.weight", "blocks.1.mlp.gate.weight", "blocks.0.norm_attn.weight"])
def test_weights_that_change_in_place_are_seen(name: str) -> None:
    model = make_model(V1)
    x = torch.randint(0, CONFIG.V, (3, 1))
    one = native_pass(model)
    with torch.no_grad():
        before = one(x[:, 0], cache_for(model, 3))
        model.get_parameter(name).mul_(1.5)
        after = one(x[:, 0], cache_for(model, 3))
        assert not torch.allclose(before, after)
        torch.testing.assert_close(after, model(x)[:, 0], rtol=1e-4, atol=1e-4)


def test_decoders_of_a_model_share_its_panels_until_a_weight_changes() -> None:
    model = make_model()
    first, second, third = (native_pass(model) for _ in range(3))
    shared = first._current_layout()
    assert second._current_layout() is shared
    with torch.no_grad():
        model.blocks[0].mlp.up.weight.zero_()
    assert third._current_layout() is not shared
    assert first._current_layout() is third._current_layout()
    count = len(module._layouts)
    del model, first, second, third
    gc.collect()
    assert len(module._layouts) < count


def test_weights_of_inference_mode() -> None:
    """Such tensors have no version counter: each decoder copies them."""
    with torch.inference_mode():
        model = make_model()
        ids = torch.tensor([1, 2])
        torch.testing.assert_close(native_pass(model)(ids, cache_for(model, 2)), model(ids[:, None])[:, 0])
        model.lm_head.weight.mul_(2)
        torch.testing.assert_close(native_pass(model)(ids, cache_for(model, 2)), model(ids[:, None])[:, 0])


def test_only_ids_that_can_be_generated() -> None:
    model = make_model({"tie_embeddings": False})
    ids = torch.tensor([3])
    for number in (None, 41, 40, None):  # decoders of one model share what they copied
        model.sampled_ids = number
        with torch.no_grad():
            logits = native_pass(model)(ids, cache_for(model, 1))
            torch.testing.assert_close(logits, model(ids[:, None])[:, 0, :number])


def test_many_rows_go_to_torch(monkeypatch) -> None:
    model = make_model()
    one, ids = native_pass(model), torch.arange(5)
    monkeypatch.setattr(module, "MOST_ROWS", 4)
    monkeypatch.setattr(one, "_current_layout", lambda: pytest.fail("used the kernels"))
    with torch.no_grad():
        torch.testing.assert_close(one(ids, cache_for(model, 5)), model(ids[:, None])[:, 0])


@pytest.mark.parametrize("change", ["double", "large", "head size", "switched off"])
def test_what_the_kernels_do_not_compute(change: str, monkeypatch) -> None:
    model = make_model({"H": 8} if change == "head size" else None)
    if change == "double":
        model = model.double()
    if change == "large":
        size = 4 * sum(p.numel() for p in model.parameters())  # a little more than the matrices
        monkeypatch.setattr(module, "machine_memory", lambda: 3 * size)
    if change == "switched off":
        monkeypatch.setattr(module, "token_attention", lambda D: None)
    assert native_one_token(model) is None
    assert type(one_token(model)) is OneToken


def test_a_token_past_T_raises() -> None:
    model = make_model()
    cache, one = cache_for(model, 1), native_pass(model)
    with torch.no_grad():
        model(torch.zeros(1, CONFIG.T, dtype=torch.long), cache=cache)
        with pytest.raises(ValueError, match="T=24"):
            one(torch.tensor([0]), cache)
    assert cache.lengths == [CONFIG.T]
