"""`niels-gpt config`."""

import json

import yaml

from niels_gpt.config.builtin_configs import builtin_configs
from niels_gpt.config.yaml_file import load_config, load_pipeline, to_dict
from tests.cli import call, error_of
from tests.runs.test_catalog import make_run


def test_list(capsys):
    assert call("config", "list") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(builtin_configs())


def test_show_prints_a_config_that_loads_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call("config", "show", "debug", "--set", "train.B=3") == 0
    (tmp_path / "again.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_config("again.yaml") == load_config("debug", overrides=["train.B=3"])
    assert call("config", "show", "again.yaml", "--json") == 0
    assert json.loads(capsys.readouterr().out)["train"]["B"] == 3


def test_show_a_run_and_pipelines(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs" / "mine", "train.B=5")
    for name in ("mine", "runs/mine"):
        assert call("config", "show", name) == 0
        assert yaml.safe_load(capsys.readouterr().out)["train"]["B"] == 5
    assert run.exists()
    assert call("config", "show", "pipeline-debug", "--set", "sft.train.B=2", "--json") == 0
    phases = load_pipeline("pipeline-debug", overrides=["sft.train.B=2"])
    assert json.loads(capsys.readouterr().out) == {name: to_dict(phase) for name, phase in phases.items()}


def test_explain(capsys):
    assert call("config", "explain", "train.base_lr") == 0
    assert "train.base_lr: float = 0.0003" in capsys.readouterr().out
    assert call("config", "explain", "train.bse_lr") == 1
    assert "train.base_lr" in error_of(capsys)
