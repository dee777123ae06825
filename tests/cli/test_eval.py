import json
import math
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from niels_gpt.config.yaml_file import load_config
from niels_gpt.evaluation.exact import score_stream
from niels_gpt.runs.checkpoint import load_model
from niels_gpt.training.tasks.registry import open_task
from tests.cli import SMALL, call, data, error_of
from tests.training import DELIMITER, write_texts


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with texts and a trained run, runs/small."""
    folder = tmp_path_factory.mktemp("measuring")
    texts = write_texts(folder / "texts")
    strange = "# [[draft]] :smile:\n\nsee [[other note]] and [bold]this[/bold] :warning: it's \\here [/]\n" * 30
    (texts / "notes" / "a [draft] note.md").write_text(strange, encoding="utf-8")
    wiki = folder / "wiki"
    wiki.mkdir()
    for name in ("train", "validation"):
        (wiki / f"{name}.txt").write_text(f"a row of {name}\nanother row of text\n" * 20, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        options = [*SMALL, *data(texts), "--wiki", wiki, "--steps", 3, "--run-dir", "runs/small"]
        assert call("train", *options, "--set", "output.eval_every=2") == 0
    return folder


@pytest.fixture(autouse=True)
def there(place, monkeypatch):
    monkeypatch.chdir(place)


def held_out(texts):
    """The held-out notes and dialogues, by the contract's split."""
    notes = sorted(str(path) for path in (texts / "notes").iterdir())
    blocks = (texts / "primer.txt").read_text(encoding="utf-8").split(DELIMITER)
    streams = []
    for items, read, gap in ((notes, lambda path: Path(path).read_bytes(), b"\n\n"), (blocks, str.encode, None)):
        order = torch.randperm(len(items), generator=torch.Generator().manual_seed(42))
        out = set(order[: max(1, int(len(items) * 0.1))].tolist())
        streams.append((gap or DELIMITER.encode()).join(read(x) for i, x in enumerate(items) if i in out))
    return streams


# --- eval --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [None, 8])
def test_eval_json_is_the_exact_score_of_every_held_out_stream(place, capsys, stride):
    options = [] if stride is None else ["--stride", stride]
    assert call("eval", "--run", "runs/small", "--json", *options) == 0
    result = json.loads(capsys.readouterr().out)
    model, step = load_model("runs/small/checkpoints/best.pt")
    assert result["checkpoint"] == "runs/small/checkpoints/best.pt"
    assert (result["step"], result["stride"]) == (step, stride or 32)
    roam, primer = held_out(place / "texts")
    wiki = b"\n\n".join([b"a row of validation", b"another row of text"] * 20)
    assert list(result["scores"]) == ["val_wiki", "val_roam", "val_chat"]
    for name, stream in (("val_wiki", wiki), ("val_roam", roam), ("val_chat", primer)):
        scores = result["scores"][name]
        exact = score_stream(model, stream, stride=stride)
        assert scores["bytes"] == exact.tokens == len(stream) - 1
        assert scores["nats_per_token"] == pytest.approx(exact.nats_per_token, rel=1e-9)
        assert scores["bits_per_byte"] == pytest.approx(exact.nats_per_token / math.log(2))
        assert scores["perplexity"] == pytest.approx(math.exp(exact.nats_per_token))
        assert scores["uniform_bits"] == 8.0
        assert {"unigram_bits", "gzip_bits", "xz_bits"} < set(scores)


def test_a_smaller_stride_gives_other_numbers(capsys):
    values = []
    for stride in (32, 1):
        assert call("eval", "--run", "runs/small", "--json", "--stride", stride) == 0
        values.append(json.loads(capsys.readouterr().out)["scores"]["val_roam"]["nats_per_token"])
    assert values[0] != values[1]


def test_eval_table(capsys):
    assert call("eval", "--run", "runs/small", "--json") == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert call("eval") == 0  # the newest run
    output, errors = capsys.readouterr()
    assert errors == "using runs/small\n"
    for name, score in scores.items():
        row = next(line.split() for line in output.splitlines() if line.startswith(name))
        assert row[1] == f"{score['bytes']:,}"
        assert float(row[4]) == pytest.approx(score["bits_per_byte"], abs=6e-4)
        assert float(row[-1]) == 8.0


