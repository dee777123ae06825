"""`init_from`: the weights of a public model, a run or a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from niels_gpt import train
from niels_gpt.config.yaml_file import config_from_dict
from niels_gpt.pretrained.imported_run import import_model
from niels_gpt.pretrained.initial_weights import initial_model, open_initial
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import load_run
from tests.pretrained.conftest import random_model, save


def test_initial_weights(folder: Path, tmp_path: Path) -> None:
    """A folder, the imported run and its checkpoint are the same weights, with the same tokenizer."""
    run = import_model(str(folder), RunFolder(tmp_path / "run")).run
    loaded = load_run(run.path)
    for where in (f"hf:{folder}", str(run.path), str(run.best)):
        initial = open_initial(where, "cpu")
        assert (initial.step, initial.data["tokenizer"]) == (0, loaded.tokenizer.sha256)
        assert initial_model(where).C == initial.config.C == 72
        assert torch.equal(initial.read()["blocks.0.attn.qkv.weight"], loaded.model.blocks[0].attn.qkv.weight)


def test_a_run_starts_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model over bytes; without a model section the model is the one found."""
    monkeypatch.chdir(tmp_path)
    folder = save(random_model("smollm2", vocab_size=256), tmp_path / "model")
    tree: dict[str, Any] = {"init_from": f"hf:{folder}", "train": {"total_steps": 1, "B": 2, "warmup_steps": 0}}
    tree["train"] |= {"base_lr": 0.0, "min_lr": 0.0}
    tree["data"] = {"wiki": "embedded", "roam": "embedded", "primer": "embedded"}
    tree["output"] = {"eval_steps": 1, "sample_tokens": 1}
    train(config_from_dict(tree), tmp_path / "trained", device="cpu")
    found, expected = load_run(tmp_path / "trained").model, open_initial(f"hf:{folder}", "cpu").read()
    assert all(torch.equal(weight, expected[name]) for name, weight in found.state_dict().items())
    assert found.config.dropout == 0.0 and found.config.T == 64


def test_a_model_over_tokens_is_not_trained_on_bytes(tmp_path: Path) -> None:
    made = save(random_model("smollm2", vocab_size=400), tmp_path / "model")
    tree = {"init_from": f"hf:{made}", "data": {"wiki": "embedded", "roam": "embedded", "primer": "embedded"}}
    with pytest.raises(ValueError, match="task=pretrain"):
        train(config_from_dict(tree), tmp_path / "trained", device="cpu")
