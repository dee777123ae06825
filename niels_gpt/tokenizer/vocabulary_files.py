"""Byte-level BPE as `vocab.json` and `merges.txt`, which GPT-2 and Qwen2 have beside or instead of `tokenizer.json`.

The files have no rules that split a text; they follow from the class, as in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from niels_gpt.system.json_text import parse_json
from niels_gpt.system.untrusted_files import is_untrusted_file, read_untrusted

VOCAB_FILE, MERGES_FILE, ADDED_FILE = "vocab.json", "merges.txt", "added_tokens.json"
MOST_BYTES = 64 << 20
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_SPLIT = {"type": "Split", "pattern": {"Regex": QWEN2_PATTERN}, "behavior": "Isolated", "invert": False}
_QWEN2 = {"type": "Sequence", "pretokenizers": [_SPLIT, _LEVEL | {"use_regex": False}]}
_RULES: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("GPT2Tokenizer", "gpt2"), (None, _LEVEL)),
    **dict.fromkeys(("Qwen2Tokenizer", "qwen2", "qwen3"), ({"type": "NFC"}, _QWEN2)),
}
"""Class of a tokenizer, or model_type of a model whose tokenizer names none -> normalizer and pre_tokenizer."""
_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized")


def has_vocabulary_files(folder: Path) -> bool:
    """Whether a folder has both files. Raises as `is_untrusted_file`."""
    return all(is_untrusted_file(folder / name) for name in (VOCAB_FILE, MERGES_FILE))


def read_vocabulary_files(folder: Path, config: Mapping[str, Any], names: Mapping[str, Any]) -> bytes:
    """Return what the two files of a folder would be as `tokenizer.json`.

    config: tokenizer_config.json; names: special_tokens_map.json. Raises ValueError for files that are damaged or not
    there, and for a class whose rules are not known.
    """
    kind = config.get("tokenizer_class") or _read_json(folder / "config.json").get("model_type")
    rules = _RULES.get(str(kind).removesuffix("Fast"))
    if rules is None:
        raise ValueError(
            f"{folder} has {VOCAB_FILE} and {MERGES_FILE} of a {kind}, and no tokenizer.json: supported without it are "
            "GPT2Tokenizer and Qwen2Tokenizer; write it with transformers (AutoTokenizer, save_pretrained)"
        )
    normalizer, pre_tokenizer = rules
    if normalizer is None:
        pre_tokenizer = pre_tokenizer | {"add_prefix_space": bool(config.get("add_prefix_space"))}
    vocabulary = _read_json(folder / VOCAB_FILE)
    special = {*_special_tokens(names), *_special_tokens(config), "<|endoftext|>"}
    tokens = {i: {"content": content, "special": True} for content, i in _read_json(folder / ADDED_FILE).items()}
    tokens |= {vocabulary[content]: {"content": content, "special": True} for content in special & vocabulary.keys()}
    listed = config.get("added_tokens_decoder")
    tokens |= {int(i): token for i, token in (listed if isinstance(listed, dict) else {}).items() if str(i).isdigit()}
    content = {
        "version": "1.0",
        "added_tokens": [dict.fromkeys(_OPTIONS, False) | token | {"id": i} for i, token in sorted(tokens.items())],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": _LEVEL,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": list(_merges(folder / MERGES_FILE))},
    }
    return json.dumps(content, ensure_ascii=False).encode()


def parse_object(data: bytes | None, where: str) -> dict[str, Any]:
    """Return the object of a JSON file; an empty one if there is no such file. Raises ValueError for another value."""
    try:
        content = {} if data is None else parse_json(data.decode("utf-8"))
    except ValueError as err:
        raise ValueError(f"{where} is damaged ({err}): copy it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be a JSON object, got {type(content).__name__}")
    return content


def _read_json(path: Path) -> dict[str, Any]:
    return parse_object(read_untrusted(path, MOST_BYTES), str(path))


def _special_tokens(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the special tokens that a file names, as strings or as objects with their content."""
    named = [value for key, value in content.items() if key.endswith("_token")]
    more = content.get("additional_special_tokens")
    for value in (*named, *(more if isinstance(more, list) else ())):
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            yield token


def _merges(path: Path) -> Iterator[list[str]]:
    try:
        lines = (read_untrusted(path, MOST_BYTES) or b"").decode("utf-8").split("\n")
    except UnicodeDecodeError as err:
        raise ValueError(f"{path} is damaged: byte {err.start} is not utf-8; copy it again") from None
    for number, line in enumerate(lines, 1):
        pair = line.rstrip("\r").split(" ")
        if line.strip() and not line.startswith("#version"):
            if len(pair) != 2:
                raise ValueError(f"{path} is damaged: line {number} is not a pair of pieces; copy it again")
            yield pair
