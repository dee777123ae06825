"""The chat transcript: one `role: content` line per turn, a prompt ends with `assistant: `."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

ROLES = ("system", "user", "assistant")
DELIMITER = "\n\n<dialogue>\n\n"
"""What separates dialogues in a primer file."""
STOPS = (*(f"\n{role}: " for role in ROLES), "\n\n<dialogue>")
"""Where a reply ends: the next turn, or the next dialogue."""

# A tag counts at position 0 or right after "\n" (in MULTILINE mode ^ is exactly that).
_TAG = re.compile(r"^(system|user|assistant): ", re.MULTILINE)


def format_chat(messages: Sequence[Mapping[str, str]]) -> str:
    """The transcript of the messages, ending with the prompt `assistant: `. Nothing is escaped.

    Raises ValueError for an unknown role or a message without role or content.
    """
    lines = []
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(f"message {number} has the role {role!r}; allowed are {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"message {number} ({role}) needs a string as content, got {content!r}")
        lines.append(f"{role}: {content}\n")
    return "".join(lines) + "assistant: "


def extract_assistant_reply(generated_text: str) -> str:
    """The last non-empty assistant turn of a transcript, stripped; "" if all are empty.

    A trailing bare `assistant: ` is a prompt, not a reply. Raises ValueError without any such tag.
    """
    tags = list(_TAG.finditer(generated_text))
    if not any(tag[1] == "assistant" for tag in tags):
        raise ValueError("no 'assistant: ' at the start of a line: this is not a chat transcript")
    ends = [tag.start() for tag in tags[1:]] + [len(generated_text)]
    for tag, end in reversed(list(zip(tags, ends, strict=True))):
        reply = generated_text[tag.end() : end].strip()
        if tag[1] == "assistant" and reply:
            return reply
    return ""


def parse_chat(text: str) -> list[dict[str, str]]:
    """The messages of a transcript, contents stripped: what `format_chat` wrote, without its closing prompt.

    Raises ValueError for text that does not begin with a turn.
    """
    tags = list(_TAG.finditer(text))
    if not tags or text[: tags[0].start()].strip():
        raise ValueError(f"this does not begin with a turn such as 'user: ': {text.strip()[:40]!r}")
    ends = [tag.start() for tag in tags[1:]] + [len(text)]
    messages = [{"role": tag[1], "content": text[tag.end() : end].strip()} for tag, end in zip(tags, ends, strict=True)]
    if messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()  # a prompt, not a turn
    return messages


def check_content(text: str) -> None:
    """Raise ValueError for text from outside that would forge a turn."""
    tag = _TAG.search(text)
    if tag:
        raise ValueError(f"a line of a message may not begin with {tag[0]!r}: that would start a turn of its own")
    if DELIMITER.strip() in text:
        raise ValueError(f"a message may not contain {DELIMITER.strip()!r}: that ends a dialogue")


def fit_messages(messages: Sequence[Mapping[str, str]], limit: int) -> list[Mapping[str, str]]:
    """The messages whose transcript has at most `limit` bytes: oldest turns go first.

    A leading system message and the last message always stay (the model then crops the text itself).
    """
    kept = list(messages)
    first = 1 if kept and kept[0].get("role") == "system" else 0
    while len(kept) > first + 1 and len(format_chat(kept).encode("utf-8", "replace")) > limit:
        del kept[first]
    return kept
