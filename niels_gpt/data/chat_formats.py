"""Chat formats that people have, recognized by their columns: conversion to turns.

| format | columns of a row |
|---|---|
| messages (OpenAI) | `messages`: a list of {role, content} |
| ShareGPT | `conversations`: a list of {from, value} |
| Alpaca | `instruction`, `input`, `output` |
| pairs | one of PROMPTS and one of REPLIES, such as `prompt` and `completion` |
| ChatGPT export | `mapping`: a tree of messages, `current_node` |
| Claude export | `chat_messages`: a list of {sender, text, content} |

Turns that are not text are skipped: calls of tools and their results, images, hidden messages. Neighboring turns of one
role become one turn. A chat without a reply, with an unknown role or with an empty turn is dropped with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from niels_gpt.chat.transcript import ROLES
from niels_gpt.data.reading.drops import is_text
from niels_gpt.data.types import ChatMessage, Role

PROMPTS = ("instruction", "prompt", "question", "query")
"""Columns with what the user says; `input` too, if it is the only one."""
REPLIES = ("output", "completion", "response", "answer")
"""Columns with what the assistant says."""
SPEAKERS = (("user", "assistant"), ("human", "assistant"))
"""Further pairs of columns; `user` alone is often the name of an author."""
SYSTEM = ("system", "system_prompt")
CONTEXTS = ("input", "context")
"""Columns that are appended to the prompt."""
MESSAGE_LISTS = ("messages", "conversations")

_NO_TEXT = "skipped"
_ROLES: Mapping[str, str] = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    "developer": "system",
    **dict.fromkeys(("tool", "function", "function_call", "function_response", "observation", "ipython"), _NO_TEXT),
}
"""Role in a file -> role here."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_MARKUP = re.compile("\ue200[^\ue201]*\ue201")
"""Citations in answers of ChatGPT, between two private characters."""

Row = Mapping[str, Any]
Turns = list[tuple[str, str]]
"""(role, text)."""


class InvalidChat(ValueError):
    """A row that is dropped; the message is the reason."""


@dataclass(frozen=True)
class ChatFormat:
    """How the turns of a row are found."""

    name: str
    columns: tuple[str, ...]
    """Columns that hold the turns; the others are metadata."""
    turns: Callable[[Row], Turns]
    """Raises InvalidChat."""
    described: tuple[str, ...] | None = None
    """Columns kept as metadata; None: all others."""

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.columns)})"

    def messages(self, row: Row) -> list[ChatMessage]:
        """Return the messages of a row. Raises InvalidChat with the reason to drop it."""
        turns = _join_neighbors(self.turns(row))
        if not all(is_text(text) for _, text in turns):
            raise InvalidChat("not utf-8")
        if not any(role == "assistant" for role, _ in turns):
            raise InvalidChat("without a reply" if turns else "without messages")
        return [ChatMessage(cast(Role, role), text) for role, text in turns]

    def meta(self, row: Row) -> dict[str, Any]:
        """Return the metadata of a row."""
        if self.described is not None:
            return {key: row[key] for key in self.described if row.get(key) is not None}
        return {key: value for key, value in row.items() if key not in self.columns}


def recognize(row: Row) -> ChatFormat | None:
    """Return the chat format of a row, or None."""
    if isinstance(row.get("mapping"), Mapping) and ("current_node" in row or _is_tree(row["mapping"])):
        return CHATGPT
    if isinstance(row.get("chat_messages"), list):
        return CLAUDE
    for column in MESSAGE_LISTS:
        if isinstance(row.get(column), list):
            return message_list(column, row)
    return _pair(row)


def message_list(column: str, row: Row | None = None) -> ChatFormat:
    """Return the format of rows whose column is a list of {role, content} or {from, value}."""
    items = row.get(column) if row is not None else None
    first = items[0] if isinstance(items, list) and items else None
    is_sharegpt = isinstance(first, Mapping) and first.get("from") is not None
    system = tuple(key for key in SYSTEM if row is not None and isinstance(row.get(key), str))[:1]

    def turns(row: Row) -> Turns:
        found = _listed_turns(row.get(column))
        if system and not any(role == "system" for role, _ in found):
            return [*_optional("system", row.get(system[0])), *found]
        return found

    return ChatFormat("ShareGPT" if is_sharegpt else "messages", (column, *system), turns)


