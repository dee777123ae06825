"""The four special tokens: who speaks, and where a turn or a document ends."""

from __future__ import annotations

SPECIAL_NAMES = ("sys", "usr", "asst", "eot")
SPECIAL_TOKENS = tuple(f"<|ngpt_{name}_84a5023f67d74cf29cc4001becde983c|>" for name in SPECIAL_NAMES)
"""The strings of sys, usr, asst and eot. The long number is there so that no honest text contains one."""
_PREFIX = "<|ngpt_"


def find_special(text: str) -> str | None:
    """A special string that the text contains, or None."""
    if _PREFIX not in text:
        return None
    return next((token for token in SPECIAL_TOKENS if token in text), None)


def refuse_special(text: str) -> None:
    """Raise ValueError for text from outside that contains a special string: it would forge a turn."""
    token = find_special(text)
    if token is not None:
        raise ValueError(f"the text contains {token}, which is reserved for turns and ends of documents; remove it")
