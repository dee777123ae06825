"""`niels-gpt research splice select` and `coverage`: output, files, errors."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise

import pytest
import yaml

from niels_gpt.cli import splice
from tests import token_caches
from tests.cli import call, error_of
from tests.cli.reciting import VAL_FRAC, split, write_notes
from tests.report.pages import read

T = 32


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """The working directory, with notes/ in it."""
    monkeypatch.chdir(tmp_path)
    write_notes(tmp_path / "notes")
    return tmp_path


def options(*overrides):
    sets = (f"model.T={T}", f"data.roam_val_frac={VAL_FRAC}", "splice.num_docs=3", "splice.controls=1", *overrides)
    return ["--roam", "notes", *(f"--set={item}" for item in sets)]


def output(capsys, *arguments):
    assert call(*arguments) == 0
    return capsys.readouterr().out


def selected(capsys, *overrides):
    return json.loads(output(capsys, "splice", "select", *options(*overrides), "--json"))


def covered(capsys, *overrides, more=()):
    return json.loads(output(capsys, "splice", "coverage", *options(*overrides), "--json", *more))


def sizes(paths):
    return [path.stat().st_size for path in paths]


def ranked(paths, policy):
    """Return (index, size) of the notes in the order of a policy."""
    numbered = list(enumerate(sizes(paths)))
    if policy == "first":
        return numbered
    return sorted(numbered, key=lambda item: -item[1] if policy == "longest" else item[1])


@pytest.mark.parametrize("command", ["select", "coverage"])
def test_notes_that_are_not_utf8(place, capsys, command):
    """The remedy in the error is an option that the command has."""
    (place / "notes" / "latin.md").write_bytes("caf\xe9 ".encode("latin-1") * 40)
    assert call("research", "splice", command, *options()) == 1
    assert "--encoding-errors replace" in error_of(capsys)
    assert call("research", "splice", command, *options(), "--encoding-errors", "replace") == 0


# --- select ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["first", "longest", "shortest", "random"])
def test_select_by_each_policy(place, capsys, policy):
    train, held_out = split(place / "notes")
    found = selected(capsys, f"splice.doc_select_mode={policy}")
    assert (found["source"], found["documents"], found["candidates"]) == ("roam", len(train), len(train))
    wanted = [(i, sizes(train)[i]) for i in found["policies"][policy]]
    rows = [(row["document"], row["name"], row["length"]) for row in found["chosen"]]
    assert rows == [(i, train[i].name, size) for i, size in wanted]
    for other in ("first", "longest", "shortest"):
        assert found["policies"][other] == [i for i, _ in ranked(train, other)[:3]]
    assert len(found["policies"]["random"]) == len(set(found["policies"]["random"])) == 3
    # One span of T bytes from every start.
    assert found["examples_per_epoch"] == sum(size - T + 1 for _, size in wanted)
    [control] = found["controls"]
    assert held_out[control["document"]].name == control["name"]
    middle = sorted(size for _, size in wanted)[1]
    assert control["length"] == min(sizes(held_out), key=lambda size: abs(size - middle))
    assert not (place / "runs").exists()


def test_printed_selection(place, capsys):
    train, held_out = split(place / "notes")
    text = output(capsys, "splice", "select", *options())
    assert f"{len(train)} documents to train on" in text
    assert f"{len(held_out)} documents held out" in text
    head = next(line for line in text.splitlines() if "longest" in line)
    for policy in ("first", "longest (config)", "shortest", "random"):
        assert policy in head
    columns = [head.index(policy) for policy in ("first", "longest", "shortest", "random")]
    assert columns == sorted(columns)
    first_row = text.splitlines()[text.splitlines().index(head) + 1]
    cells = [first_row[a:b].strip() for a, b in pairwise([*columns, None])]
    for cell, policy in zip(cells, ("first", "longest", "shortest"), strict=False):
        (i, size), *_ = ranked(train, policy)
        assert cell == f"{train[i].name} ({size:,})"
    chosen = text.split("\nchosen", 1)[1]
    for i, size in ranked(train, "longest")[:3]:
        assert re.search(rf"^ +{i} +{size:,}  {re.escape(train[i].name)}$", chosen, re.MULTILINE)
    controls = chosen.split("controls", 1)[1]
    assert any(f"{path.stat().st_size:,}  {path.name}" in controls for path in held_out)


def test_select_within_limits(place, capsys):
    train, _ = split(place / "notes")
    low, high = sorted(sizes(train))[1], sorted(sizes(train))[3]
    inside = [(i, size) for i, size in enumerate(sizes(train)) if low <= size <= high]
    found = selected(capsys, f"splice.min_doc_length={low}", f"splice.max_doc_length={high}")
    assert (found["documents"], found["candidates"]) == (len(train), len(inside))
    assert {(row["document"], row["length"]) for row in found["chosen"]} == set(inside)


def test_select_one_document_by_number(place, capsys):
    train, _ = split(place / "notes")
    found = selected(capsys, "splice.doc_index=2", "splice.num_docs=5")
    assert [(row["document"], row["name"]) for row in found["chosen"]] == [(2, train[2].name)]
    assert {name: len(choice) for name, choice in found["policies"].items()} == dict.fromkeys(found["policies"], 1)
    assert "chosen by doc_index=2" in output(capsys, "splice", "select", *options("splice.doc_index=2"))


def test_too_many_documents(capsys):
    assert call("research", "splice", "select", *options("splice.num_docs=50")) == 1
    shown, message = capsys.readouterr()
    assert re.search(r"splice\.num_docs=50.* 6 of 6 .*strict_num_docs=false", message)
    assert "6 within the limits" in shown and "tokens per document" in shown  # the candidates are shown
    assert "num_docs" not in shown


@pytest.mark.parametrize(
    ("overrides", "mentioned"),
    [
        (["splice.min_doc_length=100000"], "0 of 6 "),
        (["splice.doc_select_mode=best"], "doc_select_mode"),
        (["splice.dataset_name=letters"], "letters"),
    ],
)
def test_errors_are_one_line(capsys, overrides, mentioned):
    assert call("research", "splice", "select", *options(*overrides)) == 1
    message = error_of(capsys)
    assert mentioned in message
    assert call("research", "splice", "coverage", *options(*overrides)) == 1
    assert error_of(capsys) == message


def test_a_config_file(place, capsys):
    config = {"task": "splice", "model": {"T": T}, "splice": {"num_docs": 2}, "data": {"roam": "notes"}}
    (place / "c.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    found = json.loads(output(capsys, "splice", "select", "--config", "c.yaml", "--json"))
    assert len(found["chosen"]) == 2
    found = json.loads(output(capsys, "splice", "select", "--config", "c.yaml", "--set", "splice.num_docs=4", "--json"))
    assert len(found["chosen"]) == 4
    assert call("research", "splice", "select", "--config", "none.yaml") == 1
    assert "none.yaml" in error_of(capsys)
    (place / "c.yaml").write_text("task: sft\n", encoding="utf-8")
    for command in ("select", "coverage", "study"):
        assert call("research", "splice", command, "--config", "c.yaml") == 1
        assert re.search(r"c\.yaml.*task sft.*splice", error_of(capsys))


def test_the_embedded_notes_are_the_default(place, capsys):
    found = json.loads(output(capsys, "splice", "select", "--json"))
    assert (found["source"], found["place"]) == ("roam", "embedded")
    assert len(found["chosen"]) == 10


def test_names_that_are_markup(place, capsys):
    text = "".join(f"word {i} of a long note; " for i in range(60))
    (place / "notes" / "[bold]a[red] é.md").write_text(text, encoding="utf-8")
    assert "[bold]a[red] é.md" in output(capsys, "splice", "select", *options("data.roam_val_frac=0"))


def test_select_from_a_token_cache(capsys):
    root, name = token_caches.folder(), "fineweb_edu"
    sets = ("splice.documents=tokens", f"data.token_cache={root}", "model.T=16", "splice.num_docs=2")
    arguments = [f"--set={item}" for item in (*sets, f"splice.dataset_name={name}")]
    found = json.loads(output(capsys, "splice", "select", *arguments, "--json"))
    starts = token_caches.read_offsets(root / "pretrain" / name / "train/documents.npy")
    lengths = [b - a for a, b in pairwise([*starts, len(token_caches.stream(name, "train", root))])]
    wanted = sorted(enumerate(lengths), key=lambda item: -item[1])[:2]
    assert (found["source"], found["documents"]) == (name, len(lengths))
    assert [(row["document"], row["length"]) for row in found["chosen"]] == wanted


def test_select_warns_once(caplog):
    assert call("research", "splice", "select", *options("splice.content_length=90", "splice.offset_jitter=2")) == 0
    said = [record.getMessage() for record in caplog.records if record.name == "niels_gpt.splice"]
    assert sorted(line.split()[0] for line in said) == ["content_length=90", "offset_jitter=2"]


# --- coverage ----------------------------------------------------------------------------------------


def test_coverage_of_steps_and_of_several_epochs(capsys):
    found = covered(capsys, "train.B=5", "splice.content_length=10", more=["--steps", "7"])
    assert found["examples"] == 35
    assert sum(sum(document["seen"]) for document in found["documents"]) == 35 * 10
    assert sum(sum(document["supervised"]) for document in found["documents"]) == 35 * 9
    assert found["frames"] == 7 * math.ceil(5 / 3)  # three spans of 10 share a frame of 32
    assert "7 steps of 5 examples" in found["title"]
    other = covered(capsys, "train.B=5", "splice.content_length=10", "train.seed=9", more=["--steps", "7"])
    assert other["documents"] != found["documents"]
    once, thrice = (covered(capsys, "splice.balance_mode=by_coverage", more=["--epochs", n]) for n in (1, 3))
    assert thrice["examples"] == 3 * once["examples"]
    for a, b in zip(once["documents"], thrice["documents"], strict=True):
        assert b["seen"] == [3 * n for n in a["seen"]]


def test_the_most_examples_that_are_counted(capsys, monkeypatch):
    once = covered(capsys, more=["--epochs", 1])["examples"]
    monkeypatch.setattr(splice, "_MOST_EXAMPLES", 2 * once)
    assert covered(capsys, more=["--epochs", 2])["examples"] == 2 * once
    monkeypatch.setattr(splice, "_MOST_EXAMPLES", 2 * once - 1)
    assert call("research", "splice", "coverage", *options(), "--epochs", 2) == 1
    err = capsys.readouterr().err
    assert all(fact in err for fact in ("2 epochs", f"{2 * once - 1:,} examples", "--steps"))


def test_frames_are_packed_for_relative_positions(capsys):
    for override, frames in (("splice.packed=null", 20), ("splice.packed=false", 40), ("model.positions=learned", 40)):
        found = covered(capsys, "splice.content_length=16", "train.B=8", override, more=["--steps", "5"])
        assert (found["examples"], found["frames"]) == (40, frames)


def test_printed_coverage(place, capsys):
    train, _ = split(place / "notes")
    chosen = ranked(train, "longest")[:3]
    arguments = options("splice.balance_mode=by_document")
    text = output(capsys, "splice", "coverage", *arguments, "--png", "new/c.png", "--html", "c.html")
    found = covered(capsys, "splice.balance_mode=by_document")
    lines = text.splitlines()
    assert "3 documents" in lines[0]
    assert f"{found['examples']:,} examples in {found['frames']:,} frames" in lines[0]
    for (i, size), document in zip(chosen, found["documents"], strict=True):
        assert (document["name"], document["tokens"]) == (train[i].name, size)
        [line] = [line for line in lines if line.startswith(train[i].name)]
        seen, supervised = document["seen"], document["supervised"]
        tokens, low, _, high, low_supervised, _, high_supervised, share = line.split()[-8:]
        assert (tokens, low, high) == (f"{size:,}", f"{min(seen):,}", f"{max(seen):,}")
        assert (low_supervised, high_supervised) == (f"{min(supervised):,}", f"{max(supervised):,}")
        assert float(share.rstrip("%")) == pytest.approx(100 / 3, abs=0.5)  # all documents equally often
    assert lines[-2:] == ["wrote new/c.png", "wrote c.html"]
    assert (place / "new/c.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    page = read((place / "c.html").read_text(encoding="utf-8"))
    assert all(any(train[i].name in cell for cell in page.texts("td")) for i, _ in chosen)


def test_long_selections_are_abbreviated(place, capsys):
    """Ten documents per policy, fifty chosen ones; the rest is counted."""
    for i in range(70):
        (place / "notes" / f"more {i:02}.md").write_text(f"note number {i:03} of some length", encoding="utf-8")
    sets = ["model.T=16", "data.roam_val_frac=0.1", "splice.num_docs=52", "splice.controls=0"]
    text = output(capsys, "splice", "select", "--roam", "notes", *(f"--set={item}" for item in sets))
    assert text.count("and 42 more") == 4
    assert "  and 2 more\n" in text
    chosen = text.split("\nchosen\n")[1].split("controls")[0].splitlines()
    assert len(chosen) == 51


def test_endless_coverage_is_refused_at_once(capsys):
    assert call("research", "splice", "coverage", *options("splice.epoch_length=4611686018427387904")) == 1
    message = error_of(capsys)
    assert "1 epoch of 4,611,686,018,427,387,904 examples" in message and "1,000,000,000 examples" in message
    assert "--steps" in message


def test_verbose_prints_the_summary_of_the_dataset(place, capsys):
    call("research", "splice", "select", *options("splice.num_docs=2"), "--verbose")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[multi_splice] ")]
    assert any("dataset=roam num_docs=2 " in line for line in lines)
    assert sum("Selected doc_idx=" in line for line in lines) >= 2
    assert any(line.startswith("[multi_splice] pairs_per_doc=[") for line in lines)
    call("research", "splice", "select", *options("splice.num_docs=2"))
    assert "[multi_splice]" not in capsys.readouterr().err


def test_steps_replace_epochs(place, capsys):
    epochs = options("splice.num_docs=1", "splice.epochs=2", "task=splice", "train.B=4")
    resolved = yaml.safe_load(output(capsys, "train", *epochs, "--print-config"))
    examples = selected(capsys, "splice.num_docs=1")["examples_per_epoch"]
    assert resolved["train"]["total_steps"] == math.ceil(2 * examples / 4)
    resolved = yaml.safe_load(output(capsys, "train", *epochs, "--steps", "7", "--print-config"))
    assert (resolved["train"]["total_steps"], resolved["splice"]["epochs"]) == (7, None)
