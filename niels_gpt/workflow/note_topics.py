"""Topics of a folder of notes: the headings, and the text below them as the answer to questions about them."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_ANSWER = 160
"""Most characters of an answer; it ends with a complete sentence where there is one."""
MIN_ANSWER = 20
"""Shorter text below a heading is no answer."""
MAX_HEADING = 60
"""Longer headings are sentences, not names."""

_DATE_WORDS = re.compile(
    r"""\b(?:(?:jan|febr?)(?:uary)? | mar(?:ch)? | apr(?:il)? | may | june? | july? | aug(?:ust)? | sept?(?:ember)?
          | oct(?:ober)? | (?:nov|dec)(?:ember)? | (?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?
          | (?:dai|week|month)ly | week | day | w | q | st | nd | rd | th | of | the)\b""",
    re.VERBOSE,
)
_SELDOM_ASKED = re.compile(
    r"""to[ ]?dos? | tasks? | inbox | misc | untitled | drafts? | scratch | index | readme | home | archive | changelog
      | tags? | links? | templates? | (?:(?:daily|weekly|meeting|new)[ ])?(?:notes?|log|journal)
      | (?:to[ ]?do|task)[ ]list | references? | see[ ]also | related""",
    re.VERBOSE,
)
"""Headings that say what kind of text follows, not what it is about."""
_HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*\s*$")
_FENCE = re.compile(r"\s*(```|~~~)")
_FRONT_MATTER = re.compile(r"\A---\n.*?\n(?:---|\.\.\.)\n", re.DOTALL)
_NOT_PROSE = re.compile(r"\s*(?:[|<>!]|[-*_=]{3,}\s*$|\[.*\]:|%%)")
_LINK = re.compile(r"\[\[(?:[^\]|]*\|)?([^\]|]*)\]\]|!?\[([^\]]*)\]\([^)]*\)")
_SENTENCE_END = re.compile(r"[.!?…][\"')\]]*(?=\s|$)|[\u3002\uff01\uff1f]")  # also the full stop and marks of Chinese


class NoteTopic(NamedTuple):
    """What a person can ask about a note, and the answer."""

    name: str
    answer: str
    heading: str = ""
    """What the name was made of, as it is written in the note."""

    @property
    def begin(self) -> str:
        """The first words of the answer, by which it is recognized."""
        return " ".join(re.sub(r"^\W+", "", self.answer).split()[:4])


def note_topics(text: str, *, title: str) -> Iterator[NoteTopic]:
    """Yield the topics of one note, in its order; `title` names the text above its first heading."""
    seen = set()
    for heading, body in _sections(text, title):
        # A file name may be decomposed (macOS), and a person types composed characters.
        name = unicodedata.normalize("NFC", _plain(heading).strip(" .:!?").lower())
        answer = _answer(body)
        if _is_name(name) and len(answer) >= MIN_ANSWER and name not in seen:
            seen.add(name)
            yield NoteTopic(name, answer, heading)


def choose_topics(notes: Sequence[tuple[str, Sequence[NoteTopic]]], most: int) -> list[NoteTopic]:
    """Return the first topic of each note, then the second, and so on, up to `most`; the last ones evenly chosen.

    notes: (title, topics) of each note. A name that several notes have, such as "introduction", is asked about with
    the title: "introduction of ferns". People seldom ask so, hence such topics come after all others; dates of daily
    notes, "todo", "inbox" and the like come last.
    """
    count = Counter(topic.name for _, topics in notes for topic in topics)
    own, with_title, last = list[list[NoteTopic]](), list[list[NoteTopic]](), list[list[NoteTopic]]()
    for title, all_topics in notes:
        topics = [topic for topic in all_topics if not is_seldom_asked(topic.name)]
        known = [topic for topic in topics if count[topic.name] == 1 or topic.name == title.lower()]
        last.append([topic for topic in all_topics if is_seldom_asked(topic.name)])
        own.append(known)
        with_title.append(
            [
                topic._replace(name=f"{topic.name} of {title.lower()}", heading=f"{topic.heading} of {title}")
                for topic in topics
                if topic not in known
            ]
        )
    chosen: dict[str, NoteTopic] = {}
    for row in (row for lists in (own, with_title, last) for row in itertools.zip_longest(*lists)):
        found: dict[str, NoteTopic] = {}
        for topic in row:
            if topic is not None and _is_name(topic.name) and topic.name not in chosen:
                found.setdefault(topic.name, topic)
        left = min(most - len(chosen), len(found))
        names = list(found)
        for name in (names[i * len(names) // left] for i in range(left)):  # the first notes are not preferred
            chosen[name] = found[name]
    return list(chosen.values())


def is_seldom_asked(name: str) -> bool:
    """Whether a name is a date, or says only what kind of text follows: "todo", "inbox", "daily note"."""
    words = " ".join(re.findall(r"[^\W\d_]+", name))
    return not _DATE_WORDS.sub("", words).strip() or _SELDOM_ASKED.fullmatch(words) is not None


def _is_name(name: str) -> bool:
    return 2 <= len(name) <= MAX_HEADING


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
    raw = text = ""
    for line in lines:
        words = re.sub(r"^\s*(?:[-*+]|\d+[.)])\s+(?:\[[ xX]\]\s+)?", "", line).strip()
        if words:
            raw = f"{raw} {words}".strip()
            text = _plain(raw).strip()  # of all: a link may continue in the next line
        elif len(text) >= MIN_ANSWER:
            break  # the first paragraph is enough
        if len(text) > 2 * MAX_ANSWER:
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
