"""The paths of wiki, roam and primer, and their names in tables."""

from pathlib import Path

import pytest

from niels_gpt.data import embedded
from niels_gpt.data.source_paths import display_name, primer_path, resolve_source_path, roam_path


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_auto_is_embedded_unless_the_default_path_exists(empty_working_directory):
    assert [resolve_source_path(source) for source in ("wiki", "roam", "primer")] == ["embedded"] * 3
    assert (roam_path(), primer_path()) == (embedded.NOTES, embedded.PRIMER)
    Path(".roam-data").mkdir()
    Path("data").mkdir()
    Path("data/primer.txt").write_text("user: hi\nassistant: hello\n", encoding="utf-8")
    assert [resolve_source_path(source) for source in ("wiki", "roam", "primer")] == [
        "embedded",
        ".roam-data",
        "data/primer.txt",
    ]
    assert (roam_path(), primer_path()) == (Path(".roam-data"), Path("data/primer.txt"))
    assert resolve_source_path("roam", "embedded") == "embedded"


def test_a_named_path_is_kept_and_its_home_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    for source in ("wiki", "roam", "primer"):
        assert resolve_source_path(source, "~/text") == "/home/someone/text"
        assert resolve_source_path(source, "my/text") == "my/text"
    assert resolve_source_path("wiki", "hub") == "hub"
    assert roam_path("notes") == Path("notes") and primer_path("p.txt") == Path("p.txt")


def test_display_name():
    for source, path in (("wiki", "embedded"), ("wiki", "auto"), ("val_wiki", "embedded")):
        assert display_name(source, path) == f"{source} (Python docstrings)"
    for source, path in (("wiki", "hub"), ("val_wiki", "folder"), ("roam", "embedded"), ("wikitext", "embedded")):
        assert display_name(source, path) == source
