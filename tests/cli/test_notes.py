"""`niels-gpt notes FOLDER` and `notes check`, and that every command reads only the selected notes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from bench import figures
from niels_gpt.cache.formats import list_shards
from niels_gpt.cli.main import main
from niels_gpt.config.yaml_file import load_config
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.workflow import plan, report_size
from tests.training import sentence, write_texts

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
    secret = {"path": "key.md", "line": 1, "kind": "AWS Access Key", "start": 0, "end": 20}
    assert json.loads(capsys.readouterr().out)["secrets"] == [secret]


def test_check_reports_a_note_that_is_most_of_the_text(vault: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (vault / "all chats.md").write_text("the same words " * 6000, encoding="utf-8")
    assert run("notes", "check", vault) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "--exclude" in line]
    assert "all chats.md is 91% of all text" in line and "--exclude 'all chats.md'" in line
    assert run("notes", "check", vault, "--exclude", "all chats.md", "--json") == 0
    assert json.loads(capsys.readouterr().out)["dominant"] == ""


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("notes.zip", r"unzip \S*/notes.zip -d NOTES.*train --primer \S*/notes.zip"),
        ("notes.tar.gz", r"tar -xf \S*/notes.tar.gz -C NOTES"),
        ("rows.jsonl", r"train --source NAME=\S*/rows.jsonl"),
    ],
)
def test_a_file_instead_of_a_folder_names_what_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, remedy: str
) -> None:
    (tmp_path / name).write_bytes(b"x")
    for command in (["notes"], ["notes", "check"]):
        assert run(*command, tmp_path / name) == 1
        assert re.search(remedy, capsys.readouterr().err)


def test_check_reports_private_notes_and_rare_scripts(vault: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (vault / "n0.md").write_text("ᐅ Ж º " + "letters " * 100, encoding="utf-8")
    (vault / "also.md").write_text("---\npublish: false\n---\nmine", encoding="utf-8")
    assert run("notes", "check", vault) == 0
    out = capsys.readouterr().out
    line = (
        "2 notes say private or publish: false in their front matter, and are read: --respect-front-matter skips them"
    )
    assert f"{line} (also.md, mine.md)\n" in out
    assert "scripts: Latin 100%, others under 1%\n" in out
    assert run("notes", "check", vault, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["private_notes"] == ["also.md", "mine.md"]
    assert set(found["scripts"]) == {"Latin", "Cyrillic", "Canadian Aboriginal"}
    assert run("notes", "check", vault, "--respect-front-matter") == 0
    assert "and are read" not in capsys.readouterr().out


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
    assert (
        run("research", "splice", "select", "--notes", vault, "--encoding-errors", "skip", "--set", "model.T=64") == 0
    )
    assert "x.md" in capsys.readouterr().out


def test_options_that_do_not_apply_are_refused(vault: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("data", "show", "primer", "--exclude", "x") == 1
    assert "--exclude" in capsys.readouterr().err


# --- notes FOLDER ------------------------------------------------------------------------------------

NUMBER = 24
"""Notes of the vault that a model is trained on."""
PARTS = [
    "Bits per byte on notes that it has never seen",
    "A text that begins like one of your notes",
    "Questions about your notes, not asked like this in training, ",
    "What it knows by heart (a quick audit of ",
    "Try next:",
]


@pytest.fixture
def small_plans(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Plans of small models, and reports, that do not depend on the speed of the machine."""
    monkeypatch.setattr(plan, "measure_steps", lambda *_: plan.StepTimes(0.01, 0.01))
    monkeypatch.setattr(report_size, "median", lambda speeds: 20_000.0)
    monkeypatch.setattr(plan, "SIZES", (plan.Size(16, 1, 2, 64),))
    monkeypatch.setattr(plan, "VOCABULARY", 700)
    monkeypatch.setattr(plan, "SFT_STEPS", 20)
    monkeypatch.setattr(plan, "EPOCHS", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def primer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "texts") / "primer.txt"


