"""`niels-gpt memorize` on runs over bytes and over token caches, and with other tokenizers and positions."""

from __future__ import annotations

import csv
import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import save_checkpoint
from tests import token_caches
from tests.cli import call, error_of
from tests.cli.reciting import PROMPT, SMALL_WINDOWS, VAL_FRAC, WINDOW, longest, naive_p, one_thread, split, write_notes

T = 64
QUICK = [*SMALL_WINDOWS, "--greedy", "0", "--no-curve"]


@pytest.fixture(autouse=True)
def notes(tmp_path, monkeypatch):
    """A folder of notes where the commands run."""
    monkeypatch.chdir(tmp_path)
    with one_thread():
        yield write_notes(tmp_path / "notes")


def report_of(capsys, *arguments):
    """The report that `memorize --json` prints; it is written into `out`."""
    assert call("memorize", *arguments, "--json", "--out", "out") == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(Path("out/report.json").read_text(encoding="utf-8"))
    return found


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def train(*options):
    small = ["model.C=16", "model.L=1", "model.H=2", "train.total_steps=4", "train.warmup_steps=0", "train.B=4"]
    small += ["output.checkpoint_every=2", "output.eval_steps=1", "output.sample_tokens=2"]
    assert call("train", *(f"--set={item}" for item in (*small, f"model.T={T}", *options)), "--run-dir", "run") == 0


def test_a_run_over_bytes(tmp_path, capsys):
    (tmp_path / "primer.txt").write_text(
        "\n\n<dialogue>\n\n".join(f"user: what is {i} times ten?\nassistant: it is {i}0." for i in range(30)),
        encoding="utf-8",
    )
    only = "{roam: 0.5, primer: 0.5}"
    data = ["data.roam=notes", "data.primer=primer.txt", f"data.roam_val_frac={VAL_FRAC}"]
    train(*data, f"train.p_train={only}", f"train.p_val={only}")
    capsys.readouterr()
    kept, held_out = split(tmp_path / "notes")
    found = report_of(capsys, "--run", "run", *SMALL_WINDOWS, "--greedy", 16)
    # All six notes: there are fewer than the usual eight.
    assert {d["name"] for d in found["documents"] if not d["control"]} == {path.name for path in kept}
    assert {d["name"] for d in found["documents"] if d["control"]} == {path.name for path in held_out}
    assert [entry["step"] for entry in found["checkpoints"]] == [2, 4]
    assert "train_tokens" not in found
    assert call("memorize", "--run", "run", *SMALL_WINDOWS, "--greedy", 0) == 0
    capsys.readouterr()
    assert call("splice", "fit", "run") == 1
    assert "no report of a splice run" in error_of(capsys)
    two = report_of(capsys, "--run", "run", *QUICK, "--documents", 2, "--select", "longest", "--controls", 1)
    assert [d["name"] for d in two["documents"] if not d["control"]] == longest(kept, 2)
    assert sum(d["control"] for d in two["documents"]) == 1
    primer = report_of(capsys, "--run", "run", *QUICK, "--source", "primer", "--documents", 3)
    assert {d["source"] for d in primer["documents"]} == {"primer"}
    for d in primer["documents"]:
        number = int(d["name"].split()[1])
        assert d["tokens"] == len(f"user: what is {number} times ten?\nassistant: it is {number}0.")


def test_a_copy_of_any_document_of_the_training_is_no_control(tmp_path, capsys):
    """Also of one that is not among those measured."""
    kept, held_out = split(tmp_path / "notes")
    short = min(kept, key=lambda path: path.stat().st_size)
    held_out[0].write_bytes(short.read_bytes())
    train("data.roam=notes", f"data.roam_val_frac={VAL_FRAC}", "train.p_train={roam: 1.0}", "train.p_val={roam: 1.0}")
    capsys.readouterr()
    found = report_of(capsys, "--run", "run", *QUICK, "--documents", 1, "--select", "longest")
    assert {d["name"] for d in found["documents"] if d["control"]} == {path.name for path in held_out[1:]}
    assert call("memorize", "--run", "run", *QUICK, "--control", held_out[0]) == 1
    assert "trained on" in error_of(capsys)


def test_a_run_over_bytes_with_an_empty_note(notes, capsys):
    """It is no document to measure; the others are."""
    (notes / "empty.md").write_text("", encoding="utf-8")
    (notes / "blank.md").write_text("\n", encoding="utf-8")
    train("data.roam=notes", "train.p_train={roam: 1}", "train.p_val={roam: 1}")
    capsys.readouterr()
    found = report_of(capsys, "--run", "run", *QUICK, "--documents", 20)
    assert {d["name"] for d in found["documents"]} <= {f"note {i}.md" for i in range(8)}
    assert sum(not d["control"] for d in found["documents"]) >= 7


@pytest.fixture
def token_run(tmp_path, capsys):
    """A run over the token cache of notes, in the current folder."""
    token_caches.copy_to(tmp_path / "cache")
    train("task=pretrain", "train.p_train={roam: 0.5, fineweb_edu: 0.5}")
    capsys.readouterr()
    return tmp_path / "cache"


def cached(root, split):
    """The tokens of each note of the cache."""
    starts = token_caches.read_offsets(root / "pretrain/roam" / split / "documents.npy")
    stream = token_caches.stream("roam", split, root)
    return [stream[a:b] for a, b in pairwise([*starts, len(stream)])]


