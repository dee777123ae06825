"""Byte-level BPE tokenizers of others (`tokenizer.json`) as GGUF vocabularies.

llama.cpp has the rules by which such tokenizers split a text before merging built in, under names. Here a tokenizer is
recognized by its `pre_tokenizer`; others are refused, because they would get other ids in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"\p{N}" + _REST
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False}


class BPEVocabulary(NamedTuple):
    """What a GGUF file says of a byte-level BPE tokenizer."""

    pre: str
    """llama.cpp's name of the rules that split a text."""
    tokens: list[str | None]
    """By id; None: no token has this id."""
    special: set[int]
    """Ids of added tokens that are control tokens."""
    added: set[int]
    """Ids of all added tokens."""
    merges: list[str]


def unsupported(reason: str) -> ValueError:
    """Return the error for a tokenizer of others that cannot be written as a GGUF vocabulary."""
    return ValueError(
        f"export gguf supports our own tokenizers and byte-level BPE (gpt-2, smollm, llama-bpe, qwen2), but {reason}: "
        "use export hf, whose folder has the tokenizer as it is"
    )


def read_bpe(data: bytes) -> BPEVocabulary:
    """Return the vocabulary of a tokenizer.json. Raises ValueError for one that llama.cpp would not encode alike.

    NFC is the exception: llama.cpp does not normalize, so decomposed characters get other ids there.
    """
    content = json.loads(data)
    model = content.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = f"{model.get('type')} with byte fallback" if model.get("byte_fallback") else model.get("type")
        raise unsupported(f"its tokenizer.json is a {kind} model")
    normalizer = content.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise unsupported(f"its tokenizer.json has the normalizer {normalizer.get('type')}")
    added = {entry["id"]: entry for entry in content.get("added_tokens") or []}
    by_id = {i: text for text, i in model["vocab"].items()} | {i: entry["content"] for i, entry in added.items()}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    special = {i for i, entry in added.items() if entry.get("special")}
    tokens = [by_id.get(i) for i in range(max(by_id) + 1)]
    pre = _pre_name(content.get("pre_tokenizer"))
    if bool(model.get("ignore_merges")) != (pre == "llama-bpe"):
        raise unsupported(f"llama.cpp's {pre} needs ignore_merges={str(pre == 'llama-bpe').lower()}")
    return BPEVocabulary(pre, tokens, special, set(added), merges)


def _pre_name(pre: Any) -> str:
    """Return llama.cpp's name of a `pre_tokenizer`. Raises ValueError for one that is not known."""
    steps = pre.get("pretokenizers", [pre]) if isinstance(pre, Mapping) else []
    if steps and all(steps[-1].get(key) == value for key, value in _BYTE_LEVEL.items()):
        uses_regex, before = steps[-1].get("use_regex", True), steps[:-1]
        if uses_regex and not before:
            return "gpt-2"
        if uses_regex and [step.get("type") for step in before] == ["Digits"] and before[0].get("individual_digits"):
            return "smollm"
        if not uses_regex and len(before) == 1 and before[0].get("type") == "Split":
            pattern = before[0].get("pattern", {}).get("Regex")
            known = {_LLAMA3: "llama-bpe", _QWEN2: "qwen2"}
            if before[0].get("behavior") == "Isolated" and not before[0].get("invert") and pattern in known:
                return known[pattern]
    types = ", ".join(str(step.get("type")) for step in steps) or "none"
    raise unsupported(f"the pre_tokenizer of its tokenizer.json ({types}) is not one that llama.cpp has")
