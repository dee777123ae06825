"""The error of checkpoints, single-file or sharded, and the check of their entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message has its path and the reason."""


def invalid_entry(content: Mapping[str, Any]) -> str | None:
    """A description of the first entry of a checkpoint that has the wrong type; None if all are valid."""
    if type(content["step"]) is not int or content["step"] < 0:
        return "step is not an integer of at least 0"
    for name in ("config", "extra"):
        if not isinstance(content[name], dict):
            return f"{name} is not a dict"
    if not isinstance(content["optimizer"], dict | None):
        return "optimizer state is neither a dict nor None"
    return None if isinstance(content["extra"].get("data", {}), dict) else "extra.data is not a dict"
