from pathlib import Path

import pytest
import torch

from niels_gpt.config_file import dump_config, load_config
from niels_gpt.model.gpt import GPT
from niels_gpt.train.schedule import lr_at_step
from niels_gpt.train.task import stream_config

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


def test_there_is_a_debug_config():
    assert "debug.yaml" in [path.name for path in CONFIGS]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_makes_a_model_and_a_schedule(path, tmp_path):
    config = load_config(path)
    model = GPT(config.model)
    rows = torch.zeros((1, config.model.T), dtype=torch.int64)
    with torch.no_grad():
        assert model(rows).shape == (1, config.model.T, config.model.V)
    C, L, d_ff = config.model.C, config.model.L, config.model.d_ff
    assert model.num_parameters() == config.model.V * C + L * (4 * C * C + 2 * C * d_ff + 2 * C) + C
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
    assert stream_config(config).enabled_sources
    (tmp_path / "again.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_says_what_it_is_for(path):
    assert path.read_text(encoding="utf-8").startswith("# ")
