"""Options without an effect: every option of every task is either read by it, or refused."""

import copy
import dataclasses

import pytest

from niels_gpt.config import RunConfig
from niels_gpt.config.builtin_configs import builtin_configs
from niels_gpt.config.unused import check_used
from niels_gpt.config.yaml_file import config_from_dict, load_config, load_pipeline

BYTES, PRETRAIN, SFT = ({"task": task} for task in ("bytes", "pretrain", "sft"))
OVER_BYTES, OVER_TOKENS = ({"task": "splice", "splice": {"documents": kind}} for kind in ("bytes", "tokens"))
SPLICE = {f"splice.{field.name}" for field in dataclasses.fields(RunConfig().splice)}
UNUSED = [
    (BYTES, {"data.token_cache", "data.retain"} | SPLICE),
    (PRETRAIN, SPLICE),
    (SFT, SPLICE),
    (OVER_BYTES, {"data.token_cache", "data.retain"}),
    (OVER_TOKENS, {"data.retain"}),
]
"""(config, options that its task does not read)."""
SECTIONS = ("model", "train", "data", "output", "engine", "splice")


def check(config, *, device="cpu", processes=1):
    default = dataclasses.replace(RunConfig(), task=config.task)
    check_used(config, default, device=device, processes=processes)


def changed(config, section, option):
    """The config with another value of an option, which need not be valid."""
    config, inner = copy.copy(config), copy.copy(getattr(config, section))
    object.__setattr__(inner, option, "another value")
    object.__setattr__(config, section, inner)
    return config


@pytest.mark.parametrize(("tree", "unused"), UNUSED)
def test_options_that_a_task_does_not_read_are_refused(tree, unused):
    config = config_from_dict(tree)
    for section in SECTIONS:
        for field in dataclasses.fields(getattr(config, section)):
            key = f"{section}.{field.name}"
            if section == "engine" or key == "splice.documents":
                continue
            if key in unused:
                with pytest.raises(ValueError, match=rf"{key} \(.*task"):
                    check(changed(config, section, field.name))
            else:
                check(changed(config, section, field.name))


@pytest.mark.parametrize(
    ("option", "device", "processes", "refused"),
    [
        ("graphs", "cpu", 1, True),
        ("graphs", "cuda:0", 1, False),
        ("graphs", "cuda", 2, True),
        ("shard", "cpu", 1, True),
        ("shard", "cuda", 1, True),
        ("shard", "cpu", 2, False),
    ],
)
def test_engine_options_that_the_machine_cannot_use_are_refused(option, device, processes, refused):
    check(load_config(overrides=[f"engine.{option}=false"]), device=device, processes=processes)
    config = load_config(overrides=[f"engine.{option}=true"])
    if refused:
        with pytest.raises(ValueError, match=f"engine.{option}=true"):
            check(config, device=device, processes=processes)
    else:
        check(config, device=device, processes=processes)


def test_all_are_named_at_once():
    config = load_config(overrides=["data.retain={a: 1}", "splice.alpha=3", "engine.shard=true"])
    with pytest.raises(ValueError, match=r"(?s)(?=.*data\.retain)(?=.*splice\.alpha)(?=.*engine\.shard)"):
        check(config)


@pytest.mark.parametrize("name", builtin_configs())
def test_built_in_configs_have_no_unused_options(name):
    for config in load_pipeline(name).values() if name.startswith("pipeline") else [load_config(name)]:
        check(config)
