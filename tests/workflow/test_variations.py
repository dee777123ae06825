"""Variations of dialogues: what is added, what stays, and that the answers are the same."""

from __future__ import annotations

from collections import Counter

from niels_gpt.data.types import ChatMessage, ChatSample
from niels_gpt.workflow.variations import (
    EARLIER_CHARACTERS,
    LATER,
    LEFT_OUT,
    OPENED,
    OPENINGS,
    SMALL_WORDS,
    in_chats,
    with_variations,
)


def chat(*turns: str, first: str = "user") -> ChatSample:
    roles = ["user", "assistant"] * len(turns) if first == "user" else [first, *["user", "assistant"] * len(turns)]
    messages = [ChatMessage(role, text) for role, text in zip(roles, turns, strict=False)]
    return ChatSample(messages, "primer", {"dialogue": 7})


def varied(*samples: ChatSample, seed: int = 1) -> list[ChatSample]:
    return list(with_variations(samples, seed=seed))


def questions(question: str, seeds: int = 120) -> Counter[str]:
    """The questions that many seeds make of one by leaving out words; not those with an opening."""
    found: Counter[str] = Counter()
    for seed in range(seeds):
        first, *more = varied(chat(question, "an answer"), seed=seed)
        assert first.messages[0].content == question
        assert len(more) <= 1
        made = {sample.messages[0].content for sample in more}
        found.update(made - {f"{opening} {question}" for opening in OPENINGS})
    return found


def test_a_question_is_followed_by_a_variation() -> None:
    question = "what is the loss of a model?"
    for seed in range(20):
        made = varied(chat(question, "The answer stays."), seed=seed)
        assert made[0] == chat(question, "The answer stays.")
        assert len({sample.messages[0].content for sample in made}) == len(made) in (1, 2)
        for sample in made:
            assert [message.role for message in sample.messages] == ["user", "assistant"]
            assert sample.messages[1].content == "The answer stays."
            assert (sample.source, sample.meta) == ("primer", {"dialogue": 7})


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
    shortened = next(iter(questions("loss " + "the " * words, seeds=10)))
    assert abs((words - shortened.split().count("the")) / words - LEFT_OUT) < 0.12


def test_short_questions_are_not_shortened() -> None:
    """Three words stay; four lose any of their small words, but never all words."""
    assert questions("what is loss") == questions("loss versus accuracy again") == {}
    assert set(questions("what is the loss")) == {
        *("is the loss", "what the loss", "what is loss", "the loss", "is loss", "what loss", "loss")
    }
    assert {"what", "is the it", "what is the"} <= set(questions("what is the it", seeds=600)) and all(
        questions("what is the it")
    )


def test_every_opening_is_used_and_the_seed_decides() -> None:
    texts = [f"question number {number} about loss" for number in range(1000)]  # without small words
    samples = [chat(text, "yes") for text in texts]
    made = varied(*samples)
    assert made == varied(*samples) != varied(*samples, seed=2)
    asked = [sample.messages[0].content for sample in made]
    assert abs(len(asked) - len(texts) - OPENED * len(texts)) < 60
    opened = Counter(text.split(" question number")[0] for text in asked if text not in texts)
    assert set(opened) == set(OPENINGS)


def test_some_dialogues_follow_others_in_a_chat() -> None:
    samples = [chat(f"question {number}", f"answer {number}") for number in range(1000)]
    others = [chat("who?", "me."), chat("one?", "1.", "two?", "2.")]
    made = list(in_chats(samples, others, seed=1))
    assert made == list(in_chats(samples, others, seed=1)) != list(in_chats(samples, others, seed=2))
    assert [sample.messages[-2:] for sample in made] == [sample.messages for sample in samples]
    before = Counter(tuple(message.content for message in sample.messages[:-2]) for sample in made)
    assert set(before) == {(), ("who?", "me."), ("one?", "1.", "two?", "2.")}
    assert abs(before[()] / len(samples) - (1 - LATER)) < 0.05
    for sample in made:
        assert [message.role for message in sample.messages] == ["user", "assistant"] * (len(sample.messages) // 2)
        assert (sample.source, sample.meta) == ("primer", {"dialogue": 7})


def test_dialogues_that_no_other_can_follow() -> None:
    samples = [chat(f"question {number}", "yes") for number in range(100)]
    half = "x" * (EARLIER_CHARACTERS // 2)
    for other in (chat("no answer?"), chat("be brief", "who?", "me.", first="system"), chat(half, half + "x")):
        assert list(in_chats(samples, [other], seed=1)) == samples
    assert list(in_chats(samples, [], seed=1)) == samples
    assert list(in_chats(samples, [chat(half, half)], seed=1)) != samples
    systems = [chat("be brief", "who?", "me.", first="system")] * 100
    assert list(in_chats(systems, samples, seed=1)) == systems
