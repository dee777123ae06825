"""`niels-gpt splice select` and `coverage`: output, files, errors."""

from __future__ import annotations

import json
import math
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests import token_caches
from tests.cli import call, error_of
from tests.cli.reciting import VAL_FRAC, split, write_notes
from tests.report.pages import read
from tests.splice import by_coverage, by_document, by_quota, largest_remainder, shares, spans

T = 32
ONCE = ["splice.balance_mode=by_coverage"]
PNG = b"\x89PNG\r\n\x1a\n"


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


# --- select ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["first", "longest", "shortest"])
def test_select_by_each_policy(place, capsys, policy):
    train, held_out = split(place / "notes")
    found = selected(capsys, f"splice.doc_select_mode={policy}")
    assert (found["source"], found["documents"], found["candidates"]) == ("roam", len(train), len(train))
    wanted = ranked(train, policy)[:3]
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


def test_select_is_deterministic_and_trains_nothing(place, capsys):
    arguments = ["splice", "select", *options("splice.doc_select_mode=random")]
    texts = [output(capsys, *arguments) for _ in range(2)]
    assert texts[0] == texts[1]
    choices = [selected(capsys, "splice.doc_select_mode=random", f"train.seed={seed}") for seed in (1, 2)]
    assert choices[0] == choices[1]  # it depends on the documents, not on the training seed
    assert [row["document"] for row in choices[0]["chosen"]] == choices[0]["policies"]["random"]
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
    some = sum(sizes(train)[:3]) + 2 * 2  # two bytes between documents
    limited = selected(capsys, "splice.restrict_to_training_subset=true", f"splice.max_train_tokens={some}")
    assert limited["candidates"] == 3
    assert sorted(row["document"] for row in limited["chosen"]) == [0, 1, 2]


def test_select_one_document_by_number(place, capsys):
    train, _ = split(place / "notes")
    found = selected(capsys, "splice.doc_index=2", "splice.num_docs=5")
    assert [(row["document"], row["name"]) for row in found["chosen"]] == [(2, train[2].name)]
    assert {name: len(choice) for name, choice in found["policies"].items()} == dict.fromkeys(found["policies"], 1)
    assert "chosen by doc_index=2" in output(capsys, "splice", "select", *options("splice.doc_index=2"))
    assert call("splice", "select", *options("splice.doc_index=6")) == 1
    assert re.search(r"doc_index=6.* 6 ", error_of(capsys))


def test_a_document_outside_the_limits_is_replaced_with_a_warning(place, capsys, caplog):
    train, _ = split(place / "notes")
    (shortest, size), *_ = ranked(train, "shortest")
    (longest, _), *_ = ranked(train, "longest")
    found = selected(capsys, f"splice.doc_index={shortest}", f"splice.min_doc_length={size + 1}")
    assert [row["document"] for row in found["chosen"]] == [longest]
    assert re.search(rf"{shortest} .*{size} ", caplog.text)


def test_too_many_documents(capsys):
    assert call("splice", "select", *options("splice.num_docs=50")) == 1
    message = error_of(capsys)
    assert re.search(r"splice\.num_docs=50.* 6 of 6 ", message)
    assert "strict_num_docs=false" in message
    assert call("splice", "select", *options("splice.num_docs=50")) == 1
    shown = capsys.readouterr().out
    assert "6 within the limits" in shown and "tokens per document" in shown  # the candidates are shown
    assert "num_docs" not in shown


def test_missing_documents_are_filled_up_with_a_warning(place, capsys, caplog):
    train, _ = split(place / "notes")
    low = sorted(sizes(train))[-2]
    found = selected(capsys, f"splice.min_doc_length={low}", "splice.num_docs=4", "splice.strict_num_docs=false")
    assert [row["document"] for row in found["chosen"]] == [i for i, _ in ranked(train, "longest")[:4]]
    assert re.search(r"2 of .*4 ", caplog.text)


