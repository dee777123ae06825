"""Pieces such as `<0x0A>`, which stand for one byte."""

from __future__ import annotations

import re

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_of_piece(piece: str) -> bytes | None:
    """Return the byte of a piece such as `<0x0A>`; None for any other piece."""
    match = _BYTE_PIECE.fullmatch(piece)
    return None if match is None else bytes((int(match[1], 16),))


def byte_piece(byte: int) -> str:
    """Return the piece of a byte."""
    return f"<0x{byte:02X}>"
