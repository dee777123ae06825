"""The subword model of a SentencePiece file of others, such as `tokenizer.model` of Llama 2 and TinyLlama."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from niels_gpt.tokenizer.added_token import AddedToken
from niels_gpt.tokenizer.limits import check_numbers, try_sentencepiece
from niels_gpt.tokenizer.piece_text import BLOCK, byte_of_piece


class SentencePieceModel:
    """A SentencePiece model. Its control pieces (`<s>`, `</s>`) are special strings, as transformers treats them."""

    normalizes_added = False

    def __init__(self, data: bytes, *, where: str, added: Sequence[AddedToken] = ()) -> None:
        """`added`: further tokens that `tokenizer_config.json` lists. Raises ValueError for a damaged file."""
        try_sentencepiece(data, where)
        self._data = data
        self._sp = _load(data, where)
        size: int = self._sp.vocab_size()
        known = {self._sp.id_to_piece(i): i for i in range(size)}
        own = [AddedToken(i, piece, True) for piece, i in known.items() if self._sp.is_control(i)]
        own += [AddedToken(i, piece, True) for piece, i in known.items() if self._sp.is_unknown(i)]
        own_ids = {token.id for token in own}
        for token in added:
            if token.id < size and known.get(token.content) != token.id:
                raise ValueError(
                    f"tokenizer_config.json beside {where} calls id {token.id} {token.content!r}, but the model calls "
                    f"it {self._sp.id_to_piece(token.id)!r}: use the tokenizer.json of this model"
                )
        self.added = own + [token for token in added if token.id not in own_ids]
        self.vocab_size = max([size - 1, *(token.id for token in self.added)]) + 1
        check_numbers(self.vocab_size, len(added), 0, f"tokenizer_config.json beside {where}")
        self.adds_space: bool = self._sp.encode("a") != self._inside.encode("a")
        self._ids = {token.content: token.id for token in self.added}
        self._special = frozenset(token.content for token in self.added if token.special)
        self._known = known
        unknown: int = self._sp.unk_id()
        self.unknown_id = unknown if unknown >= 0 else None

    def protect(self, strings: Collection[str]) -> None:
        """Let the methods that encode as text treat these added tokens as special, too."""
        self._special |= frozenset(strings)

    @cached_property
    def _inside(self) -> Any:
        """The model without the space that it adds at the start of a text."""
        model = _load(self._data, "the tokenizer")
        model.override_normalizer_spec(add_dummy_prefix=False)
        return model

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes that each id contributes to a text."""
        found = [b""] * self.vocab_size
        for piece, i in self._known.items():
            byte = byte_of_piece(piece) if self._sp.is_byte(i) else None
            found[i] = byte if byte is not None else piece.replace(BLOCK, " ").encode("utf-8")
        for token in self.added:
            found[token.id] = token.content.encode("utf-8")
        return found

    def id_of(self, piece: str) -> int | None:
        """The id of a piece."""
        return self._ids.get(piece, self._known.get(piece))

    def ids_before_text(self) -> list[int]:
        """The ids that Llama's tokenizers add before a text: bos, if there is one."""
        bos: int = self._sp.bos_id()
        return [bos] if bos >= 0 else []

    def ends(self) -> tuple[str | None, str | None]:
        """The pieces of (bos, eos) that the model itself names."""
        ids = (self._sp.bos_id(), self._sp.eos_id())
        bos, eos = (self._sp.id_to_piece(i) if i >= 0 else None for i in ids)
        return bos, eos

    def encode(self, text: str, *, as_text: bool = False, inside: bool = False) -> list[int]:
        """Return the ids of a text. `as_text`: special strings are text; `inside`: it continues another text."""
        strings = self._ids.keys() - self._special if as_text else self._ids.keys()
        ids: list[int] = []
        for number, segment in enumerate(_split(text, strings)):
            if number % 2:
                ids.append(self._ids[segment])
            elif segment:  # only the first one begins a text
                ids += (self._inside if inside or number else self._sp).encode(segment)
        return ids

    def encode_batch(self, texts: Sequence[str], *, as_text: bool = False) -> list[list[int]]:
        """Return the ids of each text as `encode` does."""
        return [self.encode(text, as_text=as_text) for text in texts]


def _split(text: str, strings: Collection[str]) -> list[str]:
    """Return text, string, text, string, ..., text: longer strings are found before those that they contain."""
    found = [string for string in strings if string in text]
    if not found:
        return [text]
    longest_first = sorted(found, key=len, reverse=True)
    return re.split(f"({'|'.join(map(re.escape, longest_first))})", text)


def _load(data: bytes, where: str) -> Any:
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_proto=data)
    except Exception as err:  # SentencePiece raises RuntimeError and others
        raise ValueError(f"{where} is not a SentencePiece model, or is damaged: copy it again") from err
