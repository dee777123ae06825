"""The four special tokens: the roles of a chat, and the end of a turn or document."""

from __future__ import annotations

import re

SPECIAL_NAMES = ("sys", "usr", "asst", "eot")
SPECIAL_TOKENS = tuple(f"<|ngpt_{name}_84a5023f67d74cf29cc4001becde983c|>" for name in SPECIAL_NAMES)
"""The strings of sys, usr, asst and eot. The long number keeps them out of ordinary text."""
SPECIAL_STRINGS = dict(zip(SPECIAL_NAMES, SPECIAL_TOKENS, strict=True))
_PREFIX = "<|ngpt_"
_INSIDE = re.compile(f"(?<=<)(?={'|'.join(re.escape(token[1:]) for token in SPECIAL_TOKENS)})")


def find_special(text: str) -> str | None:
    """Return a special string that the text contains, or None."""
    if _PREFIX not in text:
        return None
    return next((token for token in SPECIAL_TOKENS if token in text), None)


def refuse_special(text: str) -> None:
    """Raise ValueError for text that contains a special string: such input could forge a chat turn."""
    token = find_special(text)
    if token is not None:
        raise ValueError(f"the text contains {token}, which is reserved for turns and document ends; remove it")


def split_special(text: str) -> list[str]:
    """Return the text in segments that contain no special string: each one is cut after its first character."""
    return [text] if find_special(text) is None else _INSIDE.split(text)
