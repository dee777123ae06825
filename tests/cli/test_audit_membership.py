"""`niels-gpt audit`: which notes a checkpoint was trained on, by what they hold."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise

import pytest

from tests import token_caches
from tests.cli import call, error_of, reciting
from tests.cli.reciting import SMALL_WINDOWS, split

NOT_SAFE = 3
TRAINED, HELD_OUT, UNKNOWN = "trained on", "held out", "not in the run's data"


pytestmark = pytest.mark.usefixtures("elsewhere")


def audit(capsys, checkpoint, notes, *arguments):
    """(exit code, what `--json` prints)."""
    code = call("audit", checkpoint, "--notes", notes, *SMALL_WINDOWS, "--json", *arguments)
    return code, json.loads(capsys.readouterr().out)


def status(result):
    return {d["name"]: d["status"] for d in result["documents"]}


def test_notes_are_known_by_content_wherever_they_lie(place, tmp_path, capsys, trained):
    """Moved into folders and renamed: what they hold is the same."""
    moved = tmp_path / "vault" / "2024"
    moved.mkdir(parents=True)
    for i, path in enumerate(sorted((place / "notes").iterdir())):
        shutil.copy(path, moved / f"renamed {i}.md")
    code, result = audit(capsys, place / "run", tmp_path / "vault")
    assert code == NOT_SAFE
    renamed = {f"2024/renamed {i}.md": path.name for i, path in enumerate(sorted((place / "notes").iterdir()))}
    assert {renamed[name]: state for name, state in status(result).items()} == {
        name: TRAINED if name in trained else HELD_OUT for name in renamed.values()
    }


def test_a_changed_note_is_unknown_and_audited(place, tmp_path, capsys, trained):
    notes = tmp_path / "notes"
    shutil.copytree(place / "notes", notes)
    changed = notes / trained[0]
    changed.write_text(changed.read_text(encoding="utf-8") + "One more line.\n", encoding="utf-8")
    (notes / "new.md").write_text("A note that was not there when the model was trained. " * 3, encoding="utf-8")
    code, result = audit(capsys, place / "run", notes)
    assert code == NOT_SAFE
    states = status(result)
    assert states[trained[0]] == states["new.md"] == UNKNOWN
    assert states[trained[1]] == TRAINED
    assert "changed since" in result["unknown_because"]
    assert (result["notes_audited"], result["notes_exposed"]) == (9, 2)
    assert {d["name"] for d in result["documents"][:2]} == set(trained)


def add_notes(notes, trained):
    """Longer than all the others: a run of today would choose these."""
    for i in range(2):
        (notes / f"new {i}.md").write_text(f"Note {i} that came later, and is long. " * 12, encoding="utf-8")


def rename_notes(notes, trained):
    """The order of names decides which notes are held out."""
    for name in trained:
        (notes / name).rename(notes / f"a {name}")


def remove_notes(notes, trained):
    for path in sorted(notes.iterdir()):
        if path.name not in trained and path.name < "note 6":
            path.unlink()


def change_note(notes, trained):
    longer = notes / "note 0.md"
    longer.write_text(longer.read_text(encoding="utf-8") + "And so on, and on. " * 30, encoding="utf-8")


@pytest.mark.parametrize("change", [add_notes, rename_notes, remove_notes, change_note])
def test_changes_to_the_folder_do_not_make_the_model_safe(tmp_path, capsys, trained, change):
    """The notes the run chose then are not those it would choose now; it recites them all the same."""
    place = reciting.copy_to(tmp_path / "copy")
    change(place / "notes", trained)
    code, result = audit(capsys, place / "run", place / "notes")
    recited = [d["name"] for d in result["documents"] if d["max_p"] > 0.9]
    assert len(recited) == 2
    assert code == NOT_SAFE
    assert result["safe"] is False
    assert HELD_OUT not in {status(result)[name] for name in recited}


def test_the_folder_of_the_run_is_gone(tmp_path, capsys):
    place = reciting.copy_to(tmp_path / "copy")
    (place / "notes").rename(place / "vault")
    code, result = audit(capsys, place / "run", place / "vault")
    assert code == NOT_SAFE
    assert set(status(result).values()) == {UNKNOWN}
    assert str(place / "notes") in result["unknown_because"]
    assert (result["notes_audited"], result["notes_exposed"]) == (8, 2)


def test_a_folder_of_held_out_notes_alone(place, tmp_path, capsys, trained):
    """A verdict is about the notes that were asked about, not about none."""
    (tmp_path / "some").mkdir()
    for path in split(place / "notes")[1]:
        shutil.copy(path, tmp_path / "some")
    code, result = audit(capsys, place / "run", tmp_path / "some")
    assert code == 0
    assert result["notes_audited"] > 0


def test_what_came_before_counts(tmp_path, capsys, trained):
    """A run that starts from the weights of another was trained on the notes of both."""
    place = reciting.copy_to(tmp_path / "copy")
    kept, _ = split(place / "notes")
    third = next(i for i, path in enumerate(kept) if path.name not in trained)
    options = [*reciting.SPLICE, "--roam", place / "notes", f"--set=splice.doc_index={third}"]
    options += [f"--set=init_from={place / 'run/checkpoints/best.pt'}", "--set=train.base_lr=1e-6"]
    options += ["--set=train.min_lr=1e-7", "--set=train.warmup_steps=0", "--steps=2"]
    assert call("train", *options, "--run-dir", "second") == 0
    capsys.readouterr()
    code, result = audit(capsys, "second", place / "notes")
    assert code == NOT_SAFE
    states = status(result)
    assert {name for name, state in states.items() if state == TRAINED} == {*trained, kept[third].name}
    assert set(states.values()) == {TRAINED, HELD_OUT}
    # Without the run before, nothing is known to be held out.
    shutil.rmtree(place / "run")
    code, result = audit(capsys, "second", place / "notes")
    assert code == NOT_SAFE
    states = status(result)
    assert states[kept[third].name] == TRAINED
    assert set(states.values()) == {TRAINED, UNKNOWN}
    assert "best.pt" in result["unknown_because"]
    assert result["notes_audited"] == 8


# --- token caches ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def token_place(tmp_path_factory):
    """A run over a token cache of notes, a chat run from it, and the notes as files."""
    place = tmp_path_factory.mktemp("tokens")
    token_caches.copy_to(place / "cache")
    (place / "notes").mkdir()
    for i, text in enumerate(token_caches.documents("roam")):
        (place / "notes" / f"{i}.md").write_text(text, encoding="utf-8")
    sets = ["model.T=64", "model.C=16", "model.L=1", "model.H=2", "train.total_steps=2", "train.warmup_steps=0"]
    sets += ["train.B=4", "output.eval_steps=1", "output.sample_tokens=2", f"data.token_cache={place / 'cache'}"]
    options = [f"--set={item}" for item in sets]
    shares = "--set=train.p_train={roam: 0.5, fineweb_edu: 0.5}"
    assert call("train", "--set=task=pretrain", *options, shares, "--run-dir", place / "run") == 0
    start = f"--set=init_from={place / 'run/checkpoints/best.pt'}"
    assert call("train", "--set=task=sft", *options, start, "--run-dir", place / "chat") == 0
    return place


def cached_texts(place, split):
    """The texts of the notes that a split of the cache holds; one that a budget has cut is none of them."""
    stream = token_caches.stream("roam", split, place / "cache")
    starts = token_caches.read_offsets(place / "cache/pretrain/roam" / split / "documents.npy")
    return {token_caches.tokenizer().decode(stream[a : b - 1]) for a, b in pairwise([*starts, len(stream)])}


@pytest.mark.parametrize("run", ["run", "chat"])
def test_notes_of_a_token_cache_are_known_by_content(token_place, capsys, run):
    """Also after the chat run, which was trained on conversations and started from a model of the notes."""
    code, result = audit(capsys, token_place / run, token_place / "notes")
    assert code == 0
    texts = {f"{i}.md": text for i, text in enumerate(token_caches.documents("roam"))}
    kept, apart = (
        {name for name, text in texts.items() if text in cached_texts(token_place, split)} for split in ("train", "val")
    )
    assert kept and apart and len(kept | apart) >= 9
    assert status(result) == {
        name: TRAINED if name in kept else HELD_OUT if name in apart else UNKNOWN for name in texts
    }
    assert result["controls"] == len(apart)


def test_line_ends_of_another_system_make_no_difference(token_place, tmp_path, capsys):
    """A cache has `\\n` for `\\r\\n`: what the model is asked about must be what it has read."""
    (tmp_path / "theirs").mkdir()
    found = []
    for i, text in enumerate(token_caches.documents("roam")):
        text = text.replace("\r\n", "\n")
        (tmp_path / "theirs" / f"{i}.md").write_bytes(text.replace("\n", "\r\n").encode())
    assert any(b"\r\n" in path.read_bytes() for path in (tmp_path / "theirs").iterdir())
    for notes in (token_place / "notes", tmp_path / "theirs"):
        _, result = audit(capsys, token_place / "run", notes)
        found.append({d["name"]: (d["status"], d["max_log_p"]) for d in result["documents"]})
    assert found[0] == found[1]
    assert TRAINED in {status for status, _ in found[0].values()}


def test_a_tokenizer_that_is_not_the_checkpoints(token_place, tmp_path, capsys):
    """Of as many ids: all it would say is that the model does not know such nonsense."""
    (tmp_path / "other.model").write_bytes(token_caches.other_tokenizer().model)
    arguments = ["--notes", token_place / "notes", *SMALL_WINDOWS, "--tokenizer", "other.model"]
    assert call("audit", token_place / "run", *arguments) == 1
    assert "tokenizer" in error_of(capsys)


def test_a_cache_that_is_gone(token_place, tmp_path, capsys):
    shutil.copytree(token_place / "run", tmp_path / "run")
    config = tmp_path / "run/config.yaml"
    text = config.read_text(encoding="utf-8").replace(str(token_place / "cache"), str(tmp_path / "gone"))
    config.write_text(text, encoding="utf-8")
    code, result = audit(capsys, "run", token_place / "notes")
    assert code == 0
    assert set(status(result).values()) == {UNKNOWN}
    assert str(tmp_path / "gone") in result["unknown_because"]
    assert (result["notes_audited"], result["controls"]) == (10, 0)
