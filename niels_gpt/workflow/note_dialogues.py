"""Dialogues about a folder of notes: questions that name a heading, answered with the text below it.

They teach a chat model that it is about these notes. The notes themselves are not changed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import NamedTuple

QUESTIONS = (
    "what do my notes say about {}?",
    "tell me about {}",
    "what is {}?",
    "{}",
    "what did i write about {}?",
    "remind me of my note on {}",
    "explain {}",
    "do my notes mention {}?",
    "i forgot what i wrote about {}",
    "summarize {}",
)
"""How a person asks for a note; the gap is the heading, in lower case."""
PER_HEADING = 4
"""Questions for each heading."""
MAX_ANSWER = 240
"""Most characters of an answer; it ends with a complete sentence where there is one."""
MIN_ANSWER = 20
"""Shorter text below a heading is no answer."""
MAX_HEADING = 60
"""Longer headings are sentences, not names."""

_HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*\s*$")
_FENCE = re.compile(r"\s*(```|~~~)")
_FRONT_MATTER = re.compile(r"\A---\n.*?\n(?:---|\.\.\.)\n", re.DOTALL)
_NOT_PROSE = re.compile(r"\s*(?:[|<>!]|[-*_=]{3,}\s*$|\[.*\]:|%%)")
_LINK = re.compile(r"\[\[(?:[^\]|]*\|)?([^\]|]*)\]\]|!?\[([^\]]*)\]\([^)]*\)")
_SENTENCE_END = re.compile(r"[.!?…][\"')\]]*(?=\s|$)|[\u3002\uff01\uff1f]")  # also the full stop and marks of Chinese


class NoteDialogue(NamedTuple):
    """A question about a note, and its answer."""

    question: str
    answer: str


def note_dialogues(text: str, *, title: str) -> Iterator[NoteDialogue]:
    """Yield the dialogues of one note; `title` names the text above its first heading.

    The choice of questions depends only on the heading, so that the same notes give the same dialogues.
    """
    seen = set()
    for heading, body in _sections(text, title):
        name, answer = _plain(heading).strip(" .:!?").lower(), _answer(body)
        if not 2 <= len(name) <= MAX_HEADING or len(answer) < MIN_ANSWER or name in seen:
            continue
        seen.add(name)
        first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        for number in range(PER_HEADING):
            question = QUESTIONS[(first + 3 * number) % len(QUESTIONS)]  # 3 and the number of questions are coprime
            yield NoteDialogue(question.format(name), answer)


def _sections(text: str, title: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (heading, lines of prose below it, up to the next heading); lines of code are left out."""
    text = _FRONT_MATTER.sub("", text.removeprefix("\ufeff").replace("\r\n", "\n"))
    heading, lines, in_code = title, list[str](), False
    for line in text.split("\n"):
        if _FENCE.match(line):
            in_code = not in_code
        elif in_code:
            continue
        elif (found := _HEADING.match(line)) is not None:
            yield heading, lines
            heading, lines = found[2], []
        else:
            lines.append("" if _NOT_PROSE.match(line) else line)
    yield heading, lines


def _answer(lines: list[str]) -> str:
    """Return the beginning of the text, in one line; lists are joined."""
    text = ""
    for line in lines:
        words = _plain(re.sub(r"^\s*(?:[-*+]|\d+[.)])\s+(?:\[[ xX]\]\s+)?", "", line)).strip()
        if words:
            text = f"{text} {words}".strip()
        elif len(text) >= MIN_ANSWER:
            break  # the first paragraph is enough
        if len(text) > MAX_ANSWER:
            break
    if len(text) <= MAX_ANSWER:
        return text
    ends = [match.end() for match in _SENTENCE_END.finditer(text[: MAX_ANSWER + 1])]
    if ends and ends[-1] >= MIN_ANSWER:
        return text[: ends[-1]]
    return text[:MAX_ANSWER].rsplit(" ", 1)[0] + " ..."


def _plain(text: str) -> str:
    """Return text without the marks of links, emphasis and code; a link becomes its label."""
    text = _LINK.sub(lambda link: link[1] or link[2] or "", text)
    return re.sub(r"(\*\*|__|`)(.+?)\1", r"\2", text)