def test_a_run_over_a_token_cache(token_run, capsys):
    found = report_of(capsys, "--run", "run", *SMALL_WINDOWS, "--greedy", 16, "--documents", 4, "--select", "longest")
    notes, held_out = cached(token_run, "train"), cached(token_run, "val")
    chosen = [d for d in found["documents"] if not d["control"]]
    by_length = sorted(range(len(notes)), key=lambda i: -len(notes[i]))[:4]
    assert [d["name"] for d in chosen] == [f"document {i}" for i in by_length]
    assert [d["tokens"] for d in chosen] == [len(notes[i]) for i in by_length]
    controls = [d for d in found["documents"] if d["control"]]
    assert controls
    assert {d["tokens"] for d in controls} <= {len(note) for note in held_out}
    assert found["unit"] == "token"
    pieces = token_caches.tokenizer()
    texts = {f"document {i}": pieces.decode(note[:-1]) for i, note in enumerate(notes)}
    for strip in found["strips"]:
        if not strip["control"]:
            assert strip["text"] == texts[strip["document"]]  # without the end-of-text token
            assert len(strip["p"]) == len(strip["text"])
    for d in chosen:
        assert d["bytes"] == len(texts[d["name"]].encode("utf-8"))
    table = rows(token_run.parent / "out/windows.csv")
    best = token_run.parent / "run/checkpoints/best.pt"
    last = next(row for row in table if row["document"] == chosen[0]["name"] and int(row["end"]) == chosen[0]["tokens"])
    window = notes[by_length[0]][int(last["start"]) : int(last["end"])]
    assert float(last["p"]) == pytest.approx(naive_p(best, window, PROMPT), rel=1e-3)
    other = report_of(capsys, "--run", "run", *QUICK, "--source", "fineweb_edu", "--documents", 2)
    assert {d["source"] for d in other["documents"]} == {"fineweb_edu"}


def test_a_cache_of_another_tokenizer_than_the_checkpoints(token_run, capsys):
    other = token_caches.other_tokenizer()
    shutil.rmtree(token_run)
    (token_run / "tokenizer").mkdir(parents=True)
    (token_run / "tokenizer/spm.model").write_bytes(other.model)
    for name in token_caches.PRETRAIN:
        token_caches.build_pretrain(token_run, name, other)
    assert call("memorize", "--run", "run", *QUICK) == 1
    message = error_of(capsys)
    assert "another tokenizer" in message
    assert "run/checkpoints/best.pt" in message


def test_a_tokenizer_that_is_another_checkpoints(token_run, tmp_path, capsys):
    """Of as many ids: what it makes of a text means something else to the model."""
    (tmp_path / "other.model").write_bytes(token_caches.other_tokenizer().model)
    (tmp_path / "t.txt").write_text(token_caches.documents("roam")[3], encoding="utf-8")
    arguments = ["--tokenizer", "other.model", "--text", "t.txt"]
    assert call("memorize", "--run", "run", *QUICK, *arguments) == 1
    assert "tokenizer" in error_of(capsys)


def test_a_vocabulary_of_another_size(token_run, tmp_path, capsys, notes):
    torch.manual_seed(0)
    model = GPT({"V": 300, "T": T, "C": 16, "L": 1, "H": 2, "dropout": 0.0})
    save_checkpoint(tmp_path / "m.pt", model, None, 0, model.config)
    arguments = ["--checkpoint", "m.pt", *QUICK, "--text", notes / "note 0.md"]
    assert call("memorize", *arguments) == 1
    assert "--tokenizer" in error_of(capsys)
    assert call("memorize", *arguments, "--tokenizer", token_run / "tokenizer/spm.model") == 1
    assert "404 ids" in error_of(capsys)


def test_learned_positions_have_a_map(tmp_path, capsys, notes):
    torch.manual_seed(0)
    model = GPT({"V": 256, "T": T, "C": 16, "L": 1, "H": 2, "dropout": 0.0, "positions": "learned"})
    save_checkpoint(tmp_path / "m.pt", model, None, 0, model.config)
    note = notes / "note 0.md"
    found = report_of(capsys, "--checkpoint", "m.pt", *QUICK, "--text", note)
    assert found["positions"] == "learned"
    offsets = found["position_map"]["offsets"]
    assert (offsets[0], offsets[-1]) == (0, T - WINDOW + 1)
    [d] = found["position_map"]["documents"]
    assert len(d["mean_log_p"]) == len(offsets) == len(set(d["mean_log_p"]))
    assert d["mean_log_p"][0] == pytest.approx(found["documents"][0]["mean_log_p"])
    assert call("memorize", "--checkpoint", "m.pt", *QUICK, "--text", note) == 0
    assert "RoPE" not in capsys.readouterr().out


def test_a_chat_run_says_what_can_be_looked_into(tmp_path, capsys):
    """It was trained on conversations; documents are to be found in the caches of text."""
    token_caches.copy_to(tmp_path / "cache")
    train("task=sft")
    capsys.readouterr()
    assert call("memorize", "--run", "run", *QUICK) == 1
    message = error_of(capsys)
    assert "--source" in message
    assert "fineweb_edu" in message and "roam" in message
