"""The shipped configs: valid, documented, and no larger than the models that they are compared with."""

import dataclasses
import shlex
from pathlib import Path

import pytest
import torch
import typer

from niels_gpt.cli.main import app
from niels_gpt.config.builtin_configs import builtin_configs
from niels_gpt.config.yaml_file import dump_config, load_config, load_pipeline
from niels_gpt.model.gpt import GPT
from niels_gpt.training.optim.schedule import lr_at_step
from niels_gpt.training.tasks.byte_task import stream_config

CONFIGS = list(builtin_configs().values())


def configs_of(path):
    """Return the config of a file, or the configs of the phases of a pipeline."""
    return list(load_pipeline(path).values()) if path.stem.startswith("pipeline") else [load_config(path)]


ALL = [pytest.param(config, id=f"{path.stem}-{config.task}") for path in CONFIGS for config in configs_of(path)]


@pytest.mark.parametrize("config", ALL)
def test_a_shipped_config_gives_a_model_and_a_schedule(config, tmp_path):
    small = GPT(dataclasses.replace(config.model, L=1, T=8))
    with torch.no_grad():
        assert small(torch.zeros((1, 8), dtype=torch.int64)).shape == (1, 8, config.model.V)
    with torch.device("meta"):  # no memory for the weights
        model = GPT(config.model)
    C, L, d_ff = config.model.C, config.model.L, config.model.d_ff
    matrices = 3 if config.model.mlp == "swiglu" else 2
    positions = config.model.T * C if config.model.positions == "learned" else 0
    assert model.num_parameters() == config.model.V * C + positions + L * (4 * C * C + matrices * C * d_ff + 2 * C) + C
    settings = config.train
    rates = [
        lr_at_step(
            step,
            settings.total_steps,
            base_lr=settings.base_lr,
            warmup_steps=settings.warmup_steps,
            min_lr=settings.min_lr,
        )
        for step in (settings.warmup_steps, settings.total_steps - 1)
    ]
    assert rates == pytest.approx([settings.base_lr, settings.min_lr])
    assert settings.min_lr <= settings.base_lr
    if config.task == "splice":
        assert config.splice.dataset_name in ("roam", "wiki")  # embedded, so that it works on a new machine
    elif config.task == "bytes":
        assert stream_config(config).enabled_sources
    else:
        assert sum(settings.p_train.values()) == pytest.approx(1)
        assert settings.p_val == settings.p_train
    (tmp_path / "again.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_config(tmp_path / "again.yaml") == config


RECIPES = {"shakespeare-char": 11_000_000, "enwik8": 44_000_000, "wikitext-2": 10_000_000}
"""Recipes with published results -> the largest number of weights for a fair comparison."""


@pytest.mark.parametrize(("name", "limit"), RECIPES.items())
def test_a_recipe_is_no_larger_than_its_comparison(name, limit):
    config = load_config(name)
    V = 8004 if config.task == "pretrain" else 256  # of the tokenizer in its comment
    with torch.device("meta"):
        assert GPT(dataclasses.replace(config.model, V=V)).num_parameters() <= limit


def test_the_splits_of_the_recipes_are_the_usual_ones():
    splits = {name: [source.split for source in load_config(name).data.sources.values()] for name in RECIPES}
    assert splits == {
        "shakespeare-char": [(0.9, 0.1)],
        "enwik8": [(90_000_000, 5_000_000, 5_000_000)],
        "wikitext-2": [],  # its own train, validation and test files
    }


def commands_of(path):
    """Return the niels-gpt commands in the comments of a config, as words."""
    lines = [
        line.removeprefix("#").strip() for line in path.read_text(encoding="utf-8").splitlines() if line[:1] == "#"
    ]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("niels-gpt ")]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_commands_in_the_comments_are_valid(path, monkeypatch):
    """Commands and options are known, and the named config is this file. Runs that they name do not exist yet."""
    monkeypatch.setattr("niels_gpt.runs.loading.check_model_path", lambda path: None)
    assert path.read_text(encoding="utf-8").startswith("# ")
    for words in commands_of(path):
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        context = command.make_context(command.name, list(words))
        if context.params.get("config"):
            assert context.params["config"] == Path(path.stem)
