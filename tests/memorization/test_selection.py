"""Which documents and controls of a run are measured."""

from __future__ import annotations

import shutil
from itertools import pairwise

import numpy as np
import pytest

from niels_gpt.config import RunConfig
from niels_gpt.memorization.selection import (
    held_out_controls,
    main_source,
    read_documents,
    select_documents,
)
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import save_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import load_run
from tests import token_caches
from tests.cli import call, reciting
from tests.cli.reciting import VAL_FRAC, longest, split, write_notes

pytestmark = pytest.mark.usefixtures("workdir")


def train(run, *options):
    small = ["model.C=16", "model.L=1", "model.H=2", "model.T=64", "train.total_steps=1", "train.warmup_steps=0"]
    small += ["train.B=4", "output.eval_steps=1", "output.sample_tokens=2"]
    assert call("train", *(f"--set={item}" for item in (*small, *options)), "--run-dir", run) == 0


def names(selected, *, control=False):
    return [d.name for d in selected.documents if d.control is control]


# --- splice runs -------------------------------------------------------------------------------------


def test_documents_of_a_splice_run(place, loaded, trained):
    _, held_out = split(place / "notes")
    selected = select_documents(loaded)
    assert names(selected) == trained
    assert set(names(selected, control=True)) == {path.name for path in held_out}
    for d in selected.documents:
        assert bytes(d.ids.tolist()) == (place / "notes" / d.name).read_bytes()
        assert (d.source, d.ids.dtype) == ("roam", np.int64)
    sizes = [(place / "notes" / name).stat().st_size for name in trained]
    assert selected.train_tokens == sum(sizes)
    steps = np.arange(reciting.STEPS[-1] + 1)
    assert selected.epochs == pytest.approx(steps * 6 * 63 / sum(size - 1 for size in sizes))


def test_fewer_documents_and_controls_of_a_splice_run(loaded, trained):
    """Never more than it was trained on."""
    assert names(select_documents(loaded, number=1, controls=1)) == trained[:1]
    assert names(select_documents(loaded, number=5)) == trained
    assert [len(names(select_documents(loaded, controls=n), control=True)) for n in (0, 1)] == [0, 1]
    with pytest.raises(ValueError, match=r"letters.*roam"):
        select_documents(loaded, source="letters")
    assert names(select_documents(loaded, source="roam")) == trained


def test_documents_that_changed_since_the_training(workdir):
    copy = reciting.copy_to(workdir / "copy")
    (copy / "notes" / "new.md").write_text("A note that was added later. " * 40, encoding="utf-8")
    with pytest.raises(ValueError, match="changed"):
        select_documents(load_run(copy / "run", None, "cpu"))


