"""Questions for a chat model: reading them, asking them, and judging the answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from niels_gpt.data.embedded import QUESTIONS
from niels_gpt.inference import questions as module
from niels_gpt.inference.conversation import Conversation
from niels_gpt.inference.questions import Answer, Question, as_second_questions, ask, load_questions, share_on_topic
from tests.inference.models import GREEDY, spread_model
from tests.token_caches import tokenizer

SEED = Question("seed", "what is a seed?", ("random", "start number"))


@pytest.mark.parametrize(
    ("reply", "on_topic"),
    [
        ("a random number", True),
        ("Randomness decides.", True),
        ("it is the START NUMBER of all draws", True),
        ("pseudorandom", False),
        ("a number at the start", False),
        ("", False),
    ],
)
def test_an_answer_on_topic_has_one_of_the_words(reply: str, on_topic: bool) -> None:
    assert SEED.is_answered_by(reply) is on_topic


def test_words_are_no_patterns() -> None:
    assert not Question("", "?", ("a.b",)).is_answered_by("axb") and Question("", "?", ("a.b",)).is_answered_by("a.b")


def test_questions_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    rows = [
        '{"topic": "seed", "question": "what is a seed?", "words": ["random", "start number"], "more": 1}',
        "  ",
        '{"question": "où est la graine ?", "words": ["é"]}',
    ]
    path.write_text("\n".join(rows), encoding="utf-8")
    assert load_questions(path) == load_questions(str(path)) == [SEED, Question("", "où est la graine ?", ("é",))]
    assert len(load_questions()) == len(QUESTIONS.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(
    "line",
    [
        "what is a seed?",
        "[]",
        '{"question": ' + "[" * 100_000,
        "3",
        '{"question": "what?"}',
        '{"words": ["a"]}',
        '{"question": " ", "words": ["a"]}',
        '{"question": "what?", "words": []}',
        '{"question": "what?", "words": "seed"}',
        '{"question": "what?", "words": ["seed", " "]}',
        '{"question": "what?", "words": [1]}',
        '{"question": 1, "words": ["seed"]}',
        '{"topic": 1, "question": "what?", "words": ["seed"]}',
    ],
)
def test_lines_that_are_no_questions(line: str, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('\n{"question": "what?", "words": ["seed"]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"q\.jsonl, line 3.*\"words\""):
        load_questions(path)


def test_a_file_without_questions(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("\n \n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"q\.jsonl"):
        load_questions(path)


@pytest.mark.parametrize("kind", ["bytes", "tokens"])
def test_answers_are_those_of_separate_conversations(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOGETHER", 3)
    pieces = tokenizer() if kind == "tokens" else None
    model = spread_model(V=256 if pieces is None else pieces.vocab_size, T=64, dropout=0.0)
    asked = [Question(str(number), f"what is {'x' * number}?", ("e",)) for number in range(7)]
    found = list(ask(model, asked, tokenizer=pieces, max_new_tokens=3))
    assert [answer.question for answer in found] == asked
    for answer in found:
        limit = 12 if pieces is None else 3
        talk = Conversation(model, sampling=GREEDY, max_new_tokens=limit, tokenizer=pieces)
        assert answer.reply == "".join(talk.reply(answer.question.text)).strip()
        assert answer.on_topic is answer.question.is_answered_by(answer.reply)
    assert len({answer.reply for answer in found}) > 1


@pytest.mark.parametrize("kind", ["bytes", "tokens"])
def test_second_questions_are_asked_after_the_first(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOGETHER", 2)
    pieces = tokenizer() if kind == "tokens" else None
    model = spread_model(V=256 if pieces is None else pieces.vocab_size, T=256, dropout=0.0)
    asked = [Question(str(number), f"what is {'x' * number}?", ("e",)) for number in range(5)]
    again, earlier = as_second_questions([Answer(question, f"it is {question.topic}", True) for question in asked])
    assert again == asked
    assert [answer.question.topic for answer in earlier] == ["2", "3", "4", "0", "1"]
    found = list(ask(model, again, earlier=earlier, tokenizer=pieces, max_new_tokens=3))
    for answer, first in zip(found, earlier, strict=True):
        talk = Conversation(model, sampling=GREEDY, max_new_tokens=12 if pieces is None else 3, tokenizer=pieces)
        talk.turns = [
            {"role": "user", "content": first.question.text},
            {"role": "assistant", "content": first.reply},
        ]
        assert answer.reply == "".join(talk.reply(answer.question.text)).strip()


def test_the_length_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def answer(model: object, prompts: list[list[int]], **options: object) -> list[str]:
        calls.append((prompts, options["max_new_tokens"], options["sampling"]))
        return [" random " for _ in prompts]

    monkeypatch.setattr(module, "continue_batch", answer)
    model = spread_model(T=256)
    assert list(ask(model, [SEED] * 33)) == [Answer(SEED, "random", True)] * 33
    prompt = list(b"user: what is a seed?\nassistant: ")
    assert calls == [([prompt] * 32, 320, GREEDY), ([prompt], 320, GREEDY)]
    calls.clear()
    pieces = tokenizer()
    list(ask(spread_model(V=pieces.vocab_size, T=256), [SEED], tokenizer=pieces))
    assert [limit for _, limit, _ in calls] == [80]
    assert list(ask(model, [])) == []


def test_the_share_on_topic() -> None:
    right, wrong = Answer(SEED, "random", True), Answer(SEED, "no", False)
    assert share_on_topic([right, wrong, wrong, right, right]) == 0.6
    assert share_on_topic([wrong]) == 0.0
    with pytest.raises(ValueError, match="no answers"):
        share_on_topic([])


def test_the_format_of_a_line(tmp_path: Path) -> None:
    """What the error shows is a question."""
    path = tmp_path / "q.jsonl"
    path.write_text("no", encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        load_questions(path)
    shown = str(caught.value)[str(caught.value).index("{") :]
    path.write_text(shown, encoding="utf-8")
    assert load_questions(path)[0].words == tuple(json.loads(shown)["words"])
