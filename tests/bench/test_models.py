"""The contenders: the plain model, the sizes, and the work of the cases in tiny sizes on a CPU."""

import dataclasses
import math

import pytest
import torch

from bench import models
from bench.case import ON_CUDA, Unavailable, load_case
from bench.cases import generate_cold, shakespeare, stall
from bench.generation import Setup, load
from bench.models import GPT2_SMALL, SIZES, SMOLLM2, SMOLLM2_SHALLOW, V0, V1
from bench.nano import Nano
from bench.runner import run_case
from bench.training import OURS, Setting, memory_work, prepare, step_work
from niels_gpt.config import PRESETS, ModelConfig

SMALL = {"V": 50, "T": 16, "C": 32, "L": 2, "H": 4}


@pytest.fixture
def nano():
    torch.manual_seed(0)
    return Nano(**SMALL).eval()


def test_nano_is_causal(nano):
    ids = torch.randint(50, (2, 16))
    other = ids.clone()
    other[:, 9:] = (other[:, 9:] + 1) % 50
    before, after = nano(ids), nano(other)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_nano_has_the_weights_of_a_gpt2_without_biases(nano):
    """V C + T C embeddings, 12 C^2 and two norms per block, a last norm; the head is the embedding."""
    V, T, C, L = (SMALL[key] for key in "VTCL")
    assert sum(p.numel() for p in nano.parameters()) == V * C + T * C + L * (12 * C * C + 2 * C) + C


def test_nano_generates_from_the_last_window(nano):
    ids = torch.randint(50, (3, 14))
    made = nano.generate(ids, 5, temperature=0.0)
    assert torch.equal(made[:, :14], ids)
    for n in range(14, 19):  # past T = 16 too
        assert torch.equal(nano(made[:, max(0, n - 16) : n])[:, -1].argmax(-1), made[:, n])


def test_our_models_are_the_presets():
    assert models.our_config(V0, dropout=0.1) == ModelConfig()
    assert models.our_config(V1) == ModelConfig(**PRESETS["v1"])
    config = models.our_config(GPT2_SMALL)
    assert (config.positions, config.mlp, config.norm, config.d_ff) == ("learned", "gelu", "layernorm", 3072)
    weights = sum(p.numel() for p in _on_meta(config).parameters())
    assert weights == 50304 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 2 * 768) + 768  # 124M, as nano's


def test_the_shape_of_smollm2_is_that_of_the_public_model():
    """134,515,008 weights, as published; grouped heads, RoPE with base 100,000, a tied head."""
    config = models.our_config(SMOLLM2)
    assert sum(weight.numel() for weight in _on_meta(config).parameters()) == 134_515_008
    assert (config.n_kv_heads, config.D, config.rope_theta, config.tie_embeddings) == (3, 64, 100_000.0, True)
    shallow = models.our_config(SMOLLM2_SHALLOW)
    assert dataclasses.replace(config, L=2, T=256) == shallow


def test_llama_of_transformers_has_the_same_shape():
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = models.llama(SMOLLM2)
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    assert getattr(model.config, "rope_parameters", {"rope_theta": getattr(model.config, "rope_theta", 0)})[
        "rope_theta"
    ] == pytest.approx(100_000)


def test_lora_that_is_missing_is_reported(monkeypatch):
    monkeypatch.delattr("niels_gpt.config.LoRAConfig", raising=False)
    with pytest.raises(Unavailable, match="LoRA"):
        step_work(OURS, Setting(SMOLLM2_SHALLOW, lora=16), True)


def test_adapters_in_the_last_half():
    plain, everywhere, in_half = (
        prepare(OURS, dataclasses.replace(Setting(SMOLLM2_SHALLOW), **options), True).parameters
        for options in ({}, {"lora": 2}, {"lora": 2, "lora_in_half": True})
    )
    assert everywhere - plain == 2 * (in_half - plain) > 0