@pytest.fixture
def nasty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A vault of 24 notes with everything that people have in theirs; their names have quotes and spaces."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "my vault"
    suffixes = [".md", ".MD", ".txt", ".markdown"]
    files: dict[str, bytes] = {}
    for i in range(NUMBER):
        head = f"---\ntags: [t{i}]\n---\n" if i % 3 == 0 else ""
        text = f"{head}# Topic mark{i:02d}\n\nthe mark{i:02d} is [[Topic mark00|a link]] #tag. {sentence(i, 70)}.\n"
        files[f"sub folder/it's {i:02d}{suffixes[i % 4]}"] = (text + "\n```python\nx = 1\n```\n").encode()
    files |= {f"empty {i}.md": b"" for i in range(5)}
    files |= {".trash/gone.md": SECRET.encode(), ".obsidian/x.md": SECRET.encode(), "node_modules/y.md": b"module " * 9}
    files["sub folder/it's 05.MD"] = b"---\nprivate: true\n---\n" + files["sub folder/it's 05.MD"]
    files |= {"latin.md": b"caf\xe9 " * 50, "photo.png": b"\x89PNG\0\0", "key.md": b"AKIA" + b"IOSFODNN7EXAMPL3"}
    files |= {".nielsignore": b"ignored/\n", "ignored/z.md": b"an ignored note " * 9}
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "loop").symlink_to(root)
    return root


def headings(cache: Path, split: str) -> set[str]:
    """The names in the headings of the notes of a token cache."""
    tokens = np.concatenate([np.fromfile(path, "<u2") for path in list_shards(cache / "pretrain/roam" / split)])
    text = load_tokenizer(cache / "tokenizer/spm.model").decode(tokens.tolist())
    return set(re.findall(r"# Topic (mark\d\d)", text))


@pytest.mark.usefixtures("small_plans")
def test_a_model_of_a_vault(nasty: Path, primer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in nasty.rglob("*")}
    assert run("notes", nasty, "--minutes", "0.2", "--primer", primer, "--device", "cpu") == 0
    out = capsys.readouterr().out
    places = [out.find(part) for part in PARTS]
    assert places == sorted(places) and -1 not in places, out
    assert re.search(r"^val_roam .* 8\.000 *$", out, re.MULTILINE)

    # What is read and what is not.
    assert f"{nasty}: {NUMBER + 1} notes; skipped " in out
    assert re.search(r"warning: .*--respect-front-matter.*it's 05\.MD", out)
    assert "warning: the notes hold 1 secret" in out and "IOSFODNN7" not in out
    assert re.search(r"not utf-8: latin\.md \(--encoding-errors", out)
    assert "700 subwords" in out
    (about,), (notes,) = re.findall(r"(\d+) about notes", out), re.findall(r"(\d+) notes to train on", out)
    assert f"It was taught {int(about) // 32} topics of {notes} notes" in out and "the base" not in out
    assert [bool(pattern.search(out)) for pattern in figures.PRINTED] == [True] * 3

    # Nothing but the run is written.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my vault", "runs"]
    assert {path: path.stat().st_mtime_ns for path in nasty.rglob("*")} == before
    folder = tmp_path / "runs/notes"
    for phase in ("pretrain", "sft"):
        assert (folder / phase / "checkpoints/best.pt").exists()
        assert load_config(folder / f"{phase}.yaml").data.roam == str(nasty)

    # Held-out notes are in nothing that is trained on.
    train, held_out = headings(folder / "cache", "train"), headings(folder / "cache", "val")
    assert held_out and not train & held_out
    assert train | held_out == {f"mark{i:02d}" for i in range(NUMBER)}
    about = (folder / "cache/about_notes.jsonl").read_text(encoding="utf-8")
    asked = set(re.findall(r"the (mark\d\d) is", about))
    assert asked <= train and len(asked) >= 7  # 20 steps of 48 rows, half of them about notes, 60 for each topic
    assert "IOSFODNN7" not in about  # no secret is taught
    assert SECRET not in about and "ignored note" not in about
    assert (folder / "cache/about_notes.jsonl").stat().st_mode & 0o777 == 0o600

    # The next commands work as they are printed.
    commands = [shlex.split(line)[1:] for line in out.splitlines()[-3:]]
    assert [command[0] for command in commands] == ["chat", "generate", "audit"]
    assert commands[0][1:] == ["runs/notes"] and commands[2][1:] == ["runs/notes", "--notes", str(nasty)]
    assert run(*commands[1], "--max-tokens", "3", "--device", "cpu") == 0
    assert capsys.readouterr().out.startswith(commands[1][2])

    # The audit also asks what the model was taught to say about the notes.
    assert run(*commands[2], "--json", "--device", "cpu") in (3, 4)
    audited = [
        row for row in json.loads(capsys.readouterr().out)["documents"] if row["name"].startswith("about_notes: ")
    ]
    assert len(audited) == len(about.splitlines())
    # A held-out question is no control: its answer was trained on with other questions.
    assert {row["status"] for row in audited} == {"trained on"}
    questions = {json.loads(line)["messages"][-2]["content"] for line in about.splitlines()}
    for row in audited:  # named by the question
        (shown,) = re.findall(r"^about_notes: conversation \d+ \((.+?)…?\)$", row["name"])
        assert any(question.startswith(shown) for question in questions), shown

    # The chat model predicts notes badly: `eval` names the one that does not.
    for name, named in (("runs/notes", True), ("runs/notes/sft", True), ("runs/notes/pretrain", False)):
        assert run("eval", name, "--limit", "99", "--device", "cpu") == 0
        assert ("eval runs/notes/pretrain" in capsys.readouterr().out) is named

    assert run("notes", nasty, "--run-dir", "runs/notes") == 1
    error = capsys.readouterr().err
    assert "runs/notes already holds a model" in error and "--resume" in error
    assert run("notes", nasty, "--resume") == 1
    assert "--run-dir" in capsys.readouterr().err


