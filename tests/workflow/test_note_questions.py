"""Questions about topics of notes: all name the topic, in many forms, and one form is never trained on."""

from __future__ import annotations

import hashlib
import re

import pytest

from niels_gpt.data import embedded
from niels_gpt.data.primer import iter_primer_sft
from niels_gpt.workflow import note_questions
from niels_gpt.workflow.note_questions import (
    FORMS,
    PER_TOPIC,
    new_question,
    question_frames,
    question_in_other_words,
    questions_about,
)
from niels_gpt.workflow.note_topics import NoteTopic

FERNS = NoteTopic("staghorn ferns", "Platycerium grows on trees, and needs shade and Rainwater.")
MOSS = NoteTopic("moss", "A carpet of moss stays green without soil if the air is humid.")
FRAMES = ["how do i {} my {}", "is there a {}?", "why {} and {} but not {}?"]

GOLDEN_DIGEST = "7b759a2f9b2ed41e"
GOLDEN = ["What do my notes say about Moss", "tell me about Moss", "Hi, help me with Moss"]


def asked(topic: NoteTopic, frames: list[str]) -> list[str]:
    return [question for question, _ in questions_about([topic], frames)]


@pytest.mark.parametrize("frames", [FRAMES, []], ids=["frames", "forms only"])
def test_every_question_is_about_its_topic(frames: list[str]) -> None:
    pairs = list(questions_about([FERNS, MOSS], frames))
    assert [topic for _, topic in pairs] == [FERNS] * PER_TOPIC + [MOSS] * PER_TOPIC
    for topic in (FERNS, MOSS):
        questions = [question for question, of in pairs if of is topic]
        assert len(set(questions)) == PER_TOPIC == 32
        roots = [word[:4] for word in re.findall(r"\w+", f"{topic.name} {topic.answer}".lower()) if len(word) > 2]
        assert [question for question in questions if not any(root in question.lower() for root in roots)] == []
        named = [question for question in questions if topic.name in question.lower()]
        assert PER_TOPIC // 3 < len(named) < PER_TOPIC  # by the heading, but not only
    questions = [question for question, _ in pairs]
    assert any(question.endswith("?") for question in questions) and any(not q.endswith("?") for q in questions)
    assert any("Moss" in question or "Ferns" in question for question in questions)  # people write capitals
    assert any("Platycerium" in q or "Rainwater" in q for q in questions) and not any("{" in q for q in questions)


def test_frames_are_used() -> None:
    def fits(question: str) -> bool:
        pattern = r"(?:.* )?how do i (.+) my (.+)"
        return re.fullmatch(pattern, question.lower()) is not None

    assert any(fits(question) for question in asked(FERNS, FRAMES))
    assert not any(fits(question) for question in asked(FERNS, []))


def test_the_same_topics_give_the_same_questions() -> None:
    assert asked(FERNS, FRAMES) == asked(FERNS, FRAMES) != asked(FERNS, [])
    assert asked(MOSS, [])[:3] == GOLDEN  # on any machine, with any Python
    every = "\n".join(question for question, _ in questions_about([FERNS, MOSS], FRAMES))
    assert hashlib.sha256(every.encode()).hexdigest()[:16] == GOLDEN_DIGEST


@pytest.mark.parametrize("name", ["staghorn ferns", "moss", "50 % of {ferns}", "c++", "x" * 60])
def test_the_new_question_is_not_trained_on(name: str) -> None:
    topic = NoteTopic(name, FERNS.answer)
    new = new_question(topic)
    assert new in [form.replace("{}", name) for form in FORMS[:10]]
    assert new.lower().rstrip("?") not in [question.lower().rstrip("?") for question in asked(topic, FRAMES)]


def test_the_new_question_is_not_trained_on_after_an_opening() -> None:
    topics = [NoteTopic(f"staghorn{n} ferns", FERNS.answer) for n in range(300)]
    for question, topic in questions_about(topics, FRAMES):
        new = new_question(topic).removesuffix("?")
        if new != topic.name:  # a heading alone ends many questions
            assert not question.lower().removesuffix("?").endswith(f" {new}")