@pytest.mark.parametrize(
    ("overrides", "mentioned"),
    [
        (["splice.min_doc_length=100000"], "0 of 6 "),
        (["splice.min_doc_length=9", "splice.max_doc_length=5"], "min_doc_length=9"),
        (["splice.content_stride=0"], "splice.content_stride"),
        (["splice.balance_tau=1.5"], "balance_tau"),
        (["splice.content_length=1"], "splice.content_length"),
        (["splice.min_copy_len=1000"], "min_copy_len=1000"),
        (["splice.doc_weights=[1, 2]"], "doc_weights"),
        (["splice.groups=[a, b]"], "groups"),
        (["splice.doc_select_mode=best"], "doc_select_mode"),
        (["splice.dataset_name=letters"], "letters"),
        (["splice.restrict_to_training_subset=true"], "max_train_tokens"),
        (["splice.adaptive_k=false", "model.T=2000"], "K=2000"),
        (["splice.num_doc=3"], "num_docs"),
    ],
)
def test_errors_are_one_line(capsys, overrides, mentioned):
    assert call("splice", "select", *options(*overrides)) == 1
    message = error_of(capsys)
    assert mentioned in message
    assert call("splice", "coverage", *options(*overrides)) == 1
    assert error_of(capsys) == message


def test_a_config_file(place, capsys):
    config = {"task": "splice", "model": {"T": T}, "splice": {"num_docs": 2}, "data": {"roam": "notes"}}
    (place / "c.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    found = json.loads(output(capsys, "splice", "select", "--config", "c.yaml", "--json"))
    assert len(found["chosen"]) == 2
    found = json.loads(output(capsys, "splice", "select", "--config", "c.yaml", "--set", "splice.num_docs=4", "--json"))
    assert len(found["chosen"]) == 4
    assert call("splice", "select", "--config", "none.yaml") == 1
    assert "none.yaml" in error_of(capsys)


@pytest.mark.parametrize(("command", "task"), [("select", "bytes"), ("coverage", "pretrain"), ("study", "sft")])
def test_a_config_of_another_task(place, capsys, command, task):
    (place / "c.yaml").write_text(f"task: {task}\n", encoding="utf-8")
    assert call("splice", command, "--config", "c.yaml") == 1
    message = error_of(capsys)
    assert "c.yaml" in message
    assert f"task {task}" in message
    assert "splice" in message
    assert not (place / "runs").exists()


def test_the_embedded_notes_are_the_default(place, capsys):
    found = json.loads(output(capsys, "splice", "select", "--json"))
    assert (found["source"], found["place"]) == ("roam", "embedded")
    assert len(found["chosen"]) == 10
    lengths = [row["length"] for row in found["chosen"]]
    assert lengths == sorted(lengths, reverse=True)


def test_names_that_are_markup(place, capsys):
    text = "".join(f"word {i} of a long note; " for i in range(60))
    (place / "notes" / "[bold]a[red] é.md").write_text(text, encoding="utf-8")
    shutil.copytree(place / "notes", place / "copy")
    shutil.move(place / "copy", place / "notes" / "twice")  # two of each name
    wanted = options("splice.num_docs=12", "data.roam_val_frac=0.1")
    shown = output(capsys, "splice", "select", *wanted)
    assert "[bold]a[red] é.md" in shown
    found = json.loads(output(capsys, "splice", "select", *wanted, "--json"))
    names = [row["name"] for row in found["chosen"]]
    assert len(set(names)) == len(names) == 12


# --- select: token caches ----------------------------------------------------------------------------


def cache_options(*overrides, root):
    sets = ("splice.documents=tokens", f"data.token_cache={root}", "model.T=16", "splice.num_docs=2", *overrides)
    return [f"--set={item}" for item in sets]


def document_lengths(root, name, split="train"):
    starts = token_caches.read_offsets(root / "pretrain" / name / split / "documents.npy")
    return [b - a for a, b in pairwise([*starts, len(token_caches.stream(name, split, root))])]


@pytest.mark.parametrize("name", ["roam", "fineweb_edu"])
def test_select_from_a_token_cache(capsys, name):
    root = token_caches.folder()
    lengths = document_lengths(root, name)
    arguments = cache_options(f"splice.dataset_name={name}", root=root)
    found = json.loads(output(capsys, "splice", "select", *arguments, "--json"))
    wanted = sorted(enumerate(lengths), key=lambda item: -item[1])[:2]
    assert found["documents"] == len(lengths)
    assert [(row["document"], row["length"]) for row in found["chosen"]] == wanted
    assert {row["length"] for row in found["controls"]} <= set(document_lengths(root, name, "val"))


def test_missing_caches_and_documents(place, capsys):
    root = token_caches.copy_to(place / "cache")
    assert call("splice", "select", *cache_options("splice.dataset_name=dolly15k", root=root)) == 1
    assert "dolly15k" in error_of(capsys)
    assert call("splice", "select", *cache_options(root="nowhere")) == 1
    assert "nowhere" in error_of(capsys)
    (root / "pretrain/roam/train/documents.npy").unlink()
    assert call("splice", "select", *cache_options(root=root)) == 1
    assert "documents.npy" in error_of(capsys)
    shutil.move(root / "pretrain/roam", root / "pretrain/notes")
    assert call("splice", "select", *cache_options(root=root)) == 1
    message = error_of(capsys)
    for part in ("fineweb_edu", "notes", "splice.dataset_name"):
        assert part in message


def test_ids_past_the_vocabulary(place, capsys):
    root = token_caches.copy_to(place / "cache")
    shard = root / "pretrain/roam/train/shard_00000.bin"
    data = bytearray(shard.read_bytes())
    data[20:22] = b"\xff\xff"
    shard.write_bytes(data)
    for command in (["splice", "select"], ["splice", "study", "--out=study", "--vary=splice.num_docs=1,2"]):
        capsys.readouterr()
        assert call(*command, *cache_options("splice.doc_key=note", root=root)) == 1
        message = error_of(capsys)
        for part in ("document 0 ", "pretrain/roam/train", "65535", "niels-gpt cache verify"):
            assert part in message


@pytest.mark.parametrize("name", ["pad_token_id", "eos_token_id"])
def test_select_with_a_filler_outside_the_vocabulary(capsys, name):
    assert call("splice", "select", *options(f"splice.{name}=256"), "--json") == 1
    assert re.search(rf"splice\.{name}.*255.*256", error_of(capsys))


def test_select_warns_once(caplog):
    assert call("splice", "select", *options("splice.content_length=90", "splice.offset_jitter=2")) == 0
    said = [record.getMessage() for record in caplog.records if record.name == "niels_gpt.splice"]
    assert sorted(line.split()[0] for line in said) == ["content_length=90", "offset_jitter=2"]


def test_a_copy_of_a_training_document_is_no_control(place, capsys):
    _, held_out = split(place / "notes")
    [control] = selected(capsys)["controls"]
    chosen = selected(capsys)["chosen"][1]["name"]
    shutil.copy(place / "notes" / chosen, place / "notes" / control["name"])
    [other] = selected(capsys)["controls"]
    assert other["name"] in {path.name for path in held_out} - {control["name"]}


# --- coverage ----------------------------------------------------------------------------------------


def count(rows, lengths):
    """Count seen and supervised of every token of every document, span by span."""
    seen = [[0] * length for length in lengths]
    supervised = [[0] * length for length in lengths]
    for number, t, _, length in rows:
        for i in range(length):
            at = (t + i) % lengths[number]
            seen[number][at] += 1
            supervised[number][at] += i > 0
    return seen, supervised


@pytest.mark.parametrize(
    ("overrides", "how"),
    [
        (ONCE, "coverage"),
        (["splice.balance_mode=by_document"], "document"),
        (["splice.balance_tau=0"], 0),
        (["splice.balance_tau=0.5"], 0.5),
        (["splice.balance_tau=1"], 1),
        ([*ONCE, "splice.content_length=20", "splice.content_stride=7"], "coverage"),
        ([*ONCE, "splice.content_start_mode=cyclic_roll"], "coverage"),
        ([*ONCE, "splice.content_start_mode=anchor_start", "splice.offset_bound=truncate"], "coverage"),
        ([*ONCE, "splice.mode=slide"], "coverage"),
    ],
)
def test_coverage_of_an_epoch(place, capsys, overrides, how):
    train, _ = split(place / "notes")
    chosen = ranked(train, "longest")[:3]
    lengths = [size for _, size in chosen]
    names = ("content_length", "content_stride", "content_start_mode", "offset_bound", "mode")
    given = dict(item.removeprefix("splice.").split("=") for item in overrides)
    layout = {name: int(value) if value.isdigit() else value for name, value in given.items() if name in names}
    each = [spans(S=T, L=length, **layout) for length in lengths]
    if how in ("coverage", "document"):
        rows = by_coverage(each) if how == "coverage" else by_document(each)
    else:
        probabilities = shares(lengths, [True] * 3, tau=how)
        rows = by_quota(each, largest_remainder(probabilities, sum(map(len, each))))
    found = covered(capsys, *overrides)
    assert found["examples"] == len(rows)
    assert [(d["name"], d["tokens"]) for d in found["documents"]] == [(train[i].name, size) for i, size in chosen]
    wanted = count(rows, lengths)
    for document, seen, supervised in zip(found["documents"], *wanted, strict=True):
        assert document["seen"] == seen
        assert document["supervised"] == supervised


@pytest.mark.parametrize("tau", [0, 0.5, 1])
def test_tau_shares_by_the_closed_form(place, capsys, tau):
    train, _ = split(place / "notes")
    lengths = [size for _, size in ranked(train, "longest")[:3]]
    found = covered(capsys, f"splice.balance_tau={tau}", "splice.epoch_length=20000")
    mass = [length**tau for length in lengths]
    seen = [sum(document["seen"]) for document in found["documents"]]
    assert sum(seen) == 20_000 * T
    for got, wanted in zip(seen, mass, strict=True):
        assert got / sum(seen) == pytest.approx(wanted / sum(mass), abs=1e-4)


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


def test_frames_are_packed_for_relative_positions(capsys):
    for overrides, packed in (
        ([], True),
        (["splice.packed=false"], False),
        (["model.positions=learned"], False),
    ):
        found = covered(capsys, "splice.content_length=16", "train.B=8", *overrides, more=["--steps", "5"])
        assert (found["examples"], found["frames"]) == (40, 20 if packed else 40)


def test_printed_coverage(place, capsys):
    train, _ = split(place / "notes")
    chosen = ranked(train, "longest")[:3]
    arguments = options("splice.balance_mode=by_document")
    text = output(capsys, "splice", "coverage", *arguments, "--png", "c.png", "--html", "c.html")
    found = covered(capsys, "splice.balance_mode=by_document")
    lines = text.splitlines()
    assert "3 documents" in lines[0]
    assert f"{found['examples']:,} examples in {found['frames']:,} frames" in lines[0]
    for (i, size), document in zip(chosen, found["documents"], strict=True):
        [line] = [line for line in lines if line.startswith(train[i].name)]
        assert re.search(r"[▁▂▃▄▅▆▇█]{20}", line)
        numbers = line.split()[-8:]
        seen, supervised = document["seen"], document["supervised"]
        assert numbers[0] == f"{size:,}"
        assert (numbers[1], numbers[3]) == (f"{min(seen):,}", f"{max(seen):,}")
        assert (numbers[4], numbers[6]) == (f"{min(supervised):,}", f"{max(supervised):,}")
        assert float(numbers[7].rstrip("%")) == pytest.approx(100 / 3, abs=0.5)  # all documents equally often
    assert lines[-2:] == ["wrote c.png", "wrote c.html"]
    assert (place / "c.png").read_bytes().startswith(PNG)
    page = read((place / "c.html").read_text(encoding="utf-8"))
    for i, _ in chosen:
        assert any(train[i].name in cell for cell in page.texts("td"))
    assert len(page.all("svg")) >= 3


def test_coverage_needs_no_run(place, capsys):
    assert "documents" in output(capsys, "splice", "coverage", "--steps", "2")  # embedded notes, the default model
    assert not (place / "runs").exists()


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--epochs", "0"], ["--steps", "many"]])
def test_usage_errors(capsys, arguments):
    assert call("splice", "coverage", *options(), *arguments) == 2
    assert "Usage: niels-gpt" in capsys.readouterr().err


def test_missing_folders(capsys):
    assert call("splice", "coverage", *options(), "--png", "new/c.png") == 0
    assert Path("new/c.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert call("splice", "coverage", "--roam", "elsewhere") == 1
    assert "elsewhere" in error_of(capsys)


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