@pytest.mark.usefixtures("small_plans")
@pytest.mark.parametrize("done", ["nothing", "pretraining", "everything"])
def test_a_resumed_model_ends_with_the_same_report(
    nasty: Path, primer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], done: str
) -> None:
    options = ["--minutes", "0.2", "--primer", primer, "--device", "cpu", "--run-dir", "run"]
    if done != "nothing":
        assert run("notes", nasty, *options) == 0
        first = capsys.readouterr().out
        weights = (tmp_path / "run/sft/checkpoints/best.pt").read_bytes()
    if done == "pretraining":
        shutil.rmtree(tmp_path / "run/sft")
    assert run("notes", nasty, *options, "--resume") == 0
    out = capsys.readouterr().out
    places = [out.find(part) for part in PARTS]
    assert places == sorted(places) and -1 not in places, out
    assert ("plan: " in out) is (done == "nothing") is ("no training has begun in run" in out)
    if done != "nothing":
        assert (tmp_path / "run/sft/checkpoints/best.pt").read_bytes() == weights
        begin = "Bits per byte"
        assert out[out.index(begin) : out.index("Done in")] == first[first.index(begin) : first.index("Done in")]


@pytest.mark.usefixtures("small_plans")
def test_a_base_is_fine_tuned(nasty: Path, primer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--minutes", "0.2", "--primer", primer, "--device", "cpu"]
    assert run("notes", nasty, *options, "--run-dir", "base") == 0
    base = tmp_path / "base/sft/checkpoints/best.pt"
    tokenizer = (tmp_path / "base/sft/tokenizer.model").read_bytes()
    capsys.readouterr()
    assert run("notes", nasty, *options, "--run-dir", "tuned", "--base", "base", "--lora-rank", "2") == 0
    out = capsys.readouterr().out
    places = [out.find(part) for part in PARTS]
    assert places == sorted(places) and -1 not in places, out
    assert "LoRA of rank 2" in out and "fine-tune base," in out  # as the user named it
    row = r"^(held-out notes|docstrings of Python) +([\d,]+) +(\d\.\d{3}) +(\d\.\d{3}) +(\d\.\d{3}) *$"
    compared = {found[0]: found[1:] for found in re.findall(row, out, re.MULTILINE)}
    assert set(compared) == {"held-out notes", "docstrings of Python"}
    scored = re.search(r"^val_roam +[\d,]+ +([\d,]+) +\S+ +\S+ +(\d\.\d{3})", out, re.MULTILINE)
    assert scored is not None  # the same tokens, and the same figure for the same model
    assert (compared["held-out notes"][0], compared["held-out notes"][2]) == scored.groups()
    configs = {phase: load_config(tmp_path / f"tuned/{phase}.yaml") for phase in ("pretrain", "sft")}
    assert configs["pretrain"].init_from == str(base)
    assert [config.train.lora.rank for config in configs.values()] == [2, 2]
    assert (tmp_path / "tuned/sft/tokenizer.model").read_bytes() == tokenizer
    assert run("notes", nasty, *options, "--run-dir", "tuned", "--resume") == 0
    again = capsys.readouterr().out
    begin = "Bits per byte"
    assert again[again.index(begin) : again.index("Done in")] == out[out.index(begin) : out.index("Done in")]
    # The base of the chat model is the model that was named, not the first phase.
    run("audit", "tuned", "--json", "--device", "cpu")
    assert json.loads(capsys.readouterr().out)["base"] == str(base)
    assert run("notes", nasty, *options, "--run-dir", "new", "--lora-rank", "2") == 1
    assert "--base" in capsys.readouterr().err


@pytest.mark.parametrize("base", ["gone", "hf:gone", "hf:empty", "empty", "hf:other"])
def test_a_bad_base_is_found_before_the_notes_are_read(
    vault: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], base: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("empty").mkdir()
    Path("other").mkdir()
    Path("other/config.json").write_text('{"model_type": "mamba", "architectures": ["Mamba"]}', encoding="utf-8")

    def read(*_: object, **__: object) -> None:
        raise AssertionError("the notes are read")

    monkeypatch.setattr("niels_gpt.workflow.chat_model.read_corpus", read)
    assert run("notes", vault, "--base", base, "--device", "cpu") == 1
    error = capsys.readouterr().err
    assert base.removeprefix("hf:") in error or "mamba" in error
    assert not Path("runs").exists()


@pytest.mark.usefixtures("small_plans")
@pytest.mark.parametrize(
    "where",
    [
        "niels_gpt.workflow.chat_model.read_corpus",
        "niels_gpt.workflow.chat_model.prepare",
        "niels_gpt.cli.first_model.show_scores_of",
        "niels_gpt.memorization.audit.scan_rows",
    ],
)
def test_a_signal_in_any_phase_prints_how_to_resume(
    nasty: Path, primer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """While the notes are read and tokenized, while the model is evaluated and audited."""

    def stop(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    options = ["--primer", primer, "--device", "cpu", "--exclude", "x*"]
    with monkeypatch.context() as patch:
        patch.setattr(where, stop)
        assert run("notes", nasty, "--minutes", "0.2", *options) == 128 + signal.SIGTERM
    out = capsys.readouterr().out
    assert "Try next" not in out
    line = out.splitlines()[-1]
    words = shlex.split(line)[1:]
    assert words[:2] == ["notes", str(nasty)] and "SIGTERM" in out
    given = ["--exclude", "x*", "--minutes", "0.2", "--primer", str(primer)]
    assert words[2:] == [*given, "--run-dir", "runs/notes", "--resume"]
    assert run(*words, "--device", "cpu") == 0
    assert "Try next" in capsys.readouterr().out


GONE = "zanzibar"
"""A word of one note only: of a note that is excluded, or deleted."""
PHASES = {
    "reading": "niels_gpt.workflow.chat_model.read_corpus",
    "preparing": "niels_gpt.workflow.chat_model.build_caches",
    "training": "niels_gpt.cli.pipeline.run_phases",
    "reporting": "niels_gpt.cli.first_model.show_scores_of",
}


def kill_in(phase: str, monkeypatch: pytest.MonkeyPatch, *command: str | Path) -> None:
    """Run a command, and end it where a phase begins, as SIGKILL does: nothing is cleaned up."""

    class Killed(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(PHASES[phase], kill)
        main([str(word) for word in command])


def files_with(word: str, folder: Path) -> list[str]:
    """The files below a folder with a word in them; token caches are decoded."""
    found = [path for path in folder.rglob("*") if path.is_file() and word.encode() in path.read_bytes()]
    decoded = "".join(
        load_tokenizer(folder / "cache/tokenizer/spm.model").decode(np.fromfile(path, "<u2").tolist())
        for split in ("train", "val")
        for path in list_shards(folder / "cache/pretrain/roam" / split)
    )
    return [str(path.relative_to(folder)) for path in found] + ["cache"] * (word in decoded)


@pytest.mark.usefixtures("small_plans")
@pytest.mark.parametrize(
    "phase", ["reading", *(pytest.param(phase, marks=pytest.mark.slow) for phase in PHASES if phase != "reading")]
)
def test_a_resume_by_hand_reads_what_the_model_was_begun_with(
    nasty: Path,
    primer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    phase: str,
) -> None:
    (nasty / "diary.md").write_text(f"# {GONE}\n\n" + f"the {GONE} is mine. " * 40, encoding="utf-8")
    options = ["--exclude", "diary.md", "--respect-front-matter", "--encoding-errors", "replace"]
    command = ["notes", nasty, "--run-dir", "run", "--device", "cpu"]
    kill_in(phase, monkeypatch, *command, *options, "--primer", primer, "--minutes", "0.2")
    assert (tmp_path / "run/options.json").stat().st_mode & 0o777 == 0o600
    for typed, option in ((["--exclude", "x.md"], "--exclude"), (["--links", "text"], "--links")):
        assert run(*command, "--resume", *typed) == 1
        assert option in capsys.readouterr().err
    assert run(*command, "--resume") == 0
    out = capsys.readouterr().out
    assert "(excluded by --exclude: diary.md)" in out and "(front matter: sub folder/it's 05.MD)" in out
    assert "latin.md" not in out
    assert files_with(GONE, tmp_path / "run") == []
    assert run("audit", "run", "--json", "--device", "cpu") in (0, 3, 4)
    documents = [document["name"] for document in json.loads(capsys.readouterr().out)["documents"]]
    assert not any(GONE in name or "diary" in name for name in documents)


@pytest.mark.usefixtures("small_plans")
@pytest.mark.parametrize(
    ("phase", "how"),
    [
        ("training", "deleted"),
        pytest.param("preparing", "deleted", marks=pytest.mark.slow),
        pytest.param("reporting", ".nielsignore", marks=pytest.mark.slow),
    ],
)
def test_a_note_that_is_gone_stops_a_resume(
    nasty: Path,
    primer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    phase: str,
    how: str,
) -> None:
    note = nasty / "diary.md"
    note.write_text(f"# {GONE}\n\n" + f"the {GONE} is mine. " * 40, encoding="utf-8")
    command = ["notes", nasty, "--run-dir", "run", "--device", "cpu"]
    kill_in(phase, monkeypatch, *command, "--primer", primer, "--minutes", "0.2")
    if how == "deleted":
        note.unlink()
    else:
        (nasty / ".nielsignore").write_text("ignored/\ndiary.md\n", encoding="utf-8")
    (nasty / "new.md").write_text("a new note", encoding="utf-8")
    capsys.readouterr()
    if phase in ("reading", "preparing"):  # nothing was trained: it begins again without the note
        assert run(*command, "--resume") == 0
        assert files_with(GONE, tmp_path / "run") == []
        return
    for resume in (command, ["pipeline", "--run-dir", "run", "--device", "cpu"]):
        assert run(*resume, "--resume") == 1
        error = capsys.readouterr().err
        assert f"1 note of this run would not be read any more: diary.md ({how})" in error
        assert "--allow-data-change" in error and ("notes" if resume is command else "cache build-all") in error
    assert run(*command, "--resume", "--allow-data-change") == 0
    assert "1 note new, and not part of this run: new.md" in capsys.readouterr().out
    kept = json.loads((tmp_path / "run/cache/notes.json").read_text(encoding="utf-8"))["roam"]["kept"]
    assert kept == {"diary.md": how}
    assert run(*command, "--resume") == 0  # recorded
    if how == "deleted":
        assert run("audit", "run", "--notes", nasty, "--json", "--device", "cpu") in (3, 4)
        because = json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))["because"]
        assert any("1 document of" in line and str(nasty) in line for line in because)


@pytest.mark.parametrize("words", [[], ["vault", "--minute", "3"], ["vault", "--minutes", "x"]])
def test_wrong_usage_names_the_words_that_are_typed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("notes", *words) == 2
    error = capsys.readouterr().err
    assert re.match(r"Usage: \S+ notes \[OPTIONS\] FOLDER\n", error) and re.search(r"'\S+ notes -h'", error)
    assert "notes folder" not in error and (words[1:2] or ["FOLDER"])[0] in error


def test_a_misspelled_command_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("notes", "chekc", "vault") == 2
    assert "'check'" in capsys.readouterr().err
    assert run("notes", "folders") == 1
    assert str(tmp_path / "folders") in capsys.readouterr().err
    (tmp_path / "checks").mkdir()
    assert run("notes", "checks") == 1
    assert str(tmp_path / "checks") in capsys.readouterr().err


def test_the_help_has_the_words_that_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("notes", "--help") == 0
    out = capsys.readouterr().out
    assert re.match(r"Usage: \S+ notes \[OPTIONS\] FOLDER\n +\S+ notes check \[OPTIONS\] FOLDER\n", out)
    assert all(kind in out for kind in ("hf:FOLDER", "hf:NAME/MODEL", "run folder", "checkpoint"))
    options = re.findall(r"^  (--[a-z-]+)|^(\S.*):$", out[out.index("\nArguments:") :], re.MULTILINE)
    groups: dict[str, list[str]] = {}
    for option, title in options:
        if title:
            groups[title] = []
        else:
            groups[next(reversed(groups))].append(option)
    assert groups["Options"] == ["--minutes", "--run-dir", "--resume", "--allow-data-change"]
    assert ["--base", "--lora-rank"] in groups.values()
    assert ["--primer", "--no-questions"] in groups.values()


@pytest.mark.usefixtures("small_plans")
def test_many_characters_need_bytes(
    tmp_path: Path, primer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for i in range(25):
        characters = "".join(chr(0x4E00 + 200 * i + j) for j in range(200))
        path = tmp_path / "vault" / f"{i}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# {characters[:4]}\n\n{characters}\u3002\n", encoding="utf-8")
    assert run("notes", "vault", "--minutes", "0.2", "--primer", primer, "--device", "cpu", "--run-dir", "run") == 0
    out = capsys.readouterr().out
    assert "weights over bytes" in out and "subwords" not in out
    places = [out.find(part) for part in PARTS]
    assert places == sorted(places) and -1 not in places, out
    config = load_config(tmp_path / "run/config.yaml")
    assert (config.task, config.model.V) == ("bytes", 256)
    assert config.train.p_val == {"roam": 1.0}
    assert (tmp_path / "run/checkpoints/best.pt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "vault"]
    commands = [shlex.split(line)[1:] for line in out.splitlines()[-3:]]
    assert [command[:2] for command in commands] == [["chat", "run"], ["generate", "run"], ["audit", "run"]]
    assert run(*commands[2], "--json", "--device", "cpu") in (0, 3, 4)
    audited = [document["name"] for document in json.loads(capsys.readouterr().out)["documents"]]
    assert any(name.startswith("about_notes: ") for name in audited)
    assert run(*commands[1], "--max-tokens", "3", "--device", "cpu") == 0


@pytest.mark.parametrize(
    ("files", "facts"),
    [({}, ["no note"]), ({"a.md": "alone " * 99}, ["one note", "two"]), ({"a.md": "a", "b.md": "b"}, ["too little"])],
)
def test_vaults_that_are_too_small(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    files: dict[str, str],
    facts: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vault").mkdir()
    for name, text in files.items():
        (tmp_path / "vault" / name).write_text(text, encoding="utf-8")
    assert run("notes", "vault") == 1
    error = capsys.readouterr().err
    assert all(fact in error for fact in facts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vault"]
