"""`niels-gpt eval`: the options reach the scoring, and the table shows the scores (see test_score_run for them)."""

import json
import re

import pytest

from niels_gpt.evaluation.exact import score_stream
from niels_gpt.inference import questions
from niels_gpt.report import curves
from niels_gpt.runs.checkpoint import load_model
from tests import token_caches
from tests.cli import SMALL, call, data, error_of
from tests.training import write_texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with texts and a trained run, runs/small, that has own sources too."""
    folder = tmp_path_factory.mktemp("eval")
    texts = write_texts(folder / "texts")
    (folder / "wiki").mkdir()
    for name in ("train", "validation"):
        (folder / "wiki" / f"{name}.txt").write_text(f"a row of {name}\nanother row of text\n" * 9, encoding="utf-8")
    (folder / "mine.txt").write_text("all of it is mine, and the end of it is held out. " * 40, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(curves, "plot_losses", lambda run: None)
        options = [*SMALL, *data(texts), "--wiki", "wiki", "--steps", 3, "--run-dir", "runs/small"]
        assert call("train", *options, "--set", "output.eval_every=2") == 0
        own = ["--set=data.sources={mine: {path: mine.txt, split: [0.8, 0.2]}}"]
        own += ["--set=train.p_train={mine: 1}", "--set=train.p_val={mine: 1}"]
        assert call("train", *SMALL, *own, "--steps", 1, "--run-dir", "own") == 0
    return folder


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)


def evaluated(capsys, *arguments):
    assert call("eval", *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("options", "stride", "limit"), [([], 32, None), (["--stride", 8, "--limit", 50], 8, 50)])
def test_json(capsys, options, stride, limit):
    result = evaluated(capsys, "--run", "runs/small", *options)
    model, step = load_model("runs/small/checkpoints/best.pt")
    assert result["checkpoint"] == "runs/small/checkpoints/best.pt"
    assert (result["step"], result["stride"], result["precision"]) == (step, stride, "fp32")
    assert list(result["scores"]) == ["val_wiki", "val_roam", "val_chat"]
    wiki = b"\n\n".join([b"a row of validation", b"another row of text"] * 9)[:limit]
    assert result["scores"]["val_wiki"]["bytes"] == len(wiki) - 1
    exact = score_stream(model, wiki, stride=stride)
    assert result["scores"]["val_wiki"]["nats_per_token"] == pytest.approx(exact.nats_per_token, rel=1e-9)


def test_the_table_of_the_newest_run(capsys):
    scores = evaluated(capsys, "--run", "runs/small")["scores"]
    assert call("eval") == 0
    output, errors = capsys.readouterr()
    assert errors == "using runs/small\n"
    lines = output.splitlines()
    assert lines[0].startswith("runs/small/checkpoints/best.pt after ") and " steps" in lines[0]
    compressors = [[name, kind] for kind in ("primed", "alone") for name in scores["val_roam"]["baselines"]]
    assert ["xz", "primed"] in compressors
    head = [
        "held",
        "out",
        "bytes",
        "nats/byte",
        "ppl",
        "model",
        *(word for pair in compressors for word in pair),
        "unigram",
        "uniform",
    ]
    assert lines[1].split() == head
    for line, (name, score) in zip(lines[2:5], scores.items(), strict=True):
        values = [score["bits_per_byte"], *(score["baselines"][name][kind] for name, kind in compressors)]
        numbers = [f"{value:.3f}" for value in [*values, score["unigram_bits"]]]
        measured = [f"{score['nats_per_token']:.3f}", f"{score['perplexity']:.2f}"]
        assert line.split() == [name, f"{score['bytes']:,}", *measured, *numbers, "8.000"]
    shared = [line for line in lines[6:] if "40 characters" in line]
    for line, (name, score) in zip(shared, scores.items(), strict=True):
        assert line.startswith(f"{name}: {score['held_out_lines_in_training']:.1%} ")
    worse = [name for name, score in scores.items() if score["bits_per_byte"] > score["baselines"]["xz"]["primed"]]
    assert worse == [line.partition(":")[0] for line in lines[6:] if "worse than xz" in line]


def test_the_table_says_if_wiki_is_docstrings(capsys, monkeypatch):
    from niels_gpt.data import embedded

    monkeypatch.setattr(embedded, "stdlib_files", lambda files=embedded.stdlib_files()[:25]: files)
    assert call("eval", "--run", "runs/small", "--wiki", "embedded", "--limit", 20) == 0
    line, *_ = [line for line in capsys.readouterr().out.splitlines() if line.startswith("val_wiki")]
    assert line.startswith("val_wiki (Python docstrings) ")


def test_one_checkpoint_and_bf16(capsys):
    latest = "runs/small/checkpoints/latest.pt"
    result = evaluated(capsys, "--run", "runs/small", "--checkpoint", latest, "--limit", 40, "--precision", "bf16")
    assert (result["step"], result["checkpoint"], result["precision"]) == (3, latest, "bf16")


def test_own_sources_alone_and_with_the_built_in_ones(capsys):
    """--roam asks for the built-in sources; --source moves an own one."""
    assert list(evaluated(capsys, "--run", "own")["scores"]) == ["val_mine"]
    options = ["--roam", "texts/notes", "--primer", "texts/primer.txt", "--wiki", "wiki", "--limit", 20]
    scores = evaluated(capsys, "--run", "own", *options)["scores"]
    assert list(scores) == ["val_wiki", "val_roam", "val_chat", "val_mine"]
    assert call("eval", "--run", "own", "--source", "mine=gone.txt") == 1
    assert "gone.txt" in error_of(capsys)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["--stride", 33], ["1..T=32", "33"]),
        (["--split", "train"], ["--split", "val or test", "'train'"]),
        (["--split", "test"], ["test", "data.sources.NAME.split"]),
        (["--precision", "fp16"], ["--precision", "fp32 or bf16", "'fp16'"]),
    ],
)
def test_options_that_are_refused(capsys, options, facts):
    assert call("eval", "--run", "runs/small", *options) == 1
    message = error_of(capsys)
    assert all(fact in message for fact in facts)


# --- token caches ------------------------------------------------------------------------------------


def test_a_model_with_a_tokenizer_is_scored_on_token_caches(token_runs, capsys, monkeypatch):
    monkeypatch.chdir(token_runs)
    result = evaluated(capsys, "--run", "runs/chat", "--limit", 60)
    assert result["stride"] == 16
    assert result["scores"]["val_roam"]["tokens"] == 59
    best = "runs/chat/checkpoints/best.pt"
    options = ["--checkpoint", best, "--limit", 60, "--token-cache", token_caches.folder()]
    assert evaluated(capsys, *options) == result  # the run is found from its checkpoint
    assert call("eval", "--checkpoint", best, "--token-cache", "nowhere") == 1
    assert "nowhere" in error_of(capsys)
    assert call("eval", "--run", "runs/chat", "--limit", 60) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    lines = lines[: len(result["scores"]) + 1]
    assert lines[0].split()[2:5] == ["bytes", "tokens", "nats/token"]
    for line, (name, score) in zip(lines[1:], result["scores"].items(), strict=True):
        assert line.startswith(f"{name}  ")
        numbers = line.removeprefix(name).split()
        assert numbers[:3] == [f"{score['bytes']:,}", f"{score['tokens']:,}", f"{score['nats_per_token']:.3f}"]
        assert len(numbers) == (
            5 if "(replies)" in name else 7 + 2 * len(score["baselines"])
        )  # replies have no references


# --- questions ---------------------------------------------------------------------------------------


@pytest.fixture
def question_file(tmp_path):
    """Two questions: one that every reply answers, and one that none does."""
    rows = [
        {"topic": "none", "question": "what is it?", "words": ["qqqqqqqqqqqqqqqq"]},
        {"topic": "any", "question": "who are you?", "words": ["a", "b"]},
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def replies(monkeypatch):
    """Let every model reply a text; returns the prompts that it was given."""
    prompts = []

    def reply(model, given, **_):
        prompts.extend(given)
        return [" a reply\n" for _ in given]

    monkeypatch.setattr(questions, "continue_batch", reply)
    return prompts


def test_questions_of_a_file(capsys, question_file, replies):
    result = evaluated(capsys, "runs/small", "--question-file", question_file)
    assert result["checkpoint"] == "runs/small/checkpoints/best.pt"
    assert result["on_topic"] == 0.5
    assert [row["topic"] for row in result["answers"]] == ["none", "any"]
    assert [row["on_topic"] for row in result["answers"]] == [False, True]
    assert {row["reply"] for row in result["answers"]} == {"a reply"}
    assert result["second_on_topic"] == 0.5
    assert [row["second_on_topic"] for row in result["answers"]] == [False, True]
    first = [f"user: {row['text']}\nassistant: " for row in result["answers"]]
    assert [bytes(ids).decode() for ids in replies] == [*first, *first]  # 48 bytes hold no earlier question
    assert call("eval", "runs/small", "--questions", "--question-file", question_file) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "off topic  none: what is it?" and lines[2] == "on topic   any: who are you?"
    assert re.fullmatch(r"answers on topic: 1 of 2 \(50\.0%\); 50\.0% .*", lines[-1])


@pytest.mark.usefixtures("replies")
def test_questions_of_the_package(capsys):
    asked = questions.load_questions()
    result = evaluated(capsys, "runs/small", "--questions")
    assert [row["text"] for row in result["answers"]] == [question.text for question in asked]
    assert len(asked) >= 100
    expected = sum(question.is_answered_by("a reply") for question in asked) / len(asked)
    assert result["on_topic"] == expected


def test_a_model_with_a_tokenizer_answers(token_runs, capsys, monkeypatch, question_file):
    monkeypatch.chdir(token_runs)
    result = evaluated(capsys, "runs/chat", "--question-file", question_file)
    assert len(result["answers"]) == 2 and result["answers"][0]["on_topic"] is False
    for row in result["answers"]:
        assert not row["on_topic"] or any(word in row["reply"].lower() for word in row["words"])


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("", ["no questions"]),
        ('{"question": "x?", "words": ["x"]}\nnot json\n', ["line 2"]),
        ('{"question": "x?", "words": []}\n', ["line 1", "words"]),
        ('{"question": "x?"}\n', ["line 1"]),
        (None, ["gone.jsonl"]),
    ],
)
def test_question_files_that_are_refused(capsys, tmp_path, text, facts):
    path = tmp_path / "gone.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert call("eval", "runs/small", "--questions", "--question-file", path) == 1
    message = error_of(capsys)
    assert all(fact in message for fact in [path.name, *facts])
