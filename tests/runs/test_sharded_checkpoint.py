"""Sharded checkpoints as files: intact, damaged, or hostile."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from niels_gpt.config import ModelConfig
from niels_gpt.config.yaml_file import to_dict
from niels_gpt.model.gpt import GPT
from niels_gpt.runs import sharded_checkpoint
from niels_gpt.runs.checkpoint import CheckpointError, load_checkpoint, load_model, read_checkpoint
from niels_gpt.system import files
from niels_gpt.system.checked_json import read_checked_json, write_checked_json
from tests.faults import flipped
from tests.training import same

CONFIG = ModelConfig(V=11, T=8, C=8, L=2, H=2, dropout=0.0)
EXTRA = {"data": {"roam": "abc"}, "best": {"step": 3, "loss": 0.1 + 0.2}, "config": {}}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process


def trained():
    """A model and its optimizer after one step."""
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


def test_it_reads_like_a_single_file(made):
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


def test_tensors_are_filled_in_place(made):
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


def test_it_holds_no_path(made):
    folder, _, _ = made
    names = sorted(path.name for path in folder.iterdir())
    assert names == [".metadata", "__0_0.distcp", "checkpoint.json"]
    for path in folder.iterdir():
        data = path.read_bytes()
        assert b"quetzal" not in data, path
        assert str(folder.parent).encode() not in data


@pytest.mark.parametrize(
    ("name", "harm"),
    [(".metadata", "flipped"), ("__0_0.distcp", "flipped"), ("__0_0.distcp", "cut"), (".metadata", "gone")],
)
def test_damage_is_detected(copy, name, harm):
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


def test_an_invalid_checkpoint_json(copy):
    head = copy / sharded_checkpoint.HEAD
    for text in ("", "[]", "{", "{}", '{"files": {}}', "[" * 100_000):
        head.write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError, match="damaged"):
            read_checkpoint(copy, "cpu")
    head.unlink()
    with pytest.raises(FileNotFoundError):  # an ordinary folder
        read_checkpoint(copy, "cpu")
    with pytest.raises(CheckpointError, match=r"copy.*checkpoint\.json"):
        sharded_checkpoint.read_head(copy)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda head: head["files"].update({"__0_0.distcp": "text"}), "cannot be read"),
        (lambda head: head["files"]["__0_0.distcp"].pop("sha256"), "cannot be read"),
        (lambda head: head.update(tied=["model/lm_head.weight"]), "tied"),
        (lambda head: head.update(optimizer=[]), "optimizer"),
        (lambda head: head.update(extra=[]), "extra"),
        (lambda head: head["extra"].update(data=[]), "data"),
        (lambda head: head.update(config="v0"), "config"),
        (lambda head: head.update(step="3"), "step"),
    ],
)
def test_entries_of_the_wrong_type(copy, change, named):
    rewrite(copy, change)
    for read in (sharded_checkpoint.read_head, lambda folder: read_checkpoint(folder, "cpu")):
        with pytest.raises(CheckpointError, match=f"copy is damaged.*{named}"):
            read(copy)


@pytest.mark.parametrize("to", ["model/none", ["model/tok_emb.weight"], 5])
def test_a_weight_tied_to_a_missing_one(copy, to):
    rewrite(copy, lambda head: head.update(tied={"model/lm_head.weight": to}))
    with pytest.raises(CheckpointError, match=r"copy is damaged: model/lm_head\.weight is tied to"):
        read_checkpoint(copy, "cpu")


@pytest.mark.parametrize("name", ["optimizer/param_groups/0", "model/tok_emb.weight/x"])
def test_a_path_through_a_weight(copy, name):
    rewrite(copy, lambda head: head.update(tied={name: "model/tok_emb.weight"}))
    with pytest.raises(CheckpointError, match=rf"copy .*{name}"):
        read_checkpoint(copy, "cpu")


def rewrite(folder, change):
    """Change checkpoint.json."""
    head = read_checked_json(folder / sharded_checkpoint.HEAD)
    change(head)
    write_checked_json(folder / sharded_checkpoint.HEAD, head)


@pytest.mark.parametrize("name", [sharded_checkpoint.HEAD, ".metadata", "__0_0.distcp"])
def test_no_flipped_bit_is_read_in_silence(made, copy, name):
    intact = read_checkpoint(made[0], "cpu")
    for damaged in flipped((copy / name).read_bytes()):
        (copy / name).write_bytes(damaged)
        try:
            found = read_checkpoint(copy, "cpu")
        except CheckpointError as err:
            assert "\n" not in str(err)
        else:
            assert name == sharded_checkpoint.HEAD  # in the key of the checksum: nothing else may differ
            assert same(found, intact)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..", "sub/x", "."])
def test_names_outside_the_folder_are_rejected(copy, name):
    (copy.parent / "secret").write_bytes(b"secret")
    rewrite(copy, lambda head: head["files"].update({name: {"bytes": 6, "sha256": files.sha256_bytes(b"secret")}}))
    with pytest.raises(CheckpointError, match=r"copy is damaged: .*not the name of a file in the folder"):
        read_checkpoint(copy, "cpu")


def test_links_are_rejected(copy):
    (copy / "__0_0.distcp").rename(copy.parent / "outside")
    (copy / "__0_0.distcp").symlink_to("../outside")
    with pytest.raises(CheckpointError, match=r"copy was rejected: __0_0\.distcp is a link"):
        read_checkpoint(copy, "cpu")


def test_an_index_cannot_refer_to_other_files(copy, tmp_path):
    shutil.copy(copy / "__0_0.distcp", tmp_path / "outside")
    index = pickle.loads((copy / ".metadata").read_bytes())
    for place in index.storage_data.values():
        place.relative_path = "../outside"
    replace_index(copy, pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"copy was rejected: \.metadata refers to '\.\./outside'"):
        read_checkpoint(copy, "cpu")
    with pytest.raises(CheckpointError, match=r"copy cannot be read: .*\.metadata refers to"):
        sharded_checkpoint.fill_from_folder(copy, {"model/tok_emb.weight": torch.zeros(11, 8)}, group=None)


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


@pytest.mark.parametrize("content", [Harm(), {"a": [Harm()]}])
def test_an_index_that_would_run_code_is_rejected(copy, content, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    replace_index(copy, pickle.dumps(content))
    with pytest.raises(CheckpointError, match=r"copy .*\.metadata .*mkdir"):
        read_checkpoint(copy, "cpu")
    assert not (tmp_path / "harmed").exists()
    # torch's metadata module imports `os`: an attribute path through it must not help.
    through = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.getcwd\x93)R."
    replace_index(copy, through)
    with pytest.raises(CheckpointError, match=r"copy .*\.metadata .*os\.getcwd"):
        read_checkpoint(copy, "cpu")
    replace_index(copy, pickle.dumps([1, 2]))
    with pytest.raises(CheckpointError, match=r"copy .*\.metadata .*not an index"):
        read_checkpoint(copy, "cpu")


def replace_index(folder, metadata):
    """Write another index, with a checkpoint.json that matches it."""
    (folder / ".metadata").write_bytes(metadata)
    entry = {"bytes": len(metadata), "sha256": files.sha256_bytes(metadata)}
    rewrite(folder, lambda head: head["files"].update({".metadata": entry}))


def test_an_index_that_cannot_be_opened(copy, monkeypatch, caplog):
    """torch would log two tracebacks."""
    read_bytes = Path.read_bytes

    def refuse(path):
        if path.name == ".metadata":
            raise PermissionError(13, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CheckpointError, match=r"copy .*\.metadata"):
        read_checkpoint(copy, "cpu")
    with pytest.raises(CheckpointError, match=r"copy .*\.metadata"):
        sharded_checkpoint.fill_from_folder(copy, {}, group=None)
    assert not caplog.records


def test_an_unwritable_folder(tmp_path):
    model, _ = trained()
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    with pytest.raises(OSError, match=r"taken"):
        sharded_checkpoint.write_shards(
            tmp_path / "taken", sharded_checkpoint.flat({"model": model.state_dict()}), rank=0, group=None
        )
