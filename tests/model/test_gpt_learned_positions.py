"""Learned positions: v0 with them is a GPT-2 without biases; decoders agree; old checkpoints load."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from niels_gpt import GPT, ModelConfig, load_checkpoint, loss_fn, save_checkpoint
from niels_gpt.config import TrainConfig
from niels_gpt.inference.decoding import Decoder
from niels_gpt.inference.sampling import Sampling
from niels_gpt.runs.checkpoint import CheckpointError, build_model, load_model
from niels_gpt.training.optim.optimizer import MuonAdamW, make_optimizer

T, V = 16, 61
CONFIG = ModelConfig(V=V, T=T, C=32, L=3, H=4, d_ff=48, dropout=0.1, positions="learned")
V1 = {"norm": "rmsnorm", "mlp": "swiglu"}
v0_and_v1 = pytest.mark.parametrize("options", [{}, V1], ids=["v0", "v1"])


def make(dtype: torch.dtype = torch.float64, **changes: object) -> GPT:
    """A model with weights so large that every token and position matters, in float64: no two logits are equal."""
    model = GPT(dataclasses.replace(CONFIG, **changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p.dim() == 1) + 0.3 * torch.randn(p.shape, generator=generator))
    return model.to(dtype)


def some_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


# --- the function ----------------------------------------------------------------------------------


def gpt2(model: GPT) -> GPT2LMHeadModel:
    """transformers' GPT-2 with our weights (its matrices are transposed) and biases of zero."""
    config = GPT2Config(
        vocab_size=V,
        n_positions=T,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_inner=48,
        activation_function="gelu",
        layer_norm_epsilon=1e-5,
        attn_implementation="eager",
    )
    weights = {"transformer.wte.weight": model.tok_emb.weight, "transformer.wpe.weight": model.pos_emb.weight}
    weights["transformer.ln_f.weight"] = model.norm.weight
    for layer, block in enumerate(model.layers()):
        at = f"transformer.h.{layer}."
        weights |= {
            f"{at}ln_1.weight": block.norm_attn.weight,
            f"{at}attn.c_attn.weight": block.attn.qkv.weight.T,
            f"{at}attn.c_proj.weight": block.attn.out.weight.T,
            f"{at}ln_2.weight": block.norm_mlp.weight,
            f"{at}mlp.c_fc.weight": block.mlp.up.weight.T,
            f"{at}mlp.c_proj.weight": block.mlp.down.weight.T,
        }
    peer = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for name, p in peer.named_parameters():
            p.copy_(torch.zeros_like(p) if name.endswith(".bias") else weights.pop(name))
    assert not weights
    return peer


