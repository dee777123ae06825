"""Text of utf-8 files: decoded, or why it cannot be."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable
from pathlib import Path

from niels_gpt.system.private_files import keep_private

NOT_UTF8 = "not utf-8"


def read_text(path: str | Path, *, errors: str = "strict") -> str:
    """Return the text of one utf-8 file; see `decode_utf8`. What is made from a private file stays private."""
    keep_private([path])
    return decode_utf8(Path(path).read_bytes(), where=str(path), errors=errors)


def decode_utf8(data: bytes, *, where: str, errors: str = "strict") -> str:
    """Decode utf-8. Raises ValueError with the offset of the first invalid byte, unless errors is "replace".

    "skip" is strict here: it is the caller that skips files.
    """
    try:
        return data.decode("utf-8", errors="strict" if errors == "skip" else errors)
    except UnicodeDecodeError as err:
        raise ValueError(
            f"{where} is not utf-8: byte 0x{data[err.start]:02x} at offset {err.start}; "
            "convert the file, or pass --encoding-errors replace"
        ) from None


def utf8_problem(data: bytes) -> str | None:
    """Return why bytes are not utf-8 text (`not utf-8: byte 0xe9 at offset 7`), or None.

    UTF-16 without a byte order mark is valid utf-8 with every other byte zero; it counts as not utf-8 too.
    """
    return utf8_problem_of([data])


def utf8_problem_of(chunks: Iterable[bytes]) -> str | None:
    """`utf8_problem` of the joined chunks, of which only one is needed at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, is_utf16 = 0, False
    for number, chunk in enumerate(itertools.chain(chunks, [b""])):  # the last one ends the text
        is_utf16 = _looks_like_utf16(chunk) if number == 0 else is_utf16
        kept = decoder.getstate()[0]
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as err:
            problem = f"{NOT_UTF8}: byte 0x{(kept + chunk)[err.start]:02x} at offset {offset - len(kept) + err.start}"
            return f"{problem}, looks like UTF-16" if is_utf16 else problem
        offset += len(chunk)
    return f"{NOT_UTF8}: looks like UTF-16" if is_utf16 else None


def _looks_like_utf16(data: bytes) -> bool:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return True
    start = data[:4096]
    even, odd = start[0::2].count(0), start[1::2].count(0)
    return len(start) >= 4 and max(even, odd) > 0.4 * (len(start) // 2) and min(even, odd) < 0.05 * len(start)
