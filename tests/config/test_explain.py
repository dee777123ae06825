"""What `config explain` knows about a key."""

import dataclasses

import pytest

from niels_gpt.config import LoRAConfig, RunConfig, TrainConfig
from niels_gpt.config.explain import all_keys, explain
from niels_gpt.config.yaml_file import to_dict


def leaves(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict) and not key.startswith(("p_", "retain")) and key != "sources":
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_every_key_of_a_config_is_explained():
    known = {entry.key: entry for entry in all_keys()}
    assert set(leaves(to_dict(RunConfig()))) <= known.keys()
    assert all(entry.text for entry in known.values())
    assert set(known) >= {"data.sources.NAME.path", "model.preset", "train", "splice.balance_tau"}


def test_a_key_has_text_type_and_default():
    (entry,) = explain("train.base_lr")
    assert (entry.type, float(entry.default)) == ("float", TrainConfig.base_lr)
    assert "warm-up" in entry.text
    assert explain("train.optimizer")[0].type == "adamw | muon"
    assert explain("engine.compile")[0].type == "true | false or null"
    assert explain("train.p_train")[0].default == "{wiki: 0.784, roam: 0.196, primer: 0.02}"


def test_a_section_has_all_its_keys():
    names = [entry.key for entry in explain("train")]
    adapters = [f"train.lora.{field.name}" for field in dataclasses.fields(LoRAConfig)]
    below = [name for name in names if name not in adapters]
    assert below == ["train", *(f"train.{field.name}" for field in dataclasses.fields(TrainConfig))]
    assert [name for name in names if name in adapters] == adapters


def test_keys_of_pipelines_and_of_named_sources():
    assert explain("sft.train.B") == explain("train.B")
    assert explain("data.sources.diary.path") == explain("data.sources.NAME.path")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("base_lr", "train.base_lr"), ("train.bas_lr", "train.base_lr"), ("seed", "train.seed or data.seed")],
)
def test_an_unknown_key_gets_a_suggestion(key, nearest):
    with pytest.raises(ValueError, match=nearest):
        explain(key)
    with pytest.raises(ValueError, match="sections are"):
        explain("zzzzzz")
