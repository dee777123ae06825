"""n_kv_heads, tie_embeddings and rope_theta in everything that handles a model: caches, checkpoints, optimizers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from niels_gpt import GPT, ModelConfig, load_checkpoint, save_checkpoint
from niels_gpt.config import TrainConfig
from niels_gpt.config.yaml_file import config_from_dict, dump_config
from niels_gpt.inference.decoding import Decoder
from niels_gpt.inference.engine import cuda_slots
from niels_gpt.inference.one_token import OneToken
from niels_gpt.inference.sampling import Sampling
from niels_gpt.model.kv_cache import KVCache
from niels_gpt.runs.checkpoint import CheckpointError, build_model, load_model
from niels_gpt.training.optim.optimizer import MuonAdamW, make_optimizer
from niels_gpt.training.parallel.sharding import ties
from niels_gpt.training.throughput import flops_per_token

T, V = 12, 50
LLAMA: dict[str, object] = {"norm": "rmsnorm", "mlp": "swiglu", "n_kv_heads": 2, "tie_embeddings": False}
LLAMA["rope_theta"] = 100.0
QWEN2: dict[str, object] = {**LLAMA, "qkv_bias": True, "norm_eps": 1e-6}
QWEN3: dict[str, object] = {**LLAMA, "qk_norm": True, "head_dim": 12, "norm_eps": 1e-6}


def make(**options: object) -> GPT:
    torch.manual_seed(0)
    model = GPT(ModelConfig(**{"V": V, "T": T, "C": 32, "L": 2, "H": 4, "dropout": 0.0, **options})).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def some_ids(rows: int) -> torch.Tensor:
    return torch.randint(V, (rows, T), generator=torch.Generator().manual_seed(1))


def test_a_cache_holds_the_heads_of_keys_and_values_only() -> None:
    full, shared = (
        KVCache(make(n_kv_heads=n).config, 3, device=torch.device("cpu"), dtype=torch.float32).buffer for n in (0, 1)
    )
    assert full.shape == (2, 3, 2, 4, T, 8)
    assert shared.shape == (2, 3, 2, 1, T, 8)


@pytest.mark.parametrize("n_kv_heads", [1, 2])
@torch.no_grad()
def test_a_cache_of_grouped_heads_gives_the_logits_of_the_full_window(n_kv_heads: int) -> None:
    """In chunks, and for rows of different lengths."""
    model, ids = make(**{**LLAMA, "n_kv_heads": n_kv_heads}).double(), some_ids(2)
    cache = KVCache(model.config, 2, device=model.device, dtype=torch.float64)
    expected = model(ids)
    parts = [model(ids[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 9))]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected[:, :9], atol=1e-9, rtol=1e-9)
    cache.lengths = [9, 4]
    logits = model(torch.stack((ids[0, 9:11], ids[1, 4:6])), cache=cache)
    torch.testing.assert_close(logits[0], expected[0, 9:11], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(logits[1], expected[1, 4:6], atol=1e-9, rtol=1e-9)


def test_cached_decoding_gives_the_ids_of_uncached() -> None:
    decoded = []
    for use_cache in (True, False):
        sampling, generator = Sampling(temperature=1.0), torch.Generator().manual_seed(1)
        prompts = [[3], [1, 4, 1, 5, 9]]
        decoder = Decoder(
            make(**LLAMA), prompts, max_new_tokens=15, sampling=sampling, generator=generator, use_cache=use_cache
        )
        for _ in range(15):
            decoder.step()
        decoded.append(decoder.ids)
    assert decoded[0] == decoded[1]


@pytest.mark.parametrize("options", [QWEN2, QWEN3])
@torch.no_grad()
def test_biases_head_norms_and_wide_heads_in_a_cache(options: dict[str, object]) -> None:
    """The full window, chunks with a cache, and single tokens by `OneToken` give the same logits."""
    model, ids = make(**options).double(), some_ids(2)
    cache = KVCache(model.config, 2, device=model.device, dtype=torch.float64)
    expected, decode = model(ids), OneToken(model)
    parts = [model(ids[:, :5], cache=cache), *(decode(ids[:, i], cache)[:, None] for i in range(5, T))]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-9, rtol=1e-9)


@torch.no_grad()
def test_head_norms_are_those_of_a_naive_loop() -> None:
    model, ids = make(**QWEN3).double(), some_ids(1)
    weights, (H, G, D) = model.weights().blocks[0], (4, 2, 12)
    qkv = torch.randn(1, 3, (H + 2 * G) * D, dtype=torch.float64)
    found = weights.normalized_heads(qkv).view(1, 3, H + 2 * G, D)
    for position in range(3):
        for head in range(H + 2 * G):
            x = qkv.view(1, 3, H + 2 * G, D)[0, position, head]
            norm = weights.norm_q if head < H else weights.norm_k
            if head < H + G:
                x = x / (x.square().mean() + 1e-6).sqrt() * norm.weight
            torch.testing.assert_close(found[0, position, head], x)
    assert model(ids).shape == (1, T, V)


def test_head_dim_is_stored_only_if_it_differs() -> None:
    assert ModelConfig(C=32, H=4, head_dim=8).head_dim == 0
    assert ModelConfig(C=32, H=4, head_dim=12).D == 12
    assert ModelConfig(C=30, H=4, head_dim=8).D == 8
    for wrong in ({"head_dim": 7}, {"head_dim": -1}, {"head_dim": 8, "D": 10}, {"norm_eps": 0.0}, {"rope_scale": 0.5}):
        with pytest.raises(ValueError, match=next(iter(wrong)) if "D" not in wrong else "D=10"):
            ModelConfig(C=30, H=4, **{"head_dim": 8, **wrong})


def test_cuda_graphs_decline_biases_and_head_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token at a time is decoded by plain operations then; the other options are supported."""
    monkeypatch.setattr(cuda_slots, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
    assert cuda_slots.usable(make(tie_embeddings=False, rope_theta=100.0, n_kv_heads=2, head_dim=12))
    assert not cuda_slots.usable(make(qkv_bias=True))
    assert not cuda_slots.usable(make(qk_norm=True))


def test_a_checkpoint_keeps_the_options(tmp_path: Path) -> None:
    model = make(**LLAMA)
    save_checkpoint(tmp_path / "a.pt", model, None, 5, model.config)
    loaded, _ = load_model(tmp_path / "a.pt")
    assert loaded.config == model.config
    assert torch.equal(loaded(some_ids(2)), model(some_ids(2)))


def test_a_checkpoint_from_before_the_options_loads(tmp_path: Path) -> None:
    model = make()
    old = {key: getattr(model.config, key) for key in ("V", "T", "C", "L", "H", "D", "d_ff", "dropout", "norm", "mlp")}
    save_checkpoint(tmp_path / "a.pt", model, None, 5, old)
    assert "n_kv_heads" not in load_checkpoint(tmp_path / "a.pt", "cpu")[0]
    assert load_model(tmp_path / "a.pt")[0].config == model.config


def test_weights_of_other_heads_do_not_fit() -> None:
    config = {"V": V, "T": T, "C": 32, "L": 2, "H": 4, "n_kv_heads": 2}
    with pytest.raises(CheckpointError, match=r"attn\.qkv\.weight"):
        build_model(config, make().state_dict(), where="a.pt")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_untied_head_is_an_embedding_to_the_optimizer(optimizer: str) -> None:
    """Muon is for hidden matrices; every weight is in one group, once."""
    model = make(**LLAMA)
    made = make_optimizer(model, TrainConfig(optimizer=optimizer, weight_decay=0.1))
    groups = made._muon.param_groups if isinstance(made, MuonAdamW) else []
    assert not any(p is model.lm_head.weight or p is model.tok_emb.weight for g in groups for p in g["params"])
    decay = {id(p): group["weight_decay"] for group in made.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters())) == sum(len(g["params"]) for g in made.param_groups)
    assert decay[id(model.lm_head.weight)] == (0.1 if optimizer == "adamw" else 0.0)


def test_only_a_tied_head_is_a_tie() -> None:
    assert ties(make()) == {"lm_head.weight": "tok_emb.weight"}
    assert ties(make(tie_embeddings=False)) == {}


def test_an_untied_embedding_costs_no_matmul() -> None:
    """The FLOPs per token are those of the tied model: one row is looked up."""
    tied, untied = make(), make(tie_embeddings=False)
    assert untied.num_parameters() == tied.num_parameters() + V * 32
    expected = 6 * tied.num_parameters() + 12 * 2 * 32 * T
    assert flops_per_token(tied.config, tied.num_parameters()) == expected
    assert flops_per_token(untied.config, untied.num_parameters()) == expected


def test_a_config_file_round_trip() -> None:
    config = config_from_dict({"model": {"H": 4, "n_kv_heads": 2, "tie_embeddings": False, "rope_theta": 5e5}})
    text = dump_config(config)
    assert config_from_dict(yaml.safe_load(text)) == config
    assert "n_kv_heads: 2" in text and "tie_embeddings: false" in text and "rope_theta: 500000.0" in text