def test_eval_of_one_checkpoint(capsys):
    assert call("eval", "--run", "runs/small", "--checkpoint", "runs/small/checkpoints/latest.pt", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"] == 3
    assert result["checkpoint"] == "runs/small/checkpoints/latest.pt"


def test_eval_of_own_sources_scores_no_others(tmp_path, monkeypatch, capsys):
    """A run that learned from own sources only says nothing about the texts of the package."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("all of it is mine, and the end of it is held out. " * 40, encoding="utf-8")
    own = ["--set=data.sources={mine: {path: mine.txt, split: [0.8, 0.2]}, other: {path: none}}"]
    own += ["--set=train.p_train={mine: 1}", "--set=train.p_val={mine: 1}"]
    assert call("train", *SMALL, *own, "--steps", 1, "--run-dir", "out") == 0
    capsys.readouterr()
    assert call("eval", "--run", "out", "--json") == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert list(scores) == ["val_mine"]
    assert scores["val_mine"]["bytes"] == 400 - 1


def test_a_stride_past_the_context(capsys):
    assert call("eval", "--run", "runs/small", "--stride", 33) == 1
    assert "1..T=32" in error_of(capsys)


# --- batch show --------------------------------------------------------------------------------------


def rows(step):
    return open_task(load_config("runs/small/config.yaml")).origins(step)


@pytest.mark.parametrize("step", [0, 2, 100])
def test_batch_show_json(place, capsys, step):
    assert call("batch", "show", "--run", "runs/small", "--step", step, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    batch = open_task(load_config("runs/small/config.yaml")).batch(step)
    assert [row["row"] for row in shown] == [0, 1, 2, 3]
    for row, ids in zip(shown, batch.x, strict=True):
        assert row["text"] == bytes(ids.tolist()).decode("utf-8", errors="replace")
        assert row["source"] in ("roam", "primer")
        if row["source"] == "roam":
            document = Path(row["document"]).read_bytes() + b"\n\n"
            here = document[row["offset"] :]
            assert bytes(ids.tolist())[: len(here)] == here[:32]


def test_batch_show_prints_source_document_offset_and_text_of_each_row(place, capsys):
    """Also for names and texts that look like the markup or the emoji of a terminal library."""
    seen_strange = False
    for step in range(12):
        assert call("batch", "show", "--run", "runs/small", "--step", step) == 0
        output = capsys.readouterr().out
        assert output.startswith(f"step {step} of 3")
        assert ("past the end" in output) == (step >= 3)
        blocks = output.split("\n\n")[1:]
        wanted = rows(step)
        assert len(blocks) == len(wanted) == 4
        for block, row in zip(blocks, wanted, strict=True):
            head, _, text = block.partition("\n")
            assert head.startswith(f"row {row.row}  {row.source}  {row.document}  offset {row.offset} ")
            assert text.rstrip("\n") == repr(row.text)[1:-1]
            seen_strange |= "[draft]" in row.document
    assert seen_strange


def test_batch_show_of_a_name_of_another_encoding(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = write_texts(tmp_path / "texts")
    for path in (texts / "notes").iterdir():
        path.rename(path.parent / os.fsdecode(b"caf\xe9 " + os.fsencode(path.name)))
    assert call("train", *SMALL, *data(texts), "--steps", 1, "--run-dir", "out") == 0
    for options in ([], ["--json"]):
        capsys.readouterr()
        sys.stdout.reconfigure(errors="strict")  # as a terminal
        assert call("batch", "show", "--run", "out", "--step", 0, *options) == 0
        output = capsys.readouterr().out
        assert r"caf\udce9 note_" in output
    wanted = [row.document for row in open_task(load_config("out/config.yaml")).origins(0)]
    assert [row["document"] for row in json.loads(output)] == wanted


def test_batch_show_cuts_long_texts(place, capsys):
    assert call("batch", "show", "--run", "runs/small", "--step", 1, "--chars", 5) == 0
    output = capsys.readouterr().out
    for row in rows(1):
        assert repr(row.text[:5])[1:-1] + "..." in output
    assert call("batch", "show", "--run", "runs/small", "--step", 1, "--chars", 0) == 0
    assert "..." not in re.sub(r"/\.\.\.", "", capsys.readouterr().out)


def test_long_texts_stay_on_one_line(tmp_path, monkeypatch, capsys):
    """A pipe has no width: nothing is broken into lines that the text does not have."""
    monkeypatch.chdir(tmp_path)
    texts = write_texts(tmp_path / "texts")
    assert call("train", *SMALL, *data(texts), "--steps", 1, "--run-dir", "out", "--set", "model.T=150") == 0
    capsys.readouterr()
    assert call("batch", "show", "--run", "out", "--step", 0) == 0
    output = capsys.readouterr().out
    for row in open_task(load_config("out/config.yaml")).origins(0):
        assert repr(row.text)[1:-1] in output


def test_batch_show_on_changed_data_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = write_texts(tmp_path / "texts")
    assert call("train", *SMALL, *data(texts), "--steps", 1, "--run-dir", "out") == 0
    capsys.readouterr()
    primer = texts / "primer.txt"
    primer.write_text(primer.read_text(encoding="utf-8").replace("the", "THE"), encoding="utf-8")
    assert call("batch", "show", "--run", "out", "--step", 0) == 1
    message = error_of(capsys)
    assert "primer" in message
    assert "roam" not in message