@pytest.mark.parametrize("n", [1, 7, T])
@torch.no_grad()
def test_it_is_a_gpt2(n: int) -> None:
    model, ids = make(), some_ids(3, n)
    peer = gpt2(model)
    expected = peer(ids).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(model(ids), expected, atol=1e-5, rtol=1e-5)
    positions = torch.randint(T, (3, n), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(
        model(ids, positions=positions), peer(ids, position_ids=positions).logits, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("given_positions", [False, True])
def test_the_gradients_are_those_of_gpt2(given_positions: bool) -> None:
    model, ids, targets = make(), some_ids(3, 11), some_ids(3, 11, seed=2)
    positions = torch.randint(T, (3, 11), generator=torch.Generator().manual_seed(3)) if given_positions else None
    peer = gpt2(model)
    loss_fn(model(ids, positions=positions), targets).backward()
    logits = peer(ids, position_ids=positions).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    for ours, theirs in ((model.pos_emb, peer.transformer.wpe), (model.tok_emb, peer.transformer.wte)):
        assert theirs.weight.grad.abs().max() > 1e-3
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, atol=1e-6, rtol=1e-4)
    used = set(range(11)) if positions is None else set(positions.flatten().tolist())
    rows = model.pos_emb.weight.grad.abs().sum(dim=1)
    assert {position for position in range(T) if rows[position] > 0} == used


def test_the_sum_of_both_embeddings_is_dropped() -> None:
    model = make(dropout=0.5).train()
    seen: list[torch.Tensor] = []
    model.layers()[0].register_forward_hook(lambda module, args, output: seen.append(args[0]))
    torch.manual_seed(0)
    model(some_ids(8, T))
    assert 0.45 < (seen[0] == 0).double().mean() < 0.55


# --- the weights -----------------------------------------------------------------------------------


@v0_and_v1
def test_one_more_weight(options: dict[str, str]) -> None:
    learned, rope = make(**options), make(positions="rope", **options)
    assert learned.pos_emb.weight.shape == (T, 32) and rope.pos_emb is None
    assert learned.num_parameters() == rope.num_parameters() + T * 32
    names = list(rope.state_dict())
    assert list(learned.state_dict()) == [names[0], "pos_emb.weight", *names[1:]]
    assert not list(learned.buffers())


def test_initial_weights() -> None:
    torch.manual_seed(0)
    table = GPT(dataclasses.replace(CONFIG, T=512)).pos_emb.weight
    assert table.std().item() == pytest.approx(0.02, rel=0.03) and abs(table.mean().item()) < 0.001


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_table_is_an_embedding_to_the_optimizer(optimizer: str) -> None:
    """Muon is for the hidden matrices; AdamW decays matrices only."""
    model = make(torch.float32)
    made = make_optimizer(model, TrainConfig(optimizer=optimizer, weight_decay=0.1))
    groups = made._muon.param_groups if isinstance(made, MuonAdamW) else []
    assert not any(p is model.pos_emb.weight or p is model.tok_emb.weight for g in groups for p in g["params"])
    decay = {id(p): group["weight_decay"] for group in made.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    assert decay[id(model.pos_emb.weight)] == decay[id(model.tok_emb.weight)] == (0.1 if optimizer == "adamw" else 0.0)
    before = model.pos_emb.weight.detach().clone()
    loss_fn(model(some_ids(2, T)), some_ids(2, T, seed=2)).backward()
    made.step()
    assert (model.pos_emb.weight != before).all()


def test_the_option() -> None:
    assert ModelConfig().positions == "rope"
    with pytest.raises(ValueError, match=r"model\.positions.*'rope', 'learned'.*'absolute'"):
        ModelConfig(positions="absolute")  # type: ignore[arg-type]


# --- caches and decoding ---------------------------------------------------------------------------


@torch.no_grad()
def test_cached_uncached_and_batched_decoding_give_the_ids_of_the_naive_loop() -> None:
    """Past T the window is the last T tokens, at positions 0..T-1."""
    model, steps = make(), T + 6
    prompts = [[3], [1, 4, 1, 5, 9], list(range(T - 1)), list(range(20, 20 + 2 * T))]
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(steps):
            ids.append(model(torch.tensor([ids[-T:]]))[0, -1].argmax().item())
        expected.append(ids)
    assert len({tuple(ids[-steps:]) for ids in expected}) == 4
    for use_cache in (True, False):
        for batch in ([0, 1, 2, 3], [0], [1], [2], [3]):
            decoder = Decoder(
                model,
                [prompts[row] for row in batch],
                max_new_tokens=steps,
                sampling=Sampling(temperature=0.0),
                use_cache=use_cache,
            )
            for _ in range(steps):
                decoder.step()
            assert decoder.ids == [expected[row] for row in batch]


# --- checkpoints -----------------------------------------------------------------------------------


def test_a_checkpoint_round_trip(tmp_path: Path) -> None:
    model = make(torch.float32)
    save_checkpoint(tmp_path / "a.pt", model, None, 5, model.config)
    loaded, step = load_model(tmp_path / "a.pt")
    assert step == 5 and loaded.config == model.config
    assert torch.equal(loaded(some_ids(2, T)), model(some_ids(2, T)))


def test_a_checkpoint_from_before_the_option_is_rope(tmp_path: Path) -> None:
    model = make(torch.float32, positions="rope")
    old = dataclasses.asdict(model.config)
    del old["positions"]
    save_checkpoint(tmp_path / "a.pt", model, None, 5, old)
    assert "positions" not in load_checkpoint(tmp_path / "a.pt", "cpu")[0]
    loaded, _ = load_model(tmp_path / "a.pt")
    assert loaded.config == model.config
    assert torch.equal(loaded(some_ids(2, T)), model(some_ids(2, T)))


@pytest.mark.parametrize(("saved", "wanted"), [("rope", "learned"), ("learned", "rope")])
def test_weights_of_the_other_kind_raise(saved: str, wanted: str) -> None:
    config = dataclasses.asdict(dataclasses.replace(CONFIG, positions=wanted))
    with pytest.raises(CheckpointError, match=r"pos_emb\.weight"):
        build_model(config, make(positions=saved).state_dict(), where="a.pt")
