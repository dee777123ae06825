"""`niels-gpt import hf`: a public model as a run folder on which the other commands work."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from niels_gpt import train
from niels_gpt.cli.main import main
from niels_gpt.config.yaml_file import config_from_dict, to_dict
from niels_gpt.export import run_export
from niels_gpt.pretrained.families import FAMILIES
from niels_gpt.pretrained.imported_run import describe, import_model
from niels_gpt.runs.catalog import config_table
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.info import RunInfo, read_tree
from niels_gpt.runs.loading import find_unfinished_run, load_run
from niels_gpt.tokenizer import ByteTokenizer, ForeignTokenizer
from tests.cli import typed
from tests.pretrained.conftest import add_tokenizer, change_config, random_model, save


def run_command(*arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 0


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
    listed = RunInfo(Path("runs/smol"))
    assert (listed.state, listed.steps, listed.task) == ("imported", None, None)
    detail = RunInfo(Path("runs/smol")).detail
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
    monkeypatch.setattr(run_export, "check_folder_ids", lambda folder, tokenizer: None)  # see test_self_check.py
    run_command("export", "hf", "run", "--out", "out")
    card = Path("out/README.md").read_text(encoding="utf-8")
    assert 'license: "apache-2.0"' in card and "SmolLM" in card and "trained with niels-gpt" not in card
    capsys.readouterr()
    run_command("runs", "show", "run")
    assert "--resume" not in capsys.readouterr().out


def test_an_imported_model_chats_under_the_name_of_its_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    import_model(str(folder), RunFolder(tmp_path / "runs/smol"))
    typed(monkeypatch, "hello\n/exit\n")
    run_command("chat", "runs/smol", "--max-tokens", "2", "--device", "cpu")
    out = capsys.readouterr().out
    assert out.startswith("smol> ") and "niels>" not in out


def test_its_config_has_only_what_is_known(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    run = import_model(str(folder), RunFolder(Path("runs/smol"))).run
    stored = yaml.safe_load(run.config_path.read_text(encoding="utf-8"))
    assert stored == {"model": to_dict(load_run(run.path).model.config)}
    assert run.read_config().model == load_run(run.path).model.config
    run_command("config", "show", "runs/smol")
    run_command("config", "show", "smol", "--json")
    text, _, json_text = capsys.readouterr().out.partition("{")
    assert (yaml.safe_load(text), json.loads("{" + json_text)) == (stored, stored)
    run_command("runs", "show", "runs/smol")
    run_command("report", "runs/smol")
    printed = capsys.readouterr().out
    report = run.path.joinpath("report.md").read_text(encoding="utf-8")
    for shown in (printed, report):
        assert all(fact in shown for fact in ("SmolLM", "llama", "apache-2.0"))
    assert not any(key in report for key in ("p_train", "total_steps", "fineweb", "task:"))


def test_a_comparison_shows_no_training_of_an_imported_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    import_model(str(folder), RunFolder(Path("runs/smol")))
    for name, rate in (("a", 0.01), ("b", 0.02)):
        Path("runs", name).mkdir()
        RunFolder(f"runs/{name}").write_config(config_from_dict({"train": {"base_lr": rate, "total_steps": 10}}))
    runs = {name: RunInfo(Path("runs") / name) for name in ("smol", "a", "b")}
    table = config_table(runs)
    assert table["train.base_lr"] == [None, 0.01, 0.02] and table["model.V"] == [400, 256, 256]
    assert {key.partition(".")[0] for key in config_table({k: runs[k] for k in ("smol", "a")})} == {"model"}
    run_command("report", "smol", "a", "--out", "compared.html")
    report = Path("compared.md").read_text(encoding="utf-8")
    assert "runs/a/config.yaml" in report and "runs/smol/config.yaml" not in report


def test_a_run_imported_by_an_older_version_shows_no_training_either(folder: Path, tmp_path: Path) -> None:
    run = import_model(str(folder), RunFolder(tmp_path / "smol")).run
    run.write_config(
        config_from_dict({"task": "pretrain", "model": yaml.safe_load(run.config_path.read_text())["model"]})
    )
    assert read_tree(run.path).keys() == {"model"}
    assert load_run(run.path).config is None


def test_a_changed_model_is_reported(folder: Path, tmp_path: Path) -> None:
    run = import_model(str(folder), RunFolder(tmp_path / "smol")).run
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.read_config()
    run.config_path.write_text(run.config_path.read_text().replace("T: 64", "T: 32"))
    with pytest.warns(UserWarning, match=r"model\.T was 64, is 32"):
        run.read_config()


def test_a_folder_has_no_revision(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--revision main.*SmolLM.*NAME/MODEL"):
        import_model(str(folder), RunFolder(tmp_path / "run"), revision="main")
    assert not (tmp_path / "run").exists()


def test_a_second_import_names_the_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    run_command("import", "hf", str(folder))
    assert "before" not in capsys.readouterr().out
    run_command("import", "hf", str(folder))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith("runs/smollm")]
    assert len(lines) == 1
    other = save(random_model("tinyllama"), tmp_path / "other")
    assert import_model(str(other), RunFolder("runs/other")).earlier == []


def test_the_help_names_all_families(capsys: Any) -> None:
    run_command("import", "hf", "--help")
    text = capsys.readouterr().out.lower().replace("-", "").replace("\n", " ").replace(" ", "")
    for model_type in FAMILIES:
        assert model_type.replace("_", "") in text, model_type


def test_a_chat_template_that_fails_is_named_at_the_import(folder: Path, tmp_path: Path) -> None:
    for number, template in enumerate(("{{ ''.__class__.__mro__ }}", "{# nothing #}")):
        (folder / "chat_template.jinja").write_text(template)
        lines = describe(import_model(str(folder), RunFolder(tmp_path / str(number))))
        assert any("cannot chat" in line and "template" in line for line in lines)
        assert f"generate {tmp_path / str(number)}" in lines[-1]
    (folder / "chat_template.jinja").unlink()
    lines = describe(import_model(str(folder), RunFolder(tmp_path / "other")))
    assert not any("cannot" in line for line in lines) and f"chat {tmp_path / 'other'}" in lines[-1]
