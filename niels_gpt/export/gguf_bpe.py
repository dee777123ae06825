"""BPE tokenizers of others (`tokenizer.json`) as GGUF vocabularies, if llama.cpp gives the same ids.

- Byte-level BPE, as GPT-2's: llama.cpp has the rules by which such tokenizers split a text before merging built in,
  under names. A tokenizer is recognized by its `pre_tokenizer`.
- BPE with byte fallback, as Llama 2's and TinyLlama's: llama.cpp merges neighbors by the score of the piece that they
  make, as SentencePiece does. Published files were converted from SentencePiece, so their merges list every pair that
  makes a piece, by the score of the piece; this is checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from niels_gpt.tokenizer.piece_text import BLOCK, byte_of_piece, byte_piece
from niels_gpt.tokenizer.vocabulary_files import QWEN2_PATTERN

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False}
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": BLOCK}
_PREFIX = {"type": "Prepend", "prepend": BLOCK}
_NO_METASPACE_PREFIX = {"type": "Metaspace", "replacement": BLOCK, "prepend_scheme": "never", "split": False}

Kind = Literal["NORMAL", "BYTE", "CONTROL", "USER_DEFINED", "UNKNOWN", "UNUSED"]


class Token(NamedTuple):
    """One id of a GGUF vocabulary."""

    text: str
    score: float
    kind: Kind
    """Its name in `gguf.TokenType`."""


class BPEVocabulary(NamedTuple):
    """What a GGUF file says of a BPE tokenizer."""

    model: Literal["gpt2", "llama"]
    """llama.cpp's name of the algorithm: byte-level BPE, or merging by score."""
    pre: str
    """llama.cpp's name of the rules that split a text."""
    tokens: list[Token]
    merges: list[str]
    """Empty for `llama`, whose scores say the same."""
    space_prefix: bool
    """Whether a space is put at the start of a text, and after a special token."""
    unknown_id: int | None


def unsupported(reason: str) -> ValueError:
    """Return the error for a tokenizer of others that cannot be written as a GGUF vocabulary."""
    return ValueError(
        "export gguf supports our own tokenizers, byte-level BPE (gpt-2, smollm, llama-bpe, qwen2) and BPE with byte "
        f"fallback (Llama 2, TinyLlama), but {reason}: use export hf, whose folder has the tokenizer as it is"
    )


def read_bpe(data: bytes) -> BPEVocabulary:
    """Return the vocabulary of a tokenizer.json. Raises ValueError for one that llama.cpp would not encode alike.

    NFC is the exception: llama.cpp does not normalize, so decomposed characters get other ids there.
    """
    content = json.loads(data)
    model = content.get("model") or {}
    if model.get("type") != "BPE":
        raise unsupported(f"its tokenizer.json is a {model.get('type')} model")
    for entry in content.get("added_tokens") or []:
        for option in ("lstrip", "rstrip", "single_word"):
            if entry.get(option):
                raise unsupported(f"its token {entry['content']!r} has {option}, which llama.cpp does not know")
    return _byte_fallback(content) if model.get("byte_fallback") else _byte_level(content)


def _byte_level(content: Mapping[str, Any]) -> BPEVocabulary:
    """Return the vocabulary of a byte-level BPE."""
    model, normalizer = content["model"], content.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise unsupported(f"its tokenizer.json has the normalizer {normalizer.get('type')}")
    pre = _pre_name(content.get("pre_tokenizer"))
    if bool(model.get("ignore_merges")) != (pre == "llama-bpe"):
        raise unsupported(f"llama.cpp's {pre} needs ignore_merges={str(pre == 'llama-bpe').lower()}")
    merges = [" ".join(pair) for pair in _pairs(model)]
    return BPEVocabulary("gpt2", pre, _tokens(content, {}), merges, False, None)