def test_prompts_of_a_given_length():
    setup = Setup(SMOLLM2_SHALLOW, prompt_tokens=20, new_tokens=5)
    assert (len(setup.prompt), setup.new(False), setup.new(True)) == (20, 5, 10)
    (text,) = {load(OURS, dataclasses.replace(setup, batch=2), True)(7)[0], load(OURS, setup, True)(7)}
    assert text.startswith(setup.prompt)


def _on_meta(config):
    from niels_gpt import GPT

    with torch.device("meta"):
        return GPT(config)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [OURS, "nano"])
def test_a_round_is_steps_on_the_same_batch(name, size):
    work = step_work(name, Setting(SIZES[size]), True)
    assert work.amount == 2 * 64  # rows x T of the tiny size, one step
    assert work.facts["notes"] == []
    work.run()


def test_all_contenders_train_on_the_same_rows():
    made = {name: prepare(name, Setting(V0), True) for name in (OURS, "nano")}
    assert made[OURS].tokens == made["nano"].tokens
    losses = [made[OURS].step().loss.item() for _ in range(20)]
    assert losses[0] == pytest.approx(math.log(256), abs=0.1) and losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("checkpointed", [False, True])
def test_memory_is_measured(checkpointed):
    found = memory_work(OURS, Setting(V0, checkpointed=checkpointed), True).run()
    assert 0 <= found["GiB"] < 4


@pytest.mark.parametrize("size", [V0, V1])
def test_generation_works_with_any_vocabulary(size):
    assert len(load(OURS, Setup(size, batch=1), True)(7)) > 0
    texts = load(OURS, Setup(size, batch=3), True)(7)
    assert len(texts) == 3 and len(set(texts)) == 1
    (first, second) = load("nano", Setup(size, batch=2), True)(7)
    assert first == second and len(first) == len("hello world") + 7


def test_cold_generation_times_the_first_token_and_all():
    found = generate_cold.cold_work(OURS, Setup(V0), True).run()
    assert 0 < found["s to first"] < found["s"]


def test_the_stall_is_a_share():
    ours, beside = (contender.build(True) for contender in load_case("stall").contenders)
    assert ours.amount == beside.amount
    found = ours.run()
    assert 0 < found["% stall"] < 100 and found["seconds"] > 0
    assert beside.run()["seconds"] > 0


def test_the_stall_of_a_gpu_is_read_from_the_metrics(monkeypatch):
    """Checks the computation on lines as a GPU run writes them."""
    lines = [{"tokens_per_s": 1.0, "stall": 1.0}] * 4 + [{"tokens_per_s": 128.0, "stall": 0.1}] * 4
    monkeypatch.setattr("niels_gpt.training.loop.train", lambda *args, **options: None)
    monkeypatch.setattr("niels_gpt.runs.folder.RunFolder.metrics", lambda self: lines)
    work = stall._training("cuda", True)
    assert work.amount == 4 * 128
    assert work.run() == pytest.approx({"seconds": 4.0, "% stall": 10.0})


def test_shakespeare_finds_the_first_step_that_reaches_the_loss():
    reached = {100: (1.0, 2.0), 200: (2.0, 1.46), 300: (3.0, 1.44)}
    assert shakespeare._found(reached, 1.4697) == {"s": 2.0, "steps": 200, "val loss": 1.44}
    with pytest.raises(ValueError, match=r"1\.4 .*300 steps.*1\.4400"):
        shakespeare._found(reached, 1.4)


def test_shakespeare_runs():
    ours, nano = (contender.build(True).run() for contender in load_case("shakespeare").contenders)
    for found in (ours, nano):
        assert found["steps"] == 6 and found["s"] > 0 and 2 < found["val loss"] < math.log(256)


def test_a_missing_text_of_shakespeare(monkeypatch, tmp_path):
    monkeypatch.setenv("BENCH_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"nowhere.*--data PATH"):
        shakespeare.text_path()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CUDA)
def test_the_cases_for_a_gpu_run_on_one(name):
    if name.startswith("serve"):
        pytest.importorskip("fastapi")
    rows = run_case(name, rounds=1, quick=True, device="cuda")
    assert all(row.error in (None, "not installed") for row in rows), rows
    assert any(row.role == "ours" and row.median is not None for row in rows)
