"""Sources of the user's own: a folder of text files, or rows with a text or with messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from niels_gpt.chat.transcript import ROLES
from niels_gpt.config import SourceConfig
from niels_gpt.data.reading.drops import Drops, is_text
from niels_gpt.data.reading.hub import HubReader, HubRequest, Shuffle
from niels_gpt.data.reading.local import ROW_SUFFIXES, list_files
from niels_gpt.data.reading.text_rows import check_take, text_key
from niels_gpt.data.roam import read_text
from niels_gpt.data.split import shuffled
from niels_gpt.data.types import ChatMessage, ChatSample, PretrainSample
from niels_gpt.system import files

TEXT_SUFFIXES = (".md", ".txt")

FIRST_ROWS = 100
"""Of so many rows one should tell whether they are texts or chats."""


def kind_of(name: str, config: SourceConfig, *, split: str = "train") -> str:
    """`text` or `chat`: by the first row that tells, where the config says `auto`. Raises as `iter_user_files` does."""
    if config.kind != "auto":
        return config.kind
    place = path_of_source(name, config)
    if not holds_text_files(place):
        for _, row in itertools.islice(HubReader(_request(name, place, split)), FIRST_ROWS):
            if isinstance(row.get(config.field or "messages"), list):
                return "chat"
            if isinstance(row.get(config.field or "text"), str):
                return "text"
    return "text"


def iter_user_files(
    name: str,
    config: SourceConfig,
    *,
    split: str = "train",
    shuffle: bool = False,
    seed: int = 42,
    take: int | None = None,
    errors: str = "strict",
    stats: dict[str, int] | None = None,
) -> Iterator[PretrainSample | ChatSample]:
    """The samples of a source that the config describes, at most `take`.

    Empty texts, and chats that are none, are left out and counted in `stats`. Raises ValueError or OSError for
    what cannot be read.
    """
    check_take(take)
    if take == 0:
        return
    kind, place, given = kind_of(name, config, split=split), path_of_source(name, config), 0
    order = Shuffle(seed) if shuffle else None
    if holds_text_files(place):
        if split != "train":
            raise ValueError(f"{place} has no split {split!r}; it has train")
        found: Iterator[tuple[dict[str, Any], dict[str, Any]]] = _files(place, errors, order)
    else:
        reader = HubReader(_request(name, place, split, streaming=not shuffle), shuffle=order)
        found = ((row, {"row": number}) for number, row in reader)
    with Drops(name, stats) as drops:
        for row, meta in found:
            sample = _sample(row, meta, name, kind, config.field, drops)
            if sample is not None:
                yield sample
                given += 1
                if given == take:
                    return


def user_file_paths(name: str, config: SourceConfig) -> list[str]:
    """The files that a source is read from, sorted."""
    place = path_of_source(name, config)
    if place.is_file():
        return [str(place)]
    return list_files(place, TEXT_SUFFIXES if holds_text_files(place) else ROW_SUFFIXES, visible_only=True)


def _sample(
    row: Mapping[str, Any], meta: dict[str, Any], name: str, kind: str, field: str, drops: Drops
) -> PretrainSample | ChatSample | None:
    if kind == "chat":
        used = field or "messages"
        messages = _messages(row.get(used))
        if isinstance(messages, str):
            drops.add(messages)
            return None
        return ChatSample(messages, name, {**_without(row, used), **meta})
    try:
        used = field or text_key(row)
    except ValueError:
        used = ""
    text = row.get(used)
    if not isinstance(text, str):
        drops.add("without text")
    elif not text.strip():
        drops.add("empty")
    elif not is_text(text):
        drops.add("not utf-8")
    else:
        return PretrainSample(text, name, {**_without(row, used), **meta})
    return None


def _without(row: Mapping[str, Any], used: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != used}


def _messages(value: Any) -> list[ChatMessage] | str:
    """The messages of a row, or why there are none."""
    if not isinstance(value, list) or not value:
        return "without messages"
    messages = []
    for message in value:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if role not in ROLES:
            return "with a role other than " + ", ".join(ROLES)
        if not isinstance(content, str) or not is_text(content) or not content.strip():
            return "with an empty message"
        messages.append(ChatMessage(role, content))
    return messages


def _files(place: Path, errors: str, order: Shuffle | None) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    root = place if place.is_dir() else place.parent
    paths = list_files(place, TEXT_SUFFIXES, visible_only=True) if place.is_dir() else [str(place)]
    for path in shuffled(paths, order.seed) if order else paths:
        yield {"text": read_text(path, errors=errors)}, {"path": Path(path).relative_to(root).as_posix()}


def holds_text_files(place: Path) -> bool:
    """Whether the place is text files rather than rows. Raises ValueError where it is neither."""
    if place.is_file():
        return place.suffix.lower() in TEXT_SUFFIXES
    if list_files(place, ROW_SUFFIXES, visible_only=True):
        return False
    if not list_files(place, TEXT_SUFFIXES, visible_only=True):
        known = ", ".join((*TEXT_SUFFIXES, *ROW_SUFFIXES))
        raise ValueError(f"{place} holds no file that can be read; known are {known}")
    return True


def path_of_source(name: str, config: SourceConfig) -> Path:
    """Where a source lies. Raises FileNotFoundError where there is nothing."""
    place = files.expand_home(config.path).absolute()
    if not place.exists():
        raise FileNotFoundError(
            f"the source {name} should lie in {place}, but there is no such file or folder: set "
            f"data.sources.{name}.path (--source {name}=PATH)"
        )
    return place


def _request(name: str, place: Path, split: str = "train", *, streaming: bool = True) -> HubRequest:
    return HubRequest(name, None, split, streaming, place, text_file_is_document=True)
