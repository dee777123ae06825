"""User-defined sources that are folders: .nielsignore, --exclude and --encoding-errors apply to them too."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from niels_gpt.config import DataConfig, NotesConfig, SourceConfig
from niels_gpt.data.reading.utf8 import utf8_problem_of
from niels_gpt.data.registry import get_source
from niels_gpt.data.user_files import iter_user_files, kind_of, select_user_files, user_file_paths


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


def write_rows(path: Path, *rows: dict[str, str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_rows_in_hidden_and_ignored_files(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.json", ".h/c.jsonl", "secret.jsonl"):
        write_rows(tmp_path / name, {"text": name})
    (tmp_path / ".nielsignore").write_text("secret.jsonl\n", encoding="utf-8")
    assert texts(tmp_path, notes=NotesConfig()) == ["a.jsonl", "b.json"]
    assert texts(tmp_path, notes=NotesConfig(include_hidden=True)) == [".h/c.jsonl", "a.jsonl", "b.json"]
    shuffled = texts(tmp_path, notes=NotesConfig(), shuffle=True)
    assert sorted(shuffled) == ["a.jsonl", "b.json"]
    selected = select_user_files("mine", SourceConfig(str(tmp_path)), NotesConfig())
    assert selected is not None and selected.names() == ["a.jsonl", "b.json"]


def test_the_selected_files_tell_texts_from_chats(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", {"prompt": "hi", "completion": "hello"})
    write_rows(tmp_path / "b.jsonl", {"text": "a text"})
    config = SourceConfig(str(tmp_path))
    assert kind_of("mine", config) == "chat"
    assert kind_of("mine", config, notes=NotesConfig(exclude=("a.jsonl",))) == "text"
    data = DataConfig(sources={"mine": config}, notes=NotesConfig(exclude=("a.jsonl",)))
    assert get_source("mine", data).kind == "text"


def test_rows_that_are_not_utf8(tmp_path: Path) -> None:
    write_rows(tmp_path / "b.jsonl", {"text": "fine"})
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    (tmp_path / "c.json").write_text('[{"text": "wide"}]', encoding="utf-16")
    with gzip.open(tmp_path / "d.jsonl.gz", "wb") as file:
        file.write(b'{"text": "packed \xe9"}\n')
    config = SourceConfig(str(tmp_path))
    with pytest.raises(ValueError, match=r"a\.jsonl"):
        texts(tmp_path, notes=NotesConfig())
    stats: dict[str, int] = {}
    assert texts(tmp_path, notes=NotesConfig(), errors="skip", stats=stats) == ["fine"]
    assert stats == {"not utf-8": 3}
    assert texts(tmp_path, errors="skip", shuffle=True) == ["fine"]
    selected = select_user_files("mine", config, NotesConfig(), errors="skip")
    assert selected is not None and selected.names() == ["b.jsonl"]
    reasons = {entry.path: entry.reason for entry in selected.skipped}
    assert "0xe9 at offset 13" in reasons["a.jsonl"] and "UTF-16" in reasons["c.json"]
    assert reasons.keys() == {"a.jsonl", "c.json", "d.jsonl.gz"}
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(ValueError, match="not utf-8"):
        texts(tmp_path, errors="skip")


def test_a_bad_byte_in_the_first_rows_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    assert texts(tmp_path, errors="replace") == ["caf\ufffd"]


def test_files_beside_the_conversations_of_an_export(tmp_path: Path) -> None:
    write_rows(tmp_path / "conversations.json", {"text": "a conversation"})
    write_rows(tmp_path / "user.json", {"text": "an account"})
    selected = select_user_files("mine", SourceConfig(str(tmp_path)), NotesConfig())
    assert selected is not None and selected.names() == ["conversations.json"]
    assert texts(tmp_path, notes=NotesConfig()) == ["a conversation"]


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_the_offset_of_a_bad_byte_does_not_depend_on_the_chunks(size: int) -> None:
    data = "häuser ☃ ".encode() + b"\xe9 end"
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    assert utf8_problem_of(chunks) == f"not utf-8: byte 0xe9 at offset {data.index(bytes([0xE9]) + b' ')}"
    assert utf8_problem_of([data[: data.index(b" \xe9")]]) is None
    assert "offset 1" in str(utf8_problem_of([b"a", b"\xe2\x98"]))  # ends within a character
