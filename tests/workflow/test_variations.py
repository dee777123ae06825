"""Variations of dialogues: what is added, what stays, and that the answers are the same."""

from __future__ import annotations

from collections import Counter

from niels_gpt.data.types import ChatMessage, ChatSample
from niels_gpt.workflow.variations import LEFT_OUT, MIN_WORDS, OPENINGS, SMALL_WORDS, with_variations


def chat(*turns: str, first: str = "user") -> ChatSample:
    roles = ["user", "assistant"] * len(turns) if first == "user" else [first, *["user", "assistant"] * len(turns)]
    messages = [ChatMessage(role, text) for role, text in zip(roles, turns, strict=False)]
    return ChatSample(messages, "primer", {"dialogue": 7})


def varied(*samples: ChatSample, seed: int = 1) -> list[ChatSample]:
    return list(with_variations(samples, seed=seed))


def questions(question: str, seeds: int = 60) -> Counter[str]:
    """The questions that many seeds make of one, without the question itself and those with an opening."""
    found: Counter[str] = Counter()
    for seed in range(seeds):
        first, opened, *short = varied(chat(question, "an answer"), seed=seed)
        assert first.messages[0].content == question
        opening = opened.messages[0].content.removesuffix(f" {question}")
        assert opening in OPENINGS
        assert len(short) <= 1
        found.update(sample.messages[0].content for sample in short)
    return found


def test_a_question_is_followed_by_its_variations() -> None:
    question = "what is the loss of a model?"
    made = varied(chat(question, "The answer stays."))
    assert [len(sample.messages) for sample in made] == [2] * len(made) and len(made) in (2, 3)
    for sample in made:
        assert [message.role for message in sample.messages] == ["user", "assistant"]
        assert sample.messages[1].content == "The answer stays."
        assert (sample.source, sample.meta) == ("primer", {"dialogue": 7})
    assert made[0] == chat(question, "The answer stays.")


def test_other_conversations_are_unchanged() -> None:
    samples = [
        chat("what is the loss of it?", "one", "and the step?", "two"),
        chat("be brief", "what is the loss of it?", "one", first="system"),
        chat("what is the loss of it?"),
    ]
    assert varied(*samples) == samples


def test_only_small_words_are_left_out() -> None:
    question = "What is The loss, of a big Model?"
    small = {word for word in question.split() if word.lower().strip("?,.!") in SMALL_WORDS}
    assert small == {"What", "is", "The", "of", "a"}
    found = questions(question)
    assert len(found) > 10 and question not in found
    for shortened in found:
        words, rest = shortened.split(), question.split()
        for word in words:  # in the same order
            rest = rest[rest.index(word) + 1 :]
        assert set(question.split()) - set(words) <= small


def test_the_share_of_words_left_out() -> None:
    words = 200
    (shortened,) = questions("loss " + "the " * words, seeds=1)
    assert abs((words - shortened.split().count("the")) / words - LEFT_OUT) < 0.12


def test_short_questions_are_not_shortened() -> None:
    assert questions("what is that") == {}
    assert len(["what", "is", "that"]) == MIN_WORDS - 1
    assert len(questions("what is the loss")) > 1
    assert questions("loss versus accuracy again") == {}  # no small words
    assert all(questions("what is the it"))  # never empty


def test_every_opening_is_used_and_the_seed_decides() -> None:
    samples = [chat(f"question number {number} about loss", "yes") for number in range(200)]
    made = varied(*samples)
    assert made == varied(*samples) != varied(*samples, seed=2)
    opened = [sample.messages[0].content.split(" question number")[0] for sample in made[1::2]]
    assert len(made) == 400 and set(opened) == set(OPENINGS)
