"""The primer: dialogues in the chat transcript format in one text file, or a chat file of another format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from niels_gpt.chat.transcript import DELIMITER, check_content, parse_chat
from niels_gpt.config import SourceConfig
from niels_gpt.data.reading.drops import Drops
from niels_gpt.data.reading.local import suffix
from niels_gpt.data.reading.text_rows import check_take
from niels_gpt.data.reading.utf8 import read_text
from niels_gpt.data.row_layout import UnknownColumns
from niels_gpt.data.split import split_items
from niels_gpt.data.types import ChatMessage, ChatSample
from niels_gpt.data.user_files import iter_user_files, user_layout

CHAT_FILES = (".jsonl", ".json", ".parquet", ".zip")
"""Suffixes of primers with rows of a known chat format; .gz may follow."""


def load_primer_text(path: str, *, errors: str = "strict") -> str:
    """Return the text of the file, unchanged. Raises as `load_texts` does."""
    return read_text(path, errors=errors)


def primer_dialogues(text: str, *, delimiter: str = DELIMITER) -> list[str]:
    """Return the dialogues of a primer; blank blocks are dropped."""
    return [block for block in text.split(delimiter) if block.strip()]


def split_primer_dialogues(
    text: str, *, val_frac: float = 0.1, seed: int, delimiter: str = DELIMITER
) -> tuple[str, str]:
    """Return (train_text, val_text): complete dialogues, joined with the delimiter again."""
    train, val = split_items(primer_dialogues(text, delimiter=delimiter), val_frac=val_frac, seed=seed)
    return delimiter.join(train), delimiter.join(val)


def is_chat_file(path: str | Path) -> bool:
    """Whether a primer is a file with rows of chats, not a text with dialogues."""
    return suffix(Path(path)) in CHAT_FILES


def primer_layout(path: str | Path, *, errors: str = "strict") -> str:
    """Return the chat format of a primer, for messages; "" for a text. Raises as `iter_primer_sft` does."""
    if not is_chat_file(path):
        return ""
    try:
        return str(user_layout("primer", SourceConfig(str(path), kind="chat"), errors=errors))
    except UnknownColumns as err:
        raise _unknown_columns(path, err) from None


def chat_file_text(path: str, *, errors: str = "strict", delimiter: str = DELIMITER) -> str:
    """Return the chats of a chat file as the text of a primer. Raises as `iter_primer_sft` does."""
    return delimiter.join(text for _, text in transcripts(iter_primer_sft(path, errors=errors), "primer"))


def transcripts(chats: Iterable[ChatSample], source: str) -> Iterator[tuple[ChatSample, str]]:
    """Yield each chat with its transcript; one that would read as other turns is dropped, counted and logged."""
    with Drops(source, None, unit="chat") as drops:
        for chat in chats:
            try:
                for message in chat.messages:
                    check_content(message.content)
            except ValueError:
                drops.add("with a line that begins like a turn")
            else:
                yield chat, "\n".join(f"{message.role}: {message.content}" for message in chat.messages)


def _iter_chat_file(
    path: str | Path, *, take: int | None, errors: str, stats: dict[str, int] | None
) -> Iterator[ChatSample]:
    config = SourceConfig(str(path), kind="chat")
    try:
        for sample in iter_user_files("primer", config, take=take, errors=errors, stats=stats):
            if isinstance(sample, ChatSample):
                yield sample
    except UnknownColumns as err:
        raise _unknown_columns(path, err) from None
    except FileNotFoundError:
        raise FileNotFoundError(f"no file of dialogues at {path}") from None


def _unknown_columns(path: str | Path, err: UnknownColumns) -> ValueError:
    return ValueError(
        f"{path}: {err.problem}. Make it a source of your own that names them: data.sources.NAME: {{path: {path}, "
        "columns: {user: COLUMN, assistant: COLUMN}}"
    )


def iter_primer_sft(
    path: str | Path = "data/primer.txt",
    *,
    take: int | None = None,
    delimiter: str = DELIMITER,
    errors: str = "strict",
    stats: dict[str, int] | None = None,
) -> Iterator[ChatSample]:
    """Yield the dialogues of a primer as messages, at most `take`; meta has the `dialogue` number.

    A .jsonl, .json or .parquet file, or the .zip of an export, is read as a chat file instead (`chat_formats`), with
    the metadata of its rows. Dropped and counted in `stats`: dialogues that do not begin with a turn, with an empty
    turn, without a reply, or with a delimiter that lacks its blank lines. Windows line ends and a byte order mark are
    accepted.
    Raises as `load_texts` does.
    """
    check_take(take)
    if is_chat_file(path):
        yield from _iter_chat_file(path, take=take, errors=errors, stats=stats)
        return
    text = read_text(path, errors=errors).removeprefix("\ufeff").replace("\r\n", "\n")
    blocks = primer_dialogues(text, delimiter=delimiter)
    yielded = 0
    with Drops("primer", stats, unit="dialogue") as drops:
        for number, block in enumerate(blocks):
            if yielded == take:
                return
            try:
                turns = parse_chat(block)
            except ValueError:
                drops.add("without a turn at the start")
                continue
            if not all(turn["content"] for turn in turns):
                drops.add("with an empty turn")
            elif delimiter.strip() in block:
                drops.add("with a dialogue mark inside")
            elif not any(turn["role"] == "assistant" for turn in turns):
                drops.add("without a reply")
            else:
                messages = [ChatMessage(turn["role"], turn["content"]) for turn in turns]  # type: ignore[arg-type]
                yield ChatSample(messages, "primer", {"dialogue": number})
                yielded += 1
