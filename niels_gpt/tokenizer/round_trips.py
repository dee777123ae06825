"""Find what a tokenizer loses, by encoding and decoding hard strings."""

from __future__ import annotations

from typing import Protocol

PROBES = (
    ("combining characters are composed (NFC)", "e\u0301 \u1100\u1161"),
    ("composed characters are decomposed (NFD)", "\u00e9\uac00"),
    ("compatibility characters are replaced (NFKC)", "\ufb01\u2460\u00bd\uff41\u00a0x"),
    ("letters become lower case", "Aa\u00c4\u00e4"),
    ("a space at the start is lost", " a"),
    ("a space at the end is lost", "a "),
    ("repeated spaces are merged", "a  b   c"),
    ("line ends or tabs change", "a\nb\r\nc\td\n\ne"),
    ("control characters change", "a\x00b\x07c\x7f\u200bd\ufeffe"),
    ("U+2581 becomes a space", "a\u2581b"),
    (
        "characters outside its vocabulary are lost",
        "\u6f22\u5b57 \U0001f9ff \U0001f468\u200d\U0001f469 \U000103a0 \ue000\ufffd",
    ),
)
"""(what is lost, a text that shows it and nothing else of the list)."""


class RoundTrip(Protocol):
    """What is needed of a tokenizer."""

    def encode_as_text(self, text: str, /) -> list[int]: ...
    def decode(self, ids: list[int], /) -> str: ...


def find_losses(tokenizer: RoundTrip) -> str | None:
    """Return what decoding does not restore, as text for the user; None if every probe comes back."""
    adds_space = tokenizer.decode(tokenizer.encode_as_text("a")) == " a"
    lost = ["a space is added at the start"] if adds_space else []
    for what, text in PROBES:
        try:
            found = tokenizer.decode(tokenizer.encode_as_text(text))
        except ValueError:
            lost.append(what)
            continue
        if (found.removeprefix(" ") if adds_space and not text.startswith(" ") else found) != text:
            lost.append(what)
    return "; ".join(lost) or None
