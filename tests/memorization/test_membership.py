"""Membership: which notes a checkpoint was trained on, by their content."""

from __future__ import annotations

import errno
import shutil
import warnings
from itertools import pairwise

import numpy as np
import pytest

from niels_gpt.memorization.audit_input import CHAT, NOTE, read_path, read_run
from niels_gpt.memorization.membership import HELD_OUT, TRAINED, UNKNOWN, membership
from niels_gpt.runs.loading import load_run
from tests import token_caches
from tests.cli import call, reciting
from tests.cli.reciting import split

pytestmark = pytest.mark.usefixtures("workdir")


def status_of(loaded, folder):
    """Return (note -> status, reason for unknown ones) of a folder of notes."""
    return membership(loaded, {text.name: text.ids for text in read_path(folder, loaded).texts})


def test_notes_are_compared_by_content(place, workdir, loaded, trained):
    """Moved into folders and renamed, their status is the same."""
    moved = workdir / "vault" / "2024"
    moved.mkdir(parents=True)
    names = {}
    for i, path in enumerate(sorted((place / "notes").iterdir())):
        shutil.copy(path, moved / f"renamed {i}.md")
        names[f"2024/renamed {i}.md"] = path.name
    status, _ = status_of(loaded, workdir / "vault")
    assert {names[name]: known for name, known in status.items()} == {
        name: TRAINED if name in trained else HELD_OUT for name in names.values()
    }


def test_an_edited_note_is_unknown(place, workdir, loaded, trained):
    notes = workdir / "notes"
    shutil.copytree(place / "notes", notes)
    with (notes / trained[0]).open("a", encoding="utf-8") as file:
        file.write("One more line.\n")
    (notes / "new.md").write_text("A note that did not exist when the model was trained.", encoding="utf-8")
    status, reason = status_of(loaded, notes)
    assert status[trained[0]] == status["new.md"] == UNKNOWN
    assert status[trained[1]] == TRAINED
    assert sorted(status.values()).count(HELD_OUT) == 6
    assert "edited" in reason


def test_a_changed_folder_of_the_run_has_no_held_out_notes(workdir, trained):
    """The longest note would be selected today, but the run was not trained on it."""
    copy = reciting.copy_to(workdir / "copy")
    (copy / "notes" / "new.md").write_text("A long note that was added later. " * 12, encoding="utf-8")
    status, reason = status_of(load_run(copy / "run", None, "cpu"), copy / "notes")
    assert set(status.values()) == {UNKNOWN}
    assert str(copy / "notes") in reason and "changed" in reason
    (copy / "notes").rename(copy / "vault")
    status, reason = status_of(load_run(copy / "run", None, "cpu"), copy / "vault")
    assert set(status.values()) == {UNKNOWN}
    assert str(copy / "notes") in reason


def test_a_checkpoint_outside_a_run(place, workdir):
    shutil.copy(place / "run/checkpoints/best.pt", workdir / "model.pt")
    status, reason = status_of(load_run(None, workdir / "model.pt", "cpu"), place / "notes")
    assert set(status.values()) == {UNKNOWN}
    assert "model.pt" in reason


def test_runs_before_count(workdir, trained, capsys):
    """A run that starts from the weights of another was trained on the notes of both."""
    copy = reciting.copy_to(workdir / "copy")
    train, _ = split(copy / "notes")
    third = next(i for i, path in enumerate(train) if path.name not in trained)
    options = [*reciting.SPLICE, "--roam", copy / "notes", f"--set=splice.doc_index={third}"]
    options += [f"--set=init_from={copy / 'run/checkpoints/best.pt'}", "--set=train.base_lr=1e-6"]
    options += ["--set=train.min_lr=1e-7", "--set=train.warmup_steps=0", "--steps=2"]
    assert call("train", *options, "--run-dir", "second") == 0
    second = load_run(workdir / "second", None, "cpu")
    status, _ = status_of(second, copy / "notes")
    assert {name for name, known in status.items() if known == TRAINED} == {*trained, train[third].name}
    assert set(status.values()) == {TRAINED, HELD_OUT}
    shutil.rmtree(copy / "run")  # without the first run nothing is known to be held out
    status, reason = status_of(second, copy / "notes")
    assert status[train[third].name] == TRAINED
    assert set(status.values()) == {TRAINED, UNKNOWN}
    assert "best.pt" in reason


def test_a_run_that_was_resumed_without_a_note_has_read_it(workdir, capsys):
    """The note is gone, so nobody can judge whether the model recites it."""
    (workdir / "notes").mkdir()
    for i in range(12):
        text = " ".join(f"{i * j * 7919 % 104729:x}" for j in range(3, 40))
        (workdir / "notes" / f"{i}.md").write_text(text, encoding="utf-8")
    options = ["--notes", workdir / "notes", "--set=train.p_train={roam: 1.0}", "--set=train.p_val={roam: 1.0}"]
    assert call("train", "--config", "debug", *options, "--steps", "2", "--run-dir", "run") == 0
    assert call("audit", "run", "--device", "cpu") == 0
    (workdir / "notes/0.md").unlink()
    assert call("train", "run", "--resume", "--steps", "4", "--allow-data-change") == 0
    assert call("train", "run", "--resume", "--steps", "6") == 0
    capsys.readouterr()
    assert call("audit", "run", "--device", "cpu") == 4
    assert "its first 2 steps read other data" in capsys.readouterr().out


