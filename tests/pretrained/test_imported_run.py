"""`niels-gpt import hf`: a public model as a run folder on which the other commands work, and `init_from: hf:`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from niels_gpt import train
from niels_gpt.cli.main import main
from niels_gpt.config.yaml_file import config_from_dict
from niels_gpt.pretrained.imported_run import describe, import_model, initial_model, open_initial
from niels_gpt.runs.catalog import summarize
from niels_gpt.runs.describe import describe as describe_run
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import find_unfinished_run, load_run
from niels_gpt.tokenizer import ByteTokenizer, ForeignTokenizer
from tests.foreign_tokenizers import byte_level, write_folder
from tests.pretrained.conftest import change_config, random_model, save


def add_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level BPE with ChatML tokens, `vocab_size` ids in all."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    config = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer = byte_level(tokens, vocab_size=vocab_size - len(tokens))
    assert tokenizer.get_vocab_size() == vocab_size
    write_folder(folder, tokenizer, config)


def run_command(*arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small SmolLM2 with a tokenizer of fewer ids than its embedding has rows."""
    made = save(random_model("smollm2", vocab_size=400), tmp_path / "SmolLM")
    add_tokenizer(made, 340)
    return made


def test_an_imported_model_is_a_run(folder: Path, tmp_path: Path) -> None:
    imported = import_model(str(folder), RunFolder(tmp_path / "run"))
    loaded = load_run(tmp_path / "run")
    assert (loaded.step, imported.config.T, loaded.model.config.V) == (0, 64, 400)
    assert isinstance(loaded.tokenizer, ForeignTokenizer)
    assert loaded.tokenizer.decode(loaded.encode("Grüße, 世界")) == "Grüße, 世界"
    ids = torch.randint(300, (1, 20))
    theirs = random_model("smollm2", vocab_size=400)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids), theirs(ids).logits, atol=1e-4, rtol=0)
    assert loaded.model.lm_head.weight is loaded.model.tok_emb.weight
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "run" / "tokenizer" / name).read_bytes() == (folder / name).read_bytes()


def test_weights_keep_their_type_on_disk_and_are_float32_in_memory(folder: Path, tmp_path: Path) -> None:
    save(random_model("smollm2", vocab_size=400).bfloat16(), folder)
    run = import_model(str(folder), RunFolder(tmp_path / "run")).run
    stored = torch.load(run.best, weights_only=True)["model"]
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    weights = load_run(run.path).model.state_dict()
    assert all(torch.equal(weights[name], stored[name].float()) for name in stored)


def test_the_source_is_recorded_without_a_path(folder: Path, tmp_path: Path) -> None:
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\n")
    run = import_model(str(folder), RunFolder(tmp_path / "run")).run
    source = json.loads(run.source_path.read_text())
    assert (source["name"], source["model_type"], source["licence"]) == ("SmolLM", "llama", "apache-2.0")
    assert str(tmp_path) not in run.source_path.read_text()


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


def test_an_imported_model_is_not_resumed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = import_model(str(folder), RunFolder(tmp_path / "runs" / "smol")).run
    with pytest.raises(ValueError, match="init_from"):
        train(run.read_config(), run, device="cpu", resume=True)
    with pytest.raises(ValueError, match="no run"):
        find_unfinished_run()