def test_the_form_of_the_new_question_depends_on_the_heading() -> None:
    # sha256sum of "ferns" begins with 220497c5.
    assert new_question(NoteTopic("ferns", "x")) == FORMS[0x220497C5 % 10].format("ferns")
    assert len({new_question(NoteTopic(f"x{n}", "")).replace(f"x{n}", "") for n in range(99)}) == 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("na\u0308ive", "na\u0308ive"),
        (
            "\u0939\u093f\u0928\u094d\u0926\u0940, \u092e\u0947\u0902",
            "\u0939\u093f\u0928\u094d\u0926\u0940 \u092e\u0947\u0902",
        ),
        ("\uc11c\uc6b8\ud2b9\ubcc4\uc2dc\uccad, \uc55e", "\uc11c\uc6b8\ud2b9\ubcc4\uc2dc\uccad \uc55e"),
        ("\u4e24\u6b21\uff0c\u800c\u4e14\u4ece\u4e0d\u5728\u3002", "\u4e24\u6b21 \u800c\u4e14\u4ece\u4e0d \u5728"),
        ("don't re-use git_log", "don't re-use git log"),
        ("Python\u8bed\u8a00", "Python \u8bed\u8a00"),
    ],
    ids=["decomposed", "Hindi", "Korean", "Chinese", "English", "mixed"],
)
def test_words(text: str, words: str) -> None:
    """Combining marks belong to words, punctuation does not; Chinese has no spaces, so four characters are a word."""
    assert note_questions._WORD.findall(text) == words.split(" ")


def test_words_of_many_topics_are_not_asked_for() -> None:
    """A word that a tenth of the topics have does not tell them apart."""
    topics = [NoteTopic(f"name{n}", f"all about the garden, rare{n} and other{n}") for n in range(100)]
    topics += [NoteTopic(f"else{n}", f"nothing of that: only{n} here") for n in range(900)]
    for question, topic in questions_about(topics[::-1], ["how does {} work", "{} or {}?"]):
        if "garden" in question:  # beside others, as a row of the answer
            assert topic.name in question.lower() or re.search(r"rare|other", question.lower()), question


@pytest.mark.parametrize(
    "topic",
    [
        NoteTopic("10", "1 2 3 4 5 6 7 8 9 10 11"),
        NoteTopic("the", "the one of the others"),
        NoteTopic("\u8568\u985e", "\u6bcf\u5468\u6d47\u6c34\u4e24\u6b21\u800c\u4e14\u4ece\u4e0d\u5728\u4e2d\u5348"),
        NoteTopic("{} and {0}", "{braces} {in} the {1} text"),
        NoteTopic("\u2600\u2600", "\u2600 \u2600 \u2600"),
    ],
    ids=["numbers", "small words", "Chinese", "braces", "symbols"],
)
def test_unusual_topics(topic: NoteTopic) -> None:
    questions = asked(topic, FRAMES)
    assert len(questions) >= 10 and all(question.strip() for question in questions)
    assert sum(topic.name in question.lower() for question in questions) >= 5


@pytest.mark.parametrize(
    ("question", "frame"),
    [
        ("How do I water my ferns?", "how do i {} my {}?"),
        ("how do i water green ferns", "how do i {}"),
        ("is the moss dry, or is it not?", "is the {} or is it not?"),
        ("what is niels good for?", None),
        ("what ferns?", None),
        ("water green ferns daily", None),
        ("is it my own?", None),
        ("how " * 15, None),
        ("does a fern or a moss or a lichen like the sun", None),
    ],
)
def test_frames(question: str, frame: str | None) -> None:
    assert question_frames([question, question]) == ([] if frame is None else [frame])


def test_the_package_has_thousands_of_frames() -> None:
    chats = iter_primer_sft(embedded.PRIMER, errors="strict")
    frames = question_frames(message.content for chat in chats for message in chat.messages if message.role == "user")
    assert len(frames) == len(set(frames)) > 2000
    text = " ".join(q for q, _ in questions_about([FERNS, MOSS], frames)).lower()
    assert "niels" not in text


def test_a_question_in_other_words_has_none_of_the_heading_and_is_not_trained_on() -> None:
    topic = NoteTopic("Rust compilers", "The compiler of rust translates programs into machine instructions quickly.")
    question = question_in_other_words(topic)
    assert question is not None and not re.search("rust|compiler", question.lower())
    assert sum(word in question for word in ("translates", "programs", "machine", "instructions", "quickly")) == 3
    trained = {asked.lower().removesuffix("?") for asked, _ in questions_about([topic], [])}
    assert question.lower().removesuffix("?") not in trained
    assert question_in_other_words(NoteTopic("rust", "a rust of the rust.")) is None