def test_a_checkpoint_outside_a_run(place, workdir):
    shutil.copy(place / "run/checkpoints/best.pt", workdir / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt.*--run.*--text"):
        select_documents(load_run(None, workdir / "model.pt", "cpu"))


# --- other runs --------------------------------------------------------------------------------------


def test_documents_of_a_run_over_bytes(workdir):
    write_notes(workdir / "notes")
    (workdir / "notes/tiny.md").write_text("ab", encoding="utf-8")  # two tokens: nothing to measure
    dialogues = (f"user: what is {i} times ten?\nassistant: it is {i}0." for i in range(30))
    (workdir / "primer.txt").write_text("\n\n<dialogue>\n\n".join(dialogues), encoding="utf-8")
    train(
        "run",
        "data.roam=notes",
        "data.primer=primer.txt",
        f"data.roam_val_frac={VAL_FRAC}",
        "train.p_train={roam: 0.1, primer: 0.9}",
        "train.p_val={roam: 0.5, primer: 0.5}",
    )
    loaded = load_run(workdir / "run", None, "cpu")
    kept, held_out = split(workdir / "notes")
    usable = [path for path in kept if path.stat().st_size > 2]
    selected = select_documents(loaded)  # fewer than the default of eight
    assert set(names(selected)) == {path.name for path in usable}
    assert set(names(selected, control=True)) == {path.name for path in held_out}
    assert (selected.train_tokens, selected.epochs) == (None, None)
    two = select_documents(loaded, number=2, mode="longest", controls=1)
    assert names(two) == longest(usable, 2) and len(names(two, control=True)) == 1
    primer = select_documents(loaded, source="primer")
    assert len(names(primer)) == 8 and len(names(primer, control=True)) == 3  # the defaults
    for d in primer.documents:
        number = int(d.name.split()[1])
        assert bytes(d.ids.tolist()).decode() == f"user: what is {number} times ten?\nassistant: it is {number}0."
    names_of_both = [d.name.removesuffix(" (held out)") for d in primer.documents]
    assert len({d.name for d in primer.documents}) == len(names_of_both)


def test_copies_and_tiny_documents(workdir):
    """A copy of a training document is no control, even if that is not selected; two tokens are not measured."""
    write_notes(workdir / "notes")
    kept, held_out = split(workdir / "notes")
    held_out[0].write_bytes(min(kept, key=lambda path: path.stat().st_size).read_bytes())
    only = ["train.p_train={roam: 1.0}", "train.p_val={roam: 1.0}"]
    train("run", "data.roam=notes", f"data.roam_val_frac={VAL_FRAC}", *only)
    loaded = load_run(workdir / "run", None, "cpu")
    selected = select_documents(loaded, number=1, mode="longest")
    assert set(names(selected, control=True)) == {path.name for path in held_out[1:]}
    with pytest.raises(ValueError, match=r"--control .*trained on"):
        read_documents([], [held_out[0]], loaded)
    for path in (workdir / "notes").iterdir():
        path.write_text("ab", encoding="utf-8")
    model = GPT({"V": 256, "T": 64, "C": 16, "L": 1, "H": 2})  # a checkpoint that does not record its data
    save_checkpoint(workdir / "m.pt", model, None, 0, model.config)
    loaded = load_run(None, workdir / "m.pt", "cpu")._replace(run=RunFolder(workdir / "run"))
    with pytest.raises(ValueError, match=r"notes.*two tokens"):
        select_documents(loaded)


def cached(root, split):
    """Return the tokens of each note of the cache."""
    starts = token_caches.read_offsets(root / "pretrain/roam" / split / "documents.npy")
    stream = token_caches.stream("roam", split, root)
    return [stream[a:b] for a, b in pairwise([*starts, len(stream)])]


def test_documents_of_a_token_cache(workdir):
    token_caches.copy_to(workdir / "cache")
    train("run", "task=pretrain", "train.p_train={roam: 0.5, fineweb_edu: 0.5}")
    token_run = load_run(workdir / "run", None, "cpu")
    selected = select_documents(token_run, number=4, mode="longest")
    notes, held_out = cached(workdir / "cache", "train"), cached(workdir / "cache", "val")
    by_length = sorted(range(len(notes)), key=lambda i: -len(notes[i]))[:4]
    assert names(selected) == [f"document {i}" for i in by_length]
    assert [d.ids.tolist() for d in selected.documents[:4]] == [list(notes[i]) for i in by_length]
    controls = selected.documents[4:]
    assert controls and all(d.control and d.ids.tolist() in [list(note) for note in held_out] for d in controls)
    other = select_documents(token_run, source="fineweb_edu", number=2)
    assert {d.source for d in other.documents} == {"fineweb_edu"}
    # the same cache by another tokenizer
    other, cache = token_caches.other_tokenizer(), workdir / "cache"
    shutil.rmtree(cache)
    (cache / "tokenizer").mkdir(parents=True)
    (cache / "tokenizer/spm.model").write_bytes(other.model)
    for name in token_caches.PRETRAIN:
        token_caches.build_pretrain(cache, name, other)
    with pytest.raises(ValueError, match=r"tokenizer.*best\.pt"):
        select_documents(token_run)


def test_main_source(workdir):
    def source(task, **shares):
        config = RunConfig(task=task)
        object.__setattr__(config.train, "p_train", shares)
        return main_source(config)

    assert source("bytes", wiki=0.9, roam=0.1) == "roam"
    assert source("bytes", wiki=0.7, primer=0.3, roam=0.0) == "wiki"
    assert source("pretrain", a=0.3, b=0.7) == "b"
    token_caches.copy_to(workdir / "cache")
    with pytest.raises(ValueError, match=r"--source \(fineweb_edu, roam\).*--text"):
        source("sft")
    shutil.rmtree(workdir / "cache/pretrain")
    with pytest.raises(ValueError, match=r"--source \(none\)"):
        source("sft")


# --- files -------------------------------------------------------------------------------------------


def test_files_as_documents(place, workdir, loaded):
    (workdir / "a.txt").write_text("é text", encoding="utf-8")
    held_out = split(place / "notes")[1][0]
    first, second = read_documents([workdir / "a.txt"], [held_out], loaded)
    assert (first.name, first.control, first.source) == (str(workdir / "a.txt"), False, "file")
    assert bytes(first.ids.tolist()).decode() == "é text"
    assert (second.name, second.control) == (str(held_out), True)
    assert read_documents([], [], loaded) == []


def test_files_that_are_rejected(place, workdir, loaded, trained):
    (workdir / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin\.txt"):
        read_documents([workdir / "latin.txt"], [], loaded)
    [replaced] = read_documents([workdir / "latin.txt"], [], loaded, "replace")
    assert bytes(replaced.ids.tolist()).decode() == "caf\ufffd"
    with pytest.raises(ValueError, match=r"none\.txt"):
        read_documents([workdir / "none.txt"], [], loaded)
    with pytest.raises(ValueError, match=rf"--control .*{trained[0]}"):
        read_documents([], [place / "notes" / trained[0]], loaded)


# --- controls for files ------------------------------------------------------------------------------


def test_controls_for_files_of_a_chat_run_are_those_of_a_pretrain_cache(tmp_path):
    token_caches.copy_to(tmp_path / "cache")
    small = [*token_caches.SMALL, "task=sft", "train.total_steps=1", "train.warmup_steps=0"]
    assert call("train", *token_caches.options(small), "--run-dir", "chat") == 0
    loaded = load_run("chat", device="cpu")
    found = held_out_controls(loaded, 1)
    assert [(document.control, document.source) for document in found] == [(True, "roam")]
    shutil.rmtree(tmp_path / "cache/pretrain")
    with pytest.raises(ValueError, match="--control") as error:
        held_out_controls(loaded)
    assert not any(option in str(error.value) for option in ("--text", "--source"))


def test_a_model_without_data_has_no_controls_for_files(tmp_path):
    """The advice is an option that can be used with --text."""
    model = GPT({"T": 32, "C": 16, "L": 1, "H": 2})
    save_checkpoint(tmp_path / "m.pt", model, None, 1, model.config)
    with pytest.raises(ValueError, match="--control") as error:
        held_out_controls(load_run(tmp_path / "m.pt", device="cpu"))
    assert "--text" not in str(error.value)
