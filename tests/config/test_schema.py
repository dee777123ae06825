"""The config dataclasses: defaults, derived sizes, and limits."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.config import (
    DataConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    RunConfig,
    SourceConfig,
    TrainConfig,
    default_p_train,
)

MIXES = {
    "bytes": {"wiki": 0.784, "roam": 0.196, "primer": 0.020},
    "pretrain": {"fineweb_edu": 0.95, "roam": 0.05},
    "sft": {"dolly15k": 0.50, "oasst1": 0.45, "primer": 0.05},
}


def test_v0_model():
    made = dataclasses.asdict(ModelConfig())
    assert made == {"V": 256, "T": 256, "C": 256, "L": 4, "H": 4, "D": 64, "d_ff": 1024, "dropout": 0.1} | {
        "norm": "layernorm",
        "mlp": "gelu",
        "positions": "rope",
        "n_kv_heads": 0,
        "tie_embeddings": True,
        "rope_theta": 10000.0,
        "head_dim": 0,
        "norm_eps": 1e-5,
        "qkv_bias": False,
        "bias": False,
        "qk_norm": False,
        "rope_scale": 1.0,
        "rope_low": 1.0,
        "rope_high": 4.0,
        "rope_context": 8192,
    }


def test_v0_training():
    made = TrainConfig(total_steps=10, seed=3, B=4)
    assert (made.total_steps, made.seed, made.B) == (10, 3, 4)
    assert (made.base_lr, made.warmup_steps, made.min_lr, made.clip_norm) == (3e-4, 200, 3e-5, 1.0)
    assert made.p_train == {"wiki": 0.784, "roam": 0.196, "primer": 0.020}
    assert made.p_val == {"wiki": 1.0}


def test_default_probabilities_are_a_new_dict_each_time():
    default_p_train()["wiki"] = 0.0
    TrainConfig().p_train["wiki"] = 0.0
    assert default_p_train() == TrainConfig().p_train == {"wiki": 0.784, "roam": 0.196, "primer": 0.020}


def test_configs_are_frozen():
    for made, name in ((ModelConfig(), "C"), (TrainConfig(), "B"), (DataConfig(), "seed"), (RunConfig(), "model")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, name, 1)


@settings(max_examples=40)
@given(heads=st.integers(1, 12), pairs=st.integers(1, 40), d_ff=st.integers(0, 5000))
def test_derived_sizes(heads, pairs, d_ff):
    width = heads * pairs * 2
    made = ModelConfig(C=width, H=heads, d_ff=d_ff)
    assert pairs * 2 == made.D
    assert made.d_ff == (d_ff if d_ff else 4 * width)
    assert ModelConfig(**dataclasses.asdict(made)) == made
    assert ModelConfig.of(dataclasses.asdict(made)) == made


def test_of_accepts_a_dict_or_a_config():
    wanted = ModelConfig(T=64, C=32, H=2, L=1)
    assert ModelConfig.of(wanted) is wanted
    assert ModelConfig.of({"T": 64, "C": 32, "H": 2, "L": 1}) == wanted
    assert ModelConfig.of({"V": 256, "T": 64, "C": 32, "L": 1, "H": 2, "D": 16, "d_ff": 128, "dropout": 0.1}) == wanted


@pytest.mark.parametrize("D", [0, 15, 32])
def test_of_rejects_a_different_head_width(D):
    with pytest.raises(ValueError, match=rf"D={D}\b.*16"):
        ModelConfig.of({"C": 32, "H": 2, "D": D})


def test_of_rejects_unknown_keys_and_other_types():
    with pytest.raises(ValueError, match=r"droput.*did you mean dropout"):
        ModelConfig.of({"droput": 0.1})
    with pytest.raises(ValueError, match="list"):
        ModelConfig.of([256, 256])


INVALID = {
    ModelConfig: [
        ({"C": 100, "H": 3}, ["C=100", "H=3"]),
        ({"C": 12, "H": 4}, ["12", "4", "3", "odd"]),
        ({"C": 64, "H": 4, "D": 32}, ["D=32", "64", "4", "16"]),
    ],
    TrainConfig: [
        ({"B": 10, "accumulate": 4}, ["B=10", "accumulate=4"]),
        ({"p_train": {"wiki": 0.5, "roam": 0.4}}, ["p_train", "0.9"]),
        ({"p_train": {}}, ["p_train", "empty"]),
        ({"p_val": {"wiki": 1.5, "roam": -0.5}}, ["p_val", "roam", "-0.5"]),
    ],
    SourceConfig: [
        ({"path": "x", "kind": "chat", "split": (0.9, 0.1)}, ["chat", "split"]),
        ({"path": "hub:a/b"}, ["hub:a/b", "split"]),
        ({"path": "x", "columns": {"user": "q"}}, ["columns", "assistant", "{'user': 'q'}"]),
        ({"path": "x", "columns": {"user": "q", "assistant": ""}}, ["columns", "''"]),
        ({"path": "x", "columns": {"user": "q", "assistant": "a", "bot": "b"}}, ["columns", "system", "'bot'"]),
        *(
            ({"path": "x", "columns": {"user": "q", "assistant": "a"}, key: value}, ["columns", key, str(value)])
            for key, value in (("field", "text"), ("kind", "text"), ("split", (0.9, 0.1)))
        ),
        ({"path": "hub:a b", "split": (0.9, 0.1)}, ["hub:ID@REVISION", "hub:a b"]),
        *(
            ({"path": path, "split": (0.9, 0.1)}, ["hub:ID", path])
            for path in ("hub:", "hub:@m", "hub:a@", "hub:a@b@c")
        ),
    ],
}


@pytest.mark.parametrize(
    ("cls", "changes", "mentioned"), [(cls, *case) for cls, cases in INVALID.items() for case in cases]
)
def test_invalid_options_are_named(cls, changes, mentioned):
    for make in (cls, lambda **changes: ModelConfig.of(changes)) if cls is ModelConfig else (cls,):
        with pytest.raises(ValueError) as caught:
            make(**changes)
        for part in mentioned:
            assert part in str(caught.value)


def test_training_edges():
    made = TrainConfig(total_steps=1, warmup_steps=0, accumulate=0, B=1, seed=0, betas=(0.0, 0.5), clip_norm=0.0)
    assert (made.total_steps, made.warmup_steps, made.B, made.betas) == (1, 0, 1, (0.0, 0.5))
    assert TrainConfig(seed=2**63 - 1, B=12, accumulate=4).accumulate == 4
    with pytest.raises(ValueError, match=r"train\.betas.*1\.0"):
        TrainConfig(betas=(0.9, 1.0))


def test_swiglu_width_is_a_multiple_of_64():
    assert [ModelConfig(C=C, H=2, mlp="swiglu").d_ff for C in (24, 28, 48, 512)] == [64, 128, 128, 1408]


def test_learned_positions_allow_an_odd_head_width():
    assert ModelConfig(C=12, H=4, positions="learned").D == 3
    for name in ("norm", "mlp", "positions"):
        with pytest.raises(ValueError, match=rf"model\.{name}.*'other'"):
            ModelConfig(**{name: "other"})


@pytest.mark.parametrize("task", ["bytes", "pretrain", "sft"])
def test_every_task_has_a_default_mix(task):
    config = RunConfig(task=task)
    assert config.train.p_train == MIXES[task]
    assert config.train.p_val == ({"wiki": 1.0} if task == "bytes" else MIXES[task])
    assert sum(MIXES[task].values()) == pytest.approx(1.0)
    plain, other = (dataclasses.asdict(made) for made in (RunConfig(), config))
    for tree in (plain, other):
        tree["task"] = tree["train"]["p_train"] = tree["train"]["p_val"] = None
    assert other == plain  # nothing else depends on the task


@pytest.mark.parametrize("task", ["pretrain", "sft"])
def test_validation_sources_follow_the_training_sources(task):
    both = RunConfig(task=task, train=TrainConfig(p_train={"a": 0.3, "b": 0.7}))
    assert both.train.p_train == both.train.p_val == {"a": 0.3, "b": 0.7}
    assert both.train.p_train is not both.train.p_val
    val = RunConfig(task=task, train=TrainConfig(p_val={"b": 0.5, "c": 0.5}))
    assert (val.train.p_train, val.train.p_val) == (MIXES[task], {"b": 0.5, "c": 0.5})


def test_fp8_needs_sides_that_are_multiples_of_16():
    train = TrainConfig(precision="fp8")
    RunConfig(model=ModelConfig(C=48, H=3, L=1), train=train)
    with pytest.raises(ValueError, match=r"fp8.*16.*model\.C=24 .*bf16"):
        RunConfig(model=ModelConfig(C=24, H=3, L=1, d_ff=64), train=train)
    with pytest.raises(ValueError, match=r"model\.C=24 and model\.d_ff=100"):
        RunConfig(model=ModelConfig(C=24, H=3, L=1, d_ff=100), train=train)
    RunConfig(model=ModelConfig(C=24, H=3, L=1), train=TrainConfig(precision="bf16"))


@pytest.mark.parametrize("split", [(0.9, 0.1), (0.8, 0.1, 0.1), (90, 10), (90, 5, 5), (0.5, 0.5 + 9e-7)])
def test_valid_splits(split):
    assert SourceConfig("x", split=split).split == split


@pytest.mark.parametrize(
    "split", [(0.9,), (0.25,) * 4, (0.9, 0.2), (0.5, 0.5 + 2e-6), (1.0, 5), (0.9, 0.0), (5, 0), (-1, 2), (2.5, 1)]
)
def test_invalid_splits(split):
    with pytest.raises(ValueError) as caught:
        SourceConfig("x", split=split)
    assert str(list(split)) in str(caught.value)


def test_hub_sources_and_their_names():
    for path in ("hub:a/b", "hub:a/b@main"):
        assert SourceConfig(path, split=(0.9, 0.1)).path == path
    assert list(DataConfig(sources={"Notes_2-b": SourceConfig("x")}).sources) == ["Notes_2-b"]
    for name in ("wiki", "roam", "primer", "chat", "", "-a", "a b", "a/b"):
        with pytest.raises(ValueError, match=rf"data\.sources\.{name}"):
            DataConfig(sources={name: SourceConfig("x")})


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", "a\tb", "a\n", "../a", ""])
def test_names_of_sources_are_plain_words(name):
    with pytest.raises(ValueError, match="a name may have only letters, digits, - and _"):
        DataConfig(sources={name: SourceConfig(path="notes")})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rank": -1}, "train.lora.rank"),
        ({"rank": 2, "alpha": -1.0}, "train.lora.alpha"),
        ({"rank": 2, "alpha": math.inf}, "train.lora.alpha"),
        ({"rank": 2, "targets": ("attn.qkv", "attn.qkv")}, "train.lora.targets"),
        ({"alpha": 2.0}, "train.lora.rank"),
        ({"targets": ("attn.qkv",)}, "train.lora.rank"),
        ({"layers": 1}, "train.lora.rank"),
        ({"rank": 2, "layers": -1}, "train.lora.layers"),
    ],
)
def test_lora_limits(options, named):
    with pytest.raises(ValueError, match=named):
        LoRAConfig(**options)


def test_lora_scale():
    assert LoRAConfig(rank=8).scale == 2.0
    assert LoRAConfig(rank=8, alpha=4.0).scale == 0.5


@pytest.mark.parametrize(
    ("lora", "sections", "named"),
    [
        ({}, {"train": {"optimizer": "muon"}}, "train.optimizer=muon"),
        ({}, {"train": {"precision": "fp8"}}, "train.precision=fp8"),
        ({}, {"engine": {"shard": True}}, "engine.shard=true"),
        ({"rank": 257}, {}, "train.lora.rank=257"),
        ({"layers": 5}, {}, "model.L=4"),
        ({"targets": ("mlp.gate",)}, {}, "mlp.gate"),
    ],
)
def test_what_lora_refuses(lora, sections, named):
    train = TrainConfig(lora=LoRAConfig(**{"rank": 8, **lora}), **sections.get("train", {}))
    with pytest.raises(ValueError, match=named):
        RunConfig(train=train, engine=EngineConfig(**sections.get("engine", {})))
