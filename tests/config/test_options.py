"""Every option refuses what is outside of its declaration, and names itself, the value and the limit."""

import dataclasses
import json
import math
import re
from typing import get_args

import numpy as np
import pytest

from niels_gpt.config import (
    DataConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    NotesConfig,
    OutputConfig,
    RunConfig,
    SourceConfig,
    TrainConfig,
)
from niels_gpt.config.explain import KeyDoc, all_keys
from niels_gpt.config.options import MOST, checked, fields_of
from niels_gpt.config.splice import SpliceConfig
from niels_gpt.config.yaml_file import load_config

SECTIONS = {
    "": RunConfig,
    "model": ModelConfig,
    "train": TrainConfig,
    "train.lora": LoRAConfig,
    "data": DataConfig,
    "data.notes": NotesConfig,
    "data.sources.NAME": SourceConfig,
    "output": OutputConfig,
    "engine": EngineConfig,
    "splice": SpliceConfig,
}
LIMITS = {
    "of at least 0": """model.D model.d_ff model.n_kv_heads model.head_dim train.base_lr train.min_lr train.accumulate
        train.weight_decay train.clip_norm train.lora.alpha train.lora.layers engine.prefetch splice.min_doc_length
        splice.alpha splice.offset_jitter splice.doc_index splice.controls""",
    "of at least 1": """model.V model.T model.C model.L model.H model.rope_scale model.rope_context train.B
        splice.max_doc_length splice.content_stride splice.offset_stride splice.max_train_tokens
        splice.max_train_batches splice.initial_batch_size splice.num_docs splice.epoch_length splice.curriculum
        splice.eval_examples""",
    "of at least 2": "splice.content_length splice.min_copy_len",
    "above 0": "model.norm_eps model.rope_low model.rope_high",
    "above 1": "model.rope_theta",
    "in [0, 1)": "model.dropout train.betas",
    "in [0, 1]": "data.roam_val_frac data.primer_val_frac splice.balance_tau",
    "in (0, 1000000]": "splice.epochs",
    "in [1, 1000000]": "output.eval_steps output.sample_tokens",
    "in [0, 65536]": "train.lora.rank",
    "in [1, 1000000000]": "train.total_steps output.checkpoint_every output.keep output.eval_every",
    "in [0, 1000000000]": "train.warmup_steps output.sample_every",
    "in [0, 9223372036854775807]": "train.seed data.seed",
    "not empty": """data.wiki data.roam data.primer data.cache_dir data.token_cache data.sources.NAME.path
        output.sample_prompt splice.base splice.dataset_name splice.tokenizer splice.doc_key""",
}
NEWER = {
    "0.2": "model.n_kv_heads model.tie_embeddings model.rope_theta",
    "0.3": """model.bias model.qk_norm engine.backend data.notes.exclude data.sources.NAME.columns train.lora.rank
        splice.epochs""",
}
KEYS = {entry.key: entry for entry in all_keys() if entry.type != "section" and entry.key != "model.preset"}


def split(key: str) -> tuple[type, str]:
    section, _, name = key.rpartition(".")
    return SECTIONS[section], name


def interval(entry: KeyDoc) -> tuple[str, list[int]]:
    """The kind of the limits, and their numbers."""
    kind, _, rest = entry.limits.partition(" ")
    return rest if kind == "in" else kind, [int(number) for number in re.findall(r"\d+", rest)]


def outside(entry: KeyDoc) -> list[object]:
    """Values next to the limits, and beyond."""
    kind, numbers = interval(entry)
    step = 1 if entry.type.startswith("int") else 1e-9
    if kind == "not":
        return [""]
    if kind == "above":
        return [numbers[0], -1]
    if kind == "of":
        return [numbers[0] - step, -1, *([] if step < 1 else [MOST + 1])]
    if numbers:
        return [numbers[0] - step * (kind[0] == "["), numbers[1] + step * (kind[-1] == "]")]
    return []


