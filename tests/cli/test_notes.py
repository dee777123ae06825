"""`niels-gpt notes check`, and that every command reads only the selected notes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from niels_gpt.cli.main import main

SECRET = "deleted long ago"


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "vault"
    files = {f"n{i}.md": f"note {i} " * 60 for i in range(20)}
    files |= {".trash/a.md": SECRET, "drafts/b.md": "a draft " * 9, "mine.md": "---\nprivate: true\n---\nmine"}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def test_check_prints_what_is_read_and_skipped(vault: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (vault / "key.md").write_text("AKIA" + "IOSFODNN7EXAMPL3", encoding="utf-8")
    assert run("notes", "check", vault, "--exclude", "drafts") == 0
    out = capsys.readouterr().out
    assert "22 notes" in out and ".trash" in out and "drafts" in out and "key.md:1" in out
    assert "IOSFODNN7" not in out and SECRET not in out
    assert run("notes", "check", vault, "--json", "--strict") == 3
    assert json.loads(capsys.readouterr().out)["secrets"] == [{"path": "key.md", "line": 1, "kind": "AWS Access Key"}]


def test_training_reads_and_records_only_the_selected_notes(vault: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "model={C: 16, L: 1, H: 2, T: 16}", "--set", "train.B=2", "--set", "train.warmup_steps=0"]
    options += ["--set", "train.p_train={roam: 1}", "--set", "train.p_val={roam: 1}", "--steps", "1"]
    selection = ["--exclude", "drafts/", "--respect-front-matter", "--set", "data.cache_dir=data/cache"]
    assert run("train", "--notes", vault, "--run-dir", "run", *options, *selection, "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert "20 notes" in out and ".trash" in out
    record = json.loads(Path("run/skipped.json").read_text(encoding="utf-8"))["roam"]
    assert {entry["path"]: entry["reason"].partition(" (")[0] for entry in record["skipped"]} == {
        ".trash/": "hidden",
        "drafts/": "excluded by --exclude",
        "mine.md": "front matter",
    }
    assert Path("run/skipped.json").stat().st_mode & 0o777 == 0o600
    streams = b"".join(path.read_bytes() for path in Path("data/cache").rglob("roam_*.bin"))
    assert b"note 7" in streams
    for hidden in (SECRET.encode(), b"a draft", b"mine"):
        assert hidden not in streams


def test_caches_and_data_commands_read_only_the_selected_notes(vault: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("data", "stats", "roam", "--path", vault, "--exclude", "drafts", "--json") == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 21
    assert run("data", "show", "roam", "--path", vault, "-n", "99", "--include-hidden") == 0
    assert SECRET in capsys.readouterr().out
    build = ["cache", "build", "roam", "--path", vault, "--vocab-size", "300", "--json"]
    assert run(*build) == 0
    first = json.loads(capsys.readouterr().out)[0]
    record = json.loads(Path("cache/skipped.json").read_text(encoding="utf-8"))
    assert [entry["path"] for entry in record["roam"]["skipped"]] == [".trash/"]
    assert Path("cache/skipped.json").stat().st_mode & 0o777 == 0o600
    assert run(*build) == 0 and json.loads(capsys.readouterr().out)[0]["state"] == "up to date"
    assert run(*build, "--exclude", "drafts") == 0
    second = json.loads(capsys.readouterr().out)[0]
    assert second["state"] == "built" and second["train_tokens"] != first["train_tokens"]
    assert run(*build, "--exclude", "drafts", "--links", "text") == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "built"


@pytest.mark.parametrize("command", ["train --roam {}", "splice select --roam {}", "data stats roam --path {}"])
def test_all_files_that_are_not_utf8_are_named_at_once(
    vault: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for name in ("x.md", "y.md"):
        (vault / name).write_bytes(b"caf\xe9")
    assert run(*command.format(vault).split()) == 1
    err = capsys.readouterr().err
    assert "x.md" in err and "y.md" in err and "--encoding-errors skip" in err


def test_bad_files_can_be_skipped(vault: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (vault / "x.md").write_bytes(b"caf\xe9")
    assert run("splice", "select", "--notes", vault, "--encoding-errors", "skip", "--set", "model.T=64") == 0
    assert "x.md" in capsys.readouterr().out


def test_options_that_do_not_apply_are_refused(vault: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("data", "show", "primer", "--exclude", "x") == 1
    assert "--exclude" in capsys.readouterr().err
