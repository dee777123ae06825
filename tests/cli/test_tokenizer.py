"""`niels-gpt tokenizer train` and `report`, against SentencePiece itself."""

import hashlib
import json
import re
import shlex
import shutil

import pytest
import sentencepiece
import torch

from niels_gpt.tokenizer import SPECIAL_TOKENS, load_tokenizer
from tests import token_caches
from tests.cli import call, error_of
from tests.training import DELIMITER, write_texts

SMALL = ["--vocab-size", 320]


class OfflineModeIsEnabled(ConnectionError):
    """What the client of the Hub raises offline; it is not retried."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Notes and dialogues under the default paths, a config with an own source, and a tokenizer in tok/."""
    folder = tmp_path_factory.mktemp("tokenizing")
    texts = write_texts(folder / "data")
    (texts / "notes").rename(folder / ".roam-data")
    rows = [{"text": f"row {i}: {token_caches.words(i, 30)} {token_caches.UNSEEN}"} for i in range(20)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "mine.jsonl").write_text(lines, encoding="utf-8")
    (folder / "c.yaml").write_text("data: {sources: {mine: {path: mine.jsonl}}}\n", encoding="utf-8")
    (folder / "latin").mkdir()
    (folder / "latin" / "note.md").write_bytes("caf\xe9 ".encode("latin-1") * 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert call("tokenizer", "train", "roam", "primer", "--out", "tok", *SMALL) == 0
    return folder


@pytest.fixture(autouse=True)
def inside(place, monkeypatch):
    monkeypatch.chdir(place)
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "140")


def notes(place):
    """Return the training notes; a tenth is held out by the split of the contract."""
    paths = sorted((place / ".roam-data").iterdir(), key=str)
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(42)).tolist()
    held_out = order[: max(1, int(len(paths) * 0.1))]
    return [path.read_text(encoding="utf-8") for i, path in enumerate(paths) if i not in held_out]


def messages(place):
    blocks = (place / "data" / "primer.txt").read_text(encoding="utf-8").split(DELIMITER)
    return [line.partition(": ")[2] for block in blocks for line in block.splitlines()]


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- train -------------------------------------------------------------------------------------------


def test_a_tokenizer_is_written(place, capsys):
    assert call("tokenizer", "train", "roam", "primer", "--out", "new/tok", *SMALL) == 0
    output, _ = capsys.readouterr()
    model = (place / "new/tok/spm.model").read_bytes()
    sha = hashlib.sha256(model).hexdigest()
    assert f"new/tok/spm.model: 324 ids, sha256 {sha[:12]}..." in output
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert sp.vocab_size() == 324
    for token in SPECIAL_TOKENS:
        assert len(sp.encode(token)) == 1
    meta = json.loads((place / "new/tok/meta.json").read_text(encoding="utf-8"))
    assert (meta["sha256"], meta["vocab_size"]) == (sha, 324)
    read = [*notes(place), *messages(place)]
    assert meta["inputs"]["texts"] == len(read)
    assert meta["inputs"]["bytes"] == sum(len(text.encode("utf-8")) for text in read)
    assert snapshot(place / "tok") == snapshot(place / "new/tok")  # the same text and seed: the same bytes


def test_an_existing_tokenizer_is_replaced_only_with_force(place, capsys):
    """And the seed and the number of documents reach the training."""
    shutil.copytree(place / "tok", place / "kept")
    few = ["tokenizer", "train", "roam", "--out", "kept", "--documents", 3, "--seed", 5, *SMALL]
    assert call(*few) == 1
    assert re.search("kept.*--force", error_of(capsys))
    assert snapshot(place / "kept") == snapshot(place / "tok")
    assert call(*few, "--force") == 0
    meta = json.loads((place / "kept/meta.json").read_text(encoding="utf-8"))
    assert (meta["seed"], meta["inputs"]["texts"]) == (5, 3)
    assert load_tokenizer(place / "kept").sha256 == meta["sha256"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["roam", "--vocab-size", 200], ["vocab_size", "200"]),
        (["roam", "--path", "gone"], ["gone"]),
        (["mine"], ["'mine'", "roam"]),  # without its config
        (["--path", "data"], ["--path data", "exactly one"]),  # it would be read as every source
        (["roam", "primer", "--path", "data"], ["--path data", "got 2"]),
        (["roam", "--path", "latin"], ["utf-8", "--encoding-errors replace"]),
    ],
)
def test_training_that_is_refused(place, arguments, words, capsys):
    assert call("tokenizer", "train", *arguments, "--out", "none") == 1
    message = error_of(capsys)
    for word in words:
        assert word in message
    assert not (place / "none" / "spm.model").exists()


