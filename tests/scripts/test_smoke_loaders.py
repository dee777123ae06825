"""The smoke script: its output and its exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from niels_gpt.data.types import ChatMessage, ChatSample, PretrainSample
from scripts import smoke_loaders
from tests.data import write_rows

ROOT = Path(__file__).parents[2]
NAMES = ["fineweb_edu", "wikitext", "gutenberg", "dolly15k", "oasst1", "roam", "primer"]
LONG = "a sentence of some length about nothing at all, " * 5


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("NIELS_GPT_DATA", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "")  # restores them after the test: the script sets them


@pytest.fixture
def data(tmp_path):
    """A folder with the rows of all five datasets, a sub-folder each."""
    folder = tmp_path / "data"
    write_rows(folder / "fineweb-edu" / "train.jsonl", [{"text": f"page {i} {LONG}"} for i in range(5)])
    write_rows(folder / "wikitext" / "train.jsonl", [{"text": ""}, *({"text": f" line {i}\n"} for i in range(5))])
    write_rows(folder / "gutenberg_clean_en_splits" / "train.jsonl", [{"text": f"book {i}"} for i in range(5)])
    write_rows(
        folder / "databricks-dolly-15k" / "train.jsonl",
        [{"instruction": f"ask {i}", "context": "", "response": LONG, "category": "qa"} for i in range(5)],
    )
    messages = [
        {"message_id": f"{i}{key}", "parent_id": parent and f"{i}{parent}", "message_tree_id": f"{i}a", "role": role}
        | {"text": f"{role} {key} of tree {i}", "lang": "en"}
        for i in range(4)
        for key, parent, role in (("a", None, "prompter"), ("b", "a", "assistant"), ("c", "a", "assistant"))
    ]
    write_rows(folder / "oasst1" / "train.jsonl", messages)
    return folder


def run(capsys, *arguments):
    """Return (exit code, the output of each loader, the last lines)."""
    code = smoke_loaders.main([str(argument) for argument in arguments])
    output, errors = capsys.readouterr()
    assert all("dropped" in line for line in errors.splitlines()), errors
    lines = output.splitlines()
    end = len(lines) - lines[::-1].index("")  # after the last empty line
    sections = {}
    for line in filter(None, lines[:end]):
        if line.startswith(" "):
            sections[list(sections)[-1]].append(line.strip())
        else:
            sections[line] = []
    return code, sections, lines[end:]


def test_all_loaders_on_local_data(data, capsys):
    code, sections, last = run(capsys, "--data", data, "--offline")
    assert code == 0
    assert last == [
        "ok      fineweb_edu: 2 samples",
        "ok      wikitext: 2 samples",
        "ok      gutenberg: 2 samples",
        "ok      dolly15k: 2 samples",
        "ok      oasst1: 4 threads",  # of two trees
        "ok      roam: 2 samples",
        "ok      primer: 2 samples",
    ]
    assert list(sections) == NAMES
    for name in ("fineweb_edu", "wikitext", "gutenberg", "roam"):
        assert len(sections[name]) == 2
    assert [line.split("  ")[0] for line in sections["wikitext"]] == ["line 0", "line 1"]
    assert sorted(line[:4] for line in sections["gutenberg"]) == ["book", "book"]


def test_roles_and_the_first_80_characters_of_a_chat(data, capsys):
    _, sections, _ = run(capsys, "--data", data, "oasst1", "dolly15k")
    asked, answered = zip(*(line.split(": ", 1) for line in sections["dolly15k"]), strict=True)
    assert asked == ("user", "assistant") * 2
    assert [text for role, text in zip(asked, answered, strict=True) if role == "assistant"] == [LONG[:80] + "..."] * 2
    threads = [line.split(": ", 1) for line in sections["oasst1"]]
    assert [role for role, _ in threads] == ["user", "assistant"] * 2  # two threads are shown
    tree = threads[0][1][-1]
    wanted = ("prompter a", "assistant b", "prompter a", "assistant c")
    assert [text for _, text in threads] == [f"{who} of tree {tree}" for who in wanted]


def test_selected_loaders_with_data_by_the_environment(data, capsys, monkeypatch):
    monkeypatch.setenv("NIELS_GPT_DATA", str(data))
    code, sections, last = run(capsys, "--offline", "primer", "wikitext")
    assert (code, list(sections)) == (0, ["primer", "wikitext"])
    assert [line.split()[1] for line in last] == ["primer:", "wikitext:"]


def test_another_config_of_a_dataset(tmp_path, capsys):
    for config in ("wikitext-2-raw-v1", "wikitext-103-raw-v1"):
        write_rows(tmp_path / "d" / "wikitext" / config / "train.jsonl", [{"text": f"of {config}"}] * 2)
    for options, config in (
        ([], "wikitext-103-raw-v1"),
        (["--subset", "wikitext=wikitext-2-raw-v1"], "wikitext-2-raw-v1"),
    ):
        code, sections, _ = run(capsys, "--data", tmp_path / "d", *options, "wikitext")
        assert code == 0
        assert all(line.startswith(f"of {config} ") for line in sections["wikitext"])


def test_a_failing_loader_does_not_hide_the_others(data, capsys):
    (data / "databricks-dolly-15k" / "train.jsonl").write_text("not JSON\n", encoding="utf-8")
    write_rows(data / "wikitext" / "train.jsonl", [{"text": " "}])
    code, sections, last = run(capsys, "--data", data, "--offline")
    assert code == 1
    assert list(sections) == NAMES
    states = {line.split()[1].rstrip(":"): line for line in last}
    assert list(states) == NAMES
    assert [name for name, line in states.items() if line.startswith("FAILED")] == ["wikitext", "dolly15k"]
    assert "train.jsonl" in states["dolly15k"]
    assert "no samples" in states["wikitext"]
    assert states["primer"] == "ok      primer: 2 samples"


def test_a_failure_is_one_line_even_if_its_message_is_not(monkeypatch, capsys):
    def broken():
        yield PretrainSample("one", "broken", {})
        raise RuntimeError("first line\n\nsecond line")

    def chats():
        yield ChatSample([ChatMessage("user", "hi\nthere")], "chats", {})

    monkeypatch.setattr(smoke_loaders, "loaders", lambda subset: {"broken": broken, "chats": chats, "other": chats})
    assert smoke_loaders.main([]) == 1
    *_, failed, fine, other = capsys.readouterr().out.splitlines()
    assert failed.startswith("FAILED  broken: RuntimeError: first line")
    assert fine == "ok      chats: 1 samples"
    assert other.startswith("FAILED  other: ") and "chats" in other  # samples of another source


def test_an_unknown_name(capsys):
    with pytest.raises(SystemExit) as caught:
        smoke_loaders.main(["wikitext", "poems"])
    assert caught.value.code not in (0, None)
    errors = capsys.readouterr().err
    assert "poems" in errors and all(name in errors for name in NAMES)


@pytest.mark.parametrize("value", ["wikitext-2-raw-v1", "wiki=wikitext-2-raw-v1"])
def test_an_invalid_subset(data, capsys, value):
    with pytest.raises(SystemExit) as caught:
        smoke_loaders.main(["--data", str(data), "--subset", value, "primer"])
    assert caught.value.code == 2
    assert "--subset" in capsys.readouterr().err


def test_as_a_module(data, tmp_path):
    wanted = {"oasst1": "FAILED", "primer": "ok"}
    (data / "oasst1" / "train.jsonl").unlink()
    command = [sys.executable, "-m", "scripts.smoke_loaders", "--offline", "--data", str(data), *wanted]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == ("FAILED" in wanted.values()), done.stderr
    assert "Traceback" not in done.stderr
    last = [line.split() for line in done.stdout.splitlines()[-len(wanted) :]]
    assert {line[1].rstrip(":"): line[0] for line in last} == wanted
