"""The chat transcript for byte models: turns of the form `role: content`; a prompt ends with `assistant: `."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

ROLES = ("system", "user", "assistant")
DELIMITER = "\n\n<dialogue>\n\n"
"""Separator of the dialogues in a primer file."""
STOPS = (*(f"\n{role}: " for role in ROLES), "\n\n<dialogue>")
"""Strings that end a reply: the next turn, or the next dialogue."""

# A tag counts at position 0 or directly after "\n": exactly what ^ means in MULTILINE mode.
_TAG = re.compile(r"^(system|user|assistant): ", re.MULTILINE)
_LINE_WITH_TAG = re.compile(rf"\n(?={'|'.join(f'{role}: ' for role in ROLES)}|{DELIMITER.strip()})")


def format_chat(messages: Sequence[Mapping[str, str]]) -> str:
    """Return the transcript of the messages, followed by the prompt `assistant: `. Nothing is escaped.

    Raises ValueError for an unknown role, and for a message without role or content.
    """
    turns = (role_and_content(message, number) for number, message in enumerate(messages))
    return "".join(f"{role}: {content}\n" for role, content in turns) + "assistant: "


def role_and_content(message: Mapping[str, str], number: int) -> tuple[str, str]:
    """Return (role, content) of a message. Raises ValueError for an unknown role or a content that is not a string."""
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"message {number} has the role {role!r}; allowed roles are {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"message {number} ({role}) needs a string as content, got {content!r}")
    return role, content


def extract_assistant_reply(generated_text: str) -> str:
    """Return the last non-empty assistant turn of a transcript, stripped; "" if all are empty.

    A final bare `assistant: ` is a prompt, not a reply. Raises ValueError if there is no assistant tag.
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
    """Return the messages of a transcript with stripped contents, without the final prompt: inverse of `format_chat`.

    Raises ValueError for text that does not begin with a turn.
    """
    tags = list(_TAG.finditer(text))
    if not tags or text[: tags[0].start()].strip():
        raise ValueError(f"the text does not begin with a turn such as 'user: ': {text.strip()[:40]!r}")
    ends = [tag.start() for tag in tags[1:]] + [len(text)]
    messages = [{"role": tag[1], "content": text[tag.end() : end].strip()} for tag, end in zip(tags, ends, strict=True)]
    if messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()  # a prompt, not a turn
    return messages


def check_content(text: str) -> None:
    """Raise ValueError for user input that would forge a turn."""
    tag = _TAG.search(text)
    if tag:
        raise ValueError(f"a line of a message must not begin with {tag[0]!r}: it would start another turn")
    if DELIMITER.strip() in text:
        raise ValueError(f"a message must not contain {DELIMITER.strip()!r}: it would end the dialogue")


def escape_content(text: str) -> str:
    """Return the content of a message as text that cannot start a turn: a line that would is indented by a space."""
    return _LINE_WITH_TAG.sub("\n ", text)


def first_kept(sizes: Sequence[int], system: int, limit: int, keep: int | None = None) -> int:
    """Return the number of the first turn that is kept, for messages of these sizes, `system` of them at the front.

    When the messages so far exceed `limit`, the oldest turns are dropped until at most `keep` are left (None: `limit`).
    The last message stays in any case. What is dropped depends only on the messages up to the one that exceeded the
    limit. So with a smaller `keep` the prompts of several turns begin alike, and a prefix cache serves them.
    """
    keep, first, total = limit if keep is None else min(keep, limit), system, sum(sizes[:system])
    for number in range(system, len(sizes)):
        total += sizes[number]
        if total > limit:
            while total > keep and first < number:
                total -= sizes[first]
                first += 1
    return first
