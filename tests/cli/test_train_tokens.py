"""`niels-gpt train` on token caches: pretraining, tuning from a checkpoint, and --verify."""

import math
import re

import pytest
import torch
import yaml

from niels_gpt.model.gpt import GPT
from niels_gpt.report import curves
from niels_gpt.runs.folder import RunFolder
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
    assert (tmp_path / "out/config.yaml").read_text(encoding="utf-8") == resolved
    assert "niels-gpt chat --run out" in output


def test_the_tuned_model_starts_from_the_pretrained_one(token_runs):
    base, chat = RunFolder(token_runs / "runs/base"), RunFolder(token_runs / "runs/chat")
    before, after = (torch.load(run.best, weights_only=True)["model"] for run in (base, chat))
    torch.manual_seed(0)
    other = GPT(chat.read_config().model).state_dict()

    def distance(a, b):
        return math.sqrt(sum(float((a[name] - b[name]).pow(2).sum()) for name in a if a[name].dim() > 1))

    assert 0 < distance(before, after) < distance(other, after) / 2


def test_a_share_of_zero_needs_no_cache(tmp_path):
    shares = "train.p_train={fineweb_edu: 1.0, gone: 0.0}"
    assert call("train", *token_options("pretrain", shares), "--run-dir", "out") == 0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.token_cache=nowhere", ["nowhere", "niels-gpt cache build-all"]),
        ("train.p_train={roam: 1}", ["sft", "roam"]),
        ("init_from=gone.pt", ["gone.pt"]),
    ],
)
def test_caches_and_checkpoints_that_are_missing(tmp_path, capsys, override, words):
    assert call("train", *token_options("sft", override), "--run-dir", "out") == 1
    message = error_of(capsys)
    assert all(word in message for word in words)
    assert not (tmp_path / "out/config.yaml").exists()


@pytest.mark.parametrize(
    ("task", "file"),
    [
        ("pretrain", "pretrain/fineweb_edu/val/shard_00000.bin"),
        ("sft", "sft/oasst1/train_tokens.bin"),
        ("sft", "pretrain/roam/val/shard_00000.bin"),  # evaluated during SFT too
    ],
)
def test_verify_finds_damage_that_keeps_the_size(tmp_path, caches, capsys, task, file):
    data = bytearray((caches / file).read_bytes())
    data[10] ^= 1
    (caches / file).write_bytes(data)
    assert call("train", *token_options(task), "--run-dir", "out", "--verify") == 1
    message = error_of(capsys)
    assert file in message and "damaged" in message
    assert not (tmp_path / "out").exists()
