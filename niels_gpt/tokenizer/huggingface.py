"""The subword model of a Hugging Face `tokenizer.json`, computed by the `tokenizers` library.

`token_bytes` inverts its decoder: every id becomes the bytes that it contributes to a text, so that text can be
streamed token by token. Decoders that need the neighbors of a token (WordPiece) have no such bytes and are refused.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from niels_gpt.tokenizer.added_token import AddedToken
from niels_gpt.tokenizer.limits import check_tokenizer_json
from niels_gpt.tokenizer.piece_text import byte_characters, byte_of_piece

MODELS = ("BPE", "Unigram")
DECODERS = ("ByteLevel", "Metaspace", "Sequence", "Replace", "ByteFallback", "Fuse", "Strip")


class HuggingFaceModel:
    """A `tokenizer.json`. Encodes text with or without special strings, at the start of a text or inside one."""

    def __init__(self, data: bytes, *, where: str) -> None:
        """Raises ValueError for a file that is damaged, or of a type that is not supported."""
        self._where = where
        self._json = parse_tokenizer_json(data, where)
        check_tokenizer_json(self._json, where)
        model: dict[str, Any] = self._json["model"]
        kind = model.get("type") or ("BPE" if "merges" in model else None)  # old files name no type
        if kind not in MODELS:
            raise ValueError(f"{where} has a tokenizer of type {kind}; supported are {' and '.join(MODELS)}")
        self._plain = self._build(data.decode("utf-8"))
        vocabulary: Mapping[str, int] = self._plain.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"{where} has an empty vocabulary")
        self.vocab_size = max(vocabulary.values()) + 1
        self.added = [
            AddedToken(i, token.content, token.special) for i, token in self._plain.get_added_tokens_decoder().items()
        ]
        self._pieces: list[str | None] = [None] * self.vocab_size
        for piece, i in vocabulary.items():
            self._pieces[i] = piece
        unknown = model.get("unk_token") if kind == "BPE" else model.get("unk_id")
        self.unknown_id: int | None = vocabulary.get(unknown) if isinstance(unknown, str) else unknown
        self._special: frozenset[str] = frozenset(token.content for token in self.added if token.special)
        self._convert, self.adds_space = _decoder(self._json.get("decoder"), where)

    def protect(self, strings: Collection[str]) -> None:
        """Let the methods that encode as text treat these added tokens as special, too."""
        self._special |= frozenset(strings)
        self.__dict__.pop("_as_text", None)
        self.__dict__.pop("_as_text_inside", None)

    @cached_property
    def normalizes_added(self) -> bool:
        """Whether text that differs from an added token can become one: by lower case, for example."""
        return self._json.get("normalizer") is not None and any(
            token.get("normalized") for token in self._json.get("added_tokens", ())
        )

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes that each id contributes to a text; none for ids that the vocabulary skips."""
        return [b"" if piece is None else self._convert(piece) for piece in self._pieces]

    def id_of(self, piece: str) -> int | None:
        """The id of a piece."""
        i: int | None = self._plain.token_to_id(piece)
        return i

    def ids_before_text(self) -> list[int]:
        """The ids that the post-processor adds before a text."""
        with self._errors("cannot encode a text"):
            alone = self._plain.encode("a", add_special_tokens=False).ids
            full = self._plain.encode("a", add_special_tokens=True).ids
        count = len(full) - len(alone)
        before = next((n for n in range(count + 1) if full[n : n + len(alone)] == alone), 0)
        return list(full[:before])

    def encode(self, text: str, *, as_text: bool = False, inside: bool = False) -> list[int]:
        """Return the ids of a text. `as_text`: special strings are text; `inside`: it continues another text."""
        tokenizer = self._choose(as_text, inside)
        with self._errors("cannot encode a text"):
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str], *, as_text: bool = False) -> list[list[int]]:
        """Return the ids of each text as `encode` does; releases the interpreter lock."""
        tokenizer = self._choose(as_text, False)
        with self._errors("cannot encode a text"):
            found = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [each.ids for each in found]

    @contextlib.contextmanager
    def _errors(self, problem: str) -> Iterator[None]:
        """Turn errors of the library, which are of type Exception itself or PanicException, into ValueError."""
        try:
            yield
        except BaseException as err:
            if not isinstance(err, Exception) and type(err).__name__ != "PanicException":
                raise
            reason = " ".join(str(err).split())[:200]
            raise ValueError(f"{self._where} {problem}: {reason}") from err

    def _choose(self, as_text: bool, inside: bool) -> Any:
        if inside and self._prefixes:
            return self._as_text_inside if as_text else self._inside
        return self._as_text if as_text else self._plain

    @cached_property
    def _prefixes(self) -> bool:
        """Whether a text starts with a space that is not there."""
        return _without_prefix(self._json) != self._json

    @cached_property
    def _inside(self) -> Any:
        return self._build(_without_prefix(self._json))

    @cached_property
    def _as_text(self) -> Any:
        return self._build(self._json, protect=True)

    @cached_property
    def _as_text_inside(self) -> Any:
        return self._build(_without_prefix(self._json), protect=True)

    def _build(self, content: str | dict[str, Any], *, protect: bool = False) -> Any:
        """The library's tokenizer; with `protect`, it does not find special strings in a text."""
        from tokenizers import Tokenizer

        if isinstance(content, dict) and protect:
            tokens = [
                token | {"special": token["special"] or token["content"] in self._special}
                for token in content.get("added_tokens", ())
            ]
            content = content | {"added_tokens": tokens}
        with self._errors("cannot be read by the library tokenizers"):
            built = Tokenizer.from_str(content if isinstance(content, str) else json.dumps(content))
        built.no_truncation()  # a text is encoded whole
        built.no_padding()
        built.encode_special_tokens = protect
        return built


