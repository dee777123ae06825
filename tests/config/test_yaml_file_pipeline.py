"""Configs of the token tasks, of model presets, and of the two phases of a pipeline."""

import dataclasses

import pytest

from niels_gpt.config import PRESETS, ModelConfig, RunConfig, TrainConfig
from niels_gpt.config.yaml_file import config_from_dict, dump_config, load_config, load_pipeline
from niels_gpt.model.gpt import GPT

PRETRAIN = {"fineweb_edu": 0.95, "roam": 0.05}
SFT = {"dolly15k": 0.50, "oasst1": 0.45, "primer": 0.05}
MIXES = {"pretrain": PRETRAIN, "sft": SFT}


def write(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def message_of(make, *arguments, **options):
    """Return the message of the ValueError; it must be one line."""
    with pytest.raises(ValueError) as error:
        make(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_written_config_is_read_back(tmp_path):
    config = load_config(None, overrides=["task=sft", "model.preset=v1", "data.retain={}", "init_from='2024'"])
    assert "preset" not in dump_config(config)
    assert load_config(write(tmp_path, dump_config(config))) == config


def test_changing_the_task_of_a_written_config_keeps_its_shares(tmp_path):
    path = write(tmp_path, dump_config(RunConfig(task="pretrain")))
    assert load_config(path, overrides=["task=sft"]).train.p_train == PRETRAIN


V1 = {"V": 16004, "T": 1024, "C": 512, "L": 8, "H": 8, "D": 64, "d_ff": 1536, "dropout": 0.0}
V1 |= {"n_kv_heads": 0, "tie_embeddings": True, "rope_theta": 10000.0}


def test_presets():
    assert set(PRESETS) == {"v0", "v1"}
    assert load_config(None, overrides=["model.preset=v0"]) == RunConfig()
    made = load_config(None, overrides=["model.preset=v1"]).model
    assert dataclasses.asdict(made).items() >= {**V1, "norm": "rmsnorm", "mlp": "swiglu", "positions": "rope"}.items()


def test_the_size_of_v1():
    """V C + L (4 C C + 3 C d_ff + 2 C) + C: the head is tied, and there are no biases."""

    def number(c):
        return c.V * c.C + c.L * (4 * c.C**2 + 3 * c.C * c.d_ff + 2 * c.C) + c.C

    full = config_from_dict({"model": {"preset": "v1"}}).model
    assert round(number(full) / 1e6, 1) == 35.5
    small = config_from_dict({"model": {"preset": "v1", "V": 50, "C": 32, "L": 2, "d_ff": 96}}).model
    assert sum(weight.numel() for weight in GPT(small).parameters()) == number(small)


@pytest.mark.parametrize("order", [1, -1])
def test_keys_beside_a_preset_win(order, tmp_path):
    overrides = ["model.preset=v1", "model.T=64", "model.L=2", "model.norm=layernorm"][::order]
    made = load_config(None, overrides=overrides).model
    wanted = {**V1, "T": 64, "L": 2, "norm": "layernorm", "mlp": "swiglu", "positions": "rope"}
    assert dataclasses.asdict(made).items() >= wanted.items()
    path = write(tmp_path, "model:\n  L: 3\n  preset: v1\n")
    assert load_config(path).model == ModelConfig(**{**PRESETS["v1"], "L": 3})
    assert load_config(path, overrides=["model.preset=v0"]).model == ModelConfig(L=3)


@pytest.mark.parametrize("preset", ["v2", "", "[v1]"])
def test_an_unknown_preset(preset):
    message = message_of(load_config, None, overrides=[f"model.preset={preset}"])
    assert "model.preset" in message
    assert "v0, v1" in message
    assert "unknown key train.preset" in message_of(load_config, None, overrides=["train.preset=v1"])


def test_a_pipeline_without_a_file_is_v1_on_the_default_mixes():
    phases = load_pipeline()
    assert list(phases) == ["pretrain", "sft"]
    for name, config in phases.items():
        assert config.task == name
        assert config.train.p_train == config.train.p_val == MIXES[name]
        assert config.model == ModelConfig(**PRESETS["v1"])
        assert config.init_from == ""
    assert phases["sft"].data.retain == PRETRAIN


FILE = """
data:
  token_cache: tokens
  seed: 5
pretrain:
  model: {preset: v0, T: 64, C: 32, L: 2, H: 2}
  train: {total_steps: 30, warmup_steps: 3, p_train: {a: 0.5, b: 0.5}, p_val: {b: 1.0}}
  output: {eval_every: 7}
sft:
  data: {seed: 6}
  train: {total_steps: 20, warmup_steps: 2, base_lr: 1e-4, p_train: {c: 1.0}}
"""


def test_the_sections_of_a_file(tmp_path):
    phases = load_pipeline(write(tmp_path, FILE))
    first, second = phases["pretrain"], phases["sft"]
    assert first == RunConfig(
        task="pretrain",
        model=ModelConfig(T=64, C=32, L=2, H=2),
        train=TrainConfig(total_steps=30, warmup_steps=3, p_train={"a": 0.5, "b": 0.5}, p_val={"b": 1.0}),
        data=dataclasses.replace(RunConfig().data, token_cache="tokens", seed=5),
        output=dataclasses.replace(RunConfig().output, eval_every=7),
    )
    assert second == RunConfig(
        task="sft",
        model=first.model,  # one model
        train=TrainConfig(total_steps=20, warmup_steps=2, base_lr=1e-4, p_train={"c": 1.0}, p_val={"c": 1.0}),
        data=dataclasses.replace(RunConfig().data, token_cache="tokens", seed=6, retain={"b": 1.0}),
        output=RunConfig().output,
    )


def test_retain_can_be_chosen(tmp_path):
    """The default is p_val of pretraining."""
    path = write(tmp_path, FILE)
    assert load_pipeline(path)["sft"].data.retain == {"b": 1.0}
    for section in ("data", "sft.data"):
        phases = load_pipeline(path, overrides=[f"{section}.retain={{a: 1.0}}"])
        assert phases["sft"].data.retain == {"a": 1.0}


def test_overrides_have_the_section_in_front(tmp_path):
    overrides = ["sft.train.total_steps=100", "pretrain.model.L=3", "data.token_cache=x", "sft.data.token_cache=y"]
    phases = load_pipeline(write(tmp_path, FILE), overrides=overrides)
    assert (phases["pretrain"].train.total_steps, phases["sft"].train.total_steps) == (30, 100)
    assert phases["pretrain"].model.L == phases["sft"].model.L == 3
    assert (phases["pretrain"].data.token_cache, phases["sft"].data.token_cache) == ("x", "y")
    assert load_pipeline(overrides=["pretrain.model.preset=v0"])["sft"].model == ModelConfig()


@pytest.mark.parametrize("text", ["", "pretrain: {}\n", "data: {}\nsft: {}\npretrain: {}\n"])
def test_empty_sections(text, tmp_path):
    assert load_pipeline(write(tmp_path, text)) == load_pipeline()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sft.model.L=2", ["sft.model"]),
        ("sft.task=bytes", ["sft.task"]),
        ("sft.init_from=x.pt", ["sft.init_from"]),
        ("pretrain.task=sft", ["pretrain.task"]),
        ("train.total_steps=5", ["unknown key train", "did you mean pretrain?"]),
        ("model.preset=v1", ["unknown key model", "data, pretrain, sft"]),
        ("pre_train.train.B=5", ["pre_train", "did you mean pretrain?"]),
        ("pretrain.train.total_stepz=5", ["train.total_stepz", "did you mean total_steps?"]),
        ("data.token_chache=x", ["data.token_chache", "did you mean token_cache?"]),
        ("pretrain.model.preset=v7", ["model.preset", "v7", "v0, v1"]),
        ("pretrain.train.p_train={a: 2}", ["train.p_train", "sum to 1"]),
        ("sft.train.B=0", ["train.B", "1", "0"]),
        ("sft=3", ["sft", "section", "3"]),
        ("pretrain=", ["pretrain", "section"]),
        ("data=[]", ["data", "section"]),
        ("pretrain.data=", ["data", "section"]),
        ("sft.data=[a]", ["data", "section"]),
        ("pretrain.model=v1", ["model", "section"]),
        ("no equals sign", ["section.key=value"]),
    ],
)
def test_invalid_pipelines_are_named(override, words, tmp_path):
    for path in (None, write(tmp_path, "sft: {train: {B: 4}}\n")):
        message = message_of(load_pipeline, path, overrides=[override])
        for word in words:
            assert word in message


def test_errors_name_the_file(tmp_path):
    path = write(tmp_path, "pretrain:\n  train: {total_stepz: 4}\n")
    assert str(path) in message_of(load_pipeline, path)
    assert str(path) in message_of(load_pipeline, write(tmp_path, "- a\n- b\n"))
    assert "no config file" in message_of(load_pipeline, tmp_path / "gone.yaml")
