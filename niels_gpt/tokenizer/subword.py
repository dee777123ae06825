"""The lossless SentencePiece tokenizer: `decode(encode(s)) == s` for every string.

SentencePiece represents a space as U+2581 (a lower block) and would decode a U+2581 of the text as a space. Therefore
the text is split at U+2581, and each one is encoded as its three utf-8 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.system import files
from niels_gpt.system.checked_json import DamagedJSON, read_checked_json
from niels_gpt.system.program import command
from niels_gpt.tokenizer.byte_level import check_text, flat_ids
from niels_gpt.tokenizer.dtypes import token_dtype
from niels_gpt.tokenizer.piece_text import BLOCK, byte_of_piece, byte_piece
from niels_gpt.tokenizer.special import SPECIAL_NAMES, SPECIAL_STRINGS, SPECIAL_TOKENS, split_special

_PROBE = f"  \ufb01\u2460\t {BLOCK}\u6f22e\u0301\n  "
"""Text that SentencePiece changes unless it is trained with the right options."""


def _remedy() -> str:
    return f"restore it from a backup, or train one with {command('tokenizer', 'train')}"


class Tokenizer:
    """A trained SentencePiece model with the four special tokens."""

    document_start: Sequence[int] = ()
    adds_space = False
    lossy = None
    loss_notice = None

    def __init__(self, model: bytes, *, where: str = "the tokenizer") -> None:
        """Load the bytes of a model. Raises ValueError if they are not a lossless model with our special tokens."""
        import sentencepiece

        try:
            self._sp: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
        except Exception as err:  # SentencePiece raises RuntimeError and others
            raise ValueError(f"{where} is not a SentencePiece model, or is damaged: {_remedy()}") from err
        self._arrays = hasattr(self._sp, "encode_as_numpy")
        self.model = model
        self.sha256 = files.sha256_bytes(model)
        self.vocab_size: int = self._sp.vocab_size() if model else 0
        if not self.vocab_size:
            raise ValueError(f"{where} is not a SentencePiece model: it is empty; {_remedy()}")
        self.dtype = token_dtype(self.vocab_size)
        """Of the arrays of `encode_batch`: uint16, or uint32 if the vocabulary has more than 65,536 ids."""
        ids = [self._sp.piece_to_id(token) for token in SPECIAL_TOKENS]
        for (name, token), i in zip(SPECIAL_STRINGS.items(), ids, strict=True):
            if self._sp.id_to_piece(i) != token:
                raise ValueError(f"{where} has no special token {name} ({token}): {_remedy()}")
        self._special = dict(zip(SPECIAL_NAMES, ids, strict=True))
        self._block = [self._sp.piece_to_id(byte_piece(byte)) for byte in BLOCK.encode("utf-8")]
        self.end_ids = (self._special["eot"],)
        self._check(where)

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[bytes]]:
        """Pickle the bytes of the model: another process loads them again."""
        return Tokenizer, (self.model,)

    def _check(self, where: str) -> None:
        """Raise ValueError for a model that would lose text: truncated, or trained with other options."""
        missing = [byte for byte in range(256) if not self._sp.is_byte(self._sp.piece_to_id(byte_piece(byte)))]
        single = all(self.encode(token) == [self._special[name]] for name, token in SPECIAL_STRINGS.items())
        ids = self.encode(_PROBE)
        if missing or not single or b"".join(map(self._bytes_of, ids)) != _PROBE.encode("utf-8"):
            raise ValueError(
                f"{where} does not keep every character (it needs byte fallback, identity normalization and no dummy "
                f"prefix), or is damaged: {_remedy()}"
            )

    def special_token_ids(self) -> dict[str, int]:
        """Return the ids of sys, usr, asst and eot."""
        return dict(self._special)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; a special string becomes a single id.

        Raises ValueError for a string that cannot be encoded as utf-8 (it has a lone surrogate).
        """
        if not isinstance(text, str):
            check_text(text)
        try:
            if BLOCK not in text:
                ids: list[int] = self._sp.encode(text)
                return ids
            segments = [self._sp.encode(segment) for segment in text.split(BLOCK)]
        except (RuntimeError, TypeError, UnicodeError):  # depends on the version of SentencePiece
            check_text(text)
            raise
        joined = segments[0]
        for segment in segments[1:]:
            joined += self._block + segment
        return joined

    def encode_as_text(self, text: str) -> list[int]:
        """Return the ids of a text in which special strings are text, so that no id is special. Raises as `encode`."""
        return [i for segment in split_special(text) for i in self.encode(segment)]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text as `dtype`, equal to those of `encode`. Releases the interpreter lock."""
        try:
            if any(BLOCK in text for text in texts):
                return [np.array(self.encode(text), dtype=self.dtype) for text in texts]
            if self._arrays:  # SentencePiece 0.2.2 and later: no Python int per token
                arrays = self._sp.encode(list(texts), num_threads=1, return_type="numpy")
                return [ids.astype(self.dtype) for ids in arrays]
            lists = self._sp.encode(list(texts), num_threads=1)
        except (RuntimeError, TypeError, UnicodeError):
            for text in texts:
                check_text(text)
            raise
        return [np.array(ids, dtype=self.dtype) for ids in lists]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, or of a single one; invalid utf-8 becomes U+FFFD.

        Raises ValueError for an unknown id, and for ids of several rows.
        """
        pieces = self.token_bytes
        values = [int(i) for i in flat_ids(ids)]
        if values and not 0 <= min(values) <= max(values) < len(pieces):
            raise ValueError(f"ids must be in 0..{len(pieces) - 1}, got {min(values)}..{max(values)}")
        return b"".join([pieces[i] for i in values]).decode("utf-8", errors="replace")

    def render(self, ids: Iterable[int]) -> str:
        """Return the text of ids for display: special tokens as <sys>, <usr>, <asst>, and <eot> with a line end."""
        names = {i: f"<{name}> " for name, i in self._special.items()} | {self._special["eot"]: "<eot>\n"}
        texts: list[str] = []
        plain: list[int] = []
        for i in map(int, ids):
            if i in names:
                texts += (self.decode(plain), names[i])
                plain = []
            else:
                plain.append(i)
        return "".join((*texts, self.decode(plain)))

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The utf-8 bytes of each id; a byte piece may be part of a character."""
        return [self._bytes_of(i) for i in range(self.vocab_size)]

    def _bytes_of(self, i: int) -> bytes:
        piece: str = self._sp.id_to_piece(i)
        if self._sp.is_byte(i):
            byte = byte_of_piece(piece)
            assert byte is not None
            return byte
        if self._sp.is_unknown(i):  # encode never returns it, since every byte has a piece
            return "\ufffd".encode()
        return piece.replace(BLOCK, " ").encode("utf-8")


def load_subword(path: Path) -> Tokenizer:
    """Load our tokenizer from its file. Raises as `load_tokenizer` does."""
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer {path}: train one with {command('tokenizer', 'train')}")
    model = path.read_bytes()
    if path.name == "spm.model":
        _compare_with_meta(path, model)
    return Tokenizer(model, where=str(path))


def _compare_with_meta(path: Path, model: bytes) -> None:
    """Raise ValueError if `meta.json` beside a model is damaged or records another model; accept it without one."""
    meta_path = path.with_name("meta.json")
    try:
        recorded = read_checked_json(meta_path).get("sha256")
    except FileNotFoundError:
        return
    except DamagedJSON as err:
        raise ValueError(f"{meta_path} is damaged ({err}), so {path} cannot be checked: {_remedy()}") from None
    if recorded != files.sha256_bytes(model):
        raise ValueError(f"{path} is damaged: its sha256 differs from {meta_path}; {_remedy()}")