def is_byte_vocabulary(data: bytes, where: str) -> bool:
    """Whether a `tokenizer.json` maps a text to its utf-8 bytes, as that of a byte model does."""
    model = HuggingFaceModel(data, where=where)
    probe = "a \u00e9\n\u6f22 <|x|>"
    return (
        model.vocab_size == 256
        and model.token_bytes == [bytes((byte,)) for byte in range(256)]
        and model.encode(probe) == list(probe.encode("utf-8"))
    )


def parse_tokenizer_json(data: bytes, where: str) -> dict[str, Any]:
    """Return the content of a tokenizer.json. Raises ValueError for one that is damaged."""
    try:
        content = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as err:
        raise ValueError(f"{where} is damaged: byte {err.start} is not utf-8; copy it again") from None
    except (json.JSONDecodeError, RecursionError) as err:
        at = f"line {err.lineno}: {err.msg}" if isinstance(err, json.JSONDecodeError) else "it is nested too deep"
        raise ValueError(f"{where} is damaged ({at}): copy it again") from None
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ValueError(f"{where} is not a tokenizer.json: it has no field model")
    return content


# --- the start of a text ------------------------------------------------------------------------------


def _without_prefix(content: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer without the space that it adds at the start of a text."""
    return content | {
        "normalizer": _edit(content.get("normalizer"), "normalizers"),
        "pre_tokenizer": _edit(content.get("pre_tokenizer"), "pretokenizers"),
    }


def _edit(step: Any, parts: str) -> Any:
    """A normalizer or pre-tokenizer without what adds a prefix."""
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Sequence":
        kept = [_edit(each, parts) for each in step.get(parts, ())]
        kept = [each for each in kept if each is not None]
        return step | {parts: kept} if kept else None
    if step.get("type") == "Prepend":
        return None
    if step.get("type") == "Metaspace":
        return {"type": "Metaspace", "replacement": step.get("replacement", "\u2581"), "prepend_scheme": "never"} | {
            name: step[name] for name in ("split",) if name in step
        }
    if step.get("type") == "ByteLevel":
        return step | {"add_prefix_space": False}
    return step


# --- the decoder --------------------------------------------------------------------------------------

Convert = Callable[[str], bytes]


def _decoder(decoder: Any, where: str) -> tuple[Convert, bool]:
    """(the bytes of a piece; whether decoding removes one space at the start). Raises ValueError by name."""
    if not isinstance(decoder, dict):
        raise ValueError(f"{where} has no decoder, so its ids have no certain text; supported are {_names()}")
    kind = decoder.get("type")
    if kind == "ByteLevel":
        return _from_byte_level, False
    if kind == "Metaspace":
        block = decoder.get("replacement", "\u2581")
        never = decoder.get("prepend_scheme", "always") == "never" or decoder.get("add_prefix_space") is False
        return lambda piece: piece.replace(block, " ").encode("utf-8"), not never
    steps = decoder.get("decoders", ()) if kind == "Sequence" else [decoder]
    return _sequence(steps, where)


def _sequence(steps: Sequence[Any], where: str) -> tuple[Convert, bool]:
    """The decoder of a list of steps, of which those after Fuse see the whole text."""
    replaced: list[tuple[str, str]] = []
    fallback = fused = strips = False
    for step in steps:
        kind = step.get("type") if isinstance(step, dict) else None
        pattern = step.get("pattern", {}).get("String") if kind == "Replace" else None
        if kind in ("ByteLevel", "Metaspace") and len(steps) == 1:
            return _decoder(step, where)
        if kind == "Replace" and pattern and not fused and not fallback:
            replaced.append((pattern, str(step.get("content", ""))))
        elif kind == "ByteFallback" and not fused:
            fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and _at_most_one_space(step):
            strips = strips or step["start"] == 1
        else:
            raise ValueError(
                f"{where} has a decoder with the step {kind}, which has no bytes per token; supported are {_names()}"
            )

    def convert(piece: str) -> bytes:
        byte = byte_of_piece(piece) if fallback else None
        if byte is not None:
            return byte
        for old, new in replaced:
            piece = piece.replace(old, new)
        return piece.encode("utf-8")

    return convert, strips


def _at_most_one_space(strip: Mapping[str, Any]) -> bool:
    """Whether a step Strip removes one space at the start, or nothing."""
    return strip.get("content") == " " and strip.get("start") in (0, 1) and strip.get("stop") == 0


def _names() -> str:
    return ", ".join(DECODERS)


_BYTES = {character: byte for byte, character in byte_characters().items()}


def _from_byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in piece])
    except KeyError:  # an added token: its own text
        return piece.encode("utf-8")
