"""The names of held-out sets in metrics.jsonl, and the loss among them that selects the best checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def eval_name(source: str, split: str = "val") -> str:
    """The name of a source's held-out set in metrics: `val_SOURCE`, and `val_chat` for primer's dialogues.

    Tasks over tokens add the means over their sources, `val_pretrain` and `val_sft`.
    """
    return "val_chat" if source == "primer" else f"{split}_{source}"


def headline_evals(evals: Mapping[str, float]) -> dict[str, float]:
    """The evaluations to display. Those with a / in their name are per-document details, for metrics.jsonl only."""
    return {name: value for name, value in evals.items() if "/" not in name}


def is_over_bytes(config: Mapping[str, Any]) -> bool:
    """Whether a run, given its config as a dict, predicts bytes: its losses are then per byte.

    An imported model has no task: one with a larger vocabulary predicts tokens.
    """
    if "task" not in config:
        return bool(config["model"]["V"] <= 256)
    if config["task"] == "splice":
        return bool(config.get("splice", {}).get("documents", "bytes") == "bytes")
    return bool(config["task"] == "bytes")


def selection_loss(config: Mapping[str, Any], evals: Mapping[str, float]) -> float:
    """The loss that selects the best checkpoint, of an evaluation in metrics.jsonl. Raises KeyError if it has none."""
    names = {"pretrain": "val_pretrain", "sft": "val_sft", "splice": "splice"}
    if config["task"] in names:
        return evals[names[config["task"]]]
    return math.fsum(w * evals[eval_name(name)] for name, w in config["train"]["p_val"].items() if w)


def bits_per_byte(config: Mapping[str, Any], evals: Mapping[str, float]) -> float | None:
    """`selection_loss` in bits per byte, if the evaluation alone tells: for bytes, and for documents of a splice."""
    if is_over_bytes(config):
        return selection_loss(config, evals) / math.log(2)
    documents = [v for name, v in evals.items() if name.startswith("bpb/") and not name.startswith("bpb/control ")]
    return sum(documents) / len(documents) if documents else None
