"""Which backend computes a model, and what the table says about each."""

import dataclasses

import pytest
import torch

from niels_gpt import GPT, ModelConfig
from niels_gpt.model import backend
from niels_gpt.model.backend import (
    CPU,
    CUDA_BF16,
    CUDA_FP8,
    OPTIONS,
    PLAIN,
    SUPPORT,
    backend_report,
    choose,
    decodes,
    default_backend,
    usable,
    use_backend,
)

CONFIG = ModelConfig(V=9, T=8, C=8, L=1, H=2, dropout=0.0)


@pytest.mark.parametrize(
    ("device", "precision", "use", "expected"),
    [
        ("cpu", "fp32", "training", CPU),
        ("cpu", "bf16", "scoring", CPU),
        ("cuda", "fp32", "training", PLAIN),
        ("cuda", "tf32", "training", PLAIN),
        ("cuda:1", "bf16", "training", CUDA_BF16),
        ("cuda", "bf16", "scoring", CUDA_BF16),
        ("cuda", "fp8", "training", CUDA_FP8),
        ("cuda", "fp8", "scoring", CUDA_BF16),
        ("mps", "fp32", "training", PLAIN),
        ("mps", "bf16", "training", PLAIN),
    ],
)
def test_choose(device, precision, use, expected, monkeypatch):
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    assert choose(device, precision=precision, use=use) is expected
    monkeypatch.setattr(backend, "HAS_TRITON", False)
    assert choose(device, precision=precision, use=use) is (CPU if device == "cpu" else PLAIN)


def test_a_model_that_was_not_prepared_follows_device_and_autocast(monkeypatch):
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    assert GPT(CONFIG).backend is default_backend("cpu") is CPU
    assert default_backend("cuda") is default_backend("mps") is default_backend("meta") is PLAIN
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    for dtype, expected in ((torch.bfloat16, CUDA_BF16), (torch.float16, PLAIN)):
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind, dtype=dtype: dtype)
        assert default_backend("cuda") is expected
    assert default_backend("mps") is PLAIN


def test_use_backend_sets_and_restores():
    model = GPT(CONFIG)
    with use_backend(model, PLAIN):
        assert model.backend is PLAIN
        with pytest.raises(RuntimeError), use_backend(model, CUDA_BF16):
            assert model.backend is CUDA_BF16
            raise RuntimeError
        assert model.backend is PLAIN
    assert model.backend is CPU


def test_the_plain_backend_runs_the_modules():
    """Hooks on every module see it; its loss is the mean or the sum over `total`."""
    model, ids = GPT(CONFIG), torch.tensor([[1, 2, 3]])
    seen = set()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: seen.add(name))
    with use_backend(model, PLAIN):
        model(ids)
    block = ["norm_attn", "attn", "attn.qkv", "attn.out", "norm_mlp", "mlp", "mlp.up", "mlp.down", "drop"]
    assert seen >= {"tok_emb", "blocks.0", "norm", "lm_head", *(f"blocks.0.{name}" for name in block)}
    with use_backend(model, PLAIN):
        mean, total = model.loss(ids, ids), model.loss(ids, ids, total=torch.tensor(6))
    torch.testing.assert_close(mean, 2 * total)


def test_a_model_that_kernels_do_not_compute_is_plain(monkeypatch):
    def computed(model):
        """By the backend, by the backend as far as norm and head go, and by a decoder."""
        return usable(model, CPU) is CPU, usable(model, CPU, blocks=False) is CPU, decodes("one-token", model)

    model = GPT(dataclasses.replace(CONFIG, norm="rmsnorm"))
    assert computed(model) == (True, True, True) and backend.why_plain() == ""
    assert usable(model, PLAIN) is PLAIN
    for module, expected in ((model.blocks[0].mlp, (False, True, False)), (model.norm, (False, False, False))):
        hook = module.register_forward_hook(lambda *_: None)
        assert computed(model) == expected
        hook.remove()
    with monkeypatch.context() as patch:
        patch.setattr(backend, "OPTIONS", tuple({*OPTIONS} - {"norm=rmsnorm"}))  # an option that no kernel knows
        assert computed(model) == (False, False, False)
    monkeypatch.setenv("NIELS_GPT_BACKEND", "plain")
    assert computed(model) == (False, False, False) and backend.why_plain() == "NIELS_GPT_BACKEND=plain"


# --- the table -------------------------------------------------------------------------------------


def test_every_option_is_supported_or_declined_with_a_reason():
    rows = backend_report("cpu")
    assert [row.name for row in rows] == list(SUPPORT)
    for row in rows:
        assert {*row.supports} | {*row.declines} == {*OPTIONS}
        assert not {*row.supports} & {*row.declines}
        assert all(row.declines.values()) and row.used_for
        assert row.available == (not row.reason or row.name == "cpu")
    assert rows[0] == ("plain", rows[0].used_for, True, "", OPTIONS, {})


@pytest.mark.parametrize(
    ("options", "used"),
    [
        ({"mlp": "gelu", "rope_low": 2.0, "dropout": 0.1}, {"mlp=gelu"}),
        ({"mlp": "swiglu"}, {"mlp=swiglu"}),
        ({"norm": "rmsnorm", "positions": "learned"}, {"mlp=gelu", "norm=rmsnorm", "positions=learned"}),
        ({"n_kv_heads": 1, "tie_embeddings": False}, {"mlp=gelu", "n_kv_heads", "tie_embeddings=false"}),
        ({"head_dim": 8, "norm_eps": 1e-6, "qk_norm": True}, {"mlp=gelu", "head_dim", "norm_eps", "qk_norm"}),
        ({"rope_theta": 5e5, "rope_scale": 2.0}, {"mlp=gelu", "rope_theta", "rope_scale"}),
        ({"qkv_bias": True}, {"mlp=gelu", "qkv_bias"}),
        ({"bias": True}, {"mlp=gelu", "qkv_bias", "bias"}),
    ],
)
def test_the_options_of_a_model_decide_who_decodes_it(options, used):
    model = GPT({"V": 9, "T": 8, "C": 8, "L": 1, "H": 2, **options})
    assert backend.options_of(model) == used
    for name in ("one-token", "int8", "cuda-graphs"):
        assert decodes(name, model) == used.isdisjoint(SUPPORT[name])


def test_what_runs_on_a_cpu(monkeypatch):
    monkeypatch.setattr(backend.cpu, "missing_kernels", lambda: "install gcc")
    rows = {row.name: row for row in backend_report("cpu")}
    assert [name for name, row in rows.items() if row.available] == ["plain", "cpu", "one-token", "int8"]
    assert rows["cpu"].reason == "install gcc"  # without C kernels it is slower, but choose returns it
    assert all("--device cuda" in rows[name].reason for name in ("cuda-bf16", "cuda-fp8", "cuda-graphs"))


def test_what_runs_on_a_gpu(monkeypatch):
    monkeypatch.setattr(backend.cuda, "unavailable", lambda device: "")
    monkeypatch.setattr(backend.fp8, "unavailable", lambda device: f"{device} has no FP8")
    rows = {row.name: row for row in backend_report("cuda:1")}
    assert [name for name, row in rows.items() if row.available] == ["plain", "cuda-bf16", "one-token", "cuda-graphs"]
    assert "cuda:1" in rows["cpu"].reason and "cuda:1" in rows["int8"].reason and "cuda:1" in rows["cuda-fp8"].reason
