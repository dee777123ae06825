"""Does a chat model answer on topic? Ask it questions, and look for the words of a right answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from niels_gpt.data.embedded import QUESTIONS
from niels_gpt.inference.conversation import Conversation
from niels_gpt.inference.generation import continue_batch
from niels_gpt.inference.sampling import Sampling
from niels_gpt.model.gpt import GPT
from niels_gpt.system import files
from niels_gpt.system.json_text import parse_json
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer

MAX_TOKENS = 80
"""Longest answer, in tokens."""
BYTES_PER_TOKEN = 4
"""A model over bytes may answer with this many times as many bytes."""
TOGETHER = 32
"""Questions that are answered in one batch."""


class Question(NamedTuple):
    """A question, and how to recognize an answer on its topic."""

    topic: str
    text: str
    words: tuple[str, ...]
    """An answer on topic contains one of these, at the start of a word and in any case."""

    def is_answered_by(self, reply: str) -> bool:
        """Whether a reply is on topic."""
        return any(re.search(rf"\b{re.escape(word)}", reply, re.IGNORECASE) for word in self.words)


class Answer(NamedTuple):
    """The reply of a model to a question."""

    question: Question
    reply: str
    on_topic: bool


def load_questions(path: str | Path | None = None) -> list[Question]:
    """Read questions: a line per question, {"topic": ..., "question": ..., "words": [...]}.

    path: a .jsonl file; None: the examination that ships with the package, which no dialogue of the package repeats.
    Raises ValueError, with the line, for anything else.
    """
    file = QUESTIONS if path is None else files.expand_home(path)
    questions = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            questions.append(_question(line, where=f"{file}, line {number}"))
    if not questions:
        raise ValueError(f"{file} has no questions")
    return questions


def _question(line: str, *, where: str) -> Question:
    try:
        row = parse_json(line)
        topic, text, words = row.get("topic", ""), row["question"], row["words"]
        if not (isinstance(topic, str) and isinstance(text, str) and isinstance(words, list)):
            raise TypeError
        if not text.strip() or not words or not all(isinstance(word, str) and word.strip() for word in words):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        expected = '{"topic": "seed", "question": "what is a seed?", "words": ["random"]}'
        raise ValueError(f"{where} is not a question: expected a line such as {expected}") from None
    return Question(topic, text, tuple(words))


def ask(
    model: GPT,
    questions: Sequence[Question],
    *,
    earlier: Sequence[Answer] | None = None,
    tokenizer: AnyTokenizer | None = None,
    max_new_tokens: int = MAX_TOKENS,
) -> Iterator[Answer]:
    """Yield the greedy answer to each question, in order; each is asked in a new conversation.

    earlier: for each question, the question and the answer with which its conversation begins.
    """
    for first in range(0, len(questions), TOGETHER):
        asked = questions[first : first + TOGETHER]
        chats = [Conversation(model, tokenizer=tokenizer) for _ in asked]
        for index, (chat, question) in enumerate(zip(chats, asked, strict=True), first):
            if earlier is not None:
                chat.add_user(earlier[index].question.text)
                chat.add_assistant(earlier[index].reply)
            chat.add_user(question.text)
        over_bytes = isinstance(tokenizer or ByteTokenizer(), ByteTokenizer)
        replies = continue_batch(
            model,
            [chat.prompt() for chat in chats],
            max_new_tokens=BYTES_PER_TOKEN * max_new_tokens if over_bytes else max_new_tokens,
            sampling=Sampling(temperature=0.0),
            stop=chats[0].stops,
            tokenizer=tokenizer,
        )
        for question, reply in zip(asked, replies, strict=True):
            yield Answer(question, reply.strip(), question.is_answered_by(reply))


def as_second_questions(answers: Sequence[Answer]) -> tuple[list[Question], list[Answer]]:
    """Return the questions again, each with an earlier answer to another one, half the list away: another topic."""
    half = len(answers) // 2
    return [answer.question for answer in answers], [*answers[half:], *answers[:half]]


def share_on_topic(answers: Sequence[Answer]) -> float:
    """Return the share of answers on topic. Raises ValueError without answers."""
    if not answers:
        raise ValueError("there are no answers to judge")
    return sum(answer.on_topic for answer in answers) / len(answers)