# --- token caches ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A run over a token cache of notes, a chat run from it, and the notes as files."""
    root = tmp_path_factory.mktemp("tokens")
    token_caches.copy_to(root / "cache")
    (root / "notes").mkdir()
    for i, text in enumerate(token_caches.documents("roam")):
        (root / "notes" / f"{i}.md").write_text(text, encoding="utf-8")
    sets = ["model.T=64", "model.C=16", "model.L=1", "model.H=2", "train.total_steps=2", "train.warmup_steps=0"]
    sets += ["train.B=4", "output.eval_steps=1", "output.sample_tokens=2", f"data.token_cache={root / 'cache'}"]
    options = [f"--set={item}" for item in sets]
    shares = "--set=train.p_train={roam: 0.5, fineweb_edu: 0.5}"
    assert call("train", "--set=task=pretrain", *options, shares, "--run-dir", root / "run") == 0
    start = f"--set=init_from={root / 'run/checkpoints/best.pt'}"
    assert call("train", "--set=task=sft", *options, start, "--run-dir", root / "chat") == 0
    return root


def cached_texts(root, split):
    """Return the texts of the complete notes in a split of the cache."""
    stream = token_caches.stream("roam", split, root / "cache")
    starts = token_caches.read_offsets(root / "cache/pretrain/roam" / split / "documents.npy")
    return {token_caches.tokenizer().decode(stream[a : b - 1]) for a, b in pairwise([*starts, len(stream)])}


@pytest.mark.parametrize("run", ["run", "chat"])
def test_notes_of_a_token_cache(tokens, run):
    """Also of a chat run, which was trained on conversations and started from a model of the notes."""
    status, _ = status_of(load_run(tokens / run, None, "cpu"), tokens / "notes")
    texts = {f"{i}.md": text for i, text in enumerate(token_caches.documents("roam"))}
    train, val = (
        {name for name, text in texts.items() if text in cached_texts(tokens, split)} for split in ("train", "val")
    )
    assert train and val and len(train | val) >= 9
    assert status == {name: TRAINED if name in train else HELD_OUT if name in val else UNKNOWN for name in texts}


def test_line_ends_do_not_matter(tokens, workdir):
    """A cache has `\\n` for `\\r\\n`, and a note is encoded as the training data was."""
    (workdir / "theirs").mkdir()
    for i, text in enumerate(token_caches.documents("roam")):
        converted = text.replace("\r\n", "\n").replace("\n", "\r\n")
        (workdir / "theirs" / f"{i}.md").write_bytes(converted.encode())
    loaded = load_run(tokens / "run", None, "cpu")
    status, _ = status_of(loaded, workdir / "theirs")
    assert status == status_of(loaded, tokens / "notes")[0]
    assert TRAINED in status.values()


def test_a_missing_cache(tokens, workdir):
    shutil.copytree(tokens / "run", workdir / "run")
    config = workdir / "run/config.yaml"
    text = config.read_text(encoding="utf-8").replace(str(tokens / "cache"), str(workdir / "gone"))
    config.write_text(text, encoding="utf-8")
    status, reason = status_of(load_run(workdir / "run", None, "cpu"), tokens / "notes")
    assert set(status.values()) == {UNKNOWN}
    assert str(workdir / "gone") in reason


def test_a_source_without_a_share_was_not_trained_on(tokens, workdir):
    shutil.copytree(tokens / "run", workdir / "run")
    config = workdir / "run/config.yaml"
    text = config.read_text(encoding="utf-8")
    assert "roam: 0.5" in text and "fineweb_edu: 0.5" in text
    config.write_text(text.replace("roam: 0.5", "roam: 0.0").replace("fineweb_edu: 0.5", "fineweb_edu: 1.0"), "utf-8")
    status, _ = status_of(load_run(workdir / "run", None, "cpu"), tokens / "notes")
    assert set(status.values()) == {UNKNOWN}


def test_no_notes(loaded):
    assert membership(loaded, {})[0] == {}
    assert membership(loaded, {"x": np.array([1, 2, 3])})[0] == {"x": UNKNOWN}


def test_the_own_data_of_a_chat_run(tokens):
    """Notes of the run before and conversations, with the status that the caches give them; public text is skipped."""
    loaded = load_run(tokens / "chat", None, "cpu")
    found = read_run(loaded)
    decoded = {loaded.tokenizer.decode(text.ids.tolist()) for text in found.texts if text.kind == NOTE}
    complete = cached_texts(tokens, "train") | cached_texts(tokens, "val")
    assert len(decoded) == len(complete) and len(decoded - complete) <= 2  # the end of a split may cut its last note
    chats = [text for text in found.texts if text.kind == CHAT]
    special = loaded.tokenizer.special_token_ids()
    assert chats and all(text.ids[-1] == special["eot"] for text in chats)
    assert {entry.name for entry in found.skipped if not entry.missing} >= {"fineweb_edu"}
    assert not any(entry.missing for entry in found.skipped)
    status, _ = membership(loaded, {text.name: text.ids for text in found.texts})
    assert set(status.values()) == {TRAINED, HELD_OUT}
    assert {status[text.name] for text in chats} == {TRAINED, HELD_OUT}


def test_data_that_cannot_be_read_is_reported_and_missing_data_is_not(workdir, loaded, monkeypatch):
    notes = {"x": np.arange(40)}

    def refuse(error):
        def opened(*_):
            raise error

        monkeypatch.setattr("niels_gpt.memorization.membership.SpliceTask", opened)

    refuse(OSError(errno.EIO, "Input/output error", "shard"))
    with pytest.warns(UserWarning, match=r"cannot be read.*Input/output error"):
        status, why = membership(loaded, notes)
    assert status == {"x": UNKNOWN} and "Input/output error" in why
    refuse(FileNotFoundError("no folder of notes"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert membership(loaded, notes) == ({"x": UNKNOWN}, "no folder of notes")
