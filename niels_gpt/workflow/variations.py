"""More dialogues from few: a question with a greeting before it, without some of its small words, or later in a chat.

A small model then learns that such words and the turns before do not matter, and answers more questions that it has
never seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from niels_gpt.data.types import ChatMessage, ChatSample
from niels_gpt.system.rng import HashedDraws

OPENINGS = (
    "hey niels,",
    "niels,",
    "please tell me:",
    "quick question:",
    "hi,",
    "i am new here.",
    "one more thing:",
    "ok,",
    "so",
    "sorry, but",
    "can you help me?",
    "i was wondering,",
    "just curious:",
    "my friend asked me:",
    "in the docs i read about this.",
    "hello,",
)
"""What people write before a question."""
SMALL_WORDS = frozenset(
    {"a", "an", "the", "of", "in", "on", "to", "for", "with", "and", "or", "so", "is", "be", "am", "are", "was", "do"}
    | {"does", "can", "could", "would", "i", "it", "me", "my", "you", "your", "that", "this", "there", "what", "how"}
    | {"why", "please"}
)
"""Words that may be left out of a question without changing its topic."""
OPENED = 0.5
"""Share of the variations that have an opening."""
LEFT_OUT = 0.35
"""Probability that a small word is left out."""
MIN_WORDS = 4
"""Shorter questions are not shortened."""
LATER = 0.25
"""Probability that a dialogue follows another one in a chat."""
WHOLE = ("user", "assistant")
"""Roles of the first and the last message of a dialogue that another one can follow."""
EARLIER_CHARACTERS = 400
"""Characters of the dialogue before it, at most: about half of what a chat remembers."""


def with_variations(samples: Iterable[ChatSample], *, seed: int) -> Iterator[ChatSample]:
    """Yield each sample; after one with a single question also a variation of the question, with the same answer.

    A variation has an opening, or fewer small words. Most questions get one.
    """
    draw = HashedDraws(seed)
    for sample in samples:
        yield sample
        if [message.role for message in sample.messages] != ["user", "assistant"]:
            continue
        question, answer = sample.messages
        if draw.random() < OPENED:
            varied = f"{draw.choice(OPENINGS)} {question.content}"
        else:
            varied = shortened(question.content, draw)
        if varied != question.content:
            yield ChatSample([ChatMessage("user", varied), answer], sample.source, dict(sample.meta))


def shortened(question: str, draw: HashedDraws) -> str:
    """The question without some of its small words; unchanged if it is short."""
    words = question.split()
    kept = [word for word in words if not (_is_small(word) and draw.random() < LEFT_OUT)]
    return " ".join(kept) if len(words) >= MIN_WORDS and kept else question


def in_chats(samples: Iterable[ChatSample], others: Sequence[ChatSample], *, seed: int) -> Iterator[ChatSample]:
    """Yield each sample, some of them as the end of a chat: after a dialogue that is drawn from `others`."""
    draw = HashedDraws(seed)
    short = [other.messages for other in others if _can_be_followed(other.messages)]
    for sample in samples:
        later = short and sample.messages[0].role == "user" and draw.random() < LATER
        before = draw.choice(short) if later else []
        yield ChatSample([*before, *sample.messages], sample.source, dict(sample.meta))


def _can_be_followed(messages: Sequence[ChatMessage]) -> bool:
    whole = (messages[0].role, messages[-1].role) == WHOLE
    return whole and sum(len(message.content) for message in messages) <= EARLIER_CHARACTERS


def _is_small(word: str) -> bool:
    return word.lower().strip("?,.!") in SMALL_WORDS
