"""The primer: dialogues in the chat transcript format, in one text file."""

from __future__ import annotations

from niels_gpt.chat.transcript import DELIMITER
from niels_gpt.data.roam import read_text
from niels_gpt.data.split import split_items


def load_primer_text(path: str, *, errors: str = "strict") -> str:
    """The file's text exactly as stored. Raises as `load_texts` does."""
    return read_text(path, errors=errors)


def primer_dialogues(text: str, *, delimiter: str = DELIMITER) -> list[str]:
    """The dialogue blocks of a primer; blank ones are dropped."""
    return [block for block in text.split(delimiter) if block.strip()]


def split_primer_dialogues(
    text: str, *, val_frac: float = 0.1, seed: int, delimiter: str = DELIMITER
) -> tuple[str, str]:
    """(train_text, val_text): whole dialogues held out, each part joined again with the delimiter."""
    train, val = split_items(primer_dialogues(text, delimiter=delimiter), val_frac=val_frac, seed=seed)
    return delimiter.join(train), delimiter.join(val)