def mapped(columns: Mapping[str, str]) -> ChatFormat:
    """Return the format of rows whose columns the user has mapped: {user: ..., assistant: ..., system: ...}."""
    return _pair_format("mapped columns", columns["user"], columns["assistant"], columns.get("system"))


# --- one prompt and one reply per row ----------------------------------------------------------------


def _pair(row: Row) -> ChatFormat | None:
    for user, assistant in SPEAKERS:
        if _is_turn(row, user) and _is_turn(row, assistant):
            return _pair_format(f"{user}/{assistant}", user, assistant, _only(row, SYSTEM))
    user_column = _only(row, PROMPTS) or ("input" if _is_turn(row, "input") and not _any(row, PROMPTS) else None)
    reply = _only(row, REPLIES)
    if user_column is None or reply is None:
        return None
    contexts = tuple(key for key in CONTEXTS if key != user_column and isinstance(row.get(key), str))
    name = f"{user_column}/{reply}"
    name = {"instruction/output": "Alpaca", "instruction/response": "Dolly"}.get(name, name)
    history = ("history",) if isinstance(row.get("history"), list) else ()
    return _pair_format(name, user_column, reply, _only(row, SYSTEM), contexts, history)


def _is_turn(row: Row, column: str) -> bool:
    """Whether a column can hold a turn; null counts, because a row may lack what others have."""
    return column in row and isinstance(row[column], str | list | None)


def _any(row: Row, columns: Iterable[str]) -> bool:
    return any(_is_turn(row, column) for column in columns)


def _only(row: Row, columns: Iterable[str]) -> str | None:
    """Return the one column that a row has; where it has several, the one that is not null."""
    present = [column for column in columns if _is_turn(row, column)]
    if len(present) > 1:
        present = [column for column in present if row[column] is not None]
    return present[0] if len(present) == 1 else None


def _pair_format(
    name: str,
    user: str,
    assistant: str,
    system: str | None = None,
    contexts: tuple[str, ...] = (),
    history: tuple[str, ...] = (),
) -> ChatFormat:
    def turns(row: Row) -> Turns:
        prompt = _required("user", row, user)
        for column in contexts:
            for _, text in _optional("user", row.get(column)):
                head = "context:\n" if column == "context" else ""
                prompt[-1] = (prompt[-1][0], f"{prompt[-1][1]}\n\n{head}{text}")
        earlier = [turn for column in history for turn in _history(row.get(column))]
        before = _optional("system", row.get(system)) if system else []
        return [*before, *earlier, *prompt, *_required("assistant", row, assistant)]

    columns = (*((system,) if system else ()), *history, user, *contexts, assistant)
    return ChatFormat(name, columns, turns)


def _required(role: str, row: Row, column: str) -> Turns:
    """Return the turns of a column: a text, or a list of messages. Raises InvalidChat if it has none."""
    value = row.get(column)
    if isinstance(value, list):
        return _listed_turns(value)
    if value is not None and not isinstance(value, str):
        raise InvalidChat(f"whose {column} is no text")
    if not value or value.isspace():
        raise InvalidChat(f"without {column}")
    return [(role, value.strip())]


def _optional(role: str, value: Any) -> Turns:
    return [(role, value.strip())] if isinstance(value, str) and value.strip() else []


def _history(value: Any) -> Turns:
    """Return the earlier turns of an Alpaca row: a list of [prompt, reply]."""
    pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2] if isinstance(value, list) else []
    return [turn for pair in pairs for turn in (*_optional("user", pair[0]), *_optional("assistant", pair[1]))]


# --- lists of messages -------------------------------------------------------------------------------


def _listed_turns(items: Any) -> Turns:
    """Return the turns of {role, content}, unchanged, or of {from, value}, stripped. Raises InvalidChat."""
    if not isinstance(items, list) or not items:
        raise InvalidChat("without messages")
    turns: Turns = []
    for item in items:
        item = item if isinstance(item, Mapping) else {}
        named = item.get("role") if item.get("role") is not None else item.get("from")
        role = _ROLES.get(named) if isinstance(named, str) else None
        if role is None:
            raise InvalidChat("with a role other than " + ", ".join(ROLES))
        if role == _NO_TEXT:
            continue
        if role == "assistant" and item.get("weight") == 0:
            raise InvalidChat("with a reply of weight 0")
        text = _text(item.get("content")) if item.get("content") is not None else _text(item.get("value")).strip()
        if text and not text.isspace():
            turns.append((role, text))
        elif not item.get("tool_calls") and not item.get("function_call"):
            raise InvalidChat("with an empty message")
    return turns


