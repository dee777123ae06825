"""Configs by name. tests/test_configs.py checks the configs themselves."""

import pytest

from niels_gpt.config.builtin_configs import builtin_configs, description, find_config
from niels_gpt.config.yaml_file import load_config, load_pipeline


def test_a_name_works_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("splice-one").task == "splice"
    assert load_pipeline("pipeline-debug")["sft"].task == "sft"
    assert all(description(path) for path in builtin_configs().values())


def test_a_file_comes_before_a_name_and_a_folder_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "debug").mkdir()
    assert find_config("debug") == builtin_configs()["debug"]
    (tmp_path / "v1").write_text("train: {B: 3}", encoding="utf-8")
    assert load_config("v1").train.B == 3
    with pytest.raises(ValueError, match="folder"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("splice-on", "did you mean splice-one"), ("configs/debug.yaml", "debug is built in"), ("q", "enwik8")],
)
def test_an_unknown_name_lists_the_known_ones(name, hint):
    with pytest.raises(ValueError, match=hint):
        load_config(name)
