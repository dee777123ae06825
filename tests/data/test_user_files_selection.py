"""User-defined sources that are folders: .nielsignore, --exclude and --encoding-errors apply to them too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from niels_gpt.config import NotesConfig, SourceConfig
from niels_gpt.data.user_files import iter_user_files, select_user_files, user_file_paths


def texts(folder: Path, **options: object) -> list[str]:
    return [sample.text for sample in iter_user_files("mine", SourceConfig(str(folder)), **options)]  # type: ignore


def test_text_files(tmp_path: Path) -> None:
    for name in ("a.txt", "b.MD", "drafts/c.txt", ".h/d.txt", "secret.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name} [[x|y]]", encoding="utf-8")
    (tmp_path / ".nielsignore").write_text("secret.txt\n", encoding="utf-8")
    assert len(texts(tmp_path)) == 4
    notes = NotesConfig(exclude=("drafts/",), links="text")
    assert texts(tmp_path, notes=notes) == ["a.txt y", "b.MD y"]
    selected = select_user_files("mine", SourceConfig(str(tmp_path)), notes)
    assert selected is not None and selected.names() == ["a.txt", "b.MD"]
    assert {entry.path for entry in selected.skipped} == {"drafts/", ".h/", "secret.txt"}
    assert user_file_paths("mine", SourceConfig(str(tmp_path)), notes) == selected.paths


def test_encodings(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("fine", encoding="utf-8")
    for name in ("x.txt", "y.txt"):
        (tmp_path / name).write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"x\.txt.*y\.txt"):
        texts(tmp_path, notes=NotesConfig())
    stats: dict[str, int] = {}
    assert texts(tmp_path, notes=NotesConfig(), errors="skip", stats=stats) == ["fine"]
    assert stats == {"not utf-8": 2}
    assert texts(tmp_path, errors="skip") == ["fine"]
    assert len(texts(tmp_path, notes=NotesConfig(), errors="replace")) == 3


def test_rows(tmp_path: Path) -> None:
    for name in ("a.jsonl", "old/b.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n", encoding="utf-8")
    assert texts(tmp_path) == ["a.jsonl", "old/b.jsonl"]
    assert texts(tmp_path, notes=NotesConfig(exclude=("old",))) == ["a.jsonl"]
