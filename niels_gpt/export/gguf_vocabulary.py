"""Our tokenizers as GGUF vocabularies that llama.cpp encodes with, to the same ids.

llama.cpp has an algorithm per vocabulary type, and few of them fit:

- `plamo2` is a unigram model with byte fallback, which is what our SentencePiece models are. `t5` is a unigram model,
  too, but replaces every character without a piece by `<unk>`.
- `gpt2` is byte-level BPE, and `llama` merges neighbors by score: for tokenizers of others (`gguf_bpe.py`).
- `rwkv` matches the longest token, byte by byte: with the 256 bytes as tokens it encodes every text as its bytes.

With `plamo2` two things remain different. Where two segmentations have the same score, such as runs of one character
(`00000` as 00 + 000 or 000 + 00), it prefers the longer first piece, and SentencePiece mostly the longer last one. And
it drops a byte order mark (U+FEFF) at the start of a text or turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from niels_gpt.chat.formats import template_format
from niels_gpt.export.chat_template import chat_template
from niels_gpt.export.gguf_bpe import read_bpe, unsupported
from niels_gpt.export.pieces import pieces_of
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer, ForeignTokenizer, Tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter, TokenType

LARGEST_SCORE = 900.0
"""llama.cpp rounds scores to 1e-4, and an unknown character costs 1000. So scores are scaled up to this range: then
they are exact to 1e-6, and sums of them rank segmentations as SentencePiece does."""
END_BYTE = 0xFD
"""The end-of-text id of a byte vocabulary: a byte that no UTF-8 text has, since nothing ends a text there. Without any,
llama-cpp-python ends every chat reply after one token."""


def add_vocabulary(writer: GGUFWriter, tokenizer: AnyTokenizer, V: int, *, learned_chat: bool = False) -> None:
    """Add the vocabulary, the special ids and the chat template. Embedding rows above the vocabulary get no text.

    learned_chat: as for `hugging_face.write_hf`.
    """
    from gguf import TokenType

    start, space_prefix, template = False, False, None
    if isinstance(tokenizer, ForeignTokenizer):
        tokens, space_prefix = _bpe_tokens(writer, tokenizer.files)
        start, template = bool(tokenizer.document_start), tokenizer.templates.get("default")
        reply_end = None
        if learned_chat:
            chat = template_format(tokenizer)
            template, reply_end = chat.template, chat.reply_ends[0]
        _add_special_ids(writer, tokenizer, reply_end)
    else:
        template = chat_template(tokenizer)
        if isinstance(tokenizer, ByteTokenizer):
            writer.add_tokenizer_model("rwkv")
            tokens = [(f"\\x{byte:02x}", 0.0, TokenType.NORMAL) for byte in range(256)]
            writer.add_eos_token_id(END_BYTE)
        else:
            writer.add_tokenizer_model("plamo2")
            tokens = _unigram_tokens(tokenizer)
            _add_special_ids(writer, tokenizer)
    tokens += [(f"[unused {i}]", -math.inf, TokenType.UNUSED) for i in range(len(tokens), V)]
    texts, scores, types = zip(*tokens, strict=True)
    writer.add_token_list(list(texts))
    writer.add_token_scores(list(scores))
    writer.add_token_types(list(types))
    writer.add_add_bos_token(start)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(space_prefix)
    if template is not None:
        writer.add_chat_template(template)


def _add_special_ids(writer: GGUFWriter, tokenizer: AnyTokenizer, reply_end: int | None = None) -> None:
    """Add the ids that end a text (and a reply, if that is another one), start it, and pad it."""
    special = tokenizer.special_token_ids()
    writer.add_eos_token_id(special["eot"])
    writer.add_eot_token_id(special["eot"] if reply_end is None else reply_end)
    writer.add_bos_token_id(special.get("bos", special["eot"]))  # without it llama.cpp takes id 1 or 11
    writer.add_pad_token_id(special["eot"])


def _bpe_tokens(writer: GGUFWriter, foreign: Mapping[str, bytes]) -> tuple[list[tuple[str, float, TokenType]], bool]:
    """Add a BPE tokenizer of others; return (text, score, type) of each id, and whether it adds a space to a text."""
    from gguf import TokenType

    if "tokenizer.json" not in foreign:
        raise unsupported("this model has a tokenizer.model and no tokenizer.json")
    found = read_bpe(foreign["tokenizer.json"])
    writer.add_tokenizer_model(found.model)
    writer.add_tokenizer_pre(found.pre)
    if found.merges:
        writer.add_token_merges(found.merges)
    if found.unknown_id is not None:
        writer.add_unk_token_id(found.unknown_id)
    return [(token.text, token.score, TokenType[token.kind]) for token in found.tokens], found.space_prefix


def _unigram_tokens(tokenizer: Tokenizer) -> list[tuple[str, float, TokenType]]:
    """Return (text, score, type) of each id. A score of -inf: no text matches the token."""
    from gguf import TokenType

    pieces = pieces_of(tokenizer)
    scale = LARGEST_SCORE / max(-min(piece.score for piece in pieces if piece.kind == "normal"), 1.0)
    # <unk> is UNUSED, not UNKNOWN: llama.cpp would read a "<unk>" in a prompt as this id.
    types = {"normal": TokenType.NORMAL, "byte": TokenType.BYTE, "special": TokenType.CONTROL}
    tokens = []
    for piece in pieces:
        score = piece.score * scale if piece.kind == "normal" else -math.inf
        tokens.append((piece.text, score, types.get(piece.kind, TokenType.UNUSED)))
    return tokens