def _byte_fallback(content: Mapping[str, Any]) -> BPEVocabulary:
    """Return the vocabulary of a BPE that writes characters without a piece as bytes."""
    model = content["model"]
    prefix = _space_prefix(content)
    normalized = [entry["content"] for entry in content.get("added_tokens") or [] if entry.get("normalized")]
    if normalized and content.get("normalizer") is not None:
        raise unsupported(f"its token {normalized[0]!r} is normalized, which llama.cpp does not do")
    if model.get("ignore_merges"):
        raise unsupported("its tokenizer.json has ignore_merges, which llama.cpp does not know beside byte fallback")
    if missing := [byte for byte in range(256) if byte_piece(byte) not in model["vocab"]]:
        raise unsupported(f"its tokenizer.json has no piece {byte_piece(missing[0])}")
    texts = {*model["vocab"], *(entry["content"] for entry in content.get("added_tokens") or [])}
    tokens = _tokens(content, _scores(_pairs(model), texts))
    return BPEVocabulary("llama", "default", tokens, [], prefix, model["vocab"].get(model.get("unk_token")))


def _pairs(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the merges: pairs of pieces, first the one that is merged first."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    return [(left, right) for left, right in pairs]


def _tokens(content: Mapping[str, Any], scores: Mapping[str, float]) -> list[Token]:
    """Return the token of each id; ids that no token has are UNUSED."""
    model = content["model"]
    added = {entry["id"]: entry for entry in content.get("added_tokens") or []}
    by_id = {i: text for text, i in model["vocab"].items()} | {i: entry["content"] for i, entry in added.items()}
    tokens = []
    for i in range(max(by_id) + 1):
        text = by_id.get(i)
        kind: Kind = "NORMAL"
        if text is None:
            kind = "UNUSED"
        elif model.get("byte_fallback") and text == model.get("unk_token"):
            kind = "UNKNOWN"
        elif i in added:
            kind = "CONTROL" if added[i].get("special") else "USER_DEFINED"
        elif model.get("byte_fallback") and byte_of_piece(text) is not None:
            kind = "BYTE"
        tokens.append(Token(f"[unused {i}]" if text is None else text, scores.get(text or "", 0.0), kind))
    return tokens


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
            known = {_LLAMA3: "llama-bpe", QWEN2_PATTERN: "qwen2"}
            if before[0].get("behavior") == "Isolated" and not before[0].get("invert") and pattern in known:
                return known[pattern]
    types = ", ".join(str(step.get("type")) for step in steps) or "none"
    raise unsupported(f"the pre_tokenizer of its tokenizer.json ({types}) is not one that llama.cpp has")


# --- byte fallback ------------------------------------------------------------------------------------


def _space_prefix(content: Mapping[str, Any]) -> bool:
    """Return whether a space is added where llama.cpp adds one, or none at all. Raises ValueError for other rules.

    Metaspace with the schemes `first` and `always` has other rules: it adds none after a special token, or before a
    text that begins with a space.
    """
    normalizer, pre = content.get("normalizer"), content.get("pre_tokenizer")
    if normalizer is None and pre == _NO_METASPACE_PREFIX:
        return False
    steps = normalizer.get("normalizers", [normalizer]) if isinstance(normalizer, Mapping) else []
    if pre is None and _SPACES in steps and all(step in (_SPACES, _PREFIX) for step in steps):
        return _PREFIX in steps
    found = [str(step["type"]) for step in (*steps, pre) if step is not None]
    raise unsupported(f"llama.cpp does not treat spaces as its tokenizer.json does ({', '.join(found) or 'none'})")


def _scores(merges: Sequence[tuple[str, str]], texts: set[str]) -> dict[str, float]:
    """Return the score of each piece that merges make: the negative of its rank.

    Raises ValueError if llama.cpp, which knows only the scores, would merge other pairs, or in another order.
    """
    scores: dict[str, float] = {}
    last = None
    for left, right in merges:
        piece = left + right
        if piece in scores and piece != last:
            raise unsupported(f"its merges make the piece {piece!r} at several ranks")
        scores.setdefault(piece, -float(len(scores)))
        last = piece
    splits = ((text[:n], text[n:]) for text in texts for n in range(1, len(text)))
    possible = {(a, b) for a, b in splits if (len(a) == 1 or a in texts) and (len(b) == 1 or b in texts)}
    if differing := sorted(possible ^ set(merges)):
        left, right = differing[0]
        raise unsupported(f"its merges are not those of a SentencePiece model (see {left!r} and {right!r})")
    return scores