def test_the_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    run_command("import", "hf", str(folder), "--context", "32")
    assert "runs/smollm" in capsys.readouterr().out
    assert load_run(tmp_path / "runs" / "smollm").model.config.T == 32
    run_command("generate", "runs/smollm", "the cat", "--max-tokens", "5", "--temperature", "0")
    assert len(capsys.readouterr().out) > 1


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["eval", "run"], "--cache-dir"),
        (["memorize", "run"], "--text"),
        (["audit", "run"], "--notes"),
        (["trace", "the cat sat on the mat, and then it slept", "run"], ""),
        (["batch", "show", "run", "--step", "0"], ""),
    ],
)
def test_what_needs_data_says_that_there_is_none(
    words: list[str], remedy: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    import_model(str(folder), RunFolder(Path("run")))
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert "run is an imported model, which has no data" in error and remedy in error


def test_how_it_is_listed_and_reported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    import_model(str(folder), RunFolder(Path("runs/smol")))
    listed = summarize(Path("runs/smol"))
    assert (listed.state, listed.steps, listed.task) == ("imported", None, None)
    detail = describe_run(Path("runs/smol"))
    assert detail["data"] == [] and {key.partition(".")[0] for key in detail["differences"]} == {"model"}
    run_command("runs", "list")
    run_command("runs", "show", "runs/smol")
    printed = capsys.readouterr().out
    assert printed.count("imported") == 2 and "fineweb" not in printed and "eval" not in printed
    run_command("report", "runs/smol")
    report = Path("runs/smol/report.md").read_text(encoding="utf-8")
    assert "imported" in report and "niels-gpt train" not in report and "No step" not in report
    import_model(str(folder), RunFolder(Path("runs/other")))
    run_command("report", "smol", "other")


@pytest.mark.parametrize("name", ["", "hf:", "hf: "])
def test_an_empty_name_is_not_the_working_directory(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as caught:
        main(["import", "hf", name])
    assert caught.value.code == 1
    assert "NAME/MODEL" in capsys.readouterr().err
    with pytest.raises(ValueError, match="NAME/MODEL"):
        import_model(name, RunFolder(tmp_path / "run"))
    if name:
        with pytest.raises(ValueError, match=r"init_from.*hf:.*NAME/MODEL"):
            config_from_dict({"init_from": name})
    assert sorted(folder.rglob("*")) == before


def test_a_tokenizer_that_does_not_fit(folder: Path, tmp_path: Path) -> None:
    add_tokenizer(folder, 420)
    with pytest.raises(ValueError, match=r"420 ids.*400"):
        import_model(str(folder), RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("context", "given"), [(65, "learned"), (100, "rope"), (0, "rope")])
def test_a_context_that_the_model_does_not_have(context: int, given: str, tmp_path: Path) -> None:
    folder = save(random_model("gpt2" if given == "learned" else "smollm2"), tmp_path / "model")
    with pytest.raises(ValueError, match=f"--context {context}"):
        import_model(str(folder), RunFolder(tmp_path / "run"), context=context)


def test_a_byte_model_that_was_exported_is_a_byte_model(tmp_path: Path) -> None:
    from niels_gpt.export.tokenizer_json import to_tokenizer_json

    folder = save(random_model("smollm2", vocab_size=256), tmp_path / "model")
    (folder / "tokenizer.json").write_text(to_tokenizer_json(ByteTokenizer()), encoding="utf-8")
    imported = import_model(str(folder), RunFolder(tmp_path / "run"))
    assert isinstance(imported.tokenizer, ByteTokenizer)
    assert "--tokenizer" not in "".join(describe(imported))
    assert isinstance(load_run(tmp_path / "run").tokenizer, ByteTokenizer)


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    folder = save(random_model("smollm2"), tmp_path / "model")
    imported = import_model(str(folder), RunFolder(tmp_path / "run"))
    assert imported.tokenizer is None
    assert "--tokenizer" in "".join(describe(imported))
    with pytest.raises(ValueError, match="--tokenizer"):
        load_run(tmp_path / "run")


def test_a_long_context_is_limited(tmp_path: Path) -> None:
    folder = save(random_model("llama3"), tmp_path / "model")
    change_config(folder, max_position_embeddings=131072)
    imported = import_model(str(folder), RunFolder(tmp_path / "run"))
    assert (imported.config.T, imported.context, imported.tokenizer) == (8192, 131072, None)


def test_a_full_disk_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        import_model(str(folder), RunFolder(tmp_path / "run"))
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    import_model(str(folder), RunFolder(tmp_path / "run"))
    with pytest.raises(ValueError, match="already holds a run"):
        import_model(str(folder), RunFolder(tmp_path / "run"))


def test_a_folder_with_other_files_is_left_alone(folder: Path, tmp_path: Path) -> None:
    """Not even the model's own folder becomes a run."""
    other = tmp_path / "other" / "samples"
    other.mkdir(parents=True)
    for target in (folder, other.parent):
        before = sorted(target.rglob("*"))
        with pytest.raises(ValueError, match="not empty"):
            import_model(str(folder), RunFolder(target))
        assert sorted(target.rglob("*")) == before


def test_the_export_names_the_source_and_its_licence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    import_model(str(folder), RunFolder(Path("run")))
    run_command("export", "hf", "run", "--out", "out")
    card = Path("out/README.md").read_text(encoding="utf-8")
    assert 'license: "apache-2.0"' in card and "SmolLM" in card and "trained with niels-gpt" not in card
    capsys.readouterr()
    run_command("runs", "show", "run")
    assert "--resume" not in capsys.readouterr().out
