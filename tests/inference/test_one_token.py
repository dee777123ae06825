"""The passes of one token, in torch and in C, give the logits of GPT.forward, for every option of the model.

Other tests compare GPT.forward with a naive reference.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from niels_gpt import GPT, ModelConfig
from niels_gpt.inference import native_one_token as module
from niels_gpt.inference.int8 import one_token
from niels_gpt.inference.native_one_token import NativeOneToken, native_one_token
from niels_gpt.inference.one_token import OneToken
from niels_gpt.kernels.cpu import native
from niels_gpt.model.kv_cache import KVCache

needs_compiler = pytest.mark.skipif(not native.allowed() or native.find_compiler() is None, reason="no C compiler")

SIZES = {"V": 50, "T": 24, "C": 64, "L": 3, "H": 4}
CONFIG = ModelConfig(**SIZES)
V1 = {"norm": "rmsnorm", "mlp": "swiglu"}
OPTIONS: dict[str, dict[str, object]] = {
    "v0": {},
    "v1": V1,
    "tanh": {"mlp": "gelu_tanh"},
    "learned": {"norm": "rmsnorm", "positions": "learned", "n_kv_heads": 1},
    "llama": {**V1, "n_kv_heads": 2, "tie_embeddings": False, "rope_theta": 50.0},
    "qwen": {**V1, "n_kv_heads": 2, "qkv_bias": True, "qk_norm": True, "head_dim": 32},
}


def native_pass(model: GPT) -> NativeOneToken:
    found = native_one_token(model)
    assert isinstance(found, NativeOneToken), native.problem()
    return found


class Pass(NamedTuple):
    """A pass, the type that it is tested in, and how far it may be from GPT.forward."""

    make: Callable[[GPT], OneToken | NativeOneToken]
    dtype: torch.dtype
    tolerance: float

    def check(self, logits: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(logits, expected, rtol=self.tolerance, atol=self.tolerance)


PASSES = {
    "torch": Pass(OneToken, torch.float64, 1e-9),
    "torch in float32": Pass(OneToken, torch.float32, 1e-4),
    "C": Pass(native_pass, torch.float32, 1e-4),
}
every_pass = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[needs_compiler] if name == "C" else []) for name in PASSES]
)
every_model = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def make_model(name: str, options: dict[str, object] | None = None) -> GPT:
    """A model in the type of a pass."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(**{**SIZES, **(options or {})})).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # norms away from 1, weights larger than at the start
    return model.to(PASSES[name].dtype)


def cache_for(model: GPT, batch: int) -> KVCache:
    return KVCache(model.config, batch, device=model.device, dtype=next(model.parameters()).dtype)


# --- every pass --------------------------------------------------------------------------------------


@every_pass
@every_model
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_token_by_token_equals_the_full_window(name: str, options: dict[str, object], batch: int) -> None:
    model = make_model(name, options)
    x = torch.randint(0, CONFIG.V, (batch, CONFIG.T))
    cache, one = cache_for(model, batch), PASSES[name].make(model)
    with torch.no_grad():
        expected = model(x)
        for t in range(CONFIG.T):
            PASSES[name].check(one(x[:, t], cache), expected[:, t])
    assert cache.lengths == [CONFIG.T] * batch


@every_pass
@every_model
def test_rows_of_different_lengths_do_not_see_each_other(name: str, options: dict[str, object]) -> None:
    """In C, a row's logits are those of the row alone bit by bit."""
    model = make_model(name, options)
    x = torch.randint(0, CONFIG.V, (3, CONFIG.T))
    lengths = [2, 7, 4]
    cache, one = cache_for(model, 3), PASSES[name].make(model)
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
                PASSES[name].check(logits[row], model(x[row : row + 1, : n + step + 1])[0, -1])
                if name == "C":
                    assert torch.equal(one(ids[row : row + 1], alone[row])[0], logits[row])


@every_pass
@pytest.mark.parametrize(
    "weight",
    ["tok_emb.weight", "blocks.2.mlp.gate.weight", "blocks.1.attn.qkv.weight", "blocks.0.norm_attn.weight"],
)
def test_weights_that_change_in_place_are_seen(name: str, weight: str) -> None:
    model = make_model(name, V1)
    x = torch.randint(0, CONFIG.V, (3, 1))
    one = PASSES[name].make(model)
    with torch.no_grad():
        before = one(x[:, 0], cache_for(model, 3))
        model.get_parameter(weight).mul_(1.5)
        after = one(x[:, 0], cache_for(model, 3))
        assert not torch.allclose(before, after)
        PASSES[name].check(after, model(x)[:, 0])


@every_pass
def test_weights_of_inference_mode(name: str) -> None:
    """Such tensors have no version counter: each decoder copies them."""
    with torch.inference_mode():
        model = make_model(name)
        ids = torch.tensor([1, 2])
        for _ in range(2):
            logits = PASSES[name].make(model)(ids, cache_for(model, 2))
            expected = model(ids[:, None])[:, 0]
            PASSES[name].check(logits, expected)
            torch.testing.assert_close(logits, expected)
            model.lm_head.weight.mul_(2)


@every_pass
def test_a_token_past_T_raises(name: str) -> None:
    model = make_model(name)
    cache, one = cache_for(model, 1), PASSES[name].make(model)
    with torch.no_grad():
        model(torch.zeros(1, CONFIG.T, dtype=torch.long), cache=cache)
        with pytest.raises(ValueError, match="T=24"):
            one(torch.tensor([0]), cache)
    assert cache.lengths == [CONFIG.T]


# --- the pass in C -----------------------------------------------------------------------------------


@needs_compiler
def test_decoders_of_a_model_share_its_panels_until_a_weight_changes() -> None:
    model = make_model("C")
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


@needs_compiler
def test_only_ids_that_can_be_generated() -> None:
    model = make_model("C", {"tie_embeddings": False})
    ids = torch.tensor([3])
    for number in (None, 41, 40, None):  # decoders of one model share what they copied
        model.sampled_ids = number
        with torch.no_grad():
            logits = native_pass(model)(ids, cache_for(model, 1))
            torch.testing.assert_close(logits, model(ids[:, None])[:, 0, :number])


@needs_compiler
def test_many_rows_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("C")
    one, ids = native_pass(model), torch.arange(5)
    monkeypatch.setattr(module, "MOST_ROWS", 4)
    monkeypatch.setattr(one, "_current_layout", lambda: pytest.fail("used the kernels"))
    with torch.no_grad():
        torch.testing.assert_close(one(ids, cache_for(model, 5)), model(ids[:, None])[:, 0])


@needs_compiler
@pytest.mark.parametrize("change", ["double", "large", "head size", "switched off"])
def test_what_the_kernels_do_not_compute(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("C", {"H": 8} if change == "head size" else None)
    if change == "double":
        model = model.double()
    if change == "large":
        size = 4 * sum(p.numel() for p in model.parameters())  # a little more than the matrices
        monkeypatch.setattr(module, "machine_memory", lambda: 3 * size)
    if change == "switched off":
        monkeypatch.setattr(module, "token_attention", lambda D: None)
    assert native_one_token(model) is None
    assert type(one_token(model)) is OneToken
