"""More dialogues from few: the same question with a greeting before it, or without some of its small words.

A small model then learns that such words do not matter, and answers more questions in words that it has never seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from niels_gpt.data.types import ChatMessage, ChatSample

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
LEFT_OUT = 0.35
"""Probability that a small word is left out."""
MIN_WORDS = 4
"""Shorter questions are not shortened."""


def with_variations(samples: Iterable[ChatSample], *, seed: int) -> Iterator[ChatSample]:
    """Yield each sample; after one with a single question also the question with an opening, and one shortened."""
    draw = random.Random(seed)
    for sample in samples:
        yield sample
        roles = [message.role for message in sample.messages]
        if roles != ["user", "assistant"]:
            continue
        question, answer = sample.messages
        yield _asked(f"{draw.choice(OPENINGS)} {question.content}", answer, sample)
        words = question.content.split()
        kept = [word for word in words if not (_is_small(word) and draw.random() < LEFT_OUT)]
        if len(words) >= MIN_WORDS and kept and kept != words:
            yield _asked(" ".join(kept), answer, sample)


def _is_small(word: str) -> bool:
    return word.lower().strip("?,.!") in SMALL_WORDS


def _asked(question: str, answer: ChatMessage, sample: ChatSample) -> ChatSample:
    return ChatSample([ChatMessage("user", question), answer], sample.source, dict(sample.meta))
