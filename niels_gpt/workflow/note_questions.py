"""Questions about topics of notes, to train on and to ask: by the heading, by a part of it, by words of the answer.

A small model answers only what resembles its training. With few forms of questions it learns the forms; so each topic
gets many, and most are sentences of the other dialogues in which the words that carry the meaning are replaced. They
make little sense, but teach that the words of the topic decide, wherever they stand.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from niels_gpt.system.rng import HashedDraws
from niels_gpt.workflow.note_topics import NoteTopic
from niels_gpt.workflow.variations import OPENINGS, SMALL_WORDS, shortened

PER_TOPIC = 32
"""Questions for each topic, at most."""
BY_HEADING = 0.5
"""Share of the questions that have the whole heading in one of FORMS."""
IN_FRAME = 0.8
"""Share of the others that use a frame instead of one of WORD_FORMS."""
HEADING_IN_FRAME = 0.5
"""Share of the frames with the whole heading in one gap."""
TOPIC_IN_GAP = 0.6
"""Probability that a gap of several has a word of the topic; else it has one of FILLERS."""
OPENED, SHORTENED, NO_MARK, CAPITAL, CASED = 0.15, 0.15, 0.3, 0.3, 0.3
"""Shares of the questions: after an opening, without some small words, without a question mark, with a capital at the
beginning, with capitals in words of the topic."""
COMMON = 0.03
"""A word of more than this share of the topics does not tell them apart."""

FORMS = (
    "what do my notes say about {}?", "tell me about {}", "what is {}?", "{}", "what did i write about {}?",
    "remind me of my note on {}", "explain {}", "do my notes mention {}?", "i forgot what i wrote about {}",
    "summarize {}", "what do i know about {}?", "how does {} work?", "how do i use {}?", "what was {} again?",
    "can you tell me more about {}?", "give me my note on {}", "what have i noted about {}?", "i need to know about {}",
    "help me with {}", "when do i need {}?", "where do i find {}?", "any notes on {}?", "describe {}",
    "what does {} do?", "what is {} for?", "how to {}", "how do i {}?", "what can i do with {}?",
    "refresh my memory on {}", "what should i remember about {}?", "look up {}", "why {}?",
)  # fmt: skip
"""Questions with the heading, in lower case."""
NEW_FORMS = FORMS[:10]
"""One of these, by the heading, is not trained on for a topic: a model is asked it afterwards."""
WORD_FORMS = (
    "how do i {}?", "how can i {}?", "what is the {}?", "what is for {}?", "which one was it for {}?",
    "what was that thing about {}?", "something about {}", "i am looking for {}", "what do i use for {}?",
    "which note is about {}?", "where did i write about {}?", "{}", "what helps with {}?", "i want to {}",
    "is there a way to {}?", "what is it called: {}", "who {}?", "why {}?", "can i {}?", "what's the name of the {}?",
    "what did i say on {}?", "when {}?", "where {}?", "what should i do with {}?",
)  # fmt: skip
"""Questions with words of the topic."""
NAMELESS_OPENINGS = tuple(opening for opening in OPENINGS if "niels" not in opening)
"""Openings also for a base that has another name."""
FILLERS = (
    "thing", "stuff", "one", "good", "new", "old", "again", "here", "work", "use", "best", "right", "first", "time",
    "people", "place", "kind", "part", "something", "anything", "way", "really", "actually", "find", "write", "keep",
    "know", "still", "many", "much", "different", "day",
)  # fmt: skip
"""Words that say nothing about a topic."""
COMMON_WORDS = SMALL_WORDS | frozenset((
    "about", "after", "all", "also", "any", "as", "at", "because", "been", "before", "but", "by", "each", "from", "get",
    "has", "have", "he", "her", "his", "if", "into", "its", "just", "like", "make", "more", "most", "need", "not",
    "now", "only", "other", "our", "out", "own", "same", "set", "she", "should", "some", "such", "than", "their",
    "them", "then", "these", "they", "those", "through", "up", "us", "used", "using", "very", "want", "we", "well",
    "were", "when", "where", "which", "while", "who", "will", "one", "use", "way",
))  # fmt: skip
"""Words of questions that carry no topic."""
OTHER_WORDS = 3
"""Words of the answer in a question in other words: the longest, which few topics share."""
MIN_FRAME, MAX_FRAME, MAX_GAPS = 3, 14, 3
"""Words of a question that becomes a frame, and its gaps."""

_MARKS = "".join(chr(code) for code in range(0x300, 0x10000) if unicodedata.category(chr(code)).startswith("M"))
_NO_SPACES = r"(?=[^\W_])[\u2e80-\u2fff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]"
"""A character of Chinese or Japanese, in which no spaces separate words."""
_LETTER = rf"(?!{_NO_SPACES})(?:[^\W_]|[{_MARKS}])"
_WORD = re.compile(rf"(?:{_NO_SPACES}){{1,4}}|(?:{_LETTER})+(?:['-](?:{_LETTER})+)*")
_ENDING = re.compile(r"(?<=\w{4})(?:ing|ed|es|s|e|ion|ions|ly)$")


def new_question(topic: NoteTopic) -> str:
    """A question about a topic that is not trained on."""
    return NEW_FORMS[int.from_bytes(_digest(topic)[:4], "big") % len(NEW_FORMS)].format(topic.name)


def question_in_other_words(topic: NoteTopic) -> str | None:
    """A question with words of the answer and none of the heading, which is not trained on; None: it has too few."""
    heading = {_ENDING.sub("", word) for word in _words(topic.name)}
    words = [word for word in _words(topic.answer) if word not in COMMON_WORDS]
    words = [word for word in words if _ENDING.sub("", word) not in heading]
    longest = sorted(words, key=len)[-OTHER_WORDS:]
    form = WORD_FORMS[_digest(topic)[4] % len(WORD_FORMS)]
    return form.format(" ".join(word for word in words if word in longest)) if len(longest) == OTHER_WORDS else None


def question_frames(questions: Iterable[str]) -> list[str]:
    """Questions of other dialogues whose words that carry the meaning are gaps, {}; each frame once.

    Those that are short, long, full of gaps or about niels are left out.
    """
    frames = dict[str, None]()
    for question in questions:
        words = question.lower().split()
        if not MIN_FRAME <= len(words) <= MAX_FRAME or any("niels" in word for word in words):
            continue
        kept = list[str]()
        for word in words:
            if word.strip("?,.!") in COMMON_WORDS:
                kept.append(word)
            elif not kept or kept[-1] != "{}":
                kept.append("{}")
        if 1 <= kept.count("{}") <= MAX_GAPS and kept.count("{}") < len(kept):
            end = "?" if question.endswith("?") and kept[-1] == "{}" else ""
            frames.setdefault(" ".join(kept) + end)
    return list(frames)


def questions_about(topics: Sequence[NoteTopic], frames: Sequence[str]) -> Iterator[tuple[str, NoteTopic]]:
    """Yield different questions about each topic, with the topic; the same for the same topics and frames.

    frames: from `question_frames`; without any, only forms are used.
    """
    found = {topic: _words(f"{topic.name} {topic.answer}") for topic in topics}
    count = Counter(word for words in found.values() for word in set(words))
    most = max(COMMON * len(topics), 3)
    cased = {word.lower(): word for topic in topics for word in _WORD.findall(topic.answer) if word != word.lower()}
    for topic, words in found.items():
        rare = [word for word in words if count[word] <= most and word not in COMMON_WORDS] or words or [topic.name]
        own = {*rare, *_words(topic.name)} - COMMON_WORDS
        asker = _Asker(topic, rare, frames, {word: cased.get(word, word.capitalize()) for word in own})
        for question in asker.questions():
            yield question, topic


class _Asker:
    """Draws questions about one topic."""

    def __init__(self, topic: NoteTopic, rare: list[str], frames: Sequence[str], cased: dict[str, str]) -> None:
        """rare: words of the topic that few others have. cased: these and those of the heading, with capitals."""
        self._topic, self._rare, self._frames, self._cased = topic, rare, frames, cased
        self._draw = HashedDraws(int.from_bytes(_digest(topic), "big"))
        self._answer = _WORD.findall(topic.answer.lower())

    def questions(self) -> list[str]:
        """Different questions, none of those that a model is asked afterwards; the first two have the heading."""
        new = {_bare(new_question(self._topic)), _bare(question_in_other_words(self._topic) or "")}
        found = dict[str, None]()
        for _ in range(3 * PER_TOPIC):
            if len(found) == PER_TOPIC:
                break
            if len(found) < 2 or self._draw.random() < BY_HEADING:
                question = self._draw.choice(FORMS).format(self._topic.name)
            elif self._frames and self._draw.random() < IN_FRAME:
                question = self._framed(self._draw.choice(self._frames))
            else:
                question = self._draw.choice(WORD_FORMS).format(self._described())
            varied = self._varied(question)
            if not new & {_bare(question), _bare(varied)}:
                found.setdefault(varied)
        return list(found)

    def _framed(self, frame: str) -> str:
        """The frame with the heading, words of the topic and fillers in its gaps; at least one is of the topic."""
        draw, (first, *rest) = self._draw, frame.split("{}")
        heading = draw.randrange(len(rest)) if draw.random() < HEADING_IN_FRAME else -1
        question, about = first, False
        for gap, text in enumerate(rest):
            if gap == heading:
                words = self._topic.name
            elif len(rest) == 1:
                words = self._described()
            elif draw.random() < TOPIC_IN_GAP or (not about and gap == len(rest) - 1):
                words = draw.choice(self._rare)
            else:
                question += draw.choice(FILLERS) + text
                continue
            question, about = question + words + text, True
        return question

    def _described(self) -> str:
        """Some words of the heading, a few words of the answer in a row, or some that only this topic has."""
        draw, name = self._draw, self._topic.name.split()
        kind = draw.random()
        if kind < 0.3 and len(name) > 1:
            kept = draw.randrange(len(name))
            return " ".join(word for i, word in enumerate(name) if i == kept or draw.random() < 0.4)
        starts = [i for i, word in enumerate(self._answer) if word in self._rare]
        if kind < 0.65 and starts:
            first = draw.choice(starts)
            return " ".join(self._answer[max(first - draw.randrange(2), 0) : first + 1 + draw.randrange(4)])
        chosen = draw.sample(self._rare, min(len(self._rare), 1 + draw.randrange(3)))
        between = draw.choice((" ", " and ", " for ", " with "))
        return between.join(_ENDING.sub("", word) if draw.random() < 0.3 else word for word in chosen)

    def _varied(self, question: str) -> str:
        """The question as people write it, for example without the mark."""
        draw = self._draw
        if draw.random() < OPENED:
            question = f"{draw.choice(NAMELESS_OPENINGS)} {question}"
        elif draw.random() < SHORTENED:
            question = shortened(question, draw)
        if draw.random() < NO_MARK:
            question = question.removesuffix("?")
        if draw.random() < CASED:
            question = _WORD.sub(lambda word: self._cased.get(word[0], word[0]), question)
        return question[0].upper() + question[1:] if draw.random() < CAPITAL else question


def _digest(topic: NoteTopic) -> bytes:
    return hashlib.sha256(topic.name.encode()).digest()


def _words(text: str) -> list[str]:
    """The words of a text in lower case, without numbers; in order, each once."""
    return list(dict.fromkeys(word for word in _WORD.findall(text.lower()) if not word.isdigit()))


def _bare(question: str) -> str:
    return question.lower().removesuffix("?")
