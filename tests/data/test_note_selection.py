"""Which notes are read, which are skipped and why; compared with git's own ignore rules."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from niels_gpt.config import NotesConfig
from niels_gpt.data.note_selection import (
    EXCLUDED,
    LINK,
    SelectedNotes,
    Skipped,
    is_private,
    links_to_text,
    private_notes_line,
    read_note,
    record_skipped,
    select_notes,
    split_front_matter,
    write_skipped,
)
from niels_gpt.data.reading.utf8 import utf8_problem
from niels_gpt.data.roam import list_roam_paths
from tests.faults import flipped


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return root


def test_hidden_files_and_node_modules_are_skipped_and_counted(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "a.md": "a",
            "sub/b.md": "b",
            ".trash/c.md": "c",
            ".trash/x/d.md": "d",
            ".e.md": "e",
            "node_modules/f.md": "f",
        },
    )
    selected = select_notes(root, NotesConfig())
    assert selected.names() == ["a.md", "sub/b.md"]
    assert selected.skipped == [
        Skipped(".e.md", "hidden", 1),
        Skipped(".trash/", "hidden", 2),
        Skipped("node_modules/", "node_modules", 1),
    ]
    everything = select_notes(root, NotesConfig(include_hidden=True))
    assert everything.paths == list_roam_paths(str(root)) and everything.skipped == []


def test_a_hidden_root_is_read(tmp_path: Path) -> None:
    root = write(tmp_path / ".roam-data", {"a.md": "a"})
    assert select_notes(root, NotesConfig()).names() == ["a.md"]


def test_every_file_is_selected_or_skipped_once(tmp_path: Path) -> None:
    names = ["a.md", "A.MD", "b.txt", "c.pdf", "d", ".h/e.md", "t/Templates/f.md", "empty.md", "bad.md", "p.md"]
    root = write(tmp_path, dict.fromkeys(names, "text"))
    write(root, {"empty.md": " \n", "bad.md": b"\xe9", "p.md": "---\nprivate: true\n---\nx"})
    notes = NotesConfig(skip_templates=True, respect_front_matter=True)
    selected = select_notes(root, notes, errors="skip")
    assert selected.names() == ["a.md"]
    assert sum(entry.files for entry in selected.skipped) + len(selected.paths) == len(names)
    kinds = {entry.path: entry.kind for entry in selected.skipped}
    assert kinds == {
        "A.MD": "not a note",
        "b.txt": "not a note",
        "c.pdf": "not a note",
        "d": "not a note",
        ".h/": "hidden",
        "t/Templates/": "template",
        "empty.md": "empty",
        "bad.md": "not utf-8",
        "p.md": "front matter",
    }


def test_format_text_reads_txt_and_markdown_in_any_case(tmp_path: Path) -> None:
    root = write(tmp_path, dict.fromkeys(["a.md", "b.MD", "c.txt", "d.Markdown", "e.rst"], "text"))
    assert select_notes(root, NotesConfig(formats="text")).names() == ["a.md", "b.MD", "c.txt", "d.Markdown"]


@pytest.mark.parametrize("name", ["template", "Templates", "_templates", "99 - Templates"])
def test_template_folders(tmp_path: Path, name: str) -> None:
    root = write(tmp_path, {f"{name}/a.md": "a", "b.md": "b", "my template ideas/c.md": "c"})
    assert len(select_notes(root, NotesConfig()).paths) == 3
    assert select_notes(root, NotesConfig(skip_templates=True)).names() == ["b.md", "my template ideas/c.md"]


IGNORES = {
    ".nielsignore": "# comment\n*.log.md\n/drafts/\nprivate\n!keep.log.md\n**/old/*.md\n!**/old/good.md\n",
    "sub/.nielsignore": "*.md\n!yes.md\nx/**\n",
    "a.md": "",
    "b.log.md": "",
    "keep.log.md": "",
    "drafts/a.md": "",
    "sub/drafts/yes.md": "",
    "private/keep.log.md": "",
    "sub/private": "",
    "sub/no.md": "",
    "sub/yes.md": "",
    "sub/x/yes.md": "",
    "k/old/bad.md": "",
    "k/old/good.md": "",
    "k/drafts/c.md": "",
}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git as the reference")
def test_ignore_files_do_as_git_does(tmp_path: Path) -> None:
    root = write(tmp_path / "notes", {name: text or "text" for name, text in IGNORES.items()})
    reference = write(
        tmp_path / "git", {name.replace(".nielsignore", ".gitignore"): text for name, text in IGNORES.items()}
    )
    subprocess.run(["git", "init", "-q", str(reference)], check=True)
    command = ["git", "-C", str(reference), "ls-files", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    expected = sorted(name for name in listed if name.endswith(".md"))
    assert select_notes(root, NotesConfig()).names() == expected
    assert 0 < len(expected) < 10


def test_exclude_takes_patterns_and_paths(tmp_path: Path) -> None:
    root = write(tmp_path, dict.fromkeys(["a.md", "drafts/b.md", "x/drafts/c.md", "x/d.md", "y/e.md"], "text"))

    def names(*patterns: str) -> list[str]:
        return select_notes(root, NotesConfig(exclude=patterns)).names()

    assert names("drafts/") == ["a.md", "x/d.md", "y/e.md"]
    assert names("./drafts", "y") == ["a.md", "x/d.md", "x/drafts/c.md"]
    assert names(str(root / "x")) == ["a.md", "drafts/b.md", "y/e.md"]
    assert names("*.md", "!a.md") == ["a.md"]


def test_a_pattern_that_matches_nothing_is_reported(tmp_path: Path) -> None:
    root = write(tmp_path, {"drafts/b.md": "b", "a.md": "a"})
    selected = select_notes(root, NotesConfig(exclude=("drafst/", "drafts/", "draft*")))
    assert selected.unmatched == ("drafst/",)
    assert "drafst/" in selected.summary()


def test_an_invalid_pattern_is_named(tmp_path: Path) -> None:
    root = write(tmp_path, {"a.md": "a", ".nielsignore": "ok\n!\n"})
    with pytest.raises(ValueError, match=r"\.nielsignore.*'!'"):
        select_notes(root, NotesConfig())


def test_links_are_followed_to_files_but_never_into_folders(tmp_path: Path) -> None:
    root = write(tmp_path / "notes", {"a.md": "a", "sub/b.md": "b"})
    write(tmp_path, {"outside.md": "o", "other/c.md": "c"})
    (root / "link.md").symlink_to(tmp_path / "outside.md")
    (root / "loop").symlink_to("loop")
    (root / "up").symlink_to("..")
    (root / "gone.md").symlink_to("nowhere.md")
    os.mkfifo(root / "pipe.md")
    selected = select_notes(root, NotesConfig())
    assert selected.paths == list_roam_paths(str(root))
    assert selected.names() == ["a.md", "link.md", "sub/b.md"]
    assert {entry.path for entry in selected.skipped} == {"loop", "up/", "gone.md", "pipe.md"}


def test_a_linked_note_is_read_once(tmp_path: Path) -> None:
    root = write(tmp_path / "notes", {"a.md": "a", "private/b.md": "b", ".annex/c": "c", "sub/d.md": "d"})
    write(tmp_path, {"outside.md": "o"})
    for name, target in {
        "0.md": "a.md",
        "1.md": "private/b.md",
        "2.md": ".annex/c",  # as git-annex has them
        "3.md": "../outside.md",
        "4.md": "../outside.md",
        "5.md": "0.md",
        "sub/6.md": str(root / "sub/d.md"),
    }.items():
        (root / name).symlink_to(target)
    selected = select_notes(root, NotesConfig(exclude=("private/",)))
    assert selected.names() == ["2.md", "3.md", "a.md", "sub/d.md"]
    reasons = {entry.path: entry.kind for entry in selected.skipped if not entry.path.endswith("/")}
    assert reasons == {"0.md": LINK, "1.md": EXCLUDED, "4.md": LINK, "5.md": LINK, "sub/6.md": LINK}


def test_strict_names_all_files_that_are_not_utf8(tmp_path: Path) -> None:
    bad = {f"bad{i:02}.md": b"ab\xe9" for i in range(25)}
    root = write(tmp_path, {"a.md": "ä", "u.md": "hello".encode("utf-16"), **bad})
    with pytest.raises(ValueError, match="26 files") as caught:
        select_notes(root, NotesConfig())
    message = str(caught.value)
    assert sum(f"bad{i:02}.md" in message for i in range(25)) == 20
    assert "0xe9 at offset 2" in message and "6 more" in message and "--encoding-errors skip" in message
    assert len(select_notes(root, NotesConfig(), errors="replace").paths) == 27
    skipping = select_notes(root, NotesConfig(), errors="skip")
    assert skipping.names() == ["a.md"] and len(skipping.skipped) == 26
    assert any("UTF-16" in entry.reason for entry in skipping.skipped if entry.path == "u.md")


def test_utf16_without_a_mark_is_not_text() -> None:
    assert utf8_problem("Grüße aus Köln".encode("utf-16-le")) is not None
    assert "UTF-16" in str(utf8_problem("plain words".encode("utf-16-be")))
    assert utf8_problem(b"a\0b") is None and utf8_problem(b"") is None
    assert utf8_problem("\ufeffplain words".encode()) is None


def test_missing_folders_and_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        select_notes(tmp_path / "none", NotesConfig())
    write(tmp_path, {"a.md": "a"})
    with pytest.raises(NotADirectoryError):
        select_notes(tmp_path / "a.md", NotesConfig())


def test_nothing_left_says_what_was_skipped(tmp_path: Path) -> None:
    root = write(tmp_path, {".trash/a.md": "a", "b.txt": "b"})
    with pytest.raises(FileNotFoundError, match=r"\.trash.*\.txt"):
        select_notes(root, NotesConfig()).check_found()


@pytest.mark.parametrize(
    ("front", "private"),
    [
        ("publish: false", True),
        ("publish: true", False),
        ("title: x\nprivate: true  # mine", True),
        ('"private": "yes"', True),
        ("Publish: No", True),
        ("private: false", False),
        ("tags:\n  - private: true", False),
        ("publish:", False),
        ("summary: it is private: true", False),
    ],
)
def test_private_front_matter(front: str, private: bool) -> None:
    for newline in ("\n", "\r\n"):
        text = f"---\n{front}\n---\nbody".replace("\n", newline)
        assert (is_private(text) is not None) == private
        assert is_private("\ufeff" + text) == is_private(text)
    assert is_private(f"body\n---\n{front}\n---\n") is None


def test_private_notes_line() -> None:
    said = "say private or publish: false in their front matter, and are read: --respect-front-matter skips them"
    assert private_notes_line(["a", "b", "c", "d"]) == f"4 notes {said} (a, b, c and 1 more)"
    assert private_notes_line(["a\udce9"]).startswith("1 note says")
    private_notes_line(["a\udce9"]).encode()


def test_split_front_matter() -> None:
    assert split_front_matter("---\na: 1\ntags:\n- x\n---\nbody\n") == ("a: 1\ntags:\n- x\n", "body\n")
    assert split_front_matter("---\na: 1\n---")[1] == ""
    for text in (
        "body",
        "---\nnever closed: 1\n",
        "---\nA rule above, and a rule below\n---\nbody",
        "----\na: 1\n---\n",
    ):
        assert split_front_matter(text) == ("", text)


def test_links_to_text() -> None:
    assert links_to_text("[[a]] [[b|c]] ![[d.png]] [[e\\|f]] [[g#h|]]") == "a c d.png f g#h"
    assert links_to_text("`[[a]]` [[b]] ``[[`c]]``") == "`[[a]]` b ``[[`c]]``"
    code = "```\n[[a]]\n~~~\n```\n"
    assert links_to_text(f"[[x]]\n{code}[[y]]\n") == f"x\n{code}y\n"
    assert links_to_text("[[a\nb]] [[]] [x](y)") == "[[a\nb]] [[]] [x](y)"


def test_read_note_applies_the_options(tmp_path: Path) -> None:
    root = write(tmp_path, {"a.md": "---\nt: 1\n---\n\r\nsee [[b|c]] #tag\n"})
    original = (root / "a.md").read_bytes().decode()
    assert read_note(root / "a.md", NotesConfig()) == original
    changed = read_note(root / "a.md", NotesConfig(strip_front_matter=True, links="text"))
    assert changed == "\r\nsee c #tag\n"
    write(root, {"only.md": "---\nt: 1\n---\n"})
    assert select_notes(root, NotesConfig(strip_front_matter=True)).names() == ["a.md"]


def test_skipped_json_is_private_and_complete(tmp_path: Path) -> None:
    root = write(tmp_path / "notes", {"a.md": "a", ".trash/b.md": "b"})
    path = tmp_path / "skipped.json"
    write_skipped(path, {"roam": select_notes(root, NotesConfig())})
    assert path.stat().st_mode & 0o777 == 0o600
    record = json.loads(path.read_text(encoding="utf-8"))["roam"]
    assert record["notes"] == 1
    assert record["skipped"] == [{"path": ".trash/", "reason": "hidden", "files": 1}]


def test_damaged_records_of_skipped_files_are_dropped(tmp_path):
    selected = SelectedNotes(tmp_path, [], [Skipped("a.md", "empty"), Skipped("b.md", "hidden")])
    path = tmp_path / "skipped.json"
    record_skipped(path, {"one": selected})
    record_skipped(path, {"two": selected})
    records = json.loads(path.read_text(encoding="utf-8"))
    assert set(records) == {"one", "two"} and records["one"]["skipped"] == records["two"]["skipped"]
    for damaged in flipped(path.read_bytes()):
        path.write_bytes(damaged)
        record_skipped(path, {"new": selected})
        found = json.loads(path.read_text(encoding="utf-8"))
        for name, record in found.items():
            assert name in ("one", "two", "new") and record["skipped"] == records["one"]["skipped"]
