"""What the rows of a source hold: texts or chats, and in which columns. Decided by the names of the columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from niels_gpt.config import SourceConfig
from niels_gpt.data.chat_formats import MESSAGE_LISTS, REPLIES, ChatFormat, mapped, message_list, recognize

TEXTS = ("text", "content")
"""Columns that hold the text of a document, whatever the other columns are."""
METADATA = frozenset(
    (
        *("id", "_id", "uuid", "hash", "url", "uri", "link", "permalink", "path", "file", "filename", "file_name"),
        *("date", "time", "timestamp", "created", "created_at", "updated", "updated_at", "published", "published_at"),
        *("lang", "language", "source", "license", "licence", "split", "subset", "domain", "encoding"),
    )
)
"""Columns that describe a document and are never its text."""


class RowLayout(NamedTuple):
    """What the rows hold."""

    kind: Literal["text", "chat"]
    column: str = ""
    """Of texts: the column."""
    format: ChatFormat | None = None
    """Of chats: the format of the first one."""
    same_for_all: bool = False
    """Whether the user has named the columns; otherwise the format of each row is recognized separately."""

    def __str__(self) -> str:
        return f"chats: {self.format}" if self.format else f"texts: {self.column}"

    def format_of(self, row: Mapping[str, Any]) -> ChatFormat | None:
        """Return the chat format of one row."""
        return self.format if self.same_for_all else recognize(row)


class UnknownColumns(ValueError):
    """Rows whose columns are neither those of a text nor of a known chat format; the message has the remedy."""

    def __init__(self, problem: str, source: str, *, kind: str = "auto") -> None:
        remedies = {
            "field": "field: COLUMN for texts",
            "columns": "columns: {user: COLUMN, assistant: COLUMN} for chats",
        }
        if kind == "text":
            del remedies["columns"]
        if kind == "chat":
            remedies["field"] = "field: COLUMN for lists of messages"
        super().__init__(
            f"data.sources.{source}: {problem}. Add to data.sources.{source}: {', or '.join(remedies.values())}"
        )
        self.problem = problem


def layout_of(rows: Iterable[Mapping[str, Any]], name: str, config: SourceConfig) -> RowLayout:
    """Return the layout of a source from its first rows; the first row that can only be one thing decides.

    Raises UnknownColumns with the columns that were found.
    """
    columns: dict[str, None] = {}
    strings: dict[str, None] = {}
    wanted = [config.field] if config.field else list(config.columns.values())
    for row in rows:
        columns |= dict.fromkeys(map(str, row))
        strings |= dict.fromkeys(str(key) for key, value in row.items() if isinstance(value, str))
        layout = _named_layout(row, config) if wanted else _recognized_layout(row, config.kind)
        if layout is not None:
            return layout
    listed = ", ".join(columns) or "none"
    if wanted:
        missing = [column for column in wanted if column not in columns]
        if missing:
            problem = f"the rows have no column {missing[0]!r}; their columns are {listed}"
            raise UnknownColumns(problem, name, kind=config.kind)
        if config.columns or config.kind == "chat":
            chosen = mapped(config.columns) if config.columns else message_list(config.field)
            return RowLayout("chat", "", chosen, same_for_all=True)
        return RowLayout("text", config.field)
    lists = [column for column in MESSAGE_LISTS if column in columns]
    if lists and config.kind != "text":  # null in all of the first rows
        return RowLayout("chat", "", message_list(lists[0]))
    if config.kind == "chat":
        raise UnknownColumns(f"the rows are of no known chat format; their columns are {listed}", name, kind="chat")
    return RowLayout("text", text_column(columns, strings, name, kind=config.kind))


def text_column(columns: Iterable[str], strings: Iterable[str], name: str, *, kind: str = "text") -> str:
    """Return the column that holds the text of a document, of all columns and of those with strings.

    Raises UnknownColumns if it cannot be told. With `kind` "auto", a column with a reply is a reason for that.
    """
    columns, strings = list(columns), list(strings)
    listed = ", ".join(columns) or "none"
    replies = [column for column in strings if column in REPLIES]
    if replies and kind == "auto" and len(strings) > 1:
        raise UnknownColumns(f"cannot tell which column {replies[0]!r} replies to; the columns are {listed}", name)
    for column in TEXTS:
        if column in columns:
            return column
    candidates = [column for column in strings if column.lower() not in METADATA] or strings
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise UnknownColumns(f"the rows have no text; their columns are {listed}", name, kind=kind)
    raise UnknownColumns(f"cannot tell which of the columns {listed} is the text", name, kind=kind)


def _named_layout(row: Mapping[str, Any], config: SourceConfig) -> RowLayout | None:
    """Return the layout of a row whose columns the user has named; None if it lacks them."""
    if config.columns:
        complete = all(row.get(config.columns[role]) is not None for role in ("user", "assistant"))
        return RowLayout("chat", "", mapped(config.columns), same_for_all=True) if complete else None
    value = row.get(config.field)
    if isinstance(value, list) and config.kind != "text":
        return RowLayout("chat", "", message_list(config.field, row), same_for_all=True)
    if isinstance(value, str) and config.kind != "chat":
        return RowLayout("text", config.field)
    return None


def _recognized_layout(row: Mapping[str, Any], kind: str) -> RowLayout | None:
    """Return the layout of a row by the names of its columns; None if it does not decide."""
    chat = recognize(row) if kind != "text" else None
    if chat is not None:
        return RowLayout("chat", "", chat)
    if kind == "chat" or any(isinstance(row.get(column), str) for column in REPLIES if kind == "auto"):
        return None
    column = next((column for column in TEXTS if isinstance(row.get(column), str)), None)
    return RowLayout("text", column) if column else None
