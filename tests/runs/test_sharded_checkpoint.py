"""Sharded checkpoints as files: read back whole, damaged, or made to harm."""

import json
import os
import pickle
import shutil

import pytest
import torch

from niels_gpt.config import ModelConfig
from niels_gpt.config.yaml_file import to_dict
from niels_gpt.model.gpt import GPT
from niels_gpt.runs import sharded_checkpoint
from niels_gpt.runs.checkpoint import (
    CheckpointError,
    load_checkpoint,
    load_model,
    read_checkpoint,
)
from niels_gpt.system import files
from tests.training import same

CONFIG = ModelConfig(V=11, T=8, C=8, L=2, H=2, dropout=0.0)
EXTRA = {"data": {"roam": "abc"}, "best": {"step": 3, "loss": 0.1 + 0.2}, "config": {}}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process


def trained():
    """A model and its optimiser after one update."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    groups = [{"params": list(model.parameters())[:3]}, {"params": list(model.parameters())[3:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    model.loss(torch.arange(8)[None], torch.arange(8)[None]).backward()
    optimizer.step()
    return model, optimizer


def save(folder, model, optimizer, step=3):
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    tensors = sharded_checkpoint.flat({"model": weights, "optimizer": optimizer.state_dict()})
    folder.mkdir()
    written = sharded_checkpoint.write_shards(folder, tensors, rank=0, group=None)
    head = {
        "step": step,
        "config": to_dict(CONFIG),
        "extra": EXTRA,
        "optimizer": sharded_checkpoint.without_tensors(optimizer.state_dict()),
        "tied": {"model/lm_head.weight": "model/tok_emb.weight"},
    }
    sharded_checkpoint.write_head(folder, head, [written])
    return tensors


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded-quetzal") / "step_00000003"
    model, optimizer = trained()
    save(folder, model, optimizer)
    return folder, model, optimizer


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "copy")


def test_it_reads_as_a_single_file_does(made):
    folder, model, optimizer = made
    payload = read_checkpoint(folder, "cpu")
    assert same(payload["model"], model.state_dict())
    assert payload["model"]["lm_head.weight"] is payload["model"]["tok_emb.weight"]
    assert (payload["step"], payload["config"], payload["extra"]) == (3, to_dict(CONFIG), EXTRA)
    assert same(payload["optimizer"]["state"], optimizer.state_dict()["state"])
    again = torch.optim.AdamW(
        [{"params": list(GPT(CONFIG).parameters())[:3]}, {"params": list(GPT(CONFIG).parameters())[3:]}]
    )
    again.load_state_dict(payload["optimizer"])
    groups = [group["params"] for group in again.state_dict()["param_groups"]]
    assert groups == [group["params"] for group in optimizer.state_dict()["param_groups"]]
    assert [group["weight_decay"] for group in again.param_groups] == [0.01, 0.0]
    config, weights, _, step = load_checkpoint(folder, "cpu")
    assert (config, step) == (payload["config"], 3)
    assert same(weights, payload["model"])
    loaded, step = load_model(folder)
    x = torch.arange(8)[None]
    assert torch.equal(loaded(x), model.eval()(x))


def test_tensors_are_filled_where_they_lie(made):
    folder, model, _ = made
    other, _ = trained()
    with torch.no_grad():
        for weight in other.parameters():
            weight.zero_()
    weights = {name: weight for name, weight in other.state_dict().items() if name != "lm_head.weight"}
    sharded_checkpoint.fill_from_folder(folder, sharded_checkpoint.flat({"model": weights}), group=None)
    assert same(other.state_dict(), model.state_dict())
    with pytest.raises(CheckpointError, match="cannot be read"):
        sharded_checkpoint.fill_from_folder(folder, {"model/tok_emb.weight": torch.zeros(12, 8)}, group=None)
    with pytest.raises(CheckpointError, match="cannot be read"):
        sharded_checkpoint.fill_from_folder(folder, {"model/none": torch.zeros(1)}, group=None)


def test_no_path_is_in_it(made):
    folder, _, _ = made
    names = sorted(path.name for path in folder.iterdir())
    assert names == [".metadata", "__0_0.distcp", "checkpoint.json"]
    for path in folder.iterdir():
        data = path.read_bytes()
        assert b"quetzal" not in data, path
        assert str(folder.parent).encode() not in data


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("harm", ["flipped", "cut off", "gone"])
def test_damage_is_seen(copy, name, harm):
    path = copy / name
    data = bytearray(path.read_bytes())
    if harm == "gone":
        path.unlink()
    else:
        data[len(data) // 2] ^= 8
        path.write_bytes(data if harm == "flipped" else data[:-5])
    with pytest.raises(CheckpointError, match=f"damaged.*{name}"):
        read_checkpoint(copy, "cpu")
    with pytest.raises(CheckpointError, match="damaged"):
        sharded_checkpoint.read_head(copy)


def test_a_head_that_is_no_head(copy):
    head = copy / sharded_checkpoint.HEAD
    for text in ("", "[]", "{", "{}", '{"files": {}}', "[" * 100_000):
        head.write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError, match="damaged"):
            read_checkpoint(copy, "cpu")
    head.unlink()
    with pytest.raises(FileNotFoundError):  # a folder like any other
        read_checkpoint(copy, "cpu")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        sharded_checkpoint.read_head(copy)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda head: head["files"].update({"__0_0.distcp": "text"}), "cannot be read"),
        (lambda head: head["files"].update({"__0_0.distcp": {}}), "cannot be read"),
        (lambda head: head["files"]["__0_0.distcp"].pop("sha256"), "cannot be read"),
        (lambda head: head.update(tied=["model/lm_head.weight"]), "tied"),
        (lambda head: head.update(optimizer=[]), "optimizer"),
        (lambda head: head.update(extra=[]), "extra"),
        (lambda head: head["extra"].update(data=[]), "data"),
        (lambda head: head.update(config="v0"), "config"),
        (lambda head: head.update(step="3"), "step"),
        (lambda head: head.update(step=3.0), "step"),
    ],
)
def test_a_head_of_other_kinds(copy, change, named):
    rewrite(copy, change)
    for read in (sharded_checkpoint.read_head, lambda folder: read_checkpoint(folder, "cpu")):
        with pytest.raises(CheckpointError, match=f"copy is damaged.*{named}"):
            read(copy)


@pytest.mark.parametrize("to", ["model/none", ["model/tok_emb.weight"], 5])
def test_a_weight_that_is_tied_to_none(copy, to):
    rewrite(copy, lambda head: head.update(tied={"model/lm_head.weight": to}))
    with pytest.raises(CheckpointError, match=r"copy is damaged: model/lm_head\.weight is tied to"):
        read_checkpoint(copy, "cpu")


@pytest.mark.parametrize("name", ["optimizer/param_groups/0", "model/tok_emb.weight/x"])
def test_a_weight_in_the_place_of_another(copy, name):
    rewrite(copy, lambda head: head.update(tied={name: "model/tok_emb.weight"}))
    with pytest.raises(CheckpointError, match=f"copy was refused: {name}"):
        read_checkpoint(copy, "cpu")


def rewrite(folder, change):
    """The same files with another head."""
    head = json.loads((folder / sharded_checkpoint.HEAD).read_text(encoding="utf-8"))
    change(head)
    files.write_json(folder / sharded_checkpoint.HEAD, head)


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


@pytest.mark.parametrize("content", [Harm(), {"a": [Harm()]}])
def test_a_list_of_parts_that_would_run_code_is_refused(copy, content, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    self_made(copy, pickle.dumps(content))
    with pytest.raises(CheckpointError, match=r"refused.*holds code or objects"):
        read_checkpoint(copy, "cpu")
    assert not (tmp_path / "harmed").exists()
    # torch's own module knows the name `os`: a path through it must not help.
    through = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.getcwd\x93)R."
    self_made(copy, through)
    with pytest.raises(CheckpointError, match=r"refused.*holds code or objects .*os\.getcwd"):
        read_checkpoint(copy, "cpu")
    self_made(copy, pickle.dumps([1, 2]))
    with pytest.raises(CheckpointError, match=r"refused.*no list of parts"):
        read_checkpoint(copy, "cpu")


def self_made(folder, metadata):
    """Another list of parts, with a head that fits it."""
    (folder / ".metadata").write_bytes(metadata)
    head = json.loads((folder / sharded_checkpoint.HEAD).read_text(encoding="utf-8"))
    head["files"][".metadata"] = {"bytes": len(metadata), "sha256": files.sha256_bytes(metadata)}
    files.write_json(folder / sharded_checkpoint.HEAD, head)


def test_a_folder_that_cannot_be_written(tmp_path):
    model, _ = trained()
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    with pytest.raises(OSError, match="cannot write"):
        sharded_checkpoint.write_shards(
            tmp_path / "taken", sharded_checkpoint.flat({"model": model.state_dict()}), rank=0, group=None
        )
