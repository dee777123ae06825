"""Our tokenizers as `tokenizer.json` of the `tokenizers` library.

A SentencePiece model becomes a Unigram model with byte fallback. Two things differ there. First, the library matches
every entry of the vocabulary in a text, also `<unk>` and `<0x41>`, which SentencePiece does not. These entries get a
score below that of any other segmentation. That is not enough for an entry with a character that is no piece, because
an unknown character costs more than the lowest score; but no piece crosses an unknown character, so the text is split
there beforehand. Second, the sums of scores have 64 bits instead of 32: where two segmentations have the same score
(`      ` as 2 + 4 or 4 + 2 spaces), SentencePiece decides by its rounding errors and the library does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from niels_gpt.export.pieces import HARD_TEXTS, pieces_of
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer, Tokenizer
from niels_gpt.tokenizer.piece_text import byte_characters

if TYPE_CHECKING:
    import tokenizers

NEVER = -1e4
"""Score of entries that no text may match. 49 known characters, a special string, score -700 in a large vocabulary."""
TIE = 1e-3
"""Segmentations whose scores differ by less count as equally likely: SentencePiece's sums have 24 bits."""


def to_tokenizer_json(tokenizer: Tokenizer | ByteTokenizer) -> str:
    """Return the content of `tokenizer.json`, compared with the tokenizer on hard texts.

    Raises ValueError if the library would give other ids.
    """
    made = _of_bytes() if isinstance(tokenizer, ByteTokenizer) else _of_pieces(tokenizer)
    _compare(made, tokenizer)
    return str(made.to_str(pretty=True)) + "\n"


def _of_pieces(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    pieces = pieces_of(tokenizer)
    unknown = next(i for i, piece in enumerate(pieces) if piece.kind == "unknown")
    vocabulary = [(piece.text, piece.score if piece.kind == "normal" else NEVER) for piece in pieces]
    made = Tokenizer(models.Unigram(vocabulary, unk_id=unknown, byte_fallback=True))
    known = {piece.text for piece in pieces if piece.kind == "normal"}
    missing = sorted({c for piece in pieces if piece.kind != "normal" for c in piece.text} - known)
    if missing:
        one_of = Regex("[" + "".join(f"\\x{{{ord(character):X}}}" for character in missing) + "]")
        made.pre_tokenizer = pre_tokenizers.Split(one_of, behavior="isolated")
    special = [piece.text for piece in pieces if piece.kind == "special"]
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return made


def _of_bytes() -> tokenizers.Tokenizer:
    """The byte tokenizer: a BPE without merges, over the library's printable form of the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.BPE({character: byte for byte, character in byte_characters().items()}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def _compare(made: tokenizers.Tokenizer, tokenizer: Tokenizer | ByteTokenizer) -> None:
    """Raise ValueError if `made` gives other ids for hard texts and for each piece."""
    texts: list[str] = [*HARD_TEXTS]
    if isinstance(tokenizer, Tokenizer):
        pieces = pieces_of(tokenizer)
        texts += [piece.text for piece in pieces]
        texts += [f"a{piece.text} {piece.text}\n" for piece in pieces if piece.kind == "special"]
    found = [encoded.ids for encoded in made.encode_batch(texts, add_special_tokens=False)]
    compare_ids(texts, found, tokenizer, "this tokenizer cannot be written as tokenizer.json")


def compare_ids(texts: Sequence[str], found: Sequence[list[int]], tokenizer: AnyTokenizer, problem: str) -> None:
    """Raise ValueError, which begins with `problem`, if ids differ from ours by more than pieces of equal score."""
    pieces = pieces_of(tokenizer) if isinstance(tokenizer, Tokenizer) else []

    def score(ids: Iterable[int]) -> float:
        return math.fsum(pieces[i].score for i in ids)

    different = []
    for text, theirs in zip(texts, found, strict=True):
        ours = tokenizer.encode(text)
        if theirs == ours:
            continue
        if pieces and max(theirs, default=0) < len(pieces) and abs(score(theirs) - score(ours)) < TIE:
            same_text = b"".join(tokenizer.token_bytes[i] for i in theirs) == text.encode("utf-8")
            if same_text:
                continue
        different.append(f"{text!r} would have the ids {theirs[:20]} instead of {ours[:20]}")
    if different:
        raise ValueError(f"{problem}, {len(different)} of {len(texts)} texts: {different[0]}")
