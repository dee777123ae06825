"""How subwords are written: a space and single bytes in SentencePiece, bytes in byte-level BPE."""

from __future__ import annotations

import re

BLOCK = "\u2581"
"""The character that SentencePiece writes for a space."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_of_piece(piece: str) -> bytes | None:
    """Return the byte of a piece such as `<0x0A>`; None for any other piece."""
    match = _BYTE_PIECE.fullmatch(piece)
    return None if match is None else bytes((int(match[1], 16),))


def byte_piece(byte: int) -> str:
    """Return the piece of a byte."""
    return f"<0x{byte:02X}>"


def byte_characters() -> dict[int, str]:
    """Return the character that byte-level BPE writes for each byte: itself if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}
