"""Sources of the user's own: a folder of text files, or rows with a text or with messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from niels_gpt.chat.transcript import ROLES
from niels_gpt.config import SourceConfig
from niels_gpt.data.documents import check_take, select_text_field
from niels_gpt.data.drops import Drops, is_text
from niels_gpt.data.hub import Reader, Request, Shuffle
from niels_gpt.data.local import suffix
from niels_gpt.data.roam import list_files, read_text
from niels_gpt.data.types import ChatMessage, ChatSample, PretrainSample

TEXT_SUFFIXES = (".md", ".txt")
ROW_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


def kind_of(name: str, config: SourceConfig) -> str:
    """`text` or `chat`: by the first row, where the config says `auto`. Raises as `iter_own` does."""
    if config.kind != "auto":
        return config.kind
    if _is_text_files(_place(name, config)):
        return "text"
    for _, row in Reader(_request(name, config)):
        return "chat" if isinstance(row.get(config.field or "messages"), list) else "text"
    return "text"


def iter_own(
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
    kind, place, given = kind_of(name, config), _place(name, config), 0
    with Drops(name, stats) as drops:
        if _is_text_files(place):
            if split != "train":
                raise ValueError(f"{place} has no split {split!r}; it has train")
            found: Iterator[tuple[dict[str, Any], dict[str, Any]]] = _files(place, errors)
        else:
            reader = Reader(_request(name, config, split), shuffle=Shuffle(seed) if shuffle else None)
            found = ((row, {"row": number}) for number, row in reader)
        for row, meta in found:
            if given == take:
                return
            sample = _sample(row, meta, name, kind, config.field, drops)
            if sample is not None:
                yield sample
                given += 1


def own_files(name: str, config: SourceConfig) -> list[str]:
    """The files that a source is read from, sorted."""
    place = _place(name, config)
    if place.is_file():
        return [str(place)]
    return list_files(place, TEXT_SUFFIXES if _is_text_files(place) else ROW_SUFFIXES)


def _sample(
    row: Mapping[str, Any], meta: dict[str, Any], name: str, kind: str, field: str, drops: Drops
) -> PretrainSample | ChatSample | None:
    used = field or ("messages" if kind == "chat" else "text")
    meta = {**{key: value for key, value in row.items() if key != used}, **meta}
    if kind == "chat":
        messages = _messages(row.get(used))
        if isinstance(messages, str):
            drops.add(messages)
            return None
        return ChatSample(messages, name, meta)
    try:
        text = row.get(field) if field else select_text_field(row)
    except ValueError:
        text = None
    if not isinstance(text, str):
        drops.add("without text")
    elif not text.strip():
        drops.add("empty")
    elif not is_text(text):
        drops.add("not utf-8")
    else:
        return PretrainSample(text, name, meta)
    return None


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


def _files(place: Path, errors: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    root = place if place.is_dir() else place.parent
    for path in list_files(place, TEXT_SUFFIXES) if place.is_dir() else [str(place)]:
        yield {"text": read_text(path, errors=errors)}, {"path": Path(path).relative_to(root).as_posix()}


def _is_text_files(place: Path) -> bool:
    """Whether the place is text files rather than rows. Raises ValueError where it is neither."""
    if place.is_file():
        return suffix(place) in TEXT_SUFFIXES
    if list_files(place, ROW_SUFFIXES):
        return False
    if not list_files(place, TEXT_SUFFIXES):
        known = ", ".join((*TEXT_SUFFIXES, *ROW_SUFFIXES))
        raise ValueError(f"{place} holds no file that can be read; known are {known}")
    return True


def _place(name: str, config: SourceConfig) -> Path:
    place = Path(config.path).expanduser().absolute()
    if not place.exists():
        raise FileNotFoundError(f"data.sources.{name}.path is {place}, but there is no such file or folder")
    return place


def _request(name: str, config: SourceConfig, split: str = "train") -> Request:
    return Request(name, None, split, path=_place(name, config))
