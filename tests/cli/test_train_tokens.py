"""`niels-gpt train` on token caches: pretraining, tuning from a checkpoint, and --verify."""

import re

import pytest
import yaml

from niels_gpt.config.yaml_file import load_config
from niels_gpt.data.source_paths import with_absolute_paths
from niels_gpt.report import curves
from tests import token_caches
from tests.cli import call, error_of
from tests.cli.conftest import token_options
from tests.training import metric_lines


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(curves, "plot_losses", lambda run: None)
    return token_caches.copy_to(tmp_path / "cache")


@pytest.mark.parametrize(
    ("task", "names"), [("pretrain", ("fineweb_edu", "roam")), ("sft", ("oasst1", "primer"))], ids=["pretrain", "sft"]
)
def test_a_run_takes_its_vocabulary_from_the_tokenizer(tmp_path, capsys, task, names):
    arguments = token_options(task, "output.eval_every=2")
    assert call("train", *arguments, "--print-config") == 0
    resolved = capsys.readouterr().out
    assert yaml.safe_load(resolved)["model"]["V"] == 404
    assert call("train", *arguments, "--verify", "--run-dir", "out") == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    for name in names:
        assert re.search(rf"^{name} +50\.0% ", output, re.MULTILINE)
    shown = re.search(rf"^step 2/4 .*val_{task} (\d\.\d+).*tok/s", output, re.MULTILINE)
    lines = metric_lines(tmp_path / "out")
    assert shown[1] == f"{lines[1]['evals'][f'val_{task}']:.3f}"
    assert "val_pretrain" in lines[1]["evals"]
    (tmp_path / "printed.yaml").write_text(resolved, encoding="utf-8")
    assert load_config(tmp_path / "out/config.yaml") == with_absolute_paths(load_config(tmp_path / "printed.yaml"))
    assert ("niels-gpt chat out" if task == "sft" else "niels-gpt generate out") in output


def test_verify_finds_damage_that_keeps_the_size(tmp_path, caches, capsys):
    file = "pretrain/roam/val/shard_00000.bin"  # evaluated during SFT too
    data = bytearray((caches / file).read_bytes())
    data[10] ^= 1
    (caches / file).write_bytes(data)
    assert call("train", *token_options("sft"), "--run-dir", "out", "--verify") == 1
    message = error_of(capsys)
    assert file in message and "damaged" in message
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").touch()
    assert call("train", *token_options("sft"), "--run-dir", "out", "--verify") == 1
    assert "--run-dir" in error_of(capsys)  # reported before gigabytes of caches are read
