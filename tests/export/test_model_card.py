"""The model card names the public model that a run began with, and its licence."""

import json

import pytest
import torch

from niels_gpt.config import ModelConfig, RunConfig, TrainConfig
from niels_gpt.export.audit_gate import check
from niels_gpt.export.hugging_face import write_hf
from niels_gpt.export.model_card import model_card
from niels_gpt.memorization.base_model import load_base
from niels_gpt.model.gpt import GPT
from niels_gpt.pretrained.imported_run import import_model
from niels_gpt.pretrained.public_base import PublicBase, public_base
from niels_gpt.runs.checkpoint import save_checkpoint
from niels_gpt.runs.environment import recorded_session
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import load_run
from niels_gpt.system import program
from niels_gpt.tokenizer import ByteTokenizer

CONFIG = ModelConfig(T=16, C=16, L=1, H=2)


def card(run: RunFolder) -> str:
    loaded = load_run(run.path, device="cpu")
    return model_card(loaded, check(loaded), name="mine", architecture="GPTNeoXForCausalLM", usage="")


def tuned(path, init_from: str) -> RunFolder:
    run = RunFolder(path)
    run.path.mkdir()
    save_checkpoint(run.best, GPT(CONFIG), None, 3, CONFIG)
    run.write_config(RunConfig(model=CONFIG, train=TrainConfig(total_steps=3, warmup_steps=0), init_from=init_from))
    return run


@pytest.fixture
def public(tmp_path):
    """A folder in the format of the Hub, with a licence."""
    folder = tmp_path / "Small-1"
    folder.mkdir()
    torch.manual_seed(0)
    write_hf(GPT(CONFIG), ByteTokenizer(), folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n", encoding="utf-8")
    return folder


def test_an_imported_model_and_runs_from_it(public, tmp_path):
    base = import_model(str(public), RunFolder(tmp_path / "base")).run
    first = tuned(tmp_path / "first", str(base.best))
    for run in (base, first, tuned(tmp_path / "second", str(first.best)), tuned(tmp_path / "direct", f"hf:{public}")):
        assert public_base(run) == PublicBase("Small-1", "apache-2.0")
        text = card(run)
        assert "Small-1" in text and "apache-2.0" in text
        assert "base_model" not in text and str(tmp_path) not in text  # a folder is no repository
    assert load_base(load_run(first.path, device="cpu"))[0].name == "Small-1"
    assert "fine-tuned" in card(first) and "fine-tuned" not in card(base)


def test_the_data_of_all_phases(public, tmp_path):
    base = import_model(str(public), RunFolder(tmp_path / "base")).run
    first = tuned(tmp_path / "first", str(base.best))
    second = tuned(tmp_path / "second", str(first.best))
    row = {"share": 1.0, "train": 7, "held_out": 2, "unit": "B", "documents": 3, "licence": "yours", "path": "secret"}
    for run, name in ((first, "my_notes"), (second, "my_chats")):
        data = [{"source": name, **row}]
        with recorded_session(run.path, step=0, processes=1, machine={}, data=data, fingerprint={}):
            pass
    text = card(second)
    assert text.index("my_chats") < text.index("my_notes") < text.index("What the base was trained on")
    assert "secret" not in text and "my_chats" not in card(first)
    assert "the author's own" in text and "yours" not in text


def test_a_repository_is_named_in_the_header(public, tmp_path):
    base = import_model(str(public), RunFolder(tmp_path / "base")).run
    source = json.loads(base.source_path.read_bytes()) | {"name": "somebody/Small-1"}
    base.source_path.write_text(json.dumps(source), encoding="utf-8")
    assert "\nbase_model: somebody/Small-1\n" in card(base).split("---")[1]


def test_a_run_from_nothing_or_from_what_is_gone_has_no_base(tmp_path):
    alone = tuned(tmp_path / "alone", "")
    lost = tuned(tmp_path / "lost", str(tmp_path / "gone" / "checkpoints" / "best.pt"))
    loop = tuned(tmp_path / "loop", str(tmp_path / "loop" / "checkpoints" / "best.pt"))
    for run in (alone, lost, loop):
        assert public_base(run) is None
    assert "Base" not in card(alone)


def test_what_was_typed_is_not_published(tmp_path, monkeypatch):
    """Not even the last parts of paths: they name folders and what is excluded."""
    run = tuned(tmp_path / "run", "")
    words = ["notes", "/home/me/my diary/therapy", "--exclude", "*clinic*", "--base=hf:/home/me/Small-1"]
    words += ["--set=data.sources={mine: {path: /home/me/journal.txt, licence: CC0}}", "--run-dir", "runs/secret"]
    monkeypatch.setattr(program, "_arguments", tuple(words))
    with recorded_session(run.path, step=0, processes=1, machine={}, data=[], fingerprint={}):
        pass
    text = card(run)
    for part in ("/home", "diary", "therapy", "clinic", "Small-1", "journal", "secret", "--exclude"):
        assert part not in text
