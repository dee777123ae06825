"""Parse JSON that a user, or a damaged disk, wrote: nesting is limited, because code that walks a value recurses."""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 100
"""Most lists and objects inside each other. Files of ours and chat exports have fewer than ten."""


class NestedTooDeeply(ValueError):
    """A value that has more than `DEEPEST` lists and objects inside each other."""

    def __init__(self) -> None:
        super().__init__(f"nested too deeply (more than {DEEPEST} levels)")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError (JSONDecodeError, NestedTooDeeply or, for bytes, UnicodeDecodeError)."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise NestedTooDeeply from None
    check_nesting(value)
    return value


def check_nesting(value: Any) -> None:
    """Raise NestedTooDeeply for a parsed value that has more than `DEEPEST` lists and objects inside each other."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise NestedTooDeeply
