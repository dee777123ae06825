"""What an audit reads: every text of a folder or file, or the documents of the run itself; and what it cannot read.

The filters of training (hidden files, .nielsignore, front matter) do not limit an audit: a deleted or private note that
a model recites is the worst leak. So everything that training could have read is read here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from niels_gpt.cache.writing.encoding import normalize_line_ends
from niels_gpt.chat.format import find_replies
from niels_gpt.chat.formats import chat_format
from niels_gpt.chat.transcript import DELIMITER, parse_chat
from niels_gpt.config import DataConfig, NotesConfig, SourceConfig
from niels_gpt.data import embedded
from niels_gpt.data.embedded import PRIMER
from niels_gpt.data.note_selection import EMPTY, LINKED, NODE_MODULES, TEXT_FORMATS, note_text, read_note, select_notes
from niels_gpt.data.primer import primer_dialogues
from niels_gpt.data.reading.json_rows import is_chat_export
from niels_gpt.data.reading.local import ROW_SUFFIXES
from niels_gpt.data.reading.utf8 import utf8_problem
from niels_gpt.data.registry import sources
from niels_gpt.data.row_layout import UnknownColumns
from niels_gpt.data.source_paths import roam_path
from niels_gpt.data.types import ChatSample
from niels_gpt.data.user_files import TEXT_SUFFIXES, iter_user_files, read_file
from niels_gpt.memorization.membership import RunSource, run_sources
from niels_gpt.pretrained.public_base import PublicBase, public_base
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.system import files
from niels_gpt.system.console import error_message
from niels_gpt.tokenizer import ByteTokenizer, ForeignTokenizer, text_bytes, token_sizes
from niels_gpt.training.tasks.documents import DocumentSet, uses_bytes

NOTE, TEXT, ROW, CHAT = "note", "text file", "row", "conversation"
"""The kinds of documents."""
_READ = tuple(dict.fromkeys((*TEXT_FORMATS, *TEXT_SUFFIXES)))
_ASKED = 60
"""Characters of a question in the name of a conversation."""
_START = 1 << 16
"""Bytes at the start of a file that show whether it is text."""
_CONTROL = bytes(set(range(32)) - set(b"\t\n\r\f\x1b")) + b"\x7f"
_REPLY = re.compile(rb"^assistant: (.+?)(?=\s*(?:^(?:system|user|assistant): |\Z))", re.MULTILINE | re.DOTALL)
"""A reply in a transcript; see chat/transcript.py."""
ENCODING_REMEDY = "convert to utf-8, or pass --encoding-errors replace"
BASE_REMEDY = "audit the run that the base was exported from, export it again, and train from that"


class AuditText(NamedTuple):
    """A document to audit, as the ids that the model would see."""

    name: str
    kind: str
    ids: np.ndarray
    note: str = ""
    """The file of a note or text file, relative to the audited folder or to that of the run; else empty."""
    made: bool = False
    """Whether `notes` wrote the conversation, from the text of notes."""


class NotRead(NamedTuple):
    """A file or folder that was not read, or a part of it."""

    name: str
    """Relative to the audited folder; a folder ends with `/`."""
    reason: str
    missing: bool
    """Whether it has text, or may have: the audit then cannot call the model safe. False for images and the like."""
    files: int = 1
    remedy: str = ""


@dataclass
class AuditInput:
    """The documents to audit, and what is not among them."""

    texts: list[AuditText] = field(default_factory=list)
    skipped: list[NotRead] = field(default_factory=list)
    trained_replies: set[bytes] = field(default_factory=set)
    """The ids of the replies that the run was trained on: a held-out conversation may repeat them."""

    def add(self, name: str, kind: str, ids: np.ndarray, *, note: str = "", made: bool = False) -> None:
        """Add a document."""
        self.texts.append(AuditText(name, kind, np.asarray(ids, dtype=np.int64), note, made))

    def unique_names(self) -> AuditInput:
        """Return the same input with a number after every name that occurs again."""
        seen: Counter[str] = Counter()
        texts = []
        for text in self.texts:
            seen[text.name] += 1
            number = seen[text.name]
            texts.append(text if number == 1 else text._replace(name=f"{text.name} ({number})"))
        return AuditInput(texts, self.skipped, self.trained_replies)


# --- the run's own data ------------------------------------------------------------------------------


def read_run(loaded: LoadedRun, *, only_chats: bool = False) -> AuditInput:
    """Return the documents of the run's own sources, also the held-out ones, as the training has them.

    only_chats: of sources of conversations only. Public sources (from the Hub, or Python's docstrings) are listed as
    skipped, and so are dialogues of the package. Data that has changed since the training is read as it is now, and
    reported as missing. So is the text of a base that is an uncleared export of ours.
    """
    found, problems, keys = AuditInput(), list[str](), set[tuple[str, bytes]]()
    package, of_package, chats_read = _PackageDialogues(loaded), Counter[str](), False
    for source in run_sources(loaded, problems):
        if _is_public(source.name, source.config.data):
            found.skipped.append(NotRead(source.name, "a public source", missing=False, files=0))
            continue
        chat = _holds_chats(source)
        if only_chats and not chat:
            continue
        chats_read = chats_read or chat
        made = chat and _is_made(source)
        notes = _note_names(source, loaded) if source.name == "roam" and not chat else {}
        for documents in (source.train, source.held_out):
            for name, ids in _documents_of(documents, loaded):
                key = (source.name, ids.tobytes())
                if key in keys:  # the runs before may have had the same data
                    continue
                keys.add(key)
                if chat and package.has(ids):
                    of_package[source.name] += 1
                    continue
                if chat and documents is source.train:
                    found.trained_replies |= replies_of(ids, loaded) - package.replies
                kind = CHAT if chat else NOTE if source.name == "roam" else ROW
                asked = f" ({_last_question(ids, loaded)})" if chat else ""
                note = notes.get(ids.tobytes(), "") if kind == NOTE else ""
                found.add(f"{source.name}: {note or name}{asked}", kind, ids, note=note, made=made)
    for name, number in of_package.items():
        found.skipped.append(NotRead(name, f"{number:,} dialogues of the package, which everyone has", False, 0))
    if only_chats and (chats_read or loaded.config is None or loaded.config.task != "sft"):
        problems = []  # they are about other sources
    remedy = "restore it, name the text with --notes, or train again"
    found.skipped += [NotRead("data of the run", problem, True, 0, remedy) for problem in dict.fromkeys(problems)]
    base = public_base(loaded.home)
    if base is not None and base.private_text and not only_chats:
        found.skipped.append(_base_not_read(base))
    return found.unique_names()


def _note_names(source: RunSource, loaded: LoadedRun) -> dict[bytes, str]:
    """{ids: path} of the notes of a run, by content: token caches have no names. Empty if the folder is gone."""
    data = source.config.data
    errors = "replace" if data.encoding_errors == "replace" else "skip"
    try:
        folder = data.roam if data.roam is None else Path(data.roam)
        selected = select_notes(roam_path(folder), data.notes, errors=errors)
        texts = [read_note(path, data.notes, errors) for path in selected.paths]
    except (OSError, ValueError):
        return {}
    return {loaded.encode(text).tobytes(): name for text, name in zip(texts, selected.names(), strict=True)}


def _is_made(source: RunSource) -> bool:
    """Whether `notes` wrote the conversations of a source: their file is beside the token caches."""
    own = source.config.data.sources.get(source.name)
    return own is not None and Path(own.path).parent == Path(source.config.data.token_cache)


def public_texts(loaded: LoadedRun) -> Iterator[str]:
    """Yield the texts of the package, and those of the public sources that a run was trained on."""
    yield from embedded.public_texts()
    for source in run_sources(loaded, []):
        if _is_public(source.name, source.config.data):
            for _, ids in _documents_of(source.train, loaded):
                yield text_bytes(loaded.tokenizer, ids).decode("utf-8", "replace")


def _base_not_read(base: PublicBase) -> NotRead:
    """The private text of a base, which is not in its folder."""
    reason, remedy = "it was trained on private text, which is not here", BASE_REMEDY
    if base.damaged:
        reason = f"what it was trained on is not known: {base.damaged} is damaged"
        remedy = "import the model again, and train from that"
    return NotRead(f"the base {base.name}", reason, True, 0, remedy)


def _documents_of(documents: DocumentSet, loaded: LoadedRun) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, ids) of the documents with text; the EOT of a text is not part of it."""
    eot = loaded.tokenizer.special_token_ids().get("eot")
    sizes = token_sizes(loaded.tokenizer)
    for i in range(len(documents.lengths)):
        ids = np.asarray(documents.ids(i), dtype=np.int64)
        chat = documents.name(i).startswith("conversation")
        if len(ids) and ids[-1] == eot and not chat:
            ids = ids[:-1]
        if sizes[ids].any():
            yield documents.name(i), ids


def _holds_chats(source: RunSource) -> bool:
    """Whether the documents of a source are conversations."""
    if source.config.task == "sft":
        return True
    own = source.config.data.sources.get(source.name)
    return uses_bytes(source.config) and (source.name == "primer" or (own is not None and own.kind == "chat"))


class _PackageDialogues:
    """The dialogues of the package, which everyone has."""

    def __init__(self, loaded: LoadedRun) -> None:
        self._loaded = loaded
        blocks = primer_dialogues(PRIMER.read_text(encoding="utf-8"))
        turns = [turn for block in blocks for turn in parse_chat(block)]
        texts = {turn["content"] for turn in turns if turn["role"] == "assistant"}
        self._blocks = {block.strip() for block in blocks}
        self.replies = {np.asarray(reply_ids(text, loaded), dtype=np.int64).tobytes() for text in texts}
        """Their replies, as ids."""

    def has(self, ids: np.ndarray) -> bool:
        """Whether everything that a model learns to say from a conversation is of the package.

        Over bytes that is all of its text; over tokens it is the replies.
        """
        if isinstance(self._loaded.tokenizer, ByteTokenizer):
            return bytes(ids.astype(np.uint8)).decode("utf-8", "replace").strip() in self._blocks
        replies = replies_of(ids, self._loaded)
        return bool(replies) and replies <= self.replies


def _last_question(ids: np.ndarray, loaded: LoadedRun) -> str:
    """What the user asked last in a conversation, to recognize it by."""
    if isinstance(loaded.tokenizer, ByteTokenizer):
        text = bytes(ids.astype(np.uint8)).decode("utf-8", "replace")
        text = text[text.rfind("user: ") :].partition("\n")[0].removeprefix("user: ")
    elif isinstance(loaded.tokenizer, ForeignTokenizer):
        chats = chat_format(loaded.tokenizer)
        replies = find_replies(ids, chats.reply_start, chats.reply_ends)
        end = replies[-1][0] - len(chats.reply_start) if replies else len(ids)
        after = replies[-2][1] if len(replies) > 1 else 0
        text = text_bytes(loaded.tokenizer, ids[after : max(after, end)]).decode("utf-8", "replace")
    else:
        special = loaded.tokenizer.special_token_ids()
        begin = max(np.flatnonzero(ids == special["usr"]), default=-1) + 1
        ends = np.flatnonzero(ids == special["eot"])
        text = loaded.tokenizer.decode(ids[begin : min(ends[ends >= begin], default=len(ids))].tolist())
    words = " ".join(text.split())
    return words if len(words) <= _ASKED else f"{words[: _ASKED - 1]}…"


def replies_of(ids: np.ndarray, loaded: LoadedRun) -> set[bytes]:
    """The replies in a conversation, as ids; a text that is no conversation is one reply."""
    if isinstance(loaded.tokenizer, ByteTokenizer):
        try:
            turns = parse_chat(bytes(ids.astype(np.uint8)).decode("utf-8", "replace"))
        except ValueError:
            return {ids.tobytes()}
        replies = [loaded.encode(turn["content"]) for turn in turns if turn["role"] == "assistant"]
        return {np.asarray(reply, dtype=np.int64).tobytes() for reply in replies}
    return {ids[begin:end].tobytes() for begin, end in reply_spans(ids, loaded)}


def reply_spans(ids: np.ndarray, loaded: LoadedRun) -> list[tuple[int, int]]:
    """[begin, end) of the text of each reply in a conversation, without the token that ends it."""
    if isinstance(loaded.tokenizer, ByteTokenizer):
        return [match.span(1) for match in _REPLY.finditer(ids.astype(np.uint8).tobytes())]
    chats = chat_format(loaded.tokenizer)
    spans = find_replies(ids, chats.reply_start, chats.reply_ends)
    return [(begin, end - int(ids[end - 1] in chats.reply_ends)) for begin, end in spans]


def reply_ids(text: str, loaded: LoadedRun) -> list[int]:
    """The ids of a reply as `replies_of` finds them in a conversation."""
    text = text if isinstance(loaded.tokenizer, ByteTokenizer) else normalize_line_ends(text)
    if not isinstance(loaded.tokenizer, ForeignTokenizer):
        return loaded.tokenizer.encode(text)
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    try:
        ids, ((begin, end),) = chat_format(loaded.tokenizer).encode(chat)
    except ValueError:  # the template refuses it, so no conversation has it
        return loaded.tokenizer.encode_as_text(text)
    return ids[begin : end - 1]


def _is_public(name: str, data: DataConfig) -> bool:
    """Whether everyone can read the text of a source: it is from the Hub, or ships with Python."""
    if name == "wiki":
        return data.wiki in ("auto", "embedded", "hub")
    if name in data.sources:
        return data.sources[name].path.startswith("hub:")
    source = sources(data).get(name)
    return source is not None and (source.dataset_id is not None or name == "stdlib")


# --- files -------------------------------------------------------------------------------------------


def read_path(path: Path, loaded: LoadedRun, encoding_errors: str | None = None) -> AuditInput:
    """Return every text of a file, or of all files below a folder, as the model would have seen it in training.

    Markdown and text are documents; files of rows have a document per row or conversation; transcripts such as a primer
    have one per dialogue. Any other file is read if it is text. Not read, and no obstacle: what no reader of training
    takes (images, hidden files that are not notes, node_modules). Not read, and missing: files that are not utf-8,
    rows that no reader understands, what cannot be opened.

    encoding_errors: `replace` decodes files that are not utf-8; None: as the run did. Raises FileNotFoundError.
    """
    root = files.expand_home(path).absolute()
    if not root.exists():
        raise FileNotFoundError(f"no file or folder {root} to audit")
    config = loaded.config
    data = config.data if config is not None else DataConfig()
    reader = _Reader(loaded, data, encoding_errors or data.encoding_errors)
    if root.is_file():
        reader.read(root, root.name, any_suffix=True)
    else:
        reader.walk(root)
    return reader.found.unique_names()


class _Reader:
    def __init__(self, loaded: LoadedRun, data: DataConfig, errors: str) -> None:
        self._loaded, self._data, self._errors = loaded, data, errors
        self._notes: NotesConfig = data.notes
        self._bytes = isinstance(loaded.tokenizer, ByteTokenizer)
        self.found = AuditInput()

    def walk(self, root: Path) -> None:
        """Read all files below a folder."""
        hidden: Counter[str] = Counter()

        def refuse(err: OSError) -> None:
            name = _relative(Path(str(err.filename)), root)
            reason = f"cannot be read: {err.strerror or err}"
            self._skip(f"{name}/", reason, missing=True, remedy="make it readable, or move it out of the folder")

        for folder, subfolders, names in os.walk(root, onerror=refuse):
            here = Path(folder)
            subfolders.sort()
            for name in list(subfolders):
                below = here / name
                if below.is_symlink():
                    self._skip(f"{_relative(below, root)}/", f"{LINKED}: training does not enter it", files=0)
                elif name == "node_modules" and not self._notes.include_hidden:
                    subfolders.remove(name)
                    number = sum(len(inside) for _, _, inside in os.walk(below))
                    self._skip(f"{_relative(below, root)}/", f"{NODE_MODULES}: software of others", files=number)
            for name in sorted(names):
                relative = _relative(here / name, root)
                top = next((part for part in Path(relative).parts if part.startswith(".")), None)
                if top is None or self._notes.include_hidden:
                    self.read(here / name, relative, any_suffix=True)
                elif name.lower().endswith(TEXT_FORMATS):
                    self.read(here / name, relative, any_suffix=False)
                else:
                    hidden[top] += 1
        for name, number in sorted(hidden.items()):
            self._skip(name, "hidden, and not a note", files=number)

    def read(self, path: Path, name: str, *, any_suffix: bool) -> None:
        """Read one file; `any_suffix`: decide by the content if its suffix is unknown."""
        suffix = path.suffix.lower() or "no suffix"
        if not path.is_file():
            self._skip(name, "broken link" if path.is_symlink() else "not a regular file")
            return
        try:
            if path.name.lower().endswith(ROW_SUFFIXES) or (suffix == ".zip" and is_chat_export(path)):
                self._read_rows(path, name)
                return
            known = path.name.lower().endswith(_READ)
            if not known and not (any_suffix and _looks_like_text(path)):
                self._skip(name, f"not text ({suffix})")
                return
            self._read_text(path, name, read_file(path) if known else path.read_bytes())
        except ValueError as err:
            self._skip(name, str(err), missing=True, remedy="mend the file, or move it out of the folder")
        except OSError as err:
            reason = f"cannot be read: {error_message(err)}"
            self._skip(name, reason, missing=True, remedy="make it readable, or move it out of the folder")

    def _read_text(self, path: Path, name: str, data: bytes) -> None:
        problem = utf8_problem(data)
        if problem is not None and _is_binary(data[:_START]) and "UTF-16" not in problem:
            self._skip(name, f"not text ({path.suffix.lower() or 'no suffix'})")
            return
        if problem is not None and self._errors != "replace":
            self._skip(name, problem, missing=True, remedy=ENCODING_REMEDY)
            return
        text = data.decode("utf-8", errors="replace")
        is_note = path.name.lower().endswith(TEXT_FORMATS)
        text = note_text(text, self._notes) if is_note else text
        if not text.strip():
            self._skip(name, EMPTY)
            return
        dialogues = _dialogues(text)
        if not dialogues or not self._bytes:  # a model over tokens may have seen it as one text or as conversations
            kind = NOTE if path.name.lower().endswith((".md", ".markdown")) else TEXT
            self.found.add(name, kind, self._loaded.encode(text), note=name)
        for number, block in enumerate(dialogues):
            messages = parse_chat(block.removeprefix("\ufeff"))
            self._add_chat(f"{name}, dialogue {number}", messages, block)

    def _read_rows(self, path: Path, name: str) -> None:
        configured = self._configured(path)
        config = configured or SourceConfig(path=str(path))
        is_json = path.suffix.lower() == ".json"
        decoding = "replace" if self._errors == "replace" else "strict"
        dropped: dict[str, int] = {}
        before = len(self.found.texts)
        try:
            with _without_log():
                for sample in iter_user_files(path.name, config, errors=decoding, stats=dropped):
                    label = f"{name}, row {sample.meta['row']}"
                    if isinstance(sample, ChatSample):
                        messages = [{"role": message.role, "content": message.content} for message in sample.messages]
                        self._add_chat(label, messages, "\n".join(f"{m.role}: {m.content}" for m in sample.messages))
                    else:
                        self.found.add(label, ROW, self._loaded.encode(sample.text))
        except UnknownColumns:
            if configured or not is_json:
                raise
        rest = {reason: number for reason, number in dropped.items() if reason != EMPTY}
        if len(self.found.texts) == before and is_json:  # settings, not rows
            self._read_text(path, name, path.read_bytes())
        elif rest:
            listed = ", ".join(f"{number:,} rows {reason}" for reason, number in rest.items())
            self._skip(name, listed, missing=True, files=0, remedy="name their field in data.sources, or mend them")
        elif len(self.found.texts) == before:
            self._skip(name, EMPTY)

    def _configured(self, path: Path) -> SourceConfig | None:
        """The run's own description of a file of rows."""
        for config in self._data.sources.values():
            if not config.path.startswith("hub:"):
                configured = files.expand_home(config.path).absolute()
                if configured == path or configured in path.parents:
                    return dataclasses.replace(config, path=str(path), split=())
        return None

    def _add_chat(self, name: str, messages: list[dict[str, str]], transcript: str) -> None:
        """Add a conversation: by the template for tokens, as its transcript for bytes."""
        ids: np.ndarray | None = None
        if not self._bytes:
            with contextlib.suppress(ValueError):  # a turn without content, or special strings: never in a cache
                ids = np.array(chat_format(self._loaded.tokenizer).encode(messages).ids, dtype=np.int64)
        self.found.add(name, CHAT, self._loaded.encode(transcript) if ids is None else ids)

    def _skip(self, name: str, reason: str, *, missing: bool = False, files: int = 1, remedy: str = "") -> None:
        self.found.skipped.append(NotRead(_printable(name), reason, missing, files, remedy))


def _dialogues(text: str) -> list[str]:
    """Return the dialogues of a transcript such as a primer; empty for any other text."""
    blocks = primer_dialogues(text, delimiter=DELIMITER)
    try:
        for block in blocks:
            parse_chat(block.removeprefix("\ufeff"))
    except ValueError:
        return []
    return blocks


def _looks_like_text(path: Path) -> bool:
    """Whether a file of an unknown suffix is text, in utf-8 or another encoding."""
    with path.open("rb") as file:
        start = file.read(_START)
    return start[:2] in (b"\xff\xfe", b"\xfe\xff") or not _is_binary(start)


def _is_binary(start: bytes) -> bool:
    """Whether bytes have a zero, or more control characters than any text has."""
    return b"\0" in start or len(start.translate(None, _CONTROL)) < 0.99 * len(start)


def _relative(path: Path, root: Path) -> str:
    return _printable(path.relative_to(root).as_posix())


def _printable(name: str) -> str:
    """A name that is not utf-8 keeps its bytes as escapes."""
    return os.fsencode(name).decode("utf-8", errors="backslashreplace")


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Disable the log of dropped rows: they are reported as skipped."""
    log = logging.getLogger("niels_gpt.data")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