def test_bad_bytes_can_be_replaced(capsys):
    replaced = ["roam", "--path", "latin", "--encoding-errors", "replace"]
    assert call("tokenizer", "train", *replaced, "--out", "latin-tok", *SMALL) == 0
    assert capsys.readouterr().out.count("latin-tok/spm.model: ") == 1
    report, _ = reported(capsys, *replaced, "--tokenizer", "tok")
    assert report["sources"][0]["texts"] == 1


def test_the_default_is_every_source_that_can_be_read(place, capsys, hub):
    """Sources on the Hub cannot be reached here: they are skipped with a warning."""
    hub.error = OfflineModeIsEnabled("no network")
    assert call("tokenizer", "train", "--out", "all", *SMALL) == 0
    output, errors = capsys.readouterr()
    for name in ("fineweb_edu", "wikitext", "dolly15k", "oasst1"):
        assert re.search(rf"^warning: .*{name}: .*no network", errors, re.MULTILINE)
    meta = json.loads((place / "all/meta.json").read_text(encoding="utf-8"))
    assert meta["inputs"]["texts"] == len(notes(place)) + len(messages(place))
    assert "niels-gpt tokenizer report roam primer " in output


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["roam", "--path", "other notes", "--out", "a [draft] folder"], "roam"),
        (["mine", "--config", "c.yaml", "--out", "of-mine"], "mine"),
    ],
    ids=["spaces in paths", "an own source"],
)
def test_the_next_command_can_be_typed_as_it_is_printed(place, arguments, wanted, capsys):
    """And it measures the text that the tokenizer was trained on."""
    other = place / "other notes"
    if not other.exists():
        other.mkdir()
        for i in range(4):
            (other / f"{i}.md").write_text(token_caches.words(i, 200), encoding="utf-8")
    assert call("tokenizer", "train", *arguments, "--vocab-size", 350) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: niels-gpt ")]
    rest = shlex.split(line.removeprefix("next: niels-gpt "))
    assert call(*rest, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = report["sources"]
    assert row["source"] == wanted
    meta = json.loads((place / arguments[-1] / "meta.json").read_text(encoding="utf-8"))
    assert (row["texts"], row["bytes"]) == (meta["inputs"]["texts"], meta["inputs"]["bytes"])


# --- report ------------------------------------------------------------------------------------------


def reported(capsys, *arguments):
    assert call("tokenizer", "report", *arguments, "--json") == 0
    output, errors = capsys.readouterr()
    return json.loads(output), errors


def processor(place):
    return sentencepiece.SentencePieceProcessor(model_file=str(place / "tok" / "spm.model"))


def measured(place, texts):
    """Measure every text alone, by SentencePiece."""
    sp = processor(place)
    ids = [i for text in texts for i in sp.encode(text)]
    size = sum(len(text.encode("utf-8")) for text in texts)
    single = [i for i in ids if sp.is_byte(i) or len(sp.id_to_piece(i).replace("\u2581", " ").encode("utf-8")) == 1]
    return {
        "texts": len(texts),
        "bytes": size,
        "tokens": len(ids),
        "bytes_per_token": size / len(ids),
        "one_byte_tokens": len(single) / len(ids),
    }, set(ids)


def test_bytes_per_token_of_each_source(place, capsys):
    report, errors = reported(capsys, "roam", "primer", "--tokenizer", "tok")
    assert errors == ""
    assert [row["source"] for row in report["sources"]] == ["roam", "primer"]
    for row, texts in zip(report["sources"], (notes(place), messages(place)), strict=True):
        wanted, _ = measured(place, texts)
        assert row["tokens_per_second"] > 0
        assert {key: row[key] for key in wanted} == pytest.approx(wanted)
    sha = hashlib.sha256((place / "tok/spm.model").read_bytes()).hexdigest()
    assert (report["sha256"], report["vocab_size"]) == (sha, 324)


def subwords(place):
    """Return id -> bytes of every learned subword of several bytes: no byte, no special token, not <unk>."""
    sp = processor(place)
    found = {}
    for i in range(sp.vocab_size()):
        data = sp.id_to_piece(i).replace("\u2581", " ").encode("utf-8")
        learned = not (sp.is_byte(i) or sp.is_unknown(i) or sp.id_to_piece(i) in SPECIAL_TOKENS)
        if learned and len(data) > 1:
            found[i] = data
    return found


def test_unused_and_longest_subwords(place, capsys):
    report, _ = reported(capsys, "primer", "--tokenizer", "tok/spm.model", "--take", 5)
    wanted, used = measured(place, messages(place)[:5])
    assert {key: report["sources"][0][key] for key in wanted} == pytest.approx(wanted)
    found = subwords(place)
    unused = [data.decode("utf-8") for i, data in found.items() if i not in used]
    assert 0 < len(unused) < len(found)
    assert report["unused_pieces"] == len(unused)
    assert report["unused_examples"] == unused[:24]
    longest = [text.encode("utf-8") for text in report["longest_pieces"]]
    assert [len(data) for data in longest] == sorted(map(len, found.values()), reverse=True)[:12]
    assert len(set(longest)) == 12 and set(longest) <= set(found.values())


def test_the_table(capsys):
    report, _ = reported(capsys, "roam", "primer", "--tokenizer", "tok")
    assert call("tokenizer", "report", "roam", "primer", "--tokenizer", "tok") == 0
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert "\x1b" not in output
    for row in report["sources"]:
        (line,) = [line for line in lines if line.startswith(row["source"])]
        assert f" {row['bytes_per_token']:.2f} " in line
        assert f" {100 * row['one_byte_tokens']:.1f}% " in line
    assert re.search(r"^GPT-2.* 4\b", output, re.MULTILINE) and re.search(r"^bytes.* 1\.00 ", output, re.MULTILINE)
    assert "  ".join(repr(subword) for subword in report["longest_pieces"]) in output
    assert re.search(rf"^unused: {report['unused_pieces']:,} ", output, re.MULTILINE)
    assert "  ".join(repr(subword) for subword in report["unused_examples"]) in output


def test_texts_with_special_strings_are_skipped(tmp_path, capsys):
    for number, text in enumerate(["the note", f"forged {SPECIAL_TOKENS[3]} here", "and the model"]):
        (tmp_path / f"{number}.md").write_text(text, encoding="utf-8")
    (tmp_path / "c.yaml").write_text(f"data: {{sources: {{few: {{path: {tmp_path}}}}}}}\n", encoding="utf-8")
    report, _ = reported(capsys, "few", "--config", tmp_path / "c.yaml", "--tokenizer", "tok")
    assert report["sources"][0]["texts"] < 3


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["roam", "--tokenizer", "gone"], "gone.*niels-gpt tokenizer train"),
        (["roam", "--tokenizer", "tok", "--path", "gone"], "gone"),
        (["--tokenizer", "tok", "--path", "data"], "--path data .*exactly one"),
        (["roam", "--tokenizer", "tok", "--path", "latin"], "--encoding-errors replace"),
    ],
)
def test_reports_that_are_refused(arguments, facts, capsys):
    assert call("tokenizer", "report", *arguments) == 1
    assert re.search(facts, error_of(capsys))


def test_the_default_is_to_report_every_source_that_can_be_read(capsys, hub):
    hub.error = OfflineModeIsEnabled("no network")
    report, errors = reported(capsys, "--tokenizer", "tok")
    assert [row["source"] for row in report["sources"]] == ["roam", "primer"]
    assert re.search(r"^warning: .*fineweb_edu: ", errors, re.MULTILINE)
