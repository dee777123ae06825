"""The primer: dialogues in the chat transcript format, in one text file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from niels_gpt.chat.transcript import DELIMITER, parse_chat
from niels_gpt.data.reading.drops import Drops
from niels_gpt.data.reading.text_rows import check_take
from niels_gpt.data.roam import read_text
from niels_gpt.data.split import split_items
from niels_gpt.data.types import ChatMessage, ChatSample


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


def iter_primer_sft(
    path: str | Path = "data/primer.txt",
    *,
    take: int | None = None,
    delimiter: str = DELIMITER,
    errors: str = "strict",
    stats: dict[str, int] | None = None,
) -> Iterator[ChatSample]:
    """Yield the dialogues of a primer as messages, at most `take`; meta has the `dialogue` number.

    Dropped and counted in `stats`: dialogues that do not begin with a turn, with an empty turn, without a reply, or
    with a delimiter that lacks its blank lines. Windows line ends and a byte order mark are accepted.
    Raises as `load_texts` does.
    """
    check_take(take)
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