def _text(content: Any) -> str:
    """Return a content: a string, or the texts in a list of parts; images and other parts are skipped."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS:
            part = part.get("text")
        if isinstance(part, str) and part.strip():
            texts.append(part.strip())
    return "\n\n".join(texts)


def _join_neighbors(turns: Turns) -> Turns:
    joined: Turns = []
    for role, text in turns:
        if joined and joined[-1][0] == role:
            joined[-1] = (role, f"{joined[-1][1]}\n\n{text}")
        else:
            joined.append((role, text))
    return joined


# --- data exports ------------------------------------------------------------------------------------


def _chatgpt_turns(row: Row) -> Turns:
    """Return the turns from the root to `current_node`: the branch that the user saw last."""
    nodes = {key: node for key, node in row["mapping"].items() if isinstance(node, Mapping)}
    parents = {key: node.get("parent") for key, node in nodes.items()}
    leaf = row.get("current_node")
    if not _is_key(leaf) or leaf not in nodes:
        inner = set(filter(_is_key, parents.values()))
        leaf = next((key for key in reversed(nodes) if key not in inner), None)
    return _visible_turns(_chatgpt_turn(nodes[key].get("message")) for key in _path(parents, leaf))


def _chatgpt_turn(message: Any) -> tuple[str, str] | None:
    """Return (role, text) of a message, the text "" if it is not text; None for one that is not shown."""
    if not isinstance(message, Mapping):
        return None
    author, content, metadata = (
        value if isinstance(value, Mapping) else {} for value in map(message.get, ("author", "content", "metadata"))
    )
    role = author.get("role")
    if role not in ("user", "assistant") or metadata.get("is_visually_hidden_from_conversation"):
        return None
    if message.get("recipient") not in (None, "all") or message.get("channel") == "analysis":
        return None  # the call of a tool, or a thought
    kind, parts = content.get("content_type"), content.get("parts")
    if kind not in ("text", "multimodal_text"):
        return None
    texts = []
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, Mapping):  # an image, or speech with its transcription
            part = part.get("text")
        if isinstance(part, str):
            texts.append(_MARKUP.sub("", part).strip())
    return role, "\n\n".join(filter(None, texts))


def _claude_turns(row: Row) -> Turns:
    messages = [message for message in row["chat_messages"] if isinstance(message, Mapping)]
    by_id = {message["uuid"]: message for message in messages if _is_key(message.get("uuid"))}
    parents = {key: message.get("parent_message_uuid") for key, message in by_id.items()}
    known = list(filter(_is_key, parents.values()))
    if len(set(known)) < len(known):  # an edited message: two have the same parent, and the last one was kept
        messages = [by_id[key] for key in _path(parents, messages[-1].get("uuid"))]
    return _visible_turns(map(_claude_turn, messages))


def _claude_turn(message: Row) -> tuple[str, str] | None:
    role = {"human": "user", "assistant": "assistant"}.get(str(message.get("sender")))
    if role is None:
        return None
    # `text` has placeholders for blocks that are not text, so the blocks come first.
    return role, _text(message.get("content")).strip() or _text(message.get("text")).strip()


def _visible_turns(found: Iterable[tuple[str, str] | None]) -> Turns:
    """Return the turns with text; the reply to a turn without text (an image, a file) is skipped with it."""
    turns: Turns = []
    answers_text = True
    for turn in found:
        if turn is None:
            continue
        role, text = turn
        if role == "user":
            answers_text = bool(text)
        if text and answers_text:
            turns.append((role, text))
    return turns


def _path(parents: Mapping[Any, Any], leaf: Any) -> list[Any]:
    """Return the keys from the root to the leaf. Raises InvalidChat for a cycle."""
    path: dict[Any, None] = {}
    while _is_key(leaf) and leaf in parents:
        if leaf in path:
            raise InvalidChat("with a cycle of messages")
        path[leaf] = None
        leaf = parents[leaf]
    return list(reversed(path))


def _is_key(value: Any) -> bool:
    return isinstance(value, str)


def _is_tree(mapping: Mapping[str, Any]) -> bool:
    return bool(mapping) and all(isinstance(node, Mapping) and "message" in node for node in mapping.values())


CHATGPT = ChatFormat("ChatGPT export", ("mapping", "current_node"), _chatgpt_turns, ("title", "create_time"))
CLAUDE = ChatFormat("Claude export", ("chat_messages",), _claude_turns, ("name", "created_at"))
