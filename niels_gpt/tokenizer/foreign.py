"""Tokenizers of other projects behind our interface: a Hugging Face `tokenizer.json`, or a SentencePiece model.

Such a tokenizer is a folder of files that are kept as they are (`FILES`). Rules:

- `encode` gives the ids of a text alone; a special string in it becomes its id. This is what transformers calls
  `add_special_tokens=False`.
- `encode_as_text` gives no special id, whatever the text contains.
- A document in a cache, a prompt to continue and a text to score begin with `document_start`: the ids that transformers
  adds in front of a text with `add_special_tokens=True` (`<s>` for Llama, none for GPT-2). A document ends with `eot`,
  the end-of-text token (eos). A chat template writes these ids itself.
- `decode` joins `token_bytes`. A tokenizer that adds a space at the start of a text (SentencePiece) removes one there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.system import files
from niels_gpt.system.untrusted_files import read_untrusted
from niels_gpt.tokenizer.added_token import AddedToken
from niels_gpt.tokenizer.byte_level import check_text, flat_ids
from niels_gpt.tokenizer.dtypes import token_dtype
from niels_gpt.tokenizer.huggingface import HuggingFaceModel
from niels_gpt.tokenizer.piece_text import byte_piece
from niels_gpt.tokenizer.round_trips import find_losses
from niels_gpt.tokenizer.sentencepiece_model import SentencePieceModel
from niels_gpt.tokenizer.vocabulary_files import has_vocabulary_files, parse_object, read_vocabulary_files

JSON_FILE, MODEL_FILE, TEMPLATE_FILE = "tokenizer.json", "tokenizer.model", "chat_template.jinja"
CONFIG_FILE, MAP_FILE, GENERATION_FILE = "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"
FILES = {
    JSON_FILE: 64 << 20,
    MODEL_FILE: 64 << 20,
    CONFIG_FILE: 16 << 20,
    MAP_FILE: 1 << 20,
    GENERATION_FILE: 1 << 20,
    TEMPLATE_FILE: 1 << 20,
}
"""The files of a tokenizer, and the most bytes that each may have."""
END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>")
"""End-of-text tokens to look for where no file names one."""


class ForeignTokenizer:
    """A tokenizer of another project, made from its files."""

    def __init__(self, contents: Mapping[str, bytes], *, where: str = "the tokenizer") -> None:
        """`contents`: name -> bytes of the files. Raises ValueError for files that are damaged or not supported."""
        self.files = {name: contents[name] for name in FILES if name in contents}
        """The files, as they were given."""
        self.where = where
        """The folder that it was loaded from, for messages."""
        self.chat_format: Any = None
        """Set by `niels_gpt.chat.formats.chat_format`."""
        if JSON_FILE in self.files:
            self.files.pop(MODEL_FILE, None)  # the same vocabulary in another format
        self._config = self._read_json(CONFIG_FILE)
        self._model = self._open_model()
        self.vocab_size: int = self._model.vocab_size
        self.dtype = token_dtype(self.vocab_size)
        self.sha256 = _identity(self.files)
        self._find_ends()
        self.templates = self._read_templates()
        """Chat templates by name; `default` is the usual one."""
        self._find_special()
        self.document_start = self._find_start()
        """The ids at the start of a document."""
        self.lossy: str | None = find_losses(self)
        """What `decode(encode(text))` changes in some texts; None for a tokenizer that keeps every character."""

    def __reduce__(self) -> tuple[partial[ForeignTokenizer], tuple[dict[str, bytes]]]:
        """Pickle the files and where they are from: another process loads them again."""
        return partial(ForeignTokenizer, where=self.where), (self.files,)

    @property
    def loss_notice(self) -> str | None:
        """A line for the user that says what is lost; None if nothing is."""
        return None if self.lossy is None else f"the tokenizer of {self.where} does not keep every text: {self.lossy}"

    # --- files -----------------------------------------------------------------------------------

    def _open_model(self) -> HuggingFaceModel | SentencePieceModel:
        if JSON_FILE in self.files:
            return HuggingFaceModel(self.files[JSON_FILE], where=f"{self.where}/{JSON_FILE}")
        if MODEL_FILE in self.files:
            added = _added_tokens(self._config, f"{self.where}/{CONFIG_FILE}")
            return SentencePieceModel(self.files[MODEL_FILE], where=f"{self.where}/{MODEL_FILE}", added=added)
        raise ValueError(f"{self.where} has neither {JSON_FILE} nor {MODEL_FILE}")

    def _read_json(self, name: str) -> dict[str, Any]:
        return parse_object(self.files.get(name), f"{self.where}/{name}")

    def _read_templates(self) -> dict[str, str]:
        """The chat templates: `chat_template.jinja`, else those in `tokenizer_config.json`."""
        if TEMPLATE_FILE in self.files:
            try:
                return {"default": self.files[TEMPLATE_FILE].decode("utf-8")}
            except UnicodeDecodeError as err:
                raise ValueError(f"{self.where}/{TEMPLATE_FILE}: byte {err.start} is not utf-8") from None
        found = self._config.get("chat_template")
        if isinstance(found, str):
            return {"default": found}
        if isinstance(found, list):
            named = [(each.get("name"), each.get("template")) for each in found if isinstance(each, dict)]
            if len(named) == len(found) and all(isinstance(text, str) for pair in named for text in pair):
                return {str(name): str(template) for name, template in named}
        if found is not None:
            raise ValueError(
                f"{self.where}/{CONFIG_FILE}: chat_template must be a string or a list of {{name, template}}"
            )
        return {}

    # --- special tokens --------------------------------------------------------------------------

    def _named(self, name: str) -> str | None:
        """The content of a token such as `eos_token`, as the files name it."""
        for content in (self._config, self._read_json(MAP_FILE)):
            value = content.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                return value
        return None

    def _find_ends(self) -> None:
        """Set bos_id, eos_id and end_ids. Raises ValueError if no token ends a text."""
        own = self._model.ends() if isinstance(self._model, SentencePieceModel) else (None, None)
        self.bos_token, self.eos_token = self._named("bos_token") or own[0], self._named("eos_token") or own[1]
        generation = self._read_json(GENERATION_FILE)
        ends = generation.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not all(isinstance(i, int) and 0 <= i < self.vocab_size for i in ends):
            raise ValueError(f"{self.where}/{GENERATION_FILE}: eos_token_id {ends} is outside 0..{self.vocab_size - 1}")
        if self.eos_token is None and not ends:
            self.eos_token = next((name for name in END_NAMES if self._model.id_of(name) is not None), None)
        for name, token in (("bos_token", self.bos_token), ("eos_token", self.eos_token)):
            if token is not None and self._model.id_of(token) is None:
                raise ValueError(f"{self.where}: {name} is {token!r}, which is not in the vocabulary")
        self.bos_id = None if self.bos_token is None else self._model.id_of(self.bos_token)
        first = None if self.eos_token is None else self._model.id_of(self.eos_token)
        if first is None and not ends:
            raise ValueError(
                f"{self.where} names no end-of-text token: set eos_token in {CONFIG_FILE} to one of its tokens"
            )
        self.end_ids: tuple[int, ...] = tuple(dict.fromkeys([*([] if first is None else [first]), *ends]))
        """The ids that end a continuation: eos first, then those of `generation_config.json`."""

    def _find_special(self) -> None:
        """Set the special strings: those marked so, bos and eos, and the added tokens that a chat template writes."""
        written = "\0".join(self.templates.values())
        added = self._model.added
        tokens = [t for t in added if t.special or (t.content in written and not t.content.isspace())]
        special = {token.content: token.id for token in tokens}
        for token in (self.bos_token, self.eos_token):
            i = None if token is None else self._model.id_of(token)
            if token is not None and i is not None:
                special.setdefault(token, i)
        for i in self.end_ids:
            if i not in special.values():
                special.setdefault(self._model.token_bytes[i].decode("utf-8", "replace"), i)
        self._special = {text: i for text, i in special.items() if text and i != self._model.unknown_id}
        self._special_ids = frozenset(self._special.values())
        self._model.protect(special)
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        """Matches a special string."""

    def _find_start(self) -> list[int]:
        """The ids that transformers adds before a text: by tokenizer_config.json, else by the tokenizer itself."""
        if "add_bos_token" in self._config or "add_eos_token" in self._config:
            return [self.bos_id] if self._config.get("add_bos_token") and self.bos_id is not None else []
        return self._model.ids_before_text()

    def special_token_ids(self) -> dict[str, int]:
        """Return `eot` (the end of a document), `bos` if there is one, and the id of each special string."""
        start = {} if self.bos_id is None else {"bos": self.bos_id}
        return {"eot": self.end_ids[0], **start, **self._special}

    # --- text to ids -----------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; a special string becomes its id.

        Raises ValueError for a string that cannot be encoded as utf-8 (it has a lone surrogate).
        """
        check_text(text)
        return self._model.encode(text)

    def encode_as_text(self, text: str) -> list[int]:
        """Return the ids of a text in which special strings are text, so that no id is special. Raises as `encode`."""
        check_text(text)
        return self._without_special(text, self._model.encode(text, as_text=self._may_be_special(text)))

    def encode_inside(self, text: str, *, as_text: bool = False) -> list[int]:
        """Return the ids of a text that continues another one: no space is added at its start. Raises as `encode`."""
        check_text(text)
        if as_text:
            ids = self._model.encode(text, as_text=self._may_be_special(text), inside=True)
            return self._without_special(text, ids, inside=True)
        special = self.special_pattern.search(text)  # some tokenizers add a space after each of these
        start = len(text) if special is None else special.start()
        return [*self._model.encode(text[:start], inside=True), *self._model.encode(text[start:])]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text in `dtype`, equal to those of `encode`. Releases the interpreter lock."""
        for text in texts:
            check_text(text)
        return [np.array(ids, dtype=self.dtype) for ids in self._model.encode_batch(texts)]

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return `document_start` and the ids of each text, in which special strings are text; in `dtype`.

        The array of a text without ids is empty.
        """
        for text in texts:
            check_text(text)
        found = self._model.encode_batch(texts, as_text=any(map(self._may_be_special, texts)))
        pairs = zip(texts, found, strict=True)
        bodies = [self._without_special(text, ids) for text, ids in pairs]
        return [np.array([*self.document_start, *ids] if ids else [], dtype=self.dtype) for ids in bodies]

    def _may_be_special(self, text: str) -> bool:
        """Whether `encode` could find a special string: most texts need no second tokenizer that finds none."""
        return self.normalizes_special or self.special_pattern.search(text) is not None

    def _without_special(self, text: str, ids: list[int], *, inside: bool = False) -> list[int]:
        """Return ids without special ones: a unigram model can find `<s>` in its vocabulary, for example."""
        if self._special_ids.isdisjoint(ids):
            return ids
        pieces: list[int] = []
        end = 0
        for match in self.special_pattern.finditer(text):
            if match.start() > end:
                between = text[end : match.start()]
                pieces += self._model.encode(between, as_text=True, inside=inside or end > 0)
            pieces += self._characters(match[0])
            end = match.end()
        pieces += self._model.encode(text[end:], as_text=True, inside=inside or end > 0) if text[end:] else []
        if not self._special_ids.isdisjoint(pieces):  # by a normalizer: lower case, for example
            pieces = [i for character in text for i in self._characters(character)]
        return pieces

    def _characters(self, text: str) -> list[int]:
        """Return ids of single characters, or of their bytes. Raises ValueError for one that has none."""
        found: list[int] = []
        for character in text:
            ids = self._model.encode(character, as_text=True, inside=True)
            if not ids or not self._special_ids.isdisjoint(ids):
                options = [self._model.id_of(byte_piece(byte)) for byte in character.encode("utf-8")]
                ids = [i for i in options if i is not None]
                if len(ids) < len(options):
                    raise ValueError(f"the tokenizer has no id for {character!r} as text: remove it")
            found += ids
        return found

    # --- ids to text -----------------------------------------------------------------------------

    @property
    def token_bytes(self) -> list[bytes]:
        """The utf-8 bytes of each id; a token may end inside a character."""
        return self._model.token_bytes

    @property
    def adds_space(self) -> bool:
        """Whether the first token of a text begins with a space that the text does not have."""
        return self._model.adds_space

    @property
    def normalizes_special(self) -> bool:
        """Whether text that differs from a special string can become one: by lower case, for example."""
        return self._model.normalizes_added

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, or of a single one; invalid utf-8 becomes U+FFFD.

        Raises ValueError for an unknown id, and for ids of several rows.
        """
        values = [int(i) for i in flat_ids(ids)]
        if values and not 0 <= min(values) <= max(values) < self.vocab_size:
            raise ValueError(f"ids must be in 0..{self.vocab_size - 1}, got {min(values)}..{max(values)}")
        pieces = self.token_bytes
        data = b"".join([pieces[i] for i in values])
        if self.adds_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def render(self, ids: Iterable[int]) -> str:
        """Return the text of ids for display; the end of a document also ends the line."""
        pieces, end = self.token_bytes, self.end_ids[0]
        data = b"".join([pieces[int(i)] + (b"\n" if int(i) == end else b"") for i in ids])
        return data.decode("utf-8", errors="replace")

    @cached_property
    def special_variables(self) -> dict[str, str]:
        """What a chat template knows of the tokens: bos_token, eos_token and others that the files name."""
        names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
        named = {name: self._named(name) for name in names}
        named |= {"bos_token": self.bos_token, "eos_token": self.eos_token}
        return {name: token for name, token in named.items() if token is not None}


def load_foreign(path: Path) -> ForeignTokenizer:
    """Load the tokenizer of a folder, or the one that a file of it belongs to. Raises OSError or ValueError.

    `vocab.json` and `merges.txt` count as the `tokenizer.json` that they would be.
    """
    folder = path if path.is_dir() else path.parent
    contents = {}
    for name, limit in FILES.items():
        file = path if path.suffix == ".json" and path.is_file() and name == JSON_FILE else folder / name
        data = read_untrusted(file, limit)
        if data is not None:
            contents[name] = data
    if not contents.keys() & {JSON_FILE, MODEL_FILE} and has_vocabulary_files(folder):
        config, names = (parse_object(contents.get(name), f"{folder}/{name}") for name in (CONFIG_FILE, MAP_FILE))
        contents[JSON_FILE] = read_vocabulary_files(folder, config, names)
    return _made(tuple(contents.items()), str(folder))


@lru_cache(maxsize=4)
def _made(contents: tuple[tuple[str, bytes], ...], where: str) -> ForeignTokenizer:
    """The tokenizer of these files, made once: with 152,000 ids that takes 1.5 s, and a command opens many caches."""
    return ForeignTokenizer(dict(contents), where=where)


def write_foreign(tokenizer: ForeignTokenizer, folder: Path) -> None:
    """Write the files of a tokenizer into a folder, that with the vocabulary last; remove others of these names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in reversed(FILES):
        if name in tokenizer.files:
            files.write_bytes(folder / name, tokenizer.files[name])
        else:
            (folder / name).unlink(missing_ok=True)


def remove_foreign(folder: Path) -> None:
    """Remove the files of a tokenizer, and their folder if nothing else is in it."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _identity(contents: Mapping[str, bytes]) -> str:
    """A sha256 of all files with their names."""
    digest = hashlib.sha256()
    for name in sorted(contents):
        digest.update(json.dumps([name, len(contents[name])]).encode() + contents[name])
    return digest.hexdigest()


def _added_tokens(config: Mapping[str, Any], where: str) -> list[AddedToken]:
    """The tokens of `added_tokens_decoder`. Raises ValueError for options that only a tokenizer.json computes."""
    found = []
    listed = config.get("added_tokens_decoder", {})
    for number, token in (listed if isinstance(listed, dict) else {}).items():
        content = token.get("content") if isinstance(token, dict) else None
        if not str(number).isdigit() or not isinstance(content, str) or not content:
            raise ValueError(f"{where}: added_tokens_decoder must map ids to {{content, special}}, got {number!r}")
        if any(token.get(option) for option in ("lstrip", "rstrip", "single_word")):
            raise ValueError(f"{where}: {content!r} has lstrip, rstrip or single_word: use the model's tokenizer.json")
        found.append(AddedToken(int(number), content, bool(token.get("special"))))
    return found
