"""What goes wrong with checkpoints, of one file or of many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says which and why."""


def wrong_kind(content: Mapping[str, Any]) -> str | None:
    """What is wrong with the entries of a checkpoint, whatever its model is; None if nothing is."""
    if type(content["step"]) is not int or content["step"] < 0:
        return "step is no integer of at least 0"
    for name in ("config", "extra"):
        if not isinstance(content[name], dict):
            return f"{name} is no dict"
    if not isinstance(content["optimizer"], dict | None):
        return "optimizer state is neither a dict nor None"
    return None if isinstance(content["extra"].get("data", {}), dict) else "extra has data that is no dict"