def of_other_types(entry: KeyDoc) -> list[object]:
    if entry.type.startswith("map of"):
        return [[1], 3, "x"]
    if entry.type.startswith("list of"):
        return [[[{}]], {"a": 1}, "x"]
    if entry.type.startswith("float"):
        return ["1", True, {}]
    if entry.type.startswith("int"):
        return ["3", 0.5, {}, True]
    if entry.type.startswith("true"):
        return ["true", {}, 0.5]
    if " | " in entry.type:
        return ["other", 3, [entry.type.split(" | ")[0]]]
    return [3, True, {}]


@pytest.mark.parametrize("entry", KEYS.values(), ids=KEYS)
def test_values_outside_of_a_declaration_are_refused(entry: KeyDoc) -> None:
    """By the constructor and by YAML; the error has the key, the value and, of numbers, a limit."""
    cls, name = split(entry.key)
    needed = {"path": "x"} if cls is SourceConfig else {}
    key = entry.key.replace("NAME", "mine")
    _, numbers = interval(entry)
    for value in [*outside(entry), *of_other_types(entry)]:
        given = [value, value] if entry.type.startswith("list of 2 ") and isinstance(value, int | float) else value
        options = {**needed, name: given}
        overrides = [f"{key.rpartition('.')[0]}.{each}={json.dumps(options[each])}" for each in options]
        makers = [
            lambda options=options: cls(**options),
            lambda overrides=overrides: load_config(overrides=[item.lstrip(".") for item in overrides]),
        ]
        for path, make in zip((entry.key.replace(".NAME", ""), key), makers, strict=True):
            with pytest.raises(ValueError) as caught:
                make()
            assert path in str(caught.value) and "got " in str(caught.value)
            if isinstance(value, int | float | str) and value != "" and value is not True:
                assert repr(value) in str(caught.value)
            if value in outside(entry) and numbers:
                assert any(str(number) in str(caught.value).partition("got")[0] for number in (*numbers, MOST))


def test_the_limits_of_all_options() -> None:
    expected = {key: limits for limits, keys in LIMITS.items() for key in keys.split()}
    assert {key: entry.limits for key, entry in KEYS.items() if entry.limits} == expected


def test_the_version_of_newer_options() -> None:
    for version, keys in NEWER.items():
        assert {KEYS[key].since for key in keys.split()} == {version}
    assert {KEYS[key].since for key in ("model.C", "train.B", "data.roam", "splice.alpha")} == {"0.1"}


@pytest.mark.parametrize("entry", [entry for entry in KEYS.values() if interval(entry)[1]], ids=lambda entry: entry.key)
def test_the_limits_themselves_are_allowed(entry: KeyDoc) -> None:
    cls, name = split(entry.key)
    kind, numbers = interval(entry)
    ends = {"of": "[", "above": "("}.get(kind, kind[0]) + kind[-1]
    allowed = [number for number, end in zip(numbers, ends, strict=False) if end in "[]"]
    for value in allowed:
        for given in (value, np.int64(value)):
            many = [given, given] if entry.type.startswith("list of 2 ") else given
            found = checked(entry.key, many, fields_of(cls)[name])
            for number in found if isinstance(found, tuple) else [found]:
                assert number == value and type(number) in (int, float)


def test_numbers_of_numpy_become_plain() -> None:
    made = TrainConfig(B=np.int32(8), base_lr=np.float32(0.5), betas=np.array([0.5, 0.25]))
    assert (made.B, made.base_lr, made.betas) == (8, 0.5, (0.5, 0.25))
    assert {type(value) for value in (made.B, made.base_lr, *made.betas)} == {int, float}
    assert EngineConfig(shard=np.True_).shard is True


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_numbers_that_are_not_finite(value: float) -> None:
    for key in ("train.base_lr", "model.dropout", "splice.alpha", "train.B", "model.rope_theta"):
        cls, name = split(key)
        with pytest.raises(ValueError, match=name):
            cls(**{name: value})


def test_every_field_has_a_declaration() -> None:
    for cls in SECTIONS.values():
        assert list(fields_of(cls)) == [field.name for field in dataclasses.fields(cls)]
        assert all(get_args(declared) or isinstance(declared, type) for declared in fields_of(cls).values())
