"""The SentencePiece tokenizer: text to ids and back, every character kept.

SentencePiece writes a space as U+2581 (a low block) and would read a block in the text back as a space. Here the text
is cut at such blocks, and each is encoded as its three bytes, so that `decode(encode(s)) == s` for every string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.system import files
from niels_gpt.tokenizer.special import SPECIAL_NAMES, SPECIAL_TOKENS

BLOCK = "\u2581"
"""What SentencePiece writes for a space."""
_PROBE = f"  \ufb01\u2460\t {BLOCK}\u6f22e\u0301\n  "
"""Text that SentencePiece changes unless it is told not to."""
_NAMED = tuple(zip(SPECIAL_NAMES, SPECIAL_TOKENS, strict=True))
_REMEDY = "restore it from a copy, or train one with niels-gpt tokenizer train"
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """A trained SentencePiece model with the four special tokens."""

    def __init__(self, model: bytes, *, where: str = "the tokenizer") -> None:
        """Raises ValueError for bytes that are no such model."""
        import sentencepiece

        try:
            self._sp: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
        except Exception as err:  # SentencePiece raises RuntimeError, or worse, for bytes that are no model
            raise ValueError(f"{where} is no SentencePiece model, or is damaged: {_REMEDY}") from err
        self._arrays = hasattr(self._sp, "encode_as_numpy")
        self.model = model
        self.sha256 = files.sha256_bytes(model)
        self.vocab_size: int = self._sp.vocab_size() if model else 0
        if not self.vocab_size:
            raise ValueError(f"{where} is no SentencePiece model, for it is empty: {_REMEDY}")
        ids = [self._sp.piece_to_id(token) for token in SPECIAL_TOKENS]
        for (name, token), i in zip(_NAMED, ids, strict=True):
            if self._sp.id_to_piece(i) != token:
                raise ValueError(f"{where} has no special token {name} ({token}): {_REMEDY}")
        self._special = dict(zip(SPECIAL_NAMES, ids, strict=True))
        self._block = [self._sp.piece_to_id(f"<0x{byte:02X}>") for byte in BLOCK.encode("utf-8")]
        self._check(where)

    def _check(self, where: str) -> None:
        """Raise ValueError for a model that would lose text: a cut-off one, or one that was trained to other rules."""
        missing = [byte for byte in range(256) if not self._sp.is_byte(self._sp.piece_to_id(f"<0x{byte:02X}>"))]
        single = all(self.encode(token) == [self._special[name]] for name, token in _NAMED)
        ids = self.encode(_PROBE)
        if missing or not single or b"".join(map(self._bytes_of, ids)) != _PROBE.encode("utf-8"):
            raise ValueError(
                f"{where} does not keep every character (byte fallback, identity normalisation, no dummy prefix are "
                f"needed), or is damaged: {_REMEDY}"
            )

    def special_token_ids(self) -> dict[str, int]:
        """The ids of sys, usr, asst and eot."""
        return dict(self._special)

    def encode(self, text: str) -> list[int]:
        """The ids of a text; a special string becomes its one id.

        Raises ValueError for a string that has no utf-8 form (a lone surrogate).
        """
        if not isinstance(text, str):
            _check_text(text)
        try:
            if BLOCK not in text:
                ids: list[int] = self._sp.encode(text)
                return ids
            parts = [self._sp.encode(part) for part in text.split(BLOCK)]
        except (RuntimeError, TypeError, UnicodeError):  # its versions differ in what they raise
            _check_text(text)
            raise
        joined = parts[0]
        for part in parts[1:]:
            joined += self._block + part
        return joined

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of every text, each as uint16; what `encode` gives. The interpreter lock is free meanwhile."""
        try:
            if any(BLOCK in text for text in texts):
                return [np.array(self.encode(text), dtype=np.uint16) for text in texts]
            if self._arrays:  # SentencePiece 0.2.2 and later: no Python number per token
                arrays = self._sp.encode(list(texts), num_threads=1, return_type="numpy")
                return [ids.astype(np.uint16) for ids in arrays]
            lists = self._sp.encode(list(texts), num_threads=1)
        except (RuntimeError, TypeError, UnicodeError):
            for text in texts:
                _check_text(text)
            raise
        return [np.array(ids, dtype=np.uint16) for ids in lists]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that make no utf-8 character show as U+FFFD. Raises ValueError for an unknown id."""
        pieces = self.token_bytes
        values = [int(i) for i in ids]
        if values and not 0 <= min(values) <= max(values) < len(pieces):
            raise ValueError(f"an id is outside the vocabulary 0..{len(pieces) - 1}: {min(values)}..{max(values)}")
        return b"".join([pieces[i] for i in values]).decode("utf-8", errors="replace")

    def render(self, ids: Iterable[int]) -> str:
        """The text of ids as a person reads it: special tokens as <sys>, <usr>, <asst>, and <eot> with a line end."""
        names = {i: f"<{name}> " for name, i in self._special.items()} | {self._special["eot"]: "<eot>\n"}
        parts: list[str] = []
        plain: list[int] = []
        for i in map(int, ids):
            if i in names:
                parts += (self.decode(plain), names[i])
                plain = []
            else:
                plain.append(i)
        return "".join((*parts, self.decode(plain)))

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """For every id the utf-8 bytes it stands for; half a character for a byte piece."""
        return [self._bytes_of(i) for i in range(self.vocab_size)]

    def _bytes_of(self, i: int) -> bytes:
        piece: str = self._sp.id_to_piece(i)
        if self._sp.is_byte(i):
            match = _BYTE_PIECE.fullmatch(piece)
            assert match is not None
            return bytes((int(match[1], 16),))
        if self._sp.is_unknown(i):  # never encoded: all bytes have a piece
            return "\ufffd".encode()
        return piece.replace(BLOCK, " ").encode("utf-8")


def _check_text(text: str) -> None:
    """Raise ValueError for what is no text, or has no utf-8 form."""
    if not isinstance(text, str):
        raise ValueError(f"a tokenizer encodes strings, got a {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as err:
        raise ValueError(f"not encodable as utf-8: character {err.start} is a lone surrogate") from None


def load_tokenizer(model_path: str | Path) -> Tokenizer:
    """The tokenizer of a `spm.model` (or of the folder that holds it).

    Raises FileNotFoundError, or ValueError for a file that is no such tokenizer.
    """
    path = Path(model_path)
    path = path / "spm.model" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer {path}: train one with niels-gpt tokenizer train")
    return Tokenizer(path.read_bytes(), where=str(path))
